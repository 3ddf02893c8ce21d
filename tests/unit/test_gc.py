"""What gc takes away, and what never: every kept marker stays whole, bit for bit, wherever it is killed."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests import stores
from tests.parts import FolderObjects, GcPlan, GcRules, Materializer, Policy, Retention, arm, collect, open_dense
from tests.sampled import sampled
from tests.stores import History
from tests.unit.gc_history import ALWAYS, HOUR, NEVER, SPANS, branched, check_whole, gc, names, offered, plain, rules
from torchrec_stream_ckpt.errors import (
    ConfigError,
    CorruptionError,
    MarkerNotFoundError,
    StoreUnavailableError,
)
from torchrec_stream_ckpt.format.frame import Buffer
from torchrec_stream_ckpt.inner import Catalog
from torchrec_stream_ckpt.maintain.gc.gc import plan_gc
from torchrec_stream_ckpt.maintain.gc.gc_delete import delete_all
from torchrec_stream_ckpt.maintain.gc.inventory import take_inventory
from torchrec_stream_ckpt.util.layout import dense_file_name, manifest_name, parse_fold_segment
from torchrec_stream_ckpt.util.types import MarkerId
from torchrec_stream_ckpt.util.units import size


def test_what_only_dropped_markers_needed_goes_and_links_stay(tmp_path: Path, pool: Executor) -> None:
    history = plain(tmp_path)
    done = gc(history, rules(newest=2), pool)
    assert (set(done.kept), set(done.dropping)) == (names("1:5", "1:6"), names("1:1", "1:2", "1:3", "1:4"))
    assert {entry.name.split("/")[0] for entry in done.now} == {"dense"}, "all intervals lead to the kept ones"
    assert check_whole(history) == names("1:5", "1:6")
    assert not gc(history, rules(newest=2), pool).now


@pytest.mark.parametrize("policy", [NEVER, ALWAYS, SPANS], ids=["intervals", "bases", "spans"])
def test_merging_lets_go_of_all_between_two_kept_markers(tmp_path: Path, policy: Policy, pool: Executor) -> None:
    history = plain(tmp_path, 20, policy)
    before = stores.contents(history.objects)
    done = gc(history, rules(then_every=6, compact=True), pool)
    assert check_whole(history) == names("1:6", "1:12", "1:18", "1:20")
    after = stores.contents(history.objects)
    assert {entry.name: entry.num_bytes for entry in done.now} == {
        name: len(data) for name, data in before.items() if name not in after
    }
    manifests = {name for name in after if name.startswith("manifests/")}
    assert manifests == {manifest_name(history.lineage.job, marker) for marker in offered(history)}
    again = gc(history, rules(then_every=6, compact=True), pool)
    assert (again.now, again.later, again.spans, again.dropping) == ((), (), (), ())


def test_an_object_store_keeps_the_same_rules(tmp_path: Path, pool: Executor) -> None:
    history = branched(tmp_path)
    store = stores.open_store(f"memory://{tmp_path.name}-gc")
    for name, data in stores.contents(history.objects).items():
        if not name.startswith(("LOG", "control", "data/")):
            store.put(name, [data])
    job, given = history.lineage.job, rules(newest=1, then_every=4, compact=True)
    by_folder = gc(history, given, pool)
    by_store = collect(store, None, job, given, pool, lambda: {"a host": 1e6})
    assert (by_store.now, by_store.kept) == (by_folder.now, by_folder.kept)
    for marker in by_store.kept:
        assert stores.rows_of(store, history.lineage, marker) == history.rows[marker]


def test_a_dry_run_says_what_a_run_does_and_does_nothing(tmp_path: Path, pool: Executor) -> None:
    history = branched(tmp_path)
    before = stores.contents(history.objects)
    for compact in (False, True):
        given = rules(newest=2, then_every=5, compact=compact)
        planned = plan_gc(take_inventory(history.objects, history.lineage, history.lineage.job), given, {"a host": 1e6})
        assert stores.contents(history.objects) == before
        done = gc(history, given, pool, lineage=history.lineage)
        assert (done.now, done.dropping, done.kept) == (planned.now, planned.dropping, planned.kept)
        left = stores.contents(history.objects)
        assert {name for name in before if name not in left} == {entry.name for entry in planned.now}
        before = left
        check_whole(history)
    assert "give up marker 1:1" not in planned.describe()
    assert f"{len(planned.now)} objects, {size(planned.num_bytes)}" in planned.describe()


@settings(max_examples=sampled(6, 4), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from([NEVER, ALWAYS, SPANS]),
    st.lists(
        st.tuples(
            st.builds(
                Retention,
                keep_all_for=st.none() | st.sampled_from(["1h", "3h"]),
                then_every=st.none() | st.integers(2, 5),
                newest=st.integers(1, 4),
            ),
            st.booleans(),
            st.booleans(),
        ),
        min_size=1,
        max_size=3,
    ),
)
def test_kept_markers_are_whole_after_any_runs_and_new_markers_come(
    tmp_path_factory: pytest.TempPathFactory, pool: Executor, policy: Policy, runs: list[tuple[Retention, bool, bool]]
) -> None:
    root = tmp_path_factory.mktemp("gc")
    history = branched(root, policy)
    for number, (retention, compact, by_log) in enumerate(runs):
        given = GcRules(retention=retention, compact=compact, grace_s=0.0)
        done = gc(history, given, pool, now_s=9 * HOUR + number, lineage=history.lineage if by_log else None)
        assert check_whole(history) == set(done.kept)
        history.generation(5 + number, [7 + number, 8 + number], str(history.lineage.newest.id))  # type: ignore[union-attr]
        folded = stores.fold(root, policy)
        assert len(folded) == 2
        assert check_whole(history) == {*done.kept, *folded}


def test_the_parent_of_a_generation_that_is_not_in_the_store_yet_stays(tmp_path: Path, pool: Executor) -> None:
    history = plain(tmp_path)
    history.generation(2, [3, 4], "1:2")
    gc(history, rules(newest=1, compact=True), pool, lineage=history.lineage)
    assert offered(history) == names("1:6")
    assert stores.fold(tmp_path) == [MarkerId(2, 3), MarkerId(2, 4)]
    assert check_whole(history) == names("1:6", "2:3", "2:4")


def test_restores_and_materializers_run_on_while_gc_deletes(tmp_path: Path) -> None:
    """Each round, restores, a materializer with a new branch, and gc run at once; the grace period is one round.

    Restores that have begun before gc read on when it is done.
    """
    history, draw = plain(tmp_path), random.Random(5)
    given = rules(1.0, newest=2, then_every=5, compact=True)
    deleted = 0
    with ThreadPoolExecutor(4) as crew, ThreadPoolExecutor(2) as pool:
        for number in range(8):
            lineage = history.lineage
            catalog = Catalog.load(history.objects, lineage.job)
            left = sorted(catalog.markers - catalog.dropped)
            parent = draw.choice(left)
            history.generation(2 + number, [parent.marker + 1, parent.marker + 2], str(parent))
            begun = {marker: catalog.cover(lineage.chain(marker)) for marker in left}
            restores = {marker: crew.submit(stores.rows_of, history.objects, lineage, marker) for marker in left}
            folded = crew.submit(stores.fold, tmp_path)
            collected = crew.submit(gc, history, given, pool, now_s=1e6 + number, lineage=history.lineage)
            assert all(rows.result() == history.rows[marker] for marker, rows in restores.items())
            assert len(folded.result()) == 2
            deleted += len(collected.result().now)
            for marker, cover in begun.items():
                assert stores.rows_in(catalog, lineage, marker, cover) == history.rows[marker]
            check_whole(history)
    assert deleted > 20


def test_dense_state_of_markers_that_never_committed_goes(tmp_path: Path, pool: Executor) -> None:
    history = branched(tmp_path)
    job = history.lineage.job
    never = [dense_file_name(job, MarkerId(*each), "__0_0.distcp") for each in ((1, 9), (2, 4), (4, 4))]
    coming = [dense_file_name(job, MarkerId(*each), "__0_0.distcp") for each in ((4, 7), (5, 1))]
    for name in [*never, *coming]:
        history.objects.put(name, [b"state"])
    assert not gc(history, rules(keep_all_for="1w"), pool).now, "the store alone cannot tell"
    done = gc(history, rules(keep_all_for="1w"), pool, lineage=history.lineage)
    assert [entry.name for entry in done.now] == sorted(never)
    assert all(history.objects.size(name) for name in coming)
    check_whole(history)


def test_dense_state_of_a_generation_that_is_only_taken_over_stays(tmp_path: Path, pool: Executor) -> None:
    """Another log may have more markers of it."""
    history = branched(tmp_path)
    lineage = history.lineage
    lineage.claims[2] = replace(lineage.claims[2], incarnation="another log")
    name = dense_file_name(lineage.job, MarkerId(2, 4), "__0_0.distcp")
    history.objects.put(name, [b"state"])
    assert not gc(history, rules(keep_all_for="1w"), pool, lineage=lineage).now


def test_a_marker_that_is_not_whole_does_not_count_and_nothing_on_its_way_goes(tmp_path: Path, pool: Executor) -> None:
    history = plain(tmp_path)
    lost = f"dense/{history.lineage.job.hex()}/g00000001-m00000006/.metadata"
    history.objects.delete(lost)
    done = gc(history, rules(newest=1, keep_all_for="0s"), pool, now_s=6 * HOUR)
    assert set(done.kept) == names("1:5", "1:6")
    (reason,) = done.not_whole
    assert reason == f"1:6 is not whole: dense state is missing from the store: {lost}"


def test_a_lost_segment_keeps_all_that_leads_to_its_marker(tmp_path: Path, pool: Executor) -> None:
    history = plain(tmp_path)
    job = history.lineage.job.hex()
    history.objects.delete(f"segments/{job}/g00000001-r00000-m00000004-p000.seg")
    done = gc(history, rules(newest=1, keep_all_for="1h", compact=True), pool, now_s=6 * HOUR)
    assert set(done.kept) == names("1:3", "1:4", "1:5", "1:6"), "what is not whole may be mended"
    assert [reason.split(":")[1] for reason in done.not_whole] == [f"{each} is not whole" for each in (4, 5, 6)]
    assert all("m00000004-p000.seg is missing" in reason for reason in done.not_whole)
    assert {entry.name.split("/")[0] for entry in done.now} == {"dense"}
    assert stores.rows_of(history.objects, history.lineage, MarkerId(1, 3)) == history.rows[MarkerId(1, 3)]


def test_segments_of_no_marker_go_when_the_log_says_so(tmp_path: Path, pool: Executor) -> None:
    history = branched(tmp_path)
    job = history.lineage.job.hex()
    orphans = [
        f"segments/{job}/g00000001-r00000-m00000009-p000.seg",
        f"segments/{job}/f-g00000001-m00000003-from-root-p000.seg",
    ]
    coming = [
        f"segments/{job}/g00000004-r00000-m00000007-p000.seg",
        f"segments/{job}/f-g00000004-m00000006-from-root-p000.seg",
    ]
    for name in [*orphans, *coming, f"segments/{job}/notes.txt"]:
        history.objects.put(name, [b"rows"])
    alone = gc(history, rules(keep_all_for="1w"), pool, now_s=0.0)
    assert [entry.name for entry in alone.now] == orphans[1:]
    done = gc(history, rules(keep_all_for="1w"), pool, now_s=0.0, lineage=history.lineage)
    assert [entry.name for entry in done.now] == orphans[:1]
    assert all(history.objects.size(name) for name in [*coming, f"segments/{job}/notes.txt"])


def test_half_written_objects_of_dead_writers_go(tmp_path: Path, pool: Executor) -> None:
    history = plain(tmp_path)
    left = tmp_path / "segments" / history.lineage.job.hex() / ".put-1234"
    left.write_bytes(b"half")
    gc(history, rules(keep_all_for="1w"), pool, now_s=0.0)
    assert not left.exists()


def test_dense_state_in_another_store_is_named_and_stays(tmp_path: Path, pool: Executor) -> None:
    (tmp_path / "log").mkdir()
    history = History(tmp_path / "log")
    history.generation(1, [1, 2])
    store = stores.open_store(str(tmp_path / "store"))
    list(Materializer(history.log, store, lambda _: open_dense(str(history.root)), pool).catch_up(history.lineage))
    done = collect(store, None, history.lineage.job, rules(newest=1), pool, lambda: {"a host": 1e6})
    assert done.elsewhere == ("the log's folder",)
    assert (tmp_path / "log" / "dense" / history.lineage.job.hex() / "g00000001-m00000001" / ".metadata").exists()


def test_without_a_rule_nothing_is_deleted(tmp_path: Path, pool: Executor) -> None:
    history = plain(tmp_path)
    before = stores.contents(history.objects)
    with pytest.raises(ConfigError, match="no retention rule was given"):
        gc(history, GcRules(), pool)
    assert stores.contents(history.objects) == before


def test_an_error_in_the_middle_is_one_of_ours_and_a_second_run_finishes(tmp_path: Path, pool: Executor) -> None:
    history = plain(tmp_path)
    arm("store.renamed=raise@2")
    try:
        with pytest.raises(StoreUnavailableError):
            gc(history, rules(newest=1, compact=True), pool)
    finally:
        arm("")
    assert check_whole(history) >= names("1:6")
    gc(history, rules(newest=1, compact=True), pool)
    assert check_whole(history) == names("1:6")


def test_a_store_that_may_not_be_written_is_named(tmp_path: Path, pool: Executor) -> None:
    history = plain(tmp_path)
    folder = tmp_path / "dropped"
    folder.write_bytes(b"")  # no folder can be made here, whoever runs this
    before = stores.contents(history.objects)
    with pytest.raises(StoreUnavailableError, match="cannot write it"):
        gc(history, rules(newest=1), pool)
    after = stores.contents(history.objects)
    assert {name: data for name, data in after.items() if not name.startswith("readings/")} == before


def test_a_damaged_manifest_is_named_and_nothing_goes(tmp_path: Path, pool: Executor) -> None:
    history = plain(tmp_path)
    name = manifest_name(history.lineage.job, MarkerId(1, 3))
    whole = bytes(history.objects.read(name))
    (tmp_path / name).write_bytes(whole.replace(b"rows", b"rowz"))
    before = stores.contents(history.objects)
    with pytest.raises(CorruptionError, match="manifest was altered") as caught:
        gc(history, rules(newest=1), pool)
    assert caught.value.where["name"] == name
    assert stores.contents(history.objects) == before
    done = gc(history, rules(newest=1), pool, lineage=history.lineage)  # the log knows what the manifest said
    left = names("1:2", "1:3", "1:4", "1:5", "1:6")
    assert set(done.kept) == left, "the newest that is whole, and what may be mended"
    (tmp_path / name).write_bytes(whole)
    assert check_whole(history) == left


def test_a_manifest_that_was_lost_is_missed_by_the_store_alone(tmp_path: Path, pool: Executor) -> None:
    history = plain(tmp_path)
    history.objects.delete(manifest_name(history.lineage.job, MarkerId(1, 3)))
    with pytest.raises(CorruptionError, match="the store lacks marker 1:3, the predecessor of 1:4"):
        gc(history, rules(newest=1), pool)


def test_a_store_of_another_job_is_refused(tmp_path: Path, pool: Executor) -> None:
    history = plain(tmp_path)
    other = bytes(16)
    with pytest.raises(MarkerNotFoundError, match=f"no marker of job 0+, but of job {history.lineage.job.hex()}"):
        collect(history.objects, None, other, rules(newest=1), pool)
    with pytest.raises(MarkerNotFoundError, match="no marker of job"):
        collect(stores.open_store(str(tmp_path / "nothing")), None, other, rules(newest=1), pool)


def test_a_store_that_knows_more_than_the_log_is_refused(tmp_path: Path, pool: Executor) -> None:
    history = plain(tmp_path)
    lineage = history.lineage
    del lineage.commits[MarkerId(1, 3)]
    with pytest.raises(CorruptionError, match="the store holds marker 1:3, which is not in the log"):
        gc(history, rules(newest=1), pool, lineage=lineage)


def test_a_marker_that_comes_while_gc_looks_is_left_alone(tmp_path: Path, pool: Executor) -> None:
    history = plain(tmp_path, 6, ALWAYS)
    lineage = history.lineage
    del lineage.commits[MarkerId(1, 6)]
    done = gc(history, rules(newest=1, compact=True), pool, lineage=lineage)
    assert set(done.kept) == names("1:5")
    assert check_whole(history) == names("1:5", "1:6")


def test_a_run_that_reads_no_clock_of_an_earlier_one_says_that_nothing_gets_older(
    tmp_path: Path, pool: Executor
) -> None:
    """As where each run has a fresh machine: what waits would wait for ever, and nobody would see why."""
    history = plain(tmp_path, policy=ALWAYS)
    first = gc(history, rules(3600.0, newest=1), pool, host="boot 1")
    assert (bool(first.later), first.stands_still) == (True, "")
    again = gc(history, rules(3600.0, newest=1), pool, host="boot 2", now_s=2e6)
    assert not again.now
    assert again.stands_still.startswith("no earlier run has read this run's clock")
    assert "run gc on one host that is not booted in between" in again.describe()
    job, given = history.lineage.job, rules(3600.0, newest=1)
    blind = collect(history.objects, None, job, given, pool, dict)
    assert "this place has no clock that is never set" in blind.describe()
    done = gc(history, rules(3600.0, newest=1), pool, host="boot 2", now_s=2e6 + 3600.0)
    assert done.now
    assert done.stands_still == ""


# gc on a disk that is full: it deletes what is due, though it has no room for its own records.


RULES = rules(HOUR, newest=3, compact=True)
LATER = 1e6 + 2 * HOUR


class Small(FolderObjects):
    """On a disk without room: an object takes a block, and gives it back when it is deleted."""

    number = errno.ENOSPC
    free = 0

    def _put(self, path: Path, parts: Sequence[Buffer], name: Callable[[Path, Path], bool]) -> bool:
        if not self.free:
            raise OSError(self.number, os.strerror(self.number))
        self.free -= 1
        return super()._put(path, parts, name)

    def delete(self, name: str) -> None:
        self.free += self.size(name) is not None
        super().delete(name)


class Crowded(Small):
    """Others take each block that is given back."""

    def delete(self, name: str) -> None:
        super().delete(name)
        self.free = 0


def run(history: stores.History, small: Small, pool: Executor) -> GcPlan:
    return collect(small, None, history.lineage.job, RULES, pool, lambda: {"a host": LATER})


def awaiting(folder: Path, pool: Executor) -> tuple[stores.History, set[str]]:
    """A history with objects that a second run of gc would delete, and their names."""
    history = plain(folder)
    due = {entry.name for entry in gc(history, RULES, pool, now_s=1e6).later}
    history.generation(2, [7, 8], "1:6")
    stores.fold(folder)
    assert due
    return history, due


def check_deleted(history: stores.History, due: set[str], error: StoreUnavailableError) -> None:
    assert f"{len(due)} objects that were due are deleted" in error.message
    assert not due & stores.contents(history.objects).keys()
    assert check_whole(history) == names("1:4", "1:5", "1:6", "2:7", "2:8")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_what_is_due_makes_room_for_the_next_run(number: int, tmp_path: Path, pool: Executor) -> None:
    history, due = awaiting(tmp_path, pool)
    small = Small(tmp_path)
    small.number = number
    with pytest.raises(StoreUnavailableError, match=f"no room for its records: .*{os.strerror(number)}") as told:
        run(history, small, pool)
    check_deleted(history, due, told.value)
    assert told.value.hint.startswith("run gc again")
    done = run(history, small, pool)
    assert set(done.dropping) == names("1:4", "1:5")
    assert check_whole(history) == set(done.kept) == names("1:6", "2:7", "2:8")


def test_where_nothing_is_due_it_says_what_can_be_deleted_by_hand(tmp_path: Path, pool: Executor) -> None:
    history = plain(tmp_path)
    before = stores.contents(history.objects)
    with pytest.raises(StoreUnavailableError, match="No space left on device; nothing was due") as told:
        run(history, Small(tmp_path), pool)
    assert "delete summaries/ and readings/ of this store" in told.value.hint
    assert stores.contents(history.objects) == before


def test_another_error_of_a_disk_ends_gc_before_anything_goes(tmp_path: Path, pool: Executor) -> None:
    history, due = awaiting(tmp_path, pool)
    small = Small(tmp_path)
    small.number = errno.EIO
    with pytest.raises(StoreUnavailableError, match=r"cannot write it: Input/output error"):
        run(history, small, pool)
    assert due <= stores.contents(history.objects).keys()
    assert offered(history) == names("1:4", "1:5", "1:6", "2:7", "2:8")


def test_what_is_due_goes_though_others_take_the_room(tmp_path: Path, pool: Executor) -> None:
    history, due = awaiting(tmp_path, pool)
    with pytest.raises(StoreUnavailableError, match="gc has no room for its records") as told:
        run(history, Crowded(tmp_path), pool)
    check_deleted(history, due, told.value)
    assert told.value.hint.endswith("unless others have taken it")


def test_segments_of_a_fold_that_is_there_stay(tmp_path: Path, pool: Executor) -> None:
    history = plain(tmp_path, policy=ALWAYS)
    part = next(entry.name for entry in history.objects.list("segments/") if parse_fold_segment(entry.name) is not None)
    history.objects.put(needless := "verdicts/needless", [b""])
    small = Small(tmp_path)
    assert delete_all(small, [[part], [needless, "verdicts/gone"]], pool) == {part}
    assert small.size(part) is not None
    assert small.size(needless) is None


def test_what_may_not_be_deleted_is_named(tmp_path: Path, pool: Executor) -> None:
    small = Small(tmp_path)
    (tmp_path / "segments" / "b").mkdir(parents=True)  # nobody deletes that, whoever runs this
    with pytest.raises(StoreUnavailableError, match="cannot delete it: Is a directory") as told:
        delete_all(small, [["segments/a", "segments/b"]], pool)
    assert str(told.value.where["path"]) == str(tmp_path / "segments" / "b")
