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
from collections.abc import Callable, Sequence
from typing import Any

from torchrec_stream_ckpt.errors import CorruptionError, FencedError, MarkerFailedError
from torchrec_stream_ckpt.find.job import Tier
from torchrec_stream_ckpt.find.tiers import Tiers, TierState
from torchrec_stream_ckpt.format.claim_changes import ClaimChanges
from torchrec_stream_ckpt.format.control import Claim, Commit, Trim
from torchrec_stream_ckpt.format.rank_shards import RankShards
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.save.generation import claim_generation
from torchrec_stream_ckpt.store.pins import note_reached
from torchrec_stream_ckpt.tiers.lock import RelayLock
from torchrec_stream_ckpt.tiers.relay import LOCK_TIMEOUT_S, Relay
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
        world: Number of ranks.
        parent: The marker on which the generation is to be based.
        swept: Tables that the generation sends whole if it has the parent.
        seen: The newest generation at the time ``parent`` was chosen; None if any is accepted.
        layout: Shards that each rank holds; None if there are too many for a CLAIM.
        changes: Changes to the model that the restore declared; None if the tables are those of the parent.

    Returns:
        The inner and the outer CLAIM. If a parent was requested but neither has one, all tables are ``swept``.

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
                    hint="stop one of the two trainers: only one may run a job",
                    generation=state.generation,
                )
            log.warning(
                "the generation after marker %s starts a new base on both tiers, so every table is sent: %s",
                parent,
                why,
            )
            parent, swept = None, range(len(schema.tables))
        if parent is not None:
            _adopt(tiers, state, parent)
        rest = (schema, world, parent, tuple(swept))
        least = state.inner.next_generation
        theirs = _claim(outer, *rest, layout=layout, changes=changes, least=least, near=inner.log)
        note_reached(inner.objects, theirs.job, MarkerId(theirs.generation, 0), tiers.every)
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
    """Return why a generation cannot be based on ``parent`` on both logs; empty if it can."""
    if parent not in state.outer.commits:
        return "it was never copied to the outer tier, which has newer markers"
    return _for_each_missing(state, parent, lambda _: None)


def _for_each_missing(state: TierState, parent: MarkerId, do: Callable[[Claim | Commit], None]) -> str:
    """Call ``do`` with each record on the path to ``parent`` that the inner log lacks, in order. Returns why the inner
    log cannot take them, or ""."""
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
            # Its own rows up to there are gone, or never existed: a COMMIT for them would be false.
            if commit.id in {each.id for each in state.outer.path(parent)}:
                return f"the inner log has lost marker {commit.id}"
            continue
        if claim.generation != newest or (last is not None and commit.id <= last.id):
            return f"the inner log continued after marker {commit.id}"
        do(commit)
    return ""


def _adopt(tiers: Tiers, state: TierState, parent: MarkerId) -> None:
    """Write the control records that lead to ``parent`` into the inner log, if it lacks them."""
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
    log.info("the inner log is now based on marker %s of the outer tier", parent)


def _append(tiers: Tiers, record: Claim | Commit) -> None:
    """Append a record exactly as it is on the outer log, including its signature."""
    tiers.inner.log.append_control(record.to_frame(), garbage=tiers.inner.control.signs)
