"""What a reader finds damaged counts as read no more: also for a gc that goes on, on a full disk, and after a kill."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests import builders, stores
from tests.parts import FolderObjects, Materializer, arm, open_dense
from tests.stores import HeldObjects, History
from tests.unit.test_read_back import HOUR, Watched, gc, six_markers, units, without_base
from torchrec_stream_ckpt.errors import CorruptionError, StoreUnavailableError
from torchrec_stream_ckpt.format.frame import Buffer
from torchrec_stream_ckpt.format.readings import Reading, ReadUnit
from torchrec_stream_ckpt.inner import Catalog
from torchrec_stream_ckpt.maintain.gc import gc as gc_module
from torchrec_stream_ckpt.store.verdicts import put_reading, take_back
from torchrec_stream_ckpt.util.layout import FoldName
from torchrec_stream_ckpt.util.types import MarkerId

pytestmark = pytest.mark.usefixtures("no_syncs")

POINTS = ("readings.taken_back",)
READ = tuple(ReadUnit(FoldName(builders.JOB, MarkerId(1, marker), None).name, 7, 1) for marker in (1, 2, 3))


@pytest.fixture
def history(tmp_path: Path) -> History:
    return six_markers(tmp_path)


def damage_of(unit: ReadUnit) -> list[CorruptionError]:
    return [CorruptionError("flipped", name=unit.name)]


def readings(store: Any, *each: Sequence[ReadUnit]) -> None:
    for number, read in enumerate(each):
        put_reading(store, builders.JOB, Reading(float(number), {"a host": 1.0}, tuple(read), "held://"))


def test_damage_is_taken_back_from_all_readings_on_a_full_disk(tmp_path: Path) -> None:
    """The first one was deleted, there was no room for the rest of it, and the second one counted for a week."""

    class Full(FolderObjects):
        def put(self, name: str, parts: Sequence[Buffer]) -> None:
            raise StoreUnavailableError("no space left on device")

    readings(FolderObjects(tmp_path), READ[:2], READ[1:], READ[2:])
    take_back(Full(tmp_path), builders.JOB, damage_of(READ[1]))
    assert units(FolderObjects(tmp_path)) == {READ[2].name}  # type: ignore[arg-type]


def test_two_that_take_back_at_once_bring_nothing_back() -> None:
    class Raced(HeldObjects):
        raced = False

        def delete(self, name: str) -> None:
            if not self.raced:
                self.raced = True
                take_back(self, builders.JOB, damage_of(READ[1]))  # type: ignore[arg-type]
            super().delete(name)

    store = Raced({})
    readings(store, READ)
    take_back(store, builders.JOB, damage_of(READ[0]))  # type: ignore[arg-type]
    assert not {READ[0].name, READ[1].name} & units(store)


@pytest.mark.parametrize("nth", [1, 2])
def test_a_kill_while_damage_is_taken_back_leaves_nothing_new_that_counts(tmp_path: Path, nth: int) -> None:
    store = FolderObjects(tmp_path)
    readings(store, READ[:2], READ[1:], READ[2:])
    before = stores.contents(store)
    child = os.fork()
    if not child:
        arm(f"{POINTS[0]}=kill@{nth}")
        take_back(store, builders.JOB, damage_of(READ[1]))
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    left = stores.contents(store)
    assert left.items() < before.items()
    assert len(before) - len(left) == nth
    take_back(store, builders.JOB, damage_of(READ[1]))
    assert units(store) == {READ[2].name}  # type: ignore[arg-type]


def test_what_is_taken_back_while_gc_works_is_read(
    history: History, pool: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restore finds the damage after gc has begun, and before it deletes what the base was made of."""
    store, check = Watched(history, pool), gc_module.check_relied
    gc(history, store, pool, 0.0, 4)
    name = store.flip("-m00000003-from-root-p000")

    def late(*given: Any) -> None:
        check(*given)
        take_back(store, history.lineage.job, [CorruptionError("flipped", name=name)])  # type: ignore[arg-type]

    monkeypatch.setattr(gc_module, "check_relied", late)
    done = gc(history, store, pool, 2 * HOUR, 4)
    assert [said for said in done.damaged if "-m00000003-from-root" in said]
    for marker in (3, 4, 5, 6):
        assert stores.rows_in(*without_base(history, store, marker)) == history.rows[MarkerId(1, marker)]


def test_a_base_under_repair_keeps_its_sources_though_it_was_read_lately(history: History, pool: Executor) -> None:
    """The materializer has found the damage, and reads what the base was made of, when the next gc comes."""

    class Repaired(Watched):
        due = ""

        def read(self, name: str, begin: int = 0, end: int | None = None) -> memoryview:
            if self.due and self.due in name:
                self.due = ""
                with ThreadPoolExecutor(2) as other:
                    gc(history, self, other, 2 * HOUR, 4)
            return super().read(name, begin, end)

    store, lineage = Repaired(history, pool), history.lineage
    gc(history, store, pool, 0.0, 4)
    name = store.flip("-m00000003-from-root-p000")
    stores.lose_rows(history.root)
    store.due = "-m00000002-from-root-p000"
    made = Materializer(history.log, store, lambda _: open_dense(str(history.root)), pool)  # type: ignore[arg-type]
    catalog = Catalog.load(store, lineage.job)  # type: ignore[arg-type]
    assert made.repairer.mend(lineage, catalog, name, CorruptionError("flipped", name=name)).aside
    assert not store.due
    for marker in (3, 4, 5, 6):
        rows = stores.rows_of(store, lineage, MarkerId(1, marker))  # type: ignore[arg-type]
        assert rows == history.rows[MarkerId(1, marker)]
