"""Bring the store up to the log: every committed marker, of every generation and branch, in commit order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Literal

from torchrec_stream_ckpt.errors import (
    ConfigError,
    CorruptionError,
    MissingObjectError,
    StoreUnavailableError,
    StreamCkptError,
)
from torchrec_stream_ckpt.failpoints import failpoint
from torchrec_stream_ckpt.format.control import Commit
from torchrec_stream_ckpt.format.dense_files import DenseFile, agree, by_folder, whole
from torchrec_stream_ckpt.format.interval import Interval, intervals_of
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.format.manifest import Dropped, Manifest, SegmentRef
from torchrec_stream_ckpt.layout import (
    DENSE_DIR,
    claim_name,
    dense_name,
    dropped_name,
    manifest_name,
)
from torchrec_stream_ckpt.log.api import Log
from torchrec_stream_ckpt.log.stream import held_by
from torchrec_stream_ckpt.materialize.fold import fold_interval, folded_interval, shards_of
from torchrec_stream_ckpt.materialize.head import HeadWriter
from torchrec_stream_ckpt.materialize.merge import merge
from torchrec_stream_ckpt.store.api import Objects
from torchrec_stream_ckpt.store.catalog import Catalog
from torchrec_stream_ckpt.store.dense import DenseStore, copy_dense, files_in, lacking
from torchrec_stream_ckpt.store.identity import prepare_store
from torchrec_stream_ckpt.types import MarkerId, TableShard

SPAN = 16
"""Markers that one span of ``compact="span16"`` takes together, and spans that one of the next size does."""

_LOG_HINT = (
    "bring a whole copy of the log back; or restart the job from a marker that the store has, and go on with "
    "--pass-over-lost"
)
_DENSE_HINT = "bring it back, say where it is (--dense), or give the marker up with --pass-over-lost"


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
        log: The job's log. It is only read.
        objects: The store.
        dense_of: Where the trainer has put the dense state of a marker.
        pool: Threads to read the store with.
        policy: What to write beside.
        mine: Whether a data partition is this one's to fold; another process folds the others. The one that folds rank
            0's puts manifests and folds.
        going_on: Called again and again while it works; ends the work where it stands by raising.
        pass_over: Called with a marker that can never be in the store, and why; without it, that is an error.
        head: What keeps the newest state warm on this host.
    """

    def __init__(
        self,
        log: Log,
        objects: Objects,
        dense_of: Callable[[Commit], DenseStore],
        pool: Executor,
        policy: Policy | None = None,
        mine: Callable[[int], bool] = lambda _: True,
        going_on: Callable[[], None] = lambda: None,
        pass_over: Callable[[Commit, CorruptionError], None] | None = None,
        head: HeadWriter | None = None,
    ) -> None:
        self._log = log
        self._objects = objects
        self._dense_of = dense_of
        self._pool = pool
        self._policy = policy or Policy()
        self._mine = mine
        self._going_on = going_on
        self._pass_over = pass_over
        self._catalog: Catalog | None = None
        self._found: dict[tuple[MarkerId, int], tuple[SegmentRef, ...]] = {}
        """Segments of markers that are not in the store yet, by marker and rank: not looked for twice."""
        self._dense_checked = False
        self._head = head
        self.head_problem: StreamCkptError | None = None
        """Why HEAD could not be brought to the newest marker at the last attempt."""
        self.counts = Counts()
        self.missing: list[Commit] = []
        """Committed markers that are not in the store and that nobody has given up, in commit order."""
        self.doing = "starting"
        """For people."""

    @property
    def head_marker(self) -> MarkerId | None:
        """Where HEAD stands on this host; None: nowhere."""
        return self._head.marker if self._head is not None else None

    @property
    def held(self) -> frozenset[MarkerId]:
        """Markers that the store offers, as of the last look."""
        return self._catalog.markers - self._catalog.dropped if self._catalog is not None else frozenset()

    def compare(self, job: bytes, read: Callable[[], Lineage]) -> None:
        """Whether store and log tell one history. For the start: it looks at the newest marker of each generation.

        Args:
            job: The job's id.
            read: Reads the control partition; called once the store has been listed, so that it cannot know more.

        Raises:
            CorruptionError: one of them was put back to an earlier state, or the store is another log's.
        """
        catalog = self._load(job)
        lineage = read()
        newest: dict[int, MarkerId] = {}
        for marker in sorted(catalog.markers - lineage.given_up):
            newest[marker.generation] = marker
        for marker in newest.values():
            if marker not in lineage.commits:
                raise CorruptionError(
                    f"the store holds marker {marker}, which the log does not know",
                    hint="bring the right log back, or give this one a store of its own: --store URL",
                    store=self._objects.url,
                )
            catalog.check(lineage.commits[marker])

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
        catalog = self._look(lineage)
        if self._pass_over is not None and not self._dense_checked:
            self._give_up_denseless(lineage, catalog)
            self._dense_checked = True
        before, waiting = _previous(lineage), False
        for commit in list(self.missing):
            self._going_on()
            segments = self._fold_or_pass(lineage, catalog, commit, before[commit.id])
            if segments is None:
                waiting = waiting or commit.id not in catalog.dropped
            elif not waiting and self._mine(commit.ranks[0].partition):
                self._put_marker(lineage, catalog, commit, segments)
                self.missing.remove(commit)
                self._fold_beside(lineage, catalog, commit)
                self.counts.markers += 1
                yield commit.id
        self.missing = [commit for commit in self.missing if commit.id not in catalog.dropped]
        self._keep_warm(lineage, catalog)
        self.doing = "waiting for others" if self.missing else "waiting for markers"

    def _keep_warm(self, lineage: Lineage, catalog: Catalog) -> None:
        """Bring HEAD to the newest marker of the store. Without it a restore is slower, and nothing is lost."""
        offered = catalog.markers - catalog.dropped
        newest = next((marker for marker in reversed(lineage.commits) if marker in offered), None)
        if self._head is None or newest is None:
            return
        if self._head.marker != newest:
            self.doing = f"bringing HEAD to marker {newest}"
        try:
            self._head.follow(lineage, catalog, newest)
        except (StoreUnavailableError, ConfigError, CorruptionError) as error:
            self.head_problem = error  # it is tried again
        else:
            self.head_problem = None

    def _load(self, job: bytes) -> Catalog:
        if self._catalog is None:
            prepare_store(self._objects)
            self._catalog = Catalog.load(self._objects, job)
        return self._catalog

    def _look(self, lineage: Lineage) -> Catalog:
        """What is in the store; listed again only if something seems to be missing."""
        fresh = self._catalog is None
        catalog = self._load(lineage.job)
        if not fresh and self._missing(lineage, catalog):
            _list_again(lineage, catalog)
        self.missing = self._missing(lineage, catalog)
        wanted = {commit.id for commit in self.missing}
        self._found = {key: refs for key, refs in self._found.items() if key[0] in wanted}
        return catalog

    def _missing(self, lineage: Lineage, catalog: Catalog) -> list[Commit]:
        known = catalog.markers | catalog.dropped
        return [commit for commit in lineage.commits.values() if commit.id not in known]

    def _fold_or_pass(
        self, lineage: Lineage, catalog: Catalog, commit: Commit, before: Commit | None
    ) -> tuple[tuple[SegmentRef, ...], ...] | None:
        """The segments of all ranks; None when others' are not there yet, or the marker was passed over.

        A marker that is passed over is given up in the store, where all others see it, and a trim.
        """
        parent = before.id if before is not None else lineage.claims[commit.generation].parent
        stands_on_lost = _is_lost(catalog, parent)
        try:
            if stands_on_lost:
                raise CorruptionError(f"it stands on marker {parent}, which is lost", marker=commit.id)
            return self._fold(lineage, commit, before)
        except CorruptionError as error:
            if isinstance(error, MissingObjectError):
                raise
            # Each marker comes into the store behind the one on which it stands, which others may still be folding.
            if self._pass_over is None or parent is None or parent in catalog.markers | catalog.dropped:
                self._pass(commit, error, _LOG_HINT)
                self._give_up(lineage, catalog, Dropped.of_lost(commit, lineage.previous(commit.id)))
            return None

    def _pass(self, commit: Commit, error: CorruptionError, hint: str) -> None:
        """Pass a marker over if that is wanted; else it is an error, for which ``hint`` is the last resort."""
        error = CorruptionError(error.message, hint=error.hint or hint, **{"marker": commit.id, **error.where})
        if self._pass_over is None:
            raise error
        self._pass_over(commit, error)

    def _give_up(self, lineage: Lineage, catalog: Catalog, dropped: Dropped) -> None:
        self._put_claim(lineage, dropped.commit)
        self._objects.put(dropped_name(dropped.commit.job, dropped.commit.id), [dropped.to_bytes()])
        catalog.dropped |= {dropped.commit.id}

    def _put_claim(self, lineage: Lineage, commit: Commit) -> None:
        """CLAIM goes in front of all that names its generation."""
        claim, frame = claim_name(commit.job, commit.generation), lineage.claims[commit.generation].to_frame()
        if self._objects.size(claim) is None:
            self._objects.put(claim, [frame])
        elif bytes(self._objects.read(claim)) != frame:
            raise CorruptionError(
                "the store holds another generation of this number than the log: one of them was copied, or put back",
                hint="give every log a store of its own, or bring the right one back",
                store=self._objects.url,
                generation=commit.generation,
            )

    def _fold(
        self, lineage: Lineage, commit: Commit, before: Commit | None
    ) -> tuple[tuple[SegmentRef, ...], ...] | None:
        """The segments of all ranks, those of our partitions folded now; None when another's are not there yet."""
        claim = lineage.claims[commit.generation]
        leads = self._mine(commit.ranks[0].partition)
        segments = []
        for interval in intervals_of(claim, commit, before):
            end, mine = interval.end, self._mine(interval.end.partition)
            refs = self._found.get((commit.id, end.rank))
            if refs is None and (mine or leads):
                try:
                    refs = folded_interval(self._objects, interval)
                except CorruptionError:  # no manifest names it yet: whoever sees it folds it again, to the same bytes
                    mine = True
            if refs is None and mine:
                refs = self._fold_interval(lineage, interval, before)
            if refs is not None:
                self._found[commit.id, end.rank] = refs
            segments.append(refs)
        complete = tuple(refs for refs in segments if refs is not None)
        return complete if len(complete) == len(segments) else None

    def _fold_interval(self, lineage: Lineage, interval: Interval, before: Commit | None) -> tuple[SegmentRef, ...]:
        self.doing = f"folding marker {interval.commit.id}, rank {interval.end.rank}"
        self._check_there(lineage, interval)
        shards = self._shards_before(interval, before)
        refs = fold_interval(self._log, self._objects, interval, shards, self._count_frames)
        self.counts.segment_bytes += sum(ref.num_bytes for ref in refs)
        return refs

    def _check_there(self, lineage: Lineage, interval: Interval) -> None:
        """Whether the log still has the interval, and is the one that its generation wrote to."""
        now = self._log.incarnation()
        if now is None or not now.holds_rows_of(interval.claim.incarnation):
            raise CorruptionError(
                "the log was deleted and made again since this generation wrote to it",
                hint="bring the old log back; its rows are not in this one",
                marker=interval.commit.id,
            )
        try:
            self._log.check_there([interval.span])
        except CorruptionError as error:
            raise self._gone(lineage, interval, error) from None

    def _gone(self, lineage: Lineage, interval: Interval, cause: CorruptionError) -> CorruptionError:
        """What is lost when the log was trimmed past the store's position, what remains, and what to do."""
        assert self._catalog is not None
        marker = interval.commit.id
        behind = [each.id for each in self.missing if marker in {link.id for link in lineage.chain(each.id)}]
        lost = f"{marker}" if len(behind) < 2 else f"{marker} to {behind[-1]} ({len(behind)} markers)"
        trim = lineage.trim_of(marker.generation)
        reach = trim.reach(marker.generation) if trim is not None else None
        if trim is not None and reach is not None and reach >= marker:
            return CorruptionError(
                f"the log up to marker {reach} was trimmed on {trim.day}, and this store lacks {lost}: "
                f"the store {trim.store} has them",
                hint=f"fold into that one: --store {trim.store}",
                marker=marker,
                store=self._objects.url,
            )
        remains = max((each.id for each in lineage.chain(marker) if each.id in self.held), default=None)
        keeps = f"the store has {len(self.held)} markers" if self.held else "the store is empty"
        newest = f", {remains} the newest on its path" if remains else ""
        onward = f"restart the job from marker {remains} by its name" if remains else "begin a new job"
        return CorruptionError(
            f"the log no longer has what the store has not yet: lost is {lost}; {keeps}{newest}: {cause.headline}",
            hint=f"bring the log data back, or name the store that has it (--store); else {onward}, "
            "and go on with --pass-over-lost",
            marker=marker,
            rank=interval.end.rank,
            store=self._objects.url,
        )

    def _shards_before(self, interval: Interval, before: Commit | None) -> tuple[TableShard, ...] | None:
        """What the rank held at the marker before, as the store says, or else the log."""
        if before is None:
            return None
        assert self._catalog is not None
        previous = Interval(interval.claim, before, before.ranks[interval.end.rank])
        try:
            refs = folded_interval(self._objects, previous)
        except CorruptionError:  # as good as gone
            refs = None
        if refs is not None:
            return shards_of(self._objects, refs)
        if before.id in self._catalog.markers:
            raise MissingObjectError(
                "the store has lost segments of a marker that it holds",
                hint="bring them back, or delete the marker's manifest: it is folded anew from what the log still has",
                marker=before.id,
                rank=interval.end.rank,
                name=previous.name(0),
            )
        return held_by(self._log, interval.claim, interval.commit, interval.end)

    def _count_frames(self, num_bytes: int) -> None:
        self.counts.frames_bytes += num_bytes
        self._going_on()

    def _put_marker(
        self, lineage: Lineage, catalog: Catalog, commit: Commit, segments: tuple[tuple[SegmentRef, ...], ...]
    ) -> None:
        """The manifest comes last: with it the marker is in the store."""
        self._put_claim(lineage, commit)
        has_dense = self._take_or_pass_dense(commit)
        self._dense_checked = self._dense_checked and has_dense  # what follows may be cut short by an outage
        manifest, previous = manifest_name(commit.job, commit.id), lineage.previous(commit.id)
        failpoint("materialize.manifest")
        self._objects.put(manifest, [Manifest(commit, previous, segments).to_bytes()])
        failpoint("materialize.manifest_put")
        catalog.markers |= {commit.id}
        if not has_dense:
            self._give_up_for_dense(lineage, catalog, commit)

    def _give_up_for_dense(self, lineage: Lineage, catalog: Catalog, commit: Commit) -> None:
        """Later markers stand on its rows, but without dense state it cannot be offered."""
        previous = lineage.previous(commit.id)
        self._give_up(lineage, catalog, Dropped(commit, previous, commit.time_s, "the loss of its dense state"))

    def _give_up_denseless(self, lineage: Lineage, catalog: Catalog) -> None:
        """Do for markers in the store what a process that was killed behind their manifests did not come to."""
        prefix = f"{DENSE_DIR}/{lineage.job.hex()}/"
        sizes = by_folder({entry.name: entry.num_bytes for entry in self._objects.list(prefix)})
        for marker in sorted(catalog.markers - catalog.dropped):
            commit = lineage.commits.get(marker)
            if commit is None or not self._mine(commit.ranks[0].partition):
                continue
            if _has_all(commit, sizes.get(dense_name(commit.job, marker), {})):
                continue
            if self._objects.size(dropped_name(commit.job, marker)) is not None:
                continue  # gc has come in between
            if not self._take_or_pass_dense(commit):
                self._give_up_for_dense(lineage, catalog, commit)

    def _take_or_pass_dense(self, commit: Commit) -> bool:
        """Whether the store has the dense state now; else it was passed over."""
        try:
            self._take_dense(commit)
        except CorruptionError as error:
            self._pass(commit, error, _DENSE_HINT)
            return False
        return True

    def _take_dense(self, commit: Commit) -> None:
        """Copy the dense state, unless the trainer has put it into this very store."""
        files = whole(commit.dense_list, self._dense_files(commit))
        absent = lacking(self._objects, commit, files)
        if not absent:
            return
        self.doing = f"copying dense state of marker {commit.id}"
        for file in copy_dense(self._dense_of(commit), commit, absent, self._objects, self._going_on):
            self.counts.dense_bytes += file.num_bytes
            failpoint("materialize.dense")

    def _dense_files(self, commit: Commit) -> tuple[DenseFile, ...]:
        """As the store lists them or, where it has no whole list, as the place does from which they come."""
        try:
            return files_in(self._objects, commit)
        except CorruptionError:
            return self._dense_of(commit).files(commit)

    def _fold_beside(self, lineage: Lineage, catalog: Catalog, commit: Commit) -> None:
        """Write folds; where gc has taken pieces away since we listed them, others lead to the same rows."""
        try:
            self._write_folds(lineage, catalog, commit)
        except MissingObjectError:
            _list_again(lineage, catalog)
            self._write_folds(lineage, catalog, commit)

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
        self.doing = f"merging {len(cover.pieces)} pieces up to marker {end}"
        schema = lineage.claims[end.generation].schema
        fold = merge(
            self._objects, lineage.job, schema, lineage.bases(end), cover.pieces, self._pool, self._count_merged
        )
        self.counts.fold_bytes += sum(ref.num_bytes for ref in fold.segments)
        catalog.folds |= {(since, end)}

    def _count_merged(self, num_bytes: int) -> None:
        self.counts.fold_bytes_read += num_bytes
        self._going_on()


def _list_again(lineage: Lineage, catalog: Catalog) -> None:
    known = catalog.markers
    catalog.refresh()
    for marker in catalog.markers - known:  # another worker's; of this history, or it is not ours to go on with
        if marker in lineage.commits:
            catalog.check(lineage.commits[marker])


def _is_lost(catalog: Catalog, marker: MarkerId | None) -> bool:
    """Whether nothing can stand on a marker: its rows were given up, and nobody has brought them after all."""
    return marker in catalog.dropped - catalog.markers and marker is not None and catalog.drop_of(marker).lost


def _previous(lineage: Lineage) -> dict[MarkerId, Commit | None]:
    """The marker before each one in its generation; None for the first."""
    newest: dict[int, Commit] = {}
    before: dict[MarkerId, Commit | None] = {}
    for commit in lineage.commits.values():
        before[commit.id] = newest.get(commit.generation)
        newest[commit.generation] = commit
    return before


def backlog_bytes(lineage: Lineage, missing: Sequence[Commit]) -> int:
    """Bytes of frames that lead to these markers, each from the one before in its generation."""
    before = _previous(lineage)
    return sum(
        interval.num_bytes
        for commit in missing
        for interval in intervals_of(lineage.claims[commit.generation], commit, before[commit.id])
    )


def _has_all(commit: Commit, sizes: Mapping[str, int]) -> bool:
    """Whether a folder with files of these lengths has the dense state of a marker."""
    if commit.dense_list is not None:
        return agree(commit.dense_list, sizes)
    return all(sizes.get(file.name) == file.num_bytes for file in commit.dense_files)


def _spans(intervals_behind_root: int) -> Iterator[int]:
    """Lengths of the spans that end at this place of a chain, the shortest first."""
    length = SPAN
    while intervals_behind_root and intervals_behind_root % length == 0:
        yield length
        length *= SPAN
