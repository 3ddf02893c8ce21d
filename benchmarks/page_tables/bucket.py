"""The bucket log against raw puts and gets, its requests, and a trainer whose bucket is throttled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .results import Result, Table, newest, three

_WAYS = {"plain": "without a fault", "plain again": "the same again: the noise", "503": "503 SlowDown"}
_ATTACH = "attach after "


def speed(page: Path) -> Table:
    """Return a row for each latency of writing and of reading a span."""
    result = newest("bucket", "speed")
    found = [[result.said(page), "raw", "ours", "share of raw (range)", "CPU, raw", "CPU, ours"]]
    for point in result.points():
        if "CPU" in point.name or "speed" in point.name:
            continue
        rate, spent = (result.point(f"{point.name}, {what}") for what in ("speed", "CPU"))
        share = [f"{100 * each:.0f}" for each in point.ratios("raw", "ours")]
        cells = [f"{three(rate.median(each))} MB/s" for each in ("raw", "ours")]
        cells.append(f"{share[0]}% ({share[1]}-{share[2]})")
        found.append([point.name, *cells, *(f"{three(spent.median(each))} ms" for each in ("raw", "ours"))])
    return found


def commit(page: Path) -> Table:
    """Return a row for each latency of a commit."""
    result = newest("bucket", "commit")
    found = [[result.said(page), "one put", "a commit (range)", "requests in turn, median, most", "requests"]]
    for point in result.points():
        if point.name.startswith("commit, "):
            turns = result.facts[f"{point.name}: requests in turn"]
            asked = _kinds(result.facts[f"{point.name}: requests"])
            put = f"{three(point.median('one put'))} ms"
            found.append([point.name, put, point.taken("commit"), f"{turns['median']:g}, {turns['most']}", asked])
    return found


def attach(page: Path) -> Table:
    """Return a row for each age of a log: the first read of its control records, and the commit after it."""
    result = newest("bucket", "commit")
    (point,) = (each for each in result.points() if each.name.startswith("attach, "))
    found = [[result.said(page), point.name, "requests", "in turn", "which", "requests of the commit after it"]]
    for name, facts in result.facts.items():
        if name.startswith(_ATTACH):
            what, after = name.removeprefix(_ATTACH).partition(":")[0], facts["the commit after it"]
            which = _kinds({kind: count for kind, count in facts.items() if isinstance(count, int) and " " not in kind})
            row = [what, point.taken(what), str(facts["all"]), str(facts["in turn"]), which]
            found.append([*row, f"{sum(after.values())}: {_kinds(after)}"])
    return found


def _kinds(asked: dict[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in asked.items() if kind != "all")


def throttle(page: Path) -> Table:
    """Return a row for each way in which the bucket answers, or does not."""
    result = newest("bucket", "throttle")
    calls = [f"`step()`, {each}" for each in ("mean", "p99", "worst")]
    head = ["training step, mean", "until a marker", "requests a second", "longest time without one"]
    found = [[f"ms; {result.said(page)}", *calls, *head]]
    points = [
        result.point(f"throttle: {each}")
        for each in (
            "step(), mean",
            "step(), p99",
            "step(), worst",
            "training step, mean",
            "until a marker is committed",
        )
    ]
    for way in points[0].variants:
        rate, pause = (_fact(result, each)[way] for each in ("requests a second", "longest time without a request, s"))
        cells = [three(point.median(way)) for point in points]
        found.append([_WAYS.get(way, "no answer"), *cells, three(rate), f"{three(1e3 * pause)}"])
    return found


def _fact(result: Result, name: str) -> dict[str, Any]:
    return dict(result.facts[f"throttle: {name}"])
