"""Read the dense state of a marker by DCP's own reader. Each file is compared with its digest before it is opened."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from torchrec_stream_ckpt.errors import CorruptionError, MissingObjectError
from torchrec_stream_ckpt.extras.interchange.dense_state import (
    OF_RANK_0,
    DenseTensors,
    entries_for_others,
    put_together,
    read_entries,
)
from torchrec_stream_ckpt.format.control import Commit
from torchrec_stream_ckpt.format.dense import check_names
from torchrec_stream_ckpt.inner import Job
from torchrec_stream_ckpt.util.layout import dense_file_name


class ComparedReader(FileSystemReader):
    """DCP's reader of the dense files of one marker. Holds one file at a time.

    Args:
        job: The job whose store has the files.
        commit: The marker.
    """

    def __init__(self, job: Job, commit: Commit) -> None:
        self.compared = _ComparedFiles(job, commit)
        super().__init__(self.compared.place)
        self.fs = self.compared

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read DCP's metadata of the entries, a pickle that the digest in COMMIT vouches for."""
        metadata = super().read_metadata(*args, **kwargs)
        self.set_up_storage_reader(metadata, is_coordinator=False)
        return metadata

    def outline(self, metadata: Metadata) -> tuple[DenseTensors, dict[int, str]]:
        """Return the dense state with meta tensors for entries that are not read, and their entry names by ``id()``.

        Buffers, and values of optimizers other than tensors, are read: they are in two entries of rank 0.

        Raises:
            UnsupportedError: the marker has id maps of managed collision.
            CorruptionError: a file is missing or altered, or COMMIT does not vouch for it.
            StoreUnavailableError: the store does not answer.
        """
        meta: dict[str, Any] = {}
        names = entries_for_others(metadata)
        for name in names:
            saved = metadata.state_dict_metadata[name]
            if isinstance(saved, TensorStorageMetadata) and name not in OF_RANK_0:
                meta[name] = torch.empty(saved.size, dtype=saved.properties.dtype, device="meta")
        values = meta | read_entries(self, metadata, [name for name in names if name not in meta])
        return put_together({name: values[name] for name in names}), {id(value): name for name, value in meta.items()}


class _ComparedFiles(FileSystem):
    """The dense files of one marker."""

    def __init__(self, job: Job, commit: Commit) -> None:
        self.place = job.dense.place(commit)
        self._dense, self._objects, self._commit = job.dense, job.objects, commit
        self._files = {file.name: file for file in job.dense.files(commit)}
        check_names(commit, tuple(self._files.values()), self.place)
        self._last: tuple[str, io.BytesIO] | None = None

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        """Yield the bytes of a file, compared with its digest.

        Raises:
            CorruptionError: it is missing or altered, or COMMIT does not vouch for it.
            StoreUnavailableError: the store does not answer.
        """
        name = Path(path).name
        if self._last is None or self._last[0] != name:
            self._last = None
            if name not in self._files:
                raise CorruptionError("COMMIT does not list this file", path=f"{self.place}/{name}")
            self._last = name, io.BytesIO(b"".join(self._dense.pieces(self._commit, self._files[name])))
        self._last[1].seek(0)
        yield self._last[1]

    def check_sizes(self) -> None:
        """Check that all files exist and have the length that COMMIT records; raises as :meth:`create_stream`."""
        for name, file in self._files.items():
            size, where = self._objects.size(dense_file_name(self._commit.job, self._commit.id, name)), self.place
            if size is None:
                raise MissingObjectError("dense state is missing", path=f"{where}/{name}")
            if size != file.num_bytes:
                raise CorruptionError("dense state was altered since it was committed", path=f"{where}/{name}")
