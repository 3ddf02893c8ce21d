"""Open a generation on both tiers: first on the outer log, whose order is the fence, then the same on the inner one.

A generation is based on its parent on both logs, or on neither:

- If only the inner log has the parent, it is copied to the outer one before anything is claimed.
- If only the outer log has the parent, the inner one gets the control records, and a TRIM that states that the rows up
  to there are on the outer tier. The inner log is then a log like any other, and records itself what it lacks.
- If neither is possible, the generation begins a new base: it has no parent, and sends every table whole.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Iterable
from dataclasses import replace

from torchrec_stream_ckpt.errors import CorruptionError, FencedError, MarkerFailedError
from torchrec_stream_ckpt.find.tiers import Tiers, TierState
from torchrec_stream_ckpt.format.control import Claim, Commit, Trim
from torchrec_stream_ckpt.save.generation import Opening, claim_generation
from torchrec_stream_ckpt.store.pins import note_reached
from torchrec_stream_ckpt.tiers.lock import RelayLock
from torchrec_stream_ckpt.tiers.relay import LOCK_TIMEOUT_S, Relay
from torchrec_stream_ckpt.util.types import MarkerId

log = logging.getLogger(__name__)


def claim_both(tiers: Tiers, new: Opening) -> tuple[Claim, Claim]:
    """(rank 0) Own the next generation on both logs.

    Args:
        tiers: Both logs. If a restore has chosen the parent, no other trainer may have claimed a generation since.
        new: The generation. Its tables are those that it sends whole if it has the parent.

    Returns:
        The inner and the outer CLAIM. If a parent was requested but neither has one, all tables are ``swept``.

    Raises:
        FencedError: another trainer was first.
        LogUnavailableError, StoreUnavailableError, ConfigError: as :func:`claim_generation`, of either tier.
    """
    inner, outer, parent = tiers.inner, tiers.outer, new.parent
    outer.log.prepare(new.world)
    inner.log.prepare(new.world)
    if parent is not None and parent not in TierState.read(tiers).outer.commits:
        relay_parent(tiers, parent)
    with RelayLock(tiers.folder).hold(LOCK_TIMEOUT_S):
        state = TierState.read(tiers)
        lacks, why = _missing(state, parent) if parent is not None else ([], "")
        if why:
            if tiers.seen is not None and state.generation != tiers.seen:
                raise FencedError(
                    f"another trainer has claimed generation {state.generation} since marker {parent} was restored",
                    hint="stop one of the two trainers: only one may run a job",
                    generation=state.generation,
                )
            log.warning(
                "the generation after marker %s starts a new base on both tiers, so every table is sent: %s",
                parent,
                why,
            )
            new = replace(new, parent=None, swept=tuple(range(len(new.schema.tables))))
        elif parent is not None:
            _adopt(tiers, state, parent, lacks)
        theirs = claim_generation(outer, new, least=state.inner.next_generation, near=inner.log)
        note_reached(inner.objects, theirs.job, MarkerId(theirs.generation, 0), tiers.every)
        mine = claim_generation(inner, new, twin=theirs)
        tiers.seen = mine.generation
    return mine, theirs


def relay_parent(tiers: Tiers, parent: MarkerId) -> None:
    """Copy a marker of the inner log to the outer one, if that is still possible.

    Raises:
        LogUnavailableError, StoreUnavailableError, CommitUnknownError: a tier does not answer: try again.
    """
    relay = Relay(tiers)
    try:
        for commit in relay.catch_up(upto=parent):
            log.info("marker %s was copied to the outer tier", commit.id)
    except (FencedError, MarkerFailedError, CorruptionError) as error:
        log.warning("marker %s cannot be copied to the outer tier: %s", parent, error.headline)
    finally:
        relay.close()


def _missing(state: TierState, parent: MarkerId) -> tuple[list[Claim | Commit], str]:
    """Return the records on the path to ``parent`` that the inner log lacks, in order, and why it cannot take them.

    The reason is empty if a generation can be based on ``parent`` on both logs.
    """
    lacks: list[Claim | Commit] = []
    if parent not in state.outer.commits:
        return lacks, "it was never copied to the outer tier, which has newer markers"
    newest, last = state.inner.newest_generation, state.inner.newest
    taken: set[int] = set()
    for commit in state.outer.chain(parent):
        claim = state.outer.claims[commit.generation]
        mine = state.inner.claims.get(claim.generation)
        if mine is None and claim.generation > newest:
            lacks.append(claim)
            taken.add(claim.generation)
            newest = claim.generation
        elif claim.generation not in taken and (mine is None or mine.nonce != claim.nonce):
            return lacks, f"the inner log has generations newer than {claim.generation}, but not that one"
        if commit.id in state.inner.commits:
            continue
        if state.owns(claim.generation):
            # Its own rows up to there are gone, or never existed: a COMMIT for them would be false.
            if commit.id in {each.id for each in state.outer.path(parent)}:
                return lacks, f"the inner log has lost marker {commit.id}"
            continue
        if claim.generation != newest or (last is not None and commit.id <= last.id):
            return lacks, f"the inner log continued after marker {commit.id}"
        lacks.append(commit)
    return lacks, ""


def _adopt(tiers: Tiers, state: TierState, parent: MarkerId, lacks: Iterable[Claim | Commit]) -> None:
    """Write the control records that lead to ``parent`` into the inner log, as they are on the outer one."""
    inner = tiers.inner
    path = state.outer.path(parent)
    # A reader that looks for missing rows must find an empty partition.
    inner.log.prepare(max(state.outer.claims[commit.generation].partitions for commit in path))
    for record in lacks:
        inner.log.append_control(record.to_frame(), garbage=inner.control.signs)
    lineage = inner.control.refresh()
    away = [commit.id for commit in lineage.path(parent) if not state.owns(commit.generation)]
    said = lineage.trims.reach
    if all(marker.generation in said and said[marker.generation] >= marker for marker in away):
        return
    last, job = away[-1], lineage.job
    nonce, now = uuid.uuid4().hex, time.time()
    inner.control.trim(Trim(job, last.generation, last.marker, tuple(away), tiers.outer.uri, nonce, now))
    log.info("the inner log is now based on marker %s of the outer tier", parent)
