"""Raise at a chosen bytecode, as a signal handler that raises may at any of them."""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable
from functools import cache
from types import CodeType, FrameType
from typing import Any


class Interrupted(BaseException):
    """What the handler raises."""


@cache
def _looking(code: CodeType) -> frozenset[int]:
    """Offsets of the bytecodes of ``code`` at whose end the interpreter looks for signals."""
    ends = ("RESUME", "JUMP_BACKWARD", "CALL", "CALL_FUNCTION_EX", "CALL_KW")
    return frozenset(each.offset for each in dis.get_instructions(code) if each.opname in ends)


def interrupt(
    action: Callable[[], object], places: tuple[str, ...], number: int, *, where_signals_come: bool = False
) -> bool:
    """Call ``action`` and raise before the bytecode ``number`` of the code in some files.

    Args:
        action: What is interrupted.
        places: Parts of the files' paths.
        number: Of the bytecode, counted from 0 over all of those files as they are executed.
        where_signals_come: Count bytecodes alone before which the interpreter calls handlers of signals.

    Returns:
        Whether it was interrupted: False once ``number`` is past the end.
    """
    left, hit = number, False
    before_it: dict[int, int] = {}
    """Where each frame was last, by its identity; -1: in a function in Python, at whose end nobody looks."""

    def step(frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal left, hit
        if event == "opcode" and not hit:
            last, before_it[id(frame)] = before_it.get(id(frame)), frame.f_lasti
            if where_signals_come and last is not None and last not in _looking(frame.f_code):
                return step
            hit = left == 0
            left -= 1
            if hit:
                raise Interrupted
        return step

    def enter(frame: FrameType, _event: str, _argument: Any) -> Any:
        before_it.pop(id(frame), None)
        before_it[id(frame.f_back)] = -1
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
