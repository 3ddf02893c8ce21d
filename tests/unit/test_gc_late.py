"""gc and others at once: late workers of its own, other runs, and merges that go on meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from crc32c import crc32c

from tests import stores
from tests.stores import History
from tests.unit.gc_history import ALWAYS, HOUR, branched, check_whole, gc, plain, rules
from torchrec_stream_ckpt.errors import EngineUnavailableError, StoreUnavailableError
from torchrec_stream_ckpt.format.frame import Buffer
from torchrec_stream_ckpt.format.manifest import Garbage
from torchrec_stream_ckpt.maintain.engine.api import Engine, InProcess, Site, Task
from torchrec_stream_ckpt.maintain.gc import gc as collecting
from torchrec_stream_ckpt.maintain.gc import gc_delete
from torchrec_stream_ckpt.maintain.gc.gc import GcRules, collect
from torchrec_stream_ckpt.maintain.gc.gc_delete import DeleteTask
from torchrec_stream_ckpt.maintain.gc.retention import GcPlan, Retention
from torchrec_stream_ckpt.maintain.materializer import Materializer
from torchrec_stream_ckpt.maintain.merge import Merging, merge_share, plan_merge
from torchrec_stream_ckpt.store.api import Objects, open_store
from torchrec_stream_ckpt.store.catalog import Catalog
from torchrec_stream_ckpt.store.dense import open_dense
from torchrec_stream_ckpt.store.folder import FolderObjects
from torchrec_stream_ckpt.util import failpoints
from torchrec_stream_ckpt.util.layout import garbage_name, parse_fold_segment
from torchrec_stream_ckpt.util.types import MarkerId

RULES = GcRules(retention=Retention(newest=1, then_every=4), compact=True)
CLOCKS = {"a host": 1e6}


def waiting(root: Path) -> History:
    """What is not needed is on a list, and its grace period is over."""
    history = branched(root)
    with ThreadPoolExecutor(1) as pool:
        gc(history, RULES, pool, now_s=1e6 - 2 * HOUR)
    return history


class Late(InProcess):
    """Notes its tasks: a worker that a network has cut off does them again, after another one did."""

    def __init__(self, tasks: list[Task[Any]], site: Site) -> None:
        super().__init__(site)
        self._tasks = tasks

    def submit(self, task: Task[Any], *, urgent: bool = False) -> Future[Any]:
        self._tasks.append(task)
        return super().submit(task, urgent=urgent)


class Away(InProcess):
    def submit(self, task: Task[Any], *, urgent: bool = False) -> Future[Any]:
        raise EngineUnavailableError("Ray cannot be reached", hint="start the cluster")


def stopped_merge(history: History, end: MarkerId, pool: Executor) -> tuple[str, Callable[[], object]]:
    """The one segment of a base that is merged and whose own object is not put; and what puts it."""
    objects, lineage = history.objects, history.lineage
    merging = plan_merge(objects, lineage, Catalog.load(objects, lineage.job).cover(lineage.chain(end)), pool)
    refs = [merge_share(objects, task, pool) for task in merging.tasks]
    (part,) = (ref.name for each in refs for ref in each)
    return part, partial(merging.finish, objects, refs, pool)


class Meanwhile(FolderObjects):
    """Something happens right after an object was deleted."""

    def __init__(self, root: Path, name: str, happens: Callable[[], object]) -> None:
        super().__init__(root)
        self._name = name
        self._happens = happens

    def delete(self, name: str) -> None:
        super().delete(name)
        if name == self._name:
            self._happens()


def run(
    history: History,
    given: GcRules = RULES,
    engine: Callable[[Site], Engine] = InProcess,
    objects: Objects | None = None,
) -> GcPlan:
    objects = objects or history.objects
    with ThreadPoolExecutor(1) as pool:
        made = engine(Site(None, objects, pool))
        return collect(objects, None, history.lineage.job, given, pool, lambda: CLOCKS, engine=made)


def test_a_worker_that_comes_after_its_run_deletes_nothing(tmp_path: Path) -> None:
    """The list of the run is gone: what has such a name now was written since."""
    objects = open_store(str(tmp_path))
    for name in ("segments/a", "segments/b", "garbage/list"):
        objects.put(name, [b"it"])
    with ThreadPoolExecutor(1) as pool:
        task, site = DeleteTask(("segments/a", "segments/gone"), "garbage/list"), Site(None, objects, pool)
        assert task.run(site) == task.run(site) == ()
        assert set(stores.contents(objects)) == {"segments/b", "garbage/list"}
        objects.delete("garbage/list")
        assert DeleteTask(("segments/b",), "garbage/list").run(site) == ("segments/b",)
        assert set(stores.contents(objects)) == {"segments/b"}


def test_a_worker_that_goes_on_after_a_stop_looks_for_its_run_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right after the first deletion the run ends, and the next object is written anew."""
    monkeypatch.setattr(gc_delete, "LOOK_S", 0.0)  # each deletion comes that late

    class Stopping(FolderObjects):
        def delete(self, name: str) -> None:
            super().delete(name)
            super().delete("garbage/list")

    objects = Stopping(tmp_path)
    for name in ("segments/a", "segments/b", "segments/c", "garbage/list"):
        objects.put(name, [b"it"])
    with ThreadPoolExecutor(1) as pool:
        task = DeleteTask(("segments/a", "segments/b", "segments/c"), "garbage/list")
        assert task.run(Site(None, objects, pool)) == ("segments/b", "segments/c")
    assert set(stores.contents(objects)) == {"segments/b", "segments/c"}


@pytest.mark.parametrize("how", ["after a grace period", "without one", "of a run that failed"])
def test_what_is_written_anew_after_a_run_stays_whatever_late_workers_do(tmp_path: Path, how: str) -> None:
    history = waiting(tmp_path) if how != "without one" else branched(tmp_path)  # which stands on no list
    objects, before = history.objects, stores.contents(history.objects)
    tasks: list[Task[Any]] = []
    if how == "of a run that failed":
        failpoints.arm("gc.deleted=raise@5")
        with pytest.raises(OSError, match=r"gc\.deleted"):
            run(history, RULES, partial(Late, tasks))
        failpoints.arm("")
    else:
        given = RULES if how != "without one" else replace(RULES, grace_s=0.0)
        assert run(history, given, partial(Late, tasks)).now
    gone = before.keys() - stores.contents(objects).keys()
    anew = {name for name in gone if not name.startswith(("garbage/", "readings/"))}
    assert len(anew) > 4
    for name in anew:
        objects.put(name, [before[name]])
    with ThreadPoolExecutor(1) as pool:
        for task in tasks:
            task.run(Site(None, objects, pool))
    assert anew <= stores.contents(objects).keys()


def test_a_run_that_another_one_has_ended_says_what_it_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another gc takes the list of this one away as soon as it is there."""
    history = waiting(tmp_path)
    look = gc_delete._Asking.look

    def ended(asked: gc_delete._Asking) -> None:
        history.objects.delete(asked._run_list)
        look(asked)

    monkeypatch.setattr(gc_delete._Asking, "look", ended)
    left = run(history)
    monkeypatch.undo()
    assert (left.now, len(left.later) > 5) == ((), True)
    assert {entry.name for entry in left.later} <= stores.contents(history.objects).keys()
    done = run(history)
    assert {entry.name for entry in done.now} == {entry.name for entry in left.later}
    assert not list(history.objects.list("garbage/"))


def test_a_list_that_another_gc_takes_away_meanwhile_says_nothing(tmp_path: Path) -> None:
    history = waiting(tmp_path)

    class Taken(FolderObjects):
        def read(self, name: str, begin: int = 0, end: int | None = None) -> memoryview:
            if name.startswith("garbage/"):
                self.delete(name)
            return super().read(name, begin, end)

    done = run(history, objects=Taken(tmp_path))
    assert done.now == ()
    assert len(done.later) > 5, "it waits from now on"


def test_what_a_run_that_was_killed_still_wants_is_ended_before_the_next_one_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A late worker of the killed one would delete what a merge of this one has written anew."""
    history, seen, merge = branched(tmp_path), list[int | None](), collecting.merge
    killed = Garbage(1.0, ()).to_bytes()
    name = garbage_name(history.lineage.job, 1000, crc32c(killed))
    history.objects.put(name, [killed])

    def looking(*given: Any) -> Any:
        seen.append(history.objects.size(name))
        return merge(*given)

    monkeypatch.setattr(collecting, "merge", looking)
    assert run(history, replace(RULES, grace_s=0.0)).now
    assert set(seen) == {None}


def test_workers_that_are_away_are_named_with_what_was_given_up(tmp_path: Path) -> None:
    history = branched(tmp_path)
    with pytest.raises(EngineUnavailableError, match="given up for good by this run") as told:
        run(history, replace(RULES, grace_s=0.0), Away)
    assert told.value.hint == "start the cluster; the next gc deletes the rest"
    assert not list(history.objects.list("garbage/")), "the run has ended"
    assert run(history, replace(RULES, grace_s=0.0)).now


def test_segments_of_a_merge_that_goes_on_wait_however_long_it_takes(tmp_path: Path) -> None:
    """Markers came while it merges, so its end is not the newest one."""
    history, given = plain(tmp_path), rules(HOUR, newest=6)
    objects, lineage = history.objects, history.lineage
    catalog = Catalog.load(objects, lineage.job)
    with ThreadPoolExecutor(2) as pool:
        merging = plan_merge(objects, lineage, catalog.cover(lineage.chain(MarkerId(1, 4))), pool)
        refs = [merge_share(objects, task, pool) for task in merging.tasks]
        (part,) = (ref.name for each in refs for ref in each)
        gc(history, given, pool, now_s=1e6)
        another = merging.tasks[0].fold.segment_name(8)
        objects.put(another, [objects.read(part)])
        assert gc(history, given, pool, now_s=1e6 + 2 * HOUR).now == (), "a segment has come since"
        objects.delete(another)
        assert {entry.name for entry in gc(history, given, pool, now_s=1e6 + 2 * HOUR).now} == {part}
        with pytest.raises(
            StoreUnavailableError, match="1 segments of a fold were deleted while it was merged"
        ) as told:
            merging.finish(objects, refs, pool)
        assert told.value.where["name"] == part
        refs = [merge_share(objects, task, pool) for task in merging.tasks]
        gc(history, given, pool, now_s=1e6 + 3 * HOUR)
        merging.finish(objects, refs, pool)
        gc(history, given, pool, now_s=1e6 + 5 * HOUR)
    assert objects.size(part) is not None
    assert len(check_whole(history)) == 6


def test_a_fold_that_lost_a_segment_before_it_was_put_is_merged_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history, finish, taken = History(tmp_path), Merging.finish, list[str]()
    history.generation(1, range(1, 7))

    def late(self: Merging, objects: Objects, refs: Any, pool: Any) -> Any:
        if not taken:
            taken.append(refs[0][0].name)
            objects.delete(taken[0])
        return finish(self, objects, refs, pool)

    monkeypatch.setattr(Merging, "finish", late)
    dense = open_dense(str(tmp_path))
    with ThreadPoolExecutor(2) as pool:
        made = Materializer(history.log, history.objects, lambda _: dense, pool, ALWAYS)
        with pytest.raises(StoreUnavailableError, match="were deleted while it was merged"):
            list(made.catch_up(history.lineage))
        assert not Catalog.load(history.objects, history.lineage.job).folds
        list(made.catch_up(history.lineage))
        made.settle(history.lineage)
    assert Catalog.load(history.objects, history.lineage.job).folds
    assert history.objects.size(taken[0]) is not None
    assert len(check_whole(history)) == 6


def test_a_fold_that_is_put_while_gc_reads_keeps_its_segments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A merge had stopped for longer than the grace period, and ends after gc has listed the store."""
    history, given, check = plain(tmp_path), rules(HOUR, newest=6), collecting.check_relied
    objects, lineage = history.objects, history.lineage
    with ThreadPoolExecutor(2) as pool:
        cover = Catalog.load(objects, lineage.job).cover(lineage.chain(MarkerId(1, 4)))
        merging = plan_merge(objects, lineage, cover, pool)
        refs = [merge_share(objects, task, pool) for task in merging.tasks]
        (part,) = (ref.name for each in refs for ref in each)
        gc(history, given, pool, now_s=1e6)

        def late(*args: Any) -> None:
            merging.finish(objects, refs, pool)
            check(*args)

        monkeypatch.setattr(collecting, "check_relied", late)
        done = gc(history, given, pool, now_s=1e6 + 2 * HOUR)
        monkeypatch.undo()
        assert ([entry.name for entry in done.now], [entry.name for entry in done.later]) == ([], [part])
        assert objects.size(part) is not None
        again = gc(history, given, pool, now_s=1e6 + 4 * HOUR)
    assert (again.now, again.later) == ((), ())
    assert not list(objects.list("garbage/"))
    assert len(check_whole(history)) == 6


def test_segments_of_a_fold_that_another_materializer_puts_again_go_after_it(tmp_path: Path) -> None:
    """It is late with a fold that gc has just deleted: it has found its segments, and puts the fold's own object."""

    class PutAgain(FolderObjects):
        def delete(self, name: str) -> None:
            data = bytes(self.read(name)) if name.startswith("folds/") else None
            super().delete(name)
            if data is not None:
                self.put(name, [data])

    history = branched(tmp_path, ALWAYS)
    with ThreadPoolExecutor(1) as pool:
        gc(history, RULES, pool, now_s=1e6 - 2 * HOUR)
        done = run(history, objects=PutAgain(tmp_path))
        left = [entry.name for entry in done.later]
        assert left
        assert all(parse_fold_segment(name) is not None for name in left)
        for now_s in (1e6, 1e6 + HOUR):
            catalog = Catalog.load(history.objects, history.lineage.job)
            refs = [ref for fold in catalog.folds for ref in catalog.fold(*fold).segments]
            assert all(history.objects.size(ref.name) == ref.num_bytes for ref in refs)
            last = gc(history, RULES, pool, now_s=now_s)
    assert {entry.name for entry in last.now} > {*left}
    assert not {*left} & stores.contents(history.objects).keys()
    assert not list(history.objects.list("garbage/"))
    check_whole(history)


def test_a_fold_whose_segment_goes_while_it_is_put_is_merged_again(tmp_path: Path) -> None:
    """The put takes long, and a gc that has not seen the fold takes a segment that was left by a merge before."""
    history, taken = History(tmp_path), list[str]()
    history.generation(1, range(1, 7))

    class Slow(FolderObjects):
        def create(self, name: str, parts: Sequence[Buffer]) -> bool:
            if name.startswith("folds/") and not taken:
                taken.extend(entry.name for entry in self.list("segments/") if parse_fold_segment(entry.name))
                self.delete(taken[0])
            return super().create(name, parts)

    dense = open_dense(str(tmp_path))
    with ThreadPoolExecutor(2) as pool:
        made = Materializer(history.log, Slow(tmp_path), lambda _: dense, pool, ALWAYS)
        with pytest.raises(StoreUnavailableError, match="were deleted while it was merged"):
            list(made.catch_up(history.lineage))
        assert history.objects.size(taken[0]) is None
        list(made.catch_up(history.lineage))
        made.settle(history.lineage)
    assert history.objects.size(taken[0]) is not None
    assert len(check_whole(history)) == 6


def test_a_fold_that_is_put_while_gc_deletes_keeps_its_segments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two merges had stopped for longer than the grace period. One ends while what the other has left is deleted."""
    monkeypatch.setattr(gc_delete, "LOOK_S", 0.0)  # each deletion comes that late
    history, given = plain(tmp_path), rules(HOUR, newest=6)
    with ThreadPoolExecutor(2) as pool:
        left, _ = stopped_merge(history, MarkerId(1, 2), pool)
        late, finish = stopped_merge(history, MarkerId(1, 4), pool)
        gc(history, given, pool, now_s=1e6 - 2 * HOUR)
        done = run(history, given, objects=Meanwhile(tmp_path, left, finish))
        assert ([entry.name for entry in done.now], [entry.name for entry in done.later]) == ([left], [late])
        assert history.objects.size(late) is not None
        again = gc(history, given, pool, now_s=1e6 + 2 * HOUR)
    assert (again.now, again.later) == ((), ())
    assert len(check_whole(history)) == 6


@pytest.mark.parametrize("when", ["before it begins", "while it merges"])
def test_a_gc_relies_on_no_fold_whose_segments_another_one_is_about_to_delete(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one has looked for the fold right before it was put, and for its own list a moment ago."""
    history, merge_all, runs = plain(tmp_path), collecting._merge_all, list[Future[GcPlan]]()
    put, over = Event(), Event()
    with ThreadPoolExecutor(2) as pool, ThreadPoolExecutor(1) as other:
        left, _ = stopped_merge(history, MarkerId(1, 2), pool)
        late, finish = stopped_merge(history, MarkerId(1, 4), pool)
        gc(history, rules(HOUR, newest=6), pool, now_s=1e6 - 2 * HOUR)

        def stop() -> None:
            finish()
            put.set()
            assert over.wait(60)

        def begin() -> None:
            objects = Meanwhile(tmp_path, left, stop)
            runs.append(other.submit(run, history, rules(HOUR, newest=6), objects=objects))
            assert put.wait(60)

        def merging(*given: Any) -> Any:
            if not runs:  # of the first one of both
                begin()
            return merge_all(*given)

        if when == "before it begins":
            begin()
        else:
            monkeypatch.setattr(collecting, "_merge_all", merging)
        mine = gc(history, rules(newest=1), pool)
        assert {entry.name.partition("/")[0] for entry in mine.now} >= {"manifests", "segments"}
        over.set()
        theirs = runs[0].result(60)
    assert [entry.name for entry in theirs.now] == [left]
    assert late in {entry.name for entry in theirs.later}
    assert check_whole(history) == {MarkerId(1, 6)}
