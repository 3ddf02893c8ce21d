"""List all objects of a job that may be needed, in the order of their names, and read each one piece by piece.

A *unit* is listed and not divided further: a CLAIM, the record that a marker was given up, a fold or a manifest with
the segments that it names, or the dense state of a marker.

A scrub hands parts of objects to workers, which read them whole and compare their checksums.

A task only reports of each part whether it is as it was written. If a part is not, the scrub reads the object itself,
and decides what is damaged and how to repair it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from torchrec_stream_ckpt.errors import CorruptionError, MarkerNotFoundError, OtherLogError, StoreUnavailableError
from torchrec_stream_ckpt.format.control import Claim, Commit, parse_control
from torchrec_stream_ckpt.format.dense_files import DenseFile
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.format.manifest import Dropped, Fold, Garbage, Manifest, SegmentRef
from torchrec_stream_ckpt.format.segment import ChunkEntry, check_chunk, entries_of, parse_front
from torchrec_stream_ckpt.maintain.engine.api import Site
from torchrec_stream_ckpt.store.api import Objects
from torchrec_stream_ckpt.store.catalog import Catalog
from torchrec_stream_ckpt.store.dense_objects import files_in, read_dense_file
from torchrec_stream_ckpt.store.reader import load_front
from torchrec_stream_ckpt.store.summaries import list_summaries, load_summary
from torchrec_stream_ckpt.util.failpoints import failpoint
from torchrec_stream_ckpt.util.layout import (
    DENSE_DIR,
    DROPPED_DIR,
    GARBAGE_DIR,
    IDENTITY_FILE,
    FoldName,
    SummaryName,
    claim_name,
    dense_file_name,
    dense_name,
    dropped_name,
    is_garbage_list,
    manifest_name,
    parse_claim_name,
    parse_dense_file,
    parse_dropped_name,
    parse_fold_name,
    parse_fold_segment,
    parse_manifest_name,
    parse_store_segment,
    parse_summary_name,
)
from torchrec_stream_ckpt.util.types import MarkerId

PIECE_BYTES = 4 * 2**20
"""Bytes read at once, at most, except for a longer chunk or directory."""


@dataclass(frozen=True, slots=True)
class SegmentPart:
    """The directory of a segment, and those of its chunks that begin in [begin, end)."""

    job: bytes
    ref: SegmentRef
    begin: int = 0
    end: int = 2**63

    @property
    def name(self) -> str:
        return self.ref.name

    @property
    def num_bytes(self) -> int:
        """Bytes read, approximately."""
        return min(self.end, self.ref.num_bytes) - self.begin

    def read(self, objects: Objects, table_name: Callable[[int], str] = str) -> Iterator[int]:
        """Read the part piece by piece. Yields the bytes of each piece. The directory counts only for the first part.

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
            raise CorruptionError(f"it has {size} bytes, {ref.num_bytes} were written", name=ref.name)
        front = load_front(objects, ref, self.job)
        if not self.begin:
            yield ref.front_bytes
        mine = [each for each in entries_of(front.directory) if self.begin <= each.offset < self.end]
        for run in _runs(mine):
            begin, end = run[0].offset, run[-1].offset + run[-1].num_bytes
            data = objects.read(ref.name, begin, end)
            for entry in run:
                try:
                    check_chunk(entry, data[entry.offset - begin : entry.offset - begin + entry.num_bytes], ref.name)
                except CorruptionError as error:
                    table = table_name(entry.table)
                    raise CorruptionError(error.message, name=ref.name, offset=entry.offset, table=table) from None
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

    def read(self, objects: Objects) -> Iterator[int]:
        """Read the file piece by piece, as :meth:`SegmentPart.read` does."""
        return read_dense_file(objects, self.name, self.file, PIECE_BYTES)


Part = SegmentPart | DensePart


def parts_of(part: Part, most_bytes: int) -> Sequence[Part]:
    """Split a part into parts of at most ``most_bytes``, if it can be split: each has the chunks that begin in it."""
    if isinstance(part, DensePart) or part.num_bytes <= most_bytes:
        return (part,)
    edges = [*range(part.begin, part.begin + part.num_bytes, most_bytes), part.end]
    return [SegmentPart(part.job, part.ref, *each) for each in pairwise(edges)]


@dataclass(frozen=True, slots=True)
class ScrubTask:
    """Task that reads parts of objects one after the other."""

    parts: tuple[Part, ...]

    @property
    def num_bytes(self) -> int:
        """Total bytes of the parts."""
        return sum(part.num_bytes for part in self.parts)

    def __str__(self) -> str:
        return f"scrub {len(self.parts)} parts from {self.parts[0].name} on"

    def run(self, site: Site) -> tuple[int | None, ...]:
        """Read the parts. Returns the bytes of each, None for one that is not as it was written or cannot be read."""
        found: list[int | None] = []
        for part in self.parts:
            num_bytes = 0
            try:
                for piece in part.read(site.objects):
                    num_bytes += piece
                    site.tell(piece)
            except CorruptionError:
                found.append(None)
            except StoreUnavailableError:  # the store may be unavailable: each further part would then cost a timeout
                return (*found, *[None] * (len(self.parts) - len(found)))
            else:
                found.append(num_bytes)
            failpoint("scrub.part")
        return tuple(found)


def _runs(entries: Sequence[ChunkEntry]) -> Iterator[list[ChunkEntry]]:
    """Group the chunks that are read together."""
    run: list[ChunkEntry] = []
    for entry in entries:
        if run and entry.offset + entry.num_bytes - run[0].offset > PIECE_BYTES:
            yield run
            run = []
        run.append(entry)
    if run:
        yield run


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
        self._lineage = lineage
        self._catalog = catalog
        self.heeds_lists = True
        """True if objects listed by gc count as unneeded."""
        self._refs: tuple[str, dict[str, SegmentRef]] = ("", {})
        """Segments that a fold or a manifest names: of the one read last."""
        self._files: tuple[str, dict[str, DenseFile]] = ("", {})
        """Dense files of the marker whose dense state was read last."""

    # Listing.

    def units(self) -> list[str]:
        """Return the names of all units in order. Omits those that retention has put on a list of garbage."""
        catalog, job = self._catalog, self._catalog.job
        found = {claim_name(job, generation) for generation in {marker.generation for marker in catalog.markers}}
        found |= {dropped_name(job, marker) for marker in self._dropped()}
        found |= {FoldName(job, end, start).name for start, end in catalog.folds}
        found |= {manifest_name(job, marker) for marker in catalog.markers}
        found |= {dense_name(job, marker) for marker in self._with_dense()}
        found |= {summary.name for summary in list_summaries(self._objects, job)}
        return sorted(found - self.listed())

    def _dropped(self) -> set[MarkerId]:
        names = (entry.name for entry in self._objects.list(f"{DROPPED_DIR}/{self._catalog.job.hex()}/"))
        return {found[1] for name in names if (found := parse_dropped_name(name)) is not None}

    def _with_dense(self) -> set[MarkerId]:
        """Return markers whose dense state must be whole here.

        These have a manifest, or their trainer has put their dense state here. For a marker without a manifest, the
        materializer may be copying it right now.
        """
        names = (entry.name for entry in self._objects.list(f"{DENSE_DIR}/{self._catalog.job.hex()}/"))
        here = {found[1] for name in names if (found := parse_dense_file(name)) is not None}
        commits, home = self._lineage.commits, "" if self._objects.size(IDENTITY_FILE) is not None else None
        kept = {marker for marker in here & commits.keys() if commits[marker].store in (self._objects.url, home)}
        return set((self._catalog.markers & commits.keys() | kept) - self._catalog.dropped)

    def listed(self) -> set[str]:
        """Return the names of unneeded objects that gc has listed. Ignores lists that cannot be read."""
        found: set[str] = set()
        if not self.heeds_lists:
            return found
        for entry in self._objects.list(f"{GARBAGE_DIR}/{self._catalog.job.hex()}/"):
            if is_garbage_list(entry.name):
                try:
                    found |= {*Garbage.from_bytes(self._objects.read(entry.name), entry.name).names}
                except CorruptionError:
                    continue
        return found

    def names_of(self, unit: str) -> Sequence[str]:
        """Return the objects of a unit, first the one that names the others. Only that one if it cannot be read."""
        try:
            if unit.startswith(f"{DENSE_DIR}/"):
                return list(self._dense(unit))
            if parse_manifest_name(unit) is not None or parse_fold_name(unit) is not None:
                return [unit, *self._named(unit)]
        except (CorruptionError, StoreUnavailableError):  # reading it reports whether the store is unavailable
            return [self._list_of(unit)]
        return [unit]

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
        if parse_summary_name(name) is not None:
            return True
        if (fold := parse_fold_segment(name)) is not None:
            return self._objects.size(fold[0].name) is None
        if (segment := parse_store_segment(name)) is not None:
            return self._objects.size(manifest_name(segment.job, segment.marker)) is None
        marker = parse_manifest_name(name) or parse_dense_file(name)
        if marker is not None:
            return self._objects.size(dropped_name(self._catalog.job, marker[1])) is not None
        return parse_fold_name(name) is not None  # a lost fold cannot be distinguished from one that gc deleted

    # Reading one object.

    def read(self, name: str) -> Iterator[int]:
        """Read one object whole. Yields the bytes of each piece.

        Raises:
            CorruptionError: the object is missing or damaged.
            StoreUnavailableError: the store does not answer.
        """
        if (manifest := parse_manifest_name(name)) is not None:
            return self._manifest(name, manifest[1])
        if (fold := parse_fold_name(name)) is not None:
            return self._fold(name, fold)
        if (segment := parse_store_segment(name)) is not None:
            return self._segment(name, manifest_name(segment.job, segment.marker), segment.marker)
        if (part := parse_fold_segment(name)) is not None:
            return self._segment(name, part[0].name, part[0].end)
        if (dense := parse_dense_file(name)) is not None:
            return self._dense_file(name, dense_name(dense[0], dense[1]))
        if (claim := parse_claim_name(name)) is not None:
            return self._claim(name, claim[1])
        if (summary := parse_summary_name(name)) is not None:
            return self._summary(summary)
        return self._given_up(name)

    def part(self, unit: str, name: str) -> Part | None:
        """Return the part that a worker would read of a unit's object. None if only this reader can check it.

        Workers never read the object that lists the unit's objects. If that object cannot be read, they read nothing of
        the unit.
        """
        try:
            if name == self._list_of(unit):
                return None
            if unit.startswith(f"{DENSE_DIR}/"):
                file = self._dense(unit).get(name)
                return DensePart(name, file) if file is not None else None
            ref = self._named(unit).get(name)
            return SegmentPart(self._catalog.job, ref) if ref is not None else None
        except (CorruptionError, StoreUnavailableError, MarkerNotFoundError):
            return None

    def forget(self) -> None:
        """Forget the names cached from the store, because an object was rewritten."""
        self._refs, self._files = ("", {}), ("", {})

    def _manifest(self, name: str, marker: MarkerId) -> Iterator[int]:
        data = self._objects.read(name)
        manifest = Manifest.from_bytes(data, name)
        _check_is((manifest.commit.job, manifest.commit.id), (self._catalog.job, marker), name)
        known = self._lineage.commits.get(marker)
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
        try:
            claim = parse_control(data)
        except CorruptionError as error:
            raise CorruptionError(error.message, name=name) from None
        found = (claim.job, claim.generation) if isinstance(claim, Claim) else None
        _check_is(found, (self._catalog.job, generation), name)
        known = self._lineage.claims.get(generation)
        if known is not None and known.to_frame() != data:
            raise OtherLogError("the store holds another generation of this number than the log", name=name)
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
                raise CorruptionError("summary says something else than the object", name=name.name, object=each)
            yield len(data)

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

    def _segment(self, name: str, owner: str, marker: MarkerId) -> Iterator[int]:
        ref = self._named(owner).get(name)
        if ref is None:
            raise CorruptionError("what should name this segment does not", name=name, named_by=owner)
        return SegmentPart(self._catalog.job, ref).read(self._objects, partial(self._table, marker))

    def _dense_file(self, name: str, unit: str) -> Iterator[int]:
        file = self._dense(unit).get(name)
        if file is None:
            raise CorruptionError("its COMMIT names no such dense file", name=name)
        return DensePart(name, file).read(self._objects)

    def _table(self, marker: MarkerId, table: int) -> str:
        claim = self._lineage.claims.get(marker.generation)
        known = claim is not None and table < len(claim.schema.tables)
        return claim.schema.tables[table].name if claim is not None and known else str(table)

    # Contents of owners.

    def _named(self, owner: str) -> dict[str, SegmentRef]:
        """Return the segments that a manifest or a fold names."""
        if self._refs[0] != owner:
            self._catalog.forget()  # there may be many, and each is read once
            manifest, fold = parse_manifest_name(owner), parse_fold_name(owner)
            if manifest is not None:
                ranks = self._catalog.manifest(manifest[1]).segments
                refs = [ref for each in ranks for ref in each]
            else:
                assert fold is not None
                refs = list(self._catalog.fold(fold.start, fold.end).segments)
            self._refs = owner, {ref.name: ref for ref in refs}
        return self._refs[1]

    def _dense(self, unit: str) -> dict[str, DenseFile]:
        """Return the dense files of a marker, including their list."""
        if self._files[0] != unit:
            commit = self._commit_of(unit)
            files = [*([commit.dense_list.file] if commit.dense_list else []), *files_in(self._objects, commit)]
            named = {dense_file_name(commit.job, commit.id, file.name): file for file in files}
            self._files = unit, named
        return self._files[1]

    def _commit_of(self, unit: str) -> Commit:
        found = parse_dense_file(f"{unit}/{_SOME_FILE}")
        assert found is not None
        return self._lineage.find(found[1])


def _check_is(found: object, said: object, name: str) -> None:
    if found != said:
        raise CorruptionError("this object is another one than its name says", name=name)
