"""The recovery benchmark at a tiny size: every scheme brings back the reference's state and prints what it took."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.forks import ROOT, run_script

MARKERS, NEWEST = ["3", "9", "14"], "14"
ONE_IMAGE = {"torch.load", "torch.load + copy", "torch.load, mmap + copy", "store, head"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str, Path]:
    """(report of one workload, what was printed, folder of the filed result)."""
    folder = tmp_path_factory.mktemp("recovery")
    script = ROOT / "benchmarks" / "recovery" / "run.py"
    sizes = "--rows 4000 --batch 12 --markers 14 --restore 3 9 --rounds 2 --cold-rounds 1 --cold-by fadvise --threads 1"
    places = ["--scratch", str(folder), "--out", str(folder / "result")]
    done = run_script(script, "--workload", "pnn", *sizes.split(), *places, timeout_s=500)
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
    for name in ("Check-N-Run", "IncrCP, base reset", "store, rebase"):
        assert max(later - earlier for earlier, later in pairwise(found[name]["written"])) >= base, name


def test_the_differential_chain_keeps_what_the_naive_one_does_many_times(
    run: tuple[dict[str, Any], str, Path],
) -> None:
    found = {name: row for (_, name), row in schemes(run[0]).items()}
    assert found["naive"]["stored"][-1] == found["naive"]["written"][-1]
    assert found["differential"]["stored"][-1] > 1.5 * found["naive"]["stored"][-1]
    assert found["IncrCP"]["stored"][-1] == found["naive"]["stored"][-1]
    assert found["IncrCP"]["written"][-1] > found["naive"]["written"][-1]


def test_plots_are_filed(run: tuple[dict[str, Any], str, Path]) -> None:
    for what in ("recovery", "storage", "written", "construction", "warm-cold"):
        assert (run[2] / f"result_pnn_{what}.png").read_bytes().startswith(b"\x89PNG"), what
