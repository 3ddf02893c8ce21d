"""Catching up costs the same for each marker, however many came before, and holds a bounded part of what it reads."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tests import synthetic
from tests.parts import FileLog, InProcess, Materializer, Policy, Site, open_dense
from tests.synthetic import Job
from tests.unit.folded_job import made_once
from tests.unit.test_fold import fold, lineage_of
from torchrec_stream_ckpt.format import commits
from torchrec_stream_ckpt.inner import Catalog, Control, open_store
from torchrec_stream_ckpt.maintain.engine import api
from torchrec_stream_ckpt.maintain.engine.api import Task
from torchrec_stream_ckpt.store import catalog
from torchrec_stream_ckpt.util.types import MarkerId

pytestmark = pytest.mark.usefixtures("no_syncs")

POLICIES = [Policy(rebase=0, compact="none"), Policy(), Policy(rebase=0, compact="span4"), Policy(compact="span2")]


def history(root: Path, markers: int) -> Job:
    return _history(markers)(root / "log")


@functools.cache
def _history(markers: int) -> Callable[[Path], Job]:
    return made_once(functools.partial(_write_history, markers=markers))


def _write_history(log: Path, markers: int) -> Job:
    job = Job(log, world=1)
    job.begin()
    for number in range(markers):
        job.touch(1)
        job.commit()
        if number == markers // 2:
            job.begin(MarkerId(job.generation, job.marker))
    return job


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_a_marker_that_follows_looks_at_its_own_piece_alone(
    tmp_path: Path, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = {"piece": 0, "strides": 0}
    for name in looks:
        method = getattr(Catalog, name)

        def counted(self: Catalog, *args: object, name: str = name, method: object = method) -> object:
            looks[name] += 1
            return method(self, *args)  # type: ignore[operator]

        monkeypatch.setattr(Catalog, name, counted)
    markers = 40
    job = history(tmp_path, markers)
    assert len(fold(job, open_store(str(tmp_path / "store")), policy)) == markers
    assert looks["piece"] <= markers
    assert looks["strides"] <= 1, "once, for the first marker"


@pytest.mark.parametrize("policy", POLICIES[1:], ids=str)
def test_a_materializer_that_starts_again_writes_what_one_alone_would_have(tmp_path: Path, policy: Policy) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    folds = []
    for root, stops in ((whole, ()), (cut, (3, 7, 8, 20))):
        job = Job(root / "log", world=1)
        job.begin()
        for number in range(24):
            job.touch(1)
            job.commit()
            if number in stops:
                fold(job, open_store(str(root / "store")), policy)
        fold(job, open_store(str(root / "store")), policy)
        folds.append(Catalog.load(open_store(str(root / "store")), synthetic.JOB).folds)
    assert folds[0] == folds[1] != frozenset()


def test_spans_of_another_radix_go_on_where_others_ended(tmp_path: Path) -> None:
    job, objects = Job(tmp_path / "log", world=1), open_store(str(tmp_path / "store"))
    job.begin()
    for compact in ("span16", "span4", "span8", "span2"):
        for _ in range(20):
            job.touch(1)
            job.commit()
        fold(job, objects, Policy(rebase=0, compact=compact))  # type: ignore[arg-type]
        lineage = lineage_of(job)
        newest = max(lineage.commits)
        assert synthetic.image_of_store(objects, lineage, newest) == synthetic.image_of_log(job.log, lineage, newest)
    found = Catalog.load(objects, synthetic.JOB)
    lengths = {end.marker - start.marker for start, end in found.folds if start is not None}
    assert {16, 4, 8, 2} <= lengths
    assert len(found.cover(lineage.chain(newest))) < 12


def test_no_span_crosses_a_base(tmp_path: Path) -> None:
    job, objects = history(tmp_path, 40), open_store(str(tmp_path / "store"))
    fold(job, objects, Policy(rebase=0.8, compact="span4"))
    lineage, found = lineage_of(job), Catalog.load(objects, synthetic.JOB)
    places = {commit.id: place for place, commit in enumerate(lineage.chain(max(lineage.commits)))}
    bases = [places[end] for start, end in found.folds if start is None]
    spans = [(places[start], places[end]) for start, end in found.folds if start is not None]
    assert bases
    assert spans
    assert not [(base, span) for base in bases for span in spans if span[0] < base < span[1]]


def test_what_was_read_of_many_manifests_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "MOST_REFS", 10)
    job, objects = history(tmp_path, 30), open_store(str(tmp_path / "store"))
    fold(job, objects, Policy(rebase=0, compact="none"))
    lineage, found = lineage_of(job), Catalog.load(objects, synthetic.JOB)
    chain = lineage.chain(max(lineage.commits))
    for _ in range(2):
        assert len(found.cover(chain)) == 30
        assert len(found.kept) <= 10


def work_of(act: Callable[[], object]) -> int:
    """How many functions were called, and how many times a line of code was gone through again in a loop."""
    calls, backwards, last = 0, 0, dict[object, int]()

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal calls, backwards
        if event == "call":
            calls += 1
        elif event == "line":
            backwards += frame.f_lineno <= last.get(frame, 0)
            last[frame] = frame.f_lineno
        elif event == "return":
            last.pop(frame, None)
        return trace

    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(None)
    return calls + backwards


@pytest.mark.parametrize("policy", [Policy(rebase=0, compact="none"), Policy()], ids=str)
def test_the_work_of_a_marker_does_not_grow_with_those_that_came_before(tmp_path: Path, policy: Policy) -> None:
    """Counted: calls of functions, and rounds of loops, of each marker that a catch-up puts."""
    job, objects = history(tmp_path, 72), open_store(str(tmp_path / "store"))
    lineage, found = lineage_of(job), []
    with ThreadPoolExecutor(1) as pool:
        steps = Materializer(job.log, objects, lambda _: open_dense(str(job.root)), pool, policy).catch_up(lineage)
        while True:
            marker: list[MarkerId] = []
            work = work_of(lambda marker=marker: marker.extend(islice(steps, 1)))
            if not marker:
                break
            found.append(work)
    early, late = sorted(found[16:32]), sorted(found[48:64])
    assert late[len(late) // 2] <= 1.05 * early[len(early) // 2]


def test_a_round_that_brings_one_marker_opens_one_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, objects = history(tmp_path, 40), open_store(str(tmp_path / "store"))
    opened = []
    whole = commits.open_commit
    monkeypatch.setattr(commits, "open_commit", lambda frame: opened.append(frame) or whole(frame))
    with ThreadPoolExecutor(1) as pool:
        materializer = Materializer(
            job.log, objects, lambda _: open_dense(str(job.root)), pool, Policy(rebase=0, compact="none")
        )
        control = Control(job.log)
        assert len(list(materializer.catch_up(control.refresh()))) == 40
        for _ in range(3):
            job.touch(1)
            job.commit()
            opened.clear()
            assert len(list(materializer.catch_up(control.refresh()))) == 1
            assert len(opened) <= 1


def test_what_a_new_process_opens_of_a_long_job_is_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, objects = history(tmp_path, 40), open_store(str(tmp_path / "store"))
    fold(job, objects, Policy(rebase=0, compact="none"))
    job.touch(1)
    job.commit()
    lineage, opened = lineage_of(job), []
    whole = commits.open_commit
    monkeypatch.setattr(commits, "open_commit", lambda frame: opened.append(frame) or whole(frame))
    with ThreadPoolExecutor(1) as pool:
        policy = Policy(rebase=0, compact="none")
        materializer = Materializer(job.log, objects, lambda _: open_dense(str(job.root)), pool, policy)
        assert len(list(materializer.catch_up(lineage))) == 1
    assert len(opened) <= 3, "the missing one, the one before it, and no more than that"


def test_markers_of_a_lineage_that_grows_are_those_of_one_that_is_read_anew(tmp_path: Path) -> None:
    job = history(tmp_path, 12)
    control = Control(job.log)
    for number in range(6):
        lineage = control.refresh()
        for marker in lineage_of(job).commits:
            assert lineage.previous(marker) == lineage_of(job).previous(marker)
        if number == 2:
            job.begin(MarkerId(job.generation, job.marker))
        job.touch(1)
        job.commit()


# The work of a catch-up grows with its markers, and few of them are begun before the one that is due is whole.


class TwoWorkers(InProcess):
    """Two workers as their driver sees them: small tasks run in it, and a large one runs while it waits.

    Args:
        site: What tasks work with.
    """

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self.workers = 2
        self.begun: list[int] = []
        """How many tasks were submitted when each marker was whole."""
        self.submitted = 0

    def submit(self, task: Task[Any], *, urgent: bool = False) -> Future[Any]:
        self.submitted += 1
        return super().submit(task, urgent=urgent)


def caught_up(root: Path, markers: int) -> TwoWorkers:
    job = history(root, markers)
    made: list[TwoWorkers] = []

    def engine(site: Site) -> TwoWorkers:
        made.append(TwoWorkers(site))
        return made[0]

    with ThreadPoolExecutor(2) as pool:
        objects, dense = open_store(str(root / "store")), open_dense(str(job.root))
        policy = Policy(rebase=0, compact="none")
        materializer = Materializer(FileLog(job.root), objects, lambda _: dense, pool, policy, engine)
        for _ in materializer.catch_up(lineage_of(job)):
            made[0].begun.append(made[0].submitted)
    assert len(made[0].begun) == markers
    return made[0]


def test_the_futures_that_are_asked_grow_with_the_markers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 0
    done = Future.done

    def counted(self: Future[Any]) -> bool:
        nonlocal asked
        asked += 1
        return done(self)

    monkeypatch.setattr(Future, "done", counted)
    counts = []
    for markers in (10, 20):
        asked = 0
        caught_up(tmp_path / str(markers), markers)
        counts.append(asked)
    assert counts[0] < counts[1] <= 2 * counts[0] + 2


@pytest.mark.parametrize(("small_bytes", "ahead"), [(api.SMALL_BYTES, 0), (0, 4)], ids=["small", "large"])
def test_a_manifest_waits_for_few_of_the_markers_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_bytes: int, ahead: int
) -> None:
    """Small markers wait for their turn; of large ones, two a worker are begun."""
    monkeypatch.setattr(api, "SMALL_BYTES", small_bytes)
    begun = caught_up(tmp_path, 20).begun
    assert max(count - place for place, count in enumerate(begun, 1)) == ahead
