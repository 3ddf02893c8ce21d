"""One capture for each kernel: two would not know of each other's writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from weakref import WeakSet

from torch import nn

from torchrec_stream_ckpt.adapter.kernels import FusedKernel
from torchrec_stream_ckpt.errors import ConfigError

_CLAIMED: WeakSet[nn.Module] = WeakSet()


def check_free(kernels: Sequence[FusedKernel]) -> None:
    """Refuse kernels that another capture has.

    Raises:
        ConfigError: names their tables.
    """
    taken = [kernel for kernel in kernels if kernel.module in _CLAIMED]
    if taken:
        raise ConfigError(
            "another StreamCheckpointer captures these tables",
            hint="close() it before you attach a new one",
            tables=",".join(kernel.tables for kernel in taken),
        )


def claim(kernels: Sequence[FusedKernel]) -> Callable[[], None]:
    """Keep every other capture away from these kernels, which are free; returns what frees them again."""
    modules = [kernel.module for kernel in kernels]
    _CLAIMED.update(modules)
    return lambda: _CLAIMED.difference_update(modules)
