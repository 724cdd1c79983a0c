"""Cut completions: what was generated is trained, and nothing that the template added after it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from etl.errors import RowError
from etl.records import Message, Rendered
from etl.template import ChatTemplate
from tests.chats import USER, bracket, call, load_template, make_template, render_row, say, turn_of

EMPTY = "<think>\n\n</think>\n\n"


@pytest.fixture(scope="module")
def qwen(material: Path) -> ChatTemplate:
    return load_template(material, "qwen3_6")


@pytest.fixture(scope="module")
def qwen3(material: Path) -> ChatTemplate:
    return load_template(material, "qwen3")


@pytest.fixture(scope="module")
def inline(material: Path) -> ChatTemplate:
    """A template that takes thinking as text."""
    return load_template(material, "qwen2_5")


def cut(template: ChatTemplate, message: Message, **options: Any) -> Rendered:
    return render_row(template, [USER, message], {"finish_reason": "length"}, **options)


def shown(template: ChatTemplate, message: Message, **options: Any) -> str:
    return turn_of(bracket(cut(template, message, **options)))


@pytest.mark.parametrize("message", [say("<think>\nhalf"), say("half"), say("", "half"), say("<think>half")])
def test_half_a_thought_is_trained_and_what_closes_it_is_not(qwen: ChatTemplate, message: Message) -> None:
    rendered = cut(qwen, message)
    assert turn_of(bracket(rendered)) == "[[<think>\nhalf]]\n</think>\n\n<|im_end|>\n"
    assert rendered.cuts == (rendered.text.index("half") + 4,)
    assert rendered.counts == {"truncated_rows": 1}


def test_half_an_answer_is_trained_without_its_end(qwen: ChatTemplate) -> None:
    assert shown(qwen, say("half", "why")) == "[[<think>\nwhy\n</think>\n\nhalf]]<|im_end|>\n"


def test_where_the_prompt_opens_no_thought_cut_text_is_answer(qwen3: ChatTemplate) -> None:
    assert shown(qwen3, say("half")) == EMPTY + "[[half]]<|im_end|>\n"


@pytest.mark.parametrize("message", [say("<think>"), say("<think>\n"), say("")])
def test_a_cut_right_after_the_opening_tag_leaves_an_empty_block(qwen: ChatTemplate, message: Message) -> None:
    assert shown(qwen, message) == EMPTY + "<|im_end|>\n"
    assert shown(qwen, message, train_empty_think=True) == "[[<think>]]\n\n</think>\n\n<|im_end|>\n"


@pytest.mark.parametrize("content", ["<think>\nwhy\n</think>", "<think>\nwhy\n</think>\n\n", "why\n</think>\n"])
def test_a_cut_after_the_closing_tag_trains_the_tag_and_not_the_blanks(qwen: ChatTemplate, content: str) -> None:
    assert shown(qwen, say(content)) == "[[<think>\nwhy\n</think>]]\n\n<|im_end|>\n"


def test_the_blanks_behind_the_closing_tag_are_trained_where_an_answer_follows(qwen: ChatTemplate) -> None:
    assert shown(qwen, say("<think>\nwhy\n</think>\n\nan")) == "[[<think>\nwhy\n</think>\n\nan]]<|im_end|>\n"


def test_the_switches_hold_in_cut_rows_too(qwen: ChatTemplate) -> None:
    assert shown(qwen, say("", "half"), no_train_think_open=True) == "<think>\n[[half]]\n</think>\n\n<|im_end|>\n"
    assert "[[" not in shown(qwen, say("", "half"), no_train_reasoning=True)
    both = shown(qwen, say("half", "why"), no_train_reasoning=True)
    assert both == "<think>\nwhy\n</think>\n\n[[half]]<|im_end|>\n"


def test_blanks_at_the_cut_are_trained_as_far_as_the_template_keeps_them(
    qwen: ChatTemplate, qwen3: ChatTemplate
) -> None:
    assert shown(qwen, say("an \n", "why")).endswith("\n\nan]]<|im_end|>\n")
    assert shown(qwen3, say("an \n", "why")).endswith("\n\nan \n]]<|im_end|>\n")
    assert shown(qwen3, say("", "half \t")) == "[[<think>\nhalf \t]]\n</think>\n\n<|im_end|>\n"


def test_inline_text_is_trained_as_it_stands(inline: ChatTemplate) -> None:
    assert shown(inline, say("<think>\nhalf")) == "[[<think>\nhalf]]<|im_end|>\n"
    assert shown(inline, say("<think>")) == "[[<think>]]<|im_end|>\n"
    assert shown(inline, say("<think>\nwhy\n</think>\n\n")) == "[[<think>\nwhy\n</think>]]\n\n<|im_end|>\n"
    assert shown(inline, say("<think>\nwhy\n</think>\n\nan")) == "[[<think>\nwhy\n</think>\n\nan]]<|im_end|>\n"


def test_an_empty_block_before_a_thought_that_was_only_begun_rejects_the_row() -> None:
    template = make_template(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' and '</think>' not in m.content %}<think>\n\n</think>\n\n{% endif %}"
        "{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
    )
    with pytest.raises(RowError) as error:
        cut(template, say("<think>\nhalf"))
    assert error.value.reason == "truncated_reasoning"
    assert shown(template, say("<think>\nwhy</think>an")) == "[[<think>\nwhy</think>an]]<|im_end|>\n"


def test_a_cut_call_is_trained_to_its_last_generated_character(qwen3: ChatTemplate, qwen: ChatTemplate) -> None:
    broken = say("", tool_calls=[call("f", '{"city": "Mál')])
    assert shown(qwen3, broken).endswith('"arguments": {"city": "Mál]]}\n</tool_call><|im_end|>\n')
    whole = say("hm", tool_calls=[call("g"), call("f", {"city": "Málaga", "n": 3})])
    assert shown(qwen3, whole).endswith('"arguments": {"city": "Málaga", "n": 3}]]}\n</tool_call><|im_end|>\n')
    assert shown(qwen, whole).endswith("<parameter=n>\n3]]\n</parameter>\n</function>\n</tool_call><|im_end|>\n")


def test_cut_rows_can_be_rejected_or_trained_as_if_complete(qwen: ChatTemplate) -> None:
    with pytest.raises(RowError, match="cut by the length limit") as error:
        cut(qwen, say("", "half"), truncated_completions="reject")
    assert error.value.reason == "truncated"
    rendered = cut(qwen, say("", "half"), truncated_completions="train-end")
    assert turn_of(bracket(rendered)) == "[[<think>\nhalf\n</think>\n\n<|im_end|>]]\n"
    assert rendered.cuts == ()
    assert rendered.counts == {"truncated_rows": 1}


def test_a_cut_message_that_is_not_trained_changes_nothing(qwen: ChatTemplate) -> None:
    messages = [USER, say("a", finish_reason="length", train=False), USER, say("b", "why")]
    rendered = render_row(qwen, messages, truncated_completions="reject")
    assert turn_of(bracket(rendered)) == "[[<think>\nwhy\n</think>\n\nb<|im_end|>]]\n"
    assert rendered.counts == {}


def test_a_cut_message_in_the_middle_ends_there(qwen: ChatTemplate) -> None:
    messages = [USER, say("half", finish_reason="length"), USER, say("b", "why")]
    assert "assistant\n[[half]]<|im_end|>\n" in bracket(
        render_row(qwen, messages, {"chat_template_kwargs": {"enable_thinking": False}})
    )


def test_a_cut_analysis_of_gpt_oss_ends_before_its_end_token(material: Path) -> None:
    shown_text = bracket(cut(load_template(material, "gptoss"), say("", "half")))
    assert shown_text.endswith(
        "<|start|>assistant[[<|channel|>analysis<|message|>half]]<|end|>"
        "<|start|>assistant<|channel|>final<|message|><|return|>"
    )


def test_a_cut_turn_in_a_template_with_generation_blocks(material: Path) -> None:
    template = load_template(material, "qwen3_6_training")
    assert shown(template, say("", "half")) == "[[<think>\nhalf]]\n</think>\n\n<|im_end|>\n"
