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


def lines_of(act: Callable[[], object]) -> Counter[Place]:
    """How often each line is executed until ``act`` returns, on this thread and on those that begin meanwhile.

    A round of a comprehension counts as well. What numpy, torch and the standard library do inside does not.
    """
    found: Counter[Place] = Counter()
    names: dict[str, str | None] = {}

    def count(frame: FrameType, event: str, _: object) -> Any:
        if event == "line":
            found[names[frame.f_code.co_filename] or "", frame.f_lineno] += 1
        return count

    def enter(frame: FrameType, _: str, __: object) -> Any:
        path = frame.f_code.co_filename
        if path not in names:
            names[path] = path[len(PACKAGE) + 1 :] if path.startswith(PACKAGE) else None
        return count if names[path] is not None else None

    before = sys.gettrace()
    threading.settrace(enter)
    sys.settrace(enter)
    try:
        act()
    finally:
        sys.settrace(before)
        threading.settrace(None)  # type: ignore[arg-type]
    return found


def grown(
    small: Counter[Place], large: Counter[Place], factor: float, *, least: int = 30
) -> dict[Place, tuple[int, int]]:
    """Lines that are executed more than ``factor`` times as often for the larger size, and at least ``least`` times."""
    return {
        place: (small[place], count)
        for place, count in large.items()
        if count >= least and count > factor * max(1, small[place])
    }
