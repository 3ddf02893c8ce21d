"""Which rows have to be sent: a bit for each row that changed, another for each that was never sent.

All are bool masks over the linear row space of one kernel (its shards one after the other) and live on
the tables' device: three bytes a row, on a GPU two (``sweep``). Marking is a scatter; nothing here grows. A drain does
not read the whole mask where little of it is set (``rowmask``), and on a GPU it does not wait for what is (``counts``).

There are two masks of touched rows. Updates mark in one of them. A cut swaps them: the other one then holds the
*frozen* rows, those of the cut that have not been sent yet, and becomes empty as they are.

A drain *takes* rows: their marks are cleared before they are read. So an update of another thread that ends meanwhile
leaves a mark, and a row that was read half written is sent again. Rows that were taken and not sent, for lack of space
or because something was raised, are marked again.

Which rows of a kernel were never sent, and go beside what steps touch.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Protocol

import torch

from torchrec_stream_ckpt.capture.counts import LateCounts, Record
from torchrec_stream_ckpt.capture.rowmask import RowMask
from torchrec_stream_ckpt.capture.sender import KernelRows
from torchrec_stream_ckpt.errors import UnsupportedError
from torchrec_stream_ckpt.model import FusedKernel, Lookup

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


class TouchedRows:
    """The masks of one kernel, and its sweep.

    Args:
        kernel: Holds the rows.
        record: How drains learn how many rows are marked without waiting for a GPU; None: the host looks (a CPU).
    """

    def __init__(self, kernel: FusedKernel, record: Record | None = None) -> None:
        self._kernel = kernel
        self.bases = kernel.bases
        self.total = self.bases[-1]
        touched, frozen = (
            RowMask(
                self.total, kernel.device, LateCounts(self.bases, record, kernel.device) if record is not None else None
            )
            for _ in range(2)
        )
        self._masks = touched, frozen
        """One value, so that no exception falls between the halves of a swap."""
        self.sweep: Sweep = RangeSweep(self.bases, kernel.device) if record is not None else MaskSweep(self.bases)
        """Rows that were never sent."""
        self._feature_rows = [(self.bases[shard], self.bases[shard + 1]) for shard in kernel.feature_shards]
        """For each feature, the linear rows of its shard."""

    @property
    def touched(self) -> RowMask:
        """Rows that changed since they were last sent."""
        return self._masks[0]

    @property
    def frozen(self) -> RowMask:
        """Rows of the cut that have not been sent with its values."""
        return self._masks[1]

    @property
    def counts(self) -> LateCounts | None:
        """(GPU) How many rows are touched; None: the host looks."""
        return self._masks[0].late

    def mark(self, lookup: Lookup) -> None:
        """Mark the rows of a lookup whose update has been applied. Never makes the host wait for a GPU."""
        if lookup.indices.is_cuda:
            self.touched.fill_rows(self._kernel.linear_rows(lookup))
            return
        ids, touched = lookup.indices.numpy(), self.touched
        for first, last, begin, end in self._spans(lookup):
            touched.fill(first, last, ids[begin:end])

    def _spans(self, lookup: Lookup) -> Iterator[tuple[int, int, int, int]]:
        """(CPU) Of each feature with ids: the linear rows of its shard, and where its ids begin and end."""
        if lookup.bag_starts is not None:
            bounds = lookup.offsets[lookup.bag_starts.long()].tolist()
        elif batch := (lookup.offsets.numel() - 1) // len(self._feature_rows):
            bounds = lookup.offsets[::batch].tolist()
        else:
            return
        for (first, last), (begin, end) in zip(self._feature_rows, pairwise(bounds), strict=True):
            if end > begin:
                yield first, last, begin, end

    def mark_rows(self, rows: torch.Tensor | None) -> None:
        """Something outside the fused update changes these linear rows; None: it may change any row."""
        if rows is None:
            self.touched.fill_all()
        else:
            self.touched.fill_rows(rows.to(self.touched.bits.device))

    def mark_shards(self, shards: list[int]) -> None:
        """Any row of these shards has changed."""
        for shard in shards:
            self.touched.fill_range(self.bases[shard], self.bases[shard + 1])

    def check_ids(self) -> None:
        """(GPU) Refuse an update that got an id which lies in no table; a CPU kernel raises by itself.

        FBGEMM's bounds check lets -1 pass, and its CUDA backward then writes the row before the table
        (``linearize_index_kernel`` adds the table's first row without a look at the sign): no mark would be true.
        """
        self._refuse_ids(bool(self.touched.bits[self.total]))

    def _refuse_ids(self, trained: bool) -> None:
        if trained:
            raise UnsupportedError(
                "an id of -1 was trained: on a GPU the fused update then writes outside of its table",
                hint="drop such ids before the lookup",
                tables=self._kernel.tables,
            )

    # A drain.

    def look(self) -> KernelRows | None:
        """Take the rows to drain: all that changed since they were last sent, or as many as the counts say, once.

        ``sent`` says what became of them.

        Returns:
            None when the counts are not there.

        Raises:
            UnsupportedError: as ``check_ids``.
        """
        late = self.counts
        if late is None:
            self.check_ids()
            return KernelRows(self.touched.take())
        taken = late.take()
        if taken is None:
            return None
        counts, outside = taken
        self._refuse_ids(outside)
        found = late.first(self.touched.bits, counts)
        self.touched.take_set(found.rows)
        return found

    def sent(self, rows: torch.Tensor, count: int) -> None:
        """Of the rows that ``look`` has returned, the first ``count`` were sent: again only if they change again."""
        self.touched.put_back(count)
        self.sweep.drained(rows[:count])

    def forget(self) -> None:
        """Forget what has changed so far: it is sent as it is, or not at all."""
        self.touched.clear_all()
        self.frozen.clear_all()

    def take_unswept(self, limit: int) -> KernelRows:
        """Up to ``limit`` rows to be swept, none once all were. Where drains wait for counts, of one shard.

        Their marks are taken too. On a GPU they stay: to clear them would drop the counts, and a sweep goes on at every
        step.
        """
        found = self.sweep.window(limit)
        if self.counts is None:
            self.touched.take_set(found.rows[self.touched.bits[found.rows]])
        return found

    def sweep_sent(self, rows: torch.Tensor, count: int) -> None:
        """Of the rows that ``take_unswept`` has returned, the first ``count`` were sent."""
        self.sweep.sent(rows, count)
        if self.counts is None:
            self.touched.put_back_from(int(rows[count]) if count < rows.numel() else self.total)

    # A cut.

    def freeze(self) -> None:
        """Give what is touched now to a cut, and what is touched from here on to the next; the last must be over."""
        touched, frozen = self._masks
        touched.put_back()
        self._masks = frozen, touched
        if frozen.late is not None:
            frozen.late.drop()

    def thaw(self) -> None:
        """The cut is over: frozen rows that were not sent are touched rows again. To be called again if it raises."""
        self.touched.merge(self.frozen)

    def frozen_among(self, rows: torch.Tensor | None) -> torch.Tensor:
        """Those of the linear ``rows`` (None: of all rows) that are frozen, ascending. On a GPU the host waits."""
        if rows is None:
            return self.frozen.find()
        frozen = self.frozen.bits
        rows = rows.to(frozen.device)
        return _ascending(rows[frozen[rows] & (rows < self.total)])

    def frozen_in(self, lookup: Lookup) -> torch.Tensor:
        """Linear rows of a lookup that are frozen, ascending. On a GPU the host waits, to learn how many."""
        if lookup.indices.is_cuda:
            return self.frozen_among(self._kernel.linear_rows(lookup))
        hits = [torch.empty(0, dtype=torch.int64, device="cpu")]
        for first, last, begin, end in self._spans(lookup):
            ids = lookup.indices[begin:end].long()
            hits.append(ids[self.frozen.bits[first:last][ids]] + first)
        return _ascending(torch.cat(hits))


def _ascending(rows: torch.Tensor) -> torch.Tensor:
    """Each row once."""
    unique: torch.Tensor = torch.unique(rows)
    return unique
