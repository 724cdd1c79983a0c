"""Message -> Pieces: what an assistant message says, as places in its own fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from etl.records import Message, Span
from etl.template import THINK_CLOSE, THINK_OPEN

Piece: TypeAlias = tuple[str, int, int]
"""A field of the message, and the character range in its text."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """The cores of a message's reasoning and answer, blanks around them left out; None where there is none.

    `calls`: the number of tool calls.
    """

    reasoning: Piece | None
    answer: Piece | None
    calls: int = 0

    @property
    def spoken(self) -> list[str]:
        """The names of the pieces that must be in the render, tool calls apart."""
        return ["reasoning"] * (self.reasoning is not None) + ["answer"] * (self.answer is not None)


def read_pieces(message: Message, field: str | None, *, open_prompt: bool, cut: bool) -> Pieces:
    """The pieces of an assistant message.

    `field`: the one in which the template reads reasoning; without it inline tags count, and, where the generation
    prompt opens a thought (`open_prompt`), text up to a closing tag. `cut`: the length limit cut the message.
    """
    calls = message.get("tool_calls")
    count = len(calls) if isinstance(calls, list) else 0
    reasoning = _core(message, field or "reasoning_content")
    content = content_text(message)
    if reasoning is None and (field is None or message.get(field) is None):
        inline = _inline_thought(content, open_prompt=open_prompt, cut=cut and not count)
        if inline is not None:
            (start, end), behind = inline
            thought, answer = core_within(content, start, end), core_within(content, behind, len(content))
            if not (cut and thought is None and answer is None):  # else a bare tag is all that was generated
                return Pieces(_in_content(thought), _in_content(answer), count)
    return Pieces(reasoning, _in_content(core_within(content, 0, len(content))), count)


def content_text(message: Message) -> str:
    """The message's text, also where it was made a list of one part."""
    content = message.get("content")
    if isinstance(content, list) and len(content) == 1 and isinstance(content[0], dict):
        content = content[0].get("text")
    return content if isinstance(content, str) else ""


def with_content(message: Message, text: str) -> Message:
    """The message with other text, in the same form."""
    content = message.get("content")
    return {**message, "content": [{**content[0], "text": text}] if isinstance(content, list) else text}


def field_text(message: Message, field: str) -> str:
    """The text that a piece's places are in."""
    text = content_text(message) if field == "content" else message[field]
    return text if isinstance(text, str) else ""


def piece_text(message: Message, piece: Piece) -> str:
    """What a piece says."""
    field, start, end = piece
    text = field_text(message, field)
    return text[start:end] if end - start < len(text) else text


def core_within(text: str, start: int, end: int) -> Span | None:
    """The range of text[start:end] without the blanks at its ends; None where it is blank."""
    part = text if end - start == len(text) else text[start:end]
    left = part.lstrip()
    if not left:
        return None
    start += len(part) - len(left)
    return start, start + len(left.rstrip())


def function_of(call: Any) -> Mapping[str, Any]:
    """The `{name, arguments}` of a tool call, in OpenAI's form or bare."""
    inner = call.get("function", call) if isinstance(call, dict) else {}
    return inner if isinstance(inner, dict) else {}


def _in_content(span: Span | None) -> Piece | None:
    return span and ("content", *span)


def _core(message: Message, field: str) -> Piece | None:
    text = message.get(field)
    span = core_within(text, 0, len(text)) if isinstance(text, str) and text else None
    return span and (field, *span)


def _inline_thought(content: str, *, open_prompt: bool, cut: bool) -> tuple[Span, int] | None:
    """Of text that carries its reasoning inline: where the thought lies, and where the answer begins."""
    at = len(content) - len(content.lstrip())
    opener = THINK_OPEN.match(content, at)
    if at == len(content) or not (opener or open_prompt):
        return None
    start = opener.end() if opener else 0
    close = THINK_CLOSE.search(content, start)
    if close:
        return (start, close.start()), close.end()
    return ((start, len(content)), len(content)) if cut else None
