"""Fixtures of the tests of single modules."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor

import pytest

from tests.in_memory import folders, tmp_path  # noqa: F401


@pytest.fixture(autouse=True)
def no_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here waits for a disk: a process that lives on reads what it wrote, synced or not.

    Which calls sync what, and when, is shown by tests that put their own in these places; what outlives a loss of power
    is shown in ``tests/faults/power.py``.
    """
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    monkeypatch.setattr(os, "fdatasync", lambda fd: None)


@pytest.fixture(scope="module")
def pool() -> Iterator[Executor]:
    """Threads that read a store."""
    with ThreadPoolExecutor(2) as threads:
        yield threads
