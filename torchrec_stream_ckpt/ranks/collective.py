"""Short collective steps of all ranks: a failure on one rank fails on all, with the same error.

Also holds the process groups of one checkpointer, and the teams that communicate over them.
"""

from __future__ import annotations

import contextlib
import pickle
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
from torchrec_stream_ckpt.ranks.liveness import Liveness

T = TypeVar("T")


def new_group(timeout_s: float) -> dist.ProcessGroup:
    """(all ranks) Return a separate gloo group over all ranks, apart from those that training uses.

    Raises:
        RankLostError: Not all ranks have arrived.
    """
    try:
        return cast("dist.ProcessGroup", dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s)))
    except RuntimeError as error:
        raise RankLostError(
            f"not all ranks joined a process group within {timeout_s:.0f} s ({error})",
            hint="create the StreamCheckpointer on all ranks; check the output and host of the missing one",
            rank=dist.get_rank(),
        ) from None


def outlast(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Disable the time-out of a group's collectives, and return the group.

    Its callers wait on another thread, and give up.

    gloo's own time-out ends the connections of all ranks for good. A rank that resumed after it found no group, and no
    marker was committed any more.
    """
    # Older torch has this function under another name.
    set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    set_timeout(timedelta(days=365), group)
    return group


def end_group(group: dist.ProcessGroup) -> None:
    """Release a separate group: its threads and sockets end once nothing refers to it any more. Local."""
    with contextlib.suppress(ValueError):  # the job has ended all groups before
        dist.destroy_process_group(group)


SLOT_BYTES = 2048
"""Bytes of a pickled value that travel with its length. A longer value takes a second collective for the rest."""


def _slot(data: bytes) -> torch.Tensor:
    """Return the length of ``data``, its first ``SLOT_BYTES`` bytes, and zeros up to that size."""
    begin = data[:SLOT_BYTES].ljust(SLOT_BYTES, b"\0")
    return torch.frombuffer(bytearray(len(data).to_bytes(8, "little") + begin), dtype=torch.uint8)


def _rest(data: bytes, longest: int) -> torch.Tensor:
    """Return the bytes of ``data`` that its slot lacks, and zeros up to the longest value's."""
    return torch.frombuffer(bytearray(data[SLOT_BYTES:].ljust(longest - SLOT_BYTES, b"\0")), dtype=torch.uint8)


def _length(slot: torch.Tensor) -> int:
    return int.from_bytes(slot[:8].numpy().tobytes(), "little")


def all_gather(value: T, group: dist.ProcessGroup) -> list[T]:
    """(all ranks of the group) Return the value of each rank, pickled on the way.

    Small values take one collective. ``all_gather_object`` of torch always takes two in turn: lengths, then values.
    """
    data = pickle.dumps(value)
    slots = list(torch.empty(dist.get_world_size(group), 8 + SLOT_BYTES, dtype=torch.uint8))
    dist.all_gather(slots, _slot(data), group=group)
    lengths = [_length(slot) for slot in slots]
    found = [slot[8:].numpy().tobytes() for slot in slots]
    if (longest := max(lengths)) > SLOT_BYTES:
        rests = list(torch.empty(len(slots), longest - SLOT_BYTES, dtype=torch.uint8))
        dist.all_gather(rests, _rest(data, longest), group=group)
        found = [begin + rest.numpy().tobytes() for begin, rest in zip(found, rests, strict=True)]
    return [pickle.loads(each[:length]) for each, length in zip(found, lengths, strict=True)]


def broadcast(value: T, group: dist.ProcessGroup) -> T:
    """(all ranks of the job) Return rank 0's value, pickled on the way. A small value takes one collective."""
    data = pickle.dumps(value) if dist.get_rank() == 0 else b""
    slot = _slot(data)
    dist.broadcast(slot, src=0, group=group)
    length, found = _length(slot), slot[8:].numpy().tobytes()
    if length > SLOT_BYTES:
        rest = _rest(data, length)
        dist.broadcast(rest, src=0, group=group)
        found += rest.numpy().tobytes()
    return cast("T", pickle.loads(found[:length]))


class Team:
    """Collective helpers over one gloo group. Called by all ranks in the same order, from one thread.

    Each collective runs on a separate thread, so that a wait for a missing rank can end. After that, the training
    thread's team is unusable: the ranks are not in step.

    Args:
        group: Nothing else uses it meanwhile.
        roll: Knows the calls that the ranks are in.
        bound_s: Longest time of one wait.
        in_call: True if it serves the calls on the training thread, which must be the same on all ranks.
    """

    def __init__(self, group: dist.ProcessGroup, roll: Liveness, bound_s: float, *, in_call: bool = True) -> None:
        self._group = group
        self._roll = roll
        self._bound_s = bound_s
        self._in_call = in_call
        self._failure: StreamCkptError | None = None
        self.rank = dist.get_rank()
        self.world = dist.get_world_size()
        self._worker = Worker("stream-ckpt-collective") if self.world > 1 else None

    def close(self) -> None:
        """End the group. Later calls of this object fail, and do not fall back to a group that training uses."""
        if hasattr(self, "_group"):
            end_group(self._group)
            del self._group
        if self._worker is not None:
            self._worker.close()

    def gather(self, value: T) -> list[T]:
        """(all ranks) Return the value of each rank.

        Raises:
            RankLostError: A rank did not arrive.
            ConfigError: The ranks are in different calls.
        """
        said = self._all_gather((self._roll.current if self._in_call else "", value), self._bound_s, "")
        calls = [call for call, _ in said]
        if len(set(calls)) > 1:
            self._failure = self._roll.out_of_step(calls)
            raise self._failure
        return [each for _, each in said]

    def agree(self, tag: tuple[int, int], value: T, bound_s: float, what: str) -> list[T]:
        """(all ranks, commit thread) Return the value of each rank at ``tag``, a marker and a phase of it.

        A rank that gave up waiting has continued with a higher tag. A late rank detects this and raises, and the others
        ask again. So the ranks are in step again without further messages.

        Raises:
            RankLostError: A rank did not arrive.
            MarkerFailedError: The others have continued.
        """
        begin = time.monotonic()
        while True:
            said = self._all_gather((tag, value), max(0.0, begin + bound_s - time.monotonic()), what)
            if len({phase for (_, phase), _ in said}) == 1:
                return [each for _, each in said]  # even if of different markers: the votes name them
            newest = max(other for other, _ in said)
            if tag < newest:
                ahead = [str(rank) for rank, (other, _) in enumerate(said) if other == newest]
                raise MarkerFailedError(
                    f"ranks {', '.join(ahead)} have given up this marker because rank {self.rank} was late",
                    rank=self.rank,
                )

    def _all_gather(self, value: T, bound_s: float, what: str) -> list[T]:
        def act() -> list[T]:
            group = self._group  # missing once this is closed, even with one rank
            if self.world == 1:
                return [value]
            return all_gather(value, group)

        return self._wait(act, bound_s, what)

    def _wait(self, act: Callable[[], T], bound_s: float, what: str) -> T:
        """Run a collective, but wait at most ``bound_s``."""
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
        except RuntimeError as error:  # from gloo: a connection broke
            raise self._roll.lost(error, what or self._roll.current) from error

    def add(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """(all ranks) Return the sum over ranks of arrays of one shape."""
        total = torch.from_numpy(np.array(numbers))
        if self.world > 1:
            self._wait(lambda: dist.all_reduce(total, group=self._group), self._bound_s, "")
        return cast("npt.NDArray[np.int64]", total.numpy())

    def together(self, action: Callable[[], T]) -> T:
        """(all ranks) Run ``action`` on each rank. If it fails on some, raise the error of the lowest such rank on all.

        ``action`` must be local: a rank that fails before a collective inside it would not take part in that.
        """
        error: StreamCkptError | None = None
        result: T | None = None
        try:
            result = action()
        except Exception as failure:  # any error: the other ranks must get it
            error = self._carried(failure)
        for raised in self.gather(error):
            if raised is not None:
                raise raised
        return cast("T", result)

    def on_rank0(self, action: Callable[[], T]) -> T:
        """Run ``action`` on rank 0 and return its result, or raise its error, on all ranks."""
        self.gather(None)  # all ranks are in this call
        outcome: T | StreamCkptError | None = None
        if self.rank == 0:
            try:
                outcome = action()
            except Exception as failure:  # as above
                outcome = self._carried(failure)
        if self.world > 1:
            outcome = self._wait(lambda: broadcast(outcome, self._group), self._bound_s, "")
        if isinstance(outcome, StreamCkptError):
            raise outcome
        return cast("T", outcome)

    def _carried(self, failure: Exception) -> StreamCkptError:
        """Return an error that can be sent to other ranks. A foreign error keeps its name, text and rank."""
        if isinstance(failure, StreamCkptError):
            return failure
        error = StreamCkptError(f"{type(failure).__name__}: {failure}", rank=self.rank)
        error.__cause__ = failure
        return error


PEERS_S = 20.0
"""Additional time to wait for other ranks, compared with the log."""


class Groups:
    """One group for each thread and purpose: calls on one group are in the same order on every rank. Collective.

    Args:
        commit_timeout_s: Longest time of a commit.
    """

    def __init__(self, commit_timeout_s: float) -> None:
        bound_s = commit_timeout_s + PEERS_S
        self.vote_s = 2 * commit_timeout_s + 60
        """Longest time of a vote."""
        self.step, commit_group, dense_group = (new_group(self.vote_s) for _ in range(3))
        self.dense = outlast(dense_group)
        """The group for saving dense state, on a separate thread."""
        self.roll = Liveness.of(self.step)
        """Knows the calls that the ranks are in."""
        self.team = Team(self.step, self.roll, bound_s)
        """The team of the training threads, over ``step``, as votes are."""
        self.commit_team = Team(outlast(commit_group), self.roll, bound_s, in_call=False)
        """The team of the commit threads."""

    def close(self) -> None:
        """End their threads and sockets here, even if other objects still refer to this one."""
        self.roll.close()
        self.team.close()
        self.commit_team.close()
        end_group(self.dense)
        del self.dense, self.step
