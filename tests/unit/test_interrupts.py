"""An exception at every bytecode of the hooks and the masks: no changed row is lost, and no cut is wrong."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.inside import masks_of
from tests.interrupts import interrupt
from tests.parts import Drain
from tests.sampled import sampled
from tests.unit.captured_job import Job

PLACES = ("torchrec_stream_ckpt/capture/", "torchrec_stream_ckpt/model/", "torchrec_stream_ckpt/format/ring.py")
ROOM = 10**6


pytestmark = pytest.mark.usefixtures("one_thread")


def _settled(job: Job) -> None:
    """Nothing touched, nothing frozen, all of the ring free."""
    job.end()
    job.log_takes(99)


def _touched(job: Job) -> None:
    """Some rows wait for a drain."""
    _settled(job)
    job.forward([1, 5, 16], [2, 3])
    job.backward(0)


def _looked_up(job: Job) -> None:
    """Some rows wait for a drain, and an update is due."""
    _touched(job)
    job.forward([0, 5, 16], [2, 8])


def _frozen(job: Job) -> None:
    """A cut of which two frames were sent, and an update of rows of which some were not."""
    _settled(job)
    job.forward([0, 1, 2, 3, 4, 5, 8, 9], [2])
    job.backward(0)
    job.freeze()
    job.drain()
    job.forward([0, 8, 16, 8], [2])


def _sent(job: Job) -> None:
    """All rows of a cut but the last ones were sent."""
    _touched(job)
    job.freeze()


def _push(job: Job) -> None:
    job.log_takes(99)
    job.drain()


def _sweep(job: Job) -> None:
    for table in range(2):
        masks_of(job.capture)[0].sweep.again([table])
    job.capture.sweep(Drain(1, 1), 700)


CASES: dict[str, tuple[Callable[[Job], None], Callable[[Job], None]]] = {
    "an update": (_looked_up, lambda job: job.backward(0)),
    "a lookup": (_touched, lambda job: job.forward([0, 5], [8])),
    "an update of frozen rows": (_frozen, lambda job: job.backward(0)),
    "a drain": (_touched, Job.drain),
    "a drain without space": (lambda job: (_settled(job), job.load())[0], Job.drain),
    "a sweep": (_touched, _sweep),
    "freezing": (_touched, Job.freeze),
    "sending a cut": (_frozen, _push),
    "ending a cut": (_sent, Job.drain),
    "giving a cut up": (_frozen, lambda job: job.capture.frozen.give_up("the test says so")),
    "a rewrite of frozen rows": (_frozen, lambda job: job.rewrite(0, [8, 9])),
    "a load": (_frozen, Job.load),
}


GIVEN_UP = ("freezing", "sending a cut", "ending a cut", "giving a cut up")
"""Where ``Cuts`` gives the cut up, whatever was raised."""
EVERY = sampled(17, 37)
"""One of how many bytecodes of an event is interrupted, unless the test may be slow."""
OFTENER = dict.fromkeys(["an update", "a lookup"], sampled(5, 11))
"""The same of what runs in every step."""


def _interrupted_at(name: str, every: int) -> int:
    """Interrupt the event at each bytecode, or at one of ``every``; how often that was."""
    before, event = CASES[name]
    job = Job(ROOM)
    number = times = 0
    while True:
        before(job)
        if not interrupt(lambda: event(job), PLACES, number):
            return times
        number += every
        times += 1
        if job.capture.frozen.cut is not None and name in GIVEN_UP:
            job.capture.frozen.give_up("it was interrupted")
        if job.capture.frozen.cut is None:
            job.cut = None
        job.pending.clear()
        job.log_takes(99)
        while not job.capture.swept:
            job.capture.sweep(Drain(1, 1), ROOM)
            job.log_takes(99)
        job.end()


# Python 3.12 traces the end of a generator, too: what is raised there goes nowhere.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", CASES)
def test_an_exception_at_any_bytecode_loses_no_row(name: str) -> None:
    assert _interrupted_at(name, OFTENER.get(name, EVERY)) > 5


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_an_exception_at_each_bytecode_loses_no_row(name: str) -> None:
    assert _interrupted_at(name, 1) > 100
