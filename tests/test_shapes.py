"""Every shape of the contract is found per row, the most specific wins, and none is ever read as another."""

from __future__ import annotations

from typing import Any

import pytest

from etl.config import RunConfig
from etl.errors import UsageError
from etl.records import Conversation, Reject
from etl.shapes import SHAPES, look_up
from tests.parsing import LLAMA3, assistant, parse_all, reject_of, row_of, rows_of, user

HI_OK = (user("Hi"), assistant("ok"))
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
CHOICES = [{"index": 0, "message": assistant("ok"), "finish_reason": "stop"}]

ROWS: dict[str, dict[str, Any]] = {
    "tokenized": {"prompt_token_ids": [1, 2], "token_ids": [3]},
    "batch": {
        "custom_id": "r1",
        "request": {"messages": [user()]},
        "response": {"status_code": 200, "body": {"choices": CHOICES}},
    },
    "choices": {"messages": [user()], "choices": CHOICES},
    "prompt": {"prompt": "Hi", "completion": "ok"},
    "messages": {"messages": [user(), assistant()]},
    "conversations": {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "ok"}]},
    "alpaca": {"instruction": "Hi", "input": "", "output": "ok"},
    "text": {"text": "Hi ok"},
}


def plain(conversation: Conversation) -> tuple[dict[str, Any], ...]:
    return conversation.messages


@pytest.mark.parametrize("shape", ROWS)
def test_each_shape_is_found_and_named(shape: str) -> None:
    conversation = row_of(ROWS[shape], LLAMA3)
    assert conversation.shape == shape
    assert (conversation.choice, conversation.turn) == (0, -1)
    if shape not in {"text", "tokenized"}:
        assert conversation.messages == HI_OK
        assert conversation.trained == (1,)


@pytest.mark.parametrize("shape", ROWS)
def test_of_two_shapes_in_one_row_the_more_specific_wins(shape: str) -> None:
    order = list(SHAPES)
    for other in order[order.index(shape) + 1 :]:
        assert row_of({**ROWS[other], **ROWS[shape]}, LLAMA3).shape == shape


@pytest.mark.parametrize("shape", ROWS)
def test_a_forced_shape_is_read_or_rejected_and_never_another(shape: str) -> None:
    for other, row in ROWS.items():
        items = parse_all(row, LLAMA3, shape=shape)
        for item in items:
            if isinstance(item, Conversation):
                assert item.shape == shape
                assert other == shape or (shape, other) == ("messages", "choices")  # its request alone
            else:
                assert item.reason == "shape"


@pytest.mark.parametrize("shape", ROWS)
def test_null_in_the_fields_of_more_specific_shapes_is_absence(shape: str) -> None:
    nulls = dict.fromkeys(("prompt_token_ids", "token_ids", "response", "choices", "prompt", "completion", "messages"))
    assert row_of({**nulls, **ROWS[shape]}, LLAMA3).shape == shape


@pytest.mark.parametrize("shape", ROWS)
def test_a_value_in_an_unused_field_never_rejects_a_row(shape: str) -> None:
    wild = {"meta": [None, {"a": [[]]}], "score": 1e300, "documents": "none", "extra": {"messages": 7}, "label": True}
    assert row_of({**wild, **ROWS[shape]}, LLAMA3) == row_of(ROWS[shape], LLAMA3)


@pytest.mark.parametrize("row", [None, [], [1], "x", 7, 1.5, True, [{"messages": [user(), assistant()]}]])
def test_a_line_that_is_no_object_is_a_shape_reject(row: Any) -> None:
    reject = reject_of(row)
    assert reject.reason == "shape"
    assert "not an object" in reject.detail


@pytest.mark.parametrize(
    "row", [{}, {"foo": 1}, {"messages": "Hi"}, {"messages": {}}, {"messages": []}, {"prompt": "x"}]
)
def test_a_row_of_no_known_shape_says_what_was_seen(row: dict[str, Any]) -> None:
    reject = reject_of(row)
    assert reject.reason == "shape"
    assert not row or next(iter(row)) in reject.detail


# --- tokenized


def test_token_ids_are_used_as_they_are() -> None:
    conversation = row_of({"prompt_token_ids": [], "token_ids": [5, 0, 2147483647], "id": "t"})
    assert conversation.token_ids == ([], [5, 0, 2147483647])
    assert conversation.messages == ()
    assert conversation.completion_tokens == 3


@pytest.mark.parametrize("bad", [[-1], [2**31], [1.0], [True], ["1"], [None], [[1]]])
def test_ids_that_are_none_are_a_shape_reject(bad: list[Any]) -> None:
    assert reject_of({"prompt_token_ids": [1], "token_ids": bad}).reason == "shape"
    assert reject_of({"prompt_token_ids": bad, "token_ids": [1]}).reason == "shape"


def test_a_completion_that_came_as_ids_and_was_cut_is_counted_or_rejected() -> None:
    row = {"prompt_token_ids": [1], "token_ids": [2], "finish_reason": "length"}
    assert row_of(row).counts == {"truncated_rows": 1}
    assert row_of({**row, "finish_reason": "stop"}).counts == {}
    assert reject_of(row, truncated_completions="reject").reason == "truncated"


def test_token_ids_beside_messages_only_record_the_length() -> None:
    conversation = row_of({**ROWS["messages"], "token_ids": [1, 2, 3]})
    assert (conversation.shape, conversation.completion_tokens) == ("messages", 3)


# --- batch output and choices


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [user()], "response": {"body": {"choices": CHOICES}}},
        {"request": {"messages": [user()]}, "response": {"body": {"choices": CHOICES}}},
        {"body": {"messages": [user()]}, "response": {"choices": CHOICES}},
        {"request": {"body": {"messages": [user()]}}, "response": {"choices": CHOICES}},
        {"messages": None, "body": {"messages": [user()]}, "response": {"choices": CHOICES, "body": None}},
    ],
)
def test_batch_output_finds_its_request(row: dict[str, Any]) -> None:
    conversation = row_of(row, LLAMA3)
    assert (conversation.shape, conversation.messages, conversation.trained) == ("batch", HI_OK, (1,))


def test_tools_and_template_arguments_of_the_request_are_honoured() -> None:
    request = {"messages": [user()], "tools": [{"a": 1}], "chat_template_kwargs": {"enable_thinking": False}}
    conversation = row_of({"body": request, "response": {"choices": CHOICES}})
    assert conversation.tools == [{"a": 1}]
    assert conversation.template_kwargs == {"enable_thinking": False}


def test_batch_output_without_its_request_is_a_shape_reject() -> None:
    reject = reject_of({"custom_id": "r1", "response": {"body": {"choices": CHOICES}}})
    assert reject.reason == "shape"
    assert "messages" in reject.detail


def test_a_failed_request_is_a_shape_reject_although_it_holds_messages() -> None:
    row = {"messages": [user(), assistant(), user()], "response": {"status_code": 500, "body": {"error": "x"}}}
    reject = reject_of(row)
    assert reject.reason == "shape"
    assert "500" in reject.detail


def test_several_choices_are_one_row_each() -> None:
    choices = [
        {"message": assistant(text), "finish_reason": reason} for text, reason in (("a", "stop"), ("b", "length"))
    ]
    first, second = rows_of({"messages": [user()], "choices": choices, "id": "x"}, LLAMA3)
    assert (first.messages[1]["content"], second.messages[1]["content"]) == ("a", "b")
    assert (first.choice, second.choice) == (0, 1)
    assert (first.cut, second.cut) == (frozenset(), frozenset({1}))
    assert first.row_id == second.row_id == "x"


def test_a_rows_finish_reason_holds_for_a_choice_that_gives_none() -> None:
    choices = [{"message": assistant("a")}, {"message": assistant("b"), "finish_reason": "stop"}]
    first, second = rows_of({"messages": [user()], "choices": choices, "finish_reason": "length"})
    assert (first.cut, second.cut) == (frozenset({1}), frozenset())


def test_a_faulty_choice_costs_no_other() -> None:
    row = {
        "messages": [user()],
        "choices": [{"message": assistant("a")}, None, {}, {"message": assistant(7)}, *CHOICES],
    }
    items = parse_all(row)
    assert [isinstance(item, Reject) for item in items] == [False, True, True, True, False]
    assert [item.choice for item in items] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("choices", [[], [None]])
def test_a_row_for_which_nothing_was_generated_is_one_reject(choices: list[Any]) -> None:
    reject = reject_of({"messages": [user(), assistant(), user()], "choices": choices})
    assert (reject.reason, reject.choice) == ("shape", 0)


@pytest.mark.parametrize("choices", [["a", "b"], [1, 2], "abc", 7, None])
def test_choices_that_are_answers_to_tick_are_an_unused_field(choices: Any) -> None:
    assert row_of({**ROWS["messages"], "choices": choices}).shape == "messages"


def test_a_choice_without_a_role_is_the_assistants() -> None:
    assert row_of({"messages": [user()], "choices": [{"message": {"content": "ok"}}]}, LLAMA3).messages == HI_OK


def test_text_choices_answer_a_prompt() -> None:
    conversation = row_of({"prompt": "Hi", "choices": [{"text": "ok"}]}, LLAMA3)
    assert (conversation.messages, conversation.trained) == (HI_OK, (1,))


# --- prompt + completion


def test_completion_is_believed_before_response() -> None:
    assert row_of({"prompt": "Hi", "completion": "ok", "response": "no"}, LLAMA3).messages == HI_OK
    assert row_of({"prompt": "Hi", "completion": None, "response": "ok"}, LLAMA3).messages == HI_OK


@pytest.mark.parametrize("prompt", ["Hi", [user("Hi")]])
@pytest.mark.parametrize("completion", ["ok", [assistant("ok")]])
def test_prompt_and_completion_are_text_or_messages(prompt: Any, completion: Any) -> None:
    conversation = row_of({"prompt": prompt, "response": completion}, LLAMA3)
    assert (conversation.messages, conversation.trained) == (HI_OK, (1,))


def test_assistant_turns_in_the_prompt_are_context() -> None:
    row = {"prompt": [user(), assistant("shot"), user()], "completion": [assistant("a"), user(), assistant("b")]}
    assert row_of(row).trained == (3, 5)
    assert [c.turn for c in rows_of(row, turns="expand")] == [3, 5]


@pytest.mark.parametrize("bad", [["Hi"], [None], [[user()]], [{}]])
def test_a_prompt_of_anything_else_is_a_shape_reject(bad: Any) -> None:
    assert reject_of({"prompt": bad, "completion": "ok"}).reason == "shape"
    assert reject_of({"prompt": "Hi", "completion": bad}).reason == "shape"


def test_a_prompt_without_its_completion_is_a_shape_reject() -> None:
    assert reject_of({"prompt": "Hi", "completion": None}).reason == "shape"


# --- conversations


@pytest.mark.parametrize(
    ("speaker", "role"),
    [
        ("human", "user"),
        ("user", "user"),
        ("gpt", "assistant"),
        ("assistant", "assistant"),
        ("system", "system"),
        ("tool", "tool"),
        ("observation", "tool"),
        ("narrator", "narrator"),
    ],
)
def test_speakers_have_roles_and_unknown_ones_stay(speaker: str, role: str) -> None:
    assert row_of({"conversations": [{"from": speaker, "value": "x"}]}).messages[0]["role"] == role


def test_the_role_map_comes_before_the_speakers_usual_role_and_after_it() -> None:
    turns = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "ok"}]
    conversation = row_of({"conversations": turns}, role_map={"human": "system", "assistant": "model"})
    assert [message["role"] for message in conversation.messages] == ["system", "model"]


@pytest.mark.parametrize(
    "value", ['{"name": "f", "arguments": {"x": 1}}', '[{"name": "f", "arguments": "{\\"x\\": 1}"}]']
)
def test_a_function_call_turn_is_a_tool_call(value: str) -> None:
    message = row_of({"conversations": [{"from": "function_call", "value": value}]}, LLAMA3).messages[0]
    assert message == assistant("", tool_calls=[CALL])


def test_a_broken_function_call_stays_the_assistants_text() -> None:
    assert row_of({"conversations": [{"from": "function_call", "value": "{f"}]}, LLAMA3).messages[0] == assistant("{f")


@pytest.mark.parametrize("turn", [None, {}, {"value": "x"}, {"from": None, "value": "x"}, {"from": "gpt", "value": 7}])
def test_a_turn_without_a_speaker_or_text_is_a_shape_reject(turn: Any) -> None:
    assert reject_of({"conversations": [{"from": "human", "value": "Hi"}, turn]}).reason == "shape"


def test_a_system_text_beside_the_conversation_comes_first() -> None:
    assert row_of({**ROWS["conversations"], "system": "S"}).messages[0] == {"role": "system", "content": "S"}
    assert row_of({**ROWS["alpaca"], "system": "S"}).messages[0] == {"role": "system", "content": "S"}
    assert len(row_of({**ROWS["conversations"], "system": " "}).messages) == 2


# --- Alpaca and text


def test_alpacas_input_follows_its_instruction() -> None:
    messages = row_of({"instruction": "Sum", "input": "1+1", "output": "2"}, LLAMA3).messages
    assert messages == (user("Sum\n\n1+1"), assistant("2"))


def test_text_is_kept_to_the_character() -> None:
    assert row_of({"text": " <|im_end|>\r\n\u0000"}).text == " <|im_end|>\r\n\u0000"


# --- tools, arguments, documents


@pytest.mark.parametrize("tools", [[{"a": 1}], '[{"a": 1}]', {"a": 1}, '{"a": 1}', ['{"a": 1}']])
def test_tools_come_as_a_list_or_as_json_text(tools: Any) -> None:
    assert row_of({**ROWS["messages"], "tools": tools}).tools == [{"a": 1}]


@pytest.mark.parametrize("tools", [None, [], "", " ", "null", "[]"])
def test_no_tools_are_none(tools: Any) -> None:
    assert row_of({**ROWS["messages"], "tools": tools}).tools is None


@pytest.mark.parametrize("tools", ["[{", "hammer", 7, [None], ["x"], [[]], "7"])
def test_tools_that_are_none_are_a_shape_reject(tools: Any) -> None:
    reject = reject_of({**ROWS["messages"], "tools": tools})
    assert (reject.reason, "tools" in reject.detail) == ("shape", True)


def test_the_tools_of_one_row_take_no_keys_from_another() -> None:
    tools = [{"function": {"parameters": {"properties": {name: {"type": "string"}}}}} for name in "ab"]
    assert [row_of({**ROWS["messages"], "tools": [tool]}).tools for tool in tools] == [[tools[0]], [tools[1]]]


def test_a_null_inside_a_tools_description_is_the_rows_own() -> None:
    assert row_of({**ROWS["messages"], "tools": [{"default": None}]}).tools == [{"default": None}]


def test_template_arguments_of_the_command_line_win() -> None:
    row = {**ROWS["messages"], "chat_template_kwargs": {"a": 1, "b": 1, "add_generation_prompt": True}}
    arguments = row_of(row, chat_template_kwargs={"b": 2, "c": 2}, template_arg={"c": 3}).template_kwargs
    assert arguments == {"a": 1, "b": 2, "c": 3}


def test_template_arguments_may_be_json_text() -> None:
    assert row_of({**ROWS["messages"], "chat_template_kwargs": '{"a": 1}'}).template_kwargs == {"a": 1}


@pytest.mark.parametrize("arguments", [[], 7, "x", True])
def test_template_arguments_that_are_none_are_a_shape_reject(arguments: Any) -> None:
    assert reject_of({**ROWS["messages"], "chat_template_kwargs": arguments}).reason == "shape"


def test_documents_pass_through_and_other_things_of_that_name_do_not() -> None:
    assert row_of({**ROWS["messages"], "documents": [{"title": "T"}]}).documents == [{"title": "T"}]
    for other in (None, [], "x", ["x"], 7):
        assert row_of({**ROWS["messages"], "documents": other}).documents is None


# --- --field


def test_a_field_points_elsewhere() -> None:
    row = {"my": {"path": [user(), assistant()]}, "messages": "unused"}
    assert row_of(row, LLAMA3, field={"messages": "my.path"}).messages == HI_OK


def test_a_field_that_is_not_there_is_absent_and_said() -> None:
    reject = reject_of(ROWS["messages"], field={"messages": "my.path"})
    assert (reject.reason, reject.detail) == (
        "shape",
        "no known shape in the keys messages; nothing at --field messages=my.path",
    )


def test_a_field_that_no_shape_reads_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="--field mesages"):
        RunConfig(input="x", field={"mesages": "my.path"})


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("a", {"b": [{"c": 1}]}),
        ("a.b.0.c", 1),
        ("a.b.1.c", None),
        ("a.b", [{"c": 1}]),
        ("x.y", 2),
        ("a.x.y", None),
        ("", None),
    ],
)
def test_a_path_goes_through_objects_and_lists_and_a_whole_key_comes_first(path: str, found: Any) -> None:
    assert look_up({"a": {"b": [{"c": 1}]}, "x.y": 2, "x": {"y": 3}}, path) == found


# --- what stands beside the messages


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Hi", "response": "ok"},
        {"prompt": [user("Hi")], "completion": "ok"},
        {"instruction": "Hi", "output": "ok"},
        {"messages": [user("Hi")], "response": "ok"},
    ],
)
def test_reasoning_beside_a_plain_answer_is_the_answers(row: dict[str, Any], name: str) -> None:
    conversation = row_of({**row, name: "because"})
    assert conversation.messages[-1] == assistant("ok") | {"reasoning_content": "because"}
    assert row_of({**row, name: {"effort": "high"}}).messages[-1]["reasoning_content"] == ""  # a request's, no text


def test_reasoning_beside_a_choices_answer_is_that_answers() -> None:
    choices = [
        {"text": "a", "reasoning": "why a"},
        {"message": assistant("b"), "reasoning_content": "why b"},
        {"message": assistant("c") | {"reasoning": "why c"}, "reasoning_content": "not this"},
    ]
    found = [row.messages[-1] for row in rows_of({"messages": [user()], "choices": choices})]
    assert [message["reasoning_content"] for message in found] == ["why a", "why b", "why c"]


def test_reasoning_elsewhere_is_pointed_to() -> None:
    row = {"prompt": "Hi", "completion": "ok", "out": {"cot": "because"}}
    found = row_of(row, field={"reasoning_content": "out.cot"})
    assert found.messages[-1]["reasoning_content"] == "because"


SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize("shape", ["batch", "choices", "prompt", "messages", "conversations", "alpaca"])
@pytest.mark.parametrize("system", ["Be brief.", [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]])
def test_a_system_text_beside_the_messages_opens_the_conversation(shape: str, system: Any) -> None:
    conversation = row_of({**ROWS[shape], "system": system}, LLAMA3)
    assert conversation.messages == (SYSTEM, *HI_OK)
    assert conversation.trained == (2,)


@pytest.mark.parametrize("role", ["system", "developer"])
def test_messages_that_begin_with_a_system_text_of_their_own_keep_it(role: str) -> None:
    messages = [{"role": role, "content": "Own."}, *HI_OK]
    assert row_of({"messages": messages, "system": "Other."}, LLAMA3).messages == tuple(messages)


@pytest.mark.parametrize("system", ["", "  ", None, 7, {"os": "linux"}, [], ["linux"]])
def test_a_field_named_system_that_is_no_text_is_unused(system: Any) -> None:
    assert row_of({"messages": list(HI_OK), "system": system}, LLAMA3).messages == HI_OK


@pytest.mark.parametrize("failed", [{"response": None}, {"choices": None}])
def test_a_failed_request_does_not_train_the_history_that_it_was_asked_with(failed: dict[str, Any]) -> None:
    row = {"messages": [user(), assistant(), user()], "error": {"code": "batch_expired"}, **failed}
    reject = reject_of(row)
    assert (reject.reason, reject.detail) == ("shape", 'the request failed: {"code":"batch_expired"}')
    assert row_of({**row, "error": None}).trained == (1,)


def test_a_choice_that_failed_is_rejected_alone() -> None:
    broken = {"message": assistant("") | {"reasoning": "half"}, "error": {"code": 502}, "finish_reason": "error"}
    good, bad = parse_all({"messages": [user()], "choices": [*CHOICES, broken]})
    assert isinstance(good, Conversation)
    assert isinstance(bad, Reject)
    assert (bad.reason, bad.detail, bad.choice) == ("shape", 'choices[1] failed: {"code":502}', 1)


@pytest.mark.parametrize("name", ["completion", "response"])
def test_a_text_beside_messages_that_await_a_reply_is_the_reply(name: str) -> None:
    conversation = row_of({"messages": [user("Hi")], name: "ok", "finish_reason": "length"}, LLAMA3)
    assert (conversation.shape, conversation.messages, conversation.cut) == ("messages", HI_OK, frozenset({1}))
    assert row_of({"messages": list(HI_OK), name: "more"}, LLAMA3).messages == HI_OK


def test_a_reply_that_the_request_already_holds_is_not_said_twice() -> None:
    choices = [*CHOICES, {"message": assistant("other")}]
    first, second = rows_of({"messages": list(HI_OK), "choices": choices}, LLAMA3)
    assert first.messages == HI_OK
    assert second.messages == (user("Hi"), assistant("other"))
    earlier = row_of({"messages": [*HI_OK, user("More")], "choices": CHOICES}, LLAMA3)
    assert earlier.messages == (*HI_OK, user("More"), assistant("ok"))


def test_the_requests_settings_are_found_wherever_its_messages_are() -> None:
    body = {"messages": [user()], "tools": [CALL], "chat_template_kwargs": {"enable_thinking": False}}
    answer = {"response": {"body": {"choices": CHOICES}}}
    for row, field in (
        ({"body": body, **answer}, {}),
        ({"body": body, **answer}, {"messages": "body.messages"}),
        ({"messages": [user()], "request": {"body": {**body, "messages": None}}, **answer}, {}),
    ):
        found = row_of(row, field=field)
        assert (found.tools, found.template_kwargs) == ([CALL], {"enable_thinking": False})


def test_a_cut_text_is_counted_and_can_be_rejected() -> None:
    row = {"text": "abc", "finish_reason": "length"}
    assert row_of(row).counts == {"truncated_rows": 1}
    assert reject_of(row, truncated_completions="reject").reason == "truncated"
