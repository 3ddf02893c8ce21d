"""Bring the store up to the log: every committed marker, of every generation and branch, in commit order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Literal

from torchrec_stream_ckpt.errors import ConfigError, CorruptionError
from torchrec_stream_ckpt.failpoints import failpoint
from torchrec_stream_ckpt.format.control import Commit
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.format.manifest import Manifest, SegmentRef
from torchrec_stream_ckpt.layout import claim_name, dense_file_name, manifest_name
from torchrec_stream_ckpt.log.api import Log
from torchrec_stream_ckpt.materialize.fold import Interval, fold_interval, folded_interval, shards_of
from torchrec_stream_ckpt.materialize.merge import merge
from torchrec_stream_ckpt.store.api import Objects
from torchrec_stream_ckpt.store.catalog import Catalog
from torchrec_stream_ckpt.store.dense import DenseStore
from torchrec_stream_ckpt.store.identity import prepare_store
from torchrec_stream_ckpt.types import MarkerId, TableShard

SPAN = 16
"""Markers that one span of ``compact="span16"`` takes together, and spans that one of the next size does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """What the materializer writes beside what the log holds."""

    rebase: float = 1.0
    """Write a new base when what came since the last one is more than so many times its bytes; 0: never."""
    compact: Literal["none", "span16"] = "none"
    """``span16``: write, for every 16 markers, their newest rows once more: for old markers on slow storage."""

    def __post_init__(self) -> None:
        if self.rebase < 0:
            raise ConfigError(f"rebase must not be negative, it is {self.rebase}", hint="0 is for never")
        if self.compact not in ("none", "span16"):
            raise ConfigError(f"compact must be 'none' or 'span16', it is {self.compact!r}")


@dataclass(slots=True)
class Counts:
    """What a materializer has done since it started. Bytes as read and as written, markers whole."""

    markers: int = 0
    frames_bytes: int = 0
    segment_bytes: int = 0
    fold_bytes_read: int = 0
    fold_bytes: int = 0
    dense_bytes: int = 0


class Materializer:
    """Folds a log into a store. Any number may work on one job: what each writes is the same.

    Args:
        log: The job's log.
        objects: The store.
        dense_of: Where the trainer has put the dense state of a marker.
        pool: Threads to read the store with.
        policy: What to write beside.
        mine: Whether a data partition is this one's to fold; another process folds the others.
    """

    def __init__(
        self,
        log: Log,
        objects: Objects,
        dense_of: Callable[[Commit], DenseStore],
        pool: Executor,
        policy: Policy | None = None,
        mine: Callable[[int], bool] = lambda _: True,
    ) -> None:
        self._log = log
        self._objects = objects
        self._dense_of = dense_of
        self._pool = pool
        self._policy = policy or Policy()
        self._mine = mine
        self.counts = Counts()

    def missing(self, lineage: Lineage, catalog: Catalog) -> list[Commit]:
        """Committed markers that are not in the store and that nobody has given up, in commit order."""
        known = catalog.markers | catalog.dropped
        return [commit for commit in lineage.commits.values() if commit.id not in known]

    def catch_up(self, lineage: Lineage) -> Iterator[MarkerId]:
        """Put every missing marker into the store, as far as others do their part; yields each one that is whole.

        Args:
            lineage: The control partition as of now.

        Raises:
            CorruptionError: the log is damaged, or lacks what the store does not have yet.
            LogUnavailableError, StoreUnavailableError: one of them does not answer.
        """
        if not lineage.claims:
            return
        prepare_store(self._objects)
        catalog = Catalog.load(self._objects, lineage.job)
        for commit in self.missing(lineage, catalog):
            segments = self._fold(lineage, commit)
            if segments is None:
                return
            self._put_marker(lineage, commit, segments)
            catalog.markers |= {commit.id}
            self._write_folds(lineage, catalog, commit)
            self.counts.markers += 1
            yield commit.id

    def _fold(self, lineage: Lineage, commit: Commit) -> tuple[tuple[SegmentRef, ...], ...] | None:
        """The segments of all ranks, those of our partitions folded now; None when another's are not there yet."""
        segments = []
        for interval in intervals(lineage, commit):
            refs = folded_interval(self._objects, interval)
            if refs is None and self._mine(interval.end.partition):
                shards = self._shards_before(interval)
                refs = fold_interval(self._log, self._objects, interval, shards, self._count_frames)
                self.counts.segment_bytes += sum(ref.num_bytes for ref in refs)
            segments.append(refs)
        complete = tuple(refs for refs in segments if refs is not None)
        return complete if len(complete) == len(segments) else None

    def _shards_before(self, interval: Interval) -> tuple[TableShard, ...] | None:
        """What the rank held at the marker before, which is in the store: they are folded in order."""
        if interval.previous is None:
            return None
        previous = Interval(interval.claim, interval.previous, interval.previous.ranks[interval.end.rank], None)
        refs = folded_interval(self._objects, previous)
        if refs is None:
            raise CorruptionError(
                "the store has lost the segments of a marker that a later one of its generation needs",
                hint="fold the log into a new store, if it still has all",
                marker=interval.previous.id,
                rank=interval.end.rank,
            )
        return shards_of(self._objects, refs)

    def _count_frames(self, num_bytes: int) -> None:
        self.counts.frames_bytes += num_bytes

    def _put_marker(self, lineage: Lineage, commit: Commit, segments: tuple[tuple[SegmentRef, ...], ...]) -> None:
        """The manifest comes last: with it the marker is in the store."""
        claim = claim_name(commit.job, commit.generation)
        if self._objects.size(claim) is None:
            self._objects.put(claim, [lineage.claims[commit.generation].to_frame()])
        self._take_dense(commit)
        manifest = manifest_name(commit.job, commit.id)
        failpoint("materialize.manifest")
        self._objects.put(manifest, [Manifest(commit, lineage.previous(commit.id), segments).to_bytes()])
        failpoint("materialize.manifest_put")

    def _take_dense(self, commit: Commit) -> None:
        """Copy the dense state, unless the trainer has put it into this very store."""
        names = {file: dense_file_name(commit.job, commit.id, file.name) for file in commit.dense_files}
        absent = [file for file, name in names.items() if self._objects.size(name) != file.num_bytes]
        if not absent:
            return
        dense = self._dense_of(commit)
        dense.verify(commit)
        folder = dense.local(commit)
        for file in absent:
            self._objects.put(names[file], [(folder / file.name).read_bytes()])
            self.counts.dense_bytes += file.num_bytes
            failpoint("materialize.dense")
        dense.release()

    def _write_folds(self, lineage: Lineage, catalog: Catalog, commit: Commit) -> None:
        """Spans, then a base, as the policy wants them at this marker."""
        chain = lineage.chain(commit.id)
        if self._policy.compact == "span16":
            for span in _spans(len(chain) - 1):
                self._merge(lineage, catalog, chain, len(chain) - 1 - span)
        cover = catalog.cover(chain)
        if not self._policy.rebase or cover is None or cover.reach != commit.id:
            return
        base, *rest = cover.pieces
        if sum(piece.num_bytes for piece in rest) > self._policy.rebase * base.num_bytes:
            self._merge(lineage, catalog, chain, -1)

    def _merge(self, lineage: Lineage, catalog: Catalog, chain: list[Commit], start: int) -> None:
        """Write the fold of what came behind ``chain[start]``; -1: a base."""
        since, end = (chain[start].id if start >= 0 else None), chain[-1].id
        cover = catalog.cover(chain[start + 1 :], since)
        if cover is None or cover.reach != end or len(cover.pieces) < 2:
            return
        schema = lineage.claims[end.generation].schema
        fold = merge(
            self._objects, lineage.job, schema, lineage.bases(end), cover.pieces, self._pool, self._count_merged
        )
        self.counts.fold_bytes += sum(ref.num_bytes for ref in fold.segments)
        catalog.folds |= {(since, end)}

    def _count_merged(self, num_bytes: int) -> None:
        self.counts.fold_bytes_read += num_bytes


def intervals(lineage: Lineage, commit: Commit) -> list[Interval]:
    """What each rank sent for ``commit`` since the marker before in its generation."""
    markers = [each for each in lineage.commits.values() if each.generation == commit.generation]
    place = markers.index(commit)
    before = markers[place - 1] if place else None
    claim = lineage.claims[commit.generation]
    return [Interval(claim, commit, end, before) for end in commit.ranks]


def _spans(intervals_behind_root: int) -> Iterator[int]:
    """Lengths of the spans that end at this place of a chain, the shortest first."""
    length = SPAN
    while intervals_behind_root and intervals_behind_root % length == 0:
        yield length
        length *= SPAN
