"""A relay is killed at each of its steps: the next one finishes what it began."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import tiered
from tests.parts import TierState
from tests.synthetic import image_of_log
from tests.tiered import TieredJob, relay

POINTS = ("relay.sent", "relay.dense", "relay.commit", "relay.committed")


@pytest.fixture
def job(tmp_path: Path) -> TieredJob:
    """Three markers on the inner tier, none on the outer one."""
    made = TieredJob(tmp_path / "inner", settings=tiered.config(tmp_path / "inner", tmp_path / "outer"))
    made.begin()
    made.markers(3)
    return made


@pytest.mark.parametrize("nth", [1, 2, 7])
@pytest.mark.parametrize("point", POINTS)
def test_a_relay_that_is_killed_is_finished_by_the_next(
    job: TieredJob, point: str, nth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL at each step; segments of the outer log are small, so that some lie beyond what was committed."""
    program = (
        "import sys; from torchrec_stream_ckpt.log import file_writer; file_writer.SEGMENT_BYTES = 20_000;"
        "from torchrec_stream_ckpt.cli.main import main; main()"
    )
    environment = os.environ | {"STREAM_CKPT_FAILPOINTS": f"{point}=kill@{nth}"}
    command = [sys.executable, "-c", program, "relay", *job.settings.uris, "--once"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    passes = {"relay.dense": 6, "relay.commit": 3, "relay.committed": 3}.get(point, 99)
    assert done.returncode == (-signal.SIGKILL if nth <= passes else 0), done.stderr
    monkeypatch.setattr("torchrec_stream_ckpt.log.file_writer.SEGMENT_BYTES", 9_000)
    there = list(TierState.read(job.tiers).outer.commits)
    copied = relay(job.tiers)
    assert [str(marker) for marker in there] + copied == ["1:1", "1:2", "1:3"]
    outer = TierState.read(job.tiers).outer
    for marker in outer.commits:
        assert image_of_log(job.tiers.outer.log, outer, marker) == job.truth(marker)
