"""Digests of rows, to compare written rows with the intended ones."""

from __future__ import annotations

import numpy as np

from torchrec_stream_ckpt.format.proof import column_keys, digest_rows, per_row_keys, row_keys, words_of
from torchrec_stream_ckpt.format.rows import RowsView


class RowDigests:
    """Sum of digests of rows, independent of their order."""

    def __init__(self) -> None:
        self.rows = 0
        self.digest = np.zeros(1, np.int64)

    def add(self, table: int, col0: int, cols: int, view: RowsView) -> None:
        """Add at least one row of a table. Each row must be added once with these columns."""
        self.rows += len(view.ids)
        for section, values in enumerate((view.weights, *view.states)):
            words = words_of(values.reshape(len(view.ids), -1))
            each = max(1, values.dtype.itemsize // 4)
            columns = per_row_keys(col0, cols, each) if values.ndim == 1 else column_keys(col0, cols, each)
            self.digest += digest_rows(words, columns, row_keys(table, section, view.ids)).sum()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RowDigests) and (self.rows, int(self.digest[0])) == (other.rows, int(other.digest[0]))

    __hash__ = None  # type: ignore[assignment]
