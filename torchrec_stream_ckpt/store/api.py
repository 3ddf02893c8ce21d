"""The interface of a store's objects: a flat space of names below one URL, each object there whole or not at all.

Nothing is appended to or renamed, so that object stores, which know neither, keep the same rules as a folder does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torchrec_stream_ckpt.errors import ConfigError
from torchrec_stream_ckpt.format.frame import Buffer
from torchrec_stream_ckpt.util.options import Options, read_options
from torchrec_stream_ckpt.util.uris import check_store_url


@dataclass(frozen=True, slots=True)
class Entry:
    """One object of a listing."""

    name: str
    """Relative to the store, with ``/`` between its parts."""
    num_bytes: int


class Readable(Protocol):
    """What objects are read from: a store, or several."""

    def read(self, name: str, begin: int = 0, end: int | None = None) -> memoryview:
        """As :meth:`Objects.read`."""


class Objects(Readable, Protocol):
    """The objects of one store. Safe to call from several threads."""

    url: str
    reads_ahead: int
    """Reads that are worth having in flight at once: many where each one has a network's delay."""

    def put(self, name: str, parts: Sequence[Buffer]) -> None:
        """Write one object from ``parts``, one after the other. It is durable on return, and until then not there.

        It takes the place of an object of this name: a reader sees one of them whole. For names whose bytes may change,
        and for repairs; everything else goes through ``store.once``.

        Raises:
            StoreUnavailableError: it was not written.
        """

    def create(self, name: str, parts: Sequence[Buffer]) -> bool:
        """Write one object as :meth:`put`, unless the name is taken. False: it is, and what stands there stays.

        What stands there may be what this call has written, if an answer was lost. A store that ignores the condition
        overwrites the object, and says True: see :class:`LooksFirst`.

        Raises:
            StoreUnavailableError: it was not written.
        """

    def read(self, name: str, begin: int = 0, end: int | None = None) -> memoryview:
        """Bytes [begin, end) of an object, up to its end without ``end``. Read-only.

        Raises:
            MissingObjectError: there is no such object.
            CorruptionError: it is shorter.
            StoreUnavailableError: the store does not answer or does not accept our login.
        """

    def size(self, name: str) -> int | None:
        """Length in bytes; None when there is no such object."""

    def list(self, prefix: str) -> Iterator[Entry]:
        """All objects whose names begin with ``prefix``, which ends with ``/`` or is empty; in no order."""

    def delete(self, name: str) -> None:
        """Take an object away; nothing happens when it is not there."""

    def clear_leftovers(self) -> int:
        """Take away what writers that died have left half written, where that can be told; returns how many bytes.

        No listing shows it. Writers that live are not disturbed.
        """

    def close(self) -> None: ...


@runtime_checkable
class ReadsInto(Protocol):
    """A store whose objects can be read to where their bytes are wanted, without a copy in between."""

    def read_into(self, name: str, begin: int, buffers: Sequence[memoryview]) -> None:
        """Fill ``buffers``, one after the other, with what an object has from ``begin`` on; raises as ``read``."""


@runtime_checkable
class LooksFirst(Protocol):
    """A store that may not refuse a put to a name that is taken."""

    looks_first: bool
    """True if :meth:`Objects.create` looks at a name before it puts: another writer may come in between.

    True once the store has said that it does not refuse. Set it, if the store was seen to ignore the condition.
    """

    def overwrites_in_parts(self, name: str, parts: Sequence[Buffer]) -> bool:
        """Put an object that is there once more, by the requests of a large one, if its name is free; tell whether the
        store did so. False also where one condition is known to hold for objects of any length: nothing is put.

        Raises:
            StoreUnavailableError: the store does not answer, or does not let this user write.
        """


@runtime_checkable
class KeepsTime(Protocol):
    """A store that says by one clock of its own when it took an object."""

    server: str
    """Where its server or account is, as far as settings name one; empty for the service's own."""

    def put_at(self, name: str) -> float | None:
        """When an object was put, in seconds since some beginning; None when the store does not say."""


def open_store(url: str, options: Options = None) -> Objects:
    """Open the store at ``url``; touches nothing until it is used.

    Args:
        url: ``file://DIR``, a plain path, or what fsspec knows: ``s3://BUCKET/PREFIX``, ``memory://NAME``.
        options: Settings of fsspec's file system, or a file of ``key=value`` lines.

    Raises:
        ConfigError: it is not the URL of a store, or what reads it is not installed.
    """
    where = check_store_url(url)
    if where.folder is not None:
        from torchrec_stream_ckpt.store.folder import FolderObjects

        if options:
            raise ConfigError("store options are for object stores, this is a folder", hint="leave them out")
        return FolderObjects(where.folder)
    from torchrec_stream_ckpt.store.remote import FsspecObjects

    return FsspecObjects(where, read_options(options, "store"))
