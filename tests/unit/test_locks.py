"""A lock of a file is its process's alone: children have none of it, and nobody but the owner can take it."""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

from tests.builders import claim, commit
from tests.parts import FileLog, control_file
from torchrec_stream_ckpt.format.head import HEAD_LOCK
from torchrec_stream_ckpt.store.head import HeadFolder
from torchrec_stream_ckpt.tiers.lock import RelayLock
from torchrec_stream_ckpt.util import scratch
from torchrec_stream_ckpt.util.layout import CONTROL_LOCK, RELAY_LOCK
from torchrec_stream_ckpt.util.locks import held
from torchrec_stream_ckpt.util.scratch import ScratchFolder, clear_dead

RECORDS = [claim(1).to_frame(), commit(1, 1).to_frame(), commit(1, 2).to_frame()]

End = Callable[[], None]


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FileLog:
    monkeypatch.setattr(control_file, "LOCK_TIMEOUT_S", 5.0)
    log = FileLog(tmp_path)
    log.prepare(1)
    return log


@pytest.fixture
def syncing(log: FileLog, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """An append is under way on a disk whose sync takes until the event is set."""
    begun, done, real = threading.Event(), threading.Event(), os.fdatasync

    def slow(fd: int) -> None:
        begun.set()
        assert done.wait(300)  # a child that imports torch takes minutes on a busy machine
        real(fd)

    monkeypatch.setattr(os, "fdatasync", slow)
    appender = threading.Thread(target=log.append_control, args=(RECORDS[0],))
    appender.start()
    assert begun.wait(300)
    yield done
    done.set()
    appender.join()


def _forked() -> End:
    pid = os.fork()
    if not pid:
        with contextlib.suppress(BaseException):
            time.sleep(300)
        os._exit(0)

    def end() -> None:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)

    return end


def _started(method: str) -> End:
    child = multiprocessing.get_context(method).Process(target=time.sleep, args=(300,), daemon=True)
    child.start()

    def end() -> None:
        child.kill()
        child.join()

    return end


def _from_server() -> End:
    """Of a server of its own: that of other tests imports torch before it forks anything."""
    server = forkserver.ForkServer()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forkserver, "connect_to_new_process", server.connect_to_new_process)
        end = _started("forkserver")

    def end_both() -> None:
        end()
        server._stop()  # type: ignore[attr-defined]

    return end_both


def _ran() -> End:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], close_fds=False)

    def end() -> None:
        child.kill()
        child.wait()

    return end


def _loading() -> End:
    from torch.utils.data import DataLoader

    batches: Any = iter(DataLoader(range(1_000_000), num_workers=2, persistent_workers=True))
    next(batches)
    return lambda: batches._shutdown_workers()


CHILDREN: dict[str, Callable[[], End]] = {
    "fork": _forked,
    "multiprocessing-fork": lambda: _started("fork"),
    "forkserver": _from_server,
    "spawn": lambda: _started("spawn"),
    "subprocess": _ran,
    "dataloader": _loading,
}


@pytest.mark.parametrize("child", CHILDREN)
def test_a_child_that_begins_during_a_commit_keeps_no_lock(log: FileLog, syncing: threading.Event, child: str) -> None:
    end = CHILDREN[child]()
    try:
        syncing.set()
        # Again and again, from two logs: as the trainer's markers, and as an operator's fence beside them.
        for record in RECORDS[1:]:
            log.append_control(record)
        FileLog(log.uri.directory).append_control(RECORDS[0])
    finally:
        end()
    assert [record for _, record in log.read_control()] == [*RECORDS, RECORDS[0]]


def test_a_lock_ends_with_the_process_that_took_it_though_its_child_lives(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    ready, tell = os.pipe()
    trainer = os.fork()
    if not trainer:
        with contextlib.suppress(BaseException), held(path, timeout_s=0):
            worker = os.fork()
            if worker:
                os.write(tell, worker.to_bytes(4, "little"))
            time.sleep(300)
        os._exit(0)
    worker = int.from_bytes(os.read(ready, 4), "little")
    try:
        with pytest.raises(TimeoutError), held(path, timeout_s=0.05):
            pass
        os.kill(trainer, signal.SIGKILL)
        os.waitpid(trainer, 0)
        with held(path, timeout_s=0):
            pass
        os.kill(worker, 0)  # and it was alive all the time
    finally:
        os.kill(worker, signal.SIGKILL)
        os.close(ready)
        os.close(tell)


def test_a_child_may_close_what_its_parent_has_locked(tmp_path: Path) -> None:
    folder = HeadFolder(tmp_path / "head", b"j" * 16, create=True)
    assert folder.lock(exclusive=True, wait_s=0)
    pid = os.fork()
    if not pid:
        code = 1
        with contextlib.suppress(BaseException):
            folder.close()
            code = 0
        os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    other = HeadFolder(tmp_path / "head", b"j" * 16)
    assert not other.lock(exclusive=False, wait_s=0)
    folder.close()
    assert other.lock(exclusive=False, wait_s=0)
    other.close()


def _lock_control(folder: Path) -> Path:
    log = FileLog(folder)
    log.prepare(1)
    log.append_control(RECORDS[0])
    return folder / CONTROL_LOCK


def _lock_relay(folder: Path) -> Path:
    with RelayLock(folder).hold(1.0):
        return folder / RELAY_LOCK


def _lock_head(folder: Path) -> Path:
    folder.chmod(0o700)
    head = HeadFolder(folder, b"j" * 16, create=True)
    head.close()
    return head.path / HEAD_LOCK


@pytest.mark.parametrize("lock", [_lock_control, _lock_relay, _lock_head])
@pytest.mark.parametrize("umask", [0, 0o022])
def test_only_its_owner_can_open_a_lock(tmp_path: Path, lock: Callable[[Path], Path], umask: int) -> None:
    before = os.umask(umask)
    try:
        path = lock(tmp_path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o644)  # as older programs made it
    lock(tmp_path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_an_umask_that_takes_all_rights_leaves_the_owner_his(tmp_path: Path) -> None:
    before = os.umask(0o777)
    try:
        with held(tmp_path / "lock", timeout_s=0):
            pass
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "lock").stat().st_mode) == 0o600


def test_a_lock_excludes_programs_that_lock_the_file_themselves(tmp_path: Path) -> None:
    with (
        held(tmp_path / "lock", timeout_s=0),
        open(tmp_path / "lock", "rb") as file,
        pytest.raises(BlockingIOError),
    ):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with open(tmp_path / "lock", "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


# Folders for temporary files: those of processes that were killed go, those of processes that live stay.


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
