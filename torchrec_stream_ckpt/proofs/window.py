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
from torchrec_stream_ckpt.find.route import Path
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.format.manifest import SegmentRef
from torchrec_stream_ckpt.format.notes import Notes
from torchrec_stream_ckpt.format.proof import BLOCK_ROWS, Window
from torchrec_stream_ckpt.format.rows import RowsView
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.proofs.rowsums import Slice, TableSums, compare_sums
from torchrec_stream_ckpt.proofs.seen_marks import SeenMarks, common_window
from torchrec_stream_ckpt.proofs.shares import SHARE_BYTES, ShareFound, WindowShare, compare_shares, cut_window
from torchrec_stream_ckpt.proofs.unproved import Compared
from torchrec_stream_ckpt.store.api import Objects, Readable
from torchrec_stream_ckpt.store.catalog import Catalog, Picked, Piece
from torchrec_stream_ckpt.store.head import Head
from torchrec_stream_ckpt.store.ranges import SMALL_BYTES
from torchrec_stream_ckpt.store.reader import open_segments
from torchrec_stream_ckpt.util.types import MarkerId, TableShard

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
        run: Reads shares of a window in workers, with whole chunks if its flag is set. If None, this process reads all
            of them.
    """

    def __init__(
        self,
        objects: Objects,
        pool: Executor,
        progress: Callable[[int], None] = lambda _: None,
        run: Callable[[Sequence[WindowShare], bool], list[ShareFound]] | None = None,
    ) -> None:
        self._objects = objects
        self._pool = pool
        self._progress = progress
        self._run = run
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
        opened = self._pieces(near, catalog, lineage, marker, cover)
        pieces = tuple((lineage.claims[piece.generation].schema, piece) for piece in opened)
        reading = _MarkerWindow(lineage, Path.at(lineage, marker), notes, window, pieces)
        try:
            found = self._read(near, reading, whole=False)
        except CorruptionError:
            found = None
        if found is None or found.differing:
            near.clear()
            found = self._read(self._objects, reading, whole=True)
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

    def _read(self, objects: Readable, reading: _MarkerWindow, *, whole: bool) -> WindowCheck:
        shares = cut_window(reading.schema, reading.window, reading.shards, reading.pieces, SHARE_BYTES)
        if self._run is not None and len(shares) > 1:
            found = self._run(shares, whole)
            self._progress(sum(share.num_bytes for share in found))
        else:
            found = [share.read(objects, self._pool, self._progress, whole=whole) for share in shares]
        compared = compare_shares(reading.schema, seen_at(reading.path, reading.notes), found)
        compared = replace(compared, total=cells_of(reading.schema, reading.window))
        return WindowCheck(reading.marker, reading.window, compared, sum(share.num_bytes for share in found))


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
class _MarkerWindow:
    """One marker while its window is read."""

    lineage: Lineage
    path: Path
    """The path with only the marker."""
    notes: tuple[Notes, ...]
    window: Window
    pieces: tuple[tuple[Schema, Piece], ...]
    """Each with the schema of its generation: an older one may have had other tables."""

    @property
    def marker(self) -> MarkerId:
        return self.path.chain[0]

    @property
    def schema(self) -> Schema:
        return self.lineage.claims[self.marker.generation].schema

    @property
    def shards(self) -> list[TableShard]:
        """Shards of its ranks."""
        return _with_rows(shard for each in self.notes for shard in each.shards)


def seen_at(path: Path, notes: Sequence[Notes]) -> SeenMarks:
    """Collect the reports of the ranks of one marker. ``path`` is only the marker."""
    seen = SeenMarks(path)
    seen.told({path.chain[-1]: tuple(notes)})
    return seen


def _with_rows(shards: Iterable[TableShard]) -> list[TableShard]:
    return [shard for shard in shards if shard.rows and shard.cols]


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
    schema = lineage.claims[state.marker.generation].schema
    slices: dict[int, set[Slice]] = {}
    for index, col0, cols in state.columns:
        slices.setdefault(index, set()).add((col0, cols))
    own: dict[int, set[Slice]] = {}
    for shard in _with_rows(shard for each in state.notes for shard in each.shards):
        own.setdefault(shard.table, set()).add((shard.col0, shard.cols))
    sums, seen, num_bytes = dict[int, TableSums](), seen_at(Path.at(lineage, state.marker), state.notes), 0
    for index, table in schema.live:
        if table.id is not None and table.rows and window.width:
            sums[index] = TableSums(table, sorted(slices.get(index, ())), sorted(own.get(index, ())))
            sent = sums[index].allocate(window)
            seen.sent |= {TableShard(index, 0, table.rows, *columns): sent for columns in sums[index].own}
    for each in state.slices:
        table = schema.tables[each.table]
        if each.table not in sums:
            continue
        assert table.id is not None
        blocks = window.blocks(table.id, 0, table.rows)
        ids = (blocks[:, None] * BLOCK_ROWS + np.arange(BLOCK_ROWS)).ravel()
        ids = ids[ids < table.rows]
        weights, *states = (array[ids] for array in head.arrays(each, schema).arrays)
        if len(ids):
            sums[each.table].take(each.col0, each.cols, RowsView(ids, weights, tuple(states)), 0)
        num_bytes += weights.nbytes + sum(array.nbytes for array in states)
    compared = compare_sums(schema, seen, lambda index, *each: sums[index].digests(*each))
    compared = replace(compared, total=cells_of(schema, window))
    return WindowCheck(state.marker, window, compared, num_bytes)
