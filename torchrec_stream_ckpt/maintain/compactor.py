"""Write bases and spans in addition to the intervals of the store, as a policy wants, while markers are added.

The set of folds follows from the markers alone, in their order: all folds that the policy wants at one marker come
before those of the next. A slow merge therefore delays folds, but changes none.

:func:`plan_spans` plans merges between two kept markers, so that objects needed only by the markers between them can be
deleted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from typing import Literal, get_args

from torchrec_stream_ckpt.errors import ConfigError
from torchrec_stream_ckpt.find.holdings import Holdings
from torchrec_stream_ckpt.format.control import Commit
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.maintain.engine.api import Engine
from torchrec_stream_ckpt.maintain.merge import Merged, Merging, plan_merge
from torchrec_stream_ckpt.maintain.progress import Progress
from torchrec_stream_ckpt.store.api import Objects
from torchrec_stream_ckpt.store.catalog import Catalog, Piece
from torchrec_stream_ckpt.util.types import MarkerId


@dataclass(frozen=True, slots=True)
class Span:
    """A fold to be written: all rows that changed in (start, end]."""

    start: MarkerId | None
    """Marker at which the fold starts. None for a base."""
    end: MarkerId
    pieces: tuple[Piece, ...]
    """Pieces that the fold is made of."""

    @property
    def num_bytes(self) -> int:
        """Bytes to read, and the maximum of bytes to write."""
        return sum(piece.num_bytes for piece in self.pieces)

    def __str__(self) -> str:
        return f"{self.start or 'the root'} to {self.end}"


def plan_spans(holdings: Holdings, anchors: Iterable[MarkerId]) -> Iterator[Span]:
    """Yield the folds that make all markers between ``anchors`` unneeded, on the path of each anchor from the root.

    No fold crosses a base, which would have to be rewritten. A base itself is rewritten if the pieces after it are
    larger.

    Args:
        holdings: Contents of the store.
        anchors: Markers that must stay restorable. Those that are not whole are skipped.
    """
    stays = frozenset(anchors)
    for end in sorted(stays):
        holding = holdings.look(end)
        if holding.reach != end:
            continue
        chain = holdings.strides.chain(end)
        places = {commit.id: place for place, commit in enumerate(chain)}
        base, *rest = holding.pieces
        others = [marker for marker in stays if marker in places and marker != end]
        before = max(others, key=places.__getitem__, default=None)
        if before is None and sum(piece.num_bytes for piece in rest) > base.num_bytes:
            yield Span(None, end, holding.pieces)
            continue
        start = base.end if before is None or places[before] < places[base.end] else before
        tail = chain[places[start] + 1 :]
        cover = holdings.catalog.cover(tail, start)
        if len(cover) > 1 and cover[-1].end == end and not holdings.damage(cover):
            yield Span(start, end, cover)


TASK_BYTES = 256 * 2**20
"""Bytes that a task of a merge reads, approximately."""
Compact = Literal["none", "span2", "span4", "span8", "span16"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """Folds that the materializer writes in addition to the intervals of the log."""

    rebase: float = 1.0
    """Write a new base when the pieces after the last one exceed this multiple of its bytes. 0 for never."""
    compact: Compact = "span4"
    """``span4``: for every 4 markers, write their newest rows once more, for every 4 of these again, and so on."""

    def __post_init__(self) -> None:
        if self.rebase < 0:
            raise ConfigError(f"rebase must not be negative, got {self.rebase}", hint="set it to 0 to write no bases")
        if self.compact not in get_args(Compact):
            raise ConfigError(f"compact must be one of {', '.join(get_args(Compact))}, got {self.compact!r}")

    @property
    def radix(self) -> int:
        """Number of markers in one span, and of spans in one of the next size. 0 if there are no spans."""
        return int(self.compact.removeprefix("span")) if self.compact != "none" else 0


@dataclass(slots=True)
class _GrowingPath:
    """The path of a marker, and the pieces that a restore of it would read. It grows with the path."""

    catalog: Catalog
    listed: int
    """Number of times the catalog had been listed, or its cache discarded."""
    ids: list[MarkerId]
    """Markers of the path, from the first marker of the job."""
    cover: list[Piece]
    """Pieces, as in ``Catalog.cover``."""
    ahead: dict[MarkerId, list[Piece]] = field(default_factory=dict)
    """Folds that end at markers after the path, by their end."""

    @property
    def end(self) -> MarkerId:
        return self.ids[-1]

    def grow(self, piece: Piece) -> None:
        """Add the next marker, with its interval."""
        self.cover.append(piece)
        self.ids.append(piece.end)
        for fold in self.ahead.pop(piece.end, ()):
            self.take(fold)

    def take(self, fold: Piece) -> None:
        """Replace pieces by a fold that was written, now or after the path has grown to its end."""
        if fold.end > self.end:
            self.ahead.setdefault(fold.end, []).append(fold)
            return
        place = next((place for place, piece in enumerate(self.cover) if piece.start == fold.start), None)
        stop = next((place for place, piece in enumerate(self.cover, 1) if piece.end == fold.end), None)
        if place is not None and stop is not None and place < stop:
            self.cover[place:stop] = [fold]

    def place_of(self, marker: MarkerId) -> int | None:
        """Return the index of the first piece after a marker. None if the marker is within a piece."""
        for place in range(len(self.cover), 0, -1):
            if self.cover[place - 1].end <= marker:
                return place if self.cover[place - 1].end == marker else None
        return None


class Compactor:
    """Merges pieces of the store on the path to a marker, one fold at a time, each by as many tasks as it is worth.

    If a marker follows on the last one, only the pieces that are merged are read, and no older ones.

    Args:
        objects: The store.
        pool: Threads to read it with.
        policy: Rule for the folds to write.
        progress: Updated with the bytes merged.
        engine: Runs the tasks.
    """

    def __init__(self, objects: Objects, pool: Executor, policy: Policy, progress: Progress, engine: Engine) -> None:
        self._objects = objects
        self._pool = pool
        self.policy = policy
        self._progress = progress
        self._engine = engine
        self._queue: deque[MarkerId] = deque()
        """Markers whose folds are not all written, in the order in which they were added."""
        self._way: _GrowingPath | None = None
        """Path to the first marker of the queue."""
        self._newest: _GrowingPath | None = None
        """Path to the marker that :meth:`cover` was last called with."""
        self._merging: Merging | None = None
        self._futures: list[Future[Merged]] = []

    @property
    def is_busy(self) -> bool:
        """True if folds of added markers are still to be written."""
        return bool(self._queue)

    def add(self, marker: MarkerId) -> None:
        """Add a marker that was put into the store."""
        if self.policy.rebase or self.policy.radix:
            self._queue.append(marker)

    def wait(self, timeout_s: float) -> bool:
        """Let tasks run until one is done or time is up. Returns whether all are done. Raises as ``Engine.wait``."""
        left = [future for future in self._futures if not future.done()]
        if left:
            merging, done = self._merging, len(self._futures) - len(left)
            assert merging is not None
            self._progress.doing = f"merging up to marker {merging.end}: {done} of {len(self._futures)} tasks are done"
            self._engine.wait(left, timeout_s)
        return all(future.done() for future in left)

    def advance(self, lineage: Lineage, catalog: Catalog) -> None:
        """Write folds until a task must be waited for.

        Raises:
            CorruptionError: a piece is damaged. The next call begins this fold again.
            StoreUnavailableError, EngineUnavailableError: the store or the engine does not answer. The next call begins
                this fold again.
        """
        while True:
            if self._merging is not None:
                if not all(future.done() for future in self._futures):
                    return
                self._finish(catalog)
            elif not self._begin(lineage, catalog):
                return

    def cover(self, lineage: Lineage, catalog: Catalog, commit: Commit) -> tuple[Piece, ...]:
        """Return the pieces that a restore of a marker would read. Raises as ``Catalog.cover``."""
        way, self._newest = self._newest, None
        self._newest = _to(way, lineage, catalog, commit, self._pool)
        return tuple(self._newest.cover)

    def _begin(self, lineage: Lineage, catalog: Catalog) -> bool:
        """Begin the next merge that the policy wants. Returns False if there is none."""
        while self._queue:
            marker = self._queue[0]
            commit = lineage.commits.get(marker)
            if commit is not None and marker in catalog.markers:
                way, self._way = self._way, None  # if this fails, the path is computed again
                way = _to(way, lineage, catalog, commit, self._pool)
                place = self._wanted(way)
                if place is not None:
                    self._merge(lineage, way.cover[place:])
                    self._way = way
                    return True
                self._way = way
            self._queue.popleft()
        return False

    def _wanted(self, way: _GrowingPath) -> int | None:
        """Return the index of the first piece of the next fold, 0 for a base. None if the policy wants no fold here."""
        if not way.cover or way.cover[-1].end != way.end:
            return None
        if self.policy.radix:
            for span in spans(len(way.ids) - 1, self.policy.radix):
                # No span crosses a base: it would be the longest piece that leads here, and the base would be unused.
                place = way.place_of(way.ids[-1 - span])
                if place is not None and len(way.cover) - place > 1:
                    return place
        base, *rest = way.cover
        due = self.policy.rebase and sum(piece.num_bytes for piece in rest) > self.policy.rebase * base.num_bytes
        return 0 if due and rest else None

    def _merge(self, lineage: Lineage, pieces: list[Piece]) -> None:
        self._progress.doing = f"merging {len(pieces)} pieces up to marker {pieces[-1].end}"
        merging = plan_merge(self._objects, lineage, pieces, self._pool, task_bytes=TASK_BYTES)
        self._merging = merging
        self._futures = []
        try:
            for task in merging.tasks:
                self._futures.append(self._engine.submit(task))
        except BaseException:
            self._drop()
            raise

    def _finish(self, catalog: Catalog) -> None:
        """Put the fold after all its tasks are done."""
        merging, futures = self._merging, self._futures
        assert merging is not None
        try:
            done = [future.result() for future in futures]
            fold = merging.finish(self._objects, [each.refs for each in done], self._pool)
        finally:
            self._drop()
        self._progress.counts.fold_bytes_read += sum(each.read_bytes for each in done)
        self._progress.counts.fold_bytes += sum(ref.num_bytes for ref in fold.segments)
        catalog.folded(fold.start, fold.end)
        for way in (self._way, self._newest):
            if way is not None:
                way.take(Piece(fold.start, fold.end, fold.segments, fold.chain))

    def _drop(self) -> None:
        """Cancel the current merge."""
        for future in self._futures:
            future.cancel()
        self._merging, self._futures = None, []


def _to(way: _GrowingPath | None, lineage: Lineage, catalog: Catalog, commit: Commit, pool: Executor) -> _GrowingPath:
    """Return the path of a marker: that of the marker before and one more piece, if that path is known."""
    before = lineage.previous(commit.id) or lineage.claims[commit.generation].parent
    if way is not None and way.catalog is catalog and way.listed == catalog.listed:
        if way.end == commit.id:
            return way
        if way.end == before and way.cover and way.cover[-1].end == before:
            way.grow(catalog.piece(before, commit))
            return way
    chain = lineage.chain(commit.id)
    return _GrowingPath(catalog, catalog.listed, [each.id for each in chain], list(catalog.cover(chain, pool=pool)))


def spans(intervals_since_root: int, radix: int) -> Iterator[int]:
    """Yield the lengths of the spans that end at this place of a chain, the shortest first."""
    length = radix
    while intervals_since_root and intervals_since_root % length == 0:
        yield length
        length *= radix
