"""Fixtures of tests whose S3 server is in trouble."""

from __future__ import annotations

import asyncio

import pytest


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two tries s3fs and botocore pause for a twentieth of their time. How often they try stays the same."""
    pause = asyncio.sleep
    monkeypatch.setattr(asyncio, "sleep", lambda delay, result=None: pause(delay / 20, result))
