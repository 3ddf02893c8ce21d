"""Open a generation on both tiers: the outer log first, for its order is the fence; then the same on the inner one.

A generation stands on its parent on both logs, or on none of them:

- a parent that only the inner log has is copied to the outer one before anything is claimed;
- for a parent that only the outer log has, the inner one gets the control records, and a TRIM that says that the rows
  up to there are on the outer tier: so it is a log like any other one, and says by itself what it lacks;
- if neither is possible, the generation begins a new base: it stands on nothing, and sends every table whole.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from torchrec_stream_ckpt.errors import CorruptionError, FencedError, MarkerFailedError
from torchrec_stream_ckpt.extras.tiers.lock import RelayLock
from torchrec_stream_ckpt.extras.tiers.relay import LOCK_TIMEOUT_S, Relay
from torchrec_stream_ckpt.find.job import Tier
from torchrec_stream_ckpt.find.tiers import Tiers, TierState
from torchrec_stream_ckpt.format.claim_changes import ClaimChanges
from torchrec_stream_ckpt.format.control import Claim, Commit, Trim
from torchrec_stream_ckpt.format.rank_shards import RankShards
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.save.generation import claim_generation
from torchrec_stream_ckpt.store.pins import Reached, note_reached
from torchrec_stream_ckpt.util.types import MarkerId

log = logging.getLogger(__name__)


def claim_both(
    tiers: Tiers,
    schema: Schema,
    world: int,
    parent: MarkerId | None,
    swept: Sequence[int],
    seen: int | None = None,
    *,
    layout: RankShards | None,
    changes: ClaimChanges | None = None,
) -> tuple[Claim, Claim]:
    """(rank 0) Own the next generation on both logs.

    Args:
        tiers: Both logs.
        schema: The job's tables.
        world: Ranks.
        parent: The marker on which the generation is to stand.
        swept: Tables that it sends whole, if it does.
        seen: The newest generation when ``parent`` was chosen; None: whatever it was.
        layout: Which shards each rank holds; None where they are too many for a CLAIM.
        changes: What the restore was told of a changed model; None: the tables are those of the parent.

    Returns:
        The inner and the outer CLAIM. Without a parent where one was asked for, all tables are ``swept``.

    Raises:
        FencedError: another trainer was first.
        LogUnavailableError, StoreUnavailableError, ConfigError: as :func:`claim_generation`, of either tier.
    """
    inner, outer = tiers.inner, tiers.outer
    outer.log.prepare(world)
    inner.log.prepare(world)
    if parent is not None and parent not in TierState.read(tiers).outer.commits:
        relay_parent(tiers, parent)
    with RelayLock(tiers.folder).hold(LOCK_TIMEOUT_S):
        state = TierState.read(tiers)
        if parent is not None and (why := _why_no_parent(state, parent)):
            if seen is not None and state.generation != seen:
                raise FencedError(
                    f"another trainer has claimed generation {state.generation} since marker {parent} was restored",
                    hint="only one trainer may run a job; stop one",
                    generation=state.generation,
                )
            log.warning("generation of marker %s begins a new base on both tiers, every table is sent: %s", parent, why)
            parent, swept = None, range(len(schema.tables))
        if parent is not None:
            _adopt(tiers, state, parent)
        rest = (schema, world, parent, tuple(swept))
        least = state.inner.next_generation
        theirs = _claim(outer, *rest, layout=layout, changes=changes, least=least)
        note_reached(inner.objects, theirs.job, Reached(MarkerId(theirs.generation, 0), tiers.every))
        mine = _claim(inner, *rest, layout=layout, twin=theirs)
    return mine, theirs


def _claim(tier: Tier, *rest: Any, **how: Any) -> Claim:
    return claim_generation(tier.log, tier.control, tier.dense, tier.objects, tier.config, *rest, **how)


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


def _why_no_parent(state: TierState, parent: MarkerId) -> str:
    """Why a generation cannot stand on ``parent`` on both logs; empty when it can."""
    if parent not in state.outer.commits:
        return "it was never copied to the outer tier, which has gone on"
    return _for_each_missing(state, parent, lambda _: None)


def _for_each_missing(state: TierState, parent: MarkerId, do: Callable[[Claim | Commit], None]) -> str:
    """Call ``do`` with what the inner log lacks of the way to ``parent``, in order. Why it cannot take it, or ""."""
    newest, last = state.inner.newest_generation, state.inner.newest
    taken: set[int] = set()
    for commit in state.outer.chain(parent):
        claim = state.outer.claims[commit.generation]
        mine = state.inner.claims.get(claim.generation)
        if mine is None and claim.generation > newest:
            do(claim)
            taken.add(claim.generation)
            newest = claim.generation
        elif claim.generation not in taken and (mine is None or mine.nonce != claim.nonce):
            return f"the inner log has generations newer than {claim.generation}, but not that one"
        if commit.id in state.inner.commits:
            continue
        if state.owns(claim.generation):
            # Its own rows up to there are gone, or were never there: a COMMIT for them would be false.
            if commit.id in {each.id for each in state.outer.path(parent)}:
                return f"the inner log has lost marker {commit.id}"
            continue
        if claim.generation != newest or (last is not None and commit.id <= last.id):
            return f"the inner log has gone on after marker {commit.id}"
        do(commit)
    return ""


def _adopt(tiers: Tiers, state: TierState, parent: MarkerId) -> None:
    """Write the control records that lead to ``parent`` into the inner log, as far as it lacks them."""
    inner = tiers.inner
    path = state.outer.path(parent)
    # A reader that looks for missing rows must find an empty partition.
    inner.log.prepare(max(state.outer.claims[commit.generation].partitions for commit in path))
    _for_each_missing(state, parent, lambda record: _append(tiers, record))
    lineage = inner.control.refresh()
    away = [commit.id for commit in lineage.path(parent) if not state.owns(commit.generation)]
    said = lineage.trims.reach
    if all(marker.generation in said and said[marker.generation] >= marker for marker in away):
        return
    last, job = away[-1], lineage.job
    nonce, now = uuid.uuid4().hex, time.time()
    inner.control.trim(Trim(job, last.generation, last.marker, tuple(away), tiers.outer.uri, nonce, now))
    log.info("the inner log stands on marker %s of the outer tier", parent)


def _append(tiers: Tiers, record: Claim | Commit) -> None:
    """As it stands on the outer log, its signature included."""
    tiers.inner.log.append_control(record.to_frame(), garbage=tiers.inner.control.signs)
