"""Sets of rows to send: a bit for each row that changed, and another for each row that was never sent.

All are bool masks over the linear row space of one kernel (its shards one after the other) and live on the tables'
device: three bytes per row, on a GPU two (``sweep``). Marking is a scatter; nothing here grows. If few rows are set, a
drain does not read the whole mask (``rowmask``). On a GPU it does not wait for the number of set rows (``counts``).

There are two masks of touched rows. Updates mark rows in one of them. A cut swaps them: the other one then holds the
*frozen* rows, those of the cut that have not been sent yet, and empties as they are sent.

A drain *takes* rows: their marks are cleared before they are read. So an update of another thread that ends meanwhile
leaves a mark, and a row that was read half written is sent again. Rows that were taken and not sent, for lack of space
or because of an exception, are marked again.

A sweep sends the rows of a kernel that were never sent, in addition to the rows that steps touch.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TypeAlias

import torch

from torchrec_stream_ckpt.capture.counts import LateCounts, Record
from torchrec_stream_ckpt.capture.rowmask import RowMask
from torchrec_stream_ckpt.capture.sender import KernelRows
from torchrec_stream_ckpt.errors import UnsupportedError
from torchrec_stream_ckpt.model import FusedKernel, Lookup

_SCAN_ROWS = 2**16
"""Fewest rows examined in one piece: rows that drains have sent are skipped in few pieces."""


class MaskSweep:
    """(CPU) Sweep with one byte per row. A row that a drain has sent is skipped."""

    def __init__(self, bases: tuple[int, ...]) -> None:
        self._bases = bases
        self._total = bases[-1]
        self.unswept = torch.zeros(self._total, dtype=torch.bool, device="cpu")
        self._cursor = self._total

    def again(self, shards: list[int]) -> None:
        """Schedule every row of these shards to be sent once, whether a step touches it or not."""
        for shard in shards:
            self.unswept[self._bases[shard] : self._bases[shard + 1]] = True
        self._cursor = 0 if shards else self._cursor

    def window(self, limit: int) -> KernelRows:
        """Return up to ``limit`` rows that were never sent. Skips over rows that have been sent."""
        found = torch.empty(0, dtype=torch.int64, device="cpu")
        while self._cursor < self._total and not found.numel():
            window = self.unswept[self._cursor : self._cursor + max(limit, _SCAN_ROWS)]
            found = window.nonzero().flatten()[:limit] + self._cursor
            if not found.numel():
                self._cursor += window.numel()
        return KernelRows(found)

    def sent(self, rows: torch.Tensor, count: int) -> None:
        """Record that the first ``count`` rows of the window were sent. The next window begins after them."""
        if count:
            self.drained(rows[:count])
            self._cursor = int(rows[count - 1]) + 1

    def drained(self, rows: torch.Tensor) -> None:
        """Record that a drain has sent these rows."""
        if self.left:
            self.unswept.index_fill_(0, rows, False)

    @property
    def left(self) -> int:
        """Rows that the sweep still has to send, as far as is known without a scan."""
        return self._total - self._cursor


class RangeSweep:
    """(GPU) Sweep by ranges that the host knows, without reading masks.

    Rows that a drain sends meanwhile are sent twice.
    """

    def __init__(self, bases: tuple[int, ...], device: torch.device) -> None:
        self._bases = bases
        self._device = device
        self._next = list(bases[1:])
        """For each shard, the linear row at which the sweep continues. Its end, once the shard is finished."""

    def again(self, shards: list[int]) -> None:
        """Schedule every row of these shards to be sent once."""
        for shard in shards:
            self._next[shard] = self._bases[shard]

    def window(self, limit: int) -> KernelRows:
        """Return up to ``limit`` rows of the first unfinished shard."""
        begin, end = next(((begin, end) for _, begin, end in self._ranges() if begin < end), (0, 0))
        end = min(end, begin + limit)
        cuts = [min(max(base, begin), end) - begin for base in self._bases]
        return KernelRows(torch.arange(begin, end, dtype=torch.int64, device=self._device), cuts)

    def sent(self, rows: torch.Tensor, count: int) -> None:
        """Record that the first ``count`` rows of the window were sent."""
        shard = next((shard for shard, begin, end in self._ranges() if begin < end), 0)
        self._next[shard] += count

    def drained(self, rows: torch.Tensor) -> None:
        """Ignore rows that a drain has sent: the host does not know which, and they are sent once more."""

    @property
    def left(self) -> int:
        """Rows that the sweep still has to send."""
        return sum(end - begin for _, begin, end in self._ranges())

    def _ranges(self) -> list[tuple[int, int, int]]:
        """Return (shard, row at which the sweep continues in it, its end)."""
        ends = [end for _, end in pairwise(self._bases)]
        return list(zip(range(len(ends)), self._next, ends, strict=True))


Sweep: TypeAlias = MaskSweep | RangeSweep
"""The remaining rows that were never sent."""


class TouchedRows:
    """The masks of one kernel, and its sweep.

    Args:
        kernel: Holds the rows.
        record: Gives drains the number of marked rows without waiting for a GPU. If None, the host reads the masks (a
            CPU).
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
        """One value, so that no exception occurs between the halves of a swap."""
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
        """(GPU) Counts of touched rows. None if the host reads the mask."""
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
        """(CPU) Yield, for each feature with ids, the linear rows of its shard and the range of its ids."""
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
        """Mark linear rows that are changed outside the fused update. If ``rows`` is None, mark all rows."""
        if rows is None:
            self.touched.fill_all()
        else:
            self.touched.fill_rows(rows.to(self.touched.bits.device))

    def mark_shards(self, shards: list[int]) -> None:
        """Mark all rows of these shards: any of them has changed."""
        for shard in shards:
            self.touched.fill_range(self.bases[shard], self.bases[shard + 1])

    def check_ids(self) -> None:
        """(GPU) Reject an update with an id outside all tables. A CPU kernel raises by itself.

        FBGEMM's bounds check accepts -1, and its CUDA backward then writes the row before the table
        (``linearize_index_kernel`` adds the table's first row without checking the sign). No mark would be correct.
        """
        self._refuse_ids(bool(self.touched.bits[self.total]))

    def _refuse_ids(self, trained: bool) -> None:
        if trained:
            raise UnsupportedError(
                "the batch contained id -1, for which FBGEMM writes outside of the table on a GPU",
                hint="remove negative ids before the lookup",
                tables=self._kernel.tables,
            )

    # A drain.

    def look(self) -> KernelRows | None:
        """Take the rows to drain: all rows changed since they were last sent, or as many as the counts report, once.

        Call ``sent`` with the number of rows sent.

        Returns:
            None if the counts have not arrived.

        Raises:
            UnsupportedError: As ``check_ids``.
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
        """Record that the first ``count`` rows returned by ``look`` were sent.

        They are sent again only if they change again.
        """
        self.touched.put_back(count)
        self.sweep.drained(rows[:count])

    def forget(self) -> None:
        """Forget all changes so far: these rows are sent by a sweep with their current values, or not at all."""
        self.touched.clear_all()
        self.frozen.clear_all()

    def take_unswept(self, limit: int) -> KernelRows:
        """Return up to ``limit`` rows to sweep.

        Empty if all were swept. If drains wait for counts, all are of one shard.

        Their marks are taken, too. On a GPU the marks stay: clearing them would drop the counts, and a sweep continues
        at every step.
        """
        found = self.sweep.window(limit)
        if self.counts is None:
            self.touched.take_set(found.rows[self.touched.bits[found.rows]])
        return found

    def sweep_sent(self, rows: torch.Tensor, count: int) -> None:
        """Record that the first ``count`` rows returned by ``take_unswept`` were sent."""
        self.sweep.sent(rows, count)
        if self.counts is None:
            self.touched.put_back_from(int(rows[count]) if count < rows.numel() else self.total)

    # A cut.

    def freeze(self) -> None:
        """Give the touched rows to a cut, and later ones to the next cut. The previous cut must be over."""
        touched, frozen = self._masks
        touched.put_back()
        self._masks = frozen, touched
        if frozen.late is not None:
            frozen.late.drop()

    def thaw(self) -> None:
        """End the cut: frozen rows that were not sent are touched rows again. If this raises, call it again."""
        self.touched.merge(self.frozen)

    def frozen_among(self, rows: torch.Tensor | None) -> torch.Tensor:
        """Return the frozen rows among the linear ``rows``, or among all rows if None, ascending.

        On a GPU the host waits.
        """
        if rows is None:
            return self.frozen.find()
        frozen = self.frozen.bits
        rows = rows.to(frozen.device)
        return _ascending(rows[frozen[rows] & (rows < self.total)])

    def frozen_in(self, lookup: Lookup) -> torch.Tensor:
        """Return the linear rows of a lookup that are frozen, ascending. On a GPU the host waits for their number."""
        if lookup.indices.is_cuda:
            return self.frozen_among(self._kernel.linear_rows(lookup))
        hits = [torch.empty(0, dtype=torch.int64, device="cpu")]
        for first, last, begin, end in self._spans(lookup):
            ids = lookup.indices[begin:end].long()
            hits.append(ids[self.frozen.bits[first:last][ids]] + first)
        return _ascending(torch.cat(hits))


def _ascending(rows: torch.Tensor) -> torch.Tensor:
    """Return each row once, ascending."""
    unique: torch.Tensor = torch.unique(rows)
    return unique
