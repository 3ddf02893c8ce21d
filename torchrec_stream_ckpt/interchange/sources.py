"""All rows of a marker in pieces that can be read by id: the store's, and the log's tail, folded into a scratch folder.

A log has no index: a window of a table lies anywhere in it. So what only the log has is folded once, as the
materializer does it, and then read as the store is.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from torchrec_stream_ckpt.errors import ConfigError, CorruptionError, StoreUnavailableError, TrimmedError
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.log.api import Log
from torchrec_stream_ckpt.materialize.fold import fold_interval
from torchrec_stream_ckpt.route.find import locate
from torchrec_stream_ckpt.route.held import load_catalog, lost, segment_of
from torchrec_stream_ckpt.route.route import Route
from torchrec_stream_ckpt.store.api import Objects
from torchrec_stream_ckpt.store.catalog import Catalog, Picked
from torchrec_stream_ckpt.store.folder import FolderObjects
from torchrec_stream_ckpt.store.reader import open_segments
from torchrec_stream_ckpt.types import MarkerId

_READERS = 4


@dataclass(frozen=True, slots=True)
class OpenSegment:
    """One segment."""

    objects: Objects
    picked: Picked
    """All of its chunks."""
    generation: int
    """The oldest one that its rows may be of."""


class Sources:
    """All segments that lead to a marker; a row's newest version is in the first one that has it.

    Args:
        log: The job's log.
        lineage: Its control partition.
        marker: The marker.
        since: Begin after this one.
        catalog: What the store holds; None: nothing.
        folder: Takes what only the log has.
        pool: Threads to read with.
        progress: Called with the bytes of each frame that is folded.
    """

    def __init__(
        self,
        log: Log,
        lineage: Lineage,
        marker: MarkerId,
        since: MarkerId | None,
        catalog: Catalog | None,
        folder: FolderObjects,
        pool: Executor,
        progress: Callable[[int], None],
    ) -> None:
        self._log = log
        self._catalog = catalog
        self._folder = folder
        self._progress = progress
        self._damaged: dict[str, CorruptionError] = {}
        self.pool = pool
        self.newest_first: tuple[OpenSegment, ...] = ()
        self._route = self._open(lineage, marker, since)

    @property
    def schema(self) -> Schema:
        return self._route.schema

    @property
    def bases(self) -> dict[int, int]:
        """``Lineage.bases`` of the marker: what older generations sent of a table does not count."""
        return self._route.bases

    def _open(self, lineage: Lineage, marker: MarkerId, since: MarkerId | None) -> Route:
        route = locate(lineage, marker, self._catalog, since=since, damaged=self._damaged)
        route.check(self._log)
        stored = [
            OpenSegment(self._catalog.objects, picked, piece.generation)
            for piece in (route.held.pieces if route.held is not None else ())
            for picked in piece.opened
            if self._catalog is not None  # there are no pieces otherwise
        ]
        tail = list(_fold_tail(self._log, route, self._folder, self.pool, self._progress))
        self.newest_first = tuple([*stored, *tail][::-1])
        return route

    def go_around(self, error: CorruptionError) -> None:
        """A segment was found to be damaged: :attr:`newest_first` has its rows from elsewhere on return.

        Raises:
            CorruptionError: ``error`` itself, where there is no other way to its rows.
        """
        name = segment_of(self._route.held, error)
        if name is None:
            raise error
        self._damaged[name] = error
        route = self._route
        try:
            self._route = self._open(route.lineage, route.marker, route.since)
        except (CorruptionError, TrimmedError) as other:
            raise lost(error, route.marker, other) from None


@contextlib.contextmanager
def open_sources(
    log: Log,
    lineage: Lineage,
    marker: MarkerId,
    objects: Objects | None,
    scratch: Path,
    *,
    since: MarkerId | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> Iterator[Sources]:
    """Everything that was sent for ``marker``; with ``since``, a marker on its path, what was sent after that one.

    Args:
        log: The job's log.
        lineage: Its control partition.
        marker: A committed marker.
        objects: The store; None, or one that nobody has written to, serves nothing.
        scratch: A folder with room for what only the log has; left as it was found.
        since: Begin after this marker.
        progress: Called with the bytes of each frame that is folded.

    Raises:
        MarkerNotFoundError: ``marker`` was never committed, or given up.
        ConfigError: ``since`` is not on the path to it.
        CorruptionError: the log or the store is damaged, or lacks what is needed.
        TrimmedError: the log was trimmed, and another store has what is needed.
        StoreUnavailableError, LogUnavailableError: one of them does not answer, or the scratch folder is full.
    """
    if since is not None and since not in {commit.id for commit in lineage.chain(marker)}:
        raise ConfigError(f"marker {since} is not on the path to marker {marker}", hint="see stream-ckpt list --tree")
    with ThreadPoolExecutor(_READERS) as pool, _scratch(scratch) as folder:
        yield Sources(
            log, lineage, marker, since, load_catalog(objects, lineage), FolderObjects(folder), pool, progress
        )


@contextlib.contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    try:
        made = tempfile.TemporaryDirectory(prefix=".stream-ckpt-", dir=folder)
    except OSError as error:
        raise StoreUnavailableError(
            f"cannot make a folder for scratch: {error.strerror}", hint="name another one with --scratch", path=folder
        ) from None
    with made as name:
        yield Path(name)


def _fold_tail(
    log: Log,
    route: Route,
    folder: FolderObjects,
    pool: Executor,
    progress: Callable[[int], None],
) -> Iterator[OpenSegment]:
    """What the log gives, in the order of the path."""
    for interval in route.intervals:
        commit = interval.commit
        # Which shards the rank held matters only if folding goes on: here it does not.
        refs = fold_interval(log, folder, interval, (), progress)
        for picked in open_segments(folder, refs, commit.job, pool):
            yield OpenSegment(folder, picked, commit.generation)
