"""Conversations + Encoded -> pa.Table in SCHEMA, and pa.Table -> the bytes of one Parquet part."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from etl.records import Conversation, Encoded
from etl.schema import output_schema

ROW_GROUP_BYTES: Final = 32 * 2**20
"""Upper bound of a row group before compression: a reader's first row costs no more than this."""

LEVELS_SHARE: Final = 100
"""A hundredth more for the levels that say where lists and nulls are."""

ZSTD_LEVEL: Final = 3


def build_table(conversations: Sequence[Conversation], encoded: Encoded, keep: tuple[str, ...] = ()) -> pa.Table:
    """One row a conversation, in order, with a column for each field of `keep`.

    The lists are views of the batch's buffers: Python lists would be 20 times slower.
    """
    splits = encoded.splits.astype(np.int32)
    lengths = np.diff(splits)
    columns: dict[str, Any] = {
        "id": [c.row_id for c in conversations],
        "input_ids": pa.ListArray.from_arrays(splits, encoded.ids),
        "loss_mask": pa.ListArray.from_arrays(splits, encoded.mask),
        "n_tokens": lengths,
        "n_loss_tokens": loss_tokens(encoded),
        "source": [c.source for c in conversations],
        "source_offset": [c.source_offset for c in conversations],
        "choice": [c.choice for c in conversations],
        "turn": [c.turn for c in conversations],
    }
    for at, name in enumerate(keep):
        columns[name] = [c.kept[at] for c in conversations]
    schema = output_schema(keep)
    return pa.table([_column(columns[f.name], f.type) for f in schema], schema=schema)


def _column(values: Any, kind: pa.DataType) -> pa.Array:
    return values if isinstance(values, pa.Array) else pa.array(values, type=kind)


def loss_tokens(encoded: Encoded) -> npt.NDArray[np.int32]:
    """Trained tokens of each row, int32 [rows]."""
    # Counting the ones of a view a row is six times faster than a running sum over the batch.
    mask, splits = encoded.mask.view(np.bool_), encoded.splits.tolist()
    return np.array([np.count_nonzero(mask[a:b]) for a, b in pairwise(splits)], np.int32)


def truncate(encoded: Encoded, max_length: int) -> Encoded:
    """The batch with ids and mask of every row cut to its first `max_length` tokens."""
    lengths = np.diff(encoded.splits)
    if not len(lengths) or lengths.max() <= max_length:
        return encoded
    place = np.arange(len(encoded.ids)) - np.repeat(encoded.splits[:-1], lengths)
    kept = place < max_length
    splits = np.concatenate([[0], np.cumsum(np.minimum(lengths, max_length))])
    return dataclasses.replace(encoded, ids=encoded.ids[kept], mask=encoded.mask[kept], splits=splits)


def select(encoded: Encoded, keep: npt.NDArray[np.bool_]) -> Encoded:
    """The batch with only the rows for which `keep` (bool [rows]) is true."""
    if keep.all():
        return encoded
    lengths = np.diff(encoded.splits)
    tokens = np.repeat(keep, lengths)
    splits = np.concatenate([[0], np.cumsum(lengths[keep])])
    return Encoded(encoded.ids[tokens], encoded.mask[tokens], splits)


def serialize(table: pa.Table) -> bytes:
    """The table as one Parquet file: zstd 3, row groups of at most ROW_GROUP_BYTES, the same bytes on every call.

    Only `source` is dictionary-encoded (token ids do not repeat enough to gain); no pandas metadata, which would make
    readers look for an `ArrowDtype` index.
    """
    # Not a Python file: each page written to one waits for the interpreter, which the next partition keeps busy.
    sink = pa.BufferOutputStream()
    table = table.replace_schema_metadata(None)
    with pq.ParquetWriter(
        sink,
        table.schema,
        compression="zstd",
        compression_level=ZSTD_LEVEL,
        use_dictionary=["source"],
        write_statistics=["source", "source_offset", "n_tokens", "n_loss_tokens"],
    ) as writer:
        for start, stop in row_groups(table):
            writer.write_table(table.slice(start, stop - start), row_group_size=stop - start)
    body: bytes = sink.getvalue().to_pybytes()
    return body


def row_groups(table: pa.Table) -> Iterator[tuple[int, int]]:
    """Row ranges [start, stop) whose data stays within ROW_GROUP_BYTES; a larger single row is a group alone."""
    sizes = sum((_bytes_per_row(table[name]) for name in table.column_names), np.zeros(table.num_rows, np.int64))
    ends = np.cumsum(sizes)
    start = 0
    while start < table.num_rows:
        base = ends[start - 1] if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, base + ROW_GROUP_BYTES, side="right")))
        yield start, stop
        start = stop


def _bytes_per_row(column: pa.ChunkedArray) -> npt.NDArray[np.int64]:
    """What a column's rows take in the file before compression; Parquet has no integers under four bytes."""
    kind = column.type
    if pa.types.is_list(kind):
        sizes = pc.multiply(pc.list_value_length(column), max(4, kind.value_type.bit_width // 8))
    elif pa.types.is_string(kind):
        sizes = pc.add(pc.binary_length(column), 4)
    else:
        return np.full(len(column), max(4, kind.bit_width // 8), np.int64)
    filled: npt.NDArray[np.int64] = pc.fill_null(sizes, 0).to_numpy().astype(np.int64)
    return filled + filled // LEVELS_SHARE
