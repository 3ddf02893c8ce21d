"""A job goes on after its log was lost: from the store, with the next generation."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tests import jobs, ranks, stores, warm
from tests.model import PLAN_2, PLAN_3, Spec, differences, trainer, truth
from tests.parts import app
from torchrec_stream_ckpt import StreamConfig
from torchrec_stream_ckpt.log import file_writer
from torchrec_stream_ckpt.util.layout import CONTROL_FILE, RECORDS_DIR

pytestmark = pytest.mark.distributed


def test_a_job_restores_and_goes_on_after_its_log_was_lost(tmp_path: Path) -> None:
    directory = tmp_path / "job"
    settings = StreamConfig(uri=f"file://{directory}", marker_every=2)
    trained = warm.run(2, jobs.train_with, PLAN_2, settings, 4, {})[0][1]
    stores.fold(directory)
    stores.lose_log(directory)
    with pytest.raises(ranks.RankFailed, match="stream-ckpt recover"):
        warm.run(2, jobs.train_with, PLAN_2, settings, 1, {})
    done = CliRunner().invoke(app, ["recover", str(settings.uri), "--store", str(directory), "--json"])
    assert json.loads(done.stdout)["offered"] == ["1:1", "1:2", "1:3"]
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
    cli("trim", str(settings.uri), "--store", str(tmp_path))
    (tmp_path / CONTROL_FILE).unlink()
    shutil.rmtree(tmp_path / RECORDS_DIR)
    cli("recover", str(settings.uri), "--store", str(tmp_path))
    for rank, (state, committed) in enumerate(warm.run(2, _go_on, PLAN_2, settings)):
        assert differences(trained, state, rng=rank == 0) == []
        assert committed == "3:4"


def cli(*arguments: str) -> None:
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
