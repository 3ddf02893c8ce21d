"""The live view and the report of a log on a real broker."""

from __future__ import annotations

import json
import uuid
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.builders import end
from tests.jobs_on_paper import PaperJob, tables
from tests.parts import app, open_log
from torchrec_stream_ckpt.inner import Control
from torchrec_stream_ckpt.util.types import MarkerId

pytestmark = pytest.mark.kafka


def run(*arguments: str, status: int = 0) -> str:
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == status, done.output
    return done.stdout


def test_a_job_on_a_broker_is_watched_and_reported(bootstrap: str, tmp_path: Path) -> None:
    uri, store = f"kafka://{bootstrap}/job-{uuid.uuid4().hex}", f"file://{tmp_path / 'store'}"
    log = open_log(uri)
    job = PaperJob(tmp_path, tables("a", "b"), world=2, log=log)
    first = job.run(3)
    job.step = first[1].step
    job.run(2, parent=MarkerId(1, 2))
    seen = json.loads(run("watch", uri, "--store", store, "--once", "--json", status=1))  # it is late
    assert (seen["newest"]["marker"], seen["generation"], seen["markers"]) == ("2:5", 2, 5)
    assert [rank["partition"] for rank in seen["ranks"]] == [0, 1]
    assert seen["restore"]["seconds"] == pytest.approx(seen["restore"]["num_bytes"] / 2 / 0.15e9)
    assert [alert["kind"] for alert in seen["alerts"]] == ["late"]
    Control(log).end(end(2))
    seen = json.loads(run("watch", uri, "--store", store, "--once", "--json"))
    assert (seen["ended"]["outcome"], seen["alerts"]) == ("finished", [])
    run("report", uri, "--store", store, "--out", str(tmp_path / "report.html"))
    page = (tmp_path / "report.html").read_text()
    assert "2: 2 ranks, 2 markers" in page
    assert "are not in the log" not in page
    assert "the trainer has ended: finished at step 70" in page
    log.close()
