"""Detect writes in place outside the fused update by the versions of a kernel's tensors.

Torch counts the in-place operators on a tensor, and all views of it share the count. FBGEMM's fused updates do not
increment it. ``tensor.data = other`` does not increment it either, but gives the tensor other memory. Comparing both
costs a microsecond per tensor. For the operators that increment the count, and for undetected writes, see
docs/guarantees.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from torchrec_stream_ckpt.model.versions import TENSOR

_Seen = tuple[torch.Tensor, torch.UntypedStorage, int]
"""A tensor, its memory and its version. Both objects are kept, so that no new object gets their identity."""


class Versions:
    """The versions of the tensors that hold one kernel's tables.

    Args:
        tbe: The kernel.
        views: For each of its shards, the live views of weights and states.
    """

    def __init__(self, tbe: nn.Module, views: Sequence[Iterable[torch.Tensor]]) -> None:
        holders = {
            tensor.untyped_storage().data_ptr(): name
            for name, tensor in (*tbe.named_parameters(recurse=False), *tbe.named_buffers(recurse=False))
            if tensor.numel()
        }
        for name in holders.values():
            TENSOR.require(getattr(tbe, name))
        self._tbe = tbe
        self._shards: dict[str, set[int]] = {}
        """Name of a tensor of the kernel -> the shards whose rows it holds. A write to one of them counts for all."""
        for shard, tensors in enumerate(views):
            for view in tensors:
                if view.numel():
                    self._shards.setdefault(holders[view.untyped_storage().data_ptr()], set()).add(shard)
        self._seen = self._looked = self._now()

    def _now(self) -> list[_Seen]:
        """Return the current tensors and versions. A replaced tensor may have the version of the old one."""
        tensors = [getattr(self._tbe, name) for name in self._shards]
        return [(tensor, tensor.untyped_storage(), tensor._version) for tensor in tensors]

    def rebase(self) -> None:
        """Record all writes so far as known."""
        self._seen = self._looked = self._now()

    def changed(self) -> set[int]:
        """Return shards that may have been written since ``told`` or ``rebase``."""
        self._looked = now = self._now()
        pairs = zip(self._shards.values(), self._seen, now, strict=True)
        return set().union(*(shards for shards, was, now in pairs if not _same(was, now)))

    def told(self) -> None:
        """Record the last result of ``changed`` as known."""
        self._seen = self._looked


def _same(was: _Seen, now: _Seen) -> bool:
    return was[0] is now[0] and was[1] is now[1] and was[2] == now[2]
