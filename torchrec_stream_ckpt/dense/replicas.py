"""A copy of what the ranks hold alike: each of them copies a part, into memory that is kept for the next marker.

The ranks compare what they hold (``replica_check.py``), so one copy of it is saved. Which rank makes the copy follows
from names and sizes alone: every rank comes to the same answer without asking, and the votes of a marker compare what
the answer was made from.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

Tensors = Mapping[str, torch.Tensor]
"""By entry."""
MODEL = "model."
"""Begins the entries of parameters."""


def owners(tensors: Tensors, world: int, parameters: Mapping[str, str] | None = None) -> dict[str, int]:
    """The rank that saves each tensor: bytes are spread, the largest groups first.

    A parameter and what optimizers keep for it are one group. So one rank saves all of it.

    Args:
        tensors: What each rank holds a copy of.
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

    One copy at a time: the last one's readers must be done.
    """

    def __init__(self) -> None:
        self._kept: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def copy(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        """On the CPU, as they are now; pinned memory for what is on a GPU, for which the host waits once.

        Memory of names that are gone is freed."""
        self._kept = {name: self._room(name, tensor) for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            self._kept[name].copy_(tensor, non_blocking=True)
        for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        return dict(self._kept)

    def holds(self, tensors: Tensors) -> bool:
        """Return whether these are bit for bit what was copied last, and all of it."""
        return self._kept.keys() == tensors.keys() and all(
            _same(self._kept[name], tensor) for name, tensor in tensors.items()
        )

    def _room(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        kept = self._kept.get(name)
        if kept is not None and kept.shape == tensor.shape and kept.dtype == tensor.dtype:
            return kept
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)


def _same(kept: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Bit for bit: NaN is what it was, and -0.0 is not 0.0."""
    return kept.dtype == tensor.dtype and kept.shape == tensor.shape and bool(torch.equal(_bits(kept), _bits(tensor)))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
