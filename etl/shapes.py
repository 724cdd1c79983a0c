"""A row of JSON -> Drafts: which of the known shapes it has, and its candidate rows, nothing normalised yet.

The most specific shape wins, in the order of `SHAPES`. A shape is told by its own fields alone; once told, a fault
in them rejects the candidate and never falls through to a shape that would read the same row as something else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, TypeAlias

from etl.errors import RowError
from etl.jsonline import compact, spelled_value
from etl.messages import REASONING_FIELDS, kind

Row: TypeAlias = Mapping[str, Any]

_ALIASES: Final = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
    "tool_response": "tool",
}
_SYSTEMS: Final = ("system", "developer")
_IDS_END: Final = 2**31
_SAID: Final = 200


class Draft(NamedTuple):
    """One candidate row as its shape holds it.

    `request` holds `tools` and template arguments, the row's own first. `messages` as the row spells them;
    the first `context` of them stand inside `prompt` and are never trained. `finish_reason` as given for the last
    reply, `completion_tokens` as recorded for it.
    """

    shape: str
    request: Row
    messages: list[Any]
    context: int = 0
    finish_reason: Any = None
    completion_tokens: int | None = None
    text: str | None = None
    token_ids: tuple[list[int], list[int]] | None = None


def read_shape(row: Row, shape: str, role_map: Mapping[str, str]) -> list[Draft | RowError]:
    """The row's candidates, in order; a faulty choice is its own RowError. Raises RowError `shape`.

    `shape` is `auto`, or the one shape to read the row as.
    """
    if row.get("error") and any(name in row and row[name] is None for name in ("response", "choices")):
        raise RowError("shape", f"the request failed: {_brief(row['error'])}")  # nothing answers its messages
    if shape != "auto":
        return SHAPES[shape][1](row, role_map)
    for matches, read in SHAPES.values():
        if matches(row):
            return read(row, role_map)
    raise RowError("shape", _unknown(row))


def look_up(value: Any, path: str) -> Any:
    """The value under a key, or under a dotted path through objects and lists (`body.messages`, `choices.0`)."""
    if isinstance(value, dict) and path in value:
        return value[path]
    for step in path.split("."):
        if isinstance(value, dict):
            value = value.get(step)
        elif isinstance(value, list) and step.isdecimal() and int(step) < len(value):
            value = value[int(step)]
        else:
            return None
    return value


def point_elsewhere(row: Row, fields: Mapping[str, str]) -> Row:
    """The row with each field of `--field` read from its path; one that is not there is absent."""
    found = {name: look_up(row, path) for name, path in fields.items()}
    return {**{key: value for key, value in row.items() if key not in found}, **found}


# --- tokenized ------------------------------------------------------------------------------------------------------


def _is_tokenized(row: Row) -> bool:
    return isinstance(row.get("prompt_token_ids"), list) and isinstance(row.get("token_ids"), list)


def _read_tokenized(row: Row, _role_map: Mapping[str, str]) -> list[Draft | RowError]:
    prompt = _token_ids(row.get("prompt_token_ids") or [], "prompt_token_ids")
    generated = _token_ids(row.get("token_ids"), "token_ids")
    recorded = _usage(row, row)
    reason = row.get("finish_reason")
    return [Draft("tokenized", row, [], 0, reason, recorded, token_ids=(prompt, generated))]


def _token_ids(value: Any, name: str) -> list[int]:
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:
        raise RowError("shape", f"{name} is not a list of integers")
    if value and not (min(value) >= 0 and max(value) < _IDS_END):
        raise RowError("shape", f"{name} holds an id outside 0 … 2^31 - 1")
    return value


# --- batch output and choices ---------------------------------------------------------------------------------------


def _is_batch(row: Row) -> bool:
    return isinstance(row.get("response"), dict)


def _read_batch(row: Row, _role_map: Mapping[str, str]) -> list[Draft | RowError]:
    response = row.get("response")
    if not isinstance(response, dict):
        raise RowError("shape", f"response is {kind(response)}, not an object")
    body = response.get("body")
    body = body if isinstance(body, dict) else response
    if not isinstance(body.get("choices"), list):
        status = response.get("status_code")
        said = "" if status is None else f" (status_code {status!r})"
        raise RowError("shape", f"response holds no choices{said}")
    return _read_answers("batch", row, body)


def _is_choices(row: Row) -> bool:
    choices = row.get("choices")
    # a list of plain strings or numbers is a multiple-choice question, not what a model generated
    return isinstance(choices, list) and not (choices and all(isinstance(c, str | int | float) for c in choices))


def _read_choices(row: Row, _role_map: Mapping[str, str]) -> list[Draft | RowError]:
    return _read_answers("choices", row, row)


def _read_answers(shape: str, row: Row, body: Row) -> list[Draft | RowError]:
    choices = body.get("choices")
    if not isinstance(choices, list) or not choices:
        raise RowError("shape", f"choices is {'empty' if choices == [] else kind(choices)}: nothing was generated")
    request, messages, context = _request(row)
    answers = [_answer(choice) for choice in choices]
    if any(answer and _is_same_reply(messages[-1], answer) for answer in answers):
        messages = messages[:-1]  # the program that asked had added it to what it would ask next
    drafts: list[Draft | RowError] = []
    for i, (choice, answer) in enumerate(zip(choices, answers, strict=True)):
        if answer is None:
            drafts.append(RowError("shape", f"choices[{i}] holds no message"))
            continue
        if choice.get("error"):
            drafts.append(RowError("shape", f"choices[{i}] failed: {_brief(choice['error'])}"))
            continue
        reason = choice.get("finish_reason")
        drafts.append(
            Draft(
                shape,
                request,
                [*messages, answer],
                context,
                finish_reason=row.get("finish_reason") if reason is None else reason,
                completion_tokens=_usage(body if len(choices) == 1 else {}, choice),
            )
        )
    return drafts


def _answer(choice: Any) -> dict[str, Any] | None:
    if not isinstance(choice, dict):
        return None
    message = choice.get("message")
    if isinstance(message, dict):
        beside = {} if _reasoning(message) else _reasoning(choice)
        given = {key: value for key, value in message.items() if value is not None}
        return {"role": "assistant", **beside, **given}
    text = choice.get("text")
    return _reply(text, choice) if isinstance(text, str) else None


def _is_same_reply(message: Any, answer: Mapping[str, Any]) -> bool:
    said = ("role", "content", "tool_calls")
    spoken = answer.get("content") or answer.get("tool_calls")
    return bool(spoken) and isinstance(message, dict) and all(message.get(key) == answer.get(key) for key in said)


def _reply(text: str, holder: Row) -> dict[str, Any]:
    """An assistant message of plain text, with the reasoning that stands beside it."""
    return {"role": "assistant", "content": text, **_reasoning(holder)}


def _reasoning(holder: Row) -> dict[str, str]:
    found = {name: holder.get(name) for name in REASONING_FIELDS}
    return {name: value for name, value in found.items() if isinstance(value, str)}


def _request(row: Row) -> tuple[Row, list[Any], int]:
    """The request's fields, its messages, and how many of those are context."""
    request, body = row.get("request"), row.get("body")
    nested = request.get("body") if isinstance(request, dict) else None
    holders = [holder for holder in (row, request, body, nested) if isinstance(holder, dict)]
    fields = {key: value for holder in reversed(holders) for key, value in holder.items() if value is not None}
    for holder in holders:
        if isinstance(holder.get("messages"), list) and holder["messages"]:
            return fields, [*_system(fields, holder["messages"]), *holder["messages"]], 0
    if isinstance(row.get("prompt"), str | list):
        asked = _as_messages(row["prompt"], "user", "prompt")
        messages = [*_system(row, asked), *asked]
        return fields, messages, len(messages)
    raise RowError("shape", "choices without the messages that they answer (messages, request.messages, body.messages)")


# --- prompt + completion --------------------------------------------------------------------------------------------


def _completion(row: Row) -> tuple[str, Any]:
    name = "completion" if row.get("completion") is not None else "response"
    return name, row.get(name)


def _is_prompt(row: Row) -> bool:
    return isinstance(row.get("prompt"), str | list) and isinstance(_completion(row)[1], str | list)


def _read_prompt(row: Row, _role_map: Mapping[str, str]) -> list[Draft | RowError]:
    asked = _as_messages(row.get("prompt"), "user", "prompt")
    prompt = [*_system(row, asked), *asked]
    name, answer = _completion(row)
    completion = [_reply(answer, row)] if isinstance(answer, str) else _as_messages(answer, "assistant", name)
    return [_whole("prompt", row, [*prompt, *completion], len(prompt))]


def _as_messages(value: Any, role: str, name: str) -> list[Any]:
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if not isinstance(value, list):
        raise RowError("shape", f"{name} is {kind(value)}, neither text nor a list of messages")
    return value


# --- messages, conversations, Alpaca, text --------------------------------------------------------------------------


def _is_messages(row: Row) -> bool:
    return bool(row.get("messages")) and isinstance(row["messages"], list)


def _read_messages(row: Row, _role_map: Mapping[str, str]) -> list[Draft | RowError]:
    messages = _full_list(row, "messages")
    answer = _completion(row)[1]
    answered = isinstance(messages[-1], dict) and messages[-1].get("role") == "assistant"
    reply = [_reply(answer, row)] if isinstance(answer, str) and answer.strip() and not answered else []
    return [_whole("messages", row, [*_system(row, messages), *messages, *reply])]


def _is_conversations(row: Row) -> bool:
    return bool(row.get("conversations")) and isinstance(row["conversations"], list)


def _read_conversations(row: Row, role_map: Mapping[str, str]) -> list[Draft | RowError]:
    turns = [_from_value(turn, role_map) for turn in _full_list(row, "conversations")]
    return [_whole("conversations", row, [*_system(row, turns), *turns])]


def _from_value(turn: Any, role_map: Mapping[str, str]) -> Any:
    """A from/value turn in role/content; role/content passes, and what is neither is left to be rejected."""
    if not isinstance(turn, dict) or "from" not in turn:
        return turn
    speaker, value = turn["from"], turn.get("value")
    message = {key: item for key, item in turn.items() if key not in ("from", "value")}
    known = isinstance(speaker, str) and speaker not in role_map
    message["role"] = _ALIASES.get(speaker, speaker) if known else speaker
    calls = _spelled_calls(value) if speaker == "function_call" else None
    if calls is None:
        return {**message, "content": value}
    return {**message, "content": "", "tool_calls": calls}


def _spelled_calls(value: Any) -> list[Any] | None:
    """The calls of a `function_call` turn: an object or a list of them; None where it spells neither."""
    value = spelled_value(value) if isinstance(value, str) else value
    calls = value if isinstance(value, list) else [value]
    return calls if calls and all(isinstance(call, dict) and "name" in call for call in calls) else None


def _is_alpaca(row: Row) -> bool:
    return isinstance(row.get("instruction"), str) and isinstance(row.get("output"), str)


def _read_alpaca(row: Row, _role_map: Mapping[str, str]) -> list[Draft | RowError]:
    if not _is_alpaca(row):
        raise RowError("shape", "instruction and output are not both strings")
    given = row.get("input")
    more = f"\n\n{given}" if isinstance(given, str) and given.strip() else ""
    user = {"role": "user", "content": row["instruction"] + more}
    return [_whole("alpaca", row, [*_system(row, []), user, _reply(row["output"], row)])]


def _is_text(row: Row) -> bool:
    return isinstance(row.get("text"), str)


def _read_text(row: Row, _role_map: Mapping[str, str]) -> list[Draft | RowError]:
    if not _is_text(row):
        raise RowError("shape", f"text is {kind(row.get('text'))}, not a string")
    return [Draft("text", row, [], finish_reason=row.get("finish_reason"), text=row["text"])]


SHAPES: Final[
    Mapping[str, tuple[Callable[[Row], bool], Callable[[Row, Mapping[str, str]], list[Draft | RowError]]]]
] = {
    "tokenized": (_is_tokenized, _read_tokenized),
    "batch": (_is_batch, _read_batch),
    "choices": (_is_choices, _read_choices),
    "prompt": (_is_prompt, _read_prompt),
    "messages": (_is_messages, _read_messages),
    "conversations": (_is_conversations, _read_conversations),
    "alpaca": (_is_alpaca, _read_alpaca),
    "text": (_is_text, _read_text),
}
"""How each shape is told and how it is read, the most specific first."""


def _whole(shape: str, row: Row, messages: list[Any], context: int = 0) -> Draft:
    return Draft(shape, row, messages, context, row.get("finish_reason"), _usage(row, row))


def _full_list(row: Row, name: str) -> list[Any]:
    value = row.get(name)
    if not isinstance(value, list) or not value:
        raise RowError("shape", f"{name} is {'empty' if value == [] else kind(value)}, not a list of messages")
    return value


def _system(row: Row, messages: list[Any]) -> list[Any]:
    """The system message that a row holds beside messages which begin with none."""
    system = row.get("system")
    parts = isinstance(system, list) and all(isinstance(part, dict) and part.get("text") for part in system)
    said = system if parts or (isinstance(system, str) and system.strip()) else None
    begun = bool(messages) and isinstance(messages[0], dict) and messages[0].get("role") in _SYSTEMS
    return [{"role": "system", "content": said}] if said and not begun else []


def _usage(row: Row, ids_holder: Row) -> int | None:
    usage = row.get("usage")
    recorded = usage.get("completion_tokens") if isinstance(usage, dict) else None
    if type(recorded) is int and recorded >= 0:
        return recorded
    ids = ids_holder.get("token_ids")
    return len(ids) if isinstance(ids, list) else None


def _brief(error: Any) -> str:
    return (error if isinstance(error, str) else compact(error))[:_SAID]


def _unknown(row: Row) -> str:
    empty = [name for name in ("messages", "conversations") if row.get(name) == []]
    if empty:
        return f"{empty[0]} is empty"
    keys = ", ".join(sorted(map(str, row))[:12])
    return f"no known shape in the keys {keys[:200]}" if keys else "an empty object"
