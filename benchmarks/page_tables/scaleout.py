"""What workers make of a materializer's tasks, and a simulated day."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from .results import Table, newest, ranged, three

_GOAL = 1.7
_SHARES_NOTHING = "{} processes that share nothing"
_DAYS = [
    (True, 1.0, 12e9, 8),
    (True, 1.0, 12e9, 16),
    (True, 1.0, 12e9, 37),
    (True, 3.0, 6e9, 16),
    (False, 1.0, 12e9, 16),
    (False, 3.0, 6e9, 16),
    (False, 1.0, 3e9, 16),
]
"""(spans, --rebase, bytes a second of the store each way, workers): those that decide something."""


def workers(page: Path) -> Table:
    """Of each kind of work: how many times as fast as one core, and the seconds of both."""
    result = newest("scaleout")
    measured, tasks = result.found["measured"], result.found["tasks"]
    several = f"{measured['workers']} cores"
    rounds = {name: [each["wall_s"] for each in measured["rounds"][name]] for name in ("one core", several)}
    folds: tuple[list[float], list[float]] = (rounds["one core"], rounds[several])
    beside = [
        each["wall_s"] / measured["workers"] for each in measured["rounds"][_SHARES_NOTHING.format(measured["workers"])]
    ]
    rows = [("folds and merges", *folds), ("the same by processes that share nothing", rounds["one core"], beside)]
    names = {"scrub": "a scrub", "proof": "a marker against its proof"}
    rows += [
        (text, tasks[name]["one_core_s"], tasks[name]["several_s"]) for name, text in names.items() if name in tasks
    ]
    found = [[result.said(page), "one core, s", f"{several}, s", "times as fast (range)", "goal"]]
    for text, one, more in rows:
        ratios = [a / b for a, b in zip(one, more, strict=True)]
        middle = statistics.median(ratios)
        goal = "-"
        if text == "folds and merges":
            goal = f"{_GOAL}: {'reached' if middle >= _GOAL else '**missed**'}"
        times = ranged([middle, min(ratios), max(ratios)], 2)
        found.append([text, three(statistics.median(one)), three(statistics.median(more)), times, goal])
    return found


def day(page: Path) -> Table:
    """The simulated day, with the costs that the same result has measured."""
    result = newest("scaleout")
    head = [
        "workers",
        "store, each way",
        "`--rebase`, `--compact`",
        "lag of a marker, mean and worst",
        "after the outage",
        "bases and spans of the day",
    ]
    return [head, *(_day(_simulated(result.found["simulated"], *wanted), *wanted) for wanted in _DAYS)]


def _simulated(days: list[dict[str, Any]], spans: bool, rebase: float, store: float, count: int) -> dict[str, Any]:
    wanted = (rebase, store, count)
    for found in days:
        has_spans = found["spans"] + found["spans_owed_at_the_end"] > 0
        if has_spans == spans and (found["rebase"], found["store_bytes_per_s"], found["workers"]) == wanted:
            return found
    raise ValueError(f"no simulated day with {wanted}, {'with' if spans else 'without'} spans")


def _day(found: dict[str, Any], spans: bool, rebase: float, store: float, count: int) -> list[str]:
    done, owed = (found[f"bases{end}"] + found[f"spans{end}"] for end in ("", "_owed_at_the_end"))
    late_s = max(found["base_late_s_worst"] or 0.0, found["span_late_s_worst"] or 0.0)
    caught_up = found["caught_up_after_outage_s"]
    return [
        str(count),
        f"{store / 1e9:.0f} GB/s",
        f"{rebase:.0f}, `{'span4' if spans else 'none'}`",
        f"{found['lag_s_mean']:.0f} s, {found['lag_s_worst']:.0f} s",
        "not caught up" if caught_up is None else f"caught up in {caught_up / 60:.1f} min",
        f"all {done + owed}, at most {late_s / 60:.0f} min late"
        if found["keeps_up"]
        else f"fall behind: {done} of {done + owed}",
    ]
