"""List all objects of a job that may be needed, in the order of their names, and read each one piece by piece.

A *unit* is listed and not divided further: a CLAIM, the record that a marker was given up, a fold or a manifest with
the segments that it names, the dense state of a marker, or an object of the second copy of control records.

A *part* is a segment or a dense file. Any thread may read one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from torchrec_stream_ckpt.errors import CorruptionError, OtherLogError, StoreUnavailableError, located
from torchrec_stream_ckpt.format.control import Claim, Commit, parse_control
from torchrec_stream_ckpt.format.dense_files import DenseFile
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.format.manifest import Dropped, Fold, Garbage, Manifest, SegmentRef
from torchrec_stream_ckpt.format.segment import check_chunk, entries_of, parse_front
from torchrec_stream_ckpt.store.api import Objects, names_in
from torchrec_stream_ckpt.store.catalog import Catalog
from torchrec_stream_ckpt.store.dense_objects import files_in, read_dense_file
from torchrec_stream_ckpt.store.reader import load_front, runs_of
from torchrec_stream_ckpt.store.records import check_copy, copy_names
from torchrec_stream_ckpt.store.summaries import list_summaries, load_summary
from torchrec_stream_ckpt.util.layout import (
    DENSE_DIR,
    DROPPED_DIR,
    GARBAGE_DIR,
    IDENTITY_FILE,
    CopyName,
    FoldName,
    SummaryName,
    claim_name,
    dense_file_name,
    dense_name,
    dropped_name,
    is_garbage_list,
    manifest_name,
    parse_claim_name,
    parse_copy_name,
    parse_dropped_name,
    parse_manifest_name,
    parse_marker_object,
    parse_summary_name,
)
from torchrec_stream_ckpt.util.types import MarkerId

PIECE_BYTES = 4 * 2**20
"""Bytes read at once, at most, except for a longer chunk or directory."""


@dataclass(frozen=True, slots=True)
class SegmentPart:
    """A whole segment: its directory and its chunks."""

    job: bytes
    ref: SegmentRef

    @property
    def num_bytes(self) -> int:
        """Bytes read, approximately."""
        return self.ref.num_bytes

    def read(self, objects: Objects, table_name: Callable[[int], str] = str) -> Iterator[int]:
        """Read the part piece by piece. Yields the bytes of each piece.

        Args:
            objects: The store.
            table_name: Returns the name of a table for errors, by its index.

        Raises:
            CorruptionError: the segment is missing or altered.
            StoreUnavailableError: the store does not answer.
        """
        ref = self.ref
        size = objects.size(ref.name)
        if size is not None and size != ref.num_bytes:
            raise CorruptionError(f"segment has {size} bytes, but {ref.num_bytes} were written", name=ref.name)
        front = load_front(objects, ref, self.job)
        yield ref.front_bytes
        for run in runs_of(entries_of(front.directory), PIECE_BYTES):
            begin, end = run[0].offset, run[-1].offset + run[-1].num_bytes
            data = objects.read(ref.name, begin, end)
            for entry in run:
                with located(offset=entry.offset, table=table_name(entry.table)):
                    check_chunk(entry, data[entry.offset - begin : entry.offset - begin + entry.num_bytes], ref.name)
            yield end - begin


@dataclass(frozen=True, slots=True)
class DensePart:
    """A whole dense file: its digest covers all its bytes."""

    name: str
    file: DenseFile

    @property
    def num_bytes(self) -> int:
        """Bytes read."""
        return self.file.num_bytes

    def read(self, objects: Objects, table_name: Callable[[int], str] = str) -> Iterator[int]:
        """Read the file piece by piece, as :meth:`SegmentPart.read` does."""
        return read_dense_file(objects, self.name, self.file, PIECE_BYTES)


Part = SegmentPart | DensePart

_SOME_FILE = "x"


class ScrubReader:
    """Reads objects of one job and compares their checksums.

    Args:
        objects: The store.
        lineage: The control partition, or the lineage that the store itself holds.
        catalog: Contents of the store.
    """

    def __init__(self, objects: Objects, lineage: Lineage, catalog: Catalog) -> None:
        self._objects = objects
        self.lineage = lineage
        self.catalog = catalog
        self.heeds_lists = True
        """True if objects listed by gc count as unneeded."""
        self._parts: tuple[str, dict[str, Part]] = ("", {})
        """Unit that was read last, and the segments or dense files that belong to it, by name."""

    # Listing.

    def units(self) -> list[str]:
        """Return the names of all units in order. Omits those that retention has put on a list of garbage."""
        catalog, job = self.catalog, self.catalog.job
        found = {claim_name(job, generation) for generation in {marker.generation for marker in catalog.markers}}
        found |= {dropped_name(job, marker) for marker in self._dropped()}
        found |= {FoldName(job, end, start).name for start, end in catalog.folds}
        found |= {manifest_name(job, marker) for marker in catalog.markers}
        found |= {dense_name(job, marker) for marker in self._with_dense()}
        found |= {summary.name for summary in list_summaries(self._objects, job)}
        found |= {copy.name for copy in copy_names(self._objects, job)}
        return sorted(found - self.listed())

    def _dropped(self) -> set[MarkerId]:
        return {found[1] for found in names_in(self._objects, DROPPED_DIR, self.catalog.job, parse_dropped_name)}

    def _with_dense(self) -> set[MarkerId]:
        """Return markers whose dense state must be whole here.

        These have a manifest, or their trainer has put their dense state here. For a marker without a manifest, the
        materializer may be copying it right now.
        """
        commits, home = self.lineage.commits, "" if self._objects.size(IDENTITY_FILE) is not None else None
        kept = {marker for marker, commit in commits.items() if commit.store in (self._objects.url, home)}
        return set((self.catalog.markers & commits.keys() | kept) - self.catalog.dropped)

    def listed(self) -> set[str]:
        """Return the names of unneeded objects that gc has listed. Ignores lists that cannot be read."""
        found: set[str] = set()
        if not self.heeds_lists:
            return found
        for entry in self._objects.list(f"{GARBAGE_DIR}/{self.catalog.job.hex()}/"):
            if is_garbage_list(entry.name):
                try:
                    found |= {*Garbage.from_bytes(self._objects.read(entry.name), entry.name).names}
                except CorruptionError:
                    continue
        return found

    def names_of(self, unit: str) -> Sequence[str]:
        """Return the objects of a unit, first the one that names the others. Only that one if it cannot be read."""
        is_dense = unit.startswith(f"{DENSE_DIR}/")
        if not is_dense and parse_marker_object(unit) is None:
            return [unit]
        try:
            parts = self._parts_of(unit)
        except (CorruptionError, StoreUnavailableError):  # reading it reports whether the store is unavailable
            return [self._list_of(unit)]
        return [*parts] if is_dense else [unit, *parts]

    def _list_of(self, unit: str) -> str:
        """Return the object that lists the objects of a unit."""
        if not unit.startswith(f"{DENSE_DIR}/"):
            return unit
        commit = self._commit_of(unit)
        return dense_file_name(commit.job, commit.id, commit.dense_list.file.name) if commit.dense_list else unit

    def is_needless(self, name: str) -> bool:
        """Return whether an object found damaged is not needed: gc will delete it, or has already done so."""
        if name in self.listed():
            return True
        if self._objects.size(name) is not None:
            return False
        found = parse_marker_object(name)
        if found is None:
            return parse_summary_name(name) is not None or parse_copy_name(name) is not None
        if not found.dense_file and found.owner != name:
            return self._objects.size(found.owner) is None
        if found.fold is not None:
            return True  # a lost fold cannot be distinguished from one that gc deleted
        return self._objects.size(dropped_name(self.catalog.job, found.marker)) is not None

    # Reading one object.

    def read(self, name: str) -> Iterator[int]:
        """Read one object whole. Yields the bytes of each piece.

        Raises:
            CorruptionError: the object is missing or damaged.
            StoreUnavailableError: the store does not answer.
        """
        part, found = self.part(name), parse_marker_object(name)
        if part is not None:
            assert found is not None
            return part.read(self._objects, partial(self._table, found.marker))
        if found is not None:
            return self._fold(name, found.fold) if found.fold is not None else self._manifest(name, found.marker)
        if (claim := parse_claim_name(name)) is not None:
            return self._claim(name, claim[1])
        if (summary := parse_summary_name(name)) is not None:
            return self._summary(summary)
        if (copy := parse_copy_name(name)) is not None:
            return self._copy(copy)
        return self._given_up(name)

    def part(self, name: str) -> Part | None:
        """Return the part that is a whole segment or dense file, for any thread to read. None for other objects.

        Raises:
            CorruptionError: the object that should name it is damaged, or does not name it.
            MarkerNotFoundError: the COMMIT of the marker was deleted.
            StoreUnavailableError: the store does not answer.
        """
        found = parse_marker_object(name)
        if found is None or found.owner == name:
            return None
        part = self._parts_of(found.owner).get(name)
        if part is None and found.dense_file:
            raise CorruptionError("COMMIT does not list this dense file", name=name)
        if part is None:
            raise CorruptionError("the object that should list this segment does not", name=name, named_by=found.owner)
        return part

    def forget(self) -> None:
        """Forget the names cached from the store, because an object was rewritten."""
        self._parts = ("", {})

    def _manifest(self, name: str, marker: MarkerId) -> Iterator[int]:
        data = self._objects.read(name)
        manifest = Manifest.from_bytes(data, name)
        _check_is((manifest.commit.job, manifest.commit.id), (self.catalog.job, marker), name)
        known = self.lineage.commits.get(marker)
        if known is not None and known != manifest.commit:
            raise OtherLogError(f"marker {marker} differs between store and log", name=name)
        yield len(data)

    def _fold(self, name: str, fold: FoldName) -> Iterator[int]:
        data = self._objects.read(name)
        found = Fold.from_bytes(data, name)
        _check_is((found.job, found.start, found.end), (fold.job, fold.start, fold.end), name)
        yield len(data)

    def _claim(self, name: str, generation: int) -> Iterator[int]:
        data = bytes(self._objects.read(name))
        with located(name=name):
            claim = parse_control(data)
        found = (claim.job, claim.generation) if isinstance(claim, Claim) else None
        _check_is(found, (self.catalog.job, generation), name)
        known = self.lineage.claims.get(generation)
        if known is not None and known.to_frame() != data:
            raise OtherLogError(f"generation {generation} differs between store and log", name=name)
        yield len(data)

    def _summary(self, name: SummaryName) -> Iterator[int]:
        """Compare a summary with the objects it was made from. Damaged or missing ones are skipped."""
        if self._objects.size(name.name) is None:
            return  # it may be deleted at any time
        summary = load_summary(self._objects, name)
        yield sum(len(part.data) for part in summary.parts.values())
        for each, part in summary.parts.items():
            try:
                data = self._objects.read(each, 0, None if parse_manifest_name(each) else len(part.data))
            except CorruptionError:
                continue
            if data != part.data and self._is_sound(each, bytes(data)):
                raise CorruptionError("summary differs from the object that it copies", name=name.name, object=each)
            yield len(data)

    def _copy(self, name: CopyName) -> Iterator[int]:
        yield check_copy(self._objects, name)

    @staticmethod
    def _is_sound(name: str, data: bytes) -> bool:
        """Return whether these bytes are a manifest or the beginning of a segment, as ``name`` requires."""
        try:
            if parse_manifest_name(name) is not None:
                Manifest.from_bytes(data, name)
            else:
                parse_front(data, name)
        except CorruptionError:
            return False
        return True

    def _given_up(self, name: str) -> Iterator[int]:
        data = self._objects.read(name)
        dropped, of = Dropped.from_bytes(data, name), parse_dropped_name(name)
        _check_is((dropped.commit.job, dropped.commit.id), of, name)
        yield len(data)

    def _table(self, marker: MarkerId, table: int) -> str:
        claim = self.lineage.claims.get(marker.generation)
        known = claim is not None and table < len(claim.schema.tables)
        return claim.schema.tables[table].name if claim is not None and known else str(table)

    # Contents of owners.

    def _parts_of(self, unit: str) -> dict[str, Part]:
        """Return the segments that a fold or a manifest names, or the dense files of a marker with their list first."""
        if self._parts[0] != unit:
            found, job = parse_marker_object(unit), self.catalog.job
            if found is None:
                commit = self._commit_of(unit)
                files = [*([commit.dense_list.file] if commit.dense_list else []), *files_in(self._objects, commit)]
                names = [dense_file_name(commit.job, commit.id, file.name) for file in files]
                self._parts = unit, {name: DensePart(name, file) for name, file in zip(names, files, strict=True)}
            else:
                self.catalog.forget()  # there may be many, and each is read once
                fold = found.fold
                refs = (
                    self.catalog.fold(fold.start, fold.end).segments
                    if fold is not None
                    else self.catalog.manifest(found.marker).refs
                )
                self._parts = unit, {ref.name: SegmentPart(job, ref) for ref in refs}
        return self._parts[1]

    def _commit_of(self, unit: str) -> Commit:
        found = parse_marker_object(f"{unit}/{_SOME_FILE}")
        assert found is not None
        return self.lineage.find(found.marker)


def _check_is(found: object, said: object, name: str) -> None:
    if found != said:
        raise CorruptionError("object does not match its name (wrong or renamed object)", name=name)
