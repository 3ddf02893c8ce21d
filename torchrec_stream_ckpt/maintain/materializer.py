"""Bring the store up to date with the log: every committed marker, of every generation and branch, in commit order.

Also recognizes markers that a lost log's materializer has put into the store after another log had taken its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from concurrent.futures import Executor
from functools import partial
from shlex import quote

from torchrec_stream_ckpt.errors import (
    CorruptionError,
    EngineUnavailableError,
    MissingObjectError,
    OtherLogError,
    StreamCkptError,
)
from torchrec_stream_ckpt.find.job import came_after_recovery
from torchrec_stream_ckpt.format.control import Commit
from torchrec_stream_ckpt.format.interval import intervals_of
from torchrec_stream_ckpt.format.lineage import Lineage, previous_commit
from torchrec_stream_ckpt.format.manifest import Dropped, Manifest
from torchrec_stream_ckpt.log.api import Log
from torchrec_stream_ckpt.maintain.compactor import Compactor, Policy
from torchrec_stream_ckpt.maintain.dense_copier import DenseCopier
from torchrec_stream_ckpt.maintain.engine.api import Engine, InProcess, Site
from torchrec_stream_ckpt.maintain.head import HeadKeeper, HeadWriter
from torchrec_stream_ckpt.maintain.incomplete_markers import IncompleteMarkers, put_claim
from torchrec_stream_ckpt.maintain.interval_folder import IntervalFolder, Segments
from torchrec_stream_ckpt.maintain.progress import Progress
from torchrec_stream_ckpt.maintain.proof_checker import ProofChecker, ProofRule
from torchrec_stream_ckpt.maintain.repairer import Repair, Repairer
from torchrec_stream_ckpt.maintain.summarizer import Summarizer
from torchrec_stream_ckpt.store.api import Objects
from torchrec_stream_ckpt.store.catalog import Catalog
from torchrec_stream_ckpt.store.dense_objects import DenseStore
from torchrec_stream_ckpt.store.identity import prepare_store
from torchrec_stream_ckpt.store.write_once import put_once
from torchrec_stream_ckpt.util.failpoints import failpoint
from torchrec_stream_ckpt.util.layout import manifest_name
from torchrec_stream_ckpt.util.types import MarkerId

_PATIENCE_S = 0.2
"""Seconds between checks for a stop while waiting for folds."""
_HINT = (
    "restore a complete copy of the log; or restart the job from a marker that the store has, and continue with "
    "--pass-over-lost"
)


class Materializer:
    """Folds a log into a store. Two that work on one job do no harm, because both write the same objects.

    Args:
        log: The job's log. It is only read.
        objects: The store.
        dense_of: Returns the place where the trainer has put the dense state of a marker.
        pool: Threads to read the store with.
        policy: Folds to write in addition to the intervals.
        engine: Creates the engine that runs its tasks, from the resources of tasks in this process.
        going_on: Called repeatedly during the work. Ends the work at that point by raising.
        pass_over: Called with a marker that can never be in the store, and the reason. Without it, this is an error.
        head: Writer that keeps HEAD on this host at the newest state.
        repaired: Called with a damaged object of the store that was rewritten.
        proofs: Rule by which markers are compared with their proofs. None to compare none.
    """

    def __init__(
        self,
        log: Log,
        objects: Objects,
        dense_of: Callable[[Commit], DenseStore],
        pool: Executor,
        policy: Policy | None = None,
        engine: Callable[[Site], Engine] = InProcess,
        going_on: Callable[[], None] = lambda: None,
        pass_over: Callable[[Commit, CorruptionError], None] | None = None,
        head: HeadWriter | None = None,
        repaired: Callable[[Repair], None] = lambda _: None,
        proofs: ProofRule | None = None,
    ) -> None:
        self._log = log
        self._objects = objects
        self._catalog: Catalog | None = None
        self.progress = Progress(going_on)
        """Progress that its parts report."""
        self.counts = self.progress.counts
        """Counts of the work done so far."""
        self._losses = IncompleteMarkers(objects, pass_over, self._put_claim)
        self.engine = engine(Site(log, objects, pool, self.progress.tell))
        """Runs the tasks. The caller closes it."""
        self._intervals = IntervalFolder(log, objects, self.progress, self.engine, pool)
        self._dense = DenseCopier(objects, dense_of, self._losses, self.progress)
        self.repairer = Repairer(objects, pool, self._intervals, self.progress, repaired)
        """Repairs damaged objects of its store."""
        self.compactor = Compactor(objects, pool, policy or Policy(), self.progress, self.engine)
        self._late: StreamCkptError | None = None
        """Error because of which a fold of this round was not written. Raised late, because markers have priority."""
        self.proofs = ProofChecker(objects, pool, self.compactor, self.repairer, self.progress, proofs)
        """Compares markers with their proofs."""
        self._summarizer = Summarizer(objects, pool, self.progress)
        keeper = HeadKeeper(head, self.repairer, self.proofs, self.progress) if head is not None else None
        self.head = keeper
        self.missing: list[Commit] = []
        """Committed markers that are not in the store and were not given up, in commit order."""
        self.missing_bytes = 0
        """Bytes of frames that lead to the missing markers, each from the marker before in its generation."""

    def forget(self) -> None:
        """Discard cached manifests and folds because one was rewritten. They are read again when next needed."""
        if self._catalog is not None:
            self._catalog.forget()

    @property
    def head_marker(self) -> MarkerId | None:
        """Marker that HEAD on this host is at. None if it is at none."""
        return self.head.writer.marker if self.head is not None else None

    @property
    def head_problem(self) -> StreamCkptError | None:
        """Error of the last attempt to bring HEAD to the newest marker, or the fault found in HEAD."""
        return self.head.problem if self.head is not None else None

    @property
    def held(self) -> Set[MarkerId]:
        """Markers that the store offers, as of the last listing."""
        return self._catalog.markers - self._catalog.dropped if self._catalog is not None else frozenset()

    def compare(self, job: bytes, read: Callable[[], Lineage]) -> None:
        """Check that store and log have one history. Called at the start: checks the newest marker of each generation.

        Args:
            job: The job's id.
            read: Reads the control partition. Called after the store is listed, so that the store cannot know more.

        Raises:
            CorruptionError: one of them was restored to an earlier state, or the store belongs to another log.
        """
        catalog = self._load(job)
        lineage, now = read(), self._log.incarnation()
        newest: dict[int, MarkerId] = {}
        for marker in sorted(catalog.markers - lineage.given_up):
            if now is None or not came_after_recovery(lineage, marker, now):
                newest[marker.generation] = marker
        damaged = []
        for marker in newest.values():
            if marker not in lineage.commits:
                raise CorruptionError(
                    f"the store holds marker {marker}, which is not in the log",
                    hint="if the log has lost its end, recover it: stream-ckpt recover URI --store "
                    f"{quote(self._objects.url)}; if the store was filled from another copy of the log, name a "
                    "separate store: --store URL",
                    store=self._objects.url,
                )
            if not self._tells_history(catalog, lineage.commits[marker]):
                damaged.append(marker)
                own = (each for each in sorted(catalog.markers, reverse=True) if each.generation == marker.generation)
                older = (lineage.commits[each] for each in own if each < marker and each in lineage.commits)
                next((each for each in older if self._tells_history(catalog, each)), None)
        for marker in damaged:  # all that can be read is of this history: no log writes into another's store
            self.repairer.mending(lineage, catalog, partial(_check, catalog, lineage.commits[marker]))

    @staticmethod
    def _tells_history(catalog: Catalog, commit: Commit) -> bool:
        """Return whether a marker's manifest can be read. Raises OtherLogError if it is of another history."""
        try:
            catalog.check(commit)
        except OtherLogError:
            raise
        except CorruptionError:
            return False
        return True

    def catch_up(self, lineage: Lineage) -> Iterator[MarkerId]:
        """Put every missing marker into the store. Yields each one once it is whole.

        Folds are begun, and do not delay markers: see :attr:`Compactor.is_busy`.

        Args:
            lineage: The current control partition.

        Raises:
            CorruptionError: the log is damaged, or lacks data that the store does not have yet.
            LogUnavailableError, StoreUnavailableError, EngineUnavailableError: one of them does not answer.
        """
        if not lineage.claims:
            return
        catalog = self._look(lineage)
        self._dense.give_up_lost(lineage, catalog)
        self._late = None
        self.proofs.check(lineage, catalog)
        due = list(self.missing)
        for place, commit in enumerate(due, 1):
            self.progress.going_on()
            following = due[place : place + self._intervals.ahead]
            before = previous_commit(lineage, commit.id)
            segments = self._fold_or_pass(lineage, catalog, commit, before, following)
            if segments is None:
                continue
            self._put_marker(lineage, catalog, commit, segments)
            self.missing.remove(commit)
            self.missing_bytes -= backlog_bytes(lineage, [commit])
            self.compactor.add(commit.id)
            self._merge(lineage, catalog)
            self.counts.markers += 1
            self.proofs.add(commit)
            self.proofs.check(lineage, catalog)
            self._summarizer.came(catalog, commit.id)
            yield commit.id
        self._merge(lineage, catalog)
        self._are_missing(lineage, [commit for commit in self.missing if commit.id not in catalog.dropped])
        if lineage.newest is not None:
            self._summarizer.write(catalog)
        if self.head is not None:
            self.head.follow(lineage, catalog)
        if self._late is not None:
            raise self._late
        if not self.compactor.is_busy:
            self.progress.doing = "waiting for markers"

    def has_merged(self, timeout_s: float) -> bool:
        """Let merges run for at most ``timeout_s``. Returns whether the next :meth:`catch_up` can advance them."""
        try:
            return self.compactor.wait(timeout_s)
        except EngineUnavailableError:  # the next catch_up gets the error from the tasks
            return True

    def settle(self, lineage: Lineage) -> None:
        """Finish all folds that are begun. Raises as :meth:`catch_up`."""
        if self._catalog is None:
            return
        while self.compactor.is_busy:
            self.progress.going_on()
            self.compactor.wait(_PATIENCE_S)
            self._merge(lineage, self._catalog)
            if self._late is not None:
                raise self._late
        self.progress.doing = "waiting for markers"

    def _merge(self, lineage: Lineage, catalog: Catalog) -> None:
        """Advance folds. An error is raised only after all markers are in the store."""
        if self._late is not None:
            return
        try:
            self.compactor.wait(0)
            self.repairer.mending(lineage, catalog, partial(self.compactor.advance, lineage, catalog))
        except StreamCkptError as error:
            self._late = error

    def _load(self, job: bytes) -> Catalog:
        if self._catalog is None:
            prepare_store(self._objects)
            self._catalog = Catalog.load(self._objects, job)
        return self._catalog

    def _look(self, lineage: Lineage) -> Catalog:
        """Return the catalog. The store is listed again only if a marker seems to be missing."""
        fresh = self._catalog is None
        catalog = self._load(lineage.job)
        if not fresh and self._missing(lineage, catalog):
            catalog.refresh_within(lineage)
        self._are_missing(lineage, lineage.commits.named(self._missing(lineage, catalog)))
        self._intervals.forget(self.missing)
        return catalog

    def _are_missing(self, lineage: Lineage, missing: list[Commit]) -> None:
        if self.missing != missing:
            self.missing_bytes = backlog_bytes(lineage, missing)
        self.missing = missing

    @staticmethod
    def _missing(lineage: Lineage, catalog: Catalog) -> list[MarkerId]:
        """Return the missing markers by name. Does not open the COMMITs of markers that the store has."""
        markers, dropped = catalog.markers, catalog.dropped
        return [marker for marker in lineage.commits if marker not in markers and marker not in dropped]

    def _fold_or_pass(
        self,
        lineage: Lineage,
        catalog: Catalog,
        commit: Commit,
        before: Commit | None,
        following: Sequence[Commit],
    ) -> Segments | None:
        """Return the segments of all ranks. None if the marker was passed over, which gives it up in the store."""
        parent = before.id if before is not None else lineage.claims[commit.generation].parent
        stands_on_lost = _is_lost(catalog, parent)  # damage there is an error, never a lost marker
        try:
            if stands_on_lost:
                raise CorruptionError(
                    f"marker {commit.id} is based on marker {parent}, which is lost", marker=commit.id
                )
            fold = partial(self._intervals.segments, lineage, catalog, commit, before, self.missing, following)
            return self.repairer.mending(lineage, catalog, fold)
        except CorruptionError as error:
            if isinstance(error, MissingObjectError | OtherLogError):
                raise  # the log has lost nothing
            self._losses.pass_over(commit, error, _HINT)
            dropped = Dropped.of_lost(commit, lineage.previous(commit.id))
            self._losses.give_up(lineage, catalog, dropped)
            return None

    def _put_marker(self, lineage: Lineage, catalog: Catalog, commit: Commit, segments: Segments) -> None:
        """Put a marker's objects, the manifest last: with it the marker is in the store."""
        self._put_claim(lineage, catalog, commit)
        has_dense = self._dense.take(commit)
        manifest = Manifest(commit, lineage.previous(commit.id), segments)
        failpoint("materialize.manifest")
        self.repairer.mending(lineage, catalog, partial(_put_manifest, self._objects, catalog, manifest))
        failpoint("materialize.manifest_put")
        if not has_dense:
            self._dense.give_up(lineage, catalog, commit)

    def _put_claim(self, lineage: Lineage, catalog: Catalog, commit: Commit) -> None:
        """Call :func:`put_claim`. A damaged CLAIM is rewritten from the log."""
        self.repairer.mending(lineage, catalog, partial(put_claim, self._objects, lineage, commit))


def _put_manifest(objects: Objects, catalog: Catalog, manifest: Manifest) -> None:
    """Put a manifest, unless another process has put an equal one. Raises as ``Catalog.check``."""
    commit = manifest.commit
    try:
        put_once(objects, manifest_name(commit.job, commit.id), [manifest.to_bytes()])
        catalog.came(commit.id)
    except CorruptionError:
        catalog.came(commit.id)
        if catalog.check(commit) != manifest:
            raise


def _check(catalog: Catalog, commit: Commit) -> None:
    """Call ``Catalog.check`` for a marker, unless gc has deleted it since."""
    if commit.id in catalog.markers:
        catalog.check(commit)


def _is_lost(catalog: Catalog, marker: MarkerId | None) -> bool:
    """Return whether nothing can build on a marker: its rows were given up, and were not added later."""
    return (
        marker is not None
        and marker in catalog.dropped
        and marker not in catalog.markers
        and catalog.drop_of(marker).lost
    )


def backlog_bytes(lineage: Lineage, missing: Sequence[Commit]) -> int:
    """Return the bytes of frames that lead to these markers, each from the one before in its generation."""
    return sum(
        interval.num_bytes
        for commit in missing
        for interval in intervals_of(lineage.claims[commit.generation], commit, previous_commit(lineage, commit.id))
    )
