"""The capture of one rank: from the fused update to frames in the ring.

Rows are marked once the fused update has been applied, never at lookup, and read only when they are
drained: a row that is hot for a hundred steps is sent once a drain, with its latest value. An update is noted before
it runs, so that its rows count as touched whatever keeps it from marking them.

A cut *freezes* what is touched at its step boundary. Frozen rows are sent as the ring gets space, at that boundary
and at later ones; whoever is about to overwrite one that has not been sent sends it first (copy on write: the copy is
the frame itself). So every frozen row is sent with the value of the boundary, or the cut is given up.
"""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial

import torch

from torchrec_stream_ckpt.adapter import FusedKernel, FusedUpdate, Key, Lookup
from torchrec_stream_ckpt.capture.counts import Record, deferral
from torchrec_stream_ckpt.capture.kernel_rows import KernelRows
from torchrec_stream_ckpt.capture.sender import Drain, Sender
from torchrec_stream_ckpt.capture.staging import StreamIdentity
from torchrec_stream_ckpt.capture.touched import TouchedRows
from torchrec_stream_ckpt.capture.updates import RunningUpdates
from torchrec_stream_ckpt.format.control import TableScalars
from torchrec_stream_ckpt.format.ring import FrameBuffer, FrameRing
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.types import RowRange

log = logging.getLogger(__name__)

_MANY_NOTES = 64
"""Of updates; with more of them, those that were left are settled before the next drain."""


@dataclass(frozen=True, slots=True)
class FrozenCut:
    """A cut that is being sent."""

    drain: Drain
    """What its frames carry."""
    on_give_up: Callable[[str], object]
    """Hears why it was given up."""


class Capture:
    """Hooks every fused kernel of this rank. All methods but the hooks run on the training thread.

    Hooks run on any thread that trains. Whatever is raised in here, and wherever, no changed row is lost: marks, notes
    and the cut are changed in an order that each step leaves usable.

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
        self._sender = Sender(kernels, self._index)
        self._updates = RunningUpdates()
        self._cut: FrozenCut | None = None
        self._sending = threading.RLock()
        """Held while rows of a cut are sent, and while it is given up: by one thread at a time."""
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
            for position, kernel in enumerate(kernels)
            for remover in (
                kernel.on_update(
                    partial(self._before_update, position),
                    partial(self._after_update, position),
                    partial(self._unseen_update, position),
                ),
                kernel.on_rewrite(partial(self._before_rewrite, position)),
            )
        ]

    def begin(self) -> None:
        """What the tables hold now is what a base, or the parent marker, will say: send only what changes from here."""
        for kernel, mask in zip(self._kernels, self._masks, strict=True):
            kernel.expect_writes()
            with kernel.reading():
                mask.forget()
        self._announced.clear()

    def open(
        self, identity: StreamIdentity, ring: FrameRing, submit: Callable[[FrameBuffer], int], swept: Collection[int]
    ) -> None:
        """Start a generation: tables in ``swept`` are sent whole, beside what steps touch."""
        self._sender.open(identity, ring, submit)
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
        self._count_left()
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
        self._updates.let_go()
        self._count_left()
        self._note_writes()
        try:
            return self._sender.may_send(drain) and all(self._drain_kernel(drain, n) for n in range(len(self._kernels)))
        finally:
            for position in self._deferred:
                self._masks[position].forget_counts()  # what found no space goes with the next one that is due

    def _drain_kernel(self, drain: Drain, position: int) -> bool:
        with self._kernels[position].reading():
            found = self._masks[position].look()
            if found is None:
                return False
            rows = found.rows
            self._left[position] = rows.numel()
            sent = self._sender.send(position, found, drain)
            self._masks[position].sent(rows, sent)
            self._left[position] -= sent
            return sent == rows.numel()

    def sweep(self, drain: Drain, max_bytes: int) -> bool:
        """Send up to about ``max_bytes`` of rows that were never sent. Whether all that was looked at found space."""
        assert self._cut is None
        if not self._sender.may_send(drain):
            return False
        self._note_writes()
        for position, mask in enumerate(self._masks):
            row_bytes = self._sender.row_bytes(position)
            while not mask.swept and max_bytes > 0:
                with self._kernels[position].reading():
                    found = mask.take_unswept(max(1, max_bytes // row_bytes))
                    sent = self._sender.send(position, found, drain)
                    mask.sweep_sent(found.rows, sent)
                if sent < found.rows.numel():
                    return False
                max_bytes -= sent * row_bytes
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

    def freeze(self, drain: Drain, on_give_up: Callable[[str], object]) -> tuple[TableScalars, ...]:
        """All that is touched now is a cut, to be sent as it is now, in frames that carry ``drain``'s step and marker.

        No fused update runs meanwhile, on whatever thread. The cut is open until ``finish`` or ``give_up``; hooks may
        give it up in between, on any thread that writes rows. If this raises, it is to be given up.

        Returns:
            The kernels' own state at this moment.
        """
        assert self._cut is None
        assert self.swept
        with self._updates.still():
            self._count_left()
            self._note_writes()
            for kernel, mask in zip(self._kernels, self._masks, strict=True):
                with kernel.reading():
                    mask.check_ids()
            scalars = self._scalars()
            self._cut = FrozenCut(drain, on_give_up)
            for mask in self._masks:
                mask.freeze()
        self._left, self._left_frozen = [0] * len(self._masks), self._left
        return scalars

    def still(self) -> AbstractContextManager[None]:
        """No fused update of another thread runs inside."""
        return self._updates.still()

    def push(self, drain: Drain) -> bool:
        """Send the frozen rows that find space. Whether nothing is left of an open cut."""
        self._note_writes()
        if not self._sender.may_send(drain):
            return False
        for position, (kernel, mask) in enumerate(zip(self._kernels, self._masks, strict=True)):
            with self._sending, kernel.reading():
                if self._cut is None:
                    return False
                rows = mask.frozen()
                self._left_frozen[position] = rows.numel()
                sent = self._sender.send(position, KernelRows(rows), drain)
                mask.frozen_sent(rows[:sent] if sent < rows.numel() else rows)
                self._left_frozen[position] -= sent
                if sent < rows.numel():
                    return False
        return self._cut is not None

    def finish(self) -> None:
        """The cut is in the ring to its last row, and so is its MARK."""
        self._cut = None
        self._left_frozen = [0] * len(self._masks)

    def give_up(self, reason: str) -> None:
        """The cut, if one is open, is none: its rows that were not sent are touched rows again."""
        with self._sending:
            if self._cut is None:
                return
            self._cut.on_give_up(reason)  # first: whatever is raised from here on, this cut is never taken for whole
            for mask in self._masks:
                mask.thaw()
            self._left = [sum(left) for left in zip(self._left, self._left_frozen, strict=True)]
            self._left_frozen = [0] * len(self._masks)
            self._cut = None

    def _before_update(self, position: int, update: FusedUpdate) -> None:
        """A fused update is about to run."""
        self._updates.begin(position, update)
        if len(self._updates) > _MANY_NOTES:
            self._count_left()
        if self._cut is not None:
            self._save(position, lambda: self._masks[position].frozen_in(update.lookup))

    def _after_update(self, position: int, lookup: Lookup, key: Key) -> None:
        """It has been applied."""
        self._masks[position].mark(lookup)
        self._updates.settle(position, key)

    def _count_left(self) -> None:
        """Rows of updates that were stopped before they had marked them are touched."""
        for position, key, lookup in self._updates.left():
            with self._kernels[position].reading():
                self._after_update(position, lookup, key)

    def _unseen_update(self, position: int) -> None:
        """An update has run that no hook has seen before: any row of its kernel may have changed."""
        self.give_up("rows were updated by a lookup that was not seen: one from before the attach, or a compiled one")
        self._masks[position].mark_rows(None)
        log.warning(
            "a lookup was updated that was not seen, made before the attach or past the hooks of its module: "
            "all rows of %s are sent again",
            ",".join(shard.table.name for shard in self._kernels[position].shards),
        )

    def _before_rewrite(self, position: int, rows: torch.Tensor | None) -> None:
        """Linear rows are about to change outside the fused update; None: all of them."""
        if position in self._announced:
            return
        self._note_writes_of(position)
        mask = self._masks[position]
        if self._cut is not None:
            self._save(position, lambda: mask.frozen_among(rows))
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
            kernel.writes_marked()
            return
        tables = ", ".join(dict.fromkeys(kernel.shards[shard].table.name for shard in written))
        self.written_in_place = True
        self.give_up(f"{tables} was written in place before all rows of the marker had been sent")
        kernel.writing()
        self._masks[position].mark_shards(written)
        kernel.writes_marked()
        if tables not in self._warned:
            self._warned.add(tables)
            log.warning(
                "%s: written in place beside the fused update. All rows are sent again, and a marker that is being "
                "sent is given up; load_state_dict() gives up none",
                tables,
            )

    def mark_ranges(self, ranges: Collection[RowRange]) -> None:
        """Send rows again that have not changed."""
        for kernel, mask in zip(self._kernels, self._masks, strict=True):
            for position, shard in enumerate(kernel.shards):
                for table, begin, end in ranges:
                    first, last = max(begin, shard.row0), min(end, shard.row0 + shard.rows)
                    if table == shard.table.name and first < last:
                        base = kernel.bases[position] - shard.row0
                        mask.mark_rows(torch.arange(base + first, base + last, device="cpu"))

    def _save(self, position: int, find: Callable[[], torch.Tensor]) -> None:
        """Send frozen rows in front of a write, within the marker's budget; a write neither waits nor fails."""
        begin = time.perf_counter()
        with self._sending:
            cut = self._cut
            if cut is None:  # another thread has given it up
                return
            try:
                with self._kernels[position].reading():
                    rows = find()
                    sent = self._sender.send(position, KernelRows(rows), replace(cut.drain, saving=True))
                    self._masks[position].frozen_sent(rows[:sent])
                self.saved_rows += sent
                if sent < rows.numel():
                    self.give_up(
                        "rows that the marker has not sent are overwritten, and ring and marker budget are full"
                    )
            except Exception as error:  # the publisher has died, or memory is short
                log.exception("the rows of marker %d cannot be sent on this rank", cut.drain.marker)
                self.give_up(f"{type(error).__name__}: {error}")
            finally:
                self.saving_s += time.perf_counter() - begin

    def _scalars(self) -> tuple[TableScalars, ...]:
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
