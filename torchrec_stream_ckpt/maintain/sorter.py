"""Collect rows in any order and return them by id, the newest version of each: the content of a segment."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from torchrec_stream_ckpt.format.rows import NUMPY_DTYPES, Array, RowLayout, RowsView, view_rows
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.format.segment import Chunk, chunk_rows

Order = npt.NDArray[np.int64]

_FIRST_ROWS = 64
_GROWTH = 1.25
_WASTE = 1.5


class _Slice:
    """Rows of one table with the same columns, in order of arrival."""

    def __init__(self, layout: RowLayout) -> None:
        self.layout = layout
        self.count = 0
        self._columns: list[Array] = [
            np.empty(_FIRST_ROWS if section.per_row else (_FIRST_ROWS, section.width), NUMPY_DTYPES[section.dtype])
            for section in layout.sections
        ]
        """Ids, weights and states; longer than ``count``."""

    @property
    def capacity_bytes(self) -> int:
        return sum(column.nbytes for column in self._columns)

    def add(self, rows: RowsView) -> None:
        """Add a copy of rows."""
        end = self.count + len(rows.ids)
        if end > len(self._columns[0]):
            capacity = max(end, int(_GROWTH * len(self._columns[0])))
            for column in self._columns:  # no views of them exist: the kernel moves large ones instead of copying
                column.resize((capacity, *column.shape[1:]), refcheck=False)
        for column, values in zip(self._columns, (rows.ids, rows.weights, *rows.states), strict=True):
            column[self.count : end] = values
        self.count = end

    def newest(self) -> tuple[Order, Order | None]:
        """Return (ids in ascending order, index of each one's newest version, None if that is the same order)."""
        ids: Order = self._columns[0][: self.count].view(np.int64)
        if bool((ids[1:] > ids[:-1]).all()):
            return ids, None
        order = np.argsort(ids, kind="stable")
        ordered = ids[order]
        is_newest = np.append(ordered[1:] != ordered[:-1], True)
        return ordered[is_newest], order[is_newest]

    def pack(self, ids: Order, chosen: slice | Order, payload: memoryview) -> None:
        """Write the ``chosen`` rows, whose ids are ``ids``, as a chunk."""
        view = view_rows(self.layout, len(ids), payload)
        view.ids[:] = ids
        for target, source in zip((view.weights, *view.states), self._columns[1:], strict=True):
            if isinstance(chosen, slice):
                target[...] = source[chosen]
            else:
                np.take(source, chosen, axis=0, out=target, mode="clip")


class RowSorter:
    """Holds rows up to a number of bytes.

    Reuses its memory for each segment, because fresh pages cost more than the work done with them.

    Args:
        schema: Schema of the tables that the rows belong to.
    """

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        self.slices: dict[tuple[int, int, int], _Slice] = {}
        self._payloads = np.empty(0, np.uint8)
        """Memory of the payloads that :meth:`chunks` returns."""
        self.num_bytes = 0
        """Bytes of rows held."""

    def add(self, table: int, col0: int, cols: int, rows: RowsView) -> None:
        """Add a copy of rows that are newer than all previous ones."""
        if not len(rows.ids):
            return
        key = (table, col0, cols)
        if key not in self.slices:
            self.slices[key] = _Slice(RowLayout.of(self._schema.tables[table], cols))
        self.slices[key].add(rows)
        self.num_bytes += rows.ids.nbytes + rows.weights.nbytes + sum(state.nbytes for state in rows.states)

    def chunks(self) -> list[Chunk]:
        """Return the rows held, by table, columns and id, and empty the sorter. Valid until rows are added again."""
        held = {key: part for key, part in sorted(self.slices.items()) if part.count}
        newest = {key: part.newest() for key, part in held.items()}
        plan = [
            (key, begin, min(begin + chunk_rows(part.layout), len(newest[key][0])))
            for key, part in held.items()
            for begin in range(0, len(newest[key][0]), chunk_rows(part.layout))
        ]
        lengths = [held[key].layout.offsets(stop - begin)[1] for key, begin, stop in plan]
        payloads = self._make_room(sum(lengths))
        chunks, position = [], 0
        for (key, begin, stop), length in zip(plan, lengths, strict=True):
            (ids, order), payload = newest[key], payloads[position : position + length]
            held[key].pack(ids[begin:stop], slice(begin, stop) if order is None else order[begin:stop], payload)
            chunks.append(Chunk(*key, ids[begin:stop].copy(), payload))
            position += length
        self._let_go()
        return chunks

    def _make_room(self, num_bytes: int) -> memoryview:
        """Return zeroed memory for chunks, so that their gaps are zero."""
        if len(self._payloads) < num_bytes:
            self._payloads = np.zeros(num_bytes, np.uint8)
        else:
            self._payloads[:num_bytes] = 0
        return self._payloads.data[:num_bytes]

    def _let_go(self) -> None:
        """Discard the rows. Keeps the memory unless much of it would be unused for the next segment."""
        kept_bytes = sum(part.capacity_bytes for part in self.slices.values())
        if kept_bytes > _WASTE * self.num_bytes:
            self.slices.clear()
        for part in self.slices.values():
            part.count = 0
        self.num_bytes = 0
