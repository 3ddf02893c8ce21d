"""What maintains a log and its store is killed at each of its steps: the next one makes up for it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from tests import stores, tiered
from tests.builders import claim, commit
from tests.forks import command, status_of
from tests.parts import FileLog, GcRules, Retention, TierState, collect, file_writer
from tests.synthetic import image_of_log
from tests.tiered import TieredJob, relay
from tests.unit.copied_job import check, copied, copied_offsets, image, keep, offsets, recover, trainer
from tests.unit.gc_history import HOUR, branched, check_whole, gc, names, rules
from tests.unit.snapshot_log import grow, markers, shorten
from tests.unit.warm_head import Warm, counted_builds
from torchrec_stream_ckpt.inner import open_store
from torchrec_stream_ckpt.util.types import MarkerId

# A trainer between append and copy, and a recovery.


COPY_POINTS = ("copy.put", "copy.stored")
RECOVER_POINTS = ("recover.put", "recover.fence", "recover.copy")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A job of two generations and five markers, whose records are copied."""
    return copied(tmp_path)


@pytest.mark.parametrize("point", RECOVER_POINTS)
def test_a_recovery_that_was_killed_is_finished_by_the_next(root: Path, point: str) -> None:
    before = image(root)
    (root / "control.log").unlink()
    nth = 4 if point == "recover.put" else 1
    fuse = f"{point}=kill@{nth}"
    assert status_of(command, "recover", f"file://{root}", "--store", str(root), fuse=fuse) == -signal.SIGKILL
    found = recover(root)
    assert found["offered"][-1] == "2:3"
    assert image(root) == before
    check(root)


def _commit(root: Path) -> None:
    control = trainer(root)
    control.check_copy()
    for marker in range(4, 8):
        control.commit(commit(2, marker), 5.0, threading.Event())
        control.close()


@pytest.mark.parametrize("point", COPY_POINTS)
def test_a_kill_between_append_and_copy_leaves_a_copy_that_is_behind(root: Path, point: str) -> None:
    assert status_of(_commit, root, fuse=f"{point}=kill@2") == -signal.SIGKILL
    appended = offsets(root)
    copied = copied_offsets(root)
    assert copied == appended[: 8 if point == "copy.put" else 9]
    assert len(appended) == 9
    check(root)
    keep(root)
    assert copied_offsets(root) == appended


# gc is killed at each of its steps: kept markers are whole, and the next run finishes.


GC_POINTS = {"gc.dropped": 2, "gc.merged": 1, "gc.listed": 1, "gc.deleted": 3, "gc.tidied": 1, "read_back.saved": 1}
"""Where a gc is killed, and at which pass."""


@pytest.fixture(scope="module")
def pool() -> Iterator[Executor]:
    with ThreadPoolExecutor(2) as threads:
        yield threads


GIVEN = GcRules(retention=Retention(newest=1, then_every=4), compact=True)


def _collect(store: Path, job: bytes) -> None:
    with ThreadPoolExecutor(1) as pool:
        collect(open_store(str(store)), None, job, replace(GIVEN, grace_s=HOUR), pool, lambda: {"a host": 1e6})


@pytest.mark.parametrize(("point", "nth"), [*GC_POINTS.items(), ("gc.deleted", 1), ("gc.deleted", 9), ("store.put", 4)])
def test_a_kill_at_any_point_leaves_kept_markers_whole_and_the_next_run_finishes(
    point: str, nth: int, tmp_path: Path, pool: Executor
) -> None:
    history = branched(tmp_path)
    whole = names("1:4", "3:4", "4:6")
    if point in ("gc.tidied", "gc.deleted"):
        gc(history, GIVEN, pool, now_s=1e6 - HOUR)
    fired = tmp_path / "fired"
    status = status_of(_collect, tmp_path, history.lineage.job, fuse=f"{point}=kill@{nth}", report=fired)
    assert (status, fired.read_text()) == (-signal.SIGKILL, f"{point}\n")
    assert check_whole(history) >= whole
    gc(history, GIVEN, pool, now_s=1e6 + HOUR)
    gc(history, GIVEN, pool, now_s=1e6 + 2 * HOUR)
    assert check_whole(history) == whole
    final = stores.contents(history.objects)
    twin = branched(tmp_path / "twin")
    gc(twin, rules(newest=1, then_every=4, compact=True), pool, now_s=1e6 + HOUR)
    kinds = ("manifests/", "folds/", "segments/", "dense/", "garbage/")
    assert {name for name in final if name.startswith(kinds)} == {
        name for name in stores.contents(twin.objects) if name.startswith(kinds)
    }


# A HEAD's writer is killed: none is left, and the next one builds it anew.


HEAD_POINTS = ("head.dirty", "head.chunk", "head.clean")


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry each time that HEAD is built anew."""
    return counted_builds(monkeypatch)


@pytest.mark.parametrize("point", HEAD_POINTS)
def test_a_writer_that_is_killed_leaves_none_and_the_next_one_builds_it_anew(
    tmp_path: Path, pool: Executor, built: list[int], point: str
) -> None:
    warmed = Warm(tmp_path, pool)
    warmed.markers(1)
    warmed.follow()
    warmed.job.touch(8)
    warmed.job.commit()
    assert status_of(_follow, tmp_path, fuse=f"{point}=kill") == -signal.SIGKILL
    assert warmed.head() is None
    warmed.follow()
    warmed.check(MarkerId(1, 2))
    assert len(built) == 2


def _follow(folder: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        Warm(folder, pool).follow()


# The shortening of a control log is killed: it takes nothing, and the next one finishes.


@pytest.fixture
def log(tmp_path: Path) -> FileLog:
    made = FileLog(tmp_path / "log")
    made.prepare(1)
    made.append_control(claim(1).to_frame())
    return made


SHORTEN_POINTS = ("snapshot.append", "snapshot.written", "prune.begun", "prune.written", "prune.renamed")


@pytest.mark.parametrize("point", [*SHORTEN_POINTS, "control.written"])
def test_a_shortening_that_is_killed_takes_nothing_and_is_finished_by_the_next(log: FileLog, point: str) -> None:
    grow(log, 1, 3)
    shorten(log)
    grow(log, 4, 6)
    assert status_of(_shorten, log.uri.directory, fuse=f"{point}=kill") == -signal.SIGKILL
    assert markers(log) == [1, 2, 3, 4, 5, 6]
    grow(log, 7, 7)
    assert shorten(log) > 0
    assert markers(log) == [1, 2, 3, 4, 5, 6, 7]


def _shorten(folder: Path) -> None:
    shorten(FileLog(folder))


# A relay is killed at each of its steps: the next one finishes what it began.


RELAY_POINTS = ("relay.sent", "relay.dense", "relay.commit", "relay.committed")


@pytest.fixture
def job(tmp_path: Path) -> TieredJob:
    """Three markers on the inner tier, none on the outer one."""
    made = TieredJob(tmp_path / "inner", settings=tiered.config(tmp_path / "inner", tmp_path / "outer"))
    made.begin()
    made.markers(3)
    return made


@pytest.mark.parametrize("nth", [1, 2, 7])
@pytest.mark.parametrize("point", RELAY_POINTS)
def test_a_relay_that_is_killed_is_finished_by_the_next(
    job: TieredJob, point: str, nth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL at each step; segments of the outer log are small, so that some lie beyond what was committed."""
    passes = {"relay.dense": 6, "relay.commit": 3, "relay.committed": 3}.get(point, 99)
    status = status_of(_relay, job.settings.uris, fuse=f"{point}=kill@{nth}")
    assert status == (-signal.SIGKILL if nth <= passes else 0)
    monkeypatch.setattr(file_writer, "SEGMENT_BYTES", 9_000)
    there = list(TierState.read(job.tiers).outer.commits)
    copied = relay(job.tiers)
    assert [str(marker) for marker in there] + copied == ["1:1", "1:2", "1:3"]
    outer = TierState.read(job.tiers).outer
    for marker in outer.commits:
        assert image_of_log(job.tiers.outer.log, outer, marker) == job.truth(marker)


def _relay(uris: tuple[str, ...]) -> None:
    file_writer.SEGMENT_BYTES = 20_000
    command("relay", *uris, "--once")


POINTS = (*COPY_POINTS, *RECOVER_POINTS, *GC_POINTS, *HEAD_POINTS, *SHORTEN_POINTS, *RELAY_POINTS)
"""Where a process may die."""
