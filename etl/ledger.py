"""OUTPUT/__etl: the plan, and for each partition rejects, part and receipt, written in that order.

A partition is done when its receipt exists and the part that it names has its size; SUCCESS says that all are.
Everything here is plain JSON whose bytes depend on the input and the options alone, but for what stands under `run`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import platform
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import groupby, islice
from typing import Any, Final, NamedTuple, Protocol, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from etl.config import RunConfig
from etl.errors import EtlError, StorageError, UsageError
from etl.pipeline import Gate, Outcome
from etl.records import ObjectRange, Partition, Reject
from etl.storage import Storage, canonical_url
from etl.tables import serialize

T = TypeVar("T")
R = TypeVar("R")

VERSION: Final = 1
RAW_BYTES: Final = 2**20
"""The rejects of one line keep together this much of it: a line of 20,000 bad choices must not fill gigabytes."""


CLOSED: Final = ("lines", "blank", "candidates", "rows", "rejected", "tokens", "loss_tokens")
"""The numbers of a receipt whose sum SUCCESS holds."""

COUNTS: Final = (*CLOSED, "verified_rows", "mismatched_rows")
"""The numbers of a receipt."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong: `kind` is one of KINDS, `where` a URL, `detail` what was seen and what was meant."""

    kind: str
    where: str
    detail: str


@dataclass(frozen=True, slots=True)
class Places:
    """Where everything of one output lies."""

    output: str

    @property
    def root(self) -> str:
        """OUTPUT without a closing slash."""
        return self.output.rstrip("/")

    @property
    def ledger(self) -> str:
        """OUTPUT/__etl."""
        return f"{self.root}/__etl"

    @property
    def plan(self) -> str:
        """OUTPUT/__etl/plan.json."""
        return f"{self.ledger}/plan.json"

    @property
    def success(self) -> str:
        """OUTPUT/__etl/SUCCESS."""
        return f"{self.ledger}/SUCCESS"

    @property
    def lease(self) -> str:
        """OUTPUT/__etl/lease.json."""
        return f"{self.ledger}/lease.json"

    def part(self, stem: str) -> str:
        """OUTPUT/part-….parquet."""
        return f"{self.root}/{stem}.parquet"

    def receipt(self, stem: str) -> str:
        """OUTPUT/__etl/receipts/part-….json."""
        return f"{self.ledger}/receipts/{stem}.json"

    def rejects(self, stem: str) -> str:
        """OUTPUT/__etl/rejects/part-….jsonl."""
        return f"{self.ledger}/rejects/{stem}.jsonl"

    @property
    def report(self) -> str:
        """OUTPUT/__etl/report.html."""
        return f"{self.ledger}/report.html"

    def is_passing(self, url: str) -> bool:
        """Whether a run may have left this beside its plan: the lease, a probe for conditional writes, its log."""
        return url == self.lease or url.startswith((f"{self.ledger}/probe-", f"{self.ledger}/runs/"))

    def run(self, run_id: str) -> str:
        """OUTPUT/__etl/runs/<UTC>-<id>.json."""
        return f"{self.ledger}/runs/{run_id}.json"


# --- one partition, in a worker ----------------------------------------------------------------------------------


class StageSeconds(Protocol):
    """Anything that knows how long each stage took."""

    seconds: dict[str, float]

    def __call__(self, stage: str) -> Any:
        """Count the time spent inside as `stage`."""


@dataclass(frozen=True, slots=True)
class Task:
    """One partition's work: where it goes, what stood on the clock (perf_counter) before it, its run's way there."""

    output: str
    fingerprint: str
    partition: Partition
    started: float
    gate: Gate = field(default_factory=Gate)


class Part(NamedTuple):
    """A partition's rows, and the Parquet file that they make; None without rows."""

    table: pa.Table
    body: bytes | None


def make_part(table: pa.Table, clock: StageSeconds) -> Part:
    """The rows with their file."""
    with clock("parquet"):
        return Part(table, serialize(table) if table.num_rows else None)


def write_partition(storage: Storage, task: Task, outcome: Outcome, part: Part, clock: StageSeconds) -> dict[str, Any]:
    """Write rejects, part and receipt, each one PUT; return the receipt. A partition without rows writes no part.

    `storage` is this partition's own: its retries become the receipt's. Raises EtlError where the run has ended.
    """
    places, stem = Places(canonical_url(task.output)), task.partition.stem

    def put(url: str, body: bytes) -> None:
        with task.gate:
            storage.put(url, body)

    with clock("write"):
        if outcome.rejects:
            put(places.rejects(stem), encode_rejects(outcome.rejects, task.partition))
        if part.body is not None:
            put(places.part(stem), part.body)
    receipt = _lasting(task, outcome, part) | {"run": _passing(storage, task, clock, outcome)}
    put(places.receipt(stem), encode_json(receipt))
    return receipt


def _lasting(task: Task, outcome: Outcome, part: Part) -> dict[str, Any]:
    """What is the same however often the partition is done."""
    partition, (table, body) = task.partition, part
    return {
        "version": VERSION,
        "index": partition.index,
        "identity": partition.identity,
        "part": f"{partition.stem}.parquet" if body is not None else None,
        "size": len(body) if body is not None else None,
        "sha256": hashlib.sha256(body).hexdigest() if body is not None else None,
        "objects": [{"key": r.url, "etag": r.etag, "start": r.start, "end": r.end} for r in partition.ranges],
        "lines": outcome.lines,
        "blank": outcome.blank,
        "candidates": outcome.candidates,
        "rows": table.num_rows,
        "rejected": len(outcome.rejects),
        "reasons": dict(sorted(Counter(reject.reason for reject in outcome.rejects).items())),
        "counts": dict(sorted(outcome.counts.items())),
        "drift": dict(sorted(outcome.drift.items())),
        "tokens": pc.sum(table["n_tokens"]).as_py() or 0,
        "loss_tokens": pc.sum(table["n_loss_tokens"]).as_py() or 0,
        "engine": outcome.engine,
        "verified_rows": outcome.verified_rows,
        "mismatched_rows": outcome.mismatched_rows,
        "fingerprint": task.fingerprint,
    }


def _passing(storage: Storage, task: Task, clock: StageSeconds, outcome: Outcome) -> dict[str, Any]:
    why = {} if outcome.why is None else {"why": outcome.why}  # this engine, and not the fast one
    return {
        "seconds": round(time.perf_counter() - task.started, 4),
        "stages": {stage: round(seconds, 4) for stage, seconds in clock.seconds.items()},
        "host": platform.node(),
        "retries": storage.retries,
        **why,
    }


def encode_rejects(rejects: Iterable[Reject], partition: Partition) -> bytes:
    """Rejects as JSON lines. `line` stays null where earlier ranges of the object decide it (`number_rejects`)."""
    from_start = {r.url for r in partition.ranges if r.start == 0}
    records: list[bytes] = []
    for _, of_line in groupby(rejects, lambda reject: (reject.source, reject.offset)):
        left = RAW_BYTES
        for reject in of_line:
            raw = reject.raw[:left]
            left -= len(raw)
            records.append(encode_json(_reject_record(reject, raw, known=reject.source in from_start)))
    return b"".join(records)


def _reject_record(reject: Reject, raw: bytes, *, known: bool) -> dict[str, Any]:
    record: dict[str, Any] = {
        "source": reject.source,
        "line": reject.number if known else None,
        "offset": reject.offset,
        "bytes": reject.size,
        "choice": reject.choice,
        "turn": reject.turn,
        "reason": reject.reason,
        "detail": reject.detail,
        "truncated": len(raw) < reject.size,
    }
    if not known:
        record["line_in_range"] = reject.number
    try:
        record["raw"] = raw.decode()
    except UnicodeDecodeError:
        record["raw_base64"] = base64.b64encode(raw).decode()
    return record


def encode_json(value: object) -> bytes:
    """One line of JSON, UTF-8, keys in the order given."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "backslashreplace") + b"\n"


def read_record(body: bytes, where: str) -> dict[str, Any] | Fault:
    """A JSON object, or the fault that its bytes are."""
    try:
        record = json.loads(body)
    except (ValueError, RecursionError):
        kind = "edited" if body.rstrip().endswith(b"}") else "truncated"
        return Fault(kind, where, f"its {len(body)} bytes are no JSON")
    return record if isinstance(record, dict) else Fault("edited", where, "it is no JSON object")


def read_receipt(body: bytes, where: str) -> dict[str, Any] | Fault:
    """A receipt with every field of its type, or the first fault that keeps it from being one."""
    record = read_record(body, where)
    if isinstance(record, Fault):
        return record
    for name in COUNTS:
        if not _is_count(record.get(name)):
            return Fault("wrong_count", where, f"{name} is {record.get(name)!r}, not a whole number from 0 on")
    for name in ("reasons", "counts"):
        values = record.get(name)
        if not isinstance(values, dict) or not all(map(_is_count, values.values())):
            return Fault("wrong_count", where, f"{name} is {values!r}, not counts by name")
    if not isinstance(record.get("engine"), str):
        return Fault("edited", where, f"engine is {record.get('engine')!r}")
    for name in ("part", "sha256"):
        if name not in record or not isinstance(record[name], str | None):
            return Fault("edited", where, f"{name} is {record.get(name)!r}")
    return record


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


# --- the whole output, on the client -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Plan:
    """What one output consists of: written before the first part, and only ever appended to.

    `largest_id` is the tokenizer's highest id, so that `check` needs no tokenizer; None where the plan has none.
    `discards`: stems of the plan that this one replaces (`--overwrite`), until what they name is deleted.
    """

    fingerprint: str
    settings: Mapping[str, Any]
    inputs: tuple[str, ...]
    partitions: tuple[Partition, ...]
    passed_over: tuple[str, ...] = ()
    largest_id: int | None = None
    discards: tuple[str, ...] = ()

    def encode(self) -> bytes:
        """The bytes of plan.json."""
        record = {
            "version": VERSION,
            "fingerprint": self.fingerprint,
            "settings": self.settings,
            "largest_id": self.largest_id,
            "inputs": list(self.inputs),
            "passed_over": list(self.passed_over),
            **({"discards": list(self.discards)} if self.discards else {}),
            "partitions": [
                {
                    "index": p.index,
                    "identity": p.identity,
                    "objects": [[r.url, r.etag, r.start, r.end, r.size] for r in p.ranges],
                }
                for p in self.partitions
            ],
        }
        return encode_json(record)

    @classmethod
    def decode(cls, body: bytes, where: str) -> Plan:
        """The plan from plan.json's bytes. Raises UsageError where they are no plan of this version."""
        try:
            record = json.loads(body)
            partitions = tuple(map(_planned, record["partitions"]))
            version, fingerprint, settings = record["version"], str(record["fingerprint"]), _settings(record)
            inputs, passed_over = _texts(record["inputs"]), _texts(record["passed_over"])
            discards = _texts(record.get("discards", []))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise UsageError(
                f"{where} is not a plan that etl wrote ({type(error).__name__}); restore it, or choose another OUTPUT"
            ) from error
        if version != VERSION:
            raise UsageError(f"{where} has version {version}, this etl writes {VERSION}; use the etl that wrote it")
        return cls(fingerprint, settings, inputs, partitions, passed_over, record.get("largest_id"), discards)


def _planned(record: Any) -> Partition:
    index, identity, objects = record["index"], record["identity"], record["objects"]
    if type(index) is not int or type(identity) is not str or not objects:
        raise TypeError("a partition")
    for r in objects:
        if [type(value) for value in r] != [str, str, int, int, int]:
            raise TypeError("an object")
    return Partition(index, identity, tuple(ObjectRange(*r) for r in objects))


def _settings(record: Mapping[str, Any]) -> dict[str, Any]:
    settings = dict(record["settings"])
    numbers = record.get("largest_id"), settings.get("max_length"), settings.get("min_loss_tokens")
    if not all(isinstance(number, int | None) for number in numbers):
        raise TypeError("a number")
    _texts(settings.get("keep", []))
    return settings


def _texts(values: Any) -> tuple[str, ...]:
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise TypeError("a list of texts")
    return tuple(values)


def files_of(places: Places, stems: Iterable[str]) -> list[str]:
    """The URLs of part, receipt and rejects of each stem."""
    return [url(stem) for stem in stems for url in (places.part, places.receipt, places.rejects)]


def names_of(places: Places, plan: Plan) -> frozenset[str]:
    """Every URL that a plan accounts for, whether it is there or not."""
    stems = (*(p.stem for p in plan.partitions), *plan.discards)
    return frozenset([places.plan, places.success, places.report, *files_of(places, stems)])


def read_plan(storage: Storage, places: Places) -> Plan | None:
    """The output's plan, or None where there is none yet."""
    body = storage.get(places.plan)
    return None if body is None else Plan.decode(body, places.plan)


def open_output(
    output: str,
    *,
    endpoint_url: str | None = None,
    profile: str | None = None,
    anon: bool = False,
    storage_option: Mapping[str, Any] | None = None,
) -> tuple[Storage, Places, Plan]:
    """The way to an output that etl has written, and its plan. Raises UsageError where there is none."""
    if not output:
        raise UsageError("name an OUTPUT, e.g. s3://bucket/tokens/")
    config = RunConfig(
        input=output, endpoint_url=endpoint_url, profile=profile, anon=anon, storage_option=storage_option or {}
    )
    try:
        storage = Storage.from_config(config)
        places = Places(canonical_url(output))
        storage.check_bucket(places.root)
        plan = read_plan(storage, places)
    except StorageError as error:
        raise UsageError(str(error)) from error
    if plan is None:
        raise UsageError(f"{output} is no output of etl: there is no {places.plan}; check the spelling")
    return storage, places, plan


def map_in_order(work: Callable[[T], R], items: Iterable[T], threads: int = 16) -> Iterator[R]:
    """`work` on every item in threads; results in the items' order, and never more than a window of them waiting."""
    waiting = iter(items)
    with ThreadPoolExecutor(threads) as pool:
        while chunk := list(islice(waiting, 32 * threads)):
            yield from pool.map(work, chunk)


def read_receipts(storage: Storage, places: Places, plan: Plan) -> dict[str, dict[str, Any]]:
    """Stem -> receipt of every partition of the plan that is done: part in place, with the size that it names."""
    sizes = {info.url: info.size for info in storage.list(places.root)}
    stems = [p.stem for p in plan.partitions if places.receipt(p.stem) in sizes]
    bodies = map_in_order(storage.get, map(places.receipt, stems), threads=32)
    receipts = {stem: read_receipt(body, stem) for stem, body in zip(stems, bodies, strict=True) if body is not None}
    return {
        stem: receipt
        for stem, receipt in receipts.items()
        if not isinstance(receipt, Fault) and is_done(stem, receipt, places, sizes)  # else it is made again
    }


class Sums:
    """Receipts added up, one at a time: numbers, rejects by reason, counts by name."""

    def __init__(self) -> None:
        self.numbers: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()

    def add_receipt(self, receipt: Mapping[str, Any]) -> None:
        """One more."""
        self.numbers.update({name: receipt[name] for name in COUNTS})
        self.numbers["parts"] += receipt["part"] is not None
        self.numbers["fallback_partitions"] += receipt["mismatched_rows"] > 0
        self.reasons.update(receipt["reasons"])
        self.counts.update(receipt["counts"])


def is_done(stem: str, receipt: Mapping[str, Any], places: Places, sizes: Mapping[str, int]) -> bool:
    """Whether a receipt is the partition's own, and its part is among `sizes` (by URL) with the size that it names."""
    index, identity = receipt.get("index"), receipt.get("identity")
    is_own = type(index) is int and Partition(index, str(identity), ()).stem == stem
    return is_own and (receipt["part"] is None or sizes.get(places.part(stem)) == receipt.get("size"))


def is_finished(storage: Storage, places: Places, plan: Plan) -> bool:
    """Whether SUCCESS is there, whole, and of this plan's options."""
    body = storage.get(places.success)
    record = None if body is None else read_record(body, places.success)
    return isinstance(record, dict) and record.get("fingerprint") == plan.fingerprint


def number_rejects(storage: Storage, places: Places, plan: Plan, receipts: Mapping[str, Mapping[str, Any]]) -> None:
    """Fill in `line` of the rejects in later ranges of a cut object, where the lines before them are all counted."""
    before: Counter[str] = Counter()
    uncounted: set[str] = set()
    for partition in plan.partitions:
        receipt = receipts.get(partition.stem)
        first = partition.ranges[0]
        if receipt is None:
            uncounted.add(first.url)
            continue
        if first.start > 0 and receipt["rejected"] and first.url not in uncounted:
            body = storage.get(places.rejects(partition.stem)) or b""
            try:
                records = [dict(json.loads(line)) for line in body.splitlines()]
            except (ValueError, TypeError) as error:
                url, receipt_url = places.rejects(partition.stem), places.receipt(partition.stem)
                raise EtlError(f"{url} is damaged; delete it and {receipt_url}, then run again") from error
            if any("line_in_range" in record for record in records):
                numbered = [_numbered(record, before[first.url]) for record in records]
                storage.put(places.rejects(partition.stem), b"".join(map(encode_json, numbered)))
        before[first.url] += receipt["lines"]


def _numbered(record: dict[str, Any], before: int) -> dict[str, Any]:
    number = record.pop("line_in_range", None)
    return record if number is None else {**record, "line": before + number}


def write_success(storage: Storage, places: Places, plan: Plan, totals: Mapping[str, Any]) -> None:
    """Say that every partition of the plan is done, with the counts that only the output decides."""
    lasting = {*CLOSED, "reasons", "parts", "partitions"}
    record: dict[str, Any] = {"version": VERSION, "fingerprint": plan.fingerprint}
    record |= {name: value for name, value in totals.items() if name in lasting}
    record["counts"] = totals.get("counts", {})
    storage.put(places.success, encode_json(record))


def write_run(storage: Storage, places: Places, run_id: str, result: Mapping[str, Any]) -> None:
    """Keep what one run did and how long it took."""
    storage.put(places.run(run_id), encode_json(result))
