"""Raise at a chosen bytecode, as a signal handler that raises may at any of them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


class Interrupted(BaseException):
    """What the handler raises."""


def interrupt(action: Callable[[], object], places: tuple[str, ...], number: int) -> bool:
    """Call ``action`` and raise before the bytecode ``number`` of the code in some files.

    Args:
        action: What is interrupted.
        places: Parts of the files' paths.
        number: Of the bytecode, counted from 0 over all of those files as they are executed.

    Returns:
        Whether it was interrupted: False once ``number`` is past the end.
    """
    left, hit = number, False

    def step(frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal left, hit
        if event == "opcode" and not hit:
            hit = left == 0
            left -= 1
            if hit:
                raise Interrupted
        return step

    def enter(frame: FrameType, _event: str, _argument: Any) -> Any:
        # What a callback of a weak reference raises goes nowhere: it cannot interrupt anybody.
        if frame.f_code.co_name == "<lambda>" or not any(place in frame.f_code.co_filename for place in places):
            return None
        frame.f_trace_opcodes = True
        return step

    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # Python 3.12 traces bytecodes only if a frame asked for it before
    sys.settrace(enter)
    try:
        action()
    except Interrupted:
        pass
    finally:
        sys.settrace(before)
    return hit
