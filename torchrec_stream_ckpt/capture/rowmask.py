"""A set of rows as a bool mask, with a coarse mask over it: a scan looks only where something was set.

The plain scan of a mask costs 0.1 to 1 ns a row, whatever is set in it (docs/performance.md). On a CPU a second mask
therefore holds a flag for each block of rows. Setting rows sets the flags of their blocks, so a scan reads the flags
and the blocks that they name: it grows with what was set, and with a 64th of the table. On a GPU a scan is one
kernel at memory bandwidth, and there is no second mask; there the mask owns counts of its rows that are on their way
to the host (``counts``), and drops them whenever it clears a row.

A flag may stand over a block in which nothing is set; never the other way round.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from torchrec_stream_ckpt.capture.counts import BLOCK, LateCounts

Ids = npt.NDArray[np.integer[Any]]

_SHIFT = 6
assert 1 << _SHIFT == BLOCK  # a cache line of the mask
_SMALL = 100_000
_FEW = 64
"""A lookup flags its blocks one by one where a scan of the shard would cost more: with more rows than ``_SMALL`` and 64
for each id. Else it flags the whole shard."""
_MANY = 16
"""With a flag on more than a 16th of all blocks the whole mask is scanned: it costs a 16th a block, read in order."""

_DENSE = 32
"""With more than one of 32 rows set it costs less to write the whole mask than their bytes one by one."""


class RowMask:
    """A bool mask over ``total`` linear rows and one more, where ids that lie in no table are marked (on a GPU).

    Args:
        total: Rows.
        device: Of the tables.
        late: Counts rows for a host that does not wait; None: the host scans.
    """

    def __init__(self, total: int, device: torch.device, late: LateCounts | None = None) -> None:
        self.total = total
        self.late = late
        blocks = total // BLOCK + 1
        self.padded = torch.zeros(blocks * BLOCK, dtype=torch.bool, device=device)
        """The mask and what fills its last block, which is never set."""
        self.bits = self.padded[: total + 1]
        """One byte a row; to be read. Code that sets one here says so to ``flag``."""
        self._bits = self.bits.numpy() if device.type == "cpu" else np.empty(0, np.bool_)
        self._flags = np.zeros(blocks, np.bool_) if device.type == "cpu" and late is None else None
        self._found: torch.Tensor | None = None
        """What the last scan returned, unless something was set since."""
        self._hand: torch.Tensor | None = None
        """Rows that were taken and may not have been sent."""
        self._torn = False
        """Flags are being taken: some may be cleared whose rows are not in hand yet."""
        self.left = 0
        """Rows that were set when they were last looked for, and were not sent."""

    def fill(self, begin: int, end: int, ids: Ids) -> None:
        """(CPU) Set the rows ``begin`` + ``ids`` of the shard [``begin``, ``end``).

        By numpy: of 4096 ids ``index_fill_`` takes twice as long, most of it to be called.
        """
        self._bits[begin:end][ids] = True
        if end - begin <= _SMALL + _FEW * len(ids) or self._flags is None:
            self.flag(begin, end)
        else:
            self._flag_rows(ids + np.int64(begin))

    def fill_rows(self, rows: torch.Tensor) -> None:
        """Set linear rows, the one after the last included."""
        self.bits.index_fill_(0, rows, True)
        if self._flags is not None:
            self._flag_rows(rows.numpy())
        self._found = None

    def fill_all(self) -> None:
        self.fill_range(0, self.total)

    def fill_range(self, begin: int, end: int) -> None:
        """Set the rows [``begin``, ``end``)."""
        self.bits[begin:end] = True
        self.flag(begin, end)

    def flag(self, begin: int, end: int) -> None:
        """Any of these rows may have been set."""
        self._found = None
        if self._flags is not None:
            self._flags[begin // BLOCK : (end - 1) // BLOCK + 1] = True

    def _flag_rows(self, rows: Ids) -> None:
        assert self._flags is not None
        self._found = None
        self._flags[rows >> _SHIFT] = True

    def merge(self, other: RowMask) -> None:
        """Set what is set in ``other``, and clear it there; on a CPU other threads may set rows here meanwhile."""
        if self._flags is None:
            self.bits.logical_or_(other.bits)
            self._found = None
        else:
            self.fill_rows(other.find())
        self.left += other.left
        other.clear_all()

    def take(self) -> torch.Tensor:
        """Find the rows that are set, and clear them; on a CPU other threads may set rows meanwhile.

        They are in hand until ``put_back`` says which of them were sent. Without that word, because something was
        raised, all of them are set again by the next call.
        """
        if self._flags is None:
            return self.take_set(self.find())
        self.put_back()
        self._torn = True
        # Code that sets a row sets its flag after it. So flags go first: a row that the scan misses keeps its flag.
        blocks = np.flatnonzero(self._flags)
        self._flags[blocks] = False
        self._hand = rows = self._scan(blocks)
        self._torn = False
        self._clear_bits(rows)
        return rows

    def take_set(self, rows: torch.Tensor) -> torch.Tensor:
        """The same for these rows, which are set."""
        self.put_back()
        self._hand = rows
        self._clear_bits(rows)
        return rows

    def _clear_bits(self, rows: torch.Tensor) -> None:
        self.bits.index_fill_(0, rows, False)
        self._cleared()

    def put_back_from(self, row: int) -> None:
        """Of the rows in hand, those from ``row`` on are set again."""
        self.put_back(int((self._hand < row).sum()) if self._hand is not None else 0)

    def put_back(self, sent: int = 0) -> None:
        """Of the rows in hand, all but the first ``sent`` are set again."""
        if self._torn and self._flags is not None:
            self._flags.fill(True)
        self._torn = False
        if self._hand is not None and sent < self._hand.numel():
            self.fill_rows(self._hand[sent:])
        self._hand = None

    def clear(self, rows: torch.Tensor) -> None:
        """Clear linear rows. What the last ``find`` returned, handed back as it is, empties the mask at once."""
        if rows is self._found and rows.numel() * _DENSE > self.total:
            self.bits[: self.total] = False
        else:
            self.bits.index_fill_(0, rows, False)
        if rows is self._found and self._flags is not None:
            self._flags.fill(False)
        self._cleared()

    def clear_all(self) -> None:
        self._hand, self._torn, self.left = None, False, 0
        self.bits.zero_()
        if self._flags is not None:
            self._flags.fill(False)
        self._cleared()

    def _cleared(self) -> None:
        """Fewer rows are set than were found or counted."""
        self._found = None
        if self.late is not None:
            self.late.drop()

    def find(self) -> torch.Tensor:
        """The linear rows that are set, int64, ascending. On a GPU the host waits, to learn how many."""
        self.put_back()
        if self._flags is not None:
            found = self._scan(np.flatnonzero(self._flags))
        else:
            found = self.bits[: self.total].nonzero().flatten()
        self._found = found
        if self._flags is not None and not found.numel():
            self._flags.fill(False)
        return found

    def _scan(self, blocks: npt.NDArray[np.intp]) -> torch.Tensor:
        """(CPU) What is set in some blocks. numpy finds it four to eight times as fast as torch's ``nonzero``."""
        if blocks.size * _MANY > self.padded.numel() // BLOCK:
            return torch.from_numpy(np.flatnonzero(self._bits[: self.total]))
        hits = np.flatnonzero(self.padded.numpy().reshape(-1, BLOCK)[blocks])
        return torch.from_numpy((blocks[hits >> _SHIFT] << _SHIFT) + (hits & (BLOCK - 1)))
