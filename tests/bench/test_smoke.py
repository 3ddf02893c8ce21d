"""Each benchmark of one process at a small size: it runs to its end, checks what it restores, and files its figures."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.bench.smoke import ROOT, measured, refusal, run
from tests.forks import run_script
from tests.sampled import marks_of

CASES = {
    "encode": "--quick",
    "evolve": "--quick",
    "hooks": "--quick",
    "limits": "--quick",
    "marker": "--quick",
    "overhead": "--quick",
    "stream": "--quick --log file",
    "tracker": "--quick",
}
"""Those that file what ``common.Report`` makes of them."""

POINTS = {
    "encode": {"gather", "gather, speed"}
    | {f"{size}, {way}" for size in ("small", "medium", "varying", "large") for way in ("write", "read")},
    "evolve": {"restore", "restore, cold", "to first marker"},
    "hooks": {"CPU time of a small step"},
    "limits": {"limits"},
    "marker": {"table", "twice the table", "a tenth of the rows", "table, durable", "digest of the dense state"},
    "stream": {f"{point}{kind}" for point in ("file", "file, without fsync") for kind in ("", ", CPU", ", speed")},
    "tracker": {"thesis", "criteo"},
}
STRETCHES = ("at first", "8 times the ids", "a tenth of the ids", "every core busy", "as at first")


@pytest.mark.parametrize("case", sorted(set(CASES) - {"overhead"}))
def test_a_case_files_every_point(case: str, tmp_path: Path) -> None:
    report = run(f"{case}/run.py", CASES[case], tmp_path)
    assert report["case"] == case
    assert set(measured(report)) == POINTS[case]


@pytest.mark.slow
def test_the_overhead_of_every_stretch_is_filed(tmp_path: Path) -> None:
    report = run("overhead/run.py", CASES["overhead"], tmp_path)
    assert all(report["facts"][name]["steps"] > 0 for name in STRETCHES)
    assert all(goal["found"] for goal in report["goals"])


def test_a_head_is_restored_in_each_way(tmp_path: Path) -> None:
    report = run("head/run.py", f"--quick --head {tmp_path}", tmp_path)
    ways = {"torch.load", "and copy", "mmap, copy", "store", "head", "unverified"}
    assert measured(report) == {"warm": ways, "cold": ways}


def test_a_log_is_folded(tmp_path: Path) -> None:
    report = run("ingest/run.py", "--quick", tmp_path)
    assert report["median"]["megabytes"] == report["median_cold"]["megabytes"] > 2
    assert report["median"]["segments"] > 0


def test_merges_read_each_byte_once_and_spans_are_counted(tmp_path: Path) -> None:
    report = run("merge/run.py", "--quick", tmp_path)
    assert report["merging"]["a base"]["read_of_held"] <= 1.1
    assert report["merging"]["a base"]["written_bytes"] <= report["merging"]["a base"]["read_back_bytes"]
    assert [each["compact"] for each in report["planning"]] == ["none", "span2", "span4", "span8", "span16"]
    assert [len(each[how]) for each in report["planning"] for how in ("with summaries", "without")] == [3] * 10
    by_radix = {each["radix"]: each for each in report["spans"] if not each["rebase"]}
    assert by_radix[0]["written_of_delta"] == 1
    assert by_radix[2]["written_of_delta"] > by_radix[4]["written_of_delta"] > by_radix[16]["written_of_delta"] > 1
    assert by_radix[2]["pieces_most"] < by_radix[16]["pieces_most"]


QUANTILES = {"p50", "p99", "worst"}


def test_the_pauses_of_readers_are_filed(tmp_path: Path) -> None:
    report = run("freshness/run.py", "--quick --part pause", tmp_path)
    updates = [f"{how}, {size}" for how in ("whole", "in slices") for size in ("small", "large")]
    points = {f"{where}, {what}" for where in ("one core", "two cores") for what in ("no update", *updates)}
    assert set(report["points"]) == points
    assert all(set(point["variants"]) == QUANTILES for point in report["points"].values())
    assert all(each["found"] for each in report["goals"])


@pytest.mark.kafka
@pytest.mark.parametrize(
    "part", [pytest.param(part, marks=marks_of(part, ("catch-up",))) for part in ("age", "cpu", "catch-up")]
)
def test_a_replica_of_each_log_is_measured(part: str, tmp_path: Path) -> None:
    found = measured(run("freshness/run.py", f"--quick --part {part}", tmp_path))
    ways, others = {"rows", "markers"}, {"no follower", "no follower, again", "waits alone", "other work"}
    wanted = {
        "age": {
            f"{log}, {mode}{rest}": QUANTILES
            for log in ("file", "kafka")
            for mode in ways
            for rest in ("", ", 20 ms between steps")
        },
        "cpu": {f"{log}: CPU of the follower, a step": ways for log in ("file", "kafka")}
        | {f"{log}: CPU of the trainer, a step": {*others, *ways} for log in ("file", "kafka")},
        "catch-up": {
            f"{log}: catching up": {"raw read", *ways}
            for log in ("file, from the disk", "file, from the page cache", "kafka")
        },
    }
    assert found == wanted[part]


def test_a_materializer_scales_out_and_a_day_is_simulated(tmp_path: Path) -> None:
    report = run("scaleout/run.py", "--quick", tmp_path)
    assert report["measured"]["rounds"]["2 cores"][0]["fold_bytes"] > 0
    costs = report["unit_costs"]
    assert min(costs["fold_s_per_byte"], costs["task_s"]) > 0
    assert "merge_s_per_byte" in costs  # a difference of two runs: of a few rows it may be anything
    assert len(report["simulated"]) == 24
    assert {name: each["done"] > 0 for name, each in report["tasks"].items()} == {"scrub": True}


@pytest.mark.slow
@pytest.mark.kafka
def test_a_log_of_a_broker_is_folded(tmp_path: Path) -> None:
    report = run("ingest/run.py", "--quick --log kafka", tmp_path)
    assert report["median"]["megabytes"] > 2
    assert report["median"]["segments"] > 0


def test_a_case_without_its_broker_says_so_by_name(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    call = [sys.executable, str(ROOT / "benchmarks" / "ingest" / "run.py"), "--log", "kafka", "--out", str(out)]
    nowhere = os.environ | {"XDG_CACHE_HOME": "/proc/none", "PYTHONPATH": str(ROOT)}  # Kafka's jars cannot be there
    done = subprocess.run(call, capture_output=True, text=True, timeout=300, check=False, env=nowhere)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(out.read_text())["not measured"].startswith("no broker: ")


@pytest.mark.slow
@pytest.mark.kafka
def test_a_broker_takes_what_a_raw_producer_sends_and_what_we_do(tmp_path: Path) -> None:
    assert set(measured(run("stream/run.py", "--quick --log kafka", tmp_path))) == {
        "kafka",
        "kafka, speed",
        "kafka, CPU",
    }


def test_a_reader_behind_a_log_is_timed(tmp_path: Path) -> None:
    found = measured(run("stream/behind.py", "--quick", tmp_path))
    assert set(found) == {"until read", "until sent", "CPU, writer", "CPU, reader", "CPU, both"}
    assert len(found["until sent"]) == 4


@pytest.mark.slow
@pytest.mark.kafka
def test_both_tiers_give_back_what_was_committed(tmp_path: Path) -> None:
    found = measured(run("tiers/run.py", "--quick", tmp_path))
    assert found["warm"] == {"inner", "outer"}
    assert "inner" in found["cold"]  # a broker may hold its files


def test_a_trace_is_drawn(tmp_path: Path) -> None:
    out = tmp_path / "trace.png"
    script = ROOT / "benchmarks" / "step_time" / "trace.py"
    done = run_script(script, "--config", "small", "--out", str(out), timeout_s=400)
    assert done.returncode == 0, done.stderr[-3000:]
    assert out.read_bytes().startswith(b"\x89PNG")
    labels = {"forward", "backward", "optimizer", "drain", "mark", "checksum", "write", "sync"}
    shown = {line.split()[-5]: float(line.split()[-4]) for line in done.stdout.splitlines()}
    assert set(shown) == labels
    assert all(shown[name] > 0 for name in ("forward", "backward", "drain"))


def test_the_share_of_the_interpreter_lock_is_printed() -> None:
    sizes = ("--rounds", "1", "--frames", "8", "--seconds", "0.05")
    done = run_script(ROOT / "benchmarks" / "step_time" / "gil.py", *sizes, timeout_s=400)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "share of the interpreter lock, 8 frames in 0.05 s: median" in done.stdout


def test_bars_of_a_filed_result_are_drawn(tmp_path: Path) -> None:
    result, picture = next((ROOT / "benchmarks" / "marker" / "results").glob("*.json")), tmp_path / "bars.png"
    done = run_script(ROOT / "benchmarks" / "plot.py", str(result), str(picture), "--points", "table")
    assert done.returncode == 0, done.stderr[-3000:]
    assert picture.read_bytes().startswith(b"\x89PNG")
    said = refusal("plot.py", f"{result} {picture} --points no-such-point")
    assert "has 'no-such-point' in its name" in said


TOO_SMALL = {
    "age/run.py --generations 0": "--generations: 0 is too small: pass at least 1",
    "bucket/run.py --ids 3": "--ids: 3 is too small: pass at least 4",
    "bucket/run.py --old 9 --young 9": "--old 9: the old log needs more markers than the young one, which has 9",
    "dense/run.py --ranks 0": "--ranks: 0 is too small: pass at least 1",
    "freshness/run.py --part age --ids 3": "--ids: 3 is too small: pass at least 4",
    "encode/run.py --rounds 0": "--rounds: 0 is too small: pass at least 1",
    "head/run.py --steps 0": "--steps: 0 is too small: pass at least 1",
    "ingest/run.py --megabytes 2 --rows 2000": "--rows 2000: a frame holds 3729 rows, each one once: pass at least",
    "limits/run.py --megabytes 0": "--megabytes: 0 is too small: pass at least 1",
    "marker/run.py --rows 5000": "--rows 5000 --touched 0.01 has a step touch 50 rows: make it at least 100",
    "memory/run.py --rows 5000": "--rows 5000 --touched 0.01 leaves each of 10 steps less than one bag of 10 rows",
    "merge/run.py --markers 3": "--markers: 3 is too small: pass at least 20",
    "overhead/run.py --seconds 0": "--seconds 0: no step fits into that time: pass more than 0",
    "dense/weak.py --every 32": "--every 32: a run of --steps 31 has no checkpoint: make it at most that",
    "recovery/run.py --rows 10": "--rows: 10 is too small: pass at least 1000",
    "restore/run.py --rows 500": "--rows 500 --steps 10: the steps touch a tenth of the rows",
    "scale/run.py --rows 10": "--rows: 10 is too small: pass at least 1000",
    "scaleout/run.py --rows 10": "--rows: 10 is too small: pass at least 1000",
    "step_time/gil.py --seconds 0": "--seconds 0: nothing can be counted in that time: pass more than 0",
    "step_time/run.py --steps two": "--steps: 'two' is not a whole number",
    "step_time/run.py --variants off_again": "invalid choice",
    "stream/run.py --megabytes -1": "--megabytes: -1 is too small: pass at least 1",
    "takeover/run.py --dim 1": "--dim: 1 is too small: pass at least 4",
    "thesis/run.py --ranks 0": "--ranks: 0 is too small: pass at least 1",
    "tiers/run.py --steps 3": "--steps: 3 is too small: pass at least 4",
    "tiers/restarts.py --epochs 40": "--epochs: 40 is too small: pass at least 41",
    "tracker/run.py --steps 0": "--steps: 0 is too small: pass at least 1",
}


@pytest.mark.parametrize("call", TOO_SMALL)
def test_a_size_that_is_too_small_is_refused_in_one_line(call: str) -> None:
    script, _, sizes = call.partition(" ")
    assert TOO_SMALL[call] in refusal(script, sizes)


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without CUDA")
@pytest.mark.parametrize("case", ["marker", "scale", "step_time"])
def test_a_case_on_a_gpu_that_is_not_there_says_so(case: str) -> None:
    assert "argument --device: torch finds no CUDA device here" in refusal(f"{case}/run.py", "--device cuda")


def test_the_age_of_filed_results_is_told(tmp_path: Path) -> None:
    """Or why nobody can tell: what was unpacked from an archive has no history."""
    script = [sys.executable, str(ROOT / "benchmarks" / "filed.py")]
    done = subprocess.run([*script, "encode"], capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path)
    assert "later commits" in done.stdout if not done.returncode else done.stderr.startswith("Error: git log")
    done = subprocess.run([*script, "encoding"], capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path)
    assert done.returncode == 2
    assert "no case encoding: there are age, bucket, dense, encode" in done.stderr


def test_a_result_of_a_commit_that_is_not_here_is_as_old_as_the_commit_that_filed_it(tmp_path: Path) -> None:
    """Commits that are moved onto others get new names, and results keep the old ones."""

    def git(*arguments: str) -> str:
        author = ["-c", "user.name=t", "-c", "user.email=t@localhost"]
        return subprocess.run(
            ["git", *author, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
        ).stdout

    case = tmp_path / "benchmarks" / "encode"
    (case / "results").mkdir(parents=True)
    shutil.copy(ROOT / "benchmarks" / "filed.py", case.parent)
    for name in ("2026-01-02_moved", "2026-01-03_with-changes"):
        commit = "0123456789ab" + "+" * name.endswith("changes")
        (case / "results" / f"{name}.json").write_text(json.dumps({"machine": {"commit": commit}}))
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "filed")
    filed = git("log", "-1", "--format=%h").strip()
    (case / "results" / "2026-01-04_unknown.json").write_text(json.dumps({"machine": {"commit": "0123456789ab"}}))
    (case / "run.py").write_text("# newer\n")
    git("add", str(case / "run.py"))
    git("commit", "-qm", "newer")
    script = [sys.executable, str(case.parent / "filed.py"), "encode"]
    done = subprocess.run(script, capture_output=True, text=True, timeout=300, check=False)
    rows = [line.split() for line in done.stdout.splitlines()[1:]]
    assert [row[1:5] for row in rows] == [
        ["2026-01-02_moved", "2026-01-02", filed, "1"],
        ["2026-01-03_with-changes", "2026-01-03", filed, "1"],
        ["2026-01-04_unknown", "2026-01-04", "?", "?"],
    ], done.stderr


def test_every_benchmark_has_a_smoke_test() -> None:
    scripts = {
        str(path.relative_to(ROOT / "benchmarks"))
        for path in (ROOT / "benchmarks").rglob("*.py")
        if '__name__ == "__main__"' in path.read_text()
    }
    others = [ROOT / "tests" / "unit" / name for name in ("test_pages.py", "test_bench_compare.py")]
    tests = "".join(path.read_text() for path in [*Path(__file__).parent.glob("*.py"), *others])
    named = {script for script in scripts if f'"{script}"' in tests or script.removesuffix("/run.py") in CASES}
    named |= {script for script in scripts if " / ".join(f'"{part}"' for part in script.split("/")) in tests}
    named |= {"quotations.py", "whole.py"}  # which tests/unit/test_quotations.py and test_whole.py import
    named |= {f"proof/{part}.py" for part in ("costs", "draw", "ettr")}  # which proof/page.py runs, in test_proof.py
    assert scripts - named == set()
