"""A set of rows as a bool mask, with a coarse mask over it: a scan reads only blocks in which a row was set.

The plain scan of a mask costs 0.1 to 1 ns per row, however many rows are set (docs/performance.md). On a CPU, a second
mask therefore holds a flag for each block of rows. Setting rows sets the flags of their blocks. A scan reads the flags
and the blocks with a flag, so its cost grows with the number of set rows and with a 64th of the table. On a GPU a scan
is one kernel at memory bandwidth, and there is no second mask. There the mask owns counts of its rows that are on their
way to the host (``counts``), and drops them whenever it clears a row.

A flag may be set for a block without set rows, but never the other way round.
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
"""A lookup flags its blocks one by one if a scan of the shard would cost more: with more than ``_SMALL`` rows plus 64
per id. Otherwise it flags the whole shard."""
_MANY = 16
"""If more than a 16th of all blocks have a flag, the whole mask is scanned: read in order, a block costs a 16th."""

_DENSE = 32
"""If more than one of 32 rows is set, writing the whole mask costs less than writing their bytes one by one."""
_WAKES = 1 << 20
"""Rows from which on torch empties a mask. It wakes its threads for 32,768 bytes already, which costs more than the
write of a small mask: up to 4 ms of a restore."""


class RowMask:
    """A bool mask over ``total`` linear rows, plus one entry that marks ids outside all tables (on a GPU).

    Args:
        total: Number of rows.
        device: Device of the tables.
        late: Counts rows for a host that does not wait. If None, the host scans.
    """

    def __init__(self, total: int, device: torch.device, late: LateCounts | None = None) -> None:
        self.total = total
        self.late = late
        blocks = total // BLOCK + 1
        self.padded = torch.zeros(blocks * BLOCK, dtype=torch.bool, device=device)
        """The mask, and the padding of its last block, which is never set."""
        self.bits = self.padded[: total + 1]
        """One byte per row, for reading. Code that sets a byte here must call ``flag``."""
        self._bits = self.bits.numpy() if device.type == "cpu" else np.empty(0, np.bool_)
        self._flags = np.zeros(blocks, np.bool_) if device.type == "cpu" and late is None else None
        self._found: torch.Tensor | None = None
        """Result of the last scan. None if a row was set since."""
        self._hand: torch.Tensor | None = None
        """Rows that were taken and may not have been sent."""
        self._torn = False
        """True while flags are taken: some may be cleared whose rows are not in hand yet."""
        self.left = 0
        """Rows that were set at the last look and were not sent."""

    def fill(self, begin: int, end: int, ids: Ids) -> None:
        """(CPU) Set the rows ``begin`` + ``ids`` of the shard [``begin``, ``end``).

        This uses numpy: for 4096 ids ``index_fill_`` takes twice as long, mostly for the call.
        """
        self._bits[begin:end][ids] = True
        if end - begin <= _SMALL + _FEW * len(ids) or self._flags is None:
            self.flag(begin, end)
        else:
            self._flag_rows(ids + np.int64(begin))

    def fill_rows(self, rows: torch.Tensor) -> None:
        """Set linear rows, including the entry after the last one."""
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
        """Flag the blocks of rows of which any may have been set."""
        self._found = None
        if self._flags is not None:
            self._flags[begin // BLOCK : (end - 1) // BLOCK + 1] = True

    def _flag_rows(self, rows: Ids) -> None:
        assert self._flags is not None
        self._found = None
        self._flags[rows >> _SHIFT] = True

    def merge(self, other: RowMask) -> None:
        """Set the rows that are set in ``other``, and clear them there.

        On a CPU other threads may set rows here meanwhile.
        """
        if self._flags is None:
            self.bits.logical_or_(other.bits)
            self._found = None
        else:
            self.fill_rows(other.find())
        self.left += other.left
        other.clear_all()

    def take(self) -> torch.Tensor:
        """Find the rows that are set, and clear them. On a CPU other threads may set rows meanwhile.

        They are in hand until ``put_back`` reports how many of them were sent. If that call is missing because of an
        exception, the next call sets all of them again.
        """
        if self._flags is None:
            return self.take_set(self.find())
        self.put_back()
        self._torn = True
        # Code that sets a row sets its flag after it. So flags are cleared first: a row that the scan misses keeps its
        # flag.
        blocks = np.flatnonzero(self._flags)
        self._flags[blocks] = False
        self._hand = rows = self._scan(blocks)
        self._torn = False
        self._clear_bits(rows)
        return rows

    def take_set(self, rows: torch.Tensor) -> torch.Tensor:
        """Take these rows, which are set."""
        self.put_back()
        self._hand = rows
        self._clear_bits(rows)
        return rows

    def _clear_bits(self, rows: torch.Tensor) -> None:
        self.bits.index_fill_(0, rows, False)
        self._cleared()

    def put_back_from(self, row: int) -> None:
        """Set those rows in hand again that are at or after ``row``."""
        self.put_back(int((self._hand < row).sum()) if self._hand is not None else 0)

    def put_back(self, sent: int = 0) -> None:
        """Set all rows in hand again except the first ``sent``."""
        if self._torn and self._flags is not None:
            self._flags.fill(True)
        self._torn = False
        if self._hand is not None and sent < self._hand.numel():
            self.fill_rows(self._hand[sent:])
        self._hand = None

    def clear(self, rows: torch.Tensor) -> None:
        """Clear linear rows. If ``rows`` is the tensor that the last ``find`` returned, the mask is emptied at once."""
        if rows is self._found and rows.numel() * _DENSE > self.total:
            self.bits[: self.total] = False
        else:
            self.bits.index_fill_(0, rows, False)
        if rows is self._found and self._flags is not None:
            self._flags.fill(False)
        self._cleared()

    def clear_all(self) -> None:
        self._hand, self._torn, self.left = None, False, 0
        if 0 < self._bits.size < _WAKES:
            self._bits.fill(False)
        else:
            self.bits.zero_()
        if self._flags is not None:
            self._flags.fill(False)
        self._cleared()

    def _cleared(self) -> None:
        """Drop the found rows and counts: fewer rows are set now."""
        self._found = None
        if self.late is not None:
            self.late.drop()

    def find(self) -> torch.Tensor:
        """Return the linear rows that are set, int64, ascending. On a GPU the host waits for their number."""
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
        """(CPU) Return the set rows of some blocks.

        numpy finds them four to eight times as fast as torch's ``nonzero``.
        """
        if blocks.size * _MANY > self.padded.numel() // BLOCK:
            return torch.from_numpy(np.flatnonzero(self._bits[: self.total]))
        hits = np.flatnonzero(self.padded.numpy().reshape(-1, BLOCK)[blocks])
        return torch.from_numpy((blocks[hits >> _SHIFT] << _SHIFT) + (hits & (BLOCK - 1)))
