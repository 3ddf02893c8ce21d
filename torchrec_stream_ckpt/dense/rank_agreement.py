"""First synchronization of the ranks: all of them create the checkpointer, for a model that is ready for it."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torchrec_stream_ckpt.errors import ConfigError, RankLostError, UnsupportedError
from torchrec_stream_ckpt.model import check_data_parallel
from torchrec_stream_ckpt.ranks.collective import Team
from torchrec_stream_ckpt.ranks.liveness import WARN_S

log = logging.getLogger(__name__)

PER_RANK = "stateful_per_rank"
_MET = "stream-ckpt/met"


def meet(model: nn.Module | None, optimizer: torch.optim.Optimizer | None, bound_s: float) -> None:
    """(all ranks) Wait until each rank has made this call.

    A rank whose model is not data parallel yet reports that first: the others may be inside ``init_data_parallel()``,
    which is collective, and would never arrive.

    Raises:
        RankLostError: Some ranks did not arrive. Names them.
        UnsupportedError: The model of a rank is not data parallel. Names the rank, on all ranks that have arrived.
    """
    rank = dist.get_rank()
    refusal: UnsupportedError | None = None
    try:
        if model is not None:
            check_data_parallel(model, optimizer)
    except UnsupportedError as error:
        refusal = UnsupportedError(error.message, hint=error.hint, **{**error.where, "rank": rank})
    group = dist.group.WORLD
    store = group.get_group_store() if group is not None and hasattr(group, "get_group_store") else None
    if store is None:
        if refusal is not None:
            raise refusal
        return
    world, begin, told = dist.get_world_size(), time.monotonic(), False
    number = store.add(f"{_MET}/rank{rank}", 1)
    if refusal is not None:
        store.set(f"{_MET}/{number}/refused", json.dumps([refusal.message, refusal.hint, rank]))
        raise refusal
    store.add(f"{_MET}/{number}", 1)
    while store.add(f"{_MET}/{number}", 0) < world:
        if store.check([f"{_MET}/{number}/refused"]):
            message, hint, of_rank = json.loads(store.get(f"{_MET}/{number}/refused"))
            raise UnsupportedError(message, hint=hint, rank=of_rank)
        waited_s = time.monotonic() - begin
        if waited_s > bound_s or (waited_s > WARN_S and not told):
            told = True
            missing = [other for other in range(world) if store.add(f"{_MET}/rank{other}", 0) < number]
            said = f"rank {rank} has waited {waited_s:.0f} s in StreamCheckpointer() for rank {_listed(missing)}"
            if waited_s > bound_s:
                raise RankLostError(
                    said,
                    hint="create the StreamCheckpointer on all ranks; check that rank's output and host",
                    rank=rank,
                )
            log.warning("%s", said)
        time.sleep(min(0.5, 0.01 + waited_s / 10))


def check_settings(team: Team, settings: Mapping[str, Any]) -> None:
    """(all ranks) Reject settings that must be the same on all ranks, but differ.

    Args:
        team: All ranks.
        settings: Settings of this rank, by name.

    Raises:
        ConfigError: Names those that differ, on all ranks.
    """
    of_ranks = team.gather(dict(settings))
    found = []
    for name, mine in of_ranks[0].items():
        other = next((rank for rank, each in enumerate(of_ranks) if each[name] != mine), None)
        if other is not None:
            found.append(f"{name} is {mine!r} on rank 0 and {of_ranks[other][name]!r} on rank {other}")
    if found:
        raise ConfigError(
            f"settings differ between ranks: {'; '.join(found)}",
            hint="pass the same StreamConfig and arguments on all ranks; check each host's environment variables",
        )


def check_handed_over(team: Team, kinds: Mapping[str, Iterable[str]]) -> None:
    """(all ranks) Reject objects that serve all ranks, if not all ranks handed them over in the same way.

    Args:
        team: All ranks.
        kinds: Names of the objects of this rank by the argument in which they were given.

    Raises:
        ConfigError: Names the objects, on all ranks.
    """
    of_ranks = team.gather({name: kind for kind, names in kinds.items() for name in names})
    found = []
    for name in sorted({name for each in of_ranks for name in each}):
        given = [each.get(name) for each in of_ranks]
        if set(given) - {None, PER_RANK} and len(set(given)) > 1:
            other = next(rank for rank, kind in enumerate(given) if kind != given[0])
            said = [f"in {kind}" if kind else "not passed" for kind in (given[0], given[other])]
            found.append(f"'{name}' is {said[0]} on rank 0 and {said[1]} on rank {other}")
    if found:
        raise ConfigError(
            f"stateful objects differ between ranks: {'; '.join(found)}",
            hint="pass the same names on all ranks: stateful for equal state, stateful_rank0 if only rank 0's state is "
            "saved (all ranks pass the object), stateful_per_rank if each rank has its own state",
        )


def _listed(ranks: list[int]) -> str:
    """List at most eight ranks, and the number of the others."""
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return ", ".join(map(str, ranks[:8])) + more
