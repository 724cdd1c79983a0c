"""Rows of JSON -> what parsing makes of them, for the tests of parsing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from etl.config import RunConfig
from etl.conversation import parse
from etl.records import Conversation, Line, Reject, TemplateTraits

SOURCE = "s3://bucket/rows.jsonl"


def opens_unless_disabled(arguments: Mapping[str, Any]) -> bool:
    """As Qwen3.5 and Qwen3.6: the generation prompt opens a thought unless `enable_thinking` is false."""
    return arguments.get("enable_thinking") is not False


def never_opens(_arguments: Mapping[str, Any]) -> bool:
    """As Qwen3: the model writes its own `<think>`."""
    return False


QWEN36 = TemplateTraits("reasoning_content", opens_unless_disabled)
QWEN3 = TemplateTraits("reasoning_content", never_opens)
GPT_OSS = TemplateTraits("thinking", never_opens)
LLAMA3 = TemplateTraits(None, never_opens)
DEEPSEEK_R1 = TemplateTraits(None, opens_unless_disabled)


def parse_line(raw: bytes, traits: TemplateTraits = QWEN3, **options: Any) -> list[Conversation | Reject]:
    """All candidates of one line, at offset 7 of `SOURCE`."""
    return parse(Line(SOURCE, 7, raw, 3), RunConfig(input=SOURCE, **options), traits)


def parse_all(row: Any, traits: TemplateTraits = QWEN3, **options: Any) -> list[Conversation | Reject]:
    """All candidates of a row."""
    return parse_line(json.dumps(row).encode(), traits, **options)


def rows_of(row: Any, traits: TemplateTraits = QWEN3, **options: Any) -> list[Conversation]:
    """All candidates of a row none of which is rejected."""
    items = parse_all(row, traits, **options)
    rejects = [item for item in items if isinstance(item, Reject)]
    assert not rejects, rejects
    return [item for item in items if isinstance(item, Conversation)]


def row_of(row: Any, traits: TemplateTraits = QWEN3, **options: Any) -> Conversation:
    """The one candidate of a row."""
    (conversation,) = rows_of(row, traits, **options)
    return conversation


def reject_of(row: Any, traits: TemplateTraits = QWEN3, **options: Any) -> Reject:
    """The one reject of a row, which may also be a line's bytes."""
    items = parse_line(row, traits, **options) if isinstance(row, bytes) else parse_all(row, traits, **options)
    (reject,) = items
    assert isinstance(reject, Reject), reject
    return reject


def user(content: Any = "Hi", **more: Any) -> dict[str, Any]:
    """A user message."""
    return {"role": "user", "content": content, **more}


def assistant(content: Any = "ok", **more: Any) -> dict[str, Any]:
    """An assistant message."""
    return {"role": "assistant", "content": content, **more}


def reply_of(message: dict[str, Any], traits: TemplateTraits = QWEN3, **options: Any) -> dict[str, Any]:
    """An assistant message as the template gets it, after one user message."""
    return row_of({"messages": [user(), message]}, traits, **options).messages[-1]
