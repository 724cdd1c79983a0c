"""One Dask task and one future a partition, nothing kept, nothing secret in the graph, nothing left behind."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import dask
import pytest
from dask.dataframe.dask_expr import new_collection
from dask.system import cpu_count
from distributed import Client, LocalCluster, SchedulerPlugin, futures_of, wait

from etl import cluster, jobs
from etl.errors import EtlError, UsageError
from etl.pipeline import PackedKit
from etl.records import ObjectRange, Partition, TokenizerSpec
from etl.terminal import main
from etl.watcher import Watcher
from tests.jobs import ROOT, config, etl, jsonl, small_rows, stored, upload, workers
from tests.test_tokenizer import tiny_files, write


class Counting(SchedulerPlugin):
    """Lives in the scheduler: the names of all tasks that ever came, and the most that were held at once."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.most_in_memory = 0

    def transition(self, key: Any, start: str, finish: str, *_args: Any, **_kwargs: Any) -> None:
        self.names.add(str(key))
        if finish == "memory":
            self.held.add(key)
        elif start == "memory":
            self.held.discard(key)
        self.most_in_memory = max(self.most_in_memory, len(self.held))

    async def start(self, scheduler: Any) -> None:
        self.held: set[Any] = set()
        scheduler.counting = self


def counted(dask_scheduler: Any) -> tuple[int, list[str], int]:
    """Tasks in the scheduler now, the kinds of all that came, and how many came."""
    names = dask_scheduler.counting.names
    return len(dask_scheduler.tasks), sorted({name.split("-toparquet")[0] for name in names}), len(names)


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    """A client of two worker processes."""
    with workers(2) as connected:
        yield connected


def partitions(n: int) -> list[Partition]:
    """Partitions of objects that nobody reads."""
    return [Partition(i, f"{i:012x}", (ObjectRange(f"s3://b/{i}.jsonl", "e", 0, 9, 9),)) for i in range(n)]


def test_every_core_has_a_worker_where_as_many_are_asked_for_or_none() -> None:
    cores = cpu_count()
    options: list[dict[str, Any]] = [{}, {"workers": cores}, {"workers": cores + 1}, {"scheduler": "tcp://host:8786"}]
    assert [cluster.fills_cores(config("bucket", **more)) for more in options] == [True, True, True, False]
    assert cluster.fills_cores(config("bucket", workers=1)) == (cores == 1)


def test_a_run_of_60_partitions_is_60_tasks_and_leaves_none(s3: Any, bucket: str, client: Client) -> None:
    upload(s3, bucket, {f"{i:02}.jsonl": jsonl(small_rows(2, f"{i}-")) for i in range(60)})
    client.register_plugin(Counting(), name="counting")
    result = jobs.run(config(bucket, scheduler=client.scheduler.address, partition_bytes=400))
    assert (result.exit_code, result.rows) == (0, 120)
    left, kinds, came = client.run_on_scheduler(counted)
    assert left == 0
    assert kinds == ["('read-tokenize-reset_index"]
    assert came == result.partitions == 60


@pytest.mark.parametrize(("cores", "window"), [(2, 8), (64, 16)])
def test_of_many_partitions_the_scheduler_knows_a_window_alone(
    monkeypatch: pytest.MonkeyPatch, cores: int, window: int
) -> None:
    monkeypatch.setattr(cluster, "cpu_count", lambda: cores)  # four workers on two cores would only take turns
    most = 0
    with (
        dask.config.set({**cluster.SETTINGS, **cluster.pace(4)}),
        LocalCluster(n_workers=4, processes=False, dashboard_address="127.0.0.1:0", silence_logs=50) as local,
        Client(local) as client,
    ):
        came = []
        for item, result in cluster.slide(client, range(400), lambda chunk: client.map(abs, chunk, pure=False)):
            came.append((item, result))
            most = max(most, len(local.scheduler.tasks))
        held = len(client.futures)
    assert sorted(came) == [(item, item) for item in range(400)]
    assert held <= 1  # the last one, which the client forgets in its own time
    assert most <= window + window // 4  # those just released may not be forgotten yet


def test_more_workers_than_cores_are_said(bucket: str, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "cpu_count", lambda: 2)
    said = cluster.describe_workers(config(bucket, workers=128), client)
    assert said == "128 workers on 2 cores: only as many compute at a time"
    assert cluster.describe_workers(config(bucket, workers=2), client) is None
    assert cluster.describe_workers(config(bucket, scheduler=client.scheduler.address), client) is None


def test_workers_that_join_late_are_waited_for_with_a_word_and_given_work(s3: Any, bucket: str) -> None:
    upload(s3, bucket, {f"{i:02}.jsonl": jsonl(small_rows(2, f"{i}-")) for i in range(40)})
    with LocalCluster(n_workers=0, threads_per_worker=1, dashboard_address="127.0.0.1:0", silence_logs=50) as late:
        address = late.scheduler_address
        said = []
        most = 0

        class Joining(Watcher):
            def say(self, text: str) -> None:
                said.append(text)
                if text.startswith("no worker"):
                    late.scale(3)

            def advance(self, _receipt: Any) -> None:
                nonlocal most
                most = max(most, len(late.scheduler.tasks))

        result = jobs.run(config(bucket, scheduler=address, partition_bytes=400), Joining())
    assert f"no worker has joined {address} yet; waiting for the first" in said
    assert (result.exit_code, result.rows) == (0, 80)
    assert most > 8  # what two workers would have been given


def test_an_opened_partition_that_moves_to_another_worker_is_opened_there(s3: Any, bucket: str, client: Client) -> None:
    upload(s3, bucket, {"a.jsonl": jsonl(small_rows(7))})
    frame = jobs.frame(config(bucket))
    opened = client.persist(new_collection(frame.expr.dependencies()[0]), optimize_graph=False)
    (holding,) = futures_of(opened)
    wait(holding)
    there = set(client.who_has([holding])[holding.key])
    others = [address for address in client.nthreads() if address not in there]
    assert len(client.submit(cluster.tokenize_alone, holding, workers=others).result(timeout=60)) == 7


def test_the_same_frame_again_adds_no_further_tokenizer(s3: Any, bucket: str, client: Client) -> None:
    upload(s3, bucket, {"a.jsonl": jsonl(small_rows(2))})
    jobs.frame(config(bucket))
    known = client.run_on_scheduler(kits)
    assert len(jobs.frame(config(bucket)).compute()) == 2
    assert client.run_on_scheduler(kits) == known


def test_the_optimised_expression_has_one_key_a_partition(bucket: str) -> None:
    options = config(bucket)
    expression = cluster.write_expression(partitions(7), "kit", options)
    assert len(expression.__dask_graph__()) == 7


def test_the_graph_carries_neither_credential_nor_tokenizer(bucket: str) -> None:
    options = config(bucket)
    graph = cloudpickle.dumps(cluster.write_expression(partitions(1800), "kit", options).__dask_graph__())
    assert b"test-secret-key" not in graph
    assert b"test-access-key" not in graph
    assert b"S3FileSystem" not in graph
    assert len(graph) < 1_000_000


def test_a_worker_killed_in_the_middle_costs_no_row(s3: Any, bucket: str) -> None:
    upload(s3, bucket, {f"{i:02}.jsonl": jsonl(small_rows(2, f"{i:02}-")) for i in range(16)})
    killed: list[int] = []
    with workers(2) as connected:
        victim = next(iter(connected.cluster.workers.values())).pid

        class Killer(Watcher):
            def advance(self, _receipt: Any) -> None:
                if not killed:
                    os.kill(victim, 9)
                    killed.append(victim)

        result = jobs.run(config(bucket, scheduler=connected.scheduler.address, partition_bytes=300), Killer())
    assert killed == [victim]
    assert (result.exit_code, result.rows) == (0, 32)
    assert sorted(stored(result.output).table["id"].to_pylist()) == [f"{i:02}-{j}" for i in range(16) for j in range(2)]


def test_the_dashboard_keeps_to_loopback_and_moves_where_its_port_is_taken(bucket: str, qwen36: TokenizerSpec) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        options = config(bucket, no_dashboard=False, dashboard_address=address, workers=1)
        with cluster.connect(options, PackedKit.pack("kit", qwen36, options)) as connected:
            assert connected.dashboard_link.startswith("http://127.0.0.1:")
            assert address not in connected.dashboard_link


def test_a_scheduler_that_does_not_answer_is_one_line(
    bucket: str, qwen36: TokenizerSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "Client", lambda url, timeout: Client(url, timeout=timeout / 50))
    options = config(bucket, scheduler="tcp://127.0.0.1:9")
    with (
        pytest.raises(UsageError, match="no Dask scheduler answers there"),
        cluster.connect(options, PackedKit.pack("kit", qwen36, options)),
    ):
        pass


def processes(of: str) -> dict[int, str]:
    """Process id -> command line of the processes whose environment carries the mark."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"ETL_TEST_MARK={of}".encode() in (folder / "environ").read_bytes():
                found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
    return found


def children(of: str) -> list[str]:
    """Their command lines."""
    return list(processes(of).values())


def start(words: list[str], mark: str, **more: Any) -> subprocess.Popen[str]:
    """The command line begun, its processes marked."""
    return subprocess.Popen(
        [sys.executable, "-m", "etl", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "ETL_TEST_MARK": mark},
        **more,
    )


def test_a_run_says_what_it_should_and_nothing_else(s3: Any, bucket: str, client: Client, capsys: Any) -> None:
    upload(s3, bucket, {f"{i}.jsonl": jsonl(small_rows(5)) for i in range(4)})
    words = ["run", f"s3://{bucket}/completions/", f"s3://{bucket}/tokens/", "--tokenizer", "builtin:qwen3.6"]
    words += ["--endpoint-url", os.environ["AWS_ENDPOINT_URL"], "--scheduler", client.scheduler.address]
    assert main([*words, "--partition-bytes", "800", "--json"]) == 0
    said = capsys.readouterr()
    assert [line for line in said.err.splitlines() if not re.fullmatch(SAID, line)] == []
    assert '"rows": 20' in said.out.splitlines()[-1]


SAID = r"dashboard: http://127\.0\.0\.1:\d+/status|4 partitions, 0 done before|the template leaves out .*|.*tokens/s"


@pytest.mark.long
def test_a_run_by_command_line_says_what_it_should_and_leaves_no_process(s3: Any, bucket: str) -> None:
    upload(s3, bucket, {f"{i}.jsonl": jsonl(small_rows(5)) for i in range(4)})
    done = etl(
        *("run", f"s3://{bucket}/completions/", f"s3://{bucket}/tokens/", "--tokenizer", "builtin:qwen3.6"),
        *("--workers", "2", "--partition-bytes", "800", "--dashboard-address", "127.0.0.1:0", "--json"),
        ETL_TEST_MARK=bucket,
    )
    assert done.returncode == 0, done.stderr
    assert children(bucket) == []
    assert [line for line in done.stderr.splitlines() if not re.fullmatch(SAID, line)] == []
    assert '"rows": 20' in done.stdout.splitlines()[-1]


def kits(dask_scheduler: Any) -> set[str]:
    """The kits that the scheduler gives to every worker that joins."""
    return {name for name in dask_scheduler.worker_plugins if name.startswith("etl-")}


def worker_kits(dask_worker: Any) -> set[str]:
    """The kits that a worker has."""
    return {name for name in dask_worker.plugins if name.startswith("etl-")}


class Interrupted(Watcher):
    """Somebody who presses Ctrl-C when the first partition is done."""

    def advance(self, _receipt: Any) -> None:
        raise KeyboardInterrupt


@pytest.mark.parametrize(("watcher", "exit_code"), [(Watcher(), 0), (Interrupted(), 130)])
def test_a_run_takes_its_kit_away_from_a_cluster_however_it_ends_but_not_a_frame_s(
    s3: Any, bucket: str, client: Client, watcher: Watcher, exit_code: int
) -> None:
    upload(s3, bucket, {f"{i}.jsonl": jsonl(small_rows(3, f"{i}-")) for i in range(6)})
    options = config(bucket, scheduler=client.scheduler.address, partition_bytes=500)
    before = client.run_on_scheduler(kits)
    frame = jobs.frame(options)
    with_frame = client.run_on_scheduler(kits)
    assert jobs.run(options, watcher).exit_code == exit_code
    assert client.run_on_scheduler(kits) == with_frame > before
    assert all(found == with_frame for found in client.run(worker_kits).values())
    assert len(client.compute(frame).result()) == 18


SCHEDULER = """
from distributed import LocalCluster
options = {"protocol": "tcp://", "host": "127.0.0.1", "dashboard_address": "127.0.0.1:0", "silence_logs": 50}
with LocalCluster(n_workers=1, processes=False, **options) as cluster:
    print(cluster.scheduler_address, flush=True)
    input()
"""


def test_a_scheduler_that_dies_in_the_middle_is_one_line_and_the_same_options_go_on(
    s3: Any, bucket: str, client: Client, tmp_path: Path, qwen36: TokenizerSpec
) -> None:
    tiny = str(write(tmp_path, tiny_files(qwen36.chat_template)))  # that cluster's worker has to load it
    upload(s3, bucket, {f"{i:02}.jsonl": jsonl(small_rows(3, f"{i:02}-")) for i in range(24)})
    with subprocess.Popen([sys.executable, "-c", SCHEDULER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as remote:
        assert remote.stdout is not None
        address = remote.stdout.readline().decode().strip()

        class Killer(Watcher):
            def advance(self, _receipt: Any) -> None:
                remote.kill()

        result = jobs.run(config(bucket, tokenizer=tiny, scheduler=address, partition_bytes=500), Killer())
    said = f"--scheduler {address}: the scheduler is gone; the same command goes on from here"
    assert (result.exit_code, result.error) == (1, said)
    done = jobs.run(config(bucket, tokenizer=tiny, scheduler=client.scheduler.address, partition_bytes=500))
    assert (done.exit_code, done.rows) == (0, 72)
    assert done.partitions_done_before >= 1


def test_an_interrupt_ends_a_run_with_130_and_the_same_options_finish_it(s3: Any, bucket: str, client: Client) -> None:
    upload(s3, bucket, {f"{i:03}.jsonl": jsonl(small_rows(3, f"{i:03}-")) for i in range(24)})
    words = [
        *("run", f"s3://{bucket}/completions/", f"s3://{bucket}/tokens/", "--tokenizer", "builtin:qwen3.6", "--json"),
        *("--workers", "1", "--partition-bytes", "500", "--no-dashboard"),
    ]
    started = start(words, bucket)
    while not s3.list_objects_v2(Bucket=bucket, Prefix="tokens/__etl/receipts/").get("KeyCount"):
        assert goes_on(started)
    started.send_signal(signal.SIGTERM)
    out, err = started.communicate(timeout=60)
    assert started.returncode == 130, err
    assert "Traceback" not in err
    assert '"exit_code": 130' in out.splitlines()[-1]
    assert children(bucket) == []
    assert "tokens/__etl/lease.json" not in {o["Key"] for o in s3.list_objects_v2(Bucket=bucket)["Contents"]}
    done = jobs.run(config(bucket, scheduler=client.scheduler.address, partition_bytes=500))
    assert (done.exit_code, done.rows) == (0, 72)
    assert done.partitions_done_before >= 1


def goes_on(process: subprocess.Popen[str], seconds: float = 0.2) -> bool:
    """Whether the process is there after so much time, which is left to it and to the server."""
    try:
        process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        return True
    return False


def left_after(mark: str, seconds: float) -> list[str]:
    """The marked processes that are there, given so much time to end."""
    deadline = time.monotonic() + seconds
    while (found := processes(mark)) and (left := deadline - time.monotonic()) > 0:
        with contextlib.suppress(ProcessLookupError):
            end = os.pidfd_open(next(iter(found)))  # of a process that is nobody's child here; readable at its end
            try:
                select.select([end], [], [], left)
            finally:
                os.close(end)
    return list(found.values())


def test_ctrl_c_at_the_very_start_is_heard_by_the_command_alone(s3: Any, bucket: str) -> None:
    upload(s3, bucket, {"a.jsonl": jsonl(small_rows(3))})
    words = ["run", f"s3://{bucket}/completions/", f"s3://{bucket}/tokens/", "--tokenizer", "builtin:qwen3.6"]
    started = start(words, bucket, start_new_session=True)
    while not any("forkserver" in command for command in children(bucket)):
        assert goes_on(started, 0.02)
    os.killpg(started.pid, signal.SIGINT)  # as a terminal does
    _, err = started.communicate(timeout=60)
    assert started.returncode == 130, err
    assert "Traceback" not in err
    assert left_after(bucket, 60) == []


@pytest.mark.long
def test_an_interrupt_while_the_workers_begin_is_one_line_and_leaves_no_process(s3: Any, bucket: str) -> None:
    upload(s3, bucket, {"a.jsonl": jsonl(small_rows(3))})
    words = ["run", f"s3://{bucket}/completions/", f"s3://{bucket}/tokens/", "--tokenizer", "builtin:qwen3.6"]
    started = start([*words, "--workers", "1", "--no-dashboard", "--quiet"], bucket)
    # A worker looks like the forkserver that it is forked from.
    while sum("forkserver" in command for command in children(bucket)) < 2:
        assert goes_on(started, 0.02)
    started.send_signal(signal.SIGINT)
    _, err = started.communicate(timeout=60)
    assert (started.returncode, err) == (130, "etl: interrupted; the same command goes on from here\n")
    assert left_after(bucket, 60) == []


@pytest.mark.long
def test_workers_and_the_process_that_they_are_forked_from_do_not_hear_ctrl_c() -> None:
    # In a process of its own: here an earlier test has started multiprocessing's resource tracker.
    code = (
        "import os\n"
        "from tests.jobs import workers\n"
        "with workers(1) as client:\n"
        "    for pid in (*client.run(os.getppid).values(), *client.run(os.getpid).values()):\n"
        "        print(open(f'/proc/{pid}/status').read())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=120
    )
    blocked = [int(mask, 16) for mask in re.findall(r"^SigBlk:\s*(\w+)$", done.stdout, re.MULTILINE)]
    assert [mask >> (signal.SIGINT - 1) & 1 for mask in blocked] == [1, 1]


def test_a_run_that_cannot_begin_leaves_no_process(bucket: str) -> None:
    done = etl(
        *("run", f"s3://{bucket}/nothing/", f"s3://{bucket}/tokens/", "--tokenizer", "builtin:qwen3.6"),
        ETL_TEST_MARK=bucket,
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert left_after(bucket, 60) == []


def measured(dask_scheduler: Any) -> dict[tuple[str, ...], float]:
    """What the dashboard's Fine Performance Metrics are drawn from."""
    return {tuple(map(str, key)): value for key, value in dask_scheduler.cumulative_worker_metrics.items()}


def test_the_dashboard_is_told_the_seconds_of_every_stage(s3: Any, bucket: str, client: Client) -> None:
    upload(s3, bucket, {f"{i}.jsonl": jsonl(small_rows(50, f"{i}-")) for i in range(4)})
    result = jobs.run(config(bucket, scheduler=client.scheduler.address, partition_bytes=9000))
    assert result.exit_code == 0
    deadline = time.monotonic() + 30
    stages: set[str] = set()
    wanted = {"read", "parse", "render", "encode", "table", "parquet", "write"}
    while not wanted <= stages and time.monotonic() < deadline:  # workers tell with their heartbeat
        found = client.run_on_scheduler(measured)
        stages = {key[2] for key in found if key[0] == "execute" and key[1].startswith("read-tokenize")}
    assert wanted <= stages


def test_a_profile_report_is_one_file_that_needs_nothing_else(s3: Any, bucket: str, tmp_path: Path) -> None:
    upload(s3, bucket, {"a.jsonl": jsonl(small_rows(5))})
    report = tmp_path / "profile.html"
    result = jobs.run(config(bucket, workers=1, profile_report=str(report)))
    assert result.exit_code == 0
    page = report.read_text()
    assert "read-tokenize" in page
    assert not re.search(r"<script[^>]+src=.https?://", page)


def test_workers_get_the_memory_limit_tls_and_no_dashboard_that_were_asked_for(
    bucket: str, qwen36: TokenizerSpec
) -> None:
    options = config(bucket, workers=1, memory_limit="3GiB", tls=True, no_dashboard=True)
    with cluster.connect(options, PackedKit.pack("kit", qwen36, options)) as connected:
        (worker,) = connected.scheduler_info()["workers"].values()
        assert worker["memory_limit"] == 3 * 2**30
        assert connected.scheduler.address.startswith("tls://127.0.0.1:")
        port = connected.scheduler_info()["services"]["dashboard"]
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/status", timeout=10)


def test_without_a_limit_a_worker_gets_its_share_but_never_less_than_a_gibibyte(bucket: str) -> None:
    assert cluster.memory_limit(config(bucket), 1_000_000) == 2**30
    assert cluster.memory_limit(config(bucket), 1) > cluster.memory_limit(config(bucket), 4) > 2**30


def test_a_quiet_run_says_nothing_but_its_json(s3: Any, bucket: str, client: Client, capsys: Any) -> None:
    upload(s3, bucket, {"a.jsonl": jsonl(small_rows(3))})
    words = ["run", f"s3://{bucket}/completions/", f"s3://{bucket}/tokens/", "--tokenizer", "builtin:qwen3.6"]
    words += ["--endpoint-url", os.environ["AWS_ENDPOINT_URL"], "--scheduler", client.scheduler.address]
    assert main([*words, "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")
    assert main([*words, "--quiet", "--json", "--engine", "transformers"]) == 0
    said = capsys.readouterr()
    assert (said.out.count("\n"), said.err) == (1, "")


def test_a_full_temporary_folder_is_one_line(bucket: str, qwen36: TokenizerSpec, tmp_path: Path) -> None:
    options = config(bucket, workers=1)
    kit = PackedKit.pack("tests", qwen36, options)
    absent = tmp_path / "absent" / "kit.pickle"
    with pytest.raises(EtlError, match=r"cannot write .*kit\.pickle: .*TMPDIR"), cluster.connect(options, kit, absent):
        pass


def test_what_must_not_be_broken_off_is_finished_before_an_interrupt_is_raised() -> None:
    done: list[str] = []
    waiting = threading.main_thread().ident

    def work() -> str:
        while not (back := sys._current_frames()[waiting or 0].f_back) or back.f_code.co_name != "result":
            os.sched_yield()
        os.kill(os.getpid(), signal.SIGINT)
        done.append("finished")
        return "undone"

    with pytest.raises(KeyboardInterrupt):
        cluster._uninterrupted(work, done.append)
    assert done == ["finished", "undone"]
