"""What can go wrong around a run: it ends in a whole output, or in one line and an output that can be finished."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dask
import pytest
from distributed import LocalCluster

from etl import jobs, preload
from etl import storage as storage_module
from etl.cluster import SETTINGS, pace
from etl.errors import EtlError
from etl.ledger import Places
from etl.pipeline import Gate
from etl.tables import serialize
from etl.watcher import Watcher
from tests.jobs import QWEN36, ROOT, config, etl, jsonl, small_rows, stored, upload
from tests.servers import Proxy, start_proxy
from tests.test_cluster import left_after

TORN = b'{"messages": [{"ro'


@pytest.fixture
def proxy(moto: str) -> Iterator[Proxy]:
    """A proxy in front of the server."""
    with start_proxy(moto) as started:
        yield started


@contextlib.contextmanager
def near(workers: int) -> Iterator[str]:
    """The address of a cluster of workers in this process, so that a test can reach what they do."""
    with (
        dask.config.set({**SETTINGS, **pace(workers)}),
        LocalCluster(
            n_workers=workers, threads_per_worker=1, processes=False, dashboard_address="127.0.0.1:0", silence_logs=50
        ) as cluster,
    ):
        yield cluster.scheduler_address


@pytest.fixture(scope="module")
def nearby() -> Iterator[str]:
    """The address of a cluster of two workers in this process."""
    with near(2) as address:
        yield address


@pytest.fixture
def run(bucket: str, nearby: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> Callable[..., jobs.RunResult]:
    """Run over the test's bucket through the proxy, with waits of a few milliseconds between tries."""
    monkeypatch.setattr(storage_module, "_FIRST_WAIT", 0.001)

    def start(**options: Any) -> jobs.RunResult:
        return jobs.run(config(bucket, scheduler=nearby, endpoint_url=proxy.endpoint_url, **options))

    return start


def fill(s3: Any, bucket: str, objects: int) -> None:
    """Objects of three rows each; one holds a bad line."""
    bodies = {f"{i:02}.jsonl": jsonl(small_rows(3, f"{i:02}-")) for i in range(objects)}
    upload(s3, bucket, {**bodies, "01.jsonl": bodies["01.jsonl"] + TORN})


def lasting(output: str) -> dict[str, Any]:
    """All that an output holds but the traces of single runs; receipts without what changes from run to run."""
    found, places = stored(output), Places(output)
    objects: dict[str, Any] = {
        name: body for name, body in found.objects.items() if not places.is_passing(f"{places.root}/{name}")
    }
    for receipt in found.receipts:
        name = f"__etl/receipts/part-{receipt['index']:07d}-{receipt['identity']}.json"
        objects[name] = {key: value for key, value in receipt.items() if key != "run"}
    return objects


# ------------------------------------------------------------------------------------------------ kill -9 the client


def words(bucket: str, proxy: Proxy) -> list[str]:
    """The command that is killed and given again."""
    return [
        *("run", f"s3://{bucket}/completions/", f"s3://{bucket}/tokens/", "--tokenizer", QWEN36, "--json"),
        *("--workers", "2", "--partition-bytes", "600", "--no-dashboard", "--max-reject-share", "0.1"),
        *("--endpoint-url", proxy.endpoint_url),
    ]


def killed_at(request: int, bucket: str, proxy: Proxy) -> None:
    """Start the command and kill it with the arrival of that request (1 is the first) from it or its workers."""
    with proxy.lock:
        proxy.total = 0
    process = subprocess.Popen(
        [sys.executable, "-m", "etl", *words(bucket, proxy)],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "ETL_TEST_MARK": bucket},
    )

    def kill(_method: str, _path: str, _count: int) -> bool:
        if proxy.total >= request:
            process.kill()
        return False

    proxy.refusals, proxy.refuse_when = -1, kill
    process.wait(timeout=120)
    proxy.refusals = 0
    assert process.returncode == -9


def whole_run(s3: Any, bucket: str, nearby: str, objects: int) -> dict[str, Any]:
    """The output of an undisturbed run with the command's options, taken out of the way."""
    fill(s3, bucket, objects)
    options = config(bucket, scheduler=nearby, partition_bytes=600, max_reject_share=0.1)
    result = jobs.run(type(options)(**{**vars(options), "output": f"s3://{bucket}/whole/"}))
    assert (result.exit_code, result.rows, result.rejected) == (0, 3 * objects, 1)
    return lasting(f"s3://{bucket}/whole")


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_kill_9_at_the_first_request_or_nine_random_ones_changes_no_byte(
    s3: Any, bucket: str, proxy: Proxy, nearby: str
) -> None:
    whole = whole_run(s3, bucket, nearby, 30)
    undisturbed = etl(*words(bucket, proxy))
    assert undisturbed.returncode == 0, undisturbed.stderr
    total = proxy.total
    assert lasting(f"s3://{bucket}/tokens") == whole
    moments = [1, *sorted(random.Random(9).sample(range(2, total + 1), 9))]  # at the first, the cluster begins
    for request in moments:
        clear(s3, bucket)
        killed_at(request, bucket, proxy)
        done = etl(*words(bucket, proxy), ETL_TEST_MARK=bucket)
        print(f"killed at request {request} of {total}; the same command then said: {done.stderr}")
        assert (done.returncode, "waiting" in done.stderr) == (0, False)
        assert lasting(f"s3://{bucket}/tokens") == whole, f"killed at request {request} of {total}"
        assert left_after(bucket, 60) == []


def test_what_workers_are_forked_from_waits_for_the_kit_as_long_as_there_is_somebody_to_write_it(
    tmp_path: Path,
) -> None:
    kit = tmp_path / "folder" / "kit.pickle"
    assert not preload._await(kit, os.getppid())  # the run is over and has taken its folder away
    kit.parent.mkdir()
    assert not preload._await(kit, os.getpid())  # that process is not, or no more, what started this one
    kit.touch()
    assert preload._await(kit, os.getppid())


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_kill_9_again_and_again_still_comes_to_its_end(s3: Any, bucket: str, proxy: Proxy, nearby: str) -> None:
    whole = whole_run(s3, bucket, nearby, 20)
    for request in (24, 30, 45):
        killed_at(request, bucket, proxy)
    done = etl(*words(bucket, proxy), ETL_TEST_MARK=bucket)
    assert done.returncode == 0, done.stderr
    assert lasting(f"s3://{bucket}/tokens") == whole
    assert left_after(bucket, 60) == []


def clear(s3: Any, bucket: str) -> None:
    """Delete the output of the command."""
    for entry in s3.list_objects_v2(Bucket=bucket, Prefix="tokens/").get("Contents", ()):
        s3.delete_object(Bucket=bucket, Key=entry["Key"])


# ----------------------------------------------------------------------------- a run that ends while its tasks go on


def test_an_interrupted_run_writes_nothing_on_a_running_cluster_once_its_lease_is_gone(
    s3: Any, bucket: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(s3, bucket, 6)
    sent, answered = threading.Event(), threading.Event()
    parts: list[str] = []

    def hold(method: str, path: str, _count: int) -> bool:
        if method == "PUT" and ".parquet" in path:
            parts.append(path)
            if path != parts[0]:
                sent.set()
                answered.wait(60)
        return False

    def shut(gate: Gate, seconds: float) -> bool:
        inside = not shut_at_once(gate, 0)
        if inside:
            answered.set()
        return shut_at_once(gate, seconds)

    class Impatient(Watcher):
        def advance(self, _receipt: Any) -> None:
            assert sent.wait(60)
            raise KeyboardInterrupt

    shut_at_once = Gate.shut
    monkeypatch.setattr(Gate, "shut", shut)
    proxy.refusals, proxy.refuse_when = -1, hold
    with near(1) as address:
        options = config(bucket, scheduler=address, endpoint_url=proxy.endpoint_url, partition_bytes=600)
        assert jobs.run(options, Impatient()).exit_code == 130
        at_its_end = stored(f"s3://{bucket}/tokens")
        answered.set()
    # A worker that has closed has seen its threads to their end.
    assert stored(f"s3://{bucket}/tokens") == at_its_end
    assert "__etl/lease.json" not in at_its_end.objects
    assert len(at_its_end.receipts) == 1
    assert len(at_its_end.parts) in {2, 3}  # the one or two requests that were under way have been waited for


def test_a_gate_that_is_shut_lets_nothing_in_and_is_not_kept_waiting_for_ever() -> None:
    gate = Gate()
    with gate:
        assert not gate.shut(0)
    assert gate.shut(60)
    with pytest.raises(EtlError, match="is over"), gate:
        pass


# --------------------------------------------------------------------------------------------- a store in difficulty


@pytest.mark.long
def test_slow_down_on_the_first_five_requests_of_each_key_costs_retries_and_no_row(
    s3: Any, bucket: str, run: Any, proxy: Proxy
) -> None:
    fill(s3, bucket, 4)
    proxy.refusals = 5
    proxy.refuse_when = lambda method, _path, _count: method in {"GET", "PUT"}
    result = run(partition_bytes=600, max_reject_share=0.1)
    assert (result.exit_code, result.error, result.rows, result.rejected) == (0, None, 12, 1)
    receipts = stored(f"s3://{bucket}/tokens").receipts
    # 5 for the object (the look at the first object's first bytes had used up its own) and 5 for the part, 5 more where
    # there are rejects; a receipt cannot count what it costs itself.
    assert [receipt["run"]["retries"] for receipt in receipts] == [5, 15, 10, 10]
    assert result.as_dict()["retries"] == 40


def test_a_store_that_stays_slow_ends_the_run_with_1_and_one_line(s3: Any, bucket: str, run: Any, proxy: Proxy) -> None:
    fill(s3, bucket, 3)
    proxy.refusals = -1
    proxy.refuse_when = lambda method, path, _count: method == "PUT" and "part-0000002" in path
    result = run(partition_bytes=600, max_reject_share=0.2)
    assert (result.exit_code, result.partitions_failed, result.rows) == (1, 1, 6)
    assert "the store still asked to slow down at the 8th try (SlowDown)" in str(result.error)
    assert len(str(result.error).splitlines()) == 1
    names = set(stored(f"s3://{bucket}/tokens").objects)
    assert not {name for name in names if "part-0000002" in name or "SUCCESS" in name or "lease" in name}
    proxy.refusals = 0
    assert run(partition_bytes=600, max_reject_share=0.2).exit_code == 0


def test_a_lost_reply_to_every_write_costs_a_retry_and_nothing_else(
    s3: Any, bucket: str, run: Any, proxy: Proxy, nearby: str
) -> None:
    whole = whole_run(s3, bucket, nearby, 4)
    proxy.drop_replies = 1
    result = run(partition_bytes=600, max_reject_share=0.1)
    assert (result.exit_code, result.error) == (0, None)
    assert lasting(f"s3://{bucket}/tokens") == whole


def test_an_object_replaced_between_listing_and_reading_fails_its_partition_by_name(
    s3: Any, bucket: str, run: Any, proxy: Proxy
) -> None:
    fill(s3, bucket, 3)
    was = s3.head_object(Bucket=bucket, Key="completions/02.jsonl")["ETag"].strip('"')

    def replace(method: str, path: str, count: int) -> bool:
        if method == "GET" and path.endswith("02.jsonl") and count == 1:
            upload(s3, bucket, {"02.jsonl": jsonl(small_rows(7))})
        return False

    proxy.refusals, proxy.refuse_when = -1, replace
    result = run(partition_bytes=600, max_reject_share=0.2)
    now = s3.head_object(Bucket=bucket, Key="completions/02.jsonl")["ETag"].strip('"')
    assert (result.exit_code, result.partitions_failed, result.rows) == (1, 1, 6)
    assert f"s3://{bucket}/completions/02.jsonl changed since it was listed: its ETag was {was}, is {now}" in str(
        result.error
    )
    assert not [name for name in stored(f"s3://{bucket}/tokens").objects if "part-0000002" in name]


def test_credentials_that_expire_in_the_middle_are_said_and_renewed_ones_finish_the_run(
    s3: Any, bucket: str, run: Any, proxy: Proxy
) -> None:
    fill(s3, bucket, 3)
    proxy.refusal, proxy.refusals = (400, "ExpiredToken", "The provided token has expired."), -1
    proxy.refuse_when = lambda _method, path, _count: ".parquet" in path
    result = run(partition_bytes=600, max_reject_share=0.2)
    assert (result.exit_code, result.partitions_failed) == (1, 3)
    assert "the credentials have expired; renew them" in str(result.error)
    assert len(str(result.error).splitlines()) == 1
    proxy.refusals = 0
    finished = run(partition_bytes=600, max_reject_share=0.2)
    assert (finished.exit_code, finished.rows) == (0, 9)


def test_an_exception_while_a_part_is_made_publishes_nothing_of_it(
    s3: Any, bucket: str, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(s3, bucket, 3)

    def fail_on_the_last(table: Any) -> bytes:
        if table["id"][0].as_py().startswith("02"):
            raise MemoryError("made up")
        return serialize(table)

    monkeypatch.setattr("etl.ledger.serialize", fail_on_the_last)
    result = run(partition_bytes=600, max_reject_share=0.2)
    assert (result.exit_code, result.partitions_failed) == (1, 1)
    assert "MemoryError: made up" in str(result.error)
    assert not [name for name in stored(f"s3://{bucket}/tokens").objects if "part-0000002" in name]
