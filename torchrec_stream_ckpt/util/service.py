"""A service: works in rounds until it is stopped, and retries while a dependency is unavailable."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torchrec_stream_ckpt.errors import StreamCkptError


class Stopped(Exception):  # noqa: N818
    """The service was asked to stop. Its current work is done again when it starts."""


@dataclass(frozen=True, slots=True)
class Event:
    """An event of a service. Names of events and fields are stable: ``--json`` prints them."""

    event: str
    """``start``, ``marker``, ``trouble``, ``recovered``, ``stop``, or one that a service adds to these."""
    fields: dict[str, Any]


class Service(ABC):
    """Follows data that others write. :meth:`run` is for one thread, :meth:`stop` for any.

    Args:
        report: Takes events, on the thread of :meth:`run`.
        outlasts: Errors after which a round is tried again.
        retry_s: Seconds to wait before that: the first time, and at most.
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
        """Headline of the current error. Empty while the service works."""

    def stop(self) -> None:
        """End :meth:`run` soon. Safe on any thread and in a signal handler."""
        self._stop.set()

    def going_on(self) -> None:
        """End long work if the service was asked to stop. Long work calls this repeatedly.

        Raises:
            Stopped: The service was asked to stop.
        """
        if self._stop.is_set():
            raise Stopped

    def run(self, *, once: bool = False, poll_s: float) -> bool:
        """Work until :meth:`stop`. With ``once``, work until all that exists now is done.

        Returns:
            True if it came to its own end, False after :meth:`stop`.

        Raises:
            StreamCkptError: Waiting does not help; with ``once``, any error.
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
        """Do the work that exists now. With ``last``, no other round follows."""

    @abstractmethod
    def _totals(self) -> dict[str, Any]:
        """Sum up the work done, for the last event."""

    def _is_last(self) -> bool:
        """Return whether no more work will come."""
        return False

    def _is_over(self) -> bool:
        """Return whether the round just done is the last one, judging by its data."""
        return False

    def _wait(self, seconds: float) -> None:
        self._stop.wait(seconds)

    def _close(self) -> None:  # noqa: B027 (a service that opens nothing has nothing to close)
        """Close resources that rounds have opened."""

    def _say_trouble(self, error: StreamCkptError) -> None:
        """Report an error once for each change: a log that is away for hours is one line."""
        if error.headline != self._trouble:
            self._trouble = error.headline
            self.report(Event("trouble", {"message": error.headline, "hint": error.advice}))

    def _say_recovered(self) -> None:
        if self._trouble:
            self._trouble = ""
            self.report(Event("recovered", {}))
