"""Lookups of other threads, of compiled kernels and from before the attach: markers stay exact, or say why not."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import ranks, warm
from tests.inside import inside
from tests.model import PLAN_1, Spec, Trainer, batch, differences, trainer, truth
from torchrec_stream_ckpt import StreamCheckpointer, StreamConfig
from torchrec_stream_ckpt.errors import UnsupportedError
from torchrec_stream_ckpt.format.control import TableScalars

pytestmark = pytest.mark.distributed

State = dict[str, torch.Tensor]
PLAN: Spec = {**PLAN_1, "t_dp": ("tw", 0)}
CELL = {"optimizer": "EXACT_ROWWISE_ADAGRAD", "kernel": "fused", "module": "EmbeddingBagCollection"}


def _attach(job: Trainer, uri: str, paranoid: bool) -> StreamCheckpointer:
    settings = StreamConfig(uri=uri, marker_every=None, drain_every=1, commit_timeout_s=30)
    return StreamCheckpointer(job.dmp, job.optimizer, config=settings, stateful={"loader": job}, paranoid=paranoid)


def _loss(job: Trainer, number: int) -> torch.Tensor:
    """Of the tables alone: what several threads can train without DDP between them."""
    loss: torch.Tensor = job.dmp.module.ebc(batch(number)[1]).values().square().sum()
    return loss


@contextmanager
def _beside(act: Callable[[int], object], threads: int = 1) -> Iterator[None]:
    """Other threads call ``act`` with growing numbers, at least once each."""
    stop, failed, calls = threading.Event(), list[BaseException](), [0] * threads

    def loop(thread: int) -> None:
        try:
            while not stop.is_set():
                act(10_000 * (thread + 1) + calls[thread])
                calls[thread] += 1
        except BaseException as error:
            failed.append(error)

    running = [threading.Thread(target=loop, args=(thread,)) for thread in range(threads)]
    for thread in running:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in running:
            thread.join(60)
    if failed:
        raise failed[0]
    assert all(calls)


def evaluation(job: Trainer, checkpointer: StreamCheckpointer, seconds: float) -> None:
    def evaluate(number: int) -> None:
        with torch.no_grad():
            _loss(job, number)

    with _beside(evaluate):
        _train(job, checkpointer, seconds)


def serving(job: Trainer, checkpointer: StreamCheckpointer, seconds: float) -> None:
    def serve(number: int) -> None:
        with torch.no_grad():  # FBGEMM has no lookup for inference mode on a CPU
            _loss(job, number)

    with _beside(serve, threads=2):
        _train(job, checkpointer, seconds)


def lookups_that_are_never_trained(job: Trainer, checkpointer: StreamCheckpointer, seconds: float) -> None:
    with _beside(lambda number: _loss(job, number)):
        _train(job, checkpointer, seconds)


def hogwild(job: Trainer, checkpointer: StreamCheckpointer, seconds: float) -> None:
    with _beside(lambda number: _loss(job, number).backward(), threads=2):
        end, steps = time.monotonic() + seconds, 0
        while time.monotonic() < end or steps < 5:
            _loss(job, steps).backward()
            checkpointer.step()
            steps += 1
            if steps % 5 == 0:
                checkpointer.mark().result(60)  # under ``paranoid`` compared with the live tables


def several_graphs(job: Trainer, checkpointer: StreamCheckpointer, seconds: float) -> None:
    for number in range(5):
        losses = [_loss(job, 10 * number + k) for k in range(3)]
        for k in (2, 0, 1):
            losses[k].backward()
            checkpointer.step()


def _train(job: Trainer, checkpointer: StreamCheckpointer, seconds: float) -> None:
    end, steps = time.monotonic() + seconds, 0
    while time.monotonic() < end or steps < 10:
        job.step()
        checkpointer.step()
        steps += 1


CASES: dict[str, Callable[[Trainer, StreamCheckpointer, float], None]] = {
    case.__name__: case for case in (evaluation, serving, lookups_that_are_never_trained, hogwild, several_graphs)
}


def _run(uri: str, name: str, paranoid: bool, seconds: float) -> State:
    """A case on a fresh job, and the truth at the marker that follows it."""
    sys.setswitchinterval(1e-4)
    job = trainer(PLAN)
    with _attach(job, uri, paranoid) as checkpointer:
        checkpointer.restore()
        checkpointer.mark().result(60)
        job.step()  # TorchRec sets up its input distribution in the first forward, for one thread
        CASES[name](job, checkpointer, seconds)
        checkpointer.mark().result(60)
        return truth(job)


def _restored(uri: str) -> State:
    job = trainer(PLAN)
    with _attach(job, uri, paranoid=False) as checkpointer:
        assert checkpointer.restore() is not None
        return truth(job)


def _check(uri: str, name: str, paranoid: bool, seconds: float) -> None:
    (state,) = ranks.run(1, _run, uri, name, paranoid, seconds, timeout_s=seconds + 120)
    (found,) = warm.run(1, _restored, uri)
    assert differences(state, found) == []


def _counted_in_between(uri: str) -> State:
    """A forward of another thread is counted between the two reads of the kernels' iteration at the cut."""
    job = trainer(PLAN)
    with _attach(job, uri, paranoid=False) as checkpointer:
        capture = inside(checkpointer).capture
        freeze = capture.freeze

        def early(*how: Any) -> tuple[TableScalars, ...]:
            return tuple(replace(each, iteration=each.iteration - 1) for each in freeze(*how))

        capture.freeze = early  # type: ignore[method-assign]
        job.step()
        checkpointer.step()
        checkpointer.mark().result(60)
        return truth(job)


def test_a_lookup_between_the_reads_of_a_cut_damages_no_marker(tmp_path: Path) -> None:
    (state,) = ranks.run(1, _counted_in_between, f"file://{tmp_path}")
    (found,) = warm.run(1, _restored, f"file://{tmp_path}")
    assert differences(state, found) == []


def _covered(name: str) -> Any:
    pipeline = f"plain: {name.replace('_', ' ')}" + (", in other threads" if name != "several_graphs" else " in flight")
    return pytest.param(name, marks=pytest.mark.covers(**CELL, pipeline=pipeline))


@pytest.mark.parametrize("paranoid", [False, True])
@pytest.mark.parametrize("name", [_covered(name) for name in CASES])
def test_lookups_of_other_threads_mislead_no_marker(name: str, paranoid: bool, tmp_path: Path) -> None:
    _check(f"file://{tmp_path}", name, paranoid, 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("paranoid", [False, True])
@pytest.mark.parametrize("name", [name for name in CASES if name != "several_graphs"])
def test_threads_mislead_no_marker_for_minutes(name: str, paranoid: bool, tmp_path: Path) -> None:
    _check(f"file://{tmp_path}", name, paranoid, 120.0)


# Lookups that no hook has seen.


def _in_flight_at_attach(uri: str, paranoid: bool) -> State:
    job = trainer(PLAN)
    job.step()
    before = _loss(job, 50)
    with _attach(job, uri, paranoid) as checkpointer:
        checkpointer.restore()
        checkpointer.mark().result(60)
        before.backward()
        checkpointer.step()
        checkpointer.mark().result(60)
        return truth(job)


@pytest.mark.covers(**CELL, pipeline="plain: attached with a lookup in flight")
@pytest.mark.parametrize("paranoid", [False, True])
def test_a_lookup_in_flight_at_the_attach_is_captured(paranoid: bool, tmp_path: Path) -> None:
    uri = f"file://{tmp_path}"
    (state,) = ranks.run(1, _in_flight_at_attach, uri, paranoid)
    (found,) = warm.run(1, _restored, uri)
    assert differences(state, found) == []


def _compiled(uri: str, backend: str, eager_steps: int) -> tuple[str, list[str]]:
    """What a step with compiled kernels says, and what a marker after it lacks."""
    job = trainer(PLAN)
    with _attach(job, uri, paranoid=False) as checkpointer:
        checkpointer.restore()
        for number in range(eager_steps):
            _loss(job, number).backward()
            checkpointer.step()
        kernels = [group.emb_module for lookup in job.dmp.module.ebc._lookups for group in lookup._emb_modules]
        for kernel in kernels:
            kernel.forward = torch.compile(kernel.forward, backend=backend)
        with pytest.raises(UnsupportedError) as caught:
            _loss(job, 77).backward()
        checkpointer.step()
        checkpointer.mark().result(60)
        state = truth(job)
        for kernel in kernels:
            del kernel.forward
    other = trainer(PLAN)
    with _attach(other, uri, paranoid=False) as checkpointer:
        checkpointer.restore()
        return str(caught.value), differences(state, truth(other))


@pytest.mark.covers(
    **CELL,
    pipeline="torch.compile of a kernel's forward",
    outcome="refused",
    why="a compiled lookup does not expose its ids",
)
@pytest.mark.parametrize("eager_steps", [0, 3])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_kernel_is_refused_in_the_step_that_looks_up(backend: str, eager_steps: int, tmp_path: Path) -> None:
    ((said, lacking),) = ranks.run(1, _compiled, f"file://{tmp_path}", backend, eager_steps)
    assert "a compiled lookup does not expose its ids" in said
    assert lacking == []
