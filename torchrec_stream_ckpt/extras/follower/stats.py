"""Position of a replica as a value and as metrics, and its patience with outages."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from torchrec_stream_ckpt.errors import StreamCkptError
from torchrec_stream_ckpt.format.end_note import End
from torchrec_stream_ckpt.util.metrics import FOLLOWER_METRICS, Value, values_of
from torchrec_stream_ckpt.util.types import MarkerId

log = logging.getLogger(__name__)

RATE_S = 10.0
"""Seconds over which rates are taken."""


@dataclass(slots=True)
class FollowStats:
    """Position of a replica. The following thread writes it; any thread may read it."""

    marker: MarkerId | None = None
    """The newest marker that is wholly applied."""
    step: int = 0
    committed_s: float = 0.0
    """When that marker was committed, by the trainer's wall clock."""
    newest: MarkerId | None = None
    """The newest committed marker, as of the last look."""
    newest_s: float = 0.0
    """When it was committed, by the trainer's wall clock."""
    rows: int = 0
    """Number of row records handed out."""
    tombstones: int = 0
    """(a sink) Number of raw ids deleted, because a marker no longer has them."""
    markers: int = 0
    """Number of updates of kind LOAD and MARKER."""
    reloads: int = 0
    """Number of LOADs after the first one."""
    rollbacks: int = 0
    outages: int = 0
    """Number of times that log or store did not answer."""
    proofs: int = 0
    """Number of markers whose weights were compared with their proof."""
    unproved: int = 0
    """Number of blocks of rows that differed from their marker's proof, each counted when it was found."""
    doubted: int = 0
    """Number of these blocks that the tables still hold. Nothing is served until it is 0."""
    uncompared: int = 0
    """Number of markers applied without a comparison, because they have no proof, or it cannot be read."""
    reread: int = 0
    """(``FollowedModel``) Number of rows read again whole, because a marker changed only a part of their columns."""
    ended: End | None = None
    """The END record of the job's trainer, as of the last look; None while the trainer has written no END."""
    woken_by: str = ""
    """Kind of event that ends a wait: ``inotify``, ``fetch`` (Kafka's long poll), or ``poll`` (time alone). Empty
    before the first wait."""
    looks: int = 0
    """Number of times that the log was read."""
    wakeups: int = 0
    """Number of waits that news of the log has ended."""
    heard_s: float = field(default_factory=time.time)
    """When the log last answered."""
    _recent: deque[tuple[float, int, int]] = field(default_factory=deque)
    """When rows were handed out or raw ids deleted, and their numbers."""

    @property
    def age_s(self) -> float:
        """Seconds since the applied marker was committed; readers see no older data. Infinite without a marker."""
        return max(0.0, time.time() - self.committed_s) if self.marker is not None else float("inf")

    @property
    def lag_s(self) -> float:
        """Seconds by which the applied marker was committed before the newest one. 0 if they are the same; infinite
        without an applied marker."""
        if self.marker is None:
            return float("inf")
        return max(0.0, self.newest_s - self.committed_s) if self.newest != self.marker else 0.0

    @property
    def rows_per_s(self) -> float:
        """Row records a second over the last :data:`RATE_S` seconds."""
        now = time.monotonic()
        return sum(rows for when, rows, _ in list(self._recent) if now - when <= RATE_S) / RATE_S

    @property
    def tombstones_per_s(self) -> float:
        """(a sink) Raw ids deleted a second over the last :data:`RATE_S` seconds."""
        now = time.monotonic()
        return sum(deleted for when, _, deleted in list(self._recent) if now - when <= RATE_S) / RATE_S

    def count(self, rows: int, tombstones: int = 0) -> None:
        """Count rows that were handed out, and raw ids that were deleted in a sink."""
        self.rows += rows
        self.tombstones += tombstones
        now = time.monotonic()
        self._recent.append((now, rows, tombstones))
        while now - self._recent[0][0] > RATE_S:
            self._recent.popleft()


class Outages:
    """Waits while log and store, or a sink, do not answer, and logs that once.

    Args:
        stats: Counts the outages.
        over: Message for the end of one.
    """

    def __init__(self, stats: FollowStats, over: str = "the log and the store answer again") -> None:
        self._stats = stats
        self._over = over
        self.since: float | None = None
        """Time since which log or store has not answered, on the monotonic clock; None if they answer."""

    def over(self) -> None:
        """Note an answer."""
        if self.since is not None:
            log.warning("%s", self._over)
        self.since = None
        self._stats.heard_s = time.time()

    def outlast(self, error: StreamCkptError, longest_s: float) -> None:
        """Note that there was no answer; raises ``error`` once that has lasted ``longest_s``."""
        now = time.monotonic()
        if self.since is None:
            self.since = now
            self._stats.outages += 1
            log.warning("waiting up to %.0f s: %s", longest_s, error.headline)
        if now - self.since >= longest_s:
            raise error


def follower_values(stats: FollowStats) -> Mapping[str, Value]:
    """Return the values of metrics, by the names of ``FOLLOWER_METRICS``."""
    at, newest = stats.marker or MarkerId(0, 0), stats.newest or MarkerId(0, 0)
    numbers = {"newest_generation": newest.generation, "newest_marker": newest.marker}
    return values_of(stats, FOLLOWER_METRICS, generation=at.generation, marker=at.marker, **numbers)
