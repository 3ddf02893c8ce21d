"""What a store holds whole of each marker, as far as names and lengths tell. Of the rows, nothing is read."""

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
    """What a restore of one marker would find."""

    marker: MarkerId
    pieces: tuple[Piece, ...]
    """What it would read; empty when the store has nothing of it."""
    damage: str = ""
    """What of the pieces is gone, short or altered; empty when nothing is."""
    dense: str = ""
    """What is wrong with the dense state in the store; empty when nothing is."""

    @property
    def reach(self) -> MarkerId | None:
        """The marker up to which the store serves the rows."""
        return self.pieces[-1].end if self.pieces and not self.damage else None

    @property
    def problem(self) -> str:
        """Why the store alone is not enough; empty when it is."""
        if self.damage:
            return self.damage
        if self.reach != self.marker:
            return f"the rows are there up to marker {self.reach}" if self.reach else "the rows are not there"
        return self.dense


@dataclass(slots=True)
class Holdings:
    """A job's catalog, and how long each of its objects is."""

    catalog: Catalog
    lineage: Lineage
    sizes: Mapping[str, int]
    """Length of each object, by name, as of one listing."""
    strides: Strides = field(init=False)
    _folders: dict[str, dict[str, int]] = field(default_factory=dict)
    _damages: dict[Stride, str] = field(default_factory=dict)
    """What is wrong with each; of a marker with itself: with what it needs besides rows."""

    def __post_init__(self) -> None:
        self.strides = Strides(self.lineage, self.catalog)

    @classmethod
    def load(cls, objects: Objects, lineage: Lineage) -> Holdings:
        """List the job's objects.

        Raises:
            StoreUnavailableError: the store does not answer, or does not accept our login.
        """
        catalog = Catalog.load(objects, lineage.job)  # first: what it names has been written before it
        kinds = (SEGMENTS_DIR, DENSE_DIR, MANIFESTS_DIR, FOLDS_DIR, VERDICTS_DIR)
        entries = (entry for kind in kinds for entry in objects.list(f"{kind}/{lineage.job.hex()}/"))
        return cls(catalog, lineage, {entry.name: entry.num_bytes for entry in entries})

    def look(self, marker: MarkerId) -> Holding:
        """Look for what the store has of one committed marker.

        Raises:
            MarkerNotFoundError: it is not committed.
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
        """Return the holdings as they will be once these folds are written."""
        made = Holdings(self.catalog.assuming(spans), self.lineage, self.sizes)
        made._damages.update(self._damages)
        return made

    def needed_by(self, marker: MarkerId) -> list[Stride]:
        """List the strides that a restore of a marker reads; raises as :meth:`look`."""
        return [*((piece.start, piece.end) for piece in self.look(marker).pieces), (marker, marker)]

    def apart_from(self, damaged: Mapping[Stride, str]) -> Holdings:
        """The same without folds that were found damaged; the way of a marker that needs a damaged interval has damage.

        Args:
            damaged: What was found, each with the reason.
        """
        folds, known = frozenset(damaged.keys() & self.catalog.folds), {**self._damages, **damaged}
        made = Holdings(replace(self.catalog, folds=self.catalog.folds - folds), self.lineage, self.sizes)
        made._damages.update({step: why for step, why in known.items() if step not in folds})
        return made

    def damage(self, cover: Sequence[Piece]) -> str:
        """The first segment of a cover that is not there as it was written; empty when all are."""
        parts = [((piece.start, piece.end), piece.segments) for piece in cover]
        # Whatever piece leads there: the notes in the segments of its own interval say what each rank held.
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
            return f"{ref.name} is gone"
        return "" if found == ref.num_bytes else f"{ref.name} has {found} bytes, {ref.num_bytes} were written"

    def _dense(self, commit: Commit) -> str:
        if commit.dense_list is not None:
            folder = dense_name(commit.job, commit.id)
            if not self._folders:
                self._folders.update(by_folder(self.sizes))
            whole = agree(commit.dense_list, self._folders.get(folder, {}))
            return "" if whole else f"dense state is not whole in the store: {folder}"
        for file in commit.dense_files:
            name = dense_file_name(commit.job, commit.id, file.name)
            found = self.sizes.get(name)
            if found is None:
                return f"dense state is not in the store: {name}"
            if found != file.num_bytes:
                return f"dense state was altered: {name} has {found} bytes, {file.num_bytes} were committed"
        return ""
