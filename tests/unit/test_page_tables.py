"""Tables of the pages if a result is not what it should be: nothing goes missing in silence, no wrong file is taken."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))

from page_tables import cases, costs, goals, growth, results, store, thesis  # noqa: E402
from page_tables.bucket import SMALL, SMALL_JOBS, SMALL_RANKS, small_bill  # noqa: E402
from page_tables.papers import front  # noqa: E402
from page_tables.results import NotFiledError, Point, Result, newest, of_machines  # noqa: E402
from pages import lines, written  # noqa: E402

from tests.unit.test_pages import check_sentences, kaggle, page  # noqa: E402

MACHINE = {"cpu": "AMD EPYC", "cores": 2, "load_average": 0.5}
PAGE = ROOT / "README.md"


@pytest.fixture
def filed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Files a result: ``filed("case", "2026-01-01_a-box", found)``. There are no others."""
    monkeypatch.setattr(results, "BENCHMARKS", tmp_path)
    for module in (cases, costs, goals, growth, store, thesis):
        monkeypatch.setattr(module, "newest", newest.__wrapped__)

    def put(case: str, name: str, found: dict[str, Any]) -> None:
        (folder := tmp_path / case / "results").mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.json").write_text(json.dumps({"machine": MACHINE} | found))

    return put


def point(unit: str = "ms", baseline: str = "base", **medians: float) -> dict[str, Any]:
    rows = {name: {"median": each, "min": each, "max": each, "rounds": [each]} for name, each in medians.items()}
    for row in rows.values():
        if baseline in medians:
            row |= {"ratio": medians[baseline] / row["median"], "ratio_range": [1.0, 1.0]}
    return {"unit": unit, "baseline": baseline, "variants": rows}


def goal(what: str, met: bool | None = True, found: str = "2 x", wanted: str = ">= 1 x") -> dict[str, Any]:
    return {"what": what, "wanted": wanted, "found": found if met is not None else "", "met": met}


@pytest.mark.parametrize(
    "text",
    [
        "<!-- figures: limits -->\n| stale |\n\nno end\n",
        "<!-- figures: limits --> \n| stale |\n<!-- end -->\n",
        "<!-- figures:\nlimits -->\n| stale |\n<!-- end -->\n<!-- end -->\n",
        "<!-- figures: limits -->\n| stale |\nprose\n<!-- figures: limits -->\n<!-- end -->\n",
    ],
)
def test_a_table_whose_comments_are_not_right_is_refused_and_no_prose_is_taken_along(text: str, tmp_path: Path) -> None:
    mine = tmp_path / "page.md"
    mine.write_text(text)
    with pytest.raises(SystemExit, match="comments begin one and"):
        written(mine)


def test_two_results_of_one_day_are_refused_by_name(filed: Any) -> None:
    for name in ("2026-01-01_a-box", "2026-01-02_a-box", "2026-01-02_b-box"):
        filed("case", name, {})
    with pytest.raises(NotFiledError, match=r"has 2026-01-02_a-box\.json and 2026-01-02_b-box\.json: keep one"):
        newest.__wrapped__("case")
    assert results.is_filed("case"), "a table that falls back to an older result would hide it"


def test_rows_that_were_not_measured_stand_there_by_name(filed: Any) -> None:
    facts = {"kafka is not measured": "no broker: Java is missing", "frames": 7}
    filed("case", "2026-01-01_a-box", {"facts": facts, "points": {"file": point(base=4, ours=2)}})
    filed("whole", "2026-01-01_a-box", {"not measured": "4 GB of memory are wanted, 1 GB is free"})
    text = lines(cases.points(PAGE, "case"))
    assert "| kafka | | not measured: no broker: Java is missing | |" in text
    assert "| file | ours | 2 ms (2-2) | 2 (1-1) |" in text
    why = "not measured: 4 GB of memory are wanted, 1 GB is free"
    for make in (cases.points, cases.goals, cases.medians):
        assert why in lines(make(PAGE, "whole")), make


def test_less_memory_is_not_called_faster(filed: Any) -> None:
    filed("memory", "2026-01-01_a-box", {"points": {"peak": point("MB", base=4, ours=2)}})
    assert cases.points(PAGE, "memory")[0][-1] == "times less than the baseline (range)"


def test_a_result_of_a_busy_machine_says_so_at_its_head(filed: Any) -> None:
    filed("busy", "2026-01-01_a-box", {"machine": MACHINE | {"load_average": 10.6}, "points": {}})
    found = {"facts": {"not idle": "x"}, "points": {"limits": point("GB/s", "none", copy=1)}}
    filed("limits", "2026-01-01_a-box", found)
    assert cases.points(PAGE, "busy")[0][0].endswith("load 10.6: **a busy machine**")
    assert costs.limits(PAGE)[0][1].endswith("load 0.5: **not idle**")


def test_lines_of_the_package_stand_with_the_commit_that_they_are_of(filed: Any) -> None:
    """The file that a filed result names may have another name today."""
    row = {"axis": "tables", "sizes": [1, 2], "call": "verify", "measured": [{"calls": 1}, {"calls": 4}]}
    row |= {"exponents": {"calls": 2.0}, "steepest": [["verify/old.py:3", 2.0, 4]]}
    filed("growth", "2026-01-01_a-box_far", {"machine": MACHINE | {"commit": "0123456789ab"}, "rows": [row]})
    head, found = growth.steep(Path("docs/growth.md"), "far")
    assert head[-1] == "where, at `01234567`"
    assert found == ["tables, 1 to 2", "`verify`", "functions", "2.00", "4", "`verify/old.py:3`"]


def test_a_median_of_cold_rounds_alone_has_a_row(filed: Any) -> None:
    found = {"median": {"a_s": 1}, "rounds": [{"a_s": 1}], "median_cold": {"b_s": 2}, "rounds_cold": [{"b_s": 2}]}
    filed("case", "2026-01-01_a-box", found)
    assert cases.medians(PAGE, "case")[1:] == [["a s", "1 (1-1)", "not measured"], ["b s", "not measured", "2 (2-2)"]]


def test_a_goal_that_no_row_has_is_told_and_one_without_a_figure_is_named(
    filed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(goals, "CASES", {"memory": goals.CASES["memory"]})
    rows = {"points": {"peak": point("MB", ours=2)}, "goals": [goal("ours: peak"), goal("gone: peak", None)]}
    filed("memory", "2026-01-01_a-box", rows)
    found = [(row[0], row[3], row[4]) for row in goals.table(PAGE)[1:]]
    assert found == [("peak memory on top, ours", "2 MB (2-2)", "reached"), ("memory, gone: peak", "-", "not measured")]
    filed("memory", "2026-01-02_a-box", rows | {"goals": [*rows["goals"], goal("new: peak", met=False)]})
    with pytest.raises(NotFiledError, match="no row has the goal 'new: peak'"):
        goals.table(PAGE)


def test_goals_that_a_table_only_counts_are_counted_with_the_missed_ones(
    filed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(rows: goals.Rows) -> Iterator[list[str]]:
        yield rows.row("a", "first", "2 MB")
        yield from rows.more("others")

    monkeypatch.setattr(goals, "CASES", {"memory": made})
    filed_goals = [goal("a"), goal("b"), goal("c", met=False), goal("d", met=False), goal("e", None)]
    filed("memory", "2026-01-01_a-box", {"points": {"peak": point("MB", ours=2)}, "goals": filed_goals})
    found = [(row[0], row[3], row[4]) for row in goals.table(PAGE)[1:]]
    assert found[1:] == [
        ("memory, 3 more: others", "1 reached, **2 missed**", "-"),
        ("memory, e", "-", "not measured"),
    ]
    filed("memory", "2026-01-02_a-box", {"points": {"peak": point("MB", ours=2)}, "goals": [goal("a")]})
    assert len(goals.table(PAGE)) == 2


def test_a_row_that_says_something_else_than_its_goal_is_told(filed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The figure comes from the rounds, the verdict from the goal: one of two files, or of two variants, is wrong."""
    monkeypatch.setattr(goals, "CASES", {"memory": goals.CASES["memory"]})
    for taken, said in ((368.4, "368 MB"), (400.0, "368 MB")):
        rows = {"points": {"peak": point("MB", ours=taken)}, "goals": [goal("ours: peak", found=said)]}
        filed("memory", "2026-01-01_a-box", rows)
        if taken < 400:
            assert goals.table(PAGE)[1][3] == "368 MB (368-368)"
    with pytest.raises(NotFiledError, match=r"'ours: peak' was judged by 368 MB, and its row says 400 MB"):
        goals.table(PAGE)


def test_a_ratio_is_the_filed_one_where_the_case_filed_it() -> None:
    rows = {
        "base": {"median": 4, "min": 4, "max": 4, "rounds": [4]},
        "ours": {"median": 2, "min": 2, "max": 2, "rounds": [2], "ratio": 2.04, "ratio_range": [1.9, 2.1]},
    }
    assert Point("p", "ms", rows, "base").times("base", "ours") == "2.04 x (1.9-2.1); 2 ms"
    assert Point("p", "ms", rows, "other").times("base", "ours") == "2 x (2-2); 2 ms"


def test_a_cell_cannot_end_its_column() -> None:
    assert lines([["a"], ["x | y\nz"]]) == "\n| a |\n|---|\n| x \\| y z |\n\n"


def test_cases_that_are_not_filed_or_not_measured_keep_their_row(filed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        goals, "CASES", {"memory": goals.CASES["memory"], "head": goals.CASES["head"], "hooks": goals.CASES["hooks"]}
    )
    filed("head", "2026-01-01_a-box", {"median": {}})
    filed("hooks", "2026-01-01_a-box", {"not measured": "1 GB of memory is free"})
    found = [(row[0], row[3], row[4]) for row in goals.table(PAGE)[1:]]
    assert found == [
        ("memory", "not filed", "not measured"),
        ("head", "not measured: with the clocks of now", "not measured"),
        ("hooks", "not measured: 1 GB of memory is free", "not measured"),
    ]


def test_a_limit_is_that_of_the_machine_of_the_row(filed: Any, tmp_path: Path) -> None:
    slow, fast = ({"points": {"limits": point("GB/s", "none", copy=each)}} for each in (1.0, 2.0))
    filed("limits", "2026-01-01_a-box", slow)
    filed("limits", "2026-01-02_a-box", fast)
    filed("limits", "2026-01-02_b-box", {"machine": MACHINE | {"cpu": "Xeon"}, **slow})
    same, other, unknown = (
        Result(tmp_path / "x.json", {"machine": MACHINE | {"cpu": cpu}}) for cpu in ("AMD EPYC", "Xeon", "ARM")
    )
    assert goals.limit(same, 1e9, "copy") == "copy: 500 ms"
    assert goals.limit(other, 1e9, "copy") == "copy: 1000 ms"
    assert goals.limit(unknown, 1e9, "copy") == "of another machine"
    assert costs.limits(PAGE)[1] == ["copy", "2.0 (2.0-2.0)", "1.0 (1.0-1.0)"]


def test_a_run_that_was_not_measured_is_not_missed(filed: Any) -> None:
    job = "criteo, 1 rank"
    for workload in ("criteo", "synthetic"):
        found = {"points": {f"{job}, every 1": point("s", none=1, thesis=3, ours=2)}, "goals": []}
        filed("thesis", f"2026-01-01_a-box_{workload}", found)
    row = next(row for row in thesis.runs(PAGE) if row[0] == f"{job}, 1, buffered")
    assert row[1:6] == ["1", "not measured", "3", "2 s (2-2)", "not measured"]
    assert [row[:2] for row in thesis.runs(PAGE)[2:3]] == [["criteo, 2 ranks", "not measured: no such point"]]
    assert ["synthetic, 1 rank", "not measured: no such goal"] in [row[:2] for row in thesis.recoveries(PAGE)]


def test_a_recovery_has_the_times_of_its_baselines_and_a_speed_and_verdict_for_each_goal(filed: Any) -> None:
    points = {"criteo, 1 rank, recovery": point(**{"torch.load + copy": 4.0, "ours, log": 2.0, "ours, HEAD": 8.0})}
    of = "torch.load + copy / ours"
    judged = [
        goal(f"criteo, 1 rank, recovery, ours, log: {of}"),
        goal(f"criteo, 1 rank, recovery, ours, HEAD: {of}", met=False, found="0.5 x"),
    ]
    filed("thesis", "2026-01-01_a-box_criteo", {"points": points, "goals": judged})
    filed("thesis", "2026-01-01_a-box_synthetic", {"points": {}, "goals": []})
    assert [row[:5] for row in thesis.recoveries(PAGE)[1:4]] == [
        ["criteo, 1 rank", "", "4 ms (4-4)", "-", "-"],
        ["criteo, 1 rank: log", "2 ms", "2 x (2-2): reached", "-", "-"],
        ["criteo, 1 rank: HEAD", "8 ms", "0.5 x (0.5-0.5): **missed**", "-", "-"],
    ]
    judged[1]["found"] = "0.9 x"
    filed("thesis", "2026-01-01_a-box_criteo", {"points": points, "goals": judged})
    with pytest.raises(NotFiledError, match=r"was judged by 0\.9 x, and its row says 0\.5 x"):
        thesis.recoveries(PAGE)


def test_a_recovery_goal_of_another_form_is_not_dropped(filed: Any) -> None:
    for workload in ("criteo", "synthetic"):
        found = {"points": {}, "goals": [goal(f"{workload}, 1 rank, recovery, ours: torch.load / ours")]}
        filed("thesis", f"2026-01-01_a-box_{workload}", found)
    with pytest.raises(NotFiledError, match="no row has the goal 'criteo, 1 rank, recovery, ours"):
        thesis.recoveries(PAGE)


def test_a_restore_stands_beside_the_fastest_way_that_the_result_has() -> None:
    found = Point("p", "ms", point(**{"dcp.load": 6.0, costs.MAPPED: 1.0, "ours, log": 2.0})["variants"])
    dcp, mapped = (
        [f"restore of 1.3 GB from the log, compared with {name}"] for name in ("`dcp.load`", "mapped `torch.load`")
    )
    assert list(costs._restored(found)) == [[*dcp, "3.00 times as fast"], [*mapped, "0.50 times as fast"]]
    older = Point("p", "ms", point(**{"dcp.load": 6.0, "ours, log": 2.0})["variants"])
    assert list(costs._restored(older)) == [[*dcp, "3.00 times as fast"]]
    assert list(costs._restored(Point("p", "ms", {"ours, log": {"unavailable": "x"}}))) == []


def test_a_job_that_is_not_filed_has_a_row(filed: Any) -> None:
    rows = costs.all_steps(PAGE)
    assert [row[:2] for row in rows[1:]] == [[job, "not measured"] for job in costs.JOBS]
    assert len({len(row) for row in rows}) == 1


def test_a_peer_that_could_not_run_is_named_beside_the_others() -> None:
    rows = point(base=4, ours=2)["variants"] | {"peer": {"unavailable": "not installed"}}
    assert Point("p", "ms", rows, "base").others("base", "peer", "never") == "base 4 ms, peer not measured"


def test_a_goal_that_one_groups_slow_load_reaches_says_what_the_other_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``torch.load`` and a copy took 326 ms in one group, and 1517 in the other."""

    def took(whole_ms: float) -> dict[str, Any]:
        return {"warm": {"150": {"whole_ms": whole_ms}}}

    groups = {"one base": {"copy": took(300)}, "new bases": {"copy": took(1500), "store": took(450)}}
    judged = [goal("newest marker, warm: store / copy", found="0.3 x", wanted="<= 1 x"), goal("written")]
    found = {"workloads": {"kaggle": {"groups": groups, "goals": judged}}}
    monkeypatch.setattr(store, "_result", lambda: Result(tmp_path / "2026-01-01_a.json", found))
    row, other = store.store_goals(PAGE)[1:]
    assert row[2:] == ["0.3 x; of the 300 ms in the other group 1.5 x", "reached; **missed**"]
    assert other[2:] == ["2 x", "reached"]


def test_times_that_could_not_be_cold_say_why() -> None:
    row = {"unavailable": "", "no_cold": "90% stays", "warm": {"50": {"whole_ms": 1.0}}, "cold": {}}
    assert store._times(row, "warm", "whole_ms") == "1"
    assert store._times(row, "cold", "whole_ms") == "not measured: 90% stays"
    assert store._spread([], "90% stays") == "not measured: 90% stays"


def test_sentences_that_name_a_setting_of_the_filed_run() -> None:
    def asked(result: Result, option: str) -> float:
        return float(str(result.found["command"]).split(f"--{option} ")[1].split()[0])

    jobs = [newest("step_time", job) for job in ("1-rank", "2-ranks", "criteo_1-rank", "criteo_2-ranks")]
    assert {asked(result, "rounds") for result in jobs} == {5}
    blocks = sorted(asked(result, "steps") for result in jobs)
    (epyc,) = (each for each in of_machines("limits") if "EPYC" in each.cpu)
    said = {
        r"time of a block of (\d+) to (\d+) steps": [blocks[0], blocks[-1]],
        r"three blocks of (\d+) s\)\. Markers": [asked(newest("bucket", "throttle"), "seconds")],
    }
    check_sentences("docs/performance.md", said)
    copied = epyc.point("limits").median("copy, 1 thread")
    check_sentences("benchmarks/marker/README.md", {r"EPYC, which copies at (\d+) GB/s": [copied]})


def test_what_other_layouts_read_and_store() -> None:
    layouts = kaggle("kaggle")["layouts"]
    own, chain = (layouts[name]["restored"] for name in ("store, span4, rebase", "Check-N-Run"))
    reads = r"our store reads ([\d.]+) and ([\d.]+) times as many rows at markers 50 and 150"
    check_sentences("docs/papers/check_n_run.md", {reads: [own[at] / chain[at] for at in ("50", "150")]})
    tenth = front("tenth")
    base, others = tenth["base"], tenth["others"]
    whole = base + others["Check-N-Run"]["stored"]
    stored = [100 * (base + others[f"IncrCP, a base every {number}"]["stored"]) / whole for number in (50, 100)]
    pattern = r"here (\d+)% with a base every 50 markers, (\d+)% with one every 100"
    check_sentences("benchmarks/recovery/README.md", {pattern: stored})


def test_what_layouts_of_others_do_better() -> None:
    tenth, figures = front("tenth"), newest("recovery", "tenth").found["figures"]["14a"]
    bloom, ratio = figures["and Bloom filters"], figures["and the real ratio"]
    deltas = figures["none"]["stored"] / 50  # rows of all intervals
    cold = []
    for workload in newest("recovery", "figure-15").found["workloads"].values():
        of = {name: row["cold"]["100"]["whole_ms_rounds"] for name, row in workload["groups"]["new bases"].items()}
        own = of.pop("store, by default")
        del of["naive"]
        cold += [statistics.median(a / b for a, b in zip(own, theirs, strict=True)) for theirs in of.values()]
    said: dict[str, Iterable[float]] = {
        r"Check-N-Run counts ([\d.]+)\. IncrCP": [tenth["others"]["Check-N-Run"]["average"]],
        r"are ([\d.]+) to ([\d.]+) times as fast; at marker 20": [min(cold), max(cold)],
        r"\(([\d.]+)% in a tenth of the job\)": [100 * deltas / tenth["rows"]],
        r"ratio writes (\d+)% less and reads back (\d+)% more": [
            100 * (1 - ratio["written"] / bloom["written"]),
            100 * (ratio["read_back"] / bloom["read_back"] - 1),
        ],
    }
    check_sentences("docs/papers/incrcp.md", said)


def test_what_a_merge_reads() -> None:
    base, export = (newest("merge").found["merging"][what] for what in ("a base", "windows"))
    said: dict[str, Iterable[float]] = {
        r"a base takes (\d+) reads and ([\d.]+) s \(([\d.]+) s of CPU\)": [
            base[each] for each in ("requests", "wall_s", "cpu_s")
        ],
        r"an export (\d+) reads and ([\d.]*\d) s": [export["requests"], export["wall_s"]],
    }
    check_sentences("docs/store.md", said)


def test_followers_stand_beside_the_noise_of_the_trainer() -> None:
    noise, more, work = list[float](), list[list[float]](), list[list[float]]()
    for variant in ("costs", "pause"):
        result = newest("freshness", variant)
        trained = [result.point(f"{log}: CPU of the trainer, a step").variants for log in ("file", "kafka")]
        ends = [end for row in trained for end in row["no follower, again"]["ratio_range"]]
        noise.append(100 * max(abs(1 / end - 1) for end in ends))
        more += [sorted(100 * (1 / row[name]["ratio"] - 1) for name in ("markers", "rows")) for row in trained]
        work.append([100 * (1 / row["other work"]["ratio"] - 1) for row in trained])
    said: dict[str, Iterable[float]] = {
        r"differ by up to (\d+)% in one round, and by (\d+)% in": noise,
        r"takes (\d+) to (\d+)% less over files and (\d+) to (\d+)% more over Kafka": [
            -more[0][1],
            -more[0][0],
            *more[1],
        ],
        r"result (\d+) to (\d+)% more over files and (\d+) to (\d+)% over Kafka": [*more[2], *more[3]],
        r"which follows nothing, it takes (\d+) and (\d+)% more over Kafka and (\d+) and (\d+)% over files": [
            each[log] for log in (1, 0) for each in work
        ],
    }
    check_sentences("benchmarks/freshness/README.md", said)
    pattern = r"with a follower it was (\d+)% less to (\d+)% more, and two runs without one differed by up to (\d+)%"
    check_sentences("docs/performance.md", {pattern: [-more[0][0], more[2][1], max(noise)]})


def test_where_designs_of_others_cost_less() -> None:
    added = {
        (ranks, every): newest("thesis", "criteo").facts[f"criteo, {ranks}, every {every}: seconds added"]
        for ranks in ("1 rank", "2 ranks")
        for every in (1, 2, 3)
    }
    behind = [where for where, each in added.items() if each["thesis"] < each["ours"]]
    assert behind == [("1 rank", 2), *(("2 ranks", every) for every in (1, 2, 3))]
    for job in ("synthetic", "criteo"):
        step = newest("thesis", f"parts-{job}").point("table 4.1").variants
        low, high = step["none again"]["ratio_range"]
        assert all(low < step[name]["ratio"] < high for name in ("thesis", "ours, marks alone"))
    for ranks in ("1 rank", "2 ranks"):
        blocked = newest("dense", f"weak-{ranks.replace(' ', '-')}").point(f"weak scaling, 100 MB, {ranks}, blocked")
        assert max(blocked.median(f"VELOC-{way}") for way in ("Single", "Sharded")) < blocked.median("ours")


def test_what_one_object_for_several_ranks_would_save() -> None:
    readme = "benchmarks/bucket/README.md"
    assert f"stream-ckpt {SMALL.format(*SMALL_JOBS[0], SMALL_RANKS[0])} --all" in page(readme)
    bills = {(job, ranks): small_bill(*job, ranks) for job in SMALL_JOBS for ranks in SMALL_RANKS}
    bare = [small_bill(*SMALL_JOBS[0], ranks, "--no-check-proofs")["whole"] for ranks in SMALL_RANKS]
    saved = {where: bill["at least"] - bill["grouped"] for where, bill in bills.items()}
    most = max(saved, key=saved.__getitem__)
    _, middle, last = (bills[SMALL_JOBS[0], ranks] for ranks in SMALL_RANKS)
    waited, waited_middle = (bill["log"] - bill["at least"] for bill in (last, middle))
    said: dict[str, Iterable[float]] = {
        r"leaves ([\d,]+), ([\d,]+) and ([\d,]+) of the first job": bare,
        r"saves at most (\d+) USD of these bills, (\d+)%": [saved[most], 100 * saved[most] / bills[most]["whole"]],
        r"with 512 small ranks ([\d,]+) of ([\d,]+) USD, (\d+)% of the bill, and (\d+)% of the bill without proofs": [
            *(waited, last["whole"]),
            *(100 * waited / whole for whole in (last["whole"], bare[-1])),
        ],
        r"with 64 small ranks (\d+)% and (\d+)%": [100 * waited_middle / whole for whole in (middle["whole"], bare[1])],
    }
    check_sentences(readme, said)
