"""Collect the metrics of a rank, on the training thread and when markers settle. Any thread can read them.

Nothing here reads a tensor, waits for a device or communicates with another rank.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

from torchrec_stream_ckpt.capture.hook import Capture
from torchrec_stream_ckpt.capture.prover import Prover
from torchrec_stream_ckpt.errors import ReplicaMismatchError
from torchrec_stream_ckpt.format.proof import Proved
from torchrec_stream_ckpt.format.ring import FrameRing
from torchrec_stream_ckpt.log.publisher import Publisher
from torchrec_stream_ckpt.log.stream import Strays
from torchrec_stream_ckpt.native.kernel import describe
from torchrec_stream_ckpt.util.stats import Stats, Stopwatch
from torchrec_stream_ckpt.util.types import Committed, MarkerId


@dataclass(frozen=True, slots=True)
class _Sent:
    """Totals of closed streams, and the open stream; replaced as a whole."""

    rows: int = 0
    num_bytes: int = 0
    restore_bytes: int = 0
    """Bytes that a restore of the parent marker reads on this rank."""
    generation: int = 0
    publisher: Publisher | None = None
    before: int = 0
    """Strays among the frames of streams that are closed."""
    strays: Strays = field(default_factory=Strays)
    """Strays in the open stream."""


@dataclass(frozen=True, slots=True)
class _Newest:
    """Newest committed marker, or the one that the generation is based on."""

    marker: MarkerId | None
    step: int
    cut_s: float
    """Time of its cut, or of the opening of the generation that is based on it; on the monotonic clock."""


class Telemetry:
    """Metrics of one rank.

    Args:
        rank: This rank.
        bytes_per_s: Bytes per second that one rank restores.
    """

    def __init__(self, rank: int, bytes_per_s: float) -> None:
        self._rank = rank
        self._bytes_per_s = bytes_per_s
        self.blocked, self.drain, self.cut, self.commit = (Stopwatch() for _ in range(4))
        self._sent = _Sent()
        self.newest = _Newest(None, 0, time.monotonic())
        self._lock = threading.Lock()
        self.committed = self.failed = self._differed = self.in_flight = 0

    def opened(
        self,
        generation: int,
        publisher: Publisher,
        strays: Strays,
        parent: MarkerId | None,
        step: int,
        parent_bytes: int | None,
    ) -> None:
        """Record that a generation is open.

        Args:
            generation: Number of the generation.
            publisher: Publisher of its stream.
            strays: Foreign records in its stream; updated from here on.
            parent: The marker that it is based on.
            step: Step of that marker.
            parent_bytes: Bytes that a restore of that marker reads on this rank; None for the bytes that this process
                has sent.
        """
        before = self._sent
        rows, num_bytes = before.rows, before.num_bytes
        if before.publisher is not None:
            rows, num_bytes = rows + before.publisher.rows, num_bytes + before.publisher.num_bytes
        if parent_bytes is None:
            parent_bytes = before.restore_bytes + num_bytes - before.num_bytes
        others = before.before + before.strays.count
        self._sent = _Sent(rows, num_bytes, parent_bytes, generation, publisher, others, strays)
        self.newest = _Newest(parent, step, time.monotonic())

    def follow(self, marker: MarkerId, step: int, future: Future[Committed]) -> None:
        """(training thread) Record a marker that was just cut, and its outcome when it settles."""
        with self._lock:
            self.in_flight += 1
        future.add_done_callback(partial(self._settled, _Newest(marker, step, time.monotonic())))

    def _settled(self, cut: _Newest, future: Future[Committed]) -> None:
        """(commit thread) Record the outcome of a marker."""
        error = future.exception()
        failed = error is not None
        with self._lock:
            self.in_flight -= 1
            self.failed += failed
            self._differed += isinstance(error, ReplicaMismatchError)
            self.committed += not failed
        if not failed:
            self.newest = cut
            self.commit.add(time.monotonic() - cut.cut_s)

    def stats(self, step: int, capture: Capture, ring: FrameRing, prover: Prover | None) -> Stats:
        """Return all current metrics. Safe on any thread."""
        proved = prover.proved if prover is not None else Proved(0, 0.0, 0)
        sent, newest, publisher = self._sent, self.newest, self._sent.publisher
        rows, num_bytes = (publisher.rows, publisher.num_bytes) if publisher is not None else (0, 0)
        pending, pending_bytes = publisher.backlog if publisher is not None else (0, 0)
        restore_bytes = sent.restore_bytes + num_bytes
        swept, all_rows = capture.sweep_progress
        with self._lock:
            committed, failed, in_flight = self.committed, self.failed, self.in_flight
            differed = self._differed
        return Stats(
            rank=self._rank,
            generation=sent.generation,
            step=step,
            rows=sent.rows + rows,
            num_bytes=sent.num_bytes + num_bytes,
            dirty_rows=capture.dirty_rows,
            swept_rows=swept,
            sweep_rows=all_rows,
            ring_used_bytes=ring.used_bytes,
            ring_limit_bytes=ring.ring_bytes,
            ring_waits=ring.waits,
            unacknowledged_frames=pending,
            unacknowledged_bytes=pending_bytes,
            log_up=publisher is None or publisher.failure is None,
            strays=sent.before + sent.strays.count,
            markers_committed=committed,
            markers_failed=failed,
            markers_differed=differed,
            marker_in_flight=in_flight > 0,
            newest=newest.marker,
            newest_step=newest.step,
            loss_s=time.monotonic() - newest.cut_s,
            loss_steps=max(0, step - newest.step),
            proof_round_markers=proved.round_markers,
            proved_ratio=proved.share,
            oldest_proof_markers=proved.oldest_markers,
            restore_bytes=restore_bytes,
            restore_s=restore_bytes / self._bytes_per_s,
            blocked=self.blocked.read(),
            drain=self.drain.read(),
            cut=self.cut.read(),
            commit=self.commit.read(),
            native_kernel=describe(),
            log_writes=publisher.writes if publisher is not None else "",
        )
