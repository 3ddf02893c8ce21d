"""DeepFreeze's baselines for replicated dense state, built on what VELOC does with memory regions.

A checkpoint copies the protected regions, raw, into a file on node-local scratch space (here shared memory) while
training waits; then a thread flushes that file to the disk, with fsync. *Single*: rank 0 does that for all tensors, the
others wait for it. *Sharded*: each rank does it for its part of the tensors, which are dealt out by their bytes.

Kinder than VELOC: the scratch file is mapped once and its pages are there already, nothing is serialized, no checksum.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

Named = Sequence[tuple[str, torch.Tensor]]


def dealt(state: Named, ranks: int) -> list[list[tuple[str, torch.Tensor]]]:
    """The tensors of each rank: largest first, each to the rank that has least."""
    parts: list[list[tuple[str, torch.Tensor]]] = [[] for _ in range(ranks)]
    for name, tensor in sorted(state, key=lambda each: (-each[1].nbytes, each[0])):
        min(parts, key=lambda part: sum(each.nbytes for _, each in part)).append((name, tensor))
    return parts


class Veloc:
    """Protected regions of one rank.

    Args:
        state: Tensors whose memory stays where it is.
        scratch: File on node-local scratch space.
        target: Where it is flushed to.
    """

    def __init__(self, state: Named, scratch: Path, target: Path) -> None:
        self.num_bytes = sum(tensor.nbytes for _, tensor in state)
        self.target = target
        self._regions = [tensor.detach().reshape(-1).view(torch.uint8) for _, tensor in state]
        with open(scratch, "wb+") as file:
            file.truncate(max(1, self.num_bytes))
            self._map = mmap.mmap(file.fileno(), max(1, self.num_bytes))
        self._scratch = torch.frombuffer(self._map, dtype=torch.uint8)
        self._scratch.zero_()  # its pages are there
        self._thread = ThreadPoolExecutor(1)

    def checkpoint(self) -> Future[None]:
        """Returns once the regions are copied; the future ends when they are on the disk."""
        begin = 0
        for region in self._regions:
            self._scratch[begin : begin + region.numel()].copy_(region)
            begin += region.numel()
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
        wanted = torch.cat(self._regions).cpu() if self._regions else torch.zeros(1, dtype=torch.uint8)
        return torch.equal(found, wanted)

    def close(self) -> None:
        self._thread.shutdown()
