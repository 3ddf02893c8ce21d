"""Names of markers in the calls that take a marker: restores, warm starts, the planner, and readers without a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests import warm
from tests.jobs import attach
from tests.model import PLAN_2, trainer
from tests.parts import app
from torchrec_stream_ckpt import StreamConfig, StreamReader, open_marker, planner_constraints
from torchrec_stream_ckpt.errors import ConfigError, MarkerNotFoundError

pytestmark = pytest.mark.distributed


def _train(uri: str) -> None:
    job = trainer(PLAN_2)
    with attach(job, StreamConfig(uri=uri, marker_every=None)) as checkpointer:
        for auc in (0.5, 0.9, 0.7):
            job.step()
            checkpointer.step()
            checkpointer.mark({"auc": auc}).result(60)


def _restored(uri: str, name: str, other: str) -> list[Any]:
    with attach(trainer(PLAN_2), StreamConfig(uri=uri, marker_every=None), paranoid=False) as checkpointer:
        with pytest.raises(MarkerNotFoundError, match="no marker has the name canary"):
            checkpointer.restore("canary")
        with pytest.raises(ConfigError, match="'a b' is not a marker"):
            checkpointer.restore("a b")
        plan, restored = checkpointer.plan(name), checkpointer.restore(name)
    assert plan is not None
    assert restored is not None
    with attach(trainer(PLAN_2), StreamConfig(uri=other, marker_every=None), paranoid=False) as checkpointer:
        begun = checkpointer.warm_start(f"{uri}@{name}")
    return [str(plan.marker), str(restored.id), begun.step, sorted(planner_constraints(uri, name))]


def test_a_name_and_the_best_are_taken_by_every_call_that_takes_a_marker(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}/log"
    warm.run(2, _train, uri)
    assert CliRunner().invoke(app, ["name", uri, "1:1", "prod"]).exit_code == 0
    for number, (name, marker, step) in enumerate(
        (("prod", "1:1", 1), ("best:auc:max", "1:2", 2), ("latest", None, 3))
    ):
        with open_marker(uri, name) as rows:
            assert marker in (None, str(rows.id))
            assert rows.step == step
        reader = StreamReader(uri, name)
        reader.read_metadata()
        assert reader.step == step
        if marker is not None:
            found = warm.run(2, _restored, uri, name, f"file://{tmp_path}/other{number}")
            assert found[0] == found[1]
            assert found[0][:3] == [marker, marker, step]
        assert CliRunner().invoke(app, ["export", uri, name, "--to", f"dcp://{tmp_path}/out{number}"]).exit_code == 0
