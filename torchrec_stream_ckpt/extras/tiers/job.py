"""Tiers as a trainer uses them: opening a generation on both, the relay beside rank 0."""

from __future__ import annotations

import logging

from torchrec_stream_ckpt.extras.tiers.process import RelayProcess
from torchrec_stream_ckpt.extras.tiers.two_claims import claim_both
from torchrec_stream_ckpt.find.job import Tier, open_tier
from torchrec_stream_ckpt.find.tiers import TieredJob, Tiers
from torchrec_stream_ckpt.format.claim_changes import ClaimChanges
from torchrec_stream_ckpt.format.control import Claim
from torchrec_stream_ckpt.format.rank_shards import RankShards
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.log.control.partition import Control
from torchrec_stream_ckpt.ranks.collective import Team
from torchrec_stream_ckpt.util.config import StreamConfig
from torchrec_stream_ckpt.util.types import MarkerId

log = logging.getLogger(__name__)


class Tiered(TieredJob):
    """The outer tier of one rank's job, beside the inner one that it writes to.

    Args:
        config: The job's.
        tiers: Both logs, open.
    """

    def __init__(self, config: StreamConfig, tiers: Tiers) -> None:
        super().__init__(tiers)
        self._config = config
        self._relay: RelayProcess | None = None

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
        return cls(config, Tiers(inner, tier, config.outer_every))

    @property
    def control(self) -> Control:
        """(rank 0) The control partition that decides."""
        return self.logs.outer.control

    def claim(
        self,
        schema: Schema,
        world: int,
        parent: MarkerId | None,
        swept: tuple[int, ...],
        layout: RankShards | None,
        changes: ClaimChanges | None = None,
    ) -> Claim:
        """(rank 0) Own the next generation on both tiers; the inner CLAIM.

        Raises:
            FencedError: another trainer was first.
            LogUnavailableError, StoreUnavailableError: a tier does not answer.
        """
        self._let_go(self._config.commit_timeout_s)  # (reshard) what it has not copied of the parent is copied below
        mine, _ = claim_both(self.logs, schema, world, parent, swept, self.seen, layout=layout, changes=changes)
        self.seen = mine.generation
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
        self.logs.outer.close()
