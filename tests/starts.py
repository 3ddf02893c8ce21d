"""Restores into a job that has never stepped, and into one that holds another live state: both come to the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Run(Protocol):
    """Runs a function on all ranks of a job, as ``ranks.run`` and ``Pool.run`` do; returns what each rank returned."""

    def __call__(self, world: int, function: Callable[..., T], /, *args: Any) -> list[T]: ...


def _both(resume: Callable[..., T], args: tuple[Any, ...]) -> tuple[T, T]:
    return resume(*args, False), resume(*args, True)


def from_both_starts(run: Run, world: int, resume: Callable[..., T], *args: Any) -> list[list[T]]:
    """Restore a marker twice in the same processes. The first job has made no step, so it has no optimizer state and
    no gradients, and its buffers are as its constructor made them.

    Args:
        run: Runs a function on all ranks.
        world: How many there are.
        resume: Called with ``args``, and with whether the job is to step before it restores.
        args: What else it is called with.

    Returns:
        What each rank returned: of the job that has never stepped, then of the other one.
    """
    return [list(found) for found in zip(*run(world, _both, resume, args), strict=True)]
