"""The shortening of a control log is killed: it takes nothing, and the next one finishes."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.builders import claim
from tests.forks import status_of
from tests.parts import FileLog
from tests.unit.snapshot_log import grow, markers, shorten


@pytest.fixture
def log(tmp_path: Path) -> FileLog:
    made = FileLog(tmp_path / "log")
    made.prepare(1)
    made.append_control(claim(1).to_frame())
    return made


POINTS = ("snapshot.append", "snapshot.written", "prune.begun", "prune.written", "prune.renamed")


@pytest.mark.parametrize("point", [*POINTS, "control.written"])
def test_a_shortening_that_is_killed_takes_nothing_and_is_finished_by_the_next(log: FileLog, point: str) -> None:
    grow(log, 1, 3)
    shorten(log)
    grow(log, 4, 6)
    assert status_of(_shorten, log.uri.directory, fuse=f"{point}=kill") == -signal.SIGKILL
    assert markers(log) == [1, 2, 3, 4, 5, 6]
    grow(log, 7, 7)
    assert shorten(log) > 0
    assert markers(log) == [1, 2, 3, 4, 5, 6, 7]


def _shorten(folder: Path) -> None:
    shorten(FileLog(folder))
