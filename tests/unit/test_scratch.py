"""Folders for temporary files: those of processes that were killed go, those of processes that live stay."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import threading
from pathlib import Path

import pytest

from torchrec_stream_ckpt.util import scratch
from torchrec_stream_ckpt.util.scratch import ScratchFolder, clear_dead


def child(where: Path) -> tuple[int, Path]:
    """A process that holds a folder until it is killed."""
    got, said = os.pipe()
    pid = os.fork()
    if not pid:
        made = ScratchFolder(where)
        (made.path / "rows").write_bytes(b"rows")
        os.write(said, str(made.path).encode())
        signal.pause()
        os._exit(0)
    os.close(said)
    path = Path(os.read(got, 4096).decode())
    os.close(got)
    return pid, path


def test_what_a_killed_process_has_left_goes_with_the_next_folder_and_what_a_living_one_uses_stays(
    tmp_path: Path,
) -> None:
    (killed, dead), (living, used) = child(tmp_path), child(tmp_path)
    try:
        os.kill(killed, signal.SIGKILL)
        os.waitpid(killed, 0)
        assert (dead / "rows").exists()
        mine = ScratchFolder(tmp_path)
        assert not dead.exists()
        assert (used / "rows").exists()
        assert mine.path.stat().st_mode & 0o777 == 0o700
        mine.close()
        assert sorted(tmp_path.iterdir()) == [used]
    finally:
        os.kill(living, signal.SIGKILL)
        os.waitpid(living, 0)
    clear_dead(tmp_path)
    assert not list(tmp_path.iterdir())


def test_what_is_not_surely_a_dead_process_of_ours_stays(tmp_path: Path) -> None:
    names = ["unlocked", "link", "file", "other"]
    unlocked, link, file, other = (tmp_path / f"{scratch.PREFIX}{name}" for name in names)
    elsewhere = tmp_path / "elsewhere"
    for folder in (unlocked, elsewhere, other):
        folder.mkdir()
    for folder in (elsewhere, other):
        (folder / "lock").touch()
    link.symlink_to(elsewhere)
    file.touch()
    os.chown(other, os.geteuid() + 1, -1) if os.geteuid() == 0 else other.rename(elsewhere / "other")
    before = sorted(tmp_path.rglob("*"))
    ScratchFolder(tmp_path).close()
    assert sorted(tmp_path.rglob("*")) == before


def test_many_that_begin_at_once_take_no_folder_from_each_other(tmp_path: Path) -> None:
    problems: list[str] = []

    def work() -> None:
        for number in range(20):
            with contextlib.closing(ScratchFolder(tmp_path)) as made:
                (made.path / str(number)).touch()
                if not (made.path / "lock").exists():
                    problems.append(str(made.path))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems
    assert not list(tmp_path.iterdir())


def test_a_folder_that_another_process_took_for_a_dead_ones_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the making of the lock's file and its lock, anybody may take it."""
    lock = scratch.try_lock
    looks: list[int] = []

    def try_lock(fd: int) -> bool:
        looks.append(fd)
        if len(looks) == 1:
            monkeypatch.setattr(scratch, "try_lock", lock)
            clear_dead(tmp_path)
            monkeypatch.setattr(scratch, "try_lock", try_lock)
        return lock(fd)

    monkeypatch.setattr(scratch, "try_lock", try_lock)
    made = ScratchFolder(tmp_path)
    assert len(looks) == 2
    assert list(tmp_path.iterdir()) == [made.path]
    made.close()


def test_without_locks_a_folder_is_made_and_nobody_takes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(fd: int) -> bool:
        raise OSError(95, "Operation not supported")

    with monkeypatch.context() as patched:
        patched.setattr(scratch, "try_lock", fail)
        made = ScratchFolder(tmp_path)
    clear_dead(tmp_path)
    assert made.path.is_dir()
    made.close()


def test_temporary_files_are_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made = ScratchFolder()
    assert made.path.parent == tmp_path
    made.close()
