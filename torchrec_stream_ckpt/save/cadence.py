"""Decide when to cut: all ranks decide one step in advance, and no rank waits for the decision.

At the end of a step with a vote, all ranks start a tiny all-reduce. They read its result at the end of the next step,
when it has long arrived. A marker is cut there if rank 0 wants one and every rank is ready (its sweep has finished, and
it has no marker in flight). So all ranks cut at the same step, whatever their clocks show. All ranks also learn at the
same step that another trainer has taken over, that a rank had no memory to continue a cut, or that the log has lost a
rank's stream.

The result also contains the step of the next vote (``Spacing``), so no rank votes alone. In addition, all ranks vote
when a marker is due by steps, and at the first step after a cut. A single rank decides by the same rules without a
collective.

A signal handler may raise at any bytecode. A vote is started and stored in a single call that is written in C. Its
result counts once all of it is read, so a rank that was interrupted reads it at its next step. A rank that has missed
the step of a vote votes at the next one. The result contains the step at which the first rank voted, and all ranks
count from that step.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from operator import attrgetter

import torch
import torch.distributed as dist

from torchrec_stream_ckpt.errors import StreamCkptError
from torchrec_stream_ckpt.ranks.liveness import Liveness
from torchrec_stream_ckpt.ranks.vote_interval import NEVER, Spacing
from torchrec_stream_ckpt.save.event_time import EventTime

_EARLY = 0.1
"""Share of the interval by which a marker by seconds may come early, if the step before it is shorter than expected."""


@dataclass(frozen=True, slots=True)
class StepVote:
    """Vote of one rank at the end of a step; in a result, a field is true if it is true for every rank."""

    ready: bool
    """True if the rank can cut at the next step boundary without waiting, and (rank 0) a marker is due."""
    settled: bool
    """True if no marker is in flight on the rank."""
    owner: bool
    """True unless the rank has learned that another trainer has taken over."""
    holding: bool
    """True unless the rank has given up its part of the last cut."""
    sound: bool = True
    """True unless the log has lost an acknowledged frame of the rank's stream."""
    calm: bool = True
    """True unless a signal asks the rank for a marker."""
    staying: bool = True
    """True unless a signal asks the rank for a marker and the end of the job."""


NOTHING = StepVote(ready=False, settled=True, owner=True, holding=True)
_NAMES = [field.name for field in fields(StepVote)]
_flags_of = attrgetter(*_NAMES)


class Cadence:
    """Votes over a separate process group. Called on the training thread of every rank, at every step.

    Args:
        every_steps: Cut at each multiple of this number of steps; None for never.
        every_s: Cut when this many seconds have passed since the last cut; None for never.
        group: A gloo group that nothing else uses at the same time.
        affordable: Cut whenever a marker is affordable to all ranks. Returns the number of steps until it may be
            affordable to this rank, 0 if it is now. None to cut by steps and seconds alone.
        roll: Reports where the ranks are. If None, only the group's timeout bounds the wait for other ranks.
        bound_s: Maximum duration of a vote, in seconds.
        event_time: Cut when all ranks have ended a stretch of event time; None for never.
        listens: Vote even if no marker is due, because a marker may be requested from outside.
    """

    def __init__(
        self,
        every_steps: int | None,
        every_s: float | None,
        group: dist.ProcessGroup,
        affordable: Callable[[], int] | None = None,
        roll: Liveness | None = None,
        bound_s: float = 0.0,
        event_time: EventTime | None = None,
        *,
        listens: bool = False,
    ) -> None:
        self._every_steps = every_steps
        self._every_s = every_s
        self._group = group
        self._affordable = affordable
        self._roll, self._bound_s = roll, bound_s
        self.events = event_time or EventTime(None)
        """Progress of training in event time."""
        self._rank = dist.get_rank()
        self._alone = dist.get_world_size() == 1
        self._last_cut_s = time.monotonic()
        self._due = False
        self._spacing = Spacing(alone=self._alone)
        self._listens = listens or every_s is not None or affordable is not None or self.events.counts
        """True if votes take place regularly, and not only for markers that are due by steps or in flight."""
        self.next_step = NEVER
        """Step of the next vote, the same on all ranks."""
        self._flags: torch.Tensor | None = None
        """This rank's part of the last vote; after the vote has ended, its result."""
        self.works: list[dist.Work] = []
        """The open vote, if any."""
        self._own: list[int] = []
        """Vote of a job with a single rank."""
        self.open()

    def open(self) -> None:
        """(all ranks) Begin a generation. Its first vote is at its first step, or when a marker is due or cut."""
        self.next_step = 0 if self._listens else NEVER
        self._spacing.restart()

    def start(self, step: int, vote: StepVote) -> None:
        """At the end of ``step``, start a vote with this rank's state; the result is for the end of the next step.

        Does not wait. All ranks vote at the same steps, because all of them know what decides that.
        """
        self._due = self._due or (self._every_steps is not None and (step + 1) % self._every_steps == 0)
        if step < self.next_step and not self._due:
            return
        self._spacing.voting(step)
        # Rank 0's clock decides by seconds; all ranks know the steps.
        left_s = self._every_s - (time.monotonic() - self._last_cut_s) if self._every_s is not None else 0.0
        to_go = self._affordable() if self._affordable is not None else 0
        wanted = self._due or (self._every_s is not None and (self._is_due_next(left_s) or self._rank != 0))
        wanted = wanted or (self._affordable is not None and to_go == 0)
        soon = self._soon(left_s, polls=not vote.settled or not vote.calm or (wanted and not vote.ready))
        later = max(to_go, self.events.steps_to_go(step) if self.events.counts else 0)
        flags = _flags_of(replace(vote, ready=vote.ready and wanted))
        said = [*map(int, flags), int(vote.ready), self.events.stretch, step, soon, -later]
        if self._alone:
            self._own = said
            return
        self._flags = torch.tensor(said, dtype=torch.int64, device="cpu")
        with self._naming():
            # A single C call starts the collective and stores it: no signal handler runs in between.
            self.works.extend(map(self._group.allreduce, [[self._flags]], [dist.ReduceOp.MIN]))

    def _is_due_next(self, left_s: float) -> bool:
        """Return whether a marker by seconds is due at the next boundary, where the result of this vote is read."""
        assert self._every_s is not None
        return self._spacing.is_last_before(left_s, _EARLY * self._every_s)

    def _soon(self, left_s: float, *, polls: bool) -> int:
        """Return the number of steps after which this rank needs the next vote.

        Args:
            left_s: Seconds until a marker is due by time.
            polls: Whether the rank waits for an event that may happen at any moment.
        """
        if polls:
            steps = self._spacing.poll()
        else:
            self._spacing.restart()
            steps = self._spacing.longest if self._listens else NEVER
        if self._due:
            return 1
        return min(steps, self._spacing.steps_in(left_s)) if left_s > 0 and self._rank == 0 else steps

    def decide(self) -> StepVote:
        """Return the result of the vote, at the end of the next step. An interrupted call may be repeated."""
        said = self._said()
        if not said:
            return NOTHING
        *flags, able, stretch, first, soon, later = said
        vote = StepVote(**dict(zip(_NAMES, map(bool, flags), strict=True)))
        self.events.heard(stretch)
        if self.events.is_due or not vote.calm:  # all ranks know it, and cut at the first boundary at which all can
            vote = replace(vote, ready=bool(able))
        steps = 1 if vote.ready else soon if later >= 0 else min(soon, -later)
        self.next_step = first + steps
        self._void()
        return vote

    def _said(self) -> list[int]:
        """Wait for the vote, and return the minimum over all ranks of each field; empty if no vote is open."""
        if not self.works:
            return self._own
        (work,) = self.works
        try:
            if not work.is_completed() and self._roll is not None:
                self._roll.wait(lambda seconds: _done(work, seconds), self._bound_s)
            with self._naming():
                work.wait()
        except (RuntimeError, StreamCkptError):
            self._void()
            raise
        assert self._flags is not None
        said: list[int] = self._flags.tolist()
        return said

    def _void(self) -> None:
        """Discard the open vote."""
        self.works, self._own = [], []

    @contextlib.contextmanager
    def _naming(self) -> Iterator[None]:
        """Add the lost rank to errors of gloo, which does not name it when a connection breaks."""
        try:
            yield
        except RuntimeError as error:
            if self._roll is None:
                raise
            raise self._roll.lost(error, self._roll.current or "a vote") from error

    def cut(self) -> None:
        """Record that a cut was made at this step boundary, for any reason. An open vote becomes void."""
        self.decide()
        self.events.cut()
        self._due = False
        self.next_step = 0
        self._spacing.restart()
        self._last_cut_s = time.monotonic()

    def close(self, timeout_s: float) -> None:
        """Wait up to ``timeout_s`` for an open vote to end, because its threads must not outlive the process group."""
        works = self.works
        self._void()
        for work in works:
            with contextlib.suppress(RuntimeError):  # a peer is gone: there is nothing left to decide
                work.wait(timedelta(seconds=max(timeout_s, 0.001)))

    def end(self) -> None:
        """Release the group; no more votes follow."""
        del self._group


def _done(work: dist.Work, seconds: float) -> bool:
    """Wait up to ``seconds`` for a collective; returns whether it has ended."""
    ends = time.monotonic() + seconds
    pause = 0.00002
    while not work.is_completed():
        if time.monotonic() >= ends:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 0.001)
    return True
