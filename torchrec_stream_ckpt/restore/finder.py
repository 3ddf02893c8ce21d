"""Find the marker that a user asks for, and where all ranks read it from.

A user asks for a marker by its name, for the newest one, or for the best one by its metadata. All ranks search
together, and repeat the search to skip locations with damage.
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
"""Forms in which a user can name a marker; None for the newest one."""


def chosen(team: Team, job: Job | Tiers, marker: Named, best: str | None) -> MarkerId | None:
    """(all ranks) Return the marker that is asked for, or None for the newest intact one.

    Raises:
        ConfigError: the name is not a marker, the ranks ask for different ones, or no marker has a value of that name.
        MarkerNotFoundError: there is no marker to choose the best from.
        StoreUnavailableError: the store does not answer; it holds the list of markers that were given up.
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
            raise ConfigError(f"marker={marker} and best={best} were both given", hint="pass only one of them")
        return Best.parse(best)
    if isinstance(marker, str):
        if marker == LATEST:
            return None
        if marker.startswith(PREFIX):
            return Best.parse(marker.removeprefix(PREFIX))
    return MarkerId.of(marker)


def _offered(job: Job | Tiers) -> dict[MarkerId, dict[str, Value]]:
    """(rank 0) Return the metadata of each marker that can be restored, oldest first; with two tiers, from both."""
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
    """Newest marker and origin of a job that has committed markers."""

    newest: MarkerId
    origin: tuple[str, MarkerId] | None
    """Job (its id in hex) and marker that the job's warm start began from; None if it had no warm start."""


class Finder:
    """Finds the same marker on all ranks, repeatedly if locations with damage must be skipped.

    Args:
        config: Configuration of the nearest tier.
        team: All ranks.
        tier: Tier that the job writes to.
        tiers: Both tiers, if there are two.
    """

    def __init__(self, config: StreamConfig, team: Team, tier: Tier, tiers: TieredJob | None) -> None:
        self._config = config
        self._team = team
        self._tiers = tiers
        self._job = tiers.logs if tiers is not None else tier
        self.head: Head | None = None
        """HEAD that rows are copied from; its writer waits until it is closed."""
        self.use_head = True
        """True if the search includes HEAD."""
        self.damaged = Damaged(config.max_fallback)
        """Locations that were found damaged; the same on all ranks, except for the markers that were skipped."""
        self._place = OUTER
        """Place that the marker found last is read from."""

    def begin(self) -> None:
        """Reset the list of known damage; files may have been repaired since."""
        self.use_head, self.damaged = True, self.damaged.anew()

    @property
    def frames(self) -> LogReader:
        """Log that holds the frames of the marker that was found last."""
        return self._place.log(self._job)

    @property
    def objects(self) -> Objects:
        """Store that may hold rows of the marker that was found last."""
        return self._place.objects(self._job)

    @property
    def dense(self) -> DenseStore:
        """Store that holds the dense state of the marker that was found last."""
        return self._place.dense(self._job)

    def find(self, marker: MarkerId | None) -> Route | None:
        """(all ranks) Find a marker, or the newest one if ``marker`` is None.

        Afterwards all ranks know where to read it from, and a HEAD that they use is open. Returns None if no marker
        exists.
        """
        route = self._look(marker, self._open_head if self.use_head else no_head)
        if route is not None and route.head is not None:
            route = self._everywhere(route, route.head)
        if route is None or route.head is None:
            self.close()
        return route

    def begun(self) -> Begun | None:
        """(rank 0) Return the newest marker, and the origin of the first rows on the path to it.

        Returns:
            None if no marker was ever committed.

        Raises:
            CorruptionError: the log was lost, and its store holds markers.
            MarkerNotFoundError: an import into the log has begun and has not finished.
        """
        state = TierState.read(self._job)
        newest = next(state.newest_first(), None)
        if newest is None:
            find(self._job, None)  # checks whether a log was lost
            outer = self._job.outer
            check_no_import(outer.control.lineage, outer.uri)
            return None
        lineage = state.lineage(next(state.places(newest.id)))
        return Begun(newest.id, begun_in(lineage.claims[lineage.way(newest.id)[0].generation]))

    def check_may_begin(self) -> None:
        """(rank 0) Check that a log without a marker is not waiting for the marker of an import or of a warm start.

        Raises:
            MarkerNotFoundError: the log waits for one of them.
        """
        outer = self._job.outer
        check_may_begin(outer.control.lineage, outer.uri)

    def made_of(self, marker: MarkerId, digest: str) -> MarkerId | None:
        """(rank 0) Return the newest marker if its path has ``marker``, followed by the changes with this digest."""
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
        """Close the HEAD, so that its writer can continue."""
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
        """Return ``route`` if every host has the same HEAD as rank 0, otherwise a route without HEAD."""
        if all(self._team.gather(self._has_head(head))):
            return route
        if self._team.rank == 0:
            log.info("HEAD is not used: not every host of this job has marker %s", head.marker)
        cold = self._look(route.commit.id, no_head)
        assert cold is not None
        return replace(cold, skipped=route.skipped)

    def _has_head(self, wanted: HeadState) -> bool:
        """Return whether the HEAD of this host has the same content as that of rank 0. If so, it is open."""
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
