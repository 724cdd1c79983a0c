"""Conversations and token arrays become one Arrow table, and that table one Parquet file."""

from __future__ import annotations

import io
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from etl import tables
from etl.records import Conversation, Encoded
from etl.schema import COLUMNS, SCHEMA, empty_frame, output_schema


def batch(*rows: tuple[list[int], list[int]]) -> Encoded:
    """A batch from (ids, mask) pairs."""
    ids = [i for row, _ in rows for i in row]
    mask = [m for _, row in rows for m in row]
    splits = np.cumsum([0, *(len(row) for row, _ in rows)])
    return Encoded(np.array(ids, np.int32), np.array(mask, np.int8), splits)


def conversation(row_id: str, kept: tuple[str | None, ...] = ()) -> Conversation:
    return Conversation(row_id, "s3://b/a.jsonl", 7, 0, -1, kept=kept)


def test_a_table_has_the_ids_the_mask_and_their_counts_of_every_row() -> None:
    table = tables.build_table([conversation("a"), conversation("b")], batch(([1, 2, 3], [0, 1, 1]), ([4], [0])))
    assert table.schema == SCHEMA
    assert table["input_ids"].to_pylist() == [[1, 2, 3], [4]]
    assert table["loss_mask"].to_pylist() == [[0, 1, 1], [0]]
    assert table["n_tokens"].to_pylist() == [3, 1]
    assert table["n_loss_tokens"].to_pylist() == [2, 0]
    assert table["source"].to_pylist() == ["s3://b/a.jsonl"] * 2
    assert table["source_offset"].to_pylist() == [7, 7]
    assert table["turn"].to_pylist() == [-1, -1]


def test_kept_fields_are_further_string_columns() -> None:
    table = tables.build_table([conversation("a", ("x", None))], batch(([1], [1])), ("topic", "score"))
    assert table.schema == output_schema(("topic", "score"))
    assert (table["topic"].to_pylist(), table["score"].to_pylist()) == (["x"], [None])


def test_truncation_cuts_ids_and_mask_of_a_row_alike() -> None:
    cut = tables.truncate(batch(([1, 2, 3], [0, 1, 1]), ([4], [1]), ([5, 6], [1, 0])), 2)
    assert (cut.ids.tolist(), cut.mask.tolist()) == ([1, 2, 4, 5, 6], [0, 1, 1, 1, 0])
    assert cut.splits.tolist() == [0, 2, 3, 5]


def test_selection_keeps_whole_rows() -> None:
    kept = tables.select(batch(([1, 2], [0, 1]), ([], []), ([3], [1])), np.array([True, False, True]))
    assert (kept.ids.tolist(), kept.mask.tolist(), kept.splits.tolist()) == ([1, 2, 3], [0, 1, 1], [0, 2, 3])


def test_a_part_reads_back_as_it_was_written_without_pandas_metadata() -> None:
    table = tables.build_table([conversation("a")], batch(([1, 2], [0, 1])))
    read = pq.read_table(io.BytesIO(tables.serialize(table)))
    assert read.to_pylist() == table.to_pylist()
    assert read.schema == SCHEMA
    assert b"pandas" not in (read.schema.metadata or {})


def test_the_same_table_gives_the_same_bytes_whatever_its_chunks() -> None:
    whole = tables.build_table([conversation("a"), conversation("b")], batch(([1, 2], [0, 1]), ([3], [1])))
    chunked = pa.concat_tables([whole.slice(0, 1), whole.slice(1, 1)])
    assert tables.serialize(chunked) == tables.serialize(whole)


def test_every_column_is_compressed_with_zstd_and_only_source_has_a_dictionary() -> None:
    table = tables.build_table([conversation("a")] * 3, batch(*[([1, 2], [0, 1])] * 3))
    group = pq.ParquetFile(io.BytesIO(tables.serialize(table))).metadata.row_group(0)
    columns = [group.column(i) for i in range(group.num_columns)]
    assert {column.compression for column in columns} == {"ZSTD"}
    assert [c.path_in_schema for c in columns if "RLE_DICTIONARY" in c.encodings] == ["source"]


def test_row_groups_stay_within_32_mib_of_data() -> None:
    rows, tokens = 500, 32_000
    ids = np.arange(rows * tokens, dtype=np.int32)
    encoded = Encoded(ids, np.ones(rows * tokens, np.int8), np.arange(rows + 1, dtype=np.int64) * tokens)
    table = tables.build_table([conversation(str(i)) for i in range(rows)], encoded)
    groups = list(tables.row_groups(table))
    assert [groups[0][0], groups[-1][1]] == [0, rows]
    assert all(stop == start for (_, stop), (start, _) in pairwise(groups))
    assert max(stop - start for start, stop in groups) * tokens * 8 <= tables.ROW_GROUP_BYTES
    assert len(groups) == 4


def test_a_row_larger_than_a_row_group_is_a_group_alone() -> None:
    ids = np.zeros(5 * 2**20, np.int32)
    table = tables.build_table(
        [conversation("big"), conversation("small")],
        Encoded(np.append(ids, np.int32(1)), np.ones(len(ids) + 1, np.int8), np.array([0, len(ids), len(ids) + 1])),
    )
    assert list(tables.row_groups(table)) == [(0, 1), (1, 2)]


def test_the_meta_has_the_schema_s_own_types() -> None:
    frame = empty_frame(SCHEMA)
    assert list(frame.columns) == [name for name, _, _ in COLUMNS]
    assert pa.Table.from_pandas(frame, preserve_index=False).replace_schema_metadata(None).schema == SCHEMA
