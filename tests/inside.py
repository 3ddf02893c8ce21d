"""The inside of a ``StreamCheckpointer``: the one place of tests and benchmarks that knows its private names.

A test that waits for a part, looks into one or breaks one asks here. So a part can move without a word in any test,
and the class that users hold has no member for tests. ``tests/unit/test_fences.py`` holds that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from torchrec_stream_ckpt import StreamCheckpointer
from torchrec_stream_ckpt.capture.hook import Capture
from torchrec_stream_ckpt.capture.staging import RowStager
from torchrec_stream_ckpt.capture.touched import TouchedRows
from torchrec_stream_ckpt.dense.dense_state import DenseState
from torchrec_stream_ckpt.find.job import Tier
from torchrec_stream_ckpt.format.ring import FrameRing
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.log.publisher import Publisher
from torchrec_stream_ckpt.model import FusedKernel
from torchrec_stream_ckpt.restore.session import Session
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
    def capture(self) -> Capture:
        return self._checkpointer._attached.capture

    @property
    def kernels(self) -> list[FusedKernel]:
        return self._checkpointer._attached.kernels

    @property
    def schema(self) -> Schema:
        return self._checkpointer._attached.schema

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
        assert self._checkpointer._tiers is not None
        return self._checkpointer._tiers

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
        cadence = self._streaming._cadence
        own = cadence._affordable
        assert own is not None
        cadence._affordable = lambda: own() if fact() else 1

    def count_votes(self) -> list[int]:
        """Grows by one with each vote among the ranks that this one starts from here on."""
        cadence, votes = self._streaming._cadence, list[int]()
        group = cadence._group

        class Counting:
            def allreduce(self, *given: Any) -> dist.Work:
                votes.append(1)
                return group.allreduce(*given)

        cadence._group = Counting()  # type: ignore[assignment]
        return votes

    @contextmanager
    def commit_timeout(self, timeout_s: float) -> Iterator[None]:
        """Markers that are cut within wait so long for the log."""
        coordinator = self.coordinator
        before, coordinator._timeout_s = coordinator._timeout_s, timeout_s
        try:
            yield
        finally:
            coordinator._timeout_s = before

    @contextmanager
    def without_proofs(self) -> Iterator[None]:
        """Markers that are cut within prove nothing."""
        cuts = self.cuts
        before, cuts._prover = cuts._prover, None
        try:
            yield
        finally:
            cuts._prover = before

    # Parts of the capture, and faults in it.

    @property
    def masks(self) -> list[TouchedRows]:
        """One a kernel."""
        return self.capture._masks

    def lose_a_hook(self) -> None:
        """The first kernel is updated from here on, and nobody marks its rows."""
        self.capture._removers[0]()

    def pass_over(self, row: int) -> None:
        """The sweep takes ``row`` of the first kernel for sent."""
        self.masks[0].sweep.unswept[row] = False  # type: ignore[attr-defined]

    @property
    def stager(self) -> RowStager:
        """Of the first shard."""
        return self.capture._sender.stagers[0][0]

    def number_rows_wrong(self) -> None:
        """Frames of the first shard name the row before each of theirs from here on."""
        stager = self.stager
        shard = replace(stager._shard, row0=stager._shard.row0 - 1)
        self.capture._sender.stagers[0][0] = RowStager(shard, stager._table, stager._identity)


def inside(checkpointer: StreamCheckpointer) -> Inside:
    """The parts of ``checkpointer``."""
    return Inside(checkpointer)
