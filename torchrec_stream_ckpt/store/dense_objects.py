"""Dense state of markers in a store: in a folder it is used in place, from an object store it is copied."""

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
from torchrec_stream_ckpt.format.dense import ALTERED_HINT, MISSING_HINT, check_names, dense_path
from torchrec_stream_ckpt.format.dense_files import LIST_NAME, DenseFile, agree, altered, parse_list, whole
from torchrec_stream_ckpt.store.api import Objects
from torchrec_stream_ckpt.store.folder import FolderObjects
from torchrec_stream_ckpt.store.identity import check_store, prove_writable
from torchrec_stream_ckpt.util.durable import fsync_dir, make_dirs
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


def read_dense_file(objects: Objects, name: str, file: DenseFile, piece_bytes: int | None = None) -> Iterator[int]:
    """Read a dense file and compare its digest. Yields the length of each piece in bytes. Raises as :func:`_pieces`."""
    return map(len, _pieces(objects, name, file, piece_bytes))


def _pieces(
    objects: Objects, name: str, file: DenseFile, piece_bytes: int | None = None, **where: object
) -> Iterator[memoryview]:
    """Read a dense file in pieces, and compare its digest after the last one. ``where`` is its place for errors.

    Raises:
        CorruptionError: it is missing or was altered.
        StoreUnavailableError: the store does not answer.
    """
    size, where = objects.size(name), where or {"store": objects.url, "name": name}
    if size is None:
        raise MissingObjectError("dense state is missing", hint=MISSING_HINT, **where)
    if size != file.num_bytes:  # the file is altered and need not be read
        raise CorruptionError(altered("the file", size, file), hint=ALTERED_HINT, **where)
    digest, step = hashlib.sha256(), piece_bytes or _RANGE_BYTES
    for begin in range(0, size, step):
        data = objects.read(name, begin, min(size, begin + step))
        digest.update(data)
        yield data
    if digest.hexdigest() != file.sha256:
        raise CorruptionError("dense state was altered since it was committed", hint=ALTERED_HINT, **where)


class DenseStore:
    """Dense state of all markers of a store, as trainers and readers use it.

    In an object store, every rank uploads its own files, and downloads those that it reads. The
    scratch folder is made in ``TMPDIR``. It is deleted by :meth:`close` and at exit. A process that
    is killed leaves it.
    """

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self.url = objects.url
        self.folder: Path | None = None
        """The store's folder. None for an object store."""
        self._scratch: Path | None = None
        self._fetched: dict[MarkerId, Path] = {}

    def preflight(self) -> None:
        """(rank 0, at attach) Check that the store answers and accepts our login.

        Raises:
            StoreUnavailableError: it does not.
        """
        check_store(self._objects)

    def prepare(self, job: bytes, *, held: bool = False) -> None:
        """(rank 0) Make the store ready for a job that will write.

        Args:
            job: The job.
            held: True if a COMMIT of the job names this store. It was prepared before that marker's CLAIM, so the names
                of its folders are durable and are not synced again.

        Raises:
            ConfigError: the folder cannot be made.
            StoreUnavailableError: it cannot be written.
        """
        prove_writable(self._objects)

    def is_seen(self, job: bytes) -> bool:
        """(each rank) Return whether this rank sees the store that rank 0 has prepared."""
        self._make_scratch()  # made here, where a rank that cannot make it still stops all ranks
        return check_store(self._objects)

    def writing(self, job: bytes, marker: MarkerId) -> Path:
        """(each rank) Return the folder into which DCP is to write this marker. It may not exist yet."""
        assert self._scratch is not None
        return self._scratch / f"written-{marker.generation}-{marker.marker}"

    def publish(self, job: bytes, marker: MarkerId, files: Sequence[DenseFile]) -> None:
        """(each rank) Put the files that this rank has written for a marker into the store. Durable on return.

        Raises:
            StoreUnavailableError: the store did not accept them.
        """
        failpoint("dense.put")
        for file in files:
            data = (self.writing(job, marker) / file.name).read_bytes()
            self._objects.put(dense_file_name(job, marker, file.name), [data])
        failpoint("dense.stored")

    def put_list(self, job: bytes, marker: MarkerId, data: bytes) -> None:
        """(rank 0) Put the list of a marker's dense files next to them. Durable on return.

        Raises:
            StoreUnavailableError: the store did not accept it.
        """
        self._objects.put(dense_file_name(job, marker, LIST_NAME), [data])

    def discard(self, job: bytes, marker: MarkerId) -> None:
        """(rank 0) Delete the files of a marker that was given up, as far as possible."""
        try:
            for entry in list(self._objects.list(f"{dense_name(job, marker)}/")):
                self._objects.delete(entry.name)
        except StreamCkptError as error:
            log.warning("cannot delete the dense state of marker %s, which was given up: %s", marker, error.headline)

    def settle(self, job: bytes, marker: MarkerId) -> None:
        """(each rank) Delete files that were needed only for writing the marker, after it has been voted on."""
        shutil.rmtree(self.writing(job, marker), ignore_errors=True)

    def files(self, commit: Commit) -> tuple[DenseFile, ...]:
        """Return all dense files of a marker, from its COMMIT or from the list that it names.

        Raises:
            CorruptionError: the list is missing or was altered; the error names it.
            StoreUnavailableError: the store does not answer.
        """
        return files_in(self._objects, commit)

    def verify(self, commit: Commit) -> None:
        """Compare all dense files of a marker with COMMIT.

        Raises:
            CorruptionError: a file is missing or was altered; the error names it.
            StoreUnavailableError: the store does not answer.
        """
        self.local(commit)

    def local(self, commit: Commit) -> Path:
        """Return a folder with the marker's dense files, after :meth:`verify` on one rank. Raises as ``verify``."""
        if commit.id not in self._fetched:
            folder = self._make_scratch() / f"read-{commit.generation}-{commit.marker}"
            try:
                self._fetch(commit, folder)
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
            self._fetched[commit.id] = folder
        return self._fetched[commit.id]

    def pieces(self, commit: Commit, file: DenseFile) -> Iterator[memoryview]:
        """Read a marker's dense file in pieces, and compare its digest after the last one. Raises as ``verify``."""
        return _pieces(self._objects, dense_file_name(commit.job, commit.id, file.name), file)

    def why_not(self, commit: Commit) -> str:
        """Describe what is wrong with a marker's dense files, judging by names and sizes. Empty if nothing is."""
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
        """Return the place of a marker's dense files, for people."""
        return f"{self.url}/{dense_name(commit.job, commit.id)}"

    def release(self) -> None:
        """Delete the local copies that :meth:`local` made."""
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
                with (folder / file.name).open("xb") as copy:
                    copy.writelines(self.pieces(commit, file))
        except OSError as error:
            raise StoreUnavailableError(
                f"cannot write a local copy of the dense state: {error.strerror}",
                hint="set TMPDIR to a folder with free space",
                path=folder,
            ) from None


class DenseFolder(DenseStore):
    """Dense state in a folder that all ranks see. DCP writes and reads a marker's own folder. One rank verifies."""

    def __init__(self, folder: Path) -> None:
        super().__init__(FolderObjects(folder))
        self.folder: Path = folder

    def preflight(self) -> None:
        pass

    def prepare(self, job: bytes, *, held: bool = False) -> None:
        root = self._root(job)
        if held and root.is_dir():
            return
        try:
            make_dirs(root)
            for folder in (root, root.parent, root.parent.parent):
                fsync_dir(folder)
        except OSError as error:
            raise ConfigError(
                f"cannot create the folder of the dense state: {error.strerror}",
                hint="check the store's path",
                path=root,
            ) from None

    def is_seen(self, job: bytes) -> bool:
        return self._root(job).is_dir()

    def writing(self, job: bytes, marker: MarkerId) -> Path:
        return self.folder / dense_name(job, marker)

    def publish(self, job: bytes, marker: MarkerId, files: Sequence[DenseFile]) -> None:
        pass  # DCP has synced its files, and rank 0 their folder

    def discard(self, job: bytes, marker: MarkerId) -> None:
        shutil.rmtree(self.writing(job, marker), ignore_errors=True)

    def settle(self, job: bytes, marker: MarkerId) -> None:
        pass

    def verify(self, commit: Commit) -> None:
        files = self.files(commit)
        check_names(commit, files, self.local(commit))
        for file in files:
            for _ in self.pieces(commit, file):
                pass

    def pieces(self, commit: Commit, file: DenseFile) -> Iterator[memoryview]:
        name = dense_file_name(commit.job, commit.id, file.name)
        return _pieces(self._objects, name, file, path=self.folder / name)

    def local(self, commit: Commit) -> Path:
        return dense_path(self.folder, commit)

    def place(self, commit: Commit) -> str:
        return str(self.local(commit))

    def _root(self, job: bytes) -> Path:
        """Return the folder of one job's dense state."""
        return (self.folder / dense_name(job, MarkerId(0, 0))).parent
