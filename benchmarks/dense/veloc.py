"""DeepFreeze's baselines for replicated dense state, built on what VELOC does with memory regions.

A checkpoint copies the protected regions, raw, into a file on node-local scratch space (here shared memory) while
training waits; then a thread flushes that file to the disk, with fsync. *Single*: rank 0 does that for all tensors, the
others wait for it. *Sharded*: each rank does it for its slice of each tensor along the tensor's largest dimension.

Kinder than VELOC: the scratch file is mapped once and its pages are there already, nothing is serialized, no checksum.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path

import torch

Named = Sequence[tuple[str, torch.Tensor]]
_ALIGN = 16
"""Bytes at a multiple of which a region begins in the scratch file."""


def sliced(state: Named, rank: int, ranks: int) -> list[tuple[str, torch.Tensor]]:
    """The slices of a rank: views of the live tensors. A scalar is rank 0's."""
    found = []
    for name, tensor in state:
        if not tensor.dim():
            found += [(name, tensor)] * (rank == 0)
            continue
        dim = max(range(tensor.dim()), key=lambda dim: tensor.shape[dim])
        begin, end = (each * tensor.shape[dim] // ranks for each in (rank, rank + 1))
        if end > begin:
            found.append((name, tensor.detach().narrow(dim, begin, end - begin)))
    return found


class Veloc:
    """Protected regions of one rank.

    Args:
        state: Tensors whose memory stays where it is.
        scratch: File on node-local scratch space.
        target: Where it is flushed to.
    """

    def __init__(self, state: Named, scratch: Path, target: Path) -> None:
        self._regions = [tensor.detach() for _, tensor in state]
        ends = list(accumulate((-(-region.nbytes // _ALIGN) * _ALIGN for region in self._regions), initial=0))
        self._begins, self.num_bytes = ends[:-1], ends[-1]
        self.target = target
        with open(scratch, "wb+") as file:
            file.truncate(max(1, self.num_bytes))
            self._map = mmap.mmap(file.fileno(), max(1, self.num_bytes))
        self._scratch = torch.frombuffer(self._map, dtype=torch.uint8)
        self._scratch.zero_()  # its pages are there
        self._thread = ThreadPoolExecutor(1)

    def checkpoint(self) -> Future[None]:
        """Returns once the regions are copied; the future ends when they are on the disk."""
        for begin, region in zip(self._begins, self._regions, strict=True):
            place = self._scratch[begin : begin + region.nbytes]
            place.view(region.dtype).view(region.shape).copy_(region)
        return self._thread.submit(self._flush)

    def _flush(self) -> None:
        with open(self.target, "wb", buffering=0) as file:
            view = memoryview(self._map)[: self.num_bytes]
            while view.nbytes:
                view = view[file.write(view) :]
            os.fsync(file.fileno())

    def holds_the_state(self) -> bool:
        """Whether the disk has the regions as they are now, bit for bit."""
        found = torch.frombuffer(bytearray(self.target.read_bytes()) or bytearray(1), dtype=torch.uint8)
        return all(
            torch.equal(found[begin : begin + region.nbytes], region.cpu().contiguous().view(-1).view(torch.uint8))
            for begin, region in zip(self._begins, self._regions, strict=True)
        )

    def close(self) -> None:
        self._thread.shutdown()
