"""Interface of a store's objects: a flat namespace below one URL, in which each object exists whole or not at all.

There are no appends and no renames, so that object stores, which have neither, follow the same rules as a folder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

from torchrec_stream_ckpt.errors import ConfigError
from torchrec_stream_ckpt.format.frame import Buffer
from torchrec_stream_ckpt.util.options import Options, read_options
from torchrec_stream_ckpt.util.uris import check_store_url

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Entry:
    """One object of a listing."""

    name: str
    """Name relative to the store, with ``/`` between its parts."""
    num_bytes: int


class Readable(Protocol):
    """Source of objects: one store, or several."""

    def read(self, name: str, begin: int = 0, end: int | None = None) -> memoryview:
        """Read bytes of an object, as :meth:`Objects.read`."""


class Objects(Readable, Protocol):
    """Objects of one store. Safe to call from several threads."""

    url: str
    reads_ahead: int
    """Useful number of concurrent reads. It is large if each read has a network's delay."""

    def put(self, name: str, parts: Sequence[Buffer]) -> None:
        """Write one object from ``parts``, one after the other. It is durable on return, and does not exist before.

        It replaces an object of this name; a reader sees one of them whole. Use it only for names whose bytes may
        change, and for repairs. Everything else is written with ``store.once``.

        Raises:
            StoreUnavailableError: it was not written.
        """

    def create(self, name: str, parts: Sequence[Buffer]) -> bool:
        """Write one object as :meth:`put`, unless the name is taken. If it is, returns False and keeps the object.

        The existing object may be one that this call has written, if an answer was lost. A store that ignores the
        condition overwrites the object and returns True; see :class:`LooksFirst`.

        Raises:
            StoreUnavailableError: it was not written.
        """

    def read(self, name: str, begin: int = 0, end: int | None = None) -> memoryview:
        """Return bytes [begin, end) of an object, read-only. Without ``end``, up to the object's end.

        Raises:
            MissingObjectError: there is no such object.
            CorruptionError: it is shorter.
            StoreUnavailableError: the store does not answer or does not accept our login.
        """

    def size(self, name: str) -> int | None:
        """Return the length in bytes. Returns None if there is no such object."""

    def list(self, prefix: str) -> Iterator[Entry]:
        """Yield all objects whose names begin with ``prefix``, which ends with ``/`` or is empty. In no order."""

    def delete(self, name: str) -> None:
        """Delete an object. Does nothing if it does not exist."""

    def clear_leftovers(self) -> int:
        """Delete partial data of writers that died, if that can be determined. Returns the number of bytes.

        No listing shows such data. Live writers are not disturbed.
        """

    def close(self) -> None: ...


@runtime_checkable
class ReadsInto(Protocol):
    """Store whose objects can be read directly into buffers, without an intermediate copy."""

    def read_into(self, name: str, begin: int, buffers: Sequence[memoryview]) -> None:
        """Fill ``buffers``, one after the other, with an object's bytes from ``begin`` on; raises as ``read``."""


@runtime_checkable
class DeletesMany(Protocol):
    """Store that may delete many objects by one request."""

    def delete_many(self, names: Sequence[str]) -> Sequence[str]:
        """Delete objects, at most 1000. Returns those that it did not delete: delete them one by one, to learn why."""


@runtime_checkable
class LooksFirst(Protocol):
    """Store that may not refuse a put to a name that is taken."""

    looks_first: bool
    """True if :meth:`Objects.create` checks a name before it puts. Another writer may put in between.

    It is True once the store has reported that it does not refuse. Set it if the store was seen to ignore the
    condition.
    """

    def overwrites_in_parts(self, name: str, parts: Sequence[Buffer]) -> bool:
        """Put an existing object again, with the requests of a large one, on condition that its name is free.

        Returns True if the store overwrote it. Returns False also if the condition is known to hold for objects of any
        length; in this case nothing is put.

        Raises:
            StoreUnavailableError: the store does not answer, or does not let this user write.
        """


@runtime_checkable
class KeepsTime(Protocol):
    """Store that reports, by a single clock of its own, when it received an object."""

    server: str
    """Server or account, if settings name one. Empty for the service's default."""

    def put_at(self, name: str) -> float | None:
        """Return the time when an object was put, in seconds since some epoch. None if the store does not report it."""


def names_in(objects: Objects, kind: str, job: bytes, parse: Callable[[str], T | None]) -> Iterator[T]:
    """Yield the parsed names of all objects of a job in one folder of a store. Skips names that ``parse`` rejects."""
    for entry in objects.list(f"{kind}/{job.hex()}/"):
        if (found := parse(entry.name)) is not None:
            yield found


def open_store(url: str, options: Options = None) -> Objects:
    """Open the store at ``url``. Nothing is accessed until the store is used.

    Args:
        url: ``file://DIR``, a plain path, or a URL for fsspec: ``s3://BUCKET/PREFIX``, ``memory://NAME``.
        options: Settings of fsspec's file system, or a file of ``key=value`` lines.

    Raises:
        ConfigError: it is not the URL of a store, or the library that reads it is not installed.
    """
    where = check_store_url(url)
    if where.folder is not None:
        from torchrec_stream_ckpt.store.folder import FolderObjects

        if options:
            raise ConfigError("store options are for object stores, but this store is a folder", hint="omit them")
        return FolderObjects(where.folder)
    from torchrec_stream_ckpt.store.remote import FsspecObjects

    return FsspecObjects(where, read_options(options, "store"))
