"""What one restore has found to be damaged: what is read around, what is read elsewhere, what is passed over."""

from __future__ import annotations

import logging
from collections.abc import Container, Mapping

from torchrec_stream_ckpt.errors import CorruptionError
from torchrec_stream_ckpt.route.route import Route
from torchrec_stream_ckpt.route.tiers import Place
from torchrec_stream_ckpt.types import MarkerId

log = logging.getLogger(__name__)

MAX_FALLBACK = 3


class Damaged:
    """What was found while markers were looked for and read. What is passed over is known on rank 0 alone.

    Args:
        most: How many markers may be passed over.
    """

    def __init__(self, most: int = MAX_FALLBACK) -> None:
        self._most = most
        self._errors: dict[MarkerId, CorruptionError] = {}
        """Markers that a restore without a name has passed over: damaged wherever they could be read."""
        self._segments: dict[bool, dict[str, CorruptionError]] = {False: {}, True: {}}
        """Segments of the inner tier's store and of the outer one's, by name: both have the same names."""
        self.places: dict[tuple[MarkerId, Place], CorruptionError] = {}
        """Where a marker turned out to be damaged while it was read."""

    def anew(self) -> Damaged:
        """For the next restore: what was damaged may be whole again, a materializer repairs it under the same name."""
        return Damaged(self._most)

    @property
    def passed(self) -> tuple[MarkerId, ...]:
        """The markers that were passed over, newest first."""
        return tuple(self._errors)

    def segments(self, place: Place) -> Mapping[str, CorruptionError]:
        """Return the segments, by name, that are read around in the store of a place."""
        return self._segments[place.reads_outer_store]

    def forget(self, passed: Container[MarkerId]) -> None:
        """Take back what was passed over, but for these."""
        self._errors = {marker: error for marker, error in self._errors.items() if marker in passed}

    @property
    def said(self) -> tuple[str, ...]:
        """Each marker with its reason."""
        return tuple(f"{marker}: {error.headline}" for marker, error in self._errors.items())

    def elsewhere(self, route: Route, error: CorruptionError, *, may_pass: bool = False) -> None:
        """Note that a marker is damaged where it was read: the next look reads around that, or elsewhere.

        Args:
            route: To the marker.
            error: What is damaged.
            may_pass: Whether an older marker will do.

        Raises:
            CorruptionError: ``error`` itself, where no other place has the rows.
        """
        name, place = route.segment_of(error), (route.marker, route.place)
        if name is not None and name not in self.segments(route.place):
            log.warning("marker %s is read around a damaged segment of the store: %s", route.marker, error.headline)
            self._segments[route.place.reads_outer_store][name] = error
        elif may_pass or (not route.place.outer_alone and place not in self.places):
            self.places[place] = error
        else:
            raise error

    def over(self, marker: MarkerId, error: CorruptionError) -> None:
        """Note that ``marker`` cannot be restored.

        Raises:
            CorruptionError: no further marker may be passed over.
        """
        self._errors[marker] = error
        if len(self._errors) > self._most:
            raise self.exhausted()
        log.warning("marker %s is damaged, falling back to the one before: %s", marker, error.headline)

    def exhausted(self) -> CorruptionError:
        """Return an error that says what is wrong with the newest one, and with which older ones."""
        (newest, error), *others = self._errors.items()
        older = {"older": "; ".join(f"{marker}: {each.message}" for marker, each in others)} if others else {}
        hint = "bring back what is missing; stream-ckpt verify --all tells which markers are whole: restore one by name"
        if error.hint and not others:
            hint = error.hint
        return type(error)(error.message, hint=hint, **{**error.where, "marker": str(newest), **older})
