"""One partition of an output -> Finding: its receipt, part and rejects recounted and held against the plan."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from etl.contents import UNREADABLE, Contents, Expected, first_outside, read_contents
from etl.ledger import VERSION, Fault, Places, Plan, read_receipt
from etl.records import ObjectRange, Partition
from etl.storage import Storage

KINDS: Final = (
    "missing_part",
    "missing_receipt",
    "truncated",
    "edited",
    "foreign",
    "doubled",
    "wrong_count",
    "bad_value",
    "plan_mismatch",
)

_CORES: Final = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1  # macOS
DECODERS: Final = threading.BoundedSemaphore(_CORES)
"""Many parts may be on their way, but only as many as there are cores are unpacked at once."""


class Owners:
    """Which partition reads the line at (source, offset)."""

    def __init__(self, plan: Plan) -> None:
        self.ranges: dict[str, list[tuple[int, ObjectRange, str]]] = {}
        for partition in plan.partitions:
            for r in partition.ranges:
                self.ranges.setdefault(r.url, []).append((r.start, r, partition.stem))
        for found in self.ranges.values():
            found.sort(key=lambda entry: entry[0])

    def stem(self, source: str, offset: int) -> str | None:
        """The stem of the partition, None where the plan has no such line."""
        found = self.ranges.get(source, [])
        at = bisect_right(found, offset, key=lambda entry: entry[0]) - 1
        if at < 0 or not (found[at][1].whole or offset < found[at][1].end):
            return None
        return found[at][2]


@dataclass(frozen=True, slots=True)
class Output:
    """An output as it was listed: URL -> size of every object in `held`, `finished` where SUCCESS is among them."""

    storage: Storage
    places: Places
    plan: Plan
    owners: Owners
    held: Mapping[str, int]

    @property
    def finished(self) -> bool:
        """Whether a run has closed it."""
        return self.places.success in self.held

    def get(self, url: str) -> bytes | None:
        """An object's bytes, None where it is not there."""
        return self.storage.get(url) if url in self.held else None


@dataclass(slots=True)
class Finding:
    """What one partition showed. `blamed` names counts that its receipt has wrong, `undone` that there is nothing."""

    stem: str
    faults: list[Fault] = field(default_factory=list)
    receipt: dict[str, Any] | None = None
    blamed: set[str] = field(default_factory=set)
    part_read: bool = False
    rows: int = 0
    undone: bool = False

    def add(self, kind: str, where: str, detail: str) -> None:
        """One more fault."""
        self.faults.append(Fault(kind, where, detail))


def inspect_partition(output: Output, partition: Partition) -> Finding:
    """Everything of one partition: receipt, part, rejects."""
    finding = Finding(partition.stem)
    receipt_url, part_url = output.places.receipt(partition.stem), output.places.part(partition.stem)
    body = output.get(receipt_url)
    if body is None:
        _inspect_unreceipted(output, partition, finding)
        return finding
    receipt = read_receipt(body, receipt_url)
    if isinstance(receipt, Fault):
        finding.faults.append(receipt)
        return finding
    finding.receipt = receipt
    for name, was, meant in receipt_differences(receipt, partition, output.plan):
        finding.add("plan_mismatch", receipt_url, f"{name} {was!r}, the plan has {meant!r}")
    if receipt["part"] is None and part_url in output.held:
        finding.add("foreign", part_url, "its receipt says that this partition has no rows and no part")
    contents, proven = _inspect_part(output, partition, finding) if receipt["part"] is not None else (Contents(), True)
    rejects = _inspect_rejects(output, partition, finding)
    faults = count_faults(receipt, contents if proven else None, rejects)
    for name, detail in faults:
        finding.blamed.add(name)
        finding.add("wrong_count", receipt_url, detail)
    return finding


def _inspect_unreceipted(output: Output, partition: Partition, finding: Finding) -> None:
    """No receipt: lost where the output was finished, else not written yet."""
    part_url = output.places.part(partition.stem)
    if part_url in output.held:
        detail = f"the part {partition.stem}.parquet is there without its receipt; etl run writes both again"
    elif output.finished:
        detail = "neither receipt nor part is there, although SUCCESS says that all is done; etl run makes them again"
    else:
        finding.undone = True
        return
    finding.add("missing_receipt", output.places.receipt(partition.stem), detail)
    if part_url in output.held:
        _read_part(output, partition, finding, output.storage.get(part_url) or b"")


def receipt_differences(receipt: Mapping[str, Any], partition: Partition, plan: Plan) -> Iterator[tuple[str, Any, Any]]:
    """The fields of a receipt that the plan decides and that differ from it: name, seen, meant."""
    objects = [{"key": r.url, "etag": r.etag, "start": r.start, "end": r.end} for r in partition.ranges]
    meant: dict[str, Any] = {
        "version": VERSION,
        "index": partition.index,
        "identity": partition.identity,
        "fingerprint": plan.fingerprint,
        "part": f"{partition.stem}.parquet" if receipt["part"] is not None else None,
    }
    yield from ((name, receipt.get(name), value) for name, value in meant.items() if receipt.get(name) != value)
    seen = receipt.get("objects")
    if seen != objects:
        both = zip(seen, objects, strict=False) if isinstance(seen, list) else ()
        was, is_ = next(((a, b) for a, b in both if a != b), (f"{_length(seen)} of them", f"{len(objects)} of them"))
        yield "objects", was, is_


def _length(value: object) -> object:
    return len(value) if isinstance(value, list) else value


def _inspect_part(output: Output, partition: Partition, finding: Finding) -> tuple[Contents | None, bool]:
    """What the part holds, None where it cannot be read, and whether its bytes are those of the receipt."""
    receipt = finding.receipt or {}
    url = output.places.part(partition.stem)
    body = output.get(url)
    if body is None:
        finding.add("missing_part", url, f"its receipt names {receipt['rows']} rows in it; etl run writes it again")
        return None, False
    proven = hashlib.sha256(body).hexdigest() == receipt["sha256"]
    contents = _read_part(output, partition, finding, body, changed=not proven)
    if proven and receipt.get("size") != len(body):
        finding.blamed.add("size")
        detail = f"size {receipt.get('size')!r}, its part has {len(body)} bytes"
        finding.add("wrong_count", output.places.receipt(partition.stem), detail)
    return contents, proven


def _read_part(
    output: Output, partition: Partition, finding: Finding, body: bytes, *, changed: bool = False
) -> Contents | None:
    url = output.places.part(partition.stem)
    expected = Expected(output.plan.settings, output.plan.largest_id, partition.ranges)
    try:
        with DECODERS:
            contents = read_contents(body, expected)
    except UNREADABLE as error:
        finding.add(*_unreadable(finding.receipt, url, body, error))
        return None
    finding.part_read, finding.rows = True, contents.rows
    if changed:
        finding.add("edited", url, f"its SHA-256 is not the receipt's; {_change(finding.receipt or {}, contents)}")
    for flaw in contents.flaws:
        finding.add("bad_value", url, flaw)
    _inspect_keys(output, partition, finding, contents)
    return contents


def _unreadable(receipt: Mapping[str, Any] | None, url: str, body: bytes, error: Exception) -> tuple[str, str, str]:
    size = (receipt or {}).get("size")
    if len(body) == size:
        return "edited", url, f"its bytes are not those of its receipt, and no Parquet ({_first(error)})"
    if isinstance(size, int) and len(body) >= size:
        return "edited", url, f"{len(body)} bytes, its receipt says {size}; they are no Parquet ({_first(error)})"
    known = "an unknown number" if size is None else size
    return "truncated", url, f"{len(body)} bytes of {known}; they are no whole Parquet"


def _first(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def _change(receipt: Mapping[str, Any], contents: Contents) -> str:
    """What the recount says about a part that is not the one that was written."""
    pairs = [(name, receipt.get(name), getattr(contents, name)) for name in ("rows", "tokens", "loss_tokens")]
    changed = [f"{name} was {was}, is {now}" for name, was, now in pairs if was != now]
    return ", ".join(changed) or "rows, tokens and loss_tokens are as many as before"


def _inspect_keys(output: Output, partition: Partition, finding: Finding, contents: Contents) -> None:
    """Every row once, and of this partition's own lines."""
    keys, url = contents.keys, output.places.part(partition.stem)
    if keys is None or not len(keys.codes):
        return
    again = keys.doubled()
    if again is not None:
        place = f"{keys.sources[keys.codes[again]]}@{keys.offsets[again]}"
        finding.add("doubled", url, f"row {again} has the key of another row of this part: {place}")
    outside = first_outside(keys, partition.ranges)
    if outside is not None:
        source, offset = keys.sources[keys.codes[outside]], int(keys.offsets[outside])
        owner = output.owners.stem(source, offset)
        seen = f"row {outside} is of {source}@{offset}, which "
        if owner is None:
            finding.add("plan_mismatch", url, seen + "the plan does not read")
        else:
            finding.add("doubled", url, seen + f"belongs to {owner}.parquet")


@dataclass(frozen=True, slots=True)
class Rejects:
    """What a rejects file holds: how many by reason, and the distinct lines (source, offset) they are of."""

    reasons: Counter[str]
    lines: frozenset[tuple[str, int]]


def _inspect_rejects(output: Output, partition: Partition, finding: Finding) -> Rejects | None:
    """The rejects as counted in their file; None where the file is at fault, so that the receipt is not."""
    receipt, url = finding.receipt or {}, output.places.rejects(partition.stem)
    body = output.get(url)
    try:
        records = [_reject(line) for line in (body or b"").splitlines()]
    except (ValueError, KeyError, TypeError):
        kind = "edited" if (body or b"").endswith(b"\n") else "truncated"
        finding.add(
            kind, url, f"one of its lines is no reject that etl wrote; delete it and {partition.stem}'s receipt"
        )
        return None
    consistent = receipt["rejected"] == sum(receipt["reasons"].values())
    if consistent and receipt["candidates"] == receipt["rows"] + receipt["rejected"] != receipt["rows"] + len(records):
        seen = "it is not there" if body is None else f"it holds {len(records)} rejects"
        finding.add("wrong_count", url, f"{seen}, its receipt counts {receipt['rejected']}")
        return None
    unnumbered = sum(line is None for _, _, line in records)
    if output.finished and unnumbered:
        finding.add("bad_value", url, f"{unnumbered} rejects have no line number, although the output is closed")
    return Rejects(Counter(reason for _, reason, _ in records), frozenset(place for place, _, _ in records))


def _reject(line: bytes) -> tuple[tuple[str, int], str, int | None]:
    record = json.loads(line)
    source, offset, reason, number = (record[name] for name in ("source", "offset", "reason", "line"))
    if [type(source), type(offset), type(reason)] != [str, int, str] or not isinstance(number, int | None):
        raise TypeError("of other types than a reject's")
    return (source, offset), reason, number


def count_faults(
    receipt: Mapping[str, Any], contents: Contents | None, rejects: Rejects | None
) -> Iterable[tuple[str, str]]:
    """Every count of a receipt that is not what was recounted: its name and one line.

    `contents` is None where the part is not the one that the receipt was written for, `rejects` where their file is
    at fault: then those counts are held against each other alone.
    """
    recounted: dict[str, Any] = {}
    if contents is not None:
        recounted |= {name: getattr(contents, name) for name in ("rows", "tokens", "loss_tokens")}
    if rejects is not None:
        recounted |= {"rejected": rejects.reasons.total(), "reasons": dict(rejects.reasons)}
    rows, rejected = (recounted.get(name, receipt[name]) for name in ("rows", "rejected"))
    recounted["candidates"] = rows + rejected
    for name, meant in recounted.items():
        if receipt[name] != meant:
            yield name, f"{name} {receipt[name]!r}, recounted {meant!r}"
    if contents is not None and rejects is not None and (contents.keys is not None or not contents.rows):
        # Each line that is not blank became at least one row or reject.
        filled = len((contents.keys.lines() if contents.keys else set()) | rejects.lines)
        if receipt["lines"] - receipt["blank"] != filled:
            seen = f"lines {receipt['lines']} less blank {receipt['blank']}"
            yield "lines", f"{seen}, but rows and rejects are of {filled} lines"
    yield from _bounded(receipt, rows + rejected)


def _bounded(receipt: Mapping[str, Any], candidates: int) -> Iterator[tuple[str, str]]:
    """Counts that nothing else holds: they cannot exceed what they count."""
    if not receipt["mismatched_rows"] <= receipt["verified_rows"] <= candidates:
        seen = f"mismatched_rows {receipt['mismatched_rows']}, verified_rows {receipt['verified_rows']}"
        yield "verified_rows", f"{seen}, candidates {candidates}: each cannot exceed the next"
    for name, count in receipt["counts"].items():
        if name.endswith("_rows") and count > candidates:
            yield "counts", f"counts.{name} {count}, of {candidates} candidates"
