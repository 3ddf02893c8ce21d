"""A trainer between append and copy, and a recovery, are killed: the next one makes up for it."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import pytest

from tests.builders import commit
from tests.forks import command, status_of
from tests.unit.copied_job import check, copied, copied_offsets, image, keep, offsets, recover, trainer

POINTS = ("copy.put", "copy.stored", "recover.put", "recover.fence", "recover.copy")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A job of two generations and five markers, whose records are copied."""
    return copied(tmp_path)


@pytest.mark.parametrize("point", ["recover.put", "recover.fence", "recover.copy"])
def test_a_recovery_that_was_killed_is_finished_by_the_next(root: Path, point: str) -> None:
    before = image(root)
    (root / "control.log").unlink()
    nth = 4 if point == "recover.put" else 1
    fuse = f"{point}=kill@{nth}"
    assert status_of(command, "recover", f"file://{root}", "--store", str(root), fuse=fuse) == -signal.SIGKILL
    found = recover(root)
    assert found["offered"][-1] == "2:3"
    assert image(root) == before
    check(root)


def _commit(root: Path) -> None:
    control = trainer(root)
    control.check_copy()
    for marker in range(4, 8):
        control.commit(commit(2, marker), 5.0, threading.Event())
        control.close()


@pytest.mark.parametrize("point", ["copy.put", "copy.stored"])
def test_a_kill_between_append_and_copy_leaves_a_copy_that_is_behind(root: Path, point: str) -> None:
    assert status_of(_commit, root, fuse=f"{point}=kill@2") == -signal.SIGKILL
    appended = offsets(root)
    copied = copied_offsets(root)
    assert copied == appended[: 8 if point == "copy.put" else 9]
    assert len(appended) == 9
    check(root)
    keep(root)
    assert copied_offsets(root) == appended
