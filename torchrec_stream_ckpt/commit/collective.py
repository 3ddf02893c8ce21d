"""Small steps that all ranks take together: what fails on one rank fails on all, with the same error."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from torchrec_stream_ckpt.errors import StreamCkptError

T = TypeVar("T")


def new_group(timeout_s: float) -> dist.ProcessGroup:
    """(all ranks) A gloo group of our own over all ranks, apart from those that training uses."""
    return cast("dist.ProcessGroup", dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s)))


def end_group(group: dist.ProcessGroup) -> None:
    """Let go of a group of our own: its threads and sockets end once nothing refers to it any more. Local."""
    with contextlib.suppress(ValueError):  # the job has ended all groups before
        dist.destroy_process_group(group)


class Team:
    """Collective helpers over one gloo group. Called by all ranks in the same order, from one thread."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank = dist.get_rank()
        self.world = dist.get_world_size()

    def close(self) -> None:
        """End the group. What still calls this fails, and does not fall back to a group that training uses."""
        if hasattr(self, "_group"):
            end_group(self._group)
            del self._group

    def gather(self, value: T) -> list[T]:
        """(all ranks) The value of each rank."""
        values: list[T | None] = [None] * self.world
        dist.all_gather_object(values, value, group=self._group)
        return cast("list[T]", values)

    def add(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """(all ranks) The sum over ranks of arrays of one shape."""
        total = torch.from_numpy(np.array(numbers))
        dist.all_reduce(total, group=self._group)
        return cast("npt.NDArray[np.int64]", total.numpy())

    def together(self, action: Callable[[], T]) -> T:
        """(all ranks) Do ``action`` on each rank; if it fails on one, the lowest such rank's error is raised on all.

        ``action`` must be local: a collective inside would be left alone by a rank that fails before it.
        """
        error: StreamCkptError | None = None
        result: T | None = None
        try:
            result = action()
        except Exception as failure:  # whatever it is: the other ranks must hear of it
            error = self._carried(failure)
        for raised in self.gather(error):
            if raised is not None:
                raise raised
        return cast("T", result)

    def on_rank0(self, action: Callable[[], T]) -> T:
        """Do ``action`` on rank 0 and give its result, or its error, to all ranks."""
        outcome: list[T | StreamCkptError | None] = [None]
        if self.rank == 0:
            try:
                outcome[0] = action()
            except Exception as failure:  # as above
                outcome[0] = self._carried(failure)
        dist.broadcast_object_list(outcome, src=0, group=self._group)
        if isinstance(outcome[0], StreamCkptError):
            raise outcome[0]
        return cast("T", outcome[0])

    def _carried(self, failure: Exception) -> StreamCkptError:
        """An error that other ranks can be sent; one that is not ours keeps its name, text and rank."""
        if isinstance(failure, StreamCkptError):
            return failure
        error = StreamCkptError(f"{type(failure).__name__}: {failure}", rank=self.rank)
        error.__cause__ = failure
        return error
