"""Write bases and spans beside the intervals of the store, as a policy wants them, while markers go on coming in.

Which folds there are follows from the markers alone, in their order: of each marker, what its policy wants, before
anything of the next one. So a merge that takes long makes folds late, and changes none.

Merge what lies between two markers that are kept, so that what only those between them needed can go.
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
    """None: a base."""
    end: MarkerId
    pieces: tuple[Piece, ...]
    """What it is made of."""

    @property
    def num_bytes(self) -> int:
        """Bytes to be read; at most so many are written."""
        return sum(piece.num_bytes for piece in self.pieces)

    def __str__(self) -> str:
        return f"{self.start or 'the root'} to {self.end}"


def plan_spans(holdings: Holdings, anchors: Iterable[MarkerId]) -> Iterator[Span]:
    """The folds that let go of all markers between ``anchors``, on each one's way from the root.

    None crosses a base, which would have to be written anew; a base itself is written anew when what came since is
    larger.

    Args:
        holdings: What is there.
        anchors: Markers that must stay restorable. Those that are not whole are left as they are.
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
"""What a task of a merge reads, about."""
Compact = Literal["none", "span2", "span4", "span8", "span16"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """What the materializer writes beside what the log holds."""

    rebase: float = 1.0
    """Write a new base when what came since the last one is more than so many times its bytes; 0: never."""
    compact: Compact = "span4"
    """``span4``: write, for every 4 markers, their newest rows once more, for every 4 of these again, and so on."""

    def __post_init__(self) -> None:
        if self.rebase < 0:
            raise ConfigError(f"rebase must not be negative, it is {self.rebase}", hint="0 is for never")
        if self.compact not in get_args(Compact):
            raise ConfigError(f"compact must be one of {', '.join(get_args(Compact))}, it is {self.compact!r}")

    @property
    def radix(self) -> int:
        """Markers that one span takes together, and spans that one of the next size does; 0: there are none."""
        return int(self.compact.removeprefix("span")) if self.compact != "none" else 0


@dataclass(slots=True)
class _GrowingPath:
    """The markers that lead to one, and the pieces that a restore of it would read. It grows with the path."""

    catalog: Catalog
    listed: int
    """How often the catalog had been listed, or forgotten."""
    ids: list[MarkerId]
    """From the first marker of the job on."""
    cover: list[Piece]
    """As ``Catalog.cover``."""
    ahead: dict[MarkerId, list[Piece]] = field(default_factory=dict)
    """Folds by where they end: at markers that were not asked for yet."""

    @property
    def end(self) -> MarkerId:
        return self.ids[-1]

    def grow(self, piece: Piece) -> None:
        """The next marker, with its interval."""
        self.cover.append(piece)
        self.ids.append(piece.end)
        for fold in self.ahead.pop(piece.end, ()):
            self.take(fold)

    def take(self, fold: Piece) -> None:
        """A fold has come in place of pieces, perhaps of some that are not here yet."""
        if fold.end > self.end:
            self.ahead.setdefault(fold.end, []).append(fold)
            return
        place = next((place for place, piece in enumerate(self.cover) if piece.start == fold.start), None)
        stop = next((place for place, piece in enumerate(self.cover, 1) if piece.end == fold.end), None)
        if place is not None and stop is not None and place < stop:
            self.cover[place:stop] = [fold]

    def place_of(self, marker: MarkerId) -> int | None:
        """Of the first piece that comes after a marker; None when the marker is within a piece."""
        for place in range(len(self.cover), 0, -1):
            if self.cover[place - 1].end <= marker:
                return place if self.cover[place - 1].end == marker else None
        return None


class Compactor:
    """Merges what the store has on the path to a marker, one fold at a time, each by as many tasks as it is worth.

    A marker that follows on the last one costs no look at what is older: only the pieces that are merged are looked at.

    Args:
        objects: The store.
        pool: Threads to read it with.
        policy: Which folds are wanted.
        progress: Told of what is merged.
        engine: Runs the tasks.
    """

    def __init__(self, objects: Objects, pool: Executor, policy: Policy, progress: Progress, engine: Engine) -> None:
        self._objects = objects
        self._pool = pool
        self.policy = policy
        self._progress = progress
        self._engine = engine
        self._queue: deque[MarkerId] = deque()
        """Markers of which the folds are not all written, in the order in which they came."""
        self._way: _GrowingPath | None = None
        """To the first of these."""
        self._newest: _GrowingPath | None = None
        """To the marker that was last asked for."""
        self._merging: Merging | None = None
        self._futures: list[Future[Merged]] = []

    @property
    def is_busy(self) -> bool:
        """True if folds of markers that came in are still to be written."""
        return bool(self._queue)

    def add(self, marker: MarkerId) -> None:
        """A marker has come into the store."""
        if self.policy.rebase or self.policy.radix:
            self._queue.append(marker)

    def wait(self, timeout_s: float) -> bool:
        """Let tasks go on, until one is done or the time is over; whether all are done. Raises as ``Engine.wait``."""
        left = [future for future in self._futures if not future.done()]
        if left:
            merging, done = self._merging, len(self._futures) - len(left)
            assert merging is not None
            self._progress.doing = f"merging up to marker {merging.end}: {done} of {len(self._futures)} tasks are done"
            self._engine.wait(left, timeout_s)
        return all(future.done() for future in left)

    def advance(self, lineage: Lineage, catalog: Catalog) -> None:
        """Write folds as far as that needs no waiting.

        Raises:
            CorruptionError: a piece is damaged; the next call begins this fold anew.
            StoreUnavailableError, EngineUnavailableError: likewise.
        """
        while True:
            if self._merging is not None:
                if not all(future.done() for future in self._futures):
                    return
                self._finish(catalog)
            elif not self._begin(lineage, catalog):
                return

    def cover(self, lineage: Lineage, catalog: Catalog, commit: Commit) -> tuple[Piece, ...]:
        """The pieces that a restore of a marker would read; raises as ``Catalog.cover``."""
        way, self._newest = self._newest, None
        self._newest = _to(way, lineage, catalog, commit, self._pool)
        return tuple(self._newest.cover)

    def _begin(self, lineage: Lineage, catalog: Catalog) -> bool:
        """Begin the next merge that is wanted; False: none is."""
        while self._queue:
            marker = self._queue[0]
            commit = lineage.commits.get(marker)
            if commit is not None and marker in catalog.markers:
                way, self._way = self._way, None  # where this fails, it is looked for anew
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
        """From which piece on the next fold takes all; 0: a base. None: the policy wants none at this marker."""
        if not way.cover or way.cover[-1].end != way.end:
            return None
        if self.policy.radix:
            for span in spans(len(way.ids) - 1, self.policy.radix):
                # None crosses a base: it would be the longest piece that leads here, and the base would not be used.
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
        """All tasks are done: the fold is put."""
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
        """Forget the merge that was under way."""
        for future in self._futures:
            future.cancel()
        self._merging, self._futures = None, []


def _to(way: _GrowingPath | None, lineage: Lineage, catalog: Catalog, commit: Commit, pool: Executor) -> _GrowingPath:
    """The way to a marker: that to the one before, and one piece more, where that is known."""
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
    """Lengths of the spans that end at this place of a chain, the shortest first."""
    length = radix
    while intervals_since_root and intervals_since_root % length == 0:
        yield length
        length *= radix
