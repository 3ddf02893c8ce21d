"""What steps, markers and restores cost, the limits of the machine, the cost of a job's age, the bound on overhead."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .freshness import worst_log
from .goals import wanted
from .results import VERDICT, Point, Result, Table, code, is_filed, newest, of_machines, ranged, three
from .thesis import thesis

STEPS = {
    "off again": "off again: the noise",
    "drain every 10": "drain every 10, buffered",
    "drain every step": "drain every step, buffered",
    "drain every step, direct": "drain every step",
    "marker every 10": "drain every step, marker every 10, buffered",
    "marker every 10, direct": "drain every step, marker every 10",
    "marker every 10, no proof": "the same, buffered, without proofs",
    "auto, max_overhead 1%": '`drain_every="auto"`, `max_overhead=0.01`, buffered',
    "auto, max_overhead 1%, direct": '`drain_every="auto"`, `max_overhead=0.01`',
}
"""Names of the variants of ``step_time``; with direct writes, unless they are buffered."""
JOBS = {
    "thesis, 1 rank": "1-rank",
    "thesis, 2 ranks": "2-ranks",
    "criteo, 1 rank": "criteo_1-rank",
    "criteo, 2 ranks": "criteo_2-ranks",
}
"""Jobs of ``step_time`` -> the variant under which results are filed."""
GPU = "criteo_1-gpu"
NUMBER = re.compile(r"[\d.]+")
_EASY = {"drain every 10": 1.035, "drain every step": 1.035, "marker every 10": 1.035}
STEP_GOALS = {
    "thesis, 1 rank": {
        "drain every 10": 1.035,
        "drain every step": 1.06,
        "marker every 10": 1.06,
        "drain every step, direct": 1.05,
        "marker every 10, direct": 1.06,
    },
    "thesis, 2 ranks": {
        "drain every 10": 1.035,
        "drain every step": 1.12,
        "marker every 10": 1.12,
        "drain every step, direct": 1.05,
        "marker every 10, direct": 1.06,
    },
    "criteo, 1 rank": _EASY,
    "criteo, 2 ranks": _EASY,
}
"""At most so many times as long, until all is sent."""


def until_sent(row: dict[str, Any]) -> str:
    key = "until_all_is_sent"
    if f"ratio_min_{key}" not in row:  # of 2026-11-22 and before
        return f"{row[f'ratio_median_{key}']:.3f}"
    return ranged([row[f"ratio_{each}_{key}"] for each in ("median", "min", "max")])


def _short(row: dict[str, Any]) -> str:
    """Until all is sent, with two digits."""
    return NUMBER.sub(lambda found: f"{float(found[0]):.2f}", until_sent(row)).replace(" to ", "-")


def short(page: Path) -> Table:
    """The usual questions, each with a link into the page."""
    one, two, gpu = (newest("step_time", each) for each in (JOBS["thesis, 1 rank"], JOBS["thesis, 2 ranks"], GPU))
    marker, on_gpu = newest("marker").point("table"), newest("marker", "ours_1-gpu").point("table")
    dense = newest("dense").point("600 MB, 4 ranks")
    memory = newest("memory").point("peak").variants
    peak = next(row["median"] for name, row in memory.items() if name.startswith("ours"))
    auto, every, worst = "auto, max_overhead 1%", "marker every 10", _worst(two.found["variants"])
    direct = f"{every}, direct"
    longer = " times as long"
    step_ms = f"{gpu.found['variants']['off']['step_ms_median']:.0f} ms"

    def times(result: Result, name: str) -> str:
        return _short(result.found["variants"][name])

    def restored(point: Point, *names: str) -> str:
        return ", ".join(f"{SHORT.get(x, code(x.removeprefix('ours, ')))} {three(point.median(x))} ms" for x in names)

    steps, pauses = "[cost](#cost)", "[goals](#goals-and-results)"
    pace, h100 = "[pace](#automatic-pace)", "[GPU](#on-a-gpu)"
    log, store = (newest("restore").point(f"{source}, on 1") for source in ("log", "store"))
    return [
        ["question", "cost", "details"],
        [f"a step on one rank, a core free for the log: {STEPS[direct]}", times(one, direct) + longer, steps],
        [f"a step on two ranks of two cores, no core free: {STEPS[direct]}", times(two, direct) + longer, steps],
        [f"the same: {STEPS[worst]}", times(two, worst) + longer, steps],
        [f"a step of {step_ms} on an H100: {STEPS[every]}", times(gpu, every) + longer, h100],
        [f"one rank, two ranks, the H100, with {STEPS[auto]}",
         ", ".join(times(each, auto) for each in (one, two, gpu)) + longer, pace],
        ["pause for a marker that changes 1% of 1.3 GB", marker.taken("ours"), pauses],
        ["the same on an H100", on_gpu.taken("ours"), h100],
        ["pause for 600 MB of dense state, four ranks on two cores", dense.taken("ours"), pauses],
        ["host memory on top, 1.3 GB of tables", f"{three(peak)} MB", "[bound](guarantees.md#p5-waits-and-memory)"],
        ["restore of 1.3 GB, one rank",
         f"{restored(log, 'ours, log')}, {restored(store, 'ours, store')}, {restored(log, 'dcp.load', MAPPED)}",
         "[restart](#missed-goals)"],
    ]  # fmt: skip


def _worst(rows: dict[str, Any]) -> str:
    return max(("drain every step", "marker every 10"), key=lambda each: rows[each]["ratio_median_until_all_is_sent"])


def all_steps(page: Path) -> Table:
    """Every job, also one that is not filed."""
    head = ["job, variant", "until all is sent", "cpu", "cpu, all threads"]
    found = [[*head, "MB a step", "goal", "", "result"]]
    for job, variant in JOBS.items():
        if not is_filed("step_time", variant):
            found.append([job, "not measured", *[""] * (len(found[0]) - 2)])
            continue
        result = newest("step_time", variant)
        for name, row in result.found["variants"].items():
            if name == "off":
                continue
            goal = STEP_GOALS.get(job, {}).get(name)
            met = goal is not None and row["ratio_median_until_all_is_sent"] <= goal
            verdict = ["", ""] if goal is None else [f"<= {goal:g}", VERDICT[met]]
            said = STEPS.get(name, name)
            if name == "off again":
                said += f", at {three(result.found['variants']['off']['step_ms_median'])} ms a step"
            if "auto" in name:
                said += f": {row['markers']} marker{'s' * (row['markers'] != 1)} in {row['steps']} steps"
            threads = [row.get(f"all_cpu_ratio_{each}") for each in ("median", "min", "max")]
            of_all = "-" if threads[0] is None else ranged(threads)
            cells = [f"{job}, {said}", until_sent(row), f"{row['cpu_ratio_median']:.3f}", of_all]
            found.append([*cells, three(row["megabytes_a_step"]), *verdict, result.link(page, result.date)])
    return found


LIMITS = {
    "copy, 1 thread": "memory copy, 1 thread",
    "copy, 2 threads": "memory copy, 2 threads",
    "gather of rows of 256 B, 1 thread": "gather of a quarter of a table of 1 GiB, rows of 256 B, 1 thread",
    "gather of rows, 2 threads": "the same, 2 threads",
    "append, fdatasync each 64 MiB": "append to a file, `fdatasync` each 64 MiB",
    "append, fdatasync each 1 MiB": "append to a file, `fdatasync` each 1 MiB",
    "read, in the page cache": "read a file, in the page cache",
    "read, cold": "read a file, cold",
}


def limits(page: Path) -> Table:
    """One column a machine."""
    results = of_machines("limits")
    points = [result.point("limits") for result in results]
    found = [["GB/s (range)", *(result.said(page) for result in results)]]
    for name in points[0].variants:
        rows = (point.variants[name] for point in points)
        cells = (f"{row['median']:.1f} ({row['min']:.1f}-{row['max']:.1f})" for row in rows)
        found.append([LIMITS.get(name, name), *cells])
    return found


def judged(page: Path, result: Result, names: dict[str, str] | None = None) -> Table:
    """The goals of a result as they were filed."""
    found = [[result.said(page), "goal", "found", ""]]
    goals = result.found.get("goals", ())
    if not goals:
        found += [[what, "-", f"not measured: {why}", VERDICT[None]] for what, why in result.left_out.items()]
    for goal in goals:
        what = (names or {}).get(goal["what"], code(goal["what"]))
        found.append([what, wanted(goal["wanted"]), goal["found"].replace(" %", "%") or "-", VERDICT[goal["met"]]])
    return found


def age(page: Path) -> Table:
    names = {"list --newest 20": "`list --newest 20`", "list of all, CPU a marker": "`list` of all, CPU a marker"}
    return judged(page, newest("age"), names)


STRETCHES = {"at first": "as it is", "8 times the ids": "eight times the ids"}


def overhead(page: Path, variant: str = "") -> Table:
    """The stretches of one job whose load changes."""
    result = newest("overhead", variant)
    found = [[f"bound 1%, {result.said(page)}", "step", "overhead", "markers in steps"]]
    for name, row in result.facts.items():
        if isinstance(row, dict) and "overhead" in row:
            cells = [f"{three(row['step ms'])} ms", f"{100 * row['overhead']:.2f}%"]
            found.append([STRETCHES.get(name, name), *cells, f"{row['markers']} in {row['steps']}"])
    (goal,) = result.found["goals"]
    return [*found, ["all together", "", f"{goal['found'].replace(' ', '')}: {VERDICT[goal['met']]}", ""]]


def four(page: Path) -> Table:
    """The figures of the README: one a row, the typical case and the worst one."""
    marker = newest("marker").point("table")
    one, two = (newest("step_time", JOBS[f"thesis, {ranks}"]).found["variants"] for ranks in ("1 rank", "2 ranks"))
    dense = newest("dense").point("600 MB, 4 ranks")
    stored = _stored()
    found = [
        ["a step with a marker every 10, one rank", f"{_short(one['marker every 10, direct'])} times as long"],
        ["the same on two ranks, no core free", f"{_short(two['marker every 10, direct'])} times as long"],
        ['the same with `log_writes="buffered"`', f"{_short(two['marker every 10'])} times as long"],
        ["pause for a marker that changes 1% of 1.3 GB", f"{three(marker.median('ours'))} ms"],
        *([f"the same for {what}", f"{three(marker.median(name))} ms"] for name, what in _peers(marker).items()),
        ["pause for 600 MB of dense state", f"{three(dense.median('ours'))} ms"],
        *_restored(newest("restore").point("log, on 1")),
        *_small_tables(),
        ["stored for any of 150 markers, by default", f"{stored[1]:.2f} times naive increments"],
        worst_log(page),
    ]
    return [["medians, two cores", ""], *found]


def _peers(marker: Point) -> dict[str, str]:
    """Return the fastest way of DCP, and torchsnapshot: with it, training must not change the tensors meanwhile."""
    dcp, snapshot = min((name for name in marker.variants if name.startswith("dcp.")), key=marker.median), {}
    if marker.has(name := "torchsnapshot async_take"):
        snapshot[name] = f"{code(name)} (copies nothing)"
    return {dcp: code(dcp)} | snapshot


MAPPED = "torch.load, mmap + copy"
"""The fastest way that torch has; results before 2026-11-23 have no such variant."""
SHORT = {MAPPED: "mapped `torch.load`"}


def _restored(point: Point) -> Iterator[list[str]]:
    """Against each way that has a figure, the fastest one among them."""
    for base in ("dcp.load", MAPPED):
        if point.has(base) and point.has("ours, log"):
            speed = f"{point.ratios(base, 'ours, log')[0]:.2f} times as fast"
            yield [f"restore of 1.3 GB from the log, compared with {SHORT.get(base, code(base))}", speed]


def _small_tables() -> Iterator[list[str]]:
    """Restores of two ranks from the log, against the fastest ``torch.load`` that the result has."""
    found: dict[str, list[float]] = {}
    for result, job in thesis():
        for point in result.points() if job.endswith("2 ranks") else ():
            if point.name.startswith(f"{job}, recovery") and point.has("ours, log") and "cold" not in point.name:
                base = MAPPED if point.has(MAPPED) else "torch.load"
                found.setdefault(base, []).append(point.ratios(base, "ours, log")[0])
    for base, each in found.items():
        ends = dict.fromkeys(f"{end(each):.2f}" for end in (min, max))
        speeds = f"{' to '.join(ends)} times as fast"
        yield [f"the same with small tables, two ranks, compared with {SHORT.get(base, code(base))}", speeds]


def _stored() -> Sequence[float]:
    """Of naive's bytes, the first base included: without bases, and by default."""
    one, new = newest("recovery", "150-markers").found["workloads"]["kaggle"]["groups"].values()
    of = [(one["store"], one["naive"]), (new["store, by default"], new["naive"])]
    return [own["stored"][-1] / naive["stored"][-1] for own, naive in of]
