"""20,000 rows of distinct text from S3 to S3: every row once, and the same bytes whatever the number of workers."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest

from etl import jobs
from etl.config import RunConfig
from tests.jobs import QWEN36, Stored, jsonl, stored, upload
from tests.rows import mixed_rows

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]

ROWS = 20_000
OBJECTS = 40


@pytest.fixture(scope="module")
def filled(moto: str) -> str:
    """A bucket with 40 objects of 500 rows, about 160 MB."""
    import boto3

    client = boto3.client("s3", endpoint_url=moto)
    client.create_bucket(Bucket="scale")
    rows = mixed_rows(ROWS, seed=5)
    each = ROWS // OBJECTS
    for at in range(OBJECTS):
        body = jsonl(islice(rows, each))
        upload(client, "scale", {f"{at:02}.jsonl": body})
    return "scale"


def tokenized(bucket: str, output: str, workers: int, moto: str) -> tuple[jobs.RunResult, Stored]:
    config = RunConfig(
        input=f"s3://{bucket}/completions/",
        output=f"s3://{bucket}/{output}/",
        tokenizer=QWEN36,
        endpoint_url=moto,
        partition_bytes="2MiB",
        workers=workers,
        no_dashboard=True,
    )
    return jobs.run(config), stored(f"s3://{bucket}/{output}")


def test_the_same_bytes_with_1_2_and_8_workers(filled: str, moto: str, monkeypatch: Any) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", moto)
    result, first = tokenized(filled, "one", 1, moto)
    assert (result.exit_code, result.rows, result.rejected, result.mismatched_rows) == (0, ROWS, 0, 0)
    ids = first.table["id"].to_pylist()
    assert (ids, len(set(ids))) == ([f"row-{at:07d}" for at in range(ROWS)], ROWS)
    for output, workers in (("two", 2), ("eight", 8)):
        result, other = tokenized(filled, output, workers, moto)
        assert result.exit_code == 0
        assert other.parts == first.parts, f"{workers} workers wrote other bytes"
        assert [{**r, "run": 0} for r in other.receipts] == [{**r, "run": 0} for r in first.receipts]
