"""One at a time copies an inner log, or opens a generation on both tiers; each knows whether it was the last one."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from torchrec_stream_ckpt.errors import LogUnavailableError
from torchrec_stream_ckpt.layout import RELAY_LOCK


class RelayLock:
    """A ``flock`` in the inner log's folder: it goes with the process that holds it.

    Args:
        folder: Of the inner log.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._me = uuid.uuid4().hex

    @contextlib.contextmanager
    def hold(self, timeout_s: float) -> Iterator[bool]:
        """Hold the lock; gives whether nobody else has held it since this one did.

        Raises:
            LogUnavailableError: somebody else holds it for so long, or it cannot be made.
        """
        path = self._folder / RELAY_LOCK
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise LogUnavailableError(f"cannot lock the inner log: {error.strerror}", path=path) from None
        try:
            self._acquire(fd, path, timeout_s)
            undisturbed = os.pread(fd, 1000, 0).startswith(self._me.encode())
            os.truncate(fd, 0)
            os.pwrite(fd, f"{self._me} {os.getpid()}\n".encode(), 0)
            yield undisturbed
        finally:
            os.close(fd)

    def _acquire(self, fd: int, path: Path, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    _, _, pid = os.pread(fd, 1000, 0).decode("ascii", "replace").strip().rpartition(" ")
                    raise LogUnavailableError(
                        f"another relay has been copying this inner log for {timeout_s:.0f} s",
                        hint="let it finish; if it hangs, end it",
                        path=path,
                        pid=pid,
                    ) from None
                time.sleep(0.05)
            else:
                return
