"""Choose the engine that ``--engine`` names.

Also counts the cores that this process may use: by its affinity, and by the CPU quota of its control groups.

A container with a quota sees all cores of its host. That many workers would wait for each other, and each one uses
memory.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torchrec_stream_ckpt.errors import ConfigError
from torchrec_stream_ckpt.maintain.engine.api import Engine, InProcess, Site
from torchrec_stream_ckpt.maintain.engine.parcel import SiteAddress
from torchrec_stream_ckpt.maintain.engine.processes import Processes


def usable_cores(root: Path = Path("/")) -> int:
    """Count the cores that this process may use, at least one. Part of a core counts as one.

    Args:
        root: Folder that contains ``/proc`` and ``/sys``.
    """
    return max(1, min([len(os.sched_getaffinity(0)), *map(math.ceil, _quotas(root))]))


def _quotas(root: Path) -> Iterator[float]:
    """Yield the CPU quota, in cores, of each control group that has one, of either version."""
    try:
        lines = (root / "proc/self/cgroup").read_text("ascii").splitlines()
    except (OSError, ValueError):
        return
    for line in lines:
        _, _, rest = line.partition(":")
        kinds, _, own = rest.partition(":")
        if kinds and "cpu" not in kinds.split(","):
            continue
        top = root / "sys/fs/cgroup" / ("cpu" if kinds else "")
        for folder in (top, *_down(top, own)):  # a container may see only the top, which is then its own
            quota = _numbers(folder, "cpu.cfs_quota_us", "cpu.cfs_period_us") if kinds else _numbers(folder, "cpu.max")
            if len(quota) == 2 and quota[0] > 0 and quota[1] > 0:
                yield quota[0] / quota[1]


def _down(top: Path, own: str) -> Iterator[Path]:
    for part in Path(own.lstrip("/")).parts:
        top = top / part
        yield top


def _numbers(folder: Path, *names: str) -> list[int]:
    """Read all numbers of these files. Empty if a file cannot be read or contains anything else (``max``)."""
    try:
        return [int(text) for name in names for text in (folder / name).read_text("ascii").split()]
    except (OSError, ValueError):
        return []


_LOCAL = re.compile(r"local(?::([1-9][0-9]{0,3}))?")
_RAY = re.compile(r"ray://(\[[0-9a-fA-F:]+\]|[^\s:/?#@\[\]]+):([1-9][0-9]{0,4})")


@dataclass(frozen=True, slots=True)
class EngineName:
    """An engine as requested."""

    kind: Literal["local", "ray"]
    workers: int = 1
    """(local) Number of processes. 1 for the materializer's own process only."""
    host: str = ""
    port: int = 0

    @classmethod
    def parse(cls, text: str) -> EngineName:
        """Parse ``local``, ``local:4`` or ``ray://HOST:PORT``.

        Raises:
            ConfigError: the text has another form.
        """
        if match := _LOCAL.fullmatch(text):
            return cls("local", int(match[1]) if match[1] else usable_cores())
        if (match := _RAY.fullmatch(text)) and int(match[2]) < 2**16:
            return cls("ray", host=match[1], port=int(match[2]))
        raise ConfigError(
            f"{text!r} is not an engine",
            hint="use local (all cores), local:N (N processes) or ray://HOST:PORT (a Ray head, usually port 6379)",
        )

    @property
    def is_remote(self) -> bool:
        """True if its workers run on other hosts."""
        return self.kind == "ray"

    def open(self, here: Site, source: Callable[[], SiteAddress]) -> Engine:
        """Create the engine. It starts nothing before it is used.

        Args:
            here: Resources of the tasks that run in this process.
            source: Returns the address of the log and store that workers open.
        """
        if self.kind == "ray":
            from torchrec_stream_ckpt.maintain.engine.on_ray import OnRay

            return OnRay(here, source(), self.host.strip("[]"), self.port)
        if self.workers == 1:
            return InProcess(here)
        return Processes(here, source(), self.workers)
