"""The dense state of a marker without a model: parameters, buffers and dense optimizers in its files.

Also compares a marker's dense files with the proofs of its ranks, without a model.
"""

from __future__ import annotations

import hashlib
import io
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load

from torchrec_stream_ckpt.errors import CorruptionError, StreamCkptError, UnsupportedError
from torchrec_stream_ckpt.format.control import Commit
from torchrec_stream_ckpt.format.entry_digests import NESTED, DenseProof
from torchrec_stream_ckpt.format.proof import Proof
from torchrec_stream_ckpt.inner import Compared, DenseMarks, compare_replicated, entry_digests, read_saved

OF_RANK_0 = ("rank0.buffers", "rank0.optimizers")
"""Entries that may differ between ranks. Readers without a model get those of rank 0."""
_NUMPY: tuple[Any, ...] = (
    np.ndarray,
    np.dtype,
    *{type(np.dtype(code)) for code in "?bhilqBHILQefdFDSUV"},
    np.empty(0).__reduce__()[0],
    np.float64(0).__reduce__()[0],
)
"""Names in pickles of arrays and NumPy's numbers. None of them runs code of the pickle."""


@dataclass(frozen=True, slots=True)
class DenseTensors:
    """Whole tensors, and the nested and plain values that an optimizer keeps."""

    model: dict[str, Any]
    """Parameters, data-parallel tables and buffers of rank 0, by name."""
    optimizer: dict[str, dict[str, Any]]
    """Optimizer states, by parameter and state."""


def read_dense(folder: Path, *, without_maps: bool = False) -> DenseTensors:
    """Read a dense directory whose digests have been compared. Holds all of it in memory.

    Args:
        folder: The directory.
        without_maps: Leave out id maps of managed collision.

    Raises:
        UnsupportedError: it has such maps, and they are not left out.
    """
    reader = FileSystemReader(folder)
    metadata = reader.read_metadata()
    return put_together(read_entries(reader, metadata, entries_for_others(metadata, without_maps=without_maps)))


def entries_for_others(metadata: Metadata, *, without_maps: bool = False) -> list[str]:
    """Return the entries of a dense directory that are useful to a program without this project.

    Raises:
        UnsupportedError: it has id maps of managed collision, and they are not left out.
    """
    names = list(metadata.state_dict_metadata)
    maps = sorted(
        {name.removeprefix("collision.").rsplit(".", 2)[0] for name in names if name.startswith("collision.")}
    )
    if maps and not without_maps:
        raise UnsupportedError(
            f"the id maps of managed collision ({', '.join(maps)}) depend on the plan and fit no state dict",
            hint="restore the marker with StreamCheckpointer, or export its rows to safetensors or Parquet",
        )
    return [name for name in names if name.startswith(("model.", "optim.", f"{NESTED}.")) or name in OF_RANK_0]


def put_together(values: dict[str, Any]) -> DenseTensors:
    """Combine entries into the dense state. Those of :data:`OF_RANK_0` are read; the others may be meta tensors."""
    model = {name.removeprefix("model."): value for name, value in values.items() if name.startswith("model.")}
    if "rank0.buffers" in values:
        model |= _buffers(values["rank0.buffers"].numpy().tobytes())
    return DenseTensors(model, _optimizer_states(values))


def _buffers(data: bytes) -> dict[str, Any]:
    """Read buffers, and the extra state of modules: tensors, plain values and NumPy arrays. None of their code is run.

    Raises:
        UnsupportedError: extra state holds an object of another class.
    """
    allowed = {f"{each.__module__}.{each.__qualname__}" for each in _NUMPY}
    named = set(torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(data))) - allowed
    if named:
        raise UnsupportedError(
            f"the extra state of a module holds objects that run code when unpickled: {', '.join(sorted(named))}",
            hint="return only numbers, text, tensors or NumPy arrays in get_extra_state(); or use StreamCheckpointer",
            entry="rank0.buffers",
        )
    with torch.serialization.safe_globals(list(_NUMPY)):
        found: dict[str, Any] = torch.load(io.BytesIO(data), weights_only=True)
    return found


def _optimizer_states(values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return optimizer states, by parameter and state; those of rank 0 if ranks may differ."""
    if "rank0.optimizers" in values:
        saved = read_saved(values, "rank0.optimizers")
        return {
            name: state
            for optimizer in saved.values()
            for name, state in optimizer.state.items()
            if isinstance(state, dict)
        }
    optimizer: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        if name.startswith("optim."):
            parameter, _, state = name.split(".", 2)[2].rpartition(".")
            optimizer.setdefault(parameter, {})[state] = value
    return optimizer


def read_entries(reader: FileSystemReader, metadata: Metadata, names: list[str]) -> dict[str, Any]:
    """Read entries of a checkpoint as whole tensors on the CPU, or as plain values; raises as :func:`load_here`."""
    state = {name: _empty(metadata.state_dict_metadata[name]) for name in names}
    load_here(state, reader)
    return state


def load_here(state: dict[str, Any], reader: FileSystemReader, planner: LoadPlanner | None = None) -> None:
    """Run DCP's load in this process alone, in place.

    Raises:
        CorruptionError: a file is missing or cannot be read.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            load(state, storage_reader=reader, planner=planner, no_dist=True)
    except CheckpointException as error:  # a BaseException, which no handler of errors would see
        said = failure_of(error)
        raise CorruptionError(f"the checkpoint cannot be read: {said}", path=reader.checkpoint_id) from None


def failure_of(error: CheckpointException) -> str:
    """Describe a failure inside of DCP. Raises one of ours as it is."""
    causes = [cause for cause, _ in error.failures.values()]
    if ours := next((cause for cause in causes if isinstance(cause, StreamCkptError)), None):
        raise ours from None
    return "; ".join(f"{type(cause).__name__}: {cause}" for cause in causes)


def digest_entries(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each entry of a dense directory whose digests have been compared, by name. Holds one at a
    time."""
    reader = FileSystemReader(folder)
    metadata = reader.read_metadata()
    return {
        name: _digest(read_entries(reader, metadata, [name])[name]) for name in sorted(metadata.state_dict_metadata)
    }


def _digest(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return hashlib.sha256(repr(value).encode()).hexdigest()
    flat = value.detach().contiguous().reshape(-1).view(torch.uint8)
    shape = f"{value.dtype} {tuple(value.shape)}".encode()
    return hashlib.sha256(shape + flat.numpy().tobytes()).hexdigest()


def _empty(saved: Any) -> Any:
    if not isinstance(saved, TensorStorageMetadata):
        return None  # a plain value: DCP puts it in place of this
    return torch.empty(saved.size, dtype=saved.properties.dtype, device="cpu")


_READ_BYTES = 64 * 2**20
"""Most bytes of entries that are read at once, unless a single entry is larger."""


def compare_dense(folder: Path, commit: Commit, proof: Proof | None, proofs: Mapping[int, DenseProof]) -> Compared:
    """Read the dense state of a marker whose files were verified; holds a part of it at a time.

    Args:
        folder: Folder with the files.
        commit: The marker's COMMIT.
        proof: The proof of its rank 0 for replicated tables; None if the marker has no such proof.
        proofs: Proofs of entries, by rank.

    Raises:
        CorruptionError: a file cannot be read, or an entry differs from its value at the cut.
    """
    reader = FileSystemReader(folder)
    metadata = reader.read_metadata()
    compared = Compared()
    for each in proof.replicated if proof is not None else ():
        assert proof is not None
        alone = Proof(proof.position, proof.width, "", (each,))
        held = isinstance(metadata.state_dict_metadata.get(each.name), TensorStorageMetadata)
        tensors = read_entries(reader, metadata, [each.name]) if held else {}
        compared += compare_replicated(tensors, alone, commit.id)
    marks = DenseMarks(proofs, len(commit.ranks))
    if compared.unproved is None:  # which reports more of the same tensors
        _compare_entries(reader, metadata, marks, commit)
    return compared


def _compare_entries(reader: FileSystemReader, metadata: Metadata, marks: DenseMarks, commit: Commit) -> None:
    different = [
        each
        for names in _groups(metadata, marks)
        for each in marks.differing(entry_digests(read_entries(reader, metadata, list(names))))
    ]
    if different:
        raise marks.damaged(different, commit.id)


def _groups(metadata: Metadata, marks: DenseMarks) -> Iterator[Sequence[str]]:
    """Yield groups of names of proved entries: each load of DCP's has a fixed cost."""
    group: list[str] = []
    size = 0
    for name, saved in sorted(metadata.state_dict_metadata.items()):
        if not (isinstance(saved, TensorStorageMetadata) and marks.proves(name)):
            continue
        num_bytes = saved.size.numel() * saved.properties.dtype.itemsize
        if group and size + num_bytes > _READ_BYTES:
            yield group
            group, size = [], 0
        group.append(name)
        size += num_bytes
    if group:
        yield group
