"""Threads that train one kernel while another one drains it and cuts it: each cut is one moment, bit for bit."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from tests.inside import masks_of
from tests.parts import Drain
from tests.unit.captured_job import ROWS, Job
from torchrec_stream_ckpt.capture import hook
from torchrec_stream_ckpt.errors import MarkerFailedError


@pytest.fixture(autouse=True)
def threads_that_take_turns_often() -> Iterator[None]:
    threads, interval = torch.get_num_threads(), sys.getswitchinterval()
    torch.set_num_threads(1)
    sys.setswitchinterval(1e-5)
    yield
    torch.set_num_threads(threads)
    sys.setswitchinterval(interval)


class Trainers:
    """Threads that train random rows of a job until they are told to stop; a context."""

    def __init__(self, job: Job, count: int) -> None:
        self._job = job
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._train, args=(seed,)) for seed in range(count)]
        self.updates = [0] * count
        self.failed: list[BaseException] = []

    def _train(self, seed: int) -> None:
        draw = random.Random(seed)
        try:
            while not self._stop.is_set():
                ids = [[draw.randrange(rows) for _ in range(draw.randrange(4))] for rows in ROWS]
                offsets = torch.tensor([0, len(ids[0]), len(ids[0]) + len(ids[1])])
                self._job.tbe(torch.tensor(ids[0] + ids[1], dtype=torch.long), offsets).sum().backward()
                self.updates[seed] += 1
        except BaseException as error:
            self.failed.append(error)

    def __enter__(self) -> Trainers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(30)
        assert not any(thread.is_alive() for thread in self._threads)


class Boundaries(Job):
    """Knows what the tables held when a cut was made, though other threads train."""

    def __init__(self) -> None:
        super().__init__(budget_bytes=10**6)
        (mask,) = masks_of(self.capture)
        freeze = mask.freeze

        def frozen() -> None:
            self.cut = [values.clone() for values in self.tables()]
            freeze()

        mask.freeze = frozen  # type: ignore[method-assign]

    def freeze(self) -> None:
        self.cuts += 1
        self.capture.freeze(Drain(1, 1), self._give_up)


def _train_and_cut(seconds: float) -> tuple[int, int, int]:
    """Cuts, how many of them were given up, and the rows that copy on write has sent."""
    job, draw = Boundaries(), random.Random(0)
    end = time.monotonic() + seconds
    with Trainers(job, 3) as trainers:
        while time.monotonic() < end and not trainers.failed:
            if job.cut is None and draw.random() < 0.3:
                job.freeze()
            job.drain()
            job.log_takes(draw.randrange(4))
            time.sleep(draw.random() * 0.003)
    assert trainers.failed == []
    assert all(trainers.updates)
    while job.cut is not None:
        job.log_takes(9)
        job.drain()
    job.end()
    return job.cuts, job.given_up, job.capture.frozen.saved_rows


def test_a_cut_is_one_moment_while_threads_train() -> None:
    cuts, given_up, saved_rows = _train_and_cut(3)
    assert cuts > 10
    assert given_up == 0
    assert saved_rows > 0


@pytest.mark.slow
def test_many_cuts_are_one_moment_each_while_threads_train() -> None:
    cuts, given_up, _ = _train_and_cut(180)
    assert cuts > 1_000
    assert given_up == 0


def test_an_update_that_does_not_end_fails_the_marker_and_holds_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hook, "_PATIENCE_S", 0.05)
    job = Job()
    job.forward([1], [2])
    reached, go_on = threading.Event(), threading.Event()

    def stuck(_grads: object) -> None:
        reached.set()
        go_on.wait(30)

    node = job.pending[0].grad_fn
    assert node is not None
    node.register_prehook(stuck)  # type: ignore[arg-type]
    thread = threading.Thread(target=job.backward, args=(0,))
    thread.start()
    reached.wait(30)
    with pytest.raises(MarkerFailedError, match="a fused update has been running"):
        job.freeze()
    job.cut = None
    job.forward([3], [4])
    job.backward(0)  # another update is not held
    go_on.set()
    thread.join(30)
    assert not thread.is_alive()
    job.end()


def test_an_update_that_another_thread_begins_meanwhile_waits_for_the_cut() -> None:
    job = Boundaries()
    job.forward([1, 2], [3])
    order: list[str] = []
    update = job.pending.pop()
    thread = threading.Thread(target=lambda: (update.sum().backward(), order.append("updated")))
    with job.capture.still():
        thread.start()
        thread.join(0.3)
        order.append("cut")
    thread.join(30)
    assert order == ["cut", "updated"]
    job.end()


def test_notes_of_interrupted_updates_do_not_grow() -> None:
    job = Job()

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    for number in range(300):
        job.forward([number % ROWS[0]], [number % ROWS[1]])
        node = job.pending[0].grad_fn
        assert node is not None
        node.register_prehook(interrupted)
        with pytest.raises(KeyboardInterrupt):
            job.backward(0)
    assert len(job.capture._updates) <= 65
    job.end()
