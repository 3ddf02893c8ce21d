"""What was read of a store's small objects, kept for the next time up to a bound."""

from __future__ import annotations

from threading import Lock
from typing import TypeVar

T = TypeVar("T")

MOST_REFS = 2**18
"""Segments, and ranks of COMMITs, in what is kept: some 100 MB. What was read first is read again."""


class Kept:
    """Objects by name. What was read first goes when there is too much. Safe to use from several threads."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[object, int]] = {}
        self._weight = 0
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._held)

    def get(self, name: str, kind: type[T]) -> T | None:
        """An object that is kept; None: it is to be read."""
        found = self._held.get(name)
        return found[0] if found is not None and isinstance(found[0], kind) else None

    def put(self, name: str, value: object, weight: int) -> None:
        """Keep an object; ``weight``: how many segments or ranks it names."""
        weight = max(1, weight)
        with self._lock:
            self._weight += weight - self._held.pop(name, (None, 0))[1]
            self._held[name] = value, weight
            while self._weight > MOST_REFS and len(self._held) > 1:
                self._weight -= self._held.pop(next(iter(self._held)))[1]

    def clear(self) -> None:
        """Forget all of it."""
        with self._lock:
            self._held.clear()
            self._weight = 0
