"""A copy of the state that ranks hold alike: each rank copies a part, into memory that is kept for the next marker.

The ranks compare this state (``replica_check.py``), so one copy of it is saved. The choice of the rank that makes the
copy follows from names and sizes alone. So every rank comes to the same answer without asking, and the votes of a
marker compare the input of that choice.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from torchrec_stream_ckpt.native.kernel import kernel

Tensors = Mapping[str, torch.Tensor]
"""Tensors by entry."""
MODEL = "model."
"""Prefix of the entries of parameters."""
_LARGE_BYTES = 1 << 16
"""From this size on, a copy by the kernel is faster than by torch on one thread."""


def owners(tensors: Tensors, world: int, parameters: Mapping[str, str] | None = None) -> dict[str, int]:
    """Return the rank that saves each tensor: bytes are spread, the largest groups first.

    A parameter and its optimizer state are one group. So one rank saves all of it.

    Args:
        tensors: Tensors of which each rank holds a copy.
        world: Number of ranks.
        parameters: Entry of a tensor of an optimizer -> the parameter that it belongs to.
    """
    groups: dict[str, list[str]] = {}
    for name in sorted(tensors):
        of = (parameters or {}).get(name)
        groups.setdefault(f"{MODEL}{of}" if of is not None else name, []).append(name)
    sizes = {group: sum(tensors[name].nbytes for name in names) for group, names in groups.items()}
    load = [0] * world
    found = {}
    for group in sorted(groups, key=lambda group: (-sizes[group], group)):
        rank = load.index(min(load))
        load[rank] += sizes[group]
        found.update(dict.fromkeys(groups[group], rank))
    return found


class CopyMemory:
    """Memory for copies, reused: fresh pages cost several times as much as the copy does.

    One copy at a time: the readers of the last one must be done.
    """

    def __init__(self) -> None:
        self._kept: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def copy(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        """Return copies on the CPU, as the tensors are now.

        Tensors on a GPU use pinned memory; the host waits for them once.

        Memory of names that no longer exist is freed.
        """
        self._kept = {name: self._room(name, tensor) for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            _copy(self._kept[name], tensor)
        for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        return dict(self._kept)

    def holds(self, tensors: Tensors) -> bool:
        """Return whether these tensors are, bit for bit and without an omission, those that were copied last."""
        return self._kept.keys() == tensors.keys() and all(
            _same(self._kept[name], tensor) for name, tensor in tensors.items()
        )

    def _room(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        kept = self._kept.get(name)
        if kept is not None and kept.shape == tensor.shape and kept.dtype == tensor.dtype:
            return kept
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)


def _copy(target: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy a tensor into memory of :class:`CopyMemory`. If torch has several threads, it copies with all of them."""
    native = kernel() if tensor.nbytes >= _LARGE_BYTES and torch.get_num_threads() == 1 else None
    if native is not None and native.copies and _is_plain(tensor):
        native.copy(target.data_ptr(), tensor.data_ptr(), tensor.nbytes)
    else:
        target.copy_(tensor, non_blocking=True)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether the elements of a tensor lie on the CPU in row-major order, as they are."""
    plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.device.type == "cpu"
    return plain and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def _same(kept: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Compare bit for bit: a NaN equals itself, and -0.0 is not 0.0."""
    return kept.dtype == tensor.dtype and kept.shape == tensor.shape and bool(torch.equal(_bits(kept), _bits(tensor)))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
