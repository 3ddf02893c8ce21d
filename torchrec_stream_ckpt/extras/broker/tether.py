"""Run a command that must not outlive another process.

Usage: ``python -I tether.py PID BIRTH COMMAND...``. A watcher is forked off, then this process becomes COMMAND, so the
caller's child is COMMAND itself. The kernel's parent-death signal is not used: it fires when the *thread* that forked
ends, which in a threaded starter is long before the process ends. Uses the standard library only, because it is run by
its path.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from pathlib import Path


def _birth(pid: int) -> str:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}:{fields[19]}"


def _watch(master: int, servant: int) -> None:
    """Wait for either process to end; if the master ends, kill the servant."""
    ended, _, _ = select.select([master, servant], [], [])
    if master in ended and servant not in ended:
        signal.pidfd_send_signal(servant, signal.SIGKILL)


def main() -> None:
    pid, birth, command = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    try:
        master = os.pidfd_open(pid)
        gone = _birth(pid) != birth
    except OSError:
        gone = True
    if gone:
        sys.exit(f"the broker is to stop when process {pid} ends, but it has already ended")
    servant = os.pidfd_open(os.getpid())
    if os.fork() == 0:
        _watch(master, servant)
        os._exit(0)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
