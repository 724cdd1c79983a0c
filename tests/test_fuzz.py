"""Conversations x templates x tokenizers, drawn at random: what must hold of ids and masks whatever the row says.

Whose text a character is can be seen: what others than the assistant write stands between α and ω, an answer between
κ and λ, a thought between ρ and σ, and no template or other text of these tests holds any of the six.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import random
import re
import time
import unicodedata
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from etl.config import RunConfig
from etl.conversation import parse_row
from etl.errors import RowError
from etl.pipeline import build_kit
from etl.records import REASONS, Conversation, Encoded, Reject, Rendered, TokenizerSpec
from etl.rendering import render
from etl.template import ChatTemplate
from etl.tokenizer import load_named
from tests.chats import DATE, TOOLS
from tests.independent import independent_mask, load_plain

FAMILIES: Final = ("builtin:qwen3.6", "qwen3", "llama3_1", "gemma3", "deepseek_v3", "gptoss")
QUICK: Final = ("qwen3_6", "qwen3", "llama3_1", "gptoss", "deepseekv3", "gemma3", "phi3", "qwen3_6_training", "glm4moe")
CASES: Final = int(os.environ.get("FUZZ_CASES", "6000"))
"""Of the long test, over all tokenizers; FUZZ_CASES=50000 takes a quarter of an hour."""
ROWS_AT_ONCE: Final = 8
OTHERS, ANSWER, THOUGHT = (re.compile(f"{a}[^{a}{b}]*{b}") for a, b in ("αω", "κλ", "ρσ"))

# --- what is drawn ---

_PIECES: Final = (
    *("ok", "the answer", "x", "A", "7", "4200", "'s", "def f():\n\treturn 1\n", '{"a": "b"}', "[", "{{ x }}"),
    *("", " ", "  ", "\n", "\n\n", "\t", "\r\n", "\x0b", "\x1c", "\x85", "\u2028", "\u00a0", "\u3000", "\u200b"),
    *("é", "e\u0301", "\u0301", "\u0316", "\u0338", "\u212b", "\u0958", "한", "\u1112\u1161\u11ab", "क़", "ี่", "שׁ"),
    *("日本。", "👍🏽", "👨‍👩‍👧", "\ufe0f", "𝔘", "\x00", "\ufeff", "ſ", "İ", "▁", "\ue001", "\U000f0001", "ﬁ"),
    *("<think>", "</think>", "<think>\n\n</think>\n\n", "<think>\nwhy\n</think>\n\n", "[THINK]", "</", "<", "|>"),
    *("<|im_start|>", "<|im_end|>", "<|im_start|>assistant\n", "<|eot_id|>", "<|start_header_id|>", "</s>", "<s>"),
    *("<end_of_turn>", "<start_of_turn>model\n", "<bos>", "<|start|>", "<|end|>", "<|return|>", "<|message|>"),
    *("<｜Assistant｜>", "<｜end▁of▁sentence｜>", "<tool_call>", "</tool_call>", "<|endoftext|>", "<|user|>"),
    *("<|end", "[/INST]", "<|call|>", "{% y %}"),
)


def _mixtures(count: int) -> list[str]:
    """Pieces, and mixtures of up to six: drawn as one, since each draw costs hypothesis more than us."""
    draw = random.Random(5)
    return [*_PIECES, *("".join(draw.choices(_PIECES, k=draw.randint(2, 6))) for _ in range(count))]


TEXT: Final = st.sampled_from(_mixtures(4000))


def _between(marks: str, text: st.SearchStrategy[str] = TEXT) -> st.SearchStrategy[str]:
    return text.map(lambda said: marks[0] + said + marks[1])


_ANSWERS: Final = _between("κλ") | _between("κλ") | TEXT
_THOUGHTS: Final = st.none() | _between("ρσ") | _between("ρσ") | TEXT
_UNCLOSED: Final = TEXT.filter(lambda text: "</think>" not in text and "[THINK]" not in text)
_INLINE: Final = st.builds("<think>\n{}\n</think>\n\n{}".format, _between("ρσ", _UNCLOSED), _between("κλ"))
_ARGUMENTS: Final = st.sampled_from(
    [{}, {"city": "Málaga"}, {"n": 3, "b": [True, None, {"c": "z"}]}, {"s": '"<|im_end|>"'}, "{broken", '{"a": 1}', ""]
)
_CALL: Final = st.builds(
    lambda name, arguments: {"id": "call12345", "type": "function", "function": {"name": name, "arguments": arguments}},
    st.sampled_from(["f", "g", "look_up"]),
    _ARGUMENTS,
)
_MORE: Final[dict[str, st.SearchStrategy[Any]]] = {
    "tool_calls": st.lists(_CALL, min_size=1, max_size=2),
    "train": st.booleans(),
    "finish_reason": st.sampled_from(["stop", "length"]),
}
_BEGUN: Final = {"role": st.just("assistant")}
_REPLY: Final = st.one_of(
    *[st.fixed_dictionaries(_BEGUN | {"content": _ANSWERS}, optional=_MORE | {"reasoning_content": _THOUGHTS})] * 2,
    st.fixed_dictionaries(_BEGUN | {"content": _INLINE}, optional=_MORE),
)
_ASKED: Final = st.fixed_dictionaries({"role": st.just("user"), "content": _between("αω")})
_RESULT: Final = st.fixed_dictionaries(
    {"role": st.just("tool"), "content": _between("αω"), "tool_call_id": st.just("call12345"), "name": st.just("f")}
)
_SYSTEM: Final = st.fixed_dictionaries({"role": st.sampled_from(["system", "developer"]), "content": _between("αω")})
_EXCHANGE: Final = st.tuples(_ASKED, _REPLY).map(list)
_DISORDER: Final = st.lists(_ASKED | _REPLY | _RESULT, min_size=1, max_size=5)
_CHATS: Final = st.builds(
    lambda system, exchanges, rest: [*system, *(m for exchange in exchanges for m in exchange), *rest],
    st.just([]) | st.just([]) | _SYSTEM.map(lambda message: [message]),
    st.lists(_EXCHANGE, min_size=1, max_size=3),
    st.just([]) | st.just([]) | _DISORDER,
)
ROW: Final = st.fixed_dictionaries(
    {"messages": _CHATS | _CHATS | _DISORDER},
    optional={
        "tools": st.just(TOOLS),
        "finish_reason": st.sampled_from(["stop", "length"]),
        "chat_template_kwargs": st.sampled_from([{"enable_thinking": False}, {"preserve_thinking": True}, {"x": 1}]),
    },
)
OPTIONS: Final = st.fixed_dictionaries(
    {},
    optional={
        "turns": st.sampled_from(["last", "expand"]),
        "control_tokens": st.sampled_from(["literal", "reject"]),
        "truncated_completions": st.sampled_from(["reject", "train-end"]),
        **{
            name: st.booleans()
            for name in (
                *("no_train_think_open", "no_train_reasoning", "no_train_tool_calls", "no_train_end"),
                "train_empty_think",
            )
        },
    },
)


# --- what must hold ---


class Bench:
    """One tokenizer, with any of trl's templates."""

    def __init__(self, material: Path, family: str) -> None:
        self.folder = material / "templates"
        self.names = sorted(path.stem for path in self.folder.glob("*.jinja"))
        named = family if family.startswith("builtin:") else str(material / "tokenizers" / family)
        self.spec: TokenizerSpec = load_named(named)
        any_template = dataclasses.replace(self.spec, chat_template="{{ messages }}")
        self.encoder = build_kit(any_template, RunConfig(input="x", verify_share=0)).encoder
        self.plain = load_plain(self.spec.backend_json)
        self.truth = Text(self.plain)
        self.outcomes: Counter[str] = Counter()
        self.template = functools.cache(self._template)

    def _template(self, name: str) -> ChatTemplate:
        source = (self.folder / f"{name}.jinja").read_text(encoding="utf-8")
        spec = dataclasses.replace(self.spec, chat_template=source)
        return ChatTemplate.from_spec(spec, RunConfig(input="x", date=DATE))

    def run(self, name: str, rows: list[dict[str, Any]], options: dict[str, Any]) -> None:
        template, config = self.template(name), RunConfig(input="x", **options)
        done = [
            (item, rendered)
            for row in rows
            for item in parse_row(row, config, template.traits)
            if (rendered := self._render(item, template, config)) is not None and isinstance(item, Conversation)
        ]
        encoded = self.encoder.encode([rendered for _, rendered in done])
        assert encoded.failed == {}
        assert len(encoded.ids) == len(encoded.mask) == encoded.splits[-1]
        for i, (conversation, rendered) in enumerate(done):
            self._require_true(rendered, *_row(encoded, i))
            _require_owners(conversation, rendered, config, tags=template._sandbox.has_tags)

    def _render(self, item: Conversation | Reject, template: ChatTemplate, config: RunConfig) -> Rendered | None:
        reason = item.reason if isinstance(item, Reject) else ""
        rendered = None
        if isinstance(item, Conversation):
            try:
                rendered = render(item, template, config)
            except RowError as error:
                reason = error.reason
        assert rendered is not None or reason in REASONS
        self.outcomes[f"reject {reason}" if rendered is None else "row"] += 1
        return rendered

    def _require_true(self, rendered: Rendered, ids: list[int], mask: list[int]) -> None:
        assert len(ids) == len(mask)
        assert set(mask) <= {0, 1}
        assert self.plain.decode(ids, skip_special_tokens=False) == self.truth.normalised(rendered)
        if any(_joins(rendered.text, at) for at in (*rendered.cuts, *(at for span in rendered.spans for at in span))):
            self.outcomes["edge within a composed character"] += 1
            return
        assert (ids, mask) == independent_mask(self.plain, rendered)


class Text:
    """A rendered text as the tokenizer gives it back: NFC between added tokens, or with its own blanks."""

    def __init__(self, plain: tokenizers.Tokenizer) -> None:
        kept: list[str] = []
        normalizer = str(plain.normalizer)
        self._change: Callable[[str], str] = str
        if "NFC" in normalizer:
            self._change = functools.partial(unicodedata.normalize, "NFC")
            kept = [token.content for token in plain.get_added_tokens_decoder().values() if not token.normalized]
        elif "Replace" in normalizer:
            self._change = lambda text: text.replace("▁", " ")
        self._added = re.compile("|".join(map(re.escape, sorted(kept, key=len, reverse=True))) or r"(?!)")

    def normalised(self, rendered: Rendered) -> str:
        out, at = "", 0
        for found in self._added.finditer(rendered.text):
            if not any(start < found.end() and found.start() < end for start, end in rendered.literal):
                out += self._change(rendered.text[at : found.start()]) + found[0]
                at = found.end()
        return out + self._change(rendered.text[at:])


def _row(encoded: Encoded, i: int) -> tuple[list[int], list[int]]:
    part = slice(encoded.splits[i], encoded.splits[i + 1])
    return encoded.ids[part].tolist(), encoded.mask[part].tolist()


def _joins(text: str, at: int) -> bool:
    """Whether NFC may join or move the character at this place to those before it."""
    if not at < len(text):
        return False
    first = unicodedata.normalize("NFD", text[at])[0]
    return bool(unicodedata.combining(first)) or "\u1161" <= first <= "\u11c2"


def _require_owners(conversation: Conversation, rendered: Rendered, config: RunConfig, *, tags: bool) -> None:
    """Nobody else's text is trained; an answer and a thought are trained whole or not at all, and none is forgotten."""
    trained = np.zeros(len(rendered.text), bool)
    for start, end in rendered.spans:
        trained[start:end] = True
    for found in OTHERS.finditer(rendered.text):
        assert not trained[slice(*found.span())].any(), f"trained: {found[0]!r} in {rendered.text!r}"
    left_out = 0
    for found in ANSWER.finditer(rendered.text):
        part = trained[slice(*found.span())]
        # an answer up to a closing tag is a thought where the prompt has opened one
        whole = part.all() or not part.any() or (config.no_train_reasoning and "</think>" in found[0])
        assert whole, f"half trained: {found[0]!r} in {rendered.text!r}"
        left_out += not part.any()
    for found in THOUGHT.finditer(rendered.text):
        part = trained[slice(*found.span())]
        assert part.all() or not part.any(), f"half trained: {found[0]!r} in {rendered.text!r}"
        assert part.any() <= (not config.no_train_reasoning), f"trained: {found[0]!r} in {rendered.text!r}"
    replies = sum(message["role"] == "assistant" for message in conversation.messages)
    may_be = replies - len(conversation.trained) + rendered.counts.get("dropped_reasoning_turns", 0)
    # a cut answer may be taken for half a thought, and an author's tags may leave out what they like
    free = tags or (config.no_train_reasoning and conversation.cut)
    assert free or left_out <= may_be, f"{left_out} answers are not trained in {rendered.text!r}"


# --- the share of every test run, and all of it ---

_bench = functools.cache(Bench)


def _fuzz(bench: Bench, names: list[str], examples: int) -> int:
    """Draw and hold; the number of conversations that were tried."""
    tried = 0

    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(
        name=st.sampled_from(names),
        rows=st.lists(ROW, min_size=ROWS_AT_ONCE, max_size=ROWS_AT_ONCE),
        options=st.just({}) | OPTIONS,
    )
    def hold(name: str, rows: list[dict[str, Any]], options: dict[str, Any]) -> None:
        nonlocal tried
        tried += len(rows)
        bench.run(name, rows, options)

    hold()
    return tried


def test_whatever_a_conversation_says_its_ids_and_mask_are_true(material: Path) -> None:
    assert _fuzz(_bench(material, "builtin:qwen3.6"), list(QUICK), 20) >= 20 * ROWS_AT_ONCE


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("family", FAMILIES)
def test_thousands_of_conversations_under_every_template_and_tokenizer(material: Path, family: str) -> None:
    began, bench = time.monotonic(), _bench(material, family)
    bench.outcomes.clear()
    share = -(-CASES // len(FAMILIES))
    tried = _fuzz(bench, bench.names, -(-share // ROWS_AT_ONCE))
    seconds = time.monotonic() - began
    print(f"\n{family}: {tried} conversations in {seconds:.0f} s, {dict(bench.outcomes.most_common())}")
    assert tried >= share
