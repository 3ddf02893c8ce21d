"""Workers of a process, as the kernel knows them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path


def workers_of(process: BaseProcess) -> list[int]:
    """Pids of the children of all of its threads: spawned ones, not what watches them."""
    found: list[int] = []
    tasks = Path(f"/proc/{process.pid}/task")
    with suppress(OSError):  # it has ended
        for thread in list(tasks.iterdir()):
            with suppress(OSError):  # a thread or a child has just ended
                pids = (thread / "children").read_text().split()
                found += [int(pid) for pid in pids if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return found


def stopped(pids: Sequence[int]) -> list[int]:
    """Those that SIGSTOP holds."""
    return [pid for pid in pids if _state(pid) == "T"]


def is_gone(pid: int) -> bool:
    """Whether it has ended, waited for or not."""
    try:
        return _state(pid) == "Z"
    except OSError:
        return True


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
