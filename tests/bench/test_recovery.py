"""The recovery benchmark at a tiny size: every scheme brings back the reference's state and prints what it took."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.forks import ROOT, run_script

SIZES = "--rows 4000 --batch 60 --markers 14"
MARKERS, NEWEST = ["3", "9", "14"], "14"
ONE_IMAGE = {"torch.load", "torch.load + copy", "torch.load, mmap + copy", "store, head"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str, Path]:
    """(report of one workload, what was printed, folder of the filed result)."""
    folder = tmp_path_factory.mktemp("recovery")
    script = ROOT / "benchmarks" / "recovery" / "run.py"
    sizes = f"{SIZES} --restore 3 9 --rounds 2 --cold-rounds 1 --cold-by fadvise --threads 1 --incrcp-every 6"
    places = ["--scratch", str(folder), "--out", str(folder / "result")]
    done = run_script(script, "--quick", "--workload", "pnn", *sizes.split(), *places, timeout_s=500)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in folder.glob("recovery-*")] == [], "the scratch folder is still there"
    return json.loads((folder / "result.json").read_text())["workloads"]["pnn"], done.stdout, folder


def schemes(report: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(group, name): row for group, rows in report["groups"].items() for name, row in rows.items()}


def test_every_scheme_restores_the_reference_bit_for_bit(run: tuple[dict[str, Any], str, Path]) -> None:
    for (group, name), row in schemes(run[0]).items():
        if not row["unavailable"]:
            markers = [NEWEST] if name in ONE_IMAGE else MARKERS[:: 1 if group == "one base" else 2]
            assert row["exact"] == [int(marker) for marker in markers], name


def test_schemes_that_begin_from_files_load_in_fresh_processes(run: tuple[dict[str, Any], str, Path]) -> None:
    for group, name in (("one base", "store"), ("new bases", "store, by default")):
        first = run[0]["first_loads_ms"][group]
        assert {name, "torch.load + copy", "torch.load, mmap + copy"} <= set(first["warm"])
        assert all(len(times) == 1 for times in first["warm"].values())


def test_a_scheme_that_cannot_run_says_why(run: tuple[dict[str, Any], str, Path]) -> None:
    for (_, name), row in schemes(run[0]).items():
        assert bool(row["unavailable"]) == (not row["warm"]), name
        assert row["unavailable"] in run[1]


def test_what_is_printed_was_measured_in_this_run(run: tuple[dict[str, Any], str, Path]) -> None:
    for (_, name), row in schemes(run[0]).items():
        for times in row["warm"].values():
            assert len(times["whole_ms_rounds"]) == 2, name
            assert f"{times['whole_ms']:.1f} (" in run[1], name


def test_new_bases_are_taken_and_chunks_extracted(run: tuple[dict[str, Any], str, Path]) -> None:
    """Else this size would say nothing of them."""
    found = {name: row for (_, name), row in schemes(run[0]).items()}
    base = found["naive"]["stored"][0]
    assert found["IncrCP"]["read_back"][-1] > 0
    for name in ("Check-N-Run", "IncrCP, base every N", "store, by default"):
        assert max(later - earlier for earlier, later in pairwise(found[name]["written"])) >= base, name


def test_the_differential_chain_keeps_what_the_naive_one_does_many_times(
    run: tuple[dict[str, Any], str, Path],
) -> None:
    found = {name: row for (_, name), row in schemes(run[0]).items()}
    assert found["naive"]["stored"][-1] == found["naive"]["written"][-1]
    assert found["differential"]["stored"][-1] > 1.5 * found["naive"]["stored"][-1]
    assert found["IncrCP"]["stored"][-1] == found["naive"]["stored"][-1]
    assert found["IncrCP"]["written"][-1] > found["naive"]["written"][-1]


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the layouts of the same job come to in rows, by their ids alone."""
    out = tmp_path_factory.mktemp("counts") / "counts.json"
    script = ROOT / "benchmarks" / "recovery" / "counts.py"
    sizes = [*SIZES.split(), "--ratios", "0", "1", "--out", str(out)]
    done = run_script(script, "--workload", "pnn", *sizes, timeout_s=500)
    assert done.returncode == 0, done.stderr
    layouts: dict[str, Any] = json.loads(out.read_text())["workloads"]["pnn"]["layouts"]
    return layouts


@pytest.mark.parametrize("name", ["naive", "differential", "IncrCP", "store", "store, by default", "Check-N-Run"])
def test_each_layout_reads_the_rows_that_its_rules_say(
    name: str, run: tuple[dict[str, Any], str, Path], counted: dict[str, Any]
) -> None:
    (read,) = {row["reads"][NEWEST]["delta_rows"] for (_, each), row in schemes(run[0]).items() if each == name}
    assert read == counted[name]["restored"][NEWEST]


def test_incrcp_reads_back_what_its_filters_let_pass(
    run: tuple[dict[str, Any], str, Path], counted: dict[str, Any]
) -> None:
    (found,) = [row for (_, name), row in schemes(run[0]).items() if name == "IncrCP"]
    naive = run[0]["groups"]["one base"]["naive"]
    row_bytes = naive["reads"][NEWEST]["delta_bytes"] // naive["reads"][NEWEST]["delta_rows"]
    assert found["read_back"][-1] == row_bytes * counted["IncrCP"]["read_back"]
    assert found["written"][-1] - naive["written"][0] == row_bytes * counted["IncrCP"]["written"]
    assert found["dead"][-1] > 0, "bundles hold parts that were written anew"


def test_a_layout_that_rewrites_more_reads_less(counted: dict[str, Any]) -> None:
    naive, incrcp = counted["naive"], counted["IncrCP"]
    assert counted["IncrCP, R=1"]["restored"] == naive["restored"], "nothing passes a ratio of 1"
    assert counted["IncrCP, R=0"]["written"] >= incrcp["written"] > naive["written"]
    assert counted["IncrCP, R=0"]["restored"][NEWEST] <= incrcp["restored"][NEWEST] < naive["restored"][NEWEST]
    assert counted["differential"]["restored"][NEWEST] <= counted["IncrCP, R=0"]["restored"][NEWEST]
    assert counted["store, span2"]["restored"][NEWEST] < counted["store, span4"]["restored"][NEWEST]


@pytest.mark.slow  # by the counts that the tests above compare with files
def test_figures_of_the_paper_are_counted(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    done = run_script(ROOT / "benchmarks" / "recovery" / "figures.py", "--quick", "--out", str(out), timeout_s=500)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())["figures"]
    assert set(found) == {"13", "14a", "14b", "15", "17"}
    by_ratio, added, bundled = found["13"]["R"], found["14a"], found["14b"]
    assert by_ratio["1"]["restored"] == found["13"]["naive"]["restored"]
    assert by_ratio["1"]["average_of_naive"] == 1 > by_ratio["0.02"]["average_of_naive"]
    assert by_ratio["0.02"] == added["and the real ratio"]
    assert list(added) == ["none", "key ranges", "and Bloom filters", "and the real ratio"]
    assert added["and Bloom filters"]["read_back"] < added["key ranges"]["read_back"]
    assert added["and Bloom filters"]["asked"]["by_ratio"] < added["and the real ratio"]["asked"]["by_ratio"]
    for row in bundled.values():
        assert all(row["files"][at] <= row["files_unbundled"][at] for at in row["files"])
    assert bundled["0"]["files"]["10"] < bundled["0"]["files_unbundled"]["10"]
    assert found["15"]["layouts"]["IncrCP, base every 80"]["bases"] == 1
    tenth = {length: list(rows["naive"]["restored"]) for length, rows in found["17"].items()}
    assert tenth == {"20": ["10"], "30": ["10"], "40": ["10"], "50": ["10"]}


def test_the_front_is_counted_and_drawn(tmp_path: Path) -> None:
    """The script itself compares policies with the rules of the store, many of them with ``--quick``."""
    out = tmp_path / "front.json"
    done = run_script(ROOT / "benchmarks" / "recovery" / "front.py", "--quick", "--out", str(out), timeout_s=300)
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    assert report["default"] in report["store"]
    averages = [report["store"][name]["average"] for name in report["front"]]
    assert averages == sorted(averages)
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_plots_are_filed(run: tuple[dict[str, Any], str, Path]) -> None:
    for what in ("recovery", "storage", "written", "construction", "warm-cold"):
        assert (run[2] / f"result_pnn_{what}.png").read_bytes().startswith(b"\x89PNG"), what
