"""Go through sorted runs by windows of ids, each chunk read once: what a window leaves of a chunk is kept for the next.

A *run* is what one segment has of a table under the same columns: chunks whose ids ascend. At any id, at most one chunk
of a run is *open*: it holds ids before that one, and ids from it on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from heapq import merge
from itertools import islice, pairwise
from operator import attrgetter
from typing import Protocol

import numpy as np
import numpy.typing as npt

from torchrec_stream_ckpt.format.rows import RowsView
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.format.segment import ChunkEntry, Directory, decode_chunk
from torchrec_stream_ckpt.store.api import Readable
from torchrec_stream_ckpt.store.catalog import Picked
from torchrec_stream_ckpt.store.reader import read_chunks

Window = tuple[int, int]
"""[first id, id after the last one)."""
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Given:
    """Rows of one chunk, those before the window left out if an earlier window had them."""

    place: int
    """Of the run's segment, counted from the newest one."""
    picked: Picked
    entry: ChunkEntry
    view: RowsView
    is_kept: bool = False
    """True if an earlier window had other rows of the chunk."""


class ReadSegments(Protocol):
    """How chunks of several segments are read: ``read_chunks``, of whatever store."""

    def __call__(self, picked: Iterable[Picked]) -> Iterator[tuple[Picked, ChunkEntry, memoryview]]: ...


def read_from(objects: Readable, pool: Executor, progress: Callable[[int], None] = lambda _: None) -> ReadSegments:
    """Read from one store, some ahead; ``progress`` is called with the bytes of each chunk."""

    def read(picked: Iterable[Picked]) -> Iterator[tuple[Picked, ChunkEntry, memoryview]]:
        for each, entry, data in read_chunks(objects, picked, pool):
            progress(len(data))
            yield each, entry, data

    return read


class Runs:
    """The runs of some segments, window by window.

    Each chunk is read once while windows ascend. A window that begins before the end of the last one, or after one
    that failed or was not used up, begins anew.

    Memory: one chunk a run that is open at the end of a window, and what ``read`` reads ahead.

    Args:
        newest: Chunks of one table, the newest segment first. A row's newest version is in the first one that has it.
        schema: Of its rows.
        read: Reads them.
    """

    def __init__(self, newest: Sequence[Picked], schema: Schema, read: ReadSegments) -> None:
        self._newest = newest
        self._schema = schema
        self._read = read
        self._of = np.repeat(np.arange(len(newest)), [len(each.chunks) for each in newest])
        """The place of each chunk's segment."""
        self._chunks: Ints = np.concatenate([each.chunks for each in newest]) if newest else np.empty(0, np.int64)
        entries = [each.entries[["first", "last"]] for each in newest]
        first, self._last = (
            np.concatenate([each[name] for each in entries]) if entries else np.empty(0, np.int64)
            for name in ("first", "last")
        )
        self._order: Ints = np.argsort(first, kind="stable")
        self._first = first[self._order]
        self._names = {each.ref.name: place for place, each in enumerate(newest)}
        self._at, self._stop = 0, 0
        self._kept: list[Given] = []
        self._is_open = False
        """True if a window was begun and not used up: what it would have kept is not there."""

    def window(self, row0: int, stop: int) -> Iterator[Given]:
        """Chunks with ids of [row0, stop), newest segment first; to be used up before the next window.

        Raises:
            CorruptionError: a segment is damaged, or what it holds does not fit the schema.
            StoreUnavailableError: the store does not answer.
        """
        return self._give(self._read(self._begin(row0, stop)), stop)

    def through(self, windows: Iterable[Window]) -> Iterator[tuple[Window, Iterator[Given]]]:
        """:meth:`window` for each of ascending windows, read ahead beyond the end of one; empty ones are left out."""
        planned = [(window, self._begin(*window)) for window in windows]
        reads = self._read(picked for _, each in planned for picked in each)
        for window, picked in planned:
            assert not self._is_open, "the window before was not used up"
            if picked or self._kept:
                yield window, self._give(islice(reads, sum(len(each.chunks) for each in picked)), window[1])

    def _begin(self, row0: int, stop: int) -> list[Picked]:
        """The chunks that are to be read for a window, newest segment first."""
        if row0 < self._stop or self._is_open:
            self._at, self._kept, self._is_open = 0, [], False
        begin, self._at = self._at, max(self._at, int(np.searchsorted(self._first, stop)))
        self._stop = stop
        new = np.sort(self._order[begin : self._at])
        new = new[self._last[new] >= row0]
        edges = [0, *(np.flatnonzero(np.diff(self._of[new])) + 1).tolist(), len(new)]
        segments = ((self._newest[self._of[new[left]]], new[left:right]) for left, right in pairwise(edges) if right)
        return [Picked(each.ref, each.front, self._chunks[chosen]) for each, chosen in segments]

    def _give(self, reads: Iterable[tuple[Picked, ChunkEntry, memoryview]], stop: int) -> Iterator[Given]:
        kept, self._kept, self._is_open = self._kept, [], True
        for given in merge(kept, self._decode(reads), key=attrgetter("place")):
            yield given
            if given.entry.last >= stop:
                self._kept.append(given if given.is_kept else _rest(given, stop))
        self._is_open = False

    def _decode(self, reads: Iterable[tuple[Picked, ChunkEntry, memoryview]]) -> Iterator[Given]:
        for picked, entry, data in reads:
            name = picked.ref.name
            yield Given(self._names[name], picked, entry, decode_chunk(entry, data, self._schema, name))


def _rest(given: Given, stop: int) -> Given:
    """A copy of the rows from ``stop`` on: what was read may be larger than the chunk, and is let go."""
    view = given.view
    begin = int(np.searchsorted(view.ids, stop))
    states = tuple(state[begin:].copy() for state in view.states)
    rest = RowsView(view.ids[begin:].copy(), view.weights[begin:].copy(), states)
    return Given(given.place, given.picked, given.entry, rest, True)


def columns_of(segments: Iterable[Picked]) -> set[tuple[int, int]]:
    """(first column, columns) of all chunks."""
    return {
        (int(col0), int(cols)) for each in segments for col0, cols in np.unique(each.entries[["col0", "cols"]]).tolist()
    }


def cuts_of(columns: Iterable[tuple[int, int]]) -> list[int]:
    """Where slices of columns begin and end: between two cuts, columns always come together."""
    return sorted({edge for col0, cols in columns for edge in (col0, col0 + cols)})


def open_at_once(segments: Iterable[Picked], cuts: Sequence[int]) -> int:
    """How many chunks are open at once, at most, in any range of columns between two ``cuts``."""
    entries = [each.entries for each in segments]
    if not entries:
        return 0
    held = np.concatenate(entries)
    return max((_most(held, left) for left in cuts[:-1]), default=0)


def _most(held: Directory, column: int) -> int:
    begin = held["col0"].astype(np.int64)
    mine = held[(begin <= column) & (begin + held["cols"] > column)]
    if not len(mine):
        return 0
    firsts, lasts = np.sort(mine["first"]), np.sort(mine["last"])
    return int((np.arange(1, len(firsts) + 1) - np.searchsorted(lasts, firsts)).max())
