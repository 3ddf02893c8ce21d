"""A sample of the tests on a machine without the native kernel: Python computes the same bytes, and restores them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from torchrec_stream_ckpt.native.kernel import VARIABLE

ROOT = Path(__file__).parents[2]
SAMPLE = ("tests/golden", "tests/distributed/test_exact.py")


def run(*arguments: str) -> str:
    """Run a Python that may not use the kernel, and return its output."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    ran = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment | {VARIABLE: "off"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_golden_bytes_and_an_exact_restore_need_no_kernel(tmp_path: Path) -> None:
    assert f"{VARIABLE} is off" in run(
        "-c", "from torchrec_stream_ckpt.native.kernel import describe; print(describe())"
    )
    said = run("-m", "pytest", "-q", "-p", "no:cacheprovider", f"--basetemp={tmp_path / 'run'}", *SAMPLE)
    passed = re.search(r"(\d+) passed", said)
    assert passed is not None, said
    assert int(passed[1]) > 100
    assert "failed" not in said
