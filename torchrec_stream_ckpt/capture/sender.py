"""Send rows of one rank as frames to the ring, each drain within its limits.

Also defines the form in which masks hand over rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from torchrec_stream_ckpt.capture.device_areas import RUN_FRAMES, DeviceAreas
from torchrec_stream_ckpt.capture.staging import RowStager, StreamIdentity
from torchrec_stream_ckpt.format.ring import FrameBuffer, FrameRing
from torchrec_stream_ckpt.model import FusedKernel


class KernelRows(NamedTuple):
    """Some rows of one kernel."""

    rows: torch.Tensor
    """Linear rows, int64, ascending, on the tables' device."""
    cuts: Sequence[int] | None = None
    """Index of each shard's first row in ``rows``, followed by the number of rows. If None, the host computes it."""


@dataclass(frozen=True, slots=True)
class Drain:
    """One drain: the step and marker of its frames, and how much of the ring it may take."""

    step: int
    marker: int
    """The marker to which the rows will belong."""
    extra: bool = False
    """True if it may take from the marker's budget when the ring is full."""
    saving: bool = False
    """True if it sends rows before a write: in frames of exactly their size, from the marker's budget first."""
    deadline_s: float | None = None
    """Latest time, on the monotonic clock, until which it may wait for space. None if it never waits."""

    @property
    def wait_s(self) -> float:
        """Seconds that it may still wait."""
        return max(0.0, self.deadline_s - time.monotonic()) if self.deadline_s is not None else 0.0


class Sender:
    """Gathers rows into frames and submits them.

    Args:
        kernels: All kernels of this rank.
        tables: Name -> index of each table of the job.
    """

    def __init__(self, kernels: Sequence[FusedKernel], tables: Mapping[str, int]) -> None:
        self._kernels = kernels
        self.tables = tables
        """Name -> index of each table. Set this again before :meth:`open` if a lineage has the tables in another order.
        """
        self.stagers: list[list[RowStager]] = []
        """Stagers by kernel and shard, once a generation is open."""
        self.ring: FrameRing | None = None
        self.submit: Callable[[FrameBuffer], int] | None = None
        self._begun: Drain | None = None
        self._areas: dict[torch.device, DeviceAreas] = {}
        """(GPU) Memory in which frames are laid out."""
        self._quota = 0
        """Frames that the current drain may still fill. Acknowledgements during the drain do not prolong it."""

    def open(self, identity: StreamIdentity, ring: FrameRing, submit: Callable[[FrameBuffer], int]) -> None:
        """Start a generation: frames carry ``identity``."""
        self.ring, self.submit = ring, submit
        self.stagers = [
            [RowStager(shard, self.tables[shard.table.name], identity) for shard in kernel.shards]
            for kernel in self._kernels
        ]

    def row_bytes(self, position: int) -> int:
        """Return the most bytes that a row of this kernel takes in a frame."""
        return max((stager.row_bytes for stager in self.stagers[position]), default=1)

    def may_send(self, drain: Drain) -> bool:
        """Begin or continue a drain. Returns whether to look at the masks: False while the log accepts no frames."""
        assert self.ring is not None
        if drain is not self._begun:
            self._begun, self._quota = drain, self.ring.capacity
        return drain.extra or drain.wait_s > 0 or self.ring.has_room

    @torch.no_grad()
    def send(self, position: int, found: KernelRows, drain: Drain) -> int:
        """Gather and submit rows of one kernel. Returns how many of them, from the first on, were submitted."""
        rows, cuts = found
        if not rows.numel():
            return 0
        assert self.submit is not None
        kernel = self._kernels[position]
        if cuts is None:
            cuts = torch.searchsorted(rows, torch.tensor(kernel.bases, device=rows.device)).tolist()
        weights, states = kernel.weights(), kernel.states()
        for shard, stager in enumerate(self.stagers[position]):
            begin, end = cuts[shard], cuts[shard + 1]
            while begin < end:
                buffers = self._run(drain, stager, end - begin, RUN_FRAMES if rows.is_cuda else 1)
                if not buffers:
                    return begin
                local = rows[begin : min(begin + len(buffers) * stager.max_rows, end)] - kernel.bases[shard]
                if rows.is_cuda:
                    stager.fill_run(
                        buffers,
                        local,
                        weights[shard],
                        states[shard],
                        newest=partial(kernel.newest, shard),
                        areas=self._areas_of(kernel.device),
                        step=drain.step,
                        marker=drain.marker,
                    )
                else:
                    (buffer,) = buffers
                    stager.fill(buffer, local, weights[shard], states[shard], step=drain.step, marker=drain.marker)
                for buffer in buffers:
                    self.submit(buffer)
                begin += local.numel()
        return rows.numel()

    def _areas_of(self, device: torch.device) -> DeviceAreas:
        if device not in self._areas:
            self._areas[device] = DeviceAreas(device)
        return self._areas[device]

    def _run(self, drain: Drain, stager: RowStager, rows: int, most: int) -> list[FrameBuffer]:
        """Return memory for the next frames of a shard, up to ``most``. Waits, if at all, only for the first one.

        The log frees space as frames are acknowledged, and the frames of the run are submitted only after it was
        filled.
        """
        buffers: list[FrameBuffer] = []
        while rows > 0 and len(buffers) < most:
            buffer = self._buffer(drain, stager.frame_bytes(min(rows, stager.max_rows)), wait=not buffers)
            if buffer is None:
                break
            buffers.append(buffer)
            rows -= stager.max_rows
        return buffers

    def _buffer(self, drain: Drain, num_bytes: int, *, wait: bool) -> FrameBuffer | None:
        """Return memory for a frame. Returns None if this drain has used its memory."""
        assert self.ring is not None
        if drain.saving:
            return self.ring.borrow(num_bytes)
        if not drain.extra:
            if not self._quota:
                return None
            self._quota -= 1
        return self.ring.acquire(extra=drain.extra, wait_s=drain.wait_s if wait else 0.0)
