"""Which marker a user asks for: by its name, the newest one, or the best one by what was said of it."""

from __future__ import annotations

import logging

from torchrec_stream_ckpt.commit.collective import Team
from torchrec_stream_ckpt.errors import ConfigError
from torchrec_stream_ckpt.route.best import LATEST, PREFIX, Best, Value, best_of
from torchrec_stream_ckpt.route.job import Job
from torchrec_stream_ckpt.route.tiers import Tiers, TierState
from torchrec_stream_ckpt.types import MarkerId

log = logging.getLogger(__name__)

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
