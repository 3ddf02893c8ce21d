"""A script that raises and never calls ``close()`` ends with its own traceback and exit status 1."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.forks import ROOT, run_script
from tests.parts import FileLog
from torchrec_stream_ckpt.inner import Control


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    folder = tmp_path_factory.mktemp("unclosed")
    done = run_script(ROOT / "tests" / "unclosed_job.py", str(folder))
    assert done.returncode == 0, done.stderr
    return folder, done


@pytest.mark.parametrize(
    ("case", "world"),
    [
        ("alone", 1),
        ("two", 2),
        ("never_closed", 2),
        ("busy_in_torch", 1),
        ("one_rank_waits", 2),
        ("with_a_callback", 1),
    ],
)
def test_the_exit_status_is_that_of_the_error(
    ended: tuple[Path, subprocess.CompletedProcess[str]], case: str, world: int
) -> None:
    _, done = ended
    assert json.loads(done.stdout)[case] == [1] * world, done.stderr


def test_every_process_shows_its_traceback_and_none_aborts(
    ended: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    _, done = ended
    assert done.stderr.count("RuntimeError: the error of the user") == 9
    assert "terminate called" not in done.stderr


def test_the_marker_in_flight_is_committed_or_given_up(
    ended: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    folder, _ = ended
    steps = {case: Control(FileLog(folder / case / "log")).refresh().newest for case in ("alone", "busy_in_torch")}
    assert steps["alone"] is not None
    assert steps["alone"].step in (2, 3)
    assert steps["busy_in_torch"] is not None
    assert steps["busy_in_torch"].step == 2  # the marker of step 3 can never have been saved
