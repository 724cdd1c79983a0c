"""One message as a row spells it -> the one message that the chat template gets, whatever its spelling.

    role       renamed by `--role-map`
    content    None or missing is "", a list of text parts their joined text
    reasoning  from `reasoning_content`, `reasoning`, `thinking` or inline tags; handed over apart, in the field that
               the template reads ('' if none). Where it reads none, text stays as it is: inline tags stay inline, and
               what came in a field goes on in `reasoning_content`, so that rendering can count it as dropped
    tool calls OpenAI's form; arguments that spell an object as that object, a broken string as text

Line breaks at the seam between reasoning and answer belong to the template, which writes its own; they are stripped,
so that every spelling gives the same ids. Keys that are null or only steer etl (`train`, `weight`, `finish_reason`)
are left out; all other keys go to the template as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from etl.errors import RowError
from etl.jsonline import spelled_object, spelled_value
from etl.records import Message

REASONING_FIELDS: Final = ("reasoning_content", "reasoning", "thinking")
"""The spellings of reasoning, in the order in which they are believed."""

CUT_REASONS: Final = frozenset(
    {
        *("length", "max_tokens", "max_output_tokens", "model_length", "model_context_window_exceeded"),
        *("abort", "aborted", "cancelled", "content_filter", "error", "insufficient_system_resource"),
    }
)
"""The values of `finish_reason` that mean: the model did not end this text; a limit did, a filter, or a failure."""

_OPEN: Final = "<think>"
_CLOSE: Final = "</think>"
_BREAKS: Final = "\r\n"
_TEXT_PARTS: Final = frozenset({"text", "input_text", "output_text"})
_UNWRITTEN: Final = ("refusal", "audio")
_STEERING: Final = frozenset({"train", "weight", "finish_reason"})


def kind(value: Any) -> str:
    """What a JSON value is, for people: `null`, `a list`, `a number`."""
    names = {type(None): "null", bool: "a boolean", dict: "an object", list: "a list", str: "a string"}
    return names.get(type(value), "a number")


def is_cut(finish_reason: Any) -> bool:
    """Whether a `finish_reason` says that the text was cut; SGLang's is an object with a `type`."""
    if isinstance(finish_reason, dict):
        finish_reason = finish_reason.get("type")
    return isinstance(finish_reason, str) and finish_reason.lower() in CUT_REASONS


def is_trainable(raw: Mapping[str, Any]) -> bool:
    """Whether a message's own flags allow training: neither `train: false` nor `weight: 0`."""
    return not (_is_zero(raw.get("train")) or _is_zero(raw.get("weight")))


def normalize_message(raw: Any, where: str, role_map: Mapping[str, str]) -> Message:
    """Role, content and tool calls in canonical form; reasoning is left to `place_reasoning`. Raises RowError."""
    if not isinstance(raw, dict):
        raise RowError("shape", f"{where} is {kind(raw)}, not a message")
    message: Message = {key: value for key, value in raw.items() if value is not None and key not in _STEERING}
    role = message.get("role")
    if type(role) is not str or not role:
        raise RowError("shape", f"{where}.role is {kind(role)}, not a role's name")
    role = message["role"] = role_map.get(role, role)
    content = message.get("content", "")
    message["content"] = content if type(content) is str else joined_text(content, f"{where}.content")
    if not message["content"] and (unwritten := [name for name in _UNWRITTEN if message.get(name)]):
        raise RowError("part", f"{where}.{unwritten[0]} is what the message says, which no template writes")
    if role == "assistant" and ("tool_calls" in message or "function_call" in message):
        _normalize_calls(message, where)
    return message


def joined_text(content: Any, where: str) -> str:
    """The joined text of a list of text parts. Raises RowError `part` on another part, `shape` on anything else."""
    if not isinstance(content, list):
        raise RowError("shape", f"{where} is {kind(content)}, neither text nor a list of parts")
    return "".join(_part_text(part, f"{where}[{i}]") for i, part in enumerate(content))


def place_reasoning(
    message: Message, where: str, field: str | None, opens_thinking: Callable[[], bool], *, cut: bool
) -> bool:
    """Move an assistant message's reasoning to where the template reads it, in place.

    Returns whether the message's own text closed its thought with `</think>`. Raises RowError.
    """
    reasoning = _pop_reasoning(message, where)
    if field is None:
        if reasoning:
            message["reasoning_content"] = reasoning
        return False
    content = message["content"]
    closed = False
    if reasoning:
        reasoning = _without_tags(reasoning)
        message["content"] = _without_thought(content, reasoning).lstrip(_BREAKS)
    else:
        reasoning, message["content"], closed = _split_inline(
            content, opens_thinking, unclosed_is_reasoning=cut and "tool_calls" not in message, cut=cut
        )
    message[field] = reasoning.strip(_BREAKS)
    return closed


def _split_inline(
    content: str, opens_thinking: Callable[[], bool], *, unclosed_is_reasoning: bool, cut: bool
) -> tuple[str, str, bool]:
    """Reasoning, answer, and whether a close tag parted them; the first close tag is the real one."""
    body = content.lstrip()
    if body.startswith(_OPEN):
        reasoning, close, answer = body[len(_OPEN) :].partition(_CLOSE)
        if not close and not cut:
            return "", content, False
    elif _CLOSE in content and opens_thinking():
        reasoning, close, answer = content.partition(_CLOSE)
    elif unclosed_is_reasoning and body and opens_thinking():
        reasoning, close, answer = content, "", ""
    else:
        return "", content, False
    return ("" if reasoning.isspace() else reasoning), answer.lstrip(_BREAKS), bool(close)


def _without_tags(reasoning: str) -> str:
    """A field's reasoning without the tags that some servers leave around it."""
    core = reasoning.strip()
    if core.startswith(_OPEN):
        return core.removeprefix(_OPEN).removesuffix(_CLOSE)
    return reasoning


def _without_thought(content: str, reasoning: str) -> str:
    """The answer where content repeats, in tags, the reasoning that a field holds as well."""
    said, close, answer = content.lstrip().removeprefix(_OPEN).partition(_CLOSE)
    return answer if close and said.strip() == reasoning.strip() else content


def _pop_reasoning(message: Message, where: str) -> str:
    """The first spelling that is not blank; all spellings are taken out of the message."""
    found = ""
    for name in REASONING_FIELDS:
        if name not in message:
            continue
        value = message.pop(name)
        if found or isinstance(value, bool):  # a flag (`thinking: true`), no text
            continue
        text = value if type(value) is str else joined_text(value, f"{where}.{name}")
        if text and not text.isspace():
            found = text
    return found


def _part_text(part: Any, where: str) -> str:
    if not isinstance(part, dict):
        raise RowError("part", f"{where} is {kind(part)}, not a text part")
    text, named = part.get("text"), part.get("type", "text")
    if type(text) is not str or type(named) is not str or named not in _TEXT_PARTS:
        raise RowError("part", f"{where} is of type {named!r} with {kind(text)} for text; only text is tokenized")
    return text


def _normalize_calls(message: Message, where: str) -> None:
    calls = _unless_blank(message.pop("tool_calls", None))
    legacy = _unless_blank(message.pop("function_call", None))
    if isinstance(calls, str):
        calls = spelled_value(calls)
        if not isinstance(calls, list):
            raise RowError("shape", f"{where}.tool_calls is a string that spells no list")
    if not calls and legacy is not None:
        calls = [legacy]
    if calls is not None and not isinstance(calls, list):
        raise RowError("shape", f"{where}.tool_calls is {kind(calls)}, not a list")
    if calls:
        message["tool_calls"] = [normalize_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]


def normalize_call(raw: Any, where: str) -> dict[str, Any]:
    """`{…, type, function: {name, arguments}}` from that or a bare `{name, arguments}`. Raises RowError `shape`."""
    if not isinstance(raw, dict):
        raise RowError("shape", f"{where} is {kind(raw)}, not a tool call")
    call = {key: value for key, value in raw.items() if value is not None}
    if "function" not in call:
        call["function"] = {key: call.pop(key) for key in ("name", "arguments") if key in call}
    function = call["function"]
    if not isinstance(function, dict) or type(function.get("name")) is not str:
        raise RowError("shape", f"{where} names no function")
    call.setdefault("type", "function")
    call["function"] = {**function, "arguments": _arguments(function.get("arguments"))}
    return call


def _unless_blank(value: Any) -> Any:
    """None where a column of strings has nothing to say: a blank, or `null` as text."""
    return None if isinstance(value, str) and value.strip() in ("", "null") else value


def _arguments(value: Any) -> Any:
    if value is None:
        return {}
    if type(value) is not str:
        return value
    spelled = spelled_object(value)
    return value if spelled is None else spelled


def _is_zero(flag: Any) -> bool:
    return isinstance(flag, bool | int | float) and flag == 0
