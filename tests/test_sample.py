"""The bundled sample is what its generator writes, and what the demo promises of it."""

from __future__ import annotations

import gzip
import json
from collections import Counter

import pytest
import zstandard

from tests import sample


def plain(name: str) -> bytes:
    raw = (sample.SAMPLE / name).read_bytes()
    if name.endswith(".gz"):
        return gzip.decompress(raw)
    return zstandard.ZstdDecompressor().decompressobj().decompress(raw) if name.endswith(".zst") else raw


@pytest.fixture(scope="module")
def made() -> dict[str, list[str]]:
    return sample.objects()


def test_the_committed_objects_are_what_the_generator_writes(made: dict[str, list[str]]) -> None:
    assert sorted(path.name for path in sample.SAMPLE.iterdir()) == sorted(made)
    assert [name for name, lines in made.items() if plain(name).decode().splitlines() != lines] == []


def test_it_is_small_and_under_one_per_cent_of_it_is_bad(made: dict[str, list[str]]) -> None:
    lines = [line for group in made.values() for line in group]
    assert (len(lines), len(lines) - sum(sample.REASONS.values())) == (sample.LINES, sample.ROWS)
    assert sum(sample.REASONS.values()) / len(lines) < 0.01
    assert sum(path.stat().st_size for path in sample.SAMPLE.iterdir()) < 700_000


def test_no_two_rows_say_the_same(made: dict[str, list[str]]) -> None:
    texts = Counter(line.partition(",")[2] for group in made.values() for line in group)
    assert [text[:80] for text, count in texts.items() if count > 1] == []


def test_it_holds_every_kind_of_row_that_the_demo_speaks_of(made: dict[str, list[str]]) -> None:
    rows = [json.loads(line) for group in made.values() for line in group if line.endswith("}")]
    messages = [m for row in rows for m in row.get("messages", [])]
    kinds = {
        "prompt": sum("prompt" in row for row in rows),
        "tools": sum("tools" in row for row in rows),
        "cut": sum(row.get("finish_reason") == "length" for row in rows),
        "several turns": sum(len(row.get("messages", [])) > 3 for row in rows),
        "thought apart": sum(bool(m.get("reasoning_content")) for m in messages),
        "thought inline": sum((m.get("content") or "").startswith("<think>") for m in messages),
        "system": sum(m["role"] == "system" for m in messages),
    }
    assert min(kinds.values()) >= 6, kinds
    text = "".join(line for group in made.values() for line in group)
    scripts = {"Hindi": "ह", "Chinese": "的", "Arabic": "ا", "Korean": "한", "Thai": "ไ", "emoji": "🎂"}
    assert [name for name, letter in scripts.items() if letter not in text] == []
