"""Locked folders for temporary files: the next process deletes those that a killed process has left."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
from pathlib import Path

from torchrec_stream_ckpt.util.locks import close_lock, open_lock, try_lock

PREFIX = ".stream-ckpt-"
_LOCK = "lock"
_ATTEMPTS = 10


class ScratchFolder:
    """A new folder for temporary files. Folders of killed processes of this user next to it are deleted first.

    Args:
        where: Parent folder. If None, the one for temporary files (``TMPDIR``).

    Raises:
        OSError: It cannot be created.
    """

    def __init__(self, where: Path | None = None) -> None:
        self.where = where if where is not None else Path(tempfile.gettempdir())
        """Its parent folder."""
        clear_dead(self.where)
        self.path, self._lock = _make(self.where)

    def close(self) -> None:
        """Delete the folder and its content."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            close_lock(self._lock)
            self._lock = None


def clear_dead(where: Path) -> None:
    """Delete scratch folders of this user whose process has ended.

    Those without a lock stay: their owner is unknown.
    """
    with contextlib.suppress(OSError):
        for path in where.glob(f"{PREFIX}*"):
            with contextlib.suppress(OSError):
                _clear(path)


def _make(where: Path) -> tuple[Path, int | None]:
    """Create a folder, and its lock.

    The lock is None if the file system has no locks: only its owner deletes that folder.
    """
    for _ in range(_ATTEMPTS):
        path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=where))
        lock = None
        try:
            lock = open_lock(path / _LOCK)
            if try_lock(lock) and os.fstat(lock).st_nlink:
                return path, lock
        except OSError:
            if not path.is_dir():  # cleared away before it was locked
                continue
            (path / _LOCK).unlink(missing_ok=True)
            if lock is not None:
                close_lock(lock)
            return path, None
        close_lock(lock)  # another process took it for a dead one's, between those two calls
    raise FileNotFoundError(f"another program deletes new folders in {where}")


def _clear(path: Path) -> None:
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        return
    lock = open_lock(path / _LOCK, create=False)
    try:
        if try_lock(lock):
            shutil.rmtree(path, ignore_errors=True)
    finally:
        close_lock(lock)
