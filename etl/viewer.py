"""Token ids + loss mask -> stretches of text that are trained or not, with invisible characters made visible."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from tokenizers import Tokenizer

from etl.records import TokenizerSpec


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive tokens of one kind, decoded."""

    text: str
    trained: bool
    tokens: int


def stretches(input_ids: Sequence[int], loss_mask: Sequence[int], spec: TokenizerSpec) -> Iterator[Stretch]:
    """The row's text cut where the mask changes; a character split over two tokens shows as U+FFFD at a cut."""
    decode = Tokenizer.from_str(spec.backend_json).decode
    for trained, group in groupby(zip(loss_mask, input_ids, strict=True), key=lambda pair: pair[0]):
        ids = [token for _, token in group]
        yield Stretch(decode(ids, skip_special_tokens=False), bool(trained), len(ids))


def visible(text: str) -> str:
    """Line ends as `⏎` before the break, tabs as `→`, other control characters as their pictures."""
    shown = text.replace("\t", "→").replace("\r", "␍").replace("\n", "⏎\n")
    return "".join(chr(0x2400 + ord(c)) if c < " " and c != "\n" else c for c in shown)


def row_title(row: dict[str, Any]) -> str:
    """`id: 120 tokens, 90 trained`."""
    return f"{row['id']}: {row['n_tokens']} tokens, {row['n_loss_tokens']} trained"
