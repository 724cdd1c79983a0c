from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers
import transformers.utils.chat_template_utils as reference

from etl.config import RunConfig
from etl.errors import RowError, UsageError
from etl.records import Message, TokenizerSpec
from etl.template import THINK_CLOSE, THINK_OPEN, ChatTemplate, probe
from etl.template import _aliased as etl_aliased
from tests.chats import CONVERSATIONS, DATE, TOOLS, USER, converse, load_template, make_template, say

pytestmark = pytest.mark.usefixtures("pinned_clock")

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SOME = ("qwen3", "qwen3_6", "gptoss", "glm4moe_training", "diffusion_gemma", "lfm2_v2")


def _aliased(message: Message) -> Message:
    """As transformers 5 hands reasoning over, under every name that templates read; etl does so, 4 does not."""
    fields = ("reasoning_content", "thinking", "reasoning")
    reasoning = next((message[key] for key in fields if message.get(key) is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _theirs(source: str, messages: list[Message], **more: Any) -> str | None:
    if transformers.__version__.startswith("4."):
        messages = [_aliased(message) for message in messages]
    try:
        texts, _ = reference.render_jinja_template(
            [messages], chat_template=source, bos_token="<s>", eos_token="</s>", **more
        )
    except Exception:  # noqa: BLE001  whatever a template raises there
        return None
    return str(texts[0])


def _text(
    template: ChatTemplate,
    messages: list[Message],
    tools: list[Any] | None = None,
    documents: list[Any] | None = None,
    *,
    add_generation_prompt: bool = False,
    **arguments: Any,
) -> str:
    """The messages as they are, but for the names that reasoning goes under, by a template."""
    given = [etl_aliased(message) for message in messages]
    merged = template.merged(arguments)
    return template.trace(given, tools, documents, merged, add_generation_prompt=add_generation_prompt).text


def _ours(template: ChatTemplate, messages: list[Message], **more: Any) -> str | None:
    try:
        return _text(template, messages, **more)
    except RowError:
        return None


def _assert_parity(material: Path, name: str) -> None:
    template = load_template(material, name)
    for title, messages in CONVERSATIONS.items():
        tools = TOOLS if title == "tools" else None
        for asked in (False, True):
            theirs = _theirs(template.source, messages, tools=tools, add_generation_prompt=asked)
            assert _ours(template, messages, tools=tools, add_generation_prompt=asked) == theirs, (name, title)


@pytest.mark.parametrize("name", SOME)
def test_the_text_is_byte_equal_to_transformers(material: Path, name: str) -> None:
    _assert_parity(material, name)


@pytest.mark.long
def test_the_text_of_every_template_of_trl_is_byte_equal_to_transformers(material: Path) -> None:
    names = sorted(path.stem for path in (material / "templates").glob("*.jinja"))
    assert len(names) >= 72
    for name in names:
        _assert_parity(material, name)


def test_template_arguments_and_documents_reach_the_template(material: Path) -> None:
    template = load_template(material, "qwen3_6", preserve_thinking=True)
    messages = [USER, say("a", reasoning_content="ra"), USER, say("b")]
    assert _theirs(template.source, messages, preserve_thinking=True) == _text(template, messages)
    source = "{% for d in documents %}{{ d.title }};{% endfor %}{{ messages[0].content }}{{ flavour }}"
    shown = _text(make_template(source), [USER], documents=[{"title": "T"}], flavour="sweet")
    assert shown == _theirs(source, [USER], documents=[{"title": "T"}], flavour="sweet") == "T;Hisweet"


def test_the_runs_template_arguments_win_over_the_rows() -> None:
    assert _text(make_template("{{ a }}{{ b }}{{ messages[0].content }}", a=1), [USER], a=2, b=3) == "13Hi"


def test_settled_reasoning_renders_the_same_without_the_aliases_of_transformers_5(material: Path) -> None:
    for name in ("qwen3_6", "gptoss", "lfm2_2_5", "diffusion_gemma", "muse_glimmer"):
        template = load_template(material, name)
        field = template.traits.reasoning_field
        assert field is not None
        settled = template.prepare([USER, say("ok", **{field: "because"})])
        as_they_are = template.trace(settled, None, None, {}).text
        assert "because" in as_they_are
        assert as_they_are == _theirs(template.source, settled)


def test_null_keys_are_dropped_as_transformers_5_drops_them() -> None:
    assert converse(make_template(CHATML), [{**USER, "name": None}, say("ok")]).messages[0] == USER


def test_no_template_and_a_broken_one_are_usage_errors() -> None:
    with pytest.raises(UsageError, match="no chat template; give one with --chat-template"):
        ChatTemplate(None, {})
    with pytest.raises(UsageError, match="cannot be compiled") as error:
        make_template("{% for m in messages %}")
    assert "\n" not in str(error.value)


def test_a_template_that_asks_the_clock_needs_a_date(material: Path) -> None:
    source = (material / "templates" / "llama3_2.jinja").read_text(encoding="utf-8")
    with pytest.raises(UsageError, match="--date"):
        make_template(source, date=None)
    assert "02 Jan 2026" in _text(make_template(source), [USER])
    assert "26 Jul 2024" in _text(make_template(source, date=None, date_string="26 Jul 2024"), [USER])


def test_a_row_that_makes_the_template_ask_the_clock_is_rejected_where_no_date_was_given() -> None:
    template = make_template("{% if messages|length > 5 %}{{ strftime_now('%Y') }}{% endif %}" + CHATML, date=None)
    with pytest.raises(RowError, match="--date"):
        _text(template, [USER] * 6)


def test_what_a_template_raises_is_one_line_with_the_reason_template() -> None:
    template = make_template("{{ raise_exception('line one\nline two') }}")
    with pytest.raises(RowError) as error:
        _text(template, [USER])
    assert error.value.reason == "template"
    assert error.value.detail == "line one line two"


@pytest.mark.parametrize(
    "expression",
    [
        "messages.append(1)",
        "messages[0].update({'role': 'x'})",
        "messages[0].clear()",
        "messages.__class__.__mro__",
        "''['__class__'].mro()",
        "messages[0].__init__.__globals__",
        "'{0.__class__.__mro__}'.format(messages)",
        "namespace(_x=1)",
        "namespace.__init__.__globals__",
        "raise_exception.__globals__['json']",
        "cycler.__init__.__globals__",
        "self._TemplateReference__context.environment",
        "lipsum.__globals__['os'].system('true')",
        "strftime_now.__self__.year",
    ],
)
def test_the_sandbox_holds(expression: str) -> None:
    template = make_template("{% if messages[0].content == 'attack' %}{{ " + expression + " }}{% endif %}")
    with pytest.raises(RowError) as error:
        _text(template, [{"role": "user", "content": "attack"}])
    assert error.value.reason == "template"


def test_the_shortcuts_of_the_sandbox_render_as_jinjas_own() -> None:
    source = (
        "{% set ns = namespace(items=1, a='x{}', n=none) %}{% set ns.b = [1] %}"
        "{{ ns.items }}{{ ns.a.format(7) }}{{ ns.n }}{{ ns.b }}{{ ns.missing }}{{ ns['a'] }}"
        "{% for m in messages %}{{ m.items is callable }}{{ m.values()|list|length }}"
        "{{ m.role.upper() }}{{ m.nothing }}"
        "{{ loop.index0 }}{{ loop.previtem is defined }}{{ loop.cycle('a', 'b') }}{{ m.content.strip() }}"
        "{{ m.content.split('i')|join('-') }}{{ m.content.count('H') }}{% endfor %}"
        "{% macro f(x, y=2) %}{{ x }}{{ y }}{{ varargs }}{{ kwargs }}{% endmacro %}{{ f(1) }}{{ f(1, 3, 4, k=5) }}"
    )
    assert _text(make_template(source), [USER, say("it")]) == _theirs(source, [USER, say("it")])


@pytest.mark.parametrize(
    ("name", "field", "opens"),
    [
        ("qwen3", "reasoning_content", False),
        ("qwen3_6", "reasoning_content", True),
        ("gptoss", "thinking", False),
        ("gemma3", None, False),
        ("deepseekv3", None, True),
        ("nemotron_3_ultra", "reasoning_content", True),
        ("qwen3_5_nothink", "reasoning_content", False),
    ],
)
def test_traits_are_learned_by_probing(material: Path, name: str, field: str | None, opens: bool) -> None:
    traits = load_template(material, name).traits
    assert traits.reasoning_field == field
    assert traits.opens_thinking({}) is opens


def test_whether_the_prompt_opens_a_thought_depends_on_the_rows_arguments_unless_the_run_gives_them(
    material: Path,
) -> None:
    assert not load_template(material, "qwen3_6").traits.opens_thinking({"enable_thinking": False})
    fixed = load_template(material, "qwen3_6", enable_thinking=True)
    assert fixed.traits.opens_thinking({"enable_thinking": False})


@pytest.mark.parametrize(
    ("name", "prompt", "header"),
    [
        ("qwen3_6", "<|im_start|>assistant\n<think>\n", "<|im_start|>assistant\n"),
        ("phi3", "<|assistant|>\n", "<|assistant|>\n"),
        ("gptoss", "<|start|>assistant", "<|start|>assistant"),
        ("deepseekv3", "<｜Assistant｜><think>\n", "<｜Assistant｜>"),
        ("llava_next", "", ""),
    ],
)
def test_the_role_header_is_the_generation_prompt_without_its_thinking_opener(
    material: Path, name: str, prompt: str, header: str
) -> None:
    template = load_template(material, name)
    assert template.prompt(template.arguments) == prompt
    assert template.header(template.arguments) == header


@pytest.mark.parametrize("tag", ["<think>", "<thinking>", "[THINK]", "<seed:think>", "<|START_THINKING|>", "◁think▷"])
def test_opening_tags_are_told_from_closing_ones(tag: str) -> None:
    assert THINK_OPEN.fullmatch(tag)
    assert not THINK_CLOSE.search(tag)


@pytest.mark.parametrize("tag", ["</think>", "[/THINK]", "</seed:think>", "<|END_THINKING|>", "◁/think▷", "<channel|>"])
def test_closing_tags_are_told_from_opening_ones(tag: str) -> None:
    assert THINK_CLOSE.fullmatch(tag)
    assert not THINK_OPEN.search(tag)


def test_ordinary_tags_are_no_thoughts() -> None:
    for tag in ("<|im_start|>", "<div>", "[INST]", "<tool_call>", "<|channel|>analysis"):
        assert not THINK_OPEN.search(tag)
        assert not THINK_CLOSE.search(tag)


def test_probing_says_that_earlier_reasoning_is_left_out_and_how_to_keep_it(material: Path) -> None:
    assert any("preserve_thinking=true" in note for note in probe(load_template(material, "qwen3_6")))
    assert any("--turns expand" in note for note in probe(load_template(material, "qwen3")))
    assert probe(load_template(material, "qwen3_6", preserve_thinking=True)) == []


def test_probing_names_a_template_that_never_renders_reasoning(material: Path) -> None:
    assert probe(load_template(material, "deepseekv3")) == [
        "the template never renders reasoning: turns that have any are not trained"
    ]


def test_probing_refuses_a_template_that_renders_no_answers() -> None:
    with pytest.raises(UsageError, match="does not render what an assistant says"):
        probe(make_template("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"))
    with pytest.raises(UsageError, match="does not render what an assistant says"):
        probe(make_template("{% for m in messages %}{{ m.content|upper }}{% endfor %}"))
    with pytest.raises(UsageError, match=r"what an assistant says \(a system message first\)"):
        probe(make_template("{{ raise_exception('a system message first') }}"))


def test_probing_names_a_template_argument_that_the_template_never_reads() -> None:
    source = "{% for m in messages %}{{ m.role }}{{ m.content if not short }}{% endfor %}"
    notes = probe(make_template(source, shrot=True, short=False))
    assert [note for note in notes if "never reads" in note] == [
        "the template never reads shrot: this template argument changes nothing"
    ]


def test_probing_says_where_the_prompt_begins_no_turn() -> None:
    notes = probe(make_template(CHATML.replace("<|im_start|>assistant", "<|im_start|>bot")))
    assert any("no turn begins with the generation prompt" in note for note in notes)


def test_added_tokens_are_found_longest_first_and_blank_ones_not_at_all() -> None:
    added = ["<a>", "<a>b", "<ab>", "<a", "\n", "  ", "[x]", "a.b", "", "<unused1>", "<unused10>"]
    template = ChatTemplate(CHATML, {"eos_token": "<a"}, added, ["<a>", "[x]", ""])
    assert template.added_tokens.findall("<a>bc<a>c<ab><ax\n\n  [x]a.baxb<unused10><unused11>") == [
        "<a>b",
        "<a>",
        "<ab>",
        "<a",
        "[x]",
        "a.b",
        "<unused10>",
    ]
    assert template.control_tokens.findall("<a>b[x]<a") == ["<a>", "[x]"]
    assert ChatTemplate(CHATML, {}).control_tokens.search("anything") is None


def test_memory_does_not_grow_with_the_rows_own_arguments(material: Path) -> None:
    template = load_template(material, "qwen3_6")
    for i in range(1000):
        template.opens_thinking({"enable_thinking": bool(i % 2), "request_id": i})
    assert len(template._memory) < 10
    for i in range(1000):
        template.opens_thinking({"add_vision_id": i})
    assert len(template._memory) <= 256


def test_a_template_comes_from_the_spec_that_workers_get(qwen36: TokenizerSpec) -> None:
    template = ChatTemplate.from_spec(qwen36, RunConfig(input="x", date=DATE))
    assert template.traits.reasoning_field == "reasoning_content"
    assert template.added_tokens.findall("a<think>b<|im_end|>") == ["<think>", "<|im_end|>"]
    assert template.control_tokens.findall("a<think>b<|im_end|>") == ["<|im_end|>"]
