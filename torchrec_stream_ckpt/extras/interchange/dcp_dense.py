"""Read the dense state of a marker, one file at a time. Each file is compared with its digest before it is opened."""

from __future__ import annotations

import hashlib
import io
import tempfile
from collections.abc import Sequence
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from torchrec_stream_ckpt.errors import CorruptionError, MissingObjectError
from torchrec_stream_ckpt.extras.interchange.dense_state import (
    OF_RANK_0,
    DenseTensors,
    entries_for_others,
    put_together,
)
from torchrec_stream_ckpt.format.control import Commit
from torchrec_stream_ckpt.format.dense import check_names
from torchrec_stream_ckpt.format.dense_files import DenseFile
from torchrec_stream_ckpt.inner import Job
from torchrec_stream_ckpt.util.layout import dense_file_name

METADATA = ".metadata"
"""DCP's metadata file, a pickle."""


class DenseFiles:
    """The dense files of one marker. A file is read when one of its entries is requested; one file is held at a time.

    Args:
        job: The job whose store has the files.
        commit: The marker.
    """

    def __init__(self, job: Job, commit: Commit) -> None:
        self._objects = job.objects
        self._commit = commit
        self._place = job.dense.place(commit)
        self._files = {file.name: file for file in job.dense.files(commit)}
        check_names(commit, tuple(self._files.values()), self._place)
        self._last: tuple[str, memoryview] | None = None

    def check_sizes(self) -> None:
        """Check that all files exist and have the length that COMMIT records.

        Raises:
            MissingObjectError: a file is missing.
            CorruptionError: a file has another length.
            StoreUnavailableError: the store does not answer.
        """
        for file in self._files.values():
            self._check_size(file)

    def _check_size(self, file: DenseFile) -> None:
        size = self._objects.size(dense_file_name(self._commit.job, self._commit.id, file.name))
        if size is None:
            raise MissingObjectError("dense state is missing", path=f"{self._place}/{file.name}")
        if size != file.num_bytes:
            raise self._altered(file.name)

    def _altered(self, name: str) -> CorruptionError:
        return CorruptionError("dense state was altered since it was committed", path=f"{self._place}/{name}")

    def data(self, name: str) -> memoryview:
        """Return all bytes of a file, compared with its digest.

        Raises:
            CorruptionError: it is missing or altered, or COMMIT does not vouch for it.
            StoreUnavailableError: the store does not answer.
        """
        if self._last is None or self._last[0] != name:
            self._last = None
            file = self._files.get(name)
            if file is None:
                raise CorruptionError("COMMIT does not list this file", path=f"{self._place}/{name}")
            self._check_size(file)
            data = self._objects.read(dense_file_name(self._commit.job, self._commit.id, name))
            if hashlib.sha256(data).hexdigest() != file.sha256:
                raise self._altered(name)
            self._last = (name, data)
        return self._last[1]

    @cached_property
    def metadata(self) -> Metadata:
        """DCP's metadata of the entries, a pickle. The digest in COMMIT vouches for it. Raises as :meth:`data`."""
        data = self.data(METADATA)
        with tempfile.TemporaryDirectory(prefix="stream-ckpt-dense-") as folder:  # opens the compared bytes
            (Path(folder) / METADATA).write_bytes(data)
            return FileSystemReader(folder).read_metadata()

    def sorted(self, indices: Sequence[MetadataIndex]) -> list[MetadataIndex]:
        """Sort parts of entries so that each file is read once."""
        return [index for _, group in groupby(sorted(indices, key=self._file_of), self._file_of) for index in group]

    def _file_of(self, index: MetadataIndex) -> str:
        return str(self.metadata.storage_data[index].relative_path)

    def read(self, index: MetadataIndex) -> Any:
        """Return one part of an entry: a tensor, or a plain value. Raises as :meth:`data`."""
        where = self.metadata.storage_data[index]
        data = self.data(where.relative_path)[where.offset : where.offset + where.length]
        plain = not isinstance(self.metadata.state_dict_metadata[index.fqn], TensorStorageMetadata)
        # Only our own trainer or import has written it, and the digest is compared, as in ``restore``.
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=not plain)

    def outline(self) -> tuple[DenseTensors, dict[int, str]]:
        """Return the dense state with meta tensors for entries that are not read, and their entry names by ``id()``.

        Buffers, and values of optimizers other than tensors, are read: they are in two entries of rank 0.

        Raises:
            UnsupportedError: the marker has id maps of managed collision.
            CorruptionError, StoreUnavailableError: as :meth:`data`.
        """
        values: dict[str, Any] = {}
        entries: dict[int, str] = {}
        for name in entries_for_others(self.metadata):
            saved = self.metadata.state_dict_metadata[name]
            if isinstance(saved, TensorStorageMetadata) and name not in OF_RANK_0:
                values[name] = torch.empty(saved.size, dtype=saved.properties.dtype, device="meta")
                entries[id(values[name])] = name
            else:
                offset = saved.chunks[0].offsets if isinstance(saved, TensorStorageMetadata) else None
                values[name] = self.read(MetadataIndex(name, offset))
        return put_together(values), entries
