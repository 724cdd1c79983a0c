"""Installed sources and documentation -> distinct chat completions as JSON lines, 500 to an object.

Rows are like those of the job that etl was born for: a short prompt, long thinking, an answer; 8 KB in the median. No
paragraph is used twice until all are used up, and then with other words in it: repeated text would flatter an encoder
that remembers words.
"""

from __future__ import annotations

import json
import os
import random
import re
import statistics
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final

from tests.rows import SCRIPTS

ROWS_AN_OBJECT: Final = 500
MEDIAN_BYTES: Final = 8000
_KINDS: Final = (".py", ".md", ".rst", ".txt", "METADATA")
_LARGEST_FILE: Final = 2_000_000
_COMMON: Final = re.compile(r"\b(?:self|the|return|name|value|of|if|import)\b")
_LETTERS: Final = "abcdeghiklmnoprstuvz"


@dataclass(frozen=True, slots=True)
class Corpus:
    """Files of JSON lines in order, and what is in them. `repeats`: how often the source text was gone through."""

    files: tuple[Path, ...]
    rows: int
    bytes: int
    median_bytes: int
    repeats: float

    def first(self, rows: int) -> tuple[list[Path], int, int]:
        """The first files that hold `rows` rows, with their rows and bytes."""
        files = list(self.files[: -(-rows // ROWS_AN_OBJECT)])
        return files, min(self.rows, len(files) * ROWS_AN_OBJECT), sum(path.stat().st_size for path in files)


def source_files() -> list[Path]:
    """Every text file of the standard library and of the installed packages, in name order."""
    found = []
    for base in sorted({sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")}):
        for folder, _, names in os.walk(base):
            found += [Path(folder, name) for name in names if name.endswith(_KINDS)]
    return sorted(found)


def paragraphs(rng: random.Random, wanted: int) -> list[str]:
    """About `wanted` characters of distinct pieces of 60 to 1,200 in a drawn order, number tables left out."""
    files = source_files()
    rng.shuffle(files)
    seen: dict[str, None] = {}
    size = 0
    for path in files:
        if size >= wanted:
            break
        if path.stat().st_size > _LARGEST_FILE:
            continue
        text = path.read_text("utf-8", "replace").replace("<|", "<").replace("think>", "thought>")
        for piece in map(str.strip, re.split(r"\n\s*\n", text)):
            if 60 <= len(piece) <= 1200 and piece not in seen and not _is_numbers(piece):
                seen[piece] = None
                size += len(piece) + 2
    pieces = list(seen)
    rng.shuffle(pieces)
    return pieces


def _is_numbers(piece: str) -> bool:
    # tables of expected values, of which scientific packages hold more than anybody's thoughts do
    raw = piece.encode()
    return len(raw) - len(raw.translate(None, b"0123456789")) > len(raw) / 10


class Writer:
    """Takes text off the paragraphs, from the first to the last, then again with other words in them."""

    def __init__(self, rng: random.Random, pieces: list[str]) -> None:
        self._rng = rng
        self._pieces = pieces
        self._at = 0

    @property
    def repeats(self) -> float:
        """How often the paragraphs were gone through."""
        return self._at / len(self._pieces)

    def text(self, size: int) -> str:
        """About `size` characters; one in seven holds a sentence in another script."""
        taken, length = [], 0
        while length < size:
            round_, at = divmod(self._at, len(self._pieces))
            piece = _COMMON.sub(self._other_word, self._pieces[at]) if round_ else self._pieces[at]
            self._at += 1
            taken.append(piece)
            length += len(piece) + 2
        if self._rng.random() < 1 / 7:
            taken.append(self._rng.choice(SCRIPTS))
        return "\n\n".join(taken)

    def _other_word(self, _: re.Match[str]) -> str:
        return "".join(self._rng.choices(_LETTERS, k=self._rng.randint(3, 7)))

    def row(self, number: int) -> dict[str, Any]:
        """A question, and a reply of which two thirds are thought; the size is drawn log-normally."""
        size = max(200, int(self._rng.lognormvariate(0, 0.5) * MEDIAN_BYTES * 0.75))
        question = {"role": "user", "content": self.text(self._rng.randint(40, 500))}
        reply = {"role": "assistant", "reasoning_content": self.text(size * 2 // 3), "content": self.text(size // 3)}
        return {"id": f"row-{number:07d}", "messages": [question, reply], "finish_reason": "stop"}


def write_corpus(folder: Path, rows: int, seed: int = 0) -> Corpus:
    """`rows` rows in files below `folder`, which is made."""
    folder.mkdir(parents=True)
    rng = random.Random(seed)
    writer = Writer(rng, paragraphs(rng, rows * MEDIAN_BYTES * 5 // 4))
    lines = (json.dumps(writer.row(at), ensure_ascii=False).encode() + b"\n" for at in range(rows))
    files: list[Path] = []
    sizes: list[int] = []
    while chunk := list(islice(lines, ROWS_AN_OBJECT)):
        files.append(folder / f"{len(files):05d}.jsonl")
        files[-1].write_bytes(b"".join(chunk))
        sizes += map(len, chunk)
    return Corpus(tuple(files), len(sizes), sum(sizes), int(statistics.median(sizes)), writer.repeats)


def read_rows(files: list[Path]) -> Iterator[dict[str, Any]]:
    """The rows of the files."""
    for path in files:
        with path.open("rb") as lines:
            yield from map(json.loads, lines)
