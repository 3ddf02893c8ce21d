"""Tiers as a trainer uses them: where to restore from, opening a generation on both, the relay beside rank 0."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from torchrec_stream_ckpt.commit.collective import Team
from torchrec_stream_ckpt.config import StreamConfig
from torchrec_stream_ckpt.control.partition import Control
from torchrec_stream_ckpt.errors import CorruptionError
from torchrec_stream_ckpt.format.control import Claim
from torchrec_stream_ckpt.format.head import HeadState
from torchrec_stream_ckpt.format.rank_shards import RankShards
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.route.job import Tier, open_tier
from torchrec_stream_ckpt.route.passed import Passed
from torchrec_stream_ckpt.route.route import Route
from torchrec_stream_ckpt.tiers.opening import claim_both
from torchrec_stream_ckpt.tiers.process import RelayProcess
from torchrec_stream_ckpt.tiers.source import OUTER, Found, Place, Source, look_up
from torchrec_stream_ckpt.tiers.tier import Tiers
from torchrec_stream_ckpt.types import MarkerId

log = logging.getLogger(__name__)


class Tiered:
    """The outer tier of one rank's job, beside the inner one that it writes to.

    Args:
        config: The job's.
        tiers: Both logs, open.
        team: All ranks.
    """

    def __init__(self, config: StreamConfig, tiers: Tiers, team: Team) -> None:
        self._config = config
        self._tiers = tiers
        self._team = team
        self._relay: RelayProcess | None = None
        self._damaged: dict[tuple[MarkerId, Place], CorruptionError] = {}
        self._seen: int | None = None
        """The newest generation when a marker was found last, or that of this job since it is open."""
        self.place: Place = OUTER
        """Where the marker comes from that was found last."""

    @classmethod
    def open(cls, config: StreamConfig, inner: Tier, team: Team) -> Tiered | None:
        """(all ranks) None for a job with a single log.

        Raises:
            LogUnavailableError, StoreUnavailableError: the outer tier does not answer: nothing can be claimed.
        """
        outer = config.outer
        if outer is None:
            return None
        tier = team.together(lambda: open_tier(outer, signs=team.rank == 0))
        team.on_rank0(tier.preflight)
        return cls(config, Tiers(inner, tier, config.outer_every), team)

    @property
    def control(self) -> Control:
        """(rank 0) The control partition that decides."""
        return self._tiers.outer.control

    def find(
        self,
        marker: MarkerId | None,
        head: Callable[[bytes], HeadState | None],
        passed: Passed,
        damaged: Mapping[str, CorruptionError],
    ) -> tuple[Route | None, Source]:
        """(all ranks) ``marker``, or the newest one that is whole, and what to read it from; see ``look_up``."""
        found: Found | None = self._team.on_rank0(
            lambda: look_up(self._tiers, marker, head, places=self._damaged, passed=passed, damaged=damaged)
        )
        self.place = found.place if found is not None else OUTER
        self._seen = found.generation if found is not None else None
        return (found.choice if found is not None else None), self.place.source(self._tiers)

    def note_damage(self, marker: MarkerId, error: CorruptionError) -> None:
        """(all ranks) The marker that was found is damaged where it was read: the next look passes that place over."""
        if self._team.rank == 0:
            log.warning("marker %s cannot be had from the %s tier: %s", marker, self.place, error.headline)
        self._damaged[marker, self.place] = error

    def claim(
        self, schema: Schema, world: int, parent: MarkerId | None, swept: tuple[int, ...], layout: RankShards | None
    ) -> Claim:
        """(rank 0) Own the next generation on both tiers; the inner CLAIM.

        Raises:
            FencedError: another trainer was first.
            LogUnavailableError, StoreUnavailableError: a tier does not answer.
        """
        self._let_go(self._config.commit_timeout_s)  # (reshard) what it has not copied of the parent is copied below
        mine, _ = claim_both(self._tiers, schema, world, parent, swept, self._seen, layout=layout)
        self._seen = mine.generation
        return mine

    def start_relay(self) -> None:
        """(rank 0) Copy from here on, in a process of its own."""
        self._relay = RelayProcess(self._config)

    @property
    def relay_pid(self) -> int | None:
        """(rank 0) Of the relay."""
        return self._relay.pid if self._relay is not None else None

    def _let_go(self, timeout_s: float) -> bool:
        """Let the relay copy what is there and end; whether it has."""
        relay, self._relay = self._relay, None
        return relay is None or relay.close(timeout_s)

    def close(self, timeout_s: float) -> None:
        """Let go of the outer tier; the relay may take ``timeout_s`` to copy the rest, and goes on by itself then."""
        if not self._let_go(timeout_s):
            log.warning("the outer tier does not have all of this job yet: stream-ckpt relay tells, and copies it")
        self._tiers.outer.close()
