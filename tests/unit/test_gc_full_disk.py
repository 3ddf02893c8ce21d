"""gc on a disk that is full: it deletes what is due, though it has no room for its own records."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from pathlib import Path

import pytest

from tests import stores
from tests.parts import FolderObjects, collect
from tests.unit.gc_history import ALWAYS, HOUR, check_whole, gc, names, offered, plain, rules
from torchrec_stream_ckpt.errors import StoreUnavailableError
from torchrec_stream_ckpt.format.frame import Buffer
from torchrec_stream_ckpt.maintain.gc.gc_delete import delete_all
from torchrec_stream_ckpt.maintain.gc.retention import GcPlan
from torchrec_stream_ckpt.util.layout import parse_fold_segment

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


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_what_is_due_makes_room_for_the_next_run(number: int, tmp_path: Path, pool: Executor) -> None:
    history = plain(tmp_path)
    due = {entry.name for entry in gc(history, RULES, pool, now_s=1e6).later}
    history.generation(2, [7, 8], "1:6")
    stores.fold(tmp_path)
    small = Small(tmp_path)
    small.number = number
    with pytest.raises(StoreUnavailableError, match=f"no room for its records: .*{os.strerror(number)}") as told:
        run(history, small, pool)
    assert f"{len(due)} objects that were due are deleted" in told.value.message
    assert told.value.hint.startswith("run gc again")
    assert due
    assert not due & stores.contents(history.objects).keys()
    assert check_whole(history) == names("1:4", "1:5", "1:6", "2:7", "2:8")
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
    history = plain(tmp_path)
    due = {entry.name for entry in gc(history, RULES, pool, now_s=1e6).later}
    history.generation(2, [7, 8], "1:6")
    stores.fold(tmp_path)
    small = Small(tmp_path)
    small.number = errno.EIO
    with pytest.raises(StoreUnavailableError, match=r"cannot write it: Input/output error"):
        run(history, small, pool)
    assert due <= stores.contents(history.objects).keys()
    assert offered(history) == names("1:4", "1:5", "1:6", "2:7", "2:8")


def test_what_is_due_goes_though_others_take_the_room(tmp_path: Path, pool: Executor) -> None:
    history = plain(tmp_path)
    due = {entry.name for entry in gc(history, RULES, pool, now_s=1e6).later}
    history.generation(2, [7, 8], "1:6")
    stores.fold(tmp_path)
    with pytest.raises(StoreUnavailableError, match="gc has no room for its records") as told:
        run(history, Crowded(tmp_path), pool)
    assert f"{len(due)} objects that were due are deleted" in told.value.message
    assert told.value.hint.endswith("unless others have taken it")
    assert due
    assert not due & stores.contents(history.objects).keys()
    assert check_whole(history) == names("1:4", "1:5", "1:6", "2:7", "2:8")


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
