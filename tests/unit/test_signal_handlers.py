"""Handlers of signals: what they do, what stood before them, and where they step aside."""

from __future__ import annotations

import gc
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

import pytest

from torchrec_stream_ckpt.errors import ConfigError
from torchrec_stream_ckpt.save import signals as room
from torchrec_stream_ckpt.save.signals import MARK, STOP, Signals


@pytest.fixture(autouse=True)
def no_handlers() -> Iterator[None]:
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (STOP, MARK)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def installed(signal_s: float = 20.0) -> Signals:
    signals = Signals("mark", signal_s)
    signals.check()
    signals.install()
    return signals


def test_signals_of_a_kind_before_an_answer_are_one_and_one_after_it_is_another() -> None:
    signals = installed()
    assert not signals.pending(STOP)
    for number in (STOP, STOP, MARK):
        os.kill(os.getpid(), number)
    assert (signals.pending(STOP), signals.pending(MARK), signals.names) == (True, True, "SIGTERM and SIGUSR1")
    seen = signals.seen()
    os.kill(os.getpid(), MARK)  # after the look, so it is no part of the answer
    assert signals.answered(STOP, seen)
    assert not signals.answered(STOP, seen)
    assert signals.answered(MARK, seen)
    assert (signals.pending(STOP), signals.pending(MARK)) == (False, True)
    signals.remove()
    assert [signal.getsignal(number) for number in (STOP, MARK)] == [signal.SIG_DFL] * 2


def test_the_time_of_a_signal_runs_from_the_first_step_boundary_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    signals, now = installed(), [100.0]
    monkeypatch.setattr(room.time, "monotonic", lambda: now[0])
    os.kill(os.getpid(), STOP)
    now[0] += 50.0
    assert signals.waited_s(STOP) == 0.0
    for _ in range(2):
        signals.boundary()
        now[0] += 3.0
    assert (signals.waited_s(STOP), signals.waited_s(MARK)) == (6.0, 0.0)
    signals.answered(STOP, signals.seen())
    assert signals.waited_s(STOP) == 0.0
    signals.remove()


class Raised(Exception):  # noqa: N818
    pass


def test_the_handler_before_is_called_after_the_flag_and_what_it_raises_is_raised() -> None:
    heard: list[int] = []

    def earlier(number: int, _frame: FrameType | None) -> None:
        heard.append(number)
        raise Raised

    signal.signal(STOP, earlier)
    signals = installed()
    with pytest.raises(Raised):
        os.kill(os.getpid(), STOP)
    assert heard == [STOP]
    assert signals.pending(STOP)
    with signals.aside(), pytest.raises(Raised):
        os.kill(os.getpid(), STOP)
    assert signals.seen()[STOP] == 1
    signals.remove()
    assert signal.getsignal(STOP) is earlier


def test_under_a_handler_of_another_one_ours_stays_and_passes_on() -> None:
    heard: list[str] = []
    signal.signal(STOP, lambda *_: heard.append("before"))
    signals = installed()
    ours = signal.getsignal(STOP)

    def later(number: int, frame: FrameType | None) -> None:
        heard.append("later")
        assert callable(ours)
        ours(number, frame)

    signal.signal(STOP, later)
    os.kill(os.getpid(), STOP)
    assert (heard, signals.pending(STOP)) == (["later", "before"], True)
    signals.remove()
    assert signal.getsignal(STOP) is later
    os.kill(os.getpid(), STOP)
    assert heard == ["later", "before"] * 2
    assert signals.seen()[STOP] == 1


def ended_by(action: Callable[[], object]) -> int:
    """The signal that ends a child that does this, or 0."""
    child = os.fork()
    if child == 0:
        action()
        time.sleep(0.01)
        os._exit(0)
    return os.WTERMSIG(status) if os.WIFSIGNALED(status := os.waitpid(child, 0)[1]) else 0


def kill_myself() -> None:
    os.kill(os.getpid(), STOP)


@pytest.mark.parametrize("first", [0, 1])
def test_of_two_checkpointers_either_may_be_closed_first(first: int) -> None:
    both = installed(), installed()
    both[first].remove()
    other = both[1 - first]
    os.kill(os.getpid(), STOP)  # and this process goes on
    assert other.pending(STOP)
    assert not both[first].pending(STOP)
    other.remove()
    assert [signal.getsignal(number) for number in (STOP, MARK)] == [signal.SIG_DFL] * 2


def test_a_fork_a_spare_and_a_checkpointer_that_is_gone_are_ended_by_a_signal_as_ever() -> None:
    signals = installed()
    assert ended_by(kill_myself) == STOP  # of a pool, or of a loader

    def spare() -> None:
        mine = installed()
        with mine.aside():
            kill_myself()

    assert ended_by(spare) == STOP

    def forgotten() -> None:
        mine = installed()
        kill_myself()
        assert mine.pending(STOP)
        del mine
        gc.collect()
        kill_myself()

    signals.remove()
    assert ended_by(forgotten) == STOP
    signal.signal(STOP, signal.SIG_IGN)
    signals = installed()
    with signals.aside():
        kill_myself()
    signals.remove()
    assert signal.getsignal(STOP) == signal.SIG_IGN


def test_off_the_main_thread_and_over_a_foreign_handler_they_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    errors: list[ConfigError] = []

    def check() -> None:
        try:
            Signals("mark", 1.0).check()
        except ConfigError as error:
            errors.append(error)

    thread = threading.Thread(target=check, name="trainer")
    thread.start()
    thread.join()
    assert "on_signal requires the main thread" in str(errors[0])
    assert "this is trainer" in str(errors[0])
    thread = threading.Thread(target=Signals(None, 1.0).check)  # nothing is installed, and nothing refused
    thread.start()
    thread.join()
    monkeypatch.setattr(signal, "getsignal", lambda _: None)
    with pytest.raises(ConfigError, match="SIGTERM has a handler that Python did not install"):
        Signals("mark", 1.0).check()


def test_without_on_signal_nothing_is_installed() -> None:
    signals = Signals(None, 1.0)
    signals.install()
    assert signal.getsignal(STOP) == signal.SIG_DFL
    assert not signals.on
    signals.remove()


def test_a_rank_that_comes_to_no_step_boundary_is_told_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(room, "_TICK_S", 0.005)
    monkeypatch.setattr(room, "GRACE_S", 0.0)
    signals = installed(0.02)
    with caplog.at_level(logging.WARNING, room.__name__):
        os.kill(os.getpid(), STOP)
        deadline = time.monotonic() + 30
        while not caplog.messages and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(0.05)
        (said,) = caplog.messages
        assert "SIGTERM arrived 0 s ago, but this rank has not reached a step boundary since" in said
        signals.answered(STOP, signals.seen())
        os.kill(os.getpid(), STOP)
        signals.boundary()
        while len(caplog.messages) < 2 and time.monotonic() < deadline:
            time.sleep(0.005)
        assert "waits for the other ranks" in caplog.messages[1]
    signals.remove()
