"""Gather rows as they come and give them back by id, the newest version of each: the body of a segment."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from torchrec_stream_ckpt.format.control import Schema
from torchrec_stream_ckpt.format.rows import Array, RowLayout, RowsView, view_rows
from torchrec_stream_ckpt.format.segment import Chunk, chunk_rows


@dataclass(slots=True)
class _Slice:
    """Rows of one table with the same columns, in the order in which they came."""

    ids: list[npt.NDArray[np.int64]] = field(default_factory=list)
    sections: list[tuple[Array, ...]] = field(default_factory=list)
    """Weights and states of each batch."""

    def newest(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64] | None]:
        """(ids, ascending; where each one's newest version stands, None if that is the same order)."""
        ids = self.ids[0] if len(self.ids) == 1 else np.concatenate(self.ids)
        if bool((ids[1:] > ids[:-1]).all()):
            return ids, None
        order = np.argsort(ids, kind="stable")
        ordered = ids[order]
        is_newest = np.append(ordered[1:] != ordered[:-1], True)
        return ordered[is_newest], order[is_newest]


class RowSorter:
    """Holds rows up to a number of bytes.

    Args:
        schema: The tables that the rows are of.
    """

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        self._slices: dict[tuple[int, int, int], _Slice] = {}
        self.num_bytes = 0
        """Bytes held."""

    def add(self, table: int, col0: int, cols: int, rows: RowsView) -> None:
        """Take rows that are newer than all before; their memory must stay as it is until :meth:`chunks` is done."""
        if not len(rows.ids):
            return
        part = self._slices.setdefault((table, col0, cols), _Slice())
        part.ids.append(rows.ids)
        part.sections.append((rows.weights, *rows.states))
        self.num_bytes += rows.ids.nbytes + rows.weights.nbytes + sum(state.nbytes for state in rows.states)

    def chunks(self) -> Iterator[Chunk]:
        """What was taken, by table, columns and id; empties the sorter as it goes."""
        for table, col0, cols in sorted(self._slices):
            part = self._slices.pop((table, col0, cols))
            layout = RowLayout.of(self._schema.tables[table], cols)
            ids, order = part.newest()
            columns = [
                batches[0] if len(batches) == 1 else np.concatenate(batches)
                for batches in zip(*part.sections, strict=True)
            ]
            height = chunk_rows(layout)
            for begin in range(0, len(ids), height):
                stop = min(begin + height, len(ids))
                chosen = slice(begin, stop) if order is None else order[begin:stop]
                yield Chunk(table, col0, cols, ids[begin:stop], _pack(layout, ids[begin:stop], columns, chosen))
        self.num_bytes = 0


def _pack(
    layout: RowLayout, ids: npt.NDArray[np.int64], columns: list[Array], chosen: slice | npt.NDArray[np.int64]
) -> bytearray:
    payload = bytearray(layout.offsets(len(ids))[1])
    view = view_rows(layout, len(ids), memoryview(payload))
    view.ids[:] = ids
    for target, source in zip((view.weights, *view.states), columns, strict=True):
        if isinstance(chosen, slice):
            target[...] = source[chosen]
        else:
            np.take(source, chosen, axis=0, out=target, mode="clip")
    return payload
