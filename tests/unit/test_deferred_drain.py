"""Drains by counts that arrive later, as on a GPU, on a CPU: any order of events is exact, and nothing waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from tests.inside import masks_of, sender_of
from tests.parts import Drain, FrameBuffer, FrameRing
from tests.sampled import sampled
from tests.unit.captured_job import BUDGET_BYTES, EVENTS, ROWS, Job
from torchrec_stream_ckpt.capture.counts import LateCounts
from torchrec_stream_ckpt.capture.rowmask import BLOCK, RowMask
from torchrec_stream_ckpt.capture.touched import RangeSweep
from torchrec_stream_ckpt.errors import UnsupportedError
from torchrec_stream_ckpt.format.frame import MAX_FRAME_BYTES

CPU = torch.device("cpu")
BASES = (0, 5, 5, 12)


pytestmark = pytest.mark.usefixtures("one_thread")


class Copies:
    """In place of a GPU's events: copies to the host are done when the test says so."""

    def __init__(self) -> None:
        self.asked = self.done = 0

    def __call__(self, _device: torch.device) -> Callable[[], bool]:
        self.asked += 1
        number = self.asked
        return lambda: self.done >= number

    def arrive(self) -> None:
        self.done = self.asked


class DeferredJob(Job):
    """The job of a GPU, on a CPU."""

    def __init__(self, budget_bytes: int = BUDGET_BYTES, ring_frames: int = 2) -> None:
        self.copies = Copies()
        super().__init__(budget_bytes, defer=lambda _device: self.copies)
        self.ring = sender_of(self.capture).ring = FrameRing(ring_frames * MAX_FRAME_BYTES, budget_bytes)
        self.taken.clear()

    def arrive(self) -> None:
        self.copies.arrive()

    def sweep_again(self, table: int) -> None:
        if self.cut is None:
            masks_of(self.capture)[0].sweep.again([table])

    def sweep(self, max_bytes: int) -> None:
        if self.cut is None:
            self.capture.sweep(Drain(1, 1), max_bytes)

    def freeze(self) -> None:
        while not self.capture.swept:
            self.log_takes(9)
            self.sweep(10**6)
        super().freeze()

    def give_up(self) -> None:
        self.capture.frozen.give_up("the test says so")

    def drain_by_counts(self) -> bool:
        """Both halves of a drain."""
        assert not self.capture.look(due=True)
        self.arrive()
        assert self.capture.look(due=False)
        return self.capture.drain(Drain(1, 1))

    @property
    def marked(self) -> list[int]:
        return masks_of(self.capture)[0].touched.find().tolist()


MORE_EVENTS = st.one_of(
    EVENTS,
    st.tuples(st.just("arrive")),
    st.tuples(st.just("drain")),
    st.tuples(st.just("arrive")),
    st.tuples(st.just("drain")),
    st.tuples(st.just("give_up")),
    st.tuples(st.just("sweep_again"), st.integers(0, 1)),
    st.tuples(st.just("sweep"), st.integers(1, 300)),
)


@settings(max_examples=sampled(300, 50))
@given(st.lists(MORE_EVENTS, max_size=50), st.sampled_from([0, 400, BUDGET_BYTES, 10**6]), st.sampled_from([2, 3, 40]))
def test_a_cut_is_the_boundary_whenever_counts_arrive(
    events: list[tuple[object, ...]], budget_bytes: int, ring_frames: int
) -> None:
    job = DeferredJob(budget_bytes, ring_frames)
    for name, *arguments in events:
        getattr(job, str(name))(*arguments)
    job.end()
    assert job.ring.waits == 0


@settings(max_examples=sampled(100, 20))
@given(st.lists(MORE_EVENTS, max_size=30), st.sampled_from([2, 40]))
def test_drains_alone_send_all_that_is_marked_once_training_pauses(
    events: list[tuple[object, ...]], ring_frames: int
) -> None:
    job = DeferredJob(ring_frames=ring_frames)
    for name, *arguments in events:
        getattr(job, str(name))(*arguments)
    job.capture.frozen.give_up("the test is over")
    for _ in range(3 * sum(ROWS)):
        job.log_takes(99)
        job.arrive()
        job.drain()
        job.sweep(1_000)
    assert job.marked == []
    assert job.capture.swept
    assert job.capture.dirty_rows == 0
    assert job.says(job.tables())


def test_a_drain_sends_as_many_rows_as_were_counted_with_the_values_of_now() -> None:
    job = DeferredJob(ring_frames=40)
    job.forward([3, 7], [2])
    job.backward(0)
    assert not job.capture.look(due=True)
    job.forward([1, 3], [2, 8])
    job.backward(0)
    job.arrive()
    assert job.capture.look(due=False)
    assert job.capture.drain(Drain(1, 1))
    assert job.marked == [7, ROWS[0] + 8]  # of 1, 3, 7 the first two, of 2, 8 the first one
    sent = torch.tensor([1, 3])
    assert torch.equal(job.read[0][sent], job.tables()[0][sent])
    assert job.drain_by_counts()
    assert job.says(job.tables())


def test_while_counts_are_under_way_nothing_is_sent_and_nothing_is_counted_anew() -> None:
    job = DeferredJob()
    job.load()
    for _ in range(3):
        assert not job.capture.look(due=True)
    assert job.copies.asked == 1
    assert not job.capture.drain(Drain(1, 1))
    assert not job.taken
    assert len(job.marked) == sum(ROWS)


def test_without_a_drain_that_is_due_nothing_is_counted() -> None:
    job = DeferredJob()
    job.load()
    assert not job.capture.look(due=False)
    assert job.copies.asked == 0


def test_a_ring_that_is_full_ends_the_drain_until_the_next_one_is_due() -> None:
    job = DeferredJob(ring_frames=2)
    job.load()
    assert not job.drain_by_counts()
    assert len(job.taken) == 2
    assert len(job.marked) == job.capture.dirty_rows == sum(ROWS) - 6
    assert not job.capture.look(due=False)
    assert job.copies.asked == 1


@pytest.mark.parametrize("event", ["freeze", "begin", "write_in_place"])
def test_counts_of_marks_that_may_be_gone_are_not_used(event: str) -> None:
    """Marks are only set by the last one: its counts stay."""
    job = DeferredJob(ring_frames=40)
    job.load()
    assert not job.capture.look(due=True)
    job.arrive()
    if event == "begin":
        job.capture.begin()
    else:
        getattr(job, event)()
    job.capture.frozen.give_up("the test says so")
    assert job.capture.look(due=False) is (event == "write_in_place")


def _clear(mask: RowMask) -> None:
    mask.clear(torch.tensor([2]))


def _merge(mask: RowMask) -> None:
    RowMask(mask.total, CPU).merge(mask)


@pytest.mark.parametrize("clears", [_clear, _merge, RowMask.clear_all, RowMask.take])
def test_who_clears_a_mark_drops_the_counts(clears: Callable[[RowMask], None]) -> None:
    copies = Copies()
    mask = RowMask(BASES[-1], CPU, LateCounts(BASES, copies, CPU))
    assert mask.late is not None
    mask.fill_rows(torch.tensor([2, 3, 11]))
    mask.late.ask(mask.padded)
    copies.arrive()
    assert mask.late.arrived
    clears(mask)
    assert not mask.late.asked


def test_counts_are_by_shard_and_find_the_first_rows_of_each() -> None:
    copies = Copies()
    mask = RowMask(BASES[-1], CPU, LateCounts(BASES, copies, CPU))
    assert mask.late is not None
    mask.fill_rows(torch.tensor([2, 3, 11]))
    mask.late.ask(mask.padded)
    assert mask.late.take() is None
    mask.fill_rows(torch.tensor([0, 7, 12]))  # the last one is of an id that lies in no table
    copies.arrive()
    assert mask.late.take() == ([2, 0, 1], False)
    assert mask.late.take() is None
    rows, cuts = mask.late.first(mask.bits, [2, 0, 1])
    assert rows.tolist() == [0, 2, 7]
    assert cuts == (0, 2, 2, 3)
    mask.late.ask(mask.padded)
    copies.arrive()
    assert mask.late.take() == ([3, 0, 2], True)


@given(st.lists(st.integers(0, 200), min_size=1, max_size=5), st.integers(0, 2**32 - 1))
@settings(deadline=None)
def test_counts_are_those_of_a_sum_for_any_shards_and_marks(shards: list[int], seed: int) -> None:
    bases, copies = (0, *accumulate(shards)), Copies()
    mask = RowMask(bases[-1], CPU, LateCounts(bases, copies, CPU))
    assert mask.late is not None
    generator = torch.Generator().manual_seed(seed)
    mask.bits.copy_(torch.rand(mask.bits.shape, generator=generator) < torch.rand(1, generator=generator))
    mask.late.ask(mask.padded)
    copies.arrive()
    expected = [int(mask.bits[begin:end].sum()) for begin, end in pairwise(bases)]
    assert mask.late.take() == (expected, bool(mask.bits[-1]))


def test_a_few_ids_of_a_large_shard_are_marked_without_flags() -> None:
    total = 10_000 * BLOCK
    mask = RowMask(total, CPU, LateCounts((0, total), Copies(), CPU))
    mask.fill(0, total, np.array([5]))
    assert mask.find().tolist() == [5]


def test_an_id_of_no_table_is_refused_once_the_counts_are_there_and_by_a_marker() -> None:
    job = DeferredJob()
    masks_of(job.capture)[0].touched.fill_rows(torch.tensor([sum(ROWS)]))
    for _ in range(2):
        with pytest.raises(UnsupportedError, match=r"contained id -1.*"):
            job.drain_by_counts()
    with pytest.raises(UnsupportedError, match=r"contained id -1.*"):
        job.freeze()


@pytest.mark.parametrize("limit", [1, 3, 100])
def test_a_sweep_by_ranges_goes_through_its_shards_and_no_others(limit: int) -> None:
    sweep = RangeSweep((0, 5, 5, 12, 20), CPU)
    assert sweep.left == 0
    assert sweep.window(limit).rows.numel() == 0
    sweep.again([3, 0, 1])
    seen: list[int] = []
    while sweep.left:
        rows, cuts = sweep.window(limit)
        assert cuts is not None
        assert [row for row in rows.tolist() if row < 5] == rows[: cuts[1]].tolist()
        assert cuts[-1] == rows.numel() <= limit
        some = rows[: max(1, rows.numel() // 2)]  # the rest found no space
        sweep.sent(rows, some.numel())
        seen += some.tolist()
    assert seen == [*range(5), *range(12, 20)]


# Nothing waits for the device.


class WaitsForTheDeviceError(AssertionError):
    """What was called makes the host of a GPU wait."""


class Asynchronous(TorchDispatchMode):
    """Refuses every operator whose result, or its size, the host of a GPU has to wait for."""

    WAITING = ("nonzero", "_local_scalar_dense", "item", "is_nonzero", "equal", "masked_select")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        copies = name in ("copy_", "_to_copy") and not (kwargs.get("non_blocking") or (name == "copy_" and args[2:]))
        if name in self.WAITING or "unique" in name or copies:
            raise WaitsForTheDeviceError(str(func))
        return func(*args, **kwargs)


@contextmanager
def asynchronous() -> Iterator[None]:
    """The same for what does not come by the dispatcher on a CPU, and for tensors of what the host holds."""

    def refuse(*_args: object, **_more: object) -> None:
        raise WaitsForTheDeviceError

    with pytest.MonkeyPatch.context() as patched, Asynchronous():
        for name in ("tolist", "item", "cpu", "__bool__", "__int__", "__float__", "__index__"):
            patched.setattr(torch.Tensor, name, refuse)
        patched.setattr(torch, "tensor", refuse)
        yield


def test_look_drain_and_sweep_wait_for_nothing() -> None:
    job = DeferredJob(ring_frames=3)
    sender_of(job.capture).submit = lambda buffer: job.taken.append(buffer) or 0
    job.sweep_again(0)
    masks_of(job.capture)[0].mark_rows(None)
    with asynchronous():
        for _ in range(20):
            job.capture.sweep(Drain(1, 1), 100)
            if job.capture.look(due=True):
                job.capture.drain(Drain(1, 1))
            job.arrive()
            job.log_takes(9)
    assert job.capture.swept
    assert job.copies.asked > 3
    assert job.marked == []


def test_a_marker_does_wait() -> None:
    """So what refuses does refuse."""
    job = DeferredJob()
    with asynchronous(), pytest.raises(WaitsForTheDeviceError):
        job.capture.freeze(Drain(1, 1), lambda reason: None)


def test_a_drain_that_looks_by_itself_does_wait() -> None:
    job = Job()
    with asynchronous(), pytest.raises(WaitsForTheDeviceError):
        job.capture.drain(Drain(1, 1))


# Touch, freeze, drain and copy on write in any order, on one real kernel, against a copy of its tables.


@settings(max_examples=sampled(300, 50))
@given(st.lists(EVENTS, max_size=40), st.sampled_from([0, 400, BUDGET_BYTES, 10**6]))
def test_a_cut_that_is_sent_is_the_boundary_whatever_happens_meanwhile(
    events: list[tuple[object, ...]], budget_bytes: int
) -> None:
    job = Job(budget_bytes)
    for name, *arguments in events:
        getattr(job, str(name))(*arguments)
        assert job.ring.held_bytes <= job.ring.limit_bytes
    job.end()
    assert job.ring.waits == 0


def test_drains_go_on_for_ever_without_a_cut() -> None:
    job = Job()
    for _ in range(10):
        job.load()
        while not job.capture.drain(Drain(1, 1)):
            assert job.taken, "a drain with a free ring sends nothing"
            job.log_takes(9)
        job.log_takes(9)
        assert job.says(job.tables())


def test_one_step_fills_the_ring_once_whatever_the_log_takes_meanwhile() -> None:
    job = Job()
    job.load()
    sent = 0

    def acknowledged_at_once(buffer: FrameBuffer) -> int:
        nonlocal sent
        sent += 1
        job.ring.release(buffer)
        return 0

    sender_of(job.capture).submit = acknowledged_at_once
    assert not job.capture.drain(Drain(1, 1))
    assert sent == job.ring.capacity


def _frozen_and_full(budget_bytes: int) -> Job:
    """All rows are in a cut, two frames of which have taken the ring."""
    job = Job(budget_bytes)
    job.load()
    job.freeze()
    job.drain()
    assert not job.ring.has_room
    return job


def test_what_an_update_overwrites_is_sent_before_in_frames_of_its_size() -> None:
    job = _frozen_and_full(BUDGET_BYTES)
    before = job.ring.held_bytes
    job.forward([8, 16, 8], [2])
    job.forward([16, 0], [])
    job.backward(0)
    job.backward(0)
    assert job.capture.frozen.saved_rows == 3  # 8 and 16 of the first table, 2 of the second; 0 is in the ring
    assert len(job.taken) == 4
    assert 0 < job.ring.held_bytes - before < 1_500
    job.end()
    assert job.given_up == 0


def test_a_forward_from_before_the_cut_is_seen_as_well() -> None:
    job = Job()
    job.load()
    job.forward([12], [3])
    job.freeze()
    job.drain()
    job.backward(0)
    assert job.capture.frozen.saved_rows == 2
    job.end()
    assert job.given_up == 0


def test_without_memory_the_cut_is_given_up_and_its_rows_go_with_the_next_one() -> None:
    job = _frozen_and_full(0)
    job.forward([8], [])
    job.backward(0)
    assert job.given_up == 1
    assert job.capture.frozen.saved_rows == 0
    job.end()


def test_a_load_saves_the_rest_of_the_cut_or_gives_it_up() -> None:
    for budget_bytes, given_up in ((10**6, 0), (500, 1)):
        job = _frozen_and_full(budget_bytes)
        job.load()
        assert job.given_up == given_up
        job.end()


def test_rows_that_were_written_in_place_cannot_be_saved() -> None:
    job = _frozen_and_full(10**6)
    job.write_in_place()
    assert job.given_up == 1
    assert job.capture.outside.in_place
    job.end()


def test_a_stream_that_has_ended_gives_the_cut_up_and_lets_the_update_pass() -> None:
    job = _frozen_and_full(10**6)

    def ended(_buffer: FrameBuffer) -> int:
        raise RuntimeError("the publisher thread has died")

    live, sender_of(job.capture).submit = sender_of(job.capture).submit, ended
    before = [values.clone() for values in job.tables()]
    job.forward([8], [])
    job.backward(0)
    assert job.given_up == 1
    assert not torch.equal(before[0], job.tables()[0])
    sender_of(job.capture).submit = live
    job.end()
