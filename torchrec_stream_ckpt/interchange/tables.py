"""Logical tables of a marker without a model: windows of rows, put together from all pieces."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np

from torchrec_stream_ckpt.errors import CorruptionError
from torchrec_stream_ckpt.format.frame import DTYPE_BYTES
from torchrec_stream_ckpt.format.rows import NUMPY_DTYPES, Array, RowsView
from torchrec_stream_ckpt.format.segment import decode_chunk
from torchrec_stream_ckpt.interchange.sources import OpenSegment, Sources
from torchrec_stream_ckpt.store.catalog import Picked
from torchrec_stream_ckpt.store.newest import NewestFirst
from torchrec_stream_ckpt.store.reader import read_chunks
from torchrec_stream_ckpt.types import StateSpec, TableSpec

WINDOW_BYTES = 32 * 2**20
"""Weights and states that a window holds at most, unless one row is larger."""


@dataclass(frozen=True, slots=True)
class TableWindow:
    """Rows [row0, row0 + rows) of one table. bfloat16 is there as its bits, uint16."""

    row0: int
    weights: Array
    """Shape (rows, dim)."""
    states: tuple[Array, ...]
    """States in the schema's order: shape (rows, dim), or (column slices, rows) where a state holds one value a row."""

    @property
    def rows(self) -> int:
        return len(self.weights)


class TableReader:
    """Reads one table of a marker by rows. Holds one window and what is read ahead.

    Each window reads all chunks that overlap it, of every piece: one that goes through the table reads little twice as
    long as windows are large.

    Args:
        sources: Where the rows are.
        table: Index of the table in the schema.

    Raises:
        CorruptionError: the pieces cannot be of one table.
    """

    def __init__(self, sources: Sources, table: int) -> None:
        self._open_sources = sources
        self._table = table
        self._pool = sources.pool
        self._schema = sources.schema
        self.spec: TableSpec = sources.schema.tables[table]
        self._sources = _sources_of(sources, table)
        held = {
            (int(col0), int(cols))
            for source in self._sources
            for col0, cols in np.unique(source.picked.front.directory[source.picked.chunks][["col0", "cols"]])
        } or {(0, self.spec.dim)}  # of a table without rows nothing is sent
        self._cuts = sorted({edge for col0, cols in held for edge in (col0, col0 + cols)} | {0, self.spec.dim})
        """Columns between two cuts always arrive together."""
        self.slices: tuple[tuple[int, int], ...] = tuple(sorted(held)) if self.spec.has_row_state else ()
        """(first column, columns) of each column shard, of which a state with one value a row has a value each."""
        if self.spec.has_row_state and list(self.slices) != [(a, b - a) for a, b in pairwise(self._cuts)]:
            raise CorruptionError(
                "row-wise state under two column splits, of which none was sent whole", table=self.spec.name
            )

    @property
    def row_bytes(self) -> int:
        """Bytes of one row with its states."""
        return DTYPE_BYTES[self.spec.dtype] * self.spec.dim + sum(
            DTYPE_BYTES[state.dtype] * self.values(state) for state in self.spec.states
        )

    def values(self, state: StateSpec) -> int:
        """How many values one row has of a state."""
        return len(self.slices) if state.per_row else self.spec.dim

    def windows(self) -> Iterator[tuple[int, int]]:
        """(first row, rows) of windows of ``WINDOW_BYTES`` that go through the table."""
        height = max(1, WINDOW_BYTES // self.row_bytes)
        for row0 in range(0, self.spec.rows, height):
            yield row0, min(height, self.spec.rows - row0)

    def read(self, row0: int, rows: int) -> TableWindow:
        """The newest version of each row of [row0, row0 + rows); a damaged piece of the store is read around.

        Raises:
            CorruptionError: a piece is damaged and nothing else has its rows, or a row was never sent.
            StoreUnavailableError: the store does not answer.
        """
        while True:
            try:
                return self._read(row0, rows)
            except CorruptionError as error:
                self._open_sources.go_around(error)
                again = TableReader(self._open_sources, self._table)
                if again.slices != self.slices:
                    raise
                self._sources, self._cuts = again._sources, again._cuts

    def _read(self, row0: int, rows: int) -> TableWindow:
        window = self._empty(row0, rows)
        newest = NewestFirst(row0, rows, len(self._cuts) - 1)
        for objects, sources in groupby(self._sources, key=lambda source: source.objects):
            picked = [_overlapping(source.picked, row0, rows) for source in sources]
            for each, entry, data in read_chunks(objects, [each for each in picked if len(each.chunks)], self._pool):
                view = decode_chunk(entry, data, self._schema, each.ref.name)
                self._put(window, newest, view, entry.col0, entry.cols)
        if newest.missing:
            raise CorruptionError(f"{newest.missing} rows were never sent", table=self.spec.name, row0=str(row0))
        return window

    def _empty(self, row0: int, rows: int) -> TableWindow:
        def shape(state: StateSpec) -> tuple[int, int]:
            return (len(self.slices), rows) if state.per_row else (rows, self.spec.dim)

        states = tuple(np.empty(shape(state), NUMPY_DTYPES[state.dtype]) for state in self.spec.states)
        return TableWindow(row0, np.empty((rows, self.spec.dim), NUMPY_DTYPES[self.spec.dtype]), states)

    def _put(self, window: TableWindow, newest: NewestFirst, view: RowsView, col0: int, cols: int) -> None:
        """Write those rows of a chunk that no newer one has given."""
        for cut, (left, right) in enumerate(pairwise(self._cuts)):
            if not col0 <= left < col0 + cols:
                continue
            rows, chosen = newest.take(view.ids, cut)
            here, there = slice(left, right), slice(left - col0, right - col0)
            window.weights[rows, here] = view.weights[chosen, there]
            for target, source in zip(window.states, view.states, strict=True):
                if source.ndim == 1:
                    target[cut, rows] = source[chosen]
                else:
                    target[rows, here] = source[chosen, there]


def _sources_of(sources: Sources, table: int) -> list[OpenSegment]:
    """What counts of one table."""
    return [
        OpenSegment(source.objects, _of_table(source.picked, table), source.generation)
        for source in sources.newest_first
        if source.generation >= sources.bases.get(table, 0)
    ]


def rows_sent(sources: Sources, table: int) -> int:
    """How many rows of a table the sources hold any version of. Holds one byte a row of the table."""
    sent = np.zeros(sources.schema.tables[table].rows, np.bool_)
    while True:
        mine = [
            OpenSegment(each.objects, _of_table(each.picked, table), each.generation) for each in sources.newest_first
        ]
        try:
            for objects, group in groupby(mine, key=lambda source: source.objects):
                picked = [source.picked for source in group if len(source.picked.chunks)]
                for each, entry, data in read_chunks(objects, picked, sources.pool):
                    sent[decode_chunk(entry, data, sources.schema, each.ref.name).ids] = True
            return int(sent.sum())
        except CorruptionError as error:
            sources.go_around(error)


def _of_table(picked: Picked, table: int) -> Picked:
    entries = picked.front.directory
    return Picked(picked.ref, picked.front, picked.chunks[entries["table"][picked.chunks] == table])


def _overlapping(picked: Picked, row0: int, rows: int) -> Picked:
    """The chunks that may hold rows of a window."""
    entries = picked.front.directory[picked.chunks]
    chosen = (entries["first"] < row0 + rows) & (entries["last"] >= row0)
    return Picked(picked.ref, picked.front, picked.chunks[chosen])


def table_bytes(table: TableSpec) -> int:
    """Bytes of a whole table with its states, under one column shard."""
    row = DTYPE_BYTES[table.dtype] * table.dim
    row += sum(DTYPE_BYTES[state.dtype] * (1 if state.per_row else table.dim) for state in table.states)
    return row * table.rows
