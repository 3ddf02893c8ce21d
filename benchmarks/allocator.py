"""One setting of the C library's allocator, the same in every process of every variant.

With glibc's default a freed block may go back to the kernel or stay, depending on what the process has freed before. A
step of one job took 10,000 to 27,000 page faults or none by that alone, and a ``torch.load`` took 16 or 100 ms. So both
thresholds are fixed, high: memory that was freed stays in the process. Importing this module sets them here
(``mallopt``) and for all processes that are started from here (environment). ``BENCH_ALLOCATOR=default`` leaves the
allocator as it is, to show what that changes.
"""

from __future__ import annotations

import ctypes
import os
import platform
from pathlib import Path
from typing import Any

MMAP_THRESHOLD = 1 << 30
"""Bytes from which a block is a map of its own, and goes back to the kernel once it is freed."""
TRIM_THRESHOLD = (1 << 31) - 1
"""Free bytes at the end of the heap from which they go back; the most that ``mallopt`` takes."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_OTHERS = ("jemalloc", "tcmalloc", "mimalloc")


def fix() -> dict[str, Any]:
    """Set it; what a result says of it."""
    known = {"library": " ".join(platform.libc_ver()).strip() or "unknown"}
    if others := [name for name in _OTHERS if name in Path("/proc/self/maps").read_text()]:
        return {"library": others[0], "setting": "its own, the same for all variants"}
    if os.environ.get("BENCH_ALLOCATOR") == "default":
        return known | {"setting": "default, decided by what a process has freed before"}
    os.environ |= {"MALLOC_MMAP_THRESHOLD_": str(MMAP_THRESHOLD), "MALLOC_TRIM_THRESHOLD_": str(TRIM_THRESHOLD)}
    set_here = getattr(ctypes.CDLL(None), "mallopt", None)
    wanted = ((_M_MMAP_THRESHOLD, MMAP_THRESHOLD), (_M_TRIM_THRESHOLD, TRIM_THRESHOLD))
    if set_here is None or not all(set_here(name, value) for name, value in wanted):
        return known | {"setting": "default: this C library does not take the thresholds"}
    return known | {"mmap_threshold": MMAP_THRESHOLD, "trim_threshold": TRIM_THRESHOLD}


def trim() -> None:
    """Give all free memory back, so that what is allocated next is seen."""
    give_back = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if give_back is not None:
        give_back(0)


SETTING = fix()
