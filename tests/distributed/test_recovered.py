"""A job goes on after its log was lost: from the store, with the next generation."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests import jobs, ranks, stores, warm
from tests.command import ask, run
from tests.jobs import Truths, attach, settle
from tests.model import PLAN_2, PLAN_3, Spec, differences, trainer, truth
from tests.parts import FileLog, file_writer
from torchrec_stream_ckpt import StreamConfig
from torchrec_stream_ckpt.inner import Control
from torchrec_stream_ckpt.util.layout import CONTROL_FILE, RECORDS_DIR
from torchrec_stream_ckpt.util.types import MarkerId

pytestmark = pytest.mark.distributed


def test_a_job_restores_and_goes_on_after_its_log_was_lost(tmp_path: Path) -> None:
    directory = tmp_path / "job"
    settings = StreamConfig(uri=f"file://{directory}", marker_every=2)
    trained = warm.run(2, jobs.train_with, PLAN_2, settings, 4, {})[0][1]
    stores.fold(directory)
    stores.lose_log(directory)
    with pytest.raises(ranks.RankFailed, match="stream-ckpt recover"):
        warm.run(2, jobs.train_with, PLAN_2, settings, 1, {})
    assert ask("recover", settings.uri, "--store", directory)["offered"] == ["1:1", "1:2", "1:3"]
    # Its rows come from the store; what it commits stands on them, in the new log.
    restored = warm.run(3, jobs.restore_with, PLAN_3, settings, None, 4, {})
    for rank, (state, step, _, _) in enumerate(restored):
        assert step == 4
        assert differences(trained[4], state, rng=rank == 0) == []
    again = warm.run(2, jobs.restore_with, PLAN_2, settings, None, 0, {})
    for rank, (state, step, _, _) in enumerate(again):
        assert step == 8
        assert differences(restored[0][3][8], state, rng=rank == 0) == []


def _train(spec: Spec, settings: StreamConfig) -> dict[str, torch.Tensor]:
    """A job whose log is deleted frame by frame; the truth at its newest marker."""
    before, file_writer.SEGMENT_BYTES = file_writer.SEGMENT_BYTES, 1
    try:
        return jobs.train_with(spec, settings, 4, {})[1][4]
    finally:
        file_writer.SEGMENT_BYTES = before  # the next job in this process is another test's


def _go_on(spec: Spec, settings: StreamConfig) -> tuple[dict[str, torch.Tensor], str]:
    """Restore the newest marker and commit another one, under the oracle."""
    job = trainer(spec)
    job.step()
    checkpointer = jobs.attach(job, settings, paranoid=True)
    assert checkpointer.restore() is not None
    state = truth(job)
    job.step()
    checkpointer.step()
    committed = checkpointer.mark().result(60)
    checkpointer.close()
    return state, str(committed.id)


def test_a_job_commits_on_after_the_record_of_a_trim_was_lost_with_its_control_log(tmp_path: Path) -> None:
    settings = StreamConfig(uri=f"file://{tmp_path}", marker_every=2)
    (trained, *_) = warm.run(2, _train, PLAN_2, settings)
    stores.fold(tmp_path)
    run("trim", str(settings.uri), "--store", str(tmp_path))
    (tmp_path / CONTROL_FILE).unlink()
    shutil.rmtree(tmp_path / RECORDS_DIR)
    run("recover", str(settings.uri), "--store", str(tmp_path))
    for rank, (state, committed) in enumerate(warm.run(2, _go_on, PLAN_2, settings)):
        assert differences(trained, state, rng=rank == 0) == []
        assert committed == "3:4"


# A segment is cut under a live job: what stood on it is not committed, and the job goes on in another generation.


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
