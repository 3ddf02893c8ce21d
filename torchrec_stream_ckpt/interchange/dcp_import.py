"""A checkpoint of torch's DCP, as a TorchRec job has saved it, as the first marker of a new log.

The tables become rows of generation 1, with their fused optimizer state. The dense model and dense optimizers go into
the marker's dense directory. What such a checkpoint does not hold, a restore leaves as the job has made it: random
state, loaders and schedules, param groups, learning rates, and what the kernels count.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_saver import save

from torchrec_stream_ckpt.commit.generation import claim_generation
from torchrec_stream_ckpt.config import StreamConfig
from torchrec_stream_ckpt.control.partition import Control
from torchrec_stream_ckpt.errors import ConfigError, CorruptionError
from torchrec_stream_ckpt.format.control import Claim, Commit
from torchrec_stream_ckpt.format.dense import digest_files
from torchrec_stream_ckpt.format.dense_files import DenseFile
from torchrec_stream_ckpt.format.rank_shards import RankShards
from torchrec_stream_ckpt.format.rows import Array
from torchrec_stream_ckpt.interchange.dcp_contents import (
    Contents,
    DcpSource,
    SavedTable,
    read_contents,
    tensor_entry,
)
from torchrec_stream_ckpt.interchange.dense_state import load_here, read_entries
from torchrec_stream_ckpt.interchange.writer import MARKER, Batch, write_stream
from torchrec_stream_ckpt.layout import dense_name
from torchrec_stream_ckpt.log.api import Log
from torchrec_stream_ckpt.store.api import Objects
from torchrec_stream_ckpt.store.dense import DenseStore, name_files
from torchrec_stream_ckpt.types import MarkerId, TableShard

LOST = (
    "random state",
    "loaders, schedules and other stateful objects",
    "param groups and learning rates",
    "what the fused kernels count (iterations)",
)
"""What a checkpoint of DCP does not hold, and so a restore does not bring back."""

Part = tuple[str, tuple[int, ...], tuple[int, ...]]
"""An entry, offsets in it, sizes."""


@dataclass(frozen=True, slots=True)
class Imported:
    """What was written."""

    marker: str
    step: int
    uri: str
    tables: tuple[str, ...]
    rows: int
    num_bytes: int
    """Bytes of rows in the log."""
    dense: int
    """Entries of the dense model."""
    dense_states: int
    """Entries of dense optimizers."""
    not_taken: tuple[str, ...]
    """Entries of the checkpoint that nothing here takes."""
    lost: tuple[str, ...] = LOST


def import_dcp(
    folder: Path,
    log: Log,
    control: Control,
    dense: DenseStore,
    objects: Objects,
    config: StreamConfig,
    source: DcpSource,
    progress: Callable[[int], None] = lambda _: None,
) -> Imported:
    """Write a checkpoint as marker 1:1 of a log that is empty. Holds one saved chunk, and the dense model.

    The checkpoint's metadata is a pickle: opening it runs what is in it.

    Args:
        folder: The checkpoint.
        log: Where to.
        control: Its control partition.
        dense: Where the dense state goes.
        objects: The store in which that is.
        config: The URI and store of both, as the job will have them.
        source: What the checkpoint does not say.
        progress: Called with the bytes of each chunk.

    Raises:
        ConfigError: the log is not empty, or ``source`` does not fit the checkpoint.
        UnsupportedError: the checkpoint holds what cannot be brought over.
        CorruptionError: it cannot be read.
        LogUnavailableError, StoreUnavailableError: one of them does not take it.
    """
    reader = FileSystemReader(folder)
    metadata = _read_metadata(reader, folder)
    contents = read_contents(metadata, source)
    if control.refresh().claims:
        raise ConfigError(
            "this log is not empty: an import begins a lineage",
            hint="name another folder or topic; of an import that was killed, delete the log and begin again",
            uri=config.uris[-1],
        )
    schema = contents.schema
    shards = [
        TableShard(index, 0, table.spec.rows, col0, cols)
        for index, table in enumerate(contents.tables)
        for col0, cols in table.slices
    ]
    layout, swept = RankShards.of([shards]), tuple(range(len(schema.tables)))
    claim = claim_generation(log, control, dense, objects, config, schema, 1, None, swept, layout=layout)
    batches = _batches(reader, metadata, contents.tables, progress)
    end = write_stream(log, claim, shards, batches, source.step, config.commit_timeout_s)
    files = _write_dense(reader, metadata, contents, dense, claim)
    marker = MarkerId(claim.generation, MARKER)
    named, list_ = name_files(dense, claim.job, marker, files)
    commit = Commit(
        job=claim.job,
        generation=claim.generation,
        nonce=claim.nonce,
        marker=MARKER,
        step=source.step,
        ranks=(end,),
        dense=dense_name(claim.job, marker),
        dense_files=named,
        dense_list=list_,
        time_s=time.time(),
        store=config.store_url if config.store else "",
    )
    control.commit(commit, config.commit_timeout_s, Event())
    dense.settle(claim.job, marker)
    names = tuple(table.spec.name for table in contents.tables)
    rows = sum(table.spec.rows for table in contents.tables)
    counts = (len(contents.dense), len(contents.dense_states))
    return Imported(str(marker), source.step, config.uris[-1], names, rows, end.num_bytes, *counts, contents.rest)


def _read_metadata(reader: FileSystemReader, folder: Path) -> Metadata:
    try:
        return reader.read_metadata()
    except FileNotFoundError:
        raise ConfigError("there is no checkpoint of DCP here: no .metadata", path=folder) from None
    except Exception as error:  # whatever reading raises if it is not a pickle
        raise CorruptionError(f"the checkpoint's metadata cannot be read: {error}", path=folder) from None


def _batches(
    reader: FileSystemReader, metadata: Metadata, tables: tuple[SavedTable, ...], progress: Callable[[int], None]
) -> Iterator[Batch]:
    """The rows of each saved chunk, with their states."""
    for index, table in enumerate(tables):
        rows = table.spec.rows
        for chunk in tensor_entry(metadata, table.weight).chunks:
            if 0 in chunk.sizes:
                continue
            (row0, col0), (count, cols) = chunk.offsets, chunk.sizes
            place = table.slices.index((col0, cols))
            wanted: list[Part] = [(table.weight, (row0, col0), (count, cols))]
            for state, key in zip(table.spec.states, table.states, strict=True):
                if state.per_row:
                    wanted.append((key, (place * rows + row0,), (count,)))
                else:
                    wanted.append((key, (row0, col0), (count, cols)))
            weights, *states = _read_parts(reader, metadata, wanted)
            yield Batch(TableShard(index, 0, rows, col0, cols), row0, weights, tuple(states))
            progress(weights.nbytes + sum(state.nbytes for state in states))


def _read_parts(reader: FileSystemReader, metadata: Metadata, parts: Sequence[Part]) -> list[Array]:
    planner = _PartPlanner(metadata, parts)
    load_here({}, reader, planner)
    return [_array(planner.tensors[name, offsets]) for name, offsets, _ in parts]


def _array(tensor: torch.Tensor) -> Array:
    bits = tensor.view(torch.uint16) if tensor.dtype is torch.bfloat16 else tensor
    return bits.numpy()


class _PartPlanner(DefaultLoadPlanner):
    """Loads given parts of entries into tensors of their size."""

    def __init__(self, metadata: Metadata, parts: Sequence[Part]) -> None:
        super().__init__()
        self._entries = {name: tensor_entry(metadata, name) for name, _, _ in parts}
        self._parts = parts
        self.tensors = {
            (name, offsets): torch.empty(sizes, dtype=self._entries[name].properties.dtype, device="cpu")
            for name, offsets, sizes in parts
        }

    def create_local_plan(self) -> LoadPlan:
        return LoadPlan(
            [
                item
                for name, offsets, sizes in self._parts
                for item in create_read_items_for_chunk_list(
                    name, self._entries[name], [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))]
                )
            ]
        )

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        assert index.offset is not None
        return self.tensors[index.fqn, tuple(index.offset)]


def _write_dense(
    reader: FileSystemReader, metadata: Metadata, contents: Contents, dense: DenseStore, claim: Claim
) -> tuple[DenseFile, ...]:
    """The marker's dense directory, as ``commit/dense.py`` reads one that was imported."""
    values = read_entries(reader, metadata, [*contents.dense.values(), *contents.dense_states.values()])
    optim: dict[str, dict[str, Any]] = {}
    for (parameter, kind), entry in contents.dense_states.items():
        optim.setdefault(parameter, {})[kind] = values[entry]
    note = json.dumps({"lost": LOST, "not_taken": contents.rest}).encode()
    state: dict[str, Any] = {
        "model": {name: values[entry] for name, entry in contents.dense.items()},
        "optim": {"imported": optim},
        "shared": {"imported": torch.frombuffer(bytearray(note), dtype=torch.uint8)},
    }
    marker = MarkerId(claim.generation, MARKER)
    folder = dense.writing(claim.job, marker)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        save(_without_empty(state), storage_writer=FileSystemWriter(folder), no_dist=True)
    files = digest_files(folder, [path.name for path in folder.iterdir()])
    dense.publish(claim.job, marker, files)
    return files


def _without_empty(state: dict[str, Any]) -> dict[str, Any]:
    """DCP would take an empty mapping for a value of its own."""
    pruned = {key: _without_empty(value) if isinstance(value, dict) else value for key, value in state.items()}
    return {key: value for key, value in pruned.items() if value != {} or not isinstance(value, dict)}
