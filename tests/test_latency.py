"""A store that answers late: requests are many at once, each partition's are few, and a run hardly notices."""

from __future__ import annotations

import statistics
import threading
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any

import dask
import pytest
from distributed import LocalCluster

from etl import jobs
from etl.cluster import SETTINGS
from etl.config import RunConfig
from etl.pipeline import EXPECTED_WORKERS
from etl.watcher import Watcher
from tests.jobs import config, jsonl, small_rows, stored, upload
from tests.rows import jsonl as as_lines
from tests.rows import mixed_rows
from tests.servers import Proxy, start_proxy

LATENCY = 0.05
OBJECTS = 200
PAIRS = 3
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
    with (
        dask.config.set(SETTINGS),
        LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address="127.0.0.1:0", silence_logs=50) as cluster,
    ):
        yield cluster.scheduler_address


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


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_50_ms_more_on_each_request_cost_a_run_of_200_objects_less_than_a_tenth(
    s3: Any, bucket: str, proxy: Proxy
) -> None:
    rows = mixed_rows(4000, seed=11)
    bodies = [as_lines(islice(rows, 200)) for _ in range(20)]
    upload(s3, bucket, {f"{at:03}.jsonl": bodies[at % len(bodies)] for at in range(OBJECTS)})
    shares = [delayed_share(bucket, proxy, pair) for pair in range(PAIRS)]
    print(f"with 50 ms on each request a run takes {', '.join(f'{share:.3f}' for share in shares)} of the time without")
    assert statistics.median(shares) < 1.1


def delayed_share(bucket: str, proxy: Proxy, pair: int) -> float:
    """The time of a run with the latency over that of one without, one after the other; which is first alternates."""
    seconds = {}
    for latency in (0.0, LATENCY) if pair % 2 else (LATENCY, 0.0):
        proxy.latency = latency
        options = vars(config(bucket, endpoint_url=proxy.endpoint_url, workers=2))
        result = jobs.run(RunConfig(**{**options, "output": f"s3://{bucket}/{pair}-{latency}/"}))
        assert (result.exit_code, result.rows) == (0, OBJECTS * 200)
        seconds[latency] = result.seconds
        print(f"{latency * 1000:2.0f} ms: {result.seconds:6.2f} s, of it {stages(f's3://{bucket}/{pair}-{latency}')}")
    return seconds[LATENCY] / seconds[0.0]


def stages(output: str) -> str:
    """Seconds by stage over all partitions."""
    spent: Counter[str] = Counter()
    for receipt in stored(output).receipts:
        spent.update(receipt["run"]["stages"])
    return ", ".join(f"{stage} {seconds:.2f}" for stage, seconds in spent.items())
