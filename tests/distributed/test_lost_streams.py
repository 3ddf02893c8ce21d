"""A segment is cut under a live job: what stood on it is not committed, and the job goes on in another generation."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch.distributed as dist

from tests import jobs, ranks, warm
from tests.jobs import Truths, attach, settle
from tests.model import PLAN_2, Spec, differences, trainer, truth
from tests.parts import FileLog
from torchrec_stream_ckpt import StreamConfig
from torchrec_stream_ckpt.inner import Control
from torchrec_stream_ckpt.util.types import MarkerId

pytestmark = pytest.mark.distributed


def cut_segment(root: Path) -> None:
    """What rank 1 has sent since the job's second marker is gone."""
    (segment,) = (root / "data" / "p00001").glob("*.seg")
    os.truncate(segment, Control(FileLog(root)).refresh().find(MarkerId(1, 2)).ranks[1].end + 100)


def train_through_a_cut(spec: Spec, settings: StreamConfig, root: Path, steps: int) -> tuple[list[int], Truths]:
    """The generation after each step, and the truth there; rank 1's segment is cut after half of the steps."""
    job, truths = trainer(spec), Truths()
    checkpointer = attach(job, settings)
    assert checkpointer.restore() is None
    generations = []
    for step in range(steps):
        job.step()
        checkpointer.step()
        settle(checkpointer)
        truths[job.step_number] = truth(job)
        generations.append(checkpointer.generation or 0)
        if step == steps // 2 and dist.get_rank() == 1:
            cut_segment(root)
    checkpointer.close()
    return generations, truths


def test_the_cadence_goes_on_in_another_generation_with_every_row(tmp_path: Path) -> None:
    settings = StreamConfig(uri=f"file://{tmp_path}", marker_every=2, drain_every=1)
    results = ranks.run(2, train_through_a_cut, PLAN_2, settings, tmp_path, 24)
    generations, truths = results[0]
    assert generations == results[1][0]
    assert (generations[12], generations[-1]) == (1, 2)
    lineage = Control(FileLog(tmp_path)).refresh()
    assert lineage.newest is not None
    assert lineage.newest.generation == 2
    assert lineage.claims[2].parent == MarkerId(1, 2)
    assert lineage.claims[2].swept == tuple(range(len(lineage.claims[2].schema.tables)))
    for marker in (lineage.newest.id, MarkerId(1, 2)):
        state, step, _ = warm.run(2, jobs.restore_once, PLAN_2, settings, str(marker), {})[0]
        assert differences(truths[step], state) == []
