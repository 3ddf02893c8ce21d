"""The grace period of gc, and the ages of markers: by clocks that are never set, and not by those of hosts."""

from __future__ import annotations

import time
from concurrent.futures import Executor
from functools import partial
from pathlib import Path

import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from tests import builders, stores
from tests.parts import Garbage, collect
from tests.stores import HeldObjects, History
from tests.unit.gc_history import HOUR, check_whole, gc, names, offered, plain, rules
from torchrec_stream_ckpt.errors import (
    MissingObjectError,
)
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.inner import Catalog, open_store
from torchrec_stream_ckpt.maintain.gc import clocks
from torchrec_stream_ckpt.maintain.gc.clocks import ages, elapsed, glance_at_clocks, read_clocks
from torchrec_stream_ckpt.store.api import KeepsTime
from torchrec_stream_ckpt.store.identity import place_of
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


# How much time has gone by, by clocks that nobody sets.


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


def test_an_object_store_tells_its_own_time_and_keeps_one_object_of_all_questions(tmp_path: Path) -> None:
    store = open_store(f"memory://{tmp_path.name}")
    clock = f"store memory://{tmp_path.name}"
    assert clock not in glance_at_clocks(store, ["manifests/none.json"])
    begin = read_clocks(store, JOB)[clock]
    time.sleep(0.02)
    assert read_clocks(store, JOB)[clock] > begin
    assert [entry.name for entry in store.list("")] == [probe_name(JOB, "0" * 16)]


def test_a_look_that_writes_nothing_knows_the_time_of_the_newest_object(tmp_path: Path) -> None:
    store = open_store(f"memory://{tmp_path.name}")
    clock = f"store memory://{tmp_path.name}"
    store.put("manifests/a.json", [b"1"])
    begin = read_clocks(store, JOB)[clock]
    time.sleep(0.02)
    store.put("manifests/b.json", [b"2"])
    before = [entry.name for entry in store.list("")]
    shown = glance_at_clocks(store, ["manifests/a.json", "manifests/b.json"])
    assert begin < shown[clock] <= read_clocks(store, JOB)[clock]
    assert glance_at_clocks(store, ["manifests/b.json", "manifests/a.json"])[clock] == shown[clock]
    assert [entry.name for entry in store.list("")] == before


def test_a_copy_of_an_object_store_does_not_read_its_clock(tmp_path: Path) -> None:
    """The lists of garbage and the readings go along with a copy, and the clocks of two servers may be hours apart."""
    first, copy = open_store(f"memory://{tmp_path.name}"), open_store(f"memory://{tmp_path.name}/copy")
    host = glance_at_clocks(first, ()).keys()
    assert read_clocks(first, JOB).keys() & read_clocks(copy, JOB).keys() == host


def test_one_bucket_name_on_two_servers_is_two_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    def place(**options: str) -> str:
        return place_of(open_store("s3://bucket/job", options))

    pytest.importorskip("s3fs")
    assert place() == "s3://bucket/job"
    assert place(endpoint_url="https://one:9000/") == "s3://bucket/job at https://one:9000"
    assert place(**{"client_kwargs.endpoint_url": "https://u:secret@two"}) == "s3://bucket/job at https://***@two"
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://three")
    assert place() == "s3://bucket/job at https://three"


def test_a_folder_is_one_store_whatever_link_leads_there(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk")
    assert place_of(open_store(str(tmp_path / "link"))) == place_of(open_store(f"file://{tmp_path}/disk"))
    assert place_of(HeldObjects({})) == "held://"  # type: ignore[arg-type]


def test_a_sandbox_that_shows_no_boot_has_no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clocks, "_BOOT_ID", Path("/nowhere"))
    assert read_clocks(HeldObjects({}), JOB) == {}  # type: ignore[arg-type]


def boots(namespace: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Clocks of a host whose kernel shows this time namespace."""
    boot = namespace.parent / "boot_id"
    boot.write_text("a-boot\n")
    monkeypatch.setattr(clocks, "_BOOT_ID", boot)
    monkeypatch.setattr(clocks, "_TIME_NAMESPACE", namespace)
    return list(read_clocks(HeldObjects({}), JOB))  # type: ignore[arg-type]


def test_only_the_hosts_own_time_namespace_is_a_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    namespace = tmp_path / "time"
    assert boots(namespace, monkeypatch) == ["a-boot"], "a kernel without time namespaces"
    namespace.symlink_to("time:[4026532999]")
    assert boots(namespace, monkeypatch) == []
    namespace.unlink()
    namespace.symlink_to("time:[4026531834]")
    assert boots(namespace, monkeypatch) == ["a-boot"]


@pytest.mark.parametrize("step_s", [86400.0, -86400.0, 0.0])
@pytest.mark.parametrize("at", [1, 4, 8])
def test_a_step_of_the_trainers_clock_ages_no_marker_by_more_than_a_wait(step_s: float, at: int) -> None:
    lineage = Lineage()
    lineage.apply(builders.claim(1))
    for marker in range(10):
        shown_s = 1e6 + 600.0 * marker + (step_s if marker >= at else 0.0)
        lineage.apply(builders.commit(1, marker + 1, time_s=shown_s))
    for marker, age_s in ages(lineage, 0.0).items():
        assert age_s <= 600.0 * (10 - marker.marker) + 600.0


@pytest.mark.parametrize("step_s", [86400.0, 0.0])
def test_the_only_wait_of_a_generation_ages_nothing_for_it_may_be_a_step_of_the_clock(step_s: float) -> None:
    lineage = Lineage()
    for number in (1, 2, 3):
        lineage.apply(builders.claim(number))
        lineage.apply(builders.commit(number, 1, time_s=1e6))
        lineage.apply(builders.commit(number, 2, time_s=1e6 + 600.0 + step_s))
    assert set(ages(lineage, 7.0).values()) == {7.0}


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
