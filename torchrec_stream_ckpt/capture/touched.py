"""Which rows have to be sent: a bit for each row that changed, another for each that was never sent.

All are bool masks over the linear row space of one kernel (its shards one behind the other) and live on
the tables' device: three bytes a row. Marking is a scatter; nothing here grows. A drain does not read the whole mask
where little of it is set (``rowmask``).

There are two masks of touched rows. Updates mark in one of them. A cut swaps them: the other one then holds the
*frozen* rows, those of the cut that have not been sent yet, and becomes empty as they are.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from torchrec_stream_ckpt.adapter import FusedKernel, Lookup
from torchrec_stream_ckpt.capture.rowmask import RowMask
from torchrec_stream_ckpt.errors import UnsupportedError


class TouchedRows:
    """The masks of one kernel."""

    def __init__(self, kernel: FusedKernel) -> None:
        self._kernel = kernel
        self.bases = kernel.bases
        self.total = self.bases[-1]
        self._touched = RowMask(self.total, kernel.device)
        self._frozen = RowMask(self.total, kernel.device)
        self._unswept = torch.zeros(self.total, dtype=torch.bool, device=kernel.device)
        self._cursor = self.total
        self._feature_rows = [(self.bases[shard], self.bases[shard + 1]) for shard in kernel.feature_shards]
        """For each feature, the linear rows of its shard."""

    def mark(self, lookup: Lookup) -> None:
        """Mark the rows of a lookup whose update has been applied. Never makes the host wait for a GPU."""
        if lookup.indices.is_cuda:
            rows = self._kernel.linear_rows(lookup).clamp_(max=self.total)
            self._touched.fill_rows(rows)
            return
        ids = lookup.indices.numpy()
        for (first, last), (begin, end) in zip(self._feature_rows, pairwise(self._bounds(lookup)), strict=True):
            if end > begin:
                self._touched.fill(first, last, ids[begin:end])

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

    def sweep_again(self, shards: list[int]) -> None:
        """Every row of these shards is to be sent once, whether a step touches it or not."""
        for shard in shards:
            self._unswept[self.bases[shard] : self.bases[shard + 1]] = True
        self._cursor = 0 if shards else self._cursor

    def check_ids(self) -> None:
        """(GPU) Say it when an update has got an id that lies in no table; a CPU kernel raises by itself.

        FBGEMM's bounds check lets -1 pass, and its CUDA backward then writes the row in front of the table
        (``linearize_index_kernel`` adds the table's first row without a look at the sign): no mark would be true.
        """
        if self._touched.bits[self.total]:
            raise UnsupportedError(
                "an id of -1 was trained: on a GPU the fused update then writes outside of its table",
                hint="drop such ids before the lookup",
                tables=",".join(shard.table.name for shard in self._kernel.shards),
            )

    def forget_ids(self) -> None:
        """What was trained so far is sent as it is, whatever changed it."""
        self._touched.bits[self.total] = False
        self._frozen.bits[self.total] = False

    def touched(self) -> torch.Tensor:
        """Linear rows that changed since they were last sent, ascending."""
        return self._touched.find()

    def unswept(self, limit: int) -> torch.Tensor:
        """Up to ``limit`` rows that were never sent, ascending; skips over what has been."""
        found = torch.empty(0, dtype=torch.int64, device=self._unswept.device)
        while self._cursor < self.total and not found.numel():
            window = self._unswept[self._cursor : self._cursor + limit]
            found = window.nonzero().flatten() + self._cursor
            if not found.numel():
                self._cursor += window.numel()
        return found

    @property
    def swept(self) -> bool:
        """Whether every row has been sent at least once, as far as is known without a scan."""
        return self._cursor >= self.total

    @property
    def swept_rows(self) -> int:
        """How many rows the sweep has behind it, as far as is known without a scan."""
        return min(self._cursor, self.total)

    def sent(self, rows: torch.Tensor) -> None:
        """These rows were gathered: they have to be sent again only if they change again."""
        self._touched.clear(rows)
        if not self.swept:
            self._unswept.index_fill_(0, rows, False)

    # A cut.

    def freeze(self) -> None:
        """What is touched now belongs to a cut; what is touched from here on does not. The last cut must be over."""
        self._touched, self._frozen = self._frozen, self._touched

    def thaw(self) -> None:
        """The cut is over: frozen rows that were not sent are touched rows again."""
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
        hits = [torch.empty(0, dtype=torch.int64)]
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
