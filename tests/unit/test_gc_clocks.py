"""The grace period of gc, and the ages of markers: by clocks that are never set, and not by those of hosts."""

from __future__ import annotations

from concurrent.futures import Executor
from functools import partial
from pathlib import Path

import pytest
from crc32c import crc32c

from tests import stores
from tests.parts import collect
from tests.stores import History
from tests.unit.gc_history import HOUR, check_whole, gc, names, offered, plain, rules
from torchrec_stream_ckpt.errors import (
    MissingObjectError,
)
from torchrec_stream_ckpt.format.manifest import Garbage
from torchrec_stream_ckpt.inner import Catalog
from torchrec_stream_ckpt.store.api import KeepsTime
from torchrec_stream_ckpt.util.layout import garbage_name, probe_name
from torchrec_stream_ckpt.util.types import MarkerId


def test_nothing_goes_before_the_grace_period_is_over(tmp_path: Path, pool: Executor) -> None:
    history = plain(tmp_path)
    given = rules(HOUR, newest=1, compact=True)
    first = gc(history, given, pool, now_s=1e6)
    assert (first.now, len(first.dropping)) == ((), 5)
    early = gc(history, given, pool, now_s=1e6 + HOUR - 1)
    assert (early.now, early.later) == ((), first.later)
    late = gc(history, given, pool, now_s=1e6 + HOUR)
    assert (late.now, late.later) == (first.later, ())
    assert check_whole(history) == names("1:6")
    assert not list(history.objects.list("garbage/"))


def test_the_grace_period_of_what_a_merge_replaces_begins_behind_the_merge(tmp_path: Path, pool: Executor) -> None:
    history, given = plain(tmp_path), rules(HOUR, then_every=3, compact=True)
    times = iter([1e6, 1e6 + 2 * HOUR])  # the merge takes longer than the grace period
    first = collect(history.objects, None, history.lineage.job, given, pool, lambda: {"a host": next(times)})
    assert first.spans
    assert first.now == ()
    early = gc(history, given, pool, now_s=1e6 + 3 * HOUR - 1)
    assert (early.now, early.later) == ((), first.later)
    assert gc(history, given, pool, now_s=1e6 + 3 * HOUR).now == first.later
    assert check_whole(history) == names("1:3", "1:6")


def test_who_read_a_manifest_before_gc_finds_its_rows_within_the_grace_period(tmp_path: Path, pool: Executor) -> None:
    history = plain(tmp_path)
    catalog = Catalog.load(history.objects, history.lineage.job)
    cover = catalog.cover(history.lineage.chain(MarkerId(1, 4)))
    gc(history, rules(HOUR, newest=1, compact=True), pool)
    refs = [ref for piece in cover for ref in piece.segments]
    assert all(history.objects.size(ref.name) == ref.num_bytes for ref in refs)
    gc(history, rules(HOUR, newest=1, compact=True), pool, now_s=1e6 + HOUR)
    with pytest.raises(MissingObjectError, match="the store does not hold this object"):
        history.objects.read(refs[-1].name)


@pytest.mark.parametrize("skew_s", [-86400.0, 86400.0])
def test_no_two_hosts_clocks_are_compared(skew_s: float, tmp_path: Path, pool: Executor) -> None:
    """What one host has listed waits anew for a host that cannot tell when that was, whatever its clocks show."""
    history, given = plain(tmp_path), rules(HOUR, newest=1, compact=True)
    first = gc(history, given, pool, now_s=1e6, host="one")
    assert first.later
    for later_s in (5.0, HOUR - 1):
        assert gc(history, given, pool, now_s=1e6 + skew_s + later_s, host="another").now == ()
    assert gc(history, given, pool, now_s=1e6 - HOUR, host="one").now == (), "a clock that went back shows nothing"
    assert gc(history, given, pool, now_s=1e6 + skew_s + HOUR + 5, host="another").now == first.later
    assert check_whole(history) == names("1:6")
    assert not list(history.objects.list("garbage/"))


def test_of_several_clocks_the_one_that_shows_least_counts(tmp_path: Path, pool: Executor) -> None:
    history, given = plain(tmp_path), rules(HOUR, newest=1)
    run = partial(collect, history.objects, None, history.lineage.job, given, pool)
    first = run(lambda: {"host": 1e6, "store": 5.0})
    assert run(lambda: {"host": 1e6 + 2 * HOUR, "store": 6.0}).now == ()
    assert run(lambda: {"store": 5.0 + HOUR}).now == first.later


def test_however_many_runs_ask_a_store_for_its_time_one_probe_is_left(tmp_path: Path, pool: Executor) -> None:
    history = plain(tmp_path)
    store, job = stores.open_store(f"memory://{tmp_path.name}-probes"), history.lineage.job
    assert isinstance(store, KeepsTime)
    for kind in ("STORE", "claims/", "manifests/", "segments/", "dense/"):
        for name, data in stores.contents(history.objects).items():
            if name.startswith(kind):
                store.put(name, [data])
    for _ in range(3):
        collect(store, None, job, rules(newest=6), pool)
        assert [entry.name for entry in store.list("garbage/")] == [probe_name(job, "0" * 16)]


def test_a_list_that_an_older_program_wrote_tells_no_time(tmp_path: Path, pool: Executor) -> None:
    history, given = plain(tmp_path), rules(HOUR, newest=1)
    first = gc(history, given, pool)
    (entry,) = history.objects.list("garbage/")
    history.objects.delete(entry.name)
    old = Garbage(1.0, tuple(each.name for each in first.later)).to_bytes()
    name = garbage_name(history.lineage.job, 1000, crc32c(old))
    history.objects.put(name, [old])
    assert gc(history, given, pool, now_s=9e6).now == ()
    assert history.objects.size(name) is None
    assert gc(history, given, pool, now_s=9e6 + HOUR).now == first.later


def test_a_host_whose_clock_is_a_day_ahead_drops_no_fresh_marker(tmp_path: Path, pool: Executor) -> None:
    history = plain(tmp_path)  # an hour apart
    for host, now_s in (("one", 1e6), ("another", 1e6 + 25 * HOUR)):
        assert gc(history, rules(keep_all_for="24h"), pool, now_s=now_s, host=host).dropping == ()
    assert set(gc(history, rules(keep_all_for="2h"), pool, host="one").kept) == names("1:4", "1:5", "1:6")


@pytest.mark.parametrize("ahead", [-24, 24])
def test_a_trainer_whose_clock_is_a_day_off_makes_no_older_marker_old(
    ahead: int, tmp_path: Path, pool: Executor
) -> None:
    history = History(tmp_path)
    history.generation(1, range(30, 34))
    history.generation(2, range(34 + ahead, 36 + ahead), "1:33")  # two markers, on another host
    stores.fold(tmp_path)
    assert gc(history, rules(keep_all_for="4h"), pool, lineage=history.lineage).dropping == ()
    done = gc(history, rules(keep_all_for="2h"), pool, lineage=history.lineage)
    assert set(done.dropping) == names("1:30"), "three hours; the only wait of the second generation counts nothing"


def test_markers_of_a_job_that_has_ended_grow_old_by_what_rounds_have_seen(tmp_path: Path, pool: Executor) -> None:
    history, given = plain(tmp_path), rules(keep_all_for="5h")
    assert gc(history, given, pool, now_s=100.0, host="before a reboot").dropping == ()
    gc(history, given, pool, now_s=100.0 + 1.5 * HOUR, host="before a reboot")
    assert offered(history) == names("1:3", "1:4", "1:5", "1:6")
    gc(history, given, pool, now_s=7.0, host="after a reboot")
    assert offered(history) == names("1:3", "1:4", "1:5", "1:6"), "nobody knows how long the reboot took"
    gc(history, given, pool, now_s=7.0 + 1.5 * HOUR, host="after a reboot")
    assert offered(history) == names("1:4", "1:5", "1:6"), "what was seen before it counts"
    gc(history, given, pool, now_s=7.0 + 3.5 * HOUR, host="after a reboot")
    assert offered(history) == names("1:6")
