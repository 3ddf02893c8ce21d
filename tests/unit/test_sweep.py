"""A sweep sends each row once, looks at no row twice, and sends no frames of single rows."""

from __future__ import annotations

import random

import pytest
import torch

from tests.inside import masks_of, sender_of
from tests.parts import Drain
from tests.unit.captured_job import ROWS, Job
from torchrec_stream_ckpt.capture import touched as sweep_module
from torchrec_stream_ckpt.capture.sender import KernelRows
from torchrec_stream_ckpt.capture.touched import MaskSweep


@pytest.mark.parametrize("limit", [1, 3, 100])
@pytest.mark.parametrize("scan_rows", [1, 4, 2**16])
def test_a_sweep_by_a_mask_goes_on_after_what_was_sent(
    limit: int, scan_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some of a window finds no space; a drain sends rows before the sweep comes to them."""
    monkeypatch.setattr(sweep_module, "_SCAN_ROWS", scan_rows)
    rng, sweep = random.Random(limit), MaskSweep((0, 5, 5, 12, 30))
    assert sweep.left == 0
    assert sweep.window(limit).rows.numel() == 0
    sweep.again([0, 1, 3])
    wanted, seen = {*range(5), *range(12, 30)}, []
    while sweep.left:
        rows = sweep.window(limit).rows
        count = max(1, rows.numel() // 2) if rows.numel() else 0
        before = sweep.left
        sweep.sent(rows, count)
        seen += rows[:count].tolist()
        assert rows.numel() <= limit
        assert sweep.left == 30 - seen[-1] - 1 or not count
        assert not count or sweep.left < before
        drained = rng.sample(sorted(wanted - {*seen}), min(2, len(wanted - {*seen})))
        sweep.drained(torch.tensor(drained, dtype=torch.int64))
        wanted -= {*drained}
    assert seen == sorted(wanted)


class Counting(MaskSweep):
    """Counts how often it is looked at."""

    windows = 0

    def window(self, limit: int) -> KernelRows:
        self.windows += 1
        return super().window(limit)


def test_what_is_left_of_a_budget_is_not_sent_row_by_row() -> None:
    """It would be a frame a row, and a look at the mask for each row that was sent before."""
    job = Job()
    mask = masks_of(job.capture)[0]
    mask.sweep = sweep = Counting(mask.bases)
    sweep.again([0, 1])
    job.taken.clear()
    row_bytes = sender_of(job.capture).row_bytes(0)
    for budget, rows in ((5 * row_bytes + row_bytes - 1, 5), (1, 1), (2 * row_bytes, 2)):
        before, looked = sweep.left, sweep.windows
        assert job.capture.sweep(Drain(1, 1), budget)
        assert (before - sweep.left, sweep.windows - looked) == (rows, 1)
        job.log_takes(9)
    assert sweep.left == sum(ROWS) - 8
