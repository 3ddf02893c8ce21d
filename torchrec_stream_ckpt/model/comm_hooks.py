"""Communication hooks of DDP. No ``state_dict`` of torch holds their state from one step to the next."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchrec_stream_ckpt.model import versions
from torchrec_stream_ckpt.util.types import plain_name


def comm_hooks(model: nn.Module) -> Iterator[tuple[str, str, Any, Any]]:
    """Yield (path of the DDP module, name of the hook, the hook, its state) of each hook."""
    for path, module in model.named_modules():
        if isinstance(module, DistributedDataParallel):
            versions.REPLICATED.require(module, module=path)
            for hook, state in module._comm_hooks:
                yield plain_name(path), getattr(hook, "__qualname__", type(hook).__name__), hook, state
