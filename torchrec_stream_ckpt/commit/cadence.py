"""When to cut: decided by rank 0 one step ahead, known to every rank without waiting.

At the end of a step all ranks start a tiny all-reduce and read its result at the end of the next one, when
it has long arrived. A marker is cut there if rank 0 wants one and every rank is ready (its sweep has
finished, no marker is in flight on it). So all ranks cut at the same step, whatever their clocks say.
"""

from __future__ import annotations

import contextlib
import time
from datetime import timedelta

import torch
import torch.distributed as dist

_CLOSE_TIMEOUT = timedelta(seconds=5)


class Cadence:
    """Votes on cuts over a group of its own. Called on the training thread of every rank, at every step.

    Args:
        every_steps: Cut at each multiple of so many steps, or never when None.
        every_s: Cut when so many seconds have passed since the last cut, or never when None.
        group: A gloo group that nothing else uses.
    """

    def __init__(self, every_steps: int | None, every_s: float | None, group: dist.ProcessGroup) -> None:
        self._every_steps = every_steps
        self._every_s = every_s
        self._group = group
        self._rank = dist.get_rank()
        self._last_cut_s = time.monotonic()
        self._due = False
        self._vote: tuple[torch.Tensor, dist.Work] | None = None

    def start(self, step: int, ready: bool) -> None:
        """At the end of ``step``, vote on a cut at the end of the next one. Does not wait."""
        self._due = self._due or (self._every_steps is not None and (step + 1) % self._every_steps == 0)
        if not self._due and self._every_s is None:
            return
        timely = self._every_s is not None and time.monotonic() - self._last_cut_s >= self._every_s
        wanted = self._due or timely or self._rank != 0
        ballot = torch.tensor([int(ready and wanted)], dtype=torch.int32)
        work = dist.all_reduce(ballot, dist.ReduceOp.MIN, group=self._group, async_op=True)
        assert work is not None
        self._vote = (ballot, work)

    def decide(self) -> bool:
        """At the end of the next step: whether all ranks cut here."""
        if self._vote is None:
            return False
        ballot, work = self._vote
        self._vote = None
        work.wait()
        return bool(ballot.item())

    def cut(self) -> None:
        """A cut was made at this step boundary, for whatever reason; an open vote is void."""
        self.decide()
        self._due = False
        self._last_cut_s = time.monotonic()

    def close(self) -> None:
        """Let an open vote end, for a moment at most: its threads must not outlive the process group."""
        if self._vote is not None:
            _, work = self._vote
            self._vote = None
            with contextlib.suppress(RuntimeError):  # a peer is gone: there is nothing left to decide
                work.wait(_CLOSE_TIMEOUT)
