"""Fixtures of the tests of single modules."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def no_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here waits for a disk: a process that lives on reads what it wrote, synced or not.

    Which calls sync what, and when, is shown by tests that put their own in these places; what outlives a loss of power
    is shown in ``tests/faults/power.py``.
    """
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    monkeypatch.setattr(os, "fdatasync", lambda fd: None)
