"""Tables as Parquet files: one file a table, one row an id. Whole ones for analysis, or the changes of a marker."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import numpy.typing as npt

from torchrec_stream_ckpt.errors import ConfigError
from torchrec_stream_ckpt.extras.interchange.names import state_names
from torchrec_stream_ckpt.format.rows import NO_ID, NUMPY_DTYPES, Array
from torchrec_stream_ckpt.inner import TableReader, TableWindow
from torchrec_stream_ckpt.util.types import TableSpec

Ids = npt.NDArray[np.int64]

_WIDENED = ("bfloat16", "float16")
"""Dtypes written as float32, which holds each of their values: few readers of Parquet know half precision."""
_MAX_NAME = 255
"""Longest name of a file, in bytes, on the file systems of Linux."""
_GROUP_BYTES = 8 * 2**20
"""Weights of one row group of changes."""


def write_parquet(
    folder: Path,
    readers: Sequence[TableReader],
    *,
    states: bool,
    about: dict[str, str],
    owners: Mapping[str, Ids] | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> list[str]:
    """Write ``<table>.parquet`` with the columns ``id``, ``vector`` and, if requested, one for each array of a state.

    A row group is one window. bfloat16 and float16 become float32, with the same values.

    Args:
        folder: An empty folder.
        readers: The tables.
        states: Whether to write states.
        about: Written to the metadata of each file.
        owners: Raw id of each row, by table, for the column ``raw_id``: null for a free row. Other tables have no such
            column.
        progress: Called with the bytes of each window.

    Returns:
        Names of the files.

    Raises:
        ConfigError: a table's name is too long for a file. Nothing was written.
    """
    import pyarrow
    import pyarrow.parquet

    names = [file_name(reader.spec.name) for reader in readers]
    for reader, name in zip(readers, names, strict=True):
        more = {"table": reader.spec.name, "dtype": reader.spec.dtype, "optimizer": reader.spec.optimizer}
        with contextlib.ExitStack() as stack:
            sink: Any = None
            for row0, rows in list(reader.windows()) or [(0, 0)]:  # a table without rows has a schema, too
                raw_ids = (owners or {}).get(reader.spec.name)
                columns = dict(_columns(pyarrow, reader, reader.read(row0, rows), raw_ids, states=states))
                group = pyarrow.table(columns).replace_schema_metadata({**about, **more})
                if sink is None:
                    sink = stack.enter_context(pyarrow.parquet.ParquetWriter(folder / name, group.schema))
                sink.write_table(group, row_group_size=max(1, rows))
                progress(rows * reader.row_bytes)
    return names


def file_name(table: str) -> str:
    """Return the name of a table's file. Raises ConfigError if it is too long."""
    name = f"{quote(table, safe='')}.parquet"
    if len(name) > _MAX_NAME:
        raise ConfigError(
            f"the table name is too long for a file: its file name has {len(name)} characters, at most {_MAX_NAME}",
            hint="leave the table out with --tables, or export to safetensors:// or dcp://",
            table=table,
        )
    return name


class ChangesFile:
    """Changed and deleted rows of one table in a Parquet file that is complete after :meth:`close`.

    Its columns are the key, ``weights`` (a list of ``dim`` numbers; null in a tombstone), and ``tombstone``. bfloat16
    and float16 become float32, with the same values. Holds :data:`_GROUP_BYTES` of rows, and what one call adds.

    Args:
        path: A file that does not exist.
        key: Name of the column with the keys.
        table: The table.
        about: Written to the metadata of the file.
    """

    def __init__(self, path: Path, key: str, table: TableSpec, about: dict[str, str]) -> None:
        import pyarrow
        import pyarrow.parquet

        self._pyarrow = pyarrow
        self._table = table
        number = _widened(np.empty(0, NUMPY_DTYPES[table.dtype]), table.dtype).dtype
        weights = pyarrow.list_(pyarrow.from_numpy_dtype(number), table.dim)
        self._schema = pyarrow.schema(
            [
                pyarrow.field(key, pyarrow.int64(), nullable=False),
                pyarrow.field("weights", weights),
                pyarrow.field("tombstone", pyarrow.bool_(), nullable=False),
            ],
            metadata={**about, "table": table.name, "dtype": table.dtype},
        )
        self._writer: Any = pyarrow.parquet.ParquetWriter(path, self._schema)
        self._parts: list[Any] = []
        self._held_bytes = 0

    def put(self, keys: Ids, weights: Array) -> None:
        """Add rows, weights of shape (n, dim)."""
        vectors = _vectors(self._pyarrow, np.ascontiguousarray(weights), self._table.dtype)
        self._add([self._pyarrow.array(keys), vectors, self._pyarrow.array(np.zeros(len(keys), np.bool_))])

    def delete(self, keys: Ids) -> None:
        """Add tombstones."""
        nothing = self._pyarrow.nulls(len(keys), self._schema.field("weights").type)
        self._add([self._pyarrow.array(keys), nothing, self._pyarrow.array(np.ones(len(keys), np.bool_))])

    def _add(self, columns: list[Any]) -> None:
        part = self._pyarrow.table(columns, schema=self._schema)
        self._parts.append(part)
        self._held_bytes += part.nbytes
        if self._held_bytes >= _GROUP_BYTES:
            self._write()

    def _write(self) -> None:
        if self._parts:
            whole = self._pyarrow.concat_tables(self._parts)
            self._writer.write_table(whole, row_group_size=whole.num_rows)
        self._parts, self._held_bytes = [], 0

    def close(self) -> None:
        """Write the rest of the rows, and end the file."""
        self._write()
        self._writer.close()

    def abandon(self) -> None:
        """Close the file, which is not complete."""
        self._parts = []
        with contextlib.suppress(OSError):
            self._writer.close()


def _columns(
    pyarrow: Any, reader: TableReader, window: TableWindow, raw_ids: Ids | None, *, states: bool
) -> Iterator[tuple[str, Any]]:
    spec, end = reader.spec, window.row0 + window.rows
    yield "id", pyarrow.array(np.arange(window.row0, end))
    if raw_ids is not None:
        mine = raw_ids[window.row0 : end]
        yield "raw_id", pyarrow.array(mine, mask=mine == NO_ID)
    yield "vector", _vectors(pyarrow, window.weights, spec.dtype)
    for state, values in zip(spec.states, window.states, strict=True) if states else ():
        names = [name.removeprefix(f"{spec.name}.") for name in state_names(spec, state, reader.slices)]
        if state.per_row:
            yield from zip(names, (pyarrow.array(_widened(each, state.dtype)) for each in values), strict=True)
        else:
            yield names[0], _vectors(pyarrow, values, state.dtype)


def _vectors(pyarrow: Any, values: Array, dtype: str) -> Any:
    return pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(_widened(values, dtype).reshape(-1)), values.shape[1])


def _widened(values: Array, dtype: str) -> Array:
    """Convert values to a type that Parquet has, without changing any value."""
    if dtype == "bfloat16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32) if dtype in _WIDENED else values
