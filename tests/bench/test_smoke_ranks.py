"""Each benchmark that starts ranks or processes of its own, at a small size."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.bench.smoke import ROOT, measured, run
from tests.forks import run_script

WAYS = ("pickle", "np.save", "np.memmap")
NEW_NODES = ("a new node", "standing by")


LARGE_RESULT = """
import os, sys
sys.path.insert(0, "benchmarks")
os.environ["BENCH_START"] = "forkserver"
from common import start_ranks

def body(rank, num_bytes):
    return bytes([rank + 1]) * num_bytes

if __name__ == "__main__":
    assert start_ranks(body, 2, 1 << 20) == b"\\1" * (1 << 20)
"""


def test_the_first_rank_may_return_more_than_a_pipe_holds(tmp_path: Path) -> None:
    script = tmp_path / "large_result.py"
    script.write_text(LARGE_RESULT)
    done = run_script(script)
    assert done.returncode == 0, done.stderr


def test_dense_state_of_two_ranks(tmp_path: Path) -> None:
    report = run("dense/run.py", "--quick", tmp_path)
    ways = {"torch.save, barrier", "VELOC-Single", "VELOC-Sharded", "ours"}
    assert measured(report) == {"2 MB, 2 ranks": ways, "2 MB, 2 ranks, durable": ways}
    assert len(report["facts"]["2 MB, 2 ranks: bytes written by each rank"]) == 2


def test_weak_scaling_of_two_ranks(tmp_path: Path) -> None:
    report = run("dense/weak.py", "--quick --ranks 2", tmp_path)
    ways = {"torch.save", "VELOC-Single", "VELOC-Sharded", "ours"}
    name, runs = "weak scaling, 2 MB, 2 ranks", {"none", "none again", *ways}
    assert measured(report) == {
        f"{name}, run": runs,
        f"{name}, durable": ways,
        f"{name}, run, without fsync": runs,
        f"{name}, blocked": ways,
        f"{name}, iterations": runs,
    }


def test_one_rank_saves_a_parameter_and_its_states(tmp_path: Path) -> None:
    report = run("dense/balance.py", "--quick", tmp_path)
    name = "balance, 20 MB, 2 ranks"
    assert measured(report) == {name: {"even", "one large"}}
    shares = report["facts"][f"{name}: busiest rank over the mean"]
    assert all(1 <= each["as dealt"] <= 2 for each in shares.values())


def test_the_dense_state_is_copied_at_once_and_late(tmp_path: Path) -> None:
    report = run("dense/lazy.py", "--quick", tmp_path)
    name, ways = "2 MB, 2 ranks: mark()", {"at once", "lazy"}
    assert measured(report) == {
        name: ways,
        f"{name}, CPU of its thread": ways,
        f"{name} and the next step": {*ways, "none"},
        f"{name} and the next step, CPU until committed": {*ways, "none"},
    }


def test_small_tables_are_restored_in_each_way(tmp_path: Path) -> None:
    report = run("restore/small.py", "--quick", tmp_path)
    ways = {"torch.load, mmap + copy", "ours, log", "ours, store"}
    name = "2 tables of 1000 rows"
    assert measured(report) == {name: ways, f"{name}, CPU": ways}


def test_killed_savers(tmp_path: Path) -> None:
    report = run("dense/pymm.py", "--quick", tmp_path)
    ways = {f"{way}, {files} file" + "s" * (files == "two") for way in WAYS for files in ("one", "two")}
    crashes = report["facts"]["crashes"]
    last = {f"{way}, two files, last complete" for way in WAYS}
    assert set(crashes) == {*ways, *last, "ours, a marker"}
    assert all(sum(each.values()) == 1 for each in crashes.values())
    assert crashes["ours, a marker"]["right"] == crashes["pickle, two files"]["right"] == 1
    assert crashes["np.memmap, two files, last complete"]["right"] == 1


def test_saves_by_size_and_again_and_again(tmp_path: Path) -> None:
    report = run("dense/sizes.py", "--quick", tmp_path)
    ways = {*WAYS, "ours, a marker"}
    sizes = {"4 MB", "4 MB: written"}
    assert measured(report) == {**{key: {*ways, "np.savez_compressed"} for key in sizes}, "4 MB, 2 saves": ways}
    written, durable = (report["points"][name]["variants"] for name in ("4 MB: written", "4 MB"))
    assert all(written[way]["median"] <= durable[way]["median"] for way in durable)


@pytest.mark.slow
@pytest.mark.parametrize(("part", "ways"), [("cold", ("torch.save", "the same node")), ("hot", NEW_NODES)])
def test_a_job_outlives_four_failures(part: str, ways: tuple[str, ...], tmp_path: Path) -> None:
    """On the same node, on a new one without the near tier, and with spares that stand by."""
    report = run("tiers/restarts.py", f"--quick --part {part}", tmp_path)
    assert measured(report, rounds=4) == {key: set(ways) for key in ("to the next step", "until restored")}
    for way in ways:
        found = report["facts"][way]
        assert found["failures"] == 4
        assert found["losses that differ"] == found["tensors that differ"] == 0
        assert found["losses compared"] == 2 * (82 + found["steps made again"])
        assert found["tensors compared"] > 2 * 2


@pytest.mark.slow
def test_ways_of_others_are_killed_by_the_same_clock(tmp_path: Path) -> None:
    variants = run("proof/run.py", "--quick --kills 1 --peer-kills 2", tmp_path)["facts"]["variants"]
    assert set(variants) == {"ours", "torch.save", "dcp.async_save", "ModelDeltaTracker and DCP"}
    assert all(found["steps trained again"] >= 0 for found in variants.values())


@pytest.mark.slow
def test_training_logs_are_the_same_bytes_with_and_without_checkpoints(tmp_path: Path) -> None:
    """And what checkpoints add is measured with the near tier and without it. All numbers of ranks share one broker."""
    report = run("tiers/ranks.py", "--quick --ranks 1 2", tmp_path)
    nothing, ways = {"none", "none again"}, {"torch.save", "far", "near, far"}
    for ranks, name in enumerate(("1 rank", "2 ranks"), 1):
        digests = report["facts"][f"{name}: SHA-256 of the training logs"]
        assert set(digests) == nothing | ways | {f"{way}, without fsync" for way in ways}
        (of_ranks,) = {tuple(each) for each in digests.values()}
        assert len(set(of_ranks)) == ranks, "each rank logs a loss of its own"
    points = [name + ending for name in ("1 rank", "2 ranks") for ending in ("", ", without fsync")]
    assert measured(report) == dict.fromkeys(points, nothing | ways)


ROOMLESS = {
    "dense/weak.py --ranks 1 --megabytes 100000000": ["weak scaling, 100000000 MB, 1 rank"],
    "dense/pymm.py --megabytes 100000000": ["crashes"],
    "dense/sizes.py --megabytes 100000000 --repeated 90000000": ["100000000 MB", "90000000 MB, 2 saves"],
    "thesis/parts.py --ids 1000000000000 --tables 4.1": ["table 4.1"],
    "tiers/ranks.py --rows 100000000000 --ranks 1": ["1 rank"],
}


@pytest.mark.parametrize("call", ROOMLESS)
def test_a_row_that_the_machine_has_no_room_for_is_filed_by_name_and_not_begun(call: str, tmp_path: Path) -> None:
    script, _, sizes = call.partition(" ")
    report = run(script, f"--quick {sizes}", tmp_path)
    assert report["points"] == {}
    for row in ROOMLESS[call]:
        assert re.search(r" needs [\d.]+ GB of memory, [\d.]+ GB are free$", report["facts"][f"{row} is not measured"])


def test_one_way_to_sync_by_itself(tmp_path: Path) -> None:
    report = run("thesis/parts.py", "--quick --tables 4.4 --fsync with", tmp_path)
    assert set(report["points"]) == {"table 4.4, durable"}


def test_parts_of_the_thesis(tmp_path: Path) -> None:
    report = run("thesis/parts.py", "--quick", tmp_path)
    saves = {"torch.save, all", "torch.save, without embeddings", "ours, a marker"}
    assert measured(report) == {
        "table 4.1": {"none", "none again", "thesis", "ours", "ours, marks alone"},
        "table 4.2": {"multiprocessing.Queue", "Quick Queue", "ours, submit"},
        "table 4.4": saves,
        "table 4.4, durable": saves,
    }


def test_memory_of_each_way(tmp_path: Path) -> None:
    report = run("memory/run.py", "--quick", tmp_path)
    assert set(report["points"]["peak"]["variants"]) == {"torch.save", "dcp.async_save", "ours, 10% touched"}
    assert all(goal["found"] for goal in report["goals"])


def test_each_way_restores_what_was_saved(tmp_path: Path) -> None:
    report = run("restore/run.py", "--quick", tmp_path)
    ways = {"torch.load + copy", "torch.load, mmap + copy", "dcp.load"}
    on_files = {
        f"{source}, on 1{state}": {*ways, f"StreamReader, {source}", f"ours, {source}"}
        for source in ("log", "store")
        for state in ("", ", cold")
    }
    assert measured(report) == on_files | {"kafka, on 1": {"raw consume", "ours, kafka"}}


def test_steps_are_timed_with_and_without_a_stream(tmp_path: Path) -> None:
    report = run("step_time/run.py", "--quick", tmp_path)
    assert len(report["variants"]) == 10
    assert all(row["ratio_median_until_all_is_sent"] > 0 for row in report["variants"].values())
    assert all(row["steps"] == 2 and row["step_ms_median"] > 0 for row in report["variants"].values())
    assert report["variants"]["drain every step"]["megabytes_a_step"] > 0


def test_a_spare_takes_over_and_a_restart_restores(tmp_path: Path) -> None:
    report = run("takeover/run.py", "--quick", tmp_path)
    assert len(report["rounds"]) == 1
    assert report["medians"]["plain_to_first_step_s"] > report["medians"]["plain_to_restored_s"] > 0
    assert report["medians"]["spare_to_first_step_s"] > report["medians"]["spare_to_restored_s"]


@pytest.mark.slow
@pytest.mark.parametrize("workload", ["synthetic", "synthetic-10k", "criteo"])
def test_whole_runs_and_recoveries(workload: str, tmp_path: Path) -> None:
    report = run("thesis/run.py", f"--quick --each-step --workload {workload}", tmp_path)
    points = {f"every {number}" for number in (1, 2, 3)} | {"every 1, without fsync", "recovery", "recovery, cold"}
    points.add("every 1, each step")
    assert set(report["points"]) == {f"{workload}, 1 rank, {each}" for each in points}
    for rows in report["points"].values():
        assert all(row["median"] > 0 for row in rows["variants"].values())


@pytest.mark.slow
@pytest.mark.kafka
def test_whole_runs_of_several_jobs_over_one_broker(tmp_path: Path) -> None:
    jobs = "--workload synthetic-10k synthetic-25k --ranks 1 2"
    report = run("thesis/run.py", f"--quick --log kafka {jobs} --fsync with", tmp_path)
    assert len(report["points"]) == 4 * 5
    assert all("rounds" in row for rows in report["points"].values() for row in rows["variants"].values())


@pytest.mark.slow
def test_unit_costs_are_measured_and_compared_with_jobs(tmp_path: Path) -> None:
    out = tmp_path / "scale"
    script = ROOT / "benchmarks" / "scale" / "run.py"
    done = run_script(script, "--quick", "--out", str(out), timeout_s=500)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(out.with_name("scale.json").read_text())
    assert report["unit_costs"]["scan_s_per_row"] >= 0
    assert set(report["check"]) == {"1"}
    assert [row["gpus"] for row in report["scale"]] == sorted(row["gpus"] for row in report["scale"])
    for picture in ("check", "8-to-1024"):
        assert out.with_name(f"scale_{picture}.png").read_bytes().startswith(b"\x89PNG")
