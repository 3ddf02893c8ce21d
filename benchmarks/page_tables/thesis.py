"""Whole runs and recoveries of the thesis' shapes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .goals import OURS, check
from .results import ALL, VERDICT, NotFiledError, Point, Result, Table, code, newest, three

DIRECT = "ours, direct"
SERVICE = "thesis, loading service"
RECOVERED = ("torch.load + copy", "torch.load, mmap + copy", SERVICE)


def runs(page: Path) -> Table:
    """Its two jobs."""
    head = [
        "job, ranks, a checkpoint every N epochs",
        "none",
        "`torch.save`",
        "thesis",
        "ours (range)",
        "below both",
    ]
    head += ["added by `torch.save`, thesis, ours", "ours <= 10% of `torch.save`'s", "result"]
    found = [head]
    for result, job in thesis():
        points = [point for point in result.points() if point.name.startswith(f"{job}, every ")]
        if not points:
            found.append(_not_measured(result, job, page, len(head)))
        for point in points:
            found += [
                [*_run(point, own, result.facts), result.link(page, result.path.stem[11:])] for own in _logs(point)
            ]
    return found


def _logs(point: Point) -> tuple[str, ...]:
    """Our variants of a run: with the default log first."""
    return (DIRECT, OURS) if point.has(DIRECT) else (OURS,)


def _run(point: Point, own: str, facts: dict[str, Any]) -> list[str]:
    """The cells of a run and one of our logs. Verdicts are of the medians of the rounds' ratios."""
    bases = ("torch.save", "thesis")
    below = all(point.ratios(base, own)[0] >= 1 for base in bases) if all(map(point.has, (*bases, own))) else None
    extra = facts.get(f"{point.name}: seconds added", {})
    share = None
    if own in extra and extra.get("torch.save", 0) > 0:
        share = 100 * max(0.0, extra[own]) / extra["torch.save"]
    return [
        point.name.replace("every ", "") + (", buffered" if own == OURS else ""),
        *(three(point.median(x)) if point.has(x) else "not measured" for x in ("none", *bases)),
        point.taken(own),
        VERDICT[below],
        ", ".join(three(extra[x]) if x in extra else "-" for x in (*bases, own)),
        "-" if share is None else f"{three(share)}%: {VERDICT[share <= 10]}",
    ]


def recoveries(page: Path) -> Table:
    """For each job, the times of the baselines; then a row for each source, with its speed against each of them."""
    found = [["recovery", OURS, *map(code, RECOVERED), "result"]]
    for result, job in thesis():
        goals = [goal for goal in result.found.get("goals", ()) if goal["what"].startswith(f"{job}, recovery")]
        filed = result.link(page, result.path.stem[11:])
        if not goals:
            found.append([job, f"not measured: {result.left_out.get(ALL, 'no such goal')}", "", "", "", filed])
        rows: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
        for goal in goals:
            parts = re.fullmatch(rf"({job}, recovery.*?), ours, (\w+): (.*) / ours", goal["what"])
            if not parts or parts[3] not in RECOVERED:
                raise NotFiledError(f"{result.path.name}: no row has the goal '{goal['what']}'")
            rows.setdefault((parts[1], parts[2]), {})[parts[3]] = goal
        named = set()
        for (name, source), judged in rows.items():
            point = result.point(name if result.has(name) else f"{name}, {'log' if source == 'log' else 'store'}")
            what = name.replace(", recovery", "")
            if point.name not in named:
                named.add(point.name)
                times = (point.taken(base) if point.has(base) else "-" for base in RECOVERED)
                found.append([what, "", *times, filed])
            own = f"{OURS}, {source}"
            speeds = (_speed(point, own, base, judged.get(base)) for base in RECOVERED)
            taken = f"{three(point.median(own))} {point.unit}" if point.has(own) else "not measured"
            found.append([f"{what}: {source}", taken, *speeds, ""])
    return found


def _speed(point: Point, own: str, base: str, goal: dict[str, Any] | None) -> str:
    """How many times as fast as a baseline, with the verdict of the goal of at least as fast."""
    if goal is None:
        return "-"
    said = point.times(base, own).partition(";")[0]
    check(goal, said)
    return f"{said}: {VERDICT[goal['met']]}"


def thesis() -> Iterator[tuple[Result, str]]:
    """Each job on each number of ranks, from the newest result of its workload."""
    for workload in ("criteo", "synthetic"):
        for ranks in ("1 rank", "2 ranks"):
            yield newest("thesis", workload), f"{workload}, {ranks}"


def _not_measured(result: Result, job: str, page: Path, columns: int) -> list[str]:
    """The row of a job without figures."""
    why = result.left_out.get(ALL, "no such point")
    return [job, f"not measured: {why}", *[""] * (columns - 3), result.link(page, result.path.stem[11:])]
