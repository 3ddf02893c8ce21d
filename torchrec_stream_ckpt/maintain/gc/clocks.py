"""Measure elapsed time by clocks that are never set. Wall clocks of different hosts are never compared.

Each list of garbage holds readings of some clocks from when it was written. A later round that reads one of the same
clocks knows the elapsed time, whatever any wall clock shows. A round that reads none of them does not, and the wait
starts again.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from torchrec_stream_ckpt.errors import MissingObjectError
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.format.manifest import Garbage
from torchrec_stream_ckpt.store.api import KeepsTime, Objects
from torchrec_stream_ckpt.store.identity import place_of
from torchrec_stream_ckpt.util.layout import probe_name
from torchrec_stream_ckpt.util.types import MarkerId, grouped

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_TIME_NAMESPACE = Path("/proc/self/ns/time")
_OF_HOST = "time:[4026531834]"
"""Time namespace in which a host boots. The kernel gives this number to no other one."""
_PROBE = "0" * 16
"""Every run puts the same probe again, so one that is killed leaves no other."""


def read_clocks(objects: Objects, job: bytes) -> dict[str, float]:
    """Read the clocks that this run can read: this host's time since boot, and the store's own clock.

    The store's clock is read by putting an empty object, always the same one.

    Args:
        objects: The store.
        job: Job under whose name the object is put.
    """
    clocks = _host_clock()
    if isinstance(objects, KeepsTime):
        name = probe_name(job, _PROBE)
        objects.put(name, [b""])
        if (shown := objects.put_at(name)) is not None:
            clocks[_store_clock(objects)] = shown
    return clocks


def glance_at_clocks(objects: Objects, known: Iterable[str]) -> dict[str, float]:
    """Read the clocks for a run that writes nothing. The store's clock shows at least the time of its newest object.

    Args:
        objects: The store.
        known: Names of objects, including the newest ones.
    """
    clocks = _host_clock()
    if isinstance(objects, KeepsTime):
        for name in known:
            with contextlib.suppress(MissingObjectError):  # gc has deleted it meanwhile
                if (shown := objects.put_at(name)) is not None:
                    clock = _store_clock(objects)
                    clocks[clock] = max(shown, clocks.get(clock, shown))
    return clocks


def _host_clock() -> dict[str, float]:
    with contextlib.suppress(OSError):  # a sandbox that hides the boot id
        boot = _BOOT_ID.read_text("ascii").strip()
        if not os.path.lexists(_TIME_NAMESPACE) or os.readlink(_TIME_NAMESPACE) == _OF_HOST:  # others shift the clock
            return {boot: time.clock_gettime(time.CLOCK_BOOTTIME)}
    return {}


def _store_clock(objects: Objects) -> str:
    return f"store {place_of(objects)}"


def elapsed(then: Mapping[str, float], now: Mapping[str, float]) -> float | None:
    """Return the minimum number of seconds elapsed. None if no clock shows it."""
    spans = [now[name] - shown for name, shown in then.items() if name in now]
    return max(0.0, min(spans)) if spans else None


def waited(lists: Iterable[tuple[str, Garbage]], clocks: Mapping[str, float]) -> dict[str, float]:
    """Return for how many seconds each object has been known to be garbage. Omits objects if no clock shows it."""
    found: dict[str, float] = {}
    for _, garbage in lists:
        gone_by = elapsed(garbage.clocks, clocks)
        if gone_by is not None:
            found |= {name: max(gone_by, found.get(name, 0.0)) for name in garbage.names}
    return found


def idle(lists: Iterable[tuple[str, Garbage]], newest: MarkerId | None, clocks: Mapping[str, float]) -> float:
    """Return the minimum seconds for which the job has had no newer marker than ``newest``, as seen by rounds."""
    same = (garbage for _, garbage in lists if newest is not None and garbage.newest == newest)
    return max((each.idle_s + (elapsed(each.clocks, clocks) or 0.0) for each in same), default=0.0)


def ages(lineage: Lineage, idle_s: float) -> dict[MarkerId, float]:
    """Return the minimum age of each marker in seconds.

    Within a generation, one trainer's clock shows it. The time between two generations does not count, because their
    trainers may have run on hosts with different clocks.

    A step of that clock looks like a wait. So the longest wait of a generation counts at most twice the next longest,
    and a single wait counts nothing: one step makes markers older by no more than that.

    Args:
        lineage: Lineage of the job.
        idle_s: Age of its newest marker.
    """
    times = grouped((commit.generation, commit.time_s) for commit in lineage.commits.values())
    found: dict[tuple[int, int], float] = {}
    for generation in sorted(times, reverse=True):
        waits = _counted([max(0.0, later - earlier) for earlier, later in pairwise(times[generation])])
        for place in reversed(range(len(times[generation]))):
            idle_s += waits[place] if place < len(waits) else 0.0
            found[generation, place] = idle_s
    places: dict[int, int] = {}
    ages_s: dict[MarkerId, float] = {}
    for commit in lineage.commits.values():
        place = places[commit.generation] = places.get(commit.generation, -1) + 1
        ages_s[commit.id] = found[commit.generation, place]
    return ages_s


def _counted(waits: Sequence[float]) -> list[float]:
    """Return the waits between markers of a generation, the longest cut to twice the next. A single one is 0."""
    if len(waits) < 2:
        return [0.0] * len(waits)
    second = sorted(waits)[-2]
    return [min(wait, 2 * second) for wait in waits]


def stands_still(lists: Iterable[tuple[str, Garbage]], clocks: Mapping[str, float]) -> str:
    """Describe why waiting objects do not age in this run. Empty if they do, or if no object waits."""
    if not clocks:
        return "this place has no clock that is never set: runs here never delete waiting objects"
    waiting = [garbage for _, garbage in lists if garbage.names]
    if waiting and all(elapsed(garbage.clocks, clocks) is None for garbage in waiting):
        return "no earlier run has read this run's clock: the grace period begins anew"
    return ""
