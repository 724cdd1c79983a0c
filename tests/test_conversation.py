"""A line gives its candidate rows, each a conversation or a reject with a true reason, and never an exception."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etl.config import RunConfig
from etl.conversation import parse_row
from etl.records import REASONS, Conversation, Reject
from tests.parsing import (
    QWEN3,
    QWEN36,
    SOURCE,
    assistant,
    parse_all,
    parse_line,
    reject_of,
    row_of,
    rows_of,
    user,
)

CHAT = [user(), assistant("a"), user(), assistant("b")]


# --- where a row is from


@pytest.mark.parametrize(
    ("fields", "row_id"),
    [
        ({"custom_id": "c", "id": "i", "uuid": "u"}, "c"),
        ({"id": "i", "uuid": "u"}, "i"),
        ({"uuid": "u"}, "u"),
        ({"id": "007"}, "007"),
        ({"id": "1344800117571260417"}, "1344800117571260417"),
        ({"id": 0}, "0"),
        ({"id": 18446744073709551617}, "18446744073709551617"),
        ({"id": None, "uuid": "u"}, "u"),
        ({"id": "", "uuid": "u"}, "u"),
        ({"id": True, "uuid": 1.5}, f"{SOURCE}@7"),
        ({"id": ["x"], "custom_id": {}}, f"{SOURCE}@7"),
        ({}, f"{SOURCE}@7"),
    ],
)
def test_the_row_id_is_the_first_that_is_given(fields: dict[str, Any], row_id: str) -> None:
    assert row_of({"messages": CHAT, **fields}).row_id == row_id


def test_an_id_of_any_length_keeps_its_digits() -> None:
    (item,) = parse_line(b'{"text": "x", "id": ' + b"7" * 5000 + b"}")
    assert isinstance(item, Conversation)
    assert item.row_id == "7" * 5000
    assert type(item.row_id) is str


def test_a_row_says_where_it_is_from() -> None:
    conversation = row_of({"messages": CHAT})
    assert (conversation.source, conversation.source_offset) == (SOURCE, 7)


def test_a_reject_holds_the_line_and_its_place() -> None:
    reject = reject_of(b'{"messages": [null]}')
    assert (reject.source, reject.offset, reject.size, reject.number) == (SOURCE, 7, 20, 3)
    assert (reject.choice, reject.turn, reject.raw) == (0, -1, b'{"messages": [null]}')


def test_a_loaded_row_is_parsed_alike() -> None:
    (item,) = parse_row({"id": "a", "messages": CHAT}, RunConfig(input=SOURCE), QWEN3)
    assert item == row_of({"id": "a", "messages": CHAT})._replace(source="", source_offset=0)
    (reject,) = parse_row({"messages": [None]}, RunConfig(input=SOURCE), QWEN3)
    assert isinstance(reject, Reject)
    assert reject.reason == "shape"


# --- which turns


def test_all_assistant_turns_may_be_trained() -> None:
    conversation = row_of({"messages": CHAT})
    assert (conversation.trained, conversation.turn) == ((1, 3), -1)


def test_turns_last_is_the_last_assistant_message_alone() -> None:
    assert row_of({"messages": [*CHAT, user()]}, turns="last").trained == (3,)
    assert row_of({"messages": [*CHAT[:3], assistant("b", train=False)]}, turns="last").trained == ()


def test_turns_expand_gives_each_trainable_message_with_what_came_before() -> None:
    tools = [{"name": "f"}]
    first, second = rows_of({"messages": [*CHAT, user("bye")], "tools": tools, "id": "x"}, turns="expand")
    assert [len(first.messages), len(second.messages)] == [2, 4]
    assert [first.trained, second.trained] == [(1,), (3,)]
    assert [first.turn, second.turn] == [1, 3]
    assert [first.choice, second.choice] == [0, 0]
    assert first.tools == second.tools == tools
    assert first.row_id == second.row_id == "x"


def test_expanding_several_choices_keeps_every_key_apart() -> None:
    choices = [{"message": assistant("x")}, {"message": assistant("y")}]
    items = rows_of({"messages": CHAT[:3], "choices": choices}, turns="expand")
    assert [(item.choice, item.turn) for item in items] == [(0, 1), (0, 3), (1, 1), (1, 3)]


@pytest.mark.parametrize("flag", [{"train": False}, {"weight": 0}, {"weight": 0.0}, {"train": True, "weight": 0}])
def test_a_message_can_be_kept_out_of_training(flag: dict[str, Any]) -> None:
    row = {"messages": [user(), assistant("a", **flag), user(), assistant("b")]}
    assert row_of(row).trained == (3,)
    assert [item.turn for item in rows_of(row, turns="expand")] == [3]


@pytest.mark.parametrize("flag", [{"train": True}, {"weight": 1}, {"weight": 0.5}, {"weight": None}, {"train": None}])
def test_other_weights_count_as_one(flag: dict[str, Any]) -> None:
    assert row_of({"messages": [user(), assistant("a", **flag)]}).trained == (1,)


@pytest.mark.parametrize("turns", ["all", "last", "expand"])
def test_a_row_that_trains_nothing_is_still_a_candidate(turns: str) -> None:
    for messages in ([user()], [user(), assistant("a", train=False)]):
        conversation = row_of({"messages": messages}, turns=turns)
        assert (conversation.trained, conversation.turn) == ((), -1)


# --- what was generated


@pytest.mark.parametrize("reason", ["length", "max_tokens", "MAX_TOKENS"])
def test_a_rows_finish_reason_cuts_its_last_assistant_message(reason: str) -> None:
    assert row_of({"messages": [*CHAT, user()], "finish_reason": reason}).cut == {3}


def test_a_messages_finish_reason_cuts_that_one() -> None:
    assert row_of({"messages": [user(), assistant("a", finish_reason="length"), *CHAT]}).cut == {1}


@pytest.mark.parametrize("reason", ["stop", "tool_calls", "eos", None, 7, ["length"], ""])
def test_other_finish_reasons_cut_nothing(reason: Any) -> None:
    assert row_of({"messages": CHAT, "finish_reason": reason}).cut == frozenset()


def test_a_users_finish_reason_cuts_nothing() -> None:
    assert row_of({"messages": [user("x", finish_reason="length"), assistant()]}).cut == frozenset()


def test_expanded_rows_know_the_cuts_of_their_own_messages() -> None:
    first, second = rows_of({"messages": CHAT, "finish_reason": "length"}, turns="expand")
    assert (first.cut, second.cut) == (frozenset(), frozenset({3}))


@pytest.mark.parametrize(
    ("fields", "recorded"),
    [
        ({"usage": {"completion_tokens": 12}}, 12),
        ({"usage": {"completion_tokens": 12}, "token_ids": [1]}, 12),
        ({"token_ids": [1, 2]}, 2),
        ({"usage": None, "token_ids": None}, None),
        ({"usage": {"completion_tokens": "12"}}, None),
        ({"usage": {"completion_tokens": -1}}, None),
        ({"usage": {"completion_tokens": True}}, None),
        ({"usage": 7}, None),
    ],
)
def test_recorded_completion_tokens(fields: dict[str, Any], recorded: int | None) -> None:
    assert row_of({"messages": CHAT, **fields}).completion_tokens == recorded


def test_recorded_tokens_belong_to_the_last_reply_alone() -> None:
    usage = {"completion_tokens": 12}
    expanded = rows_of({"messages": CHAT, "usage": usage}, turns="expand")
    assert [item.completion_tokens for item in expanded] == [None, 12]
    untrained = [*CHAT[:3], assistant("b", weight=0)]
    assert row_of({"messages": untrained, "usage": usage}).completion_tokens is None


def test_the_usage_of_several_choices_is_no_ones_alone() -> None:
    choices = [{"message": assistant("x"), "token_ids": [1, 2]}, {"message": assistant("y")}]
    row = {"messages": [user()], "choices": choices, "usage": {"completion_tokens": 12}}
    assert [item.completion_tokens for item in rows_of(row)] == [2, None]
    assert row_of({**row, "choices": choices[:1]}).completion_tokens == 12


# --- --keep


def test_kept_fields_are_strings_as_they_are_else_compact_json() -> None:
    row = {"messages": CHAT, "s": "é", "n": 18446744073709551617, "o": {"a": [1, None]}, "null": None, "b": True}
    kept = row_of(row, keep=["s", "n", "o", "null", "gone", "b", "o.a"]).kept
    assert kept == ("é", "18446744073709551617", '{"a":[1,null]}', None, None, "true", "[1,null]")


def test_every_candidate_of_a_row_keeps_alike() -> None:
    assert [item.kept for item in rows_of({"messages": CHAT, "k": "v"}, turns="expand", keep="k")] == [("v",), ("v",)]


# --- text that cannot be written


LONE = "x\ud83d"


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [user(LONE), assistant()]},
        {"messages": [user(), assistant(LONE)]},
        {"messages": [user(), assistant(reasoning=LONE)]},
        {"messages": [{"role": LONE, "content": "x"}]},
        {"messages": [user(name=LONE), assistant()]},
        {"messages": [user(), assistant([{"type": "text", "text": LONE}])]},
        {"messages": [user(), assistant(tool_calls=[{"name": "f", "arguments": {LONE: 1}}])]},
        {"messages": [user(), assistant(tool_calls=[{"name": "f", "arguments": json.dumps({"a": LONE})}])]},
        {"messages": CHAT, "tools": [{"description": LONE}]},
        {"messages": CHAT, "tools": json.dumps([{"description": LONE}])},
        {"messages": CHAT, "chat_template_kwargs": {"a": LONE}},
        {"messages": CHAT, "documents": [{"text": LONE}]},
        {"messages": CHAT, "id": LONE},
        {"messages": CHAT, "kept": {"a": [LONE]}},
        {"messages": CHAT, "kept": LONE},
        {"text": LONE},
        {"prompt": LONE, "completion": "ok"},
    ],
)
def test_a_lone_surrogate_in_text_that_is_used_rejects_the_row(row: dict[str, Any]) -> None:
    reject = reject_of(row, keep="kept")
    assert reject.reason == "encoding"
    reject.detail.encode()


@pytest.mark.parametrize(
    "more", [{"meta": LONE}, {LONE: 1}, {"uuid": LONE, "id": "i"}, {"usage": {"x": LONE}}, {"response": LONE}]
)
def test_a_lone_surrogate_in_a_field_that_is_not_used_does_not(more: dict[str, Any]) -> None:
    assert row_of({"messages": CHAT, **more}).messages == row_of({"messages": CHAT}).messages


def test_one_bad_choice_leaves_the_good_one() -> None:
    items = parse_all({"messages": [user()], "choices": [{"message": assistant(LONE)}, {"message": assistant("😀")}]})
    assert isinstance(items[0], Reject)
    assert isinstance(items[1], Conversation)
    assert items[1].messages[1]["content"] == "😀"


def test_details_quote_what_was_seen_but_stay_short_and_writable() -> None:
    reject = reject_of({"messages": [user([{"type": LONE * 10_000}])]})
    assert reject.reason == "part"
    assert len(reject.detail.encode()) < 5000


# --- anything at all


def test_deep_nesting_in_used_fields_is_a_row_or_a_reject() -> None:
    for depth in (200, 900, 1020, 5000):
        for start, end in (('{"messages":[{"role":"user","content":', "}]}"), ('{"text":"x","kept":', "}")):
            raw = (start + "[" * depth + "]" * depth + end).encode()
            (item,) = parse_line(raw, keep="kept")
            assert isinstance(item, Conversation) or item.reason in {"json", "part"}


def test_deep_nesting_in_a_field_that_nobody_uses_costs_nothing() -> None:
    messages = json.dumps([user("Hi"), assistant("ok")])
    raw = f'{{"messages": {messages}, "meta": {"[" * 5000}{"]" * 5000}, "id": "x"}}'.encode()
    (item,) = parse_line(raw)
    assert isinstance(item, Conversation)
    assert (item.row_id, len(item.messages)) == ("x", 2)
    (kept,) = parse_line(raw, keep="meta")
    assert isinstance(kept, Reject)
    assert (kept.reason, kept.detail) == ("json", "meta is nested too deep to be read")


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(alphabet=st.characters(exclude_categories=()), max_size=8)
    | st.sampled_from(["user", "assistant", "tool", "text", "<think>", "</think>", "length", '{"a": 1}', "[", "human"])
)
KEYS = st.sampled_from(
    [
        *("messages", "prompt", "completion", "response", "request", "body", "choices", "conversations", "system"),
        *("instruction", "input", "output", "text", "prompt_token_ids", "token_ids", "tools", "documents", "usage"),
        *("chat_template_kwargs", "finish_reason", "custom_id", "id", "role", "content", "from", "value", "type"),
        *("reasoning", "thinking", "reasoning_content", "tool_calls", "function", "name", "arguments", "message"),
        *("function_call", "train", "weight", "completion_tokens", "kept"),
    ]
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=5), max_leaves=25
)
TEXTS = st.text(max_size=8) | st.sampled_from(
    ["<think>\nx\n</think>\n\ny", "x</think>y", "<think>x", "<|im_end|>", "\n", " ", "a\u0000b", '{"a": "\\ud83d"}']
)
CALLS = st.fixed_dictionaries({"name": TEXTS, "arguments": TEXTS | st.dictionaries(TEXTS, VALUES, max_size=2)})
GOOD_MESSAGES = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "assistant", "tool"]), "content": TEXTS | st.none()},
    optional={
        "reasoning_content": TEXTS | st.none(),
        "thinking": TEXTS,
        "tool_calls": st.lists(CALLS, max_size=2),
        "train": st.booleans(),
        "weight": st.sampled_from([0, 1, 0.5]),
        "finish_reason": st.sampled_from(["stop", "length"]),
        "name": SCALARS,
        "extra": VALUES,
    },
)
CHATS = st.lists(GOOD_MESSAGES, min_size=1, max_size=5)
WILD_MESSAGES = st.dictionaries(KEYS, VALUES, max_size=4) | SCALARS
NEAR_ROWS = st.fixed_dictionaries(
    {"messages": CHATS},
    optional={
        "prompt": CHATS | TEXTS,
        "completion": CHATS | TEXTS | st.none(),
        "choices": st.lists(st.fixed_dictionaries({"message": GOOD_MESSAGES | WILD_MESSAGES}), max_size=3),
        "response": st.fixed_dictionaries({"choices": st.lists(st.fixed_dictionaries({"message": GOOD_MESSAGES}))}),
        "finish_reason": st.sampled_from(["stop", "length"]),
        "tools": st.lists(st.dictionaries(KEYS, VALUES, max_size=2), max_size=2) | st.sampled_from(["", "[", 7]),
        "chat_template_kwargs": st.dictionaries(KEYS | st.just("enable_thinking"), SCALARS, max_size=2),
        "usage": VALUES,
        "id": SCALARS,
        "kept": VALUES,
    },
)
WILD_ROWS = st.dictionaries(KEYS, VALUES | st.lists(GOOD_MESSAGES | WILD_MESSAGES, max_size=4), max_size=6)
ROWS = NEAR_ROWS | NEAR_ROWS | WILD_ROWS | VALUES
OPTIONS = st.fixed_dictionaries(
    {
        "shape": st.sampled_from(["auto", "auto", "messages", "prompt", "conversations", "alpaca", "batch", "choices"]),
        "turns": st.sampled_from(["all", "last", "expand"]),
        "keep": st.sampled_from([(), ("kept",), ("messages", "a.b")]),
        "field": st.sampled_from([{}, {"messages": "body.messages"}, {"prompt": "messages"}]),
    }
)


def require_sound(items: list[Conversation | Reject], turns: str) -> None:
    assert items
    assert len({(item.choice, item.turn) for item in items}) == len(items)
    for item in items:
        if isinstance(item, Reject):
            assert item.reason in REASONS
            item.detail.encode()
            continue
        assert all(item.messages[i]["role"] == "assistant" for i in {*item.trained, *item.cut, *item.closed})
        assert item.closed <= item.cut
        assert all(type(message["content"]) is str for message in item.messages)
        assert (item.turn == -1) or (turns == "expand" and item.trained == (item.turn,))
        "".join(message["content"] + message["role"] for message in item.messages).encode()
        "".join([item.row_id, *filter(None, item.kept)]).encode()


def require_a_reading(row: Any, options: dict[str, Any]) -> None:
    raw = json.dumps(row).encode()
    for traits in (QWEN3, QWEN36):
        items = parse_line(raw, traits, **options)
        require_sound(items, options["turns"])
        assert repr(parse_line(raw, traits, **options)) == repr(items)


@given(ROWS, OPTIONS)
@settings(max_examples=60, deadline=None)
def test_any_json_gives_rows_or_rejects(row: Any, options: dict[str, Any]) -> None:
    require_a_reading(row, options)


@pytest.mark.long
@given(ROWS, OPTIONS)
@settings(max_examples=10_000, deadline=None)
def test_any_of_ten_thousand_hostile_objects_gives_rows_or_rejects(row: Any, options: dict[str, Any]) -> None:
    require_a_reading(row, options)


GOOD = orjson.dumps({"messages": CHAT, "id": "x", "tools": [{"name": "f"}], "choices": None})


@given(st.lists(st.tuples(st.integers(0, len(GOOD)), st.integers(0, 6), st.binary(max_size=4)), min_size=1, max_size=4))
@settings(max_examples=150, deadline=None)
def test_any_mutation_of_a_good_line_gives_rows_or_rejects(edits: list[tuple[int, int, bytes]]) -> None:
    raw = GOOD
    for at, removed, inserted in edits:
        raw = raw[:at] + inserted + raw[at + removed :]
    require_sound(parse_line(raw), "all")
