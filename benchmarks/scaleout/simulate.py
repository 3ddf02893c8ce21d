"""A day of a materializer at a size that this machine does not have: work arrives by the clock, cores take it.

Two queues, as the engine has them: folds of markers first, merges of bases with what is left, one base after another. A
base is due when the intervals since the last one are more than ``rebase`` bases. Work is cut into slices of a second; a
task that has begun is finished first. Nothing is drawn: the same numbers give the same day.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Day:
    """What is simulated. Bytes and seconds."""

    table_bytes: float
    interval_bytes: float
    """Rows that changed between two markers, each once."""
    frame_bytes: float
    """Frames of the log between two markers."""
    ranks: int
    marker_s: float
    workers: int
    fold_s_per_byte: float
    """Core seconds of a byte of frames."""
    merge_s_per_byte: float
    """Core seconds of a byte that a merge reads, the reading back of what it writes included."""
    task_s: float
    """Of the materializer, for each task: to plan it, hand it over and hear of it."""
    request_s: float = 0.02
    """Of a request to the store."""
    requests_at_once: int = 4
    store_bytes_per_s: float = 3e9
    """What the store gives all workers, and as much again that it takes from them."""
    rebase: float = 1.0
    hours: float = 24.0
    away: tuple[float, float] = (12 * 3600.0, 600.0)
    """When the store goes away, and for how long."""
    lost_share: float = 0.01
    """Work that is done twice, since workers die."""


def simulate(day: Day) -> dict[str, Any]:
    """Lag of markers over the day, bases, and how busy everything was."""
    fold_tasks = max(1.0, min(day.ranks, day.frame_bytes / (64 * 2**20)))
    # In sequence, for each marker: what the leader asks the store, and hands to workers.
    leader_s = 3 * day.ranks * day.request_s / day.requests_at_once + fold_tasks * day.task_s
    folds: deque[list[float]] = deque()  # [committed at, bytes of frames left]
    since, base, merging, bases, merged_left = 0.0, 0.0, 0.0, 0, 0.0
    lags, late_bases, busy, due_at, leader_free = [], [], 0.0, deque[float](), 0.0
    owed: deque[float] = deque()  # bytes that merges which are due will read
    for now in range(int(day.hours * 3600)):
        if now % day.marker_s == 0:
            first = now == 0
            folds.append([float(now), day.table_bytes if first else day.frame_bytes])
        if day.away[0] <= now < day.away[0] + day.away[1]:
            continue
        cores = day.workers * (1 - day.lost_share)
        reads = writes = day.store_bytes_per_s
        while folds and cores > 1e-9 and writes > 1:
            written = day.interval_bytes / day.frame_bytes
            take = min(folds[0][1], cores / day.fold_s_per_byte, writes / written)
            folds[0][1] -= take
            cores -= take * day.fold_s_per_byte
            writes -= take * written
            if folds[0][1] > 1:
                break
            committed, _ = folds.popleft()
            leader_free = max(leader_free, now) + leader_s
            lags.append(max(now, leader_free) - committed)
            if base == 0.0:
                base = day.table_bytes
            else:
                since += day.interval_bytes
                if since > day.rebase * base:
                    owed.append(since + base)
                    due_at.append(float(now))
                    since = 0.0
        if merged_left <= 0 and owed:
            merged_left = owed.popleft()
        if merged_left > 0 and cores > 1e-9:
            written = 1.0 / (1.0 + day.rebase)  # of what is read: the base of the two
            take = min(merged_left, cores / day.merge_s_per_byte, reads / (1.0 + written), writes / written)
            merged_left -= take
            cores -= take * day.merge_s_per_byte
            merging += take
            if merged_left <= 1:
                merged_left, bases = 0.0, bases + 1
                late_bases.append(now + 1 - due_at.popleft())
        busy += day.workers - cores
    steady = lags[2:]
    outage = (day.away[0] / day.marker_s, (day.away[0] + 2 * day.away[1]) / day.marker_s)
    undisturbed = [lag for number, lag in enumerate(lags) if number > 40 and not outage[0] - 1 <= number <= outage[1]]
    return {
        "workers": day.workers,
        "rebase": day.rebase,
        "store_bytes_per_s": day.store_bytes_per_s,
        "markers": len(lags),
        "behind_at_the_end": len(folds),
        "lag_s_first_marker": lags[0] if lags else None,
        "lag_s_mean": sum(undisturbed) / len(undisturbed) if undisturbed else None,
        "lag_s_worst": max(undisturbed, default=None),
        "lag_s_worst_with_outage": max(steady, default=None),
        "caught_up_after_outage_s": _caught_up(lags, day),
        "bases": bases,
        "bases_owed_at_the_end": len(due_at),
        "base_late_s_worst": max(late_bases, default=None),
        "merged_bytes": merging,
        "leader_s_a_marker": leader_s,
        "busy": busy / (day.workers * day.hours * 3600),
        "keeps_up": len(folds) <= 2 and len(due_at) <= 1,
    }


def _caught_up(lags: list[float], day: Day) -> float | None:
    """Seconds after the outage until a marker is no later than two intervals."""
    end = day.away[0] + day.away[1]
    for number, lag in enumerate(lags):
        committed = number * day.marker_s
        if committed >= day.away[0] and lag <= 2 * day.marker_s and committed + lag >= end:
            return committed + lag - end
    return None
