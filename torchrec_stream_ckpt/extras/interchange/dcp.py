"""A marker as a checkpoint of torch's DCP, which plain ``dcp.load`` reads into the state dicts of any plan.

==========================================  =============================================================
``<module>.embedding_bags.<table>.weight``  a table, in chunks; ``<module>.embeddings.<table>.weight`` is
                                            another name of the same bytes
``state.<table's name>.<table>.momentum1``  first fused state; the others by name, as in
                                            ``dmp.fused_optimizer.state_dict()``; also under both names
``<parameter>``                             the dense model, buffers included
``state.<parameter>.<state>``               dense optimizers, as in a ``KeyedOptimizer``
==========================================  =============================================================

TorchRec stores a row-wise state as one vector, the column shards' values one after the other. It can be loaded if a
table is split into as many columns as in the marker.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save

from torchrec_stream_ckpt.extras.interchange.dense_state import DenseTensors, failure_of
from torchrec_stream_ckpt.extras.interchange.names import TorchRecName
from torchrec_stream_ckpt.inner import TableReader, TableWindow
from torchrec_stream_ckpt.util.types import TableSpec

Path_ = tuple[str, ...]
"""Path of an entry in the nested state dict."""


@dataclass(frozen=True, slots=True)
class Keys:
    """Keys of a job's state dicts: ``{"model": ..., "optim": ...}``; empty if all entries are in one."""

    model: str = ""
    optimizer: str = ""

    def of_model(self, name: str) -> Path_:
        return (self.model, name) if self.model else (name,)

    def of_state(self, parameter: str, state: str) -> Path_:
        return (*([self.optimizer] if self.optimizer else []), "state", parameter, state)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A part of one entry, and its position in a window of a table."""

    path: Path_
    dtype: torch.dtype
    size: tuple[int, ...]
    """Shape of the entry."""
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    reader: TableReader
    row0: int
    rows: int
    """Rows of the window."""
    shard: int
    """Number of the column shard of the table."""
    state: int | None
    """Number of the state; None for the weights."""

    @property
    def key(self) -> str:
        return ".".join(self.path)

    @property
    def item(self) -> WriteItem:
        chunk = ChunkStorageMetadata(torch.Size(self.offsets), torch.Size(self.sizes))
        data = TensorWriteData(chunk, TensorProperties(dtype=self.dtype), torch.Size(self.size))
        return WriteItem(MetadataIndex(self.key, self.offsets), WriteItemType.SHARD, tensor_data=data)

    def tensor(self, window: TableWindow) -> torch.Tensor:
        """Return a copy of the chunk's part of its window."""
        array = window.weights if self.state is None else window.states[self.state]
        if len(self.size) == 1:
            array = array[self.shard]
        else:
            col0, cols = self.offsets[1], self.sizes[1]
            array = array[:, col0 : col0 + cols]
        tensor = torch.from_numpy(array.copy())
        return tensor.view(torch.bfloat16) if self.dtype is torch.bfloat16 else tensor


def write_dcp(
    folder: Path,
    readers: Sequence[TableReader],
    dense: DenseTensors,
    *,
    states: bool,
    keys: Keys,
    progress: Callable[[int], None] = lambda _: None,
) -> list[str]:
    """Write tables, their states and the dense state. Holds one window of a table and the dense state.

    Args:
        folder: An empty folder.
        readers: The tables.
        dense: The dense state.
        states: Whether to write fused and dense optimizer states.
        keys: Keys of the state dicts.
        progress: Called with the bytes of each window.

    Returns:
        Names of the files.
    """
    planner = _Planner([chunk for reader in readers for chunk in _chunks(reader, keys, states=states)], progress)
    aliases = {
        ".".join(each.path): each.alias
        for reader in readers
        for each in table_entries(reader.spec, keys, states=states)
    }
    writer = _TableWriter(folder, aliases)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            save(nested(dense, keys, states=states), storage_writer=writer, planner=planner, no_dist=True)
    except CheckpointException as error:  # a BaseException, which no handler of errors would see
        said, causes = failure_of(error), [cause for cause, _ in error.failures.values()]
        raise next((cause for cause in causes if isinstance(cause, OSError)), RuntimeError(said)) from None
    return sorted(path.name for path in folder.iterdir())


def nested(dense: DenseTensors, keys: Keys, *, states: bool) -> dict[str, Any]:
    """Return the dense state as the state dicts of a job."""
    entries = {keys.of_model(name): value for name, value in dense.model.items()}
    for parameter, values in dense.optimizer.items() if states else ():
        entries |= {keys.of_state(parameter, state): value for state, value in values.items()}
    nested: dict[str, Any] = {}
    for path, value in entries.items():
        inner = nested
        for part in path[:-1]:
            inner = inner.setdefault(part, {})
        inner[path[-1]] = value
    return nested


@dataclass(frozen=True, slots=True)
class TableEntry:
    """Weights or one state of a table, under two names: a log does not record which of them the job has."""

    state: int | None
    """Number of the state; None for the weights."""
    dtype: torch.dtype
    per_row: bool
    """True for a state with one value a row."""
    path: Path_
    alias: Path_


def table_entries(spec: TableSpec, keys: Keys, *, states: bool) -> Iterator[TableEntry]:
    """Yield the entries of a table."""
    name = TorchRecName.of(spec)
    first, second = name.keys
    yield TableEntry(None, getattr(torch, spec.dtype), False, keys.of_model(first), keys.of_model(second))
    for position, state in enumerate(spec.states if states else ()):
        called = name.state_key(position, state.name)
        paths = keys.of_state(first, called), keys.of_state(second, called)
        yield TableEntry(position, getattr(torch, state.dtype), state.per_row, *paths)


def _chunks(reader: TableReader, keys: Keys, *, states: bool) -> Iterator[_Chunk]:
    """Yield the chunks, window by window. A table with row-wise state is cut at its column shards, to keep them
    distinguishable."""
    spec = reader.spec
    slices, entries = reader.slices or ((0, spec.dim),), list(table_entries(spec, keys, states=states))
    for row0, rows in reader.windows():
        for entry in entries:
            for shard, (col0, cols) in enumerate(slices):
                size = (spec.rows * len(slices),) if entry.per_row else (spec.rows, spec.dim)
                offsets = (shard * spec.rows + row0,) if entry.per_row else (row0, col0)
                sizes = (rows,) if entry.per_row else (rows, cols)
                yield _Chunk(entry.path, entry.dtype, size, offsets, sizes, reader, row0, rows, shard, entry.state)


class _Planner(DefaultSavePlanner):
    """DCP's planner, with chunks whose tensors are made when the writer asks for them."""

    def __init__(self, chunks: Sequence[_Chunk], progress: Callable[[int], None]) -> None:
        super().__init__()
        self._chunks = {(chunk.key, chunk.offsets): chunk for chunk in chunks}
        self._progress = progress
        self._window: tuple[TableReader, TableWindow] | None = None

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        items = [*plan.items, *(chunk.item for chunk in self._chunks.values())]
        paths = {chunk.key: chunk.path for chunk in self._chunks.values()}
        self.plan = replace(plan, items=items, planner_data={**plan.planner_data, **paths})
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        offset = write_item.index.offset
        chunk = self._chunks.get((write_item.index.fqn, tuple(offset))) if offset is not None else None
        return super().resolve_data(write_item) if chunk is None else chunk.tensor(self._read(chunk))

    def _read(self, chunk: _Chunk) -> TableWindow:
        """Read the chunk's window. The writer takes the items in order, so all chunks of a window follow each other."""
        if self._window is None or self._window[0] is not chunk.reader or self._window[1].row0 != chunk.row0:
            self._window = None
            self._window = (chunk.reader, chunk.reader.read(chunk.row0, chunk.rows))
            self._progress(chunk.rows * chunk.reader.row_bytes)
        return self._window[1]


class _TableWriter(FileSystemWriter):
    """DCP's writer, in the order of the plan, and with second names for some entries."""

    def __init__(self, folder: Path, aliases: Mapping[str, Path_]) -> None:
        # Copying ahead would sort the items by size: each window would be read once for each of its items.
        super().__init__(folder, single_file_per_rank=True, thread_count=1, per_thread_copy_ahead=0)
        self._aliases = aliases

    def finish(self, metadata: Any, results: Any) -> None:
        for key, path in self._aliases.items():
            alias = ".".join(path)
            metadata.state_dict_metadata[alias] = metadata.state_dict_metadata[key]
            metadata.planner_data[alias] = path
        same = [
            replace(result, index=replace(result.index, fqn=".".join(self._aliases[result.index.fqn])))
            for written in results
            for result in written
            if result.index.fqn in self._aliases
        ]
        super().finish(metadata, [*results, same])
