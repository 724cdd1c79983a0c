"""Requests are many at once, and each partition's are few; what a late store costs is in `make bench`."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from etl import jobs
from etl.pipeline import EXPECTED_WORKERS
from etl.watcher import Watcher
from tests.jobs import config, jsonl, small_rows, upload, workers
from tests.servers import Proxy, start_proxy

PATIENCE = 30.0
"""Seconds that a held request waits for the one that should be on its way beside it."""


@pytest.fixture
def proxy(moto: str) -> Iterator[Proxy]:
    """A proxy in front of the server, which counts and, when told to, delays or holds requests."""
    with start_proxy(moto) as started:
        yield started


@pytest.fixture(scope="module")
def scheduler() -> Iterator[str]:
    """The address of a cluster of one worker process: what is at the same time is so within it."""
    with workers(1) as client:
        yield client.scheduler.address


class OnStart(Watcher):
    """Calls back when the survey is over and the partitions begin."""

    def __init__(self, call: Any) -> None:
        self.call = call

    def start(self, total: int, done: int) -> None:
        del total, done
        self.call()


def test_the_objects_of_a_partition_are_fetched_at_the_same_time(
    s3: Any, bucket: str, proxy: Proxy, scheduler: str
) -> None:
    upload(s3, bucket, {f"{i}.jsonl": jsonl(small_rows(3, f"{i}-")) for i in range(8)})
    together = threading.Barrier(8)

    def hold(method: str, path: str, _count: int) -> bool:
        if method == "GET" and path.endswith(".jsonl"):
            together.wait(PATIENCE)  # nobody is answered before all eight have asked
        return False

    def arm() -> None:
        proxy.refusals, proxy.refuse_when = -1, hold

    each = 8 * EXPECTED_WORKERS  # a running cluster's worker takes its share of so many
    options = config(bucket, scheduler=scheduler, endpoint_url=proxy.endpoint_url, read_concurrency=each)
    result = jobs.run(options, OnStart(arm))
    assert (result.exit_code, result.partitions, result.rows, result.retries) == (0, 1, 24, 0)
    assert proxy.in_flight_peak >= 8
    assert not together.broken


def test_the_next_partition_is_read_while_a_part_is_written(s3: Any, bucket: str, proxy: Proxy, scheduler: str) -> None:
    upload(s3, bucket, {f"{i}.jsonl": jsonl(small_rows(3, f"{i}-")) for i in range(4)})
    lock = threading.Lock()
    read: set[str] = set()
    news = threading.Condition(lock)
    seen_while_writing: list[bool] = []

    def hold(method: str, path: str, _count: int) -> bool:
        with news:
            if method == "GET" and path.endswith(".jsonl"):
                read.add(path)
                news.notify_all()
            elif method == "PUT" and path.endswith(".parquet") and len(seen_while_writing) < 3:
                # the part is stored only when one more object than there are parts so far has been asked for
                wanted = len(seen_while_writing) + 2
                seen_while_writing.append(news.wait_for(lambda: len(read) >= wanted, PATIENCE))
        return False

    def arm() -> None:
        proxy.refusals, proxy.refuse_when = -1, hold

    options = config(bucket, scheduler=scheduler, endpoint_url=proxy.endpoint_url, partition_bytes=600)
    result = jobs.run(options, OnStart(arm))
    assert (result.exit_code, result.partitions, result.rows) == (0, 4, 12)
    assert seen_while_writing == [True, True, True]


def test_a_partition_costs_one_request_an_object_one_for_its_part_and_one_for_its_receipt(
    s3: Any, bucket: str, proxy: Proxy, scheduler: str
) -> None:
    size = len(jsonl(small_rows(3, "00-")))
    upload(s3, bucket, {f"{i:02}.jsonl": jsonl(small_rows(3, f"{i:02}-")) for i in range(20)})
    options = config(bucket, scheduler=scheduler, endpoint_url=proxy.endpoint_url, partition_bytes=4 * size)
    result = jobs.run(options)
    assert (result.exit_code, result.partitions, result.rows) == (0, 5, 60)
    spent: Counter[tuple[str, str]] = Counter()
    for (method, path), count in proxy.seen.items():
        kind = next((kind for kind in (".jsonl", ".parquet", "/receipts/") if kind in path), "rest")
        spent[method, kind] += count
    print(f"beside its partitions a run made {sum(n for (_, kind), n in spent.items() if kind == 'rest')} requests")
    # the look at the first object's first bytes is the one GET more
    assert {key: n for key, n in spent.items() if key[1] != "rest"} == {
        ("GET", ".jsonl"): 20 + 1,
        ("PUT", ".parquet"): 5,
        ("PUT", "/receipts/"): 5,
    }
    assert sum(n for (_, kind), n in spent.items() if kind == "rest") <= 30
