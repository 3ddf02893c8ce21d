"""Damaged bytes are refused with an error of ours: never accepted, never a crash, never memory without bounds."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.fuzz.__main__ import fuzz
from tests.fuzz.targets import targets

SHORT = {
    "frame": 0.5,
    "forged frame": 0.5,
    "file log": 2.0,
    "store object": 0.5,
    "forged store object": 0.5,
    "store": 0.5,
    "summary": 0.5,
}
ATTEMPTS = 100
"""At least, however busy the machine is."""
TOLD = os.environ.get("STREAM_CKPT_FUZZ_S")
"""``make test-all`` gives each a minute."""
SECONDS = dict.fromkeys(SHORT, float(TOLD)) if TOLD else SHORT


@pytest.mark.parametrize("name", SECONDS)
def test_no_damage_is_accepted_and_no_reader_crashes(name: str, tmp_path: Path) -> None:
    (target,) = (target for target in targets(tmp_path) if target.name == name)
    seed = time.time_ns() % 2**40  # other damage at every run; a failure names its seed
    outcomes = fuzz(target, SECONDS[name], seed, attempts=ATTEMPTS)
    assert outcomes["refused"] > ATTEMPTS // 4
