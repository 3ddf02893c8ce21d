"""Read sorted runs by windows of ids, each chunk once. The rows of a chunk after a window are kept for the next window.

A *run* is the part of one segment with one table and the same columns: chunks whose ids ascend. At any id, at most one
chunk of a run is *open*: it has ids before that one, and ids from it on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from heapq import merge
from itertools import islice, pairwise
from operator import attrgetter

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
    """Rows of one chunk. Those before the window are omitted if an earlier window had them."""

    place: int
    """Index of the run's segment, counted from the newest one."""
    picked: Picked
    entry: ChunkEntry
    view: RowsView
    is_kept: bool = False
    """True if an earlier window had other rows of the chunk."""


ReadSegments = Callable[[Iterable[Picked]], Iterator[tuple[Picked, ChunkEntry, memoryview]]]
"""Reader of the chunks of several segments, such as ``read_chunks`` for some store."""


def read_from(objects: Readable, pool: Executor, progress: Callable[[int], None] = lambda _: None) -> ReadSegments:
    """Return a reader for one store, which reads ahead. ``progress`` is called with the bytes of each chunk."""

    def read(picked: Iterable[Picked]) -> Iterator[tuple[Picked, ChunkEntry, memoryview]]:
        for each, entry, data in read_chunks(objects, picked, pool):
            progress(len(data))
            yield each, entry, data

    return read


class Runs:
    """Runs of some segments, window by window.

    Each chunk is read once while windows ascend. A window starts over if it begins before the end of the last one, or
    after one that failed or was not used up.

    Memory: one chunk for each run that is open at the end of a window, and the chunks that ``read`` reads ahead.

    Args:
        newest: Chunks of one table, the newest segment first. A row's newest version is in the first one that has it.
        schema: Schema of its rows.
        read: Reads the chunks.
    """

    def __init__(self, newest: Sequence[Picked], schema: Schema, read: ReadSegments) -> None:
        self._newest = newest
        self._schema = schema
        self._read = read
        self._of = np.repeat(np.arange(len(newest)), [len(each.chunks) for each in newest])
        """Index of each chunk's segment."""
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
        """True if a window was begun and not used up. The rows that it would have kept are then missing."""

    def window(self, row0: int, stop: int) -> Iterator[Given]:
        """Yield chunks with ids of [row0, stop), newest segment first. Use them up before the next window.

        Raises:
            CorruptionError: a segment is damaged, or its contents do not fit the schema.
            StoreUnavailableError: the store does not answer.
        """
        return self._give(self._read(self._begin(row0, stop)), stop)

    def through(self, windows: Iterable[Window]) -> Iterator[tuple[Window, Iterator[Given]]]:
        """Yield :meth:`window` for each of ascending windows, reading ahead beyond the end of one. Omits empty ones."""
        planned = [(window, self._begin(*window)) for window in windows]
        reads = self._read(picked for _, each in planned for picked in each)
        for window, picked in planned:
            assert not self._is_open, "the previous window was not used up"
            if picked or self._kept:
                yield window, self._give(islice(reads, sum(len(each.chunks) for each in picked)), window[1])

    def _begin(self, row0: int, stop: int) -> list[Picked]:
        """Return the chunks to read for a window, newest segment first."""
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
    """Copy the rows from ``stop`` on, so that the bytes read, which may exceed the chunk, are freed."""
    view = given.view
    begin = int(np.searchsorted(view.ids, stop))
    states = tuple(state[begin:].copy() for state in view.states)
    rest = RowsView(view.ids[begin:].copy(), view.weights[begin:].copy(), states)
    return Given(given.place, given.picked, given.entry, rest, True)


def columns_of(segments: Iterable[Picked]) -> set[tuple[int, int]]:
    """Return (first column, columns) of all chunks."""
    return {
        (int(col0), int(cols)) for each in segments for col0, cols in np.unique(each.entries[["col0", "cols"]]).tolist()
    }


def cuts_of(columns: Iterable[tuple[int, int]]) -> list[int]:
    """Return the edges of slices of columns. Columns between two cuts are always given together."""
    return sorted({edge for col0, cols in columns for edge in (col0, col0 + cols)})


def open_at_once(segments: Iterable[Picked], cuts: Sequence[int]) -> int:
    """Return the largest number of chunks that are open at once in any range of columns between two ``cuts``."""
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
