"""Observe calls that change rows from outside: loaded state dicts, moved shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import KeyedOptimizer

from torchrec_stream_ckpt.errors import UnsupportedError
from torchrec_stream_ckpt.model.modules import is_replicated, sharded_embeddings
from torchrec_stream_ckpt.model.patch import Hook, patch, wrap
from torchrec_stream_ckpt.model.wrappers import walk


def watch_outside_writes(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    on_all_changed: Callable[[], None],
    on_reshard: Callable[[Callable[[], float]], float],
) -> Callable[[], None]:
    """Intercept calls that change rows outside the fused update. Returns the remover.

    Loading a state dict calls ``on_all_changed`` first: of the model, of any module that holds tables, of a fused
    optimizer, or of an optimizer that was handed over. ``dmp.reshard(...)`` becomes ``on_reshard(call)``, where
    ``call()`` moves the rows. Other writes in place are detected afterwards (``tensor_versions``).
    """

    def loading(*_args: object, **_more: object) -> None:
        on_all_changed()

    def resharding(reshard: Callable[..., float], *args: Any, **kwargs: Any) -> float:
        _check_reshard(model)
        return on_reshard(lambda: reshard(*args, **kwargs))

    sharded = [module for _, module in sharded_embeddings(model)]
    lookups = [lookup for module in sharded for lookup in module._lookups if not is_replicated(lookup)]
    modules = {id(part): part for root in (*sharded, *lookups) for part in root.modules()}
    handles = [part.register_load_state_dict_pre_hook(Hook(loading)) for part in modules.values()]
    # A combined optimizer writes into the states of its parts itself: each one that can be called is hooked.
    dmp = model if isinstance(model, DistributedModelParallel) else None
    fused = [dmp.fused_optimizer] if dmp is not None else [module.fused_optimizer for module in sharded]
    roots = [root for root in (*fused, optimizer) if root is not None]
    optimizers = {id(part): part for root in roots for part in walk(root) if isinstance(part, KeyedOptimizer)}
    # A lookup loads by its own method, which calls no hooks of its parts.
    patched = [patch(part, "load_state_dict", loading) for part in (*optimizers.values(), *lookups)]
    if dmp is not None:
        patched.append(wrap(dmp, "reshard", resharding))

    def remove() -> None:
        for handle in handles:
            handle.remove()
        for undo in patched:
            undo()

    return remove


def _check_reshard(model: nn.Module) -> None:
    for path, module in sharded_embeddings(model):
        if any(is_replicated(lookup) for lookup in module._lookups):
            raise UnsupportedError(
                "DMP.reshard() of a module with data-parallel tables is not supported: TorchRec rebuilds those without "
                "DDP",
                hint="shard these tables, or mark(), close(), and restore in a new job with the other plan",
                module=path,
            )
