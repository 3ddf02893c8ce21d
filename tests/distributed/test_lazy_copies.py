"""``dense_copy="lazy"``: a copy that goes on during the next forward and backward holds the state of the cut, bit for
bit, or its marker fails by name."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch

from tests import ranks
from tests.dense_job import Job, Net, attach, build, copied, unequal
from tests.inside import inside
from tests.pool import Pool
from torchrec_stream_ckpt import StreamCheckpointer
from torchrec_stream_ckpt.errors import MarkerFailedError

pytestmark = pytest.mark.distributed

WIDE = partial(Net, 1200)
"""A weight of 77 KB in the tower, and an optimizer's tensors of that size: they are copied late."""
WEIGHT = "model.over.0.weight"
WAIT_S = 100.0
State = dict[str, Any]


@contextmanager
def held(checkpointer: StreamCheckpointer, *, copied: bool = False) -> Iterator[None]:
    """Inside of this the commit thread of this rank waits before it copies, or after its copy and before its vote."""
    dense, go_on, calls = inside(checkpointer).dense, Event(), [0]
    real = dense.finish_copy

    def finish_copy() -> str:
        calls[0] += 1
        if not copied or calls[0] > 1:
            assert go_on.wait(WAIT_S)
        return real()

    dense.finish_copy = finish_copy  # type: ignore[method-assign]
    try:
        yield
    finally:
        go_on.set()
        del dense.finish_copy


def lazy(job: Job, uri: str, **settings: Any) -> StreamCheckpointer:
    return attach(job, uri, dense_copy="lazy", **settings)


def step(job: Job, checkpointer: StreamCheckpointer) -> None:
    job.step()
    checkpointer.step()


def restored(kind: str, uri: str, net: Callable[[], Net] = WIDE, markers: tuple[str | None, ...] = (None,)) -> Any:
    """State of a job that was in another state, after it has restored each of these markers."""
    found = []
    for marker in markers:
        job = build(kind, lr=0.5, net=net)
        with attach(job, uri) as checkpointer:
            assert checkpointer.restore(marker) is not None
            found.append((job.truth(), gradients(job)))
    return found


def gradients(job: Job) -> State:
    return copied({name: each.grad for name, each in job.dmp.named_parameters() if "over" in name})


# Equal to the copy at once.


def _many(kind: str, uri: str) -> list[State]:
    """The truth at each marker. Every other one is copied by the optimizer's step alone."""
    job, found = build(kind, net=WIDE), []
    with lazy(job, uri) as checkpointer:
        for number in range(4):
            step(job, checkpointer)
            future = checkpointer.mark()
            found.append(job.truth())
            step(job, checkpointer)
            future.result(WAIT_S)
            if number % 2:
                continue
            with held(checkpointer):
                future = checkpointer.mark()
                found.append(job.truth())
                step(job, checkpointer)
                step(job, checkpointer)
            future.result(WAIT_S)
    return found


@pytest.mark.parametrize("kind", ["Adam", "AdamW, fused", "LBFGS", "nested state", "a state_dict() of its own"])
def test_markers_hold_the_state_of_their_cuts_whoever_copies_it(kind: str, pool: Pool, tmp_path: Path) -> None:
    uri = f"file://{tmp_path}"
    truths = pool.run(2, _many, kind, uri)
    names = tuple(f"1:{number}" for number in range(1, len(truths[0]) + 1))
    for rank, found in enumerate(pool.run(2, restored, kind, uri, WIDE, names)):
        assert [unequal(truth, state) for truth, (state, _) in zip(truths[rank], found, strict=True)] == [[]] * 6
    for world in (1, 3):
        for rank, ((state, _),) in enumerate(pool.run(world, restored, kind, uri, WIDE, names[1:2])):
            assert unequal(truths[rank if rank < 2 else 0][1], state) == []


# Writes between a cut and the step.


def _weight(job: Job) -> torch.Tensor:
    weight: torch.Tensor = job.dmp.module.over[0].weight
    return weight


@torch.no_grad()
def _in_place(job: Job) -> None:
    _weight(job).clamp_(-0.01, 0.01)


@torch.no_grad()
def _one_element(job: Job) -> None:
    _weight(job)[1, 1] = 5


@torch.no_grad()
def _all_together(job: Job) -> None:
    torch._foreach_mul_([_weight(job)], 0.5)


def _loaded(job: Job) -> None:
    job.dmp.module.over[0].load_state_dict(
        {name: each + 1 for name, each in job.dmp.module.over[0].state_dict().items()}
    )


def _moments(job: Job) -> None:
    job.optimizer.state[_weight(job)]["exp_avg"].mul_(0.5)


def _past_torch(job: Job) -> None:
    _weight(job).data.mul_(0.5)


def _by_numpy(job: Job) -> None:
    _weight(job).detach().numpy()[:] = 1


WRITES = {
    _in_place: WEIGHT,
    _one_element: WEIGHT,
    _all_together: WEIGHT,
    _loaded: WEIGHT,
    _moments: "optim.optimizer0.over.0.weight.exp_avg",
}
"""Seen whenever they come before the marker counts."""
UNCOUNTED = {_past_torch: WEIGHT, _by_numpy: WEIGHT}
"""Seen if they come before the copy."""


def _written(uri: str) -> tuple[list[str], State]:
    """Result of the marker before each write; then the state at a marker after all of them."""
    job, said = build("Adam", net=WIDE), []
    with lazy(job, uri) as checkpointer:
        cases = [(write, copied) for copied in (False, True) for write in WRITES] + [
            (each, False) for each in UNCOUNTED
        ]
        for write, copied in cases:
            step(job, checkpointer)
            with held(checkpointer, copied=copied):
                future = checkpointer.mark()
                job.loss().backward()
                write(job)
            with pytest.raises(MarkerFailedError) as caught:
                future.result(WAIT_S)
            said.append(str(caught.value))
            step(job, checkpointer)
            checkpointer.mark().result(WAIT_S)
        with held(checkpointer):  # after the step everything may be written
            future = checkpointer.mark()
            truth = job.truth()
            job.step()
            for write in (*WRITES, *UNCOUNTED):
                write(job)
        future.result(WAIT_S)
        return said, truth


def test_a_write_before_the_step_fails_its_marker_by_name_and_no_other(pool: Pool, tmp_path: Path) -> None:
    uri = f"file://{tmp_path}"
    names = [*WRITES.values(), *WRITES.values(), *UNCOUNTED.values()]
    found = pool.run(2, _written, uri)
    for said, _ in found:
        wanted = [f"{name} was written between the cut and the next optimizer step" for name in names]
        assert [text for text, each in zip(said, wanted, strict=True) if each not in text] == []
    for (_, truth), ((state, _),) in zip(found, pool.run(2, restored, "Adam", uri), strict=True):
        assert unequal(truth, state) == []


def _unseen(uri: str, paranoid: bool) -> str:
    """An element is written past torch, under a marker that proves all of the dense state."""
    job = build("Adam", net=WIDE)
    with lazy(job, uri, paranoid=paranoid) as checkpointer:
        step(job, checkpointer)
        if paranoid:
            checkpointer.mark().result(WAIT_S)
            step(job, checkpointer)
        with held(checkpointer):
            future = checkpointer.mark()
            _weight(job).data[1, 1] = 5
        with pytest.raises(MarkerFailedError) as caught:
            future.result(WAIT_S)
        return str(caught.value)


@pytest.mark.parametrize("paranoid", [False, True], ids=["the first marker", "any marker if paranoid"])
def test_a_marker_that_proves_a_tensor_finds_every_write_before_its_copy(
    paranoid: bool, pool: Pool, tmp_path: Path
) -> None:
    for said in pool.run(2, _unseen, f"file://{tmp_path}", paranoid):
        assert f"the saved copy of {WEIGHT} differs from the live tensor at the cut" in said


# What a loop does next.


def _no_step(uri: str) -> State:
    """Two marks at one boundary, and a close, while nothing is trained."""
    job = build("Adam", net=WIDE)
    with lazy(job, uri) as checkpointer:
        step(job, checkpointer)
        first, second = checkpointer.mark(), checkpointer.mark()
        assert first.result(WAIT_S) == second.result(WAIT_S)
        step(job, checkpointer)
        checkpointer.mark()
        truth = job.truth()
    job.step()  # the close has waited
    return truth


def _no_backward(uri: str) -> State:
    """The backward after a cut raises, and the loop goes on with the next batch."""
    job = build("Adam", net=WIDE)

    def fails(_: torch.Tensor) -> None:
        raise ArithmeticError("not finite")

    with lazy(job, uri) as checkpointer:
        step(job, checkpointer)
        with held(checkpointer):
            future = checkpointer.mark()
            truth = job.truth()
            loss = job.loss()
            loss.register_hook(fails)
            with pytest.raises(ArithmeticError):
                loss.backward()
            job.optimizer.zero_grad()
        future.result(WAIT_S)
    return truth


def _normed(uri: str) -> State:
    """The forward after a cut changes buffers."""
    job = build("Adam", net=partial(WIDE, norm=True))
    with lazy(job, uri) as checkpointer:
        step(job, checkpointer)
        with held(checkpointer):
            future = checkpointer.mark()
            truth = job.truth()
            step(job, checkpointer)
        future.result(WAIT_S)
        assert unequal(truth["weights"], job.truth()["weights"])
    return truth


COURSES = {_no_step: WIDE, _no_backward: WIDE, _normed: partial(WIDE, norm=True)}


@pytest.mark.parametrize("course", COURSES, ids=lambda course: course.__name__.strip("_"))
def test_a_marker_holds_its_cut_whatever_the_loop_does_next(
    course: Callable[[str], State], pool: Pool, tmp_path: Path
) -> None:
    uri = f"file://{tmp_path}"
    truths = pool.run(2, course, uri)
    for truth, ((state, _),) in zip(truths, pool.run(2, restored, "Adam", uri, COURSES[course]), strict=True):
        assert unequal(truth, state) == []


def _accumulated(uri: str) -> tuple[State, State]:
    """A marker between two backwards of one step: the second one adds to the gradients."""
    job = build("Adam", net=WIDE)
    with lazy(job, uri) as checkpointer:
        step(job, checkpointer)
        job.optimizer.zero_grad()
        job.loss().backward()
        checkpointer.step()
        with held(checkpointer):
            future = checkpointer.mark()
            truth = job.truth(), gradients(job)
            job.number += 1
            job.loss().backward()
            job.optimizer.step()
        future.result(WAIT_S)
    return truth


def test_gradients_are_copied_at_the_cut(pool: Pool, tmp_path: Path) -> None:
    uri = f"file://{tmp_path}"
    found = pool.run(2, _accumulated, uri)
    for (truth, grads), ((state, grads_2),) in zip(found, pool.run(2, restored, "Adam", uri), strict=True):
        assert unequal(truth, state) == []
        assert any(bool(each.any()) for each in grads.values())
        assert unequal(grads, grads_2) == []


def _stopped(uri: str) -> State:
    job = build("Adam", net=WIDE)
    with lazy(job, uri, on_signal="mark") as checkpointer:
        for number in range(1000):
            if number == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            step(job, checkpointer)
            if checkpointer.should_stop:
                return job.truth()
    raise AssertionError("the job was not stopped")


def test_the_marker_of_sigterm_is_whole(pool: Pool, tmp_path: Path) -> None:
    uri = f"file://{tmp_path}"
    truths = ranks.run(2, _stopped, uri)
    for truth, ((state, _),) in zip(truths, pool.run(2, restored, "Adam", uri), strict=True):
        assert unequal(truth, state) == []
