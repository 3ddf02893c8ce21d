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

from torchrec_stream_ckpt.errors import ConfigError, StoreUnavailableError
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.log.api import Log
from torchrec_stream_ckpt.materialize.fold import fold_interval
from torchrec_stream_ckpt.route.find import locate
from torchrec_stream_ckpt.route.held import load_catalog
from torchrec_stream_ckpt.route.route import Route
from torchrec_stream_ckpt.store.api import Objects
from torchrec_stream_ckpt.store.catalog import Picked
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


@dataclass(frozen=True, slots=True)
class Sources:
    """All segments that lead to a marker; a row's newest version is in the first one that has it."""

    schema: Schema
    bases: dict[int, int]
    """``Lineage.bases`` of the marker: what older generations sent of a table does not count."""
    newest_first: tuple[OpenSegment, ...]
    pool: Executor


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
    route = locate(lineage, marker, load_catalog(objects, lineage), since=since)
    held = route.held
    route.check(log)
    with ThreadPoolExecutor(_READERS) as pool, _scratch(scratch) as folder:
        pieces = held.pieces if held is not None else ()
        stored = [
            OpenSegment(objects, picked, piece.generation)
            for piece in pieces
            for picked in piece.opened
            if objects is not None  # else there are no pieces
        ]
        tail = list(_fold_tail(log, route, FolderObjects(folder), pool, progress))
        yield Sources(route.schema, route.bases, tuple([*stored, *tail][::-1]), pool)


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
