"""A day of a materializer at a size that this machine does not have: work arrives by the clock, cores take it.

Two queues, as the engine has them: folds of markers first, merges with what is left, one after another, in the order of
the markers that want them. A span is due at every fourth, sixteenth, and so on marker (``span_radix``), a base when the
pieces since the last one are more than ``rebase`` bases; at one marker, spans come first. Work is cut into slices of a
second; a task that has begun is finished first. Nothing is drawn: the same numbers give the same day.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

LATE_S = 900.0
"""A merge that has waited longer at the end of the day is behind."""


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
    requests_of_rank: int = 2
    """For its segment of a marker, by the materializer: a look and a put."""
    requests_at_once: int = 16
    """``reads_ahead`` of an object store."""
    store_bytes_per_s: float = 3e9
    """What the store gives all workers, and as much again that it takes from them."""
    rebase: float = 1.0
    span_bytes: tuple[float, ...] = ()
    """Of a span of each size, the smallest first: ``sizing.fold_load``. None of them: no spans."""
    span_radix: int = 4
    hours: float = 24.0
    away: tuple[float, float] = (12 * 3600.0, 600.0)
    """When the store goes away, and for how long."""
    lost_share: float = 0.01
    """Work that is done twice, since workers die."""


@dataclass(frozen=True, slots=True)
class Merge:
    """One that is due."""

    read_bytes: float
    written_bytes: float
    due_at: float
    is_base: bool


class Pieces:
    """What lies after the newest base, in the order of the materializer's rules."""

    def __init__(self, day: Day) -> None:
        self._day = day
        self._marker = 0
        self._ends: list[tuple[int, float]] = []
        """(where it begins, bytes) of each piece, oldest first."""

    def came(self, now: float) -> list[Merge]:
        """A marker has come into the store; returns the merges that are due with it."""
        day, due = self._day, []
        self._ends.append((self._marker, day.interval_bytes))
        self._marker += 1
        for level, size in enumerate(day.span_bytes, 1):
            length = day.span_radix**level
            place = next((at for at, (begin, _) in enumerate(self._ends) if begin == self._marker - length), None)
            if self._marker % length or place is None or len(self._ends) - place < 2:
                break
            due.append(Merge(sum(each for _, each in self._ends[place:]), size, now, is_base=False))
            self._ends[place:] = [(self._marker - length, size)]
        rest = sum(each for _, each in self._ends)
        if rest > day.rebase * day.table_bytes:
            due.append(Merge(rest + day.table_bytes, day.table_bytes, now, is_base=True))
            self._ends = []
        return due


def simulate(day: Day) -> dict[str, Any]:
    """Lag of markers over the day, bases, and how busy everything was."""
    fold_tasks = max(1.0, min(day.ranks, day.frame_bytes / (64 * 2**20)))
    # In sequence, for each marker: what the leader asks the store, and hands to workers.
    requests = day.requests_of_rank * day.ranks
    leader_s = requests * day.request_s / day.requests_at_once + fold_tasks * day.task_s
    folds: deque[list[float]] = deque()  # [committed at, bytes of frames left]
    pieces = Pieces(day)
    base, merging, bases, spans, merged_left = 0.0, 0.0, 0, 0, 0.0
    lags, late_bases, late_spans, busy, leader_free = [], [], [], 0.0, 0.0
    owed: deque[Merge] = deque()
    current = None
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
                owed.extend(pieces.came(now))
        while current is None or cores > 1e-9:
            if current is None and owed:
                current = owed.popleft()
                merged_left = current.read_bytes
            if current is None or min(cores, reads, writes) <= 1e-9:
                break
            written = current.written_bytes / current.read_bytes
            take = min(merged_left, cores / day.merge_s_per_byte, reads / (1.0 + written), writes / written)
            merged_left -= take
            cores -= take * day.merge_s_per_byte
            merging += take
            reads -= take * (1.0 + written)
            writes -= take * written
            if merged_left > 1:
                break
            (late_bases if current.is_base else late_spans).append(now + 1 - current.due_at)
            bases, spans = bases + current.is_base, spans + (not current.is_base)
            current = None
        busy += day.workers - cores
    waiting = [*owed, *([current] if current is not None else [])]
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
        "bases_owed_at_the_end": sum(each.is_base for each in waiting),
        "base_late_s_worst": max(late_bases, default=None),
        "spans": spans,
        "spans_owed_at_the_end": sum(not each.is_base for each in waiting),
        "span_late_s_worst": max(late_spans, default=None),
        "merged_bytes": merging,
        "leader_s_a_marker": leader_s,
        "busy": busy / (day.workers * day.hours * 3600),
        "keeps_up": len(folds) <= 2 and all(now + 1 - each.due_at <= LATE_S for each in waiting),
    }


def _caught_up(lags: list[float], day: Day) -> float | None:
    """Seconds after the outage until a marker is no later than two intervals."""
    end = day.away[0] + day.away[1]
    for number, lag in enumerate(lags):
        committed = number * day.marker_s
        if committed >= day.away[0] and lag <= 2 * day.marker_s and committed + lag >= end:
            return committed + lag - end
    return None
