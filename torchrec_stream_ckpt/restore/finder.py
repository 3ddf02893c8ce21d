"""Where all ranks read one marker from: found together, and again while places with damage are passed over.

Which marker a user asks for: by its name, the newest one, or the best one by what was said of it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from torchrec_stream_ckpt.errors import ConfigError
from torchrec_stream_ckpt.find.best import LATEST, PREFIX, Best, Value, best_of
from torchrec_stream_ckpt.find.find import Damaged, OpenHead, find, no_head
from torchrec_stream_ckpt.find.job import Job, Tier
from torchrec_stream_ckpt.find.route import Route
from torchrec_stream_ckpt.find.tiers import OUTER, TieredJob, Tiers, TierState
from torchrec_stream_ckpt.format.head import HeadState
from torchrec_stream_ckpt.format.imported import begun_in, check_may_begin, check_no_import
from torchrec_stream_ckpt.log.api import LogReader
from torchrec_stream_ckpt.ranks.collective import Team
from torchrec_stream_ckpt.store.api import Objects
from torchrec_stream_ckpt.store.dense import DenseStore
from torchrec_stream_ckpt.store.head import Head, head_root
from torchrec_stream_ckpt.util.config import StreamConfig
from torchrec_stream_ckpt.util.types import MarkerId

Named = MarkerId | str | tuple[int, int] | None
"""A marker as a user names it."""


def chosen(team: Team, job: Job | Tiers, marker: Named, best: str | None) -> MarkerId | None:
    """(all ranks) The marker that is asked for; None: the newest that is whole.

    Raises:
        ConfigError: it is not a marker, the ranks ask for different ones, or nothing of that name was said of any.
        MarkerNotFoundError: no marker is offered, so none is the best.
        StoreUnavailableError: the store does not answer: it says which markers were given up.
    """
    wanted = team.together(lambda: _wanted(marker, best))
    said = team.gather(wanted)
    if len(set(said)) > 1:
        asked = ", ".join(str(each or LATEST) for each in said)
        raise ConfigError(
            f"the ranks ask for different markers: {asked}"[:400], hint="name the same marker on all ranks"
        )
    if not isinstance(wanted, Best):
        return wanted
    found = team.on_rank0(lambda: best_of(_offered(job), wanted))
    if team.rank == 0:
        log.info("the best marker by %s is %s", wanted, found)
    return found


def _wanted(marker: Named, best: str | None) -> MarkerId | Best | None:
    if best is not None:
        if marker is not None:
            raise ConfigError(f"a marker, {marker}, and the best one are asked for", hint="leave out one of them")
        return Best.parse(best)
    if isinstance(marker, str):
        if marker == LATEST:
            return None
        if marker.startswith(PREFIX):
            return Best.parse(marker.removeprefix(PREFIX))
    return MarkerId.of(marker)


def _offered(job: Job | Tiers) -> dict[MarkerId, dict[str, Value]]:
    """(rank 0) What was said of each marker that is offered, oldest first; with two tiers on either one."""
    state = TierState.read(job)
    found = job.outer.offered()
    if job.inner is not None and state.inner.claims:
        for marker, said in job.inner.offered().items():
            if state.owns(marker.generation):
                found[marker] = {**found.get(marker, {}), **said}
    return {marker: found[marker] for marker in sorted(found)}


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Begun:
    """A job that has markers of its own."""

    newest: MarkerId
    origin: tuple[str, MarkerId] | None
    """The job, in hex, and the marker that it began in by a warm start; None: it did not."""


class Finder:
    """Finds a marker on all ranks alike, again and again while places with damage are passed over.

    Args:
        config: Of the nearest tier.
        team: All ranks.
        tier: What the job writes to.
        tiers: Both tiers, if there are two.
    """

    def __init__(self, config: StreamConfig, team: Team, tier: Tier, tiers: TieredJob | None) -> None:
        self._config = config
        self._team = team
        self._tiers = tiers
        self._job = tiers.logs if tiers is not None else tier
        self.head: Head | None = None
        """What rows are copied from; its writer waits until it is closed."""
        self.use_head = True
        """True if a HEAD is looked for."""
        self.damaged = Damaged(config.max_fallback)
        """Which places were found damaged; the same on all ranks, but for what is passed over."""
        self._place = OUTER
        """Where the marker is read from that was found last."""

    def begin(self) -> None:
        """Forget which places were damaged: they may have been repaired."""
        self.use_head, self.damaged = True, self.damaged.anew()

    @property
    def frames(self) -> LogReader:
        """Frames of the marker that was found last."""
        return self._place.log(self._job)

    @property
    def objects(self) -> Objects:
        """The store that its rows may come from."""
        return self._place.objects(self._job)

    @property
    def dense(self) -> DenseStore:
        """Its dense state."""
        return self._place.dense(self._job)

    def find(self, marker: MarkerId | None) -> Route | None:
        """(all ranks) The marker. After it, all ranks know where to read it from, and a HEAD that they use is open."""
        route = self._look(marker, self._open_head if self.use_head else no_head)
        if route is not None and route.head is not None:
            route = self._everywhere(route, route.head)
        if route is None or route.head is None:
            self.close()
        return route

    def begun(self) -> Begun | None:
        """(rank 0) The newest marker, and where the first rows of the way to it come from.

        Returns:
            None where nothing was ever committed.

        Raises:
            CorruptionError: the log was lost, and its store holds markers.
            MarkerNotFoundError: an import has begun in it, and has not ended.
        """
        state = TierState.read(self._job)
        newest = next(state.newest_first(), None)
        if newest is None:
            find(self._job, None)  # looks whether a log was lost
            outer = self._job.outer
            check_no_import(outer.control.lineage, outer.uri)
            return None
        lineage = state.lineage(next(state.places(newest.id)))
        return Begun(newest.id, begun_in(lineage.claims[lineage.way(newest.id)[0].generation]))

    def check_may_begin(self) -> None:
        """(rank 0) See that a log without a marker does not wait for that of an import or of a warm start.

        Raises:
            MarkerNotFoundError: it does.
        """
        outer = self._job.outer
        check_may_begin(outer.control.lineage, outer.uri)

    def made_of(self, marker: MarkerId, digest: str) -> MarkerId | None:
        """(rank 0) The newest marker, if the way to it leads through ``marker`` and the changes with this digest."""
        state = TierState.read(self._job)
        newest = next(state.newest_first(), None)
        if newest is None:
            return None
        lineage = state.lineage(next(state.places(newest.id)))
        claims = (lineage.claims[each.generation] for each in lineage.way(newest.id))
        told = (claim.changes.each for claim in claims if claim.parent == marker and claim.changes is not None)
        made = any(change.digest == digest for each in told for change in each)
        return newest.id if made else None

    def close(self) -> None:
        """Let the writer of the HEAD go on."""
        if self.head is not None:
            self.head.close()
            self.head = None

    def _look(self, marker: MarkerId | None, head: OpenHead) -> Route | None:
        route = self._team.on_rank0(lambda: find(self._job, marker, head, self.damaged))
        self._place = route.place if route is not None else OUTER
        if self._tiers is not None:
            self._tiers.seen = route.newest_generation if route is not None else None
        return route

    def _everywhere(self, route: Route, head: HeadState) -> Route:
        """``route`` if each host has what rank 0's HEAD holds, otherwise one that uses no HEAD."""
        if all(self._team.gather(self._has_head(head))):
            return route
        if self._team.rank == 0:
            log.info("HEAD is not used: not every host of this job has marker %s", head.marker)
        cold = self._look(route.commit.id, no_head)
        assert cold is not None
        return replace(cold, skipped=route.skipped)

    def _has_head(self, wanted: HeadState) -> bool:
        """Return whether this host holds what rank 0's does; it is open then."""
        if self._team.rank:
            self._open_head(wanted.job)
        return self.head is not None and self.head.state.same_image(wanted)

    def _open_head(self, job: bytes) -> HeadState | None:
        self.close()
        root = head_root(self._config.head)
        self.head = Head.open(root, job) if root is not None else None
        if self.head is None:
            return None
        self.head.verify = self._config.verify_head
        return self.head.state
