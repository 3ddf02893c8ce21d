"""Event time: the time in its data up to which a rank has trained, and the stretch that all ranks have ended."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torchrec_stream_ckpt.errors import ConfigError
from torchrec_stream_ckpt.format.record import EVENT_S, Meta, meta_of
from torchrec_stream_ckpt.ranks.vote_interval import NEVER

_NONE = -(2**62)
"""Stretch of a rank that has no watermark."""


class EventTime:
    """Watermark of this rank, and the newest stretch that all ranks have reached. On the training thread.

    Stretches begin at the multiples of ``every_s`` in Unix time, so all ranks and all restarts cut alike.

    Args:
        every_s: Length of a stretch, in seconds; None if no marker is cut by event time.
    """

    def __init__(self, every_s: float | None) -> None:
        self._every_s = every_s
        self.watermark_s: float | None = None
        """This rank has trained all data that it was given up to this time; None if the user has not set it."""
        self._cut: int | None = None
        """Stretch of the newest marker. Before the first marker, the first stretch that all ranks have reached."""
        self._seen = _NONE
        """Newest stretch that all ranks have reached, as of the last vote."""
        self._voted: tuple[int, float] | None = None
        """Step and watermark of the last vote."""

    @property
    def counts(self) -> bool:
        """True if markers are cut by event time."""
        return self._every_s is not None

    def reach(self, event_s: float | None) -> None:
        """Record that a step has trained this rank's data up to ``event_s``. The watermark never decreases.

        Raises:
            ConfigError: the value is not a time, or none was ever given although markers are cut by event time.
        """
        if event_s is None:
            if self.counts and self.watermark_s is None:
                raise ConfigError(
                    "marker_every_event_s is set, but step() was called without event_s",
                    hint="call step(event_s=...) with the Unix time up to which this rank has trained, on all ranks",
                )
            return
        if isinstance(event_s, bool) or not isinstance(event_s, int | float) or not math.isfinite(event_s):
            raise ConfigError(f"event_s must be a finite number, got {event_s!r:.80}", hint="pass Unix time in seconds")
        self.watermark_s = max(float(event_s), self.watermark_s if self.watermark_s is not None else -math.inf)

    def stand_on(self, event_s: object) -> None:
        """Set the event time of the marker that this job continues from; ignored unless it is a number."""
        if self._every_s is not None and isinstance(event_s, int | float):
            self._cut = self._stretch(float(event_s))

    @property
    def stretch(self) -> int:
        """Number of this rank's current stretch, for the vote."""
        return self._stretch(self.watermark_s) if self._every_s is not None and self.watermark_s is not None else _NONE

    def _stretch(self, event_s: float) -> int:
        assert self._every_s is not None
        return max(_NONE + 1, min(2**62, math.floor(event_s / self._every_s)))

    def steps_to_go(self, step: int) -> int:
        """(at each vote) Estimate the steps until this rank has ended the stretch of the newest marker.

        The estimate uses the pace since the last vote. Returns 1 if the rank has ended it or the pace is unknown.
        """
        assert self._every_s is not None
        before = self._voted
        if self.watermark_s is None or self._cut is None:
            return 1
        self._voted = step, self.watermark_s
        left_s = (self._cut + 1) * self._every_s - self.watermark_s
        if before is None or step <= before[0] or left_s <= 0:
            return 1
        passed_s = self.watermark_s - before[1]
        return max(1, int(min(left_s * (step - before[0]) / passed_s, NEVER))) if passed_s > 0 else NEVER

    def heard(self, least: int) -> None:
        """Record that all ranks are in the stretch ``least`` or in a later one."""
        self._seen = max(self._seen, least)
        if self._cut is None and self._seen != _NONE:
            self._cut = self._seen

    @property
    def is_due(self) -> bool:
        """True if all ranks have ended the stretch of the newest marker; the same on all ranks."""
        return self.counts and self._cut is not None and self._seen > self._cut

    def cut(self) -> None:
        """Record that a marker was cut, for whatever reason."""
        if self._seen != _NONE:
            self._cut = self._seen


def with_event_time(meta: Meta, watermarks_s: Sequence[float | None]) -> Meta:
    """Add the event time to which all ranks have trained to a marker's metadata, unless the user has set it."""
    times = [each for each in watermarks_s if each is not None]
    if len(times) < len(watermarks_s) or EVENT_S in dict(meta):
        return meta
    return meta_of({EVENT_S: min(times), **dict(meta)})
