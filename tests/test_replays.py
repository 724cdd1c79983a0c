from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from etl import sandbox
from etl.errors import RowError
from etl.records import Message
from etl.sandbox import Sandbox, Trace
from etl.template import ChatTemplate
from tests.chats import load_template, make_template
from tests.material import MATERIAL

NAMES = sorted(path.stem for path in (MATERIAL / "templates").glob("*.jinja"))
PARTS_ONLY = {"idefics3", "idefics3_training", "llava_next", "llava_next_training", "smolvlm", "smolvlm_training"}
"""Templates whose messages hold lists: they take no text that could be left open."""

BITS = (
    "<think>", "</think>", "<tool_response>", "</tool_response>", "<|im_end|>", "<|channel|>", "<channel|>", "[THINK]",
    "/no_think", "\n", "\n\n", " ", "\t", "a", "Hello", "é", "final", "x" * 5, "", "<", "{", "[", "0", "True",
)  # fmt: skip


def _text(draw: random.Random) -> str:
    return "".join(draw.choice(BITS) for _ in range(draw.choice((0, 1, 1, 2, 4, 6))))


def _chat(draw: random.Random) -> list[Message]:
    """One of few shapes with texts that templates ask after."""
    chat: list[Message] = []
    if draw.random() < 0.3:
        chat.append({"role": draw.choice(("system", "developer")), "content": _text(draw)})
    for _ in range(draw.choice((1, 1, 1, 2))):
        chat.append({"role": "user", "content": _text(draw)})
        thought = {"reasoning_content": _text(draw)} if draw.random() < 0.5 else {}
        chat.append({"role": "assistant", "content": _text(draw), **thought})
    return chat


def _render(box: Sandbox, messages: list[Message], key: str | None) -> Trace | str:
    variables: dict[str, Any] = {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": False}
    try:
        return box.trace(messages, variables, key)
    except RowError as error:
        return error.detail


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[Trace]:
    """What came by a known way."""
    found: list[Trace] = []
    original = sandbox._Way.trace

    def watched(way: sandbox._Way, texts: list[str]) -> Trace | None:
        trace = original(way, texts)
        if trace is not None:
            found.append(trace)
        return trace

    monkeypatch.setattr(sandbox._Way, "trace", watched)
    return found


def _compare(template: ChatTemplate, chats: int, seed: int) -> None:
    box, draw = template._sandbox, random.Random(seed)
    for _ in range(chats):
        messages = template.prepare(_chat(draw))
        assert _render(box, messages, "") == _render(box, messages, None), messages


@pytest.mark.parametrize("name", NAMES)
def test_a_known_way_gives_what_the_template_gives(name: str, material: Path, taken: list[Trace]) -> None:
    _compare(load_template(material, name), 60, seed=1)
    assert len(taken) > 10 or name in PARTS_ONLY


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_a_known_way_gives_what_the_template_gives_in_many_chats(name: str, material: Path) -> None:
    _compare(load_template(material, name), 1500, seed=2)


ASKED = (
    "{{ m.content }}",
    "{{ m.content|trim }}|{{ m.content|upper }}|{{ m.content.lower() }}|{{ m.content|string }}",
    "{% if '</think>' in m.content %}{{ m.content.split('</think>')[-1].lstrip('\\n') }}{% else %}-{% endif %}",
    "{{ m.content.split('<think>')[0] }}{{ m.content.split('a')[-1] }}",
    "{% for part in m.content.split('a') %}[{{ part }}]{% endfor %}",
    "{{ 'x' ~ m.content ~ 1 ~ none }}",
    "{{ ('<' + m.content + '>').replace('a', 'b').strip('<') }}",
    "{{ 'blank' if not m.content else 'a' if m.content == 'a' else m.content != 'Hello' }}",
    "{{ (m.content|trim|length) > 0 }}{{ 'some' if m.content|length else 'none' }}",
    "{{ m.content|default('x') }}{{ m.content|d('y', true) }}{{ m.more|default('z') }}",
    "{{ m.content is string }}{{ m.content is mapping }}{{ m.content is none }}{{ m.content is sequence }}",
    "{% set ns = namespace(text='') %}{% set ns.text = ns.text + m.content %}{{ ns.text }}",
    "{% macro show(text, twice=false) %}{{ text }}{{ text if twice }}{% endmacro %}{{ show(m.content, true)|trim }}",
    "{% set held %}<{{ m.content }}>{% endset %}{{ held }}{{ held|trim }}",
    "{{ messages|map(attribute='content')|list|length }}{{ (messages|last).content }}",
    "{{ m.get('content') }}{{ m['content'] }}{% for key, value in m.items() %}{{ key }}={{ value }}{% endfor %}",
    "{{ m.content == messages[0].content }}",
)
"""What is followed."""

REFUSED = (
    "{{ m.content[1:] }}",
    "{{ m.content[0] }}",
    "{{ m.content|length }}",
    "{{ m.content|length == 2 }}",
    "{{ m.content|tojson }}",
    "{{ m|tojson }}",
    "{{ m }}",
    "{{ m.content|reverse }}",
    "{{ m.content|list }}",
    "{{ m.content|int }}",
    "{{ '%s!' % m.content }}",
    "{{ '%s!'|format(m.content) }}",
    "{{ '{}'.format(m.content) }}",
    "{{ m.content * 2 }}",
    "{{ m.content < 'b' }}",
    "{{ m.content in ['a', 'Hello'] }}{{ {'a': 1}[m.content] }}",
    "{{ {m.content: 1} }}",
    "{{ messages|map(attribute='content')|join('+') }}",
    "{{ messages|map(attribute='content')|sort|first }}",
    "{{ messages|groupby('content')|length }}",
    "{% for c in m.content %}{{ c }}.{% endfor %}",
    "{% for c in m.content.split() %}{{ c }}.{% endfor %}",
    "{{ m.content.split('<think>')|first }}{{ m.content.split('a')|last }}",
    "{{ m.content in messages[0].content }}",
    "{{ m.content.split('a')|length }}{{ m.content.split('a')[1] }}",
    "{{ m.content.title() }}{{ m.content.encode() }}",
    "{{ m.content is sameas 'a' }}{{ m.content is eq 'a' }}",
    "{{ loop.changed(m.content) }}",
    "{{ m.content.startswith(messages[0].content) }}",
    "{{ [m.content, 'a']|unique|list|length }}",
    "{{ raise_exception(m.content) if m.content == 'a' else 'fine' }}",
    "{{ m.content|safe }}{{ m.content|e }}",
    "{{ [1, 2, 3]|random }}",
)
"""What a hole cannot stand for."""


@pytest.mark.parametrize("body", [*ASKED, *REFUSED])
def test_whatever_a_template_does_with_a_text_the_next_row_is_rendered_as_if_it_were_the_first(body: str) -> None:
    source = "{% for m in messages %}{{ m.role }}:" + body + "\n{% endfor %}"
    box, fresh, draw = Sandbox(source, None, {}), random.Random(3), random.Random(4)
    for _ in range(14):
        messages = _chat(draw)
        random.seed(fresh.random())
        state = random.getstate()
        found = _render(box, messages, "")
        random.setstate(state)
        assert found == _render(Sandbox(source, None, {}), messages, None), messages


@pytest.mark.parametrize("body", ASKED)
def test_what_templates_do_with_texts_is_followed(body: str, taken: list[Trace]) -> None:
    box = Sandbox("{% for m in messages %}" + body + "{% endfor %}", None, {})
    for text in ("Hello", "there", "old", "friend"):
        assert isinstance(_render(box, [{"role": "user", "content": text}], ""), Trace)
    assert taken


def test_other_arguments_go_another_way() -> None:
    template = make_template("{% for m in messages %}{{ m.content }}{{ mood }}{% endfor %}")
    for mood in ("!", "?", "!", "?", "!", "?"):
        trace = template.trace([{"role": "user", "content": "so"}], None, None, {"mood": mood})
        assert trace.text == f"so{mood}"


def test_any_number_of_shapes_is_forgotten_in_time() -> None:
    box = Sandbox("{% for m in messages %}{{ m.content }}{% endfor %}", None, {})
    for i in range(3000):
        _render(box, [{"role": f"role {i}", "content": "x"}], "")
    assert len(box._shapes) <= sandbox._SHAPES_KEPT


@pytest.mark.parametrize(
    ("body", "texts"),
    [
        ("{% if m.content.text is defined %}{{ m.content|trim }}{% else %}{{ m.content }}{% endif %}", ("a", " c ")),
        ("{% if m.content.parts %}{{ m.content|trim }}{% else %}{{ m.content }}{% endif %}", ("a", " c ")),
        ("{% for p in m.content.blocks %}-{% else %}{{ m.content }}{% endfor %}", ("a", "b")),
        ("{{ m.content['text']|default('none') }}{{ m.content.a == m.content.b }}", ("a", "b")),
        ("{{ m.content.strip is callable }}{{ m.content.__class__ is defined }}", ("a", "b")),
        (
            "{% macro f() %}<b>{% filter safe %}<a>{% endfilter %}{% endmacro %}{{ m.content == f() }}",
            ("a", "<b><a>", "<b>&lt;a&gt;"),
        ),
        ("{{ ['a', 'b'][lipsum(n=1)|length % 2] is defined }}{{ m.content }}", ("a", "b")),
    ],
)
def test_an_attribute_of_a_text_and_marked_up_text_are_what_they_are(body: str, texts: tuple[str, ...]) -> None:
    source = "{% for m in messages %}" + body + "{% endfor %}"
    box = Sandbox(source, None, {})
    for text in (texts[0], texts[0], *texts):
        messages: list[Message] = [{"role": "user", "content": text}]
        assert _render(box, messages, "") == _render(Sandbox(source, None, {}), messages, None)


@pytest.mark.parametrize(
    ("source", "first", "then"),
    [
        ("{% for k in opts %}{{ k }}{% endfor %}", {"opts": {"a": 1, "b": 2}}, {"opts": {"b": 2, "a": 1}}),
        ("{{ 'D' if strftime_now }}", {}, {"strftime_now": None}),
        ("{% set ns = namespace(x=1) %}{{ ns.x }}", {}, {"namespace": "boo"}),
    ],
)
def test_arguments_between_which_a_template_can_tell_are_told_apart(
    source: str, first: dict[str, Any], then: dict[str, Any]
) -> None:
    source = "{% for m in messages %}{{ m.content }}{% endfor %}" + source
    template, messages = make_template(source), [{"role": "user", "content": "so"}]

    def shown(of: ChatTemplate, arguments: dict[str, Any]) -> str:
        try:
            return of.trace(messages, None, None, arguments).text
        except RowError as error:
            return error.detail

    for arguments in (first, first, first, then):
        found = shown(template, arguments)
    assert found == shown(make_template(source), then)


def test_a_template_that_writes_what_is_no_text_rejects_the_row() -> None:
    for source in ("{% filter length %}abc{% endfilter %}", "{{ 'long role'|truncate(2) }}"):
        assert isinstance(_render(Sandbox(source, None, {}), [{"role": "user", "content": "x"}], ""), str)


def test_ways_that_rarely_serve_are_given_up() -> None:
    box = Sandbox(
        "{% for m in messages %}{% for t in 'abcdefghij' %}{{ t in m.content }}{% endfor %}{% endfor %}", None, {}
    )
    draw = random.Random(5)
    for _ in range(500):
        text = "".join(letter for letter in "abcdefghij" if draw.random() < 0.5)
        messages: list[Message] = [{"role": "user", "content": text}]
        assert _render(box, messages, "") == _render(box, messages, None)
    assert [shape.ways for shape in box._shapes.values()] == [[]]


def test_what_cannot_be_followed_is_not_tried_for_ever() -> None:
    box = Sandbox("{% for m in messages %}{{ m.content[1:] }}{% endfor %}", None, {})
    for i in range(3000):
        _render(box, [{"role": f"role {i // 4}", "content": "x"}], "")
    assert box._tries <= sandbox._TRIES_AHEAD + 1


def test_long_conversations_and_roles_are_rendered_each_time() -> None:
    box = Sandbox("{% for m in messages %}{{ m.content }}{% endfor %}", None, {})
    for messages in ([{"role": "user", "content": "x"}] * 65, [{"role": "r" * 65, "content": "x"}]):
        for _ in range(3):
            _render(box, messages, "")
    assert not box._shapes
