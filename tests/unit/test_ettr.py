"""The simulation of a failing job is what closed forms say, where there are any."""

from __future__ import annotations

import itertools
import math
import random
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks" / "proof"))

from ettr import MTBF_S, Way, expected, filed_costs, simulate, uptimes, ways  # noqa: E402

FAILURES = 40_000


def test_without_a_failure_only_saves_and_slower_steps_take_time() -> None:
    way = Way(slower=1.25, save_s=2.0, counts_s=2.0, restart_s=50.0)
    spent = simulate(way, 20.0, gpus=1, mtbf_s=1e12, failures=1)
    assert spent.ettr == pytest.approx(20 / (20 * 1.25 + 2), rel=1e-6)
    assert spent.saving == pytest.approx(1 - spent.ettr, rel=1e-6)
    assert spent.restarting == 0


@pytest.mark.parametrize("mtbf_s", MTBF_S.values())
@pytest.mark.parametrize("restart_s", [0.0, 70.0])
def test_a_save_that_counts_at_its_end_has_dalys_expectation(mtbf_s: float, restart_s: float) -> None:
    way = Way(slower=1.1, save_s=3.0, counts_s=3.0, restart_s=restart_s)
    interval_s = way.interval_s(mtbf_s)
    spent = simulate(way, interval_s, gpus=100, mtbf_s=mtbf_s, failures=FAILURES)
    assert spent.ettr == pytest.approx(expected(way, interval_s, mtbf_s), rel=0.01)


def test_what_is_lost_is_half_an_interval_and_the_time_until_a_save_counts() -> None:
    """Where failures are rare beside an interval."""
    way = Way(save_s=0.0, counts_s=4.0, restart_s=0.0)
    spent = simulate(way, 10.0, gpus=10, mtbf_s=1e5, failures=FAILURES)
    assert spent.lost * 1e5 == pytest.approx(10 / 2 + 4, rel=0.02)


def test_shares_of_the_time_are_all_of_it() -> None:
    way = Way(slower=1.3, save_s=5.0, counts_s=9.0, restart_s=100.0)
    spent = simulate(way, 30.0, gpus=7, mtbf_s=120.0, failures=2000)
    assert spent.ettr + spent.saving + spent.lost + spent.restarting == pytest.approx(1.0)
    assert min(spent.ettr, spent.saving, spent.lost, spent.restarting) > 0


def test_many_gpus_fail_as_often_together_as_is_asked() -> None:
    times = list(itertools.islice(uptimes(1000, 60.0, random.Random(1)), FAILURES))
    assert times == sorted(times)
    assert times[-1] / FAILURES == pytest.approx(60.0, rel=0.02)


def test_the_interval_is_youngs_and_no_shorter_than_a_save_needs() -> None:
    assert Way(save_s=2.0, counts_s=2.0, restart_s=0.0).interval_s(3600.0) == pytest.approx(math.sqrt(2 * 2 * 3600))
    assert Way(save_s=0.001, counts_s=30.0, restart_s=0.0).interval_s(3600.0) == 30.0


def row(**more: Any) -> dict[str, Any]:
    full = {
        "saves": 11,
        "slower": 0.98,
        "restart_s": [4.0, 5.0, 9.0],
        "save_s": {"full": 0.5},
        "counts_s": {"full": 0.7},
    }
    return full | more


TRACKER = row(save_s={"full": 12.0, "rows": 1.0}, counts_s={"full": 24.0, "rows": 2.0})


def test_costs_of_full_saves_and_of_rows_are_averaged_as_often_as_they_come() -> None:
    found = ways({"ours": row(), "never": row(saves=0), "ModelDeltaTracker and DCP": TRACKER}, 0.25, 10.0, 60.0)
    assert found["ours"] == Way(slower=1.0, save_s=0.5, counts_s=0.7, restart_s=75.0)
    assert found["ours, a hot spare"].restart_s == 10.25
    assert found["ModelDeltaTracker and DCP"].save_s == pytest.approx(2.0)
    assert found["ModelDeltaTracker and DCP"].counts_s == pytest.approx(4.0)
    assert set(found) == {"ours", "ours, a hot spare", "ModelDeltaTracker and DCP"}


def test_one_store_makes_saves_count_later_and_restarts_take_longer() -> None:
    """And only ``torch.save`` waits for it."""
    moved = {"save_bytes": {"full": 100, "rows": 1}, "load_bytes": 100}
    costs = {name: row(**moved) for name in ("torch.save", "dcp.async_save", "ours")}
    costs["ModelDeltaTracker and DCP"] = TRACKER | moved
    found = ways(costs, 0.25, 10.0, 60.0, lambda num_bytes: num_bytes / 4)
    assert {name: (way.save_s, way.counts_s) for name, way in found.items() if "D" not in name} == {
        "torch.save": (25.0, 25.0),
        "dcp.async_save": (0.5, 25.0),
        "ours": (0.5, 25.0),
        "ours, a hot spare": (0.5, 25.0),
    }
    assert found["ModelDeltaTracker and DCP"].counts_s == pytest.approx((25 + 10 * 2) / 11)
    assert {way.restart_s for name, way in found.items() if "spare" not in name} == {100.0}
    assert found["ours, a hot spare"].restart_s == 10.25


def test_filed_costs_are_of_one_size() -> None:
    found = filed_costs()
    assert {row["load_bytes"] for row in found.values()} == {1_300_000_000}
    assert found["ours"]["save_bytes"]["full"] == found["ModelDeltaTracker and DCP"]["save_bytes"]["rows"] == 13_000_000
    assert (
        found["ours"]["save_s"]["full"]
        < found["dcp.async_save"]["save_s"]["full"]
        < found["torch.save"]["save_s"]["full"]
    )
    assert all(row["restart_s"][0] > 1 for row in found.values())
