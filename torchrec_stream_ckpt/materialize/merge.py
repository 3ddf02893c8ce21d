"""Merge pieces of the store into a fold: the newest version of every row that they hold, by id.

A fold from the start of the history is a base: a restore reads nothing older. One over a span saves a restore the
versions that the span has overwritten itself.

Pieces are sorted runs, and a merge goes through them side by side: it reads each byte of them once, and then once what
it has written. Runs of which too many are open at once go through a scratch folder first (:mod:`.narrow`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from torchrec_stream_ckpt.errors import CorruptionError
from torchrec_stream_ckpt.failpoints import failpoint
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.format.manifest import Fold
from torchrec_stream_ckpt.format.rows import RowLayout
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.format.segment import SegmentId, SegmentKind, check_tables, decode_chunk, slices_of
from torchrec_stream_ckpt.layout import FoldName
from torchrec_stream_ckpt.materialize.fold import SEGMENT_BYTES, SegmentWriter
from torchrec_stream_ckpt.materialize.narrow import ScratchRuns, cut_rows
from torchrec_stream_ckpt.materialize.row_digests import RowDigests
from torchrec_stream_ckpt.materialize.sorter import RowSorter
from torchrec_stream_ckpt.store.api import Objects
from torchrec_stream_ckpt.store.catalog import Picked, Piece
from torchrec_stream_ckpt.store.newest import NewestFirst, newest_first
from torchrec_stream_ckpt.store.reader import open_pieces, open_segments, read_chunks
from torchrec_stream_ckpt.store.runs import Runs, Window, columns_of, cuts_of, read_from


@dataclass(frozen=True, slots=True)
class _TableRuns:
    """What the pieces hold of one table."""

    table: int
    newest: list[Picked]
    """Newest segment first."""
    columns: set[tuple[int, int]]
    first: int
    last: int

    def windows(self, row_bytes: int) -> Iterator[Window]:
        """Rows are cut so that those of a window fit half a segment. All writers of a fold cut them alike."""
        height = max(1, SEGMENT_BYTES // 2 // row_bytes)
        for row0 in range(self.first, self.last + 1, height):
            yield row0, min(row0 + height, self.last + 1)


def merge(
    objects: Objects,
    lineage: Lineage,
    pieces: Sequence[Piece],
    pool: Executor,
    progress: Callable[[int], None] = lambda _: None,
    scratch: Path | None = None,
) -> Fold:
    """Write the fold of ``pieces``, which follow one after the other, and put it into the store.

    Memory: the rows of one segment twice, ``FAN_IN`` open chunks of at most 4 MB, and what is read ahead.

    Args:
        objects: The store.
        lineage: The control partition.
        pieces: What to merge.
        pool: Threads to read with.
        progress: Called with the bytes of each chunk that is read.
        scratch: Where a folder for temporary files may be made; None: ``TMPDIR``.

    Raises:
        CorruptionError: a piece is damaged.
        ScratchUnavailableError: there is no room for temporary files.
        StoreUnavailableError: the fold was not written.
    """
    start, end, job = pieces[0].start, pieces[-1].end, lineage.job
    schema, bases = lineage.claims[end.generation].schema, lineage.bases(end)
    name = FoldName(job, end, start)
    pieces = open_pieces(objects, pieces, job, pool)
    for piece in pieces:
        own = lineage.claims[piece.generation].schema  # rows of tables that it had otherwise are left out by bases
        for picked in piece.opened:
            check_tables(picked.front, own, picked.ref.name)
    rows, merged = RowSorter(schema), RowDigests()
    with (
        ThreadPoolExecutor(1, "stream-ckpt-write") as background,
        closing(ScratchRuns(objects, pool, scratch, progress)) as made,
    ):
        writer = SegmentWriter(
            objects, schema, name.segment_name, lambda part: SegmentId(SegmentKind.FOLD, job, end, 0, part), background
        )
        for each in _tables(bases, pieces):
            for _ in _merge_table(schema, each, rows, merged, made, pool, progress):
                if rows.num_bytes >= SEGMENT_BYTES // 2:
                    writer.put(rows, last=False)
        writer.put(rows, last=True)
        refs = writer.finish()
        made.check()
    fold = Fold(job, start, end, pieces[-1].chain, refs)
    _check_written(objects, fold, schema, merged, pool)
    failpoint("fold.manifest")
    objects.put(name.name, [fold.to_bytes()])
    failpoint("fold.manifest_put")
    return fold


def _check_written(objects: Objects, fold: Fold, schema: Schema, merged: RowDigests, pool: Executor) -> None:
    """Read a fold back before anything relies on it.

    Raises:
        CorruptionError: it holds other rows than were merged.
    """
    found = RowDigests()
    for each, entry, data in read_chunks(objects, open_segments(objects, fold.segments, fold.job, pool), pool):
        found.add(entry.table, entry.col0, entry.cols, decode_chunk(entry, data, schema, each.ref.name))
    if found != merged:
        raise CorruptionError(
            f"a fold of {merged.rows} rows was read back with {found.rows} rows, or with other bits",
            hint="it is not used; check the memory and the disks of this host, and start the materializer again",
            fold=FoldName(fold.job, fold.end, fold.start).name,
        )


def _tables(bases: Mapping[int, int], pieces: Sequence[Piece]) -> Iterator[_TableRuns]:
    """What counts of each table: nothing that is older than the generation that sent it whole."""
    segments = [picked for piece in pieces for picked in piece.opened]
    slices = {picked.ref.name: slices_of(picked.front.directory) for picked in segments}
    tables = sorted({table for each in slices.values() for table, _, _ in each})
    held: dict[int, list[Picked]] = {table: [] for table in tables}
    for piece in reversed(pieces):
        for picked in newest_first([piece]):
            chunks: dict[int, list[np.ndarray]] = {}
            for (table, _, _), place in slices[picked.ref.name].items():
                if piece.generation >= bases.get(table, 0):
                    chunks.setdefault(table, []).append(np.arange(place.start, place.stop))
            for table, numbers in chunks.items():
                held[table].append(Picked(picked.ref, picked.front, np.concatenate(numbers)))
    for table, newest in held.items():
        if newest:
            first = min(int(each.entries["first"].min()) for each in newest)
            last = max(int(each.entries["last"].max()) for each in newest)
            yield _TableRuns(table, newest, columns_of(newest), first, last)


def _merge_table(
    schema: Schema,
    held: _TableRuns,
    rows: RowSorter,
    merged: RowDigests,
    scratch: ScratchRuns,
    pool: Executor,
    progress: Callable[[int], None],
) -> Iterator[None]:
    """Add the newest version of each row of a table; yields after each window."""
    newest = scratch.narrowed(schema, held.newest, held.table)
    for col0, stop in pairwise(cuts_of(held.columns)):
        mine = [each.only(each.entries["col0"] == col0) for each in newest]
        mine = [each for each in mine if len(each.chunks)]
        windows = held.windows(RowLayout.of(schema.tables[held.table], stop - col0).row_bytes)
        for (row0, end), chunks in Runs(mine, schema, read_from(scratch, pool, progress)).through(windows):
            fresh = NewestFirst(row0, end - row0)
            for given in chunks:
                scratch.saw(given)
                _, chosen = fresh.take(given.view.ids)
                if len(chosen):
                    part = cut_rows(given.view, chosen, given.entry, col0, stop - col0, given.picked.ref.name)
                    rows.add(held.table, col0, stop - col0, part)
                    merged.add(held.table, col0, stop - col0, part)
            yield
    scratch.free(newest)
