"""A relay is killed at each of its steps: the next one finishes what it began."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests import tiered
from tests.forks import command, status_of
from tests.parts import TierState
from tests.synthetic import image_of_log
from tests.tiered import TieredJob, relay
from torchrec_stream_ckpt.log import file_writer

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
    passes = {"relay.dense": 6, "relay.commit": 3, "relay.committed": 3}.get(point, 99)
    status = status_of(_relay, job.settings.uris, fuse=f"{point}=kill@{nth}")
    assert status == (-signal.SIGKILL if nth <= passes else 0)
    monkeypatch.setattr(file_writer, "SEGMENT_BYTES", 9_000)
    there = list(TierState.read(job.tiers).outer.commits)
    copied = relay(job.tiers)
    assert [str(marker) for marker in there] + copied == ["1:1", "1:2", "1:3"]
    outer = TierState.read(job.tiers).outer
    for marker in outer.commits:
        assert image_of_log(job.tiers.outer.log, outer, marker) == job.truth(marker)


def _relay(uris: tuple[str, ...]) -> None:
    file_writer.SEGMENT_BYTES = 20_000
    command("relay", *uris, "--once")
