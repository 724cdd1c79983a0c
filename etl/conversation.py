"""Line -> Conversations: the candidate rows of one JSON line, messages in canonical form, or Rejects that say why not.

    Line ─decode→ row ─read_shape→ Drafts ─normalise→ messages ─choose turns→ Conversation, or a Reject

Nothing that a row holds raises: every candidate comes out as the one or the other.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from etl.config import RunConfig
from etl.errors import RowError
from etl.jsonline import compact, decode, require_text, spelled_value
from etl.messages import is_cut, is_trainable, kind, normalize_message, place_reasoning
from etl.records import Conversation, Line, Message, Reject, TemplateTraits
from etl.shapes import Draft, Row, look_up, point_elsewhere, read_shape

_ID_FIELDS: Final = ("custom_id", "id", "uuid")
_DETAIL_LENGTH: Final = 500
_USED_KEYS: Final = (
    "role",
    "content",
    "reasoning_content",
    "reasoning",
    "thinking",
    "name",
    "tool_call_id",
    "tool_calls",
)
_SAID_BY_THE_RENDER: Final = frozenset(
    {
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "conversation",
        "chat_template",
        "tokenize",
    }
)


class _Place(NamedTuple):
    """What all candidates of a row share. `clean`: all text in the row is known to be encodable."""

    row: Row
    line: Line
    row_id: str
    kept: tuple[str | None, ...]
    clean: bool


class _Turns(NamedTuple):
    """Messages in canonical form, which of them are what by index, and how many replies are no context."""

    messages: list[Message]
    trainable: list[int]
    cut: frozenset[int]
    closed: frozenset[int]
    last_assistant: int
    replies: int


def parse(line: Line, config: RunConfig, traits: TemplateTraits) -> list[Conversation | Reject]:
    """One item for each candidate row of the line, at least one; never raises on what the line holds."""
    try:
        row, clean = decode(line.raw)
    except RowError as error:
        return [_reject(line, error)]
    return _parse(row, line, config, traits, clean=clean)


def parse_row(row: Any, config: RunConfig, traits: TemplateTraits) -> list[Conversation | Reject]:
    """As `parse`, from a row that is already loaded, and so of no line."""
    return _parse(row, Line("", 0, b""), config, traits, clean=False)


def _parse(
    row: Any, line: Line, config: RunConfig, traits: TemplateTraits, *, clean: bool
) -> list[Conversation | Reject]:
    if not isinstance(row, dict):
        return [_reject(line, RowError("shape", f"the line is {kind(row)}, not an object"))]
    try:
        pointed = point_elsewhere(row, config.field) if config.field else row
        drafts = read_shape(pointed, config.shape, config.role_map)
        place = _Place(pointed, line, _row_id(pointed, line, clean), _kept(row, config.keep, clean), clean)
    except RowError as error:
        return [_reject(line, RowError(error.reason, error.detail + _unfound(row, config.field)))]
    except RecursionError:
        return [_reject(line, _too_deep())]
    if len(drafts) == 1:
        return _candidates(drafts[0], 0, place, config, traits)
    return [item for i, draft in enumerate(drafts) for item in _candidates(draft, i, place, config, traits)]


def _unfound(row: Row, fields: Mapping[str, str]) -> str:
    missing = [f"{name}={path}" for name, path in fields.items() if look_up(row, path) is None]
    return f"; nothing at --field {', '.join(missing)}" if missing else ""


def _candidates(
    draft: Draft | RowError, choice: int, place: _Place, config: RunConfig, traits: TemplateTraits
) -> list[Conversation | Reject]:
    if isinstance(draft, RowError):
        return [_reject(place.line, draft, choice)]
    try:
        if draft.text is not None or draft.token_ids is not None:
            return [_without_messages(draft, choice, place, config)]
        return [*_conversations(draft, choice, place, config, traits)]
    except RowError as error:
        return [_reject(place.line, error, choice)]
    except RecursionError:
        return [_reject(place.line, _too_deep(), choice)]


def _without_messages(draft: Draft, choice: int, place: _Place, config: RunConfig) -> Conversation:
    if not place.clean:
        require_text(draft.text, "text")
    cut = is_cut(draft.finish_reason)
    if cut and config.truncated_completions == "reject":
        raise RowError("truncated", "the completion was cut by the length limit")
    return Conversation(
        place.row_id,
        place.line.source,
        place.line.offset,
        choice,
        -1,
        completion_tokens=draft.completion_tokens,
        kept=place.kept,
        counts={"truncated_rows": 1} if cut else {},
        shape=draft.shape,
        text=draft.text,
        token_ids=draft.token_ids,
    )


def _conversations(
    draft: Draft, choice: int, place: _Place, config: RunConfig, traits: TemplateTraits
) -> list[Conversation]:
    """The rows that one draft becomes: one, or under `--turns expand` one for each trainable message."""
    tools, documents = _tools(draft, place.row), _documents(draft, place.row)
    arguments = _template_kwargs(draft, place.row, config)
    turns = _normalize_turns(draft, config.role_map, traits, arguments)
    trained = _trained(turns, config.turns)
    if not place.clean:
        _require_used_text(turns.messages, (tools, documents, arguments))
    whole = Conversation(
        place.row_id,
        place.line.source,
        place.line.offset,
        choice,
        -1,
        messages=tuple(turns.messages),
        trained=trained,
        cut=turns.cut,
        closed=turns.closed,
        tools=tools,
        documents=documents,
        template_kwargs=arguments,
        completion_tokens=draft.completion_tokens,
        kept=place.kept,
        counts=_counts(draft, turns, len(trained), config),
        shape=draft.shape,
    )
    if config.turns == "expand" and turns.trainable:
        return [_up_to(whole, k, turns.last_assistant) for k in turns.trainable]
    # what the generator recorded is the length of the last reply: nothing to compare if that is not trained
    if whole.completion_tokens is not None and whole.trained[-1:] != (turns.last_assistant,):
        return [whole._replace(completion_tokens=None)]
    return [whole]


def _counts(draft: Draft, turns: _Turns, trained: int, config: RunConfig) -> dict[str, int]:
    """Messages whose role `--role-map` changed, and replies that flags or `--turns last` left untrained."""
    found: dict[str, int] = {}
    if config.role_map:
        pairs = zip(draft.messages, turns.messages, strict=True)
        found["mapped_roles"] = sum(raw.get("role") != message["role"] for raw, message in pairs)
    if turns.replies > trained:
        found["untrained_messages"] = turns.replies - trained
    return found


def _up_to(whole: Conversation, k: int, last_assistant: int) -> Conversation:
    return whole._replace(
        turn=k,
        messages=whole.messages[: k + 1],
        trained=(k,),
        cut=frozenset(i for i in whole.cut if i <= k),
        closed=frozenset(i for i in whole.closed if i <= k),
        completion_tokens=whole.completion_tokens if k == last_assistant else None,
    )


def _normalize_turns(
    draft: Draft, role_map: Mapping[str, str], traits: TemplateTraits, arguments: Mapping[str, Any]
) -> _Turns:
    field, opens_thinking = traits.reasoning_field, functools.partial(traits.opens_thinking, arguments)
    messages = [normalize_message(raw, f"messages[{i}]", role_map) for i, raw in enumerate(draft.messages)]
    assistants = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    last = assistants[-1] if assistants else -1
    trainable, cut, closed = [], [], []
    for i in assistants:
        raw = draft.messages[i]
        if is_cut(raw.get("finish_reason")) or (i == last and is_cut(draft.finish_reason)):
            cut.append(i)
        if place_reasoning(messages[i], f"messages[{i}]", field, opens_thinking, cut=i in cut) and i in cut:
            closed.append(i)
        if i >= draft.context and is_trainable(raw):
            trainable.append(i)
    replies = sum(i >= draft.context for i in assistants)
    return _Turns(messages, trainable, frozenset(cut), frozenset(closed), last, replies)


def _trained(turns: _Turns, policy: str) -> tuple[int, ...]:
    if policy == "last":
        return tuple(i for i in turns.trainable if i == turns.last_assistant)
    return tuple(turns.trainable)


def _setting(draft: Draft, row: Row, name: str) -> Any:
    """A field beside the messages: the row's own, else the request's; none where it is a blank string."""
    value = row.get(name)
    value = draft.request.get(name) if value is None else value
    return None if isinstance(value, str) and not value.strip() else value


def _tools(draft: Draft, row: Row) -> list[Any] | None:
    tools = _setting(draft, row, "tools")
    if isinstance(tools, str):
        spelled = spelled_value(tools)
        if spelled is None and tools.strip() != "null":
            raise RowError("shape", "tools is a string that spells no JSON")
        tools = spelled
    if isinstance(tools, dict):
        tools = [tools]
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list):
        raise RowError("shape", f"tools is {kind(tools)}, not a list")
    return [_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)]


def _tool(tool: Any, where: str) -> dict[str, Any]:
    tool = spelled_value(tool) if isinstance(tool, str) else tool
    if not isinstance(tool, dict):
        raise RowError("shape", f"{where} is {kind(tool)}, not a tool's description")
    return tool


def _documents(draft: Draft, row: Row) -> list[Any] | None:
    """The documents as a template takes them; a field of that name that holds something else is not meant for it."""
    documents = _setting(draft, row, "documents")
    if isinstance(documents, list) and documents and all(isinstance(item, dict) for item in documents):
        return documents
    return None


def _template_kwargs(draft: Draft, row: Row, config: RunConfig) -> Mapping[str, Any]:
    """The row's template arguments under those of the command line, which win."""
    given = _setting(draft, row, "chat_template_kwargs")
    if given is None:
        return config.template_kwargs
    given = spelled_value(given) if isinstance(given, str) else given
    if not isinstance(given, dict):
        raise RowError("shape", f"chat_template_kwargs is {kind(given)}, not an object")
    return {key: value for key, value in given.items() if key not in _SAID_BY_THE_RENDER} | config.template_kwargs


def _row_id(row: Row, line: Line, clean: bool) -> str:
    for name in _ID_FIELDS:
        value = row.get(name)
        if isinstance(value, str) and value:
            if not clean:
                require_text(value, name)
            return str(value)
        if type(value) is int:
            return str(value)
    return f"{line.source}@{line.offset}"


def _kept(row: Row, fields: Sequence[str], clean: bool) -> tuple[str | None, ...]:
    return tuple(_kept_value(look_up(row, name), name, clean) for name in fields)


def _kept_value(value: Any, name: str, clean: bool) -> str | None:
    if value is None:
        return None
    if not clean:
        require_text(value, name)
    return str(value) if isinstance(value, str) else compact(value)


def _require_used_text(messages: list[Message], beside: tuple[Any, ...]) -> None:
    for i, message in enumerate(messages):
        for key in _USED_KEYS:
            if key in message:
                require_text(message[key], f"messages[{i}].{key}")
    for value in beside:
        require_text(value, "tools, documents or template arguments")


def _too_deep() -> RowError:
    return RowError("json", "nested too deep to be read")


def _reject(line: Line, error: RowError, choice: int = 0) -> Reject:
    # a detail may quote what was read: it must be writable and short whatever that was
    detail = error.detail[:_DETAIL_LENGTH].encode("utf-8", "backslashreplace").decode()
    return Reject(line.source, line.offset, len(line.raw), choice, -1, error.reason, detail, line.raw, line.number)
