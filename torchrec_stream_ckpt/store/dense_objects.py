"""Dense state of markers in an object store, copied to and from a scratch folder of this process."""

from __future__ import annotations

import hashlib
import logging
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

from torchrec_stream_ckpt.errors import (
    ConfigError,
    CorruptionError,
    MissingObjectError,
    StoreUnavailableError,
    StreamCkptError,
)
from torchrec_stream_ckpt.format.control import Commit
from torchrec_stream_ckpt.format.dense import ALTERED_HINT, MISSING_HINT, check_names
from torchrec_stream_ckpt.format.dense_files import LIST_NAME, DenseFile, agree, altered, parse_list, whole
from torchrec_stream_ckpt.store.api import Objects
from torchrec_stream_ckpt.store.identity import check_store, prove_writable
from torchrec_stream_ckpt.util.failpoints import failpoint
from torchrec_stream_ckpt.util.layout import dense_file_name, dense_name
from torchrec_stream_ckpt.util.types import MarkerId

log = logging.getLogger(__name__)

_RANGE_BYTES = 16 * 2**20


def files_in(objects: Objects, commit: Commit) -> tuple[DenseFile, ...]:
    """Return all dense files of a marker whose dense state is in a store; raises as ``DenseStore.files``."""
    said = commit.dense_list
    if said is None:
        return commit.dense_files
    name = dense_file_name(commit.job, commit.id, LIST_NAME)
    size = objects.size(name)
    if size is None:
        raise MissingObjectError("the list of dense files is missing", store=objects.url, name=name)
    data = objects.read(name) if size == said.list_bytes else b""
    return parse_list(bytes(data), said, f"{objects.url}/{name}")


def read_dense_file(objects: Objects, name: str, file: DenseFile, piece_bytes: int = _RANGE_BYTES) -> Iterator[int]:
    """Read a dense file and compare its digest. Yields the length of each piece in bytes. Raises as :func:`_pieces`."""
    return map(len, _pieces(objects, name, file, piece_bytes))


def _pieces(objects: Objects, name: str, file: DenseFile, piece_bytes: int = _RANGE_BYTES) -> Iterator[memoryview]:
    """Read a dense file in pieces, and compare its digest after the last one.

    Raises:
        CorruptionError: it is missing or was altered.
        StoreUnavailableError: the store does not answer.
    """
    size = objects.size(name)
    if size is None:
        raise MissingObjectError("dense state is missing", hint=MISSING_HINT, store=objects.url, name=name)
    if size != file.num_bytes:  # the file is altered and need not be read
        raise CorruptionError(altered("the file", size, file), store=objects.url, name=name)
    digest = hashlib.sha256()
    for begin in range(0, size, piece_bytes):
        data = objects.read(name, begin, min(size, begin + piece_bytes))
        digest.update(data)
        yield data
    if digest.hexdigest() != file.sha256:
        raise CorruptionError(
            "dense state was altered since it was committed", hint=ALTERED_HINT, store=objects.url, name=name
        )


class DenseObjects:
    """Dense state in an object store. Every rank uploads its own files, and downloads those that it reads.

    The scratch folder is made in ``TMPDIR``. It is deleted by :meth:`close` and at exit. A process that is killed
    leaves it.
    """

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self.url = objects.url
        self._scratch: Path | None = None
        self._fetched: dict[MarkerId, Path] = {}

    @property
    def folder(self) -> None:
        return None

    def preflight(self) -> None:
        check_store(self._objects)

    def prepare(self, job: bytes, *, held: bool = False) -> None:
        prove_writable(self._objects)

    def is_seen(self, job: bytes) -> bool:
        self._make_scratch()  # made here, where a rank that cannot make it still stops all ranks
        return check_store(self._objects)

    def writing(self, job: bytes, marker: MarkerId) -> Path:
        assert self._scratch is not None
        return self._scratch / f"written-{marker.generation}-{marker.marker}"

    def publish(self, job: bytes, marker: MarkerId, files: Sequence[DenseFile]) -> None:
        failpoint("dense.put")
        for file in files:
            data = (self.writing(job, marker) / file.name).read_bytes()
            self._objects.put(dense_file_name(job, marker, file.name), [data])
        failpoint("dense.stored")

    def put_list(self, job: bytes, marker: MarkerId, data: bytes) -> None:
        self._objects.put(dense_file_name(job, marker, LIST_NAME), [data])

    def discard(self, job: bytes, marker: MarkerId) -> None:
        try:
            for entry in list(self._objects.list(f"{dense_name(job, marker)}/")):
                self._objects.delete(entry.name)
        except StreamCkptError as error:
            log.warning("cannot delete the dense state of marker %s, which was given up: %s", marker, error.headline)

    def settle(self, job: bytes, marker: MarkerId) -> None:
        shutil.rmtree(self.writing(job, marker), ignore_errors=True)

    def files(self, commit: Commit) -> tuple[DenseFile, ...]:
        return files_in(self._objects, commit)

    def verify(self, commit: Commit) -> None:
        self.local(commit)

    def local(self, commit: Commit) -> Path:
        if commit.id not in self._fetched:
            folder = self._make_scratch() / f"read-{commit.generation}-{commit.marker}"
            try:
                self._fetch(commit, folder)
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
            self._fetched[commit.id] = folder
        return self._fetched[commit.id]

    def why_not(self, commit: Commit) -> str:
        prefix = f"{dense_name(commit.job, commit.id)}/"
        try:
            sizes = {entry.name.removeprefix(prefix): entry.num_bytes for entry in self._objects.list(prefix)}
            if commit.dense_list is not None and agree(commit.dense_list, sizes):
                return ""
            files = self.files(commit)
        except StreamCkptError as error:
            return error.headline
        for file in files:
            if file.name not in sizes:
                return f"dense state is missing: {self.place(commit)}/{file.name}"
            if sizes[file.name] != file.num_bytes:
                return altered(f"{self.place(commit)}/{file.name}", sizes[file.name], file)
        return ""

    def place(self, commit: Commit) -> str:
        return f"{self.url}/{dense_name(commit.job, commit.id)}"

    def release(self) -> None:
        for folder in self._fetched.values():
            shutil.rmtree(folder, ignore_errors=True)
        self._fetched.clear()

    def close(self) -> None:
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
        self._objects.close()

    def _make_scratch(self) -> Path:
        if self._scratch is None:
            try:
                self._scratch = Path(tempfile.mkdtemp(prefix="stream-ckpt-dense-"))
            except OSError as error:
                raise ConfigError(
                    f"cannot create a scratch folder for the dense state: {error.strerror}",
                    hint="set TMPDIR to a folder with free space",
                    path=tempfile.gettempdir(),
                ) from None
            weakref.finalize(self, shutil.rmtree, self._scratch, ignore_errors=True)
        return self._scratch

    def _fetch(self, commit: Commit, folder: Path) -> None:
        files = self.files(commit)
        check_names(commit, files, self.place(commit))
        try:
            folder.mkdir(mode=0o700)
            for file in whole(commit.dense_list, files):
                self._fetch_file(commit, file, folder / file.name)
        except OSError as error:
            raise StoreUnavailableError(
                f"cannot write a local copy of the dense state: {error.strerror}",
                hint="set TMPDIR to a folder with free space",
                path=folder,
            ) from None

    def _fetch_file(self, commit: Commit, file: DenseFile, path: Path) -> None:
        name = dense_file_name(commit.job, commit.id, file.name)
        with path.open("xb") as copy:
            for data in _pieces(self._objects, name, file):
                copy.write(data)
