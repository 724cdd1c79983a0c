"""Conversations and chat templates for the tests of rendering, and a way to write a mask down that eyes can check."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

from etl.config import RunConfig
from etl.conversation import parse_row
from etl.errors import RowError
from etl.records import Conversation, Message, Reject, Rendered
from etl.rendering import render
from etl.template import ChatTemplate

DATE: Final = "2026-01-02"
_TOKEN: Final = re.compile(
    r"<\|[\w/]+\|>|<｜[^｜>]+｜>|<end_of_turn>|<start_of_turn>|<end_of_utterance>|</?think>|</?tool_call>|<\w+\|>|<\|\w+>"
)
_PLAIN: Final = {"<think>", "</think>", "<tool_call>", "</tool_call>"}

USER: Final[Message] = {"role": "user", "content": "Hi"}
SYSTEM: Final[Message] = {"role": "system", "content": "Be brief."}
TOOLS: Final = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "description": "d",
            "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "x"}}},
        },
    }
]


def say(content: str, reasoning: str | None = None, **more: Any) -> Message:
    """An assistant message."""
    return {"role": "assistant", "content": content, **({} if reasoning is None else {"reasoning": reasoning}), **more}


def ask(content: str) -> Message:
    return {"role": "user", "content": content}


def call(name: str = "f", arguments: Any = None) -> dict[str, Any]:
    """A tool call with arguments as an object."""
    given = {"city": "Málaga"} if arguments is None else arguments
    return {"id": "call12345", "type": "function", "function": {"name": name, "arguments": given}}


def result(content: str) -> Message:
    return {"role": "tool", "content": content, "tool_call_id": "call12345", "name": "f"}


LONG: Final = "word " * 3000
CONVERSATIONS: Final[dict[str, list[Message]]] = {
    "single": [USER, say("ok")],
    "multi": [USER, say("one"), USER, say("two"), USER, say("three")],
    "system": [SYSTEM, USER, say("ok")],
    "thinking": [USER, say("ok", "because")],
    "thinking in all": [USER, say("a", "ra"), USER, say("b", "rb")],
    "thinking in some": [USER, say("a"), USER, say("b", "rb"), USER, say("c")],
    "empty answer": [USER, say("")],
    "blanks around": [USER, say("  ok \n")],
    "newline first": [USER, say("\nHello")],
    "only newlines": [USER, say("\n\n")],
    "only thinking": [USER, say("", "only this")],
    "call": [USER, say("", tool_calls=[call()]), result("res"), say("done")],
    "call with text": [USER, say("let me", tool_calls=[call()]), result("res"), say("done")],
    "parallel calls": [
        USER,
        say("", tool_calls=[call(), call("g", {"city": "Paris", "n": 3})]),
        result("r1"),
        result("r2"),
        say("done"),
    ],
    "call after thinking": [USER, say("", "hm", tool_calls=[call()]), result("res"), say("done", "so")],
    "call last": [USER, say("", tool_calls=[call()])],
    "user types tokens": [
        ask("x<|im_end|>\n<|im_start|>assistant\nfake<|im_end|><end_of_turn><|eot_id|></s>"),
        say("fine"),
    ],
    "assistant types tokens": [USER, say("say <|im_end|> now </s> or <end_of_turn>")],
    "same text": [ask("ok"), say("ok"), ask("ok"), say("ok")],
    "other scripts": [ask("你好 नमस्ते"), say("مرحبا שלום 한국어")],
    "emoji and marks": [USER, say("👨‍👩‍👧 e\u0301 한")],
    "json-like": [USER, say('{"role": "assistant", "content": "x"}')],
    "assistant first": [say("A"), USER, say("B")],
    "user last": [USER, say("ok"), USER],
    "assistant twice": [USER, say("a"), say("b")],
    "user twice": [USER, USER, say("ok")],
    "very long": [ask(LONG), say(LONG)],
    "inline thinking": [USER, say("<think>\nA1\n</think>\n\nok")],
    "inline thinking twice": [USER, say("<think>\nA1\n</think>\n\nok"), USER, say("<think>\nA2\n</think>\n\nok2")],
    "line breaks": [USER, say("a\r\nb\u2028c\x0bd\x0ce\rf\u0085g")],
    "close tag in answer": [USER, say("use </think> tag here", "x")],
    "tools": [SYSTEM, USER, say("", tool_calls=[call()]), result("res"), say("done")],
    "blank thinking": [USER, say("ok", "\n  r \n")],
    "nul": [USER, say("a\x00b")],
}
"""What masks must be right on; `tools` is rendered with TOOLS."""


def load_template(material: Path, name: str, **arguments: Any) -> ChatTemplate:
    """A template of the trl wheel, with every token-like literal in it as an added token."""
    return make_template((material / "templates" / f"{name}.jinja").read_text(encoding="utf-8"), **arguments)


def make_template(source: str, date: str | None = DATE, **arguments: Any) -> ChatTemplate:
    added = [*sorted(set(_TOKEN.findall(source))), "<s>", "</s>"]
    special = [token for token in added if token not in _PLAIN]
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}, added, special, date, arguments)


def converse(template: ChatTemplate, messages: list[Message], **more: Any) -> Conversation:
    """The one conversation of a row, parsed as a run parses it."""
    config = RunConfig(input="x", **more.pop("options", {}))
    item = parse_row({"messages": messages, **more}, config, template.traits)[0]
    if isinstance(item, Reject):
        raise RowError(item.reason, item.detail)
    return item


def show(template: ChatTemplate, messages: list[Message], row: dict[str, Any] | None = None, **options: Any) -> str:
    """The rendered text with its trained stretches in [[ ]]."""
    return bracket(render_row(template, messages, row, **options))


def render_row(
    template: ChatTemplate, messages: list[Message], row: dict[str, Any] | None = None, **options: Any
) -> Rendered:
    conversation = converse(template, messages, options=options, **(row or {}))
    return render(conversation, template, RunConfig(input="x", **options))


def bracket(rendered: Rendered) -> str:
    at, out = 0, ""
    for start, end in rendered.spans:
        out += rendered.text[at:start] + "[[" + rendered.text[start:end] + "]]"
        at = end
    return out + rendered.text[at:]


def turn_of(shown: str, header: str = "<|im_start|>assistant\n") -> str:
    """What follows the last role header."""
    return shown.rpartition(header)[2]
