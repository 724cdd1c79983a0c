"""Text -> the added tokens in it, found as the `tokenizers` library finds them: leftmost first, then longest.

An added token is cut out before anything else happens to the text; by its flags it takes in the blanks beside it
(`lstrip`, `rstrip`), counts only as a whole word (`single_word`), or is looked for after normalising (`normalized`).
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from etl.records import Span

BLANKS: Final = (
    "\t\n\v\f\r \x85\xa0\u1680" + "".join(map(chr, range(0x2000, 0x200B))) + "\u2028\u2029\u202f\u205f\u3000"
)
"""Unicode's White_Space, which Python's `str.strip` exceeds by four control characters."""

_WORD: Final = re.compile(r"\w")


class AddedTokens:
    """Finds the given `tokenizers.AddedToken`s; none is found where there are none."""

    def __init__(self, tokens: Iterable[Any]) -> None:
        self._by_content = {token.content: token for token in tokens if token.content}
        longest_first = sorted(self._by_content, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    def find(self, text: str, literal: Sequence[Span] = ()) -> Iterator[Span]:
        """Where tokens are cut out of the text, in order, blanks that they take in included.

        One that touches any of the ascending `literal` ranges is passed over.
        """
        starts = [start for start, _ in literal]
        done = 0
        for match in self._pattern.finditer(text) if self._pattern else ():
            start, end = match.span()
            token = self._by_content[match[0]]
            last = bisect_left(starts, end) - 1
            if last >= 0 and literal[last][1] > start:
                continue
            if token.single_word and _within_word(text, start, end):
                continue
            if token.lstrip:
                start = max(done, _before_blanks(text, done, start))
            if token.rstrip:
                end = _after_blanks(text, end)
            yield start, end
            done = end


def _within_word(text: str, start: int, end: int) -> bool:
    return bool(_WORD.match(text[start - 1 : start]) or _WORD.match(text[end : end + 1]))


def _before_blanks(text: str, least: int, at: int) -> int:
    while at > least and text[at - 1] in BLANKS:
        at -= 1
    return at


def _after_blanks(text: str, at: int) -> int:
    while at < len(text) and text[at] in BLANKS:
        at += 1
    return at
