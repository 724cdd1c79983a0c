"""Partitions -> one fused Dask task and one future each: the graph and the cluster, and the only file with Dask in it.

    dd.from_map(read) ─map_partitions(tokenize)→ to_parquet(PartEngine) ─optimize→ read-tokenize-…, one key a partition

Tasks carry a `Partition` and the name of the worker's kit, nothing else: no contents, tokenizer or credential.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import hashlib
import linecache
import logging
import os
import re
import resource
import signal
import socket
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import AbstractContextManager
from itertools import islice
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import dask
import dask.dataframe as dd
import pandas as pd
import pyarrow as pa
from dask.dataframe.io.parquet.arrow import ArrowDatasetEngine
from dask.system import cpu_count
from distributed import (
    Client,
    LocalCluster,
    WorkerPlugin,
    as_completed,
    default_client,
    get_worker,
    performance_report,
    secede,
)
from distributed.client import ClosedClientError
from distributed.comm import CommClosedError, parse_address, parse_host_port
from distributed.comm.registry import backends
from distributed.metrics import context_meter
from distributed.security import Security
from distributed.system import MEMORY_LIMIT
from distributed.utils import get_mp_context, silence_logging_cmgr
from distributed.versions import get_versions

from etl import ledger
from etl.config import RunConfig
from etl.errors import EtlError, UsageError
from etl.lease import require_held
from etl.lines import Batch
from etl.pages import check_place
from etl.pipeline import Gate, KeptKit, Kit, Outcome, PackedKit, transform, tune_worker
from etl.records import Partition, TokenizerSpec
from etl.schema import empty_frame, output_schema
from etl.storage import canonical_url

T = TypeVar("T")

RETRIES: Final = 3
"""Tries again of a failed task, beyond those that the storage client makes of a failed request."""

NATIVE: Final = {
    "RAYON_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # A partition is a thread of its own, and glibc's arena of each thread keeps what it has once held: a worker grew
    # with every partition (measured: 740 MB after eight, 490 with one arena for all).
    "MALLOC_ARENA_MAX": "1",
}
"""The environment in which a worker's native libraries start: one thread, and memory that does not grow."""

SETTINGS: Final = {
    "dataframe.convert-string": False,
    "distributed.worker.multiprocessing-method": "forkserver",
    "distributed.worker.profile.cycle": "10s",
    "distributed.admin.tick.limit": "60s",
    "distributed.admin.system-monitor.interval": "5s",
    "distributed.admin.system-monitor.disk": False,
    "distributed.admin.system-monitor.gil.enabled": False,
    "distributed.comm.timeouts.connect": "120s",
    "distributed.comm.timeouts.tcp": "120s",
    # What fails is said once, by the client, in one line; a worker's own log would be a traceback for each try.
    "distributed.logging": {"distributed": "critical", "bokeh": "critical", "tornado": "critical"},
    "distributed.nanny.pre-spawn-environ": NATIVE,
}


def pace(workers: int) -> dict[str, str]:
    """How often each worker looks after itself, less often among many.

    With Dask's defaults 128 idle workers eat two cores, with these a quarter of one (measured).
    """
    slower = max(1, workers // 32)
    return {
        "distributed.worker.profile.interval": f"{500 * slower}ms",
        "distributed.admin.tick.interval": f"{500 * slower}ms",
        "distributed.worker.memory.monitor-interval": f"{2 + slower // 2}s",
    }


_WRITING: Final = threading.BoundedSemaphore(2)
"""Partitions that a worker may be writing while it works on the next one: a slow store must not pile them up."""

LAST_REQUESTS_SECONDS: Final = 10.0
"""How long a run that is over waits for the store to answer what its workers have sent."""

ENDED: Final = "ETL_ENDED"
"""The variable that tells a worker which variables its forkserver has and the client no longer, `=` between."""

FILES_A_WORKER: Final = 10
FILES_BESIDE: Final = 100

LOOPBACK: Final = "127.0.0.1:0"

BUILT_TOGETHER: Final = 256
"""Partitions whose tasks are built in one go."""

PRELOAD: Final = ("etl.cluster", "distributed.nanny", "distributed.worker", "bokeh", "etl.preload")
"""What the forkserver imports before it forks a worker; the last loads the tokenizer."""

QUOTED: Final = (
    "concurrent.futures._base",
    "concurrent.futures.thread",
    "dask._task_spec",
    "dask.dataframe.io.parquet.core",
    "distributed._concurrent_futures_thread",
    "distributed.threadpoolexecutor",
    "distributed.utils",
    "distributed.worker",
    "fsspec.asyn",
    "gigatoken._tokenizer",
    "pyarrow.parquet.core",
    "threading",
)
"""Modules beside our own whose lines Dask's profiler quotes of a worker at work."""


# --- inside a worker ---------------------------------------------------------------------------------------------


class KitPlugin(WorkerPlugin):
    """Builds the template and the encoder once in each worker; tasks find them by `name`."""

    idempotent = True

    def __init__(self, packed: PackedKit | KeptKit) -> None:
        self.name = packed.name
        self._packed: PackedKit | KeptKit | None = packed
        self.kit: Kit | None = None

    def setup(self, worker: object) -> None:
        """Make the process a worker of this run: its environment, its threads and memory, its kit."""
        del worker
        for name in os.environ.pop(ENDED, "").split("="):
            os.environ.pop(name, None)
        tune_worker()
        if self._packed is not None:
            # A process may be several workers, of which one goes and the others stay: a gate for each.
            self.kit, self._packed = dataclasses.replace(self._packed.build(), gate=Gate()), None

    async def teardown(self, worker: object) -> None:
        """The run is over, or the worker is: begin no more requests that write, and see those sent to their end."""
        del worker
        if self.kit is not None:
            await asyncio.to_thread(self.kit.gate.shut, LAST_REQUESTS_SECONDS)


class StageClock:
    """Seconds by stage: into the dashboard's Fine Performance Metrics, and summed for the receipt."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Count the time spent inside as `stage`."""
        start = time.perf_counter()
        with context_meter.meter(stage):
            yield
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start


class OpenPartition:
    """A partition whose objects are being fetched: what `read` hands to `tokenize` in a frame of one cell.

    Between processes only the partition and the kit's name travel; the fetch starts again in the task that it arrives
    for, since it arrives outside of any task, where a process of several workers does not know which of them it is.
    """

    def __init__(self, partition: Partition, kit_name: str) -> None:
        self.partition = partition
        self.kit_name = kit_name
        self._started = time.perf_counter()
        self._begun: Iterator[Batch] | None = None

    def begin(self) -> None:
        """Begin to fetch."""
        self._begun = self.kit.read(self.partition)

    @functools.cached_property
    def kit(self) -> Kit:
        """What this worker has of the run."""
        kit = _kit(self.kit_name)
        # A storage of its own counts this partition's retries alone; the connections are the process's anyway.
        return dataclasses.replace(kit, storage=dataclasses.replace(kit.storage))

    @property
    def task(self) -> ledger.Task:
        """The partition as a task of the run."""
        kit = self.kit
        return ledger.Task(str(kit.config.output), kit.fingerprint, self.partition, self._started, kit.gate)

    def batches(self) -> Iterator[Batch]:
        """The stream whose fetch has begun; a new one on every further call."""
        begun, self._begun = self._begun, None
        return begun if begun is not None else self.kit.read(self.partition)

    def __reduce__(self) -> tuple[type, tuple[Partition, str]]:
        return type(self), (self.partition, self.kit_name)


_HERE: Final[dict[str, Callable[[], Kit]]] = {}
"""Kits of this process, for frames that are computed without a cluster; built at first use."""


def kit_name(fingerprint: str, run_id: str) -> str:
    """The name of a run's kit, which tells its workers whose they are."""
    return f"etl-{fingerprint[:12]}-{run_id}"


def _run_of(name: str) -> str | None:
    """The run whose kit has this name; None of a kit that no run has sent."""
    found = re.fullmatch(r"etl-[0-9a-f]{12}-(\d{8}T\d{6}Z-[0-9a-f]+)", name)
    return found[1] if found else None


def _kit(name: str) -> Kit:
    try:
        plugin = get_worker().plugins.get(name)
    except ValueError:  # no worker: Dask's own threads, in the client's process
        plugin = None
    if isinstance(plugin, KitPlugin) and plugin.kit is not None:
        return plugin.kit
    if name in _HERE:
        return _HERE[name]()
    raise EtlError("this process has no tokenizer for the frame; make the Client before etl.frame, or use threads")


def read(partition: Partition, kit_name: str) -> pd.DataFrame:
    """Partition -> a frame of one cell holding the stream of its line batches, whose fetch has begun."""
    opened = OpenPartition(partition, kit_name)
    opened.begin()
    return pd.DataFrame({"batches": pd.Series([opened], dtype=object)})


def tokenize(opened: pd.DataFrame) -> pd.DataFrame:
    """The stream of batches -> a frame in SCHEMA; rejects, counts and stage seconds travel in its `attrs`."""
    source: OpenPartition = opened["batches"].iloc[0]
    clock = StageClock()
    with source.kit.lock:
        outcome = transform(source.batches, source.kit, clock)
    frame: pd.DataFrame = outcome.table.to_pandas(types_mapper=pd.ArrowDtype)
    frame.attrs["etl"] = Carried(source, outcome, clock)
    return frame


def tokenize_alone(opened: pd.DataFrame) -> pd.DataFrame:
    """As `tokenize`, for a frame that a user looks at: its rows alone, without what a receipt needs."""
    frame = tokenize(opened)
    frame.attrs.clear()
    return frame


class Carried:
    """What a partition's frame carries beside its rows. pandas copies `attrs` deeply: this must stay itself."""

    def __init__(self, source: OpenPartition, outcome: Outcome, clock: StageClock) -> None:
        self.source = source
        self.outcome = outcome
        self.clock = clock

    def __deepcopy__(self, memo: object) -> Carried:
        del memo
        return self


class NoFilesystem:
    """Stands where Dask would build an s3fs on the client and pickle it, credentials included, into the graph."""

    def invalidate_cache(self, path: str | None = None) -> None:
        """Nothing is cached."""


class PartEngine(ArrowDatasetEngine):
    """Writes a partition as rejects, part, receipt, each one PUT, and returns the receipt.

    The stock engine opens the remote file in a `with`: an exception inside publishes a truncated object.
    """

    @classmethod
    def extract_filesystem(cls, urlpath: Any, *_args: Any, **_kwargs: Any) -> Any:
        """No file system on the client: workers build their own."""
        return NoFilesystem(), [urlpath], {}, {}

    @classmethod
    def initialize_write(cls, *_args: Any, **_kwargs: Any) -> Any:
        """Nothing to prepare: the stock engine would create a missing bucket here."""
        return 0, None, False, {}

    @classmethod
    def write_partition(cls, df: pd.DataFrame, *_args: Any, **_kwargs: Any) -> Any:
        """Rows in SCHEMA with a `Carried` in `attrs` -> the receipt, which is stored as well."""
        carried: Carried = df.attrs.pop("etl")  # pyarrow would try to store it in the file
        source, clock = carried.source, carried.clock
        with _WRITING:
            # The worker's one slot goes to the next partition, whose first bytes come while this one is compressed,
            # and which is worked on while this one's two or three requests are answered one after the other.
            with _turn(source.kit):
                secede()
                schema = output_schema(source.kit.config.keep_fields)
                part = ledger.make_part(pa.Table.from_pandas(df, schema=schema, preserve_index=False), clock)
            if (run_id := _run_of(source.kit_name)) is not None:
                # a worker may have been stopped for so long that another run holds the output
                places = ledger.Places(canonical_url(source.task.output))
                require_held(source.kit.storage, places.lease, run_id)
            return ledger.write_partition(source.kit.storage, source.task, carried.outcome, part, clock)


def _turn(kit: Kit) -> AbstractContextManager[Any]:
    """The worker's lock, where each core has a worker: its threads would only push each other out of the core's cache.

    Measured over 33 pairs of runs: 2 to 3 % less CPU a row. Elsewhere a free core compresses.
    """
    return kit.lock if fills_cores(kit.config) else contextlib.nullcontext()


# --- on the client -----------------------------------------------------------------------------------------------


def check_startable(config: RunConfig) -> None:
    """Raise UsageError where no cluster could be had: no scheduler answers, a dashboard's address that is none, no
    place for `--profile-report`; for processes of our own too few files, or a script without a main guard, which each
    worker would import and start.
    """
    if config.profile_report is not None:
        check_place("--profile-report", config.profile_report)
    if config.scheduler is not None:
        _find_scheduler(config.scheduler)
        return
    if not config.no_dashboard:
        _split_address(config.dashboard_address)
    _raise_file_limit(worker_count(config))
    main = sys.modules["__main__"]
    path = getattr(main, "__file__", None)
    if path is None or getattr(main, "__spec__", None) is not None:
        return  # -c, -m, a notebook or a prompt: nothing that a worker would import by its path
    with contextlib.suppress(OSError, UnicodeDecodeError):
        if "__name__" not in Path(path).read_text():
            raise UsageError(f"{path}: put what starts the run under: if __name__ == '__main__':")


def _find_scheduler(url: str) -> None:
    scheme, place = parse_address(url, strict=False)
    if scheme not in backends:
        raise UsageError(f"--scheduler {url}: give the scheduler's own address, e.g. tcp://127.0.0.1:8786")
    try:
        if scheme == "tls" and Security().get_connection_args("client")["ssl_context"] is None:
            raise UsageError(f"--scheduler {url}: TLS needs certificates; name them under distributed.comm.tls of Dask")
        if scheme in {"tcp", "tls"}:
            socket.create_connection(parse_host_port(place), timeout=5).close()
    except (ValueError, OverflowError) as error:
        raise UsageError(f"--scheduler {url} is not tcp://HOST:PORT") from error
    except OSError as error:
        raise UsageError(f"--scheduler {url}: no Dask scheduler answers there ({type(error).__name__})") from error


def _raise_file_limit(workers: int) -> None:
    """Each worker costs this process about ten open files; the soft limit is raised as far as the hard one allows."""
    needed = FILES_BESIDE + FILES_A_WORKER * workers
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        if hard != resource.RLIM_INFINITY and hard < needed:
            raise UsageError(
                f"--workers {workers} needs {needed} open files, this shell allows {hard}; ulimit -Hn {needed}"
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


@contextlib.contextmanager
def begun(config: RunConfig) -> Iterator[Path | None]:
    """Begin the process that a LocalCluster's workers are forked from; None where `--scheduler` names a cluster.

    It imports what they need, then waits for the kit at the path that this yields, which `connect` is given, and
    builds it. There is one such process a client: where an earlier run has started it, it holds that run's kit and
    environment.
    """
    if config.scheduler is not None:
        yield None
        return
    get_mp_context().set_forkserver_preload(list(PRELOAD))
    server: Any = forkserver._forkserver  # noqa: SLF001 - multiprocessing offers no other way to end it
    was_there = server._forkserver_pid is not None  # noqa: SLF001
    with tempfile.TemporaryDirectory(prefix="etl-") as folder:
        path = Path(folder) / "kit.pickle"
        with _environment({**NATIVE, "ETL_WARM": f"{os.getpid()} {path}"}), _deaf_to_interrupts():
            forkserver.ensure_running()
        try:
            yield path
        finally:
            if not path.exists() and not was_there:
                # The run could not begin, or had nothing to do; a process left over would hold our output open.
                os.kill(server._forkserver_pid, signal.SIGKILL)  # noqa: SLF001
                server._stop()  # noqa: SLF001


def ask_beforehand() -> None:
    """In the process that workers are forked from: what each of them would else find out for itself.

    A worker that joins tells the versions of a dozen packages and what `uname` says; its profiler reads the source of
    every module that it finds at work.
    """
    get_versions()
    for name, module in list(sys.modules.items()):
        if name in QUOTED or name.startswith("etl."):
            linecache.getlines(module.__file__ or "")


@contextlib.contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """What is started inside ignores Ctrl-C, which a terminal sends to all processes: the client ends the others."""
    resource_tracker.ensure_running()  # the forkserver starts it first, and starting it lets SIGINT through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # inherited; ours comes late instead of never
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def connect(config: RunConfig, packed: PackedKit, warm: Path | None = None) -> Iterator[Client]:
    """A client of the cluster that `config` names: `--scheduler`, or a LocalCluster of `--workers` processes.

    The processes of a LocalCluster are forked from one that builds the kit first; `warm` is what `begun` yields, if
    it was called. Raises UsageError where no cluster can be had.
    """
    with dask.config.set({**SETTINGS, **pace(worker_count(config))}), contextlib.ExitStack() as stack:
        if config.scheduler is not None:
            stack.enter_context(silence_logging_cmgr(logging.CRITICAL))
            client = stack.enter_context(_remote_client(config.scheduler))
            stack.enter_context(_as_guest(client, config.scheduler, packed.name))
        else:
            path = warm or stack.enter_context(begun(config))
            if path is not None:
                _keep(packed, path)
            cluster = _local_cluster(config)
            stack.callback(_uninterrupted, cluster.close)  # half closed, it would be waited for when Python ends
            client = stack.enter_context(Client(cluster, timeout=120))
        if config.profile_report is not None:
            stack.enter_context(performance_report(filename=config.profile_report, mode="inline"))
        yield client


def _keep(packed: PackedKit, path: Path) -> None:
    try:
        packed.keep(path)
    except OSError as error:
        raise EtlError(f"cannot write {path}: {error.strerror}; make room, or set TMPDIR to another folder") from error


def _remote_client(url: str) -> Client:
    try:
        return Client(url, timeout=5)
    except (OSError, ValueError) as error:
        raise UsageError(f"--scheduler {url}: no Dask scheduler answers there ({type(error).__name__})") from error


@contextlib.contextmanager
def _as_guest(client: Client, url: str, kit_name: str) -> Iterator[None]:
    """Leave a cluster that goes on without this run as it was found, and say so where it is the cluster that ends.

    Running tasks do not end with their client: what keeps them from writing once the lease is gone is that every
    worker takes the kit out of use before this returns. What remains is a worker that the scheduler does not reach,
    and in each worker the two requests that the store may leave unanswered for LAST_REQUESTS_SECONDS.
    """
    try:
        yield
    except (CancelledError, ClosedClientError, OSError) as error:
        gone = client.status != "running" or isinstance(error, CommClosedError)  # of which the client may not know yet
        if isinstance(error, OSError) and not gone:
            raise
        raise EtlError(f"--scheduler {url}: the scheduler is gone; the same command goes on from here") from error
    finally:
        # Nothing to remove where the run ended before `ship`, and nobody to ask where the scheduler is gone.
        with contextlib.suppress(ValueError, OSError):
            if client.status == "running":
                client.sync(_unship, client, kit_name, callback_timeout=LAST_REQUESTS_SECONDS + 5)


async def _unship(client: Client, kit_name: str) -> None:
    # client.unregister_worker_plugin knows no time limit
    await client.scheduler.unregister_worker_plugin(name=kit_name)


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _local_cluster(config: RunConfig) -> LocalCluster:
    workers = worker_count(config)
    start = functools.partial(
        LocalCluster,
        n_workers=workers,
        threads_per_worker=1,
        processes=True,
        host="127.0.0.1",
        # Without a dashboard the scheduler still serves its health page: on loopback, where no port can be taken.
        dashboard_address=LOOPBACK if config.no_dashboard else _free_address(config.dashboard_address),
        scheduler_kwargs={"dashboard": not config.no_dashboard},
        memory_limit=memory_limit(config, workers),
        security=Security.temporary() if config.tls else None,
        env=_worker_environment(),
        silence_logs=50,
    )
    try:
        return _uninterrupted(start, LocalCluster.close)
    except RuntimeError as error:
        raise EtlError(f"{workers} worker processes did not start ({error}); try fewer --workers") from error


def _uninterrupted(work: Callable[[], T], undo: Callable[[T], object] = lambda _: None) -> T:
    """What `work` returns, done in a thread, where no interrupt comes.

    An interrupt meanwhile is raised when the work is done, and undone.
    """
    with ThreadPoolExecutor(1) as pool:
        working = pool.submit(work)
        try:
            return working.result()
        except KeyboardInterrupt:
            with contextlib.suppress(RuntimeError):  # it did not succeed: nothing to undo
                undo(working.result())
            raise


_SEEN: Final[set[str]] = set()
"""Variables that this process has had when it started workers."""


def _worker_environment() -> dict[str, str]:
    """The environment of this process as it is now: the process that workers are forked from has an earlier one."""
    _SEEN.update(os.environ)
    return {**os.environ, **NATIVE, ENDED: "=".join(sorted(_SEEN - os.environ.keys()))}


def with_shares(config: RunConfig) -> RunConfig:
    """The configuration with the count and the memory of a LocalCluster's workers worked out."""
    workers = worker_count(config)
    return dataclasses.replace(config, workers=workers, memory_limit=memory_limit(config, workers))


def worker_count(config: RunConfig) -> int:
    """`--workers`, or as many as this process may use cores, a container's share of them included."""
    return config.workers or cpu_count()


def fills_cores(config: RunConfig) -> bool:
    """Whether each of this machine's cores has a worker of its own; of a running cluster that is not known."""
    return config.scheduler is None and worker_count(config) >= cpu_count()


def describe_workers(config: RunConfig, client: Client) -> str | None:
    """What is said of more workers than cores, or of a running cluster without any."""
    if config.scheduler is not None:
        return None if client.nthreads() else f"no worker has joined {config.scheduler} yet; waiting for the first"
    workers, cores = worker_count(config), cpu_count()
    if workers <= cores:
        return None
    return f"{workers} workers on {cores} {'core' if cores == 1 else 'cores'}: only as many compute at a time"


def memory_limit(config: RunConfig, workers: int) -> int:
    """Bytes a worker may use before Dask restarts it: its share of the machine, but never less than 1 GiB.

    Dask's "auto" is too much on small machines, and an even share of 128 kills workers that are well.
    """
    if config.memory_limit is not None:
        return int(config.memory_limit)
    return max(2**30, int(MEMORY_LIMIT * 0.9 / workers))


def _split_address(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    host = host or "127.0.0.1"
    try:
        family, *_, (name, *_) = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0]
    except (ValueError, OSError) as error:
        raise UsageError(f"--dashboard-address {address!r} is not HOST:PORT") from error
    if int(port) > _LAST_PORT:
        raise UsageError(f"--dashboard-address {address!r}: ports end at {_LAST_PORT}")
    try:
        with socket.socket(family) as probe:
            probe.bind((name, 0))
    except OSError as error:
        raise UsageError(f"--dashboard-address {address!r}: {host} is no address of this machine") from error
    return host, int(port)


_LAST_PORT: Final = 2**16 - 1


def _free_address(address: str) -> str:
    """`address`, or its host with a free port where another process holds the one asked for."""
    host, port = _split_address(address)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return f"{host}:0"
    return f"{host}:{port}"


def ship(client: Client, packed: PackedKit, warm: Path | None = None) -> None:
    """Send the kit once to every worker, those that join later included. Raises what building it raises there.

    Where workers are forked here, they are only told of the file that holds it, `warm`: most have inherited the kit.
    """
    client.register_plugin(KitPlugin(packed if warm is None else KeptKit(packed.name, warm)))


def write_expression(partitions: Sequence[Partition], kit_name: str, config: RunConfig) -> Any:
    """The optimised `to_parquet` expression over some partitions: one key each, its value the receipt."""
    rows = _rows(partitions, kit_name, config, tokenize)
    with warnings.catch_warnings(), dask.config.set(SETTINGS):
        # to_parquet asks for retries by an annotation that query planning ignores; client.get sets them.
        warnings.filterwarnings("ignore", message="Dask annotations", category=UserWarning)
        written = rows.to_parquet(
            str(config.output), engine=PartEngine, compute=False, write_index=False, write_metadata_file=False
        )
        # Only optimize() fuses the three into one task a partition; its frame leaves the barrier out.
        return written.optimize().expr.frame


def _rows(
    partitions: Sequence[Partition], kit_name: str, config: RunConfig, stage: Callable[[pd.DataFrame], pd.DataFrame]
) -> dd.DataFrame:
    meta = pd.DataFrame({"batches": pd.Series([], dtype=object)})
    opened = dd.from_map(read, partitions, kit_name=kit_name, meta=meta)
    # A frame without rows would be replaced by the meta, and its counts lost: so no enforcement.
    return opened.map_partitions(stage, meta=empty_frame(output_schema(config.keep_fields)), enforce_metadata=False)


def lazy_frame(partitions: Sequence[Partition], spec: TokenizerSpec, config: RunConfig) -> dd.DataFrame:
    """The rows as a lazy Dask DataFrame in SCHEMA; works with the current Client, and without one in threads."""
    packed = PackedKit.pack("", spec, config)
    # Named by what it holds: a notebook's cell that is run again adds no further one to this process and the workers.
    packed = dataclasses.replace(packed, name=f"etl-frame-{hashlib.sha256(packed.packed).hexdigest()[:12]}")
    _HERE.setdefault(packed.name, functools.cache(packed.build))
    with contextlib.suppress(ValueError):  # there is no Client
        ship(default_client(), packed)
    with dask.config.set({"dataframe.convert-string": False}):
        return _rows(partitions, packed.name, config, tokenize_alone)


def run_partitions(
    client: Client, partitions: Iterable[Partition], kit_name: str, config: RunConfig
) -> Iterator[tuple[Partition, dict[str, Any] | Exception]]:
    """Each partition with its receipt, or with what made it fail, as they finish."""

    def submit(chunk: Sequence[PartTask]) -> Any:
        return client.get({t.key: t.task for t in chunk}, [t.key for t in chunk], sync=False, retries=RETRIES)

    for done, receipt in slide(client, part_tasks(partitions, kit_name, config), submit):
        yield done.partition, receipt


class PartTask(NamedTuple):
    """A partition with its one Dask task, whose result is the receipt."""

    partition: Partition
    key: tuple[str, int]
    task: Any


def part_tasks(partitions: Iterable[Partition], kit_name: str, config: RunConfig) -> Iterator[PartTask]:
    """The partitions' tasks, made BUILT_TOGETHER at a time: an expression costs 30 ms, however few are in it."""
    waiting = iter(partitions)
    while chunk := list(islice(waiting, BUILT_TOGETHER)):
        expression = write_expression(chunk, kit_name, config)
        graph = expression.__dask_graph__()
        for i, partition in enumerate(chunk):
            key = (expression._name, i)  # noqa: SLF001 - Dask's name for its own keys
            yield PartTask(partition, key, graph[key])


def slide(
    client: Client, items: Iterable[T], submit: Callable[[Sequence[T]], Iterable[Any]]
) -> Iterator[tuple[T, Any | Exception]]:
    """Each item with its future's result, or with what made it fail, as they finish; `submit` makes the futures.

    A sliding window keeps graph and scheduler small; every future is released when it is done, so that a killed
    worker re-runs nothing that was finished.
    """
    waiting = iter(items)
    owner: dict[Any, T] = {}
    done = as_completed(with_results=False)

    def fill() -> int:
        """Submit what there is room for; returns how few are left when there is room again, -1 where none wait."""
        at_once = max(2, _computing_at_once(client))  # more workers may have come by now
        # for each one that computes, one that waits in the worker, and two that are being written
        room = 4 * at_once - len(owner)
        chunk = list(islice(waiting, max(0, room)))
        if chunk:
            futures = list(submit(chunk))
            owner.update(zip((f.key for f in futures), chunk, strict=True))
            done.update(futures)
        return 3 * at_once if chunk or room <= 0 else -1

    few = fill()
    while owner:
        future = next(done)
        item = owner.pop(future.key)
        error = future.exception()
        yield item, error if error is not None else future.result()
        future.release()
        if len(owner) <= few:
            few = fill()


def _computing_at_once(client: Client) -> int:
    """How many workers can compute: all of them, but of this machine's own no more than it has cores.

    More at once would only take turns, and each would pay for its first partition before any is done (measured: 128
    workers on two cores took 1.7 times as long as two, and 75 s to the first receipt).
    """
    own = client.cluster.workers if isinstance(client.cluster, LocalCluster) else None
    return len(client.nthreads()) if own is None else min(len(own), cpu_count())
