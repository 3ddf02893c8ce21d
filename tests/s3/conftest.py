"""Fixtures of tests whose S3 server is in trouble."""

from __future__ import annotations

import asyncio

import pytest
from s3fs import S3FileSystem


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two tries s3fs and botocore pause for a twentieth of their time. How often they try stays the same."""
    pause = asyncio.sleep
    monkeypatch.setattr(asyncio, "sleep", lambda delay, result=None: pause(delay / 20, result))


@pytest.fixture
def short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """s3fs sends 5 MiB in a request, the least that S3 allows, instead of 50."""
    others = S3FileSystem._pipe_file.__defaults__[1:]
    monkeypatch.setattr(S3FileSystem._pipe_file, "__defaults__", (5 * 2**20, *others))
