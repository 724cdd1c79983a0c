"""Messages -> Marked: a second render, with a private character on either side of each piece that a message wrote.

Taken out again, the marks must leave the very same text; then they show where each piece went, or that the template
dropped it. One more mark stands inside each control token that a message types, so that what remains whole is the
template's own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias

from etl.errors import RowError
from etl.messages import REASONING_FIELDS
from etl.pieces import Pieces, content_text, core_within, field_text, function_of, with_content
from etl.records import Message, Span

_MARKS_A_MESSAGE: Final = 16

Render: TypeAlias = Callable[[Sequence[Message], Any, Any], str]
"""(messages, tools, documents) -> text; raises RowError."""

_REACHES: Final = (100, 1, 0, -1)
"""How deep in a tool call marks are tried: in all its texts, in its arguments' own, around its name, not at all. Some
templates write nested values as Python does, which escapes marks.
"""

_AREAS: Final = ((0xE000, 0x1900), (0x100000, 0xFFF0), (0xF0000, 0xFFF0))
"""Unicode's private-use areas, (first, size). The first keeps a text at two bytes a character."""


@dataclass(slots=True)
class Marks:
    """Hands out characters that occur nowhere in the row's text.

    `of` maps (message index, piece name) to the numbers of the marks around that piece. Number 0 breaks up tokens.
    """

    base: int
    size: int
    of: dict[tuple[int, str], tuple[int, int]] = field(default_factory=dict)

    def pair(self, message: int, piece: str) -> tuple[str, str]:
        """Two new marks for a piece. Raises RowError `mask` where a row needs more than there are."""
        number = 2 * len(self.of) + 1
        if number + 1 >= self.size:
            raise RowError("mask", "too many messages to follow each of them")
        self.of[message, piece] = number, number + 1
        return chr(self.base + number), chr(self.base + number + 1)


@dataclass(frozen=True, slots=True)
class Marked:
    """Where the marks came out, as positions in the text without marks.

    `places`: by mark number; `of` as in Marks; `broken`: where the control tokens begin that messages typed, if
    `breaks` says that they could be broken up; `shown`: messages whose texts bear no marks, but are in the text.
    """

    places: Mapping[int, tuple[int, ...]]
    of: Mapping[tuple[int, str], tuple[int, int]]
    broken: tuple[int, ...] = ()
    breaks: bool = False
    shown: frozenset[int] = frozenset()

    def find(self, message: int, piece: str, intervals: Sequence[Span]) -> Span | None:
        """Where a piece lies within the intervals; None where not all of it does."""
        pair = self.of.get((message, piece))
        if pair is None:
            return None
        starts, ends = (
            [at for at in self.places.get(mark, ()) if any(start <= at <= end for start, end in intervals)]
            for mark in pair
        )
        return (starts[0], ends[-1]) if starts and ends and starts[0] < ends[-1] else None

    def find_call(self, message: int, call: int, intervals: Sequence[Span]) -> Span | None:
        """From the first to the last character found of a tool call: its name, or a text in its arguments."""
        names = (f"name {call}", f"arguments {call}")
        found = [span for name in names if (span := self.find(message, name, intervals))]
        return (min(start for start, _ in found), max(end for _, end in found)) if found else None

    def says(self, message: int) -> bool:
        """Whether the message says anything that was marked."""
        return any(k == message for k, _ in self.of)

    def bears(self, message: int, piece: str) -> bool:
        """Whether a piece was marked."""
        return (message, piece) in self.of

    def bounds(self) -> dict[int, Span]:
        """From the first to the last character that each message wrote, of those that left any."""
        bounds: dict[int, Span] = {}
        for (message, piece), (left, right) in self.of.items():
            if left in self.places and right in self.places:
                start = self.places[left][0]
                ends = [at for at in self.places[right] if at > start] or [start]
                end = ends[-1 if piece.startswith("arguments") else 0]  # those are marked text by text
                low, high = bounds.get(message, (start, end))
                bounds[message] = min(low, start), max(high, end)
        return bounds


def mark_all(
    messages: Sequence[Message],
    pieces: Mapping[int, Pieces],
    tools: Any,
    documents: Any,
    text: str,
    render: Render,
    tokens: re.Pattern[str] | None,
) -> Marked | None:
    """Render with as many marks as leave `text` as it is; None where there is no such way.

    Messages other than the assistant's may be left without (see `Marked.bears` and `shown`).
    `pieces`: those of the assistant messages; `tokens`: matches the control tokens to break up, if any were typed.
    """
    row = _Row(messages, tools, documents, text, render, _free_area(text, len(messages)))
    others = [k for k in range(len(messages)) if k not in pieces]
    marked = row.mark(pieces, others, tokens)
    if marked is None and (least := row.mark(pieces, (), tokens)) is not None:
        # a template may ask how a user's text begins or ends (`<tool_response>`, `/no_think`): such texts go unmarked
        able = row.markable(others)
        marked = row.mark(pieces, able, tokens) or least
        marked = replace(marked, shown=frozenset(k for k in others if not marked.bears(k, "text") and row.shows(k)))
    return marked


@dataclass(frozen=True, slots=True)
class _Row:
    """What is rendered again with marks, and what they are taken from."""

    messages: Sequence[Message]
    tools: Any
    documents: Any
    text: str
    render: Render
    area: tuple[int, int]

    def mark(
        self, pieces: Mapping[int, Pieces], others: Collection[int], tokens: re.Pattern[str] | None
    ) -> Marked | None:
        """As `mark_all`, with marks around the `pieces` and the texts of the messages in `others` alone."""
        reaches = _REACHES if any(said.calls for said in pieces.values()) else _REACHES[:1]
        for breaking, reach in dict.fromkeys((breaking, reach) for breaking in (tokens, None) for reach in reaches):
            marks = Marks(*self.area)
            shown: Any = [
                _mark_message(message, k, pieces[k], marks, reach)
                if k in pieces
                else _mark_text(message, k, marks)
                if k in others
                else message
                for k, message in enumerate(self.messages)
            ]
            tools, documents = self.tools, self.documents
            if breaking is not None:
                shown, tools, documents = _break_tokens((shown, tools, documents), breaking, chr(marks.base))
            marked = _read(shown, tools, documents, self.text, self.render, marks)
            if marked is not None:
                return replace(marked, breaks=breaking is not None)
        return None

    def markable(self, others: Sequence[int]) -> list[int]:
        """Those of the messages whose texts can bear marks."""
        if not others or self.mark({}, others, None) is not None:
            return [*others]
        half = len(others) // 2
        return [*self.markable(others[:half]), *self.markable(others[half:])] if half else []

    def shows(self, k: int) -> bool:
        """Whether a mark at the beginning or the end of message k's text is in the render."""
        message, marks = self.messages[k], Marks(*self.area)
        content = content_text(message)
        mark, _ = marks.pair(k, "text")
        for at in core_within(content, 0, len(content)) or ():
            shown = with_content(message, content[:at] + mark + content[at:])
            messages = [*self.messages[:k], shown, *self.messages[k + 1 :]]
            marked = _read(messages, self.tools, self.documents, self.text, self.render, marks)
            if marked is not None and marked.places:
                return True
        return False


def kept_blanks(
    messages: Sequence[Message],
    k: int,
    piece: tuple[str, int, int],
    tools: Any,
    documents: Any,
    text: str,
    render: Render,
) -> int:
    """How many of the blanks behind a piece of message k the template kept: so many may lie before a mark unnoticed."""
    name, _, end = piece
    message = messages[k]
    said = field_text(message, name)
    marks = Marks(*_free_area(text, 1))
    left, _ = marks.pair(k, name)
    for stop in range(len(said), end, -1):
        shown = _with_field(message, name, said[:stop] + left + said[stop:])
        marked = _read([*messages[:k], shown, *messages[k + 1 :]], tools, documents, text, render, marks)
        if marked is not None and marked.places.get(1):
            return stop - end
    return 0


def strings_in(value: Any, *, keys: bool = False) -> list[str]:
    """All text in a JSON value; that of its keys too where `keys` says so."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        value = [*value, *value.values()] if keys else list(value.values())
    return [text for item in value for text in strings_in(item, keys=keys)] if isinstance(value, list | tuple) else []


def _free_area(text: str, messages: int) -> tuple[int, int]:
    """A private-use area that the text uses nothing of, with room for some marks a message."""
    for base, size in _AREAS:
        if size > messages * _MARKS_A_MESSAGE and not re.search(f"[{chr(base)}-{chr(base + size - 1)}]", text):
            return base, size
    raise RowError("mask", "the text uses all private-use areas of Unicode")


def _read(
    messages: Sequence[Message], tools: Any, documents: Any, text: str, render: Render, marks: Marks
) -> Marked | None:
    try:
        shown = render(messages, tools, documents)
    except RowError:
        return None
    places: dict[int, list[int]] = {}
    parts: list[str] = []
    at = since = 0
    for found in re.finditer(f"[{chr(marks.base)}-{chr(marks.base + marks.size - 1)}]", shown):
        parts.append(shown[since : found.start()])
        at += found.start() - since
        since = found.end()
        places.setdefault(ord(found[0]) - marks.base, []).append(at)
    if "".join([*parts, shown[since:]]) != text:
        return None
    broken = tuple(place - 1 for place in places.pop(0, []))
    return Marked({mark: tuple(found) for mark, found in places.items()}, marks.of, broken)


def _mark_text(message: Message, k: int, marks: Marks) -> Message:
    content = content_text(message)
    core = core_within(content, 0, len(content))
    return message if core is None else with_content(message, _around(content, [(core, marks.pair(k, "text"))]))


def _mark_message(message: Message, k: int, pieces: Pieces, marks: Marks, reach: int) -> Message:
    found: dict[str, list[tuple[Span, tuple[str, str]]]] = {}
    for name, piece in (("reasoning", pieces.reasoning), ("answer", pieces.answer)):
        if piece is not None:
            found.setdefault(piece[0], []).append((piece[1:], marks.pair(k, name)))
    marked = message
    for name, inserts in found.items():
        marked = _with_field(marked, name, _around(field_text(message, name), inserts))
    if reach >= 0 and pieces.calls:
        calls = [_mark_call(call, k, i, marks, reach) for i, call in enumerate(message["tool_calls"])]
        marked = {**marked, "tool_calls": calls}
    return marked


def _with_field(message: Message, name: str, text: str) -> Message:
    if name == "content":
        return with_content(message, text)
    same = [alias for alias in REASONING_FIELDS if message.get(alias) == message[name]]
    return {**message, **dict.fromkeys(same, text)}


def _around(text: str, inserts: Sequence[tuple[Span, tuple[str, str]]]) -> str:
    for (start, end), (left, right) in sorted(inserts, reverse=True):
        text = text[:start] + left + text[start:end] + right + text[end:]
    return text


def _mark_call(call: Any, k: int, i: int, marks: Marks, reach: int) -> Any:
    """The call with marks around its name, and the same two around its arguments' text or each text in reach."""
    function = function_of(call)
    name = function.get("name")
    if not isinstance(name, str) or not name:
        return call
    left, right = marks.pair(k, f"name {i}")
    marked = {**function, "name": left + name + right}
    if "arguments" in function and reach:
        marked["arguments"] = _mark_texts(function["arguments"], marks.pair(k, f"arguments {i}"), reach)
    return {**call, "function": marked} if "function" in call else marked


def _mark_texts(value: Any, pair: tuple[str, str], reach: int) -> Any:
    if isinstance(value, str):
        core = core_within(value, 0, len(value))
        return _around(value, [(core, pair)]) if core else value
    if not reach or not isinstance(value, dict | list):
        return value
    if isinstance(value, dict):
        return {key: _mark_texts(item, pair, reach - 1) for key, item in value.items()}
    return [_mark_texts(item, pair, reach - 1) for item in value]


def _break_tokens(value: Any, tokens: re.Pattern[str], mark: str) -> Any:
    """The value with a mark behind the first character of every control token in its text."""
    if isinstance(value, str):
        return tokens.sub(lambda found: found[0][0] + mark + found[0][1:], value)
    if isinstance(value, dict):
        return {_break_tokens(key, tokens, mark): _break_tokens(item, tokens, mark) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_break_tokens(item, tokens, mark) for item in value)
    return value
