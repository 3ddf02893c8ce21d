"""Repair damage in a store: rewrite objects from other sources of their rows, and keep the replaced bytes.

A repair writes to the store through :class:`Replacing`, which leaves correct objects and keeps replaced bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import TypeVar

from torchrec_stream_ckpt.errors import CorruptionError, MissingObjectError, OtherLogError
from torchrec_stream_ckpt.find.route import lost
from torchrec_stream_ckpt.format.control import Commit
from torchrec_stream_ckpt.format.frame import Buffer
from torchrec_stream_ckpt.format.interval import Interval
from torchrec_stream_ckpt.format.lineage import Lineage, previous_commit
from torchrec_stream_ckpt.format.manifest import Fold, Manifest, SegmentRef
from torchrec_stream_ckpt.format.segment import parse_front
from torchrec_stream_ckpt.maintain.interval_folder import IntervalFolder
from torchrec_stream_ckpt.maintain.merge import merge
from torchrec_stream_ckpt.maintain.progress import Progress
from torchrec_stream_ckpt.store.api import Entry, Objects
from torchrec_stream_ckpt.store.catalog import Catalog, Piece
from torchrec_stream_ckpt.store.reader import open_segments, read_chunks
from torchrec_stream_ckpt.store.verdicts import take_back_if_possible
from torchrec_stream_ckpt.store.write_once import is_same
from torchrec_stream_ckpt.util.failpoints import failpoint
from torchrec_stream_ckpt.util.layout import (
    FoldName,
    StoreSegment,
    damaged_name,
    manifest_name,
    parse_claim_name,
    parse_marker_object,
)
from torchrec_stream_ckpt.util.types import MarkerId


class Replacing:
    """A store whose objects are rewritten one by one. Each is replaced in one put, and never deleted before.

    Args:
        objects: The store.
    """

    def __init__(self, objects: Objects) -> None:
        self.url = objects.url
        self.reads_ahead = objects.reads_ahead
        self._objects = objects
        self.known: Mapping[str, SegmentRef] = {}
        """Segments as their manifest describes them, by name. A segment with other content is never written."""
        self.asides: list[str] = []
        """Names of the objects that hold the replaced bytes."""

    def put(self, name: str, parts: Sequence[Buffer]) -> None:
        """Write an object, unless it exists with the same bytes. Other bytes are set aside first.

        Raises:
            CorruptionError: the segment differs from its description in the manifest. Nothing was written.
        """
        self._check(name, parts)
        there = self._there(name)
        if there is not None:
            if is_same(there, parts):
                return
            self.asides.append(self._set_aside(name, there))
        self._objects.put(name, parts)

    def create(self, name: str, parts: Sequence[Buffer]) -> bool:
        """Write an object as :meth:`put` does. Replaces any object of that name."""
        self.put(name, parts)
        return True

    def _check(self, name: str, parts: Sequence[Buffer]) -> None:
        ref = self.known.get(name)
        if ref is None:
            return
        front = parse_front(parts[0], name)
        if (front.header_crc, front.num_bytes) != (ref.header_crc, ref.num_bytes):
            raise CorruptionError("the log's rows differ from those that the manifest describes", segment=name)

    def _there(self, name: str) -> memoryview | None:
        """Read the current bytes of an object. Returns None if it does not exist or cannot be read."""
        try:
            return self._objects.read(name)
        except CorruptionError:
            return None

    def _set_aside(self, name: str, data: memoryview) -> str:
        """Keep bytes in addition to those of earlier repairs. Returns the name of the object that holds them."""
        number = 1
        while self._objects.size(damaged_name(name, number)) is not None:
            before = self._there(damaged_name(name, number))
            if before is not None and is_same(before, [data]):  # from a repair that was interrupted
                return damaged_name(name, number)
            number += 1  # an object that cannot be read now may be readable later
        self._objects.put(damaged_name(name, number), [data])
        failpoint("repair.aside")
        return damaged_name(name, number)

    def read(self, name: str, begin: int = 0, end: int | None = None) -> memoryview:
        return self._objects.read(name, begin, end)

    def size(self, name: str) -> int | None:
        return self._objects.size(name)

    def list(self, prefix: str) -> Iterator[Entry]:
        return self._objects.list(prefix)

    def delete(self, name: str) -> None:
        self._objects.delete(name)

    def clear_leftovers(self) -> int:
        return self._objects.clear_leftovers()

    def close(self) -> None:
        """Do nothing: the store belongs to the caller."""


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Repair:
    """One object that was repaired."""

    name: str
    reason: str
    """Description of the damage."""
    source: str
    """Description of the data it was rebuilt from."""
    aside: str
    """Names of the objects that hold the replaced bytes, separated by ", ". Empty if there were none."""


@dataclass(eq=False)
class Repairer:
    """Rewrites damaged objects of one store.

    Args:
        objects: The store.
        pool: Threads to read it with.
        intervals: Folds intervals of the log.
        progress: Updated with the bytes read.
        told: Called with each repair.
    """

    objects: Objects
    pool: Executor
    intervals: IntervalFolder
    progress: Progress
    told: Callable[[Repair], None]

    def mending(self, lineage: Lineage, catalog: Catalog, work: Callable[[], T]) -> T:
        """Do ``work``. If it finds a damaged object of the store, repair the object and do the work again.

        A missing object may have been deleted by gc after ``catalog`` was listed. So the store is listed again first,
        and only an object that is still named there is rewritten.

        Raises:
            OtherLogError: an object is of another history. Nothing is written there.
            CorruptionError: the damage is not in such an object, or no other source has its rows.
        """
        mended: set[str] = set()
        listed_again = False
        while True:
            try:
                return work()
            except OtherLogError:
                raise
            except CorruptionError as error:
                is_gone = isinstance(error, MissingObjectError)
                if is_gone and not listed_again:
                    listed_again = True
                    catalog.refresh_within(lineage)
                    continue
                name = _object_of(error)
                if name is None or name in mended or (is_gone and not _is_named(catalog, name)):
                    raise
                mended.add(name)
                self.mend(lineage, catalog, name, error)

    def mend(self, lineage: Lineage, catalog: Catalog, name: str, error: CorruptionError) -> Repair:
        """Rewrite one object. Returns the repair.

        First, earlier readings of the object are taken back: otherwise a gc during the repair could delete its sources.

        Args:
            lineage: The control partition.
            catalog: Contents of the store. Its cached content of the object is discarded.
            name: Name of the object.
            error: Error found there.

        Raises:
            CorruptionError: ``error``, if no other source has its rows.
        """
        self.progress.doing = f"repairing {name}"
        take_back_if_possible(self.objects, lineage.job, [CorruptionError(error.message, name=name)])
        if (claim := parse_claim_name(name)) is not None:
            return self._claim(lineage, name, claim[1], error)
        found, into = parse_marker_object(name), Replacing(self.objects)
        assert found is not None
        try:
            if found.fold is not None:
                source = self._fold(lineage, catalog, found.fold, into)
            elif found.segment is not None:
                source = self._interval(lineage, catalog, found.segment, into)
            else:
                source = self._manifest(lineage, catalog, found.marker, into)
        except OtherLogError:
            raise
        except CorruptionError as other:
            raise lost(error, found.marker, other) from None
        return self.done(Repair(name, error.headline, source, ", ".join(into.asides)))

    def done(self, repair: Repair) -> Repair:
        """Count a repaired object, and report it."""
        self.progress.counts.repairs += 1
        self.told(repair)
        return repair

    def _claim(self, lineage: Lineage, name: str, generation: int, error: CorruptionError) -> Repair:
        """Write the log's CLAIM of a generation to the store."""
        claim = lineage.claims.get(generation)
        if claim is None:
            raise CorruptionError("the log has no CLAIM of this generation", name=name)
        into = Replacing(self.objects)
        into.put(name, [claim.to_frame()])
        return self.done(Repair(name, error.headline, "the log", ", ".join(into.asides)))

    def _check_fold(self, catalog: Catalog, fold: FoldName, end: Commit) -> None:
        """Check that the object with the name of a fold may be this fold, damaged or not.

        Raises:
            OtherLogError: it is whole, and another history has written it.
        """
        try:
            found = Fold.from_bytes(self.objects.read(fold.name), fold.name)
        except CorruptionError:
            return
        if found.chain != end.chain:
            raise catalog.foreign(end, f"chain {found.chain:08x}")

    def _fold(self, lineage: Lineage, catalog: Catalog, fold: FoldName, into: Replacing) -> str:
        """Merge the pieces that lead from the fold's start to its end without it."""
        chain = lineage.chain(fold.end)
        self._check_fold(catalog, fold, chain[-1])
        after = [commit.id for commit in chain].index(fold.start) + 1 if fold.start is not None else 0

        def others() -> tuple[Piece, ...]:
            """Return pieces that are whole. All are read before anything is overwritten."""
            without = replace(catalog, folds=catalog.folds - {(fold.start, fold.end)})
            cover = without.cover(chain[after:], fold.start)
            if not cover or cover[-1].end != fold.end:
                raise CorruptionError("no other pieces of the store have the rows of this fold", fold=fold.name)
            self._read([ref for piece in cover for ref in piece.segments], lineage.job)
            return cover

        cover = self.mending(lineage, catalog, others)
        merge(into, lineage, cover, self.pool, self.progress.count_merged)
        catalog.forget()
        return f"{len(cover)} other pieces of the store"

    def _interval(self, lineage: Lineage, catalog: Catalog, segment: StoreSegment, into: Replacing) -> str:
        """Fold the rank's interval of the log again, to the same bytes."""
        commit, before = lineage.find(segment.marker), previous_commit(lineage, segment.marker)
        after = before.ranks[segment.rank] if before is not None else None
        interval = Interval(lineage.claims[commit.generation], commit, commit.ranks[segment.rank], after)
        self.intervals.check_there(lineage, catalog, interval, [commit])
        known: tuple[SegmentRef, ...] | None = None
        if commit.id in catalog.markers:
            known = self.mending(lineage, catalog, lambda: catalog.check(commit)).segments[segment.rank]
            into.known = {ref.name: ref for ref in known}
        else:
            self.intervals.check_history(interval, segment.part)
        refs = self.mending(lineage, catalog, lambda: self.intervals.fold(catalog, interval, before, into))
        if known is not None and known != refs:
            raise CorruptionError("the log's rows differ from those that the manifest describes", segment=segment.name)
        return "the log"

    def _manifest(self, lineage: Lineage, catalog: Catalog, marker: MarkerId, into: Replacing) -> str:
        """Write a manifest again from the marker's segments."""
        commit, before = lineage.find(marker), previous_commit(lineage, marker)
        segments = self.mending(lineage, catalog, lambda: self.intervals.again(lineage, catalog, commit, before, into))
        name, manifest = manifest_name(commit.job, marker), Manifest(commit, lineage.previous(marker), segments)
        into.put(name, [manifest.to_bytes()])
        catalog.forget()
        return "the log and the marker's segments"

    def _read(self, refs: Sequence[SegmentRef], job: bytes) -> None:
        """Compare all checksums of segments."""
        for _, _, data in read_chunks(self.objects, open_segments(self.objects, refs, job, self.pool), self.pool):
            self.progress.count_merged(len(data))


def _object_of(error: CorruptionError) -> str | None:
    """Return the name of the claim, segment, fold or manifest of a store that ``error`` is about, if any."""
    said = str(error.where.get("name", error.where.get("path", "")))
    name = "/".join(PurePosixPath(said).parts[-3:])  # below the store: its folder, the job's folder, its own name
    found = parse_marker_object(name)
    return name if parse_claim_name(name) is not None or (found is not None and not found.dense_file) else None


def _is_named(catalog: Catalog, name: str) -> bool:
    """Return whether a listed object of the store needs an object: a manifest is listed, or names the segment."""
    if (claim := parse_claim_name(name)) is not None:
        return any(marker.generation == claim[1] for marker in catalog.markers)
    found = parse_marker_object(name)
    assert found is not None
    if found.fold is not None:
        return (found.fold.start, found.fold.end) in catalog.folds
    return found.marker in catalog.markers
