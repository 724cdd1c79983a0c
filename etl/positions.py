"""Rendered -> the byte places of its spans in the text as the tokenizer sees it, which is NFC where that normalises.

Tokenizers cut added tokens out before they normalise, so each stretch between them is normalised apart. A character
is inert when NFC neither changes it nor moves or joins it to the one before; most texts hold nothing else.
"""

from __future__ import annotations

import unicodedata
from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from functools import cache
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import tokenizers

from etl.added import AddedTokens
from etl.records import Rendered, Span

_CONTINUATION, _FIRST_LEAD, _FIRST_LEAD_OF_3, _FIRST_LEAD_OF_4 = 0x80, 0xC0, 0xE0, 0xF0
_FIRST_MARK: Final = 0x300
_LONGEST_RUN: Final = 1000
_LEAD_OF_FIRST_MARK: Final = 0xCC
_TABLE_END: Final = 0x40000
_INERT, _CHANGES, _FOLLOWS, _UNKNOWN = 0, 1, 2, 3
_SPARSE: Final = 16  # characters a special one, from which looking at these alone is the faster way


class BytePlaces(NamedTuple):
    """Half-open byte ranges in the normalised text of `size` bytes; a cut is a point, or the range it fell into."""

    size: int
    spans: Sequence[Span]
    cuts: Sequence[Span]


def byte_places(rows: Sequence[Rendered], added: AddedTokens, *, nfc: bool) -> list[BytePlaces | None]:
    """Where each row's spans and cuts lie in UTF-8 bytes; `added` finds the tokens that are cut out unnormalised.

    None where that cannot be told: the text holds characters that Unicode tables do not agree on (this Python's, the
    tokenizer's), so that each may split or normalise them in another way, or an endless run of marks. No text may hold
    a lone surrogate.
    """
    places: list[BytePlaces | None] = [
        BytePlaces(len(row.text), row.spans, [(cut, cut) for cut in row.cuts]) if row.text.isascii() else None
        for row in rows
    ]
    wide = [i for i, row in enumerate(rows) if places[i] is None]
    if wide:
        texts = _Texts([rows[i].text for i in wide])
        found = texts.places([rows[i] for i in wide])
        for i, special, place in zip(wide, texts.special(), found, strict=True):
            if special is None:
                places[i] = place
            elif _UNKNOWN not in special.kinds:
                as_it_is = not nfc or _is_normal(rows[i].text, special)
                places[i] = place if as_it_is else _normalised_places(rows[i], special, added)
    return places


class _Special(NamedTuple):
    """The characters of one text that are not inert: their places, ascending, and their kinds; at least one."""

    at: list[int]
    kinds: list[int]


class _Texts:
    """Several texts as one stretch of UTF-8 bytes, of which only the characters beyond ASCII are looked at."""

    def __init__(self, texts: Sequence[str]) -> None:
        encoded = [text.encode() for text in texts]  # an engine has left it in the string
        self._bytes = np.frombuffer(b"".join(encoded), np.uint8)
        self._char_starts = np.cumsum([0, *map(len, texts)])[:-1].tolist()
        self._leads = np.flatnonzero(self._bytes >= _FIRST_LEAD)
        first = self._bytes[self._leads]
        self._greatest = int(first.max(initial=0))
        # The bytes beyond one that characters before each lead take, and the lead's place counted in characters.
        more = 1 + (first >= _FIRST_LEAD_OF_3).astype(np.int64) + (first >= _FIRST_LEAD_OF_4)
        self._more_before = np.concatenate([np.zeros(1, np.int64), np.cumsum(more)])
        self._characters = self._leads - self._more_before[:-1]

    def special(self) -> list[_Special | None]:
        """Each text's characters that are not inert; None where all are."""
        if self._greatest < _LEAD_OF_FIRST_MARK:
            return [None] * len(self._char_starts)
        kinds = _kinds(self._bytes[self._bytes >= _CONTINUATION].tobytes().decode())
        found = np.flatnonzero(kinds)
        at = self._characters[found]
        edges = np.searchsorted(at, self._char_starts).tolist()
        starts = np.repeat(self._char_starts, np.diff([*edges, len(at)]))
        local, of = (at - starts).tolist(), kinds[found].tolist()
        return [
            _Special(local[first:stop], of[first:stop]) if first < stop else None
            for first, stop in pairwise([*edges, len(at)])
        ]

    def places(self, rows: Sequence[Rendered]) -> list[BytePlaces]:
        """The places of the texts' rows as they stand, not normalised."""
        points = [
            start + point
            for row, start in zip(rows, self._char_starts, strict=True)
            for point in (0, *(edge for span in row.spans for edge in span), *row.cuts, len(row.text))
        ]
        before = np.searchsorted(self._characters, points, side="left")
        bytes_at = (np.array(points) + self._more_before[before]).tolist()
        found = []
        at = 0
        for row in rows:
            zero, *edges = bytes_at[at : at + 2 * len(row.spans) + len(row.cuts) + 2]
            at += len(edges) + 1
            local = [edge - zero for edge in edges]
            ends = 2 * len(row.spans)
            spans = list(zip(local[0:ends:2], local[1:ends:2], strict=True))
            found.append(BytePlaces(local[-1], spans, [(cut, cut) for cut in local[ends:-1]]))
        return found


class _Change(NamedTuple):
    """text[start:end] became `after`."""

    start: int
    end: int
    after: str


def _is_normal(text: str, special: _Special) -> bool:
    """Whether NFC leaves the text as it is: looked at run by run where these are few, a tenth of the time."""
    few = len(special.at) * _SPARSE < len(text)
    looked_at = "\n".join([text[start:end] for start, end in _runs(special)]) if few else text
    return unicodedata.is_normalized("NFC", looked_at)


def _normalised_places(row: Rendered, special: _Special, added: AddedTokens) -> BytePlaces | None:
    changes = _changes(row, special, added)
    if changes is None:
        return None
    text = row.text
    starts = [change.start for change in changes]
    became: list[Span] = []
    size = done = 0
    for change in changes:
        size += len(text[done : change.start].encode())
        became.append((size, size + len(change.after.encode())))
        size, done = became[-1][1], change.end

    def place(point: int) -> Span:
        last = bisect_left(starts, point) - 1
        if last >= 0 and point < changes[last].end:
            return became[last]
        done, size = (changes[last].end, became[last][1]) if last >= 0 else (0, 0)
        size += len(text[done:point].encode())
        return size, size

    spans = [(place(start)[0], place(end)[1]) for start, end in row.spans]
    return BytePlaces(place(len(text))[1], spans, [place(cut) for cut in row.cuts])


def _changes(row: Rendered, special: _Special, added: AddedTokens) -> list[_Change] | None:
    """What NFC changes, run by run; each stretch between added tokens begins with a run of its own.

    None where a run is too long: Python orders its marks in the square of their number.
    """
    begins = frozenset(end for _, end in added.find(row.text, row.literal))
    changes: list[_Change] = []
    for start, end in _runs(special, begins):
        if end - start > _LONGEST_RUN:
            return None
        before = row.text[start:end]
        after = unicodedata.normalize("NFC", before)
        if after != before:
            changes.append(_core(start, before, after))
    return changes


def _runs(special: _Special, begins: Collection[int] = ()) -> Iterator[Span]:
    """The runs that hold anything but inert characters; the others NFC leaves as they are.

    A run is a character and those after it that NFC may join to it or move. `begins`: places that NFC cannot see
    behind.
    """
    start = end = -1
    for at, kind in zip(special.at, special.kinds, strict=True):
        joins = kind == _FOLLOWS and at > 0 and at not in begins
        if not (joins and at == end):
            if end >= 0:
                yield start, end
            start = at - joins
        end = at + 1
    yield start, end


def _core(start: int, before: str, after: str) -> _Change:
    shortest = min(len(before), len(after))
    head = next((i for i in range(shortest) if before[i] != after[i]), shortest)
    tail = next((i for i in range(shortest - head) if before[-1 - i] != after[-1 - i]), shortest - head)
    return _Change(start + head, start + len(before) - tail, after[head : len(after) - tail])


def _kinds(text: str) -> npt.NDArray[np.uint8]:
    codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    return _table()[np.minimum(codes, _TABLE_END)]


@cache
def _table() -> npt.NDArray[np.uint8]:
    """What each code point is to NFC, by this Python's tables: inert; changes, alone; may follow another; unknown.

    Unknown is also what the tokenizers library, whose tables are of another year, normalises in another way. All from
    U+40000 on share the last place: tags, variation selectors and private use, inert for good.
    """
    table = np.zeros(_TABLE_END + 1, np.uint8)
    table[0x1161:0x1176] = table[0x11A8:0x11C3] = _FOLLOWS  # Hangul vowels and finals, which join by arithmetic
    changing: list[int] = []
    unknown: list[int] = []
    for code, character in enumerate(map(chr, range(_FIRST_MARK, _TABLE_END)), _FIRST_MARK):
        is_mark, made_of = unicodedata.combining(character), unicodedata.decomposition(character)
        if not (is_mark or made_of):
            if unicodedata.category(character) == "Cn":
                unknown.append(code)
            continue
        parts = [] if made_of.startswith("<") else [int(part, 16) for part in made_of.split()]
        if is_mark:
            table[code] = _FOLLOWS
        elif parts and not unicodedata.is_normalized("NFC", character):
            changing.append(code)
        table[parts[1:]] = _FOLLOWS
        if (is_mark or parts) and _is_disputed(character):
            unknown += [code, *parts[1:]]
    for code in changing:
        head = ord(unicodedata.normalize("NFD", chr(code))[0])
        table[code] = max(table[code], _FOLLOWS if table[head] == _FOLLOWS else _CHANGES)
    table[unknown] = _UNKNOWN
    return table


_NFC: Final = tokenizers.normalizers.NFC()


def _is_disputed(character: str) -> bool:
    # a mark of whatever class changes places with one of these two; what it is made of shows what joins
    probe = f"x{character}\u0334 x\u0345{character} {unicodedata.normalize('NFD', character)}"
    agreed: bool = _NFC.normalize_str(probe) == unicodedata.normalize("NFC", probe)
    return not agreed
