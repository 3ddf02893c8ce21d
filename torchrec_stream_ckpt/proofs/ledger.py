"""Record which blocks fit their proofs while a reader goes from marker to marker, the oldest first.

A block is compared once, at the marker that proves it. It holds the same rows at each later marker until one of them is
sent again. Where markers branch, a copy of the ledger is kept until one branch is read, for its sibling.

A reader of the rows that one marker proves uses a ledger of only that marker's window.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass

import numpy as np

from torchrec_stream_ckpt.find.route import Path
from torchrec_stream_ckpt.format.claim_changes import goes_on
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.format.proof import BLOCK_ROWS, POSITIONS, Digests, Ints, Window, row_keys
from torchrec_stream_ckpt.format.rows import RowsView
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.proofs.compare import MAX_NAMED, Differing, Flags, Tally
from torchrec_stream_ckpt.proofs.rowsums import Slice, plain_sums
from torchrec_stream_ckpt.proofs.seen_marks import Circle, RankReport, common_window, summed_digests
from torchrec_stream_ckpt.proofs.unproved import Compared, Unproved, UnprovedBlock, name_blocks
from torchrec_stream_ckpt.util.types import MarkerId, TableSpec

MEMORY_BYTES = 2 * 2**30
"""Most memory for the sums. If all blocks would take more, only a share of them is checked."""
_BLOCK_BYTES = 64
"""Bytes for a block without its rows, at least."""
_ROWS = np.arange(BLOCK_ROWS)


@dataclass(slots=True)
class _Part:
    """Rows of one column slice since the sums were last settled."""

    values: Ints
    """Shape (rows, sections)."""
    written: Flags
    """Shape (rows,)."""


class _Table:
    """Sums of the newest version of each row of one table, and the results for its blocks.

    A sum does not include the key of its row: that needs the id of the table, which a marker of version 1 does not
    have. Rows of several column slices are whole once each slice has added its part. Then their sums are settled, at
    the latest when slices change.

    With ``only``, all rows of the blocks in that window are read. So a row, or a part of it, that does not arrive is
    lost: it counts as zeros.
    """

    def __init__(self, spec: TableSpec, memory_bytes: int, rotation: int, only: Window | None) -> None:
        self.spec = spec
        self._memory_bytes, self._rotation, self._only = memory_bytes, rotation, only
        self._per_row = np.array([False, *(state.per_row for state in spec.states)])
        self._parts: dict[Slice, _Part] = {}
        self._columns: list[Slice] = []
        """Slices of the parts, ascending."""
        self._slices: frozenset[Slice] = frozenset()
        """Column slices that the settled values of row-wise states belong to."""
        self._slots: Ints | None = None
        count = -(-spec.rows // BLOCK_ROWS)
        self.is_held = count * _BLOCK_BYTES <= memory_bytes if only is None else spec.id is not None
        """False if nothing is compared: its blocks alone would not fit the memory, or no marker can prove them."""
        count *= self.is_held
        self.cells = np.diff(np.minimum(np.arange(count + 1) * BLOCK_ROWS, spec.rows)) * spec.dim
        """Number of cells of each block, in one section."""
        self.open = np.zeros((count, self.sections), np.bool_)
        """True if a proof was compared with the current content of the block."""
        self.bad = np.zeros((count, self.sections), np.bool_)
        self.place = np.full(count, -1, np.int32)
        """Number of the marker whose proof was compared, by block."""
        self.fresh = np.zeros(count, np.bool_)
        """True if a row of the block arrived in the step that is being read."""
        self.checked = self.differing = 0
        self.resplit = False
        """True if row-wise states arrived in other column slices before."""
        if only is not None and spec.id is not None:
            self._slots = self._allocate(only.blocks(spec.id, 0, spec.rows))
            self._known[:] = True

    @property
    def sections(self) -> int:
        """Number of sections: the weights, and each state."""
        return len(self._per_row)

    def _fitting(self, cols: int) -> Ints:
        """Return the blocks that fit the memory, for rows in slices of ``cols`` columns."""
        parts = -(-self.spec.dim // cols)
        row_bytes = self.sections * 9 + (parts * (8 * self.sections + 1) if parts > 1 else 0)
        width = min(POSITIONS, self._memory_bytes * POSITIONS // (row_bytes * len(self.open) * BLOCK_ROWS))
        window = Window(self._rotation * width % POSITIONS, width)
        return window.blocks(0, 0, self.spec.rows) if width else np.empty(0, np.int64)

    def _allocate(self, chosen: Ints) -> Ints:
        """Allocate a slot for each of these blocks. Returns the slot of each block of the table, or -1."""
        slots = np.full(len(self.open), -1, np.int64)
        slots[chosen] = np.arange(len(chosen))
        rows = (chosen[:, None] * BLOCK_ROWS + _ROWS).ravel()
        self._sums = np.zeros((len(rows), self.sections), np.int64)
        self._known = np.repeat((rows >= self.spec.rows)[:, None], self.sections, 1)  # rows beyond the table
        return slots

    def take(self, col0: int, cols: int, rows: RowsView) -> None:
        """Add rows that are newer than all previous ones."""
        if self._slots is None:
            self._slots = self._allocate(self._fitting(cols))
        blocks = np.unique(rows.ids // BLOCK_ROWS)
        self.fresh[blocks] = True
        self._judged(blocks, np.zeros((len(blocks), self.sections), np.bool_), self.bad[blocks])
        chosen = np.flatnonzero(self._slots[rows.ids // BLOCK_ROWS] >= 0)
        if len(chosen):
            ids = rows.ids[chosen]
            places = self._slots[ids // BLOCK_ROWS] * BLOCK_ROWS + ids % BLOCK_ROWS
            arrays = [array[chosen] for array in (rows.weights, *rows.states)]
            self._put((col0, cols), places, np.stack([plain_sums(array, col0, cols) for array in arrays], 1))

    def _put(self, slice_: Slice, places: Ints, sums: Ints) -> None:
        if slice_ not in self._parts and self._overlaps(slice_):
            self.settle()
        if slice_ == (0, self.spec.dim):
            self._belong(frozenset({slice_}))
            self._sums[places] = sums
            self._known[places] = True
            return
        part = self._parts.get(slice_)
        if part is None:
            part = _Part(np.zeros_like(self._sums), np.zeros(len(self._sums), np.bool_))
            self._parts[slice_] = part
            insort(self._columns, slice_)
        part.values[places] = sums
        part.written[places] = True

    def _overlaps(self, slice_: Slice) -> bool:
        """Return whether a slice shares a column with one of the parts, which share none with each other."""
        place = bisect_left(self._columns, slice_)
        return any(_overlap(slice_, other) for other in self._columns[max(0, place - 1) : place + 1])

    def _belong(self, slices: frozenset[Slice]) -> None:
        """Assign the settled values of row-wise states to these slices. Values of other slices become unknown."""
        if slices != self._slices:
            self._slices = slices
            if self._per_row.any():
                places = np.flatnonzero(self._known[:, self._per_row].any(1))
                places = places[self._rows_at(places) < self.spec.rows]
                self.resplit |= len(places) > 0
                self._known[places] = self._known[places] & ~self._per_row

    def _rows_at(self, places: Ints) -> Ints:
        """Return the rows of the table whose sums are at these places."""
        assert self._slots is not None
        blocks = np.flatnonzero(self._slots >= 0)
        return blocks[places // BLOCK_ROWS] * BLOCK_ROWS + places % BLOCK_ROWS

    def settle(self) -> None:
        """Add up the parts of the slices. Rows that only some slices have sent become unknown, or count as lost."""
        if not self._parts:
            return
        places = np.flatnonzero(np.logical_or.reduce([part.written for part in self._parts.values()]))
        sums, known = self._at(places, frozenset(self._parts))
        self._belong(frozenset(self._parts))
        self._sums[places] = sums
        self._known[places] = known
        self._parts, self._columns = {}, []

    def _at(self, places: Ints, own: frozenset[Slice]) -> tuple[Ints, Flags]:
        """Return (sums, whether they are known) of rows, as slices ``own`` have them."""
        sums, known = self._sums[places], self._known[places]
        if self._slices != own:
            known[:, self._per_row] &= (self._rows_at(places) >= self.spec.rows)[:, None]
        if self._parts:
            written = np.stack([part.written[places] for part in self._parts.values()])
            some = written.any(0)
            tiled = sum(cols for _, cols in self._parts) == self.spec.dim
            whole = np.logical_and.reduce(written) & tiled
            sums[some] = sum(part.values[places[some]] for part in self._parts.values())
            known[some] = whole[some, None] | (self._only is not None)
            if own != frozenset(self._parts):
                known[np.ix_(some, self._per_row)] = False
        return sums, known

    def judge(self, blocks: Ints, expected: Digests, own: frozenset[Slice], id_: int, number: int) -> None:
        """Compare the digests that a marker proves for some blocks with the current content.

        Args:
            blocks: Block numbers, ascending.
            expected: Digests of the blocks, shape (blocks, sections).
            own: Column slices of the marker's shards.
            id_: Id of the table.
            number: Number of the marker.
        """
        if self._slots is None:
            return
        here = np.flatnonzero(self._slots[blocks] >= 0)
        blocks, expected = blocks[here], expected[here]
        if not len(blocks):
            return
        sums, known = self._at((self._slots[blocks][:, None] * BLOCK_ROWS + _ROWS).ravel(), own)
        rows = (blocks[:, None] * BLOCK_ROWS + _ROWS).ravel()
        for section in range(self.sections):
            sums[:, section] *= row_keys(id_, section, rows)
        found = sums.reshape(-1, BLOCK_ROWS, self.sections).sum(1).view(np.uint64)
        open_ = np.logical_and.reduce(known.reshape(-1, BLOCK_ROWS, self.sections), 1)
        self._judged(blocks, open_, open_ & (found != expected))
        self.place[blocks] = number

    def _judged(self, blocks: Ints, open_: Flags, bad: Flags) -> None:
        bad = bad & open_
        cells = self.cells[blocks]
        self.checked += int(((open_.astype(np.int64) - self.open[blocks]).sum(1) * cells).sum())
        self.differing += int(bad.sum()) - int(self.bad[blocks].sum())
        self.open[blocks] = open_
        self.bad[blocks] = bad


def _overlap(one: Slice, other: Slice) -> bool:
    return one[0] < other[0] + other[1] and other[0] < one[0] + one[1]


class Ledger:
    """Tables of all markers that descend from one first generation.

    Args:
        lineage: The control partition.
        copies: Number of copies that are kept at once, at most.
        rotation: Number that determines which share of the blocks is checked, if not all of them fit.
        memory_bytes: Maximum bytes of the sums and their copies. If all blocks would take more, only a share of them is
            checked.
        only: Window whose blocks alone are checked, all of them. All of their rows are read: one that does not arrive
            is lost. None for all blocks.
    """

    def __init__(
        self,
        lineage: Lineage,
        copies: int = 0,
        rotation: int = 0,
        memory_bytes: int = MEMORY_BYTES,
        only: Window | None = None,
    ) -> None:
        self._lineage, self._memory_bytes, self._rotation = lineage, memory_bytes // (1 + copies), rotation
        self._only = only
        self._markers: list[MarkerId] = []
        """Markers whose proofs were compared, in that order."""
        self._windows: dict[MarkerId, Window] = {}
        self._names: dict[tuple[str, int, int, int, MarkerId], UnprovedBlock] = {}
        self._proving: tuple[MarkerId, Path, Circle] | None = None
        """A marker that blocks do not fit, its path and its circle."""
        self._schema = Schema(())
        self._tables: list[_Table] = []
        self._copies: list[tuple[Schema, list[_Table]]] = []

    def begin(self, schema: Schema) -> None:
        """Begin a generation that builds on no other one: nothing is known of its tables."""
        self._schema, self._names, self._proving = schema, {}, None
        self._tables = [_Table(spec, memory, self._rotation, self._only) for spec, memory in self._shares(schema)]

    def _shares(self, schema: Schema) -> Iterator[tuple[TableSpec, int]]:
        """Yield the tables, each with its share of the memory in bytes."""
        cells = [spec.rows * (1 + len(spec.states)) for spec in schema.tables]
        whole = max(1, sum(cells))
        for spec, mine in zip(schema.tables, cells, strict=True):
            yield spec, self._memory_bytes * mine // whole

    def turn(self, schema: Schema) -> None:
        """Begin a generation that builds on the one before.

        It may hold the tables in other slices, give them ids, and have other tables at their indices. Nothing is known
        of those.
        """
        before, self._schema = self._schema.tables, schema
        for table in self._tables:
            table.settle()
        kept = [index < len(before) and goes_on(before[index], spec) for index, spec in enumerate(schema.tables)]
        self._tables = [
            self._tables[index] if kept[index] else _Table(spec, memory, self._rotation, self._only)
            for index, (spec, memory) in enumerate(self._shares(schema))
        ]

    def fork(self) -> None:
        """Keep a copy of all tables, to read one branch after the other. Forks nest."""
        self._copies.append((self._schema, deepcopy(self._tables)))

    def back(self) -> None:
        """Return to the copy that was kept last."""
        self._schema, self._tables = self._copies.pop()

    def read_on(self) -> None:
        """Begin the next interval, or piece of a store."""
        for table in self._tables:
            table.fresh[:] = False

    def rows(self, table: int, col0: int, cols: int, rows: RowsView) -> None:
        """Add rows that are newer than all previous ones, each once."""
        if len(rows.ids) and self._tables[table].is_held:
            self._tables[table].take(col0, cols, rows)

    def judge(self, marker: MarkerId, said: Sequence[RankReport], *, within: bool = False) -> None:
        """Judge the rows by the proofs of the ranks at the current marker.

        Args:
            marker: Id of the marker.
            said: Proofs of all of its ranks.
            within: Whether the rows are those of a later marker. Blocks that it sent are then skipped.

        Raises:
            CorruptionError: a proof has more or fewer digests than its shards have.
        """
        window = common_window(each.proof for each in said)
        if window is None:
            return
        self._windows[marker] = window
        self._markers.append(marker)
        schema = self._lineage.claims[marker.generation].schema
        for index, (blocks, expected, own) in summed_digests(said, schema, window).items():
            table, id_ = self._tables[index], schema.tables[index].id
            if id_ is None or id_ != self._schema.tables[index].id:
                continue
            if within:
                kept = np.flatnonzero(~table.fresh[blocks])
                blocks, expected = blocks[kept], expected[kept]
            table.judge(blocks, expected, frozenset(own), id_, len(self._markers) - 1)

    def outcome(self) -> Compared:
        """Return the result for the rows of the current marker."""
        total = self._schema.cells
        checked = sum(table.checked for table in self._tables)
        if not any(table.differing for table in self._tables):
            return Compared(checked, total)
        blocks: list[UnprovedBlock] = []
        for index, table in enumerate(self._tables):
            bad = np.argwhere(table.bad)[: MAX_NAMED - len(blocks)].tolist()
            blocks += [self._name(index, block, section, int(table.place[block])) for block, section in bad]
        tables = tuple(spec.name for spec, table in self._named() if table.differing)
        count = sum(table.differing for table in self._tables)
        return Compared(checked, total, Unproved(count, tuple(blocks), tables))

    def _name(self, index: int, block: int, section: int, number: int) -> UnprovedBlock:
        """Describe a block that does not fit the proof of a marker. All markers that hold the block share the text."""
        marker = self._markers[number]
        key = (self._schema.tables[index].name, index, block, section, marker)
        if key not in self._names:
            if self._proving is None or self._proving[0] != marker:
                path = Path.to(self._lineage, marker)
                windows = {path.place(each): self._windows[each] for each in path.chain if each in self._windows}
                self._proving = marker, path, Circle(windows)
            _, path, circle = self._proving
            differing = Tally(named=(Differing(index, block, section, path.place(marker)),))
            unproved = name_blocks(differing, self._schema, path, circle)
            assert unproved is not None
            (self._names[key],) = unproved.blocks
        return self._names[key]

    @property
    def uncompared(self) -> tuple[str, ...]:
        """Tables whose row-wise states arrived in other column slices than those of the newest generation."""
        return tuple(spec.name for spec, table in self._named() if table.resplit)

    def _named(self) -> Iterator[tuple[TableSpec, _Table]]:
        """Return each table with its current spec."""
        return zip(self._schema.tables, self._tables, strict=True)
