"""The branches for a GPU, on a machine that has none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ASKED = (
    "cache filled",
    "event.synchronize",
    "flush",
    "linearize_cache_indices",
    "linearize_cache_indices, VBE",
    "lxu_cache_lookup",
    "pinned",
    "query",
    "wait_event",
    "wait_stream",
)
"""A branch that nothing goes through shows nothing."""


@pytest.mark.timeout(600)  # half a minute where nobody else works
def test_the_tests_of_a_gpu_pass_on_a_played_one(tmp_path: Path) -> None:
    """In a process of its own, which takes its CPU for the device."""
    report = tmp_path / "report.json"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-p", "tests.played.plugin", "-p", "no:cacheprovider", "-m", "gpu", "-q"),
            *("-o", "python_files=test_*.py branches.py", f"--played-report={report}", "tests/gpu"),
            *("--tb=short", "--show-capture=no", "--disable-warnings"),  # what failed is not to be cut off below
        ],
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    found = json.loads(report.read_text())
    assert found["passed"] >= 75
    assert [name for name in ASKED if not found["calls"].get(name)] == []
