"""Split a merge into windows of rows and blocks of windows, by the format, and into tasks of whole blocks.

The end of a segment is a function of the rows, so that all writers split alike (docs/format.md). The number of tasks is
not: each begins and ends with a block, and no segment crosses the border of a block.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from torchrec_stream_ckpt.format.rows import RowLayout
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.format.segment import slices_of
from torchrec_stream_ckpt.store.catalog import Picked, Piece
from torchrec_stream_ckpt.store.runs import Window, columns_of, cuts_of, open_at_once

WINDOWS_OF_BLOCK = 8
"""Number of windows in a block. Part of the store's format: a part of a fold ends with a block of windows."""
_READ_TWICE = 0.08
"""Fraction of the bytes that tasks may read twice, because chunks lie across their borders."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Slice:
    """Consecutive windows of the same columns of one table."""

    col0: int
    stop: int
    first: int
    """First row of the first window."""
    end: int
    """Row after the last one."""
    height: int
    """Number of rows of a window; the last one may have fewer."""
    number: int
    """Number of the first window among all windows of the fold."""

    @property
    def count(self) -> int:
        """Number of windows."""
        return -(-(self.end - self.first) // self.height)

    def windows(self) -> Iterator[Window]:
        for row0 in range(self.first, self.end, self.height):
            yield row0, min(row0 + self.height, self.end)

    def number_of(self, row: int) -> int:
        """Return the number of the window that contains a row."""
        return self.number + (row - self.first) // self.height

    def part(self, begin: int, stop: int) -> Slice | None:
        """Return the windows whose numbers are in [begin, stop). None if there are none."""
        begin, stop = max(begin, self.number), min(stop, self.number + self.count)
        if begin >= stop:
            return None
        first = self.first + (begin - self.number) * self.height
        end = min(self.end, self.first + (stop - self.number) * self.height)
        return replace(self, first=first, end=end, number=begin)


@dataclass(frozen=True, slots=True)
class TableWindows:
    """Windows of one table, and the chunks that have rows of them."""

    table: int
    newest: tuple[Picked, ...]
    """Chunks, the newest segment first."""
    slices: tuple[Slice, ...]
    """More than one only if chunks are wider than a slice. Each chunk is then read once for all slices."""

    @property
    def within(self) -> Window:
        """All rows of the windows, as one range."""
        return min(each.first for each in self.slices), max(each.end for each in self.slices)

    @property
    def is_whole(self) -> bool:
        """True if it cannot be split."""
        return len(self.slices) > 1

    def part(self, begin: int, stop: int) -> TableWindows | None:
        """Return the windows whose numbers are in [begin, stop), with the chunks that they need and no others."""
        found = [part for each in self.slices if (part := each.part(begin, stop)) is not None]
        if not found:
            return None
        cut = replace(self, slices=tuple(found))
        row0, end = cut.within
        chosen = (each.only((each.entries["first"] < end) & (each.entries["last"] >= row0)) for each in self.newest)
        return replace(cut, newest=tuple(each.alone() for each in chosen if len(each.chunks)))


@dataclass(frozen=True, slots=True)
class MergePlan:
    """All windows of a fold, in the order of its segments."""

    stretches: tuple[TableWindows, ...]
    windows: int

    @classmethod
    def of(cls, schema: Schema, bases: Mapping[int, int], pieces: Sequence[Piece], window_bytes: int) -> MergePlan:
        """Plan a merge of open pieces, table by table. Columns are split at every edge of a slice of a piece.

        Args:
            schema: Schema at the end of the fold.
            bases: Generation that sent each table whole, by table. Older rows are ignored.
            pieces: Pieces to merge, oldest first.
            window_bytes: Maximum bytes of the rows of a window.
        """
        found: list[TableWindows] = []
        windows = 0
        for table, newest in _held(bases, pieces).items():
            first = min(int(each.entries["first"].min()) for each in newest)
            end = max(int(each.entries["last"].max()) for each in newest) + 1
            columns = columns_of(newest)
            slices = []
            for col0, stop in pairwise(cuts_of(columns)):
                height = max(1, window_bytes // RowLayout.of(schema.tables[table], stop - col0).row_bytes)
                slices.append(Slice(col0, stop, first, end, height, windows))
                windows += slices[-1].count
            if columns <= {(each.col0, each.stop - each.col0) for each in slices}:
                for each in slices:
                    mine = (picked.only(picked.entries["col0"] == each.col0) for picked in newest)
                    held = tuple(picked for picked in mine if len(picked.chunks))
                    if held:  # columns between those sent have windows, which are counted, but no rows
                        found.append(TableWindows(table, held, (each,)))
            else:
                found.append(TableWindows(table, tuple(newest), tuple(slices)))
        return cls(tuple(found), windows)

    def cut(self, task_bytes: int | None) -> list[tuple[TableWindows, ...]]:
        """Return the stretches of each task: at least one task, which may have none.

        Args:
            task_bytes: Bytes that a task reads, approximately. None for a single task.
        """
        borders = self._borders(task_bytes) if task_bytes is not None else []
        edges = [0, *(block * WINDOWS_OF_BLOCK for block in borders), max(1, self.windows)]
        return [
            tuple(part for each in self.stretches if (part := each.part(begin, stop)) is not None)
            for begin, stop in pairwise(edges)
        ]

    def _borders(self, task_bytes: int) -> list[int]:
        """Return the first block of each task except the first task."""
        weights, may_begin = self._blocks()
        total, twice = float(weights.sum()), 0.0
        for each in self.stretches:
            sizes = np.concatenate([picked.entries["num_bytes"] for picked in each.newest])
            cuts = cuts_of(columns_of(each.newest))
            twice = max(twice, float(sizes.mean()) * open_at_once(each.newest, cuts))
        count = int(min(total / task_bytes, 1 + _READ_TWICE * total / max(1.0, twice)))
        if count < 2:
            return []
        wanted = total * np.arange(1, count) / count
        found = np.searchsorted(np.cumsum(weights), wanted, side="left") + 1
        return sorted({int(block) for block in found if block < len(weights) and may_begin[block]})

    def _blocks(self) -> tuple[Floats, npt.NDArray[np.bool_]]:
        """Return (bytes of chunks that begin in each block, whether a task may begin with it)."""
        blocks = -(-self.windows // WINDOWS_OF_BLOCK)
        weights, may_begin = np.zeros(blocks), np.ones(blocks, np.bool_)
        for stretch in self.stretches:
            head = stretch.slices[0]
            for picked in stretch.newest:
                entries = picked.entries
                rows = np.maximum(entries["first"].astype(np.int64) - head.first, 0)
                np.add.at(
                    weights, (head.number + rows // head.height) // WINDOWS_OF_BLOCK, entries["num_bytes"].astype(float)
                )
            if stretch.is_whole:
                tail = stretch.slices[-1]
                last = (tail.number + tail.count - 1) // WINDOWS_OF_BLOCK
                may_begin[head.number // WINDOWS_OF_BLOCK + 1 : last + 1] = False
        return weights, may_begin


def _held(bases: Mapping[int, int], pieces: Sequence[Piece]) -> dict[int, list[Picked]]:
    """Return the relevant segments of each table, newest first: none older than the generation that sent it whole."""
    segments = [picked for piece in pieces for picked in piece.opened]
    slices = {picked.ref.name: slices_of(picked.front.directory) for picked in segments}
    tables = sorted({table for each in slices.values() for table, _, _ in each})
    held: dict[int, list[Picked]] = {table: [] for table in tables}
    for piece in reversed(pieces):
        for picked in reversed(piece.opened):
            chunks: dict[int, list[npt.NDArray[np.int64]]] = {}
            for (table, _, _), place in slices[picked.ref.name].items():
                if piece.generation >= bases.get(table, 0):
                    chunks.setdefault(table, []).append(np.arange(place.start, place.stop))
            for table, numbers in chunks.items():
                held[table].append(Picked(picked.ref, picked.front, np.concatenate(numbers)))
    return {table: newest for table, newest in held.items() if newest}
