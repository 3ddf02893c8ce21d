"""Compare the rows that one marker proves, as a store holds them, with its proof. Nothing else is read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np

from torchrec_stream_ckpt.errors import CorruptionError
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.format.manifest import SegmentRef
from torchrec_stream_ckpt.format.notes import Notes
from torchrec_stream_ckpt.format.proof import BLOCK_ROWS, Window
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.format.segment import SegmentKind, slices_of
from torchrec_stream_ckpt.proofs.met import Met
from torchrec_stream_ckpt.proofs.rowsums import RowSums, Slice
from torchrec_stream_ckpt.proofs.unproved import Compared
from torchrec_stream_ckpt.route.path import Path
from torchrec_stream_ckpt.store.api import Objects
from torchrec_stream_ckpt.store.catalog import Catalog, Picked, Piece
from torchrec_stream_ckpt.store.ranges import read_window
from torchrec_stream_ckpt.store.reader import load_notes, open_segments
from torchrec_stream_ckpt.types import MarkerId, TableShard

_MOST_OPEN = 2**14
"""Segments of folds whose directories are kept from marker to marker: some 40 MB."""


@dataclass(frozen=True, slots=True)
class WindowCheck:
    """What came of one marker's proof."""

    marker: MarkerId
    window: Window | None
    """Which blocks it speaks of; None: the marker proves nothing."""
    compared: Compared = field(default_factory=Compared)
    """Cells of the window alone."""
    num_bytes: int = 0
    """What was read."""

    @property
    def differing(self) -> int:
        """Blocks that are not as they were proved, each once for weights and once for each state."""
        return self.compared.unproved.count if self.compared.unproved is not None else 0


class WindowReader:
    """Checks markers of one store, each by its own window.

    Args:
        objects: The store.
        pool: Threads to read with.
        progress: Called with the bytes of rows that were read.
    """

    def __init__(self, objects: Objects, pool: Executor, progress: Callable[[int], None] = lambda _: None) -> None:
        self._objects = objects
        self._pool = pool
        self._progress = progress
        self._open: dict[SegmentRef, Picked] = {}
        """Segments of folds: many markers are read through the same base."""

    def check(
        self, lineage: Lineage, catalog: Catalog, marker: MarkerId, cover: Sequence[Piece] | None = None
    ) -> WindowCheck:
        """Read the rows that a marker proves, by the pieces that a restore takes, and compare them.

        Rows that do not fit are read again with their whole chunks, so that what was altered in the store is named as
        that, and only rows whose checksums are right count as not proved.

        Args:
            lineage: The control partition.
            catalog: What the store holds.
            marker: One that the store serves.
            cover: The pieces that lead there; None: they are looked up, along all that leads to the marker.

        Raises:
            CorruptionError: an object of the store is gone or altered; names it.
            StoreUnavailableError: the store does not answer.
        """
        if cover is None:
            cover = catalog.cover(lineage.chain(marker), pool=self._pool)
        if not cover or cover[-1].end != marker:
            raise CorruptionError("the store has a gap before this marker", marker=marker)
        notes = load_notes(catalog, marker, self._pool)
        window = window_of(notes)
        if window is None:
            return WindowCheck(marker, None)
        pieces = self._pieces(catalog, lineage, marker, cover)
        reading = _MarkerWindow(lineage, Path.at(lineage, marker), notes, window, pieces)
        try:
            found = self._read(reading, whole=False)
        except CorruptionError:
            found = None
        if found is None or found.differing:
            found = self._read(reading, whole=True)
        return found

    def _pieces(
        self, catalog: Catalog, lineage: Lineage, marker: MarkerId, cover: Sequence[Piece]
    ) -> tuple[Piece, ...]:
        """Open, and without tables that a later generation has sent whole."""
        refs = [ref for piece in cover for ref in piece.segments]
        missing = [ref for ref in refs if ref not in self._open]
        fresh = dict(zip(missing, open_segments(self._objects, missing, catalog.job, self._pool), strict=True))
        picked = iter([self._open.get(ref) or fresh[ref] for ref in refs])
        self._open |= {ref: each for ref, each in fresh.items() if each.front.id.kind is SegmentKind.FOLD}
        for ref in list(islice(self._open, max(0, len(self._open) - _MOST_OPEN))):
            del self._open[ref]
        bases, pieces = lineage.bases(marker), []
        for piece in cover:
            stale = [table for table, base in bases.items() if base > piece.generation]
            opened = [each.only(~np.isin(each.entries["table"], stale)) for each in islice(picked, len(piece.segments))]
            pieces.append(replace(piece, opened=tuple(opened)))
        return tuple(pieces)

    def _read(self, reading: _MarkerWindow, *, whole: bool) -> WindowCheck:
        sums, num_bytes = reading.sums(), 0
        for piece in reading.pieces:
            schema = reading.lineage.claims[piece.generation].schema  # an older one may have had other tables
            window, ids = reading.window, reading.ids
            for each in read_window(self._objects, piece.opened, schema, ids, window, self._pool, whole=whole):
                sums.rows(each.table, each.col0, each.cols, each.rows, 0)
                num_bytes += each.num_bytes
                self._progress(each.num_bytes)
        compared = replace(sums.compare(), total=cells_of(reading.schema, reading.window))
        return WindowCheck(reading.marker, reading.window, compared, num_bytes)


@dataclass(frozen=True, slots=True)
class _MarkerWindow:
    """One marker while its window is read."""

    lineage: Lineage
    path: Path
    """The marker alone."""
    notes: tuple[Notes, ...]
    window: Window
    pieces: tuple[Piece, ...]

    @property
    def marker(self) -> MarkerId:
        return self.path.chain[0]

    @property
    def schema(self) -> Schema:
        return self.lineage.claims[self.marker.generation].schema

    @property
    def ids(self) -> list[int | None]:
        return [table.id for table in self.schema.tables]

    def sums(self) -> RowSums:
        """Empty."""
        slices: dict[int, set[Slice]] = {}
        for picked in (picked for piece in self.pieces for picked in piece.opened):
            for table, col0, cols in slices_of(picked.entries):
                slices.setdefault(table, set()).add((col0, cols))
        return window_sums(self.schema, self.path, self.notes, slices, self.window)


def window_sums(
    schema: Schema, path: Path, notes: Sequence[Notes], slices: dict[int, set[Slice]], window: Window
) -> RowSums:
    """Numbers of the rows that one marker proves, to be compared with its proof.

    Args:
        schema: Of its generation.
        path: The marker alone.
        notes: What its ranks said.
        slices: By table, the column slices that rows will come in.
        window: What they prove.
    """
    met = Met(path)
    met.told({path.chain[-1]: tuple(notes)})
    own = [shard for each in notes for shard in each.shards]
    return RowSums(schema, met, slices, _with_rows(own), window=window)


def _with_rows(shards: Iterable[TableShard]) -> list[TableShard]:
    return [shard for shard in shards if shard.rows and shard.cols]


def window_of(notes: Sequence[Notes]) -> Window | None:
    """What a marker proves, by what its ranks said; None: nothing."""
    windows = {each.mark.proof.window if each.mark.proof is not None else None for each in notes}
    return windows.pop() if len(windows) == 1 else None


def cells_of(schema: Schema, window: Window) -> int:
    """Cells of the blocks of a window, counted once for weights and once for each state."""
    total = 0
    for table in schema.tables:
        if table.id is not None and table.rows:
            blocks = window.blocks(table.id, 0, table.rows)
            rows = int(np.minimum(BLOCK_ROWS, table.rows - blocks * BLOCK_ROWS).sum())
            total += rows * table.dim * (1 + len(table.states))
    return total
