"""The one Arrow schema of the output: the meta, the cast, the writer, the README table and a test all read it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import pandas as pd
import pyarrow as pa

from etl.errors import UsageError

COLUMNS: Final = (
    ("id", pa.string(), "first of `custom_id`, `id`, `uuid`, else `<source>@<source_offset>`; need not be unique"),
    ("input_ids", pa.list_(pa.int32()), "the whole rendered conversation, tokenized once"),
    ("loss_mask", pa.list_(pa.int8()), "1 where the token is trained, else 0; as long as `input_ids`"),
    ("n_tokens", pa.int32(), "length of `input_ids`"),
    ("n_loss_tokens", pa.int32(), "ones in `loss_mask`"),
    ("source", pa.string(), "the object that the row came from (dictionary-encoded in the file)"),
    ("source_offset", pa.int64(), "byte offset of the line's first byte in the decompressed object"),
    ("choice", pa.int32(), "which of several `choices`; 0 if single"),
    ("turn", pa.int32(), "index of the trained message under `--turns expand`; -1 unless expanded"),
)
"""Name, Arrow type and meaning of every column, in file order. (source, source_offset, choice, turn) is the key."""

SCHEMA: Final = pa.schema([(name, kind) for name, kind, _ in COLUMNS])


def output_schema(keep: tuple[str, ...] = ()) -> pa.Schema:
    """SCHEMA with one nullable string column for each field of `--keep`."""
    return pa.schema([*SCHEMA, *(pa.field(name, pa.string()) for name in keep)])


def check_names(keep: Sequence[str]) -> None:
    """Raise UsageError where a field of `--keep` would be a second column of its name."""
    names = [*SCHEMA.names, *keep]
    for name in keep:
        if names.count(name) > 1:
            raise UsageError(f"--keep {name} would be a second column of that name; leave it out")


def empty_frame(schema: pa.Schema) -> pd.DataFrame:
    """The Dask meta: no rows, every column an `ArrowDtype` of the schema's own type."""
    return pd.DataFrame({f.name: pd.Series([], dtype=pd.ArrowDtype(f.type)) for f in schema})
