"""Identify processes by pid and birth, so that a recycled pid is never mistaken for the process that was started."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def birth_of(pid: int) -> str | None:
    """Return when a process started, in a form that no later process shares; None if it is gone or a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The name in parentheses may contain anything: count the fields after the last parenthesis.
    fields = stat.rpartition(")")[2].split()
    state, ticks = fields[0], fields[19]
    return None if state in "ZX" else f"{_BOOT_ID.read_text().strip()}:{ticks}"


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A pid together with its birth."""

    pid: int
    birth: str

    @classmethod
    def of(cls, pid: int) -> ProcessId | None:
        birth = birth_of(pid)
        return cls(pid, birth) if birth is not None else None

    def alive(self) -> bool:
        """Return whether the process itself still runs, not another one with its pid."""
        return birth_of(self.pid) == self.birth

    def send(self, signum: signal.Signals) -> bool:
        """Send a signal to the process; returns False if it is gone."""
        with self._descriptor() as descriptor:
            if descriptor is None:
                return False
            signal.pidfd_send_signal(descriptor, signum)
            return True

    def wait(self, timeout_s: float) -> bool:
        """Wait at most ``timeout_s`` for the process to end. Returns whether it ended; reaps it if it is our child."""
        with self._descriptor() as descriptor:
            if descriptor is not None and not select.select([descriptor], [], [], timeout_s)[0]:
                return False
        with suppress(ChildProcessError):
            os.waitpid(self.pid, os.WNOHANG)
        return True

    @contextmanager
    def _descriptor(self) -> Iterator[int | None]:
        """Open a handle on the process. The birth is checked after opening: from then on the pid cannot be recycled."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            yield None
            return
        try:
            yield descriptor if self.alive() else None
        finally:
            os.close(descriptor)


def spawn(command: list[str], output: Path) -> ProcessId:
    """Start a detached process whose output is appended to ``output``.

    ``Popen`` is not used: its destructor complains about a process that is meant to outlive it.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, str(output), flags, 0o644),
        (os.POSIX_SPAWN_DUP2, 1, 2),
    ]
    pid = os.posix_spawn(command[0], command, os.environ, file_actions=actions, setsid=True)
    # A child that died at once is a zombie: it keeps its pid until it is reaped, so the empty birth is safe.
    return ProcessId.of(pid) or ProcessId(pid, "")


def wait_until(deadline: float, pause_s: float = 0.05) -> Iterator[None]:
    """Yield until ``deadline`` on the monotonic clock, pausing in between."""
    while time.monotonic() < deadline:
        yield
        time.sleep(pause_s)
