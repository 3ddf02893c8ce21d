"""How long ago something was seen, by clocks that nobody sets. No two hosts' wall clocks are ever compared.

Each list of garbage holds what some clocks showed when it was written. A later round that reads one of the same clocks
knows how much time has gone by, whatever any wall clock says; one that reads none of them does not, and waits anew.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.format.manifest import Garbage
from torchrec_stream_ckpt.layout import probe_name
from torchrec_stream_ckpt.store.api import KeepsTime, Objects
from torchrec_stream_ckpt.types import MarkerId

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_TIME_NAMESPACE = Path("/proc/self/ns/time")


def read_clocks(objects: Objects, job: bytes, *, probe: bool = True) -> dict[str, float]:
    """What the clocks show that this run can read: this host's since it has booted, and the store's own.

    Args:
        objects: The store.
        job: Whose objects are looked at.
        probe: Ask the store, which is done by an object that is put and deleted again.
    """
    clocks = {}
    try:
        boot, namespace = _BOOT_ID.read_text("ascii").strip(), os.readlink(_TIME_NAMESPACE)
        clocks[f"{boot} {namespace}"] = time.clock_gettime(time.CLOCK_BOOTTIME)
    except OSError:  # a sandbox that shows neither
        pass
    if probe and isinstance(objects, KeepsTime):
        name = probe_name(job, secrets.token_hex(8))
        objects.put(name, [b""])
        shown = objects.put_at(name)
        objects.delete(name)
        if shown is not None:
            clocks["store"] = shown
    return clocks


def elapsed(then: Mapping[str, float], now: Mapping[str, float]) -> float | None:
    """Seconds that have gone by at least; None when no clock shows it."""
    spans = [now[name] - shown for name, shown in then.items() if name in now]
    return max(0.0, min(spans)) if spans else None


def waited(lists: Iterable[tuple[str, Garbage]], clocks: Mapping[str, float]) -> dict[str, float]:
    """How long each object has been known to be garbage, for those of which a clock shows it."""
    found: dict[str, float] = {}
    for _, garbage in lists:
        gone_by = elapsed(garbage.clocks, clocks)
        if gone_by is not None:
            found |= {name: max(gone_by, found.get(name, 0.0)) for name in garbage.names}
    return found


def idle(lists: Iterable[tuple[str, Garbage]], newest: MarkerId | None, clocks: Mapping[str, float]) -> float:
    """How long the job has had no newer marker than ``newest``, at least, as rounds have seen it."""
    same = (garbage for _, garbage in lists if newest is not None and garbage.newest == newest)
    return max((each.idle_s + (elapsed(each.clocks, clocks) or 0.0) for each in same), default=0.0)


def ages(lineage: Lineage, idle_s: float) -> dict[MarkerId, float]:
    """How old each marker is at least, in seconds.

    Within a generation one trainer's clock tells it. What went by between two generations, whose trainers may have run
    on hosts of other clocks, does not count.

    Args:
        lineage: Of the job.
        idle_s: Age of its newest marker.
    """
    times: dict[int, list[float]] = {}
    for commit in lineage.commits.values():
        times.setdefault(commit.generation, []).append(commit.time_s)
    younger: dict[int, float] = {}
    for generation in sorted(times, reverse=True):
        younger[generation] = idle_s
        idle_s += max(0.0, times[generation][-1] - times[generation][0])
    return {
        commit.id: younger[commit.generation] + max(0.0, times[commit.generation][-1] - commit.time_s)
        for commit in lineage.commits.values()
    }
