"""OUTPUT -> Report: what was made, what was not and why, and where the time went, from the receipts alone."""

from __future__ import annotations

import base64
import dataclasses
import heapq
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from etl.ledger import COUNTS, Fault, Places, Plan, Sums, is_done, map_in_order, open_output, read_receipt
from etl.pages import counted, escape, html_fragment, html_page, html_section, html_table, number, printable
from etl.records import LOW_TRAINED_SHARE, Partition
from etl.storage import Storage

EXAMPLES: Final = 3
"""Rejects shown for each reason."""

RAW_CHARACTERS: Final = 120
LISTED: Final = 5
"""Partitions shown as the largest, the slowest, and those not done."""

Receipt: TypeAlias = Mapping[str, Any]
Rows: TypeAlias = list[tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class RejectExample:
    """One rejected row. `line` is None until all earlier ranges of its object are done; `raw` is its beginning."""

    source: str
    line: int | None
    offset: int
    detail: str
    raw: str

    @property
    def place(self) -> str:
        """`source:line`, or `source@offset` where the line is not known yet."""
        return f"{self.source}@{self.offset}" if self.line is None else f"{self.source}:{self.line}"


@dataclass(frozen=True, slots=True)
class PartitionNote:
    """One partition in a list: its stem, rows, bytes of its part, seconds that it took."""

    stem: str
    rows: int
    size: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Report:
    """The totals of an output. `stages` are seconds summed over the partitions; `size` is the bytes of all parts.

    `engines` counts partitions by the engine that encoded them; `drift` is what the receipts say of it, or empty.
    `not_done` lists the first few of `partitions - partitions_done`.
    """

    output: str
    finished: bool
    inputs: tuple[str, ...]
    passed_over: int
    fingerprint: str
    partitions: int
    partitions_done: int
    not_done: tuple[str, ...]
    parts: int
    size: int
    lines: int
    blank: int
    candidates: int
    rows: int
    rejected: int
    tokens: int
    loss_tokens: int
    reasons: Mapping[str, int]
    examples: Mapping[str, tuple[RejectExample, ...]]
    counts: Mapping[str, int]
    engines: Mapping[str, int]
    verified_rows: int
    mismatched_rows: int
    fallback_partitions: int
    drift: Mapping[str, float]
    stages: Mapping[str, float]
    seconds: float
    largest: tuple[PartitionNote, ...]
    slowest: tuple[PartitionNote, ...]

    @property
    def trained_share(self) -> float:
        """loss_tokens / tokens, 0 where there are none."""
        return self.loss_tokens / self.tokens if self.tokens else 0.0

    @property
    def warnings(self) -> tuple[str, ...]:
        """What must not be overlooked."""
        return tuple(_warnings(self))

    def as_dict(self) -> dict[str, Any]:
        """What `report --json` prints: the fields, and `trained_share`."""
        return dataclasses.asdict(self) | {"trained_share": round(self.trained_share, 6)}

    def __str__(self) -> str:
        return "\n".join(_text_lines(self))

    def to_html(self) -> str:
        """One self-contained HTML file."""
        return html_page(f"etl: {self.output}", self._repr_html_(), _BODY_STYLE)

    def _repr_html_(self) -> str:
        return html_fragment(_html(self))


def report(
    output: str,
    *,
    endpoint_url: str | None = None,
    profile: str | None = None,
    anon: bool = False,
    storage_option: Mapping[str, Any] | None = None,
) -> Report:
    """What an output holds, by its receipts. Reads no part; `check` does.

    Raises UsageError where OUTPUT is no output of etl, StorageError where something in it cannot be read.
    """
    storage, places, plan = open_output(
        output, endpoint_url=endpoint_url, profile=profile, anon=anon, storage_option=storage_option
    )
    sums, held = _Sums(), {info.url: info.size for info in storage.list(places.root)}
    for partition, receipt in _receipts(storage, places, plan, held):
        sums.add(partition, receipt)
    return sums.report(places, plan, finished=places.success in held, examples=_examples(storage, places, sums))


def _receipts(
    storage: Storage, places: Places, plan: Plan, held: Mapping[str, int]
) -> Iterator[tuple[Partition, Receipt | None]]:
    """Every partition of the plan with its receipt, None where it is not done (or its receipt is none)."""

    def read(partition: Partition) -> tuple[Partition, Receipt | None]:
        url = places.receipt(partition.stem)
        body = storage.get(url) if url in held else None
        receipt = None if body is None else read_receipt(body, url)
        if receipt is None or isinstance(receipt, Fault) or not is_done(partition.stem, receipt, places, held):
            return partition, None
        return partition, receipt

    return map_in_order(read, plan.partitions)


class _Sums(Sums):
    """All that a report says of the partitions, one at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.engines: Counter[str] = Counter()
        self.stages: dict[str, float] = {}
        self.drift: dict[str, float] = {}
        self.seconds = 0.0
        self.done = self.undone = 0
        self.not_done: list[str] = []
        self.rejecting: dict[str, list[str]] = {}
        self.largest: list[tuple[float, int, PartitionNote]] = []
        self.slowest: list[tuple[float, int, PartitionNote]] = []

    def add(self, partition: Partition, receipt: Receipt | None) -> None:
        """One more partition."""
        if receipt is None:
            self.undone += 1
            self.not_done += [partition.stem] if len(self.not_done) < LISTED else []
            return
        self.done += 1
        self.add_receipt(receipt)
        self.numbers["size"] += receipt.get("size") or 0
        self.engines[str(receipt.get("engine"))] += 1
        _add_up(self.drift, receipt.get("drift"))
        self._add_run(partition, receipt)
        for reason in receipt["reasons"]:
            stems = self.rejecting.setdefault(reason, [])
            stems += [partition.stem] if len(stems) < EXAMPLES else []

    def _add_run(self, partition: Partition, receipt: Receipt) -> None:
        run = receipt.get("run")
        run = run if isinstance(run, dict) else {}
        seconds = run.get("seconds")
        seconds = float(seconds) if isinstance(seconds, int | float) else 0.0
        self.seconds += seconds
        _add_up(self.stages, run.get("stages"))
        note = PartitionNote(partition.stem, receipt["rows"], receipt.get("size") or 0, seconds)
        # Of two that are equal the earlier one is kept, so that a report is always the same.
        for heap, value in ((self.largest, note.size), (self.slowest, note.seconds)):
            heapq.heappush(heap, (value, -partition.index, note))
            if len(heap) > LISTED:
                heapq.heappop(heap)

    def report(
        self, places: Places, plan: Plan, *, finished: bool, examples: Mapping[str, tuple[RejectExample, ...]]
    ) -> Report:
        """The sums as the report of one output."""
        return Report(
            output=places.root,
            finished=finished and not self.undone,
            inputs=plan.inputs,
            passed_over=len(plan.passed_over),
            fingerprint=plan.fingerprint,
            partitions=len(plan.partitions),
            partitions_done=self.done,
            not_done=tuple(self.not_done),
            **{name: self.numbers[name] for name in (*COUNTS, "parts", "size", "fallback_partitions")},
            reasons=dict(sorted(self.reasons.items())),
            examples=examples,
            counts=dict(sorted(self.counts.items())),
            engines=dict(sorted(self.engines.items())),
            drift=self.drift,
            stages={stage: round(seconds, 3) for stage, seconds in self.stages.items()},
            seconds=round(self.seconds, 3),
            largest=_notes(self.largest),
            slowest=_notes(self.slowest),
        )


def _notes(heap: Iterable[tuple[float, int, PartitionNote]]) -> tuple[PartitionNote, ...]:
    return tuple(note for _, _, note in sorted(heap, reverse=True))


def _add_up(sums: dict[str, float], values: object) -> None:
    for name, value in values.items() if isinstance(values, dict) else ():
        if isinstance(value, int | float):
            sums[name] = sums.get(name, 0) + value


def _examples(storage: Storage, places: Places, sums: _Sums) -> dict[str, tuple[RejectExample, ...]]:
    """The first few rejects of each reason, in the plan's order; reads a file or three for each reason."""
    found: dict[str, list[RejectExample]] = {reason: [] for reason in sorted(sums.rejecting)}
    for stem in sorted({stem for stems in sums.rejecting.values() for stem in stems}):
        for line in (storage.get(places.rejects(stem)) or b"").splitlines():
            reason, example = _example(line)
            if example is not None and len(found.get(reason, [])) < EXAMPLES:
                found.setdefault(reason, []).append(example)
    return {reason: tuple(examples) for reason, examples in found.items()}


def _example(line: bytes) -> tuple[str, RejectExample | None]:
    try:
        record = json.loads(line)
        raw = record["raw"] if "raw" in record else _text(record["raw_base64"])
        example = RejectExample(
            str(record["source"]), record["line"], record["offset"], str(record["detail"]), str(raw)[:RAW_CHARACTERS]
        )
        return str(record["reason"]), example
    except (ValueError, KeyError, TypeError):
        return "", None  # damaged: `check` says so


def _text(raw_base64: str) -> str:
    """Bytes that are no UTF-8 as far as they can be shown."""
    return base64.b64decode(raw_base64)[: 4 * RAW_CHARACTERS].decode("utf-8", "backslashreplace")


# --- as text and as HTML -----------------------------------------------------------------------------------------


def _warnings(r: Report) -> Iterator[str]:
    if r.tokens and r.trained_share < LOW_TRAINED_SHARE:
        yield f"WARNING: only {r.trained_share:.1%} of the tokens are trained; look at the mask before you train"
    if r.mismatched_rows:
        again = f"{r.fallback_partitions:,} partitions were done again with the reference"
        yield f"WARNING: the two engines differed on {r.mismatched_rows:,} rows; {again}"


def _totals(r: Report) -> Rows:
    state = "finished" if r.finished else "not finished"
    rejected = f"{number(r.rejected)}{f' ({counted(r.reasons)})' if r.reasons else ''}"
    verified = f"{number(r.verified_rows)} against transformers, {number(r.mismatched_rows)} differed"
    return [
        ("output", f"{r.output} ({state})"),
        ("partitions", f"{number(r.partitions_done)} of {number(r.partitions)} done, {number(r.parts)} parts"),
        ("size", f"{r.size / 1e6:,.1f} MB"),
        ("rows", number(r.rows)),
        ("tokens", number(r.tokens)),
        ("trained", f"{number(r.loss_tokens)} ({r.trained_share:.1%})"),
        ("lines", f"{number(r.lines)}, {number(r.blank)} blank, {number(r.candidates)} candidates"),
        ("rejected", rejected),
        ("engine", ", ".join(f"{engine} ({number(n)} partitions)" for engine, n in r.engines.items()) or "none yet"),
        ("verified rows", verified),
        ("input", ", ".join(r.inputs) + (f" ({number(r.passed_over)} objects passed over)" if r.passed_over else "")),
    ]


def _sections(r: Report) -> Iterator[tuple[str, Rows]]:
    """Title and rows of every table below the totals; empty ones are left out by both forms."""
    yield "counts", [(name, number(count)) for name, count in r.counts.items()]
    yield "drift", [(name, number(value)) for name, value in r.drift.items()]
    examples = ((reason, e) for reason, some in r.examples.items() for e in some)
    yield "rejects, the first few by reason", [(reason, e.place, e.detail, e.raw) for reason, e in examples]
    total = sum(r.stages.values()) or 1.0
    stages = sorted(r.stages.items(), key=lambda pair: -pair[1])
    yield "seconds by stage, over all partitions", [(s, f"{v:,.1f} s", f"{v / total:.1%}") for s, v in stages]
    for title, notes in (("largest partitions", r.largest), ("slowest partitions", r.slowest)):
        yield (
            title,
            [(n.stem, f"{number(n.rows)} rows", f"{n.size / 1e6:,.2f} MB", f"{n.seconds:.1f} s") for n in notes],
        )
    left = r.partitions - r.partitions_done
    more = [("…", f"{number(left - len(r.not_done))} more")] if left > len(r.not_done) else []
    yield "not done yet (the same etl run goes on there)", [*((stem, "") for stem in r.not_done), *more]


def _text_lines(r: Report) -> Iterator[str]:
    yield from r.warnings
    yield from _aligned(_totals(r))
    for title, rows in _sections(r):
        if rows:
            yield from ("", title)
            yield from (f"  {line}" for line in _aligned(rows))


def _aligned(rows: Rows) -> Iterator[str]:
    """Cells in columns; a column that holds a long text is not padded."""
    shown = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    for row in shown:
        yield "  ".join(c.ljust(w if w <= RAW_CHARACTERS else 0) for c, w in zip(row, widths, strict=True)).rstrip()


_BODY_STYLE: Final = "font:14px/1.5 system-ui,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem"


def _html(r: Report) -> str:
    loud = "".join(f'<p class="loud">{escape(warning)}</p>' for warning in r.warnings)
    rest = "".join(html_section(title, html_table(rows)) for title, rows in _sections(r))
    return f"{loud}{html_table(_totals(r))}{rest}"
