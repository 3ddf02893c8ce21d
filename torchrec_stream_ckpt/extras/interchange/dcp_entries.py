"""Entries of a marker in the form of a DCP checkpoint: the names that an export has, and the place of the bytes of
each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from torchrec_stream_ckpt.errors import ColumnResplitError
from torchrec_stream_ckpt.extras.interchange.dcp import Keys, TableEntry, nested, table_entries
from torchrec_stream_ckpt.extras.interchange.dcp_dense import ComparedReader
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.util.types import TableShard, TableSpec, grouped

Slices = Sequence[tuple[int, int]]
"""(first column, columns) of each column shard of a table."""


@dataclass(frozen=True, slots=True)
class MarkerEntries:
    """All entries of a marker."""

    metadata: Metadata
    tables: Mapping[str, tuple[int, TableEntry]]
    """(index of the table in the schema, entry) by key. A table has two keys for each."""
    slices: Mapping[int, Slices]
    """Column shards of each table, ascending. A row-wise state has the values of one shard after those of the other."""
    dense: Mapping[str, str]
    """Key -> entry of the dense files."""
    values: Mapping[str, Any]
    """Key -> value that was read: buffers, and values of optimizers other than tensors."""


class _RowStateSize(tuple[int, ...]):
    """Size of a row-wise state: one value per row and column shard. Another number of shards has no exact value."""

    name: str
    rows: int

    def __ne__(self, other: object) -> bool:
        if super().__ne__(other) and isinstance(other, tuple) and len(other) == 1 and not other[0] % self.rows:
            raise no_exact_state(self.name, f"{other[0] // self.rows} column shards", f"{self[0] // self.rows}")
        return super().__ne__(other)


def no_exact_state(table: str, here: str, there: str) -> ColumnResplitError:
    """Return the error for a state of column shards, such as a row-wise one, that is loaded under other column
    shards."""
    return ColumnResplitError(
        f"row-wise state has no exact value under {here}, because the marker has {there}",
        hint="keep the column split of this table, or restore the marker with StreamCheckpointer and "
        'on_column_resplit="merge"',
        table=table,
    )


def entries_of(schema: Schema, shards: Iterable[TableShard], dense: ComparedReader, keys: Keys) -> MarkerEntries:
    """Name all entries of a marker.

    Args:
        schema: Its tables.
        shards: Shards that the ranks of its generation held.
        dense: Reader of its dense files.
        keys: Keys of the state dicts.

    Raises:
        UnsupportedError: the marker has id maps of managed collision.
        CorruptionError, StoreUnavailableError: a dense file is damaged, or cannot be read.
    """
    saved = dense.read_metadata()
    outline, entries = dense.outline(saved)
    planner = DefaultSavePlanner()
    planner.set_up_planner(nested(outline, keys, states=True), is_coordinator=True)
    _, metadata = planner.create_global_plan([planner.create_local_plan()])
    found = metadata.state_dict_metadata
    in_files: dict[str, str] = {}
    values: dict[str, Any] = {}
    for key, value in planner.state_dict.items():
        if id(value) in entries:
            in_files[key] = entries[id(value)]
            found[key] = saved.state_dict_metadata[in_files[key]]
        else:
            values[key] = value
            if not isinstance(value, torch.Tensor):
                found[key] = BytesStorageMetadata()
    held = grouped((shard.table, (shard.col0, shard.cols)) for shard in shards)
    slices = {index: sorted(set(held.get(index, [(0, spec.dim)]))) for index, spec in schema.live}
    tables: dict[str, tuple[int, TableEntry]] = {}
    for index, spec in schema.live:
        for entry in table_entries(spec, keys, states=True):
            for path in (entry.path, entry.alias):
                key = ".".join(path)
                metadata.planner_data[key], tables[key] = path, (index, entry)
                found[key] = _saved(spec, entry, slices[index])
    return MarkerEntries(metadata, tables, slices, in_files, values)


def _saved(spec: TableSpec, entry: TableEntry, slices: Slices) -> TensorStorageMetadata:
    """Return the size and chunks of an entry: a chunk for each column shard."""
    if entry.per_row:
        row_size = _RowStateSize((spec.rows * len(slices),))
        row_size.name, row_size.rows = spec.name, max(1, spec.rows)
        size = cast(torch.Size, row_size)  # torch.Size cannot be subclassed
        places: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
            ((number * spec.rows,), (spec.rows,)) for number in range(len(slices))
        ]
    else:
        size = torch.Size((spec.rows, spec.dim))
        places = [((0, col0), (spec.rows, cols)) for col0, cols in slices]
    chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in places]
    return TensorStorageMetadata(TensorProperties(dtype=entry.dtype), size, chunks)
