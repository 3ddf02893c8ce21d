"""What a store holds of one job, read from its names and manifests, and what of it leads to a marker."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from torchrec_stream_ckpt.errors import CorruptionError, MissingObjectError
from torchrec_stream_ckpt.format.control import Claim, Commit, parse_control
from torchrec_stream_ckpt.format.frame import Buffer
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.format.manifest import Fold, Manifest, SegmentRef
from torchrec_stream_ckpt.layout import (
    DROPPED_DIR,
    FOLDS_DIR,
    MANIFESTS_DIR,
    FoldName,
    claim_name,
    manifest_name,
    parse_dropped_name,
    parse_fold_name,
    parse_manifest_name,
)
from torchrec_stream_ckpt.store.api import Objects
from torchrec_stream_ckpt.types import MarkerId

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows that changed in (start, end], the newest version of each in the last segment that has it."""

    start: MarkerId | None
    """None: the piece holds every row."""
    end: MarkerId
    segments: tuple[SegmentRef, ...]

    @property
    def rows(self) -> int:
        return sum(segment.rows for segment in self.segments)

    @property
    def num_bytes(self) -> int:
        return sum(segment.num_bytes for segment in self.segments)


@dataclass(frozen=True, slots=True)
class Cover:
    """Pieces that lie one behind the other, from the start of a path to ``reach``."""

    pieces: tuple[Piece, ...]

    @property
    def reach(self) -> MarkerId:
        return self.pieces[-1].end


@dataclass(slots=True)
class Catalog:
    """The objects of one job. Nothing in a store changes, so that what was read once stays true."""

    objects: Objects
    job: bytes
    markers: frozenset[MarkerId] = frozenset()
    """Markers whose manifests are there; some may have been dropped."""
    dropped: frozenset[MarkerId] = frozenset()
    """Markers that retention has given up."""
    folds: frozenset[tuple[MarkerId | None, MarkerId]] = frozenset()
    _manifests: dict[MarkerId, Manifest] = field(default_factory=dict)

    @classmethod
    def load(cls, objects: Objects, job: bytes) -> Catalog:
        """List what is there now."""
        catalog = cls(objects, job)
        catalog.refresh()
        return catalog

    def refresh(self) -> None:
        """List again."""
        self.markers = frozenset(
            found[1] for name in self._names(MANIFESTS_DIR) if (found := parse_manifest_name(name)) is not None
        )
        self.dropped = frozenset(
            found[1] for name in self._names(DROPPED_DIR) if (found := parse_dropped_name(name)) is not None
        )
        self.folds = frozenset(
            (fold.start, fold.end) for name in self._names(FOLDS_DIR) if (fold := parse_fold_name(name)) is not None
        )

    def _names(self, kind: str) -> Iterator[str]:
        return (entry.name for entry in self.objects.list(f"{kind}/{self.job.hex()}/"))

    def manifest(self, marker: MarkerId) -> Manifest:
        """The manifest of a marker that is there.

        Raises:
            CorruptionError: it is gone or altered.
        """
        if marker not in self._manifests:
            name = manifest_name(self.job, marker)
            manifest = self._read(name, Manifest.from_bytes)
            if (manifest.commit.job, manifest.commit.id) != (self.job, marker):
                raise CorruptionError("manifest is of another marker than its name", name=name)
            self._manifests[marker] = manifest
        return self._manifests[marker]

    def _read(self, name: str, parse: Callable[[Buffer, str], T]) -> T:
        try:
            return parse(self.objects.read(name), name)
        except MissingObjectError:
            raise
        except CorruptionError as error:
            hint = (
                error.hint or "bring this object back from a copy, or delete it: stream-ckpt materialize makes it anew"
            )
            raise CorruptionError(error.message, hint=hint, store=self.objects.url, **error.where) from None

    def check(self, commit: Commit) -> Manifest:
        """The manifest of a marker that is there; raises also when it is of another history than ``commit``."""
        manifest = self.manifest(commit.id)
        if manifest.commit != commit:
            raise CorruptionError(
                "the store holds another marker of this name than the log: one of them was put back",
                hint="give every log a store of its own, or bring the right one back",
                marker=commit.id,
                store=self.objects.url,
            )
        return manifest

    def fold(self, start: MarkerId | None, end: MarkerId) -> Fold:
        """A fold that is there; raises as :meth:`manifest`."""
        name = FoldName(self.job, end, start).name
        fold = self._read(name, Fold.from_bytes)
        if (fold.job, fold.start, fold.end) != (self.job, start, end):
            raise CorruptionError("fold is another one than its name says", name=name)
        return fold

    def claim(self, generation: int) -> Claim:
        """The CLAIM of a generation that has a manifest, as it stands in the control partition."""
        name = claim_name(self.job, generation)
        claim = parse_control(self.objects.read(name))
        if not isinstance(claim, Claim) or (claim.job, claim.generation) != (self.job, generation):
            raise CorruptionError("not the CLAIM that its name says", name=name)
        return claim

    def lineage(self) -> Lineage:
        """What the control partition said of all markers that are here: for when the log is gone."""
        lineage = Lineage()
        for marker in sorted(self.markers):
            if marker.generation not in lineage.claims:
                lineage.apply(self.claim(marker.generation))
            lineage.apply(self.manifest(marker).commit)
        return lineage

    def cover(self, chain: Sequence[Commit], since: MarkerId | None = None) -> Cover | None:
        """Pieces that lead as far along ``chain`` as the store does; None when they lead nowhere.

        Args:
            chain: A tail of ``Lineage.chain`` of a marker: neighbors are an interval apart.
            since: The marker before its first one; None for a whole chain.

        Raises:
            CorruptionError: a manifest that is needed is altered, or of another history than ``chain``.
        """
        places = {since: -1} | {commit.id: place for place, commit in enumerate(chain)}
        strides: dict[int, list[int]] = {}
        for start, end in self.folds:
            if start in places and end in places and places[start] < places[end]:
                strides.setdefault(places[end], []).append(places[start])
        for place, commit in enumerate(chain):
            if commit.id in self.markers:
                strides.setdefault(place, []).append(place - 1)
        for reach in reversed(range(len(chain))):
            steps = _steps(strides, reach) if chain[reach].id in self.markers else None
            if steps is not None:
                return Cover(tuple(self._piece(chain, start, end, since) for start, end in steps))
        return None

    def _piece(self, chain: Sequence[Commit], start: int, end: int, since: MarkerId | None) -> Piece:
        first = chain[start].id if start >= 0 else since
        if (first, chain[end].id) in self.folds:
            return Piece(first, chain[end].id, self.fold(first, chain[end].id).segments)
        manifest = self.check(chain[end])
        return Piece(first, chain[end].id, tuple(ref for refs in manifest.segments for ref in refs))


def _steps(strides: Mapping[int, Sequence[int]], reach: int) -> list[tuple[int, int]] | None:
    """The longest strides from the start of a chain, -1, to ``reach``; None when there is a gap."""
    steps = []
    while reach >= 0:
        if reach not in strides:
            return None
        steps.append((min(strides[reach]), reach))
        reach = min(strides[reach])
    return steps[::-1]
