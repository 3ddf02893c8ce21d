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
from torchrec_stream_ckpt.inner import open_store
from torchrec_stream_ckpt.maintain.gc import clocks
from torchrec_stream_ckpt.maintain.gc.clocks import ages, elapsed, glance_at_clocks, read_clocks
from torchrec_stream_ckpt.store.identity import place_of
from torchrec_stream_ckpt.util.layout import probe_name
from torchrec_stream_ckpt.util.types import MarkerId

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
