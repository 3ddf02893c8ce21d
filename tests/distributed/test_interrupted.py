"""Ctrl-C, or any signal handler that raises or calls, at any moment of training: markers stay exact."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from tests import ranks
from tests.inside import inside
from tests.model import PLAN_1, Spec, Trainer, batch, differences, trainer, truth
from tests.parts import Scope
from torchrec_stream_ckpt import StreamCheckpointer, StreamConfig
from torchrec_stream_ckpt.errors import ConfigError

pytestmark = pytest.mark.distributed

PLAN: Spec = {**PLAN_1, "t_dp": ("tw", 0)}
"""Without DDP: an interrupted forward or backward leaves its reducer unusable."""

Truths = dict[str, dict[str, torch.Tensor]]


class Interrupted(BaseException):
    """What the signal handler raises."""


def _raise(_number: int, _frame: FrameType | None) -> None:
    raise Interrupted


def _train(job: Trainer) -> None:
    job.step_number += 1
    job.dmp.module.ebc(batch(job.step_number)[1]).values().square().sum().backward()
    job.optimizer.step()


def _attach(job: Trainer, uri: str, paranoid: bool) -> StreamCheckpointer:
    settings = StreamConfig(uri=uri, marker_every=None, drain_every=2, commit_timeout_s=20)
    return StreamCheckpointer(job.dmp, job.optimizer, config=settings, stateful={"loader": job}, paranoid=paranoid)


def _interrupt(uri: str, paranoid: bool, times: int, verify_every: int) -> tuple[Truths, int]:
    """Train, drain and mark under an alarm that rings at random moments; the truth at some markers."""
    job = trainer(PLAN)
    checkpointer = _attach(job, uri, paranoid)
    checkpointer.restore()
    _train(job)  # a first forward of TorchRec that is interrupted leaves what it makes there half made, for ever
    checkpointer.mark().result(60)
    signal.signal(signal.SIGALRM, _raise)
    draw, truths, hits, rounds, last_s = random.Random(5), {}, 0, 0, 0.02
    while hits < times:
        rounds += 1
        begin = time.perf_counter()
        try:
            signal.setitimer(signal.ITIMER_REAL, max(1e-5, draw.random() * last_s))
            _train(job)
            checkpointer.step()
            if rounds % 3 == 0:
                checkpointer.mark()
            signal.setitimer(signal.ITIMER_REAL, 0)
        except Interrupted:
            hits += 1
            torch.set_grad_enabled(True)  # which an interrupted ``no_grad()`` of torch leaves switched off
        else:
            last_s = time.perf_counter() - begin
        finally:
            with contextlib.suppress(Interrupted):
                signal.setitimer(signal.ITIMER_REAL, 0)
        if hits // verify_every > len(truths):
            marker = checkpointer.mark().result(60)
            truths[str(marker.id)] = truth(job)
    checkpointer.close()
    return truths, rounds


def _restored(uri: str, markers: list[str]) -> Truths:
    found = {}
    for marker in markers:
        job = trainer(PLAN)
        with _attach(job, uri, paranoid=False) as checkpointer:
            assert checkpointer.restore(marker) is not None
            found[marker] = truth(job)
    return found


def _check(uri: str, paranoid: bool, times: int, verify_every: int) -> None:
    ((truths, rounds),) = ranks.run(1, _interrupt, uri, paranoid, times, verify_every, timeout_s=600)
    assert len(truths) == times // verify_every
    assert rounds > times
    (found,) = ranks.run(1, _restored, uri, list(truths), timeout_s=600)
    for marker, state in truths.items():
        assert differences(state, found[marker]) == []


@pytest.mark.covers(
    optimizer="EXACT_ROWWISE_ADAGRAD", kernel="fused", pipeline="plain: signals that raise at any moment"
)
@pytest.mark.parametrize("paranoid", [False, True])
def test_a_signal_at_any_moment_loses_no_row(paranoid: bool, tmp_path: Path) -> None:
    _check(f"file://{tmp_path}", paranoid, 500, 100)


@pytest.mark.slow
@pytest.mark.parametrize("paranoid", [False, True])
def test_thousands_of_signals_lose_no_row(paranoid: bool, tmp_path: Path) -> None:
    _check(f"file://{tmp_path}", paranoid, 5_000, 250)


# Calls inside of another call.

HANDLERS = 40


def _handling(action: Callable[[], object], number: int, handler: Callable[[], object]) -> int:
    """Call ``action``, and ``handler`` before a bytecode of this package, as Python handles a signal; how many it had.

    Args:
        action: What is interrupted.
        number: Of the bytecode, counted from 0.
        handler: Called once.
    """
    seen = 0

    def step(_frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal seen
        if event == "opcode":
            seen += 1
            if seen == number + 1:
                sys.settrace(None)
                handler()
        return step

    def enter(frame: FrameType, _event: str, _argument: Any) -> Any:
        if "/torchrec_stream_ckpt/" not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes = True
        return step

    sys._getframe().f_trace_opcodes = True  # Python 3.12 traces bytecodes only if a frame asked for it before
    sys.settrace(enter)
    try:
        action()
    finally:
        sys.settrace(None)
    return seen


def _call_inside(uri: str) -> tuple[Truths, list[str]]:
    """``mark()`` at random moments of ``step()``; what was refused, and the truth at each marker."""
    job = trainer(PLAN)
    truths: Truths = {}
    refused: list[str] = []
    draw = random.Random(3)
    with _attach(job, uri, paranoid=False) as checkpointer:
        checkpointer.restore()
        truths[str(checkpointer.mark().result(60).id)] = truth(job)

        def mark() -> None:
            try:
                truths[str(checkpointer.mark().result(60).id)] = truth(job)
            except ConfigError as error:
                refused.append(str(error))

        _train(job)
        bytecodes = _handling(checkpointer.step, -1, mark)
        for _ in range(HANDLERS):
            _train(job)
            _handling(checkpointer.step, draw.randrange(bytecodes), mark)
            mark()
    return truths, refused


def test_a_marker_that_a_signal_handler_asks_for_inside_of_a_step_is_refused_and_harms_no_other(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}"
    ((truths, refused),) = ranks.run(1, _call_inside, uri, timeout_s=600)
    assert len(refused) > HANDLERS // 2  # some bytecodes are before or after the call itself, and some steps have fewer
    assert all(said.startswith("mark() was called while step() was running") for said in refused)
    markers = [list(truths)[number] for number in (0, len(truths) // 2, -1)]
    (found,) = ranks.run(1, _restored, uri, markers)
    assert {marker: differences(truths[marker], found[marker]) for marker in markers} == {key: [] for key in markers}


def _close_inside(uri: str) -> tuple[Truths, list[str]]:
    """``close()`` at random moments of ``step()``."""
    job = trainer(PLAN)
    refused: list[str] = []
    draw = random.Random(4)
    with _attach(job, uri, paranoid=False) as checkpointer:
        checkpointer.restore()

        def close() -> None:
            try:
                checkpointer.close()
            except ConfigError as error:
                refused.append(str(error))

        for _ in range(5):
            _train(job)
            _handling(checkpointer.step, draw.randrange(100, 300), close)
        return {str(checkpointer.mark().result(60).id): truth(job)}, refused


def test_a_close_that_a_signal_handler_asks_for_inside_of_a_step_is_refused(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}"
    ((truths, refused),) = ranks.run(1, _close_inside, uri)
    assert [said.split(",")[0] for said in refused] == ["close() was called while step() was running"] * 5
    (found,) = ranks.run(1, _restored, uri, list(truths))
    assert {marker: differences(truths[marker], found[marker]) for marker in truths} == {key: [] for key in truths}


def _mark_on_two_threads(uri: str) -> tuple[Truths, list[str]]:
    job = trainer(PLAN)
    said: list[str] = []
    begun, going_on = threading.Event(), threading.Event()
    with _attach(job, uri, paranoid=False) as checkpointer:
        checkpointer.restore()
        _train(job)
        sending = inside(checkpointer).dense.stage

        def stage(scope: Scope) -> Any:
            begun.set()
            going_on.wait(60)
            return sending(scope)

        inside(checkpointer).dense.stage = stage  # type: ignore[method-assign]
        thread = threading.Thread(target=lambda: said.append(str(checkpointer.mark().result(60).id)))
        thread.start()
        begun.wait(60)
        with pytest.raises(ConfigError) as refused:
            checkpointer.mark()
        going_on.set()
        thread.join(60)
        return {said[0]: truth(job)}, [str(refused.value)]


def test_two_threads_that_mark_at_once_cut_one_marker(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}"
    ((truths, (refused,)),) = ranks.run(1, _mark_on_two_threads, uri)
    assert refused.startswith("mark() was called while mark() was running, on this thread or another one")
    (found,) = ranks.run(1, _restored, uri, list(truths))
    assert {marker: differences(truths[marker], found[marker]) for marker in truths} == {key: [] for key in truths}


def _fork(uri: str) -> tuple[Truths, list[str]]:
    """What a child says that is forked between an update and the mark, and the truth at the mark."""
    job = trainer(PLAN)
    with _attach(job, uri, paranoid=False) as checkpointer:
        checkpointer.restore()
        _train(job)
        checkpointer.step()
        _train(job)
        ours, theirs = multiprocessing.Pipe(duplex=False)
        child = os.fork()
        if child == 0:
            try:
                for call in (checkpointer.step, checkpointer.mark, checkpointer.restore, checkpointer.plan):
                    try:
                        call()
                    except ConfigError as error:
                        theirs.send(str(error))
                checkpointer.close()
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        theirs.close()
        said = [ours.recv() for _ in range(4)]
        return {str(checkpointer.mark().result(60).id): truth(job)}, said


def test_a_forked_process_is_refused_and_harms_no_marker(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}"
    ((truths, said),) = ranks.run(1, _fork, uri)
    calls = ("step", "mark", "restore", "plan")
    for call, each in zip(calls, said, strict=True):
        assert each.startswith(f"{call}() was called in a fork of the process")
    (found,) = ranks.run(1, _restored, uri, list(truths))
    assert {marker: differences(truths[marker], found[marker]) for marker in truths} == {key: [] for key in truths}
