"""Any result as it is: all points, all goals, and which results there are."""

from __future__ import annotations

import json
from pathlib import Path

from . import costs
from .results import ALL, BENCHMARKS, Result, Table, code, newest, three


def points(page: Path, case: str, variant: str = "") -> Table:
    """Every variant of every point, also those that have no figure."""
    result = newest(case, variant)
    units = {point.unit for point in result.points() if point.baseline in point.variants}
    better = "as fast as" if units <= {"s", "ms", "us"} else "less than"
    found = [[result.said(page), "variant", "median (range)", f"times {better} the baseline (range)"]]
    found += [[name, "", f"not measured: {why}", ""] for name, why in result.left_out.items()]
    for point in result.points():
        for name, row in point.variants.items():
            times = "baseline" if name == point.baseline else "-"
            if "ratio" in row and name != point.baseline:
                middle, (least, most) = row["ratio"], row["ratio_range"]
                times = f"{three(middle)} ({three(least)}-{three(most)})"
            found.append([point.name, code(name), point.taken(name), times])
    return found


def across(page: Path, case: str, *variants: str) -> Table:
    """One row a point, one column a variant: median; times as fast as the point's baseline (range)."""
    results = [newest(case, variant) for variant in variants or ("",)]
    points = [point for result in results for point in result.points()]
    names = list(dict.fromkeys(name for point in points for name in point.variants))
    found = [["; ".join(result.said(page) for result in results), *map(code, names)]]
    for point in points:
        cells = []
        for name in names:
            row = point.variants.get(name)
            cell = "" if row is None else f"{three(row['median'])} {point.unit}" if "median" in row else "not measured"
            if row is not None and "ratio" in row and name != point.baseline:
                least, most = row["ratio_range"]
                cell += f"; {three(row['ratio'])} ({three(least)}-{three(most)})"
            cells.append(cell)
        found.append([point.name, *cells])
    return found


def goals(page: Path, case: str, variant: str = "", word: str = "") -> Table:
    """The goals of a result; with a word, those that have it: another part of the result was measured again since."""
    head, *rows = costs.judged(page, newest(case, variant))
    return [head, *(row for row in rows if not word or word in row[0].split())]


def medians(page: Path, case: str, variant: str = "") -> Table:
    """Of a case that files medians and rounds by name."""
    filed = newest(case, variant)
    result, where = filed.found, filed.said(page)
    warm, cold = (result.get(key) for key in ("median", "median_cold"))
    if why := filed.left_out.get(ALL):
        return [[where, "median (range)"], [ALL, f"not measured: {why}"]]
    if warm is not None:
        head = [where, "page cache warm (range)", *(["cold (range)"] if cold else [])]
        sides = [(warm, result["rounds"])] + ([(cold, result["rounds_cold"])] if cold else [])
    else:
        head, sides = [where, "median (range)"], [(result["medians"], result["rounds"])]
    found = [head]
    for name in dict.fromkeys(name for medians_, _ in sides for name in medians_):
        cells = []
        for medians_, rounds in sides:
            each = [row[name] for row in rounds if name in row]
            said = f"{three(medians_[name])} ({three(min(each))}-{three(max(each))})" if name in medians_ else ""
            cells.append(said or "not measured")
        found.append([name.replace("_", " "), *cells])
    return found


def results(page: Path) -> Table:
    """All that are filed, with machine and load."""
    found = [["case", "result", "machine", "load before", "clocks"]]
    for path in sorted(BENCHMARKS.glob("*/results/*.json")):
        result = Result(path, json.loads(path.read_text()))
        counted = path.stem[11:].split("_")[0] in ("counts", "figures")
        load = "-" if result.load is None else f"{result.load:.1f}"
        clocks = "none: counted" if counted else "of now" if "allocator" in result.machine else "older"
        found.append([f"`{path.parts[-3]}`", result.link(page, path.stem), result.cpu, load, clocks])
    return found
