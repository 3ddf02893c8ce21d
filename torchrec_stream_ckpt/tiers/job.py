"""Tiers of a trainer: open a generation on both logs, and run the relay next to rank 0."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from torchrec_stream_ckpt.find.job import Tier, open_tier
from torchrec_stream_ckpt.find.tiers import Tiers
from torchrec_stream_ckpt.format.control import Claim
from torchrec_stream_ckpt.log.control.partition import Control
from torchrec_stream_ckpt.ranks.collective import Team
from torchrec_stream_ckpt.save.generation import Opening
from torchrec_stream_ckpt.tiers.two_claims import claim_both
from torchrec_stream_ckpt.util.config import StreamConfig

log = logging.getLogger(__name__)


class Relaying(Protocol):
    """A relay that runs. ``extras/tiers/process.py`` has it in a separate process."""

    @property
    def pid(self) -> int: ...

    def close(self, timeout_s: float) -> bool: ...


class Tiered:
    """The outer tier of one rank's job, in addition to the inner tier that it writes to.

    Args:
        config: The job's configuration.
        tiers: Both logs, open.
        relay: Starts the relay.
    """

    def __init__(self, config: StreamConfig, tiers: Tiers, relay: Callable[[StreamConfig], Relaying]) -> None:
        self.logs = tiers
        """Both logs, open."""
        self._config = config
        self._begin_relay = relay
        self._relay: Relaying | None = None

    @classmethod
    def open(
        cls, config: StreamConfig, inner: Tier, team: Team, relay: Callable[[StreamConfig], Relaying]
    ) -> Tiered | None:
        """(all ranks) Open the outer tier; returns None for a job with a single log.

        Raises:
            LogUnavailableError, StoreUnavailableError: the outer tier does not answer, so nothing can be claimed.
        """
        outer = config.outer
        if outer is None:
            return None
        tier = team.together(lambda: open_tier(outer, signs=team.rank == 0))
        team.on_rank0(tier.preflight)
        return cls(config, Tiers(inner, tier, config.outer_every), relay)

    @property
    def control(self) -> Control:
        """(rank 0) The control partition that decides."""
        return self.logs.outer.control

    def claim(self, new: Opening) -> Claim:
        """(rank 0) Own the next generation on both tiers; returns the inner CLAIM.

        Raises:
            FencedError: another trainer was first.
            LogUnavailableError, StoreUnavailableError: a tier does not answer.
        """
        self._let_go(self._config.commit_timeout_s)  # (reshard) the rest of the parent is copied below
        return claim_both(self.logs, new)[0]

    def start_relay(self) -> None:
        """(rank 0) Start copying, in a separate process."""
        self._relay = self._begin_relay(self._config)

    @property
    def relay_pid(self) -> int | None:
        """(rank 0) Process id of the relay; None if no relay runs."""
        return self._relay.pid if self._relay is not None else None

    def _let_go(self, timeout_s: float) -> bool:
        """Let the relay copy what exists and end. Returns whether it has ended."""
        relay, self._relay = self._relay, None
        return relay is None or relay.close(timeout_s)

    def close(self, timeout_s: float) -> None:
        """Close the outer tier. The relay may take ``timeout_s`` to copy the rest; after that it continues by
        itself."""
        if not self._let_go(timeout_s):
            log.warning("the outer tier lacks a part of this job: run stream-ckpt relay to copy it")
        self.logs.outer.close()
