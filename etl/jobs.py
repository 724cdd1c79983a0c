"""RunConfig -> RunResult: run what the survey found missing, and close the books."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from etl import cluster, ledger
from etl.config import RunConfig
from etl.errors import EtlError, LeaseLost, ObjectChanged, StorageError, UsageError
from etl.lease import Lease, hold
from etl.pages import html_lines, printable
from etl.partitions import COMPRESSED_NAME, cut_partitions
from etl.pipeline import PackedKit
from etl.records import LOW_TRAINED_SHARE, Partition
from etl.surveys import Survey, look_at_input, survey
from etl.watcher import Notes, Watcher

LIMIT_AFTER: Final = 10_000
"""Candidates before the reject limit may end a run early."""

PARTITIONS_A_WORKER: Final = 4
"""With fewer, some workers wait for the last ones at the end."""


@dataclass(slots=True)
class RunResult:
    """What `--json` prints. Counts are totals of OUTPUT; seconds, retries and partitions_done_before of this run."""

    lines: int = 0
    blank: int = 0
    candidates: int = 0
    rows: int = 0
    rejected: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    tokens: int = 0
    loss_tokens: int = 0
    parts: int = 0
    partitions: int = 0
    partitions_done_before: int = 0
    partitions_failed: int = 0
    engine: str = ""
    verified_rows: int = 0
    mismatched_rows: int = 0
    fallback_partitions: int = 0
    retries: int = 0
    seconds: float = 0.0
    dashboard: str | None = None
    output: str = ""
    exit_code: int = 0
    error: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """The fields in the order of the contract."""
        return dataclasses.asdict(self)

    @property
    def trained_share(self) -> float:
        """loss_tokens / tokens, 0 where there are none."""
        return self.loss_tokens / self.tokens if self.tokens else 0.0

    def __str__(self) -> str:
        reasons = ", ".join(f"{count} {reason}" for reason, count in self.reasons.items())
        see = f" ({reasons}), see {self.output.rstrip('/')}/__etl/rejects/" if reasons else ""
        before = f", {self.partitions_done_before} done before" if self.partitions_done_before else ""
        verified = f"{self.verified_rows:,} rows verified against transformers, {self.mismatched_rows} differed"
        lines = [
            f"{self.rows:,} rows, {self.tokens:,} tokens, {self.loss_tokens:,} trained ({self.trained_share:.1%})",
            f"{self.lines:,} lines, {self.blank:,} blank, {self.rejected:,} rejected{see}",
            f"{self.parts:,} parts of {self.partitions:,} partitions{before} in {self.seconds:.1f} s",
            f"engine {self.engine or 'none'}, {verified}",
            f"output {self.output.rstrip('/')}/*.parquet",
        ]
        return "\n".join(map(printable, lines))

    def _repr_html_(self) -> str:
        return html_lines(str(self), self.error)


@dataclass(frozen=True, slots=True)
class PlanResult:
    """What `plan` shows: `objects`, `bytes`, `partitions`, `partitions_done`, `passed_over` (URLs), `fingerprint`.

    `workers` is None for a running cluster. `leaves_idle`: a new plan gives a worker fewer than PARTITIONS_A_WORKER;
    `advised_bytes`: the partition size that gives as many, where there is one. `notes`: what the run would say first.
    """

    objects: int
    bytes: int
    partitions: int
    partitions_done: int
    passed_over: tuple[str, ...]
    fingerprint: str
    workers: int | None = None
    leaves_idle: bool = False
    advised_bytes: int | None = None
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """What `plan --json` prints."""
        shown = ("objects", "bytes", "partitions", "partitions_done", "passed_over", "fingerprint")
        return {name: getattr(self, name) for name in shown}

    def __str__(self) -> str:
        lines = [
            f"{self.objects:,} objects, {self.bytes:,} bytes",
            f"{self.partitions:,} partitions, {self.partitions_done:,} done",
        ]
        if self.workers:
            lines.append(f"{self.partitions / self.workers:,.1f} partitions for each of {self.workers} workers")
        lines += [f"passed over: {url}" for url in self.passed_over] + [f"note: {note}" for note in self.notes]
        return "\n".join(map(printable, lines))

    @property
    def warning(self) -> str | None:
        """What to change so that no worker is idle, where something can be."""
        if self.advised_bytes:
            return f"fewer than 4 a worker leave some idle; --partition-bytes {self.advised_bytes} gives 4"
        if self.leaves_idle and self.bytes:
            return "fewer than 4 a worker leave some idle, and no size gives 4: compressed objects are never cut"
        return None

    def _repr_html_(self) -> str:
        return html_lines(str(self), self.warning)


def plan(config: RunConfig) -> PlanResult:
    """What `run` would read and pass over, how it is cut, and what is done; starts no cluster, writes nothing."""
    seen = survey(config)
    workers = None if config.scheduler else cluster.worker_count(config)
    thin = workers if seen.before is None and len(seen.plan.partitions) < PARTITIONS_A_WORKER * (workers or 0) else None
    return PlanResult(
        objects=len(seen.listing.objects),
        bytes=sum(o.size for o in seen.listing.objects),
        partitions=len(seen.plan.partitions),
        partitions_done=len(seen.receipts),
        passed_over=seen.listing.passed_over,
        fingerprint=seen.plan.fingerprint,
        workers=workers,
        leaves_idle=thin is not None,
        advised_bytes=thin and _advised_bytes(seen, thin),
        notes=tuple(seen.notes),
    )


def _advised_bytes(seen: Survey, workers: int) -> int | None:
    wanted, size = PARTITIONS_A_WORKER * workers, seen.config.partition_size
    # of the smaller objects, which nobody has looked into, the names must do
    compressed = seen.listing.compressed | {o.url for o in seen.listing.objects if COMPRESSED_NAME.search(o.url)}
    while size > 1:
        size //= 2
        partitions = cut_partitions(seen.listing.objects, size, "", compressed)
        if len(partitions) >= wanted:
            return size
    return None


def frame(config: RunConfig) -> Any:
    """INPUT tokenized as a lazy `dask.dataframe.DataFrame` in SCHEMA, one partition as `run` would cut it.

    Writes nothing; `output` may be absent. Rejected rows are left out: `run` counts them. Make a Client first to
    compute on its workers. Raises UsageError as `run` does.
    """
    spec, partitions = look_at_input(config)
    return cluster.lazy_frame(partitions, spec, config)


def run(config: RunConfig, watcher: Watcher | None = None) -> RunResult:
    """Tokenize everything under INPUT that OUTPUT does not hold yet.

    Returns the totals; `exit_code` is 0, 1 (something to look at, said in `error`) or 130 (interrupted). Notes and the
    dashboard's address go to `watcher`, or to standard error. Raises UsageError, before anything is written, where the
    run cannot begin.
    """
    watcher = watcher or Notes()
    started = time.monotonic()
    cluster.check_startable(config)
    with cluster.begun(config) as warm:  # what workers import takes as long as the survey
        seen = survey(config)
        for note in seen.notes:
            watcher.say(note)
        is_closed = seen.finished and not seen.todo and not seen.changed
        result = Books(seen).total() if is_closed else None
        if result is None or result.exit_code:  # limits may be others than those that it was closed under
            result = _hold_and_run(seen, watcher, warm, started)
    result.seconds = round(time.monotonic() - started, 3)
    if result.tokens and result.trained_share < LOW_TRAINED_SHARE:
        watcher.warn(f"only {result.trained_share:.1%} of the tokens are trained; look at the mask before you train")
    return result


def _hold_and_run(seen: Survey, watcher: Watcher, warm: Path | None, started: float) -> RunResult:
    run_id = new_run_id()
    with hold(seen.storage, seen.places.lease, run_id, take_over=seen.config.take_over, say=watcher.say) as lease:
        # Another run may have worked here between the look and the lease.
        books = Books(_look_again(seen))
        with books.ending():
            lease.confirm()
            books.open()
            _run_partitions(books, watcher, lease, run_id, warm)
        result = books.close(lease.confirm)
        if lease.lost is None:
            with books.ending():
                model = {"tokenizer": seen.spec.name, "revision": seen.spec.revision}
                result.seconds = round(time.monotonic() - started, 3)
                ledger.write_run(seen.storage, seen.places, run_id, result.as_dict() | model)
    return books.total()


def _look_again(seen: Survey) -> Survey:
    """The survey as it is now that no other run can change it."""
    try:
        plan = ledger.read_plan(seen.storage, seen.places)
        if plan == seen.before:
            return dataclasses.replace(seen, receipts=ledger.read_receipts(seen.storage, seen.places, seen.plan))
    except StorageError as error:
        raise UsageError(str(error)) from error
    return survey(seen.config)


def _run_partitions(books: Books, watcher: Watcher, lease: Lease, run_id: str, warm: Path | None) -> None:
    seen, config = books.seen, books.seen.config
    watcher.start(len(seen.plan.partitions), len(seen.receipts))
    todo = largest_first(seen.todo)
    if not todo:
        return
    # Each worker takes its share of --read-concurrency and of the memory: it must know among how many.
    known = config if config.scheduler else cluster.with_shares(config)
    kit = PackedKit.pack(cluster.kit_name(seen.plan.fingerprint, run_id), seen.spec, known)
    with cluster.connect(config, kit, warm) as client:
        books.dashboard = None if config.no_dashboard else client.dashboard_link
        watcher.say(f"dashboard: {books.dashboard or 'off'}")
        if remark := cluster.describe_workers(config, client):
            watcher.say(remark)
        cluster.ship(client, kit, warm)
        said: set[str] = set()
        for partition, receipt in cluster.run_partitions(client, todo, kit.name, config):
            if isinstance(receipt, LeaseLost):
                lease.confirm()
            lease.check()
            if isinstance(receipt, Exception):
                books.fail(partition, receipt)
            else:
                books.enter(partition, receipt)
                if (why := receipt["run"].get("why")) and why not in said:
                    said.add(why)
                    watcher.say(f"engine {receipt['engine']}: {why}")
                watcher.advance(receipt)
            if books.stopped:
                break


def largest_first(partitions: Iterable[Partition]) -> list[Partition]:
    """By stored bytes: at the end no worker is left alone with a long one."""
    return sorted(partitions, key=lambda partition: partition.bytes, reverse=True)


def new_run_id() -> str:
    """`<UTC>-<id>`, e.g. 20261129T170000Z-1a2b3c."""
    return f"{datetime.datetime.now(datetime.UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}"


class Books:
    """The receipts of one run, from the first to SUCCESS."""

    def __init__(self, seen: Survey) -> None:
        self.seen = seen
        self.places = seen.places
        self.receipts: dict[str, Mapping[str, Any]] = dict(seen.receipts)
        self.failed: dict[str, str] = {}
        self.tries_again = True
        self.candidates = sum(receipt["candidates"] for receipt in self.receipts.values())
        self.rejected = _counted_rejects(self.receipts.values())
        self.retries = 0
        self.dashboard: str | None = None
        self.stopped: tuple[int, str] | None = None

    def open(self) -> None:
        """Store the plan where it is new or has grown; SUCCESS goes first, for it would no longer be true."""
        seen, plan = self.seen, self.seen.plan
        if not seen.changed:
            return
        seen.storage.delete([self.places.success])
        # The new plan is safe, with what it discards, before anything is deleted: a run killed here goes on from it.
        seen.storage.put(self.places.plan, plan.encode())
        if plan.discards:
            seen.storage.delete(ledger.files_of(self.places, plan.discards))
            seen.storage.put(self.places.plan, dataclasses.replace(plan, discards=()).encode())

    def enter(self, partition: Partition, receipt: Mapping[str, Any]) -> None:
        """A partition is done."""
        self.receipts[partition.stem] = receipt
        self.candidates += receipt["candidates"]
        self.rejected += _counted_rejects([receipt])
        self.retries += receipt["run"]["retries"]
        if self.seen.config.on_error == "fail" and _counted_rejects([receipt]):
            self.stop(1, self._say_rejects(partition.stem))
        elif self.candidates >= LIMIT_AFTER and (error := self._over_limit()):
            self.stop(1, error)

    def fail(self, partition: Partition, error: Exception) -> None:
        """A partition could not be done; the others go on."""
        self.tries_again &= not isinstance(error, ObjectChanged)
        self.failed[partition.stem] = f"{partition.stem} ({partition.ranges[0].url}): {type(error).__name__}: {error}"

    def stop(self, exit_code: int, error: str) -> None:
        """End the run early; what ended it first is what it says."""
        self.stopped = self.stopped or (exit_code, error)

    @contextlib.contextmanager
    def ending(self) -> Iterator[None]:
        """An interrupt, or a failure such as a refused write, ends the run with its totals instead of without."""
        try:
            yield
        except KeyboardInterrupt:
            self.stop(130, "interrupted; the same command goes on from here")
        except UsageError:
            raise
        except EtlError as error:
            self.stop(1, str(error))

    def close(self, confirm: Callable[[], None]) -> RunResult:
        """Judge the run; write SUCCESS if all is done and within the limits.

        `confirm` raises where the output is no more this run's.
        """
        if not self.stopped:
            with self.ending():
                self._write_verdict(confirm)
        return self.total()

    def _write_verdict(self, confirm: Callable[[], None]) -> None:
        storage, plan, result = self.seen.storage, self.seen.plan, self.total()
        if result.error:
            self.stop(result.exit_code, result.error)
        # also of a run that ends with 1: its rejects are what is looked at next
        confirm()
        ledger.number_rejects(storage, self.places, plan, self.receipts)
        confirm()
        if result.exit_code:
            storage.delete([self.places.success])  # left by a run whose limits were others
        else:
            counts = dict(sorted(self._sums().counts.items()))
            ledger.write_success(storage, self.places, plan, result.as_dict() | {"counts": counts})

    def _verdict(self) -> tuple[int, str | None]:
        if self.stopped:
            return self.stopped
        if self.failed:
            first = next(iter(self.failed.values()))
            what_next = "; the same command tries them again" if self.tries_again else ""
            return 1, f"{len(self.failed)} partitions failed, the first {first}{what_next}"
        if self.seen.config.on_error == "fail":
            for stem, receipt in self.receipts.items():
                if _counted_rejects([receipt]):
                    return 1, self._say_rejects(stem)
        error = self._over_limit()
        return (1, error) if error else (0, None)

    def _say_rejects(self, stem: str) -> str:
        rejected, reasons = self.receipts[stem]["rejected"], ", ".join(self.receipts[stem]["reasons"])
        return f"--on-error fail: {rejected} rows rejected ({reasons}); see {self.places.rejects(stem)}"

    def _over_limit(self) -> str | None:
        candidates, rejected = self.candidates, self.rejected
        limit = self.seen.config.max_reject_share
        if not candidates or rejected / candidates <= limit:
            return None
        return (
            f"{rejected} of {candidates} candidates were rejected ({rejected / candidates:.2%}), more than "
            f"--max-reject-share {limit:g}; look into {self.places.ledger}/rejects/, "
            "then mend the input or raise the limit"
        )

    def _sums(self) -> ledger.Sums:
        sums = ledger.Sums()
        for receipt in self.receipts.values():
            sums.add_receipt(receipt)
        return sums

    def total(self) -> RunResult:
        """The totals of OUTPUT, and how the run ends."""
        exit_code, error = self._verdict()
        sums = self._sums()
        numbers: dict[str, Any] = {
            name: sums.numbers[name] for name in (*ledger.COUNTS, "parts", "fallback_partitions")
        }
        return RunResult(
            **numbers,
            reasons=dict(sorted(sums.reasons.items())),
            partitions=len(self.seen.plan.partitions),
            partitions_done_before=len(self.seen.receipts),
            partitions_failed=len(self.failed),
            engine="+".join(sorted({receipt["engine"] for receipt in self.receipts.values()})),
            retries=self.retries,
            dashboard=self.dashboard,
            output=str(self.seen.config.output),
            exit_code=exit_code,
            error=error,
        )


def _counted_rejects(receipts: Iterable[Mapping[str, Any]]) -> int:
    """Rejects for all reasons but `over_length`, which the user asked for."""
    return sum(receipt["rejected"] - receipt["reasons"].get("over_length", 0) for receipt in receipts)
