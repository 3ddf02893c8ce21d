"""The capture of one rank: from the fused update to frames in the ring.

Rows are marked once the fused update has been applied, never at lookup, and read only when they are
drained: a row that is hot for a hundred steps is sent once a drain, with its latest value. An update is noted before
it runs, so that its rows count as touched whatever keeps it from marking them.

A cut *freezes* what is touched at its step boundary (``frozen``).

Which fused updates run: each one is noted before its kernel, and settled once its rows are marked.

What stops Python between the two (a signal handler that raises, another library's hook, an error in another kernel)
leaves the note there. Its rows may have changed, so the next look at the marks counts them as touched. A note
whose backward has ended is one that was left; the others are of updates that still run, on other threads.

Nothing here takes a lock: each step is one operation on a dict, or one assignment, so that an exception between any
two of them leaves all of it usable.
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
"""How long updates of other threads may take to end; they take milliseconds."""
_POLL_S = 0.0002
_RECHECK_S = 0.1


class _Hold:
    """Updates do not start while it is there, except on the thread that made it."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.over = SafeEvent()


class RunningUpdates:
    """The updates of all kernels of this rank that have begun and are not settled. For any thread."""

    def __init__(self) -> None:
        self._noted: dict[tuple[int, Key], FusedUpdate] = {}
        self._hold: _Hold | None = None

    def begin(self, position: int, update: FusedUpdate) -> None:
        """An update of the kernel at ``position`` is about to run, on this thread. Waits while updates are held."""
        while True:
            self._noted[position, update.key] = update
            hold = self._hold
            if hold is None or hold.thread == threading.get_ident():
                return
            del self._noted[position, update.key]
            hold.over.wait(_RECHECK_S)

    def settle(self, position: int, key: Key) -> None:
        """The rows of this update are marked."""
        self._noted.pop((position, key), None)

    def __len__(self) -> int:
        """Notes, of updates that run and of those that were left."""
        return len(self._noted)

    def left(self) -> list[tuple[int, Key, Lookup]]:
        """(position of the kernel, key, ids) of updates that have ended and were not settled."""
        if not self._noted:
            return []
        return [
            (position, key, update.lookup)
            for (position, key), update in self._noted.copy().items()
            if not update.running
        ]

    @contextmanager
    def still(self) -> Iterator[None]:
        """No update of another thread runs inside: waits until those that run have ended, and holds new ones.

        Raises:
            MarkerFailedError: one does not end. Nothing was held for longer than that wait.
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
        """Hold nothing any longer: an exception may have left a hold. Not inside ``still``."""
        hold, self._hold = self._hold, None
        if hold is not None:
            hold.over.set()

    def _wait(self) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while any(update.running for update in self._noted.copy().values()):
            if time.monotonic() > deadline:
                raise MarkerFailedError(
                    f"a fused update has been running for {_PATIENCE_S:.0f} s: rows cannot be read meanwhile",
                    hint="call step() and mark() outside of a backward; look at what holds that thread",
                )
            time.sleep(_POLL_S)


log = logging.getLogger(__name__)

_MANY_NOTES = 64
"""Of updates; with more of them, those that were left are settled before the next drain."""


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
        self._deferred = any(mask.counts is not None for mask in self._masks)
        """(GPU) Whether drains wait for counts."""
        self._sender = Sender(kernels, self._index)
        self._updates = RunningUpdates()
        self.frozen = FrozenRows(kernels, self._masks, self._sender)
        """The cut that is open."""
        self.outside = OutsideWrites(kernels, self._masks, self.frozen)
        """What writes rows beside the fused update."""
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
        """Frames call the tables as ``schema`` does, which has the same ones; before a generation is opened."""
        self._index = self._sender.tables = schema.index()

    def begin(self) -> None:
        """Send only what changes from here: a base, or the parent marker, will say what the tables hold now."""
        for kernel, mask in zip(self._kernels, self._masks, strict=True):
            kernel.versions.rebase()
            with kernel.order.reading():
                mask.forget()
        self.outside.announced.clear()

    def open(
        self, identity: StreamIdentity, ring: FrameRing, submit: Callable[[FrameBuffer], int], swept: Collection[int]
    ) -> None:
        """Start a generation: tables in ``swept`` are sent whole, beside what steps touch."""
        self._sender.open(identity, ring, submit)
        for kernel, mask in zip(self._kernels, self._masks, strict=True):
            tables = [self._index[shard.table.name] for shard in kernel.shards]
            mask.sweep.again([position for position, table in enumerate(tables) if table in swept])

    def look(self, due: bool) -> bool:
        """(each step boundary without an open cut) Whether to call ``drain`` now. Never waits.

        On a CPU: when a drain is due. On a GPU the host must not wait for the number of rows, so a drain that is due
        is made in two halves: here the rows are counted, and at the first later boundary where the counts have
        arrived, due or not, it is time for the other one.
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
        """Send the touched rows that find space; the rest stays marked. Whether all that it looked at found space.

        It looks at all of them; on a GPU at as many as ``look`` has counted, and at none without that.
        Not while a cut is being sent: newer values before its MARK would be taken for its own.
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
                    mask.counts.drop()  # what found no space goes with the next one that is due

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
        """Send up to about ``max_bytes`` of rows that were never sent. Whether all that was looked at found space."""
        assert self.frozen.cut is None
        if not self._sender.may_send(drain):
            return False
        self.outside.note()
        left_bytes = max_bytes
        for position, mask in enumerate(self._masks):
            row_bytes = self._sender.row_bytes(position)
            # One row at least, and none in what is left over at the end: that would be a frame a row.
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
        """True if every row has been sent at least once, as far as is known without a scan."""
        return not any(mask.sweep.left for mask in self._masks)

    @property
    def sweep_progress(self) -> tuple[int, int]:
        """(rows that the sweep is done with, all rows), without a scan; on any thread."""
        total = sum(mask.total for mask in self._masks)
        return total - sum(mask.sweep.left for mask in self._masks), total

    @property
    def dirty_rows(self) -> int:
        """Changed rows that were not sent when their masks were last looked at; on any thread."""
        return sum(mask.touched.left + mask.frozen.left for mask in self._masks)

    def forwards(self) -> dict[str, int]:
        """Path of each sharded module -> its forwards on this rank that lead to updates, since the hooks are there."""
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
        """All that is touched now is a cut, to be sent as it is now, in frames that carry ``drain``'s step and marker.

        No fused update runs meanwhile, on whatever thread. The cut is open until ``frozen`` is told that it is finished
        or given up; hooks may give it up in between, on any thread that writes rows. If this raises, it is to be given
        up.

        Returns:
            The kernels' own state at this moment; the iteration is that of the trained batches.
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
                gc.collect()  # the graph of a forward that was dropped may hang in a cycle: nothing looks it up again
            scalars = scalars_of(self._kernels, self._index)
            self.frozen.freeze(drain, on_give_up)
        return scalars

    def scalars(self) -> tuple[TableScalars, ...]:
        """The kernels' own state, read from them now."""
        return scalars_of(self._kernels, self._index)

    def still(self) -> AbstractContextManager[None]:
        """No fused update of another thread runs inside."""
        return self._updates.still()

    def push(self, drain: Drain) -> bool:
        """Send the frozen rows that find space; returns whether the cut is open and nothing of it is left."""
        self.outside.note()
        return self.frozen.push(drain)

    def _before_update(self, position: int, update: FusedUpdate) -> None:
        """A fused update is about to run."""
        self._updates.begin(position, update)
        if len(self._updates) > _MANY_NOTES:
            self._count_left()
        if self.frozen.cut is not None:
            self.frozen.save(position, lambda: self._masks[position].frozen_in(update.lookup))

    def _after_update(self, position: int, lookup: Lookup, key: Key) -> None:
        """It has been applied."""
        self._masks[position].mark(lookup)
        self._updates.settle(position, key)

    def _count_left(self) -> None:
        """Rows of updates that were stopped before they had marked them are touched."""
        for position, key, lookup in self._updates.left():
            with self._kernels[position].order.reading():
                self._after_update(position, lookup, key)

    def _unseen_update(self, position: int) -> None:
        """An update has run that no hook has seen before: any row of its kernel may have changed."""
        self.frozen.give_up(
            "rows were updated by a lookup that was not seen: one made before the attach, or a compiled one"
        )
        self._masks[position].mark_rows(None)
        log.warning(
            "a lookup was updated that was not seen, made before the attach or past the hooks of its module: "
            "all rows of %s are sent again",
            self._kernels[position].tables,
        )

    def mark_ranges(self, ranges: Collection[RowRange]) -> None:
        """Send rows again that have not changed."""
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
