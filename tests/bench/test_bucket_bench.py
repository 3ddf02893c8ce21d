"""The benchmark of the bucket log at its smallest size."""

from __future__ import annotations

from pathlib import Path

from tests.bench.smoke import measured, run


def test_the_bucket_log_is_measured_against_raw_requests_and_its_requests_are_counted(tmp_path: Path) -> None:
    report = run("bucket/run.py", "--quick --part stream restore commit attach", tmp_path)
    ways = {"raw", "ours"}
    speeds = {f"{part}, 5 ms{what}": ways for part in ("stream", "restore") for what in ("", ", CPU", ", speed")}
    ages = {"20 markers", "300 markers"}
    assert measured(report) == {**speeds, "commit, 5 ms": {"one put", "commit"}, "attach, 30 ms": ages}
    facts = report["facts"]
    assert facts["commit, 5 ms: requests"]["put"] == 1
    assert 1 <= facts["commit, 5 ms: requests in turn"]["most"] <= sum(facts["commit, 5 ms: requests"].values())
    young, old = (facts[f"attach after {each}: requests"] for each in ("20 markers", "300 markers"))
    assert young["get"] >= 20  # its records are not packed
    assert old["get"] >= 300 - 256 + 1  # one pack, and the records after it
    assert old["the commit after it"] == young["the commit after it"]


def test_a_trainer_outlasts_a_throttled_bucket_with_a_complete_log(tmp_path: Path) -> None:
    # A block is twice as long as the longest pause of a client that backs off.
    report = run("bucket/run.py", "--quick --part throttle --seconds 3", tmp_path)
    what = ("step(), mean", "step(), p99", "step(), worst", "training step, mean", "until a marker is committed")
    ways = {"plain", "plain again", "503", "silence"}
    assert measured(report) == {f"throttle: {each}": ways for each in what}
    assert report["facts"]["throttle: markers, all restorable, the newest bit for bit"] >= len(ways)
    assert report["facts"]["throttle: requests a second"]["503"] > 0
