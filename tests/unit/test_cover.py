"""The cells that rectangles cover together, however many there are."""

from __future__ import annotations

import sys
from types import FrameType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sampled import sampled
from torchrec_stream_ckpt.capture import rowmask
from torchrec_stream_ckpt.capture.rowmask import BLOCK, RowMask
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


# A mask with flags over its blocks is the same set of rows as a mask that is read from end to end.


SHARDS = (0, 700, 730, 9_000)
"""First row of each shard, and the number of rows: ends lie inside of blocks."""
TOTAL = SHARDS[-1]
CPU = torch.device("cpu")

ROWS = st.lists(st.integers(0, TOTAL - 1), max_size=30)
EVENTS = st.one_of(
    st.tuples(st.just("fill"), st.integers(0, 2), st.lists(st.integers(0, 10**6), max_size=60)),
    st.tuples(st.just("fill_rows"), ROWS),
    st.tuples(st.just("fill_all")),
    st.tuples(st.just("clear"), ROWS),
    st.tuples(st.just("send"), st.booleans(), st.integers(0, 100)),
    st.tuples(st.just("merge"), ROWS),
)


class Twin:
    """A mask, and the set that it stands for."""

    def __init__(self) -> None:
        self.mask, self.rows = RowMask(TOTAL, CPU), set[int]()

    def fill(self, shard: int, ids: list[int]) -> None:
        begin, end = SHARDS[shard], SHARDS[shard + 1]
        local = [row % (end - begin) for row in ids]
        self.mask.fill(begin, end, np.array(local, np.int64))
        self.rows |= {begin + row for row in local}

    def fill_rows(self, rows: list[int]) -> None:
        self.mask.fill_rows(torch.tensor(rows, dtype=torch.int64))
        self.rows |= set(rows)

    def fill_all(self) -> None:
        self.mask.fill_all()
        self.rows = set(range(TOTAL))

    def clear(self, rows: list[int]) -> None:
        self.mask.clear(torch.tensor(rows, dtype=torch.int64))
        self.rows -= set(rows)

    def send(self, everything: bool, count: int) -> None:
        """As a drain does: all that is found, or the first of it."""
        found = self.mask.find()
        sent = found if everything else found[:count]
        self.mask.clear(sent)
        self.rows -= set(sent.tolist())

    def merge(self, rows: list[int]) -> None:
        other = RowMask(TOTAL, CPU)
        other.fill_rows(torch.tensor(rows, dtype=torch.int64))
        self.mask.merge(other)
        self.rows |= set(rows)
        assert other.find().numel() == 0


@settings(max_examples=sampled(300, 50))
@given(st.lists(EVENTS, max_size=25), st.sampled_from([0, TOTAL]), st.sampled_from([0, 2 * TOTAL]))
def test_what_is_found_is_what_was_set_and_not_cleared(
    events: list[tuple[object, ...]], small: int, wakes: int
) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(rowmask, "_SMALL", small)
        patched.setattr(rowmask, "_WAKES", wakes)
        _replay(events)


def _replay(events: list[tuple[object, ...]]) -> None:
    twin = Twin()
    for name, *arguments in events:
        getattr(twin, str(name))(*arguments)
        assert twin.mask.find().tolist() == sorted(twin.rows)


@pytest.mark.parametrize("total", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1])
def test_masks_of_all_sizes_find_their_first_and_last_row(total: int) -> None:
    mask = RowMask(total, CPU)
    ends = sorted({0, total - 1}) if total else []
    mask.fill_rows(torch.tensor(ends, dtype=torch.int64))
    assert mask.find().tolist() == ends
    mask.fill_all()
    assert mask.find().tolist() == list(range(total))


def test_a_scan_reads_the_blocks_that_were_touched_and_no_others() -> None:
    mask = RowMask(10_000 * BLOCK, CPU)
    mask.fill(0, 10_000 * BLOCK, np.array([5, 40 * BLOCK]))
    mask.bits[70 * BLOCK] = True  # nobody was told: a scan that found it would have read the whole mask
    found = mask.find()
    assert found.tolist() == [5, 40 * BLOCK]
    mask.clear(found)
    mask.bits[5] = True
    assert mask.find().tolist() == []


def test_rows_set_between_a_scan_and_its_clearing_stay() -> None:
    mask = RowMask(TOTAL, CPU)
    mask.fill_rows(torch.tensor([1, 2]))
    found = mask.find()
    mask.fill_rows(torch.tensor([3 * BLOCK]))
    mask.clear(found)
    assert mask.find().tolist() == [3 * BLOCK]
