"""A sample of the tests on a machine without the native kernel: Python computes the same bytes, and restores them."""

from __future__ import annotations

import importlib
import os
import re
from pathlib import Path

from tests import forks
from tests.sampled import sampled
from torchrec_stream_ckpt.native import kernel

SAMPLE = ("tests/golden", "--ignore=tests/golden/test_torchx_requests.py", "tests/distributed/test_exact.py")
CHOSEN = sampled("not gpu and not slow", "not gpu and not slow and not kafka")
"""The kernel knows of no log: a broker of its own is left to the long form."""


def _without_kernel(output: Path, *arguments: str) -> tuple[str, int]:
    """(process) What says which kernel there is, and the status of a pytest whose ranks have the same one."""
    os.environ[kernel.VARIABLE] = "off"
    importlib.reload(kernel)  # which forgets that one was loaded, for all that have its functions
    return kernel.describe(), forks.run_pytest(output, *arguments)


def test_golden_bytes_and_an_exact_restore_need_no_kernel(tmp_path: Path) -> None:
    output = tmp_path / "output"
    given = ("-q", "-m", CHOSEN, f"--basetemp={tmp_path / 'run'}", *SAMPLE)
    described, code = forks.call(_without_kernel, output, *given, timeout_s=550)
    assert described == f"none ({kernel.VARIABLE} is off)"
    passed = re.search(r"(\d+) passed", said := output.read_text())
    assert code == 0, said
    assert passed is not None, said
    assert int(passed[1]) > 100
