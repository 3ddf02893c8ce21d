"""A broker of a test's own, which it may kill, stop or rob of what it has stored."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

from tests.java_classes import FORMATTED
from torchrec_stream_ckpt.extras.broker.kraft import Broker


class OwnBroker(Broker):
    """Its disk is formatted already: a JVM takes a second of CPU for that.

    Args:
        directory: Its folder, which may be that of a broker that was started before.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        data = directory / "data"
        if FORMATTED.exists() and not (data / "meta.properties").exists():
            shutil.copytree(FORMATTED, data, dirs_exist_ok=True)

    @property
    def uri(self) -> str:
        """URI of the log of a job on it."""
        return self.status().uri("job")

    def begin(self, die_with: int = 0) -> None:
        """Start it, to end at the latest with a process, by default this one."""
        self.start(die_with=die_with or os.getpid())

    def signal(self, number: signal.Signals) -> None:
        pid = self.status().pid
        assert pid is not None
        os.kill(pid, number)

    def kill(self) -> bool:
        """SIGKILL, and wait until it is gone: the kernel takes a while to take a Java apart."""
        self.signal(signal.SIGKILL)
        deadline = time.monotonic() + 120
        while self.status().running:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return True

    def pause(self) -> None:
        """SIGSTOP, and wait until all threads have stopped: on a busy machine some may answer once more before."""
        self.signal(signal.SIGSTOP)
        threads = list(Path(f"/proc/{self.status().pid}/task").iterdir())
        deadline = time.monotonic() + 120
        while any(_state(thread) != "T" for thread in threads):
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def segment(self, partition: str) -> Path:
        """The only file of a partition."""
        (found,) = self._dir.rglob(f"{partition}/*.log")
        return found

    def cut(self, partition: str, keep: Callable[[int], int], die_with: int = 0) -> None:
        """As a power loss of the only copy: the end of a partition was never on the disk."""
        self.kill()
        segment = self.segment(partition)
        os.truncate(segment, keep(segment.stat().st_size))
        for snapshot in segment.parent.glob("*.snapshot"):
            snapshot.unlink()
        self.begin(die_with)

    def close(self) -> None:
        """Stop it, even if it stands still."""
        if self.status().running:
            self.signal(signal.SIGCONT)
        self.stop(timeout_s=5)


def _state(thread: Path) -> str:
    """One letter of /proc, T for stopped; a thread that has ended since will not answer either."""
    try:
        return (thread / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "T"
