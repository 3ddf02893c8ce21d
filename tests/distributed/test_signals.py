"""SIGTERM and SIGUSR1 on real ranks: each leads to a marker of the step that it says, or to a word why not."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import jobs, ranks, warm
from tests.inside import inside
from tests.model import PLAN_2, Trainer, differences, trainer, truth
from tests.parts import FileLog
from torchrec_stream_ckpt import StreamCheckpointer, StreamConfig
from torchrec_stream_ckpt.format.dense_files import DenseFile
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.inner import Control
from torchrec_stream_ckpt.save import stop_requests

pytestmark = pytest.mark.distributed

Truth = dict[str, torch.Tensor]
STOP, MARK = signal.SIGTERM, signal.SIGUSR1
STEPS_AT_MOST = 3000
HANG_S = 240.0
"""Against a hang alone: nothing rests on it."""


def lineage_of(folder: Path) -> Lineage:
    return Control(FileLog(folder)).refresh()


class Said(logging.Handler):
    """What the library says of signals on this rank."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "SIG" in (line := record.getMessage()):
            self.lines.append(line)

    def __enter__(self) -> Said:
        logging.getLogger("torchrec_stream_ckpt").addHandler(self)
        logging.getLogger("torchrec_stream_ckpt").setLevel(logging.INFO)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("torchrec_stream_ckpt").removeHandler(self)


def send(number: int) -> None:
    os.kill(os.getpid(), number)


def attach(job: Trainer, folder: Path, **settings: Any) -> StreamCheckpointer:
    config = StreamConfig(uri=f"file://{folder}", **{"marker_every": None, "on_signal": "mark", **settings})
    return StreamCheckpointer(job.dmp, job.optimizer, config=config, stateful={"loader": job})


@contextlib.contextmanager
def watching(checkpointer: StreamCheckpointer, job: Trainer) -> Iterator[tuple[dict[str, Truth], dict[str, float]]]:
    """The truth at each marker that a step cuts, and when that was."""
    truths: dict[str, Truth] = {}
    times: dict[str, float] = {}
    step = checkpointer.step

    def watched() -> None:
        before = inside(checkpointer).next_marker
        step()
        for number in range(before, inside(checkpointer).next_marker):
            times[name := f"{checkpointer.generation}:{number}"] = time.monotonic()
            truths[name] = truth(job)

    checkpointer.step = watched  # type: ignore[assignment, method-assign]
    yield truths, times
    del checkpointer.step


def _ended(folder: Path, seed: int, rounds: int) -> list[tuple[str, int, list[str], Truth]]:
    """Each round restores, and is told to stop at a moment of its own, on one rank or both."""
    rank, draw, found = dist.get_rank(), random.Random(seed), []
    for number in range(rounds):
        who, delays = draw.choice([(0,), (1,), (0, 1)]), [1.5 * draw.random() ** 2 for _ in range(2)]
        settings = {"marker_every": draw.choice([None, 1, 7]), "sweep_bytes": draw.choice([3_000, 2**24])}
        job = trainer(PLAN_2)
        with Said() as said, attach(job, folder, **settings) as checkpointer:
            timer = threading.Timer(delays[rank], send, [STOP])
            if rank in who:
                timer.start()
            checkpointer.restore()
            with watching(checkpointer, job) as (truths, _):
                while not checkpointer.should_stop:
                    job.step()
                    checkpointer.step()
                    assert checkpointer.steps < STEPS_AT_MOST
            timer.cancel()
            if rank in who:
                timer.join()  # one that has begun sends its signal while the handler is there
            marker = checkpointer.mark().result(60)  # that of the signal: this boundary has one
        found.append((str(marker.id), marker.step, said.lines, truths.get(str(marker.id), {})))
        dist.barrier()  # rank 0 writes END once the other one has said its word
        ended = lineage_of(folder).ended
        assert ended is not None
        assert (ended.outcome, ended.reason.split()[-1], ended.step) == ("preempted", "SIGTERM", marker.step), number
        dist.barrier()
    return found


def _check_ends(folder: Path, seed: int, rounds: int, restored: int) -> None:
    found = ranks.run(2, _ended, folder, seed, rounds, timeout_s=1200)
    commits = {str(marker): commit for marker, commit in lineage_of(folder).commits.items()}
    assert len({marker for marker, *_ in found[0]}) == rounds
    for of_rank in found:
        for marker, step, lines, _ in of_rank:
            told = f"SIGTERM produced marker {marker} of step {step}; the job should stop"
            assert [line for line in lines if "SIGTERM produced" in line] == [told]
            assert commits[marker].step == step
    for number in range(0, rounds, max(1, rounds // restored)):
        marker = found[0][number][0]
        back = warm.run(2, jobs.restore_once, PLAN_2, StreamConfig(uri=f"file://{folder}"), marker, {})
        for rank in range(2):
            assert differences(found[rank][number][3], back[rank][0]) == [], marker


def test_a_job_that_is_told_to_stop_at_any_moment_leaves_a_marker_of_its_last_step(tmp_path: Path) -> None:
    _check_ends(tmp_path, 1, 6, 2)


@pytest.mark.slow
def test_fifty_jobs_that_are_told_to_stop_at_any_moment_leave_a_marker_each(tmp_path: Path) -> None:
    _check_ends(tmp_path, 2, 50, 5)


def _marked(folder: Path, seed: int, times: int) -> tuple[list[float], dict[str, float], dict[str, Truth], list[str]]:
    """When this rank was signalled, what was cut when, and what was said."""
    draw, job, sent = random.Random(seed + dist.get_rank()), trainer(PLAN_2), []
    both, first = random.Random(seed), threading.Event()

    def signals() -> None:
        for number in range(times):
            if number == times // 2:  # however slow the machine: some come after the first marker was cut
                first.wait(HANG_S)
            time.sleep(0.3 * draw.random() ** 2)
            if dist.get_rank() == both.randrange(3) % 2:  # this rank, or the other one
                sent.append(time.monotonic())
                send(MARK)

    with Said() as said, attach(job, folder, sweep_bytes=20_000) as checkpointer:
        checkpointer.restore()
        thread = threading.Thread(target=signals)
        thread.start()
        with watching(checkpointer, job) as (truths, cut):
            at_rest, steps = 0, 0
            while at_rest < 40 and steps < STEPS_AT_MOST:
                job.step()
                checkpointer.step()
                if cut:
                    first.set()
                waits = thread.is_alive() or any(each > max(cut.values(), default=0.0) for each in sent)
                waiting = torch.tensor(int(waits))
                dist.all_reduce(waiting)
                at_rest, steps = 0 if waiting else at_rest + 1, steps + 1
        assert not checkpointer.should_stop
        thread.join()
    return sent, cut, truths, said.lines


def _check_marks(folder: Path, seed: int, times: int, restored: int) -> None:
    found = ranks.run(2, _marked, folder, seed, times, timeout_s=1200)
    commits = {str(marker): commit for marker, commit in lineage_of(folder).commits.items()}
    sent = [each for rank in found for each in rank[0]]
    assert times // 2 < len(sent) <= times * 2
    assert 2 <= len(commits) <= len(sent)
    for times_sent, cut, truths, lines in found:
        assert set(truths) == set(commits)
        assert all(any(each > moment for each in cut.values()) for moment in times_sent)
        for line in lines:
            told = re.fullmatch(r"SIGUSR1 produced marker (\S+) of step (\d+)", line)
            assert told, line
            assert commits[told[1]].step == int(told[2])
    assert len(found[0][3]) == len(commits)  # rank 0 tells of each, whoever was signalled
    for marker in random.Random(seed).sample(sorted(commits), restored):
        back = warm.run(2, jobs.restore_once, PLAN_2, StreamConfig(uri=f"file://{folder}"), marker, {})
        for rank in range(2):
            assert differences(found[rank][2][marker], back[rank][0]) == [], marker


def test_a_job_that_is_asked_for_markers_at_any_moment_sets_them_and_goes_on(tmp_path: Path) -> None:
    _check_marks(tmp_path, 1, 10, 1)


@pytest.mark.slow
def test_a_job_that_is_asked_for_fifty_markers_sets_them_and_goes_on(tmp_path: Path) -> None:
    _check_marks(tmp_path, 2, 50, 4)


# At chosen moments.


def during_the_restore(job: Trainer, checkpointer: StreamCheckpointer) -> None:
    load = job.load_state_dict

    def loading(state: dict[str, Any]) -> None:
        send(STOP)
        load(state)

    job.load_state_dict = loading  # type: ignore[method-assign]
    checkpointer.restore()


def during_the_sweep(job: Trainer, checkpointer: StreamCheckpointer) -> None:
    job.step()
    checkpointer.step()
    assert not inside(checkpointer).capture.swept
    if dist.get_rank():
        send(STOP)


def during_a_cut(job: Trainer, checkpointer: StreamCheckpointer) -> None:
    state = job.state_dict

    def asked() -> dict[str, Any]:
        if dist.get_rank() == 0:
            send(STOP)
        return state()

    job.state_dict = asked  # type: ignore[method-assign]
    checkpointer.mark()
    job.state_dict = state  # type: ignore[method-assign]


def during_a_commit(job: Trainer, checkpointer: StreamCheckpointer) -> None:
    dense = inside(checkpointer).dense
    save, begun, going_on = dense.save, threading.Event(), threading.Event()

    def saving(*args: Any, **how: bool) -> tuple[DenseFile, ...]:
        begun.set()
        going_on.wait(60)
        return save(*args, **how)

    dense.save = saving  # type: ignore[method-assign]
    checkpointer.mark()
    begun.wait(60)
    assert inside(checkpointer).coordinator.busy
    send(STOP)
    threading.Timer(0.3, going_on.set).start()


def with_both_signals(_job: Trainer, _checkpointer: StreamCheckpointer) -> None:
    for number in (MARK, STOP, MARK, STOP):
        send(number)


MOMENTS: list[Callable[[Trainer, StreamCheckpointer], None]] = [
    during_the_sweep,
    during_the_restore,
    during_a_cut,
    during_a_commit,
    with_both_signals,
]


def _at_moments(folder: Path) -> list[tuple[str, int, str, int]]:
    """Marker and step of each end, the moment, and how many markers there were before."""
    found = []
    for moment in MOMENTS:
        job = trainer(PLAN_2)
        with attach(job, folder, sweep_bytes=2_000) as checkpointer:
            if moment is not during_the_restore:
                checkpointer.restore()
            before = len(lineage_of(folder).commits)
            dist.barrier()
            moment(job, checkpointer)
            while not checkpointer.should_stop:
                job.step()
                checkpointer.step()
            marker = checkpointer.mark().result(60)
            assert marker.step == checkpointer.steps
        found.append((str(marker.id), marker.step, moment.__name__, before))
        dist.barrier()
    return found


def test_a_signal_during_sweep_restore_cut_or_commit_is_honored_after_it_by_one_marker(tmp_path: Path) -> None:
    found = ranks.run(2, _at_moments, tmp_path)
    assert found[0] == found[1]
    commits = {str(marker): commit.step for marker, commit in lineage_of(tmp_path).commits.items()}
    assert [commits[marker] for marker, *_ in found[0]] == [step for _, step, *_ in found[0]]
    befores = [before for *_, before in found[0]] + [len(commits)]
    more = {each[2]: after - before for each, before, after in zip(found[0], befores, befores[1:], strict=False)}
    own = {"during_a_cut": 1, "during_a_commit": 1}  # the mark() that was interrupted
    assert more == {each.__name__: 1 + own.get(each.__name__, 0) for each in MOMENTS}


# No marker, and why not.


def _too_late(folder: Path) -> tuple[list[str], float]:
    """(both ranks) The sweep is far from its end for SIGUSR1, and the store takes nothing for SIGTERM."""
    stop_requests.LEAST_S = 0.3
    job = trainer(PLAN_2)
    going_on = threading.Event()
    with Said() as said, attach(job, folder, sweep_bytes=1, signal_s=0.3) as checkpointer:
        checkpointer.restore()
        send(MARK)
        silent = torch.ones(())
        while silent:  # each rank gives up by its own clock
            job.step()
            checkpointer.step()
            silent = torch.tensor(float(not said.lines))
            dist.all_reduce(silent)
        inside(checkpointer).dense.save = lambda *_, **__: going_on.wait(60)  # type: ignore[method-assign, assignment]
        send(STOP)
        begin = time.monotonic()
        while not checkpointer.should_stop:
            job.step()
            checkpointer.step()
        checkpointer.close(timeout_s=600)
        taken_s = time.monotonic() - begin
        going_on.set()
    with attach(job, folder) as checkpointer:  # no step comes
        send(MARK)
        checkpointer.close()
    return said.lines, taken_s


def test_a_marker_that_cannot_be_had_in_time_is_named_and_the_job_ends_all_the_same(tmp_path: Path) -> None:
    for lines, taken_s in ranks.run(2, _too_late, tmp_path):
        assert "SIGUSR1 produced no marker: none could be cut for " in lines[0]
        assert " s because the sweep of this or another" in lines[0]
        assert re.match(r"SIGTERM produced no marker of step \d+, \d+ s after .*: it is not committed yet\.", lines[1])
        assert len(lines) == 2
        assert taken_s < 60  # not the 600 s that close() was given
    assert lineage_of(tmp_path).newest is None
