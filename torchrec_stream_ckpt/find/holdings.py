"""List the parts of each marker that a store holds completely, judging by names and lengths. Reads no rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torchrec_stream_ckpt.errors import CorruptionError
from torchrec_stream_ckpt.find.strides import Strides
from torchrec_stream_ckpt.format.control import Commit
from torchrec_stream_ckpt.format.dense_files import agree, by_folder
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.format.manifest import SegmentRef
from torchrec_stream_ckpt.store.api import Objects
from torchrec_stream_ckpt.store.catalog import Catalog, Piece, Stride
from torchrec_stream_ckpt.util.layout import (
    DENSE_DIR,
    FOLDS_DIR,
    MANIFESTS_DIR,
    SEGMENTS_DIR,
    VERDICTS_DIR,
    dense_file_name,
    dense_name,
)
from torchrec_stream_ckpt.util.types import MarkerId


@dataclass(frozen=True, slots=True)
class Holding:
    """Contents of the store that a restore of one marker would find."""

    marker: MarkerId
    pieces: tuple[Piece, ...]
    """Pieces that the restore would read; empty if the store has none."""
    damage: str = ""
    """The first object of the pieces that is missing, short or altered. Empty if all are intact."""
    dense: str = ""
    """Problem with the dense state in the store. Empty if it is intact."""

    @property
    def reach(self) -> MarkerId | None:
        """Marker up to which the store has the rows. None if the store has no rows, or the pieces are damaged."""
        return self.pieces[-1].end if self.pieces and not self.damage else None

    @property
    def problem(self) -> str:
        """Reason why the store alone is not enough; empty if it is."""
        if self.damage:
            return self.damage
        if self.reach != self.marker:
            return f"rows are complete only up to marker {self.reach}" if self.reach else "rows are missing"
        return self.dense


@dataclass(slots=True)
class Holdings:
    """Catalog of a job, with the length of each of its objects."""

    catalog: Catalog
    lineage: Lineage
    sizes: Mapping[str, int]
    """Length of each object in bytes, by name, as of one listing."""
    strides: Strides = field(init=False)
    _folders: dict[str, dict[str, int]] = field(default_factory=dict)
    _damages: dict[Stride, str] = field(default_factory=dict)
    """Damage of each stride, empty if it is intact. A stride from a marker to itself is for its data besides rows."""

    def __post_init__(self) -> None:
        self.strides = Strides(self.lineage, self.catalog)

    @classmethod
    def load(cls, objects: Objects, lineage: Lineage) -> Holdings:
        """List the job's objects.

        Raises:
            StoreUnavailableError: the store does not answer, or does not accept our login.
        """
        catalog = Catalog.load(objects, lineage.job)  # first: the objects that it names were written before it
        kinds = (SEGMENTS_DIR, DENSE_DIR, MANIFESTS_DIR, FOLDS_DIR, VERDICTS_DIR)
        entries = (entry for kind in kinds for entry in objects.list(f"{kind}/{lineage.job.hex()}/"))
        return cls(catalog, lineage, {entry.name: entry.num_bytes for entry in entries})

    def skipped(self, upto: MarkerId | None) -> list[MarkerId]:
        """(the log of an inner tier, the store of the outer one) Return the markers that the outer tier skipped.

        The relay copies every Nth marker, in order, and the store has a manifest for each that was copied.

        Args:
            upto: A marker in the store, before which to look. None for the newest one.
        """
        markers, dropped = self.catalog.markers, self.catalog.dropped
        last = upto or max((markers - dropped) & self.lineage.commits.keys(), default=MarkerId(0, 0))
        return [each for each in self.lineage.commits if each < last and each not in markers | dropped]

    def look(self, marker: MarkerId) -> Holding:
        """Return what the store has of one committed marker.

        Raises:
            MarkerNotFoundError: the marker is not committed.
            StoreUnavailableError: the store does not answer.
        """
        commit = self.lineage.find(marker)
        pieces: tuple[Piece, ...] = ()
        try:
            pieces = self.strides.cover(marker)
            damage = self.damage(pieces)
        except CorruptionError as error:
            damage = error.headline
        return Holding(marker, pieces, damage, self._dense(commit))

    def assuming(self, spans: Iterable[Stride]) -> Holdings:
        """Return the holdings as they will be after these folds are written."""
        made = Holdings(self.catalog.assuming(spans), self.lineage, self.sizes)
        made._damages.update(self._damages)
        return made

    def needed_by(self, marker: MarkerId) -> list[Stride]:
        """List the strides that a restore of a marker reads. Raises as :meth:`look`."""
        return [*((piece.start, piece.end) for piece in self.look(marker).pieces), (marker, marker)]

    def apart_from(self, damaged: Mapping[Stride, str]) -> Holdings:
        """Return the holdings without damaged folds. A marker that needs a damaged interval is reported as damaged.

        Args:
            damaged: Damaged strides, each with the reason.
        """
        folds, known = frozenset(damaged.keys() & self.catalog.folds), {**self._damages, **damaged}
        made = Holdings(replace(self.catalog, folds=self.catalog.folds - folds), self.lineage, self.sizes)
        made._damages.update({step: why for step, why in known.items() if step not in folds})
        return made

    def damage(self, cover: Sequence[Piece]) -> str:
        """Describe the first segment of a cover that is missing or has another length. Empty if all are intact."""
        parts = [((piece.start, piece.end), piece.segments) for piece in cover]
        # Needed with any last piece: notes in the segments of the marker's own interval list the shards of each rank.
        ends = (piece.end for piece in cover[-1:])
        parts += [((each, each), self.catalog.check(self.lineage.find(each)).refs) for each in ends]
        for key, refs in parts:
            if key not in self._damages:
                self._damages[key] = next(filter(None, map(self._wrong, refs)), "")
            if self._damages[key]:
                return self._damages[key]
        return ""

    def _wrong(self, ref: SegmentRef) -> str:
        found = self.sizes.get(ref.name)
        if found is None:
            return f"{ref.name} is missing"
        return "" if found == ref.num_bytes else f"{ref.name} has {found} bytes, expected {ref.num_bytes}"

    def _dense(self, commit: Commit) -> str:
        if commit.dense_list is not None:
            folder = dense_name(commit.job, commit.id)
            if not self._folders:
                self._folders.update(by_folder(self.sizes))
            whole = agree(commit.dense_list, self._folders.get(folder, {}))
            return "" if whole else f"dense state is incomplete in the store: {folder}"
        for file in commit.dense_files:
            name = dense_file_name(commit.job, commit.id, file.name)
            found = self.sizes.get(name)
            if found is None:
                return f"dense state is missing from the store: {name}"
            if found != file.num_bytes:
                return f"dense state was altered: {name} has {found} bytes, {file.num_bytes} were committed"
        return ""
