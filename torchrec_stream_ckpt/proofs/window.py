"""Compare the rows that one marker proves, as a store holds them, with its proof. No other data is read.

Also compares the rows in a HEAD that its marker proves with that proof.
"""

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
from torchrec_stream_ckpt.format.rows import RowsView
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.proofs.ledger import Ledger
from torchrec_stream_ckpt.proofs.seen_marks import RankReport, common_window
from torchrec_stream_ckpt.proofs.unproved import Compared
from torchrec_stream_ckpt.store.api import Objects, Readable
from torchrec_stream_ckpt.store.catalog import Catalog, Picked, Piece
from torchrec_stream_ckpt.store.head import Head
from torchrec_stream_ckpt.store.ranges import SMALL_BYTES, read_window
from torchrec_stream_ckpt.store.reader import open_segments
from torchrec_stream_ckpt.util.types import MarkerId

_MOST_OPEN = 2**14
"""Most segments whose directories are kept from marker to marker: about 40 MB."""
_MOST_AT_HAND = 64 * 2**20
"""Most bytes of small objects that are kept while one marker is compared: each is read once, directory and rows."""


@dataclass(frozen=True, slots=True)
class WindowCheck:
    """Result of the comparison with one marker's proof."""

    marker: MarkerId
    window: Window | None
    """Window of the proof. None if the marker proves nothing."""
    compared: Compared = field(default_factory=Compared)
    """Cells of the window alone."""
    num_bytes: int = 0
    """Bytes that were read."""

    @property
    def differing(self) -> int:
        """Number of blocks that differ from their proof, each once for weights and once for each state."""
        return self.compared.unproved.count if self.compared.unproved is not None else 0


class WindowReader:
    """Checks markers of one store, each by its own window.

    Args:
        objects: The store.
        pool: Threads to read with.
        progress: Called with the number of bytes of rows that were read.
    """

    def __init__(self, objects: Objects, pool: Executor, progress: Callable[[int], None] = lambda _: None) -> None:
        self._objects = objects
        self._pool = pool
        self._progress = progress
        self._open: dict[SegmentRef, Picked] = {}
        """Directories of segments, the most recently used last: many markers are read through the same pieces."""

    def check(
        self, lineage: Lineage, catalog: Catalog, marker: MarkerId, cover: Sequence[Piece] | None = None
    ) -> WindowCheck:
        """Read the rows that a marker proves, from the pieces that a restore uses, and compare them.

        Rows that do not match are read again with their whole chunks. So altered objects of the store are reported as
        such, and only rows with correct checksums count as not proved.

        Args:
            lineage: The control partition.
            catalog: Catalog of the store.
            marker: A marker that the store serves.
            cover: The pieces that lead to it. If None, they are looked up along the path to the marker.

        Raises:
            CorruptionError: An object of the store is missing or altered. Names it.
            OtherLogError: The marker's manifest is of another history, even if a fold has its rows.
            StoreUnavailableError: The store does not answer.
        """
        if cover is None:
            cover = catalog.cover(lineage.chain(marker), pool=self._pool)
        if not cover or cover[-1].end != marker:
            raise CorruptionError("the store has a gap before this marker", marker=marker)
        near, last = _AtHand(self._objects), catalog.check(lineage.find(marker)).last
        notes = tuple(Notes.from_json(each.front.notes, each.ref.name) for each in self._opened(near, catalog, last))
        window = window_of(notes)
        if window is None:
            return WindowCheck(marker, None)
        pieces = self._pieces(near, catalog, lineage, marker, cover)
        proof = _MarkerProof(lineage, marker, window, notes)
        try:
            found = self._read(near, proof, pieces, whole=False)
        except CorruptionError:
            found = None
        if found is None or found.differing:
            near.clear()
            found = self._read(self._objects, proof, pieces, whole=True)
        return found

    def _opened(self, near: _AtHand, catalog: Catalog, refs: Sequence[SegmentRef]) -> list[Picked]:
        """Return all chunks of each segment. Segments that were not read yet are read; small objects whole."""
        missing = [ref for ref in dict.fromkeys(refs) if ref not in self._open]
        near.take(missing, self._pool)
        found = {ref: self._open.pop(ref) for ref in dict.fromkeys(refs) if ref in self._open}
        found |= zip(missing, open_segments(near, missing, catalog.job, self._pool), strict=True)
        self._open |= found
        for ref in list(islice(self._open, max(0, len(self._open) - _MOST_OPEN))):
            del self._open[ref]
        return [found[ref] for ref in refs]

    def _pieces(
        self, near: _AtHand, catalog: Catalog, lineage: Lineage, marker: MarkerId, cover: Sequence[Piece]
    ) -> tuple[Piece, ...]:
        """Return the opened pieces of a cover, without tables that a later generation has sent whole."""
        picked = iter(self._opened(near, catalog, [ref for piece in cover for ref in piece.segments]))
        bases, pieces = lineage.bases(marker), []
        for piece in cover:
            stale = [table for table, base in bases.items() if base > piece.generation]
            opened = [each.only(~np.isin(each.entries["table"], stale)) for each in islice(picked, len(piece.segments))]
            pieces.append(replace(piece, opened=tuple(opened)))
        return tuple(pieces)

    def _read(self, objects: Readable, proof: _MarkerProof, pieces: Sequence[Piece], *, whole: bool) -> WindowCheck:
        ledger, num_bytes = proof.begin(), 0
        for piece in pieces:
            schema = proof.lineage.claims[piece.generation].schema  # an older one may have had other tables
            for read in read_window(objects, piece.opened, schema, proof.ids, proof.window, self._pool, whole=whole):
                for found in read.chunks:
                    ledger.rows(found.table, found.col0, found.cols, found.rows)
                num_bytes += read.num_bytes
                self._progress(read.num_bytes)
        return proof.compared(ledger, num_bytes)


class _AtHand:
    """A store with small objects kept in memory while one marker is compared."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._held: dict[str, memoryview] = {}
        self._num_bytes = 0

    def take(self, refs: Iterable[SegmentRef], pool: Executor) -> None:
        """Read small objects whole, in parallel, as far as there is room. Raises as ``Objects.read``."""
        names = []
        for ref in refs:
            if ref.num_bytes <= SMALL_BYTES and self._num_bytes + ref.num_bytes <= _MOST_AT_HAND:
                self._num_bytes += ref.num_bytes
                names.append((ref.name, ref.num_bytes))
        self._held |= pool.map(lambda each: (each[0], self._objects.read(each[0], 0, each[1])), names)

    def clear(self) -> None:
        """Drop all objects in memory."""
        self._held.clear()

    def read(self, name: str, begin: int = 0, end: int | None = None) -> memoryview:
        """Read an object as ``Objects.read`` does, from memory if possible."""
        held = self._held.get(name)
        if held is None or end is None or end > len(held):
            return self._objects.read(name, begin, end)
        return held[begin:end]


@dataclass(frozen=True, slots=True)
class _MarkerProof:
    """The proof of one marker."""

    lineage: Lineage
    marker: MarkerId
    window: Window
    notes: Sequence[Notes]

    @property
    def schema(self) -> Schema:
        return self.lineage.claims[self.marker.generation].schema

    @property
    def ids(self) -> list[int | None]:
        """Ids of the tables."""
        return [table.id for table in self.schema.tables]

    def begin(self) -> Ledger:
        """Return a ledger for the rows of the window, the oldest first."""
        ledger = Ledger(self.lineage, only=self.window)
        ledger.begin(self.schema)
        return ledger

    def compared(self, ledger: Ledger, num_bytes: int) -> WindowCheck:
        """Return the result for the rows in a ledger. Raises CorruptionError as :meth:`Ledger.judge`."""
        ledger.judge(self.marker, [RankReport(each.shards, each.mark.proof) for each in self.notes])
        compared = replace(ledger.outcome(), total=cells_of(self.schema, self.window))
        return WindowCheck(self.marker, self.window, compared, num_bytes)


def window_of(notes: Sequence[Notes]) -> Window | None:
    """Return the window that a marker proves, from the reports of its ranks. Returns None if it proves no window."""
    return common_window(each.mark.proof for each in notes)


def cells_of(schema: Schema, window: Window) -> int:
    """Return the cells of the blocks of a window, counted once for weights and once for each state."""
    total = 0
    for table in schema.tables:
        if table.id is not None and table.rows:
            blocks = window.blocks(table.id, 0, table.rows)
            rows = int(np.minimum(BLOCK_ROWS, table.rows - blocks * BLOCK_ROWS).sum())
            total += rows * table.dim * (1 + len(table.states))
    return total


def check_head(lineage: Lineage, head: Head) -> WindowCheck:
    """Read the rows that a HEAD's marker proves from its arrays, and compare them.

    Args:
        lineage: The control partition. It has the marker.
        head: An open HEAD to which no process writes meanwhile.

    Raises:
        HeadDamagedError: A file of it is missing or too short, or its checksums were altered.
    """
    state = head.state
    window = window_of(state.notes)
    if window is None:
        return WindowCheck(state.marker, None)
    proof, num_bytes = _MarkerProof(lineage, state.marker, window, state.notes), 0
    ledger = proof.begin()
    for each in state.slices:
        table = proof.schema.tables[each.table]
        if table.id is None:
            continue
        blocks = window.blocks(table.id, 0, table.rows)
        ids = (blocks[:, None] * BLOCK_ROWS + np.arange(BLOCK_ROWS)).ravel()
        ids = ids[ids < table.rows]
        weights, *states = (array[ids] for array in head.arrays(each, proof.schema).arrays)
        ledger.rows(each.table, each.col0, each.cols, RowsView(ids, weights, tuple(states)))
        num_bytes += weights.nbytes + sum(array.nbytes for array in states)
    return proof.compared(ledger, num_bytes)
