"""Gradients between two optimizer steps: a job that goes on from any boundary equals one that was not stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from tests import gradient_job, warm
from tests.dense_job import unequal
from tests.gradient_job import Job, Loop, build
from tests.inside import inside
from torchrec_stream_ckpt import StreamCheckpointer, StreamConfig
from torchrec_stream_ckpt.errors import MarkerFailedError

pytestmark = pytest.mark.distributed

LAST = 7
Case = tuple[Loop, str, dict[str, Any]]
CASES: list[Case] = [
    (gradient_job.accumulate, "Adam", {}),
    (gradient_job.accumulate, "momentum", {"bucket_views": False}),
    (gradient_job.accumulate_three, "momentum", {}),
    (gradient_job.accumulate_and_clear_at_the_top, "Adam", {}),
    (gradient_job.none_at_the_top, "Adam", {}),
    (gradient_job.none_at_the_end, "momentum", {}),
    (gradient_job.none_between_forward_and_backward, "Adam", {"bucket_views": False}),
    (gradient_job.zeros_at_the_top, "Adam", {}),
    (gradient_job.zeros_at_the_top, "momentum", {"bucket_views": False}),
    (gradient_job.zeros_at_the_end, "Adam", {}),
    (gradient_job.zeros_of_the_model, "momentum", {}),
    (gradient_job.never_cleared, "Adam", {}),
    (gradient_job.one_tower_never_cleared, "momentum", {}),
    (gradient_job.cleared_every_third_time, "momentum", {}),
    (gradient_job.zeroed_by_hand, "Adam", {}),
    (gradient_job.clipped, "momentum", {}),
    (gradient_job.scaled, "Adam", {}),
    (gradient_job.scaled_and_accumulated, "momentum", {}),
    (gradient_job.closures, "LBFGS", {}),
    (gradient_job.accumulate, "SGD", {"sparse": True}),
    (gradient_job.zeros_at_the_end, "SGD", {"sparse": True}),
]


def _attach(job: Job, uri: str) -> StreamCheckpointer:
    return StreamCheckpointer(
        job.dmp, job.optimizer, config=StreamConfig(uri=uri, marker_every=None), stateful={"job": job}
    )


def _name(case: Case) -> str:
    return " ".join([case[0].__name__, case[1], *map(str, case[2])])


def _held(checkpointer: StreamCheckpointer) -> list[str]:
    """Entries of gradients of the marker that was cut last."""
    return [entry for entry in inside(checkpointer).dense.held.shapes if entry.startswith("grad")]


def _one(job: Job, loop: Loop, checkpointer: StreamCheckpointer) -> None:
    job.number += 1
    loop(job)
    checkpointer.step()


def _train(uri: str, cases: list[int]) -> list[tuple[list[Any], list[int], Any]]:
    """Of each case: the truth at every boundary, how many gradients its markers hold, and the truth without markers."""
    found = []
    for number in cases:
        loop, optimizer, kind = CASES[number]
        plain = build(optimizer, **kind)
        for plain.number in range(1, LAST + 1):
            loop(plain)
        job, truths, held = build(optimizer, **kind), [], []
        with _attach(job, f"{uri}/{number}") as checkpointer:
            for _ in range(LAST):
                _one(job, loop, checkpointer)
                checkpointer.mark().result(60)
                truths.append(job.truth())
                held.append(len(_held(checkpointer)))
        found.append((truths, held, plain.truth()))
    return found


def _resume(uri: str, cases: list[int], marker: int) -> list[tuple[Any, Any]]:
    """Of each case: the truth right after the restore of one marker in a job that never stepped, and at the end."""
    found = []
    for number in cases:
        loop, optimizer, kind = CASES[number]
        job = build(optimizer, **kind, seed=9)
        with _attach(job, f"{uri}/{number}") as checkpointer:
            assert checkpointer.restore((1, marker)) is not None
            at = job.truth()
            while job.number < LAST:
                _one(job, loop, checkpointer)
        found.append((at, job.truth()))
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[Any]]:
    uri = f"file://{tmp_path_factory.mktemp('gradients')}"
    return uri, warm.run(2, _train, uri, list(range(len(CASES))))


@pytest.mark.parametrize("marker", [1, 3, 4])
def test_a_job_goes_on_bit_for_bit_from_any_boundary(marker: int, trained: tuple[str, list[Any]]) -> None:
    uri, ranks = trained
    resumed = warm.run(2, _resume, uri, list(range(len(CASES))), marker)
    wrong = {}
    for then, now in zip(ranks, resumed, strict=True):
        for case, (truths, _, plain), (at, last) in zip(CASES, then, now, strict=True):
            bad = unequal(truths[marker - 1], at) + unequal(truths[-1], last) + unequal(plain, last)
            if bad:
                wrong[_name(case)] = bad[:3]
    assert wrong == {}


def test_a_loop_that_clears_its_gradients_copies_none(trained: tuple[str, list[Any]]) -> None:
    for rank in trained[1]:
        held = {_name(case): found for case, (_, found, _) in zip(CASES, rank, strict=True)}
        assert held["none_at_the_end momentum"] == [0] * LAST
        for name in ("none_at_the_top Adam", "zeros_at_the_top Adam", "zeros_of_the_model momentum"):
            assert held[name][0] > 0, "whether the loop clears them is not known yet"
            assert held[name][1:] == [0] * (LAST - 1), name
        assert held["zeros_at_the_end Adam"] == [0] * LAST
        assert [found > 0 for found in held["accumulate Adam"]] == [number % 2 == 1 for number in range(1, LAST + 1)]
        assert all(found > 0 for found in held["never_cleared Adam"])


def _moved(uri: str) -> dict[str, torch.Tensor]:
    job = build("Adam")
    with _attach(job, uri) as checkpointer:
        assert checkpointer.restore((1, 3)) is not None
        return {name: each.grad.clone() for name, each in job.towers.items() if each.grad is not None}


def test_an_accumulated_gradient_comes_back_on_another_number_of_ranks(trained: tuple[str, list[Any]]) -> None:
    uri = f"{trained[0]}/0"
    one, two = warm.run(1, _moved, uri)[0], warm.run(2, _moved, uri)[1]
    assert unequal(one, two) == []
    assert len(one) >= 4


# A gradient that is one rank's own.


def _apart(uri: str) -> dict[str, str]:
    job, said = build("Adam"), {}

    def mark(name: str) -> None:
        checkpointer.step()
        try:
            checkpointer.mark().result(60)
            said[name] = "committed"
        except MarkerFailedError as error:
            said[name] = str(error)

    ddp = job.dmp._dmp_wrapped_module
    assert isinstance(ddp, DistributedDataParallel)
    with _attach(job, uri) as checkpointer:
        for boundary in ("first", "second"):
            with ddp.no_sync():
                job.number += 1
                job.loss().backward()
            mark(f"{boundary} inside")
            job.number += 1
            job.loss().backward()
            mark(f"{boundary} averaged")
            job.optimizer.step()
            job.optimizer.zero_grad()
            mark(f"{boundary} boundary")
            with torch.no_grad():
                job.loss()
            mark(f"{boundary} evaluated")
    return said


def test_a_gradient_under_no_sync_is_refused_by_name_and_the_boundary_is_not(tmp_path: Path) -> None:
    for said in warm.run(2, _apart, f"file://{tmp_path}"):
        for boundary in ("first", "second"):
            inside_text = said.pop(f"{boundary} inside")
            assert "the gradient of over.0.weight was accumulated on this rank alone, under no_sync()" in inside_text
            assert "Try: mark at the accumulation boundary" in inside_text
        assert set(said.values()) == {"committed"}


def _alone(uri: str) -> None:
    """One rank: under ``no_sync()`` too its gradient is that of all ranks."""
    job = build("Adam")
    with _attach(job, uri) as checkpointer, job.dmp._dmp_wrapped_module.no_sync():
        job.number += 1
        job.loss().backward()
        checkpointer.step()
        checkpointer.mark().result(60)
        assert _held(checkpointer)


def test_one_rank_has_nobody_to_differ_from(tmp_path: Path) -> None:
    warm.run(1, _alone, f"file://{tmp_path}")
