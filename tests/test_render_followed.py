"""Templates that hide which message they render, or end turns elsewhere: followed all the same, or refused."""

from __future__ import annotations

from typing import Final

import pytest

from etl.errors import RowError
from etl.records import Message
from etl.template import probe
from tests.chats import SYSTEM, USER, ask, make_template, render_row, say, show

PROMPT: Final = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
BODY: Final = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
DIALOGUE: Final[list[Message]] = [ask("hey"), say("fine one"), ask("hey"), say("fine two")]
RIGHT: Final = (
    "<|im_start|>user\nhey<|im_end|>\n<|im_start|>assistant\n[[fine one<|im_end|>]]\n"
    "<|im_start|>user\nhey<|im_end|>\n<|im_start|>assistant\n[[fine two<|im_end|>]]\n"
)
FOLLOWED: Final = {
    "a plain loop": "{% for m in messages %}BODY{% endfor %}",
    "a macro a message": "{% macro one(m) %}BODY{% endmacro %}{% for m in messages %}{{ one(m) }}{% endfor %}",
    "indices": "{% for i in range(messages|length) %}{% set m = messages[i] %}BODY{% endfor %}",
    "indices in place": "{% for m in range(0, messages|length, 1) %}"
    "<|im_start|>{{ messages[m].role }}\n{{ messages[m].content }}<|im_end|>\n{% endfor %}",
    "a slice": "{% for m in messages[0:] %}BODY{% endfor %}",
    "a reversed list": "{% for m in messages|reverse|list|reverse %}BODY{% endfor %}",
    "a filtered loop": "{% for m in messages if m.role != 'system' %}BODY{% endfor %}",
    "a filtered list": "{% for m in messages|rejectattr('role', 'eq', 'system') %}BODY{% endfor %}",
    "batches": "{% for pair in messages|batch(2) %}{% for m in pair %}BODY{% endfor %}{% endfor %}",
    "a loop that looks ahead": "{% for m in messages %}{% for n in messages %}{% if n.role == 'x' %}{{ n.content }}"
    "{% endif %}{% endfor %}BODY{% endfor %}",
    "a loop with break": "{% for m in messages %}{% if m.role == 'x' %}{% break %}{% endif %}BODY{% endfor %}",
    "a loop with else": "{% for m in messages %}BODY{% else %}none{% endfor %}",
    "a nested loop of words": "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% for w in m.content.split(' ') %}{{ w }}{% if not loop.last %} {% endif %}{% endfor %}<|im_end|>\n{% endfor %}",
    "a loop over copies of a list": "{% set ms = messages + [] %}{% for m in ms %}BODY{% endfor %}",
    "a namespace": "{% set ns = namespace(ms=[]) %}{% for m in messages %}{% set ns.ms = ns.ms + [m] %}{% endfor %}"
    "{% for m in ns.ms %}BODY{% endfor %}",
}
HIDDEN: Final = {
    "a set block": "{% set x %}{% for m in messages %}BODY{% endfor %}{% endset %}{{ x }}",
    "a macro of all": "{% macro all(ms) %}{% for m in ms %}BODY{% endfor %}{% endmacro %}{{ all(messages) }}",
    "a filter block": "{% filter replace('@@', '') %}{% for m in messages %}BODY{% endfor %}{% endfilter %}",
    "a recursive loop": "{% for m in messages recursive %}BODY{% endfor %}",
    "rebuilt messages": "{% set ns = namespace(ms=[]) %}{% for m in messages %}"
    "{% set ns.ms = ns.ms + [dict(role=m.role, content=m.content)] %}{% endfor %}{% for m in ns.ms %}BODY{% endfor %}",
    "no loop": "".join(
        f"{{% if messages|length > {i} %}}{{% set m = messages[{i}] %}}BODY{{% endif %}}" for i in range(4)
    ),
}


@pytest.mark.parametrize("source", FOLLOWED.values(), ids=FOLLOWED)
def test_loops_of_every_kind_tell_whose_text_it_is(source: str) -> None:
    template = make_template(source.replace("BODY", BODY) + PROMPT)
    assert template.follows_loops
    assert show(template, DIALOGUE) == RIGHT
    assert show(template, [ask("hey"), say("fine one", train=False), *DIALOGUE[2:]]) == RIGHT.replace(
        "[[", "", 1
    ).replace("]]", "", 1)


@pytest.mark.parametrize("source", HIDDEN.values(), ids=HIDDEN)
def test_where_the_loops_hide_it_the_messages_own_text_is_followed_and_the_run_says_so(source: str) -> None:
    template = make_template(source.replace("BODY", BODY) + PROMPT)
    assert not template.follows_loops
    assert any("rendered twice" in note for note in probe(template))
    assert show(template, DIALOGUE) == RIGHT
    assert show(template, [ask("hey"), say("fine one", train=False), *DIALOGUE[2:]]) == RIGHT.replace(
        "[[", "", 1
    ).replace("]]", "", 1)


def test_where_the_loops_hide_it_a_message_that_says_nothing_rejects_the_row() -> None:
    template = make_template(HIDDEN["a set block"].replace("BODY", BODY) + PROMPT)
    with pytest.raises(RowError) as error:
        show(template, [USER, say("")])
    assert error.value.reason == "mask"


def test_consecutive_turns_that_the_template_merges_are_both_trained_or_only_the_one_that_may_be() -> None:
    source = (
        "{% set ns = namespace(ms=[]) %}{% for m in messages %}{% if ns.ms and ns.ms[-1].role == m.role %}"
        "{% set ns.ms = ns.ms[:-1] + [dict(role=m.role, content=ns.ms[-1].content + '\\n\\n' + m.content)] %}"
        "{% else %}{% set ns.ms = ns.ms + [m] %}{% endif %}{% endfor %}{% for m in ns.ms %}BODY{% endfor %}"
    )
    template = make_template(source.replace("BODY", BODY) + PROMPT)
    head = "<|im_start|>user\nHi\n\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert show(template, [USER, USER, say("a"), say("b")]) == head + "[[a]]\n\n[[b<|im_end|>]]\n"
    assert show(template, [USER, USER, say("a", train=False), say("b")]) == head + "a\n\n[[b<|im_end|>]]\n"
    assert show(template, [USER, USER, say("a"), say("b", train=False)]) == head + "[[a]]\n\nb<|im_end|>\n"


def test_other_messages_text_inside_a_turn_is_not_trained() -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'assistant' %}A:{{ m.content }}"
        "{% if not loop.last and loop.nextitem.role == 'tool' %} => {{ loop.nextitem.content }}{% endif %}</s>"
        "{% elif m.role == 'user' %}U:{{ m.content }}\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}A:{% endif %}"
    )
    tool = {"role": "tool", "content": "secret"}
    assert (
        show(make_template(source), [USER, say("call"), tool, say("ok")])
        == "U:Hi\nA:[[call => ]]secret[[</s>]]A:[[ok</s>]]"
    )


def test_an_end_token_written_by_the_next_turn_or_behind_the_loop_belongs_to_the_turn() -> None:
    source = (
        "{% for m in messages %}{% if not loop.first %}<|im_end|>\n{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% endfor %}<|im_end|>\n"
    )
    assert show(make_template(source + PROMPT), DIALOGUE) == RIGHT
    phi = (
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
    )
    assert show(make_template(phi), [USER, say("ok")]) == "<|user|>\nHi<|end|>\n<|assistant|>\n[[ok<|end|>\n</s>]]"
    assert show(make_template(phi), [USER, say("ok"), USER]).endswith("[[ok<|end|>]]\n<|user|>\nHi<|end|>\n</s>")


def test_a_header_written_by_the_users_turn_is_not_trained() -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'user' %}U:{{ m.content }}<|im_start|>assistant\n"
        "{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
    )
    assert show(make_template(source), [USER, say("ok")]) == "U:Hi<|im_start|>assistant\n[[ok</s>]]"


def test_without_any_end_token_a_turn_is_trained_to_the_end_of_its_text() -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'user' %}### Q:\n{{ m.content|trim }}\n\n"
        "{% else %}### A:\n{{ m.content|trim }}\n\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}### A:\n{% endif %}"
    )
    assert show(make_template(source), [USER, say(" ok ")]) == "### Q:\nHi\n\n### A:\n[[ok\n\n]]"


def test_generation_blocks_bound_what_is_trained() -> None:
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    )
    assert show(make_template(source + PROMPT), [USER, say("ok")]).endswith("assistant\n[[ok]]<|im_end|>\n")
    whole = source.replace("{% endgeneration %}{% else %}", "<|im_end|>\n{% endgeneration %}{% else %}").replace(
        "{% endif %}<|im_end|>\n", "<|im_end|>\n{% endif %}"
    )
    assert show(make_template(whole + PROMPT), [USER, say("ok")]).endswith("assistant\n[[ok<|im_end|>]]\n")


def test_generation_blocks_in_a_macro_are_found_without_them_and_said() -> None:
    source = (
        "{% macro one(m) %}<|im_start|>{{ m.role }}\n{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}\n"
        "{% endmacro %}{% for m in messages %}{{ one(m) }}{% endfor %}"
    )
    template = make_template(source + PROMPT)
    assert any("inside macros" in note for note in probe(template))
    assert show(template, [SYSTEM, USER, say("ok")]).endswith("<|im_start|>assistant\n[[ok<|im_end|>]]")


def test_text_that_the_template_changes_rejects_the_row() -> None:
    template = make_template(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content[:12] }}<|im_end|>\n{% endfor %}" + PROMPT
    )
    assert show(template, [USER, say("short")]).endswith("[[short<|im_end|>]]\n")
    with pytest.raises(RowError) as error:
        show(template, [USER, say("longer than twelve")])
    assert error.value.reason == "mask"


def test_text_that_the_template_escapes_is_trained_as_it_is_shown() -> None:
    source = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content|tojson }}<|im_end|>\n{% endfor %}"
    assert show(make_template(source + PROMPT), [USER, say('say "x"')]).endswith(
        'assistant\n[["say \\"x\\""<|im_end|>]]\n'
    )


def test_a_piece_cut_in_the_middle_counts_as_dropped() -> None:
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content|replace(' secret ', ' ') }}"
        "<|im_end|>\n{% endfor %}"
    )
    rendered = render_row(make_template(source + PROMPT), [USER, say("a secret b")])
    assert rendered.spans == ()
    assert rendered.counts == {"dropped_reasoning_turns": 1}


def test_a_role_header_whose_blanks_end_the_message_before_is_not_trained() -> None:
    source = (  # Alpaca's
        "{% for m in messages %}### {{ 'Response' if m.role == 'assistant' else 'Instruction' }}:\n{{ m.content }}"
        "{% if m.role == 'assistant' %}</s>{% endif %}{% if not loop.last %}{{ '\n\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '\n\n### Response:\n' }}{% endif %}"
    )
    assert show(make_template(source), [USER, say("ok"), ask("x\n\n### Response:\n"), say("yes")]) == (
        "### Instruction:\nHi\n\n### Response:\n[[ok</s>]]\n\n"
        "### Instruction:\nx\n\n### Response:\n\n\n### Response:\n[[yes</s>]]"
    )


def test_a_header_for_the_next_reply_behind_the_last_one_is_not_trained() -> None:
    source = (  # Command A's
        "{% for m in messages %}<|turn|><|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}<|turn|><|assistant|>"
        "{% if add_generation_prompt %}<|answer|>{% endif %}"
    ).replace("|>{{ m.content", "|>{% if m.role == 'assistant' %}<|answer|>{% endif %}{{ m.content")
    assert show(make_template(source), [USER, say("ok"), USER, say("yes")]).endswith(
        "<|user|>Hi<|end|><|turn|><|assistant|><|answer|>[[yes<|end|>]]<|turn|><|assistant|>"
    )


def test_without_a_generation_prompt_what_every_reply_begins_with_is_the_role_header() -> None:
    plain = make_template("{% for m in messages %}BODY{% endfor %}".replace("BODY", BODY))
    assert show(plain, DIALOGUE) == RIGHT
    channels = (  # Command A's for documents
        "{% for m in messages %}<|turn|><|{{ m.role }}|>{% if m.role == 'assistant' %}"
        "{% if m.thinking %}<|think_start|>{{ m.thinking }}<|think_end|>{% endif %}<|answer|>{% endif %}"
        "{{ m.content }}<|end|>{% endfor %}"
    )
    assert show(make_template(channels), [USER, say("yes", "why"), USER, say("ok")]) == (
        "<|turn|><|user|>Hi<|end|><|turn|><|assistant|>[[<|think_start|>why<|think_end|><|answer|>yes<|end|>]]"
        "<|turn|><|user|>Hi<|end|><|turn|><|assistant|>[[<|answer|>ok<|end|>]]"
    )


def test_a_blank_before_every_reply_is_no_role_header() -> None:
    mistral = make_template(
        "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
        "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
    )
    assert show(mistral, [USER, say("ok")]) == "[INST] Hi [/INST][[ ok</s>]]"
    assert any("no generation prompt" in note for note in probe(mistral))
