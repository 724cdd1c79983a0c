"""Rendered -> ids and mask, with the real vocabularies, against the reference and the independent mask."""

from __future__ import annotations

import dataclasses
import json
import random
import re
import subprocess
import sys
import unicodedata
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from etl.config import RunConfig
from etl.encoding import Encoder
from etl.engines import CACHE_BYTES, Gigatoken, guarded, resident_bytes
from etl.errors import RowError, UsageError
from etl.pipeline import build_kit
from etl.positions import byte_places
from etl.records import Encoded, Rendered, TokenizerSpec
from tests.independent import independent_mask, load_plain
from tests.texts import HOSTILE, block_texts, hostile_texts

IM_START, IM_END, THINK, END_THINK = 248045, 248046, 248068, 248069


@pytest.fixture(scope="module")
def plain(qwen36: TokenizerSpec) -> tokenizers.Tokenizer:
    return load_plain(qwen36.backend_json)


def family_spec(folder: Path) -> TokenizerSpec:
    """A spec straight from the file, which is what transformers loads for these families."""
    return spec_of((folder / "tokenizer.json").read_text(encoding="utf-8"), folder.name)


def spec_of(backend_json: str, name: str = "test") -> TokenizerSpec:
    return TokenizerSpec(name, None, backend_json, None, {}, "0" * 64)


def rendered(text: str, *trained: str, **more: Any) -> Rendered:
    """The text with the given stretches of it trained, each found after the one before."""
    spans: list[tuple[int, int]] = []
    at = 0
    for piece in trained:
        start = text.index(piece, at)
        spans.append((start, at := start + len(piece)))
    return Rendered(text, tuple(spans), **more)


def row(encoded: Encoded, i: int) -> tuple[list[int], list[int]]:
    part = slice(encoded.splits[i], encoded.splits[i + 1])
    return encoded.ids[part].tolist(), encoded.mask[part].tolist()


def pieces(encoder: Encoder, plain: tokenizers.Tokenizer, item: Rendered) -> list[tuple[str, int]]:
    """Each token's text beside its mask."""
    ids, mask = row(encoder.encode([item]), 0)
    texts = [plain.decode([i], skip_special_tokens=False) for i in ids]
    return list(zip(texts, mask, strict=True))


def trained_text(encoder: Encoder, plain: tokenizers.Tokenizer, item: Rendered) -> str:
    ids, mask = row(encoder.encode([item]), 0)
    kept = [i for i, trained in zip(ids, mask, strict=True) if trained]
    text: str = plain.decode(kept, skip_special_tokens=False)
    return text


def scattered(texts: list[str], seed: int) -> list[Rendered]:
    """The texts with random spans and a cut, none inside a cluster that NFC could change."""
    draw = random.Random(seed)
    rows = []
    for text in texts:
        edges = [i for i in range(len(text)) if not _may_join(text[i])] + [len(text)]
        chosen = sorted(draw.sample(edges, min(6, len(edges))))
        spans = tuple(zip(chosen[::2], chosen[1::2], strict=False))
        rows.append(Rendered(text, spans, cuts=tuple(draw.sample(edges, 1))))
    return rows


def _may_join(character: str) -> bool:
    return bool(unicodedata.combining(unicodedata.normalize("NFD", character)[0])) or "\u1161" <= character <= "\u11c2"


# ── the mask, by eye ────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_end_of_turn_token_is_trained_and_the_newline_after_it_is_not(
    encoder: Encoder, plain: tokenizers.Tokenizer
) -> None:
    item = rendered("<|im_start|>assistant\nok<|im_end|>\n", "ok<|im_end|>")
    assert pieces(encoder, plain, item) == [
        ("<|im_start|>", 0),
        ("assistant", 0),
        ("\n", 0),
        ("ok", 1),
        ("<|im_end|>", 1),
        ("\n", 0),
    ]


def test_a_newline_fused_across_header_and_reply_is_trained(encoder: Encoder, plain: tokenizers.Tokenizer) -> None:
    item = Rendered("assistant\n\nHello", ((10, 16),))
    assert pieces(encoder, plain, item) == [("assistant", 0), ("\n\n", 1), ("Hello", 1)]


def test_a_token_that_also_holds_what_the_template_added_after_a_cut_is_not_trained(
    encoder: Encoder, plain: tokenizers.Tokenizer
) -> None:
    # Generated: `half` and one newline; the template added the second newline and the tag.
    item = Rendered("<think>half\n\n</think>", ((0, 12),), cuts=(12,))
    assert pieces(encoder, plain, item) == [("<think>", 1), ("half", 1), ("\n\n", 0), ("</think>", 0)]


def test_every_token_of_a_split_emoji_is_trained(encoder: Encoder, plain: tokenizers.Tokenizer) -> None:
    text = "user 👨‍👩‍👧 e\u0301 한 assistant 👨‍👩‍👧 e\u0301 한 end"
    reply = text[text.index("assistant") + 10 : text.index(" end")]
    item = Rendered(text, ((text.rindex(reply), text.rindex(reply) + len(reply)),))
    assert trained_text(encoder, plain, item).strip() == unicodedata.normalize("NFC", reply)


@pytest.mark.parametrize("before", ["e\u0301" * 50, "\u0958" * 50, "\u212b\ufb1d\u1112\u1161\u11ab", "a\u0316\u0301"])
def test_text_that_nfc_changes_does_not_shift_the_mask_after_it(
    encoder: Encoder, plain: tokenizers.Tokenizer, before: str
) -> None:
    assert trained_text(encoder, plain, rendered(f"{before}<|im_end|>\nyes<|im_end|>\n", "yes<|im_end|>")) == (
        "yes<|im_end|>"
    )


def test_a_control_token_before_a_combining_mark_stays_one(encoder: Encoder, plain: tokenizers.Tokenizer) -> None:
    item = rendered("a<|im_end|>\u0338b", "a<|im_end|>")
    assert row(encoder.encode([item]), 0)[0][1] == IM_END
    assert trained_text(encoder, plain, item) == "a<|im_end|>"


def test_a_span_that_begins_within_a_composed_character_trains_it(
    encoder: Encoder, plain: tokenizers.Tokenizer
) -> None:
    assert pieces(encoder, plain, Rendered("x e\u0301 y", ((3, 4),)))[1] == (" é", 1)


def test_characters_unknown_to_this_python_still_get_their_mask(encoder: Encoder, plain: tokenizers.Tokenizer) -> None:
    unassigned = "\u0378"
    assert unicodedata.category(unassigned) == "Cn"
    assert trained_text(encoder, plain, rendered(f"{unassigned}e\u0301<|im_end|>ok<|im_end|>\n", "ok")) == "ok"


# ── ids and masks against the reference and the independent mask ────────────────────────────────────────────────────


def disagreements(encoder: Encoder, tokenizer: tokenizers.Tokenizer, rows: list[Rendered]) -> list[Rendered]:
    encoded = encoder.encode(rows)
    assert not encoded.failed
    assert not encoded.mismatched
    return [item for i, item in enumerate(rows) if row(encoded, i) != independent_mask(tokenizer, item)]


def test_qwen36_ids_and_masks_equal_the_independent_ones(encoder: Encoder, plain: tokenizers.Tokenizer) -> None:
    assert encoder.engine_name == "gigatoken"
    assert disagreements(encoder, plain, scattered([*HOSTILE, *hostile_texts(500, seed=3)], seed=4)) == []


FAMILIES = [
    "llama3_1",
    *(pytest.param(f, marks=pytest.mark.long) for f in ("qwen3", "gemma3", "deepseek_v3", "gptoss")),
]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_families_ids_and_masks_equal_the_independent_ones(material: Path, family: str) -> None:
    spec = family_spec(material / "tokenizers" / family)
    found = Encoder(spec)
    assert (found.engine_name, found.why) == ("gigatoken", None)
    ordinary = "def f(x):\n    return  x  # naïve 日本 👍\n\n\n\t<b>It's 42</b>      \n"
    assert found._lengths is not None
    assert found._lengths[found.encode([Rendered(ordinary, ())]).ids].sum() == len(ordinary.encode())
    rows = scattered([*HOSTILE, *hostile_texts(300, seed=5)], seed=6)
    assert disagreements(found, load_plain(spec.backend_json), rows) == []


@pytest.mark.long
@pytest.mark.parametrize("family", ["qwen3_6", "llama3_1", "qwen3", "gemma3", "deepseek_v3", "gptoss"])
def test_text_of_any_unicode_block_gets_the_independent_ids_and_masks(
    material: Path, qwen36: TokenizerSpec, family: str
) -> None:
    spec = qwen36 if family == "qwen3_6" else family_spec(material / "tokenizers" / family)
    assert disagreements(Encoder(spec), load_plain(spec.backend_json), scattered(block_texts(1500, 7), seed=8)) == []


YOUNG_MARKS = (
    "\u07ca\u07f3\u07fd",
    "\u0627\u08d0\u0301\u0898",
    "e\u0301\u1ac1\u0323",
    "\u0e81\u0eba\u0ec8",
    "x\U0001e2ec\u0334",
)


def test_marks_that_the_libraries_order_differently_get_the_references_ids(
    encoder: Encoder, plain: tokenizers.Tokenizer
) -> None:
    # Unicode 10 in the tokenizers library, 14 in Python 3.11, 17 in gigatoken: each moves the marks that it knows
    texts = [f"{marks}{turned}<|im_end|>ok" for marks in YOUNG_MARKS for turned in (marks, marks[::-1])]
    assert disagreements(encoder, plain, [rendered(text, "ok") for text in texts]) == []
    assert encoder.encode([rendered(texts[0], "ok"), rendered("e\u0301 ok", "ok")]).doubtful == 1


@pytest.mark.long
@pytest.mark.parametrize("family", ["qwen3_6", "deepseek_v3", "llama3_1"])
def test_no_character_alone_or_beside_marks_is_taken_otherwise_than_by_the_reference(
    material: Path, qwen36: TokenizerSpec, family: str
) -> None:
    spec = qwen36 if family == "qwen3_6" else family_spec(material / "tokenizers" / family)
    found = Encoder(spec, verify_share=0)
    assert found.engine_name == "gigatoken"
    plain = load_plain(spec.backend_json)
    for start in range(0x80, 0x34000, 256):
        characters = [chr(code) for code in range(start, start + 256) if not 0xD800 <= code < 0xE000]
        # those that tables do not know go to the reference by themselves, and would take the others with them
        doubtful = [c for c in characters if byte_places([Rendered(c, ())], found.truth.cut_out, nfc=True) == [None]]
        text = "|".join(map(in_company, sorted({*characters} - {*doubtful})))
        few = "|".join(map(in_company, doubtful[:4]))
        encoded = found.encode([Rendered(text, ()), Rendered(few, ())])
        assert row(encoded, 0)[0] == plain.encode(text, add_special_tokens=False).ids, f"U+{start:04X}"
        assert row(encoded, 1)[0] == plain.encode(few, add_special_tokens=False).ids, f"U+{start:04X}"


def in_company(c: str) -> str:
    """The character beside letters, digits, quotes, blanks, itself, and marks of low and high classes."""
    return f"a{c}b {c}{c} 1{c}2'{c}s\n{c} {c}!.{c} x{c}\n x{c}\u0334 x\u0345{c} e{c}\u0301 \u0928{c}\u093c"


def test_both_engines_give_the_same_rows(encoder: Encoder) -> None:
    rows = scattered(hostile_texts(200, seed=7), seed=8)
    fast, slow = encoder.encode(rows), encoder.reference().encode(rows)
    assert encoder.reference().engine_name == "transformers"
    assert np.array_equal(fast.ids, slow.ids)
    assert np.array_equal(fast.mask, slow.mask)
    assert np.array_equal(fast.splits, slow.splits)


def test_a_row_is_the_same_in_any_batch(encoder: Encoder) -> None:
    rows = scattered(hostile_texts(40, seed=9), seed=10)
    whole = encoder.encode(rows)
    assert [row(whole, i) for i in range(len(rows))] == [row(encoder.encode([item]), 0) for item in rows]


def test_no_rows_are_an_empty_batch(encoder: Encoder) -> None:
    empty = encoder.encode([])
    assert (empty.splits.tolist(), len(empty.ids)) == ([0], 0)
    assert (empty.ids.dtype.name, empty.mask.dtype.name) == ("int32", "int8")


def test_four_threads_that_share_an_encoder_get_what_one_gets(encoder: Encoder) -> None:
    rows = scattered(hostile_texts(60, seed=11), seed=12)
    alone = encoder.encode(rows)
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(encoder.encode, [rows] * 8):
            assert np.array_equal(found.ids, alone.ids)
            assert np.array_equal(found.mask, alone.mask)


# ── rows of other kinds ─────────────────────────────────────────────────────────────────────────────────────────────


def test_a_row_that_came_tokenized_is_used_as_it_is(encoder: Encoder) -> None:
    encoded = encoder.encode([rendered("ok", "ok"), ([1, 2, 3], [4, 5]), ([], [])])
    assert row(encoded, 1) == ([1, 2, 3, 4, 5], [0, 0, 0, 1, 1])
    assert row(encoded, 2) == ([], [])


@pytest.mark.parametrize("ids", [[248077], [-1], [2**40], [2**70], ["7"], [None]])
def test_an_id_outside_the_vocabulary_rejects_its_row_alone(encoder: Encoder, ids: list[Any]) -> None:
    encoded = encoder.encode([rendered("ok", "ok"), ([1], ids), rendered("yes", "yes")])
    assert list(encoded.failed) == [1]
    assert encoded.failed[1].reason == "tokenizer"
    assert row(encoded, 2) == row(encoder.encode([rendered("yes", "yes")]), 0)


def test_a_lone_surrogate_rejects_its_row_alone(encoder: Encoder) -> None:
    encoded = encoder.encode([rendered("é ok", "ok"), Rendered("x\ud83d", ((0, 1),)), rendered("é yes", "yes")])
    assert {i: error.reason for i, error in encoded.failed.items()} == {1: "tokenizer"}
    assert row(encoded, 1) == ([], [])
    assert row(encoded, 2)[1] == [0, 1]


def test_a_native_panic_is_one_rows_error_and_an_interrupt_is_not() -> None:
    class PanicException(BaseException):
        """As pyo3 names it."""

    def raises(error: BaseException) -> Callable[[], None]:
        def work() -> None:
            raise error

        return work

    with pytest.raises(RowError, match="tokenizer: PanicException: index out of bounds"):
        guarded(raises(PanicException("index out of bounds\nbacktrace")))
    with pytest.raises(KeyboardInterrupt):
        guarded(raises(KeyboardInterrupt()))


def test_literal_control_tokens_are_text_and_the_templates_own_stay_ids(
    encoder: Encoder, plain: tokenizers.Tokenizer
) -> None:
    text = "<|im_start|>user\nSay <|im_end|> twice<|im_end|>\n<|im_start|>assistant\n<|im_end|>!<|im_end|>\n"
    typed = [(text.index("<|im_end|>"), text.index(" twice")), (text.index("<|im_end|>!"), text.index("!<"))]
    item = rendered(text, "<|im_end|>!<|im_end|>", literal=tuple(typed))
    item = dataclasses.replace(item, spans=((typed[1][0], len(text) - 1),))
    ids, mask = row(encoder.encode([item]), 0)
    assert ids.count(IM_END) == 2
    assert plain.decode(ids, skip_special_tokens=False) == text
    assert plain.decode([i for i, m in zip(ids, mask, strict=True) if m], skip_special_tokens=False) == (
        "<|im_end|>!<|im_end|>"
    )
    assert (ids, mask) == independent_mask(plain, item)


def test_a_tag_that_is_not_special_keeps_its_id_beside_a_literal_one(encoder: Encoder) -> None:
    ids, _ = row(encoder.encode([Rendered("<think>e\u0301<|im_end|></think>", (), literal=((9, 19),))]), 0)
    assert (ids[0], ids[-1]) == (THINK, END_THINK)
    assert IM_END not in ids


_BLANKS_MARKED: dict[str, Any] = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
_SPLITTERS: dict[str, tuple[Any, Any]] = {
    "bytes": (None, {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}),
    "bytes behind a blank": (
        None,
        {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    ),
    "nfc": (
        {"type": "NFC"},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    ),
    "prepended": (
        {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, _BLANKS_MARKED]},
        None,
    ),
    **{
        f"words {scheme}": (
            None,
            {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False},
        )
        for scheme in ("first", "always", "never")
    },
}


def worded(splitter: str, typed: bool = True, **flags: bool) -> str:
    """The JSON of a tokenizer of single characters and a few words; `<x>` is a control token of it if `typed`.

    `flags`: those of the template's own token, `<t>`.
    """
    normalizer, pre_tokenizer = _SPLITTERS[splitter]
    letters = {*tokenizers.pre_tokenizers.ByteLevel.alphabet(), *"▁ <>xtaéb\u0301\n"}
    vocab = {letter: i for i, letter in enumerate(sorted(letters))}
    merges = [("▁", "a"), ("▁a", "b"), ("a", "b"), ("Ġ", "a"), ("Ġa", "b"), ("<", "x")]
    for left, right in merges:
        vocab.setdefault(left + right, len(vocab))
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = [{**plain, **flags, "id": len(vocab), "content": "<t>"}]
    added += [{**plain, "id": len(vocab) + 1, "content": "<x>"}] * typed
    model = {"type": "BPE", "vocab": vocab, "merges": merges, "byte_fallback": False}
    whole = {"added_tokens": added, "normalizer": normalizer, "pre_tokenizer": pre_tokenizer, "model": model}
    return json.dumps({"version": "1.0", **whole})


@pytest.mark.parametrize("splitter", _SPLITTERS)
@pytest.mark.parametrize("flags", [{}, {"rstrip": True}, {"lstrip": True}, {"special": False}, {"normalized": True}])
def test_a_literal_control_token_is_what_it_is_to_a_tokenizer_that_does_not_know_it(
    splitter: str, flags: dict[str, bool]
) -> None:
    found = Encoder(spec_of(worded(splitter, **flags)), "transformers")
    innocent = load_plain(worded(splitter, typed=False, **flags))
    texts = ("<x>", "ab <x> ab", "<t>ab<x><x><t> <x> <t>ab ab", "ab <t> ab<t> a<x>b <t> ab<t>", "<t><x> a<t> <t>ab")
    for text in texts:
        literal = tuple(match.span() for match in re.finditer("<x>", text))
        encoded = found.encode([Rendered(text, ((0, len(text)),), literal=literal)])
        if encoded.failed:  # its own token is looked for when the text is another already
            assert flags == {"normalized": True}
            assert _SPLITTERS[splitter][0] is not None
            assert "<t>" in text
        else:
            assert encoded.ids.tolist() == innocent.encode(text, add_special_tokens=False).ids, text
            assert encoded.mask.all()


# ── the engines ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def small(qwen36: TokenizerSpec) -> TokenizerSpec:
    """A few hundred tokens, with Qwen3.6's normaliser, split and added tokens: quick to load, over and over."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    whole = json.loads(qwen36.backend_json)
    small = tokenizers.Tokenizer.from_str(json.dumps({**whole, "added_tokens": [], "model": _EMPTY_MODEL}))
    tokenizer.normalizer, tokenizer.pre_tokenizer = small.normalizer, small.pre_tokenizer
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([*HOSTILE, *hostile_texts(50, seed=0)], trainer)
    trained = json.loads(tokenizer.to_str())
    count = len(trained["model"]["vocab"])
    added = [{**token, "id": count + i} for i, token in enumerate(whole["added_tokens"])]
    return spec_of(json.dumps({**trained, "added_tokens": added}))


_EMPTY_MODEL = {"type": "BPE", "vocab": {}, "merges": []}


def changed(spec: TokenizerSpec, change: Callable[[dict[str, Any]], None]) -> TokenizerSpec:
    whole = json.loads(spec.backend_json)
    change(whole)
    return spec_of(json.dumps(whole))


def test_added_tokens_that_take_in_blanks_give_the_references_ids_and_leave_the_edges(small: TokenizerSpec) -> None:
    def absorb(whole: dict[str, Any]) -> None:
        for token in whole["added_tokens"]:
            token["lstrip"] = token["rstrip"] = token["content"] == "<|im_end|>"

    spec = changed(small, absorb)
    found, tokenizer = Encoder(spec), load_plain(spec.backend_json)
    rows = [
        rendered("x <|im_end|> \n y", "x"),
        rendered("x <|im_end|> \n y", "x <|im_end|>"),
        rendered("x <|im_end|> \n y", " \n y"),
        *scattered(hostile_texts(80, seed=13), seed=14),
    ]
    encoded = found.encode(rows)
    assert [row(encoded, i)[1] for i in range(3)] == [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
    assert disagreements(found, tokenizer, rows) == []


def test_an_engine_that_would_differ_is_not_taken_and_says_on_what(small: TokenizerSpec) -> None:
    def fold_case(whole: dict[str, Any]) -> None:
        whole["normalizer"] = {"type": "Lowercase"}

    spec = changed(small, fold_case)
    found = Encoder(spec)
    assert found.engine_name == "transformers"
    assert "gigatoken" in (found.why or "")
    with pytest.raises(UsageError, match="--engine gigatoken cannot take test"):
        Encoder(spec, "gigatoken")


def test_given_ids_may_reach_the_highest_of_a_vocabulary_with_holes(small: TokenizerSpec) -> None:
    def make_hole(whole: dict[str, Any]) -> None:
        last = max(whole["model"]["vocab"], key=whole["model"]["vocab"].get)
        whole["model"]["vocab"][last] = 3_000_000

    spec = changed(small, make_hole)
    assert spec.largest_id() == 3_000_000
    encoded = Encoder(spec).encode([([1], [3_000_000]), ([1], [3_000_001])])
    assert encoded.ids.tolist() == [1, 3_000_000]
    assert list(encoded.failed) == [1]


def test_a_tokenizer_without_fixed_lengths_takes_the_references_offsets(small: TokenizerSpec) -> None:
    def fold_case(whole: dict[str, Any]) -> None:
        whole["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Lowercase"}]}

    spec = changed(small, fold_case)
    rows = [rendered("user: ẞIR! reply: İch WEISS<|im_end|>\n", "İch WEISS<|im_end|>")]
    assert disagreements(Encoder(spec), load_plain(spec.backend_json), rows) == []


@pytest.mark.parametrize("splitter", _SPLITTERS)
def test_the_tokens_of_the_last_turn_are_counted_with_fixed_lengths_or_without(splitter: str) -> None:
    backend = worded(splitter)
    text = "ab<t>ab ab<t>\nab ab<t>"
    item = Rendered(text, ((5, 13), (14, 22)), last_turn=(14, 22))
    encoded = Encoder(spec_of(backend), "transformers").encode([rendered("ab<t>", "ab"), item, rendered("ab", "ab")])
    ends = [end for _, end in load_plain(backend).encode(text, add_special_tokens=False).offsets]
    assert encoded.last_turn_tokens == {1: sum(end > text.index("\n") + 1 for end in ends)}


def test_a_blank_before_each_stretch_does_not_pass_for_one_that_a_token_took_in() -> None:
    text = "<t>\n\nab<t>\n\nab<t>\n\n"
    for splitter in ("bytes", "bytes behind a blank"):
        backend = worded(splitter, rstrip=True)
        rows = [Rendered(text, ((5, 10),)), Rendered(text, ((12, 17),))]
        assert disagreements(Encoder(spec_of(backend), "transformers"), load_plain(backend), rows) == []


def test_a_difference_between_the_engines_is_counted_and_the_reference_puts_it_right(small: TokenizerSpec) -> None:
    def older_split(whole: dict[str, Any]) -> None:
        split = whole["pre_tokenizer"]["pretokenizers"][0]["pattern"]
        split["Regex"] = split["Regex"].replace(r"[\p{L}\p{M}]", r"\p{L}").replace(r"\p{M}", "")

    found = Encoder(small, verify_share=1)
    found._fast = Gigatoken(changed(small, older_split).backend_json)
    rows = [rendered("plain words", "words"), rendered("हिन्दी में", "हिन्दी")]
    encoded = found.encode(rows)
    assert (encoded.verified, encoded.mismatched) == (2, 1)
    again = found.reference().encode(rows)
    assert (again.verified, again.mismatched) == (0, 0)
    assert row(again, 1) == independent_mask(load_plain(small.backend_json), rows[1])


def test_every_batch_verifies_a_row_and_the_same_one_on_every_try(encoder: Encoder) -> None:
    rows = scattered(hostile_texts(30, seed=15), seed=16)
    assert encoder.encode(rows).verified == encoder.encode(rows).verified >= 1


def test_verify_share_none_verifies_nothing_and_one_everything(small: TokenizerSpec) -> None:
    found = Encoder(small, verify_share=0)
    rows = [rendered("ok", "ok")] * 5
    assert found.encode(rows).verified == 0
    assert found.verifying(1).encode(rows).verified == 5
    assert found.encode(rows).verified == 0


def test_another_share_to_verify_loads_no_tokenizer_anew(small: TokenizerSpec) -> None:
    spec = dataclasses.replace(small, chat_template="{% for m in messages %}{{ m.content }}{% endfor %}")
    some, every = (build_kit(spec, RunConfig(input="x", verify_share=share)).encoder for share in (0.5, 1))
    assert some._fast is not None
    assert some._fast is every._fast


def test_a_worker_that_encodes_imports_neither_transformers_nor_the_hub(small: TokenizerSpec, tmp_path: Path) -> None:
    (tmp_path / "backend.json").write_text(small.backend_json, encoding="utf-8")
    code = """
import sys
from pathlib import Path
from etl.encoding import Encoder
from etl.records import Rendered, TokenizerSpec
text = Path(sys.argv[1]).read_text(encoding="utf-8")
Encoder(TokenizerSpec("t", None, text, None, {}, "0")).encode([Rendered("ok", ((0, 2),))])
print(*sys.modules)
"""
    command = [sys.executable, "-c", code, str(tmp_path / "backend.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert not {"transformers", "huggingface_hub", "torch", "awkward", "dask"} & set(done.stdout.split())


# ── long ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.long
@pytest.mark.parametrize(
    "unit", ["a", "_", " ", "^", "\n", "的", "1", "\u0301\u0316", "e\u0301", "Qk9C+/", "<|im_end|>"]
)
def test_an_unbroken_run_of_a_million_characters_is_encoded_as_the_reference_does(encoder: Encoder, unit: str) -> None:
    text = unit * (1_000_000 // len(unit))
    item = Rendered(text, ((0, len(text)),))
    fast, slow = encoder.encode([item]), encoder.reference().encode([item])
    assert not fast.failed
    assert np.array_equal(fast.ids, slow.ids)
    assert fast.mask.all()


@pytest.mark.long
def test_memory_stays_bounded_over_text_that_never_repeats(qwen36: TokenizerSpec) -> None:
    found = Encoder(qwen36, verify_share=0)
    draw = random.Random(0)
    most = 0
    for batch in range(60):
        text = " ".join(draw.randbytes(6).hex().translate(_LETTERS) for _ in range(75_000))
        found.encode([Rendered(text, ((0, len(text)),))])
        if batch == 4:
            base = resident_bytes()
        if batch > 4:
            most = max(most, resident_bytes() - base)
    assert most < 2 * CACHE_BYTES


_LETTERS = str.maketrans("0123456789abcdef", "abcdefghijklmnop")
