"""Where a scrub stands, kept in the store so that the next one goes on there, whoever was killed."""

from __future__ import annotations

import contextlib
import time

from torchrec_stream_ckpt.errors import CorruptionError, StoreUnavailableError, StreamCkptError
from torchrec_stream_ckpt.failpoints import failpoint
from torchrec_stream_ckpt.format.scrub_place import ScrubPlace
from torchrec_stream_ckpt.layout import SCRUB_DIR, parse_scrub_place, scrub_place_name
from torchrec_stream_ckpt.store.api import Objects


class PlaceKeeper:
    """The place of one kind of scrub. The store is asked for it when it is first needed.

    Args:
        objects: The store.
        job: Whose objects are read.
        who: ``service`` or ``command``: each has a place of its own.
        must: Whether a place that cannot be written is an error: a scrub that repairs nothing reads a read-only store,
            too.
    """

    def __init__(self, objects: Objects, job: bytes, who: str, *, must: bool) -> None:
        self._objects = objects
        self._job = job
        self._who = who
        self._must = must
        self._place: ScrubPlace | None = None
        self._number = 0
        """Of the place in the store."""
        self._kept_s = time.monotonic()
        self.unkept: StreamCkptError | None = None
        """Why the place is not kept."""

    @property
    def place(self) -> ScrubPlace:
        """Where the pass stands."""
        if self._place is None:
            self._place = self._load()
        return self._place

    @place.setter
    def place(self, place: ScrubPlace) -> None:
        self._place = place

    @property
    def age_s(self) -> float:
        """Seconds since the place was kept."""
        return time.monotonic() - self._kept_s

    @property
    def oldest_s(self) -> float:
        """Seconds since the beginning of the last pass that has read everything, or of the first: nothing that was
        there then has not been read for longer. 0 as long as the store was not asked."""
        since_s = (self._place.whole_s or self._place.begun_s) if self._place is not None else 0.0
        return max(0.0, time.time() - since_s) if since_s else 0.0

    def save(self) -> None:
        """Keep the place in the store.

        Raises:
            StoreUnavailableError: it was not written.
        """
        if not self.place.begun_s:
            return
        self._objects.put(scrub_place_name(self._job, self._who, self._number + 1), [self.place.to_bytes()])
        before, self._number = self._number, self._number + 1
        failpoint("scrub.place")
        if before:
            self._objects.delete(scrub_place_name(self._job, self._who, before))

    def keep(self) -> None:
        """Keep the place, if it must be kept or can be; raises as :meth:`save`."""
        self._kept_s = time.monotonic()
        try:
            self.save()
        except StoreUnavailableError as error:
            if self._must:
                raise
            self.unkept = error

    def _load(self) -> ScrubPlace:
        """Load the newest place that can be read; that of a scrub that has not begun if there is none."""
        names = (entry.name for entry in self._objects.list(f"{SCRUB_DIR}/{self._job.hex()}/"))
        parsed = (found for name in names if (found := parse_scrub_place(name)) is not None)
        numbers = sorted((number for _, who, number in parsed if who == self._who), reverse=True)
        self._number = numbers[0] if numbers else 0
        place = ScrubPlace(1, 0.0)
        for number in numbers:
            name = scrub_place_name(self._job, self._who, number)
            if not place.begun_s:
                with contextlib.suppress(CorruptionError):
                    place = ScrubPlace.from_bytes(self._objects.read(name), name)
            if number != self._number:
                with contextlib.suppress(StreamCkptError):
                    self._objects.delete(name)  # of one that was killed in between
        return place
