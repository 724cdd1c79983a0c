"""A few hundred rows -> proof that all recipes give the same ids, and the same masks but for two named rules.

newline after the end token    etl does not train it; `{% generation %}` blocks and what follows a prompt hold it
think opener                   etl trains `<think>` and its newline; by prefix they belong to the prompt
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import pyarrow.parquet as pq

from tests.bench.rivals import by_marks, by_prefix, tokenizer

RULES: Final = (
    "newline after the end token: 0 in etl, 1 in the others; "
    "think opener (`<think>` and its newline): 1 in etl and with generation marks, 0 by prefix"
)
_OPENER: Final = 2
"""Tokens of `<think>` and its newline."""


def check(rows: Iterable[dict[str, Any]], parts: Path, folder: str, plain: str, marked: str) -> int:
    """Compare etl's rows in the folder `parts` with both rivals' functions; the number of rows, all equal.

    `folder` holds the tokenizer; `plain` and `marked` are the chat template without and with generation marks. Raises
    SystemExit, naming the row, on the first difference.
    """
    ours = {row["id"]: row for part in sorted(parts.glob("*.parquet")) for row in pq.read_table(part).to_pylist()}
    checked = 0
    for row in rows:
        written = ours.pop(row["id"])
        ids, mask = written["input_ids"], written["loss_mask"]
        first = mask.index(1)
        by_rule = {
            "old recipe": (plain, by_prefix, [*mask[:first], *[0] * _OPENER, *mask[first + _OPENER : -1], 1]),
            "datasets, daft": (marked, by_marks, [*mask[:-1], 1]),
        }
        for name, (template, function, expected) in by_rule.items():
            loaded = tokenizer(folder, template)
            theirs = function(loaded, row["messages"])
            if theirs != (ids, expected):
                what = "ids" if theirs[0] != ids else "mask"
                raise SystemExit(f"{row['id']}: {name} has another {what} than etl; nothing was timed")
        checked += 1
    if ours or not checked:
        raise SystemExit(f"etl wrote {len(ours)} rows that are not in the input; nothing was timed")
    return checked
