"""Write and read the files of a marker's dense state by torch's own DCP. Blobs are uint8 tensors in them."""

from __future__ import annotations

import contextlib
import io
import json
import os
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from torchrec_stream_ckpt.dense import exact_pickle
from torchrec_stream_ckpt.dense.hashed_file import HashedFile
from torchrec_stream_ckpt.dense.plain_tensors import read_plain
from torchrec_stream_ckpt.errors import CorruptionError, MarkerFailedError, SchemaMismatchError
from torchrec_stream_ckpt.format.dense_files import DenseFile
from torchrec_stream_ckpt.util.durable import fsync_dir
from torchrec_stream_ckpt.util.failpoints import failpoint
from torchrec_stream_ckpt.util.types import MarkerId

Entries = Mapping[str, Any]
"""Name -> DCP's metadata."""


class _Files(FileSystem):
    """DCP's file system, for writing. A full disk is an OSError, whichever write met it."""

    def __init__(self, *, direct: bool) -> None:
        super().__init__()
        self._direct = direct
        self.written: dict[str, DenseFile] = {}
        """The files, by name."""

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        with HashedFile(Path(path), direct=self._direct) as file:
            try:
                yield file
            except RuntimeError:
                if file.failure is None:
                    raise
                raise file.failure from None
            finally:
                file.close()
                # Its traceback holds torch's archive, which holds the file, and the tensors. No collector sees that.
                file.failure = None
        self.written[Path(path).name] = file.digest

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        name = Path(new_path).name
        self.written[name] = replace(self.written.pop(Path(path).name), name=name)


class _Writer(FileSystemWriter):
    """DCP's writer, with failpoints between its parts."""

    def __init__(self, path: Path, *, direct: bool) -> None:
        super().__init__(path)
        self.fs: _Files = _Files(direct=direct)

    def write_data(self, plan: Any, planner: Any) -> Any:
        failpoint("dense.part")
        written = super().write_data(plan, planner)
        failpoint("dense.part_written")
        return written

    def finish(self, metadata: Any, results: Any) -> None:
        failpoint("dense.metadata")
        super().finish(metadata, results)
        folder = Path(self.path)
        fsync_dir(folder)
        fsync_dir(folder.parent)


class DenseReader(FileSystemReader):
    """DCP's reader, which parses its metadata once and not again for each load."""

    _metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._metadata is None:
            self._metadata = super().read_metadata(*args, **kwargs)
        return self._metadata


@contextlib.contextmanager
def _as_error() -> Iterator[None]:
    """Convert DCP's failure, a BaseException that ``except Exception`` misses and whose text is tracebacks."""
    try:
        yield
    except CheckpointException as error:
        said = [f"rank {rank}: {type(failure).__name__}: {failure}" for rank, (failure, _) in error.failures.items()]
        raise RuntimeError("; ".join(said)) from error


@contextlib.contextmanager
def _without_ranks() -> Iterator[None]:
    """Omit DCP's warning that it makes no collective."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def save_together(
    state: dict[str, Any], path: Path, group: dist.ProcessGroup | None, *, direct: bool = False
) -> tuple[DenseFile, ...]:
    """(all ranks) Write each rank's part. Returns the files that this rank wrote, by name, when they are durable.

    Args:
        state: This rank's part.
        path: Directory of the files.
        group: The ranks. None if this process alone has all of the state.
        direct: True to use direct writes.
    """
    writer = _Writer(path, direct=direct)
    with _as_error(), _without_ranks() if group is None else contextlib.nullcontext():
        save(state, storage_writer=writer, process_group=group, no_dist=group is None)
    return tuple(file for _, file in sorted(writer.fs.written.items()))


def come_together(marker: MarkerId, group: dist.ProcessGroup) -> None:
    """(all ranks) Wait until every rank is about to save this marker.

    DCP's collectives carry no marker. A rank that still saves a marker which the others gave up would take part in
    their collectives for the next one, make it fail, and stay one marker late forever.

    Raises:
        MarkerFailedError: The other ranks are at a later marker. They wait for this rank's next save.
    """
    mine = torch.tensor(marker)
    said = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    while True:
        dist.all_gather(said, mine, group=group)
        markers = [MarkerId(*each.tolist()) for each in said]
        if marker < max(markers):
            raise MarkerFailedError(
                f"this rank is late: other ranks are already saving marker {max(markers)}", marker=marker
            )
        if marker == min(markers):
            return


def load_here(state: dict[str, Any], reader: DenseReader) -> dict[str, Any]:
    """Fill the tensors of ``state`` in place, by entry, and its plain values. Returns ``state``.

    Every rank reads independently, so a rank that fails leaves none waiting.
    """
    plain = read_plain(state, reader.read_metadata(), Path(reader.path))
    rest = {name: value for name, value in state.items() if name not in plain}
    if rest:
        with _without_ranks(), _as_error():
            load(rest, storage_reader=reader, no_dist=True)
    state |= rest
    return state


def flat(prefix: str, value: Any) -> dict[str, Any]:
    """Return the leaves of nested mappings, by their dotted names."""
    if not isinstance(value, dict):
        return {prefix: value}
    return {
        name: leaf
        for key, child in value.items()
        for name, leaf in flat(f"{prefix}.{key}" if prefix else str(key), child).items()
    }


def blob(value: object) -> torch.Tensor:
    """Encode any object as one uint8 tensor. Do not write to it: equal constants share one."""
    if type(value) is int:
        return _constant(value)
    if type(value) in (dict, list) and not value:
        return _empty(type(value).__name__)
    return _encoded(value)


@lru_cache(maxsize=16)
def _constant(value: int) -> torch.Tensor:
    return _encoded(value)


@cache
def _empty(kind: str) -> torch.Tensor:
    return _encoded({} if kind == "dict" else [])


def _encoded(value: object) -> torch.Tensor:
    buffer = io.BytesIO()
    torch.save(value, buffer, pickle_module=exact_pickle)
    return torch.frombuffer(bytearray(buffer.getbuffer()), dtype=torch.uint8)


class _Nowhere(io.BytesIO):
    """A stream that discards all bytes."""

    def write(self, data: Any) -> int:
        return memoryview(data).nbytes


def try_blob(value: object) -> None:
    """Raise the errors that :func:`blob` would raise, without allocating memory of its size."""
    torch.save(value, _Nowhere(), pickle_module=exact_pickle)


def unblob(saved: torch.Tensor, name: str) -> Any:
    """Decode a tensor of :func:`blob`. It is a pickle, whose digest in COMMIT was checked.

    Raises:
        CorruptionError: It was changed before its file was digested, or needs code that is missing here. Names the
            entry.
    """
    try:
        return torch.load(io.BytesIO(saved.numpy().tobytes()), map_location="cpu", weights_only=False)
    except Exception as error:  # whatever pickles and archives raise
        raise CorruptionError(
            f"'{name}' of the dense state cannot be decoded: {type(error).__name__}: {error}",
            hint="import the modules that define its objects, or restore an older marker",
            entry=name,
        ) from error


def json_blob(value: object) -> torch.Tensor:
    """Encode JSON as one uint8 tensor."""
    return torch.frombuffer(bytearray(json.dumps(value, separators=(",", ":")).encode()), dtype=torch.uint8)


def read_json(saved: torch.Tensor, name: str) -> Any:
    """Decode a tensor of :func:`json_blob`.

    Raises:
        CorruptionError: It was changed before its file was digested. Names the entry.
    """
    try:
        return json.loads(saved.numpy().tobytes())
    except (ValueError, RecursionError) as error:
        raise CorruptionError(
            f"'{name}' of the dense state cannot be decoded: {error}", hint="restore an older marker", entry=name
        ) from error


def no_blob(name: str) -> SchemaMismatchError:
    """Return the error for a blob that the marker lacks."""
    return SchemaMismatchError(
        f"'{name}' is missing from the marker", hint="pass the same stateful objects as the job that wrote it"
    )


def empty_blob(entries: Entries, name: str) -> torch.Tensor:
    """Return an empty tensor for a blob of the marker.

    Raises:
        SchemaMismatchError: The marker has no blob of this name.
    """
    entry = entries.get(name)
    if not isinstance(entry, TensorStorageMetadata):
        raise no_blob(name)
    return torch.empty(entry.size, dtype=torch.uint8, device="cpu")
