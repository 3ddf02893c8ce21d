"""Figures on the pages: each is computed again from the result that is filed below ``benchmarks/``."""

from __future__ import annotations

import json
import re
import runpy
import statistics
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
NUMBER = re.compile(r"(?<![\w.,])\d+(?:\.\d+)?(?![\w.]*\d)")


@cache
def filed(case: str, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "benchmarks" / case / "results" / f"{name}.json").read_text())
    return found


@cache
def page(name: str) -> str:
    return (ROOT / name).read_text()


def rows(name: str, heading: str) -> dict[str, list[str]]:
    """The tables below a heading: first cell -> the others."""
    (section,) = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", page(name), re.M | re.S)
    cells = [[each.strip() for each in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    return {first: rest for first, *rest in cells}


def numbers(*cells: str) -> list[str]:
    """The numbers of a text in their order, names in backticks left out."""
    return NUMBER.findall(re.sub(r"`[^`]*`", "", " ".join(cells)))


def check(said: Sequence[str], filed: Iterable[float]) -> None:
    """Each number that a page prints is the filed one, as far as it is printed: to its last digit, three at least."""
    values = list(filed)
    assert len(said) == len(values), (said, values)
    for text, value in zip(said, values, strict=True):
        last = 10.0 ** -len(text.partition(".")[2])
        if "." not in text and value >= 1000:
            last = 10.0 ** (len(text) - 4)
        assert abs(float(text) - value) <= 0.5001 * last, f"the page says {text}, filed is {value}"


def test_a_number_is_compared_to_its_last_digit() -> None:
    check(["9.47", "43.2", "2024", "15"], [9.469, 43.25, 2024.0, 14.6])
    for text, value in (("9.48", 9.469), ("1.0", 1.06), ("16", 14.6)):
        with pytest.raises(AssertionError, match="the page says"):
            check([text], [value])
    assert numbers("`torch.save` 2024 ms; kept 165; 8.7-12.5 (4 ranks)") == ["2024", "165", "8.7", "12.5", "4"]


class Point:
    """One point of a result: its variants."""

    def __init__(self, case: str, name: str, point: str) -> None:
        self._rows = filed(case, name)["points"][point]["variants"]

    def median(self, variant: str) -> float:
        return float(self._rows[variant]["median"])

    def extent(self, variant: str) -> list[float]:
        """Median, smallest, largest."""
        return [self._rows[variant][each] for each in ("median", "min", "max")]

    def ratio(self, variant: str) -> list[float]:
        """Baseline / variant: median, smallest, largest round."""
        row = self._rows[variant]
        return [row["ratio"], *row["ratio_range"]]

    def against(self, base: str, variant: str) -> list[float]:
        """The same against another baseline."""
        pairs = zip(self._rows[base]["rounds"], self._rows[variant]["rounds"], strict=True)
        found = [theirs / ours for theirs, ours in pairs]
        return [statistics.median(found), min(found), max(found)]


STEP_ROWS = {
    "off again: the noise": "off again",
    "drain every 10": "drain every 10",
    "drain every step": "drain every step",
    "drain every step, marker every 10": "marker every 10",
    '`drain_every="auto"`, `max_overhead=0.01`': "auto, max_overhead 1%",
}
ONE, TWO = "2026-11-22_xeon-2-cores_1-rank", "2026-11-21_xeon-2-cores_2-ranks"


@pytest.mark.parametrize("row", STEP_ROWS)
def test_step_times(row: str) -> None:
    until_sent, while_it_trains = [], []
    for name in (ONE, TWO):
        found = filed("step_time", name)["variants"][STEP_ROWS[row]]
        until_sent.append([found["ratio_median_until_all_is_sent"]])
        while_it_trains.append([found[f"ratio_{each}"] for each in ("median", "min", "max")])
    cells = rows("docs/performance.md", "In short")[row]
    check(numbers(*cells), [*until_sent[0], *while_it_trains[0], *until_sent[1], *while_it_trains[1]])


def test_step_times_of_larger_tables() -> None:
    variants = filed("step_time", "2026-11-22_xeon-2-cores_criteo_2-ranks")["variants"]
    text = " ".join(page("docs/performance.md").split())
    (said,) = re.findall(r"batch 4096\) on two ranks: ([^;]*); the noise is ([\d.]*\d)", text)
    wanted = [variants[name]["ratio_median_until_all_is_sent"] for name in list(STEP_ROWS.values())[1:]]
    check(numbers(*said), [*wanted, variants["off again"]["ratio_median_until_all_is_sent"]])


def test_limits_of_the_machine() -> None:
    found = rows("docs/performance.md", "What the machine can do")
    variants = filed("limits", "2026-11-21_xeon-2-cores")["points"]["limits"]["variants"]
    shown = [cells for cells in found.values() if numbers(*cells)]
    assert len(shown) == len(variants)
    for cells, row in zip(shown, variants.values(), strict=True):
        check(numbers(*cells), [row["median"], row["min"], row["max"]])


def goals() -> dict[str, list[float]]:
    """First cell of a row -> the numbers that stand in the cells of its baseline and of what was found."""
    marker = "2026-11-22_xeon-2-cores"
    table = Point("marker", marker, "table")
    rivals = ("torch.save", "dcp.async_save, fresh copy", "dcp.async_save, kept copy", "torchsnapshot async_take")
    tenth = Point("marker", marker, "a tenth of the rows").median("ours")
    wanted = {
        "blocked by one marker, 1.3 GB, 1% touched": [
            *map(table.median, rivals),
            *table.extent("ours"),
            tenth,
        ],
        "twice the table, the same rows": [
            Point("marker", marker, "twice the table").median("ours") / table.median("ours")
        ],
    }
    for size in ("100 MB", "600 MB"):
        for ranks in (2, 4):
            point = Point("dense", marker, f"{size}, {ranks} ranks")
            wanted[f"dense part of {size}, {ranks} ranks: blocked"] = [
                point.median("torch.save, barrier"),
                *point.ratio("ours"),
                point.median("ours"),
            ]
    for job in ("thesis", "criteo"):
        point, facts = Point("tracker", marker, job), filed("tracker", marker)["facts"]
        row_bytes = facts[f"{job}: bytes"]["ours"] / {"thesis": 640_000, "criteo": 1_000_000}[job]
        wanted[f"mark 10 steps, find the rows: {job}"] = [
            point.median("tracker"),
            *point.ratio("ours"),
            point.median("ours"),
            round(row_bytes),
        ]
    gather = Point("encode", marker, "gather")
    wanted["gather + frame + CRC, 1 thread"] = [gather.median("pickle"), *gather.ratio("ours")]
    wanted["the same, speed"] = Point("encode", marker, "gather, speed").extent("ours")
    for size in ("small", "large"):
        for way in ("write", "read"):
            point = Point("encode", marker, f"{size}, {way}")
            others = [point.median(name) for name in ("pickle", "safetensors", "msgpack", "Arrow IPC")]
            saved = 100 * (1 - 1 / point.ratio("ours")[0])
            wanted[f"table 4.3, {size}, {way}, CRC included"] = [*others, saved, point.median("ours")]
    for log in ("file", "kafka"):
        point, speed = Point("stream", marker, log), Point("stream", marker, f"{log}, speed")
        shares = [100 * each for each in point.ratio("ours")]
        wanted[f"stream, one publisher, {log}"] = [speed.median("raw"), *shares, speed.median("ours")]
    for source in ("log", "store"):
        for world, how in ((1, "same"), (2, "changed")):
            point, ours = Point("restore", marker, f"{source}, on {world}"), f"ours, {source}"
            wanted[f"restore of 1.3 GB from the {source}, {how} world size ({world})"] = [
                point.median("dcp.load"),
                point.median("torch.load + copy"),
                *point.against("dcp.load", ours),
                point.median(ours),
            ]
    peak = Point("memory", "2026-11-21_xeon-2-cores", "peak")
    for share in ("1%", "20%"):
        wanted[f"peak memory on top, {share} touched"] = [
            peak.median("dcp.async_save"),
            peak.median("torch.save"),
            peak.median(f"ours, {share} touched"),
        ]
    for job in ("criteo", "synthetic"):
        for ranks in ("1 rank", "2 ranks"):
            for source, ours in (("log", "log"), ("store", "store"), ("store", "HEAD")):
                point = Point("thesis", f"{marker}_{job}", f"{job}, {ranks}, recovery, {source}")
                others = [point.median(name) for name in ("torch.load", "torch.load + copy", "thesis, loading service")]
                mine = f"ours, {ours}"
                wanted[f"recovery: {job}, {ranks}, {ours}"] = [
                    *others,
                    *point.against("torch.load", mine),
                    point.median(mine),
                ]
    return wanted


@pytest.mark.parametrize("row", goals())
def test_goals(row: str) -> None:
    baseline, _, found, *_ = rows("docs/performance.md", "Goals and what was found")[row]
    check(numbers(baseline, found), goals()[row])


@pytest.mark.parametrize("job", ["criteo", "synthetic"])
@pytest.mark.parametrize("ranks", ["1 rank", "2 ranks"])
@pytest.mark.parametrize("every", [1, 2, 3])
def test_whole_runs(job: str, ranks: str, every: int) -> None:
    """Their second row has no name of its own: "... time added" follows on each."""
    name, what = f"2026-11-22_xeon-2-cores_{job}", f"{job}, {ranks}, every {every}"
    point, extra = Point("thesis", name, what), filed("thesis", name)["facts"][f"{what}: seconds added"]
    lines = page("docs/performance.md").splitlines()
    (at,) = (number for number, line in enumerate(lines) if line.startswith(f"| run: {job}, {ranks}, every {every} |"))
    run, added = ([each.strip() for each in lines[at + n].strip("|").split("|")] for n in (0, 1))
    check(numbers(run[1], run[3]), map(point.median, ("none", "torch.save", "thesis", "ours")))
    share = 100 * extra["ours"] / extra["torch.save"]
    check(numbers(added[1], added[3]), [extra["torch.save"], extra["thesis"], share, extra["ours"]])


def test_every_goal_is_looked_at() -> None:
    shown = rows("docs/performance.md", "Goals and what was found")
    elsewhere = ("run: ", "... time added", "what", "---")
    age = ("attach, ", "choice, ", "commit, ", "rank 0, ", "`list", "COMMIT of")
    assert not [name for name in shown if name not in goals() and not name.startswith((*elsewhere, *age))]


STORE_ROWS = {
    "naive, rows placed as ours are": ("one base", "naive"),
    "naive, rows placed by `index_copy_`": ("one base", "naive, index_copy_"),
    "IncrCP": ("one base", "IncrCP"),
    "store, no bases": ("one base", "store"),
    "store, `span16`": ("one base", "store, span16"),
    "`torch.load` of the newest": ("one base", "torch.load"),
    "... with a copy into the tables": ("one base", "torch.load + copy"),
    "a group of its own: naive": ("new bases", "naive"),
    "... store with `--rebase 1 --compact none`, the default then": ("new bases", "store, rebase"),
}


@pytest.mark.parametrize("row", STORE_ROWS)
def test_any_marker(row: str) -> None:
    groups = filed("recovery", "2026-11-21_xeon-2-cores_150-markers")["workloads"]["kaggle"]["groups"]
    group, name = STORE_ROWS[row]
    found, naive = groups[group][name], groups[group]["naive"]
    stored, written, *times = rows("docs/store.md", "Numbers")[row]
    if stored and "index_copy_" not in row:
        check(numbers(stored, written), [found[each][-1] / naive[each][-1] for each in ("stored", "written")])
    wanted = [
        found[cache][marker][f"{part}_ms"]
        for part in ("delta", "whole")
        for cache in ("warm", "cold")
        for marker in ("50", "150")
        if f"{part}_ms" in found[cache].get(marker, {})
    ]
    check(numbers(*times), wanted)


COUNTED_ROWS = {
    "naive increments": "naive",
    "differential chain": "differential",
    "Check-N-Run": "Check-N-Run",
    "IncrCP, R = 0.02": "IncrCP",
    "IncrCP, a base every 100 chunks": "IncrCP, base every 100",
    "store without bases": "store",
    "store with `span4`": "store, span4",
    "store with `span16`": "store, span16",
    "store with bases (`--rebase 1`)": "store, rebase",
}


@pytest.mark.parametrize("row", COUNTED_ROWS)
def test_any_marker_counted(row: str) -> None:
    found = filed("recovery", "2026-11-23_counts_kaggle")["workloads"]["kaggle"]["layouts"][COUNTED_ROWS[row]]
    wanted = [found[f"{each}_of_naive"] for each in ("written", "stored", "read_back")]
    wanted += [found["restored_of_naive"][marker] for marker in ("50", "150")]
    check(numbers(*rows("docs/store.md", "Numbers")[row]), wanted)


def test_what_incrcp_writes_by_the_papers_filters() -> None:
    job = filed("recovery", "2026-11-23_counts_kaggle")["workloads"]["kaggle"]
    naive, incrcp = job["layouts"]["naive"], job["layouts"]["IncrCP"]
    with_base = (job["rows"] + incrcp["written"]) / (job["rows"] + naive["written"])
    text = " ".join(page("docs/store.md").split())
    (said,) = re.findall(r"against ([\d.]*\d) times by the paper's filters", text)
    (again,) = re.findall(r"([\d.]*\d) times where its filters are built as the paper words them", text)
    (dead,) = re.findall(r"would take ([\d.]*\d) times naive's increments", text)
    check([said, again, dead], [with_base, with_base, incrcp["dead_of_naive"]])


def test_what_the_store_says_in_words() -> None:
    short = filed("recovery", "2026-11-21_xeon-2-cores_150-markers")["workloads"]["kaggle"]
    whole = filed("recovery", "2026-11-21_xeon-2-cores_150-markers_all-layouts")["workloads"]["kaggle"]["groups"]
    text = " ".join(page("docs/store.md").split())
    default, one = short["groups"]["new bases"]["store, rebase"], short["groups"]["one base"]
    bytes_of = {name: whole[group][name]["stored"][-1] for group, name in [
        ("one base", "naive"), ("one base", "store"), ("one base", "differential"), ("new bases", "Check-N-Run"),
        ("new bases", "store, rebase"),
    ]}  # fmt: skip
    ratio = {
        cache: {m: each["delta_naive_ratio"] for m, each in one["store"][cache].items()} for cache in ("warm", "cold")
    }
    span, incrcp = (
        sorted(each["delta_naive_ratio"] for each in one[name]["cold"].values()) for name in ("store, span16", "IncrCP")
    )
    index = short["death_index"].values()
    said = {
        r"newest marker comes back ([\d.]*\d) times as fast as by naive increments, cold ([\d.]*\d) times": [
            default["warm"]["150"]["whole_naive_ratio"],
            default["cold"]["150"]["whole_naive_ratio"],
        ],
        r"group of that run: (\d+) ms warm and (\d+) cold, where the store with bases has (\d+) and (\d+)\.": [
            *(one["torch.load"][cache]["150"]["whole_ms"] for cache in ("warm", "cold")),
            *(default[cache]["150"]["whole_ms"] for cache in ("warm", "cold")),
        ],
        r"writes more than each byte once: ([\d.]*\d) times": [
            one["IncrCP"]["written"][-1] / one["naive"]["written"][-1]
        ],
        r"\((\d+)% of a differential chain, (\d+)% of Check-N-Run": [
            100 * bytes_of["store"] / bytes_of["differential"],
            100 * bytes_of["store, rebase"] / bytes_of["Check-N-Run"],
        ],
        r"marker is ([\d.]*\d) times as fast as naive, its delta ([\d.]*\d) times": [
            default["warm"]["150"]["whole_naive_ratio"],
            default["warm"]["150"]["delta_naive_ratio"],
        ],
        r"a delta is read ([\d.]*\d) to ([\d.]*\d) times as fast": sorted(ratio["cold"].values()),
        r"with `span16` ([\d.]*\d) to ([\d.]*\d) times, where IncrCP has ([\d.]*\d) to ([\d.]*\d)": [*span, *incrcp],
        r"newest first is worth ([\d.]*\d) to ([\d.]*\d) times naive": sorted(each["naive_to_flags"] for each in index),
        r"death index would add ([\d.]*\d) to ([\d.]*\d) times": sorted(each["flags_to_index"] for each in index),
        r"chain stores ([\d.]*\d) times naive's bytes": [bytes_of["differential"] / bytes_of["naive"]],
        r"own resets stores ([\d.]*\d) times as much": [bytes_of["Check-N-Run"] / bytes_of["naive"]],
    }
    for pattern, wanted in said.items():
        (found,) = re.findall(pattern, text) or [()]
        check([found] if isinstance(found, str) else found, wanted)


def test_the_four_numbers_of_the_readme() -> None:
    steps = {name: filed("step_time", name)["variants"] for name in (ONE, TWO)}
    marker, dense = "2026-11-22_xeon-2-cores", Point("dense", "2026-11-22_xeon-2-cores", "600 MB, 4 ranks")
    table = Point("marker", marker, "table")
    recovery = [
        point.against("torch.load", f"ours, {ours}")[0]
        for job in ("criteo", "synthetic")
        for ours, source in (("log", "log"), ("store", "store"), ("HEAD", "store"))
        for point in [Point("thesis", f"{marker}_{job}", f"{job}, 2 ranks, recovery, {source}")]
        if ours == "log"
    ]
    groups = filed("recovery", "2026-11-21_xeon-2-cores_150-markers")["workloads"]["kaggle"]["groups"]
    stored = groups["one base"]["store"]["stored"][-1] / groups["one base"]["naive"]["stored"][-1]
    counted = filed("recovery", "2026-11-23_counts_kaggle")["workloads"]["kaggle"]["layouts"]["store, span4"]
    sent = "ratio_median_until_all_is_sent"
    wanted = {
        "a step, drained each time, a marker every 10": (
            [steps[ONE]["marker every 10"][sent], steps[ONE]["off again"][sent]],
            [steps[TWO]["marker every 10"][sent]],
        ),
        "training waits for a marker, 1% of 1.3 GB": (
            [table.median("ours"), table.median("dcp.async_save, kept copy")],
            [600, 4, dense.median("ours")],
        ),
        "restore of 1.3 GB from the log": (
            [Point("restore", marker, "log, on 1").against("dcp.load", "ours, log")[0]],
            [2, *sorted(recovery)],
        ),
        "stored, for any of 150 markers": ([stored], [counted["stored_of_naive"]]),
    }
    shown = rows("README.md", "Four numbers")
    assert set(shown) == {"", "---", *wanted}
    for row, halves in wanted.items():
        for cell, values in zip(shown[row], halves, strict=True):
            check(numbers(cell), values)


def test_every_case_says_what_it_measures() -> None:
    measures = runpy.run_path(str(ROOT / "benchmarks" / "filed.py"))["MEASURES"]
    cases = {script.parent.name for script in ROOT.glob("benchmarks/*/run.py")}
    assert set(measures) == cases
    assert not [case for case in cases if not (ROOT / "benchmarks" / case / "README.md").exists()]
    gone = [
        each for parts in measures.values() for each in parts if not (ROOT / "torchrec_stream_ckpt" / each).exists()
    ]
    assert not gone
