"""What every service does: rounds, patience, one word for each change, an end."""

from __future__ import annotations

from typing import Any

import pytest

from torchrec_stream_ckpt.errors import CorruptionError, LogUnavailableError, StreamCkptError
from torchrec_stream_ckpt.util.service import Event, Service

AWAY, FULL = LogUnavailableError("away", hint="mend it"), LogUnavailableError("full", hint="make room")


class Played(Service):
    """Each of its rounds does what a list says: None for a good one."""

    def __init__(self, rounds: list[StreamCkptError | None], last: int | None = None) -> None:
        self.said: list[tuple[str, object]] = []
        super().__init__(self._note, (LogUnavailableError,), (1.0, 4.0))
        self.rounds = rounds
        self._last = last
        self.waits: list[float] = []
        self.closed = 0

    def _note(self, event: Event) -> None:
        self.said.append((event.event, event.fields.get("message", self.closed)))

    def _round(self, *, once: bool, last: bool) -> None:
        self.going_on()
        error = self.rounds.pop(0)
        if error is not None:
            raise error

    def _totals(self) -> dict[str, Any]:
        return {}

    def _is_last(self) -> bool:
        return self._last is not None and len(self.rounds) <= self._last

    def _wait(self, seconds: float) -> None:
        self.waits.append(seconds)
        if not self.rounds:
            self.stop()

    def _close(self) -> None:
        self.closed += 1


def test_what_is_away_is_outlasted_and_each_change_said_once() -> None:
    service = Played([AWAY, AWAY, AWAY, FULL, None, None, AWAY, None])
    assert not service.run(poll_s=0.5)
    trouble = [("trouble", "away"), ("trouble", "full"), ("recovered", 0), ("trouble", "away"), ("recovered", 0)]
    assert service.said == [*trouble, ("stop", 1)]
    assert service.waits == [1.0, 2.0, 4.0, 4.0, 0.5, 0.5, 1.0, 0.5]


def test_once_is_one_round_and_outlasts_nothing() -> None:
    assert Played([None, None]).run(once=True, poll_s=0.5)
    service = Played([AWAY])
    with pytest.raises(LogUnavailableError):
        service.run(once=True, poll_s=0.5)
    assert (service.waits, service.said) == ([], [("stop", 1)])


def test_a_last_round_ends_it_once_it_has_worked() -> None:
    service = Played([None, AWAY, None, None], last=3)
    assert service.run(poll_s=0.5)
    assert service.said == [("trouble", "away"), ("recovered", 0), ("stop", 1)]


def test_what_waiting_does_not_mend_is_raised_after_it_has_closed() -> None:
    service = Played([None, CorruptionError("damaged")])
    with pytest.raises(CorruptionError):
        service.run(poll_s=0.5)
    assert service.said == [("stop", 1)]


def test_a_service_that_was_stopped_does_no_round() -> None:
    service = Played([None])
    service.stop()
    assert not service.run(poll_s=0.5)
    assert service.rounds == [None]
