"""Merge pieces of the store into a fold: the newest version of every row that they hold, by id.

A fold from the start of the history is a base: a restore reads nothing older. A fold of a span saves a restore the
versions that are overwritten within the span.

Pieces are sorted runs, and a merge reads them in parallel. It reads each of their bytes once, and its own output once
more. If too many runs are open at once, they are first merged in a scratch folder (:mod:`.run_merging`). A fold is
planned as a sequence of independent tasks (:mod:`.merge_plan`). Their output does not depend on their number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from torchrec_stream_ckpt.errors import CorruptionError, StoreUnavailableError
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.format.manifest import Fold, SegmentRef
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.format.segment import SegmentId, SegmentKind, check_tables, decode_chunk
from torchrec_stream_ckpt.maintain.engine.api import Site
from torchrec_stream_ckpt.maintain.fold import SEGMENT_BYTES, SegmentWriter
from torchrec_stream_ckpt.maintain.merge_plan import WINDOWS_OF_BLOCK, MergePlan, TableWindows
from torchrec_stream_ckpt.maintain.row_digests import RowDigests
from torchrec_stream_ckpt.maintain.run_merging import ScratchRuns, cut_rows
from torchrec_stream_ckpt.maintain.sorter import RowSorter
from torchrec_stream_ckpt.store.api import Objects
from torchrec_stream_ckpt.store.catalog import Piece
from torchrec_stream_ckpt.store.newest import NewestFirst
from torchrec_stream_ckpt.store.reader import open_pieces, open_segments, read_chunks
from torchrec_stream_ckpt.store.runs import Runs, read_from
from torchrec_stream_ckpt.store.write_once import put_once
from torchrec_stream_ckpt.util.failpoints import failpoint
from torchrec_stream_ckpt.util.layout import FoldName
from torchrec_stream_ckpt.util.types import MarkerId


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MergeTask:
    """Some blocks of a fold, with everything a process needs to write them. The output is a function of this value."""

    fold: FoldName
    schema: Schema
    """Schema at the end of the fold."""
    stretches: tuple[TableWindows, ...]
    """Windows to merge, with the chunks that they are made of."""
    last: int | None
    """Number of the fold's last window if this task has it and so writes the last part. None if another task does."""
    num_bytes: int
    """Bytes of chunks to read."""

    def __str__(self) -> str:
        return f"merge {self.fold.end} from {self.fold.start or 'root'}"

    def run(self, site: Site) -> Merged:
        """Merge the windows and return the result, as ``Task`` describes."""
        read_bytes = 0

        def tell(num_bytes: int) -> None:
            nonlocal read_bytes
            read_bytes += num_bytes
            site.tell(num_bytes)

        refs = merge_share(site.objects, self, site.pool, tell, site.scratch)
        return Merged(refs, read_bytes)


@dataclass(frozen=True, slots=True)
class Merged:
    """Result of one merge task."""

    refs: tuple[SegmentRef, ...]
    read_bytes: int
    """Bytes read of chunks of pieces and of temporary files."""


@dataclass(frozen=True, slots=True)
class Merging:
    """A fold in progress: its tasks, and the fold that they form."""

    job: bytes
    start: MarkerId | None
    end: MarkerId
    chain: int
    """``RankEnd.chain`` of rank 0 at the end."""
    tasks: tuple[MergeTask, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of chunks to read."""
        return sum(task.num_bytes for task in self.tasks)

    def finish(self, objects: Objects, refs: Sequence[Sequence[SegmentRef]], pool: Executor) -> Fold:
        """Put the fold after all tasks have written their segments. With this, the fold is in the store.

        Args:
            objects: The store.
            refs: Segments that each task has written.
            pool: Threads that check whether all segments exist.

        Raises:
            CorruptionError: another fold has its name.
            StoreUnavailableError: the fold was not written, or gc has deleted a segment, which no object named before.
        """
        fold = Fold(self.job, self.start, self.end, self.chain, tuple(ref for each in refs for ref in each))
        _check_there(objects, fold, pool)
        failpoint("fold.manifest")
        put_once(objects, FoldName(self.job, self.end, self.start).name, [fold.to_bytes()])
        failpoint("fold.manifest_put")
        _check_there(objects, fold, pool)  # a gc that did not see the fold may have deleted segments meanwhile
        return fold


def _check_there(objects: Objects, fold: Fold, pool: Executor) -> None:
    """Check that all segments of a fold exist. Raises as :meth:`Merging.finish`."""
    sizes = pool.map(objects.size, [ref.name for ref in fold.segments])
    gone = [ref.name for ref, size in zip(fold.segments, sizes, strict=True) if size != ref.num_bytes]
    if gone:
        raise StoreUnavailableError(
            f"{len(gone)} segments of a fold were deleted during its merge; it is merged again",
            hint="give gc a longer --grace than the time between two segments of a merge",
            name=gone[0],
            marker=fold.end,
        )


def plan_merge(
    objects: Objects, lineage: Lineage, pieces: Sequence[Piece], pool: Executor, *, task_bytes: int | None = None
) -> Merging:
    """Read the directories of consecutive ``pieces``, and split their merge into tasks.

    Args:
        objects: The store.
        lineage: The control partition.
        pieces: Pieces to merge.
        pool: Threads to read with.
        task_bytes: Bytes that a task reads, approximately. None for a single task.

    Raises:
        CorruptionError: a piece is damaged.
        StoreUnavailableError: the store does not answer.
    """
    start, end, job = pieces[0].start, pieces[-1].end, lineage.job
    pieces = open_pieces(objects, pieces, job, pool)
    for piece in pieces:
        own = lineage.claims[piece.generation].schema  # bases exclude rows of tables that it had otherwise
        for picked in piece.opened:
            check_tables(picked.front, own, picked.ref.name)
    schema = lineage.claims[end.generation].schema
    plan = MergePlan.of(schema, lineage.bases(end), pieces, SEGMENT_BYTES // 2)
    name = FoldName(job, end, start)
    shares = plan.cut(task_bytes)
    tasks = tuple(
        MergeTask(
            fold=name,
            schema=schema,
            stretches=share,
            last=max(0, plan.windows - 1) if number == len(shares) else None,
            num_bytes=sum(picked.num_bytes for stretch in share for picked in stretch.newest),
        )
        for number, share in enumerate(shares, 1)
    )
    return Merging(job, start, end, pieces[-1].chain, tasks)


def merge(
    objects: Objects,
    lineage: Lineage,
    pieces: Sequence[Piece],
    pool: Executor,
    progress: Callable[[int], None] = lambda _: None,
    scratch: Path | None = None,
) -> Fold:
    """Write the fold of consecutive ``pieces``, and put it into the store.

    Memory: the rows of one segment twice, ``FAN_IN`` open chunks of at most 4 MB, and the chunks read ahead.

    Args:
        objects: The store.
        lineage: The control partition.
        pieces: Pieces to merge.
        pool: Threads to read with.
        progress: Called with the bytes of each chunk that is read.
        scratch: Folder in which a folder for temporary files may be made. None for ``TMPDIR``.

    Raises:
        CorruptionError: a piece is damaged.
        ScratchUnavailableError: there is no room for temporary files.
        StoreUnavailableError: the fold was not written.
    """
    merging = plan_merge(objects, lineage, pieces, pool)
    refs = [merge_share(objects, task, pool, progress, scratch) for task in merging.tasks]
    return merging.finish(objects, refs, pool)


def merge_share(
    objects: Objects,
    task: MergeTask,
    pool: Executor,
    progress: Callable[[int], None] = lambda _: None,
    scratch: Path | None = None,
) -> tuple[SegmentRef, ...]:
    """Write the segments of some blocks of a fold, and read them back. Arguments and errors as in :func:`merge`."""
    with (
        ThreadPoolExecutor(1, "stream-ckpt-write") as background,
        closing(ScratchRuns(objects, pool, scratch, progress)) as made,
    ):
        parts = _Parts(objects, task, background)
        for stretch in task.stretches:
            _merge_stretch(task.schema, stretch, parts, made, pool, progress)
        refs = parts.finish()
        made.check()
    _check_written(objects, refs, task, parts.merged, pool)
    failpoint("fold.read_back")
    return refs


class _Parts:
    """Rows that a task has merged, and the segments that it writes of them, split by blocks and by bytes."""

    def __init__(self, objects: Objects, task: MergeTask, background: Executor) -> None:
        name, self._last = task.fold, task.last
        self._writer = SegmentWriter(
            objects,
            task.schema,
            name.segment_name,
            lambda part: SegmentId(SegmentKind.FOLD, name.job, name.end, 0, part),
            background,
        )
        self.rows, self.merged = RowSorter(task.schema), RowDigests()
        self._block, self._part = -1, 0

    def begin(self, window: int) -> None:
        """Begin a window, by its number."""
        block = window // WINDOWS_OF_BLOCK
        if block != self._block:
            if self.rows.num_bytes:
                self._put(last=False)
            self._block, self._part = block, block * WINDOWS_OF_BLOCK

    def end(self) -> None:
        """End a window whose rows were all added."""
        if self.rows.num_bytes >= SEGMENT_BYTES // 2:
            self._put(last=False)

    def finish(self) -> tuple[SegmentRef, ...]:
        """Write the remaining rows."""
        if self._last is not None:
            self.begin(self._last)
            self._put(last=True)
        elif self.rows.num_bytes:
            self._put(last=False)
        return self._writer.finish()

    def _put(self, *, last: bool) -> None:
        self._writer.put(self.rows, last=last, part=self._part)
        self._part += 1


def _check_written(
    objects: Objects, refs: Sequence[SegmentRef], task: MergeTask, merged: RowDigests, pool: Executor
) -> None:
    """Read segments back before anything relies on them.

    Raises:
        CorruptionError: their rows differ from those merged.
    """
    found = RowDigests()
    for each, entry, data in read_chunks(objects, open_segments(objects, refs, task.fold.job, pool), pool):
        found.add(entry.table, entry.col0, entry.cols, decode_chunk(entry, data, task.schema, each.ref.name))
    if found != merged:
        raise CorruptionError(
            f"a fold was written with {merged.rows} rows, but {found.rows} were read back, or their bits differ",
            hint="check the memory and the disks of this host, and restart the materializer; the fold is not used",
            fold=task.fold.name,
        )


def _merge_stretch(
    schema: Schema,
    held: TableWindows,
    parts: _Parts,
    scratch: ScratchRuns,
    pool: Executor,
    progress: Callable[[int], None],
) -> None:
    """Add the newest version of each row of some windows to ``parts``."""
    newest = scratch.narrowed(schema, held.newest, held.table, within=held.within)
    for cut in held.slices:
        mine = [each.only(each.entries["col0"] == cut.col0) for each in newest]
        mine = [each for each in mine if len(each.chunks)]
        cols = cut.stop - cut.col0
        for (row0, end), chunks in Runs(mine, schema, read_from(scratch, pool, progress)).through(cut.windows()):
            parts.begin(cut.number_of(row0))
            fresh = NewestFirst(row0, end - row0)
            for given in chunks:
                scratch.saw(given)
                _, chosen = fresh.take(given.view.ids)
                if len(chosen):
                    part = cut_rows(given.view, chosen, given.entry, cut.col0, cols, given.picked.ref.name)
                    parts.rows.add(held.table, cut.col0, cols, part)
                    parts.merged.add(held.table, cut.col0, cols, part)
            parts.end()
    scratch.free(newest)
