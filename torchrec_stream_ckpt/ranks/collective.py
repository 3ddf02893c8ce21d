"""Small steps that all ranks take together: what fails on one rank fails on all, with the same error.

The process groups of one checkpointer, and what talks over them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from concurrent.futures import wait
from datetime import timedelta
from typing import TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from torchrec_stream_ckpt.errors import MarkerFailedError, RankLostError, StreamCkptError
from torchrec_stream_ckpt.log.worker import Worker
from torchrec_stream_ckpt.ranks.liveness import Roll

T = TypeVar("T")


def new_group(timeout_s: float) -> dist.ProcessGroup:
    """(all ranks) A gloo group of our own over all ranks, apart from those that training uses.

    Raises:
        RankLostError: not all ranks have come.
    """
    try:
        return cast("dist.ProcessGroup", dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s)))
    except RuntimeError as error:
        raise RankLostError(
            f"the ranks did not all come to make a process group within {timeout_s:.0f} s ({error})",
            hint="make the StreamCheckpointer on all ranks; look at the output and host of the one that is missing",
            rank=dist.get_rank(),
        ) from None


def outlast(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """The group, whose collectives wait as long as it takes: whoever calls them waits on another thread, and gives up.

    gloo's own time-out ends the connections of all ranks for good. A rank that came back after it found no group, and
    no marker came any more.
    """
    # Older torch has the same under another name.
    set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    set_timeout(timedelta(days=365), group)
    return group


def end_group(group: dist.ProcessGroup) -> None:
    """Let go of a group of our own: its threads and sockets end once nothing refers to it any more. Local."""
    with contextlib.suppress(ValueError):  # the job has ended all groups before
        dist.destroy_process_group(group)


class Team:
    """Collective helpers over one gloo group. Called by all ranks in the same order, from one thread.

    Each collective runs on a thread of its own, so that a wait for a rank that does not come can end. After that the
    training thread's team is of no use any more: the ranks are not in step.

    Args:
        group: Nothing else uses it meanwhile.
        roll: Tells where the ranks are.
        bound_s: How long one wait may take.
        in_call: It serves the calls on the training thread, which must be the same on all ranks.
    """

    def __init__(self, group: dist.ProcessGroup, roll: Roll, bound_s: float, *, in_call: bool = True) -> None:
        self._group = group
        self._roll = roll
        self._bound_s = bound_s
        self._in_call = in_call
        self._failure: StreamCkptError | None = None
        self.rank = dist.get_rank()
        self.world = dist.get_world_size()
        self._worker = Worker("stream-ckpt-collective") if self.world > 1 else None

    def close(self) -> None:
        """End the group. What still calls this fails, and does not fall back to a group that training uses."""
        if hasattr(self, "_group"):
            end_group(self._group)
            del self._group
        if self._worker is not None:
            self._worker.close()

    def gather(self, value: T) -> list[T]:
        """(all ranks) The value of each rank.

        Raises:
            RankLostError: a rank did not come.
            ConfigError: the ranks have come from different calls.
        """
        said = self._all_gather((self._roll.current if self._in_call else "", value), self._bound_s, "")
        calls = [call for call, _ in said]
        if len(set(calls)) > 1:
            self._failure = self._roll.out_of_step(calls)
            raise self._failure
        return [each for _, each in said]

    def agree(self, tag: tuple[int, int], value: T, bound_s: float, what: str) -> list[T]:
        """(all ranks, commit thread) The value of each rank at ``tag``, a marker and a phase of it.

        A rank that gave up waiting has gone on to a higher tag. A late rank hears so, and the others ask again: they
        are in step again without having said a word about it.

        Raises:
            RankLostError: a rank did not come.
            MarkerFailedError: the others have gone on.
        """
        begin = time.monotonic()
        while True:
            said = self._all_gather((tag, value), max(0.0, begin + bound_s - time.monotonic()), what)
            if len({phase for (_, phase), _ in said}) == 1:
                return [each for _, each in said]  # of different markers, too: the votes name them
            newest = max(other for other, _ in said)
            if tag < newest:
                ahead = [str(rank) for rank, (other, _) in enumerate(said) if other == newest]
                raise MarkerFailedError(
                    f"ranks {', '.join(ahead)} have given this marker up: rank {self.rank} was late", rank=self.rank
                )

    def _all_gather(self, value: T, bound_s: float, what: str) -> list[T]:
        def act() -> list[T]:
            group = self._group  # which is gone once this is closed, on one rank as well
            if self.world == 1:
                return [value]
            values: list[T | None] = [None] * self.world
            dist.all_gather_object(values, value, group=group)
            return cast("list[T]", values)

        return self._wait(act, bound_s, what)

    def _wait(self, act: Callable[[], T], bound_s: float, what: str) -> T:
        """Run a collective, but wait no longer than this."""
        if self._worker is None:
            return act()
        if self._failure is not None:
            raise self._failure
        future = self._worker.submit(act)
        try:
            self._roll.wait(lambda s: bool(wait([future], s).done), bound_s, what, in_call=self._in_call)
            return future.result()
        except StreamCkptError as error:
            if self._in_call:
                self._failure = error
            raise
        except RuntimeError as error:  # of gloo: a connection broke
            raise self._roll.lost(error, what or self._roll.current) from error

    def add(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """(all ranks) The sum over ranks of arrays of one shape."""
        total = torch.from_numpy(np.array(numbers))
        if self.world > 1:
            self._wait(lambda: dist.all_reduce(total, group=self._group), self._bound_s, "")
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
        self.gather(None)  # all ranks are in this call
        outcome: list[T | StreamCkptError | None] = [None]
        if self.rank == 0:
            try:
                outcome[0] = action()
            except Exception as failure:  # as above
                outcome[0] = self._carried(failure)
        if self.world > 1:
            self._wait(lambda: dist.broadcast_object_list(outcome, src=0, group=self._group), self._bound_s, "")
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


PEERS_S = 20.0
"""Other ranks are waited for so much longer than for the log."""


class Groups:
    """One group for each thread and purpose: calls on one group are in the same order on every rank. Collective.

    Args:
        commit_timeout_s: How long a commit may take.
    """

    def __init__(self, commit_timeout_s: float) -> None:
        bound_s = commit_timeout_s + PEERS_S
        self.vote_s = 2 * commit_timeout_s + 60
        """How long a vote may take."""
        self.step, commit_group, dense_group = (new_group(self.vote_s) for _ in range(3))
        self.dense = outlast(dense_group)
        """Dense state is saved over it, on a thread of its own."""
        self.roll = Roll.of(self.step)
        """Tells where the ranks are."""
        self.team = Team(self.step, self.roll, bound_s)
        """The training threads; over ``step``, as votes are."""
        self.commit_team = Team(outlast(commit_group), self.roll, bound_s, in_call=False)
        """The commit threads."""

    def close(self) -> None:
        """End their threads and sockets here: whatever still refers to this object keeps none alive."""
        self.roll.close()
        self.team.close()
        self.commit_team.close()
        end_group(self.dense)
        del self.dense, self.step
