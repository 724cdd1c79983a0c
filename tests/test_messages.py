"""One message in canonical form: spellings of content, reasoning and tool calls that mean the same are the same."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from jinja2 import Template
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from etl.config import RunConfig
from etl.conversation import parse_row
from etl.messages import is_cut
from etl.records import TemplateTraits
from tests.parsing import (
    DEEPSEEK_R1,
    GPT_OSS,
    LLAMA3,
    QWEN3,
    QWEN36,
    assistant,
    reject_of,
    reply_of,
    row_of,
    user,
)


def reject_with(message: Any) -> tuple[str, str]:
    reject = reject_of({"messages": [user(), message]})
    return reject.reason, reject.detail


# --- content


def test_text_parts_count_as_their_joined_text() -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    assert reply_of(assistant(parts)) == reply_of(assistant("Hello"))


@pytest.mark.parametrize("parts", [[], [{"type": "text", "text": ""}]])
def test_no_text_in_parts_is_empty_text(parts: list[Any]) -> None:
    assert reply_of(assistant(parts))["content"] == ""


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "https://x.test/cat.png"}},
        {"type": "image"},
        {"type": "text", "text": None},
        {"type": "text", "text": 7},
        {"type": ["text"], "text": "x"},
        "Hi",
        None,
        ["Hi"],
    ],
)
def test_any_other_part_rejects_the_row_and_says_where(part: Any) -> None:
    reason, detail = reject_with(assistant([{"type": "text", "text": "x"}, part]))
    assert reason == "part"
    assert "messages[1].content[1]" in detail


def test_null_keys_that_a_columnar_writer_added_to_a_part_do_not_matter() -> None:
    assert reply_of(assistant([{"type": "text", "text": "Hi", "image_url": None}]))["content"] == "Hi"


def test_null_and_missing_content_count_as_empty_text() -> None:
    assert reply_of(assistant(None))["content"] == ""
    assert reply_of({"role": "assistant"})["content"] == ""


@pytest.mark.parametrize("content", [7, 0, 1.5, True, False, {"text": "Hi"}])
def test_content_that_is_no_text_is_a_shape_fault_that_says_where(content: Any) -> None:
    reason, detail = reject_with(assistant(content))
    assert reason == "shape"
    assert "messages[1].content" in detail


@pytest.mark.parametrize("content", ["  ok \n", "a\u0000b", "\ufeffx", "2024-01-02", "", " ", "e\u0301", "\r\n"])
def test_text_stays_as_it_is(content: str) -> None:
    assert reply_of(assistant(content))["content"] == content


# --- roles and keys


@pytest.mark.parametrize("message", [None, [], "Hi", 7, True])
def test_an_element_that_is_no_message_rejects_the_row(message: Any) -> None:
    reason, detail = reject_with(message)
    assert reason == "shape"
    assert "messages[1]" in detail


@pytest.mark.parametrize("role", [None, 7, "", ["user"], {"name": "user"}, True])
def test_a_role_that_is_no_name_rejects_the_row(role: Any) -> None:
    reason, detail = reject_with({"role": role, "content": "x"})
    assert reason == "shape"
    assert "messages[1].role" in detail


def test_a_missing_role_rejects_the_row() -> None:
    assert reject_with({"content": "x"})[0] == "shape"


def test_an_unknown_role_is_never_dropped_here() -> None:
    row = {"messages": [{"role": "developer", "content": "D"}, user(), assistant()]}
    assert row_of(row).messages[0] == {"role": "developer", "content": "D"}


def test_the_role_map_renames_roles() -> None:
    row = {"messages": [{"role": "developer", "content": "D"}, user(), {"role": "bot", "content": "ok"}]}
    conversation = row_of(row, role_map={"developer": "system", "bot": "assistant"})
    assert [message["role"] for message in conversation.messages] == ["system", "user", "assistant"]
    assert conversation.trained == (2,)


def test_null_keys_and_etls_own_flags_do_not_reach_the_template() -> None:
    message = assistant("ok", name=None, tool_calls=None, refusal=None, weight=1, train=True, finish_reason="stop")
    assert reply_of(message, LLAMA3) == {"role": "assistant", "content": "ok"}


def test_other_keys_reach_the_template_as_they_are() -> None:
    row = {"messages": [user("Hi", name="Ada", x=[1]), {"role": "tool", "content": "3", "tool_call_id": "c1"}]}
    assert row_of(row).messages == (
        {"role": "user", "content": "Hi", "name": "Ada", "x": [1]},
        {"role": "tool", "content": "3", "tool_call_id": "c1"},
    )


# --- reasoning

SPELLINGS = [
    assistant("ok", reasoning_content="R"),
    assistant("ok", reasoning="R"),
    assistant("ok", thinking="R"),
    assistant("ok", reasoning_content="R", reasoning="R", thinking="R"),
    assistant("ok", reasoning_content=None, reasoning=" \n", thinking="R"),
    assistant("\n\nok", reasoning_content="\nR\n"),
    assistant("ok", reasoning_content=[{"type": "text", "text": "R"}]),
    assistant("<think>\nR\n</think>\n\nok"),
    assistant("<think>R</think>ok"),
    assistant(" \n<think>\nR\n</think>\nok"),
    assistant("\u00a0\u3000\u2028\x85\x1c<think>\nR\n</think>\nok"),
    assistant("<think>\r\nR\r\n</think>\r\n\r\nok"),
    assistant([{"type": "text", "text": "<think>\nR\n</think>"}, {"type": "text", "text": "\n\nok"}]),
]


@pytest.mark.parametrize("traits", [QWEN3, QWEN36, GPT_OSS])
@pytest.mark.parametrize("message", SPELLINGS)
def test_every_spelling_of_reasoning_is_handed_over_alike(message: dict[str, Any], traits: TemplateTraits) -> None:
    expected = {"role": "assistant", "content": "ok", str(traits.reasoning_field): "R"}
    assert reply_of(message, traits) == expected


@pytest.mark.parametrize(
    "message",
    [
        assistant("ok"),
        assistant("ok", reasoning_content=None),
        assistant("ok", reasoning_content="", thinking=" \n\t"),
        assistant("ok", thinking=True),
        assistant("<think>\n\n</think>\n\nok"),
        assistant("<think></think>ok"),
        assistant("<think> \t </think>ok"),
    ],
)
def test_null_or_blank_reasoning_is_none(message: dict[str, Any]) -> None:
    assert reply_of(message) == {"role": "assistant", "content": "ok", "reasoning_content": ""}


def test_only_the_first_close_tag_ends_the_thought() -> None:
    reply = reply_of(assistant("<think>\nx\n</think>\n\nuse </think> tag here"))
    assert (reply["reasoning_content"], reply["content"]) == ("x", "use </think> tag here")


def test_tags_elsewhere_are_answer_text() -> None:
    for text in ("use </think> here", "a <think>b</think> c", "The <think> tag"):
        assert reply_of(assistant(text))["content"] == text
        assert reply_of(assistant(text, reasoning="R"), QWEN36)["content"] == text
        assert reply_of(assistant(text), QWEN36, template_arg={"enable_thinking": False})["content"] == text


def test_reasoning_without_its_opener_is_known_where_the_prompt_opens_the_thought() -> None:
    message = assistant("R\n</think>\n\nuse </think> here")
    assert reply_of(message, QWEN36) == assistant("use </think> here", reasoning_content="R")
    assert reply_of(message, QWEN3) == assistant("R\n</think>\n\nuse </think> here", reasoning_content="")


def test_the_rows_own_template_arguments_decide_whether_the_prompt_opens_the_thought() -> None:
    row = {"messages": [user(), assistant("R</think>ok")], "chat_template_kwargs": {"enable_thinking": False}}
    assert row_of(row, QWEN36).messages[1]["content"] == "R</think>ok"
    assert row_of(row, QWEN36, template_arg={"enable_thinking": True}).messages[1]["content"] == "ok"


@pytest.mark.parametrize("traits", [LLAMA3, DEEPSEEK_R1])
@pytest.mark.parametrize("text", ["<think>\nR\n</think>\n\nok", "R</think>ok", "<think>\nhalf"])
def test_where_the_template_reads_no_field_the_text_goes_in_as_it_is(text: str, traits: TemplateTraits) -> None:
    assert reply_of(assistant(text, finish_reason="length"), traits) == assistant(text)


def test_where_the_template_reads_no_field_reasoning_is_kept_to_be_counted() -> None:
    assert reply_of(assistant("ok", thinking="R", reasoning=""), LLAMA3) == assistant("ok", reasoning_content="R")
    assert reply_of(assistant("ok", thinking="", reasoning=None), LLAMA3) == assistant("ok")


@pytest.mark.parametrize("reasoning", [7, {"effort": "high"}])
def test_reasoning_that_is_no_text_is_not_dropped_in_silence(reasoning: Any) -> None:
    assert reject_with(assistant("ok", reasoning=reasoning))[0] == "shape"


def test_the_reasoning_keys_of_other_roles_are_left_alone() -> None:
    assert row_of({"messages": [user("x", thinking={"a": 1}), assistant()]}).messages[0]["thinking"] == {"a": 1}


# --- cut completions


@pytest.mark.parametrize(
    ("message", "traits"),
    [
        (assistant("<think>\nhalf"), QWEN3),
        (assistant("<think>\nhalf"), QWEN36),
        (assistant("half"), QWEN36),
        (assistant("", reasoning_content="half"), QWEN3),
    ],
)
def test_half_a_thought_is_reasoning(message: dict[str, Any], traits: TemplateTraits) -> None:
    conversation = row_of({"messages": [user(), message], "finish_reason": "length"}, traits)
    assert conversation.messages[1] == assistant("", reasoning_content="half")
    assert (conversation.cut, conversation.closed) == (frozenset({1}), frozenset())


def test_half_an_answer_is_an_answer() -> None:
    row = {"messages": [user(), assistant("half")], "finish_reason": "length"}
    assert row_of(row, QWEN3).messages[1] == assistant("half", reasoning_content="")
    closed = row_of(row, QWEN36, template_arg={"enable_thinking": False})
    assert closed.messages[1] == assistant("half", reasoning_content="")


def test_half_a_tool_call_turn_has_ended_its_thought() -> None:
    message = assistant("So:", tool_calls=[{"function": {"name": "f", "arguments": "{"}}], finish_reason="length")
    assert reply_of(message, QWEN36)["content"] == "So:"


@pytest.mark.parametrize(
    ("content", "reasoning", "answer", "closed"),
    [
        ("<think>", "", "", False),
        ("<think>\n", "", "", False),
        ("<think>\nR\n</think>", "R", "", True),
        ("<think>\nR\n</think>\n\n", "R", "", True),
        ("<think>\nR\n</think>\n\nha", "R", "ha", True),
        ("R\n</think>\n\nha", "R", "ha", True),
    ],
)
def test_a_cut_says_whether_the_text_itself_closed_the_thought(
    content: str, reasoning: str, answer: str, closed: bool
) -> None:
    conversation = row_of({"messages": [user(), assistant(content, finish_reason="length")]}, QWEN36)
    assert conversation.messages[1] == assistant(answer, reasoning_content=reasoning)
    assert conversation.closed == ({1} if closed else frozenset())


def test_a_complete_reply_has_no_cut_to_close() -> None:
    assert row_of({"messages": [user(), assistant("<think>R</think>ok")]}).closed == frozenset()


def test_a_complete_reply_with_an_open_tag_is_answer_text() -> None:
    assert reply_of(assistant("<think>\nhalf"), QWEN36)["content"] == "<think>\nhalf"


# --- tool calls


def calling(arguments: Any) -> dict[str, Any]:
    return assistant(
        "", tool_calls=[{"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}]
    )


def arguments_of(message: dict[str, Any]) -> Any:
    return reply_of(message)["tool_calls"][0]["function"]["arguments"]


def test_arguments_that_spell_an_object_are_that_object() -> None:
    spelled, plain = calling('{"city": "M\\u00e1laga", "n": 1.0}'), calling({"city": "Málaga", "n": 1.0})
    assert reply_of(spelled) == reply_of(plain)
    assert arguments_of(spelled) == {"city": "Málaga", "n": 1.0}


@pytest.mark.parametrize("text", ["{city:", "null", "[1]", "", "7", '"x"'])
def test_arguments_that_spell_no_object_stay_text(text: str) -> None:
    assert arguments_of(calling(text)) == text


def test_arguments_keep_every_digit_and_the_order_of_keys() -> None:
    arguments = arguments_of(calling('{"z": 18446744073709551617, "a": 1}'))
    assert list(arguments.items()) == [("z", 18446744073709551617), ("a", 1)]


def test_missing_arguments_are_no_arguments() -> None:
    assert arguments_of(calling(None)) == {}
    assert arguments_of(assistant(None, tool_calls=[{"function": {"name": "f"}}])) == {}


@pytest.mark.parametrize(
    "message",
    [
        assistant(None, tool_calls=[{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]),
        assistant(None, tool_calls=[{"function": {"name": "f", "arguments": '{"x": 1}'}, "id": None}]),
        assistant(None, tool_calls=[{"name": "f", "arguments": '{"x":1}'}]),
        assistant(None, tool_calls='[{"name": "f", "arguments": {"x": 1}}]'),
        assistant(None, function_call={"name": "f", "arguments": '{"x": 1}'}),
        assistant(None, function_call={"name": "f", "arguments": '{"x": 1}'}, tool_calls=[]),
    ],
)
def test_every_spelling_of_a_tool_call_is_openais(message: dict[str, Any]) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    assert reply_of(message) == assistant("", reasoning_content="", tool_calls=[call])


def test_no_tool_calls_leave_no_key() -> None:
    assert "tool_calls" not in reply_of(assistant("ok", tool_calls=[]))


@pytest.mark.parametrize("calls", [7, {"name": "f"}, "f(x)", [None], ["f"], [{}], [{"function": {"name": 7}}], [[]]])
def test_calls_that_name_no_function_are_a_shape_fault(calls: Any) -> None:
    reason, detail = reject_with(assistant("", tool_calls=calls))
    assert reason == "shape"
    assert "messages[1].tool_calls" in detail


def test_the_row_that_was_read_is_not_changed() -> None:
    row = {"messages": [user(), calling('{"x": 1}') | {"thinking": "R", "content": None, "weight": 0}]}
    before = repr(row)
    parse_row(row, RunConfig(input="x"), QWEN3)
    assert repr(row) == before


# --- as templates render it


@functools.cache
def compiled(path: Path) -> Template:
    """A template of the trl wheel, without the marks of what is trained."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    environment.globals["strftime_now"] = "2026-01-01".format
    return environment.from_string(re.sub(r"{%-?\s*(end)?generation\s*-?%}", "", path.read_text(encoding="utf-8")))


def rendered(name: str, message: dict[str, Any], traits: TemplateTraits, folder: Path) -> str:
    """A user's and an assistant's message as the template writes them."""
    conversation = row_of({"messages": [user(), message]}, traits)
    template = compiled(folder / "templates" / f"{name}.jinja")
    return template.render(messages=list(conversation.messages), bos_token="<s>")


@pytest.mark.parametrize(
    ("name", "field", "reply"),
    [
        ("qwen3", "reasoning_content", "<think>\nR\n</think>\n\nok<|im_end|>"),
        ("qwen3_6", "reasoning_content", "<think>\nR\n</think>\n\nok<|im_end|>"),
        ("glm4moe", "reasoning_content", "<think>R</think>\nok"),
        ("gptoss", "thinking", "analysis<|message|>R<|end|><|start|>assistant<|channel|>final<|message|>ok<|return|>"),
        ("lfm2_2_5", "thinking", "<think>R</think>ok<|im_end|>"),
        ("gemma4_v5", "reasoning", "<|channel>thought\nR\n<channel|>ok<turn|>"),
        ("nemotron_3_super", "reasoning_content", "<think>\nR\n</think>\nok<|im_end|>"),
    ],
)
def test_every_spelling_of_reasoning_renders_alike(name: str, field: str, reply: str, material: Path) -> None:
    traits = TemplateTraits(field, QWEN3.opens_thinking)
    texts = {rendered(name, message, traits, material).rstrip("\n") for message in SPELLINGS}
    assert len(texts) == 1
    assert texts.pop().endswith(reply)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_6", "glm4moe", "gemma4_v5"])
def test_both_spellings_of_arguments_render_alike_and_unescaped(name: str, material: Path) -> None:
    texts = {rendered(name, calling(spelled), QWEN3, material) for spelled in ('{"a": "Málaga"}', {"a": "Málaga"})}
    (text,) = texts
    assert "Málaga" in text
    assert "\\" not in text


# --- what servers and columns of strings leave behind


@pytest.mark.parametrize("reason", ["length", "max_tokens", "MAX_TOKENS", "max_output_tokens", "model_length"])
def test_a_limit_that_ended_the_text_cut_it(reason: str) -> None:
    assert is_cut(reason)
    assert is_cut({"type": reason, "length": 8})  # as SGLang writes it


@pytest.mark.parametrize("reason", ["abort", "content_filter", "error", "insufficient_system_resource"])
def test_what_the_model_did_not_end_itself_is_cut(reason: str) -> None:
    assert is_cut(reason)


@pytest.mark.parametrize(
    "reason", ["stop", "tool_calls", "eos", "end_turn", "", None, 7, {"type": "stop"}, {}, ["length"]]
)
def test_any_other_finish_reason_cuts_nothing(reason: Any) -> None:
    assert not is_cut(reason)


@pytest.mark.parametrize("name", ["refusal", "audio"])
def test_a_message_that_says_what_no_template_writes_is_rejected(name: str) -> None:
    message = {"role": "assistant", "content": None, name: "I cannot."}
    reject = reject_of({"messages": [user(), message]})
    assert (reject.reason, reject.detail.split(" is ")[0]) == ("part", f"messages[1].{name}")
    assert row_of({"messages": [user(), {**message, "content": "No."}]}).trained == (1,)
    assert row_of({"messages": [user(), {**message, "content": "No.", name: None}]}).trained == (1,)


@pytest.mark.parametrize(
    "content", ["ok", "<think>\nwhy\n</think>\n\nok", "why\n</think>\n\nok", "\n<think>why</think>ok"]
)
@pytest.mark.parametrize("field", ["why", "<think>\nwhy\n</think>", "<think>why"])
def test_a_thought_that_is_handed_over_twice_is_thought_once(content: str, field: str) -> None:
    found = row_of({"messages": [user(), assistant(content) | {"reasoning_content": field}]}).messages[1]
    assert (found["reasoning_content"], found["content"]) == ("why", "ok")


@pytest.mark.parametrize("content", ["<think>other</think>ok", "</think>ok", "use </think> so", "<think>why"])
def test_tags_that_repeat_no_thought_stay_in_the_answer(content: str) -> None:
    found = row_of({"messages": [user(), assistant(content) | {"reasoning_content": "why"}]}).messages[1]
    assert (found["reasoning_content"], found["content"]) == ("why", content)


@pytest.mark.parametrize("blank", ["", " ", "null"])
def test_a_column_of_strings_without_calls_has_none(blank: str) -> None:
    message = assistant("ok") | {"tool_calls": blank, "function_call": blank}
    found = row_of({"messages": [user(), message], "tools": blank, "documents": blank})
    assert ("tool_calls" in found.messages[1], found.tools) == (False, None)


def test_blank_template_arguments_are_none() -> None:
    assert row_of({"messages": [user(), assistant()], "chat_template_kwargs": ""}).template_kwargs == {}
