"""Batches of lines -> Outcome: the stages composed for one partition, as a plain function without Dask.

parse → render → encode (ids and mask) → judge → table, batch by batch, so that only the result grows
"""

from __future__ import annotations

import contextlib
import functools
import gc
import pickle
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from etl.config import RunConfig
from etl.conversation import parse
from etl.encoding import Encoder, TokenIds
from etl.engines import CACHE_BYTES
from etl.errors import EtlError, RowError
from etl.fingerprint import digest, settings
from etl.lines import Batch, read_batches
from etl.records import Conversation, Encoded, Line, Partition, Reject, Rendered, TokenizerSpec
from etl.rendering import render
from etl.schema import output_schema
from etl.storage import Storage
from etl.tables import build_table, loss_tokens, select, truncate
from etl.template import ChatTemplate

Timed: TypeAlias = Callable[[str], AbstractContextManager[None]]
"""Counts the seconds spent inside as the named stage."""


EXPECTED_WORKERS: Final = 8


class Gate:
    """A run's way into its output: each request that writes goes through, and none once the run is over."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._shut = False

    def __enter__(self) -> None:
        with self._changed:
            if self._shut:
                raise EtlError("the run that this partition belongs to is over; nothing more is written of it")
            self._inside += 1

    def __exit__(self, *_error: object) -> None:
        with self._changed:
            self._inside -= 1
            self._changed.notify_all()

    def shut(self, seconds: float) -> bool:
        """Let nothing more in, and wait so long for what is inside; False where something still is."""
        with self._changed:
            self._shut = True
            return self._changed.wait_for(lambda: self._inside == 0, timeout=seconds)


@dataclass(frozen=True, slots=True)
class Kit:
    """What the stages need, built once in each worker.

    `lock` is held by whoever transforms: a template and an encoder serve one partition at a time, also where a
    cluster's workers have several threads. Where no core is free for it, who compresses a part holds it too.
    `gate` is passed by each request that writes.
    """

    config: RunConfig
    fingerprint: str
    storage: Storage
    template: ChatTemplate
    encoder: Encoder
    lock: threading.Lock = field(default_factory=threading.Lock)
    gate: Gate = field(default_factory=Gate)

    def read(self, partition: Partition) -> Iterator[Batch]:
        """Begin to fetch the partition's objects; the batches come in order."""
        return read_batches(partition, self.storage, concurrency=self.read_threads)

    @property
    def read_threads(self) -> int:
        """This worker's share of `--read-concurrency`, at least two so that the next batch is always on its way.

        A running cluster is taken for one of EXPECTED_WORKERS.
        """
        return max(2, self.config.read_concurrency // (self.config.workers or EXPECTED_WORKERS))


def build_kit(spec: TokenizerSpec, config: RunConfig) -> Kit:
    """Compile the template and load the tokenizer. Raises UsageError where either cannot be used."""
    encoder = _encoder(_Loaded(spec, spec.sha256), config.engine).verifying(config.verify_share)
    encoder.limit_cache(_cache_bytes(config))
    return Kit(
        config,
        digest(settings(spec, config)),
        Storage.from_config(config),
        ChatTemplate.from_spec(spec, config),
        encoder,
    )


@dataclass(frozen=True, slots=True)
class _Loaded:
    spec: TokenizerSpec = field(compare=False)
    sha256: str


@functools.lru_cache(maxsize=1)
def _encoder(loaded: _Loaded, engine: str) -> Encoder:
    # A process that serves run after run of one tokenizer, as in a notebook, loads it once.
    return Encoder(loaded.spec, engine)


def _cache_bytes(config: RunConfig) -> int:
    """The words that the fast engine remembers may take an eighth of a worker's memory, within bounds."""
    limit = int(config.memory_limit or 0)
    return min(max(limit // 8, CACHE_BYTES // 2), 4 * CACHE_BYTES) if limit else CACHE_BYTES


COLLECTED_AFTER: Final = (50_000, 20, 100)
"""A row is hundreds of containers that die without the collector: with Python's 700 it took a tenth of the time."""


def tune_worker() -> None:
    """Make this process a worker: one native thread, and memory that many small processes can share a machine with.

    Arrow's own pool fetches memory in huge pages, each of which is cleared at first touch, in every worker (measured:
    128 workers spent a fifth of their first tasks in it).
    """
    pa.set_cpu_count(1)
    pa.set_memory_pool(pa.system_memory_pool())
    gc.set_threshold(*COLLECTED_AFTER)


@dataclass(frozen=True, slots=True)
class PackedKit:
    """What a kit is built from, small enough to be sent to each of many workers. `name` tells one run's from another's.

    A process that was forked from one that has built the kit already takes that one, unpacking nothing.
    """

    name: str
    packed: bytes

    @classmethod
    def pack(cls, name: str, spec: TokenizerSpec, config: RunConfig) -> PackedKit:
        """Compress spec and configuration: a vocabulary's JSON shrinks to a third."""
        return cls(name, zlib.compress(pickle.dumps((spec, config)), 1))

    def keep(self, path: Path) -> None:
        """Write it to a file, which is whole or not there."""
        path.with_suffix(".new").write_bytes(pickle.dumps(self))
        path.with_suffix(".new").rename(path)

    def build(self) -> Kit:
        """The kit, built here unless it was inherited. Raises UsageError as `build_kit` does."""
        if self.name not in _KITS:
            _KITS.clear()
            _KITS[self.name] = build_kit(*pickle.loads(zlib.decompress(self.packed)))  # noqa: S301 - our own, from pack
        return _KITS[self.name]


@dataclass(frozen=True, slots=True)
class KeptKit:
    """A PackedKit in a file of this machine, readable by its user alone: all that its own workers need be sent."""

    name: str
    path: Path

    def build(self) -> Kit:
        """As `PackedKit.build`; the file is not read where the kit was inherited."""
        return _KITS[self.name] if self.name in _KITS else read_kit(self.path).build()


def read_kit(path: Path) -> PackedKit:
    """What `PackedKit.keep` wrote."""
    packed: PackedKit = pickle.loads(path.read_bytes())  # noqa: S301 - our own
    return packed


_KITS: Final[dict[str, Kit]] = {}
"""This process's last kit by its name."""


def rehearse(kit: Kit) -> None:
    """Take two made-up lines through every stage: what a first row costs is then paid before workers are forked."""
    row = '{"prompt": "Count to %s.", "completion": "<think>\\nOne.\\n</think>\\n\\n1, %s"}'
    lines = tuple(Line("", 0, (row % (text, text)).encode()) for text in ("two", "deux, e\u0301te\u0301"))
    transform(lambda: [Batch(lines)], kit, lambda _stage: contextlib.nullcontext())


@dataclass(frozen=True, slots=True)
class Outcome:
    """A partition's rows in SCHEMA, its rejects, and the counts of its receipt.

    `engine` encoded its rows; `why` says what spoke against the fast one, or is None.
    """

    table: pa.Table
    rejects: tuple[Reject, ...]
    lines: int
    blank: int
    candidates: int
    counts: dict[str, int]
    drift: dict[str, int]
    engine: str
    why: str | None
    verified_rows: int
    mismatched_rows: int


class _Row(NamedTuple):
    line: Line
    conversation: Conversation


_Encodable: TypeAlias = Rendered | TokenIds


def transform(open_batches: Callable[[], Iterable[Batch]], kit: Kit, timed: Timed) -> Outcome:
    """All batches of a partition through every stage.

    Where the two tokenizer engines differ on a row, the whole partition is done again with the reference alone.
    """
    outcome = _transform(open_batches(), kit, timed)
    if outcome.mismatched_rows:
        again = _transform(open_batches(), replace(kit, encoder=kit.encoder.reference()), timed)
        return replace(again, verified_rows=outcome.verified_rows, mismatched_rows=outcome.mismatched_rows)
    return outcome


def _transform(batches: Iterable[Batch], kit: Kit, timed: Timed) -> Outcome:
    so_far = _SoFar()
    waiting = iter(batches)
    while True:
        with timed("read"):
            batch = next(waiting, None)
        if batch is None:
            return so_far.outcome(kit)
        parsed, bad, candidates = _parse(batch, kit, timed)
        rows, items, unrendered = _render(parsed, kit, timed)
        with timed("encode"):
            encoded = kit.encoder.encode(items)
        with timed("table"):
            table, unfit = _judge(rows, encoded, kit.config)
        so_far.tables.append(table)
        so_far.rejects += [*batch.rejects, *bad, *unrendered, *unfit]
        so_far.drift.update(_drift(rows, encoded))
        so_far.counts.update(_counts(rows, items, encoded, kit.config))
        so_far.totals.update(
            lines=batch.line_count,
            blank=batch.blank,
            candidates=candidates + len(batch.rejects),
            verified=encoded.verified,
            mismatched=encoded.mismatched,
        )


@dataclass(slots=True)
class _SoFar:
    tables: list[pa.Table] = field(default_factory=list)
    rejects: list[Reject] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    drift: Counter[str] = field(default_factory=Counter)
    totals: Counter[str] = field(default_factory=Counter)

    def outcome(self, kit: Kit) -> Outcome:
        """The whole partition's; rejects in the order of their lines."""
        empty = output_schema(kit.config.keep_fields).empty_table()
        return Outcome(
            pa.concat_tables(self.tables) if self.tables else empty,
            tuple(sorted(self.rejects, key=lambda r: (r.source, r.offset, r.choice, r.turn))),
            self.totals["lines"],
            self.totals["blank"],
            self.totals["candidates"],
            dict(self.counts),
            dict(self.drift),
            kit.encoder.engine_name,
            kit.encoder.why,
            self.totals["verified"],
            self.totals["mismatched"],
        )


def _parse(batch: Batch, kit: Kit, timed: Timed) -> tuple[list[_Row], list[Reject], int]:
    rows: list[_Row] = []
    rejects: list[Reject] = []
    candidates = 0
    config, traits = kit.config, kit.template.traits
    with timed("parse"):
        for line in batch.lines:
            found = parse(line, config, traits)
            candidates += len(found)
            for item in found:
                if isinstance(item, Reject):
                    rejects.append(item)
                else:
                    rows.append(_Row(line, item))
    return rows, rejects, candidates


def _render(rows: Sequence[_Row], kit: Kit, timed: Timed) -> tuple[list[_Row], list[_Encodable], list[Reject]]:
    good: list[_Row] = []
    items: list[_Encodable] = []
    rejects: list[Reject] = []
    with timed("render"):
        for row in rows:
            try:
                items.append(_encodable(row.conversation, kit))
            except RowError as error:
                rejects.append(_reject(row, error.reason, error.detail))
            else:
                good.append(row)
    return good, items, rejects


def _encodable(conversation: Conversation, kit: Kit) -> _Encodable:
    if conversation.token_ids is not None:
        return conversation.token_ids
    rendered = render(conversation, kit.template, kit.config)
    return rendered if conversation.completion_tokens is None else rendered.split_at_last_turn()


def _counts(rows: Sequence[_Row], items: Sequence[_Encodable], encoded: Encoded, config: RunConfig) -> Counter[str]:
    """Rows by the shape found, what parsing and rendering counted, rows that `--over-length truncate` shortens, and
    rows that only the reference was trusted with.
    """
    found: Counter[str] = Counter(f"shape_{row.conversation.shape}" for row in rows)
    counted: set[tuple[str, int, int]] = set()
    for row, item in zip(rows, items, strict=True):
        if row.conversation.counts:  # of a line, however many rows it becomes
            whole = row.line.source, row.line.offset, row.conversation.choice
            found.update(row.conversation.counts if whole not in counted else {})
            counted.add(whole)
        if isinstance(item, Rendered) and item.counts:
            found.update(item.counts)
    if config.max_length is not None and config.over_length == "truncate":
        found["shortened_rows"] = int((np.diff(encoded.splits) > config.max_length).sum())
    found["reference_rows"] = encoded.doubtful
    return +found


def _drift(rows: Sequence[_Row], encoded: Encoded) -> dict[str, int]:
    """Trained tokens of last turns, less what the prompt supplies, beside what the generator recorded; sums over rows.

    `off` adds up how far the rows that are not `equal` are from their record.
    """
    found: Counter[str] = Counter()
    for i, trained in encoded.last_turn_tokens.items():
        recorded = rows[i].conversation.completion_tokens
        if recorded is not None:
            off = abs(trained - recorded)
            found.update(rows=1, recorded=recorded, trained=trained, equal=int(off == 0), off=off)
    return dict(found)


def _judge(rows: Sequence[_Row], encoded: Encoded, config: RunConfig) -> tuple[pa.Table, list[Reject]]:
    """The rows that fit, as a table; the others as rejects."""
    if config.max_length is not None and config.over_length == "truncate":
        encoded = truncate(encoded, config.max_length)
    lengths = np.diff(encoded.splits)
    fits = lengths <= (config.max_length or np.iinfo(np.int64).max)
    trained = loss_tokens(encoded)
    keep = fits & (trained >= config.min_loss_tokens)
    keep[list(encoded.failed)] = False
    unfit = [(i, rows[i]) for i in np.flatnonzero(~keep).tolist()]
    rejects = [_reject(row, *_why(row, i, encoded, lengths, trained, config)) for i, row in unfit]
    kept = [row.conversation for row, good in zip(rows, keep, strict=True) if good]
    return build_table(kept, select(encoded, keep), config.keep_fields), rejects


def _why(
    row: _Row,
    i: int,
    encoded: Encoded,
    lengths: npt.NDArray[np.int64],
    trained: npt.NDArray[np.int32],
    config: RunConfig,
) -> tuple[str, str]:
    if i in encoded.failed:
        return encoded.failed[i].reason, encoded.failed[i].detail
    if config.max_length is not None and lengths[i] > config.max_length:
        return "over_length", f"{lengths[i]} tokens, --max-length {config.max_length}"
    messages = row.conversation.messages
    mute = "; no message of role assistant" if messages and all(m["role"] != "assistant" for m in messages) else ""
    return "no_loss_tokens", f"{trained[i]} trained tokens, --min-loss-tokens {config.min_loss_tokens}{mute}"


def _reject(row: _Row, reason: str, detail: str) -> Reject:
    line, conversation = row.line, row.conversation
    turn = conversation.turn
    return Reject(
        line.source, line.offset, len(line.raw), conversation.choice, turn, reason, detail, line.raw, line.number
    )
