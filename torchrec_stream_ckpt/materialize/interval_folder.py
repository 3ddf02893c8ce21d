"""The segments of a marker's intervals: found in the store, or folded from the log now."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import partial

from torchrec_stream_ckpt.errors import CorruptionError, MissingObjectError, OtherLogError, TrimmedError
from torchrec_stream_ckpt.format.control import Commit
from torchrec_stream_ckpt.format.interval import Interval, intervals_of
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.format.manifest import SegmentRef
from torchrec_stream_ckpt.format.segment import HEADER_LEN, front_bytes_of, parse_front
from torchrec_stream_ckpt.log.api import Log
from torchrec_stream_ckpt.log.stream import held_by
from torchrec_stream_ckpt.materialize.fold import fold_interval, folded_interval, shards_of
from torchrec_stream_ckpt.materialize.progress import Progress
from torchrec_stream_ckpt.route.route import check_incarnation, check_there
from torchrec_stream_ckpt.store.api import Objects
from torchrec_stream_ckpt.store.catalog import Catalog
from torchrec_stream_ckpt.types import MarkerId, TableShard

Segments = tuple[tuple[SegmentRef, ...], ...]
"""Of one marker, by rank."""


class IntervalFolder:
    """Folds the intervals of some data partitions; other processes fold the others.

    Args:
        log: The job's log. It is only read.
        objects: The store.
        mine: Whether a data partition is this one's to fold.
        progress: Told of what is folded.
        pool: Threads that look for segments of several ranks at once; None: one after the other.
    """

    def __init__(
        self,
        log: Log,
        objects: Objects,
        mine: Callable[[int], bool],
        progress: Progress,
        pool: Executor | None = None,
    ) -> None:
        self._log = log
        self._objects = objects
        self._mine = mine
        self._progress = progress
        self._map = map if pool is None else pool.map
        self._found: dict[tuple[MarkerId, int], tuple[SegmentRef, ...]] = {}
        """Segments of markers that are not in the store yet, by marker and rank: not looked for twice."""
        self._shards: dict[tuple[int, int], tuple[TableShard, ...]] = {}
        """What ranks hold in the newest generation that is folded, by generation and rank: it stays as it is."""

    def forget(self, missing: Sequence[Commit]) -> None:
        """Keep what was found of these markers alone."""
        wanted = {commit.id for commit in missing}
        self._found = {key: refs for key, refs in self._found.items() if key[0] in wanted}

    def segments(
        self, lineage: Lineage, catalog: Catalog, commit: Commit, before: Commit | None, missing: Sequence[Commit]
    ) -> Segments | None:
        """The segments of all ranks, those of our partitions folded now; None when another's are not there yet.

        Args:
            lineage: The control partition.
            catalog: What the store holds.
            commit: Of the marker.
            before: The marker before it in its generation; None for the first.
            missing: The markers that are not in the store.

        Raises:
            CorruptionError: the log is damaged, or lacks an interval.
        """
        intervals = list(intervals_of(lineage.claims[commit.generation], commit, before))
        leads = self._mine(commit.ranks[0].partition)
        sought = [
            each
            for each in intervals
            if (commit.id, each.end.rank) not in self._found and (leads or self._mine(each.end.partition))
        ]
        looked = zip(sought, self._map(self._look, sought), strict=True)
        found = {interval.end.rank: refs for interval, refs in looked}
        lacking = [each for each in sought if self._is_to_be_folded(each, found[each.end.rank])]
        shards = self._shards_of_all(lacking, before)
        for interval in lacking:
            rank = interval.end.rank
            self.check_there(lineage, catalog, interval, missing)
            found[rank] = self.fold(catalog, interval, before, shards=shards.get(rank))
        self._found |= {(commit.id, rank): refs for rank, refs in found.items() if refs}
        complete = tuple(refs for each in intervals if (refs := self._found.get((commit.id, each.end.rank))))
        return complete if len(complete) == len(intervals) else None

    def _is_to_be_folded(self, interval: Interval, refs: tuple[SegmentRef, ...] | None) -> bool:
        return refs == () or (refs is None and self._mine(interval.end.partition))

    def _look(self, interval: Interval) -> tuple[SegmentRef, ...] | None:
        """The segments of an interval that is folded; None: it is not; empty: what is there is damaged.

        No manifest names it yet: what is damaged is folded again, to the same bytes.
        """
        try:
            return folded_interval(self._objects, interval)
        except CorruptionError:
            return ()

    def _shards_of_all(
        self, intervals: Sequence[Interval], before: Commit | None
    ) -> dict[int, tuple[TableShard, ...] | None]:
        """By rank, what each held at the marker before, if this process knows it or the store says it: side by side."""
        if before is None:
            return {}
        shards = self._map(partial(self._shards_in_store, before), intervals)
        return {each.end.rank: held for each, held in zip(intervals, shards, strict=True)}

    def _know(self, interval: Interval, shards: tuple[TableShard, ...]) -> None:
        """Keep what a rank holds; that of an older generation is forgotten."""
        generation = interval.commit.generation
        if any(key[0] < generation for key in self._shards):
            self._shards.clear()
        self._shards[generation, interval.end.rank] = shards

    def again(
        self, lineage: Lineage, catalog: Catalog, commit: Commit, before: Commit | None, into: Objects
    ) -> Segments:
        """The segments of all ranks of a marker whose manifest is damaged: what is whole in the store, the rest folded.

        Whose partitions they are does not matter: what another one folds meanwhile is the same.

        Args:
            lineage: The control partition.
            catalog: What the store holds.
            commit: Of the marker.
            before: As of :meth:`segments`.
            into: Takes what is folded.

        Raises:
            OtherLogError: the store has segments of this marker that another history has written.
            CorruptionError: a segment is damaged or gone, and the log lacks its interval.
        """
        segments = []
        for interval in intervals_of(lineage.claims[commit.generation], commit, before):
            try:
                refs = folded_interval(self._objects, interval)
            except CorruptionError:
                self._check_history(interval)
                refs = None
            if refs is None:
                self.check_there(lineage, catalog, interval, [commit])
                refs = self.fold(catalog, interval, before, into)
            segments.append(refs)
        return tuple(segments)

    def _check_history(self, interval: Interval) -> None:
        """Whether what stands under the first segment's name may be this interval's, damaged or not."""
        name, mine = interval.name(0), interval.segment(0)
        try:
            front_bytes = front_bytes_of(self._objects.read(name, 0, HEADER_LEN), name)
            found = parse_front(self._objects.read(name, 0, front_bytes), name).id
        except CorruptionError:
            return
        if found != mine:
            raise OtherLogError(
                "the store holds another marker of this name than the log: one of them was copied, or put back",
                hint="give every log a store of its own, or bring the right one back",
                marker=interval.commit.id,
                rank=mine.rank,
                store=self._objects.url,
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
            catalog: What the store holds.
            interval: Which one.
            before: As of :meth:`segments`.
            into: Takes the segments; None: the store does.
            shards: What the rank held at the marker before, where that is known.
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
        """What a rank held at the marker before; None if its segments are not there, or damaged.

        The store is asked unless this process has folded an interval of the rank in this generation.
        """
        if (known := self._shards.get((before.generation, interval.end.rank))) is not None:
            return known
        previous = Interval(interval.claim, before, before.ranks[interval.end.rank])
        try:
            refs = folded_interval(self._objects, previous)
        except CorruptionError:  # as good as gone
            refs = None
        return shards_of(self._objects, refs) if refs is not None else None

    def _shards_before(
        self, catalog: Catalog, interval: Interval, before: Commit | None
    ) -> tuple[TableShard, ...] | None:
        """What the rank held at the marker before, as the store says, or else the log."""
        if before is None:
            return None
        if (stored := self._shards_in_store(before, interval)) is not None:
            return stored
        if before.id in catalog.markers:
            previous = Interval(interval.claim, before, before.ranks[interval.end.rank])
            raise MissingObjectError(
                "the store has lost segments of a marker that it holds",
                hint="bring them back, or delete the marker's manifest: it is folded anew from what the log still has",
                marker=before.id,
                rank=interval.end.rank,
                name=previous.name(0),
            )
        return held_by(self._log, interval.claim, interval.commit, interval.end)

    def check_there(self, lineage: Lineage, catalog: Catalog, interval: Interval, missing: Sequence[Commit]) -> None:
        """Whether the log still has the interval; raises with what is lost, what remains, and what to do."""
        marker = interval.commit.id
        try:
            check_incarnation(self._log, lineage, marker, [marker.generation])
            check_there(self._log, lineage, marker, [interval])
        except OtherLogError as error:  # a loss, too; what is said of it is enough
            raise CorruptionError(error.message, hint=error.hint, **error.where) from None
        except TrimmedError as error:
            raise CorruptionError(
                f"{error.message}, and this store lacks {_standing_on(lineage, marker, missing)}",
                hint=f"fold into that one: --store {error.where['store']}",
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
                f"the log no longer has what the store has not yet: lost is {lost}; {keeps}{newest}: {error.headline}",
                hint=f"bring the log data back, or name the store that has it (--store); else {onward}, "
                "and go on with --pass-over-lost",
                marker=marker,
                rank=interval.end.rank,
                store=self._objects.url,
            ) from None


def _standing_on(lineage: Lineage, marker: MarkerId, missing: Sequence[Commit]) -> str:
    """The markers that are lost with one, in words."""
    lost = [each.id for each in missing if marker in {link.id for link in lineage.chain(each.id)}]
    return f"{marker}" if len(lost) < 2 else f"{marker} to {lost[-1]} ({len(lost)} markers)"
