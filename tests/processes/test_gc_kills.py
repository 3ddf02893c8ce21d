"""gc is killed at each of its steps: kept markers are whole, and the next run finishes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests import stores
from tests.parts import GcRules, Retention
from tests.unit.gc_history import HOUR, branched, check_whole, gc, names, rules

POINTS = {"gc.dropped": 2, "gc.merged": 1, "gc.listed": 1, "gc.deleted": 3, "gc.tidied": 1, "read_back.saved": 1}
"""Where a gc is killed, and at which pass."""


@pytest.fixture(scope="module")
def pool() -> Iterator[Executor]:
    with ThreadPoolExecutor(2) as threads:
        yield threads


CHILD = """
import sys
from concurrent.futures import ThreadPoolExecutor
from torchrec_stream_ckpt.maintain.gc.gc import GcRules, collect
from torchrec_stream_ckpt.maintain.gc.retention import Retention
from torchrec_stream_ckpt.store.api import open_store
from torchrec_stream_ckpt.util.units import size
rules = GcRules(retention=Retention(newest=1, then_every=4), compact=True, grace_s=float(sys.argv[3]))
with ThreadPoolExecutor(1) as pool:
    clocks = {"a host": float(sys.argv[4])}
    collect(open_store(sys.argv[1]), None, bytes.fromhex(sys.argv[2]), rules, pool, lambda: clocks)
"""


@pytest.mark.parametrize(("point", "nth"), [*POINTS.items(), ("gc.deleted", 1), ("gc.deleted", 9), ("store.put", 4)])
def test_a_kill_at_any_point_leaves_kept_markers_whole_and_the_next_run_finishes(
    point: str, nth: int, tmp_path: Path, pool: Executor
) -> None:
    history = branched(tmp_path)
    given = GcRules(retention=Retention(newest=1, then_every=4), compact=True)
    whole = names("1:4", "3:4", "4:6")
    if point in ("gc.tidied", "gc.deleted"):
        gc(history, given, pool, now_s=1e6 - HOUR)
    fired = tmp_path / "fired"
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path), history.lineage.job.hex(), str(HOUR), "1e6"],
        env={
            **os.environ,
            "STREAM_CKPT_FAILPOINTS": f"{point}=kill@{nth}",
            "STREAM_CKPT_FAILPOINTS_REPORT": str(fired),
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, fired.read_text()) == (-signal.SIGKILL, f"{point}\n"), done.stderr
    assert check_whole(history) >= whole
    gc(history, given, pool, now_s=1e6 + HOUR)
    gc(history, given, pool, now_s=1e6 + 2 * HOUR)
    assert check_whole(history) == whole
    final = stores.contents(history.objects)
    twin = branched(tmp_path / "twin")
    gc(twin, rules(newest=1, then_every=4, compact=True), pool, now_s=1e6 + HOUR)
    kinds = ("manifests/", "folds/", "segments/", "dense/", "garbage/")
    assert {name for name in final if name.startswith(kinds)} == {
        name for name in stores.contents(twin.objects) if name.startswith(kinds)
    }
