"""Settings of the property tests."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

# How long an example takes says more of the machine than of the code.
# In CI the same examples each time, so that what fails there is what was changed; elsewhere new ones.
settings.register_profile("here", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("here")


@pytest.fixture
def no_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that write much and ask nothing of the disk: what a sync costs says more of the machine."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    monkeypatch.setattr(os, "fdatasync", lambda fd: None)
