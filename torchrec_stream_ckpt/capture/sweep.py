"""Which rows of a kernel were never sent, and go beside what steps touch."""

from __future__ import annotations

from itertools import pairwise
from typing import Protocol

import torch

from torchrec_stream_ckpt.capture.kernel_rows import KernelRows

_SCAN_ROWS = 2**16
"""As many are looked at in one piece at least: what drains have sent is passed over in few."""


class Sweep(Protocol):
    """What is left of the rows that were never sent."""

    def again(self, shards: list[int]) -> None:
        """Every row of these shards is to be sent once."""

    def window(self, limit: int) -> KernelRows:
        """Up to ``limit`` rows that were never sent."""

    def sent(self, rows: torch.Tensor, count: int) -> None:
        """Of the rows of the window, the first ``count`` were sent."""

    def drained(self, rows: torch.Tensor) -> None:
        """A drain has sent these rows."""

    @property
    def left(self) -> int:
        """Rows that the sweep has still to send, as far as is known without a scan."""


class MaskSweep:
    """(CPU) By a byte a row: a row that a drain has sent is passed over."""

    def __init__(self, bases: tuple[int, ...]) -> None:
        self._bases = bases
        self._total = bases[-1]
        self.unswept = torch.zeros(self._total, dtype=torch.bool, device="cpu")
        self._cursor = self._total

    def again(self, shards: list[int]) -> None:
        """Every row of these shards is to be sent once, whether a step touches it or not."""
        for shard in shards:
            self.unswept[self._bases[shard] : self._bases[shard + 1]] = True
        self._cursor = 0 if shards else self._cursor

    def window(self, limit: int) -> KernelRows:
        """Up to ``limit`` rows that were never sent; skips over what has been."""
        found = torch.empty(0, dtype=torch.int64, device="cpu")
        while self._cursor < self._total and not found.numel():
            window = self.unswept[self._cursor : self._cursor + max(limit, _SCAN_ROWS)]
            found = window.nonzero().flatten()[:limit] + self._cursor
            if not found.numel():
                self._cursor += window.numel()
        return KernelRows(found)

    def sent(self, rows: torch.Tensor, count: int) -> None:
        """Of the rows of the window, the first ``count`` were sent: the next one begins after them."""
        if count:
            self.drained(rows[:count])
            self._cursor = int(rows[count - 1]) + 1

    def drained(self, rows: torch.Tensor) -> None:
        """A drain has sent these rows."""
        if self.left:
            self.unswept.index_fill_(0, rows, False)

    @property
    def left(self) -> int:
        """Rows that the sweep has still to send, as far as is known without a scan."""
        return self._total - self._cursor


class RangeSweep:
    """(GPU) By ranges that the host knows: nothing is read. What a drain sends meanwhile is sent once more."""

    def __init__(self, bases: tuple[int, ...], device: torch.device) -> None:
        self._bases = bases
        self._device = device
        self._next = list(bases[1:])
        """For each shard, the linear row at which the sweep goes on; its end, once it is through."""

    def again(self, shards: list[int]) -> None:
        """Every row of these shards is to be sent once."""
        for shard in shards:
            self._next[shard] = self._bases[shard]

    def window(self, limit: int) -> KernelRows:
        """Up to ``limit`` rows of the first shard that is not through."""
        begin, end = next(((begin, end) for _, begin, end in self._ranges() if begin < end), (0, 0))
        end = min(end, begin + limit)
        cuts = [min(max(base, begin), end) - begin for base in self._bases]
        return KernelRows(torch.arange(begin, end, dtype=torch.int64, device=self._device), cuts)

    def sent(self, rows: torch.Tensor, count: int) -> None:
        """Of the rows of the window, the first ``count`` were sent."""
        shard = next((shard for shard, begin, end in self._ranges() if begin < end), 0)
        self._next[shard] += count

    def drained(self, rows: torch.Tensor) -> None:
        """A drain has sent these rows; the host does not know which, and they are sent once more."""

    @property
    def left(self) -> int:
        """Rows that the sweep has still to send."""
        return sum(end - begin for _, begin, end in self._ranges())

    def _ranges(self) -> list[tuple[int, int, int]]:
        """(shard, where the sweep goes on in it, its end)."""
        ends = [end for _, end in pairwise(self._bases)]
        return list(zip(range(len(ends)), self._next, ends, strict=True))
