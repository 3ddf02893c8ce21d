"""What a signal handler raises on the training thread leaves no lock behind, wherever it raises."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from tests.interrupts import interrupt
from tests.parts import FrameRing
from torchrec_stream_ckpt.util.signal_safe import SafeCondition, SafeEvent, SafeFuture

PLACES = ("/threading.py", "/concurrent/futures/_base.py", "torchrec_stream_ckpt/")


def _on_another_thread(action: Callable[[], object]) -> bool:
    """Whether ``action`` ends there."""
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    thread.join(5)
    return not thread.is_alive()


def _interrupted_everywhere(make: Callable[[], tuple[Callable[[], object], Callable[[], object]]]) -> int:
    """Interrupt the first call of each pair wherever a signal may; the second one has to end on another thread."""
    number = 0
    while True:
        action, other = make()
        hit = interrupt(action, PLACES, number, where_signals_come=True)
        assert _on_another_thread(other), number
        if not hit:
            return number
        number += 1


def _condition(kind: type[threading.Condition]) -> tuple[Callable[[], object], Callable[[], object]]:
    condition = kind()

    def notify() -> None:
        with condition:
            condition.notify_all()

    return notify, notify


def test_a_condition_is_never_left_locked() -> None:
    assert _interrupted_everywhere(lambda: _condition(SafeCondition)) > 0


def test_one_of_the_standard_library_is_left_locked() -> None:
    action, other = _condition(threading.Condition)
    hits = [interrupt(action, PLACES, number, where_signals_come=True) for number in range(2)]
    assert all(hits)
    thread = threading.Thread(target=other, daemon=True)
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    condition = action.__closure__[0].cell_contents  # type: ignore[attr-defined]
    while condition._is_owned():
        condition.release()
    thread.join(20)


@pytest.mark.parametrize("call", ["set", "wait", "clear"])
def test_an_event_is_never_left_locked(call: str) -> None:
    def make() -> tuple[Callable[[], object], Callable[[], object]]:
        event = SafeEvent()
        if call != "set":
            event.set()
        return getattr(event, call), lambda: (event.set(), event.wait(), event.clear())

    assert _interrupted_everywhere(make) > 0


@pytest.mark.parametrize("call", ["result", "done", "exception"])
def test_a_future_is_never_left_locked(call: str) -> None:
    def make() -> tuple[Callable[[], object], Callable[[], object]]:
        future: SafeFuture[int] = SafeFuture()
        future.set_result(3)
        return getattr(future, call), future.result

    assert _interrupted_everywhere(make) > 0


def test_the_ring_is_never_left_locked() -> None:
    def make() -> tuple[Callable[[], object], Callable[[], object]]:
        ring = FrameRing(0, 0)

        def take() -> None:
            buffer = ring.acquire()
            assert buffer is not None
            ring.release(buffer)

        return take, take

    assert _interrupted_everywhere(make) > 10
