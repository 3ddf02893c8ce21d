"""The cells that rectangles cover together, however many there are."""

from __future__ import annotations

import sys
from types import FrameType

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from torchrec_stream_ckpt.restore.plan import Rectangle, covered_cells

RECTANGLES = st.lists(
    st.tuples(st.integers(0, 12), st.integers(0, 9), st.integers(0, 12), st.integers(0, 9)), max_size=9
)


@given(RECTANGLES)
def test_each_cell_of_the_union_is_counted_once(rectangles: list[Rectangle]) -> None:
    cells = np.zeros((24, 24), np.bool_)
    for row0, rows, col0, cols in rectangles:
        cells[row0 : row0 + rows, col0 : col0 + cols] = True
    assert covered_cells(rectangles) == cells.sum()


def test_the_work_for_many_shards_hardly_grows_faster_than_their_number() -> None:
    def calls(count: int) -> int:
        made = 0

        def note(_: FrameType, event: str, __: object) -> None:
            nonlocal made
            made += event == "call"

        sys.setprofile(note)
        try:
            # All edges are different: the worst case.
            covered_cells([(each, 2 * count + each, each // 2, max(1, count // 2 - 1)) for each in range(count)])
        finally:
            sys.setprofile(None)
        return made

    # Four times the shards: about five times the calls, where the square of them would be 16 times.
    assert calls(250) > 250
    assert calls(1000) < 8 * calls(250)
