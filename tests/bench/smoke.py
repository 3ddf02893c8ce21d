"""A benchmark at a small size: what it files, and how it refuses a size that is too small."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tests.forks import run_script

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 400.0


def run(script: str, sizes: str, folder: Path) -> Any:
    """The filed result of one run."""
    out = folder / "result.json"
    done = run_script(ROOT / "benchmarks" / script, *sizes.split(), "--out", str(out), timeout_s=TIMEOUT_S)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(out.read_text())


def measured(report: dict[str, Any], rounds: int = 1) -> dict[str, set[str]]:
    """Variants by point of a result that ``common.Report`` has filed, each with all rounds; the rest says why not."""
    assert report["points"]
    assert report["command"].startswith("python benchmarks/")
    for name, why in report["facts"].items():
        if name.endswith("is not measured"):
            print(f"{name}: {why}")  # pytest shows it with the failure
    found: dict[str, set[str]] = {}
    for point, rows in report["points"].items():
        for name, row in rows["variants"].items():
            if "unavailable" in row:
                assert row["unavailable"], name
                continue
            assert len(row["rounds"]) == rounds, name
            assert all(value > 0 for value in row["rounds"]), name
            found.setdefault(point, set()).add(name)
    assert report["goals"] == [] or all(goal["found"] for goal in report["goals"]), report["goals"]
    return found


def refusal(script: str, sizes: str) -> str:
    """The one line that a size which is too small is refused with."""
    done = run_script(ROOT / "benchmarks" / script, *sizes.split(), timeout_s=TIMEOUT_S)
    assert done.returncode == 2, done.stderr[-3000:]
    assert "Traceback" not in done.stderr
    (line,) = re.findall(r"^\S+: error: .*$", done.stderr, re.MULTILINE)
    assert done.stderr.endswith(f"{line}\n")
    return str(line)
