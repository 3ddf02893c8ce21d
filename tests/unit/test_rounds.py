"""How much time has gone by, by clocks that nobody sets."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import builders
from tests.stores import HeldObjects
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.materialize import rounds
from torchrec_stream_ckpt.materialize.rounds import ages, elapsed, read_clocks
from torchrec_stream_ckpt.store.api import open_store
from torchrec_stream_ckpt.types import MarkerId

JOB = bytes(16)


def test_a_host_tells_the_time_since_its_boot_whatever_its_wall_clock_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = open_store(str(tmp_path))
    begin = read_clocks(folder, JOB)
    monkeypatch.setattr(time, "time", lambda: 0.0)
    time.sleep(0.05)
    end = read_clocks(folder, JOB)
    assert len(begin) == 1
    gone_by = elapsed(begin, end)
    assert gone_by is not None
    assert 0.05 <= gone_by < 3600
    assert not list(tmp_path.iterdir())


def test_an_object_store_tells_its_own_time_and_keeps_nothing_of_the_question(tmp_path: Path) -> None:
    store = open_store(f"memory://{tmp_path.name}")
    assert "store" not in read_clocks(store, JOB, probe=False)
    begin = read_clocks(store, JOB)["store"]
    time.sleep(0.02)
    assert read_clocks(store, JOB)["store"] > begin
    assert not list(store.list(""))


def test_a_sandbox_that_shows_no_boot_has_no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "_BOOT_ID", Path("/nowhere"))
    assert read_clocks(HeldObjects({}), JOB) == {}  # type: ignore[arg-type]


CLOCKS = st.dictionaries(st.sampled_from("abc"), st.floats(0, 1e6), max_size=3)


@given(CLOCKS, CLOCKS)
def test_what_has_gone_by_is_never_more_than_a_clock_shows(then: dict[str, float], now: dict[str, float]) -> None:
    gone_by = elapsed(then, now)
    assert (gone_by is None) == (not then.keys() & now.keys())
    for name in then.keys() & now.keys():
        assert gone_by is not None
        assert 0 <= gone_by <= max(0.0, now[name] - then[name])


@given(st.lists(st.lists(st.floats(0, 1e5), min_size=1, max_size=4), min_size=1, max_size=4), st.data())
def test_no_skew_between_trainers_makes_a_marker_older(generations: list[list[float]], data: st.DataObject) -> None:
    """Each generation's host is off by any amount: the ages are those that all hosts' true time gives, or less."""
    lineage, true, now = Lineage(), dict[MarkerId, float](), 0.0
    for number, waits in enumerate(generations, 1):
        skew_s = data.draw(st.sampled_from([0.0, 86400.0, 1e6]))
        lineage.apply(builders.claim(number))
        for marker, wait_s in enumerate(waits, 1):
            now += wait_s
            true[MarkerId(number, marker)] = now
            lineage.apply(builders.commit(number, marker, time_s=now + skew_s))
    for marker, age_s in ages(lineage, 7.0).items():
        assert 7.0 <= age_s <= now - true[marker] + 7.0 + 1e-3
