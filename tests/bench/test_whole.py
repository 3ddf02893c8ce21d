"""All benchmarks one after the other, in parts: what was done is not done again, and a failure ends nothing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench.smoke import ROOT

sys.path.append(str(ROOT / "benchmarks"))

import whole

SCRIPTS = ["benchmarks/limits/run.py", "benchmarks/encode/run.py"]


def test_a_run_goes_on_after_those_that_are_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(whole, "commit", lambda: "0123456789ab")
    assert whole.run_all(["benchmarks/limits/run.py", "benchmarks/gone/run.py"], ["--quick"], tmp_path) == [
        "benchmarks/gone/run.py"
    ]
    first = (tmp_path / "limits_run.json").stat().st_mtime_ns
    capfd.readouterr()
    assert whole.run_all(SCRIPTS, ["--quick"], tmp_path) == []
    assert "== benchmarks/limits/run.py: done at this commit" in capfd.readouterr().out
    assert (tmp_path / "limits_run.json").stat().st_mtime_ns == first
    found = [json.loads((tmp_path / f"{case}_run.json").read_text())["case"] for case in ("limits", "encode")]
    assert found == ["limits", "encode"]


def test_another_commit_or_other_options_are_run_and_so_is_what_has_changes_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = {"commit": "0123456789ab"}
    called: list[str] = []
    monkeypatch.setattr(whole, "commit", lambda: at["commit"])
    monkeypatch.setattr(whole, "ROOT", tmp_path)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.py").write_text(
            "import pathlib\npathlib.Path(__file__).with_name('ran').open('a').write('x')\n"
        )
    scripts = ["a/run.py", "b/run.py"]

    def ran() -> int:
        assert whole.run_all(scripts, called, tmp_path / "kept") == []
        return len((tmp_path / "a" / "ran").read_text())

    assert [ran(), ran()] == [1, 1]
    at["commit"] = "ba9876543210"
    assert ran() == 2
    called.append("--quick")
    assert ran() == 3
    at["commit"] += "+"
    assert [ran(), ran()] == [4, 5]


def test_a_case_that_is_not_there_is_named() -> None:
    with pytest.raises(SystemExit, match=r"make bench: no benchmarks/gone/run\.py"):
        whole.main(["benchmarks/limits/run.py", "benchmarks/gone/run.py", "--", "--quick"])


def test_make_bench_runs_every_program_that_takes_quick() -> None:
    """Except the page of the proof, which ``make proof`` writes."""
    environ = {name: text for name, text in os.environ.items() if name not in {"BENCH", "MAKEFLAGS"}}
    called = subprocess.run(["make", "-n", "bench"], cwd=ROOT, env=environ, capture_output=True, text=True, check=True)
    (line,) = re.findall(r"whole\.py (.*) --", called.stdout)
    run = sorted(path.relative_to(ROOT) for word in line.split() for path in ROOT.glob(word))
    takes_quick = re.compile(r"= parse\(|\"--quick\"")
    programs = sorted(ROOT.glob("benchmarks/*/*.py"))
    quick = [each for each in programs if "__main__" in each.read_text() and takes_quick.search(each.read_text())]
    assert [*map(str, run)] == [str(each.relative_to(ROOT)) for each in quick if each.name != "page.py"]
