"""gc beside damage and its repair: whenever it runs, the last good copy of a row that a kept marker needs stays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from tests import stores
from tests.parts import GcRules, Materializer, Policy, Retention, collect, open_dense
from tests.stores import HeldObjects, History
from torchrec_stream_ckpt.errors import CorruptionError
from torchrec_stream_ckpt.format.frame import Buffer
from torchrec_stream_ckpt.inner import Catalog
from torchrec_stream_ckpt.maintain.engine.api import InProcess, Site
from torchrec_stream_ckpt.maintain.gc.retention import GcPlan
from torchrec_stream_ckpt.maintain.interval_folder import IntervalFolder
from torchrec_stream_ckpt.maintain.progress import Progress
from torchrec_stream_ckpt.maintain.repairer import Repairer
from torchrec_stream_ckpt.store.catalog import ObjectCache
from torchrec_stream_ckpt.util.types import MarkerId

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


def gc(history: History, store: HeldObjects, pool: Executor, now_s: float, newest: int = 1) -> GcPlan:
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
    gc(history, store, pool, 0.0)
    name = flip(store, part)
    done = gc(history, store, pool, 1e6)
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
    gc(history, listed, pool, 0.0)
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
            deleted += len(gc(history, store, pool, 1e6).now)
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
    gc(history, store, pool, 1e6)
    assert is_there(history, store)


def bases_read(history: History, store: Stepped, pool: Executor, now_s: float, newest: int) -> tuple[GcPlan, set[str]]:
    """What gc did, and which bases it has read."""
    names: list[str] = []
    read = Stepped.read

    def reading(name: str, begin: int = 0, end: int | None = None) -> memoryview:
        names.append(name)
        return read(store, name, begin, end)

    store.read = reading  # type: ignore[method-assign]
    plan = gc(history, store, pool, now_s, newest)
    return plan, {name.split("-p")[0] for name in names if "/f-" in name and name.endswith(".seg")}


@pytest.mark.parametrize("damaged", [False, True], ids=["whole", "damaged"])
def test_of_several_bases_the_oldest_whole_one_is_read(history: History, pool: Executor, damaged: bool) -> None:
    """A later one is written anew from it: to read them all would cost a table a base whenever anything goes."""
    store = Stepped(folded(history, pool))
    gc(history, store, pool, 0.0, 3)
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
    gc(history, store, pool, 0.0)
    gc(history, store, pool, 1e6)
    plan, read = bases_read(history, store, pool, 2e6, 1)
    assert not plan.now
    assert not read
