"""Modules of ``torch.compile``: a marker has the names of the model that was compiled, without ``_orig_mod``."""

from __future__ import annotations

from functools import lru_cache

from torch import nn
from torchrec.distributed.model_parallel import get_unwrapped_module

from torchrec_stream_ckpt.model import versions


def is_compiled(module: nn.Module) -> bool:
    """Return whether ``torch.compile`` created this module. Checked by name: importing its class takes seconds."""
    return _compiles(type(module))  # type: ignore[arg-type]  # mypy takes a class for one that has no hash


@lru_cache(maxsize=1024)
def _compiles(kind: type[nn.Module]) -> bool:
    return any(each.__name__ == "OptimizedModule" and each.__module__.startswith("torch.") for each in kind.__mro__)


def original(module: nn.Module) -> nn.Module:
    """Return the module inside, which shares all parameters. Any other module is returned unchanged."""
    while is_compiled(module):
        versions.COMPILED.require(module)
        inner = module._orig_mod
        assert isinstance(inner, nn.Module)
        module = inner
    return module


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model without DMP, DDP and ``torch.compile`` around it.

    Paths of tables and dense parameters start there.
    """
    while (inner := original(get_unwrapped_module(model))) is not model:
        model = inner
    return model
