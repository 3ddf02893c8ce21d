"""The thread that tells where a rank is: it begins and ends while other threads wait or close."""

from __future__ import annotations

import threading

import pytest
import torch.distributed as dist

from torchrec_stream_ckpt.errors import RankLostError
from torchrec_stream_ckpt.ranks.liveness import Liveness

NAME = "stream-ckpt-roll"
WAIT_S = 60.0


@pytest.fixture
def closed() -> Liveness:
    """Its thread has ended: the next wait starts another one, as when a rank is lost while this one closes."""
    roll = Liveness(dist.HashStore(), rank=0, world=2)
    roll.close()
    return roll


def ask(roll: Liveness) -> None:
    with pytest.raises(RankLostError):
        roll.wait(lambda _: False, 0.0, "marker 1")


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == NAME]


def test_a_close_waits_for_a_thread_that_another_one_just_starts(
    closed: Liveness, monkeypatch: pytest.MonkeyPatch
) -> None:
    starting, closing = threading.Event(), threading.Event()
    real = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name == NAME:
            starting.set()
            closing.wait(WAIT_S)
            threading.Event().wait(0.2)  # so that a close which does not wait for the start joins too early
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    asking = threading.Thread(target=ask, args=[closed])
    asking.start()
    assert starting.wait(WAIT_S)
    monkeypatch.setattr(closed.ending, "set", closing.set)
    closed.close()
    asking.join(WAIT_S)
    assert not asking.is_alive()


@pytest.mark.parametrize("started", [False, True])
def test_a_start_that_is_interrupted_is_made_again_and_its_wait_is_over(
    closed: Liveness, started: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        if started:
            real(thread)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            closed.wait(lambda _: False, 0.0, "marker 1")
    ask(closed)
    closed.close()
    for thread in threads():
        thread.join(WAIT_S)
    assert not threads()


def test_a_wait_that_is_interrupted_while_it_begins_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    roll = Liveness(dist.HashStore(), rank=0, world=2)

    def interrupted() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(roll.woken, "set", interrupted)
        with pytest.raises(KeyboardInterrupt):
            roll.wait(lambda _: False, 0.0, "marker 1")
    roll.close()
    for thread in threads():
        thread.join(WAIT_S)
    assert not threads()
