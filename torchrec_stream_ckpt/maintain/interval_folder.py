"""Find the segments of a marker's intervals in the store, or fold them from the log."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field, replace
from functools import partial
from shlex import quote

from torchrec_stream_ckpt.errors import CorruptionError, MissingObjectError, OtherLogError, TrimmedError
from torchrec_stream_ckpt.find.route import check_incarnation, check_there, lacking, lacks_trimmed
from torchrec_stream_ckpt.format.control import Commit
from torchrec_stream_ckpt.format.interval import Interval, intervals_of
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.format.manifest import SegmentRef
from torchrec_stream_ckpt.format.segment import HEADER_LEN, front_bytes_of, parse_front
from torchrec_stream_ckpt.log.api import Log
from torchrec_stream_ckpt.log.stream import held_by
from torchrec_stream_ckpt.maintain.engine import api
from torchrec_stream_ckpt.maintain.engine.api import Engine, Site
from torchrec_stream_ckpt.maintain.fold import (
    SegmentWriter,
    begin_fold,
    fold_interval,
    folded_interval,
    folded_shards,
)
from torchrec_stream_ckpt.maintain.progress import Progress
from torchrec_stream_ckpt.store.api import Objects
from torchrec_stream_ckpt.store.catalog import Catalog
from torchrec_stream_ckpt.util.types import MarkerId, TableShard

_PATIENCE_S = 0.2
"""Seconds between checks for a stop while workers fold."""
Segments = tuple[tuple[SegmentRef, ...], ...]
"""Segments of one marker, by rank."""


BATCH_BYTES = 64 * 2**20
"""Bytes of frames of several ranks that one task folds, at least. A rank with more has its own task."""


@dataclass(frozen=True, slots=True)
class FoldTask:
    """Intervals of one marker to fold, each with the shards of its rank at its begin. None if it begins with HELLO."""

    intervals: tuple[tuple[Interval, tuple[TableShard, ...] | None], ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of frames."""
        return sum(interval.num_bytes for interval, _ in self.intervals)

    def __str__(self) -> str:
        first, last = self.intervals[0][0], self.intervals[-1][0]
        return f"fold {first.commit.id} ranks {first.end.rank} to {last.end.rank}"

    def run(self, site: Site) -> tuple[tuple[SegmentRef, ...], ...]:
        """Fold the intervals and return the segments of each. Segments are written while the next ones are gathered."""
        log = site.log
        assert log is not None
        writers: deque[SegmentWriter] = deque()
        found: list[tuple[SegmentRef, ...]] = []
        waiting = 0
        try:
            for interval, shards in self.intervals:
                writers.append(begin_fold(log, site.objects, interval, shards, site.tell, site.pool))
                waiting += interval.num_bytes
                while waiting > BATCH_BYTES:
                    waiting -= self.intervals[len(found)][0].num_bytes
                    found.append(writers.popleft().finish())
            while writers:
                found.append(writers.popleft().finish())
        finally:
            for writer in writers:  # nothing is written after this has raised
                writer.drop()
        return tuple(found)


@dataclass(slots=True)
class _Begun:
    """A marker that is being folded."""

    refs: dict[int, tuple[SegmentRef, ...]] = field(default_factory=dict)
    """Segments found in the store, by rank."""
    tasks: list[tuple[FoldTask, Future[tuple[tuple[SegmentRef, ...], ...]]]] = field(default_factory=list)

    def drop(self) -> None:
        """Cancel tasks that have not begun."""
        for _, future in self.tasks:
            future.cancel()


class IntervalFolder:
    """Folds intervals. If the engine has workers to spare, folds those of a few large markers in advance.

    Args:
        log: The job's log. It is only read.
        objects: The store.
        progress: Updated with the bytes folded.
        engine: Runs the tasks.
        pool: Threads that search for segments of several ranks at once. None to search one after the other.
    """

    def __init__(
        self, log: Log, objects: Objects, progress: Progress, engine: Engine, pool: Executor | None = None
    ) -> None:
        self._log = log
        self._objects = objects
        self._progress = progress
        self._engine = engine
        self._map = map if pool is None else pool.map
        self._begun: dict[MarkerId, _Begun] = {}
        self._large: dict[MarkerId, bool] = {}
        """Cached results of ``_is_large`` for markers that are not begun."""
        self._shards: dict[tuple[int, int], tuple[TableShard, ...]] = {}
        """Shards of ranks in the newest generation folded, by generation and rank. They do not change."""
        self._newest = 0
        """Number of that generation."""

    def forget(self, missing: Sequence[Commit]) -> None:
        """Drop the work begun for any marker not in ``missing``."""
        wanted = {commit.id for commit in missing}
        for marker in [each for each in self._begun if each not in wanted]:
            self._begun.pop(marker).drop()
        self._large.clear()

    @property
    def ahead(self) -> int:
        """Number of following markers that may be begun while one is folded. No manifest waits for more of them."""
        return 2 * self._engine.workers if self._engine.workers > 1 else 0

    def segments(
        self,
        lineage: Lineage,
        catalog: Catalog,
        commit: Commit,
        before: Commit | None,
        missing: Sequence[Commit],
        following: Sequence[Commit] = (),
    ) -> Segments:
        """Return the segments of all ranks. Those that are not in the store are folded now.

        Args:
            lineage: The control partition.
            catalog: Contents of the store.
            commit: COMMIT of the marker.
            before: The marker before it in its generation. None for the first.
            missing: Markers that are not in the store, in commit order.
            following: The next of these markers, :attr:`ahead` at most.

        Raises:
            CorruptionError: the log is damaged, or lacks an interval.
            EngineUnavailableError: the engine cannot be reached.
        """
        begun = self._begun.pop(commit.id, None)
        self._large.pop(commit.id, None)
        if begun is None:
            begun = self._begin(lineage, catalog, commit, before, missing)
        try:
            self._begin_following(lineage, catalog, following, missing)
            while left := [future for _, future in begun.tasks if not future.done()]:
                self._progress.going_on()
                self._progress.doing = f"folding marker {commit.id}"
                self._engine.wait(left, _PATIENCE_S)
            for task, future in begun.tasks:
                for (interval, _), refs in zip(task.intervals, future.result(), strict=True):
                    begun.refs[interval.end.rank] = refs
                    self._progress.counts.frames_bytes += interval.num_bytes
                    self._progress.counts.segment_bytes += sum(ref.num_bytes for ref in refs)
        except BaseException:
            begun.drop()
            raise
        return tuple(begun.refs[end.rank] for end in commit.ranks)

    def _begin(
        self, lineage: Lineage, catalog: Catalog, commit: Commit, before: Commit | None, missing: Sequence[Commit]
    ) -> _Begun:
        """Submit the intervals of a marker that the store does not have."""
        intervals = list(intervals_of(lineage.claims[commit.generation], commit, before))
        looked = zip(intervals, self._map(self._look, intervals), strict=True)
        begun = _Begun({interval.end.rank: refs for interval, refs in looked if refs})
        lacking = [interval for interval in intervals if interval.end.rank not in begun.refs]
        known: list[tuple[TableShard, ...] | None] = [None] * len(lacking)
        if before is not None:
            known = list(self._map(partial(self._shards_in_store, before), lacking))
        batch: list[tuple[Interval, tuple[TableShard, ...] | None]] = []
        waiting_bytes = 0
        for interval, shards in zip(lacking, known, strict=True):
            self.check_there(lineage, catalog, interval, missing, same_log=interval is not lacking[0])
            held = shards or self._shards_before(catalog, interval, before)
            batch.append((_slim(interval), held))
            if held is not None:
                self._know(interval, held)
            waiting_bytes += interval.num_bytes
            if waiting_bytes >= BATCH_BYTES:
                self._submit(begun, batch)
                batch, waiting_bytes = [], 0
        if batch:
            self._submit(begun, batch)
        return begun

    def _submit(self, begun: _Begun, batch: list[tuple[Interval, tuple[TableShard, ...] | None]]) -> None:
        task = FoldTask(tuple(batch))
        first, last = batch[0][0], batch[-1][0]
        self._progress.doing = f"folding marker {first.commit.id}, ranks {first.end.rank} to {last.end.rank}"
        begun.tasks.append((task, self._engine.submit(task, urgent=True)))

    def _begin_following(
        self, lineage: Lineage, catalog: Catalog, following: Sequence[Commit], missing: Sequence[Commit]
    ) -> None:
        """Submit the next large markers, so that no worker is idle. Errors of these are raised when their turn comes.

        Small ones wait for their turn: the engine would fold them at once in this process, and delay the marker that is
        due.
        """
        for commit in following:
            if commit.id in self._begun:
                continue
            previous = lineage.previous(commit.id)
            knows = previous is None or all((commit.generation, end.rank) in self._shards for end in commit.ranks)
            if knows and self._is_large(lineage, commit, previous):
                before = lineage.find(previous) if previous is not None else None
                try:
                    self._begun[commit.id] = self._begin(lineage, catalog, commit, before, missing)
                except CorruptionError:
                    return

    def _is_large(self, lineage: Lineage, commit: Commit, previous: MarkerId | None) -> bool:
        """Return whether a task of this marker runs in a worker. Computed once per marker."""
        if commit.id not in self._large:
            before = lineage.find(previous) if previous is not None else None
            num_bytes = sum(each.num_bytes for each in intervals_of(lineage.claims[commit.generation], commit, before))
            self._large[commit.id] = num_bytes >= api.SMALL_BYTES
        return self._large[commit.id]

    def _look(self, interval: Interval) -> tuple[SegmentRef, ...] | None:
        """Return the segments of a folded interval. None if it is not folded; empty if its segments are damaged.

        No manifest names it yet: damaged segments are set aside and folded again. A segment of another history is an
        error.
        """
        try:
            return folded_interval(self._objects, interval)
        except CorruptionError:
            self.check_history(interval)
            return ()

    def _know(self, interval: Interval, shards: tuple[TableShard, ...]) -> None:
        """Keep the shards of a rank. Those of an older generation are discarded."""
        generation = interval.commit.generation
        if generation > self._newest:
            self._shards.clear()
            self._newest = generation
        self._shards[generation, interval.end.rank] = shards

    def again(
        self, lineage: Lineage, catalog: Catalog, commit: Commit, before: Commit | None, into: Objects
    ) -> Segments:
        """Return all ranks' segments of a marker whose manifest is damaged: whole ones from the store, the rest folded.

        Args:
            lineage: The control partition.
            catalog: Contents of the store.
            commit: COMMIT of the marker.
            before: As in :meth:`segments`.
            into: Store that receives the folded segments.

        Raises:
            OtherLogError: the store has segments of this marker that another history has written.
            CorruptionError: a segment is damaged or missing, and the log lacks its interval.
        """
        segments = []
        for interval in intervals_of(lineage.claims[commit.generation], commit, before):
            try:
                refs = folded_interval(self._objects, interval)
            except CorruptionError:
                self.check_history(interval)
                refs = None
            if refs is None:
                self.check_there(lineage, catalog, interval, [commit])
                refs = self.fold(catalog, interval, before, into)
            segments.append(refs)
        return tuple(segments)

    def check_history(self, interval: Interval, part: int = 0) -> None:
        """Check that the object with a segment's name may be this interval's, damaged or not.

        Raises:
            OtherLogError: it is whole, and another history has written it.
        """
        name, mine = interval.name(part), interval.segment(part)
        try:
            front_bytes = front_bytes_of(self._objects.read(name, 0, HEADER_LEN), name)
            found = parse_front(self._objects.read(name, 0, front_bytes), name).id
        except CorruptionError:
            return
        if found != mine and replace(found, chain=mine.chain) == mine:
            raise OtherLogError(
                f"marker {interval.commit.id} differs between store and log: one of the two was copied or restored "
                "from a backup",
                hint="use a separate store for each log, or restore the one that belongs to this log",
                marker=interval.commit.id,
                rank=mine.rank,
                store=self._objects.url,
                name=name,
                there=f"chain {found.chain:08x}",
                written=f"chain {mine.chain:08x}",
            )

    def fold(
        self,
        catalog: Catalog,
        interval: Interval,
        before: Commit | None,
        into: Objects | None = None,
        shards: tuple[TableShard, ...] | None = None,
    ) -> tuple[SegmentRef, ...]:
        """Fold one rank's interval, whatever the store has of it.

        Args:
            catalog: Contents of the store.
            interval: Interval to fold.
            before: As in :meth:`segments`.
            into: Store that receives the segments. None for the usual store.
            shards: Shards of the rank at the marker before, if known.
        """
        progress = self._progress
        progress.doing = f"folding marker {interval.commit.id}, rank {interval.end.rank}"
        shards = shards or self._shards_before(catalog, interval, before)
        refs = fold_interval(self._log, into or self._objects, interval, shards, progress.count_frames)
        progress.counts.segment_bytes += sum(ref.num_bytes for ref in refs)
        if shards is not None:
            self._know(interval, shards)
        return refs

    def _shards_in_store(self, before: Commit, interval: Interval) -> tuple[TableShard, ...] | None:
        """Read which shards a rank held at the marker before. Returns None if its segments are missing or damaged.

        Reads the store unless this process has folded an interval of the rank in this generation.
        """
        if (known := self._shards.get((before.generation, interval.end.rank))) is not None:
            return known
        previous = Interval(interval.claim, before, before.ranks[interval.end.rank])
        try:
            return folded_shards(self._objects, previous)
        except CorruptionError:  # as good as missing
            return None

    def _shards_before(
        self, catalog: Catalog, interval: Interval, before: Commit | None
    ) -> tuple[TableShard, ...] | None:
        """Read which shards the rank held at the marker before: from the store, otherwise from the log."""
        if before is None:
            return None
        if (stored := self._shards_in_store(before, interval)) is not None:
            return stored
        if before.id in catalog.markers:
            previous = Interval(interval.claim, before, before.ranks[interval.end.rank])
            raise MissingObjectError(
                "segments of a marker in the store are missing",
                hint="restore them, or delete the marker's manifest, so that it is folded again from the log",
                marker=before.id,
                rank=interval.end.rank,
                name=previous.name(0),
            )
        return held_by(self._log, interval.claim, interval.commit, interval.end)

    def check_there(
        self,
        lineage: Lineage,
        catalog: Catalog,
        interval: Interval,
        missing: Sequence[Commit],
        *,
        same_log: bool = False,
    ) -> None:
        """Check that the log still has the interval. The error states what is lost, what remains, and what to do.

        Args:
            lineage: The control partition.
            catalog: Contents of the store.
            interval: Interval of one rank.
            missing: Markers that are not in the store.
            same_log: Whether the log was just found to be the one that the generation wrote to.
        """
        marker = interval.commit.id
        try:
            # A TRIM says where the data are, also in the log of a new node or a recovered one, which is another log.
            if not same_log and not lineage.trims.has_taken(marker):
                check_incarnation(self._log, lineage, marker, [marker.generation])
            check_there(self._log, lineage, marker, [interval])
        except OtherLogError as error:  # a loss, too; its own message is enough
            raise CorruptionError(error.message, hint=error.hint, **error.where) from None
        except TrimmedError as error:
            now, claim, store = self._log.incarnation(), interval.claim, error.where["store"]
            own = now is not None and now.holds_rows_of(claim.incarnation)
            lost = _standing_on(lineage, marker, missing)
            if lacks_trimmed(error, self._objects):
                gone = lacking(error, self._objects)
                raise CorruptionError(
                    f"{gone.message}: {lost}", hint=gone.advice.partition(";")[0], **gone.where
                ) from None
            raise CorruptionError(
                f"{error.message}, and this store lacks {lost}",
                hint=f"fold into that store: --store {quote(str(store))}"
                if own
                else "materialize the outer log of this job; to free space in this log: "
                f"stream-ckpt trim URI --store {quote(str(store))}",
                marker=marker,
                store=self._objects.url,
            ) from None
        except CorruptionError as error:
            held = catalog.markers - catalog.dropped
            remains = max((each.id for each in lineage.chain(marker) if each.id in held), default=None)
            keeps = f"the store has {len(held)} markers" if held else "the store is empty"
            newest = f", {remains} the newest on its path" if remains else ""
            onward = f"restart the job from marker {remains} by its name" if remains else "begin a new job"
            lost = _standing_on(lineage, marker, missing)
            raise CorruptionError(
                f"the log has lost rows that are not in the store yet: {lost}; {keeps}{newest}: {error.headline}",
                hint=f"restore the log data, or name the store that has it (--store); otherwise {onward}, "
                "and continue with --pass-over-lost",
                marker=marker,
                rank=interval.end.rank,
                store=self._objects.url,
            ) from None


def _slim(interval: Interval) -> Interval:
    """Return a copy without the data of other ranks, because it is sent to another process."""
    claim = interval.claim if interval.after is None else replace(interval.claim, layout=None)
    return replace(interval, claim=claim, commit=replace(interval.commit, ranks=(interval.end,)))


def _standing_on(lineage: Lineage, marker: MarkerId, missing: Sequence[Commit]) -> str:
    """Describe the missing markers that are lost together with ``marker``."""
    stands = {marker}
    for each in lineage.commits:  # parents come before markers that build on them
        if (lineage.previous(each) or lineage.claims[each.generation].parent) in stands:
            stands.add(each)
    lost = [each.id for each in missing if each.id in stands]
    return f"{marker}" if len(lost) < 2 else f"{marker} to {lost[-1]} ({len(lost)} markers)"
