"""(GPU) Count marked rows without making the host wait.

The host must know how many rows a drain sends: frames, their sections and the ring depend on it. So the marks of each
shard are counted on the device at one step boundary, and the numbers are used at a later one, once they have arrived.
Updates only set marks, and clearing any mark drops the counts (``RowMask``). So a count is a *lower bound* of the rows
marked later, and ``nonzero_static`` finds that number of rows without waiting. The first marked rows of a shard are
taken, whenever they were marked, with their current values. Rows marked beyond the count stay marked.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise

import torch

from torchrec_stream_ckpt.capture.sender import KernelRows

Record = Callable[[torch.device], Callable[[], bool]]
"""Records the work queued on a device so far. Returns a function that reports, without waiting, whether it is done."""


def record_event(device: torch.device) -> Callable[[], bool]:
    """(GPU) Record an event on the current stream."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    query: Callable[[], bool] = event.query
    return query


def deferral(device: torch.device) -> Record | None:
    """Return the way in which the host gets counts: an event on a GPU.

    Returns None on a CPU: the host reads the masks.
    """
    return record_event if device.type == "cuda" else None


BLOCK = 64
"""Rows whose marks are added up in the first pass: eight words of eight marks."""
_EACH_BYTE = 0x0101010101010101


class LateCounts:
    """The counts of one mask, from the request until they are used or dropped.

    Args:
        bases: Linear row of each shard's first row, followed by the number of rows.
        record: Records the moment after the copy to the host.
        device: Device of the mask.
    """

    def __init__(self, bases: tuple[int, ...], record: Record, device: torch.device) -> None:
        self._bases = bases
        self._record = record
        ends = (*bases, bases[-1] + 1)  # the last one counts ids outside all tables
        last = bases[-1] // BLOCK * BLOCK + BLOCK - 1
        rows = [[min(end // BLOCK * BLOCK + place, last) for place in range(BLOCK)] for end in ends]
        self._blocks = torch.tensor([max(0, end // BLOCK - 1) for end in ends], device=device)
        """For each end of a shard: the last whole block before it, if there is one."""
        self._any = torch.tensor([int(end >= BLOCK) for end in ends], device=device)
        self._rows = torch.tensor(rows, device=device)
        """For each end of a shard: the rows of the block that contains it."""
        self._before = torch.tensor([[place < end % BLOCK for place in range(BLOCK)] for end in ends], device=device)
        """For each of these rows, True if it precedes the end."""
        self._asked: tuple[torch.Tensor, Callable[[], bool]] | None = None

    def ask(self, padded: torch.Tensor) -> None:
        """Queue the counts of a mask on the current stream, and their copy to the host.

        A sum of bools reads one byte at a time and launches one kernel per shard. This reads the mask once, in words.

        Args:
            padded: The mask, bool, padded to whole blocks. Bytes after its last row are not set.
        """
        sums = padded.view(torch.int64).view(-1, BLOCK // 8).sum(1)  # each byte of a sum is at most 8
        sums = sums.mul_(_EACH_BYTE).bitwise_right_shift_(BLOCK - 8)  # the sum of the bytes of each
        until = sums.cumsum_(0)[self._blocks] * self._any
        counts = (until + (padded[self._rows] & self._before).sum(1)).diff()
        # Separate memory each time: a copy that was dropped may still be in flight.
        host = torch.empty(counts.shape, dtype=counts.dtype, device="cpu", pin_memory=padded.is_cuda)
        host.copy_(counts, non_blocking=True)
        self._asked = host, self._record(padded.device)

    def drop(self) -> None:
        """Drop the counts because marks were cleared: they may now exceed the number of set marks."""
        self._asked = None

    @property
    def asked(self) -> bool:
        return self._asked is not None

    @property
    def arrived(self) -> bool:
        """True if the counts can be taken. Does not wait."""
        return self._asked is not None and self._asked[1]()

    def take(self) -> tuple[list[int], bool] | None:
        """Return (marked rows of each shard, whether an id outside all tables was marked), once.

        Returns None if the counts have not arrived.
        """
        if self._asked is None or not self.arrived:
            return None
        *counts, outside = self._asked[0].numpy().tolist()
        self._asked = None
        return counts, bool(outside)

    def first(self, bits: torch.Tensor, counts: list[int]) -> KernelRows:
        """Return the first ``counts`` marked rows of each shard. A count must not exceed the number of marked rows."""
        rows = [
            torch.nonzero_static(bits[begin:end], size=count).view(-1) + begin
            for (begin, end), count in zip(pairwise(self._bases), counts, strict=True)
            if count
        ]
        none = torch.empty(0, dtype=torch.int64, device=bits.device)
        return KernelRows(torch.cat(rows) if rows else none, (0, *accumulate(counts)))
