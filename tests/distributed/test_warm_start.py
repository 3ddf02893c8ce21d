"""A job that begins in a marker of another job: all that it holds comes bit for bit, and the other job is only read."""

from __future__ import annotations

import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests import ranks, stores, tiered, warm, zoo
from tests.command import call
from tests.distributed.test_changed_model_faults import (
    ALONE,
    CHANGES,
    EVENTS,
    NEW,
    OLD,
    THREE,
    TWO,
    check,
    tree,
)
from tests.evolving import Origin, State, Step, expected
from tests.laps import config
from tests.model import differences
from tests.parts import FileLog, failpoints, fence_of
from tests.ranks import RankFailed
from tests.zoo import MARK, Marks
from tests.zoo_models import Model, Place, Plan
from torchrec_stream_ckpt import Changes, RowChange, Source, StreamConfig, planner_constraints
from torchrec_stream_ckpt.errors import StreamCkptError
from torchrec_stream_ckpt.inner import Control
from torchrec_stream_ckpt.util.layout import dense_name
from torchrec_stream_ckpt.util.types import MarkerId, Restored

pytestmark = pytest.mark.distributed

ELSEWHERE = Plan(3, 1, (Place("tw", (2,)), Place("rw"), Place("rw")))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Marks]]:
    directory = tmp_path_factory.mktemp("trained") / "log"
    return directory, warm.run(2, zoo.start, OLD, TWO, config(directory), EVENTS)


def begun(
    model: Model, plan: Plan, settings: StreamConfig, source: Source | str, changes: Changes | None, events: Any = ()
) -> tuple[State, State, Marks, Restored]:
    """What a job held before and after a warm start, and at the markers that it sets from there on."""
    job = zoo.build(model, plan)
    job.step = 900
    zoo.train(job)
    before = zoo.truth(job)
    with zoo.attach(job, settings) as checkpointer:
        found = checkpointer.warm_start(source, changes=changes)
        after = zoo.truth(job)
        zoo.play(job, checkpointer, events)
    return before, after, job.marks, found


def same(marks: list[Marks], marker: str, said: list[Any]) -> None:
    for rank, (_, after, *_) in enumerate(said):
        there = marks[min(rank, len(marks) - 1)][marker]
        assert differences(there, after, rng=rank < len(marks)) == []


@pytest.mark.parametrize(("world", "plan", "place"), [(1, ALONE, "log"), (3, ELSEWHERE, "store")])
def test_all_of_the_other_jobs_marker_comes_and_the_first_own_marker_is_whole(
    place: str, world: int, plan: Plan, trained: tuple[Path, list[Marks]], tmp_path: Path
) -> None:
    source = shutil.copytree(trained[0], tmp_path / "other")
    if place == "store":
        stores.fold(source)
        stores.lose_rows(source)
    there, settings = tree(source), config(tmp_path / "log")
    said = warm.run(world, begun, OLD, plan, settings, f"file://{source}@1:1", None, EVENTS)
    same(trained[1], "1:1", said)
    found = said[0][3]
    assert (str(found.id), found.step, found.world, found.origin) == ("1:1", 1, 2, f"file://{source}")
    assert found.source == ("log" if place == "log" else "store 1:1")
    assert tree(source) == there, "the other job is only read"
    shutil.rmtree(source)
    marks = said[0][2]
    assert {marker: int(state["step"]) for marker, state in marks.items()} == {"1:1": 2, "1:2": 3}
    for marker in marks:
        (state, _), *_ = warm.run(1, zoo.resume, OLD, ALONE, settings, marker, ())
        assert differences(marks[marker], state) == []
    if place == "store":
        stores.fold(tmp_path / "log")
        stores.lose_rows(tmp_path / "log")
        (state, _), *_ = warm.run(2, zoo.resume, OLD, TWO, settings, None, ())
        assert differences(marks["1:2"], state) == []


def test_a_changed_model_begins_in_another_job_and_goes_on_from_its_own_markers(
    trained: tuple[Path, list[Marks]], tmp_path: Path
) -> None:
    """By the same call each time: the other job may be gone then, and no change is made twice."""
    source = shutil.copytree(trained[0], tmp_path / "other")
    settings = config(tmp_path / "log")
    said = warm.run(3, begun, NEW, THREE, settings, f"file://{source}", CHANGES, EVENTS)
    check(trained[1], said, "1:2")
    claim = Control(FileLog(tmp_path / "log")).refresh().claims[1]
    theirs = Control(FileLog(source)).refresh().job.hex()
    assert claim.changes is not None
    assert (claim.parent, claim.swept, claim.changes.digest) == (None, (0, 1, 2), CHANGES.digest)
    assert claim.changes.origin == f"{theirs} 1:2"
    shutil.rmtree(source)
    again = warm.run(1, begun, NEW, ALONE, settings, f"file://{source}", CHANGES, ("train", MARK))
    assert differences(said[0][2]["1:2"], again[0][1]) == []
    assert (str(again[0][3].id), again[0][3].origin, again[0][3].evolved) == ("1:2", None, None)
    uri = f"file://{tmp_path}/log"
    shown, listed = (call(*words, uri) for words in (["show"], ["list", "--tree"]))
    assert f"generation 1 began in marker 1:2 of job {theirs}, by declared changes" in shown.output, shown.output
    assert f"started from marker 1:2 of job {theirs}" in "".join(listed.output.split("\n")), listed.output


def broken(settings: StreamConfig, source: str, fuse: str, where: int, report: Path) -> None:
    """A warm start in which one rank is killed."""
    job = zoo.build(NEW, TWO)
    with zoo.attach(job, settings, paranoid=False) as checkpointer:
        if dist.get_rank() == where:
            failpoints.arm(fuse, report)
        checkpointer.warm_start(source, changes=CHANGES)
        zoo.play(job, checkpointer, ("train", MARK))


@pytest.mark.parametrize(
    ("point", "where"),
    [("restore.frame", 1), ("restore.dense", 0), ("claim.appended", 0), ("hello.submitted", 1), ("sweep.sent", 1)],
)
def test_what_is_killed_before_the_first_own_marker_begins_again(
    trained: tuple[Path, list[Marks]], point: str, where: int, tmp_path: Path
) -> None:
    settings, report = config(tmp_path / "log", sweep_bytes=2**10), tmp_path / "fired"
    with pytest.raises(RankFailed):
        ranks.run(2, broken, settings, f"file://{trained[0]}", f"{point}=kill", where, report, timeout_s=60)
    assert report.read_text().split() == [point]
    if point.startswith("restore"):
        assert not (tmp_path / "log").exists(), "nothing is written before all is loaded"
    said = warm.run(3, begun, NEW, THREE, settings, f"file://{trained[0]}", CHANGES, EVENTS)
    check(trained[1], said, "1:2")
    newest = max(said[0][2])
    (state, _), *_ = warm.run(1, zoo.resume, NEW, ALONE, settings, newest, ())
    assert differences(said[0][2][newest], state) == []


def plain(settings: StreamConfig, plan: Plan, changes: Changes | None, call: str) -> str:
    """A job that forgets the warm start, and maybe the restore."""
    job = zoo.build(NEW, plan)
    try:
        with zoo.attach(job, settings, paranoid=False) as checkpointer:
            if call == "restore":
                assert checkpointer.restore(changes=changes) is None
            zoo.play(job, checkpointer, ("train", MARK))
    except StreamCkptError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_without_the_warm_start_that_was_broken_off_nothing_begins_from_nothing(
    trained: tuple[Path, list[Marks]], tmp_path: Path
) -> None:
    settings, source = config(tmp_path / "log"), f"file://{trained[0]}"
    warm.run(2, begun, NEW, TWO, settings, source, CHANGES)
    log = Control(FileLog(tmp_path / "log"))
    log.claim(fence_of(log.refresh(), settings.uris[0]))
    before, theirs = tree(tmp_path / "log"), Control(FileLog(trained[0])).refresh().job.hex()
    for verb, changes in (("restore", None), ("restore", CHANGES), ("none", None)):
        for said in warm.run(2, plain, settings, TWO, changes, verb):
            assert f"MarkerNotFoundError: a warm start from marker 1:2 of job {theirs} has begun in this log" in said
            assert f"uri=file://{tmp_path}/log, generation=1]" in said
            assert "Try: pass the same warm_start(...) again" in said
            assert "fresh=True" in said
    assert tree(tmp_path / "log") == before
    shutil.copytree(tmp_path / "log", tmp_path / "fresh")
    said = warm.run(1, begun, NEW, ALONE, settings, source, CHANGES, ("train", MARK))
    check(trained[1], said, "1:2")
    assert warm.run(1, plain, config(tmp_path / "fresh", fresh=True), ALONE, None, "restore") == [""]
    assert str(Control(FileLog(tmp_path / "fresh")).refresh().commits.newest) == "3:1"


def test_a_wrong_size_is_corrected_before_the_first_own_marker(
    trained: tuple[Path, list[Marks]], tmp_path: Path
) -> None:
    """As it is after a restore that was broken off: a log without a marker binds the next warm start to no table."""
    settings, (directory, marks) = config(tmp_path / "log"), trained
    wrong, right = (resized(OLD, "t1", rows) for rows in (50, 45))
    warm.run(1, begun, wrong, ALONE, settings, f"file://{directory}", Changes(rows={"part0.t1": RowChange(50)}), ())
    declared = Changes(rows={"part0.t1": RowChange(45)})
    said = warm.run(1, begun, right, ALONE, settings, f"file://{directory}", declared, ("train", MARK))
    before, after, mine, _ = said[0]
    origins = {each.name: Origin(each.name, each, None) for each in OLD.parts[0].tables}
    step = Step(right, (1, 1, 1), origins, declared, OLD)
    assert differences(expected(step, before, marks[0]["1:2"]), after, rng=False) == []
    stores.fold(tmp_path / "log")
    stores.lose_rows(tmp_path / "log")
    (state, _), *_ = warm.run(1, zoo.resume, right, ALONE, settings, "2:1", ())
    assert differences(mine["2:1"], state) == []


def resized(model: Model, name: str, rows: int) -> Model:
    (part,) = model.parts
    tables = tuple(replace(each, rows=rows) if each.name == name else each for each in part.tables)
    return replace(model, parts=(replace(part, tables=tables),))


def refused(settings: StreamConfig, source: Source | str, changes: Changes | None = None) -> str:
    with zoo.attach(zoo.build(OLD, TWO), settings, paranoid=False) as checkpointer:
        try:
            checkpointer.warm_start(source, changes=changes)
        except StreamCkptError as error:
            return f"{type(error).__name__}: {error}"
    return ""


def test_wrong_sources_are_refused_on_all_ranks_and_nothing_is_written(
    trained: tuple[Path, list[Marks]], tmp_path: Path
) -> None:
    log, own = tmp_path / "log", f"file://{tmp_path}/own"
    (tmp_path / "link").symlink_to(trained[0])
    for name in ("damaged", "lost"):
        shutil.copytree(trained[0], tmp_path / name)
    stores.fold(tmp_path / "lost")
    stores.lose_log(tmp_path / "lost")
    for path in (tmp_path / "damaged" / "data").rglob("*.seg*"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    before = tree(tmp_path)
    for source, message in (
        (f"file://{tmp_path}/none", "MarkerNotFoundError: the source of a warm start has no committed marker"),
        (f"file://{tmp_path}/none@1:1", "MarkerNotFoundError: there is no log"),
        (f"file://{trained[0]}@1:7", "MarkerNotFoundError: marker 1:7 is not committed"),
        (f"file://{tmp_path}/damaged@1:2", "CorruptionError"),
        (f"file://{tmp_path}/lost", "stream-ckpt recover"),
        (Source(f"file://{trained[0]}", store=f"file://{tmp_path}/none"), "dense state is missing"),
        ("ftp://host/log", "ConfigError: 'ftp://host/log' is not a known kind of log"),
    ):
        said = warm.run(2, refused, config(log), source)
        assert all(message in each for each in said), (source, said)
        assert not log.exists()
    assert tree(tmp_path) == before
    key = tmp_path / "key"
    key.write_bytes(bytes(range(32)))
    key.chmod(0o600)
    for said in warm.run(2, refused, config(log, commit_key_file=key), f"file://{trained[0]}"):
        assert "is signed with this commit key" in said
    for source in (own, f"file://{tmp_path}/./own", f"file://{tmp_path}/own@1:1"):
        said = warm.run(2, refused, StreamConfig(uri=own), source)
        assert all("is this job's own log" in each for each in said), said
    said = warm.run(2, refused, config(tmp_path / "link"), f"file://{trained[0]}")
    assert all("is this job's own log" in each for each in said), said


def test_a_job_with_markers_of_its_own_begins_in_no_other_one(
    trained: tuple[Path, list[Marks]], tmp_path: Path
) -> None:
    mine = shutil.copytree(trained[0], tmp_path / "mine")
    before = tree(mine)
    for said in warm.run(2, refused, config(mine), f"file://{tmp_path}/another"):
        assert "did not start from another job, and has its own markers, up to 1:2" in said
    assert tree(mine) == before
    settings = config(tmp_path / "log")
    warm.run(2, begun, OLD, TWO, settings, f"file://{trained[0]}@1:1", None, EVENTS)
    for said in warm.run(2, refused, settings, f"file://{trained[0]}@1:2"):
        assert "this job started from marker 1:1 of job" in said
        assert "not from 1:2, and has its own markers, up to 1:2" in said


def test_a_job_of_two_tiers_begins_in_another_job(trained: tuple[Path, list[Marks]], tmp_path: Path) -> None:
    settings = tiered.config(tmp_path / "inner", tmp_path / "outer", marker_every=None)
    said = warm.run(2, begun, OLD, TWO, settings, f"file://{trained[0]}", None, EVENTS)
    same(trained[1], "1:2", said)
    shutil.rmtree(tmp_path / "inner")
    again = warm.run(1, begun, OLD, ALONE, settings, f"file://{trained[0]}", None)
    assert (str(again[0][3].id), again[0][3].origin) == ("1:2", None)
    assert differences(said[0][2]["1:2"], again[0][1]) == []


def trained_on_tiers(settings: StreamConfig, copies: Path) -> Marks:
    """Both tiers as they stand when the outer one has marker 1:2, and the inner one 1:3 as well."""
    job = zoo.build(OLD, TWO)
    with zoo.attach(job, settings) as checkpointer:
        zoo.play(job, checkpointer, ("train", MARK) * 3)
        if dist.get_rank() == 0:
            outer, deadline = Control(FileLog(copies.parent / "outer")), time.monotonic() + 60
            while (newest := outer.refresh().newest) is None or str(newest.id) != "1:2":
                assert time.monotonic() < deadline
                time.sleep(0.05)
            for name in ("inner", "outer"):
                shutil.copytree(copies.parent / name, copies / name)
        dist.barrier()
    return job.marks


def test_a_job_begins_in_the_nearest_tier_of_another_job_that_has_the_marker(tmp_path: Path) -> None:
    """The newest marker may be one that only the inner tier has; what is damaged or gone there comes from the outer."""
    copies = tmp_path / "copies"
    settings = tiered.config(tmp_path / "inner", tmp_path / "outer", 2, marker_every=None)
    marks = ranks.run(2, trained_on_tiers, settings, copies)
    inner, outer = f"file://{copies}/inner", f"file://{copies}/outer"
    both, there = Source((inner, outer)), tree(copies)
    constraints = planner_constraints(f"file://{tmp_path}/none", source=both)
    assert sorted(constraints) == ["t0", "t1", "t2"]
    for number, (source, marker, place) in enumerate(
        ((both, "1:3", "inner: log"), (Source(outer), "1:2", "log"), (replace(both, marker="1:1"), "1:1", "inner: log"))
    ):
        said = warm.run(1, begun, OLD, ALONE, config(tmp_path / f"log{number}"), source, None)
        same(marks, marker, said)
        found = said[0][3]
        assert (str(found.id), found.source, found.origin) == (marker, place, source.name)
    assert tree(copies) == there, "the other job is only read"
    job = Control(FileLog(copies / "inner")).refresh().job
    (copies / "inner" / dense_name(job, MarkerId(1, 2)) / ".metadata").write_bytes(b"damaged")
    said = warm.run(2, begun, OLD, TWO, config(tmp_path / "log3"), replace(both, marker="1:2"), None)
    same(marks, "1:2", said)
    assert said[0][3].source == "outer: log"
    shutil.rmtree(copies / "inner")
    said = warm.run(2, begun, OLD, TWO, config(tmp_path / "log4"), both, None, ("train", MARK))
    same(marks, "1:2", said)
    claim = Control(FileLog(tmp_path / "log4")).refresh().claims[1]
    assert claim.changes is not None
    assert claim.changes.origin == f"{job.hex()} 1:2"
    for uri in (outer, inner):
        said = warm.run(2, refused, StreamConfig(uri=uri), both)
        assert all("is this job's own log" in each for each in said), said


def test_an_object_of_the_user_may_begin_anew(trained: tuple[Path, list[Marks]], tmp_path: Path) -> None:
    """As the position of a loader, which means nothing in the data of another job."""
    changes = Changes(stateful_added=("loader",), stateful_dropped=("loader",))
    for times in range(2):
        said = warm.run(2, begun, OLD, TWO, config(tmp_path / "log"), f"file://{trained[0]}", changes, ("train", MARK))
        assert int(said[0][1]["step"]) == (900, 901)[times], "the loader that the job came with, then its own"
    first = warm.run(2, begun, OLD, TWO, config(tmp_path / "log2"), f"file://{trained[0]}", changes)
    assert differences({**trained[1][0]["1:2"], "step": first[0][1]["step"]}, first[0][1]) == []
