"""The bucket log against raw puts and gets, its requests, and a trainer whose bucket is throttled."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from torchrec_stream_ckpt.extras.sizing.inputs import UnitCosts
from torchrec_stream_ckpt.extras.sizing.requests import Requests, log_requests

from .proof import planned
from .results import Result, Table, newest, three

SMALL = "plan --tables 26 --rows {} --dim {} --touched-rows-per-second {} --ranks {} --log bucket --marker-every-s 60"
"""Jobs whose ranks send little; their commands stand on the page."""
SMALL_JOBS = (("1e6", 32, 20_000), ("4e6", 64, 100_000))
"""Rows of a table, their columns, changed rows a second."""
SMALL_RANKS = (8, 64, 512)

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


def small_ranks(page: Path) -> Table:
    """Return a row for each job and number of ranks: USD a month, whatever shares an object."""
    found = [["job", "ranks", "sent a marker and rank", "whole bill", "of it the log"]]
    found[0] += ["log, one PUT a rank and marker at the least", "log, grouped by nodes of 8 ranks"]
    for rows, dim, changed in SMALL_JOBS:
        for ranks in SMALL_RANKS:
            bill = small_bill(rows, dim, changed, ranks)
            name = f"{changed:,} rows/s, 26 tables of {rows} x {dim}" if ranks == SMALL_RANKS[0] else ""
            usd = [f"{bill[each]:,.0f}" for each in ("whole", "log", "at least", "grouped")]
            found.append([name, str(ranks), f"{three(bill['sent'] / 1e6)} MB", *usd])
    return found


def small_bill(rows: str, dim: int, changed: int, ranks: int, *more: str) -> dict[str, float]:
    """Return bytes sent a marker and rank, and USD a month: the whole bill, its log, and logs of other objects."""
    plan = planned(*more, command=SMALL.format(rows, dim, changed, ranks))
    log = plan["month"]["log"]
    num_bytes, costs = log["written_bytes"], UnitCosts()

    def usd(writers: int) -> float:
        return log["times"] * log_requests(writers, num_bytes=num_bytes, seconds=0).cost(costs)

    return {
        "sent": num_bytes / ranks,
        "whole": plan["month_usd"],
        "log": log["times"] * Requests(**log["once"]).cost(costs),
        "at least": usd(ranks),
        "grouped": usd(math.ceil(ranks / 8)),
    }


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
