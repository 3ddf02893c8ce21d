"""Figures of others' papers, counted or measured here."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .results import Table, code, newest, three


def _figure(name: str) -> dict[str, Any]:
    found: dict[str, Any] = newest("recovery", "tenth").found["figures"][name]
    return found


def _two(values: Iterable[float]) -> list[str]:
    return [f"{value:.2f}" for value in values]


def figure_13(page: Path) -> Table:
    found = [["R", "written", "read back", "read: average", "at marker 10", "at 25", "at 50"]]
    by_ratio = {**_figure("13")["R"], "this library's store, by default": _figure("13")["store, by default"]}
    for name, row in by_ratio.items():
        parts = (row["written_of_naive"], row["read_back_of_naive"], row["average_of_naive"])
        found.append([name, *_two([*parts, *row["restored_of_naive"].values()])])
    return found


def figure_14a(page: Path) -> Table:
    found = [["filters", "written", "read back", "read: average", "chunks read in vain"]]
    for name, row in _figure("14a").items():
        parts = (row["written_of_naive"], row["read_back_of_naive"], row["average_of_naive"])
        found.append([name, *_two(parts), str(row["asked"]["by_ratio"])])
    return found


def figure_14b(page: Path) -> Table:
    head = [
        "R",
        "bundles: at marker 10",
        "at 25",
        "at 50",
        "a file for each part: at 10",
        "at 25",
        "at 50",
        "rows of no use",
    ]
    found = [head]
    for name, row in _figure("14b").items():
        files = [*row["files"].values(), *row["files_unbundled"].values()]
        found.append([name, *map(str, files), *_two([row["dead_of_naive"]])])
    return found


def figure_15(page: Path) -> Table:
    found = [["", "written", "stored", "read at marker 20", "at 50", "at 80", "at 100"]]
    for name, row in _figure("15")["layouts"].items():
        read = [row["restored_of_naive"][marker] for marker in ("20", "50", "80", "100")]
        found.append([name, *_two([row["written_of_naive"], row["stored_of_naive"], *read])])
    return found


def figure_15_times(page: Path) -> Table:
    """Whole restores, in the rounds of naive's."""
    result = newest("recovery", "figure-15")
    workloads = result.found["workloads"]
    layouts = [(name, found["groups"]["new bases"]) for name, found in workloads.items()]
    markers = list(layouts[0][1]["naive"]["warm"])
    found = [[f"ms (of naive's time); {result.said(page)}", *(f"marker {marker}" for marker in markers)]]
    for workload, schemes in layouts:
        for state in ("warm", "cold"):
            for scheme, row in schemes.items():
                each = [row[state].get(marker) for marker in markers]
                cells = [f"{three(x['whole_ms'])} ({1 / x['whole_naive_ratio']:.2f})" if x else "" for x in each]
                found.append([f"{workload}, {state}: {code(scheme)}", *cells])
    return found


def front(variant: str) -> dict[str, Any]:
    """Counts of ``recovery/front.py`` at one size."""
    return newest("recovery", f"front-{variant}").found


def picks(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Some of the front that read no more than the default at markers 50, 100 and 150.

    They are: what the default's settings reach for 15% more rows than it writes; what any policy reaches for at most
    half of what IncrCP writes with a base every 100; and the cheapest with the average of a base every 50.
    """
    default, (often, seldom) = (
        found["store"][found["default"]],
        (found["others"][f"IncrCP, a base every {number}"] for number in (50, 100)),
    )
    kept = [(name, found["store"][name]) for name in found["no_worse"]]

    def best(most: float, *, plain: bool = False) -> str:
        return max(
            (row["average"], name) for name, row in kept if row["written"] <= most and not (plain and "then" in name)
        )[1]

    names = [best(1.15 * default["written"], plain=True), best(seldom["written"] / 2)]
    names.append(next(name for name, row in kept if row["average"] >= often["average"]))
    return {name: found["store"][name] for name in names}


def incrcp_front(page: Path, variant: str) -> Table:
    """Averages over all markers, others' layouts and the store's."""
    found = front(variant)
    base, most = found["base"], found["others"]["Check-N-Run"]["stored"]
    rows = {**found["others"], f"store, default: {found['default']}": found["store"][found["default"]]}
    rows |= {f"store: {name}": row for name, row in picks(found).items()}
    head = ["", "average", "with bases", "written", "stored", "stored / Check-N-Run's, first base in both"]
    table = [[*head, "read at 50", "at 100", "at 150"]]
    for name, row in rows.items():
        parts = [row[key] for key in ("average", "with_bases", "written", "stored")]
        share = f"{100 * (base + row['stored']) / (base + most):.0f}%"
        table.append([name, *_two(parts), share, *_two(row["read_at"].values())])
    return table


def figure_17(page: Path) -> Table:
    found = [["steps an interval", "written: Check-N-Run", "IncrCP", "store", "read: Check-N-Run", "IncrCP", "store"]]
    for steps, layouts in _figure("17").items():
        each = [layouts[name] for name in ("Check-N-Run", "IncrCP", "store, by default")]
        written = [row["written_of_naive"] for row in each]
        found.append(
            [steps, *_two([*written, *(value for row in each for value in row["restored_of_naive"].values())])]
        )
    return found


def crashes(page: Path) -> Table:
    result = newest("dense", "crashes")
    outcomes = result.facts["crashes"]
    kills = sum(next(iter(outcomes.values())).values())
    found = [[f"{kills} kills each; {result.said(page)}", "right", "refused", "wrong"]]
    return [*found, *([way, *(str(row[x]) for x in ("right", "refused", "wrong"))] for way, row in outcomes.items())]


def weak_scaling(page: Path, *variants: str) -> Table:
    """Return DeepFreeze's metrics of each way to save, of one result for each number of ranks.

    The runtime overhead is the duration of iterations that take a checkpoint or follow one, less that of an iteration
    without checkpoints in the same round.
    """
    heads = "; ".join(newest("dense", variant).said(page) for variant in variants)
    names = ["blocked, ms", "times less than `torch.save`", "runtime overhead, ms an iteration", "whole run, s"]
    found = [[heads, *names]]
    for variant in variants:
        result = newest("dense", variant)
        (ranks,) = {point.name.removesuffix(", blocked") for point in result.points() if "blocked" in point.name}
        blocked, run = result.point(f"{ranks}, blocked"), result.point(f"{ranks}, run, without fsync")
        for name in run.variants:
            cells = ["-", "-"]
            if name in blocked.variants:
                times = "baseline" if name == blocked.baseline else _ranged(blocked.ratios(blocked.baseline, name))
                cells = [blocked.taken(name).replace(" ms", ""), times]
            more = _ranged(overhead(variant, name)) if name != run.baseline else "baseline"
            found.append(
                [
                    f"{ranks.removeprefix('weak scaling, ')}: {code(name)}",
                    *cells,
                    more,
                    run.taken(name).replace(" s ", " "),
                ]
            )
    return found


def overhead(variant: str, way: str) -> list[float]:
    """DeepFreeze's runtime overhead of a way to save: milliseconds an iteration, its median and its ends."""
    result = newest("dense", variant)
    (point,) = (each for each in result.points() if each.name.endswith(", iterations"))
    pairs = zip(point.variants[point.baseline]["rounds"], point.variants[way]["rounds"], strict=True)
    found = [own - bare for bare, own in pairs]
    return [statistics.median(found), min(found), max(found)]


def _ranged(values: list[float]) -> str:
    middle, least, most = map(three, values)
    return f"{middle} ({least} to {most})"


def restarts(page: Path, *variants: str) -> Table:
    """Return what each failure of SCR-Exa's restarts cost, by way to go on."""
    heads = "; ".join(newest("tiers", variant).said(page) for variant in variants)
    names = ["failures survived", "s to the next step", "s until restored", "steps made again", "losses that differ"]
    found = [[heads, *names, "tensors that differ"]]
    for variant in variants:
        result = newest("tiers", variant)
        to_step, restored = (result.point(name) for name in ("to the next step", "until restored"))
        for name in to_step.variants:
            row = result.facts[name]
            times = [each.taken(name).replace(" s ", " ") for each in (to_step, restored)]
            counts = [f"{row[f'{what} that differ']} of {row[f'{what} compared']:,}" for what in ("losses", "tensors")]
            found.append([code(name), str(row["failures"]), *times, str(row["steps made again"]), *counts])
    return found
