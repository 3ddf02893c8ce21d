"""How a job has ended: what its trainer says last, who hears it, and what a kill in between leaves."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests import jobs, ranks, warm
from tests.inside import inside
from tests.model import PLAN_1, PLAN_2, Spec, Trainer, trainer
from tests.parts import FileLog, arm, fence_of
from torchrec_stream_ckpt import StreamCheckpointer, StreamConfig, Takeover
from torchrec_stream_ckpt.errors import (
    CommitUnknownError,
    ConfigError,
    JobFinishedError,
    MarkerFailedError,
    StreamCkptError,
)
from torchrec_stream_ckpt.format.control import Commit, parse_control
from torchrec_stream_ckpt.format.end_note import End
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.inner import Control
from torchrec_stream_ckpt.save import generation_end

pytestmark = pytest.mark.distributed

STEPS = 3


def lineage_of(folder: Path) -> Lineage:
    return Control(FileLog(folder)).refresh()


@contextlib.contextmanager
def running(job: Trainer, folder: Path, how: str) -> Iterator[StreamCheckpointer]:
    """A job of its own that has trained a little, and was not closed."""
    settings = StreamConfig(uri=f"file://{folder / how}", marker_every=2)
    checkpointer = StreamCheckpointer(job.dmp, job.optimizer, config=settings, stateful={"loader": job})
    for _ in range(STEPS):
        job.step()
        checkpointer.step()
    yield checkpointer
    checkpointer.close()


class Broken(Exception):  # noqa: N818
    pass


def by_itself(checkpointer: StreamCheckpointer) -> None:
    with checkpointer:
        checkpointer.mark().result(60)


def by_an_error(checkpointer: StreamCheckpointer) -> None:
    with checkpointer:
        raise Broken


def by_an_error_and_finally(checkpointer: StreamCheckpointer) -> None:
    try:
        raise Broken
    finally:
        checkpointer.close()


def by_an_error_of_rank_1(checkpointer: StreamCheckpointer) -> None:
    with checkpointer:
        if dist.get_rank() == 1:
            raise Broken


def by_hand(checkpointer: StreamCheckpointer) -> None:
    with checkpointer:
        raise KeyboardInterrupt


def by_exit(checkpointer: StreamCheckpointer) -> None:
    with checkpointer:
        raise SystemExit(0)


def by_exit_of_a_handler(checkpointer: StreamCheckpointer) -> None:
    with checkpointer:
        raise SystemExit(143)


def as_named(checkpointer: StreamCheckpointer) -> None:
    with pytest.raises(ConfigError, match=r"outcome 'done' is not valid"):
        checkpointer.close(outcome="done")
    checkpointer.mark().result(60)
    checkpointer.close(outcome="preempted")


def fenced(checkpointer: StreamCheckpointer) -> None:
    if dist.get_rank() == 0:
        control = inside(checkpointer).tier.control
        control.claim(fence_of(control.refresh(), "file:///job"))
    dist.barrier()
    checkpointer.close()


def by_rank_0_alone(checkpointer: StreamCheckpointer) -> None:
    before, generation_end.OTHERS_S = generation_end.OTHERS_S, 0.3
    if dist.get_rank() == 0:
        checkpointer.close()
    dist.barrier()
    generation_end.OTHERS_S = before


WAYS: dict[Callable[[StreamCheckpointer], None], tuple[str, str] | None] = {
    by_itself: ("finished", ""),
    by_an_error: ("failed", "Broken"),
    by_an_error_and_finally: ("failed", "Broken"),
    by_an_error_of_rank_1: ("failed", "rank 1: Broken"),
    by_hand: ("preempted", "KeyboardInterrupt"),
    by_exit: ("finished", ""),
    by_exit_of_a_handler: ("preempted", "SystemExit"),
    as_named: ("preempted", ""),
    fenced: None,
    by_rank_0_alone: None,
}


def _end_in_all_ways(folder: Path) -> list[str]:
    """Each job ends in its way; the errors that came out of it."""
    job, came = trainer(PLAN_2), []
    for way in WAYS:
        with running(job, folder, way.__name__) as checkpointer:
            try:
                way(checkpointer)
            except BaseException as error:  # what the user raised, and nothing in its place
                came.append(f"{way.__name__}: {type(error).__name__}")
    try:
        raise Broken
    except Broken:  # an error that was there before is not this job's end
        with running(job, folder, "after_an_error") as checkpointer:
            checkpointer.close()
    return came


def test_a_job_says_how_it_has_ended_after_its_last_marker(tmp_path: Path) -> None:
    came = ranks.run(2, _end_in_all_ways, tmp_path)
    all_ranks = [
        "by_an_error: Broken",
        "by_an_error_and_finally: Broken",
        "by_hand: KeyboardInterrupt",
        "by_exit: SystemExit",
        "by_exit_of_a_handler: SystemExit",
    ]
    assert came[0] == all_ranks
    assert came[1] == [*all_ranks[:2], "by_an_error_of_rank_1: Broken", *all_ranks[2:]]
    for way, expected in {
        **{way.__name__: said for way, said in WAYS.items()},
        "after_an_error": ("finished", ""),
    }.items():
        end = lineage_of(tmp_path / way).ended
        assert ((str(end.outcome), end.reason, end.step) if end else None) == (
            (*expected, STEPS) if expected else None
        ), way
        records = [parse_control(record) for _, record in FileLog(tmp_path / way).read_control()]
        if expected is not None:
            assert isinstance(records[-1], End)
            assert any(isinstance(record, Commit) for record in records)


def _end_at(folder: Path, point: str) -> None:
    arm(f"{point}=kill" if dist.get_rank() == 0 else "")
    with running(trainer(PLAN_2), folder, "log") as checkpointer:
        checkpointer.mark().result(60)
        checkpointer.close()


@pytest.mark.parametrize(("point", "ended"), [("end.append", False), ("end.appended", True)])
def test_a_kill_around_the_last_word_leaves_the_marker_and_a_job_that_goes_on(
    point: str, ended: bool, tmp_path: Path
) -> None:
    with pytest.raises(ranks.RankFailed, match="rank 0 died"):
        ranks.run(2, _end_at, tmp_path, point)
    before = lineage_of(tmp_path / "log")
    assert (before.newest is not None and before.newest.step, before.ended is not None) == (STEPS, ended)
    settings = StreamConfig(uri=f"file://{tmp_path / 'log'}")
    assert warm.run(1, jobs.restore_once, PLAN_1, settings, None, {})[0][1] == STEPS
    after = lineage_of(tmp_path / "log")
    assert after.newest_generation == 2  # the restored one: what was said of the first does not count any more
    assert after.ended is not None
    assert (after.ended.generation, set(after.ends) - {2}) == (2, {1} if ended else set())


def train_and_fail(settings: StreamConfig, told: Path) -> None:
    job = trainer(PLAN_2)
    with jobs.attach(job, settings) as checkpointer:
        checkpointer.restore()
        while not told.exists():
            job.step()
            checkpointer.step()
            jobs.settle(checkpointer)
            time.sleep(0.05)
            dist.barrier()
            if dist.get_rank() == 0 and (told.parent / "fail").exists():
                told.touch()
            dist.barrier()
        raise Broken


def stand_by(spec: Spec, settings: StreamConfig, folder: Path) -> Any:
    job = trainer(spec)
    checkpointer = jobs.attach(job, settings)

    def loading(load: Callable[[], Any]) -> Any:
        loaded = load()
        (folder / "fail").touch()
        return loaded

    inside(checkpointer).at_newest_rows(loading)
    with checkpointer:
        try:
            restored = checkpointer.standby(Takeover(after_s=600.0, poll_s=0.05))
        except JobFinishedError as error:
            return error.message
        job.step()
        checkpointer.step()
        checkpointer.mark().result(60)
        return restored.id if restored is not None else None


def test_a_spare_takes_over_at_once_from_a_trainer_that_failed_and_ends_with_a_finished_job(tmp_path: Path) -> None:
    settings = StreamConfig(uri=f"file://{tmp_path / 'log'}", marker_every=2)
    spare = ranks.start(2, stand_by, PLAN_2, settings, tmp_path)
    live = ranks.start(2, train_and_fail, settings, tmp_path / "told")
    try:
        with pytest.raises(ranks.RankFailed, match="Broken"):
            live.join()
        found = spare.join()
    finally:
        live.close()
        spare.close()
    lineage = lineage_of(tmp_path / "log")
    assert (lineage.ends[1].outcome, lineage.ends[3].outcome) == ("failed", "finished")
    assert set(found) == {lineage.newest_of(1)}
    said = ranks.run(2, stand_by, PLAN_2, settings, tmp_path)
    assert said == [f"the job has finished at step {lineage.ends[3].step}: there is nothing to take over"] * 2


# ``close()`` meets a marker inside COMMIT: the future says what the log says, and the call ends in time.


SLOW_S = 3.0


def close(folder: Path, where: str, timeout_s: float) -> tuple[float, str]:
    """Close while COMMIT is slow; how long that took, and what became of the marker."""
    job = trainer(PLAN_2)
    settings = StreamConfig(uri=f"file://{folder}", marker_every=None)
    ours = StreamCheckpointer(job.dmp, job.optimizer, config=settings)
    job.step()
    ours.step()
    if dist.get_rank() == 0:
        control = inside(ours).tier.control
        append = control._append

        def slow(frame: Any) -> Any:
            if where == "before":
                time.sleep(SLOW_S)
            found = append(frame)
            if where == "after":
                time.sleep(SLOW_S)
            return found

        control._append = slow  # type: ignore[method-assign, assignment]
    future = ours.mark()
    time.sleep(1)  # the commit thread is in COMMIT
    dist.barrier()
    began = time.monotonic()
    ours.close(timeout_s)
    took = time.monotonic() - began
    try:
        error = future.exception(30)
    except TimeoutError:
        return took, "never settles"
    time.sleep(SLOW_S)
    if error is None:
        return took, "committed"
    assert isinstance(error, StreamCkptError), error
    return took, f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("where", ["before", "after"])
def test_close_waits_for_the_outcome_within_its_bound(where: str, tmp_path: Path) -> None:
    for took, said in ranks.run(2, close, tmp_path, where, 60.0):
        assert said == "committed"
        assert took < 30
    assert Control(FileLog(tmp_path)).refresh().newest is not None


@pytest.mark.parametrize("where", ["before", "after"])
def test_a_close_that_gives_up_reports_no_marker_as_failed_that_is_there(where: str, tmp_path: Path) -> None:
    (_, first), (_, second) = ranks.run(2, close, tmp_path, where, 0.2)
    is_there = Control(FileLog(tmp_path)).refresh().newest is not None
    for said in (first, second):
        assert said != "never settles"
        if is_there:
            assert said == "committed" or said.startswith(CommitUnknownError.__name__), said
        else:
            assert said.startswith((MarkerFailedError.__name__, CommitUnknownError.__name__)), said
