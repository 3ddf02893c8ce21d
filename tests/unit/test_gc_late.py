"""gc and others at once: other runs, lists that they take away, and merges that go on meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from crc32c import crc32c

from tests import stores
from tests.parts import (
    FolderObjects,
    Garbage,
    GcPlan,
    GcRules,
    InProcess,
    IntervalFolder,
    Materializer,
    Policy,
    Progress,
    Repairer,
    Retention,
    Site,
    collect,
    open_dense,
)
from tests.stores import HeldObjects, History
from tests.unit.gc_history import ALWAYS, HOUR, branched, check_whole, gc, plain, rules
from torchrec_stream_ckpt.errors import CorruptionError, StoreUnavailableError
from torchrec_stream_ckpt.format.frame import Buffer
from torchrec_stream_ckpt.inner import Catalog, Objects
from torchrec_stream_ckpt.maintain.gc import gc as collecting
from torchrec_stream_ckpt.maintain.gc import gc_delete
from torchrec_stream_ckpt.maintain.merge import Merging, merge_share, plan_merge
from torchrec_stream_ckpt.store.catalog import ObjectCache
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


def run(history: History, given: GcRules = RULES, objects: Objects | None = None) -> GcPlan:
    with ThreadPoolExecutor(1) as pool:
        return collect(objects or history.objects, None, history.lineage.job, given, pool, lambda: CLOCKS)


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


def test_a_list_without_names_that_an_older_gc_kept_while_it_deleted_goes(tmp_path: Path) -> None:
    """Older programs kept one for late workers, and left it if they were killed."""
    history = branched(tmp_path)
    old = Garbage(1.0, ()).to_bytes()
    name = garbage_name(history.lineage.job, 1000, crc32c(old))
    history.objects.put(name, [old])
    done = run(history)
    assert (done.now, done.stands_still) == ((), "")
    assert history.objects.size(name) is None
    assert check_whole(history) == {*done.kept}


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
        with pytest.raises(StoreUnavailableError, match="1 segments of a fold were deleted during its merge") as told:
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
        with pytest.raises(StoreUnavailableError, match="were deleted during its merge"):
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
        with pytest.raises(StoreUnavailableError, match="were deleted during its merge"):
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
    monkeypatch.setattr(gc_delete, "BATCH_NAMES", 1)
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
def test_what_a_fold_replaces_outlasts_another_gc_that_deletes_the_folds_segments(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one has looked for the fold right before it was put. What the fold replaces waits longer than that."""
    history, merge_all, runs = plain(tmp_path), collecting.merge_all, list[Future[GcPlan]]()
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
            monkeypatch.setattr(collecting, "merge_all", merging)
        mine = gc(history, rules(HOUR, newest=1), pool)
        replaced = {entry.name for entry in mine.later}
        assert {name.partition("/")[0] for name in replaced} >= {"manifests", "segments"}
        over.set()
        assert {left} <= {entry.name for entry in runs[0].result(60).now} <= {left, late}
        assert history.objects.size(late) is None
        done = gc(history, rules(HOUR, newest=1), pool, now_s=1e6 + 2 * HOUR)
    assert done.not_whole == (f"1:6 is not whole: {late} is missing",)
    assert not replaced & {entry.name for entry in done.now if not entry.name.startswith("dense/")}
    rows, _ = stores.rows_by_route(history.objects, history.lineage, MarkerId(1, 6))
    assert rows == history.rows[MarkerId(1, 6)]


# gc beside damage and its repair: whenever it runs, the last good copy of a row that a kept marker needs stays.


NEWEST = MarkerId(1, 6)
BASE = "-m00000006-from-root"


class Stepped(HeldObjects):
    """A store that does something before one of the things that are asked of it."""

    at = -1
    steps = 0
    do: Callable[[], object] = staticmethod(lambda: None)

    def _step(self) -> None:
        self.steps += 1
        if self.steps == self.at:
            self.do()

    def put(self, name: str, parts: Sequence[Buffer]) -> None:
        self._step()
        super().put(name, parts)

    def read(self, name: str, begin: int = 0, end: int | None = None) -> memoryview:
        self._step()
        return super().read(name, begin, end)


@pytest.fixture
def history(tmp_path: Path) -> History:
    made = History(tmp_path)
    made.generation(1, range(1, 7))
    return made


def folded(history: History, pool: Executor) -> dict[str, bytes]:
    """A store with a base at each marker."""
    store = HeldObjects({})
    one = Materializer(
        history.log, store, lambda _: open_dense(str(history.root)), pool, Policy(rebase=1e-9, compact="none")
    )  # type: ignore[arg-type]
    assert len(list(one.catch_up(history.lineage))) == 6
    return store.held


def gc_over(history: History, store: HeldObjects, pool: Executor, now_s: float, newest: int = 1) -> GcPlan:
    rules = GcRules(retention=Retention(newest=newest), grace_s=3600.0)
    lineage = history.lineage
    return collect(store, lineage, lineage.job, rules, pool, lambda: {"a host": now_s})  # type: ignore[arg-type]


def flip(store: HeldObjects, part: str) -> str:
    """One bit of the newest base; returns which object."""
    name = next(name for name in sorted(store.held) if part in name)
    data = bytearray(store.held[name])
    data[-10] ^= 4
    store.held[name] = bytes(data)
    return name


def is_there(history: History, store: HeldObjects) -> bool:
    """Whether the store has all rows of the newest marker, by whatever way."""
    lineage = history.lineage
    catalog, found = Catalog.load(store, lineage.job), False  # type: ignore[arg-type]
    for folds in (catalog.folds, *(catalog.folds - {fold} for fold in catalog.folds), frozenset()):
        try:
            one = replace(catalog, folds=frozenset(folds), kept=ObjectCache())
            cover = one.cover(lineage.chain(NEWEST))
            if cover:
                assert stores.rows_in(one, lineage, NEWEST, cover) == history.rows[NEWEST]
                found = True
        except (CorruptionError, AssertionError):
            continue
    return found


@pytest.mark.parametrize("part", [f"{BASE}-p000.seg", f"{BASE}.json"], ids=["rows", "its own object"])
def test_gc_never_deletes_what_a_damaged_base_was_made_of(history: History, pool: Executor, part: str) -> None:
    store = HeldObjects(folded(history, pool))
    gc_over(history, store, pool, 0.0)
    name = flip(store, part)
    done = gc_over(history, store, pool, 1e6)
    assert is_there(history, store)
    assert [each for each in (*done.damaged, *done.not_whole) if BASE in each]
    assert name in done.describe()
    if name.endswith(".seg"):
        assert "let stream-ckpt materialize repair it" in done.describe()
    assert not [entry for entry in done.now if entry.name.startswith(("segments/", "folds/"))
                and "m00000005-from-root" in entry.name], "the base before it is needed again"  # fmt: skip


def test_gc_at_any_moment_of_a_repair_leaves_a_good_copy(history: History, pool: Executor) -> None:
    whole = folded(history, pool)
    listed = HeldObjects(whole)
    gc_over(history, listed, pool, 0.0)
    lineage, deleted = history.lineage, 0
    for step in count(1):
        store = Stepped(listed.held)
        name = flip(store, f"{BASE}-p000.seg")
        catalog = Catalog.load(store, lineage.job)  # type: ignore[arg-type]
        progress = Progress(lambda: None)
        folder = IntervalFolder(history.log, store, progress, InProcess(Site(history.log, store, pool)))  # type: ignore[arg-type]
        repairer = Repairer(store, pool, folder, progress, lambda _: None)  # type: ignore[arg-type]

        def run_gc(store: Stepped = store, step: int = step) -> None:
            nonlocal deleted
            store.at = -1
            deleted += len(gc_over(history, store, pool, 1e6).now)
            assert is_there(history, store), f"before step {step}"

        store.do, store.at, store.steps = run_gc, step, 0
        try:
            repairer.mend(lineage, catalog, name, CorruptionError("a bit", name=name))
        except CorruptionError:
            assert is_there(history, store), f"step {step}"
        assert is_there(history, store)
        if store.at != -1:
            break  # the repair had no such step
    assert step > 10
    assert deleted > 0
    gc_over(history, store, pool, 1e6)
    assert is_there(history, store)


def bases_read(history: History, store: Stepped, pool: Executor, now_s: float, newest: int) -> tuple[GcPlan, set[str]]:
    """What gc did, and which bases it has read."""
    names: list[str] = []
    read = Stepped.read

    def reading(name: str, begin: int = 0, end: int | None = None) -> memoryview:
        names.append(name)
        return read(store, name, begin, end)

    store.read = reading  # type: ignore[method-assign]
    plan = gc_over(history, store, pool, now_s, newest)
    return plan, {name.split("-p")[0] for name in names if "/f-" in name and name.endswith(".seg")}


@pytest.mark.parametrize("damaged", [False, True], ids=["whole", "damaged"])
def test_of_several_bases_the_oldest_whole_one_is_read(history: History, pool: Executor, damaged: bool) -> None:
    """A later one is written anew from it: to read them all would cost a table a base whenever anything goes."""
    store = Stepped(folded(history, pool))
    gc_over(history, store, pool, 0.0, 3)
    if damaged:
        flip(store, "-m00000004-from-root-p000.seg")
    plan, read = bases_read(history, store, pool, 1e6, 3)
    assert plan.now
    assert bool(plan.damaged) == damaged
    wanted = {3, 4, 5} if damaged else {4}  # base 3 stays then, and what it was made of goes
    assert {int(name.split("-m")[1][:8]) for name in read} == wanted
    assert is_there(history, store)


def test_a_base_is_read_only_when_something_goes_in_its_favor(history: History, pool: Executor) -> None:
    store = Stepped(folded(history, pool))
    gc_over(history, store, pool, 0.0)
    gc_over(history, store, pool, 1e6)
    plan, read = bases_read(history, store, pool, 2e6, 1)
    assert not plan.now
    assert not read
