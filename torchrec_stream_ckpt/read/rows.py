"""The rows of a marker without a model: assembled window by window from all its data, or as they were sent.

A log has no index: a window of a table may lie anywhere in it. So data that only the log has is folded once into a
scratch folder, as the materializer does it, and then read like the store.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from torchrec_stream_ckpt.errors import ConfigError, CorruptionError, ScratchUnavailableError, TrimmedError
from torchrec_stream_ckpt.find.job import Job
from torchrec_stream_ckpt.find.route import Route, instead_of_log, lacking, locate
from torchrec_stream_ckpt.find.tiers import Tiers
from torchrec_stream_ckpt.format.frame import DTYPE_BYTES
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.format.manifest import SegmentRef
from torchrec_stream_ckpt.format.notes import Notes
from torchrec_stream_ckpt.format.rows import NUMPY_DTYPES, Array, RowsView
from torchrec_stream_ckpt.format.segment import ChunkEntry, decode_chunk
from torchrec_stream_ckpt.log.api import LogReader
from torchrec_stream_ckpt.maintain.fold import fold_interval
from torchrec_stream_ckpt.maintain.run_merging import ScratchRuns
from torchrec_stream_ckpt.proofs.seen_marks import Circle, Places, RankReport, agree
from torchrec_stream_ckpt.proofs.weights import WeightProof
from torchrec_stream_ckpt.read.last_sent import LastSent
from torchrec_stream_ckpt.read.sent_rows import SentRows
from torchrec_stream_ckpt.store.api import Objects
from torchrec_stream_ckpt.store.catalog import Catalog, Picked, Piece
from torchrec_stream_ckpt.store.folder import FolderObjects
from torchrec_stream_ckpt.store.newest import NewestFirst, TableChunks
from torchrec_stream_ckpt.store.reader import load_notes, open_pieces, read_chunks
from torchrec_stream_ckpt.store.runs import Runs, columns_of, cuts_of, read_from
from torchrec_stream_ckpt.util.scratch import ScratchFolder
from torchrec_stream_ckpt.util.types import MarkerId, StateSpec, TableSpec


@contextlib.contextmanager
def scratch_folder(where: Path) -> Iterator[Path]:
    """Create a new folder in ``where``, and delete it at the end.

    Raises:
        ScratchUnavailableError: it cannot be created.
    """
    try:
        made = ScratchFolder(where)
    except OSError as error:
        raise ScratchUnavailableError(
            f"the scratch folder cannot be created: {error.strerror}",
            hint="name another folder with --scratch",
            path=where,
        ) from None
    with contextlib.closing(made):
        yield made.path


@dataclass(frozen=True, slots=True)
class LogTail:
    """Pieces in a separate folder: an interval that begins elsewhere has other rows under the same names."""

    folder: Path
    objects: Objects
    pieces: tuple[Piece, ...] = ()
    """Pieces, open, in the order of the path."""

    @classmethod
    def none(cls, folder: Path) -> LogTail:
        """Return an empty tail, for use before anything is folded."""
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
        """Fold the log's data for a route. If this raises, the folder is deleted.

        Args:
            log: The job's log.
            route: The intervals that the log has to supply.
            folder: Folder to create; it must not exist.
            pool: Threads to read with.
            progress: Called with the bytes of each frame.
            sent: Records which marker last sent a row of which block, and the notes of markers; None if not needed.

        Raises:
            CorruptionError: the log is damaged, or lacks required data.
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
        """Delete the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _pieces(
    log: LogReader, route: Route, into: Objects, progress: Callable[[int], None], sent: LastSent | None
) -> Iterator[Piece]:
    start = route.reach
    shards = route.complete(log).shards if sent is not None else {}
    for commit, intervals in groupby(route.intervals, lambda interval: interval.commit):
        refs: list[SegmentRef] = []
        for each in intervals:
            # The shards of the ranks matter only if folding continues; here it does not.
            if sent is None:
                refs += fold_interval(log, into, each, (), progress)
            else:
                held = shards[commit.generation][each.end.rank]
                refs += fold_interval(log, into, each, held, progress, partial(sent.frame, each.claim.schema, held))
        yield Piece(start, commit.id, tuple(refs), commit.chain)
        start = commit.id


Ints = npt.NDArray[np.int64]
_NOTHING = np.empty(0, np.int64), np.empty(0, np.uint64)

WINDOW_BYTES = 32 * 2**20
"""Most bytes of weights and states that a window holds, unless one row is larger."""
_READERS = 4


class MarkerRows:
    """All rows that lead to a marker: pieces of the store, and pieces into which the log's tail was folded.

    Args:
        log: The job's log.
        lineage: Its control partition.
        marker: The marker.
        since: Begin after this one.
        catalog: Contents of the store; None if there is no store.
        folder: Holds data that only the log has, and runs that are too many to be merged at once.
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
        """The marker that last sent a row of each block, for rows from the log."""
        self._catalog = catalog
        self._scratch = folder
        self._pool = pool
        self._progress = progress
        self._damaged: dict[str, CorruptionError] = {}
        """Damaged segments of the store, whose rows are read from elsewhere."""
        self._chunks: list[tuple[Objects, TableChunks]] = []
        """Pieces by place, oldest first. The places are ordered, too: the store, then the folder."""
        self._names: list[tuple[Objects, set[str]]] = []
        """Names of their segments, in the same order."""
        self._narrow = ScratchRuns(self, pool, folder)
        self._folds = 0
        self._tail = LogTail.none(self._next_folder())
        self.opened = 0
        """Number of times that the rows were located. After it has grown, rows come from other places."""
        self.route = self._open(lineage, marker, since, self._damaged)
        self.lineage, self.marker, self.schema = lineage, marker, self.route.schema

    @staticmethod
    def from_log(
        log: LogReader, lineage: Lineage, marker: MarkerId, since: MarkerId, between: Callable[[], None]
    ) -> SentRows:
        """Return the rows sent after ``since`` as the log has them. Arguments and errors are those of SentRows."""
        return SentRows(log, locate(lineage, marker, None, since=since), between)

    def _open(
        self, lineage: Lineage, marker: MarkerId, since: MarkerId | None, damaged: Mapping[str, CorruptionError]
    ) -> Route:
        """Locate the rows, and fold those that only the log has. If this raises, nothing has changed."""
        route = locate(lineage, marker, self._catalog, since=since, damaged=damaged)
        try:
            route.check(self._log)
            self.last_sent = LastSent(route) if self._proofs else None
            tail = LogTail.of(self._log, route, self._next_folder(), self._pool, self._progress, self.last_sent)
        except (CorruptionError, TrimmedError) as error:
            raise instead_of_log(error, self._catalog, route, damaged) from None
        self._narrow.close()
        self._tail.delete()
        sources = [(tail.objects, tail.pieces)]
        if self._catalog is not None:
            sources.insert(0, (self._catalog.objects, route.pieces))
        self._tail, self._bases = tail, route.bases
        self._chunks = [(objects, TableChunks(pieces)) for objects, pieces in sources]
        self._narrow = ScratchRuns(self, self._pool, self._scratch)
        self._names = [
            (objects, {picked.ref.name for piece in pieces for picked in piece.opened}) for objects, pieces in sources
        ]
        self.opened += 1
        return route

    def _next_folder(self) -> Path:
        self._folds += 1
        return self._scratch / f"log-{self._folds:06d}"

    def go_around(self, error: CorruptionError) -> None:
        """Handle a damaged segment: on return, its rows come from elsewhere.

        Raises:
            CorruptionError: ``error``, if its rows are nowhere else.
        """
        name = self.route.segment_of(error)
        if name is None:
            raise error
        route, damaged = self.route, {**self._damaged, name: error}
        self.route = self._open(route.lineage, route.marker, route.since, damaged)
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
        base = {table: self._bases.get(table, 0)}
        return [each for _, chunks in reversed(self._chunks) for each in reversed(chunks.of(base))]

    def read(self, name: str, begin: int = 0, end: int | None = None) -> memoryview:
        """Read a range of one of the segments, of the store or of the folder."""
        return self._objects_of(name).read(name, begin, end)

    def _objects_of(self, name: str) -> Objects:
        return next((objects for objects, names in self._names if name in names), self._tail.objects)

    def chunks(self, picked: Picked) -> Iterator[tuple[ChunkEntry, RowsView]]:
        """Yield chunks of one segment, reading some ahead; raises as :func:`read_chunks`."""
        for each, entry, data in read_chunks(self._objects_of(picked.ref.name), [picked], self._pool):
            yield entry, decode_chunk(entry, data, self.schema, each.ref.name)

    def said(self) -> tuple[Notes, ...]:
        """Return the notes of each rank at the marker, its proofs included.

        Raises:
            CorruptionError: they are damaged, or in neither log nor store.
            StoreUnavailableError, LogUnavailableError: one of them does not answer.
        """
        tail = self._tail.pieces
        if tail and tail[-1].end == self.marker:
            fronts = [(each.front.notes, each.ref.name) for each in tail[-1].opened]
            notes = [Notes.from_json(text, name) for text, name in fronts if text]
            if all(each.mark.proof is None for each in notes):
                return tuple(notes)
            shards = self.route.complete(self._log).shards[self.marker.generation]  # the notes have none
            return tuple(replace(each, shards=held) for each, held in zip(notes, shards, strict=True))
        if self.route.stored == self.marker:
            return self.route.notes
        if self._catalog is None:
            raise CorruptionError("the MARK records of the ranks are in neither log nor store", marker=self.marker)
        return load_notes(self._catalog, self.route.commit, self._pool)

    def proof(self) -> WeightProof | None:
        """Return the proof that the marker has of its weights; None if it has none. Raises as :meth:`said`."""
        return WeightProof.of(
            self.marker, self.schema, [RankReport(each.shards, each.mark.proof) for each in self.said()]
        )

    def older_proofs(self) -> Iterator[WeightProof]:
        """Yield the proofs of the marker's weights other than its own proof, newest first.

        They hold for blocks whose rows no later marker has sent or proved. Rows that a store has merged count as sent
        by the newest marker of the merge: older proofs do not apply to them. The rows must be opened with ``proofs``.

        Raises:
            CorruptionError: required data is damaged or missing.
            StoreUnavailableError, LogUnavailableError: one of them does not answer.
        """
        sent = self.last_sent
        assert sent is not None
        marks, path, lineage = sent.seen.marks, sent.seen.path, self.lineage
        windows, last = agree([marks.windows()], marks.floor), len(path.chain) - 1
        if not windows.keys() - {last}:
            return
        for piece in self.route.pieces:
            if piece.start is None:
                sent.whole(piece)
            elif path.place(piece.end) > min(windows):
                for picked in piece.opened:
                    sent.chunks(piece, self.chunks(picked))
        circle = Circle(windows)
        of: dict[int, Places] = {}
        """For each table and block, the place of the marker whose proof holds for it; -1 if no proof does."""
        for index, table in self.schema.live:
            if table.rows and table.id is not None:
                at = sent.of(index)
                place = circle.newest(table.id, 0, len(at))
                fits = (place >= 0) & (place >= at) & path.same_table(index)[np.maximum(place, 0)]
                of[index] = np.where(fits, place, -1).astype(np.int32)
        for place in sorted(set(np.concatenate(list(of.values())).tolist()) - {-1, last}, reverse=True):
            marker, said = path.chain[place], marks.at(place)
            then = lineage.claims[marker.generation].schema
            proof = WeightProof.of(marker, then, [said[rank] for rank in sorted(said)])
            assert proof is not None
            found = {}
            for index, at in of.items():
                blocks, digests = proof.tables[then.tables[index].name] if index < len(then.tables) else _NOTHING
                left = at[blocks] == place
                found[self.schema.tables[index].name] = blocks[left], digests[left]
            yield replace(proof, tables=found)

    def close(self) -> None:
        """Delete the merged runs in the folder. The folder itself belongs to the caller."""
        self._narrow.close()

    def sent(self, tables: Collection[int]) -> Iterator[tuple[int, int, RowsView]]:
        """Yield (table, first column, rows) of the chunks of some tables, oldest first.

        If a table was sent whole later, rows of older generations are left out. If a piece is damaged and other pieces
        have its rows, everything is yielded again.
        """
        while True:
            opened = self.opened
            try:
                bases = {table: self._bases.get(table, 0) for table in tables}
                for objects, chunks in self._chunks:
                    for each, entry, data in read_chunks(objects, chunks.of(bases), self._pool):
                        yield entry.table, entry.col0, decode_chunk(entry, data, self.schema, each.ref.name)
                return
            except CorruptionError as error:
                if opened == self.opened:  # otherwise another reader has avoided it
                    self.go_around(error)

    def count_sent(self, table: int) -> int:
        """Return how many rows of a table were sent in any version. Holds one byte a row of the table."""
        sent = np.zeros(self.schema.tables[table].rows, np.bool_)
        for _, _, view in self.sent([table]):
            sent[view.ids] = True
        return int(sent.sum())


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
    """Open all rows that were sent for ``marker``; with ``since``, a marker on its path, the rows sent after that one.

    Args:
        log: The job's log.
        lineage: Its control partition.
        marker: A committed marker.
        objects: The store; None, or one that is empty, serves nothing.
        scratch: A folder with room for rows that only the log has; left as it was found.
        since: Begin after this marker.
        progress: Called with the bytes of each frame that is folded.
        proofs: Keep the data that :meth:`MarkerRows.older_proofs` needs.

    Raises:
        MarkerNotFoundError: ``marker`` was never committed, or given up.
        ConfigError: ``since`` is not on the path to it.
        CorruptionError: the log or the store is damaged, or lacks required data.
        TrimmedError: the log was trimmed, and another store has the required data.
        StoreUnavailableError, LogUnavailableError: one of them does not answer, or the scratch folder is full.
    """
    if since is not None and since not in {commit.id for commit in lineage.chain(marker)}:
        raise ConfigError(
            f"marker {since} is not on the path to marker {marker}", hint="choose a marker from stream-ckpt list --tree"
        )
    with ThreadPoolExecutor(_READERS) as pool, scratch_folder(scratch) as folder:
        catalog = Catalog.of_job(objects, lineage)
        try:
            rows = MarkerRows(log, lineage, marker, since, catalog, folder, pool, progress, proofs=proofs)
        except TrimmedError as error:
            raise lacking(error, objects) from None
        with contextlib.closing(rows):
            yield rows


@contextlib.contextmanager
def rows_at(job: Job | Tiers, route: Route, scratch: Path) -> Iterator[MarkerRows]:
    """Open all rows of a marker that was found, from the place where it is; raises as :func:`open_rows`."""
    place, lineage = route.place, route.lineage
    with ThreadPoolExecutor(_READERS) as pool, scratch_folder(scratch) as folder:
        catalog = place.offered(Catalog.of_job(place.objects(job), lineage))
        log, marker = place.log(job), route.marker
        with contextlib.closing(MarkerRows(log, lineage, marker, None, catalog, folder, pool, lambda _: None)) as rows:
            yield rows


@dataclass(frozen=True, slots=True)
class TableWindow:
    """Rows [row0, row0 + rows) of one table. bfloat16 is represented by its bits, as uint16."""

    row0: int
    weights: Array
    """Shape (rows, dim)."""
    states: tuple[Array, ...]
    """States in the schema's order: shape (rows, dim), or (column slices, rows) if a state holds one value a row."""

    @property
    def rows(self) -> int:
        return len(self.weights)


class TableReader:
    """Reads one table of a marker by rows.

    Holds one window, the chunks open at its end, and chunks that are read ahead. If the windows ascend, each chunk is
    read once.

    Args:
        rows: Source of the table's rows.
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
        held = columns_of(rows.newest_of(table)) or {(0, self.spec.dim)}  # for a table without rows nothing is sent
        self._cuts = cuts_of(held | {(0, self.spec.dim)})
        """Columns between two cuts always arrive together."""
        self.slices: tuple[tuple[int, int], ...] = tuple(sorted(held)) if self.spec.has_row_state else ()
        """(first column, columns) of each column shard. A state with one value a row has one value for each of them."""
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
        """Return the number of values of a state in one row."""
        return len(self.slices) if state.per_row else self.spec.dim

    @property
    def height(self) -> int:
        """Most rows of a window of ``WINDOW_BYTES``."""
        return max(1, WINDOW_BYTES // self.row_bytes)

    def windows(self) -> Iterator[tuple[int, int]]:
        """Yield (first row, rows) of windows of ``WINDOW_BYTES`` that cover the table."""
        for row0 in range(0, self.spec.rows, self.height):
            yield row0, min(self.height, self.spec.rows - row0)

    def read(self, row0: int, rows: int) -> TableWindow:
        """Return the newest version of each row of [row0, row0 + rows).

        If a piece of the store is damaged, other places are read.

        Raises:
            CorruptionError: a piece is damaged and no other place has its rows, or a row was never sent.
            StoreUnavailableError: the store does not answer.
        """
        return self._around_damage(lambda: self._read(row0, rows))

    def pick(self, ids: Ints) -> TableWindow:
        """Return the newest version of some rows, as :meth:`read`.

        Reads only chunks that may have a row that is still missing.

        Args:
            ids: Row numbers of the table, ascending, without duplicates. ``row0`` of the result has no meaning.
        """
        return self._around_damage(lambda: self._pick(ids))

    def _around_damage(self, read: Callable[[], TableWindow]) -> TableWindow:
        while True:
            self._follow()
            try:
                return read()
            except CorruptionError as error:
                if self._opened == self._rows.opened:  # otherwise another reader has avoided it
                    self._rows.go_around(error)

    def _follow(self) -> None:
        """Switch to the current places of the rows: another reader may have avoided damaged data."""
        if self._opened == self._rows.opened:
            return
        again = TableReader(self._rows, self._table)
        if again.slices != self.slices:
            raise CorruptionError("row-wise state around the damage has another column split", table=self.spec.name)
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
        """Write those rows of a chunk that no newer chunk has written."""
        for cut in self._cuts_of(col0, cols):
            rows, chosen = newest.take(view.ids, cut)
            self._copy(window, view, col0, cut, rows, chosen)

    def _cuts_of(self, col0: int, cols: int) -> Iterator[int]:
        """Return the column ranges between two cuts that some columns cover."""
        return (cut for cut, left in enumerate(self._cuts[:-1]) if col0 <= left < col0 + cols)

    def _copy(self, window: TableWindow, view: RowsView, col0: int, cut: int, rows: Ints, chosen: Ints) -> None:
        """Write the rows ``chosen`` of a chunk, for one range of columns."""
        left, right = self._cuts[cut], self._cuts[cut + 1]
        here, there = slice(left, right), slice(left - col0, right - col0)
        window.weights[rows, here] = view.weights[chosen, there]
        for target, source in zip(window.states, view.states, strict=True):
            if source.ndim == 1:
                target[cut, rows] = source[chosen]
            else:
                target[rows, here] = source[chosen, there]
