"""The capture of one rank: from the fused update to frames in the ring.

Rows are marked once the fused update has been applied, never at lookup, and read only when they are
drained: a row that is hot for a hundred steps is sent once a drain, with its latest value.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

import torch

from torchrec_stream_ckpt.adapter import FusedKernel
from torchrec_stream_ckpt.capture.staging import RowStager, StreamIdentity
from torchrec_stream_ckpt.capture.touched import TouchedRows
from torchrec_stream_ckpt.format.control import Schema, TableScalars
from torchrec_stream_ckpt.format.ring import FrameBuffer, FrameRing


@dataclass(frozen=True, slots=True)
class Drain:
    """One drain: what its frames carry, and how much of the ring it may take."""

    step: int
    marker: int
    """The marker to which the rows will belong."""
    extra: bool = False
    """Whether it may take from the marker's budget."""
    deadline_s: float | None = None
    """Until when, on the monotonic clock, it may wait for space; None: it never waits."""

    @property
    def wait_s(self) -> float:
        """How long it may still wait."""
        return max(0.0, self.deadline_s - time.monotonic()) if self.deadline_s is not None else 0.0


class Capture:
    """Hooks every fused kernel of this rank. All methods but the hooks run on the training thread."""

    def __init__(self, kernels: list[FusedKernel], schema: Schema) -> None:
        self._kernels = kernels
        self._index = schema.index()
        self._masks = [TouchedRows(kernel) for kernel in kernels]
        self._stagers: list[list[RowStager]] = []
        self._ring: FrameRing | None = None
        self._submit: Callable[[FrameBuffer], int] | None = None
        self._removers: list[Callable[[], None]] = [
            remover
            for kernel, mask in zip(kernels, self._masks, strict=True)
            for remover in (kernel.on_update(mask.mark), kernel.on_rewrite(mask.mark_rows))
        ]

    def open(
        self, identity: StreamIdentity, ring: FrameRing, submit: Callable[[FrameBuffer], int], swept: Collection[int]
    ) -> None:
        """Start a generation: tables in ``swept`` are sent whole, beside what steps touch."""
        self._ring, self._submit = ring, submit
        self._stagers = [
            [RowStager(shard, self._index[shard.table.name], identity) for shard in kernel.shards]
            for kernel in self._kernels
        ]
        for kernel, mask in zip(self._kernels, self._masks, strict=True):
            with kernel.reading():
                mask.sent(mask.touched())  # the base, or the parent marker, holds what changed before
                mask.forget_ids()
            tables = [self._index[shard.table.name] for shard in kernel.shards]
            mask.sweep_again([position for position, table in enumerate(tables) if table in swept])

    def drain(self, drain: Drain) -> bool:
        """Send the touched rows that find space; the rest stays marked. Whether nothing is left."""
        for position, (kernel, mask) in enumerate(zip(self._kernels, self._masks, strict=True)):
            with kernel.reading():
                mask.check_ids()
                if not self._send(position, mask.touched(), drain):
                    return False
        return True

    def sweep(self, drain: Drain, max_bytes: int) -> bool:
        """Send up to about ``max_bytes`` of rows that were never sent. Whether all that was looked at found space."""
        for position, mask in enumerate(self._masks):
            row_bytes = max((stager.row_bytes for stager in self._stagers[position]), default=1)
            while not mask.swept and max_bytes > 0:
                with self._kernels[position].reading():
                    rows = mask.unswept(max(1, max_bytes // row_bytes))
                    if not self._send(position, rows, drain):
                        return False
                max_bytes -= rows.numel() * row_bytes
        return True

    @property
    def swept(self) -> bool:
        return all(mask.swept for mask in self._masks)

    def mark_all(self) -> None:
        """Something outside the fused update may have changed any row."""
        for kernel, mask in zip(self._kernels, self._masks, strict=True):
            kernel.writing()
            mask.mark_rows(None)

    def scalars(self) -> tuple[TableScalars, ...]:
        """The kernels' own state, a record a shard; the iteration is that of the trained batches."""
        if any(kernel.in_flight for kernel in self._kernels):
            gc.collect()  # the graph of a forward that was dropped may hang in a cycle: nobody looks it up again
        return tuple(
            TableScalars(
                self._index[shard.table.name],
                shard.row0,
                shard.rows,
                shard.col0,
                shard.cols,
                kernel.iteration - kernel.in_flight,
                kernel.max_counter,
                kernel.learning_rate,
                kernel.next_learning_rate,
            )
            for kernel in self._kernels
            for shard in kernel.shards
            if shard.rows and shard.cols
        )

    def close(self) -> None:
        """Remove every hook."""
        while self._removers:
            self._removers.pop()()

    @torch.no_grad()
    def _send(self, position: int, rows: torch.Tensor, drain: Drain) -> bool:
        """Gather and submit linear ``rows`` of one kernel; whether all of them found space."""
        if not rows.numel():
            return True
        assert self._ring is not None
        assert self._submit is not None
        kernel, mask = self._kernels[position], self._masks[position]
        cuts = torch.searchsorted(rows, torch.tensor(mask.bases, device=rows.device)).tolist()
        weights, states = kernel.weights(), kernel.states()
        for shard, stager in enumerate(self._stagers[position]):
            for begin in range(cuts[shard], cuts[shard + 1], stager.max_rows):
                buffer = self._ring.acquire(extra=drain.extra, wait_s=drain.wait_s)
                if buffer is None:
                    mask.sent(rows[:begin])
                    return False
                local = rows[begin : min(begin + stager.max_rows, cuts[shard + 1])] - mask.bases[shard]
                stager.fill(
                    buffer,
                    local,
                    weights[shard],
                    states[shard],
                    newest=partial(kernel.newest, shard),
                    step=drain.step,
                    marker=drain.marker,
                )
                self._submit(buffer)
        mask.sent(rows)
        return True
