"""Storage of the markers' dense state: written in place in a folder, or copied to and from an object store.

DCP writes and reads files of a local folder. If the store is a folder, that is the marker's own folder. For an object
store it is a scratch folder of this process, and the written files are put into the store before this rank votes for
the marker. No data from a store is opened before its SHA-256 has been compared with COMMIT.
"""

from __future__ import annotations

import mmap
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Protocol

from torchrec_stream_ckpt.errors import ConfigError, CorruptionError, StoreUnavailableError, StreamCkptError
from torchrec_stream_ckpt.format.control import Commit
from torchrec_stream_ckpt.format.dense import dense_path, files_at, verify_dense
from torchrec_stream_ckpt.format.dense_files import (
    INLINE_FILES,
    LIST_NAME,
    DenseFile,
    DenseList,
    agree,
    altered,
    listed,
    whole,
)
from torchrec_stream_ckpt.store.api import Objects, open_store
from torchrec_stream_ckpt.store.dense_objects import DenseObjects
from torchrec_stream_ckpt.util.durable import fsync_dir, make_dirs, write_synced
from torchrec_stream_ckpt.util.layout import dense_file_name, dense_name
from torchrec_stream_ckpt.util.options import Options
from torchrec_stream_ckpt.util.types import MarkerId
from torchrec_stream_ckpt.util.uris import check_store_url


class DenseStore(Protocol):
    """Dense state of all markers of a store, as trainers and readers use it."""

    url: str

    @property
    def folder(self) -> Path | None:
        """The store's folder. None for an object store."""

    def preflight(self) -> None:
        """(rank 0, at attach) Check that the store answers and accepts our login.

        Raises:
            StoreUnavailableError: it does not.
        """

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

    def is_seen(self, job: bytes) -> bool:
        """(each rank) Return whether this rank sees the store that rank 0 has prepared."""

    def writing(self, job: bytes, marker: MarkerId) -> Path:
        """(each rank) Return the folder into which DCP is to write this marker. It may not exist yet."""

    def publish(self, job: bytes, marker: MarkerId, files: Sequence[DenseFile]) -> None:
        """(each rank) Put the files that this rank has written for a marker into the store. Durable on return.

        Raises:
            StoreUnavailableError: the store did not accept them.
        """

    def put_list(self, job: bytes, marker: MarkerId, data: bytes) -> None:
        """(rank 0) Put the list of a marker's dense files next to them. Durable on return.

        Raises:
            StoreUnavailableError: the store did not accept it.
        """

    def discard(self, job: bytes, marker: MarkerId) -> None:
        """(rank 0) Delete the files of a marker that was given up, as far as possible."""

    def settle(self, job: bytes, marker: MarkerId) -> None:
        """(each rank) Delete files that were needed only for writing the marker, after it has been voted on."""

    def files(self, commit: Commit) -> tuple[DenseFile, ...]:
        """Return all dense files of a marker, from its COMMIT or from the list that it names.

        Raises:
            CorruptionError: the list is missing or was altered; the error names it.
            StoreUnavailableError: the store does not answer.
        """

    def verify(self, commit: Commit) -> None:
        """Compare all dense files of a marker with COMMIT.

        Raises:
            CorruptionError: a file is missing or was altered; the error names it.
            StoreUnavailableError: the store does not answer.
        """

    def local(self, commit: Commit) -> Path:
        """Return a folder with the marker's dense files, after :meth:`verify` on one rank. Raises as ``verify``."""

    def why_not(self, commit: Commit) -> str:
        """Describe what is wrong with a marker's dense files, judging by names and sizes. Empty if nothing is."""

    def place(self, commit: Commit) -> str:
        """Return the place of a marker's dense files, for people."""

    def release(self) -> None:
        """Delete the local copies that :meth:`local` made."""

    def close(self) -> None: ...


def name_files(
    store: DenseStore, job: bytes, marker: MarkerId, files: Sequence[DenseFile]
) -> tuple[tuple[DenseFile, ...], DenseList | None]:
    """(rank 0) Decide how COMMIT names the dense files: one by one or, if there are many, by a list.

    The list is durable on return.

    Raises:
        StoreUnavailableError: the store did not accept the list.
    """
    if len(files) <= INLINE_FILES:
        return tuple(files), None
    said, data = listed(files)
    store.put_list(job, marker, data)
    return (), said


def lacking(objects: Objects, commit: Commit, files: Iterable[DenseFile]) -> list[DenseFile]:
    """Return a marker's dense files that a store lacks, or has with another length."""
    sizes = {entry.name: entry.num_bytes for entry in objects.list(f"{dense_name(commit.job, commit.id)}/")}
    return [file for file in files if sizes.get(dense_file_name(commit.job, commit.id, file.name)) != file.num_bytes]


def copy_dense(
    source: DenseStore,
    commit: Commit,
    files: Iterable[DenseFile] | None,
    target: Objects,
    going_on: Callable[[], None],
) -> Iterator[DenseFile]:
    """Copy dense files of a marker into a store. Yields each file after its copy.

    Args:
        source: Source of the files. All of them are compared with COMMIT first.
        commit: COMMIT of the marker.
        files: Files that ``target`` lacks; None: those of ``source`` that it lacks.
        target: Store to copy to.
        going_on: Called before each file. It stops the work by raising.

    Raises:
        CorruptionError: a file is missing or was altered.
        StoreUnavailableError: one of the two does not answer.
    """
    if files is None:
        files = lacking(target, commit, whole(commit.dense_list, source.files(commit)))
    try:
        source.verify(commit)
        folder = source.local(commit)
        for file in files:
            going_on()
            try:
                copy = open(folder / file.name, "rb")  # noqa: SIM115 (closed below)
            except FileNotFoundError:
                raise CorruptionError(
                    f"dense state was deleted while it was copied: {file.name}", marker=commit.id, path=folder
                ) from None
            with copy:
                target.put(dense_file_name(commit.job, commit.id, file.name), [_view(copy)])
            yield file
    finally:
        source.release()


def _view(file: BinaryIO) -> memoryview:
    """Return all bytes of a file as a map, which reads them when they are used."""
    if not os.fstat(file.fileno()).st_size:
        return memoryview(b"")
    return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def open_dense(url: str, options: Options = None) -> DenseStore:
    """Return the dense state of the store at ``url``. Like :func:`open_store`, accesses nothing until it is used."""
    return dense_in(open_store(url, options))


def dense_in(objects: Objects) -> DenseStore:
    """Return the dense state in an open store. Closing it closes the store."""
    folder = check_store_url(objects.url).folder
    return DenseFolder(folder) if folder is not None else DenseObjects(objects)


class DenseFolder:
    """Dense state in a folder that all ranks see. DCP writes and reads a marker's own folder. One rank verifies."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.url = f"file://{folder}"

    @property
    def folder(self) -> Path:
        return self._folder

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
        return self._folder / dense_name(job, marker)

    def publish(self, job: bytes, marker: MarkerId, files: Sequence[DenseFile]) -> None:
        pass  # DCP has synced its files, and rank 0 their folder

    def put_list(self, job: bytes, marker: MarkerId, data: bytes) -> None:
        folder = self.writing(job, marker)
        scratch = folder / f"{LIST_NAME}.tmp"
        try:
            write_synced(scratch, data)
            scratch.rename(folder / LIST_NAME)
            fsync_dir(folder)
        except OSError as error:
            raise StoreUnavailableError(
                f"cannot write the list of dense files: {error.strerror}",
                hint="repair the disk or the permissions",
                path=folder / LIST_NAME,
            ) from None

    def discard(self, job: bytes, marker: MarkerId) -> None:
        shutil.rmtree(self.writing(job, marker), ignore_errors=True)

    def settle(self, job: bytes, marker: MarkerId) -> None:
        pass

    def files(self, commit: Commit) -> tuple[DenseFile, ...]:
        return files_at(dense_path(self._folder, commit), commit)

    def verify(self, commit: Commit) -> None:
        verify_dense(self._folder, commit)

    def local(self, commit: Commit) -> Path:
        return dense_path(self._folder, commit)

    def why_not(self, commit: Commit) -> str:
        folder = dense_path(self._folder, commit)
        try:
            if commit.dense_list is not None and agree(commit.dense_list, _sizes(folder)):
                return ""
            files = files_at(folder, commit)
        except StreamCkptError as error:
            return error.headline
        except OSError as error:
            return f"dense state is missing: {folder}: {error.strerror}"
        for file in files:
            try:
                found = os.lstat(f"{folder}/{file.name}").st_size
            except OSError as error:
                return f"dense state is missing: {folder / file.name}: {error.strerror}"
            if found != file.num_bytes:
                return altered(str(folder / file.name), found, file)
        return ""

    def place(self, commit: Commit) -> str:
        return str(dense_path(self._folder, commit))

    def release(self) -> None:
        pass

    def close(self) -> None:
        pass

    def _root(self, job: bytes) -> Path:
        """Return the folder of one job's dense state."""
        return (self._folder / dense_name(job, MarkerId(0, 0))).parent


def _sizes(folder: Path) -> dict[str, int]:
    """Return the length of each file of a folder, without following links."""
    with os.scandir(folder) as entries:
        return {entry.name: entry.stat(follow_symlinks=False).st_size for entry in entries}
