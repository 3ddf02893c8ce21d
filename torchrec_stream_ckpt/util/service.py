"""A service: works round by round until it is told to stop, and outlasts what is away."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torchrec_stream_ckpt.errors import StreamCkptError


class Stopped(Exception):  # noqa: N818
    """The service was asked to stop; what it was doing is done again when it starts."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened. Names of events and fields are stable: ``--json`` prints them."""

    event: str
    """``start``, ``marker``, ``trouble``, ``recovered``, ``stop``, or what a service adds to these."""
    fields: dict[str, Any]


class Service(ABC):
    """Follows something that others write. :meth:`run` is for one thread, :meth:`stop` for any.

    Args:
        report: Takes events, on the thread of :meth:`run`.
        outlasts: Errors after which a round is tried again.
        retry_s: How long it waits before that: at first, and at most.
    """

    def __init__(
        self,
        report: Callable[[Event], None],
        outlasts: tuple[type[StreamCkptError], ...],
        retry_s: tuple[float, float],
    ) -> None:
        self.report = report
        self._outlasts = outlasts
        self._retry_s = retry_s
        self._stop = threading.Event()
        self._trouble = ""
        """What is away now; empty while nothing is."""

    def stop(self) -> None:
        """End :meth:`run` soon; safe on any thread and in a signal handler."""
        self._stop.set()

    def going_on(self) -> None:
        """Called again and again by whatever takes long: ends it where it stands.

        Raises:
            Stopped: the service is to stop.
        """
        if self._stop.is_set():
            raise Stopped

    def run(self, *, once: bool = False, poll_s: float) -> bool:
        """Work until :meth:`stop`; with ``once``, until nothing is missing that is there now.

        Returns:
            Whether it came to its own end: False after :meth:`stop`.

        Raises:
            StreamCkptError: waiting does not help; with ``once``, anything.
        """
        retry_s = self._retry_s[0]
        try:
            while not self._stop.is_set():
                last = once or self._is_last()
                try:
                    self._round(once=once, last=last)
                except self._outlasts as error:
                    if once:
                        raise
                    self._say_trouble(error)
                    self._wait(retry_s)
                    retry_s = min(2 * retry_s, self._retry_s[1])
                    continue
                retry_s = self._retry_s[0]
                self._say_recovered()
                if last or self._is_over():
                    return True
                self._wait(poll_s)
        except Stopped:
            pass
        finally:
            self._close()
            self.report(Event("stop", self._totals()))
        return False

    @abstractmethod
    def _round(self, *, once: bool, last: bool) -> None:
        """Do what there is to do now; with ``last``, no other round follows."""

    @abstractmethod
    def _totals(self) -> dict[str, Any]:
        """Sum up what was done, for the last event."""

    def _is_last(self) -> bool:
        """Return whether nothing more is to come."""
        return False

    def _is_over(self) -> bool:
        """Return whether the round that was just done is the last one, by what it has seen."""
        return False

    def _wait(self, seconds: float) -> None:
        self._stop.wait(seconds)

    def _close(self) -> None:  # noqa: B027 (a service that opens nothing has nothing to close)
        """Let go of what rounds have opened."""

    def _say_trouble(self, error: StreamCkptError) -> None:
        """Once for each change: a log that is away for hours is one line."""
        if error.headline != self._trouble:
            self._trouble = error.headline
            self.report(Event("trouble", {"message": error.headline, "hint": error.hint}))

    def _say_recovered(self) -> None:
        if self._trouble:
            self._trouble = ""
            self.report(Event("recovered", {}))
