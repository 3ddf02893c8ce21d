"""Read everything that a store holds of a job again, piece by piece, and repair damage.

A pass reads the units of ``scrub_reader`` in the order of their names. Its place is saved in the store every few
seconds (:class:`PlaceKeeper`), so that the next scrub continues there after a kill. Two scrubs at once read everything
twice and do no harm.

Threads read segments and dense files ahead. They only report whether these are as they were written. If one is not, the
scrub reads it itself, and decides what is damaged and how to repair it.

A listing does not show gaps: :func:`lost_manifests` and :func:`markers_without_a_way` find missing manifests, and
markers to which no pieces lead.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass, replace
from itertools import islice

from torchrec_stream_ckpt.errors import (
    CorruptionError,
    MarkerNotFoundError,
    MissingObjectError,
    StoreUnavailableError,
    StreamCkptError,
)
from torchrec_stream_ckpt.find.strides import Strides
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.format.readings import MAX_DAMAGED, ScrubPlace
from torchrec_stream_ckpt.maintain.repairer import Repair
from torchrec_stream_ckpt.maintain.scrub.scrub_mender import ScrubMender, marker_of
from torchrec_stream_ckpt.maintain.scrub.scrub_reader import Part, ScrubReader
from torchrec_stream_ckpt.store.api import Objects, names_in
from torchrec_stream_ckpt.store.catalog import Catalog
from torchrec_stream_ckpt.store.identity import check_store, place_of
from torchrec_stream_ckpt.util.failpoints import failpoint
from torchrec_stream_ckpt.util.layout import (
    MANIFESTS_DIR,
    SCRUB_DIR,
    dropped_name,
    manifest_name,
    parse_marker_object,
    parse_scrub_place,
    scrub_place_name,
)
from torchrec_stream_ckpt.util.types import MarkerId


class PlaceKeeper:
    """Place of one kind of scrub. Loaded from the store on first use.

    Args:
        objects: The store.
        job: Job whose objects are read.
        who: ``service`` or ``command``: each has its own place.
        must: Whether a place that cannot be written is an error. A scrub that repairs nothing can also read a read-only
            store.
    """

    def __init__(self, objects: Objects, job: bytes, who: str, *, must: bool) -> None:
        self._objects = objects
        self._job = job
        self._who = who
        self._must = must
        self._place: ScrubPlace | None = None
        self._number = 0
        """Number of the place in the store."""
        self._kept_s = time.monotonic()
        self.unkept: StreamCkptError | None = None
        """Error because of which the place is not saved."""

    @property
    def place(self) -> ScrubPlace:
        """Current place of the pass."""
        if self._place is None:
            self._place = self._load()
        return self._place

    @place.setter
    def place(self, place: ScrubPlace) -> None:
        self._place = place

    @property
    def age_s(self) -> float:
        """Seconds since the place was saved."""
        return time.monotonic() - self._kept_s

    @property
    def oldest_s(self) -> float:
        """Seconds since the beginning of the last pass that has read everything, or of the first pass. No object that
        existed then has gone unread for longer. 0 until the place is loaded.
        """
        since_s = (self._place.whole_s or self._place.begun_s) if self._place is not None else 0.0
        return max(0.0, time.time() - since_s) if since_s else 0.0

    def save(self) -> None:
        """Save the place in the store.

        Raises:
            StoreUnavailableError: the place was not written.
        """
        if not self.place.begun_s:
            return
        self._objects.put(scrub_place_name(self._job, self._who, self._number + 1), [self.place.to_bytes()])
        before, self._number = self._number, self._number + 1
        failpoint("scrub.place")
        if before:
            self._objects.delete(scrub_place_name(self._job, self._who, before))

    def keep(self) -> None:
        """Save the place. An error is raised, as by :meth:`save`, only if the place must be saved."""
        self._kept_s = time.monotonic()
        try:
            self.save()
        except StoreUnavailableError as error:
            if self._must:
                raise
            self.unkept = error

    def _load(self) -> ScrubPlace:
        """Load the newest readable place. Returns that of a scrub that has not begun if there is none."""
        parsed = names_in(self._objects, SCRUB_DIR, self._job, parse_scrub_place)
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
                    self._objects.delete(name)  # left by a scrub that was killed in between
        return place


def lost_manifests(objects: Objects, lineage: Lineage, catalog: Catalog) -> Iterator[MarkerId]:
    """Find markers whose manifest is missing although the store had it: later manifests of their generation exist, or
    the log was trimmed because this store held them.

    Args:
        objects: The store.
        lineage: The control partition.
        catalog: Contents of the store.
    """
    newest, trims = _newest(catalog), lineage.trims
    here = {trim.store: trim.store == objects.url or trim.store == place_of(objects) for trim in trims}
    for marker in list(lineage.commits):
        trim = trims.of(marker.generation) if trims.has_taken(marker) else None
        had = marker < newest.get(marker.generation, marker) or (trim is not None and here[trim.store])
        if marker in catalog.markers | catalog.dropped or not had:
            continue
        is_there = objects.size(manifest_name(catalog.job, marker)) is not None  # it was put during the listing
        if not is_there and objects.size(dropped_name(catalog.job, marker)) is None:
            yield marker


def markers_without_a_way(lineage: Lineage, catalog: Catalog) -> Iterator[MarkerId]:
    """Find markers to which no pieces of the store lead. Takes the arguments of :func:`lost_manifests`."""
    ways, offered = Strides(lineage, catalog), catalog.markers - catalog.dropped
    yield from (marker for marker in sorted(offered & set(lineage.commits)) if not ways.serves(marker))


def _newest(catalog: Catalog) -> dict[int, MarkerId]:
    """Find the newest marker in the store of each generation."""
    return {marker.generation: marker for marker in sorted(catalog.markers)}


AHEAD = 8
"""Segments and dense files that are read at once, if threads read."""
FAST_BYTES_PER_S = 64 * 2**20
"""Bytes per second below which the scrub reads by itself, in small pieces."""
_PATIENCE_S = 0.2
"""Seconds between checks for a stop while waiting for threads."""


SAVE_S = 5.0
"""Seconds between saves of a scrub's place. A kill loses the reading since the last save."""


@dataclass(frozen=True, slots=True)
class Damage:
    """One object that is not as it was written, and the result of its repair."""

    name: str
    marker: MarkerId | None
    """Marker that the object belongs to. None if it belongs to a generation."""
    table: str
    """Name of the damaged table if known; empty otherwise."""
    reason: str
    repair: Repair | None = None
    """Repair that was made. None if it was not repaired."""
    lost: str = ""
    """Reason why it cannot be repaired; empty before any attempt."""
    unrepaired: str = ""
    """Reason why it was not repaired this time: a place was unavailable or not writable. Empty before any attempt."""

    @property
    def state(self) -> str:
        """State of the object: ``repaired``, ``lost`` or ``damaged``."""
        return "repaired" if self.repair is not None else "lost" if self.lost else "damaged"


@dataclass(slots=True)
class ScrubCounts:
    """Counts of the work of all scrubs in this process."""

    scrubbed_bytes: int = 0
    scrub_damaged: int = 0
    scrub_repaired: int = 0


class Scrubber:
    """Reads a job's objects in one store.

    Args:
        objects: The store.
        lineage: Returns the current control partition, or the lineage that the store itself holds.
        who: ``service`` or ``command``: each has its own place.
        mender: Repairs damage. None to only report it.
        told: Called with each damaged object.
        pool: Threads that read ahead. None to read everything on the calling thread.
        bytes_per_s: Bytes per second that the caller lets this scrub read, approximately. If it is low, no thread reads
            ahead.
    """

    def __init__(
        self,
        objects: Objects,
        lineage: Callable[[], Lineage],
        who: str,
        mender: ScrubMender | None = None,
        told: Callable[[Damage], None] = lambda _: None,
        pool: Executor | None = None,
        bytes_per_s: float | None = None,
    ) -> None:
        self._objects = objects
        self._lineage = lineage
        self._job = lineage().job
        self._mender = mender
        self._told = told
        self.kept = PlaceKeeper(objects, self._job, who, must=mender is not None)
        """Place of this scrub, in the store."""
        self._pool = pool if bytes_per_s is None or bytes_per_s >= FAST_BYTES_PER_S else None
        self._failed: dict[str, None] = {}
        """Objects that are damaged now, in the order in which they were found."""
        self._is_resumed = False
        self.unnamed = 0
        """Number of objects that earlier scrubs found damaged and that the place does not name.

        This scrub does not read them before their turn.
        """
        self.counts = ScrubCounts()

    # One pass.

    def pieces(self, *, anew: bool = False) -> Generator[int]:
        """Read from the place to the end of the pass. Yields the bytes of each piece.

        Args:
            anew: Begin another pass, even if the last one has not ended.

        Raises:
            StoreUnavailableError, LogUnavailableError: the store or the log does not answer. Call it again.
        """
        again = self._begin(anew=anew)
        lineage, catalog = self._lineage(), Catalog.load(self._objects, self._job)
        reader = ScrubReader(self._objects, lineage, catalog)
        self._look_for_gaps(reader)
        for name in again:
            if name not in self._failed:
                yield from self._one(reader, name)
        first = self.place.unit
        for stretch in self._stretches(reader):
            yield from self._units(reader, [unit for unit in stretch if unit >= first])
        self._end()

    def _stretches(self, reader: ScrubReader) -> Iterator[list[str]]:
        """Yield all units. Omits objects listed by gc only while the folds that replace them are whole."""
        units = reader.units()
        yield [unit for unit in units if unit < MANIFESTS_DIR]
        failed = (parse_marker_object(name) for name in self._failed)
        if any(found is not None and found.fold is not None for found in failed):
            reader.heeds_lists = False  # they may be of a gc that died before it had read the folds
            units = reader.units()
        yield [unit for unit in units if unit >= MANIFESTS_DIR]

    def _units(self, reader: ScrubReader, units: Sequence[str]) -> Iterator[int]:
        """Read the rest of units: segments and dense files on threads if there are any, other objects here.

        The bytes of a part that a thread reads are yielded before it begins.
        """
        begun: deque[tuple[str, int, str, Future[int | None] | None]] = deque()
        ended = threading.Event()
        try:
            for unit in units:
                done = self.place.done if unit == self.place.unit else 0
                try:
                    names, number = reader.names_of(unit), 0
                except MarkerNotFoundError:  # a trim deleted its COMMIT: the marker was given up meanwhile
                    continue
                while number < len(names):
                    name, future = names[number], None
                    number += 1
                    if number > done and name not in self._failed:
                        part = _part_for_thread(reader, name) if self._pool is not None else None
                        if part is None or self._pool is None:
                            yield from self._one(reader, name)
                        else:
                            yield part.num_bytes
                            future = self._pool.submit(read_whole, self._objects, part, ended)
                    begun.append((unit, max(done, number), name, future))
                    if number == 1:
                        names = reader.names_of(unit)  # the first object names others, and may have been repaired
                    while begun and (begun[0][3] is None or len(begun) > AHEAD):
                        yield from self._take_note(reader, *begun.popleft())
            while begun:
                yield from self._take_note(reader, *begun.popleft())
        finally:
            ended.set()
            for *_, future in begun:
                if future is not None:
                    future.cancel()

    def _take_note(
        self, reader: ScrubReader, unit: str, done: int, name: str, future: Future[int | None] | None
    ) -> Iterator[int]:
        """Process an object that was read, the next one in order. Reads it again if a thread doubts it."""
        while future is not None and not future.done():
            wait([future], _PATIENCE_S)
            yield 0
        if future is not None:
            if (num_bytes := future.result()) is not None:
                self._count(num_bytes, objects=1)
            else:
                yield from self._one(reader, name)
        failpoint("scrub.read")
        self._advance(unit, done)

    def _begin(self, *, anew: bool) -> tuple[str, ...]:
        """Continue a pass, or begin one. Returns the names of objects to read again."""
        self._failed = {}
        self.unnamed, self._is_resumed = self.place.more, not anew and self.place.begun_s > 0 and not self.place.ended
        if self._is_resumed:
            return self.place.damaged
        last = self.place
        number = last.number + 1 if last.begun_s else 1
        # Names from the last pass stay until the objects are read again: gc and trim rely on none of them.
        self.kept.place = ScrubPlace(number, time.time(), whole_s=last.whole_s, damaged=last.damaged, more=last.more)
        return last.damaged

    def _one(self, reader: ScrubReader, name: str) -> Iterator[int]:
        """Read an object. Repair it if it is damaged."""
        try:
            try:
                yield from self._read(reader, name)
            except StoreUnavailableError:
                check_store(self._objects)  # either the store is unavailable, or this object alone cannot be read
                yield from self._read(reader, name)
        except CorruptionError as error:
            if not reader.is_needless(name):
                self._damaged(reader, name, error)
        except StoreUnavailableError as error:
            check_store(self._objects)
            self._note(Damage(name, marker_of(name), "", error.headline))
        except MarkerNotFoundError:  # a trim deleted its COMMIT: the marker was given up meanwhile
            return

    def _read(self, reader: ScrubReader, name: str) -> Iterator[int]:
        for num_bytes in reader.read(name):
            self._count(num_bytes)
            yield num_bytes
        self._count(0, objects=1)

    def _count(self, num_bytes: int, objects: int = 0) -> None:
        self.counts.scrubbed_bytes += num_bytes
        place = self.place
        self.kept.place = replace(place, num_bytes=place.num_bytes + num_bytes, objects=place.objects + objects)

    def _look_for_gaps(self, reader: ScrubReader) -> None:
        lineage, catalog = reader.lineage, reader.catalog
        for marker in lost_manifests(self._objects, lineage, catalog):
            name = manifest_name(self._job, marker)
            error = MissingObjectError("the manifest of this marker is missing, but the store had it", name=name)
            self._damaged(reader, name, error)
        catalog.refresh()
        for marker in markers_without_a_way(lineage, catalog):
            what, lost = "no pieces of the store lead to this marker", "the pieces that led to it were deleted"
            self._note(Damage(manifest_name(self._job, marker), marker, "", what, lost=lost))

    def _damaged(self, reader: ScrubReader, name: str, error: CorruptionError) -> None:
        damage = Damage(name, marker_of(name), str(error.where.get("table", "")), error.headline)
        if self._mender is not None:
            try:
                repair = self._mender.mend(reader.lineage, reader.catalog, name, error)
                reader.forget()
                for _ in reader.read(name):  # read the repaired object back
                    pass
                damage = replace(damage, repair=repair)
            except StoreUnavailableError as why:
                check_store(self._objects)  # either the store is unavailable, or it accepts no object
                reader.forget()
                damage = replace(damage, unrepaired=why.headline)
            except (CorruptionError, MarkerNotFoundError) as why:
                reader.forget()
                damage = replace(damage, lost=str(why.where.get("elsewhere", why.headline)))
        self._note(damage)

    def _note(self, damage: Damage) -> None:
        self.counts.scrub_damaged += 1
        if damage.repair is not None:
            self.counts.scrub_repaired += 1
        else:
            self._failed[damage.name] = None
        self._told(damage)

    # The place.

    @property
    def place(self) -> ScrubPlace:
        """Current place of the pass. Loaded from the store on first use."""
        return self.kept.place

    def _advance(self, unit: str, done: int) -> None:
        more = self._more + self.unnamed
        self.kept.place = replace(self.place, unit=unit, done=done, damaged=self._named, more=more)
        if self.kept.age_s >= SAVE_S:
            self.kept.keep()

    def _end(self) -> None:
        if not self._is_resumed:
            self.unnamed = 0  # everything was read
        more = self._more + self.unnamed
        self.kept.place = replace(self.place, ended=True, damaged=self._named, more=more, whole_s=self.place.begun_s)
        self.kept.keep()

    @property
    def _named(self) -> tuple[str, ...]:
        """Names of damaged objects to save in the place."""
        return tuple(islice(self._failed, MAX_DAMAGED))

    @property
    def _more(self) -> int:
        """Number of damaged objects that the place does not name."""
        return max(0, len(self._failed) - MAX_DAMAGED)


def _part_for_thread(reader: ScrubReader, name: str) -> Part | None:
    """Return the part that a thread can read. None if the scrub must read the object itself."""
    try:
        return reader.part(name)
    except (CorruptionError, StoreUnavailableError, MarkerNotFoundError):  # reading the object reports it
        return None


def read_whole(objects: Objects, part: Part, ended: threading.Event) -> int | None:
    """(on a thread) Read a part. Returns its bytes, or None if it is not as it was written or cannot be read."""
    num_bytes = 0
    try:
        for piece in part.read(objects):
            num_bytes += piece
            if ended.is_set():
                return None
    except (CorruptionError, StoreUnavailableError):
        return None
    return num_bytes
