"""Where the ranks of a job first meet: all of them make the checkpointer, of a model that is ready for it."""

from __future__ import annotations

import json
import logging
import time

import torch
import torch.distributed as dist
from torch import nn

from torchrec_stream_ckpt.adapter import check_data_parallel
from torchrec_stream_ckpt.commit.roll import WARN_S
from torchrec_stream_ckpt.errors import RankLostError, UnsupportedError

log = logging.getLogger(__name__)

_MET = "stream-ckpt/met"


def meet(model: nn.Module | None, optimizer: torch.optim.Optimizer | None, bound_s: float) -> None:
    """(all ranks) Wait until each rank has come to this call.

    A rank whose model is not data parallel yet says so first: the others may be inside ``init_data_parallel()``, which
    is collective, and would never come.

    Raises:
        RankLostError: some did not come; names them.
        UnsupportedError: the model of a rank is not data parallel; names the rank, on all that have come.
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
                    hint="make the StreamCheckpointer on all ranks; look at that rank's output and host",
                    rank=rank,
                )
            log.warning("%s", said)
        time.sleep(min(0.5, 0.01 + waited_s / 10))


def _listed(ranks: list[int]) -> str:
    """At most eight of them."""
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return ", ".join(map(str, ranks[:8])) + more
