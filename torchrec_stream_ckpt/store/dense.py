"""Storage of the markers' dense state: written in place in a folder, or copied to and from an object store.

DCP writes and reads files of a local folder. If the store is a folder, that is the marker's own folder. For an object
store it is a scratch folder of this process, and the written files are put into the store before this rank votes for
the marker. No data from a store is opened before its SHA-256 has been compared with COMMIT.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import BinaryIO

from torchrec_stream_ckpt.errors import CorruptionError
from torchrec_stream_ckpt.format.control import Commit
from torchrec_stream_ckpt.format.dense_files import (
    INLINE_FILES,
    DenseFile,
    DenseList,
    listed,
    whole,
)
from torchrec_stream_ckpt.store.api import Objects, open_store
from torchrec_stream_ckpt.store.dense_objects import DenseFolder, DenseStore
from torchrec_stream_ckpt.util.layout import dense_file_name, dense_name
from torchrec_stream_ckpt.util.options import Options
from torchrec_stream_ckpt.util.types import MarkerId
from torchrec_stream_ckpt.util.uris import check_store_url


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
    return DenseFolder(folder) if folder is not None else DenseStore(objects)
