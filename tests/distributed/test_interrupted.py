"""Ctrl-C, or any signal handler that raises, at any moment of training: markers stay exact."""

from __future__ import annotations

import contextlib
import random
import signal
import time
from pathlib import Path
from types import FrameType

import pytest
import torch

from tests import ranks
from tests.model import PLAN_1, Spec, Trainer, batch, differences, trainer, truth
from torchrec_stream_ckpt import StreamCheckpointer, StreamConfig

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
