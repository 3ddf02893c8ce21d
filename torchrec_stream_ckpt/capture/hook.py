"""Capture of one rank: from the fused update to frames in the ring.

Rows are marked once the fused update has been applied, never at lookup, and read only when they are drained. A row that
changes in each of a hundred steps is sent once per drain, with its latest value. An update is noted before it runs, so
its rows count as touched even if an error keeps it from marking them.

A cut *freezes* the rows that are touched at its step boundary (``frozen``).

Each fused update is noted before its kernel runs, and settled once its rows are marked.

If Python stops between the two (a signal handler that raises, another library's hook, an error in another kernel), the
note stays. Its rows may have changed, so the next look at the marks counts them as touched. A note whose backward has
ended is abandoned; the others belong to updates that still run on other threads.

No code here takes a lock: each step is one operation on a dict, or one assignment, so an exception between any two of
them leaves everything usable.
"""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import torch

from torchrec_stream_ckpt.capture.counts import Record, deferral
from torchrec_stream_ckpt.capture.frozen import FrozenRows
from torchrec_stream_ckpt.capture.outside_writes import OutsideWrites
from torchrec_stream_ckpt.capture.sender import Drain, Sender
from torchrec_stream_ckpt.capture.shards import scalars_of
from torchrec_stream_ckpt.capture.staging import StreamIdentity
from torchrec_stream_ckpt.capture.touched import TouchedRows
from torchrec_stream_ckpt.errors import MarkerFailedError
from torchrec_stream_ckpt.format.control import TableScalars
from torchrec_stream_ckpt.format.ring import FrameBuffer, FrameRing
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.model import FusedKernel, FusedUpdate, Key, Lookup
from torchrec_stream_ckpt.util.signal_safe import SafeEvent
from torchrec_stream_ckpt.util.types import RowRange

_PATIENCE_S = 10.0
"""Longest wait for updates of other threads to end. They take milliseconds."""
_POLL_S = 0.0002
_RECHECK_S = 0.1


class _Hold:
    """Blocks the start of updates on all threads except the one that created it."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.over = SafeEvent()


class RunningUpdates:
    """The updates of all kernels of this rank that have begun and are not settled. Thread-safe."""

    def __init__(self) -> None:
        self._noted: dict[tuple[int, Key], FusedUpdate] = {}
        self._hold: _Hold | None = None

    def begin(self, position: int, update: FusedUpdate) -> None:
        """Note an update of the kernel at ``position`` that is about to run on this thread.

        Waits while updates are held.
        """
        while True:
            self._noted[position, update.key] = update
            hold = self._hold
            if hold is None or hold.thread == threading.get_ident():
                return
            del self._noted[position, update.key]
            hold.over.wait(_RECHECK_S)

    def settle(self, position: int, key: Key) -> None:
        """Remove the note of this update: its rows are marked."""
        self._noted.pop((position, key), None)

    def __len__(self) -> int:
        """Number of notes, of running and of abandoned updates."""
        return len(self._noted)

    def left(self) -> list[tuple[int, Key, Lookup]]:
        """Return (position of the kernel, key, ids) of updates that ended without being settled."""
        if not self._noted:
            return []
        return [
            (position, key, update.lookup)
            for (position, key), update in self._noted.copy().items()
            if not update.running
        ]

    @contextmanager
    def still(self) -> Iterator[None]:
        """Hold new updates of other threads, and wait until the running ones have ended.

        Raises:
            MarkerFailedError: An update does not end. Updates are held only during that wait.
        """
        outer = self._hold
        self._hold = hold = _Hold()
        try:
            self._wait()
            yield
        finally:
            self._hold = outer
            hold.over.set()

    def let_go(self) -> None:
        """Release a hold that an exception may have left. Do not call this inside ``still``."""
        hold, self._hold = self._hold, None
        if hold is not None:
            hold.over.set()

    def _wait(self) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while any(update.running for update in self._noted.copy().values()):
            if time.monotonic() > deadline:
                raise MarkerFailedError(
                    f"rows cannot be read because a fused update has been running for {_PATIENCE_S:.0f} s",
                    hint="call step() and mark() outside of a backward; find out what blocks the thread of that update",
                )
            time.sleep(_POLL_S)


log = logging.getLogger(__name__)

_MANY_NOTES = 64
"""Number of notes above which abandoned updates are settled before the next drain."""


class Capture:
    """Hooks every fused kernel of this rank. All methods except the hooks run on the training thread.

    Hooks run on any thread that trains. No exception in this class loses a changed row: marks, notes and the cut are
    changed in an order that leaves them usable after each step.

    Args:
        kernels: All kernels of this rank.
        schema: Schema of the job.
        defer: Device -> how drains of kernels on it get the number of marked rows without waiting. If it returns None,
            they read the masks.
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
        self._deferred = any(mask.counts is not None for mask in self._masks)
        """(GPU) True if drains wait for counts."""
        self._sender = Sender(kernels, self._index)
        self._updates = RunningUpdates()
        self.frozen = FrozenRows(kernels, self._masks, self._sender)
        """The rows of the open cut."""
        self.outside = OutsideWrites(kernels, self._masks, self.frozen)
        """Writers of rows outside the fused update."""
        self._removers: list[Callable[[], None]] = [
            remover
            for position, kernel in enumerate(kernels)
            for remover in (
                kernel.on_update(
                    partial(self._before_update, position),
                    partial(self._after_update, position),
                    partial(self._unseen_update, position),
                ),
                kernel.on_rewrite(partial(self.outside.before_rewrite, position)),
            )
        ]

    def number(self, schema: Schema) -> None:
        """Use the table indices of ``schema``, which has the same tables. Call this before a generation is opened."""
        self._index = self._sender.tables = schema.index()

    def begin(self) -> None:
        """Send only changes from now on. A base or the parent marker will record the current content of the tables."""
        for kernel, mask in zip(self._kernels, self._masks, strict=True):
            kernel.versions.rebase()
            with kernel.order.reading():
                mask.forget()
        self.outside.announced.clear()

    def open(
        self, identity: StreamIdentity, ring: FrameRing, submit: Callable[[FrameBuffer], int], swept: Collection[int]
    ) -> None:
        """Start a generation: tables in ``swept`` are sent whole, in addition to the rows that steps touch."""
        self._sender.open(identity, ring, submit)
        for kernel, mask in zip(self._kernels, self._masks, strict=True):
            tables = [self._index[shard.table.name] for shard in kernel.shards]
            mask.sweep.again([position for position, table in enumerate(tables) if table in swept])

    def look(self, due: bool) -> bool:
        """(each step boundary without an open cut) Return whether to call ``drain`` now. Never waits.

        On a CPU, returns True if a drain is due. On a GPU the host must not wait for the number of rows, so a due drain
        takes two calls. The first counts the rows. At the first later boundary at which the counts have arrived, due or
        not, this returns True.
        """
        if not self._deferred:
            return due
        self._count_left()
        asked = [mask.counts for mask in self._masks if mask.counts is not None and mask.counts.asked]
        if asked:
            return all(counts.arrived for counts in asked)
        if due:
            for kernel, mask in zip(self._kernels, self._masks, strict=True):
                if mask.counts is not None:
                    with kernel.order.reading():
                        mask.counts.ask(mask.touched.padded)
        return False

    def drain(self, drain: Drain) -> bool:
        """Send as many touched rows as fit; the rest stay marked. Returns True if every row examined was sent.

        It examines all of them. On a GPU it examines as many as ``look`` has counted, and none without a count.
        Do not call this while a cut is being sent: newer values before its MARK would be taken for values of the cut.
        """
        assert self.frozen.cut is None
        self._updates.let_go()
        self._count_left()
        self.outside.note()
        try:
            return self._sender.may_send(drain) and all(self._drain_kernel(drain, n) for n in range(len(self._kernels)))
        finally:
            for mask in self._masks:
                if mask.counts is not None:
                    mask.counts.drop()  # rows without space go with the next due drain

    def _drain_kernel(self, drain: Drain, position: int) -> bool:
        mask = self._masks[position]
        with self._kernels[position].order.reading():
            found = mask.look()
            if found is None:
                return False
            rows = found.rows
            mask.touched.left = rows.numel()
            sent = self._sender.send(position, found, drain)
            mask.sent(rows, sent)
            mask.touched.left -= sent
            return sent == rows.numel()

    def sweep(self, drain: Drain, max_bytes: int) -> bool:
        """Send up to about ``max_bytes`` of rows that were never sent. Returns True if every row examined was sent."""
        assert self.frozen.cut is None
        if not self._sender.may_send(drain):
            return False
        self.outside.note()
        left_bytes = max_bytes
        for position, mask in enumerate(self._masks):
            row_bytes = self._sender.row_bytes(position)
            # At least one row, and none for the remainder at the end: that would be one frame per row.
            while mask.sweep.left and (left_bytes >= row_bytes or left_bytes == max_bytes):
                with self._kernels[position].order.reading():
                    found = mask.take_unswept(max(1, left_bytes // row_bytes))
                    sent = self._sender.send(position, found, drain)
                    mask.sweep_sent(found.rows, sent)
                if sent < found.rows.numel():
                    return False
                left_bytes -= sent * row_bytes
        return True

    @property
    def swept(self) -> bool:
        """True if every row is known, without a scan, to have been sent at least once."""
        return not any(mask.sweep.left for mask in self._masks)

    @property
    def sweep_progress(self) -> tuple[int, int]:
        """(rows that the sweep has finished, all rows), without a scan. Thread-safe."""
        total = sum(mask.total for mask in self._masks)
        return total - sum(mask.sweep.left for mask in self._masks), total

    @property
    def dirty_rows(self) -> int:
        """Changed rows that were not sent, as of the last look at their masks. Thread-safe."""
        return sum(mask.touched.left + mask.frozen.left for mask in self._masks)

    def forwards(self) -> dict[str, int]:
        """Return module path -> forwards of that module on this rank that lead to updates, since it was hooked."""
        found: dict[str, int] = {}
        for kernel in self._kernels:
            for shard in kernel.held:
                path = shard.table.name.rpartition(".")[0]
                found[path] = max(kernel.lookups.forwards, found.get(path, 0))
        return found

    def changed(self) -> bool:
        """Return whether any row has changed since it was sent or frozen. On a GPU the host waits."""
        self._count_left()
        self.outside.note()
        return any(bool(mask.touched.bits.any()) for mask in self._masks)

    # A cut.

    def freeze(self, drain: Drain, on_give_up: Callable[[str], object]) -> tuple[TableScalars, ...]:
        """Make a cut of all touched rows, in frames that carry ``drain``'s step and marker.

        The rows are sent with their current values. No fused update runs on any thread during this call. The cut is
        open until ``frozen`` finishes it or gives it up. Hooks may give it up in between, on any thread that writes
        rows. If this raises, give the cut up.

        Returns:
            The kernels' own state at this moment. The iteration counts trained batches.
        """
        assert self.frozen.cut is None
        assert self.swept
        with self._updates.still():
            self._count_left()
            self.outside.note()
            for kernel, mask in zip(self._kernels, self._masks, strict=True):
                with kernel.order.reading():
                    mask.check_ids()
            if any(kernel.lookups.in_flight for kernel in self._kernels):
                gc.collect()  # a dropped forward's graph may be in a reference cycle: it is never looked up again
            scalars = scalars_of(self._kernels, self._index)
            self.frozen.freeze(drain, on_give_up)
        return scalars

    def scalars(self) -> tuple[TableScalars, ...]:
        """Read the kernels' own state."""
        return scalars_of(self._kernels, self._index)

    def still(self) -> AbstractContextManager[None]:
        """Return a context in which no fused update of another thread runs."""
        return self._updates.still()

    def push(self, drain: Drain) -> bool:
        """Send as many frozen rows as fit. Returns True if the cut is open and all of its rows were sent."""
        self.outside.note()
        return self.frozen.push(drain)

    def _before_update(self, position: int, update: FusedUpdate) -> None:
        """Note a fused update that is about to run, and save frozen rows that it overwrites."""
        self._updates.begin(position, update)
        if len(self._updates) > _MANY_NOTES:
            self._count_left()
        if self.frozen.cut is not None:
            self.frozen.save(position, lambda: self._masks[position].frozen_in(update.lookup))

    def _after_update(self, position: int, lookup: Lookup, key: Key) -> None:
        """Mark the rows of an update that was applied."""
        self._masks[position].mark(lookup)
        self._updates.settle(position, key)

    def _count_left(self) -> None:
        """Mark rows of updates that were stopped before they marked them."""
        for position, key, lookup in self._updates.left():
            with self._kernels[position].order.reading():
                self._after_update(position, lookup, key)

    def _unseen_update(self, position: int) -> None:
        """Mark all rows of a kernel after an update that no hook saw: any of them may have changed."""
        self.frozen.give_up("rows were updated by an unobserved lookup: it began before the attach, or it is compiled")
        self._masks[position].mark_rows(None)
        log.warning(
            "rows were updated by an unobserved lookup, which began before the attach or bypassed the hooks of its "
            "module: all rows of %s are sent again",
            self._kernels[position].tables,
        )

    def mark_ranges(self, ranges: Collection[RowRange]) -> None:
        """Mark unchanged rows in these ranges, so that they are sent again."""
        for kernel, mask in zip(self._kernels, self._masks, strict=True):
            for position, shard in enumerate(kernel.shards):
                for table, begin, end in ranges:
                    first, last = max(begin, shard.row0), min(end, shard.row0 + shard.rows)
                    if table == shard.table.name and first < last:
                        base = kernel.bases[position] - shard.row0
                        mask.touched.fill_range(base + first, base + last)

    def close(self) -> None:
        """Remove every hook."""
        while self._removers:
            self._removers.pop()()
