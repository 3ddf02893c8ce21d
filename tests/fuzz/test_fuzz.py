"""Damaged bytes are refused with an error of ours: never accepted, never a crash, never memory without bounds."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.fuzz.__main__ import fuzz
from tests.fuzz.targets import targets

LOG = dict.fromkeys(("frame", "forged frame", "file log"), 8.0)
STORE = dict.fromkeys(("store object", "forged store object", "store"), 3.0)
SECONDS = LOG | STORE


@pytest.mark.parametrize("name", SECONDS)
def test_no_damage_is_accepted_and_no_reader_crashes(name: str, tmp_path: Path) -> None:
    (target,) = (target for target in targets(tmp_path) if target.name == name)
    outcomes = fuzz(
        target, SECONDS[name], seed=time.time_ns() % 2**40
    )  # other damage at every run; a failure names its seed
    assert outcomes["refused"] > 100
