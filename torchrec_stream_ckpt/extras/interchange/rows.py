"""The rows of a marker without a model: put together from all that leads to it, window by window, or as they were sent.

A log has no index: a window of a table lies anywhere in it. So what only the log has is folded once into a scratch
folder, as the materializer does it, and then read as the store is.

What only the log has of a marker, folded into a scratch folder as the materializer does it: a log has no index.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from torchrec_stream_ckpt.errors import ConfigError, CorruptionError, ScratchUnavailableError, TrimmedError
from torchrec_stream_ckpt.extras.interchange.last_sent import LastSent
from torchrec_stream_ckpt.find.job import Job
from torchrec_stream_ckpt.find.locate import instead_of_log, load_catalog, locate
from torchrec_stream_ckpt.find.route import Route
from torchrec_stream_ckpt.find.tiers import Tiers
from torchrec_stream_ckpt.format.frame import DTYPE_BYTES
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.format.manifest import SegmentRef
from torchrec_stream_ckpt.format.notes import Notes
from torchrec_stream_ckpt.format.rows import NUMPY_DTYPES, Array, RowsView
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.format.segment import ChunkEntry, decode_chunk
from torchrec_stream_ckpt.log.api import LogReader
from torchrec_stream_ckpt.maintain.fold import fold_interval
from torchrec_stream_ckpt.maintain.run_merging import ScratchRuns
from torchrec_stream_ckpt.store.api import Objects
from torchrec_stream_ckpt.store.catalog import Catalog, Picked, Piece
from torchrec_stream_ckpt.store.folder import FolderObjects
from torchrec_stream_ckpt.store.newest import NewestFirst, newest_first
from torchrec_stream_ckpt.store.reader import load_notes, open_pieces, read_chunks
from torchrec_stream_ckpt.store.runs import Runs, columns_of, cuts_of, read_from
from torchrec_stream_ckpt.util.scratch import ScratchFolder
from torchrec_stream_ckpt.util.types import MarkerId, StateSpec, TableSpec


@contextlib.contextmanager
def scratch_folder(where: Path) -> Iterator[Path]:
    """A new folder in ``where``, deleted at the end.

    Raises:
        ScratchUnavailableError: it cannot be made.
    """
    try:
        made = ScratchFolder(where)
    except OSError as error:
        raise ScratchUnavailableError(
            f"cannot make a folder for scratch: {error.strerror}", hint="name another one with --scratch", path=where
        ) from None
    with contextlib.closing(made):
        yield made.path


@dataclass(frozen=True, slots=True)
class LogTail:
    """Pieces in a folder of their own: an interval that begins elsewhere has other rows, and the same names."""

    folder: Path
    objects: Objects
    pieces: tuple[Piece, ...] = ()
    """Open, in the order of the path."""

    @classmethod
    def none(cls, folder: Path) -> LogTail:
        """What is there before anything is folded."""
        return cls(folder, FolderObjects(folder))

    @classmethod
    def of(
        cls,
        log: LogReader,
        route: Route,
        folder: Path,
        pool: Executor,
        progress: Callable[[int], None],
        sent: LastSent | None = None,
    ) -> LogTail:
        """Fold what the log has to give for a route; where this raises, the folder is gone.

        Args:
            log: The job's log.
            route: What it has to give.
            folder: Is made; nothing is there.
            pool: Threads to read with.
            progress: Called with the bytes of each frame.
            sent: Takes which marker last sent a row of which block, and what markers say; None: nobody asks.

        Raises:
            CorruptionError: the log is damaged, or lacks what is needed.
            StoreUnavailableError, LogUnavailableError: the log does not answer, or the folder has no room.
        """
        tail = cls.none(folder)
        try:
            pieces = tuple(_pieces(log, route, tail.objects, progress, sent))
            return replace(tail, pieces=open_pieces(tail.objects, pieces, route.lineage.job, pool))
        except BaseException:
            tail.delete()
            raise

    def delete(self) -> None:
        """Take the folder away."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _pieces(
    log: LogReader, route: Route, into: Objects, progress: Callable[[int], None], sent: LastSent | None
) -> Iterator[Piece]:
    start = route.reach
    shards = route.complete(log).shards if sent is not None else {}
    for commit, intervals in groupby(route.intervals, lambda interval: interval.commit):
        refs: list[SegmentRef] = []
        for each in intervals:
            # Which shards the ranks held matters only if folding goes on: here it does not.
            if sent is None:
                refs += fold_interval(log, into, each, (), progress)
            else:
                held = shards[commit.generation][each.end.rank]
                refs += fold_interval(log, into, each, held, progress, partial(sent.frame, each.claim.schema, held))
        yield Piece(start, commit.id, tuple(refs), commit.chain)
        start = commit.id


Ints = npt.NDArray[np.int64]

WINDOW_BYTES = 32 * 2**20
"""Weights and states that a window holds at most, unless one row is larger."""
_READERS = 4


class MarkerRows:
    """All rows that lead to a marker: pieces of the store, and those that the log's tail was folded into.

    Args:
        log: The job's log.
        lineage: Its control partition.
        marker: The marker.
        since: Begin after this one.
        catalog: What the store holds; None: nothing.
        folder: Takes what only the log has, and runs that are too many to be merged at once.
        pool: Threads to read with.
        progress: Called with the bytes of each frame that is folded.
        proofs: Keep :attr:`last_sent`.
    """

    def __init__(
        self,
        log: LogReader,
        lineage: Lineage,
        marker: MarkerId,
        since: MarkerId | None,
        catalog: Catalog | None,
        folder: Path,
        pool: Executor,
        progress: Callable[[int], None],
        *,
        proofs: bool = False,
    ) -> None:
        self._log = log
        self._proofs = proofs
        self.last_sent: LastSent | None = None
        """Which marker last sent a row of each block, as far as the log gives the rows."""
        self._catalog = catalog
        self._scratch = folder
        self._pool = pool
        self._progress = progress
        self._damaged: dict[str, CorruptionError] = {}
        """Segments of the store that are read around."""
        self._pieces: list[tuple[Objects, tuple[Piece, ...]]] = []
        """Of each place, oldest first, as the places are: the store, then the folder."""
        self._names: list[tuple[Objects, set[str]]] = []
        """Their segments, likewise."""
        self._narrow = ScratchRuns(self, pool, folder)
        self._folds = 0
        self._tail = LogTail.none(self._next_folder())
        self.opened = 0
        """How often it was looked up where the rows are: they come from elsewhere once this has grown."""
        self._route = self._open(lineage, marker, since, self._damaged)

    @property
    def schema(self) -> Schema:
        return self._route.schema

    @property
    def lineage(self) -> Lineage:
        return self._route.lineage

    @property
    def marker(self) -> MarkerId:
        return self._route.marker

    @property
    def stored(self) -> tuple[Piece, ...]:
        """Pieces of the store, oldest first."""
        return self._route.pieces

    def _open(
        self, lineage: Lineage, marker: MarkerId, since: MarkerId | None, damaged: Mapping[str, CorruptionError]
    ) -> Route:
        """Look where the rows are, and fold what only the log has; where this raises, all is as it was."""
        route = locate(lineage, marker, self._catalog, since=since, damaged=damaged)
        try:
            route.check(self._log)
            self.last_sent = LastSent(route) if self._proofs else None
            tail = LogTail.of(self._log, route, self._next_folder(), self._pool, self._progress, self.last_sent)
        except (CorruptionError, TrimmedError) as error:
            raise instead_of_log(error, self._catalog, route, damaged) from None
        self._narrow.close()
        self._tail.delete()
        self._tail, self._pieces = tail, [(tail.objects, tail.pieces)]
        if self._catalog is not None:
            self._pieces.insert(0, (self._catalog.objects, route.pieces))
        self._narrow = ScratchRuns(self, self._pool, self._scratch)
        self._names = [
            (objects, {picked.ref.name for piece in pieces for picked in piece.opened})
            for objects, pieces in self._pieces
        ]
        self.opened += 1
        return route

    def _next_folder(self) -> Path:
        self._folds += 1
        return self._scratch / f"log-{self._folds:06d}"

    def go_around(self, error: CorruptionError) -> None:
        """A segment was found to be damaged: on return, its rows come from elsewhere.

        Raises:
            CorruptionError: ``error``, where there is no other way to its rows.
        """
        name = self._route.segment_of(error)
        if name is None:
            raise error
        route, damaged = self._route, {**self._damaged, name: error}
        self._route = self._open(route.lineage, route.marker, route.since, damaged)
        self._damaged = damaged

    def runs_of(self, table: int) -> Runs:
        """Return the runs of one table, to be read by ascending windows of rows; few enough to be merged at once.

        Raises:
            CorruptionError, StoreUnavailableError: as :meth:`ScratchRuns.narrowed`.
        """
        newest = self._narrow.narrowed(self.schema, self.newest_of(table), table, as_wide=True)
        return Runs(newest, self.schema, read_from(self._narrow, self._pool))

    def newest_of(self, table: int) -> list[Picked]:
        """Return the chunks of one table, newest first: a row's newest version is in the first chunk that has it."""
        base = self._route.bases.get(table, 0)
        found = (each for _, pieces in reversed(self._pieces) for each in newest_first(pieces, base))
        mine = (each.only(each.entries["table"] == table) for each in found)
        return [each for each in mine if len(each.chunks)]

    def read(self, name: str, begin: int = 0, end: int | None = None) -> memoryview:
        """A range of one of the segments, of the store or of the folder."""
        return self._objects_of(name).read(name, begin, end)

    def _objects_of(self, name: str) -> Objects:
        return next((objects for objects, names in self._names if name in names), self._tail.objects)

    def chunks(self, picked: Picked) -> Iterator[tuple[ChunkEntry, RowsView]]:
        """Some chunks of one segment, some ahead of what is being used; raises as :func:`read_chunks`."""
        for each, entry, data in read_chunks(self._objects_of(picked.ref.name), [picked], self._pool):
            yield entry, decode_chunk(entry, data, self.schema, each.ref.name)

    def said(self) -> tuple[Notes, ...]:
        """Return what each rank said at the marker, what it proves included.

        Raises:
            CorruptionError: it is damaged, or in neither log nor store.
            StoreUnavailableError, LogUnavailableError: one of them does not answer.
        """
        tail = self._tail.pieces
        if tail and tail[-1].end == self.marker:
            fronts = [(each.front.notes, each.ref.name) for each in tail[-1].opened]
            notes = [Notes.from_json(text, name) for text, name in fronts if text]
            if all(each.mark.proof is None for each in notes):
                return tuple(notes)
            shards = self._route.complete(self._log).shards[self.marker.generation]  # the notes have none
            return tuple(replace(each, shards=held) for each, held in zip(notes, shards, strict=True))
        if self._route.stored == self.marker:
            return self._route.notes
        if self._catalog is None:
            raise CorruptionError("what the ranks said is in neither log nor store", marker=self.marker)
        return load_notes(self._catalog, self._route.commit, self._pool)

    def close(self) -> None:
        """Delete what was merged in the folder; the folder itself belongs to the caller."""
        self._narrow.close()

    def sent(self, tables: Collection[int]) -> Iterator[tuple[ChunkEntry, RowsView]]:
        """Chunks of some tables, oldest first; all of it again where a piece is damaged and others have its rows.

        What older generations sent of a table that was sent whole later is left out.
        """
        while True:
            opened = self.opened
            try:
                for objects, pieces in self._pieces:
                    for each, entry, data in read_chunks(objects, self._of(pieces, tables), self._pool):
                        yield entry, decode_chunk(entry, data, self.schema, each.ref.name)
                return
            except CorruptionError as error:
                if opened == self.opened:  # otherwise another reader has gone around it
                    self.go_around(error)

    def _of(self, pieces: Iterable[Piece], tables: Collection[int]) -> list[Picked]:
        bases = self._route.bases
        return [
            picked.only(np.isin(picked.entries["table"], [t for t in tables if piece.generation >= bases.get(t, 0)]))
            for piece in pieces
            for picked in piece.opened
        ]


@contextlib.contextmanager
def open_rows(
    log: LogReader,
    lineage: Lineage,
    marker: MarkerId,
    objects: Objects | None,
    scratch: Path,
    *,
    since: MarkerId | None = None,
    progress: Callable[[int], None] = lambda _: None,
    proofs: bool = False,
) -> Iterator[MarkerRows]:
    """Everything that was sent for ``marker``; with ``since``, a marker on its path, what was sent after that one.

    Args:
        log: The job's log.
        lineage: Its control partition.
        marker: A committed marker.
        objects: The store; None, or one that is empty, serves nothing.
        scratch: A folder with room for what only the log has; left as it was found.
        since: Begin after this marker.
        progress: Called with the bytes of each frame that is folded.
        proofs: Keep what :func:`older_proofs` needs.

    Raises:
        MarkerNotFoundError: ``marker`` was never committed, or given up.
        ConfigError: ``since`` is not on the path to it.
        CorruptionError: the log or the store is damaged, or lacks what is needed.
        TrimmedError: the log was trimmed, and another store has what is needed.
        StoreUnavailableError, LogUnavailableError: one of them does not answer, or the scratch folder is full.
    """
    if since is not None and since not in {commit.id for commit in lineage.chain(marker)}:
        raise ConfigError(f"marker {since} is not on the path to marker {marker}", hint="see stream-ckpt list --tree")
    with ThreadPoolExecutor(_READERS) as pool, scratch_folder(scratch) as folder:
        catalog = load_catalog(objects, lineage)
        with contextlib.closing(
            MarkerRows(log, lineage, marker, since, catalog, folder, pool, progress, proofs=proofs)
        ) as rows:
            yield rows


@contextlib.contextmanager
def rows_at(job: Job | Tiers, route: Route, scratch: Path) -> Iterator[MarkerRows]:
    """Everything that leads to a marker that was found, from the place where it is; raises as :func:`open_rows`."""
    place, lineage = route.place, route.lineage
    with ThreadPoolExecutor(_READERS) as pool, scratch_folder(scratch) as folder:
        catalog = load_catalog(place.objects(job), lineage)
        catalog = catalog.upto(place.outer_upto) if catalog is not None and place.outer_upto else catalog
        log, marker = place.log(job), route.marker
        with contextlib.closing(MarkerRows(log, lineage, marker, None, catalog, folder, pool, lambda _: None)) as rows:
            yield rows


@dataclass(frozen=True, slots=True)
class TableWindow:
    """Rows [row0, row0 + rows) of one table. bfloat16 is there as its bits, uint16."""

    row0: int
    weights: Array
    """Shape (rows, dim)."""
    states: tuple[Array, ...]
    """States in the schema's order: shape (rows, dim), or (column slices, rows) where a state holds one value a row."""

    @property
    def rows(self) -> int:
        return len(self.weights)


class TableReader:
    """Reads one table of a marker by rows. Holds one window, the chunks open at its end, and what is read ahead.

    Windows that ascend read each chunk once.

    Args:
        rows: Where the table's rows are.
        table: Index of the table in the schema.

    Raises:
        CorruptionError: the pieces cannot be of one table.
    """

    def __init__(self, rows: MarkerRows, table: int) -> None:
        self._rows = rows
        self._table = table
        self.spec: TableSpec = rows.schema.tables[table]
        self._opened = rows.opened
        self._runs: Runs | None = None
        held = columns_of(rows.newest_of(table)) or {(0, self.spec.dim)}  # of a table without rows nothing is sent
        self._cuts = cuts_of(held | {(0, self.spec.dim)})
        """Columns between two cuts always arrive together."""
        self.slices: tuple[tuple[int, int], ...] = tuple(sorted(held)) if self.spec.has_row_state else ()
        """(first column, columns) of each column shard, of which a state with one value a row has a value each."""
        if self.spec.has_row_state and list(self.slices) != [(a, b - a) for a, b in pairwise(self._cuts)]:
            raise CorruptionError(
                "row-wise state under two column splits, of which none was sent whole", table=self.spec.name
            )

    @property
    def row_bytes(self) -> int:
        """Bytes of one row with its states."""
        return DTYPE_BYTES[self.spec.dtype] * self.spec.dim + sum(
            DTYPE_BYTES[state.dtype] * self.values(state) for state in self.spec.states
        )

    def values(self, state: StateSpec) -> int:
        """How many values one row has of a state."""
        return len(self.slices) if state.per_row else self.spec.dim

    def windows(self) -> Iterator[tuple[int, int]]:
        """(first row, rows) of windows of ``WINDOW_BYTES`` that go through the table."""
        height = max(1, WINDOW_BYTES // self.row_bytes)
        for row0 in range(0, self.spec.rows, height):
            yield row0, min(height, self.spec.rows - row0)

    def read(self, row0: int, rows: int) -> TableWindow:
        """The newest version of each row of [row0, row0 + rows); a damaged piece of the store is read around.

        Raises:
            CorruptionError: a piece is damaged and nothing else has its rows, or a row was never sent.
            StoreUnavailableError: the store does not answer.
        """
        return self._around_damage(lambda: self._read(row0, rows))

    def pick(self, ids: Ints) -> TableWindow:
        """The newest version of some rows, as :meth:`read`; reads only chunks that may have one that is still missing.

        Args:
            ids: Ascending, none twice, all of the table. ``row0`` of what is returned says nothing.
        """
        return self._around_damage(lambda: self._pick(ids))

    def _around_damage(self, read: Callable[[], TableWindow]) -> TableWindow:
        while True:
            self._follow()
            try:
                return read()
            except CorruptionError as error:
                if self._opened == self._rows.opened:  # otherwise another reader has gone around it
                    self._rows.go_around(error)

    def _follow(self) -> None:
        """Read from where the rows are now: another reader of them may have gone around something."""
        if self._opened == self._rows.opened:
            return
        again = TableReader(self._rows, self._table)
        if again.slices != self.slices:
            raise CorruptionError(
                "row-wise state lies in other column slices in what is read around damage", table=self.spec.name
            )
        self._opened, self._runs, self._cuts = again._opened, None, again._cuts

    def _read(self, row0: int, rows: int) -> TableWindow:
        window = self._empty(row0, rows)
        newest = NewestFirst(row0, rows, len(self._cuts) - 1)
        if self._runs is None:
            self._runs = self._rows.runs_of(self._table)
        for given in self._runs.window(row0, row0 + rows):
            self._put(window, newest, given.view, given.entry.col0, given.entry.cols)
        if newest.missing:
            raise CorruptionError(f"{newest.missing} rows were never sent", table=self.spec.name, row0=str(row0))
        return window

    def _pick(self, ids: Ints) -> TableWindow:
        window, missing = self._empty(0, len(ids)), np.ones((len(self._cuts) - 1, len(ids)), np.bool_)
        for each in self._rows.newest_of(self._table):
            left = ids[missing.any(0)]
            first, last = each.entries["first"], each.entries["last"]
            some = each.only(np.searchsorted(left, first) < np.searchsorted(left, last, "right"))
            for entry, view in self._rows.chunks(some):
                places = np.minimum(np.searchsorted(view.ids, ids), len(view.ids) - 1)
                here = view.ids[places] == ids
                for cut in self._cuts_of(entry.col0, entry.cols):
                    rows = np.flatnonzero(here & missing[cut])
                    missing[cut, rows] = False
                    self._copy(window, view, entry.col0, cut, rows, places[rows])
        if missing.any():
            raise CorruptionError(f"{int(missing.any(0).sum())} rows were never sent", table=self.spec.name)
        return window

    def _empty(self, row0: int, rows: int) -> TableWindow:
        def shape(state: StateSpec) -> tuple[int, int]:
            return (len(self.slices), rows) if state.per_row else (rows, self.spec.dim)

        states = tuple(np.empty(shape(state), NUMPY_DTYPES[state.dtype]) for state in self.spec.states)
        return TableWindow(row0, np.empty((rows, self.spec.dim), NUMPY_DTYPES[self.spec.dtype]), states)

    def _put(self, window: TableWindow, newest: NewestFirst, view: RowsView, col0: int, cols: int) -> None:
        """Write those rows of a chunk that no newer one has given."""
        for cut in self._cuts_of(col0, cols):
            rows, chosen = newest.take(view.ids, cut)
            self._copy(window, view, col0, cut, rows, chosen)

    def _cuts_of(self, col0: int, cols: int) -> Iterator[int]:
        """The ranges between two cuts that some columns hold."""
        return (cut for cut, left in enumerate(self._cuts[:-1]) if col0 <= left < col0 + cols)

    def _copy(self, window: TableWindow, view: RowsView, col0: int, cut: int, rows: Ints, chosen: Ints) -> None:
        """Write the rows ``chosen`` of a chunk, as far as they are of one range of columns."""
        left, right = self._cuts[cut], self._cuts[cut + 1]
        here, there = slice(left, right), slice(left - col0, right - col0)
        window.weights[rows, here] = view.weights[chosen, there]
        for target, source in zip(window.states, view.states, strict=True):
            if source.ndim == 1:
                target[cut, rows] = source[chosen]
            else:
                target[rows, here] = source[chosen, there]


def rows_sent(rows: MarkerRows, table: int) -> int:
    """How many rows of a table were sent in any version. Holds one byte a row of the table."""
    sent = np.zeros(rows.schema.tables[table].rows, np.bool_)
    for _, view in rows.sent([table]):
        sent[view.ids] = True
    return int(sent.sum())
