"""The inside of a ``StreamCheckpointer``: the one place of tests and benchmarks that knows its private names.

A test that waits for a part, looks into one or breaks one asks here. So a part can move without a word in any test,
and the class that users hold has no member for tests. ``tests/unit/test_fences.py`` holds that.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from tests.parts import FrameRing, RowStager
from torchrec_stream_ckpt import StreamCheckpointer
from torchrec_stream_ckpt.capture.attached_model import Attached
from torchrec_stream_ckpt.capture.hook import Capture
from torchrec_stream_ckpt.capture.sender import Sender
from torchrec_stream_ckpt.capture.touched import TouchedRows
from torchrec_stream_ckpt.dense.dense_state import DenseState
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.inner import Tier
from torchrec_stream_ckpt.log.publisher import Publisher
from torchrec_stream_ckpt.model import FusedKernel
from torchrec_stream_ckpt.restore.session import Session
from torchrec_stream_ckpt.save.cadence import Cadence
from torchrec_stream_ckpt.save.coordinator import Coordinator
from torchrec_stream_ckpt.save.rank_cut import Cuts
from torchrec_stream_ckpt.save.stream import Stream
from torchrec_stream_ckpt.tiers.job import Tiered
from torchrec_stream_ckpt.util.types import Committed


class Inside:
    """The parts of one rank's checkpointer. What it returns is the part itself: a test may replace its methods."""

    def __init__(self, checkpointer: StreamCheckpointer) -> None:
        self._checkpointer = checkpointer
        self._streaming = checkpointer._streaming

    # What lives as long as the checkpointer.

    @property
    def attached(self) -> Attached:
        """The model with our hooks on it; another one after a reshard."""
        return self._checkpointer._attached

    @property
    def capture(self) -> Capture:
        return self.attached.capture

    @property
    def kernels(self) -> list[FusedKernel]:
        return self.attached.kernels

    @property
    def schema(self) -> Schema:
        return self.attached.schema

    @property
    def ring(self) -> FrameRing:
        return self._checkpointer._ring

    @property
    def dense(self) -> DenseState:
        return self._checkpointer._dense

    @property
    def session(self) -> Session:
        """The read side."""
        return self._checkpointer._session

    @property
    def tier(self) -> Tier:
        """What the job writes to."""
        return self._checkpointer._tier

    @property
    def tiers(self) -> Tiered:
        tiers = self._checkpointer._tiers
        assert tiers is not None
        return tiers

    @property
    def outer_tier(self) -> Tier:
        return self.tiers.logs.outer

    # What belongs to the generation that is open.

    @property
    def stream(self) -> Stream:
        assert self._streaming.stream is not None
        return self._streaming.stream

    @property
    def cuts(self) -> Cuts:
        return self.stream.cuts

    @property
    def coordinator(self) -> Coordinator:
        return self.stream.coordinator

    @property
    def publisher(self) -> Publisher:
        return self.stream.publisher

    # What happens at step boundaries.

    @property
    def next_marker(self) -> int:
        """The number of the next cut."""
        return self._streaming._next_marker

    @next_marker.setter
    def next_marker(self, number: int) -> None:
        self._streaming._next_marker = number

    @property
    def cadence(self) -> Cadence:
        return self._streaming._cadence

    @property
    def stranded(self) -> bool:
        """Whether a drain has raised on this rank."""
        return self._streaming._drains.stranded

    def cut(self) -> Future[Committed]:
        """Cut as the cadence does: at this boundary, without waiting for space."""
        return self._streaming._cut(self.stream, deadline_s=None)

    def waiting(self) -> AbstractContextManager[object]:
        """What is done within is not counted as training."""
        return self._streaming._pace.waiting()

    def settle(self, timeout_s: float = 60.0) -> None:
        """Send the rest of a cut that is open, and wait for the marker in flight."""
        self.cuts.complete(time.monotonic() + timeout_s)
        assert self.coordinator.settle(timeout_s)

    def wait_for_log(self, timeout_s: float = 600.0) -> None:
        """Until the log has acknowledged every frame of this rank; at once where there is no stream."""
        deadline = time.monotonic() + timeout_s
        while self._streaming.stream is not None and self.publisher.pending:
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def only_affordable_if(self, fact: Callable[[], bool]) -> None:
        """(``max_overhead``) No marker is affordable to this rank where ``fact`` says no."""
        own = self.cadence._affordable
        assert own is not None
        self.cadence._affordable = lambda: own() if fact() else 1

    def count_votes(self) -> list[int]:
        """Grows by one with each vote among the ranks that this one starts from here on."""
        votes = list[int]()
        group = self.group

        class Counting:
            def allreduce(self, *given: Any) -> dist.Work:
                votes.append(1)
                return group.allreduce(*given)

        self.cadence._group = Counting()  # type: ignore[assignment]
        return votes

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group of the training thread's collectives."""
        return self.cadence._group

    def at_newest_rows(self, load: Callable[[Callable[[], Any]], Any]) -> None:
        """A spare that loads the newest marker calls ``load`` with the session's own way to do it."""
        own = self.session.newest_rows
        self.session.newest_rows = lambda: load(own)  # type: ignore[method-assign]

    def commit_timeout(self, timeout_s: float) -> AbstractContextManager[object]:
        """Markers that are cut within wait so long for the log."""
        return patch.object(self.coordinator, "_timeout_s", timeout_s)

    def without_proofs(self) -> AbstractContextManager[object]:
        """Markers that are cut within prove nothing."""
        return patch.object(self.cuts, "_prover", None)

    # Parts of the capture, and faults in it.

    @property
    def masks(self) -> list[TouchedRows]:
        """One a kernel."""
        return masks_of(self.capture)

    def lose_a_hook(self) -> None:
        """The first kernel is updated from here on, and nobody marks its rows."""
        self.capture._removers[0]()

    def pass_over(self, row: int) -> None:
        """The sweep takes ``row`` of the first kernel for sent."""
        self.masks[0].sweep.unswept[row] = False  # type: ignore[attr-defined]

    @property
    def stager(self) -> RowStager:
        """Of the first shard."""
        return sender_of(self.capture).stagers[0][0]

    def number_rows_wrong(self) -> None:
        """Frames of the first shard name the row before each of theirs from here on."""
        stager = self.stager
        shard = replace(stager._shard, row0=stager._shard.row0 - 1)
        sender_of(self.capture).stagers[0][0] = RowStager(shard, stager.table, stager._identity)


def masks_of(capture: Capture) -> list[TouchedRows]:
    """The rows that it has to send, one a kernel."""
    return capture._masks


def sender_of(capture: Capture) -> Sender:
    """The stager that gathers them into frames."""
    return capture._sender


def inside(checkpointer: StreamCheckpointer) -> Inside:
    """The parts of ``checkpointer``."""
    return Inside(checkpointer)
