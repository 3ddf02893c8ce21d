"""How many cores this process may use: by its affinity, and by the CPU quota of the control groups that it is in.

A container with a quota sees all cores of its host. As many workers as that would wait for each other, and each one
takes its memory.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path


def usable_cores(root: Path = Path("/")) -> int:
    """Count the cores, at least one; a part of a core counts as one.

    Args:
        root: Where ``/proc`` and ``/sys`` are.
    """
    return max(1, min([len(os.sched_getaffinity(0)), *map(math.ceil, _quotas(root))]))


def _quotas(root: Path) -> Iterator[float]:
    """Read the quota of each control group that has one, of either version, in cores."""
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
        for folder in (top, *_down(top, own)):  # a container may see the top alone, which is its own then
            quota = _numbers(folder, "cpu.cfs_quota_us", "cpu.cfs_period_us") if kinds else _numbers(folder, "cpu.max")
            if len(quota) == 2 and quota[0] > 0 and quota[1] > 0:
                yield quota[0] / quota[1]


def _down(top: Path, own: str) -> Iterator[Path]:
    for part in Path(own.lstrip("/")).parts:
        top = top / part
        yield top


def _numbers(folder: Path, *names: str) -> list[int]:
    """Read all numbers of these files; none where one cannot be read, or says something else (``max``)."""
    try:
        return [int(text) for name in names for text in (folder / name).read_text("ascii").split()]
    except (OSError, ValueError):
        return []
