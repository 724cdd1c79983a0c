"""The bytes of one part -> what its rows hold, recounted, and every value in them that cannot be right."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from etl.records import ObjectRange
from etl.schema import output_schema

Ints: TypeAlias = npt.NDArray[Any]
Bools: TypeAlias = npt.NDArray[np.bool_]

UNREADABLE: Final = (pa.ArrowException, OSError)
"""What pyarrow raises on bytes that are no Parquet, or no longer."""

MASKS: Final = {"trl": "assistant_masks"}
"""Layout -> its name for the loss mask, where it has one of its own."""

KEY: Final = ("source", "source_offset", "choice", "turn")


@dataclass(frozen=True, slots=True)
class Expected:
    """What a part of this output can hold: the plan's settings, the largest id, and the ranges that it was made of."""

    settings: Mapping[str, Any]
    largest_id: int | None
    ranges: Sequence[ObjectRange]

    @property
    def mask(self) -> str:
        """The name of the column with the loss mask."""
        return MASKS.get(self.layout, "loss_mask")

    @property
    def layout(self) -> str:
        """The plan's `--layout`."""
        return str(self.settings.get("layout", "default"))

    @property
    def columns(self) -> dict[str, pa.DataType]:
        """Name -> type of the columns that every layout has."""
        kinds = {f.name: f.type for f in output_schema(tuple(self.settings.get("keep", ())))}
        return {self.mask if name == "loss_mask" else name: kind for name, kind in kinds.items()}


@dataclass(frozen=True, slots=True)
class Keys:
    """Where rows come from: `codes` and the others are int64 [rows], a code is an index into `sources`."""

    sources: tuple[str, ...]
    codes: Ints
    offsets: Ints
    choices: Ints
    turns: Ints

    def lines(self) -> set[tuple[str, int]]:
        """The distinct lines (source, offset) that the rows come from."""
        pairs = np.unique(np.stack([self.codes, self.offsets], axis=1), axis=0)
        return {(self.sources[code], offset) for code, offset in pairs.tolist()}

    def doubled(self) -> int | None:
        """A row whose key another row has too, or None."""
        order = np.lexsort((self.turns, self.choices, self.offsets, self.codes))
        same = np.ones(max(0, len(order) - 1), np.bool_)
        for values in (self.codes, self.offsets, self.choices, self.turns):
            same &= np.diff(values[order]) == 0
        again = np.flatnonzero(same)
        return int(order[again[0] + 1]) if len(again) else None


@dataclass(slots=True)
class Contents:
    """A part as its rows say it is: what to hold a receipt against, and `flaws`, each one line.

    `keys` is None where the columns that make the key are not all there.
    """

    rows: int = 0
    tokens: int = 0
    loss_tokens: int = 0
    keys: Keys | None = None
    flaws: list[str] = field(default_factory=list)


def read_contents(body: bytes, expected: Expected) -> Contents:
    """Every row group of a part, one at a time. Raises one of UNREADABLE where the bytes are no whole Parquet."""
    file = pq.ParquetFile(pa.BufferReader(body))
    contents = Contents(rows=file.metadata.num_rows)
    contents.flaws += _column_flaws(file.schema_arrow, expected)
    names = list(expected.columns)
    if contents.flaws:
        return contents
    tally = _Tally()
    parts: list[tuple[list[str], list[Ints]]] = []
    row = 0
    for group in range(file.num_row_groups):
        table = file.read_row_group(group, columns=names, use_threads=False)
        if _check_nulls(table, expected, row, tally):
            _check_group(_Group(table, row, expected), tally, contents)
            parts.append(_key_columns(table))
        row += table.num_rows
    contents.flaws += tally.lines()
    contents.keys = _join_keys(parts) if len(parts) == file.num_row_groups else None
    return contents


def key_columns(body: bytes) -> tuple[list[str], Ints]:
    """Sources and offsets of any Parquet's rows. Raises one of UNREADABLE, or KeyError where it has no such columns."""
    table = pq.read_table(pa.BufferReader(body), columns=["source", "source_offset"], use_threads=False)
    offsets = table["source_offset"].cast(pa.int64())
    return table["source"].cast(pa.string()).to_pylist(), np.asarray(offsets.fill_null(-1).to_numpy())


def _column_flaws(schema: pa.Schema, expected: Expected) -> Iterator[str]:
    for name, kind in expected.columns.items():
        at = schema.get_field_index(name)
        if at < 0:
            yield f"column {name} is missing"
        elif schema.field(at).type != kind:
            yield f"column {name} is {schema.field(at).type}, not {kind}"
    extra = [name for name in schema.names if name not in expected.columns]
    if extra and expected.layout == "default":
        yield f"column {extra[0]} is not of layout default"


class _Tally:
    """Flaws by kind: how many rows, and what the first one looks like."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.first: dict[str, str] = {}

    def add(self, name: str, bad: Bools, row: int, say: Callable[[int], str]) -> None:
        """Count the rows for which `bad` (bool [rows]) is true; `say` describes one by its index."""
        found = np.flatnonzero(bad)
        if len(found):
            at = int(found[0])
            self.counts[name] = self.counts.get(name, 0) + len(found)
            self.first.setdefault(name, f"{say(at)} in row {row + at}")

    def lines(self) -> Iterator[str]:
        """One line a kind."""
        for name, count in self.counts.items():
            yield self.first[name] + (f", the first of {count} such rows" if count > 1 else "")


def _check_nulls(table: pa.Table, expected: Expected, row: int, tally: _Tally) -> bool:
    """Whether the row group can be looked at: no null where none may be."""
    kept = set(expected.settings.get("keep", ()))
    good = True
    for name in table.column_names:
        if name in kept:
            continue
        column = table[name]
        bad = column.is_null().to_numpy()
        if pa.types.is_list(column.type) and _flat(column).null_count:
            bad = np.array([value is None or None in value for value in column.to_pylist()])
        tally.add(name, bad, row, lambda _, name=name: f"{name} is null")  # type: ignore[misc]
        good = good and not bad.any()
    return good


def _flat(column: pa.ChunkedArray) -> pa.Array:
    return pa.concat_arrays([chunk.flatten() for chunk in column.chunks] or [pa.array([], column.type.value_type)])


class _Group:
    """One row group as arrays: `ids` and `mask` flat, `lengths` and the others int64 [rows]."""

    def __init__(self, table: pa.Table, row: int, expected: Expected) -> None:
        self.row = row
        self.expected = expected
        self.ids = _flat(table["input_ids"]).to_numpy(zero_copy_only=False)
        self.mask = _flat(table[expected.mask]).to_numpy(zero_copy_only=False)
        self.lengths, self.mask_lengths = _lengths(table["input_ids"]), _lengths(table[expected.mask])
        self.n_tokens, self.n_loss_tokens = _ints(table["n_tokens"]), _ints(table["n_loss_tokens"])
        self.choices, self.turns, self.offsets = (_ints(table[name]) for name in ("choice", "turn", "source_offset"))

    def ones(self) -> Ints:
        """Trained tokens by the mask, int64 [rows]; any value but 0 counts."""
        ends = np.cumsum(self.mask != 0, dtype=np.int32)
        bounds = np.concatenate([[0], np.cumsum(self.mask_lengths)])
        return np.diff(np.concatenate([[0], ends])[bounds])


def _lengths(column: pa.ChunkedArray) -> Ints:
    parts = [np.diff(chunk.offsets.to_numpy()) for chunk in column.chunks]
    return np.concatenate(parts).astype(np.int64) if parts else np.empty(0, np.int64)


def _ints(column: pa.ChunkedArray) -> Ints:
    return np.asarray(column.to_numpy()).astype(np.int64)


def _check_group(group: _Group, tally: _Tally, contents: Contents) -> None:
    row, mask = group.row, group.expected.mask
    lengths, ones, counted = group.lengths, group.ones(), group.n_loss_tokens

    def add(name: str, bad: Bools, say: Callable[[int], str]) -> None:
        tally.add(name, bad, row, say)

    add(
        "lengths",
        lengths != group.mask_lengths,
        lambda i: f"{lengths[i]} input_ids, but {group.mask_lengths[i]} {mask} values",
    )
    add("n_tokens", group.n_tokens != lengths, lambda i: f"n_tokens {group.n_tokens[i]}, but {lengths[i]} input_ids")
    # megatron-bridge shifts the mask left by one: a row that began with a trained token has lost its one.
    slack = 1 if group.expected.layout == "megatron-bridge" else 0
    off = (counted < ones) | (counted > ones + slack)
    add("n_loss_tokens", off, lambda i: f"n_loss_tokens {counted[i]}, but {ones[i]} trained in {mask}")
    _check_values(group, add)
    _check_settings(group, add)
    contents.tokens += int(lengths.sum())
    contents.loss_tokens += int(counted.sum() if slack else ones.sum())


_Add: TypeAlias = Callable[[str, Bools, Callable[[int], str]], None]


def _check_values(group: _Group, add: _Add) -> None:
    largest = group.expected.largest_id
    odd = (group.mask != 0) & (group.mask != 1)
    rows, first = _rows_with(odd, group.mask_lengths, group.mask)
    add("mask", rows, lambda i: f"{group.expected.mask} value {first[i]}")
    outside = group.ids < 0 if largest is None else (group.ids < 0) | (group.ids > largest)
    bad, beyond = _rows_with(outside, group.lengths, group.ids)
    limit = "" if largest is None else f" beyond the tokenizer's largest, {largest},"
    add("ids", bad, lambda i: f"token id {beyond[i]}{limit if beyond[i] > 0 else ''}")
    add("choice", group.choices < 0, lambda i: f"choice {group.choices[i]}")
    expanded = group.expected.settings.get("turns") == "expand"
    wrong_turn = group.turns < -1 if expanded else group.turns != -1
    add("turn", wrong_turn, lambda i: f"turn {group.turns[i]}")


def _check_settings(group: _Group, add: _Add) -> None:
    settings = group.expected.settings
    longest, least = settings.get("max_length"), settings.get("min_loss_tokens")
    if longest is not None:
        add("max_length", group.lengths > longest, lambda i: f"{group.lengths[i]} tokens, --max-length {longest},")
    if least is not None:
        few = group.n_loss_tokens < least
        add("least", few, lambda i: f"n_loss_tokens {group.n_loss_tokens[i]}, --min-loss-tokens {least},")


def _rows_with(odd: Bools, lengths: Ints, values: Ints) -> tuple[Bools, dict[int, int]]:
    """Which rows hold an odd value (bool [rows]), and the first such value of each."""
    rows = np.zeros(len(lengths), np.bool_)
    places = np.flatnonzero(odd)
    owners = np.searchsorted(np.cumsum(lengths), places, side="right")
    rows[owners] = True
    kept, at = np.unique(owners, return_index=True)
    return rows, dict(zip(kept.tolist(), values[places[at]].tolist(), strict=True))


def _key_columns(table: pa.Table) -> tuple[list[str], list[Ints]]:
    source = table["source"].combine_chunks().dictionary_encode()
    if isinstance(source, pa.ChunkedArray):
        source = source.combine_chunks()
    codes = np.asarray(source.indices.to_numpy(zero_copy_only=False)).astype(np.int64)
    return source.dictionary.to_pylist(), [codes, *(_ints(table[name]) for name in KEY[1:])]


def _join_keys(parts: Sequence[tuple[list[str], list[Ints]]]) -> Keys:
    known: dict[str, int] = {}
    columns: list[list[Ints]] = [[np.empty(0, np.int64)] for _ in KEY]
    for names, (codes, *rest) in parts:
        places = np.array([known.setdefault(name, len(known)) for name in names] or [0], np.int64)
        for column, values in zip(columns, (places[codes], *rest), strict=True):
            column.append(values)
    codes, offsets, choices, turns = (np.concatenate(column) for column in columns)
    return Keys(tuple(known), codes, offsets, choices, turns)


def first_outside(keys: Keys, ranges: Sequence[ObjectRange]) -> int | None:
    """A row whose line is of none of the ranges, or None. A whole object may be compressed: any offset is in it."""
    everything = np.iinfo(np.int64).max
    owned = {r.url: (r.start, everything if r.whole else r.end) for r in ranges}
    bounds = np.array([owned.get(source, (0, -1)) for source in keys.sources] or [(0, -1)], np.int64)
    starts, ends = bounds[keys.codes].T
    outside = np.flatnonzero((keys.offsets < starts) | (keys.offsets >= ends))
    return int(outside[0]) if len(outside) else None
