"""Count the work of a call: how often each line of the package is executed. The count is the same at any load."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torchrec_stream_ckpt

PACKAGE = str(Path(torchrec_stream_ckpt.__file__).parent)

Place = tuple[str, int]
"""A file of the package, and a line of it."""


class Lines:
    """Counts lines that are executed, on the thread that asks and on all threads that begin while this is in use."""

    def __init__(self) -> None:
        self._found: Counter[Place] = Counter()
        self._names: dict[str, str | None] = {}

    def __enter__(self) -> Lines:
        threading.settrace(self._enter)
        return self

    def __exit__(self, *_: object) -> None:
        threading.settrace(None)  # type: ignore[arg-type]

    def of(self, act: Callable[[], object]) -> Counter[Place]:
        """How often each line is executed until ``act`` returns.

        A round of a comprehension counts as well. What numpy, torch and the standard library do inside does not.
        """
        self._found = found = Counter()
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            act()
        finally:
            sys.settrace(before)
            self._found = Counter()  # threads may go on
        return found

    def _count(self, frame: FrameType, event: str, _: object) -> Any:
        if event == "line":
            self._found[self._names[frame.f_code.co_filename] or "", frame.f_lineno] += 1
        return self._count

    def _enter(self, frame: FrameType, _: str, __: object) -> Any:
        path = frame.f_code.co_filename
        if path not in self._names:
            self._names[path] = path[len(PACKAGE) + 1 :] if path.startswith(PACKAGE) else None
        return self._count if self._names[path] is not None else None


def lines_of(act: Callable[[], object]) -> Counter[Place]:
    """How often each line is executed until ``act`` returns, on this thread and on those that begin meanwhile."""
    with Lines() as lines:
        return lines.of(act)


def grown(
    small: Counter[Place], large: Counter[Place], factor: float, *, least: int = 30
) -> dict[Place, tuple[int, int]]:
    """Lines that are executed more than ``factor`` times as often for the larger size, and at least ``least`` times."""
    return {
        place: (small[place], count)
        for place, count in large.items()
        if count >= least and count > factor * max(1, small[place])
    }
