"""File locks that this process alone holds: released explicitly, and never inherited by a child.

``flock`` belongs to the open file, which a forked child shares. While the child lives, a close in the parent releases
nothing, and a lock outlives the parent that held it. So locks are released explicitly, and each child of ``fork`` (for
example a DataLoader's workers) drops its copies at its start. A child that runs another program has none: all
descriptors here are close-on-exec.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path

_OWNER_ONLY = 0o600

_forking = threading.Lock()
"""Prevents a fork between the opening of a lock's file and its entry in ``_open``."""
_open: set[int] = set()
"""Descriptors of lock files of this process."""


def open_lock(path: Path | str, *, dir_fd: int | None = None, create: bool = True) -> int:
    """Open the file of a lock. Only its owner may open it: any other user could hold the lock forever.

    Raises:
        OSError: It cannot be opened: it is another user's, or a link.
    """
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if create else 0)
    with _forking:
        fd = os.open(path, flags, _OWNER_ONLY, dir_fd=dir_fd)
        _open.add(fd)
    try:
        found = os.fstat(fd)
        if found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) != _OWNER_ONLY:
            os.fchmod(fd, _OWNER_ONLY)  # from an older program, or created under an unusual umask
    except BaseException:
        close_lock(fd)
        raise
    return fd


def try_lock(fd: int, *, exclusive: bool = True) -> bool:
    """Take the lock of an open file if no other lock prevents it. Returns whether it was taken."""
    try:
        fcntl.flock(fd, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def await_lock(fd: int, timeout_s: float, *, exclusive: bool = True, poll_s: float = 0.01) -> bool:
    """Take the lock of an open file as soon as no other lock prevents it.

    Returns False if one does until the time-out.
    """
    deadline = time.monotonic() + timeout_s
    while not try_lock(fd, exclusive=exclusive):
        if time.monotonic() >= deadline:
            return False
        time.sleep(poll_s)
    return True


def close_lock(fd: int) -> None:
    """Release the lock, even if a child still has the file open, and close the file."""
    with _forking:
        _open.discard(fd)
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)


@contextlib.contextmanager
def held(path: Path, *, timeout_s: float, poll_s: float = 0.01) -> Iterator[int]:
    """Hold the exclusive lock of ``path``. Yields its descriptor.

    Raises:
        TimeoutError: Another process has held it until the time-out. The file is closed again.
        OSError: The file cannot be opened.
    """
    fd = open_lock(path)
    try:
        if not await_lock(fd, timeout_s, poll_s=poll_s):
            pid = holder(fd)
            by = f" by process {pid}" if pid is not None else ""
            raise TimeoutError(errno.ETIMEDOUT, f"locked for {timeout_s:.0f} s{by}")
        yield fd
    finally:
        close_lock(fd)


def holder(fd: int) -> int | None:
    """Return the id of the process that took the lock of an open file.

    Returns None if no process of this host holds it, or if the system does not list locks.
    """
    found = os.fstat(fd)
    place = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    try:
        locks = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return None
    fields = (line.split() for line in locks)
    return next((int(each[4]) for each in fields if each[1] == "FLOCK" and each[5] == place and each[4] != "-1"), None)


def _give_away() -> None:
    """(child of a fork) Drop the parent's locks.

    The descriptors stay valid, so that their holders may still close them.
    """
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for fd in _open:
        os.dup2(nothing, fd, inheritable=False)
    os.close(nothing)
    _open.clear()
    _forking.release()


os.register_at_fork(before=_forking.acquire, after_in_parent=_forking.release, after_in_child=_give_away)
