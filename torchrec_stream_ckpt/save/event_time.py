"""Event time: how far a rank has trained in the time of its data, and which stretch of it all ranks have ended."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torchrec_stream_ckpt.errors import ConfigError
from torchrec_stream_ckpt.format.record import EVENT_S, Meta, meta_of
from torchrec_stream_ckpt.ranks.vote_interval import NEVER

_NONE = -(2**62)
"""The stretch of a rank that has no watermark."""


class EventTime:
    """The watermark of this rank, and the newest stretch that all ranks have reached. On the training thread.

    Stretches begin at the multiples of ``every_s``, in Unix time: all ranks and all restarts cut alike.

    Args:
        every_s: How long a stretch is; None: no marker is cut by event time.
    """

    def __init__(self, every_s: float | None) -> None:
        self._every_s = every_s
        self.watermark_s: float | None = None
        """All that this rank was given and that is older is trained; None: nobody has said."""
        self._cut: int | None = None
        """The stretch of the newest marker, or that the first look has found."""
        self._seen = _NONE
        """The newest stretch that all ranks have reached, as of the last vote."""
        self._voted: tuple[int, float] | None = None
        """Step and watermark of the last vote."""

    @property
    def counts(self) -> bool:
        """True if markers are cut by it."""
        return self._every_s is not None

    def reach(self, event_s: float | None) -> None:
        """A step has trained this rank's data up to here; a watermark never goes back.

        Raises:
            ConfigError: it is not a time, or nobody says it although markers are cut by it.
        """
        if event_s is None:
            if self.counts and self.watermark_s is None:
                raise ConfigError(
                    "marker_every_event_s is set, and step() is not told the time of the events",
                    hint="call step(event_s=...) with the Unix time up to which this rank has trained, on all ranks",
                )
            return
        if isinstance(event_s, bool) or not isinstance(event_s, int | float) or not math.isfinite(event_s):
            raise ConfigError(f"event_s is {event_s!r:.80}", hint="give a finite number, Unix time in seconds")
        self.watermark_s = max(float(event_s), self.watermark_s if self.watermark_s is not None else -math.inf)

    def stand_on(self, event_s: object) -> None:
        """The marker that this job goes on from was cut there; of no meaning unless it is a number."""
        if self._every_s is not None and isinstance(event_s, int | float):
            self._cut = self._stretch(float(event_s))

    @property
    def stretch(self) -> int:
        """Number of the stretch that this rank is in, for the vote."""
        return self._stretch(self.watermark_s) if self._every_s is not None and self.watermark_s is not None else _NONE

    def _stretch(self, event_s: float) -> int:
        assert self._every_s is not None
        return max(_NONE + 1, min(2**62, math.floor(event_s / self._every_s)))

    def steps_to_go(self, step: int) -> int:
        """(at each vote) Steps until this rank has ended the stretch of the newest marker, at the pace since the last.

        1 at least, also where it has ended it, or where the pace is not known.
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
        """All ranks are in this stretch, or in a later one."""
        self._seen = max(self._seen, least)
        if self._cut is None and self._seen != _NONE:
            self._cut = self._seen

    @property
    def is_due(self) -> bool:
        """True if all ranks have ended the stretch of the newest marker; the same on all of them."""
        return self.counts and self._cut is not None and self._seen > self._cut

    def cut(self) -> None:
        """A marker was cut, for whatever reason."""
        if self._seen != _NONE:
            self._cut = self._seen


def with_event_time(meta: Meta, watermarks_s: Sequence[float | None]) -> Meta:
    """Return the metadata of a marker, with the event time to which all ranks have trained unless the user says it."""
    times = [each for each in watermarks_s if each is not None]
    if len(times) < len(watermarks_s) or EVENT_S in dict(meta):
        return meta
    return meta_of({EVENT_S: min(times), **dict(meta)})
