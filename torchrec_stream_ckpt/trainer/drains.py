"""What a step boundary sends without a marker: rows of the sweep, and rows that steps have touched."""

from __future__ import annotations

import logging

from torchrec_stream_ckpt.capture.hook import Capture
from torchrec_stream_ckpt.capture.sender import Drain
from torchrec_stream_ckpt.commit.pace import Pace
from torchrec_stream_ckpt.failpoints import failpoint
from torchrec_stream_ckpt.format.ring import FrameRing
from torchrec_stream_ckpt.log.publisher import Publisher
from torchrec_stream_ckpt.stats import Stopwatch

log = logging.getLogger(__name__)


class Drains:
    """Sends what finds space, and waits for nothing.

    Args:
        ring: Where frames go.
        pace: Says when a drain is due.
        sweep_bytes: What the sweep may send at a boundary.
        watch: Times each one.
        rank: Of this process, for messages.
    """

    def __init__(self, ring: FrameRing, pace: Pace, sweep_bytes: int, watch: Stopwatch, rank: int) -> None:
        self._ring = ring
        self._pace = pace
        self._sweep_bytes = sweep_bytes
        self._watch = watch
        self._rank = rank
        self.stranded = False
        """Whether one has failed on this rank."""

    def drain(self, capture: Capture, publisher: Publisher, drain: Drain) -> None:
        """Drain; if that fails here alone, training goes on and the next marker says it on all ranks."""
        try:
            with self._watch.running():
                self._drain(capture, publisher, drain)
        except Exception:  # the publisher has died: what was not sent stays marked
            if not self.stranded:
                log.exception("rank %d cannot drain: every marker will fail until the job is restarted", self._rank)
            self.stranded = True

    def _drain(self, capture: Capture, publisher: Publisher, drain: Drain) -> None:
        if not capture.swept:
            # First, and at every step: where steps touch more than the ring takes, the sweep must go on all the same.
            capture.sweep(drain, self._sweep_bytes)
            failpoint("sweep.sent")
        if capture.look(self._pace.drain_due(drain.step, self._ring.used_bytes / self._ring.ring_bytes)):
            self._drain_touched(capture, publisher, drain)
            failpoint("drain.sent")

    def _drain_touched(self, capture: Capture, publisher: Publisher, drain: Drain) -> None:
        rows, num_bytes = publisher.rows, publisher.num_bytes
        with self._pace.draining():
            capture.drain(drain)
        changed = publisher.rows - rows + capture.dirty_rows
        self._pace.drained(
            (publisher.num_bytes - num_bytes) / self._ring.ring_bytes, changed / max(1, capture.sweep_progress[1])
        )
