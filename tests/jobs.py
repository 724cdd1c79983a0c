"""What the end-to-end tests share: rows, uploads, and how an output is read back."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from distributed import Client

from etl import cluster
from etl.builtin import builtin_spec
from etl.config import RunConfig
from etl.pipeline import PackedKit
from etl.storage import Storage

ROOT = Path(__file__).resolve().parent.parent
QWEN36 = "builtin:qwen3.6"


def chat(row_id: str, question: str, answer: str, reasoning: str | None = None) -> dict[str, Any]:
    """A row of one exchange."""
    reply = {"role": "assistant", "content": answer}
    if reasoning is not None:
        reply["reasoning_content"] = reasoning
    return {"id": row_id, "messages": [{"role": "user", "content": question}, reply]}


def small_rows(n: int, prefix: str = "r") -> list[dict[str, Any]]:
    """`n` distinct rows of a few dozen tokens."""
    return [chat(f"{prefix}{i}", f"What is {i} + {i}?", f"It is {2 * i}.", f"Twice {i}.") for i in range(n)]


def jsonl(rows: Iterable[dict[str, Any]]) -> bytes:
    """Rows as JSON lines."""
    return b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)


def upload(s3: Any, bucket: str, objects: dict[str, bytes]) -> None:
    """Objects under completions/."""
    for name, body in objects.items():
        s3.put_object(Bucket=bucket, Key=f"completions/{name}", Body=body)


def config(bucket: str, **options: Any) -> RunConfig:
    """s3://bucket/completions/ to s3://bucket/tokens/ with the Qwen3.6 vocabulary and no dashboard."""
    # By option, not by environment: a cluster that the tests share was started before with another environment.
    fixed = {"tokenizer": QWEN36, "no_dashboard": True, "endpoint_url": os.environ.get("AWS_ENDPOINT_URL")}
    return RunConfig(input=f"s3://{bucket}/completions/", output=f"s3://{bucket}/tokens/", **{**fixed, **options})


@contextlib.contextmanager
def workers(count: int) -> Iterator[Client]:
    """A client of worker processes that are forked, as a run's are, from one that has loaded the Qwen3.6 vocabulary."""
    options = RunConfig(input="in", output="out", tokenizer=QWEN36, workers=count, dashboard_address="127.0.0.1:0")
    with cluster.connect(options, PackedKit.pack("tests", builtin_spec(QWEN36), options)) as client:
        yield client


@dataclass(frozen=True)
class Stored:
    """Everything below an output, by its name there."""

    objects: dict[str, bytes]

    @property
    def parts(self) -> dict[str, bytes]:
        """Name -> bytes of the Parquet parts, in order."""
        return {name: body for name, body in sorted(self.objects.items()) if name.endswith(".parquet")}

    @property
    def receipts(self) -> list[dict[str, Any]]:
        """The receipts, in order."""
        names = sorted(name for name in self.objects if name.startswith("__etl/receipts/"))
        return [json.loads(self.objects[name]) for name in names]

    @property
    def rejects(self) -> list[dict[str, Any]]:
        """All rejects, in order."""
        names = sorted(name for name in self.objects if name.startswith("__etl/rejects/"))
        return [json.loads(line) for name in names for line in self.objects[name].splitlines()]

    @property
    def table(self) -> pa.Table:
        """All rows, in the order of the parts."""
        return pa.concat_tables(pq.read_table(pa.BufferReader(body)) for body in self.parts.values())


def stored(output: str) -> Stored:
    """The output as it lies in the store."""
    storage = Storage()
    found = storage.list(output.rstrip("/"))
    root = output.rstrip("/") + "/"
    return Stored({info.url.removeprefix(root): storage.get(info.url) or b"" for info in found})


def etl(*words: str, seconds: float = 240, **env: str) -> subprocess.CompletedProcess[str]:
    """`python -m etl …` as a user runs it."""
    return subprocess.run(
        [sys.executable, "-m", "etl", *words],
        cwd=ROOT,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
        timeout=seconds,
    )
