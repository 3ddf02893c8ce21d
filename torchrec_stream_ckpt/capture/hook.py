"""The capture of one rank: from the fused update to frames in the ring.

Rows are marked once the fused update has been applied, never at lookup, and read only when they are
drained: a row that is hot for a hundred steps is sent once a drain, with its latest value.

A cut *freezes* what is touched at its step boundary. Frozen rows are sent as the ring gets space, at that boundary
and at later ones; whoever is about to overwrite one that has not been sent sends it first (copy on write: the copy is
the frame itself). So every frozen row is sent with the value of the boundary, or the cut is given up.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial

import torch

from torchrec_stream_ckpt.adapter import FusedKernel, Lookup
from torchrec_stream_ckpt.capture.counts import Record, deferral
from torchrec_stream_ckpt.capture.found import Found
from torchrec_stream_ckpt.capture.staging import RowStager, StreamIdentity
from torchrec_stream_ckpt.capture.touched import TouchedRows
from torchrec_stream_ckpt.format.control import Schema, TableScalars
from torchrec_stream_ckpt.format.ring import FrameBuffer, FrameRing

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Drain:
    """One drain: what its frames carry, and how much of the ring it may take."""

    step: int
    marker: int
    """The marker to which the rows will belong."""
    extra: bool = False
    """Whether it may take from the marker's budget when the ring is full."""
    saving: bool = False
    """Whether it sends rows in front of a write: into frames of just their size, from the marker's budget first."""
    deadline_s: float | None = None
    """Until when, on the monotonic clock, it may wait for space; None: it never waits."""

    @property
    def wait_s(self) -> float:
        """How long it may still wait."""
        return max(0.0, self.deadline_s - time.monotonic()) if self.deadline_s is not None else 0.0


@dataclass(frozen=True, slots=True)
class FrozenCut:
    """A cut that is being sent."""

    drain: Drain
    """What its frames carry."""
    on_give_up: Callable[[str], object]
    """Hears why it was given up."""


class Capture:
    """Hooks every fused kernel of this rank. All methods but the hooks run on the training thread.

    Args:
        kernels: All of this rank.
        schema: Of the job.
        defer: Device -> how drains of kernels there learn without waiting how many rows are marked; None: they look.
    """

    def __init__(
        self,
        kernels: list[FusedKernel],
        schema: Schema,
        defer: Callable[[torch.device], Record | None] = deferral,
    ) -> None:
        self._kernels = kernels
        self._index = schema.index()
        self._masks = [TouchedRows(kernel, defer(kernel.device)) for kernel in kernels]
        self._deferred = [position for position, mask in enumerate(self._masks) if mask.deferred]
        self._stagers: list[list[RowStager]] = []
        self._ring: FrameRing | None = None
        self._submit: Callable[[FrameBuffer], int] | None = None
        self._cut: FrozenCut | None = None
        self._begun: Drain | None = None
        self._quota = 0
        """Frames that the drain in progress may still fill: acknowledgements that come meanwhile do not prolong it."""
        self._left, self._left_frozen = [0] * len(kernels), [0] * len(kernels)
        """Rows, by kernel, that the last look at the touched and at the frozen ones has left behind."""
        self.saved_rows = 0
        """Rows of cuts that were sent in front of a write."""
        self.saving_s = 0.0
        """How long that took."""
        self.written_in_place = False
        """Whether something writes where no hook can send frozen rows first."""
        self._announced: set[int] = set()
        """Kernels of which any row may change until rows are sent again: all are marked, and none is frozen."""
        self._warned: set[str] = set()
        self._removers: list[Callable[[], None]] = [
            remover
            for position, (kernel, mask) in enumerate(zip(kernels, self._masks, strict=True))
            for remover in (
                kernel.on_update(partial(self._before_update, position), mask.mark),
                kernel.on_rewrite(partial(self._before_rewrite, position)),
            )
        ]

    def begin(self) -> None:
        """What the tables hold now is what a base, or the parent marker, will say: send only what changes from here."""
        for kernel, mask in zip(self._kernels, self._masks, strict=True):
            kernel.expect_writes()
            with kernel.reading():
                mask.sent(mask.touched())
                mask.forget_ids()
        self._announced.clear()

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
            tables = [self._index[shard.table.name] for shard in kernel.shards]
            mask.sweep_again([position for position, table in enumerate(tables) if table in swept])

    def look(self, due: bool) -> bool:
        """(each step boundary without an open cut) Whether to call ``drain`` now. Never waits.

        On a CPU: when a drain is due. On a GPU the host must not wait for the number of rows, so a drain that is due
        is made in two halves: here the rows are counted, and at the first later boundary where the counts have
        arrived, due or not, it is time for the other one.
        """
        if not self._deferred:
            return due
        asked = [position for position in self._deferred if self._masks[position].asked]
        if asked:
            return all(self._masks[position].counted for position in asked)
        if due:
            for position in self._deferred:
                with self._kernels[position].reading():
                    self._masks[position].ask()
        return False

    def drain(self, drain: Drain) -> bool:
        """Send the touched rows that find space; the rest stays marked. Whether all that it looked at found space.

        It looks at all of them; on a GPU at as many as ``look`` has counted, and at none without that.
        Not while a cut is being sent: newer values in front of its MARK would be taken for its own.
        """
        assert self._cut is None
        self._note_writes()
        try:
            return self._may_send(drain) and all(self._drain_kernel(drain, n) for n in range(len(self._kernels)))
        finally:
            for position in self._deferred:
                self._masks[position].forget_counts()  # what found no space goes with the next one that is due

    def _drain_kernel(self, drain: Drain, position: int) -> bool:
        with self._kernels[position].reading():
            found = self._masks[position].look()
            if found is None:
                return False
            self._left[position] = found.rows.numel()
            return self._send(position, found, drain, partial(self._drained, position))

    def _drained(self, position: int, rows: torch.Tensor) -> None:
        self._left[position] -= rows.numel()
        self._masks[position].sent(rows)

    def sweep(self, drain: Drain, max_bytes: int) -> bool:
        """Send up to about ``max_bytes`` of rows that were never sent. Whether all that was looked at found space."""
        assert self._cut is None
        if not self._may_send(drain):
            return False
        self._note_writes()
        for position, mask in enumerate(self._masks):
            row_bytes = max((stager.row_bytes for stager in self._stagers[position]), default=1)
            while not mask.swept and max_bytes > 0:
                with self._kernels[position].reading():
                    found = mask.unswept(max(1, max_bytes // row_bytes))
                    if not self._send(position, found, drain, mask.sweep_sent):
                        return False
                max_bytes -= found.rows.numel() * row_bytes
        return True

    @property
    def swept(self) -> bool:
        return all(mask.swept for mask in self._masks)

    @property
    def sweep_progress(self) -> tuple[int, int]:
        """(rows that the sweep has behind it, all rows), without a scan; on any thread."""
        return sum(mask.swept_rows for mask in self._masks), sum(mask.total for mask in self._masks)

    @property
    def dirty_rows(self) -> int:
        """Changed rows that were left behind when their masks were last looked at; on any thread."""
        return sum(self._left) + sum(self._left_frozen)

    # A cut.

    def freeze(self, drain: Drain, on_give_up: Callable[[str], object]) -> None:
        """All that is touched now is a cut, to be sent as it is now, in frames that carry ``drain``'s step and marker.

        It is open until ``finish`` or ``give_up``; hooks may give it up in between, on any thread that writes rows.
        """
        assert self._cut is None
        assert self.swept
        self._note_writes()
        for kernel, mask in zip(self._kernels, self._masks, strict=True):
            with kernel.reading():
                mask.check_ids()
        for mask in self._masks:
            mask.freeze()
        self._left, self._left_frozen = [0] * len(self._masks), self._left
        self._cut = FrozenCut(drain, on_give_up)

    def push(self, drain: Drain) -> bool:
        """Send the frozen rows that find space. Whether nothing is left of an open cut."""
        self._note_writes()
        if not self._may_send(drain):
            return False
        for position, (kernel, mask) in enumerate(zip(self._kernels, self._masks, strict=True)):
            with kernel.reading():
                if self._cut is None:
                    return False
                rows = mask.frozen()
                self._left_frozen[position] = rows.numel()
                if not self._send(position, Found(rows), drain, partial(self._pushed, position)):
                    return False
        return self._cut is not None

    def _pushed(self, position: int, rows: torch.Tensor) -> None:
        self._left_frozen[position] -= rows.numel()
        self._masks[position].frozen_sent(rows)

    def finish(self) -> None:
        """The cut is in the ring to its last row, and so is its MARK."""
        self._cut = None
        self._left_frozen = [0] * len(self._masks)

    def give_up(self, reason: str) -> None:
        """The cut, if one is open, is none: its rows that were not sent are touched rows again."""
        cut, self._cut = self._cut, None
        if cut is not None:
            for mask in self._masks:
                mask.thaw()
            self._left = [sum(left) for left in zip(self._left, self._left_frozen, strict=True)]
            self._left_frozen = [0] * len(self._masks)
            cut.on_give_up(reason)

    def _before_update(self, position: int, lookup: Lookup) -> None:
        """The fused update is about to change the rows of a lookup."""
        if self._cut is not None:
            self._save(self._cut, position, lambda: self._masks[position].frozen_in(lookup))

    def _before_rewrite(self, position: int, rows: torch.Tensor | None) -> None:
        """Linear rows are about to change outside the fused update; None: all of them."""
        if position in self._announced:
            return
        self._note_writes_of(position)
        mask = self._masks[position]
        if self._cut is not None:
            self._save(self._cut, position, lambda: mask.frozen_among(rows))
        mask.mark_rows(rows)
        if rows is None:
            self._announced.add(position)

    def before_load(self) -> None:
        """Something is about to change any row of any kernel."""
        for position, kernel in enumerate(self._kernels):
            self._before_rewrite(position, None)
            kernel.writing()

    def mark_all(self) -> None:
        """Something has changed any row already, where nobody was asked before.

        What was frozen is gone then. A job that does this will do it again: its next cuts are sent at once, as far
        as ring and budget take them.
        """
        self.written_in_place = True
        self.give_up("tables were written in place (mark_all) before all rows of the marker had been sent")
        for kernel, mask in zip(self._kernels, self._masks, strict=True):
            kernel.writing()
            kernel.expect_writes()
            mask.mark_rows(None)

    def _note_writes(self) -> None:
        """(before rows are sent) Mark whole what something has written in place since they were sent last.

        As with ``mark_all`` an open cut is given up, and the next ones are sent at once.
        """
        for position in range(len(self._kernels)):
            self._note_writes_of(position)
        self._announced.clear()

    def _note_writes_of(self, position: int) -> None:
        kernel = self._kernels[position]
        written = sorted(kernel.written())
        if not written or position in self._announced:
            return
        tables = ", ".join(dict.fromkeys(kernel.shards[shard].table.name for shard in written))
        self.written_in_place = True
        self.give_up(f"{tables} was written in place before all rows of the marker had been sent")
        kernel.writing()
        self._masks[position].mark_shards(written)
        if tables not in self._warned:
            self._warned.add(tables)
            log.warning(
                "%s: written in place beside the fused update. All rows are sent again, and a marker that is being "
                "sent is given up; load_state_dict() gives up none",
                tables,
            )

    def mark_ranges(self, ranges: Collection[tuple[str, int, int]]) -> None:
        """Send rows again that have not changed: (table, first row, row after the last one) of each range."""
        for kernel, mask in zip(self._kernels, self._masks, strict=True):
            for position, shard in enumerate(kernel.shards):
                for table, begin, end in ranges:
                    first, last = max(begin, shard.row0), min(end, shard.row0 + shard.rows)
                    if table == shard.table.name and first < last:
                        base = kernel.bases[position] - shard.row0
                        mask.mark_rows(torch.arange(base + first, base + last))

    def _save(self, cut: FrozenCut, position: int, find: Callable[[], torch.Tensor]) -> None:
        """Send frozen rows in front of a write, within the marker's budget; a write neither waits nor fails."""
        drain = replace(cut.drain, saving=True)
        begin = time.perf_counter()
        try:
            with self._kernels[position].reading():
                rows = find()
                sent = self._send(position, Found(rows), drain, self._masks[position].frozen_sent)
            if sent:
                self.saved_rows += rows.numel()
            else:
                self.give_up("rows that the marker has not sent are overwritten, and ring and marker budget are full")
        except Exception as error:  # the publisher has died, or memory is short
            log.exception("the rows of marker %d cannot be sent on this rank", drain.marker)
            self.give_up(f"{type(error).__name__}: {error}")
        finally:
            self.saving_s += time.perf_counter() - begin

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
    def _send(self, position: int, found: Found, drain: Drain, on_sent: Callable[[torch.Tensor], None]) -> bool:
        """Gather and submit rows of one kernel; whether all of them found space."""
        rows, cuts = found
        if not rows.numel():
            return True
        assert self._submit is not None
        kernel, mask = self._kernels[position], self._masks[position]
        if cuts is None:
            cuts = torch.searchsorted(rows, torch.tensor(mask.bases, device=rows.device)).tolist()
        weights, states = kernel.weights(), kernel.states()
        for shard, stager in enumerate(self._stagers[position]):
            for begin in range(cuts[shard], cuts[shard + 1], stager.max_rows):
                local = rows[begin : min(begin + stager.max_rows, cuts[shard + 1])] - mask.bases[shard]
                buffer = self._buffer(drain, stager.frame_bytes(local.numel()))
                if buffer is None:
                    on_sent(rows[:begin])
                    return False
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
        on_sent(rows)
        return True

    def _may_send(self, drain: Drain) -> bool:
        """A drain begins or goes on: whether a look at the masks is worth it. While the log takes nothing it is not."""
        assert self._ring is not None
        if drain is not self._begun:
            self._begun, self._quota = drain, self._ring.capacity
        return drain.extra or drain.wait_s > 0 or self._ring.has_room

    def _buffer(self, drain: Drain, num_bytes: int) -> FrameBuffer | None:
        """Memory for a frame, or None when there is none for this drain."""
        assert self._ring is not None
        if drain.saving:
            return self._ring.borrow(num_bytes)
        if not drain.extra:
            if not self._quota:
                return None
            self._quota -= 1
        return self._ring.acquire(extra=drain.extra, wait_s=drain.wait_s)
