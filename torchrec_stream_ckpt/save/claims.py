"""Decide on rank 0 whether this run may start a generation, and from which marker, and write its CLAIM."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from torchrec_stream_ckpt.capture.attached_model import Attached
from torchrec_stream_ckpt.errors import (
    CommitUnknownError,
    ConfigError,
    FencedError,
    LogUnavailableError,
    StoreUnavailableError,
    StreamLostError,
)
from torchrec_stream_ckpt.find.job import Tier
from torchrec_stream_ckpt.format.claim_changes import ClaimChanges
from torchrec_stream_ckpt.format.control import Claim
from torchrec_stream_ckpt.format.imported import check_may_begin, unfinished_warm_start
from torchrec_stream_ckpt.format.lineage import told_to
from torchrec_stream_ckpt.format.schema import check_schema
from torchrec_stream_ckpt.log.control.partition import Control
from torchrec_stream_ckpt.save.generation import Opening, claim_generation, newest_held
from torchrec_stream_ckpt.util.types import MarkerId

log = logging.getLogger(__name__)

_REOPEN_S = 30.0
"""Seconds between attempts to continue on a log that has lost a stream and does not answer."""


class OuterTier(Protocol):
    """(rank 0) Second tier of a job, as claims and the stream use it. :mod:`.tiers.job` implements it."""

    @property
    def control(self) -> Control:
        """Control partition that decides."""

    def claim(self, new: Opening) -> Claim:
        """Claim the next generation on both tiers. Returns the CLAIM of the inner one.

        Raises:
            FencedError: another trainer was first.
            LogUnavailableError, StoreUnavailableError: a tier does not answer.
        """

    def start_relay(self) -> None:
        """Start the relay, a separate process that copies from here on."""


class Claims:
    """Claims the generations of one job. All methods run on rank 0 only.

    Args:
        tier: Tier that the job writes to.
        tiers: Both tiers, if there are two.
        attached: The live tables.
        world: Number of ranks.
    """

    def __init__(self, tier: Tier, tiers: OuterTier | None, attached: Attached, world: int) -> None:
        self._tier = tier
        self._tiers = tiers
        self._attached = attached
        self._world = world
        self.nonce = uuid.uuid4().hex
        """Nonce of the next CLAIM in all attempts: one that was written without an answer must not fence a retry."""
        self.after: str | None = None
        """Nonce of the CLAIM that must be the newest one when the next is made; None if any may be."""
        self._reopen_s = 0.0
        """Time of the next attempt to continue after a loss, on the monotonic clock."""

    @property
    def _control(self) -> Control:
        """Control partition that decides."""
        return self._tier.control if self._tiers is None else self._tiers.control

    def check_schema(self, *, warm: bool = False) -> None:
        """Check that the tables of a job that restores nothing match those of the log.

        Args:
            warm: The job begins from a marker of another job. If the log only has an earlier warm start without a
                marker, nothing is compared.
        """
        lineage = self._control.refresh()
        claims = lineage.claims
        if claims and not (warm and unfinished_warm_start(lineage) is not None):
            check_schema(claims[max(claims)].schema, self._attached.schema)

    def check_restored(self) -> None:
        """Refuse a run that forgot ``restore()``: its markers would be newer than all markers in the log.

        Raises:
            ConfigError: the log holds markers, and ``fresh`` is not set.
            MarkerNotFoundError: the log waits for the first marker of an import or a warm start, and ``fresh`` is not
                set.
        """
        if self._tier.config.fresh:
            return
        lineage, uri = self._control.refresh(), self._tier.config.uris[0]
        check_may_begin(lineage, uri)
        if (newest := lineage.newest) is not None:
            raise ConfigError(
                f"the log has markers, up to {newest.id}, but this run has not restored one",
                hint="call `checkpointer.restore()` before the first step(); to start from scratch, set "
                "StreamConfig(..., fresh=True), in the recipes --restore none",
                uri=uri,
            )

    def claim(self, parent: MarkerId | None, swept: Sequence[int], changes: ClaimChanges | None = None) -> Claim:
        """Claim the next generation.

        Args:
            parent: The marker that it is based on.
            swept: Indices of tables that it sends completely.
            changes: Differences of the model from that of ``parent``. None if the model is unchanged.
        """
        attached = self._attached
        ids = attached.has_id_maps
        new = Opening(attached.schema, self._world, parent, tuple(swept), attached.layout, changes, ids)
        if self._tiers is not None:
            return self._tiers.claim(new)
        claim = claim_generation(self._tier, replace(new, nonce=self.nonce, after=self.after))
        self.nonce, self.after = uuid.uuid4().hex, None
        return claim

    def claim_after_loss(self, lost: Claim, why: StreamLostError) -> tuple[Claim, int] | tuple[()] | None:
        """Claim a generation after a loss, based on the newest marker on the path to here that the log still holds.

        If the model changed after that marker, the new CLAIM repeats all of these changes.

        Args:
            lost: CLAIM of the generation of which the log has lost a stream.
            why: Error that describes the loss.

        Returns:
            The CLAIM and the step of its parent; () if it must be tried again later; None if it is impossible.
        """
        if time.monotonic() < self._reopen_s:
            return ()
        self._reopen_s = time.monotonic() + _REOPEN_S
        tier = self._tier
        try:
            now = tier.log.incarnation()
            if self._tiers is not None or now is None or now.id != lost.incarnation:
                log.error("markers can no longer be committed; restart the job: %s", why.headline)
                return None
            lineage = tier.control.refresh()
            newest = lineage.newest_generation
            if newest != lost.generation and lineage.claims[newest].nonce != self.nonce:
                raise FencedError(f"generation {newest} has taken over this job")
            parent = newest_held(tier.log, tier.control, lost)
            changes = ClaimChanges.of_several(told_to(lineage, lost, parent))
            mine = self.claim(parent, self._attached.tables, changes)
        except (LogUnavailableError, StoreUnavailableError, CommitUnknownError) as error:
            log.warning("markers cannot be committed until the log answers: %s", error.headline)
            return ()
        log.warning(
            "generation %d starts from %s, and sends all rows of every table: %s",
            mine.generation,
            f"marker {parent}" if parent is not None else "no marker, because the log has no intact one",
            why.headline,
        )
        return mine, tier.control.lineage.find(parent).step if parent is not None else 0
