"""OUTPUT -> CheckResult: plan, receipts, parts, rejects and SUCCESS re-read, and held against each other.

    plan ─→ each partition: receipt ─→ part (hash, rows, values), rejects ─→ Finding ─→ SUCCESS, the last run, strangers

Partitions are looked at a few at a time, in the plan's order: memory does not grow with the output, and the faults of
one output always come in the same order.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from etl.contents import UNREADABLE, key_columns
from etl.fingerprint import digest
from etl.ledger import CLOSED, VERSION, Fault, Plan, Sums, map_in_order, open_output, read_record
from etl.pages import html_fragment, html_table, printable
from etl.partitions import partition_identity
from etl.records import ObjectRange
from etl.recount import KINDS, Finding, Output, Owners, inspect_partition

OURS: Final = re.compile(r"__etl/(plan\.json|lease\.json|SUCCESS|report\.html|runs/[^/]+\.json|probe-[0-9a-f]{32})")
"""What an output holds beside its partitions; a probe is what a killed run leaves of its look at the store."""


_STRANGE: Final = ("foreign", "doubled")
_MISSING: Final = ("missing_part", "missing_receipt")
_WRONG: Final = ("truncated", "edited", "wrong_count", "bad_value", "plan_mismatch")
REMEDIES: Final = (
    ("", _STRANGE, "what is foreign or doubled: move it away, readers of *.parquet take it for data"),
    ("/rejects/", _WRONG, "rejects that are wrong: delete that file and its partition's receipt, then run again"),
    ("/SUCCESS", _WRONG, "a SUCCESS that is wrong: delete it, then run again"),
    ("/plan.json", _WRONG, "a plan that does not hold: run with --overwrite, or into another OUTPUT"),
    ("", (*_MISSING, "truncated"), "what is missing or truncated the same etl run makes again"),
    ("", _WRONG, "what is wrong inside: delete that part and its receipt, then run again"),
)
"""What to do about a fault: by what is in its place and its kind, the first that fits."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What `check` found. `parts` and `rows` count what was read of the parts that the plan names."""

    output: str
    parts: int
    rows: int
    faults: tuple[Fault, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.faults

    def as_dict(self) -> dict[str, Any]:
        """What `check --json` prints."""
        return {
            "ok": self.ok,
            "parts": self.parts,
            "rows": self.rows,
            "faults": [dataclasses.asdict(fault) for fault in self.faults],
        }

    def __str__(self) -> str:
        lines = [printable(f"{fault.kind} {fault.where}: {fault.detail}") for fault in self.faults]
        return "\n".join([*lines, self._verdict(), *dict.fromkeys(map(_remedy, self.faults))])

    def _verdict(self) -> str:
        kinds = Counter(fault.kind for fault in self.faults)
        found = ", ".join(f"{kinds[kind]} {kind}" for kind in KINDS if kinds[kind])
        return f"{'FAULTS: ' + found if found else 'ok'} ({self.parts:,} parts, {self.rows:,} rows read)"

    def _repr_html_(self) -> str:
        rows = [(fault.kind, fault.where, fault.detail) for fault in self.faults]
        return html_fragment(f"<p>{self._verdict()}</p>" + html_table(rows, ("kind", "where", "detail")))


def _remedy(fault: Fault) -> str:
    return next(text for place, kinds, text in REMEDIES if place in fault.where and fault.kind in kinds)


def check(
    output: str,
    *,
    endpoint_url: str | None = None,
    profile: str | None = None,
    anon: bool = False,
    storage_option: Mapping[str, Any] | None = None,
) -> CheckResult:
    """Re-read an output and reconcile every count, hash, length, id range and mask value.

    Raises UsageError where OUTPUT is no output of etl, StorageError where something in it cannot be read.
    """
    storage, places, plan = open_output(
        output, endpoint_url=endpoint_url, profile=profile, anon=anon, storage_option=storage_option
    )
    held = {info.url: info.size for info in storage.list(places.root)}
    return Audit(Output(storage, places, plan, Owners(plan), held)).result()


class Audit:
    """One look at a whole output."""

    def __init__(self, output: Output) -> None:
        self.output = output
        self.plan = output.plan
        self.places = output.places
        self.sums = Findings()
        self.parts = self.rows = 0

    def result(self) -> CheckResult:
        """Every fault, in the order plan, partitions, SUCCESS and runs, strangers."""
        faults = tuple(self._faults())
        return CheckResult(self.places.root, self.parts, self.rows, faults)

    def _faults(self) -> Iterator[Fault]:
        yield from plan_faults(self.plan, self.places.plan)
        undone = 0
        for finding in map_in_order(partial(inspect_partition, self.output), self.plan.partitions):
            self.parts += finding.part_read
            self.rows += finding.rows
            self.sums.add(finding)
            yield from finding.faults
            undone += finding.undone
        if undone:
            yield self._unfinished(undone)
        yield from self._closing_faults()
        yield from self._strangers()

    def _unfinished(self, undone: int) -> Fault:
        at_work = self.places.lease in self.output.held
        busy = "a run holds the lease and may be at work" if at_work else "the same etl run goes on there"
        total = len(self.plan.partitions)
        detail = f"unfinished: {undone:,} of {total:,} partitions have neither receipt nor part yet; {busy}"
        return Fault("missing_receipt", f"{self.places.ledger}/receipts/", detail)

    # --- SUCCESS and the last run ---

    def _closing_faults(self) -> Iterator[Fault]:
        complete = self.sums.receipts == len(self.plan.partitions)
        if self.output.finished:
            yield from self._success_faults(complete=complete)
        elif complete:
            detail = (
                "every partition is done, but no run closed the output; the same etl run closes it, or says why not"
            )
            yield Fault("missing_receipt", self.places.success, detail)
        if complete:
            yield from self._run_faults()

    def _success_faults(self, *, complete: bool) -> Iterator[Fault]:
        where = self.places.success
        record = read_record(self.output.storage.get(where) or b"", where)
        if isinstance(record, Fault):
            yield record
            return
        for name, meant in (("version", VERSION), ("fingerprint", self.plan.fingerprint)):
            if record.get(name) != meant:
                yield Fault("plan_mismatch", where, f"{name} {record.get(name)!r}, the plan's is {meant!r}")
        totals = self.sums.totals() | {"partitions": len(self.plan.partitions)}
        for name in totals if complete else ():
            # An output closed by an older etl has no `counts`; a count that a receipt has wrong is told there.
            seen = record.get(name, totals[name] if name == "counts" else None)
            if seen != totals[name] and name not in self.sums.blamed:
                yield Fault("wrong_count", where, f"{name} {seen!r}, the receipts add up to {totals[name]!r}")

    def _run_faults(self) -> Iterator[Fault]:
        """What only the run that closed the output knows beside the receipts: how many rows both engines encoded."""
        total = self.sums.receipts
        runs = [run for run in self._runs() if run.get("exit_code") == 0 and run.get("partitions") == total]
        for name in ("verified_rows", "mismatched_rows"):
            known = [run.get(name) for run in runs]
            if known and self.sums.numbers[name] not in known and name not in self.sums.blamed:
                detail = f"{name} of all receipts add up to {self.sums.numbers[name]}, the last run counted {known[-1]}"
                yield Fault("wrong_count", f"{self.places.ledger}/receipts/", detail)

    def _runs(self) -> Iterator[Mapping[str, Any]]:
        folder = f"{self.places.ledger}/runs/"
        urls = [url for url in self.output.held if url.startswith(folder)]
        for body in map_in_order(self.output.storage.get, urls):
            record = read_record(body or b"", folder)
            if not isinstance(record, Fault):
                yield record

    # --- objects that the plan does not name ---

    def _strangers(self) -> Iterator[Fault]:
        stems = {partition.stem for partition in self.plan.partitions}
        replaced = set(self.plan.discards)
        root = len(self.places.root) + 1
        for url in self.output.held:
            name = url[root:]
            if OURS.fullmatch(name) or name.endswith("/") or (stem := _stem(name)) in stems:
                continue
            if stem in replaced:
                yield Fault("foreign", url, "of the plan that this one replaces (--overwrite); etl run deletes it")
            else:
                yield self._stranger(url)

    def _stranger(self, url: str) -> Fault:
        if not url.endswith(".parquet"):
            return Fault("foreign", url, "the plan names no such object; move it away")
        body = self.output.storage.get(url) or b""
        twin = self.sums.hashes.get(hashlib.sha256(body).hexdigest())
        if twin:
            return Fault("doubled", url, f"the same bytes as {twin}.parquet: readers of *.parquet see its rows twice")
        try:
            sources, offsets = key_columns(body)
        except (*UNREADABLE, KeyError):
            return Fault("foreign", url, "the plan names no such part, and etl did not write it; move it away")
        found = (self.output.owners.stem(s, offset) for s, offset in zip(sources, offsets.tolist(), strict=True))
        twin = next((stem for stem in found if stem is not None), None)
        if twin:
            return Fault("doubled", url, f"the plan names no such part, and it holds rows of {twin}.parquet again")
        return Fault("foreign", url, "the plan names no such part; readers of *.parquet read it too: move it away")


def _stem(name: str) -> str | None:
    """The partition that an object of an output belongs to, by its name below OUTPUT."""
    match = re.fullmatch(r"(?:(part-[^/]+)\.parquet|__etl/receipts/([^/]+)\.json|__etl/rejects/([^/]+)\.jsonl)", name)
    return next((stem for stem in match.groups() if stem), None) if match else None


class Findings(Sums):
    """What the receipts add up to, and what is known of each without keeping it."""

    def __init__(self) -> None:
        super().__init__()
        self.hashes: dict[str, str] = {}
        self.blamed: set[str] = set()
        self.receipts = 0

    def add(self, finding: Finding) -> None:
        """One more partition."""
        self.blamed |= finding.blamed
        receipt = finding.receipt
        if receipt is None:
            return
        self.receipts += 1
        self.add_receipt(receipt)
        if receipt["sha256"]:
            self.hashes[receipt["sha256"]] = finding.stem

    def totals(self) -> dict[str, Any]:
        """What SUCCESS should say."""
        sums: dict[str, Any] = {name: self.numbers[name] for name in (*CLOSED, "parts")}
        return sums | {"reasons": dict(self.reasons), "counts": dict(self.counts)}


def plan_faults(plan: Plan, where: str) -> Iterator[Fault]:
    """Where the plan contradicts itself: fingerprint, identities, indices, and each byte of each object once."""
    if digest(plan.settings) != plan.fingerprint:
        yield Fault("plan_mismatch", where, "the fingerprint does not follow from the settings beside it")
    pieces: dict[str, list[ObjectRange]] = {}
    for at, partition in enumerate(plan.partitions):
        if partition.identity != partition_identity(partition.ranges, plan.fingerprint):
            detail = f"{partition.stem}: the identity does not follow from its objects and the fingerprint"
            yield Fault("plan_mismatch", where, detail)
        if partition.index != at:
            yield Fault("plan_mismatch", where, f"{partition.stem}: partition {at} has index {partition.index}")
        for r in partition.ranges:
            pieces.setdefault(r.url, []).append(r)
    for url, ranges in pieces.items():
        ranges.sort(key=lambda r: r.start)
        ends = [0, *(r.end for r in ranges)]
        if [r.start for r in ranges] != ends[:-1] or ends[-1] != ranges[-1].size:
            yield Fault("plan_mismatch", where, f"the ranges of {url} do not cover it once from end to end")
