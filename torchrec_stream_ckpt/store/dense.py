"""Where the dense state of markers lies: written in place in a folder, or carried to and from an object store.

DCP writes and reads files of a local folder. In a store that is a folder, that is the marker's own; for an object store
it is a scratch folder of this process, and what was written is put into the store before this rank votes for the
marker. Nothing that came out of a store is opened before its SHA-256 has been compared with COMMIT.
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
)
from torchrec_stream_ckpt.store.api import Objects, open_store
from torchrec_stream_ckpt.store.dense_objects import DenseObjects
from torchrec_stream_ckpt.util.durable import fsync_dir, make_dirs, write_synced
from torchrec_stream_ckpt.util.layout import dense_file_name, dense_name
from torchrec_stream_ckpt.util.options import Options
from torchrec_stream_ckpt.util.types import MarkerId
from torchrec_stream_ckpt.util.uris import check_store_url


class DenseStore(Protocol):
    """The dense state of all markers of a store, as trainers and readers use it."""

    url: str

    @property
    def folder(self) -> Path | None:
        """The store's folder; None for an object store."""

    def preflight(self) -> None:
        """(rank 0, at attach) Whether the store answers and accepts our login.

        Raises:
            StoreUnavailableError: it does not.
        """

    def prepare(self, job: bytes) -> None:
        """(rank 0) Make the store ready for a job that will write.

        Raises:
            ConfigError: the folder cannot be made.
            StoreUnavailableError: it cannot be written.
        """

    def is_seen(self, job: bytes) -> bool:
        """(each rank) Whether this rank sees what rank 0 has prepared."""

    def writing(self, job: bytes, marker: MarkerId) -> Path:
        """(each rank) The folder into which DCP is to write this marker. It may still have to be made."""

    def publish(self, job: bytes, marker: MarkerId, files: Sequence[DenseFile]) -> None:
        """(each rank) Put what this rank has written there into the store; durable on return.

        Raises:
            StoreUnavailableError: it was not taken.
        """

    def put_list(self, job: bytes, marker: MarkerId, data: bytes) -> None:
        """(rank 0) Put the list of a marker's dense files beside them; durable on return.

        Raises:
            StoreUnavailableError: it was not taken.
        """

    def discard(self, job: bytes, marker: MarkerId) -> None:
        """(rank 0) Take away what was written for a marker that was given up, as far as that succeeds."""

    def settle(self, job: bytes, marker: MarkerId) -> None:
        """(each rank) The marker has been voted on: let go of what was only needed for writing it."""

    def files(self, commit: Commit) -> tuple[DenseFile, ...]:
        """All dense files of a marker, from its COMMIT or from the list that it names.

        Raises:
            CorruptionError: the list is missing or altered; names it.
            StoreUnavailableError: the store does not answer.
        """

    def verify(self, commit: Commit) -> None:
        """Compare all dense files of a marker with COMMIT.

        Raises:
            CorruptionError: a file is missing or altered; names it.
            StoreUnavailableError: the store does not answer.
        """

    def local(self, commit: Commit) -> Path:
        """A folder with the marker's dense files, once :meth:`verify` has been called on one rank. As ``verify``."""

    def why_not(self, commit: Commit) -> str:
        """Tell what is wrong with a marker's dense files, as far as names and sizes show it; empty when nothing is."""

    def place(self, commit: Commit) -> str:
        """Where they are, for people."""

    def release(self) -> None:
        """Let go of what :meth:`local` gave."""

    def close(self) -> None: ...


def name_files(
    store: DenseStore, job: bytes, marker: MarkerId, files: Sequence[DenseFile]
) -> tuple[tuple[DenseFile, ...], DenseList | None]:
    """(rank 0) How COMMIT names the dense files: one by one or, where they are many, by a list, which is durable then.

    Raises:
        StoreUnavailableError: the list was not taken.
    """
    if len(files) <= INLINE_FILES:
        return tuple(files), None
    said, data = listed(files)
    store.put_list(job, marker, data)
    return (), said


def lacking(objects: Objects, commit: Commit, files: Iterable[DenseFile]) -> list[DenseFile]:
    """A marker's dense files that a store lacks, or has with another length."""
    sizes = {entry.name: entry.num_bytes for entry in objects.list(f"{dense_name(commit.job, commit.id)}/")}
    return [file for file in files if sizes.get(dense_file_name(commit.job, commit.id, file.name)) != file.num_bytes]


def copy_dense(
    source: DenseStore, commit: Commit, files: Iterable[DenseFile], target: Objects, going_on: Callable[[], None]
) -> Iterator[DenseFile]:
    """Copy dense files of a marker into a store; gives each one that has been copied.

    Args:
        source: What is there is compared with COMMIT first, all of it.
        commit: The marker.
        files: Those that ``target`` lacks.
        target: Where to.
        going_on: Called before each file; ends the work by raising.

    Raises:
        CorruptionError: a file is missing or altered.
        StoreUnavailableError: one of the two does not answer.
    """
    try:
        source.verify(commit)
        folder = source.local(commit)
        for file in files:
            going_on()
            try:
                copy = open(folder / file.name, "rb")  # noqa: SIM115 (closed below)
            except FileNotFoundError:
                raise CorruptionError(
                    f"dense state went while it was copied: {file.name}", marker=commit.id, path=folder
                ) from None
            with copy:
                target.put(dense_file_name(commit.job, commit.id, file.name), [_view(copy)])
            yield file
    finally:
        source.release()


def _view(file: BinaryIO) -> memoryview:
    """All bytes of a file, not read before they are used."""
    if not os.fstat(file.fileno()).st_size:
        return memoryview(b"")
    return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def open_dense(url: str, options: Options = None) -> DenseStore:
    """The dense state of the store at ``url``; as :func:`open_store`, touches nothing until it is used."""
    return dense_in(open_store(url, options))


def dense_in(objects: Objects) -> DenseStore:
    """The dense state in a store that is open; closing it closes the store."""
    folder = check_store_url(objects.url).folder
    return DenseFolder(folder) if folder is not None else DenseObjects(objects)


class DenseFolder:
    """Dense state in a folder that all ranks see. DCP writes and reads a marker's own folder; one rank verifies."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.url = f"file://{folder}"

    @property
    def folder(self) -> Path:
        return self._folder

    def preflight(self) -> None:
        pass

    def prepare(self, job: bytes) -> None:
        root = self._root(job)
        try:
            make_dirs(root)
            for folder in (root, root.parent, root.parent.parent):
                fsync_dir(folder)
        except OSError as error:
            raise ConfigError(
                f"cannot make the folder of the dense state: {error.strerror}", hint="check the store's path", path=root
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
                hint="repair the disk or the rights",
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
            return f"dense state is gone: {folder}: {error.strerror}"
        for file in files:
            try:
                found = os.lstat(f"{folder}/{file.name}").st_size
            except OSError as error:
                return f"dense state is gone: {folder / file.name}: {error.strerror}"
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
        """The folder of one job's dense state."""
        return (self._folder / dense_name(job, MarkerId(0, 0))).parent


def _sizes(folder: Path) -> dict[str, int]:
    """Length of each file of a folder, links not followed."""
    with os.scandir(folder) as entries:
        return {entry.name: entry.stat(follow_symlinks=False).st_size for entry in entries}
