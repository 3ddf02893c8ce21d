"""Fixtures of the tests of single modules."""

from __future__ import annotations

import os

import pytest


@pytest.fixture
def no_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that write much and ask nothing of the disk: what a sync costs says more of the machine."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    monkeypatch.setattr(os, "fdatasync", lambda fd: None)
