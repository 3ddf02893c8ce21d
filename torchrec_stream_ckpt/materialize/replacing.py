"""The store as a repair writes to it: what is right stays, and what is replaced is kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torchrec_stream_ckpt.errors import CorruptionError
from torchrec_stream_ckpt.failpoints import failpoint
from torchrec_stream_ckpt.format.frame import Buffer
from torchrec_stream_ckpt.format.manifest import SegmentRef
from torchrec_stream_ckpt.format.segment import parse_front
from torchrec_stream_ckpt.layout import damaged_name
from torchrec_stream_ckpt.store.api import Entry, Objects
from torchrec_stream_ckpt.store.once import is_same


class Replacing:
    """A store whose objects are written anew, one by one. Each is replaced in one put, and never deleted before.

    Args:
        objects: The store.
    """

    def __init__(self, objects: Objects) -> None:
        self.url = objects.url
        self.reads_ahead = objects.reads_ahead
        self._objects = objects
        self.known: Mapping[str, SegmentRef] = {}
        """What a manifest says of segments, by name: one with other content is never written."""
        self.asides: list[str] = []
        """Where the bytes are that were replaced."""

    def put(self, name: str, parts: Sequence[Buffer]) -> None:
        """Write an object, unless the same bytes are there; other bytes are set aside first.

        Raises:
            CorruptionError: it is another segment than its manifest says. Nothing was written.
        """
        self._check(name, parts)
        there = self._there(name)
        if there is not None:
            if is_same(there, parts):
                return
            self.asides.append(self._set_aside(name, there))
        self._objects.put(name, parts)

    def create(self, name: str, parts: Sequence[Buffer]) -> bool:
        """As :meth:`put`: whatever has the name gives way."""
        self.put(name, parts)
        return True

    def _check(self, name: str, parts: Sequence[Buffer]) -> None:
        ref = self.known.get(name)
        if ref is None:
            return
        front = parse_front(parts[0], name)
        if (front.header_crc, front.num_bytes) != (ref.header_crc, ref.num_bytes):
            raise CorruptionError("the log has other rows than the manifest says", segment=name)

    def _there(self, name: str) -> memoryview | None:
        """Read what an object holds now; None when there is none, or when it cannot be read."""
        try:
            return self._objects.read(name)
        except CorruptionError:
            return None

    def _set_aside(self, name: str, data: memoryview) -> str:
        """Keep bytes beside those of earlier repairs; returns where."""
        number = 1
        while self._objects.size(damaged_name(name, number)) is not None:
            before = self._there(damaged_name(name, number))
            if before is not None and is_same(before, [data]):  # by a repair that was cut short
                return damaged_name(name, number)
            number += 1  # one that cannot be read now may be read later
        self._objects.put(damaged_name(name, number), [data])
        failpoint("repair.aside")
        return damaged_name(name, number)

    def read(self, name: str, begin: int = 0, end: int | None = None) -> memoryview:
        return self._objects.read(name, begin, end)

    def size(self, name: str) -> int | None:
        return self._objects.size(name)

    def list(self, prefix: str) -> Iterator[Entry]:
        return self._objects.list(prefix)

    def delete(self, name: str) -> None:
        self._objects.delete(name)

    def clear_leftovers(self) -> int:
        return self._objects.clear_leftovers()

    def close(self) -> None:
        """It belongs to the caller."""
