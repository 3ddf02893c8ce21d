"""A copy of what the ranks hold alike: each of them copies a part, into memory that is kept for the next marker.

DDP keeps parameters and optimizer states equal on all ranks, so one copy of them is saved; a frozen parameter is
compared, for nothing keeps it equal. Which rank makes the copy follows from names and sizes alone: every rank comes to
the same answer without asking, and the votes of a marker compare what the answer was made from.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import torch
from crc32c import crc32c

from torchrec_stream_ckpt.errors import MarkerFailedError

Tensors = Mapping[str, torch.Tensor]
"""By entry."""
FROZEN = " frozen, CRC-32C "


def owners(tensors: Tensors, world: int) -> dict[str, int]:
    """The rank that saves each tensor: bytes are spread, the largest tensors first."""
    load = [0] * world
    found = {}
    for name in sorted(tensors, key=lambda name: (-tensors[name].nbytes, name)):
        rank = load.index(min(load))
        load[rank] += tensors[name].nbytes
        found[name] = rank
    return found


def listing(tensors: Tensors, places: Mapping[str, str], frozen: Collection[str]) -> tuple[str, ...]:
    """Return what :func:`owners` looks at, and what has to be the same on all ranks.

    Args:
        tensors: What each rank holds a copy of.
        places: Entry -> where its tensor stands, for people.
        frozen: Entries of parameters that nothing keeps equal: a checksum of their bytes is in the listing.
    """
    return tuple(
        f"{name}{f' ({places[name]})' if name in places else ''} {list(tensor.shape)} {tensor.dtype}"
        + (f"{FROZEN}{_checksum(tensor):08x}" if name in frozen else "")
        for name, tensor in sorted(tensors.items())
    )


def _checksum(tensor: torch.Tensor) -> int:
    data = np.from_dlpack(_bits(tensor))
    return int(crc32c(data.data))


def check_same(listings: list[tuple[str, ...]]) -> None:
    """Refuse a marker to which the ranks would save different sets of tensors, or other values of a frozen one.

    Raises:
        MarkerFailedError: names the first tensor that one rank holds and another does not, or holds otherwise.
    """
    for rank, other in enumerate(listings):
        if not (different := sorted(set(listings[0]) ^ set(other))):
            continue
        tensor, frozen, _ = different[0].partition(FROZEN)
        if frozen and sum(each.startswith(f"{tensor}{FROZEN}") for each in different) > 1:
            raise MarkerFailedError(
                f"ranks 0 and {rank} hold different values of a frozen parameter: {tensor}",
                hint="give all ranks the same values, or register it as a buffer, which is saved for each rank",
            )
        raise MarkerFailedError(
            f"ranks 0 and {rank} hold different dense state: only one of them has {different[0]}",
            hint="let DDP or FSDP2 hold every dense parameter, and step its optimizer on every rank",
        )


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
        """Tell whether these are bit for bit what was copied last, and all of it."""
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
