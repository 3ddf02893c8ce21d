"""A copy of what the ranks hold alike: each of them copies a part, into memory that is kept for the next marker.

DDP keeps parameters and optimizer states equal on all ranks, so one copy of them is saved. Which rank makes it follows
from names and sizes alone: every rank comes to the same answer without asking, and the votes of a marker compare what
the answer was made from.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from torchrec_stream_ckpt.errors import MarkerFailedError

Place = tuple[str, ...]
"""Keys of nested mappings, outermost first."""
Tensors = Mapping[Place, torch.Tensor]


def owners(tensors: Tensors, world: int) -> dict[Place, int]:
    """The rank that saves each tensor: bytes are spread, the largest tensors first."""
    load = [0] * world
    found = {}
    for name in sorted(tensors, key=lambda name: (-tensors[name].nbytes, name)):
        rank = load.index(min(load))
        load[rank] += tensors[name].nbytes
        found[name] = rank
    return found


def listing(tensors: Tensors) -> tuple[str, ...]:
    """What :func:`owners` looks at, and what has to be the same on all ranks."""
    return tuple(f"{'.'.join(name)} {list(tensors[name].shape)} {tensors[name].dtype}" for name in sorted(tensors))


def check_same(listings: list[tuple[str, ...]]) -> None:
    """Refuse a marker to which the ranks would save different sets of tensors: some would be saved by none.

    Raises:
        MarkerFailedError: names the first tensor that one rank holds and another does not.
    """
    for rank, other in enumerate(listings):
        if different := sorted(set(listings[0]) ^ set(other)):
            raise MarkerFailedError(
                f"ranks 0 and {rank} hold different dense state: only one of them has {different[0]}",
                hint="let DDP or FSDP2 hold every dense parameter, and step its optimizer on every rank",
            )


class Copies:
    """Memory for copies, reused: fresh pages cost several times as much as the copy does.

    One copy at a time: the last one's readers must be done.
    """

    def __init__(self) -> None:
        self._kept: dict[Place, torch.Tensor] = {}

    @torch.no_grad()
    def copy(self, tensors: Tensors) -> dict[Place, torch.Tensor]:
        """On the CPU, as they are now; pinned memory for what is on a GPU, for which the host waits once.

        Memory of names that are gone is freed."""
        self._kept = {name: self._room(name, tensor) for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            self._kept[name].copy_(tensor, non_blocking=True)
        for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        return dict(self._kept)

    def _room(self, name: Place, tensor: torch.Tensor) -> torch.Tensor:
        kept = self._kept.get(name)
        if kept is not None and kept.shape == tensor.shape and kept.dtype == tensor.dtype:
            return kept
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
