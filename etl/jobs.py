"""RunConfig -> RunResult: survey input and output, plan what is missing, run it, and close the books."""

from __future__ import annotations

import dataclasses
import datetime
import secrets
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from etl import cluster, ledger
from etl.config import RunConfig
from etl.errors import LeaseLost, StorageError, UsageError
from etl.fingerprint import difference, digest, settings
from etl.lease import Lease, hold
from etl.ledger import Places, Plan
from etl.partitions import Listing, append_partitions, check_apart, cut_partitions, find_objects
from etl.records import Partition, TokenizerSpec
from etl.storage import Storage, canonical_url
from etl.template import ChatTemplate, probe
from etl.tokenizer import load_tokenizer
from etl.watcher import Watcher

LIMIT_AFTER: Final = 10_000
"""Candidates before the reject limit may end a run early."""


@dataclass(frozen=True, slots=True)
class Survey:
    """All that is known before anything is written: what would be read, how it is cut, what is done."""

    config: RunConfig
    places: Places
    storage: Storage
    spec: TokenizerSpec
    plan: Plan
    planned_before: int
    receipts: Mapping[str, Mapping[str, Any]]
    listing: Listing
    notes: tuple[str, ...]
    finished: bool

    @property
    def todo(self) -> tuple[Partition, ...]:
        """Partitions without a valid receipt, in order."""
        return tuple(p for p in self.plan.partitions if p.stem not in self.receipts)


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

    def _repr_html_(self) -> str:
        cells = "".join(f"<tr><td>{name}</td><td>{value}</td></tr>" for name, value in self.as_dict().items())
        return f"<table>{cells}</table>"


@dataclass(frozen=True, slots=True)
class PlanResult:
    """What `plan` shows: `objects`, `bytes`, `partitions`, `partitions_done`, `passed_over` (URLs), `fingerprint`."""

    objects: int
    bytes: int
    partitions: int
    partitions_done: int
    passed_over: tuple[str, ...]
    fingerprint: str


def survey(config: RunConfig) -> Survey:
    """Look at input, output and tokenizer; write nothing. Raises UsageError on whatever forbids a run."""
    if config.output is None:
        raise UsageError("name an OUTPUT, e.g. s3://bucket/tokens/")
    try:
        return _survey(config, config.output)
    except StorageError as error:
        raise UsageError(str(error)) from error


def _survey(config: RunConfig, output: str) -> Survey:
    check_apart(config.inputs, output)
    storage, places = Storage.from_config(config), Places(canonical_url(output))
    storage.check_writable(places.root)
    old = ledger.read_plan(storage, places)
    if old is None:
        _check_empty(storage, places)
    listing = find_objects(storage, config.inputs, config.partition_size)
    spec = load_tokenizer(config)
    notes = probe(ChatTemplate.from_spec(spec, config))
    values = settings(spec, config)
    plan = _new_plan(listing, config, spec, values) if old is None else _grown_plan(old, listing, config, values)
    receipts = {} if old is None else ledger.read_receipts(storage, places, old)
    return Survey(
        config,
        places,
        storage,
        spec,
        plan,
        len(old.partitions) if old else 0,
        receipts,
        listing,
        tuple(notes),
        finished=storage.stat(places.success) is not None,
    )


def _check_empty(storage: Storage, places: Places) -> None:
    held = storage.list(places.root)
    if held:
        raise UsageError(
            f"OUTPUT {places.root} already holds {len(held)} objects that etl did not plan, e.g. {held[0].url}; "
            "choose an empty place"
        )


def _new_plan(listing: Listing, config: RunConfig, spec: TokenizerSpec, values: Mapping[str, Any]) -> Plan:
    fingerprint = digest(values)
    partitions = cut_partitions(listing.objects, config.partition_size, fingerprint, listing.compressed)
    return Plan(fingerprint, values, config.inputs, tuple(partitions), listing.passed_over, spec.largest_id())


def _grown_plan(old: Plan, listing: Listing, config: RunConfig, values: Mapping[str, Any]) -> Plan:
    fingerprint = digest(values)
    if fingerprint != old.fingerprint:
        raise UsageError(
            f"OUTPUT {config.output} was written with other options: {difference(old.settings, values)}; "
            "use the same ones, or another OUTPUT"
        )
    planned = {r.url: (r.etag, r.size) for p in old.partitions for r in p.ranges}
    found = {o.url: (o.etag, o.size) for o in listing.objects}
    for url, was in planned.items():
        now = found.get(url)
        if now != was:
            seen = "is gone" if now is None else f"changed (ETag was {was[0]}, is {now[0]})"
            raise UsageError(f"input object {url} {seen} since OUTPUT was planned; restore it, or use another OUTPUT")
    fresh = [o for o in listing.objects if o.url not in planned]
    partitions = append_partitions(old.partitions, fresh, config.partition_size, fingerprint, listing.compressed)
    return dataclasses.replace(old, partitions=tuple(partitions), passed_over=listing.passed_over)


def plan(config: RunConfig) -> PlanResult:
    """What `run` would read and pass over, how it is cut, and what is done; starts no cluster, writes nothing."""
    seen = survey(config)
    return PlanResult(
        objects=len(seen.listing.objects),
        bytes=sum(o.size for o in seen.listing.objects),
        partitions=len(seen.plan.partitions),
        partitions_done=len(seen.receipts),
        passed_over=seen.listing.passed_over,
        fingerprint=seen.plan.fingerprint,
    )


def run(config: RunConfig, watcher: Watcher | None = None) -> RunResult:
    """Tokenize everything under INPUT that OUTPUT does not hold yet.

    Returns the totals; `exit_code` is 0, 1 (something to look at, said in `error`) or 130 (interrupted). Raises
    UsageError, before anything is written, where the run cannot begin.
    """
    watcher = watcher or Watcher()
    started = time.monotonic()
    seen = survey(config)
    for note in seen.notes:
        watcher.say(note)
    if not seen.todo and seen.finished:
        books = Books(seen)
        result = books.close()
    else:
        result = _hold_and_run(seen, watcher)
    result.seconds = round(time.monotonic() - started, 3)
    return result


def _hold_and_run(seen: Survey, watcher: Watcher) -> RunResult:
    run_id = new_run_id()
    with hold(seen.storage, seen.places.lease, run_id, take_over=seen.config.take_over, say=watcher.say) as lease:
        # Another run may have worked here between the look and the lease.
        books = Books(_look_again(seen))
        books.open()
        try:
            _run_partitions(books, watcher, lease, run_id)
        except KeyboardInterrupt:
            books.stop(130, "interrupted; the same command goes on from here")
        except LeaseLost as error:
            books.stop(1, str(error))
            return books.close()
        result = books.close()
        ledger.write_run(seen.storage, seen.places, run_id, result.as_dict())
    return result


def _look_again(seen: Survey) -> Survey:
    plan = ledger.read_plan(seen.storage, seen.places)
    if plan is None:
        return seen
    if plan.fingerprint != seen.plan.fingerprint:
        raise UsageError(f"another run has planned {seen.places.root} with other options; use another OUTPUT")
    receipts = ledger.read_receipts(seen.storage, seen.places, plan)
    return dataclasses.replace(seen, receipts=receipts, planned_before=len(plan.partitions))


def _run_partitions(books: Books, watcher: Watcher, lease: Lease, run_id: str) -> None:
    seen, config = books.seen, books.seen.config
    watcher.start(len(seen.plan.partitions), len(seen.receipts))
    if not seen.todo:
        return
    kit_name = f"etl-{seen.plan.fingerprint[:12]}-{run_id}"
    with cluster.connect(config) as client:
        books.dashboard = None if config.no_dashboard else client.dashboard_link
        watcher.say(f"dashboard: {books.dashboard or 'off'}")
        cluster.ship(client, kit_name, seen.spec, config)
        for partition, receipt in cluster.run_partitions(client, seen.todo, kit_name, config):
            lease.check()
            if isinstance(receipt, Exception):
                books.fail(partition, receipt)
            else:
                books.enter(partition, receipt)
                watcher.advance(receipt)
            if books.stopped:
                break


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
        self.candidates = _total(self.receipts.values(), "candidates")
        self.rejected = _counted_rejects(self.receipts.values())
        self.retries = 0
        self.dashboard: str | None = None
        self.stopped: tuple[int, str] | None = None

    def open(self) -> None:
        """Store the plan where it is new or has grown; SUCCESS goes first, for it would no longer be true."""
        if len(self.seen.plan.partitions) > self.seen.planned_before:
            self.seen.storage.delete([self.places.success])
            self.seen.storage.put(self.places.plan, self.seen.plan.encode())

    def enter(self, partition: Partition, receipt: Mapping[str, Any]) -> None:
        """A partition is done."""
        self.receipts[partition.stem] = receipt
        self.candidates += receipt["candidates"]
        self.rejected += _counted_rejects([receipt])
        self.retries += receipt["run"]["retries"]
        if self.seen.config.on_error == "fail" and _counted_rejects([receipt]):
            self.stop(1, f"--on-error fail: {_first_reject(receipt, self.places)}")
        elif self.candidates >= LIMIT_AFTER and (error := self._over_limit()):
            self.stop(1, error)

    def fail(self, partition: Partition, error: Exception) -> None:
        """A partition could not be done; the others go on."""
        self.failed[partition.stem] = f"{partition.stem} ({partition.ranges[0].url}): {type(error).__name__}: {error}"

    def stop(self, exit_code: int, error: str) -> None:
        """End the run early."""
        self.stopped = (exit_code, error)

    def close(self) -> RunResult:
        """Judge the run; write SUCCESS if all is done and within the limits."""
        result = self._totals()
        result.exit_code, result.error = self._verdict()
        if result.exit_code == 0 and not (self.seen.finished and not self.seen.todo):
            storage = self.seen.storage
            ledger.number_rejects(storage, self.places, self.seen.plan, self.receipts)
            ledger.write_success(storage, self.places, self.seen.plan, result.as_dict() | {"counts": self._counts()})
        return result

    def _verdict(self) -> tuple[int, str | None]:
        if self.stopped:
            return self.stopped
        if self.failed:
            first = next(iter(self.failed.values()))
            return 1, f"{len(self.failed)} partitions failed, the first {first}; the same command tries them again"
        if self.seen.config.on_error == "fail":
            for receipt in self.receipts.values():
                if _counted_rejects([receipt]):
                    return 1, f"--on-error fail: {_first_reject(receipt, self.places)}"
        error = self._over_limit()
        return (1, error) if error else (0, None)

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

    def _counts(self) -> dict[str, int]:
        counts: Counter[str] = Counter()
        for receipt in self.receipts.values():
            counts.update(receipt["counts"])
        return dict(sorted(counts.items()))

    def _totals(self) -> RunResult:
        receipts = list(self.receipts.values())
        reasons: Counter[str] = Counter()
        for receipt in receipts:
            reasons.update(receipt["reasons"])
        counted = ("lines", "blank", "candidates", "rows", "rejected", "tokens", "loss_tokens")
        counted_too = ("verified_rows", "mismatched_rows")
        totals: dict[str, Any] = {name: _total(receipts, name) for name in (*counted, *counted_too)}
        return RunResult(
            **totals,
            reasons=dict(sorted(reasons.items())),
            parts=sum(receipt["part"] is not None for receipt in receipts),
            partitions=len(self.seen.plan.partitions),
            partitions_done_before=len(self.seen.receipts),
            partitions_failed=len(self.failed),
            engine="+".join(sorted({receipt["engine"] for receipt in receipts})),
            fallback_partitions=sum(receipt["mismatched_rows"] > 0 for receipt in receipts),
            retries=self.retries,
            dashboard=self.dashboard,
            output=str(self.seen.config.output),
        )


def _total(receipts: Iterable[Mapping[str, Any]], name: str) -> int:
    return sum(receipt[name] for receipt in receipts)


def _counted_rejects(receipts: Iterable[Mapping[str, Any]]) -> int:
    """Rejects for all reasons but `over_length`, which the user asked for."""
    return sum(receipt["rejected"] - receipt["reasons"].get("over_length", 0) for receipt in receipts)


def _first_reject(receipt: Mapping[str, Any], places: Places) -> str:
    stem = f"part-{receipt['index']:07d}-{receipt['identity']}"
    return f"{receipt['rejected']} rows rejected ({', '.join(receipt['reasons'])}); see {places.rejects(stem)}"
