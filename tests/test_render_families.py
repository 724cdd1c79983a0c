"""The oracle: where a base template and its author's training variant render the same text, the same text is trained.

Exceptions are ours by rule, and each is told from the others here: blanks after the end token, an empty think block,
the first role header where the author trains it, and turns of which the template dropped something.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import transformers.utils.chat_template_utils as reference
from hypothesis import HealthCheck, given, settings

from etl.config import RunConfig
from etl.errors import RowError
from etl.records import Message, Rendered, Span
from etl.rendering import render, settle
from tests.chats import CONVERSATIONS, TOOLS, converse, load_template
from tests.test_rendering import MESSAGES

pytestmark = pytest.mark.usefixtures("pinned_clock")

# The author of GLM's variant lets a turn end with the header of the next one, which our contract counts to that one.
NEXT_HEADER: Final = {("glm4moe", "user last")}
FEW: Final = ("qwen3_6", "gptoss", "diffusion_gemma", "phi3", "glm4moe")


class Family:
    """A base template, and what the author of its training variant trains."""

    def __init__(self, material: Path, name: str) -> None:
        self.name = name
        self.base = load_template(material, name)
        self.variant = load_template(material, f"{name}_training")

    def authors(self, messages: list[Message], tools: Any) -> tuple[str, list[Span]] | None:
        """(text, spans) of the variant; None where it raises."""
        try:
            texts, spans = reference.render_jinja_template(
                [messages],
                tools=tools,
                chat_template=self.variant.source,
                return_assistant_tokens_mask=True,
                bos_token="<s>",
                eos_token="</s>",
            )
        except Exception:  # noqa: BLE001  whatever a template raises there
            return None
        return texts[0], spans[0]

    def compare(self, messages: list[Message], tools: Any = None) -> str:
        """How ours and the author's compare: same, by rule, other text, or why neither can be had."""
        try:
            conversation = converse(self.base, messages, tools=tools)
            ours = render(conversation, self.base, RunConfig(input="x"))
        except RowError as error:
            if error.reason not in {"template", "role"}:
                raise
            return f"reject {error.reason}"
        theirs = self.authors(settle(conversation, self.base), tools)
        if theirs is None:
            return "author raises"
        if theirs[0] != ours.text:
            return "other text"
        more = list(_without(ours.spans, theirs[1]))
        assert not more, f"trained beyond the author: {[ours.text[s:e] for s, e in more]}"
        return self._explain(ours, theirs[1])

    def _explain(self, ours: Rendered, theirs: list[Span]) -> str:
        missing = [(span, whole) for whole in theirs for span in _without([whole], ours.spans)]
        rules = {rule for span, whole in missing for rule in self._rules(ours, span, whole=span == whole)}
        assert "" not in rules, f"not trained: {[ours.text[slice(*span)] for span, _ in missing]}, {ours.counts}"
        return "same" if not rules else "by rule: " + ", ".join(sorted(rules))

    def _rules(self, ours: Rendered, span: Span, *, whole: bool) -> list[str]:
        text = ours.text[slice(*span)]
        header = re.escape(self.base.header(self.base.arguments))
        found = re.fullmatch(
            rf"(?P<header>{header})?(?P<prompt>{_PROMPT})?(?P<empty>{self.base.empty_thought.pattern})?(?P<blanks>\s*)",
            text,
        )
        if found and text:
            named = ("header", "prompt", "empty", "blanks")
            return [rule for rule in named if found[rule]]
        return ["dropped"] if whole and ours.counts.get("dropped_reasoning_turns") else [""]


_PROMPT: Final = "<｜tool▁outputs▁end｜>"
"""What DeepSeek's template writes behind the texts of tools when it is asked for the reply: no model generates it."""


def _without(spans: Iterable[Span], others: Iterable[Span]) -> Iterator[Span]:
    out = {at for start, end in others for at in range(start, end)}
    rest = sorted({at for start, end in spans for at in range(start, end)} - out)
    while rest:
        size = next((i for i in range(1, len(rest)) if rest[i] != rest[0] + i), len(rest))
        yield rest[0], rest[0] + size
        rest = rest[size:]


def _families(material: Path) -> list[str]:
    folder = material / "templates"
    names = [path.stem.removesuffix("_training") for path in sorted(folder.glob("*_training.jinja"))]
    return [name for name in names if (folder / f"{name}.jinja").exists()]


def _row_of_table(family: Family) -> dict[str, str]:
    outcomes = {}
    for title, messages in CONVERSATIONS.items():
        if (family.name, title) in NEXT_HEADER:
            outcomes[title] = "by rule: next header"
        else:
            outcomes[title] = family.compare(messages, TOOLS if title == "tools" else None)
    return outcomes


@pytest.mark.parametrize("name", FEW)
def test_what_the_author_trains_is_trained_but_for_named_rules(material: Path, name: str) -> None:
    outcomes = _row_of_table(Family(material, name))
    assert sum(outcome.startswith(("same", "by rule")) for outcome in outcomes.values()) >= 1


@pytest.mark.long
def test_every_family_and_conversation(material: Path) -> None:
    names = _families(material)
    assert len(names) == 31
    assert len(CONVERSATIONS) >= 25
    letters = {"same": "=", "by rule": "r", "other text": "t", "author raises": "a", "reject": "x"}
    print("\n= same   r same but for named rules   t other text   a author raises   x row rejected")
    totals: dict[str, int] = {}
    for name in names:
        outcomes = _row_of_table(Family(material, name))
        for outcome in outcomes.values():
            totals[outcome] = totals.get(outcome, 0) + 1
        shown = "".join(
            next(letters[key] for key in letters if outcome.startswith(key)) for outcome in outcomes.values()
        )
        print(f"{name:26}{shown}")
    for outcome, count in sorted(totals.items(), key=lambda item: -item[1]):
        print(f"{count:6} {outcome}")
    compared = sum(count for outcome, count in totals.items() if outcome.startswith(("same", "by rule")))
    assert compared >= 0.75 * len(names) * len(CONVERSATIONS)


@pytest.mark.long
def test_a_variant_rendered_by_us_trains_what_its_author_trains(material: Path) -> None:
    for name in _families(material):
        family = Family(material, name)
        family.base = family.variant
        for title, messages in CONVERSATIONS.items():
            outcome = family.compare(messages, TOOLS if title == "tools" else None)
            assert outcome != "other text", (name, title)


@pytest.mark.long
def test_fuzzed_conversations_train_no_more_and_no_less_than_the_author(material: Path) -> None:
    for name in _families(material):
        if name != "glm4moe":  # see NEXT_HEADER
            _fuzz(Family(material, name))


def _fuzz(family: Family) -> None:
    @settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(messages=MESSAGES)
    def compare(messages: list[Message]) -> None:
        family.compare(messages)

    compare()


def test_the_oracle_would_see_a_wrong_mask(material: Path) -> None:
    family = Family(material, "qwen3_6")
    text = "<|im_start|>assistant\nok<|im_end|>\n"
    assert family._explain(Rendered(text, ((22, 34),)), [(22, 35)]) == "by rule: blanks"
    with pytest.raises(AssertionError, match="not trained"):
        family._explain(Rendered(text, ((22, 24),)), [(22, 35)])
