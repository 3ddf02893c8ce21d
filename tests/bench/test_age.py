"""The benchmark of old logs at a tiny size: what it measures is measured, on a log that the library reads as whole."""

from __future__ import annotations

import json
from pathlib import Path

from tests.forks import ROOT, run_script


def test_an_old_log_is_written_and_looked_at(tmp_path: Path) -> None:
    script, out = ROOT / "benchmarks" / "age" / "run.py", tmp_path / "result.json"
    sizes = ["--generations", "3", "--markers", "12", "--ranks", "2"]
    done = run_script(script, *sizes, "--out", str(out), timeout_s=500)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert (found["facts"]["list"]["markers"], found["facts"]["list_newest"]["markers"]) == (12, 12)
    cpu, attached = {"attach, CPU", "choice, CPU"}, {"rank 0, attached"}
    assert set(found["points"]) == {"attach", "choice", "commit", "first commit", "rank 0"} | cpu | attached
    assert len(found["goals"]) == 7
    assert all(goal["found"] for goal in found["goals"])
    assert found["facts"]["commit_bytes_of_1024_ranks"] < 40_000
