"""Read folds and intervals of a store whole, and record in the store (``readings/``) which of them were read.

A piece that replaces other copies of rows is relied on only by its bytes: it was read since it was written, or is read
now. A reading is valid for a week, by a clock that is never set, so a base is not read every time that a few objects
are deleted because of it.

Before gc deletes objects, it relies on the folds that replace them, and reads these whole.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Executor
from functools import partial

from crc32c import crc32c

from torchrec_stream_ckpt.errors import CorruptionError
from torchrec_stream_ckpt.find.holdings import Holdings
from torchrec_stream_ckpt.format.dense_files import whole
from torchrec_stream_ckpt.format.manifest import SegmentRef
from torchrec_stream_ckpt.format.readings import MAX_DAMAGED, Reading, ReadUnit, ScrubPlace
from torchrec_stream_ckpt.store.api import Objects
from torchrec_stream_ckpt.store.catalog import Stride
from torchrec_stream_ckpt.store.dense_objects import files_in, read_dense_file
from torchrec_stream_ckpt.store.identity import place_of
from torchrec_stream_ckpt.store.reader import check_whole, load_notes
from torchrec_stream_ckpt.store.verdicts import list_readings, load_reading, put_reading, take_back
from torchrec_stream_ckpt.util.failpoints import failpoint
from torchrec_stream_ckpt.util.layout import (
    DENSE_DIR,
    SCRUB_DIR,
    FoldName,
    dense_file_name,
    dense_name,
    manifest_name,
    parse_marker_object,
    parse_scrub_place,
)
from torchrec_stream_ckpt.util.types import MarkerId

COUNTS_FOR_S = 7 * 86400.0
"""Seconds for which a reading is valid."""
_FORGOTTEN_S = 2 * COUNTS_FOR_S
"""Seconds, by wall clocks, after which a reading is forgotten whatever clock it used."""


class ReadBack:
    """Pieces that this process has read whole, and those that other processes have.

    Args:
        objects: The store.
        job: The job.
        pool: Threads to read with.
        clocks: Current readings of the clocks, see ``clocks``. Without any, readings of other processes are ignored.
    """

    def __init__(self, objects: Objects, job: bytes, pool: Executor, clocks: Mapping[str, float]) -> None:
        self._objects = objects
        self._job = job
        self._pool = pool
        self._clocks = dict(clocks)
        self._place = place_of(objects)
        names = list_readings(objects, job)
        self._readings = dict(zip(names, pool.map(partial(load_reading, objects), names), strict=True))
        self._known = self._units()
        self._suspects = self._load_suspects()
        self._whole: set[ReadUnit] = set()
        self._fresh: list[ReadUnit] = []
        self.damaged: dict[Stride, CorruptionError] = {}
        """Folds and intervals whose bytes differ from those written."""
        self.segments: set[str] = set()
        """Names of the segments that this process has read whole."""
        self.num_bytes = 0
        """Bytes read."""

    def is_whole(self, holdings: Holdings, step: Stride) -> bool:
        """Return whether a piece of the store holds the bytes that were written. Reads it unless it was read recently.

        If both ends of ``step`` are the same marker, checks its dense state and the notes of its ranks.

        Args:
            holdings: Contents of the store.
            step: (start, end) of the piece.

        Raises:
            StoreUnavailableError: the store does not answer.
        """
        if step in self.damaged:
            return False
        try:
            if step[0] == step[1]:
                self._look_beside_rows(holdings, step[1])
            else:
                self._look(holdings, step)
        except CorruptionError as error:
            self.damaged[step] = error
        return step not in self.damaged

    def _look(self, holdings: Holdings, step: Stride) -> None:
        """Check the object that exists now: a fold may be rewritten with other bytes between two checks of one run."""
        catalog, (start, end) = holdings.catalog, step
        refs: list[SegmentRef]
        if step in catalog.folds:
            fold = catalog.fold(start, end)
            name, data, refs = FoldName(self._job, end, start).name, fold.to_bytes(), list(fold.segments)
        else:
            manifest = catalog.manifest(end)
            name, data = manifest_name(self._job, end), manifest.to_bytes()
            refs = [ref for ranks in manifest.segments for ref in ranks]
        unit = ReadUnit(name, crc32c(data), sum(ref.num_bytes for ref in refs))
        if unit in self._whole or (unit in self._known and self._is_as_it_was(holdings, unit, refs)):
            return
        for num_bytes in check_whole(catalog.objects, refs, self._job, self._pool):
            self.num_bytes += num_bytes
        self._remember(unit)
        self.segments |= {ref.name for ref in refs}

    def _look_beside_rows(self, holdings: Holdings, marker: MarkerId) -> None:
        commit = holdings.lineage.find(marker)
        if not self.segments.issuperset(ref.name for ref in holdings.catalog.check(commit).last):
            load_notes(holdings.catalog, commit, self._pool)
        files = whole(commit.dense_list, files_in(self._objects, commit))
        names = [dense_file_name(commit.job, marker, file.name) for file in files]
        num_bytes = sum(file.num_bytes for file in files)
        unit = ReadUnit(dense_name(commit.job, marker), crc32c(commit.to_frame()), num_bytes)
        if unit in self._whole:
            return
        if unit in self._known and self._suspects is not None and self._suspects.isdisjoint(names):
            return
        for file, name in zip(files, names, strict=True):
            for piece in read_dense_file(self._objects, name, file):
                self.num_bytes += piece
        self._remember(unit)

    def _remember(self, unit: ReadUnit) -> None:
        self._whole.add(unit)
        self._fresh.append(unit)

    def _is_as_it_was(self, holdings: Holdings, unit: ReadUnit, refs: list[SegmentRef]) -> bool:
        """Return whether all objects exist with their lengths, and no scrub has found any of them damaged since."""
        if self._suspects is None or not self._suspects.isdisjoint((unit.name, *(ref.name for ref in refs))):
            return False
        return all(holdings.sizes.get(ref.name) == ref.num_bytes for ref in refs)

    @property
    def reasons(self) -> dict[Stride, str]:
        """Headlines of the errors in :attr:`damaged`."""
        return {step: error.headline for step, error in self.damaged.items()}

    # Records of readings.

    def _units(self) -> set[ReadUnit]:
        """Return the units that other processes have read and whose readings are valid here."""
        return {
            unit
            for reading in self._readings.values()
            if reading is not None and reading.store == self._place and _counts(reading, self._clocks)
            for unit in reading.units
        }

    def look_again(self) -> bool:
        """Return whether a valid reading was taken back meanwhile. Its units are read when they are next needed.

        Raises:
            StoreUnavailableError: the store does not answer.
        """
        there, known = {*list_readings(self._objects, self._job)}, self._known
        self._readings = {name: reading for name, reading in self._readings.items() if name in there}
        self._known = self._units()
        return self._known != known

    def save(self) -> None:
        """Record the units that were read, and take back readings of those that are damaged.

        Raises:
            StoreUnavailableError: the record was not written.
        """
        take_back(self._objects, self._job, self.damaged.values())
        if self._fresh and self._clocks:
            put_reading(
                self._objects, self._job, Reading(time.time(), self._clocks, tuple(sorted(self._fresh)), self._place)
            )
            failpoint("read_back.saved")
        self._fresh = []

    def tidy(self, sizes: Mapping[str, int]) -> None:
        """Delete readings that are no longer valid: of objects deleted from the store, too old, or unreadable.

        Args:
            sizes: Objects of the store.
        """
        names = sizes.keys() | {name.rpartition("/")[0] for name in sizes if name.startswith(f"{DENSE_DIR}/")}
        for name, reading in self._readings.items():
            gone = reading is not None and names.isdisjoint(unit.name for unit in reading.units)
            if reading is None or gone or not self._may_count(reading):
                self._objects.delete(name)

    def _may_count(self, reading: Reading) -> bool:
        """Return whether a reading is valid here, or may be elsewhere. The wall clock decides only about rereading."""
        if not reading.store:
            return False
        if reading.store == self._place and reading.clocks.keys() & self._clocks.keys():
            return _counts(reading, self._clocks)
        return abs(time.time() - reading.time_s) <= _FORGOTTEN_S

    def _load_suspects(self) -> frozenset[str] | None:
        """Load the names of objects that scrubs have found damaged. None if there may be others."""
        found: set[str] = set()
        for entry in self._objects.list(f"{SCRUB_DIR}/{self._job.hex()}/"):
            if parse_scrub_place(entry.name) is not None:
                try:
                    place = ScrubPlace.from_bytes(self._objects.read(entry.name), entry.name)
                except CorruptionError:
                    return None
                if place.more or len(place.damaged) >= MAX_DAMAGED:  # older programs did not set ``more``
                    return None
                found.update(place.damaged)
        return frozenset(found)


def _counts(reading: Reading, clocks: Mapping[str, float]) -> bool:
    """Return whether a reading is recent by every clock that both show. A clock that was set back shows nothing."""
    shown = [clocks[name] - then for name, then in reading.clocks.items() if name in clocks]
    return bool(shown) and min(shown) >= 0.0 and max(shown) <= COUNTS_FOR_S


def check_relied(holdings: Holdings, going: Iterable[str], staying: Iterable[Stride], read_back: ReadBack) -> None:
    """Read the staying folds that replace objects to be deleted. ``read_back`` then knows which of them are damaged.

    If several folds hold the rows of an object to be deleted, the oldest one that is whole is enough: a newer, damaged
    one can be rewritten from it and from the pieces after it.

    Args:
        holdings: Contents of the store.
        going: Names of objects that are to be deleted.
        staying: Folds that are not to be deleted.
        read_back: Reads the folds, unless they were read recently.

    Raises:
        StoreUnavailableError: the store does not answer.
    """
    strides, known = holdings.strides, holdings.lineage.commits
    folds = [(fold, strides.rows(*fold)) for fold in sorted(staying, key=lambda each: each[1]) if fold[1] in known]
    for rows in {_rows_of(holdings, name) for name in going}:
        for fold, held in folds:
            if not held.isdisjoint(rows) and read_back.is_whole(holdings, fold) and held >= rows:
                break


def remarks(job: bytes, damaged: Mapping[Stride, str]) -> tuple[str, ...]:
    """Format each damaged fold as text."""
    return tuple(f"{FoldName(job, end, start).name} is damaged: {why}" for (start, end), why in damaged.items())


def _rows_of(holdings: Holdings, name: str) -> frozenset[MarkerId]:
    """Return the markers whose rows an object holds, or the objects that it names. Empty for an object without rows."""
    found = parse_marker_object(name)
    if found is None or found.dense_file or found.marker not in holdings.lineage.commits:
        return frozenset()
    if found.fold is not None:
        return holdings.strides.rows(found.fold.start, found.fold.end)
    return frozenset({found.marker})
