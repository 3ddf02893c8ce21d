"""Catalog of one job's objects in a store, from names and manifests, and the pieces that lead to a marker.

Also a bounded cache of the store's small objects.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence, Set
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from torchrec_stream_ckpt.errors import CorruptionError, MarkerNotFoundError, MissingObjectError, OtherLogError
from torchrec_stream_ckpt.format.control import Claim, Commit, parse_control
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.format.manifest import Dropped, Fold, Manifest, SegmentRef
from torchrec_stream_ckpt.format.segment import Front
from torchrec_stream_ckpt.store.api import Objects, Readable, names_in
from torchrec_stream_ckpt.store.identity import check_store
from torchrec_stream_ckpt.store.prefetched import side_by_side
from torchrec_stream_ckpt.util.layout import (
    DROPPED_DIR,
    FOLDS_DIR,
    MANIFESTS_DIR,
    PINS_DIR,
    FoldName,
    claim_name,
    dropped_name,
    manifest_name,
    parse_dropped_name,
    parse_fold_name,
    parse_manifest_name,
    parse_pin_name,
)
from torchrec_stream_ckpt.util.types import MarkerId

MOST_REFS = 2**18
"""Limit of the cache, in segments and ranks of COMMITs: some 100 MB. The oldest entries are dropped and read again."""


class ObjectCache:
    """Bounded cache of objects by name. If it is full, the oldest entries are dropped. Safe on several threads."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[object, int]] = {}
        self._weight = 0
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._held)

    def get(self, name: str, kind: type[T]) -> T | None:
        """Return a cached object. Returns None if it must be read."""
        found = self._held.get(name)
        return found[0] if found is not None and isinstance(found[0], kind) else None

    def put(self, name: str, value: object, weight: int) -> None:
        """Cache an object. ``weight`` is the number of segments or ranks that it names."""
        weight = max(1, weight)
        with self._lock:
            self._weight += weight - self._held.pop(name, (None, 0))[1]
            self._held[name] = value, weight
            while self._weight > MOST_REFS and len(self._held) > 1:
                self._weight -= self._held.pop(next(iter(self._held)))[1]

    def clear(self) -> None:
        """Drop all cached objects."""
        with self._lock:
            self._held.clear()
            self._weight = 0


_FEW = 8
"""Up to this many objects are read one after the other."""
_AHEAD = 64
"""Number of concurrent reads if there are more."""

T = TypeVar("T")
H = TypeVar("H", bound=Hashable)
K = TypeVar("K", Manifest, Dropped, Fold)

Stride = tuple[MarkerId | None, MarkerId]
"""(start, end) of a piece, which is a fold or otherwise an interval. ``start`` is None if it begins with every row."""


@dataclass(frozen=True, slots=True)
class Picked:
    """Chunks of one segment, by their numbers in its directory, ascending."""

    ref: SegmentRef
    front: Front
    chunks: npt.NDArray[np.int64]

    @property
    def entries(self) -> npt.NDArray[np.void]:
        """Directory entries of the chunks."""
        return self.front.directory[self.chunks]

    @property
    def num_bytes(self) -> int:
        return int(self.entries["num_bytes"].sum())

    def only(self, chosen: npt.NDArray[np.bool_]) -> Picked:
        """Return only the chosen chunks. There is one flag per chunk."""
        return replace(self, chunks=self.chunks[chosen])

    def alone(self) -> Picked:
        """Return a copy for another process: the same chunks without the entries of others, and without notes."""
        front = replace(self.front, directory=self.entries, notes=b"")
        return replace(self, front=front, chunks=np.arange(len(self.chunks)))


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows that changed in (start, end]. The newest version of each is in the last segment that has it."""

    start: MarkerId | None
    """Start of the piece. None if it holds every row."""
    end: MarkerId
    segments: tuple[SegmentRef, ...]
    chain: int
    """``Commit.chain`` of ``end``."""
    opened: tuple[Picked, ...] = ()
    """Chunks of each segment, set once the directories were read: all of them, or those kept by :meth:`only`."""

    def only(self, choose: Callable[[Picked], Picked]) -> Piece:
        """Return the open piece with the chosen chunks of each segment. Omits segments without chosen chunks."""
        return replace(self, opened=tuple(left for each in self.opened if len((left := choose(each)).chunks)))

    @property
    def generation(self) -> int:
        """Generation in which it ends."""
        return self.end.generation

    @property
    def rows(self) -> int:
        return sum(segment.rows for segment in self.segments)

    @property
    def num_bytes(self) -> int:
        return sum(segment.num_bytes for segment in self.segments)


@dataclass(slots=True)
class Catalog:
    """Objects of one job. Objects in a store do not change, so everything read once stays valid."""

    objects: Objects
    job: bytes
    markers: Set[MarkerId] = frozenset()
    """Markers that have manifests. Some may have been dropped."""
    dropped: Set[MarkerId] = frozenset()
    """Markers that were given up and were not pinned before that."""
    folds: Set[Stride] = frozenset()
    listed: int = 0
    """Number of listings and cache resets. Until it grows, only the caller's own folds are new."""
    small: Readable | None = None
    """Source of manifests and directories. None for the objects themselves."""
    kept: ObjectCache = field(default_factory=ObjectCache, compare=False, repr=False)
    """Cache of manifests, folds and records of markers that were given up, up to a bound."""
    _assumed: Mapping[Stride, Fold] = field(default_factory=dict)
    """Folds that are still to be written."""

    @classmethod
    def load(cls, objects: Objects, job: bytes) -> Catalog:
        """List the current objects of a job."""
        catalog = cls(objects, job)
        catalog.refresh()
        return catalog

    @classmethod
    def of_job(cls, objects: Objects | None, lineage: Lineage) -> Catalog | None:
        """List the objects of a job in its store. Returns None if the job has written nothing there.

        Raises:
            StoreUnavailableError: it does not answer.
            UnsupportedError: the store has a newer format.
            MissingObjectError: the store has lost its format.
        """
        if objects is None or not lineage.claims or not check_store(objects):
            return None
        return cls.load(objects, lineage.job)

    def refresh(self) -> None:
        """List again."""
        self.listed += 1
        objects, job = self.objects, self.job
        self.markers = frozenset(found[1] for found in names_in(objects, MANIFESTS_DIR, job, parse_manifest_name))
        self.dropped = frozenset(found[1] for found in names_in(objects, DROPPED_DIR, job, parse_dropped_name))
        if self.dropped:  # listed before pins: a pin that existed when a marker was given up is seen
            pins = {found[1] for found in names_in(objects, PINS_DIR, job, parse_pin_name)}
            self.dropped -= {each for each in pins & self.markers & self.dropped if _is_of_choice(self, each)}
        self.folds = frozenset((found.start, found.end) for found in names_in(objects, FOLDS_DIR, job, parse_fold_name))

    # Objects that the owner of this catalog has put since it was listed.

    def came(self, marker: MarkerId) -> None:
        """Note that the caller has put the manifest of a marker."""
        self.markers = _grown(self.markers, marker)

    def went(self, marker: MarkerId) -> None:
        """Note that the caller has given a marker up."""
        self.dropped = _grown(self.dropped, marker)

    def folded(self, start: MarkerId | None, end: MarkerId) -> None:
        """Note that the caller has put a fold."""
        self.folds = _grown(self.folds, (start, end))

    def refresh_within(self, lineage: Lineage) -> None:
        """List again. Raises as :meth:`check` if a new marker is of another history."""
        known = self.markers
        self.refresh()
        for marker in self.markers - known:
            if marker in lineage.commits:
                self.check(lineage.commits[marker])

    def manifest(self, marker: MarkerId) -> Manifest:
        """Return the manifest of a marker that has one.

        Raises:
            CorruptionError: it is missing or was altered.
        """
        name = manifest_name(self.job, marker)
        return self._read(name, Manifest, lambda each: each.commit.job == self.job and each.commit.id == marker)

    def _read(self, name: str, kind: type[K], has_name: Callable[[K], bool]) -> K:
        """Return an object from the cache, or read it. Raises CorruptionError unless it has this name."""
        if (found := self.kept.get(name, kind)) is not None:
            return found
        try:
            found = kind.from_bytes(self.fronts.read(name), name)
        except MissingObjectError:
            raise
        except CorruptionError as error:
            hint = error.hint or "restore this object from a copy, or delete it: stream-ckpt materialize recreates it"
            raise CorruptionError(error.message, hint=hint, store=self.objects.url, **error.where) from None
        if not has_name(found):
            what = "record" if kind is Dropped else kind.KIND
            raise CorruptionError(f"{what} does not match its file name (wrong or renamed object)", name=name)
        refs = found.commit.ranks if isinstance(found, Dropped) else found.segments
        self.kept.put(name, found, sum(map(len, refs)) if isinstance(found, Manifest) else len(refs))
        return found

    @property
    def fronts(self) -> Readable:
        """Source of manifests, folds and directories."""
        return self.small if self.small is not None else self.objects

    def forget(self) -> None:
        """Drop cached manifests and folds, because one was written again."""
        self.listed += 1
        self.kept.clear()

    def check(self, commit: Commit) -> Manifest:
        """Return the manifest of a marker that has one. Raises also if it is of another history than ``commit``."""
        manifest = self.manifest(commit.id)
        if not manifest.commit.is_same_marker(commit):
            raise self.foreign(commit, _in_words(manifest.commit))
        return manifest

    def foreign(self, commit: Commit, there: str) -> OtherLogError:
        """Make the error for an object of another history than ``commit``. ``there`` describes that history."""
        return OtherLogError(
            f"marker {commit.id} differs between store and log: one of the two was copied or restored from a backup",
            hint="give every log a separate store, or restore the one that belongs to this log",
            marker=commit.id,
            store=self.objects.url,
            there=there,
            log=_in_words(commit),
        )

    def drop_of(self, marker: MarkerId) -> Dropped:
        """Read the record of a marker that was given up; raises as :meth:`manifest`."""
        name = dropped_name(self.job, marker)
        return self._read(name, Dropped, lambda each: each.commit.job == self.job and each.commit.id == marker)

    def is_dropped(self, commit: Commit) -> bool:
        """Return whether the marker was given up. Raises if that was a marker of this name from another history."""
        if commit.id not in self.dropped:
            return False
        if not (found := self.drop_of(commit.id).commit).is_same_marker(commit):
            raise self.foreign(commit, _in_words(found))
        return True

    def check_offered(self, marker: MarkerId) -> None:
        """Raise MarkerNotFoundError if the marker was given up. The error gives time and reason."""
        if marker not in self.dropped:
            return
        try:
            drop = self.drop_of(marker)
            how = f"by {drop.reason} on {drop.day}"
        except CorruptionError:
            how = "some time ago"
        raise MarkerNotFoundError(
            f"marker {marker} was given up {how}",
            hint="choose another marker: stream-ckpt list URI",
            store=self.objects.url,
        )

    def fold(self, start: MarkerId | None, end: MarkerId) -> Fold:
        """Return an existing fold; raises as :meth:`manifest`."""
        if (start, end) in self._assumed:
            return self._assumed[start, end]
        name = FoldName(self.job, end, start).name
        return self._read(name, Fold, lambda each: (each.job, each.start, each.end) == (self.job, start, end))

    def assuming(self, spans: Iterable[Stride]) -> Catalog:
        """Return this catalog with folds that are still to be written and have no segments."""
        folds = {(start, end): Fold(self.job, start, end, 0, ()) for start, end in spans}
        return replace(self, folds=self.folds | folds.keys(), _assumed={**self._assumed, **folds})

    def claim(self, generation: int) -> Claim:
        """Return the CLAIM of a generation that has a manifest, as in the control partition."""
        name = claim_name(self.job, generation)
        claim = parse_control(self.objects.read(name))
        if not isinstance(claim, Claim) or (claim.job, claim.generation) != (self.job, generation):
            raise CorruptionError("CLAIM does not match its file name (wrong or renamed object)", name=name)
        return claim

    def lineage(self) -> Lineage:
        """Rebuild the lineage of all markers that are or were in the store, for a log that is lost.

        Raises:
            CorruptionError: a marker between others is missing, or an object is damaged.
        """
        self.read_ahead((marker, marker) for marker in self.markers - self.dropped)
        lineage = Lineage()
        newest: dict[int, MarkerId] = {}
        for marker in sorted(self.markers | self.dropped):
            said = self.drop_of(marker) if marker in self.dropped else self.manifest(marker)
            if marker.generation not in lineage.claims:
                lineage.apply(self.claim(marker.generation))
            parent = lineage.claims[marker.generation].parent if said.previous is None else None
            if said.previous != newest.get(marker.generation) or (parent and parent not in lineage.commits):
                raise _gap(self.objects, marker, said.previous or parent)
            lineage.apply(said.commit)
            newest[marker.generation] = marker
        return lineage

    def cover(
        self, chain: Sequence[Commit], since: MarkerId | None = None, pool: Executor | None = None
    ) -> tuple[Piece, ...]:
        """Return consecutive pieces that lead as far along ``chain`` as the store does. Empty if no piece begins it.

        Args:
            chain: A tail of ``Lineage.chain`` of a marker: neighbors are an interval apart.
            since: The marker before its first one. None for a whole chain.
            pool: Threads for reading, if a store may be slow for each of the pieces.

        Raises:
            CorruptionError: a manifest that is needed was altered, or is of another history than ``chain``.
        """
        commits, steps = {commit.id: commit for commit in chain}, self.steps(chain, since)

        def piece(step: Stride) -> Piece:
            return self.piece(step[0], commits[step[1]])

        if pool is None:
            return tuple(map(piece, steps))
        return tuple(side_by_side(self.fronts, pool, piece, steps, self._named))

    def _named(self, step: Stride) -> str:
        """Return the name of the object that names the segments of a piece."""
        start, end = step
        return FoldName(self.job, end, start).name if step in self.folds else manifest_name(self.job, end)

    def read_ahead(self, steps: Iterable[Stride]) -> None:
        """Read the objects that name the segments of pieces, concurrently if many. Damage is reported later."""

        def read(step: Stride) -> None:
            with suppress(CorruptionError):
                _ = self.fold(*step) if step in self.folds else self.manifest(step[1])

        unread = [step for step in steps if self.kept.get(self._named(step), object) is None]
        if len(unread) > _FEW:
            with ThreadPoolExecutor(min(_AHEAD, len(unread))) as pool:
                list(pool.map(read, unread))

    def upto(self, last: MarkerId) -> Catalog:
        """Return this catalog without later markers."""
        return replace(
            self,
            markers=frozenset(marker for marker in self.markers if marker <= last),
            dropped=frozenset(marker for marker in self.dropped if marker <= last),
            folds=frozenset(fold for fold in self.folds if fold[1] <= last),
        )

    def strides(self, chain: Sequence[Commit], since: MarkerId | None = None) -> dict[MarkerId, MarkerId | None]:
        """Return the start of the longest piece that ends at a marker, for all markers that pieces lead to.

        A piece counts only if others lead to its start: pieces after a gap lead nowhere.
        """
        ids = [commit.id for commit in chain]
        places: dict[MarkerId | None, int] = {since: -1} | {marker: place for place, marker in enumerate(ids)}
        folds: dict[MarkerId, list[MarkerId | None]] = {}
        for start, end in self.folds:
            if start in places and end in places and places[start] < places[end]:
                folds.setdefault(end, []).append(start)
        found: dict[MarkerId, MarkerId | None] = {}
        before = since
        for marker in ids:
            starts = folds.get(marker, []) + ([before] if marker in self.markers else [])
            led = [start for start in starts if start == since or start in found]
            if led:
                found[marker] = min(led, key=lambda start: places[start])
            before = marker
        return found

    def steps(self, chain: Sequence[Commit], since: MarkerId | None = None) -> list[Stride]:
        """Return (start, end) of the pieces of :meth:`cover`, judging by names. The last one ends at a manifest."""
        strides = self.strides(chain, since)
        reach = next((each.id for each in reversed(chain) if each.id in self.markers and each.id in strides), None)
        return follow(strides, reach, since)

    def piece(self, start: MarkerId | None, end: Commit) -> Piece:
        """Return the piece of (start, end]: a fold, or otherwise an interval; raises as :meth:`cover`."""
        if (start, end.id) in self.folds:
            fold = self.fold(start, end.id)
            if fold.segments and fold.chain != end.chain:
                raise self.foreign(end, f"chain {fold.chain:08x}")
            return Piece(start, end.id, fold.segments, end.chain)
        manifest, marker = self.check(end), end.id
        if manifest.previous != (start if start is not None and start.generation == end.generation else None):
            raise _gap(self.objects, marker, manifest.previous)
        return Piece(start, marker, manifest.refs, end.chain)


def follow(
    strides: Mapping[MarkerId, MarkerId | None], reach: MarkerId | None, since: MarkerId | None = None
) -> list[Stride]:
    """Return (start, end) of the pieces from ``since`` to ``reach``, oldest first; see :meth:`Catalog.strides`."""
    steps = []
    at = reach
    while at is not None and at != since:
        steps.append((strides[at], at))
        at = strides[at]
    return steps[::-1]


def _grown(names: Set[H], name: H) -> Set[H]:
    """Return the names with one more. A set that was grown before is extended in place, by one insertion."""
    grown = names if isinstance(names, set) else set(names)
    grown.add(name)
    return grown


def _in_words(commit: Commit) -> str:
    """Describe the marker, to distinguish it from another one of its name."""
    return f"chain {commit.chain:08x}, step {commit.step}, nonce {commit.nonce}"


def _gap(objects: Objects, marker: MarkerId, previous: MarkerId | None) -> CorruptionError:
    return CorruptionError(
        f"the store lacks the markers between {marker} and the previous one that it holds"
        if previous is None
        else f"the store lacks marker {previous}, the predecessor of {marker}",
        hint="restore its manifest from a copy, or name the log's URI: the log has all markers",
        store=objects.url,
    )


def _is_of_choice(catalog: Catalog, marker: MarkerId) -> bool:
    """Return ``Dropped.of_choice`` of a marker that was given up. True if its record cannot be read."""
    try:
        return catalog.drop_of(marker).of_choice
    except (CorruptionError, MarkerNotFoundError):
        return True
