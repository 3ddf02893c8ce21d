"""Touch, freeze, drain and copy on write in any order, on one real kernel, against a copy of its tables."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.inside import sender_of
from tests.parts import Drain, FrameBuffer
from tests.sampled import sampled
from tests.unit.captured_job import BUDGET_BYTES, EVENTS, Job


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


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
