"""The thread that tells where a rank is: it begins and ends while other threads wait or close."""

from __future__ import annotations

import threading

import pytest
import torch.distributed as dist

from torchrec_stream_ckpt.commit.roll import Roll
from torchrec_stream_ckpt.errors import RankLostError

WAIT_S = 60.0


def test_a_close_waits_for_a_thread_that_another_one_just_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a rank dies: the commit thread asks for it once more, and the training thread closes meanwhile."""
    roll = Roll(dist.HashStore(), rank=0, world=2)
    roll.close("between calls")  # its thread has ended: the next wait starts another one
    starting, closing = threading.Event(), threading.Event()
    real = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name == "stream-ckpt-roll":
            starting.set()
            closing.wait(WAIT_S)
            closing.wait(0.2)
        real(thread)

    def asks() -> None:
        with pytest.raises(RankLostError):
            roll.wait(lambda _: False, 0.0, "marker 1")

    monkeypatch.setattr(threading.Thread, "start", start)
    asking = threading.Thread(target=asks)
    asking.start()
    assert starting.wait(WAIT_S)
    monkeypatch.setattr(roll._ending, "set", closing.set)
    roll.close()
    asking.join(WAIT_S)
    assert not asking.is_alive()
