"""A store that counts what is asked of it, by what the objects are and what is done with them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence

from torchrec_stream_ckpt.format.frame import Buffer
from torchrec_stream_ckpt.inner import Objects
from torchrec_stream_ckpt.store.api import Entry


class CountingObjects:
    """Passes everything on to another store, and counts. Safe on any thread, as every store is."""

    def __init__(self, objects: Objects) -> None:
        self.url = objects.url
        self.reads_ahead = objects.reads_ahead
        self.asked: Counter[tuple[str, str]] = Counter()
        """(operation, first folder of the name): how often. Operations are put, get, head, list and delete."""
        self.num_bytes: Counter[tuple[str, str]] = Counter()
        """The same of put and get: bytes."""
        self._objects = objects
        self._lock = threading.Lock()

    def taken(self) -> Counter[tuple[str, str]]:
        """What was counted since the last call."""
        with self._lock:
            found, self.asked = self.asked, Counter()
            self.num_bytes.clear()
        return found

    def _count(self, operation: str, name: str, num_bytes: int = 0) -> None:
        key = operation, name.partition("/")[0]
        with self._lock:
            self.asked[key] += 1
            if num_bytes:
                self.num_bytes[key] += num_bytes

    def put(self, name: str, parts: Sequence[Buffer]) -> None:
        self._count("put", name, sum(memoryview(part).nbytes for part in parts))
        self._objects.put(name, parts)

    def create(self, name: str, parts: Sequence[Buffer]) -> bool:
        self._count("put", name, sum(memoryview(part).nbytes for part in parts))
        return self._objects.create(name, parts)

    def read(self, name: str, begin: int = 0, end: int | None = None) -> memoryview:
        data = self._objects.read(name, begin, end)
        self._count("get", name, len(data))
        return data

    def size(self, name: str) -> int | None:
        self._count("head", name)
        return self._objects.size(name)

    def list(self, prefix: str) -> Iterator[Entry]:
        self._count("list", prefix)
        return self._objects.list(prefix)

    def delete(self, name: str) -> None:
        self._count("delete", name)
        self._objects.delete(name)

    def clear_leftovers(self) -> int:
        return self._objects.clear_leftovers()

    def close(self) -> None:
        self._objects.close()
