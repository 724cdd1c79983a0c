"""What a row is made into hangs on the row alone: whatever rows the process has rendered before, and whatever the
texts have in common with the template's own.
"""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any, Final

import pytest

from etl.config import RunConfig
from etl.conversation import parse_row
from etl.errors import RowError
from etl.records import Message, Reject
from etl.rendering import render
from etl.template import ChatTemplate
from tests.chats import USER, ask, call, load_template, make_template, result, say, show, turn_of
from tests.material import MATERIAL

NAMES: Final = sorted(path.stem for path in (MATERIAL / "templates").glob("*.jinja"))
ROWS: Final = 40
MANY_ROWS: Final = 400

# --- rows drawn at random, of the template's own words ---

_LITERALS: Final = re.compile(r"<[^<>\s'\"]{1,30}>|\[/?[A-Z_]+\]|<\|[^|]+\|>|'((?:[^'\\\n]|\\.){1,40})'")
_WORDS: Final = (
    *("ok", "x", "the answer", "\n", "\n\n", " ", "", "é", "f", "city", "}}", "{}", '"}', "[", "'", "assistant"),
    *("<think>", "</think>", "<think>\n\n</think>\n\n", "<think>\nr\n</think>\n\n", "<tool_call>\n", "</tool_call>"),
)
_OPTIONS: Final[tuple[dict[str, Any], ...]] = (
    *({}, {}, {"turns": "expand"}, {"turns": "last"}, {"no_train_reasoning": True}, {"no_train_tool_calls": True}),
    *({"no_train_think_open": True}, {"no_train_end": True}, {"train_empty_think": True}),
    *({"control_tokens": "literal"}, {"control_tokens": "reject"}, {"truncated_completions": "train-end"}),
)


class Author:
    """Writes rows in words of which almost half are the template's."""

    def __init__(self, source: str, seed: int) -> None:
        self.draw = random.Random(seed)
        found = {match[1] or match[0] for match in _LITERALS.finditer(source)}
        self.literals = sorted(word.replace("\\n", "\n") for word in found) or ["x"]

    def text(self) -> str:
        draw = self.draw
        count = draw.choice((0, 1, 1, 1, 1, 2, 3))
        return "".join(draw.choice(self.literals if draw.random() < 0.45 else _WORDS) for _ in range(count))

    def call(self) -> dict[str, Any]:
        name = self.text() or "f" if self.draw.random() < 0.1 else self.draw.choice(("f", "g"))
        nested = {"a": self.text(), "b": self.draw.choice((1, True, None, [self.text()], {"c": self.text()}))}
        given: tuple[Any, ...] = (
            {},
            {"city": self.text()},
            nested,
            {"n": 3},
            "{broken",
            self.text(),
            {self.text(): "v"},
        )
        return call(name, self.draw.choice(given))

    def reply(self) -> Message:
        if self.draw.random() < 0.4:  # most rows are plain, and it is these that others may spoil
            return say("fine", self.draw.choice((None, "because")))
        message = say(self.text(), self.text() if self.draw.random() < 0.5 else None)
        if self.draw.random() < 0.35:
            message["tool_calls"] = [self.call() for _ in range(self.draw.choice((1, 1, 2, 3)))]
        if self.draw.random() < 0.07:
            message["finish_reason"] = "length"
        return message

    def row(self) -> dict[str, Any]:
        draw = self.draw
        messages = [{"role": "system", "content": self.text()}] if draw.random() < 0.3 else []
        for _ in range(draw.choice((1, 1, 1, 2))):
            messages += [ask(self.text()), self.reply()]
            if "tool_calls" in messages[-1] and draw.random() < 0.7:
                messages += [*(result(self.text()) for _ in messages[-1]["tool_calls"]), self.reply()]
            if draw.random() < 0.05:
                messages.append({"role": "system", "content": self.text()})
        thinking: dict[str, Any] = {"enable_thinking": True}
        kwargs = draw.choice(({}, {}, {}, thinking, {"enable_thinking": False}, {"preserve_thinking": True}))
        return {"messages": messages, **({"chat_template_kwargs": kwargs} if kwargs else {})}


def outcomes(template: ChatTemplate, row: dict[str, Any], options: dict[str, Any]) -> list[Any]:
    """What each candidate of a row is made into, or why not."""
    config = RunConfig(input="x", **options)
    found: list[Any] = []
    for item in parse_row(row, config, template.traits):
        if isinstance(item, Reject):
            found.append(item.reason)
            continue
        try:
            found.append(render(item, template, config))
        except RowError as error:
            found.append((error.reason, error.detail))
    return found


def forget(template: ChatTemplate) -> None:
    """Leave the template as it was before its first row."""
    template._memory.clear()
    template._sandbox._shapes.clear()
    template._sandbox._tries = template._sandbox._taken = 0


def compare(material: Path, name: str, rows: int, seed: int) -> int:
    """Rows one after the other, each beside itself alone; how many were rendered at least in part."""
    experienced, new = load_template(material, name), load_template(material, name)
    author = Author(experienced.source, seed)
    rendered, usual = 0, _OPTIONS[0]
    for at in range(rows):
        if at % ROWS == 0:
            forget(experienced)  # what spoils later rows is learned early
            usual = author.draw.choice(_OPTIONS)
        row, options = author.row(), usual if author.draw.random() < 0.9 else author.draw.choice(_OPTIONS)
        forget(new)
        found, alone = outcomes(experienced, row, options), outcomes(new, row, options)
        assert found == alone, f"{options} {row}"
        rendered += any(not isinstance(item, str | tuple) for item in alone)
    return rendered


@pytest.mark.parametrize("name", NAMES)
def test_a_row_comes_out_the_same_whatever_rows_came_before(material: Path, name: str) -> None:
    assert compare(material, name, ROWS, seed=1) > 0


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_many_rows_come_out_the_same_whatever_rows_came_before(material: Path, name: str) -> None:
    assert compare(material, name, MANY_ROWS, seed=3) > 0


# --- what the template asks of other messages' texts ---


def test_a_user_turn_that_the_template_takes_for_a_tools_answer_costs_no_row(material: Path) -> None:
    asked = say("<think>\nask\n</think>\n\n<tool_call>\n{}\n</tool_call>")
    messages = [ask("weather?"), asked, ask("<tool_response>\nsunny\n</tool_response>"), say("It is sunny.", "good")]
    for name in ("qwen3", "qwen3_6"):
        shown = show(load_template(material, name), messages)
        assert "[[<think>\nask\n</think>\n\n<tool_call>\n{}\n</tool_call><|im_end|>]]" in shown
        assert turn_of(shown) == "[[<think>\ngood\n</think>\n\nIt is sunny.<|im_end|>]]\n"


def test_a_user_text_that_ends_in_the_templates_own_switch_costs_no_row(material: Path) -> None:
    row = {"chat_template_kwargs": {"enable_thinking": False}}
    shown = show(load_template(material, "glm4moe"), [ask("Add 1 and 1 /nothink"), say("2")], row)
    assert shown.endswith("Add 1 and 1 /nothink<|assistant|>\n<think></think>\n[[2]]")


@pytest.mark.parametrize(
    "source",
    [
        (
            "{% for m in messages %}<|{{ m.role }}|>"
            "{{ m.content.replace('/no_think', '').rstrip() if m.role == 'system' else m.content }}</s>{% endfor %}"
        ),
        (
            "<|system|>{{ messages[0].content.replace('/no_think', '').rstrip() }}</s>"
            "{% for m in messages[1:] %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}"
        ),
    ],
    ids=["in the loop", "ahead of it"],
)
def test_a_system_text_from_which_the_template_takes_its_switch_costs_no_row(source: str) -> None:
    shown = show(make_template(source), [{"role": "system", "content": "Be brief. /no_think"}, USER, say("1")])
    assert shown.endswith("<|system|>Be brief.</s><|user|>Hi</s><|assistant|>[[1</s>]]")


def test_a_reply_may_quote_a_text_that_the_template_asks_about(material: Path) -> None:
    template, said = load_template(material, "qwen3_6"), "<tool_response>\nsunny\n</tool_response>"
    messages = [ask("weather?"), say("asked", "why"), ask(said), say(f"You sent {said}", "good")]
    alone = show(template, messages)
    assert turn_of(alone) == f"[[<think>\ngood\n</think>\n\nYou sent {said}<|im_end|>]]\n"
    assert show(template, messages) == alone


LOOKING: Final = (
    "{% for m in messages %}{% if m.role != 'tool' %}<|{{ m.role }}|>{{ m.content }}"
    "{% if m.role == 'assistant' and not loop.last and messages[loop.index].role == 'tool' %}"
    "<|obs|>{{ messages[loop.index].content }}{{ '!' if messages[loop.index].content.startswith('{') }}{% endif %}"
    "</s>{% endif %}{% endfor %}"
)
EACH: Final = "<|{{ m.role }}|>{{ m.content }}</s>"
SKIPPING: Final = "{% for m in messages %}{% if m.content[:1] != '#' %}" + EACH + "{% endif %}{% endfor %}"
AHEAD: Final = (
    "{{ '' if messages[0].content.startswith('#') else messages[0].content }}{% for m in messages[1:] %}"
    + EACH
    + "{% endfor %}"
)
LAST_RULES: Final = (
    "{% set kept = messages | selectattr('role', 'equalto', 'system') | map(attribute='content') | list %}"
    "<|system|>{{ kept[-1] }}</s>{% for m in messages if m.role != 'system' %}" + EACH + "{% endfor %}"
)


def test_another_text_that_may_lie_in_a_reply_unmarked_rejects_the_row() -> None:
    template = make_template(LOOKING)
    assert "[[" in show(template, [USER, say("A"), result("sunny"), say("B")])
    with pytest.raises(RowError) as error:
        show(template, [USER, say("A"), result('{"w": "sunny"}'), say("B")])
    assert error.value.reason == "mask"


@pytest.mark.parametrize("source", [SKIPPING, AHEAD])
def test_a_text_that_the_template_leaves_out_for_what_it_says_rejects_the_row(source: str) -> None:
    with pytest.raises(RowError) as error:
        show(make_template(source), [ask("# hidden"), ask("Hi"), say("ok")])
    assert error.value.reason == "role"


def test_of_several_texts_of_a_role_outside_the_loops_none_may_be_missing() -> None:
    template, rules = make_template(LAST_RULES), {"role": "system", "content": "rules"}
    assert "[[" in show(template, [ask("Q"), rules, say("A")])
    with pytest.raises(RowError) as error:
        show(template, [ask("Q says hi"), {"role": "system", "content": "hi"}, rules, say("A")])
    assert error.value.reason == "role"


# --- what a row must not teach ---


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (say("hello <|channel>thought x<channel|> world"), say("ok fine")),
        (say("Yes<|channel>thought\nunclosed"), say("Yes")),
    ],
)
def test_a_turn_that_the_template_shortens_teaches_nothing(material: Path, first: Message, then: Message) -> None:
    template = load_template(material, "gemma4")
    assert "[[" not in show(template, [USER, first])
    assert show(template, [USER, then]).endswith(f"<|turn>model\n[[{then['content']}<turn|>]]\n")


def test_reasoning_behind_the_calls_is_not_taken_for_reasoning_left_out(material: Path) -> None:
    template = load_template(material, "gemma4_v2")
    assert "[[" not in show(template, [USER, say("", "why", tool_calls=[call()])])
    shown = show(template, [USER, say("<think>\nr\n</think>\n\n", tool_calls=[call()])])
    assert shown.endswith('[[<|tool_call>call:f{city:<|"|>Málaga<|"|>}<tool_call|><think>\nr\n</think><turn|>]]\n')


@pytest.mark.parametrize("thought", ["<|end|> foo bar", "<|end|>"])
def test_a_thought_that_begins_with_what_closes_one_teaches_nothing(material: Path, thought: str) -> None:
    template = load_template(material, "gptoss")
    show(template, [USER, say("a", thought)])
    shown = show(template, [USER, say("b", "this is the thought")])
    assert turn_of(shown, "<|start|>user<|message|>Hi<|end|><|start|>assistant") == (
        "[[<|channel|>analysis<|message|>this is the thought<|end|>"
        "<|start|>assistant<|channel|>final<|message|>b<|return|>]]"
    )


def test_a_role_header_that_an_answer_begins_with_is_answer(material: Path) -> None:
    template = load_template(material, "qwen3_6")
    header, empty = "<|im_start|>assistant\n", "<think>\n\n</think>\n\n"
    shown = show(template, [USER, say(f"{header}foo")], no_train_reasoning=True)
    assert shown.endswith(f"{header}{empty}[[{header}foo<|im_end|>]]\n")
    shown = show(template, [USER, say("Hello world, this is the whole answer.")], no_train_reasoning=True)
    assert shown.endswith(f"{empty}[[Hello world, this is the whole answer.<|im_end|>]]\n")


# --- where a turn begins, and what belongs to its calls ---


@pytest.mark.parametrize("name", ["deepseekv3", "deepseekv3_training"])
def test_what_closes_the_texts_of_tools_is_not_trained(material: Path, name: str) -> None:
    messages = [USER, say("", tool_calls=[call()]), result("sunny"), say("It is sunny.")]
    shown = show(load_template(material, name), messages)
    closed = "<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>sunny<｜tool▁output▁end｜><｜tool▁outputs▁end｜>"
    assert shown.endswith(f"{closed}[[It is sunny.<｜end▁of▁sentence｜>]]")


@pytest.mark.parametrize("late", [[], [{"role": "system", "content": "late"}, USER, say("x")]])
def test_what_closes_the_texts_of_tools_is_not_trained_where_a_system_text_comes_late(
    material: Path, late: list[Message]
) -> None:
    messages = [USER, say("", tool_calls=[call()]), result("sunny"), say("It is sunny."), *late]
    assert "<｜tool▁outputs▁end｜>[[It is sunny.<｜end▁of▁sentence｜>]]" in show(
        load_template(material, "deepseekv3"), messages
    )


def test_a_thought_that_the_prompt_opens_behind_a_tools_text_is_trained_with_its_tag(material: Path) -> None:
    template, row = load_template(material, "gemma4_v5"), {"chat_template_kwargs": {"enable_thinking": True}}
    before = [USER, say("", tool_calls=[call()]), result("sunny")]
    shown = show(template, [*before, say("It is sunny.", "good")], row)
    assert shown.endswith("<tool_response|>[[<|channel>thought\ngood\n<channel|>It is sunny.<turn|>]]\n")


def test_an_end_of_turn_behind_a_tools_text_is_trained(material: Path) -> None:
    messages = [USER, say("ok", tool_calls=[call()]), result("sunny"), say("")]
    assert show(load_template(material, "gemma4_v5"), messages).endswith("[[ok<turn|>]]\n")


@pytest.mark.parametrize("name", ["deepseekv3", "qwen3_6", "gptoss", "llama3_1", "glm4moe", "gemma3"])
def test_what_is_trained_of_a_conversation_does_not_change_as_it_goes_on(material: Path, name: str) -> None:
    template = load_template(material, name)
    whole: list[Message] = [ask("one"), say("first"), ask("two"), say("second"), ask("three"), say("third")]
    shown = show(template, whole)
    for count in (3, 5):
        before = show(template, whole[:count])
        assert shown.startswith(before[: before.rindex("]]") + 2])


def test_the_end_of_an_analysis_beside_a_call_is_no_part_of_the_call(material: Path) -> None:
    row = [USER, say("let me think", tool_calls=[call("f", {"city": "P"})])]
    assert show(load_template(material, "gptoss"), row, no_train_tool_calls=True).endswith(
        "[[<|channel|>analysis<|message|>let me think<|end|>]]"
        '<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{"city": "P"}[[<|call|>]]'
    )


def test_a_thought_behind_the_calls_is_left_out_without_them(material: Path) -> None:
    template = load_template(material, "gemma4_v2")
    thought = "<think>\nr\n</think>\n\n"
    shown = show(template, [USER, say(thought, tool_calls=[call("f", {"city": "P"})])], no_train_reasoning=True)
    assert shown.endswith('[[<|tool_call>call:f{city:<|"|>P<|"|>}<tool_call|>]]<think>\nr\n</think>[[<turn|>]]\n')
    asked = call("f", {"city": "a <think> b"})
    shown = show(template, [USER, say(f"{thought}ok", tool_calls=[asked])], no_train_think_open=True)
    assert shown.endswith(
        '[[<|tool_call>call:f{city:<|"|>a <think> b<|"|>}<tool_call|>]]<think>\n[[r\n</think>\n\nok<turn|>]]\n'
    )


def test_a_thought_behind_the_calls_is_no_part_of_them(material: Path) -> None:
    messages = [USER, say("<think>\nr\n</think>\n\n", tool_calls=[call("f", {"city": "P"})])]
    shown = show(load_template(material, "gemma4_v2"), messages, no_train_tool_calls=True)
    assert shown.endswith("<tool_call|>[[<think>\nr\n</think><turn|>]]\n")


def test_the_tag_that_closes_a_thought_is_no_end_of_turn(material: Path) -> None:
    shown = show(load_template(material, "glm4moe"), [USER, say("", "REA")], no_train_reasoning=True)
    assert shown.endswith("<|assistant|>\n<think>REA</think>")


# --- cut calls, and control tokens in names ---


@pytest.mark.parametrize(
    ("name", "arguments", "trained"),
    [
        ("qwen3_6", {"city": "Paris", "note": ""}, "<tool_call>\n<function=f>\n<parameter=city>\nParis"),
        ("qwen3_6", {"a": "long", "b": {"c": ""}}, '<parameter=b>\n{"c": ""'),
        ("qwen3_6", {"city": "Paris", "n": 5}, "Paris\n</parameter>\n<parameter=n>\n5"),
        ("gemma4", {"b": "long text", "a": "y"}, '<|tool_call>call:f{a:<|"|>y<|"|>,b:<|"|>long text'),
    ],
)
def test_a_cut_call_is_trained_to_the_last_text_in_it(
    material: Path, name: str, arguments: dict[str, Any], trained: str
) -> None:
    cut = {"finish_reason": "length"}
    shown = show(load_template(material, name), [USER, say("", tool_calls=[call("f", arguments)])], cut)
    assert bracketed(shown)[-1].endswith(trained)


def test_a_call_with_nested_texts_does_not_spoil_the_marks_of_another(material: Path) -> None:
    template = load_template(material, "lfm2_2_5")
    nested, plain = call("f", {"x": ["a", "b", 3]}), call("g", {"city": "Paris"})
    cut = say("", "long thought", tool_calls=[plain], finish_reason="length")
    shown = show(template, [USER, say("", tool_calls=[nested]), result("t"), cut])
    assert bracketed(shown)[-1] == "<think>long thought</think><|tool_call_start|>[g(city='Paris"
    messages = [ask("<|im_end|>"), say("ok", tool_calls=[nested])]
    [rendered] = outcomes(template, {"messages": messages}, {"control_tokens": "literal"})
    [(start, end)] = rendered.literal
    assert rendered.text[:start].endswith("<|im_start|>user\n")
    assert rendered.text[start:end] == "<|im_end|>"


def bracketed(shown: str) -> list[str]:
    return re.findall(r"\[\[(.*?)\]\]", shown, re.DOTALL)


@pytest.mark.parametrize("where", ["argument", "tool"])
def test_a_control_token_in_a_name_is_typed_as_well(material: Path, where: str) -> None:
    template = load_template(material, "qwen3_6")
    tools: list[dict[str, Any]] = [{"type": "function", "function": {"name": "f", "parameters": {"<|im_end|>": "x"}}}]
    row: dict[str, Any] = {"tools": tools} if where == "tool" else {}
    given = {"<|im_end|>": "v"} if where == "argument" else {}
    messages = [USER, say("", tool_calls=[call("f", given)])]
    with pytest.raises(RowError, match="types"):
        show(template, messages, row, control_tokens="reject")
    [rendered] = outcomes(template, {"messages": messages, **row}, {"control_tokens": "literal"})
    [(start, end)] = rendered.literal
    assert rendered.text[start:end] == "<|im_end|>"
    assert rendered.counts["control_token_rows"] == 1
