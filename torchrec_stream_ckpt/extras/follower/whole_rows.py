"""Whole rows of a table, put together from the columns that arrive. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from torchrec_stream_ckpt.extras.follower.updates import Changed
from torchrec_stream_ckpt.format.rows import NUMPY_DTYPES, Array, distinct
from torchrec_stream_ckpt.inner import WeightProof
from torchrec_stream_ckpt.util.types import TableSpec

Ids = npt.NDArray[np.int64]
Write = Callable[[Ids, Array], None]
"""Writes whole rows."""
_SOME = 1 << 14
"""Row records that are collected at least before they are put together."""


class WholeRows:
    """Hands over whole rows of one table, for places that cannot take a part of a row.

    If the trainer cuts the table by columns, the parts of a row arrive separately, and are held until all of them are
    there.

    Args:
        table: The table.
        write: Takes whole rows.
    """

    def __init__(self, table: TableSpec, write: Write) -> None:
        self._table = table
        self._hand_over = write
        self._sums = np.zeros(table.rows, np.int64)
        """One number for the float value of each row, from which the digests of a proof are made."""
        self._ids = np.empty(0, np.int64)
        """Rows of which columns are missing, ascending."""
        self._weights: Array
        self._known: npt.NDArray[np.bool_]
        self._parts: list[tuple[Ids, int, Array]] = []
        """Columns that arrived since: rows, first column, weights."""
        self._records = 0
        self.begin()

    def begin(self) -> None:
        """Forget parts of rows of an update that broke off."""
        shape = 0, self._table.dim
        self._ids, self._parts, self._records = np.empty(0, np.int64), [], 0
        self._weights, self._known = np.empty(shape, NUMPY_DTYPES[self._table.dtype]), np.empty(shape, np.bool_)

    def put(self, changed: Changed) -> None:
        """Write whole rows; hold parts of rows until :meth:`end`, or until the rest of them has arrived."""
        if changed.weights.shape[1] == self._table.dim and not self._parts and not len(self._ids):
            self._write(changed.ids, changed.weights)
            return
        self._parts.append((changed.ids.copy(), changed.col0, changed.weights.copy()))
        self._records += len(changed.ids)
        if self._records >= max(_SOME, len(self._ids)):
            self._put_together()

    def end(self) -> Ids:
        """Write the rows that are whole. Returns those of which only a part has arrived, and forgets that part."""
        self._put_together()
        lacking = self._ids
        self.begin()
        return lacking

    def sums_of(self, ids: Ids) -> Ids:
        """Return ``WeightProof.row_sums`` of the rows that were handed over last."""
        return self._sums[ids]

    def _put_together(self) -> None:
        if not self._parts:
            return
        ids = distinct(np.concatenate([self._ids, *(part for part, _, _ in self._parts)]))
        weights = np.empty((len(ids), self._table.dim), self._weights.dtype)
        known = np.zeros(weights.shape, np.bool_)
        places = np.searchsorted(ids, self._ids)
        weights[places], known[places] = self._weights, self._known
        for part, col0, values in self._parts:
            places, columns = np.searchsorted(ids, part), slice(col0, col0 + values.shape[1])
            weights[places, columns], known[places, columns] = values, True
        whole = known.all(1)
        self._write(ids[whole], weights[whole])
        self._ids, self._weights, self._known = ids[~whole], weights[~whole], known[~whole]
        self._parts, self._records = [], 0

    def _write(self, ids: Ids, weights: Array) -> None:
        if len(ids):
            self._sums[ids] = WeightProof.row_sums(weights)
            self._hand_over(ids, weights)
