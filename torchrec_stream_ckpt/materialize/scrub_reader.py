"""All objects of a job that somebody may need, in the order of their names, and each one read piece by piece.

A *unit* is what is listed and cut no further: a CLAIM, what says that a marker was given up, a fold or a manifest with
the segments that it names, the dense state of a marker.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from torchrec_stream_ckpt.errors import CorruptionError, MarkerNotFoundError, OtherLogError, StoreUnavailableError
from torchrec_stream_ckpt.format.control import Claim, Commit, parse_control
from torchrec_stream_ckpt.format.dense_files import DenseFile
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.format.manifest import Dropped, Fold, Garbage, Manifest, SegmentRef
from torchrec_stream_ckpt.format.segment import parse_front
from torchrec_stream_ckpt.layout import (
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
from torchrec_stream_ckpt.materialize.scrub_task import DensePart, Part, SegmentPart
from torchrec_stream_ckpt.store.api import Objects
from torchrec_stream_ckpt.store.catalog import Catalog
from torchrec_stream_ckpt.store.dense_objects import files_in
from torchrec_stream_ckpt.store.summaries import list_summaries, load_summary
from torchrec_stream_ckpt.types import MarkerId

_SOME_FILE = "x"


class ScrubReader:
    """Reads objects of one job and compares their checksums.

    Args:
        objects: The store.
        lineage: The control partition, or what the store itself says of it.
        catalog: What the store holds.
    """

    def __init__(self, objects: Objects, lineage: Lineage, catalog: Catalog) -> None:
        self._objects = objects
        self._lineage = lineage
        self._catalog = catalog
        self.heeds_lists = True
        """Whether what gc has listed counts as needless."""
        self._refs: tuple[str, dict[str, SegmentRef]] = ("", {})
        """Segments that a fold or a manifest names: of the one that was read last."""
        self._files: tuple[str, dict[str, DenseFile]] = ("", {})
        """The same of dense state."""

    # What there is.

    def units(self) -> list[str]:
        """Names of all units, in their order. What retention has put on a list of garbage is left out."""
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
        """Markers whose dense state must be whole here: with a manifest, and those whose trainer has put it here.

        Of a marker without a manifest the materializer may be copying it right now.
        """
        names = (entry.name for entry in self._objects.list(f"{DENSE_DIR}/{self._catalog.job.hex()}/"))
        here = {found[1] for name in names if (found := parse_dense_file(name)) is not None}
        commits, home = self._lineage.commits, "" if self._objects.size(IDENTITY_FILE) is not None else None
        kept = {marker for marker in here & commits.keys() if commits[marker].store in (self._objects.url, home)}
        return set((self._catalog.markers & commits.keys() | kept) - self._catalog.dropped)

    def listed(self) -> set[str]:
        """Names of what nobody needs, as gc has listed them. A list that cannot be read says nothing."""
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
        """The objects of a unit, first the one that names the others: alone, where it cannot be read."""
        try:
            if unit.startswith(f"{DENSE_DIR}/"):
                return list(self._dense(unit))
            if parse_manifest_name(unit) is not None or parse_fold_name(unit) is not None:
                return [unit, *self._named(unit)]
        except (CorruptionError, StoreUnavailableError):  # the one that reads it tells whether the store is away
            return [self._list_of(unit)]
        return [unit]

    def _list_of(self, unit: str) -> str:
        """Return the object that says which objects a unit has."""
        if not unit.startswith(f"{DENSE_DIR}/"):
            return unit
        commit = self._commit_of(unit)
        return dense_file_name(commit.job, commit.id, commit.dense_list.file.name) if commit.dense_list else unit

    def is_needless(self, name: str) -> bool:
        """Tell whether nobody misses an object that was found damaged: gc deletes it, or has done so meanwhile."""
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
        return parse_fold_name(name) is not None  # nothing tells a fold that was lost from one that gc took

    # One object.

    def read(self, name: str) -> Iterator[int]:
        """Read one object whole; yields how many bytes each piece had.

        Raises:
            CorruptionError: it is gone or damaged.
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
        """Return what a worker would read of a unit's object; None: only this reader can tell what it should be.

        What says which objects the unit has is not for workers, and nothing is for them where it cannot be read.
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
        """Ask the store again what it names: something was written anew."""
        self._refs, self._files = ("", {}), ("", {})

    def _manifest(self, name: str, marker: MarkerId) -> Iterator[int]:
        data = self._objects.read(name)
        manifest = Manifest.from_bytes(data, name)
        _check_is((manifest.commit.job, manifest.commit.id), (self._catalog.job, marker), name)
        known = self._lineage.commits.get(marker)
        if known is not None and known != manifest.commit:
            raise OtherLogError("the store holds another marker of this name than the log", name=name)
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
        """Compare a summary with the objects that it was taken from; those that are damaged or gone say nothing."""
        if self._objects.size(name.name) is None:
            return  # it may go at any time
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
        """Tell whether these are bytes of a manifest, or of the beginning of a segment, whichever."""
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

    # What owners say.

    def _named(self, owner: str) -> dict[str, SegmentRef]:
        """The segments that a manifest or a fold names."""
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
        """The dense files of a marker, its list among them."""
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
