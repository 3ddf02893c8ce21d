"""Warm ranks that the tests of one process share: :func:`run` is ``ranks.run`` for jobs that leave nothing behind.

A job that kills or freezes a rank, patches a module, reads log lines or counts threads has fresh processes, of
:mod:`tests.ranks`. Forked ones touch again what torch needs for a first job: 0.1 to 0.15 s of CPU for each rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tests.pool import Pool


@functools.cache
def pool() -> Pool:
    """The ranks; none of them is started before the first job."""
    return Pool()


def run(world: int, function: Callable[..., Any], *args: Any, timeout_s: float = 400.0) -> list[Any]:
    """Run to the end and return what each rank returned."""
    return pool().run(world, function, *args, timeout_s=timeout_s)


def close() -> None:
    """End them."""
    if pool.cache_info().currsize:
        pool().close()
        pool.cache_clear()
