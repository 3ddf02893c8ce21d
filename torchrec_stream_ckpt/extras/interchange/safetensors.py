"""Tables as safetensors files with an index, sharded as by Hugging Face. Written in place, window by window.

The safetensors library is not used, because it takes only whole tensors. The format is simple: 8 bytes of length, a
JSON header, and the tensors one after the other.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from torchrec_stream_ckpt.errors import ConfigError
from torchrec_stream_ckpt.extras.interchange.names import state_names
from torchrec_stream_ckpt.format.frame import DTYPE_BYTES
from torchrec_stream_ckpt.format.rows import Array
from torchrec_stream_ckpt.inner import TableReader, TableWindow

METADATA = "__metadata__"
INDEX = "model.safetensors.index.json"
_DTYPES = {
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float64": "F64",
    "int32": "I32",
    "int64": "I64",
    "uint8": "U8",
}


@dataclass(frozen=True, slots=True)
class _Tensor:
    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class _Slot:
    """Position of a tensor's bytes."""

    file: BinaryIO
    offset: int


def write_safetensors(
    folder: Path,
    readers: Sequence[TableReader],
    *,
    states: bool,
    shard_bytes: int,
    about: dict[str, str],
    owners: Mapping[str, Array] | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> list[str]:
    """Write whole tables, raw ids as ``<table>.raw_id``, and states as ``<table>.<state>``.

    If a state has an array for each of several column shards, these are ``<table>.<state>.col<first column>``.

    Args:
        folder: An empty folder.
        readers: The tables.
        states: Whether to write states.
        shard_bytes: Most bytes that a file holds, unless one tensor is larger.
        about: Written to the metadata of each file.
        owners: Raw id of each row, by table; for a free row the greatest int64. Other tables have none.
        progress: Called with the bytes of each window.

    Returns:
        Names of the files.

    Raises:
        ConfigError: a table has a name that the format cannot hold. Nothing was written.
    """
    raw_ids = owners or {}
    tensors = {each.spec.name: _tensors(each, states=states, raw_ids=each.spec.name in raw_ids) for each in readers}
    _check_names(tensors)
    shards = list(_shards([tensor for each in tensors.values() for tensor in each], shard_bytes))
    names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    places: dict[str, _Slot] = {}
    files: list[BinaryIO] = []
    try:
        for name, shard in zip(names, shards, strict=True):
            files.append(open(folder / name, "wb"))  # noqa: SIM115
            places |= _begin(files[-1], shard, about)
        for reader in readers:
            _write_table(reader, tensors[reader.spec.name], places, raw_ids.get(reader.spec.name), progress)
    finally:
        for file in files:
            file.close()
    index = {
        "metadata": {"total_size": sum(tensor.num_bytes for shard in shards for tensor in shard)},
        "weight_map": {tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard},
    }
    (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return [*names, INDEX]


def _check_names(tensors: Mapping[str, Sequence[_Tensor]]) -> None:
    """Check that all tensors have names of their own: ``a.b`` may be a table, or a state of table ``a``."""
    tables: dict[str, str] = {}
    for table, each in tensors.items():
        for tensor in each:
            if tensor.name == METADATA:
                raise ConfigError(
                    f"a safetensors file cannot hold a tensor named {METADATA}: the format reserves the name",
                    hint="leave the table out with --tables, or export to dcp:// or parquet://",
                    table=table,
                )
            other = tables.setdefault(tensor.name, table)
            if other != table:
                raise ConfigError(
                    f"two tensors would have the name {tensor.name}: one of table {other}, one of table {table}",
                    hint="export one of them alone with --tables, use --no-states, or export to dcp:// or parquet://",
                    table=table,
                )


def _tensors(reader: TableReader, *, states: bool, raw_ids: bool) -> list[_Tensor]:
    """Return the weights, the raw ids, then the arrays of each state, in the order of :func:`_arrays`."""
    spec = reader.spec
    tensors = [_Tensor(spec.name, spec.dtype, (spec.rows, spec.dim))]
    if raw_ids:
        tensors.append(_Tensor(f"{spec.name}.raw_id", "int64", (spec.rows,)))
    for state in spec.states if states else ():
        shape = (spec.rows,) if state.per_row else (spec.rows, spec.dim)
        tensors += [_Tensor(name, state.dtype, shape) for name in state_names(spec, state, reader.slices)]
    return tensors


def _arrays(reader: TableReader, window: TableWindow, raw_ids: Array | None, count: int) -> list[Array]:
    """Return the parts of the first ``count`` tensors that a window has."""
    arrays: list[Array] = [window.weights]
    if raw_ids is not None:
        arrays.append(raw_ids[window.row0 : window.row0 + window.rows].astype("<i8"))
    for state, values in zip(reader.spec.states, window.states, strict=True):
        arrays += list(values) if state.per_row else [values]
    return arrays[:count]


def _shards(tensors: Sequence[_Tensor], shard_bytes: int) -> Iterator[list[_Tensor]]:
    shard: list[_Tensor] = []
    held_bytes = 0
    for tensor in tensors:
        if shard and held_bytes + tensor.num_bytes > shard_bytes:
            yield shard
            shard, held_bytes = [], 0
        shard.append(tensor)
        held_bytes += tensor.num_bytes
    if shard:
        yield shard


def _begin(file: BinaryIO, shard: Sequence[_Tensor], about: dict[str, str]) -> dict[str, _Slot]:
    """Write the header, and extend the file to its final length."""
    entries: dict[str, object] = {METADATA: about}
    offsets, end = [], 0
    for tensor in shard:
        offsets.append(end)
        end += tensor.num_bytes
        entries[tensor.name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": tensor.shape,
            "data_offsets": [offsets[-1], end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    file.write(struct.pack("<Q", len(text)) + text)
    begin = file.tell()
    file.truncate(begin + end)
    return {tensor.name: _Slot(file, begin + offset) for tensor, offset in zip(shard, offsets, strict=True)}


def _write_table(
    reader: TableReader,
    tensors: Sequence[_Tensor],
    places: dict[str, _Slot],
    raw_ids: Array | None,
    progress: Callable[[int], None],
) -> None:
    for row0, rows in reader.windows():
        window = reader.read(row0, rows)
        for tensor, array in zip(tensors, _arrays(reader, window, raw_ids, len(tensors)), strict=True):
            place = places[tensor.name]
            place.file.seek(place.offset + row0 * tensor.row_bytes)
            place.file.write(array.tobytes())
        progress(rows * reader.row_bytes)
