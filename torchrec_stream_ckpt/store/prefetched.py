"""Objects whose beginnings are partly known. Known parts are read in the caller's thread, all others concurrently."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor
from typing import TypeVar

from torchrec_stream_ckpt.format.summary import Part
from torchrec_stream_ckpt.store.api import Readable

A = TypeVar("A")
B = TypeVar("B")


class Summarized:
    """Objects of which some beginnings are known. Everything else is read from the store.

    Args:
        objects: The store.
        parts: Known parts, by name.
    """

    def __init__(self, objects: Readable, parts: Mapping[str, Part]) -> None:
        self._objects = objects
        self._parts = parts

    def read(self, name: str, begin: int = 0, end: int | None = None) -> memoryview:
        """Read an object as ``Objects.read``. A known part is returned only as a whole."""
        part = self._parts.get(name)
        if part is not None and begin == 0 and len(part.data) == (part.num_bytes if end is None else end):
            return memoryview(part.data)
        return self._objects.read(name, begin, end)

    def holds(self, name: str) -> bool:
        """Return whether a part of an object is known."""
        return name in self._parts


def side_by_side(
    objects: Readable, pool: Executor, read: Callable[[A], B], wanted: Iterable[A], name_of: Callable[[A], str]
) -> list[B]:
    """Return the results of ``read`` for each item, in order. Unknown objects are read in the pool. Raises as ``read``.

    Args:
        objects: Source of the objects.
        pool: Threads to read with.
        read: Called with each item.
        wanted: Items to read.
        name_of: Returns the name of the object that is read for an item.
    """
    if not isinstance(objects, Summarized):
        return list(pool.map(read, wanted))
    asked = [(each, None if objects.holds(name_of(each)) else pool.submit(read, each)) for each in wanted]
    return [read(each) if future is None else future.result() for each, future in asked]
