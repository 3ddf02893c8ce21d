"""Materializers that share the partitions of one job."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests import synthetic
from torchrec_stream_ckpt.materialize.crew import Crew
from torchrec_stream_ckpt.store.api import open_store


def test_a_worker_takes_everything_until_it_has_seen_another_one_live(tmp_path: Path) -> None:
    objects = open_store(str(tmp_path))
    first, second = (Crew(objects, synthetic.JOB, lease_s=1000.0) for _ in range(2))
    first.beat()
    second.beat()
    assert [crew.mine(0) for crew in (first, second)] == [True, True], "neither has seen the other's sign change"
    for _ in range(2):
        first.beat()
        second.beat()
    assert first.size == second.size == 2
    for partition in range(5):
        assert first.mine(partition) != second.mine(partition)
    second.close()
    first.beat()
    assert all(first.mine(partition) for partition in range(5))
    first.close()
    assert list(objects.list("workers/")) == []


def test_a_worker_that_stands_still_is_dead_and_its_sign_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    objects = open_store(str(tmp_path))
    first, second = (Crew(objects, synthetic.JOB, lease_s=3.0) for _ in range(2))
    for _ in range(3):
        first.beat()
        second.beat()
        now[0] += 1.0
    assert first.size == 2
    for _ in range(2):
        first.beat()
        now[0] += 3.5
    first.beat()
    assert first.size == 1
    assert [entry.name for entry in objects.list("workers/") if second.name in entry.name] == []
    second.beat()  # it was only stopped
    first.beat()
    second.beat()
    first.beat()
    assert first.size == 2
