"""gc is killed at each of its steps: kept markers are whole, and the next run finishes."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from tests import stores
from tests.forks import status_of
from tests.parts import GcRules, Retention, collect
from tests.unit.gc_history import HOUR, branched, check_whole, gc, names, rules
from torchrec_stream_ckpt.inner import open_store

POINTS = {"gc.dropped": 2, "gc.merged": 1, "gc.listed": 1, "gc.deleted": 3, "gc.tidied": 1, "read_back.saved": 1}
"""Where a gc is killed, and at which pass."""


@pytest.fixture(scope="module")
def pool() -> Iterator[Executor]:
    with ThreadPoolExecutor(2) as threads:
        yield threads


GIVEN = GcRules(retention=Retention(newest=1, then_every=4), compact=True)


def _collect(store: Path, job: bytes) -> None:
    with ThreadPoolExecutor(1) as pool:
        collect(open_store(str(store)), None, job, replace(GIVEN, grace_s=HOUR), pool, lambda: {"a host": 1e6})


@pytest.mark.parametrize(("point", "nth"), [*POINTS.items(), ("gc.deleted", 1), ("gc.deleted", 9), ("store.put", 4)])
def test_a_kill_at_any_point_leaves_kept_markers_whole_and_the_next_run_finishes(
    point: str, nth: int, tmp_path: Path, pool: Executor
) -> None:
    history = branched(tmp_path)
    whole = names("1:4", "3:4", "4:6")
    if point in ("gc.tidied", "gc.deleted"):
        gc(history, GIVEN, pool, now_s=1e6 - HOUR)
    fired = tmp_path / "fired"
    status = status_of(_collect, tmp_path, history.lineage.job, fuse=f"{point}=kill@{nth}", report=fired)
    assert (status, fired.read_text()) == (-signal.SIGKILL, f"{point}\n")
    assert check_whole(history) >= whole
    gc(history, GIVEN, pool, now_s=1e6 + HOUR)
    gc(history, GIVEN, pool, now_s=1e6 + 2 * HOUR)
    assert check_whole(history) == whole
    final = stores.contents(history.objects)
    twin = branched(tmp_path / "twin")
    gc(twin, rules(newest=1, then_every=4, compact=True), pool, now_s=1e6 + HOUR)
    kinds = ("manifests/", "folds/", "segments/", "dense/", "garbage/")
    assert {name for name in final if name.startswith(kinds)} == {
        name for name in stores.contents(twin.objects) if name.startswith(kinds)
    }
