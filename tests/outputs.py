"""Rows -> a finished output in a folder, by the code of a run but without a cluster, and what a test does to it."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from etl import jobs, ledger
from etl.cluster import StageClock
from etl.config import RunConfig
from etl.ledger import encode_json
from etl.pipeline import build_kit, transform
from etl.surveys import survey
from etl.tables import serialize
from tests.jobs import QWEN36, chat, jsonl, small_rows

TORN = b'{"messages": [{"ro\n'
BYTES = 1000
"""Of a partition."""


def make_output(folder: Path, objects: Mapping[str, bytes], *, partitions: int | None = None, **options: Any) -> Path:
    """An output of these objects; only the first `partitions` of it are done where that is given."""
    (folder / "in").mkdir(parents=True, exist_ok=True)
    for name, body in objects.items():
        (folder / "in" / name).write_bytes(body)
    return go_on(folder, partitions=partitions, **options)


def go_on(folder: Path, *, partitions: int | None = None, **options: Any) -> Path:
    """The output of what lies in the folder, with whatever is done of it already."""
    source, output = folder / "in", folder / "out"
    settings: dict[str, Any] = {
        "tokenizer": QWEN36,
        "partition_bytes": BYTES,
        "max_reject_share": 1,
        "verify_share": 1,
    } | options
    seen = survey(RunConfig(input=str(source), output=str(output), **settings))
    kit, books = build_kit(seen.spec, seen.config), jobs.Books(seen)
    books.open()
    for partition in seen.todo[:partitions]:
        clock = StageClock()
        outcome = transform(lambda p=partition: kit.read(p), kit, clock)  # type: ignore[misc]
        task = ledger.Task(str(output), kit.fingerprint, partition, time.perf_counter())
        part = ledger.make_part(outcome.table, clock)
        books.enter(partition, ledger.write_partition(kit.storage, task, outcome, part, clock))
    if partitions is None:
        ledger.write_run(seen.storage, seen.places, jobs.new_run_id(), books.close(lambda: None).as_dict())
    return output


def mixed_objects() -> dict[str, bytes]:
    """What makes eight partitions.

    The first has blank lines alone, the second six rows, one with a control token; then come five ranges of one object,
    the third of them with two rejects, and at last two rows.
    """
    typed = chat("typed", "What is <|im_end|>?", "A token.")
    long = jsonl(small_rows(15, "c")) + TORN + b'{"messages": []}\n' + jsonl(small_rows(15, "d"))
    return {
        "a.jsonl": b"\n" * BYTES,
        "b.jsonl": jsonl([*small_rows(5, "b"), typed]),
        "c.jsonl": long,
        "z.jsonl": jsonl(small_rows(2, "z")),
    }


@dataclass(frozen=True)
class Hands:
    """An output on which a test lays hands."""

    output: Path

    @property
    def stems(self) -> list[str]:
        """Of the partitions that have a receipt, in the plan's order."""
        return sorted(path.stem for path in self.receipts.iterdir())

    @property
    def receipts(self) -> Path:
        """The folder of receipts."""
        return self.output / "__etl" / "receipts"

    @property
    def success(self) -> Path:
        """SUCCESS."""
        return self.output / "__etl" / "SUCCESS"

    @property
    def plan(self) -> Path:
        """The plan."""
        return self.output / "__etl" / "plan.json"

    def part(self, index: int) -> Path:
        """The part of a partition."""
        return self.output / f"{self.stems[index]}.parquet"

    def receipt(self, index: int) -> Path:
        """The receipt of a partition."""
        return self.receipts / f"{self.stems[index]}.json"

    def rejects(self) -> Path:
        """The only rejects file."""
        (path,) = (self.output / "__etl" / "rejects").iterdir()
        return path

    def edit(self, path: Path, **values: Any) -> None:
        """Other values in a JSON file."""
        path.write_bytes(encode_json(json.loads(path.read_bytes()) | values))

    def value(self, path: Path, name: str) -> Any:
        """One value of a JSON file."""
        return json.loads(path.read_bytes())[name]

    def table(self, index: int) -> pa.Table:
        """The rows of a part."""
        return pq.read_table(pa.BufferReader(self.part(index).read_bytes()))

    def write(self, index: int, table: pa.Table, *, blessed: bool = False) -> None:
        """Other rows for a part; with `blessed` its receipt vouches for the new bytes."""
        body = serialize(table)
        self.part(index).write_bytes(body)
        if blessed:
            self.edit(self.receipt(index), size=len(body), sha256=hashlib.sha256(body).hexdigest())

    def set_value(self, index: int, column: str, value: Any, *, row: int = 0, blessed: bool = True) -> None:
        """One other value in a part. A function is given the old one."""
        table = self.table(index)
        values = table[column].to_pylist()
        values[row] = value(values[row]) if callable(value) else value
        at = table.schema.get_field_index(column)
        self.write(index, table.set_column(at, column, pa.array(values, table.schema.field(at).type)), blessed=blessed)
