"""What one rank of a trainer tells of itself, as plain values; and stopwatches that several threads may read."""

from __future__ import annotations

import contextlib
import threading
import time
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from torchrec_stream_ckpt.util.types import MarkerId

BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Upper bounds of the classes of a :class:`Timing`, in seconds."""

RESTORE_BYTES_PER_S = {"file": 1.5e9, "kafka": 0.15e9}
"""What one rank reads and applies in a second, by the log's scheme: an assumption until it is measured.

Measured on 2 cores: a file log that is in no cache 1.55 GB/s (``benchmarks/recovery``); Kafka on the same host, read
and checked, 0.157 GB/s (``benchmarks/ingest``)."""


@dataclass(frozen=True, slots=True)
class Timing:
    """How long something took, all times of this process together."""

    count: int = 0
    total_s: float = 0.0
    max_s: float = 0.0
    classes: tuple[int, ...] = (0,) * len(BUCKETS_S)
    """How many took at most ``BUCKETS_S[i]`` seconds."""


class Stopwatch:
    """Collects times. Safe to call from several threads; one call costs about a microsecond."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = [0] * (len(BUCKETS_S) + 1)
        self._total_s = 0.0
        self._max_s = 0.0
        self._peak_s = 0.0

    def add(self, seconds: float) -> None:
        place = bisect_left(BUCKETS_S, seconds)
        with self._lock:
            self._counts[place] += 1
            self._total_s += seconds
            self._max_s = max(self._max_s, seconds)
            self._peak_s = max(self._peak_s, seconds)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Time what is done within, whether it fails or not."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.add(time.perf_counter() - begin)

    def read(self) -> Timing:
        with self._lock:
            counts, total_s, max_s = tuple(self._counts), self._total_s, self._max_s
        return Timing(sum(counts), total_s, max_s, tuple(accumulate(counts[:-1])))

    def take_peak(self) -> float:
        """The longest time since the last call."""
        with self._lock:
            peak_s, self._peak_s = self._peak_s, 0.0
        return peak_s


@dataclass(frozen=True, slots=True)
class Stats:
    """Where one rank stands now. Counts are of this process, over all generations that it has opened."""

    rank: int
    generation: int
    """0 until one is open."""
    step: int
    rows: int
    """Row records that were captured and handed to the publisher; those of the sweep are among them."""
    num_bytes: int
    """Bytes of their frames, and of those without rows."""
    dirty_rows: int
    """Rows that had changed and stayed unsent when their masks were last looked at, for want of space in the ring;
    those of a cut that is being sent are among them. A mask is looked at by a drain and by a cut: nothing is scanned
    for this number, and what steps have touched since then is not in it."""
    swept_rows: int
    sweep_rows: int
    """Rows of this rank, of which ``swept_rows`` need no sweep any more, or never did."""
    ring_used_bytes: int
    ring_limit_bytes: int
    """Memory that unacknowledged frames take, and that the ring has without a marker's budget."""
    ring_waits: int
    """How often ``mark()`` or ``close()`` have waited for space."""
    unacknowledged_frames: int
    unacknowledged_bytes: int
    """Frames that the log has not acknowledged, and their bytes."""
    log_up: bool
    """True if the log takes frames, as far as the publisher knows."""
    strays: int
    """Records that others have put between this rank's frames, as far as the last marker looked."""
    markers_committed: int
    markers_failed: int
    markers_differed: int
    """Of those that failed: for replicas that differ between ranks."""
    marker_in_flight: bool
    newest: MarkerId | None
    """The last marker that this process has committed or restored."""
    newest_step: int
    loss_s: float
    """What would be lost if the job died now: seconds since the cut of the last committed marker; before the first one,
    since the generation was opened."""
    loss_steps: int
    """Steps that would be lost now."""
    proof_round_markers: int
    """Markers that prove every row of this rank once; 0 without proofs."""
    proved_ratio: float
    """How much of the rows the committed markers of this generation have proved, 0 to 1."""
    oldest_proof_markers: int
    """How many committed markers ago the oldest of these proofs was made that no newer one has replaced."""
    restore_bytes: int
    """This rank's share of what a restore of the newest state would read from the log alone."""
    restore_s: float
    """How long that takes at the rate that was assumed (``StreamConfig.restore_mb_per_s``)."""
    blocked: Timing
    """``step()``: how long the training thread was in it."""
    drain: Timing
    """Drains and sweeps, which are part of it."""
    cut: Timing
    """Cuts at their step boundaries."""
    commit: Timing
    """From a cut to the COMMIT that all ranks know of; markers that failed are not in it."""

    @property
    def sweep_ratio(self) -> float:
        """Share of the sweep that is done, 0 to 1."""
        return self.swept_rows / self.sweep_rows if self.sweep_rows else 1.0
