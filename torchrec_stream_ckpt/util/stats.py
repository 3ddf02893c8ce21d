"""Status of one rank of a trainer as plain values, and stopwatches that several threads may read."""

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

RESTORE_BYTES_PER_S = {"file": 1.5e9, "kafka": 0.15e9, "bucket": 0.15e9}
"""Bytes that one rank reads and applies in a second, by the log's scheme: an assumption until it is measured.

Measured on 2 cores: an uncached file log 1.55 GB/s (``benchmarks/recovery``); Kafka on the same host, read and checked,
0.157 GB/s (``benchmarks/ingest``). Of a bucket nothing was measured: what Kafka gives is assumed."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Durations of one kind of action, over the life of this process."""

    count: int = 0
    total_s: float = 0.0
    max_s: float = 0.0
    classes: tuple[int, ...] = (0,) * len(BUCKETS_S)
    """Number of durations of at most ``BUCKETS_S[i]`` seconds."""


class Stopwatch:
    """Collects durations. Thread-safe; one call costs about a microsecond."""

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
        """Time the block inside, whether it fails or not."""
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
        """Return the longest duration since the last call."""
        with self._lock:
            peak_s, self._peak_s = self._peak_s, 0.0
        return peak_s


@dataclass(frozen=True, slots=True)
class Stats:
    """Current status of one rank. Counts are of this process, over all generations that it has opened."""

    rank: int
    generation: int
    """Number of the generation. 0 until one is open."""
    step: int
    rows: int
    """Row records that were captured and handed to the publisher, including those of the sweep."""
    num_bytes: int
    """Bytes of their frames, and of those without rows."""
    dirty_rows: int
    """Changed rows that were unsent at the last look at their masks, because the ring had no space. They include those
    of a cut that is being sent. Only a drain and a cut look at a mask: nothing is scanned for this number, and rows
    touched since then are not in it."""
    swept_rows: int
    sweep_rows: int
    """Rows of this rank. ``swept_rows`` of them need no sweep any more, or never did."""
    ring_used_bytes: int
    ring_limit_bytes: int
    """Memory of unacknowledged frames, and memory of the ring without a marker's budget."""
    ring_waits: int
    """Number of times that ``mark()`` or ``close()`` waited for space."""
    unacknowledged_frames: int
    unacknowledged_bytes: int
    """Frames that the log has not acknowledged, and their bytes."""
    log_up: bool
    """True if the log takes frames, as far as the publisher knows."""
    strays: int
    """Records that others have put between this rank's frames, as of the last marker."""
    markers_committed: int
    markers_failed: int
    markers_differed: int
    """Failed markers whose replicas differed between ranks."""
    marker_in_flight: bool
    newest: MarkerId | None
    """The last marker that this process has committed or restored."""
    newest_step: int
    loss_s: float
    """Seconds that would be lost if the job died now: since the cut of the last committed marker or, before the first
    one, since the generation was opened."""
    loss_steps: int
    """Steps that would be lost now."""
    proof_round_markers: int
    """Number of markers that prove every row of this rank once. 0 without proofs."""
    proved_ratio: float
    """Share of the rows that the committed markers of this generation have proved, 0 to 1."""
    oldest_proof_markers: int
    """Number of committed markers since the oldest of these proofs that no newer one has replaced."""
    restore_bytes: int
    """Bytes of this rank's share of a restore of the newest state from the log alone."""
    restore_s: float
    """Seconds for that at the assumed rate (``StreamConfig.restore_mb_per_s``)."""
    blocked: Timing
    """Time of the training thread in ``step()``."""
    drain: Timing
    """Time of drains and sweeps, which is part of it."""
    cut: Timing
    """Time of cuts at their step boundaries."""
    commit: Timing
    """Time from a cut to the COMMIT that all ranks know of. Failed markers are not included."""
    native_kernel: str
    """Path of the native kernel that gathers and places rows, such as ``avx2``; or ``none`` with the reason."""
    log_writes: str
    """Way in which this rank's frames are written: ``direct``, ``buffered`` (with the reason, if the file system
    refuses direct writes), or ``kafka``. Empty before a generation is open."""

    @property
    def sweep_ratio(self) -> float:
        """Completed share of the sweep, 0 to 1."""
        return self.swept_rows / self.sweep_rows if self.sweep_rows else 1.0
