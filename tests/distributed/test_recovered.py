"""A job goes on after its log was lost: from the store, with the next generation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests import jobs, ranks, stores
from tests.model import PLAN_2, PLAN_3, differences
from torchrec_stream_ckpt import StreamConfig
from torchrec_stream_ckpt.cli.main import app

pytestmark = pytest.mark.distributed


def test_a_job_restores_and_goes_on_after_its_log_was_lost(tmp_path: Path) -> None:
    directory = tmp_path / "job"
    settings = StreamConfig(uri=f"file://{directory}", marker_every=2)
    trained = ranks.run(2, jobs.train_with, PLAN_2, settings, 4, {})[0][1]
    stores.fold(directory)
    stores.lose_log(directory)
    with pytest.raises(ranks.RankFailed, match="stream-ckpt recover"):
        ranks.run(2, jobs.train_with, PLAN_2, settings, 1, {})
    done = CliRunner().invoke(app, ["recover", str(settings.uri), "--store", str(directory), "--json"])
    assert json.loads(done.stdout)["offered"] == ["1:1", "1:2", "1:3"]
    # Its rows come from the store; what it commits stands on them, in the new log.
    restored = ranks.run(3, jobs.restore_with, PLAN_3, settings, None, 4, {})
    for rank, (state, step, _, _) in enumerate(restored):
        assert step == 4
        assert differences(trained[4], state, rng=rank == 0) == []
    again = ranks.run(2, jobs.restore_with, PLAN_2, settings, None, 0, {})
    for rank, (state, step, _, _) in enumerate(again):
        assert step == 8
        assert differences(restored[0][3][8], state, rng=rank == 0) == []
