"""Compare what a HEAD holds of the rows that its marker proves with that proof."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.format.proof import BLOCK_ROWS
from torchrec_stream_ckpt.format.rows import RowsView
from torchrec_stream_ckpt.proofs.rowsums import Slice
from torchrec_stream_ckpt.proofs.window import WindowCheck, cells_of, window_of, window_sums
from torchrec_stream_ckpt.route.path import Path
from torchrec_stream_ckpt.store.head import Head


def check_head(lineage: Lineage, head: Head) -> WindowCheck:
    """Read the rows that a HEAD's marker proves out of its arrays, and compare them.

    Args:
        lineage: The control partition; it has the marker.
        head: Open: nobody writes to it meanwhile.

    Raises:
        HeadDamagedError: a file of it is gone or too short, or its checksums were altered.
    """
    state = head.state
    window = window_of(state.notes)
    if window is None:
        return WindowCheck(state.marker, None)
    schema = lineage.claims[state.marker.generation].schema
    slices: dict[int, set[Slice]] = {}
    for index, col0, cols in state.columns:
        slices.setdefault(index, set()).add((col0, cols))
    sums, num_bytes = window_sums(schema, Path.at(lineage, state.marker), state.notes, slices, window), 0
    for each in state.slices:
        table = schema.tables[each.table]
        if table.id is None:
            continue
        blocks = window.blocks(table.id, 0, table.rows)
        ids = (blocks[:, None] * BLOCK_ROWS + np.arange(BLOCK_ROWS)).ravel()
        ids = ids[ids < table.rows]
        weights, *states = (array[ids] for array in head.arrays(each, schema).arrays)
        sums.rows(each.table, each.col0, each.cols, RowsView(ids, weights, tuple(states)), 0)
        num_bytes += weights.nbytes + sum(array.nbytes for array in states)
    compared = replace(sums.compare(), total=cells_of(schema, window))
    return WindowCheck(state.marker, window, compared, num_bytes)
