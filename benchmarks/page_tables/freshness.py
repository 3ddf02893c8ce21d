"""How old a served row is, what following costs, and how long readers of a replica wait."""

from __future__ import annotations

from pathlib import Path

from .results import Table, newest, three

_ALL = ": of all rounds, ms"
_ONES = ("p50", "p99", "worst")
_WORK = ": work of the trainer, a step"


def quantiles(page: Path, variant: str) -> Table:
    """Return median, 99th percentile and worst value over all rounds, a row for each point that has them."""
    result = newest("freshness", variant)
    found = [[f"ms; {result.said(page)}", *_ONES, "samples"]]
    for name, each in result.facts.items():
        if name.endswith(_ALL):
            found.append([name.removesuffix(_ALL), *(three(each[one]) for one in _ONES), f"{each['samples']:,}"])
    return found + [[name, f"not measured: {why}", "", "", ""] for name, why in result.left_out.items()]


def paired(page: Path, variant: str) -> Table:
    """Return the variants of the points whose variants took turns: median, and ratio to the baseline."""
    result = newest("freshness", variant)
    found = [[result.said(page), "variant", "median (range)", "of the baseline's speed (range)"]]
    found += [[name, "", f"not measured: {why}", ""] for name, why in result.left_out.items()]
    for point in result.points():
        for name, row in point.variants.items() if ": " in point.name else ():
            share = "baseline" if name == point.baseline else "-"
            if "ratio" in row and name != point.baseline:
                share = f"{three(row['ratio'])} ({three(row['ratio_range'][0])}-{three(row['ratio_range'][1])})"
            found.append([point.name, name, point.taken(name), share])
    return found


def work(page: Path, variant: str) -> Table:
    """Return what the trainer's process has done in a step, counted: the median of the rounds."""
    result = newest("freshness", variant)
    rows = {
        f"{log.removesuffix(_WORK)}, {way}": counts
        for log, ways in result.facts.items()
        if log.endswith(_WORK)
        for way, counts in ways.items()
    }
    names = list(dict.fromkeys(name for counts in rows.values() for name in counts))
    found = [[f"a step; {result.said(page)}", *names]]
    return found + [[row, *map(_count, (counts[name] for name in names))] for row, counts in rows.items()]


def _count(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else three(value)


def worst_log(page: Path) -> list[str]:
    """Return the row of the README: the log whose rows are older."""
    facts = newest("freshness", "age").facts
    logs = {name: facts[f"{name}, rows{_ALL}"] for name in ("file", "kafka") if f"{name}, rows{_ALL}" in facts}
    name = max(logs, key=lambda each: float(logs[each]["p99"]))
    said = {"file": "file log", "kafka": "Kafka"}[name]
    return [f"age of a served row, {said}: p99, worst", f"{three(logs[name]['p99'])}, {three(logs[name]['worst'])} ms"]
