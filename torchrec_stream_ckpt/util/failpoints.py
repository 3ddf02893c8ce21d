"""Points at which a process can be killed, stopped or made to fail, for tests of the state that this leaves.

Off by default: a point is then one look at an empty mapping. Armed by the environment of the process,

    STREAM_CKPT_FAILPOINTS="commit.append=kill@2;segment.write=raise"

or by :func:`arm`: the second pass of ``commit.append`` ends the process by SIGKILL, the first pass of ``segment.write``
raises ``OSError`` with EIO. The actions are ``kill``, ``stop`` (SIGSTOP) and ``raise``. A point that fires first adds a
line with its name to the file named by STREAM_CKPT_FAILPOINTS_REPORT, so that a test knows it did.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import threading
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from torchrec_stream_ckpt.errors import ConfigError

_FUSE = re.compile(r"([a-z_.]+)=(kill|stop|raise)(?:@([1-9][0-9]*))?")


@dataclass
class _Fuse:
    action: str
    nth: int
    passes: count[int] = field(default_factory=lambda: count(1))


_armed: dict[str, _Fuse] = {}
_report: Path | None = None


def failpoint(name: str) -> None:
    """Pass the point ``name``. Thread-safe.

    Raises:
        OSError: It is armed with ``raise``, and this is the pass.
    """
    if _armed and (fuse := _armed.get(name)) and next(fuse.passes) == fuse.nth:
        _fire(name, fuse.action)


def arm(spec: str, report: Path | None = None) -> None:
    """Arm the points of ``spec`` in this process, and disarm all others. An empty ``spec`` disarms all.

    Raises:
        ConfigError: ``spec`` is not ``NAME=ACTION[@NTH]``, joined by semicolons.
    """
    global _report
    fuses = {}
    for part in filter(None, spec.split(";")):
        match = _FUSE.fullmatch(part)
        if match is None:
            raise ConfigError(
                f"'{part}' is not a failpoint", hint="write NAME=ACTION@NTH; ACTION is kill, stop or raise"
            )
        fuses[match[1]] = _Fuse(match[2], int(match[3] or 1))
    _armed.clear()
    _armed.update(fuses)
    _report = report


def _fire(name: str, action: str) -> None:
    if _report is not None:
        with open(_report, "a", encoding="ascii") as file:
            file.write(f"{name}\n")
    if action == "raise":
        raise OSError(errno.EIO, f"failpoint {name}")
    # To this thread: another thread may handle a signal for the process, and this one would continue for a moment.
    signal.pthread_kill(threading.get_ident(), signal.SIGKILL if action == "kill" else signal.SIGSTOP)


def arm_by_environment() -> None:
    report = os.environ.get("STREAM_CKPT_FAILPOINTS_REPORT")
    arm(os.environ.get("STREAM_CKPT_FAILPOINTS", ""), Path(report) if report else None)


arm_by_environment()
