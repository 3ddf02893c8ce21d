"""Lock for copying an inner log or opening a generation on both tiers. Each holder knows whether it was the last
one."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

from torchrec_stream_ckpt.errors import LogUnavailableError
from torchrec_stream_ckpt.util.layout import RELAY_LOCK
from torchrec_stream_ckpt.util.locks import held


class RelayLock:
    """A ``flock`` in the inner log's folder; it is released when the process that holds it ends.

    Args:
        folder: Folder of the inner log.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._me = uuid.uuid4().hex

    @contextlib.contextmanager
    def hold(self, timeout_s: float) -> Iterator[bool]:
        """Hold the lock. Yields True if no other process has held it since this one did.

        Raises:
            LogUnavailableError: another process holds it for ``timeout_s``, or it cannot be created.
        """
        path = self._folder / RELAY_LOCK
        with contextlib.ExitStack() as stack:
            try:
                fd = stack.enter_context(held(path, timeout_s=timeout_s, poll_s=0.05))
            except TimeoutError:
                raise LogUnavailableError(
                    f"another relay has been copying this inner log for {timeout_s:.0f} s",
                    hint="let it finish, or end it if it hangs",
                    path=path,
                    pid=_holder(path),
                ) from None
            except OSError as error:
                raise LogUnavailableError(
                    f"the inner log cannot be locked: {error.strerror}",
                    hint="run as the trainer's user, because only its owner may open this file",
                    path=path,
                ) from None
            undisturbed = os.pread(fd, 1000, 0).startswith(self._me.encode())
            os.truncate(fd, 0)
            os.pwrite(fd, f"{self._me} {os.getpid()}\n".encode(), 0)
            yield undisturbed


def _holder(path: Path) -> str | None:
    """Return the process id that the holder of the lock has written to its file."""
    try:
        return path.read_text("ascii", "replace").strip().rpartition(" ")[2] or None
    except OSError:
        return None
