"""How many of a marker's rows were trained, as far as their optimizer state tells: for a table that is to shrink."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np

from torchrec_stream_ckpt.evolve.resolve import TrainedRows
from torchrec_stream_ckpt.evolve.row_maps import RowMap
from torchrec_stream_ckpt.interchange.rows import MarkerRows, TableReader


def trained_rows(open_rows: Callable[[], AbstractContextManager[MarkerRows]]) -> TrainedRows:
    """Counts, among rows of a table that are not kept, those with optimizer state other than zero.

    Zero says nothing: a row may have weights that another job has trained. So there is no count where all of it is
    zero, or where the optimizer keeps none.

    Args:
        open_rows: Opens the rows of the marker; each count opens them anew, and reads one table.
    """

    def count(table: int, kept: RowMap) -> int | None:
        with open_rows() as rows:
            reader, found = TableReader(rows, table), 0
            for row0, height in reader.windows() if reader.spec.states else ():
                gone = kept.new_of(np.arange(row0, row0 + height)) < 0
                if gone.any():
                    window = reader.read(row0, height)
                    states = [(state != 0).reshape(height, -1).any(1) for state in window.states]
                    found += int((np.any(states, 0) & gone).sum())
        return found or None

    return count
