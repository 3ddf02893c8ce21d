"""A HEAD's writer is killed: none is left, and the next one builds it anew."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.forks import status_of
from tests.unit.warm_head import Warm, counted_builds
from torchrec_stream_ckpt.format import head as head_format
from torchrec_stream_ckpt.util.types import MarkerId

POINTS = ("head.dirty", "head.chunk", "head.clean")
"""Where a writer is killed."""


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as threads:
        yield threads


@pytest.fixture(params=[100, 2**20], ids=["small blocks", "blocks"])
def warmed(
    request: pytest.FixtureRequest, tmp_path: Path, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> Warm:
    monkeypatch.setattr(head_format, "BLOCK_BYTES", request.param)
    return Warm(tmp_path, pool)


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry each time that HEAD is built anew."""
    return counted_builds(monkeypatch)


@pytest.mark.parametrize("point", POINTS)
def test_a_writer_that_is_killed_leaves_none_and_the_next_one_builds_it_anew(
    tmp_path: Path, pool: ThreadPoolExecutor, built: list[int], point: str
) -> None:
    warmed = Warm(tmp_path, pool)
    warmed.markers(1)
    warmed.follow()
    warmed.job.touch(8)
    warmed.job.commit()
    assert status_of(_follow, tmp_path, fuse=f"{point}=kill") == -signal.SIGKILL
    assert warmed.head() is None
    warmed.follow()
    warmed.check(MarkerId(1, 2))
    assert len(built) == 2


def _follow(folder: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        Warm(folder, pool).follow()
