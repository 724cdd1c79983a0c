"""Rendered -> the byte places of its spans in the text as the tokenizer sees it, which is NFC where that normalises.

Tokenizers cut added tokens out before they normalise, so each stretch between them is normalised apart. A character
is inert when NFC neither changes it nor moves or joins it to the one before; most texts hold nothing else.
"""

from __future__ import annotations

import unicodedata
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from functools import cache
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


class Places(NamedTuple):
    """Half-open byte ranges in the normalised text of `size` bytes; a cut is a point, or the range it fell into."""

    size: int
    spans: Sequence[Span]
    cuts: Sequence[Span]


def byte_places(rows: Sequence[Rendered], added: AddedTokens, *, nfc: bool) -> list[Places | None]:
    """Where each row's spans and cuts lie in UTF-8 bytes; `added` finds the tokens that are cut out unnormalised.

    None where that cannot be told: the text holds characters that Unicode tables do not agree on (this Python's, the
    tokenizer's), so that each may split or normalise them in another way, or an endless run of marks. No text may hold
    a lone surrogate.
    """
    places: list[Places | None] = [
        Places(len(row.text), row.spans, [(cut, cut) for cut in row.cuts]) if row.text.isascii() else None
        for row in rows
    ]
    wide = [i for i, row in enumerate(rows) if places[i] is None]
    if wide:
        texts = _Texts([rows[i].text for i in wide])
        found = texts.places([rows[i] for i in wide])
        for i, kind, place in zip(wide, texts.worst_kinds(), found, strict=True):
            as_it_is = not nfc or kind == _INERT
            if kind != _UNKNOWN and (as_it_is or unicodedata.is_normalized("NFC", rows[i].text)):
                places[i] = place
            elif kind != _UNKNOWN:
                places[i] = _normalised_places(rows[i], added)
    return places


class _Texts:
    """Several texts as one stretch of UTF-8 bytes, of which only the characters beyond ASCII are looked at."""

    def __init__(self, texts: Sequence[str]) -> None:
        encoded = [text.encode() for text in texts]  # an engine has left it in the string
        self._bytes = np.frombuffer(b"".join(encoded), np.uint8)
        self._byte_ends = np.cumsum([len(part) for part in encoded])
        self._char_starts = np.cumsum([0, *map(len, texts)])[:-1].tolist()
        self._leads = np.flatnonzero(self._bytes >= _FIRST_LEAD)
        first = self._bytes[self._leads]
        self._greatest = int(first.max(initial=0))
        # The bytes beyond one that characters before each lead take, and the lead's place counted in characters.
        more = 1 + (first >= _FIRST_LEAD_OF_3).astype(np.int64) + (first >= _FIRST_LEAD_OF_4)
        self._more_before = np.concatenate([np.zeros(1, np.int64), np.cumsum(more)])
        self._characters = self._leads - self._more_before[:-1]

    def worst_kinds(self) -> list[int]:
        """The highest kind among each text's characters."""
        worst = [_INERT] * len(self._byte_ends)
        if self._greatest >= _LEAD_OF_FIRST_MARK:
            kinds = _kinds(self._bytes[self._bytes >= _CONTINUATION].tobytes().decode())
            special = np.flatnonzero(kinds)
            owners = np.searchsorted(self._byte_ends, self._leads[special], side="right")
            for owner, kind in set(zip(owners.tolist(), kinds[special].tolist(), strict=True)):
                worst[owner] = max(worst[owner], kind)
        return worst

    def places(self, rows: Sequence[Rendered]) -> list[Places]:
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
            found.append(Places(local[-1], spans, [(cut, cut) for cut in local[ends:-1]]))
        return found


class _Change(NamedTuple):
    """text[start:end] became `after`."""

    start: int
    end: int
    after: str


def _normalised_places(row: Rendered, added: AddedTokens) -> Places | None:
    changes = _changes(row, added)
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
    return Places(place(len(text))[1], spans, [place(cut) for cut in row.cuts])


def _stretches(row: Rendered, added: AddedTokens) -> Iterable[Span]:
    at = 0
    for match in added.find(row.text, row.literal):
        yield at, match.start
        at = match.end
    yield at, len(row.text)


def _changes(row: Rendered, added: AddedTokens) -> list[_Change] | None:
    """What NFC changes, run by run: a run is a character and those after it that NFC may join to it or move.

    None where a run is too long: Python orders its marks in the square of their number.
    """
    kinds = _kinds(row.text)
    changes: list[_Change] = []
    for start, end in _stretches(row, added):
        for run_start, run_end in _runs(kinds[start:end]):
            if run_end - run_start > _LONGEST_RUN:
                return None
            before = row.text[start + run_start : start + run_end]
            after = unicodedata.normalize("NFC", before)
            if after != before:
                changes.append(_core(start + run_start, before, after))
    return changes


def _runs(kinds: npt.NDArray[np.uint8]) -> Iterable[Span]:
    """The runs of one stretch that hold anything but inert characters; the others NFC leaves as they are."""
    special = np.flatnonzero(kinds != _INERT)
    if not len(special):
        return ()
    is_head = kinds < _FOLLOWS
    is_head[0] = True
    heads = np.flatnonzero(is_head)
    wanted = np.unique(np.searchsorted(heads, special, side="right") - 1)
    return zip(heads[wanted].tolist(), np.append(heads, len(kinds))[wanted + 1].tolist(), strict=True)


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
