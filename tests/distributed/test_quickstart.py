"""recipes/quickstart.py as it stands: alone, killed, on two ranks, and alone again, each time from where it stood."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.forks import ROOT, Torchrun, run_script
from tests.launched import Launched
from torchrec_stream_ckpt.cli.main import app
from torchrec_stream_ckpt.control.partition import Control
from torchrec_stream_ckpt.log.files import FileLog

pytestmark = pytest.mark.distributed

SCRIPT = ROOT / "recipes" / "quickstart.py"
STEPS = 1000  # of an epoch


def restored_step(output: str, ranks: int) -> int:
    found = re.search(rf"restored marker \d+:\d+ \(step (\d+), written by {ranks} ranks\)", output)
    assert found is not None, output
    return int(found[1])


def test_it_goes_on_after_a_kill_and_on_other_ranks(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}/ckpt"
    first = Torchrun(1, SCRIPT, uri)
    try:
        said = ""
        for line in first.stdout:
            said += line
            if "marker 1:2 committed" in line:
                break
    finally:
        first.kill()
    assert first.returncode, said
    assert "restored" not in said

    code, said = Torchrun(2, SCRIPT, uri).end(120)
    assert code == 0, said
    step = restored_step(said, ranks=1)
    assert 300 <= step < STEPS  # the second marker is due at 300, and may be cut later
    assert sorted(re.findall(r"rank (\d): step (\d+)", said)) == [("0", str(STEPS)), ("1", str(STEPS))]

    alone = run_script(SCRIPT, uri)  # without torchrun; the next epoch
    assert alone.returncode == 0, alone.stderr
    assert restored_step(alone.stderr, ranks=2) == STEPS
    assert f"rank 0: step {2 * STEPS}, loss 0.00" in alone.stdout


def test_a_mistake_is_a_message_without_a_traceback(tmp_path: Path) -> None:
    told = run_script(SCRIPT, "--help")
    assert (told.returncode, told.stderr) == (0, "")
    assert "file://DIR" in told.stdout
    wrong = run_script(SCRIPT, "foo://bar")
    assert wrong.returncode == 1
    assert "Error: 'foo://bar' is not a known kind of log" in wrong.stderr
    assert "Try: " in wrong.stderr
    assert "Traceback" not in wrong.stderr


def test_a_fenced_job_says_so_without_a_traceback(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}/ckpt"
    job = Torchrun(1, SCRIPT, uri)
    try:
        said = ""
        for line in job.stdout:
            said += line
            if "marker 1:1 committed" in line:
                break
        done = CliRunner().invoke(app, ["fence", uri, "--yes"])
        assert done.exit_code == 0, done.output
        code, rest = job.end(120)
    finally:
        job.kill()
    assert code, rest
    assert "Error: " in rest
    assert "an operator has ended this trainer" in rest
    assert 'quickstart.py", line' not in rest


def test_torchrun_that_is_told_to_stop_leaves_a_marker_of_the_last_step(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}/ckpt"
    command = ["torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(SCRIPT), uri]
    with Launched(command, tmp_path / "output", {}) as job:
        job.wait_for("marker 1:1 committed", 120)
        job.process.terminate()
        assert job.process.wait(120)  # no success
        said = job.text()
    told = re.search(r"SIGTERM has led to marker (\d+:\d+) of step (\d+); the job is to stop", said)
    assert told is not None, said
    lineage = Control(FileLog(tmp_path / "ckpt")).refresh()
    assert lineage.newest is not None
    assert lineage.ended is not None
    assert (str(lineage.newest.id), lineage.newest.step) == (told[1], int(told[2]))
    assert (lineage.ended.outcome, lineage.ended.reason, lineage.ended.step) == ("preempted", "SIGTERM", int(told[2]))
