"""Votes of the ranks: how many there are, that all ranks hold the same ones, what an interrupted rank does to them."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import ranks
from tests.inside import inside
from tests.interrupts import interrupt
from tests.jobs import attach
from tests.model import PLAN_1, PLAN_2, trainer
from tests.parts import EventTime
from torchrec_stream_ckpt import StreamConfig
from torchrec_stream_ckpt.errors import ConfigError, FencedError, MarkerFailedError
from torchrec_stream_ckpt.ranks import collective
from torchrec_stream_ckpt.ranks.collective import new_group
from torchrec_stream_ckpt.ranks.vote_interval import MOST_STEPS
from torchrec_stream_ckpt.save.cadence import NOTHING, Cadence, StepVote

pytestmark = pytest.mark.distributed

READY = replace(NOTHING, ready=True)


class Boundaries:
    """The step boundaries of one rank that trains nothing.

    Args:
        cadence: Its own.
        pause_s: How long a step takes.
        meet: The ranks wait for each other in each step, as in most training; otherwise only where they vote.
    """

    def __init__(self, cadence: Cadence, pause_s: float = 0.0, *, meet: bool = True) -> None:
        self.cadence = cadence
        self.pause_s = pause_s
        self._meets = meet
        self.step = 0
        self.votes: list[int] = []
        """Steps at which this rank has voted."""
        self.cuts: list[int] = []
        self.disowned: list[int] = []
        """Steps at which it has heard that a rank is no owner."""
        self.says: Callable[[int], StepVote] = lambda _: READY

    def boundary(self) -> None:
        said = self.cadence.decide()
        if not said.owner:
            self.disowned.append(self.step)
        if said.ready:
            self.cadence.cut()
            self.cuts.append(self.step)
        self.cadence.start(self.step, self.says(self.step))

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.pass_step()
            self.boundary()
            if self.cadence.works:
                self.votes.append(self.step)

    def pass_step(self) -> None:
        """What training does between two boundaries."""
        if self._meets:
            dist.barrier()
        time.sleep(self.pause_s)
        self.step += 1

    def end(self) -> dict[str, Any]:
        self.cadence.close(20.0)
        return {"votes": self.votes, "cuts": self.cuts, "disowned": self.disowned}


def _four_ranks() -> dict[str, dict[str, Any]]:
    """Each mode of the cadence, one after the other, on ranks of different speed."""
    rank, group, found = dist.get_rank(), new_group(60), {}
    pause_s = 0.001 + 0.0002 * rank

    def run(name: str, cadence: Cadence, steps: int, says: Callable[[int], StepVote] = lambda _: READY) -> None:
        boundaries = Boundaries(cadence, pause_s, meet=False)
        boundaries.says = says
        boundaries.train(steps)
        found[name] = boundaries.end()

    left = 35 + 5 * rank  # a marker is affordable to the last rank 50 steps after the last one

    def affordable() -> int:
        return max(0, left - afford.step + (afford.cuts[-1] if afford.cuts else 0))

    afford = Boundaries(Cadence(None, None, group, affordable), pause_s, meet=False)
    afford.train(220)
    found["affordable"] = afford.end()
    run("steps", Cadence(50, None, group), 120)
    run("seconds", Cadence(None, 0.1, group), 150)
    late = Cadence(50, None, group)
    run("late", late, 60, lambda step: replace(READY, ready=rank != 2 or step >= 55))
    told = 73
    run("flag", Cadence(None, 1e6, group), 120, lambda step: replace(NOTHING, owner=rank != 3 or step < told))
    events = EventTime(500.0)
    cadence = Cadence(None, None, group, event_time=events)

    def says(step: int) -> StepVote:
        events.reach(10.0 * step - rank)
        return READY

    run("events", cadence, 170, says)
    run("never", Cadence(None, None, group), 20)
    return found


@pytest.fixture(scope="module")
def four() -> list[dict[str, dict[str, Any]]]:
    return ranks.run(4, _four_ranks)


def test_all_ranks_vote_and_cut_at_the_same_steps(four: list[dict[str, dict[str, Any]]]) -> None:
    assert four[1:] == four[:1] * 3
    for mode in ("affordable", "seconds", "flag", "events"):
        assert all(b - a <= MOST_STEPS for a, b in pairwise(four[0][mode]["votes"])), mode


def test_a_vote_says_how_long_no_marker_is_affordable(four: list[dict[str, dict[str, Any]]]) -> None:
    found = four[0]["affordable"]
    assert len(found["cuts"]) >= 3
    spans = [b - a for a, b in pairwise(found["cuts"])]
    assert all(50 <= span <= 52 for span in spans), spans  # as soon as the slowest rank can pay, and one step
    assert len(found["votes"]) < 220 / 8


def test_markers_by_steps_are_exact_and_need_no_other_vote(four: list[dict[str, dict[str, Any]]]) -> None:
    assert four[0]["steps"]["cuts"] == [50, 100]
    assert len(four[0]["steps"]["votes"]) == 4  # one before each, one after it
    assert four[0]["late"]["cuts"][0] == 56  # the first boundary after rank 2 was ready
    assert four[0]["never"]["votes"] == []


def test_markers_by_seconds_and_by_event_time_come_soon_after_they_are_due(
    four: list[dict[str, dict[str, Any]]],
) -> None:
    assert four[0]["seconds"]["cuts"]
    assert len(four[0]["seconds"]["votes"]) < 75
    events = four[0]["events"]["cuts"]
    assert [step // 50 for step in events] == [1, 2, 3]
    assert all(step % 50 <= MOST_STEPS + 1 for step in events)
    assert len(four[0]["events"]["votes"]) < 60


def test_what_one_rank_says_is_heard_by_all_within_32_steps(four: list[dict[str, dict[str, Any]]]) -> None:
    heard = four[0]["flag"]["disowned"][0]
    assert 73 < heard <= 73 + MOST_STEPS + 1
    assert len(four[0]["flag"]["votes"]) < 120 / 8


def _interrupted_anywhere() -> list[tuple[int, int, list[int]]]:
    """Rank 1 is interrupted at one bytecode after the other of a boundary with a vote; then the ranks go on."""
    rank, group, found = dist.get_rank(), new_group(20), []

    for to_go in (0, 5):  # with a cut at that boundary, and without
        bytecode, over = 0, False
        while not over:
            left = [to_go]
            boundaries = Boundaries(Cadence(None, None, group, lambda left=left: left[0]))  # type: ignore[misc]
            boundaries.train(1)
            boundaries.pass_step()
            hit = True
            if rank == 1:
                hit = interrupt(
                    boundaries.boundary, ("/torchrec_stream_ckpt/ranks/", "/torchrec_stream_ckpt/save/"), bytecode
                )
            else:
                boundaries.boundary()
            left[0] = 5
            boundaries.train(8)
            left[0] = 0
            boundaries.train(4)
            found.append(
                (boundaries.cadence.next_step, boundaries.step, [step for step in boundaries.cuts if step > 6])
            )
            boundaries.cadence.close(20.0)
            last = torch.tensor(int(not hit))
            dist.all_reduce(last)
            over, bytecode = bool(last), bytecode + 5
    return found


def test_a_rank_that_is_interrupted_at_any_bytecode_votes_with_the_others_again() -> None:
    first, second = ranks.run(2, _interrupted_anywhere)
    assert len(first) > 80
    assert first == second


def _collectives(uri: str, steps: int) -> tuple[int, int]:
    """Collectives that ``step()`` makes on the training thread, votes, and markers."""
    made: list[str] = []
    thread = threading.get_ident()

    def counted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if thread == threading.get_ident():
                made.append(name)
            return real(*args, **kwargs)

        return call

    job = trainer(PLAN_1 if dist.get_world_size() == 1 else PLAN_2)
    settings = StreamConfig(uri=uri, drain_every="auto", max_overhead=0.01)
    with attach(job, settings, paranoid=False) as checkpointer, pytest.MonkeyPatch.context() as patch:
        job.step()
        checkpointer.step()
        votes = inside(checkpointer).count_votes()
        for name in vars(dist):
            if name.startswith(("all_", "broadcast", "gather", "scatter", "barrier", "reduce", "send", "recv")):
                patch.setattr(dist, name, counted(name, getattr(dist, name)))
        for _ in range(steps):
            job.step()
            made.clear()
            checkpointer.step()
            assert made == []
        patch.undo()
        return len(votes), inside(checkpointer).next_marker - 1


def test_a_single_rank_makes_no_collective_and_two_make_one_in_several_steps(tmp_path: Path) -> None:
    ((votes, markers),) = ranks.run(1, _collectives, f"file://{tmp_path}/one", 60)
    assert votes == 0
    assert markers >= 1
    both = ranks.run(2, _collectives, f"file://{tmp_path}/two", 120)
    assert both[0] == both[1]
    votes, markers = both[0]
    assert markers >= 1
    assert 0 < votes < 120 / 2


def _collectives_of_markers(uri: str) -> list[tuple[list[str], str]]:
    """Collectives of each ``mark()`` on the training thread, and how the call ended. An earlier one opens the job."""
    rank, job = dist.get_rank(), trainer(PLAN_2)
    made: list[str] = []
    found = []
    with (
        attach(job, StreamConfig(uri=uri, marker_every=None), paranoid=False) as checkpointer,
        pytest.MonkeyPatch.context() as patch,
    ):
        checkpointer.mark().result(60)
        group = inside(checkpointer).group

        def counted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                if kwargs.get("group") is group:
                    made.append(name)
                return real(*args, **kwargs)

            return call

        for name in vars(dist):
            if name.startswith(("all_", "broadcast", "gather", "scatter", "barrier", "reduce")):
                patch.setattr(dist, name, counted(name, getattr(dist, name)))

        def mark(meta: dict[str, float] | None = None) -> None:
            made.clear()
            try:
                said = str(checkpointer.mark(meta).result(60).id)
            except (ConfigError, FencedError, MarkerFailedError) as error:
                said = f"{type(error).__name__}: {error.message}"
            found.append((list(made), said))

        mark()  # the boundary has a marker, and nothing has changed
        job.step()
        checkpointer.step()
        mark()
        mark({"auc": 1.0} if rank == 0 else None)  # for the marker of this boundary
        mark({"auc": 1.0 + rank})
        if rank == 1:  # state that is not rows: no rank may take the marker of this boundary for this one
            torch.rand(1)
        mark()
        with patch.context() as slow:
            if rank == 1:
                slow.setattr(inside(checkpointer).coordinator, "settle", lambda timeout_s=None: False)
            mark()
        if rank == 1:
            inside(checkpointer).coordinator.fenced = FencedError(
                "another trainer has taken over this job", hint="stop"
            )
        mark()
        patch.undo()
    return found


def _exchanged(sizes: list[int]) -> tuple[list[list[bytes]], list[bytes], list[str]]:
    """Values of several sizes, gathered and broadcast; and the collectives that this took."""
    rank, group, made = dist.get_rank(), dist.new_group(backend="gloo"), list[str]()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_gather", "broadcast"):
            real = getattr(dist, name)
            patch.setattr(dist, name, lambda *a, _name=name, _real=real, **k: (made.append(_name), _real(*a, **k)))
        gathered = [collective.all_gather(bytes([rank]) * (size + rank), group) for size in sizes]
        told = [collective.broadcast(bytes([rank]) * size, group) for size in sizes]
    return gathered, told, made


def test_small_values_take_one_collective_and_large_ones_two(tmp_path: Path) -> None:
    header = len(pickle.dumps(b"\0" * 1000)) - 1000
    limit = collective.SLOT_BYTES - header
    sizes = [0, 1000, limit - 1, limit, 3 * limit]  # rank 1 has one byte more, and with limit - 1 both just fit
    both = ranks.run(2, _exchanged, sizes)
    assert both[0] == both[1]
    gathered, told, made = both[0]
    assert gathered == [[b"\0" * size, b"\1" * (size + 1)] for size in sizes]
    assert told == [b"\0" * size for size in sizes]
    assert made == ["all_gather"] * (3 + 2 * 2) + ["broadcast"] * (4 + 2)


def test_a_marker_takes_one_gather_that_carries_what_each_rank_says(tmp_path: Path) -> None:
    first, second = ranks.run(2, _collectives_of_markers, f"file://{tmp_path}/log")
    assert first == second
    gathers, said = zip(*first, strict=True)
    to_write = ["all_gather", "broadcast"]  # rank 0 adds metadata, and all hear how that went
    one = ["all_gather"]
    assert list(gathers) == [one, one, [*one, *to_write], one, one, one, one]
    assert said == (
        "1:1",
        "1:2",
        "1:2",
        "ConfigError: the ranks pass different meta or pin for this marker: rank 0 auc=1.0, rank 1 auc=2.0",
        "1:3",
        "MarkerFailedError: the marker in flight was neither committed nor given up within its bound",
        "FencedError: another trainer has taken over this job",
    )
