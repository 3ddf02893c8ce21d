"""Digests of the newest version of each row, for a reader that reads a marker without holding it as tables.

There is one number for each row, section and column slice. A newer version of a row replaces the older one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from torchrec_stream_ckpt.format.proof import (
    BLOCK_ROWS,
    Digests,
    Ints,
    Window,
    column_keys,
    digest_rows,
    per_row_keys,
    row_keys,
    words_of,
)
from torchrec_stream_ckpt.format.rows import Array, RowsView
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.proofs.compare import Check
from torchrec_stream_ckpt.proofs.seen_marks import NEVER, Circle, SeenMarks, agree
from torchrec_stream_ckpt.proofs.unproved import Compared, name_blocks
from torchrec_stream_ckpt.util.types import TableSpec

_CHUNK_WORDS = 1 << 16
"""Words added up at a time, so that they stay in a cache."""
_NO_KEY = np.ones(1, np.int64)

Slice = tuple[int, int]
"""(first column, columns)."""


def compare_sums(schema: Schema, seen: SeenMarks, digests: Callable[[int, Slice, Ints], Digests]) -> Compared:
    """Compare digests of all rows with those in MARKs.

    Args:
        schema: Schema as the marker's generation claimed it, with ids.
        seen: Its ``sent`` names the blocks with digests.
        digests: Returns the digests of one table, a column slice of the marker's generation, and ascending blocks;
            shape (blocks, sections).
    """
    circle = Circle(agree([seen.marks.windows()], seen.marks.floor))
    check = Check(schema, seen.path, seen.marks, circle, seen.sent)
    check.expect()
    for shard in seen.sent:
        id_ = schema.tables[shard.table].id
        assert id_ is not None
        blocks = check.blocks_of(id_, 0, shard.rows)
        check.found(shard.table, blocks, digests(shard.table, (shard.col0, shard.cols), blocks))
    tally = check.tally({})
    return Compared(tally.checked, _cells(schema), name_blocks(tally, schema, seen.path, circle))


def _cells(schema: Schema) -> int:
    return sum(table.rows * table.dim * (1 + len(table.states)) for table in schema.tables)


class TableSums:
    """The numbers of one table.

    Columns between two adjacent edges of any slices are added up together.

    Args:
        spec: The table, with an id.
        slices: All column slices in which rows arrive.
        own: Column slices of the marker's generation.
    """

    def __init__(self, spec: TableSpec, slices: Sequence[Slice], own: Sequence[Slice]) -> None:
        self.spec, self.own = spec, own
        edges = sorted({edge for col0, cols in (*slices, *own) for edge in (col0, col0 + cols)})
        parts = [(begin, end - begin) for begin, end in pairwise(edges)]
        self._numbers: dict[tuple[int, Slice], int] = {}
        """(section, columns) -> index among a row's numbers."""
        for section in range(1 + len(spec.states)):
            for columns in own if self._per_row(section) else parts:
                self._numbers[section, columns] = len(self._numbers)
        self._parts = parts

    def _per_row(self, section: int) -> bool:
        return section > 0 and self.spec.states[section - 1].per_row

    def allocate(self, window: Window) -> npt.NDArray[np.int32]:
        """Allocate the numbers for the blocks of ``window``.

        Returns the place of the marker that sent each block of the table last.
        """
        assert self.spec.id is not None
        count = -(-self.spec.rows // BLOCK_ROWS)
        chosen = window.blocks(self.spec.id, 0, self.spec.rows)
        self._slot = np.full(count, -1, np.int64)
        self._slot[chosen] = np.arange(len(chosen))
        self._values = np.zeros((len(chosen) * BLOCK_ROWS, len(self._numbers)), np.int64)
        self._sent = np.full(count, NEVER, np.int32)
        self._sent[chosen] = -1
        return self._sent

    def take(self, col0: int, cols: int, rows: RowsView, place: int) -> None:
        """Add at least one row, each once, that are newer than all previous ones.

        Args:
            col0: First column of their slice.
            cols: Number of columns of it.
            rows: The rows.
            place: Place of the marker for which they were sent, or whose state they have.
        """
        ids, arrays = rows.ids, (rows.weights, *rows.states)
        slots = self._slot[ids // BLOCK_ROWS]
        if int(slots.min()) < 0:
            chosen = np.flatnonzero(slots >= 0)
            ids, slots = ids[chosen], slots[chosen]
            arrays = tuple(array[chosen] for array in arrays)
        blocks = ids // BLOCK_ROWS
        self._sent[blocks] = np.maximum(self._sent[blocks], np.int32(place))
        if self.spec.has_row_state and (col0, cols) not in self.own:
            self._sent[blocks] = NEVER  # a state of other columns has no number
            return
        places = slots * BLOCK_ROWS + ids % BLOCK_ROWS
        for section, array in enumerate(arrays):
            for columns in self._columns(section, col0, cols):
                self._values[places, self._numbers[section, columns]] = self._digests(
                    section, columns, ids, array, columns[0] - col0
                )

    def _columns(self, section: int, col0: int, cols: int) -> list[Slice]:
        if self._per_row(section):
            return [(col0, cols)]
        return [part for part in self._parts if col0 <= part[0] and part[0] + part[1] <= col0 + cols]

    def _digests(self, section: int, columns: Slice, ids: Ints, array: Array, first: int) -> Ints:
        """Return one number per row."""
        assert self.spec.id is not None
        values = array if self._per_row(section) else array[:, first : first + columns[1]]
        return plain_sums(values, *columns) * row_keys(self.spec.id, section, ids)

    def digests(self, own: Slice, blocks: Ints) -> Digests:
        """Return digests of one slice of the marker's generation, shape (blocks, sections)."""
        found = np.zeros((len(blocks), 1 + len(self.spec.states)), np.int64)
        by_block = self._values.reshape(-1, BLOCK_ROWS, len(self._numbers))
        slots = self._slot[blocks]
        for section in range(found.shape[1]):
            for columns in self._columns(section, *own):
                found[:, section] += by_block[slots, :, self._numbers[section, columns]].sum(1)
        return found.view(np.uint64)


def plain_sums(values: Array, col0: int, cols: int) -> Ints:
    """Return one number per row, without the key of the row.

    Args:
        values: Shape (rows, cols), or (rows,) for a state with one value per row.
        col0: First column of the slice.
        cols: Number of columns of it.
    """
    keys = (per_row_keys if values.ndim == 1 else column_keys)(col0, cols, 2 if values.itemsize == 8 else 1)
    found, step = np.empty(len(values), np.int64), max(1, _CHUNK_WORDS // len(keys))
    for begin in range(0, len(values), step):
        part = values[begin : begin + step]
        found[begin : begin + step] = digest_rows(words_of(part[:, None] if part.ndim == 1 else part), keys, _NO_KEY)
    return found
