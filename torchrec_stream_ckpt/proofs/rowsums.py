"""Numbers of rows from which the digests of their blocks are made, for a reader that does not hold tables."""

from __future__ import annotations

import numpy as np

from torchrec_stream_ckpt.format.proof import Ints, column_keys, digest_rows, per_row_keys, words_of
from torchrec_stream_ckpt.format.rows import Array

_CHUNK_WORDS = 1 << 16
"""Words added up at a time, so that they stay in a cache."""
_NO_KEY = np.ones(1, np.int64)

Slice = tuple[int, int]
"""(first column, columns)."""


def plain_sums(values: Array, col0: int, cols: int) -> Ints:
    """Return one number per row, without the key of the row.

    Args:
        values: Shape (rows, cols), or (rows,) for a state with one value per row.
        col0: First column of the slice.
        cols: Number of columns of it.
    """
    keys = (per_row_keys if values.ndim == 1 else column_keys)(col0, cols, 2 if values.itemsize == 8 else 1)
    found, step = np.empty(len(values), np.int64), max(1, _CHUNK_WORDS // len(keys))
    for begin in range(0, len(values), step):
        part = values[begin : begin + step]
        found[begin : begin + step] = digest_rows(words_of(part[:, None] if part.ndim == 1 else part), keys, _NO_KEY)
    return found
