"""Notice what changes rows from outside: loaded state dicts, moved shards."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import KeyedOptimizer

from torchrec_stream_ckpt.adapter.modules import sharded_embeddings
from torchrec_stream_ckpt.adapter.patch import patch
from torchrec_stream_ckpt.adapter.wrappers import walk
from torchrec_stream_ckpt.errors import UnsupportedError


def watch_outside_writes(
    dmp: DistributedModelParallel, optimizer: torch.optim.Optimizer | None, on_all_changed: Callable[[], None]
) -> Callable[[], None]:
    """Notice what changes rows outside the fused update; returns the remover.

    Loading a state dict, of the model, of a sharded module or of a fused optimizer, calls ``on_all_changed``.
    ``reshard`` is refused. Tensors that are written in place are not seen: no API tells.
    """

    def loading(*_args: object, **_more: object) -> None:
        on_all_changed()

    handles = [module.register_load_state_dict_pre_hook(loading) for _, module in sharded_embeddings(dmp)]
    # A combined optimizer writes into the states of its parts by itself: each one that can be called is watched.
    roots = [root for root in (dmp.fused_optimizer, optimizer) if root is not None]
    optimizers = {id(part): part for root in roots for part in walk(root) if isinstance(part, KeyedOptimizer)}
    patched = [patch(part, "load_state_dict", loading) for part in optimizers.values()]
    patched.append(patch(dmp, "reshard", _refuse_reshard))

    def remove() -> None:
        for handle in handles:
            handle.remove()
        for undo in patched:
            undo()

    return remove


def _refuse_reshard(*_args: object, **_more: object) -> None:
    raise UnsupportedError(
        "DMP.reshard() under streaming is not handled yet",
        hint="mark(), close(), and restore in a new job with the other plan",
    )
