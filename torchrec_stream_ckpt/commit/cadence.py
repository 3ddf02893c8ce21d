"""When to cut: decided by rank 0 one step ahead, known to every rank without waiting.

At the end of a step all ranks start a tiny all-reduce and read its result at the end of the next one, when
it has long arrived. A marker is cut there if rank 0 wants one and every rank is ready (its sweep has
finished, no marker is in flight on it). So all ranks cut at the same step, whatever their clocks say, and
all ranks learn at the same step that another trainer has taken over, that a rank had no memory to go on with a cut, or
that the log has lost a rank's stream.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from torchrec_stream_ckpt.commit.event_time import EventTime
from torchrec_stream_ckpt.commit.roll import Roll


@dataclass(frozen=True, slots=True)
class StepVote:
    """What a rank says of itself at the end of a step; of all ranks together, what every one of them says."""

    ready: bool
    """It can cut at the next step boundary without waiting, and (rank 0) a marker is due."""
    settled: bool
    """No marker is in flight on it."""
    owner: bool
    """It has not been told that another trainer has taken over."""
    holding: bool
    """It has not given its part of the last cut up."""
    sound: bool = True
    """The log has not lost what it had acknowledged of its stream."""


NOTHING = StepVote(ready=False, settled=True, owner=True, holding=True)


class Cadence:
    """Votes over a group of its own. Called on the training thread of every rank, at every step.

    Args:
        every_steps: Cut at each multiple of this number of steps; None: never.
        every_s: Cut when this many seconds have passed since the last cut; None: never.
        affordable: Cut whenever this says so on all ranks, asked at every step; None: by steps and seconds alone.
        group: A gloo group that nothing else uses meanwhile.
        roll: Tells where the ranks are; None: waits for them have no bound but the group's.
        bound_s: How long a vote may take.
        event_time: Cut when all ranks have ended a stretch of it; None: never.
    """

    def __init__(
        self,
        every_steps: int | None,
        every_s: float | None,
        group: dist.ProcessGroup,
        affordable: Callable[[], bool] | None = None,
        roll: Roll | None = None,
        bound_s: float = 0.0,
        event_time: EventTime | None = None,
    ) -> None:
        self._every_steps = every_steps
        self._every_s = every_s
        self._group = group
        self._affordable = affordable
        self._roll, self._bound_s = roll, bound_s
        self.events = event_time or EventTime(None)
        """How far training is in the time of its data."""
        self._rank = dist.get_rank()
        self._last_cut_s = time.monotonic()
        self._due = False
        self._watching = False
        """A marker was cut, and not every rank has said yet that it has settled."""
        self._vote: tuple[torch.Tensor, dist.Work] | None = None

    def start(self, step: int, vote: StepVote) -> None:
        """At the end of ``step``, say how this rank stands; the answer is for the end of the next step.

        Does not wait. All ranks vote at the same steps: what decides that is known to all of them.
        """
        self._due = self._due or (self._every_steps is not None and (step + 1) % self._every_steps == 0)
        timed = self._every_s is not None or self.events.counts
        if not (self._due or self._watching or timed or self._affordable is not None):
            return
        timely = self._every_s is not None and time.monotonic() - self._last_cut_s >= self._every_s
        # Of the seconds, rank 0's clock decides; of the steps, all ranks know.
        wanted = self._due or (self._every_s is not None and (timely or self._rank != 0))
        wanted = wanted or (self._affordable is not None and self._affordable())
        said = (vote.ready and wanted, vote.settled, vote.owner, vote.holding, vote.sound)
        flags = torch.tensor([*said, vote.ready, self.events.stretch], dtype=torch.int64, device="cpu")
        with self._naming():
            work = dist.all_reduce(flags, dist.ReduceOp.MIN, group=self._group, async_op=True)
        assert work is not None
        self._vote = (flags, work)

    def decide(self) -> StepVote:
        """At the end of the next step: what all ranks said."""
        if self._vote is None:
            return NOTHING
        flags, work = self._vote
        self._vote = None
        if not work.is_completed() and self._roll is not None:
            self._roll.wait(lambda seconds: _done(work, seconds), self._bound_s)
        with self._naming():
            work.wait()
        *said, able, stretch = flags.tolist()
        vote = StepVote(*map(bool, said))
        self.events.heard(stretch)
        if self.events.is_due:  # all ranks know it: they cut at the first boundary at which all are able to
            vote = replace(vote, ready=bool(able))
        self._watching = self._watching and not vote.settled
        return vote

    @contextlib.contextmanager
    def _naming(self) -> Iterator[None]:
        """What gloo says of a connection that broke names no rank."""
        try:
            yield
        except RuntimeError as error:
            if self._roll is None:
                raise
            raise self._roll.lost(error, self._roll.current or "a vote") from error

    def cut(self) -> None:
        """A cut was made at this step boundary, for whatever reason; an open vote is void."""
        self.decide()
        self.events.cut()
        self._due = False
        self._watching = True
        self._last_cut_s = time.monotonic()

    def close(self, timeout_s: float) -> None:
        """Let an open vote end, for a moment at most: its threads must not outlive the process group."""
        if self._vote is not None:
            _, work = self._vote
            self._vote = None
            with contextlib.suppress(RuntimeError):  # a peer is gone: there is nothing left to decide
                work.wait(timedelta(seconds=max(timeout_s, 0.001)))

    def end(self) -> None:
        """No vote comes any more: let go of the group."""
        del self._group


def _done(work: dist.Work, seconds: float) -> bool:
    """Whether a collective ends within ``seconds``."""
    ends = time.monotonic() + seconds
    pause = 0.00002
    while not work.is_completed():
        if time.monotonic() >= ends:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 0.001)
    return True
