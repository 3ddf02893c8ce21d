"""Messages about markers that fail: why dense state was not saved, and how often one reason is logged."""

from __future__ import annotations

import errno
import math
import re
import time
from collections.abc import Iterator, Sequence

from torchrec_stream_ckpt.errors import StreamCkptError

SAY_EVERY_S = 60.0
"""Seconds between two log lines about markers that fail for one reason."""
_FULL = "no space left in"


class FailureLog:
    """Chooses the failed markers to log: the first one with a reason, then one a minute, with a count of the others."""

    def __init__(self) -> None:
        self._reason = ""
        self._said_s = -math.inf
        self._unsaid = 0

    def failed(self, failure: StreamCkptError) -> str | None:
        """Return the text to log, or None if the reason was logged within a minute."""
        reason = f"{type(failure).__name__} {re.sub(r'[0-9]+', '', failure.message)}"
        if reason == self._reason and time.monotonic() - self._said_s < SAY_EVERY_S:
            self._unsaid += 1
            return None
        before = (
            f"\n  {self._unsaid} more markers failed for this reason" if reason == self._reason and self._unsaid else ""
        )
        self._reason, self._said_s, self._unsaid = reason, time.monotonic(), 0
        return f"{failure}{before}"

    def committed(self) -> int:
        """End the series. Returns the number of failed markers that were not logged."""
        unsaid = self._unsaid
        self._reason, self._unsaid = "", 0
        return unsaid


def why_not_saved(error: BaseException, place: str) -> str:
    """Describe why the dense state of a marker was not saved.

    Args:
        error: Exception of DCP or of the store.
        place: URL of the store.
    """
    for each in _causes(error):
        if isinstance(each, OSError) and each.errno in (errno.ENOSPC, errno.EDQUOT):
            return f"{_FULL} {place}"
    return error.headline if isinstance(error, StreamCkptError) else f"{type(error).__name__}: {error}"


def hint_for(reasons: Sequence[str]) -> str:
    """Return what to try after a marker failed for these reasons. May be empty."""
    if any(_FULL in reason for reason in reasons):
        return "free space there, or delete markers with stream-ckpt gc; the next marker tries again"
    return ""


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception, those that caused it, and those of other ranks, which DCP keeps by rank."""
    while error is not None:
        yield error
        for failure, *_ in getattr(error, "failures", {}).values():
            yield from _causes(failure)
        error = error.__cause__
