"""Which rows have to be sent: a bit for each row that changed, another for each that was never sent.

All are bool masks over the linear row space of one kernel (its shards one behind the other) and live on
the tables' device: three bytes a row, on a GPU two (``sweep``). Marking is a scatter; nothing here grows. A drain does
not read the whole mask where little of it is set (``rowmask``), and on a GPU it does not wait for what is (``counts``).

There are two masks of touched rows. Updates mark in one of them. A cut swaps them: the other one then holds the
*frozen* rows, those of the cut that have not been sent yet, and becomes empty as they are.

A drain *takes* rows: their marks are cleared before they are read. So an update of another thread that ends meanwhile
leaves a mark, and a row that was read half written is sent again. Rows that were taken and not sent, for lack of space
or because something was raised, are marked again.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from torchrec_stream_ckpt.adapter import FusedKernel, Lookup
from torchrec_stream_ckpt.capture.counts import LateCounts, Record
from torchrec_stream_ckpt.capture.kernel_rows import KernelRows
from torchrec_stream_ckpt.capture.rowmask import RowMask
from torchrec_stream_ckpt.capture.sweep import MaskSweep, RangeSweep, Sweep
from torchrec_stream_ckpt.errors import UnsupportedError


class TouchedRows:
    """The masks of one kernel.

    Args:
        kernel: Holds the rows.
        record: How drains learn how many rows are marked without waiting for a GPU; None: the host looks (a CPU).
    """

    def __init__(self, kernel: FusedKernel, record: Record | None = None) -> None:
        self._kernel = kernel
        self.bases = kernel.bases
        self.total = self.bases[-1]
        touched, frozen = (
            RowMask(self.total, kernel.device, LateCounts(self.bases, record) if record is not None else None)
            for _ in range(2)
        )
        self._masks = touched, frozen
        """One value, so that no exception falls between the halves of a swap."""
        self._sweep: Sweep = RangeSweep(self.bases, kernel.device) if record is not None else MaskSweep(self.bases)
        self._feature_rows = [(self.bases[shard], self.bases[shard + 1]) for shard in kernel.feature_shards]
        """For each feature, the linear rows of its shard."""

    @property
    def _touched(self) -> RowMask:
        return self._masks[0]

    @property
    def _frozen(self) -> RowMask:
        return self._masks[1]

    def mark(self, lookup: Lookup) -> None:
        """Mark the rows of a lookup whose update has been applied. Never makes the host wait for a GPU."""
        if lookup.indices.is_cuda:
            rows = self._kernel.linear_rows(lookup).clamp_(max=self.total)
            self._touched.fill_rows(rows)
            return
        ids, touched = lookup.indices.numpy(), self._touched
        for (first, last), (begin, end) in zip(self._feature_rows, pairwise(self._bounds(lookup)), strict=True):
            if end > begin:
                touched.fill(first, last, ids[begin:end])

    def _bounds(self, lookup: Lookup) -> list[int]:
        """Where the ids of each feature begin, and where the last ones end."""
        if lookup.bag_starts is not None:
            return lookup.offsets[lookup.bag_starts.long()].tolist()
        batch = (lookup.offsets.numel() - 1) // len(self._feature_rows)
        if batch == 0:
            return [0] * (len(self._feature_rows) + 1)
        return lookup.offsets[::batch].tolist()

    def mark_rows(self, rows: torch.Tensor | None) -> None:
        """Something outside the fused update changes these linear rows; None: it may change any row."""
        if rows is None:
            self._touched.fill_all()
        else:
            self._touched.fill_rows(rows.to(self._touched.bits.device))

    def mark_shards(self, shards: list[int]) -> None:
        """Any row of these shards has changed."""
        for shard in shards:
            self._touched.fill_range(self.bases[shard], self.bases[shard + 1])

    def sweep_again(self, shards: list[int]) -> None:
        """Every row of these shards is to be sent once, whether a step touches it or not."""
        self._sweep.again(shards)

    def check_ids(self) -> None:
        """(GPU) Say it when an update has got an id that lies in no table; a CPU kernel raises by itself.

        FBGEMM's bounds check lets -1 pass, and its CUDA backward then writes the row in front of the table
        (``linearize_index_kernel`` adds the table's first row without a look at the sign): no mark would be true.
        """
        self._refuse_ids(bool(self._touched.bits[self.total]))

    def _refuse_ids(self, trained: bool) -> None:
        if trained:
            raise UnsupportedError(
                "an id of -1 was trained: on a GPU the fused update then writes outside of its table",
                hint="drop such ids before the lookup",
                tables=",".join(shard.table.name for shard in self._kernel.shards),
            )

    # What a drain looks at.

    @property
    def deferred(self) -> bool:
        """Whether a drain needs counts that were asked for before."""
        return self._touched.late is not None

    def ask(self) -> None:
        """(deferred) Have the touched rows counted. Never waits."""
        assert self._touched.late is not None
        self._touched.late.ask(self._touched.bits)

    @property
    def asked(self) -> bool:
        """(deferred) Whether counts are on their way, or there."""
        return self._touched.late is not None and self._touched.late.asked

    @property
    def counted(self) -> bool:
        """(deferred) Whether the counts are there."""
        return self._touched.late is not None and self._touched.late.arrived

    def forget_counts(self) -> None:
        """(deferred) The next drain needs new ones."""
        if self._touched.late is not None:
            self._touched.late.drop()

    def look(self) -> KernelRows | None:
        """Take the rows to drain: all that changed since they were last sent, or as many as the counts say, once.

        ``sent`` says what became of them.

        Returns:
            None when the counts are not there.

        Raises:
            UnsupportedError: as ``check_ids``.
        """
        late = self._touched.late
        if late is None:
            self.check_ids()
            return KernelRows(self._touched.take())
        taken = late.take()
        if taken is None:
            return None
        counts, outside = taken
        self._refuse_ids(outside)
        found = late.first(self._touched.bits, counts)
        self._touched.take_set(found.rows)
        return found

    def touched(self) -> torch.Tensor:
        """Linear rows that changed since they were last sent, ascending. On a GPU the host waits."""
        return self._touched.find()

    @property
    def swept(self) -> bool:
        """Whether every row has been sent at least once, as far as is known without a scan."""
        return not self._sweep.left

    @property
    def swept_rows(self) -> int:
        """How many rows the sweep has behind it, as far as is known without a scan."""
        return self.total - self._sweep.left

    def sent(self, rows: torch.Tensor, count: int) -> None:
        """Of the rows that ``look`` has returned, the first ``count`` were sent: again only if they change again."""
        self._touched.put_back(count)
        self._sweep.drained(rows[:count])

    def forget(self) -> None:
        """What has changed so far is sent as it is, or not at all."""
        self._touched.clear_all()
        self._frozen.clear_all()

    def take_unswept(self, limit: int) -> KernelRows:
        """Up to ``limit`` rows to be swept, none when ``swept``. Where drains are deferred, of one shard.

        Their marks are taken too. On a GPU they stay: to clear them would drop the counts, and a sweep goes on at every
        step.
        """
        found = self._sweep.window(limit)
        if not self.deferred:
            self._touched.take_set(found.rows[self._touched.bits[found.rows]])
        return found

    def sweep_sent(self, rows: torch.Tensor, count: int) -> None:
        """Of the rows that ``take_unswept`` has returned, the first ``count`` were sent."""
        self._sweep.sent(rows, count)
        if not self.deferred:
            self._touched.put_back_from(int(rows[count]) if count < rows.numel() else self.total)

    # A cut.

    def freeze(self) -> None:
        """What is touched now belongs to a cut; what is touched from here on does not. The last cut must be over."""
        touched, frozen = self._masks
        touched.put_back()
        self._masks = frozen, touched
        self.forget_counts()

    def thaw(self) -> None:
        """The cut is over: frozen rows that were not sent are touched rows again. To be called again if it raises."""
        self._touched.merge(self._frozen)

    def frozen(self) -> torch.Tensor:
        """Linear rows of the cut that have not been sent, ascending."""
        return self._frozen.find()

    def frozen_among(self, rows: torch.Tensor | None) -> torch.Tensor:
        """Those of the linear ``rows`` (None: of all rows) that are frozen, ascending. On a GPU the host waits."""
        if rows is None:
            return self.frozen()
        frozen = self._frozen.bits
        rows = rows.to(frozen.device)
        return _ascending(rows[frozen[rows] & (rows < self.total)])

    def frozen_in(self, lookup: Lookup) -> torch.Tensor:
        """Linear rows of a lookup that are frozen, ascending. On a GPU the host waits, to learn how many."""
        if lookup.indices.is_cuda:
            return self.frozen_among(self._kernel.linear_rows(lookup).clamp_(max=self.total))
        hits = [torch.empty(0, dtype=torch.int64, device="cpu")]
        for (first, last), (begin, end) in zip(self._feature_rows, pairwise(self._bounds(lookup)), strict=True):
            ids = lookup.indices[begin:end].long()
            hits.append(ids[self._frozen.bits[first:last][ids]] + first)
        return _ascending(torch.cat(hits))

    def frozen_sent(self, rows: torch.Tensor) -> None:
        """These frozen rows were gathered, with the values of the cut."""
        self._frozen.clear(rows)


def _ascending(rows: torch.Tensor) -> torch.Tensor:
    """Each row once."""
    unique: torch.Tensor = torch.unique(rows)
    return unique
