"""Merge pieces of the store into a fold: the newest version of every row that they hold, by id.

A fold from the start of the history is a base: a restore reads nothing older. One over a span saves a restore the
versions that the span has overwritten itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from torchrec_stream_ckpt.errors import CorruptionError
from torchrec_stream_ckpt.failpoints import failpoint
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.format.manifest import Fold, SegmentRef
from torchrec_stream_ckpt.format.proof import column_keys, digest_rows, per_row_keys, row_keys, words_of
from torchrec_stream_ckpt.format.rows import RowLayout, RowsView
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.format.segment import ChunkEntry, SegmentId, SegmentKind, check_tables, decode_chunk
from torchrec_stream_ckpt.layout import FoldName
from torchrec_stream_ckpt.materialize.fold import SEGMENT_BYTES, SegmentWriter
from torchrec_stream_ckpt.materialize.sorter import RowSorter
from torchrec_stream_ckpt.store.api import Objects
from torchrec_stream_ckpt.store.catalog import Picked, Piece
from torchrec_stream_ckpt.store.newest import NewestFirst, newest_first
from torchrec_stream_ckpt.store.reader import open_pieces, open_segments, read_chunks


@dataclass(frozen=True, slots=True)
class _MergeWindow:
    """A part of one table that is merged at once: all columns of [col0, col0+cols) came and went together."""

    table: int
    col0: int
    cols: int
    row0: int
    rows: int


def merge(
    objects: Objects,
    lineage: Lineage,
    pieces: Sequence[Piece],
    pool: Executor,
    progress: Callable[[int], None] = lambda _: None,
) -> Fold:
    """Write the fold of ``pieces``, which lie one behind the other, and put it into the store.

    Memory: the rows of one segment twice, and what is read ahead.

    Args:
        objects: The store.
        lineage: The control partition.
        pieces: What to merge.
        pool: Threads to read with.
        progress: Called with the bytes of each chunk that is read.

    Raises:
        CorruptionError: a piece is damaged.
        StoreUnavailableError: the fold was not written.
    """
    start, end, job = pieces[0].start, pieces[-1].end, lineage.job
    schema, bases = lineage.claims[end.generation].schema, lineage.bases(end)
    name = FoldName(job, end, start)
    writer = SegmentWriter(
        objects,
        schema,
        name.segment_name,
        lambda part: SegmentId(SegmentKind.FOLD, job, end, 0, part),
    )
    pieces = open_pieces(objects, pieces, job, pool)
    for picked in (picked for piece in pieces for picked in piece.opened):
        check_tables(picked.front, schema, picked.ref.name)
    rows, merged = RowSorter(schema), _RowDigests(schema)
    for window in _windows(schema, bases, pieces):
        _merge_window(objects, schema, bases, pieces, window, rows, merged, pool, progress)
        if rows.num_bytes >= SEGMENT_BYTES // 2:
            writer.put(rows, last=False)
    writer.put(rows, last=True)
    fold = Fold(job, start, end, pieces[-1].chain, tuple(writer.refs))
    _check_written(objects, fold, schema, merged, pool)
    failpoint("fold.manifest")
    objects.put(name.name, [fold.to_bytes()])
    failpoint("fold.manifest_put")
    return fold


class _RowDigests:
    """Digests of rows, summed up in whatever order they come."""

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        self.rows = 0
        self.digest = np.zeros(1, np.int64)

    def add(self, table: int, col0: int, cols: int, view: RowsView) -> None:
        """At least one row of a table, each once with these columns."""
        self.rows += len(view.ids)
        for section, values in enumerate((view.weights, *view.states)):
            words = words_of(values.reshape(len(view.ids), -1))
            each = max(1, values.dtype.itemsize // 4)
            columns = per_row_keys(col0, cols, each) if values.ndim == 1 else column_keys(col0, cols, each)
            self.digest += digest_rows(words, columns, row_keys(table, section, view.ids)).sum()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _RowDigests) and (self.rows, int(self.digest[0])) == (other.rows, int(other.digest[0]))

    __hash__ = None  # type: ignore[assignment]


def _check_written(objects: Objects, fold: Fold, schema: Schema, merged: _RowDigests, pool: Executor) -> None:
    """Read a fold back before anything relies on it.

    Raises:
        CorruptionError: it holds other rows than were merged.
    """
    found = _RowDigests(schema)
    for each, entry, data in read_chunks(objects, open_segments(objects, fold.segments, fold.job, pool), pool):
        found.add(entry.table, entry.col0, entry.cols, decode_chunk(entry, data, schema, each.ref.name))
    if found != merged:
        raise CorruptionError(
            f"a fold of {merged.rows} rows was read back with {found.rows} rows, or with other bits",
            hint="it is not used; check the memory and the disks of this host, and start the materializer again",
            fold=FoldName(fold.job, fold.end, fold.start).name,
        )


def _windows(schema: Schema, bases: Mapping[int, int], pieces: Sequence[Piece]) -> Iterator[_MergeWindow]:
    """Cut what the pieces hold, by table, columns and rows, so that a window's rows fit half a segment."""
    held: dict[int, list[tuple[int, int, int, int]]] = {}
    for piece, picked in ((each, picked) for each in pieces for picked in each.opened):
        directory = picked.front.directory
        names = ("table", "col0", "cols")
        for table, col0, cols in {tuple(int(entry[name]) for name in names) for entry in directory}:
            if piece.generation >= bases.get(table, 0):
                mine = directory[(directory["table"] == table) & (directory["col0"] == col0)]
                held.setdefault(table, []).append((col0, cols, int(mine["first"].min()), int(mine["last"].max())))
    for table in sorted(held):
        cuts = sorted({edge for col0, cols, _, _ in held[table] for edge in (col0, col0 + cols)})
        first, last = min(each[2] for each in held[table]), max(each[3] for each in held[table])
        for col0, stop in pairwise(cuts):
            if any(begin <= col0 and stop <= begin + cols for begin, cols, _, _ in held[table]):
                layout = RowLayout.of(schema.tables[table], stop - col0)
                height = max(1, SEGMENT_BYTES // 2 // layout.row_bytes)
                for row0 in range(first, last + 1, height):
                    yield _MergeWindow(table, col0, stop - col0, row0, min(height, last + 1 - row0))


def _merge_window(
    objects: Objects,
    schema: Schema,
    bases: Mapping[int, int],
    pieces: Sequence[Piece],
    window: _MergeWindow,
    rows: RowSorter,
    merged: _RowDigests,
    pool: Executor,
    progress: Callable[[int], None],
) -> None:
    """Add the newest version of each row of the window."""
    newest = NewestFirst(window.row0, window.rows)
    picked = [_overlapping(each, window) for each in newest_first(pieces, bases.get(window.table, 0))]
    for each, entry, data in read_chunks(objects, [each for each in picked if len(each.chunks)], pool):
        view = decode_chunk(entry, data, schema, each.ref.name)
        _, chosen = newest.take(view.ids)
        if len(chosen):
            part = _cut(view, chosen, entry, window, each.ref)
            rows.add(window.table, window.col0, window.cols, part)
            merged.add(window.table, window.col0, window.cols, part)
        progress(len(data))


def _overlapping(picked: Picked, window: _MergeWindow) -> Picked:
    """The chunks that may hold rows of the window."""
    entries = picked.entries
    col0, end = entries["col0"].astype(np.int64), entries["col0"].astype(np.int64) + entries["cols"]
    chosen = (
        (entries["table"] == window.table)
        & (col0 <= window.col0)
        & (end >= window.col0 + window.cols)
        & (entries["first"] < window.row0 + window.rows)
        & (entries["last"] >= window.row0)
    )
    return picked.only(chosen)


def _cut(view: RowsView, chosen: np.ndarray, entry: ChunkEntry, window: _MergeWindow, ref: SegmentRef) -> RowsView:
    """A copy of the chosen rows' columns that belong to the window."""
    begin = window.col0 - entry.col0
    columns = slice(begin, begin + window.cols)
    whole = entry.cols == window.cols
    if not whole and any(state.ndim == 1 for state in view.states):
        raise CorruptionError(
            "row-wise state under two column splits, of which none was sent whole",
            segment=ref.name,  # not "name": the object is whole, and must not be mended
            table=window.table,
        )
    states = tuple(state[chosen] if state.ndim == 1 else state[chosen, columns] for state in view.states)
    return RowsView(view.ids[chosen], view.weights[chosen, columns], states)
