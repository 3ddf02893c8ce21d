"""The branches for a GPU, on a machine that has none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests import forks

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


def _play(output: Path, *arguments: str) -> int:
    """(process) The status of a pytest that takes its CPU for the device."""
    torch.set_num_threads(1)
    return forks.run_pytest(output, "--workers", "0", "-p", "tests.played.plugin", *arguments)


@pytest.mark.timeout(600)  # half a minute where nobody else works
def test_the_tests_of_a_gpu_pass_on_a_played_one(tmp_path: Path) -> None:
    output, report = tmp_path / "output", tmp_path / "report.json"
    chosen = ("-q", "-m", "gpu", "-o", "python_files=test_*.py branches.py", f"--basetemp={tmp_path / 'run'}")
    shown = ("--tb=short", "--show-capture=no", "--disable-warnings")  # what failed is not to be cut off below
    given = (*chosen, *shown, f"--played-report={report}", "tests/gpu")
    assert forks.call(_play, output, *given, timeout_s=580) == 0, output.read_text()[-8000:]
    found = json.loads(report.read_text())
    assert found["passed"] >= 75
    assert [name for name in ASKED if not found["calls"].get(name)] == []
