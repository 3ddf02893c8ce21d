"""What IncrCP extracts: its three filters over one list of chunks a table (PVLDB 18(4)), apart from any file.

A chunk is what is left of the rows of one table that one interval changed (the paper's Row_0). Whether a later
interval's rows are taken out of it is asked in three stages, each dearer than the one before:

1. do the two key ranges overlap;
2. how many of the *new* chunk's keys does the old chunk's Bloom filter know: more than R of them;
3. once the old chunk has been read: are more than R of the new chunk's rows really in it.

Bits a key, the number of probes and the rule that a table's chunk of 100 keys or fewer takes nothing out are those of
the authors' published source, which was read for this and not copied.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
from workload import Ids

Where = TypeVar("Where")
"""What stands for the rows of a chunk: a place in a file, or nothing but their ids."""

BITS_A_KEY, PROBES = 16, 11
FEW_KEYS = 100
RATIO = 0.02
"""R of the authors' runs."""


class Bloom:
    """A Bloom filter over keys."""

    def __init__(self, keys: Ids) -> None:
        self._size = np.uint64(max(64, BITS_A_KEY * len(keys)))
        self._bits = np.zeros(int(self._size), np.bool_)
        place, step = _hashes(keys)
        for _ in range(PROBES):
            self._bits[place % self._size] = True
            place += step

    def hits(self, keys: Ids) -> int:
        """How many of the keys it may hold."""
        place, step = _hashes(keys)
        for _ in range(PROBES):
            there = self._bits[place % self._size]
            place, step = place[there] + step[there], step[there]
        return len(place)


def _hashes(keys: Ids) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """First place and distance of the probes."""
    mixed = keys.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(31)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(29)
    return mixed >> np.uint64(20), (mixed & np.uint64(0xFFFFF)) | np.uint64(1)


@dataclass
class Chunk(Generic[Where]):
    """What is left of one interval's rows of one table."""

    interval: int
    low: int
    """Least key; keys are linear row numbers."""
    high: int
    known: Bloom
    where: Where

    @classmethod
    def of(cls, interval: int, keys: Ids, where: Where) -> Chunk[Where]:
        """``keys``: ascending, at least one."""
        return cls(interval, int(keys[0]), int(keys[-1]), Bloom(keys), where)


@dataclass(frozen=True)
class Filters:
    """Which of the three are asked; an ablation leaves one out."""

    ranges: bool = True
    bloom: bool = True
    real: bool = True
    """Without it a chunk that was read is rewritten if it holds one row of the new chunk."""


@dataclass
class Asked:
    """What the filters were asked, and kept from being read or rewritten."""

    chunks: int = 0
    by_range: int = 0
    by_bloom: int = 0
    by_ratio: int = 0


@dataclass
class Lists(Generic[Where]):
    """The first row of all tables' lists, oldest chunk first."""

    ratio: float = RATIO
    filters: Filters = Filters()
    asked: Asked = field(default_factory=Asked)
    _chunks: dict[int, dict[int, Chunk[Where]]] = field(default_factory=dict)

    def put(self, table: int, chunk: Chunk[Where]) -> None:
        """A new chunk, or what an extraction has left of an old one."""
        self._chunks.setdefault(table, {})[chunk.interval] = chunk

    def drop(self, table: int, interval: int) -> None:
        """Nothing is left of it."""
        del self._chunks[table][interval]

    def clear(self) -> None:
        """A new base stands for all of them."""
        self._chunks.clear()

    def left(self, table: int, interval: int) -> Chunk[Where] | None:
        return self._chunks.get(table, {}).get(interval)

    def tables(self) -> Iterator[int]:
        yield from self._chunks

    def worth_reading(self, table: int, keys: Ids) -> list[Chunk[Where]]:
        """The chunks that filters 1 and 2 let pass for a new chunk of these keys, which is not in the list yet."""
        if len(keys) <= FEW_KEYS:
            return []
        found = []
        for chunk in self._chunks.get(table, {}).values():
            self.asked.chunks += 1
            if self.filters.ranges and (chunk.low > keys[-1] or chunk.high < keys[0]):
                self.asked.by_range += 1
            elif self.filters.bloom and chunk.known.hits(keys) <= int(self.ratio * len(keys)):
                self.asked.by_bloom += 1
            else:
                found.append(chunk)
        return found

    def worth_rewriting(self, rows: int, keys: Ids) -> bool:
        """Filter 3: ``rows`` of the new chunk's are in the one that was read."""
        if rows > (int(self.ratio * len(keys)) if self.filters.real else 0):
            return True
        self.asked.by_ratio += 1
        return False
