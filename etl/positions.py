"""Rendered -> the byte places of its spans in the text as the tokenizer sees it, which is NFC where that normalises.

Tokenizers cut added tokens out before they normalise, so each stretch between them is normalised apart. A character
is inert when NFC neither changes it nor moves or joins it to the one before; most texts hold nothing else.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np
import numpy.typing as npt

from etl.added import AddedTokens
from etl.records import Rendered, Span

_FIRST_MARK: Final = 0x300
_TABLE_END: Final = 0x30000
_INERT, _CHANGES, _FOLLOWS, _UNKNOWN = 0, 1, 2, 3


@dataclass(frozen=True, slots=True)
class Places:
    """Half-open byte ranges in the normalised text of `size` bytes; a cut is a point, or the range it fell into."""

    size: int
    spans: list[Span]
    cuts: list[Span]


def byte_places(rendered: Rendered, added: AddedTokens, *, nfc: bool) -> Places | None:
    """Where the row's spans and cuts lie in UTF-8 bytes; `added` finds the tokens that are cut out unnormalised.

    None where that cannot be told: the text holds characters that this Python's Unicode tables do not know, so that
    the tokenizer may normalise them in another way.
    """
    text = rendered.text
    if nfc and not text.isascii():
        kinds = _kinds(text)
        worst = int(kinds.max())
        if worst == _UNKNOWN:
            return None
        if worst != _INERT and not unicodedata.is_normalized("NFC", text):
            return _normalised_places(rendered, list(_changes(text, kinds, _stretches(text, added, rendered.literal))))
    return _plain_places(rendered)


def _plain_places(rendered: Rendered) -> Places:
    text = rendered.text
    if text.isascii():
        return Places(len(text), list(rendered.spans), [(cut, cut) for cut in rendered.cuts])
    points = sorted({*(edge for span in rendered.spans for edge in span), *rendered.cuts, len(text)})
    at: dict[int, int] = {}
    done = size = 0
    for point in points:
        size += len(text[done:point].encode())
        at[point], done = size, point
    spans = [(at[start], at[end]) for start, end in rendered.spans]
    return Places(size, spans, [(at[cut], at[cut]) for cut in rendered.cuts])


@dataclass(frozen=True, slots=True)
class _Change:
    """text[start:end] became `after`."""

    start: int
    end: int
    after: str


def _normalised_places(rendered: Rendered, changes: Sequence[_Change]) -> Places:
    text = rendered.text

    def place(point: int) -> Span:
        size = done = 0
        for change in changes:
            if change.start >= point:
                break
            size += len(text[done : change.start].encode())
            width = len(change.after.encode())
            if point < change.end:
                return size, size + width
            size, done = size + width, change.end
        size += len(text[done:point].encode())
        return size, size

    spans = [(place(start)[0], place(end)[1]) for start, end in rendered.spans]
    return Places(place(len(text))[1], spans, [place(cut) for cut in rendered.cuts])


def _stretches(text: str, added: AddedTokens, literal: Sequence[Span]) -> Iterable[Span]:
    at = 0
    for match in added.find(text, literal):
        yield at, match.start
        at = match.end
    yield at, len(text)


def _changes(text: str, kinds: npt.NDArray[np.uint8], stretches: Iterable[Span]) -> Iterable[_Change]:
    """What NFC changes, run by run: a run is a character and those after it that NFC may join to it or move."""
    for start, end in stretches:
        if start == end or unicodedata.is_normalized("NFC", text[start:end]):
            continue
        heads = start + np.flatnonzero(kinds[start:end] < _FOLLOWS)
        edges = [start, *heads.tolist(), end]
        for run_start, run_end in zip(edges, edges[1:], strict=False):
            if run_end - run_start > 1 or (run_end > run_start and kinds[run_start] != _INERT):
                before = text[run_start:run_end]
                after = unicodedata.normalize("NFC", before)
                if after != before:
                    yield _core(run_start, before, after)


def _core(start: int, before: str, after: str) -> _Change:
    shortest = min(len(before), len(after))
    head = next((i for i in range(shortest) if before[i] != after[i]), shortest)
    tail = next((i for i in range(shortest - head) if before[-1 - i] != after[-1 - i]), shortest - head)
    return _Change(start + head, start + len(before) - tail, after[head : len(after) - tail])


def _kinds(text: str) -> npt.NDArray[np.uint8]:
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    return _table()[np.minimum(codes, _TABLE_END)]


@cache
def _table() -> npt.NDArray[np.uint8]:
    """What each code point is to NFC, by this Python's tables: inert; changes, alone; may follow another; unknown.

    All from U+30000 on share the last place: ideographs, tags, variation selectors and private use, inert for good.
    """
    table = np.zeros(_TABLE_END + 1, np.uint8)
    table[0x1161:0x1176] = table[0x11A8:0x11C3] = _FOLLOWS  # Hangul vowels and finals, which join by arithmetic
    changing: list[int] = []
    for code in range(_FIRST_MARK, _TABLE_END):
        character = chr(code)
        if unicodedata.category(character) == "Cn":
            table[code] = _UNKNOWN
        elif unicodedata.combining(character):
            table[code] = _FOLLOWS
        elif not unicodedata.is_normalized("NFC", character):
            changing.append(code)
        parts = unicodedata.decomposition(character).split()
        if len(parts) == 2 and not parts[0].startswith("<"):
            table[int(parts[1], 16)] = _FOLLOWS
    for code in changing:
        first = ord(unicodedata.normalize("NFD", chr(code))[0])
        table[code] = max(table[code], _CHANGES, _FOLLOWS if table[first] == _FOLLOWS else _CHANGES)
    return table
