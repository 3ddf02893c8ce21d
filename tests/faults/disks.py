"""Disks that are full, that fail, and that take half of what they are given, under a job that goes on training."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from tests.faults.board import Row
from tests.faults.brokers import STEPS_DURING, Victim
from tests.faults.subject import Form, Incarnation, Subject, file_job, kafka_job
from tests.model import PLAN_2

TEAM = (2, PLAN_2)


class CannotMount(Exception):  # noqa: N818
    """This user may not mount file systems."""


@contextlib.contextmanager
def small_disk(folder: Path, num_bytes: int) -> Iterator[None]:
    """A file system of the given size at ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except FileNotFoundError:
        raise CannotMount("there is no mount(8)") from None
    if done.returncode:
        raise CannotMount(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "mount(8) failed")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True, timeout=20)


@contextlib.contextmanager
def real_disk(folder: Path, num_bytes: int, sector: int = 512) -> Iterator[None]:
    """A file system of the given size at ``folder`` that takes direct writes, on a device with sectors of this size."""
    folder.mkdir(parents=True, exist_ok=True)
    image = folder.with_name(f"{folder.name}.img")
    with open(image, "wb") as file:
        file.truncate(num_bytes)
    with contextlib.ExitStack() as undo:
        undo.callback(image.unlink)
        device = _done("losetup", "--sector-size", str(sector), "--show", "--find", str(image))
        undo.callback(_done, "losetup", "--detach", device)
        _done("mkfs.ext4", "-q", "-F", "-m", "0", device)
        _done("mount", device, str(folder))
        undo.callback(_done, "umount", "-l", str(folder))
        yield


def _done(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except FileNotFoundError:
        raise CannotMount(f"there is no {command[0]}") from None
    if done.returncode:
        raise CannotMount(f"{command[0]}: {(done.stderr.strip() or 'it failed').splitlines()[-1]}")
    return done.stdout.strip()


def fill(folder: Path, leave_bytes: int) -> Path:
    """Fill a file system up to the given rest."""
    ballast = folder / "ballast"
    with open(ballast, "wb") as file:
        while (free := shutil.disk_usage(folder).free) > leave_bytes:
            try:
                os.posix_fallocate(file.fileno(), 0, max(4096, free - leave_bytes))
            except OSError as error:
                if error.errno != errno.ENOSPC:  # somebody has written since
                    raise
            else:
                break
    return ballast


def log_full(form: Form) -> None:
    """The file log's disk is full for a while: frames wait, and go out when there is room."""
    row = form.board.row("disk of the file log full")
    subject = file_job(form, "log-full", commit_timeout_s=5.0)
    _full_for_a_while(form, row, subject, subject.directory / "log")


def direct_log_full(form: Form) -> None:
    """The same past the page cache: a write may end in the middle of a batch."""
    row = form.board.row("disk of the file log full, direct writes")
    subject = file_job(form, "direct-full", commit_timeout_s=5.0)
    _full_for_a_while(form, row, subject, subject.directory / "log", real_disk)


def store_full(form: Form) -> None:
    """The store's disk is full for a while: markers fail by name, and the next ones are committed again."""
    row = form.board.row("disk of the store full")
    subject = file_job(form, "store-full", commit_timeout_s=5.0)
    subject.settings.store = f"file://{subject.directory / 'store'}"
    _full_for_a_while(form, row, subject, subject.directory / "store")


def _full_for_a_while(
    form: Form,
    row: Row,
    subject: Subject,
    folder: Path,
    disk: Callable[[Path, int], contextlib.AbstractContextManager[None]] = small_disk,
) -> None:
    try:
        with disk(folder, 64 * 2**20):
            with subject.living(row, team=TEAM) as incarnation:
                for _ in range(3 if form.full else 1):
                    row.injected += 1
                    row.fired += _full_once(incarnation, folder)
            subject.compare_all(form.draw("full"), None if form.full else 2)
    except CannotMount as error:
        row.not_run = str(error)


def _full_once(incarnation: Incarnation, folder: Path) -> bool:
    """Whether a marker failed because there was no room; the log's files and the store's say so in their words."""
    incarnation.await_reports(1)
    failures = len(incarnation.lines("failed"))

    def named() -> bool:
        return any("no space left" in line.lower() for line in incarnation.lines("failed")[failures:])

    ballast = fill(folder, 50_000)
    incarnation.wait("a marker that fails because there is no room", named)
    incarnation.await_steps(STEPS_DURING)
    ballast.unlink()
    incarnation.await_reports(2)
    return named()


def broker_disk_full(form: Form) -> None:
    """The broker's disk is full: it ends. With room again it is started again, and the job goes on."""
    row = form.board.row("disk of the broker full")
    folder = form.folder("full-broker")
    try:
        with small_disk(folder / "broker" / "data", 160 * 2**20):
            broker = Victim(folder)
            try:
                _fill_broker(form, row, broker, folder / "broker" / "data")
            finally:
                broker.close()
    except CannotMount as error:
        row.not_run = str(error)


def _fill_broker(form: Form, row: Row, broker: Victim, data: Path) -> None:
    subject = kafka_job(form, "full", broker.bootstrap, commit_timeout_s=30.0)
    with subject.living(row, team=TEAM) as incarnation:
        row.injected += 1
        incarnation.await_reports(1)
        ballast = fill(data, 20_000)
        incarnation.wait("the broker's end", lambda: not broker.broker.status().running)
        log = (data.parent / "broker.log").read_text(errors="replace")
        row.fired += "No space left" in log
        incarnation.await_steps(STEPS_DURING)
        ballast.unlink()
        broker.start()
        incarnation.await_reports(2)
    subject.compare_all(form.draw("full"), None if form.full else 2)


def errors_of_a_disk(form: Form) -> None:
    """EIO from fdatasync and from write, by strace on a live rank: nothing is synced again through that file."""
    cases = {
        "EIO from fdatasync of the stream": "fdatasync:error=EIO:when=2",
        "EIO from write of the stream": "writev:error=EIO:when=2",
        "ENOSPC from write of the stream": "writev:error=ENOSPC:when=2..4",
    }
    _errors(form, "errors", cases)


def errors_of_a_direct_disk(form: Form) -> None:
    """The same for writes past the page cache."""
    cases = {
        "EIO from fdatasync after direct writes": "fdatasync:error=EIO:when=2",
        "EIO from a direct write": "pwritev,pwritev2:error=EIO:when=2",
        "ENOSPC from a direct write": "pwritev,pwritev2:error=ENOSPC:when=2..4",
        "a refused direct write": "pwritev,pwritev2:error=EINVAL:when=2",
    }
    _errors(form, "direct-errors", cases)


def _errors(form: Form, folder: str, cases: Mapping[str, str]) -> None:
    subject = file_job(form, folder, commit_timeout_s=20.0)
    for name, injection in cases.items():
        row = form.board.row(f"{name}, files")
        if shutil.which("strace") is None:
            row.not_run = "strace is not installed"
            continue
        for _ in range(3 if form.full else 1):
            with subject.living(row, team=TEAM) as incarnation:
                incarnation.await_reports(1)
                output = incarnation.run / "strace"
                tracer = _attach(incarnation.pid(1), _newest_segment(subject, rank=1), injection, output)
                if tracer is None:
                    row.not_run = f"strace may not attach: {output.read_text().strip()[-200:]}"
                    break
                row.injected += 1
                incarnation.wait("an injected error", lambda path=output: "(INJECTED)" in path.read_text())
                incarnation.await_reports(2)
                tracer.send_signal(signal.SIGTERM)
                tracer.wait(20)
                row.fired += "(INJECTED)" in output.read_text()
    subject.compare_all(form.draw("errors"), None if form.full else 3)


def _attach(pid: int, path: Path, injection: str, output: Path) -> subprocess.Popen[bytes] | None:
    """strace on all threads of a process, for the calls on one file; None when it is not allowed to."""
    call = injection.partition(":")[0]
    command = ["strace", "-f", "-p", str(pid), "-P", str(path), "-e", f"trace={call}", "-e", f"inject={injection}"]
    with open(output, "wb") as file:
        tracer = subprocess.Popen(command, stdout=file, stderr=file)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if re.search(r"attached", output.read_text()):
            return tracer
        if tracer.poll() is not None:
            return None
        time.sleep(0.02)
    tracer.kill()
    tracer.wait()
    return None


def short_writes(form: Form) -> None:
    """The kernel takes the first bytes of a write and refuses the rest, by a limit on the size of files."""
    row = form.board.row("short writes of the stream (limit on the size of a file), files")
    subject = file_job(form, "short", commit_timeout_s=20.0)
    draw = form.draw("short")
    for _ in range(5 if form.full else 1):
        with subject.living(row, team=TEAM) as incarnation:
            row.injected += 1
            incarnation.await_reports(1)
            segment = _newest_segment(subject, rank=1)
            # Odd, so that it falls inside a frame; the rank writes no other file as large.
            limit = segment.stat().st_size + draw.randrange(20_001, 30_000, 2)
            resource.prlimit(incarnation.pid(1), resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            incarnation.wait("a short write", lambda path=segment, end=limit: path.stat().st_size == end)
            unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
            resource.prlimit(incarnation.pid(1), resource.RLIMIT_FSIZE, unlimited)
            row.fired += segment.stat().st_size == limit  # its writer went on in another segment
            incarnation.await_reports(2)
    subject.compare_all(draw, None if form.full else 2)


def _newest_segment(subject: Subject, rank: int) -> Path:
    return max((subject.directory / "log" / "data" / f"p{rank:05d}").glob("*.seg"))
