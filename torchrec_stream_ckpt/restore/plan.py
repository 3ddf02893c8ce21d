"""Restore plans: immutable values, computed before anything is read or written.

A plan lists which part of which source shard is copied to which target shard. :meth:`RestorePlan.describe` renders it.
The module also counts the cells of a table that a set of rectangles covers, in O(n log n), because a log may name many
rectangles.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from torchrec_stream_ckpt.errors import ColumnResplitError, CorruptionError, SchemaMismatchError
from torchrec_stream_ckpt.evolve.report import EvolutionReport
from torchrec_stream_ckpt.evolve.table_outcome import TableOutcome
from torchrec_stream_ckpt.find.route import Path, Route, Shards
from torchrec_stream_ckpt.format.control import TableScalars
from torchrec_stream_ckpt.format.head import HeadState
from torchrec_stream_ckpt.format.interval import Interval
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.format.schema import Schema, check_schema
from torchrec_stream_ckpt.format.segment import check_tables, slices_of
from torchrec_stream_ckpt.restore.views import Views
from torchrec_stream_ckpt.store.catalog import Picked, Piece
from torchrec_stream_ckpt.util.types import MarkerId, TableShard, grouped

Columns = tuple[int, int, int]
"""Column slice of a table: (table, first column, number of columns)."""


@dataclass(frozen=True, slots=True, order=True)
class Move:
    """Copy rows [row0, row0+rows), columns [col0, col0+cols) of ``source`` to the same place of ``target``."""

    source: TableShard
    target: TableShard
    row0: int
    rows: int
    col0: int
    cols: int

    @property
    def same_columns(self) -> bool:
        """True if both shards hold the same columns, so that a state with one value per row is exact."""
        return (self.source.col0, self.source.cols) == (self.target.col0, self.target.cols)

    def between(self, row0: int, end: int) -> Move | None:
        """Return the part of this move with rows [row0, end), or None if it has no such rows."""
        first, last = max(self.row0, row0), min(self.row0 + self.rows, end)
        return replace(self, row0=first, rows=last - first) if first < last else None


def intersect(source: TableShard, target: TableShard) -> Move | None:
    """Return the part that the two shards have in common, or None if they do not overlap."""
    if source.table != target.table:
        return None
    row0, col0 = max(source.row0, target.row0), max(source.col0, target.col0)
    rows = min(source.row0 + source.rows, target.row0 + target.rows) - row0
    cols = min(source.col0 + source.cols, target.col0 + target.cols) - col0
    return Move(source, target, row0, rows, col0, cols) if rows > 0 and cols > 0 else None


class Overlaps:
    """Shards, arranged so that those that overlap another one are found without looking at all of them.

    Args:
        shards: The shards, of any tables.
    """

    def __init__(self, shards: Iterable[TableShard]) -> None:
        of_table = grouped((shard.table, shard) for shard in shards)
        self._of_table = {table: _Line(some) for table, some in of_table.items()}

    def moves(self, source: TableShard) -> list[Move]:
        """Return the parts that ``source`` has in common with each of the shards, in their order."""
        near = self._of_table[source.table].near(source) if source.table in self._of_table else ()
        return [move for target in near if (move := intersect(source, target)) is not None]


class _Line:
    """Shards of one table, sorted by their first column, or by their first row if that tells more of them apart."""

    def __init__(self, shards: Sequence[TableShard]) -> None:
        self._shards = shards
        by_rows = len({shard.row0 for shard in shards}) > len({shard.col0 for shard in shards})
        self._extent: Callable[[TableShard], tuple[int, int]] = (
            (lambda shard: (shard.row0, shard.rows)) if by_rows else (lambda shard: (shard.col0, shard.cols))
        )
        placed = sorted((self._extent(shard)[0], number) for number, shard in enumerate(shards))
        self._begins, self._order = [begin for begin, _ in placed], [number for _, number in placed]
        self._longest = max(self._extent(shard)[1] for shard in shards)

    def near(self, source: TableShard) -> list[TableShard]:
        """Return the shards that may overlap ``source``, in their order."""
        begin, length = self._extent(source)
        first = bisect_left(self._begins, begin - self._longest)
        last = bisect_left(self._begins, begin + length)
        return [self._shards[number] for number in sorted(self._order[first:last])]


def by_slice(moves: Iterable[Move]) -> dict[Columns, list[Move]]:
    """Group moves by the column slice of their source."""
    return grouped(((move.source.table, move.source.col0, move.source.cols), move) for move in moves)


Rectangle = tuple[int, int, int, int]
"""Rectangle of cells: (first row, number of rows, first column, number of columns)."""


def covered_cells(rectangles: Collection[Rectangle]) -> int:
    """Count the cells of the union by a sweep over the rows; a tree keeps the number of columns that are covered."""
    edges = sorted({edge for _, _, col0, cols in rectangles for edge in (col0, col0 + cols)})
    columns = _Columns(edges)
    events = sorted(
        event
        for row0, rows, col0, cols in rectangles
        for event in ((row0, 1, col0, col0 + cols), (row0 + rows, -1, col0, col0 + cols))
    )
    cells = row = 0
    for at, change, begin, end in events:
        cells += (at - row) * columns.met
        columns.change(bisect_left(edges, begin), bisect_left(edges, end), change)
        row = at
    return cells


class _Columns:
    """Segment tree over the intervals between ``edges`` that counts the columns covered by open rectangles."""

    def __init__(self, edges: list[int]) -> None:
        self._edges = edges
        self._size = max(1, len(edges) - 1)
        self._open = [0] * (4 * self._size)
        """Number of rectangles that are open over the whole interval of a node, but not over that of its parent."""
        self._met = [0] * (4 * self._size)

    @property
    def met(self) -> int:
        return self._met[1]

    def change(self, begin: int, end: int, by: int, node: int = 1, low: int = 0, high: int | None = None) -> None:
        """Open (+1) or close (-1) a rectangle over the intervals [begin, end)."""
        high = self._size if high is None else high
        if end <= low or high <= begin:
            return
        if begin <= low and high <= end:
            self._open[node] += by
        else:
            middle = (low + high) // 2
            self.change(begin, end, by, 2 * node, low, middle)
            self.change(begin, end, by, 2 * node + 1, middle, high)
        if self._open[node]:
            self._met[node] = self._edges[high] - self._edges[low]
        else:
            self._met[node] = 0 if high - low == 1 else self._met[2 * node] + self._met[2 * node + 1]


@dataclass(frozen=True, slots=True)
class StreamRead:
    """Part of a plan: read an interval of one rank's stream, and make these moves."""

    interval: Interval
    moves: tuple[Move, ...]
    shards: tuple[TableShard, ...] = ()
    """Shards that the rank held."""


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """All reads and writes of one rank to restore a marker: ``warm``, then ``stored``, then ``reads`` in order."""

    marker: MarkerId
    step: int
    world: int
    """Number of ranks that wrote the marker."""
    schema: Schema
    targets: tuple[TableShard, ...]
    reads: tuple[StreamRead, ...]
    merged: frozenset[int]
    """Indices of tables whose row-wise state has no exact value under this plan's column split, and will be merged."""
    stored: tuple[Piece, ...] = ()
    """Pieces of the store to read, oldest first, with their chunks that are read.

    Rows of a piece that holds every row are written directly. A row of another piece is written if no newer piece has
    it.
    """
    cold: tuple[Move, ...] = ()
    """Moves from the store; their sources are column slices of whole tables."""
    reach: MarkerId | None = None
    """Marker up to which rows come from HEAD and the store; None if all rows come from the log."""
    head: MarkerId | None = None
    """Marker in HEAD; None if HEAD is not used."""
    warm: tuple[Move, ...] = ()
    """Moves from HEAD; their sources are the column slices of HEAD."""
    live: MarkerId | None = None
    """Marker that the targets already hold, so that only rows sent after it are read; otherwise None."""
    path: Path = field(default_factory=Path, repr=False)
    """Markers that lead to ``marker``; if ``live`` is set, only those after it."""
    based_on: MarkerId | None = None
    """Marker of HEAD or of the base in the store; None if neither is read."""
    scalars: tuple[TableScalars, ...] = field(default=(), repr=False)
    """Kernel state of all ranks at ``reach``; empty if rows of the log follow."""
    views: Views | None = field(default=None, repr=False)
    """Part of each live shard that a target is, if the model has changed; None if the targets are the live shards."""
    report: EvolutionReport | None = field(default=None, repr=False)
    """Report of the changes; None if the model has not changed."""

    @property
    def index(self) -> dict[str, int]:
        """Index of each live table, by its name."""
        return (self.views.evolution.schema if self.views is not None else self.schema).index()

    def is_same(self, table: int) -> bool:
        """Return whether a live table continues a table of the marker without change."""
        return self.views is None or self.views.outcomes[table].goes_on

    @property
    def moves(self) -> list[Move]:
        """All distinct moves, in no particular order."""
        return _distinct(self.warm, self.cold, self.reads)

    @property
    def source(self) -> str:
        """Sources of the rows, oldest first: ``head 1:40``, ``store 1:40 + log``, ``log``."""
        parts = [f"live {self.live}"] if self.live is not None else []
        parts += [f"head {self.head}"] if self.head is not None else []
        if self.reach != self.head:
            parts.append(f"store {self.reach}")
        if self.marker not in (self.reach, self.live):
            parts.append("log")
        return " + ".join(parts)

    def describe(self) -> str:
        """Render the plan as text, with one line for each stream and each move."""
        lines = [f"marker {self.marker}, step {self.step}, written by {self.world} ranks", f"  source: {self.source}"]
        if self.reach != self.head:
            segments = [picked for piece in self.stored for picked in piece.opened]
            num_bytes = sum(picked.num_bytes for picked in segments)
            lines.append(f"  the store up to marker {self.reach}: {len(segments)} segments, {num_bytes} bytes")
        for read in self.reads:
            interval, end = read.interval, read.interval.end
            lines.append(
                f"  read generation {interval.commit.generation} rank {end.rank}: "
                f"{interval.frames} frames, {interval.num_bytes} bytes, partition {end.partition}"
            )
            for move in read.moves:
                table = self.schema.tables[move.source.table].name
                rows, cols = (move.row0, move.row0 + move.rows), (move.col0, move.col0 + move.cols)
                lines.append(f"    {table} rows [{rows[0]}, {rows[1]}) columns [{cols[0]}, {cols[1]})")
        if self.report is not None:
            lines += [f"  {line}" for line in self.report.lines()]
        for position in sorted(self.merged):
            lines.append(f"  merge the row-wise state of {self.schema.tables[position].name}: not bit-exact")
        return "\n".join(lines)


def _distinct(warm: Sequence[Move], cold: Sequence[Move], reads: Sequence[StreamRead]) -> list[Move]:
    """Return the moves of all sources, each once."""
    return list(dict.fromkeys((*warm, *cold, *(move for read in reads for move in read.moves))))


def plan_restore(route: Route, schema: Schema, targets: Sequence[TableShard], *, merge: bool = False) -> RestorePlan:
    """Plan how to restore a marker into ``targets``. Pure: reads and writes nothing.

    Args:
        route: The route to the marker, :meth:`~Route.complete`.
        schema: The tables of the restoring job.
        targets: The shards of this rank. If the route begins at a marker, they hold that marker.
        merge: Allow a changed column split of a row-wise optimizer (``on_column_resplit="merge"``).

    Raises:
        SchemaMismatchError: a table is missing or differs, or has another index; the error names it and both values.
        ColumnResplitError: row-wise state has no exact value under the new columns.
        CorruptionError: the sources do not cover a target.
    """
    plan = plan_reads(route, schema, targets)
    _check_resplit(plan, merge=merge)
    return plan


def plan_evolved(route: Route, views: Views, shards: Sequence[TableShard], *, merge: bool = False) -> RestorePlan:
    """Plan a restore, like :func:`plan_restore`, into a changed model.

    The targets are the parts of its shards that come from the marker.

    Args:
        route: The route to the marker, :meth:`~Route.complete`.
        views: Views of ``shards``.
        shards: The shards of this rank, by the indices of the new schema.
        merge: Allow a changed column split, as in :func:`plan_restore`; only columns that are kept are compared.

    Raises:
        ColumnResplitError, CorruptionError: as in :func:`plan_restore`.
    """
    targets = [target for shard in shards if (target := views.target(shard)) is not None]
    plan = plan_reads(route, route.schema, targets)
    kept = {outcome.source: outcome for outcome in views.evolution.tables if outcome.source is not None}
    merged = frozenset(
        move.source.table for move in plan.moves if _is_resplit(move, kept[move.source.table], plan.schema)
    )
    plan = replace(plan, merged=merged, views=views)
    _check_resplit(plan, merge=merge)
    return plan


def _is_resplit(move: Move, outcome: TableOutcome, schema: Schema) -> bool:
    """Return whether a kept state with one value per row comes from another split of the kept columns."""
    states = schema.tables[move.source.table].states
    kept = any(states[source].per_row for _, source in outcome.states if source is not None)
    cols = min(move.source.col0 + move.source.cols, outcome.cols_kept) - move.source.col0
    return kept and (move.source.col0, cols) != (move.target.col0, move.target.cols)


def plan_reads(route: Route, schema: Schema, targets: Sequence[TableShard]) -> RestorePlan:
    """Plan a restore, like :func:`plan_restore`, without a check that row-wise states can be combined exactly."""
    check_schema(route.schema, schema)
    _check_indices(route.schema, schema)
    check_pieces(route.pieces, route.lineage)
    schema, head, bases = route.schema, route.head, route.bases  # unlike `schema`, the marker's tables have ids
    stored, cold = _store_reads(schema, route.pieces, targets, bases)
    warm = _head_moves(schema, head, targets, bases) if head is not None else ()
    reads = _stream_reads(route.intervals, route.shards, targets, bases)
    moves = _distinct(warm, cold, reads)
    if route.since is None:
        _check_cover(schema, targets, moves)
    return RestorePlan(
        route.marker,
        route.commit.step,
        len(route.commit.ranks),
        schema,
        tuple(targets),
        reads,
        _resplit_tables(schema, moves),
        stored,
        cold,
        route.stored,
        head.marker if head is not None else None,
        warm,
        live=route.since,
        path=route.path,
        based_on=head.marker if head is not None else route.pieces[0].end if route.pieces else None,
        scalars=tuple(each for notes in route.notes for each in notes.mark.scalars)
        if route.stored == route.marker
        else (),
    )


def _store_reads(
    schema: Schema, pieces: Iterable[Piece], targets: Sequence[TableShard], bases: Mapping[int, int]
) -> tuple[tuple[Piece, ...], tuple[Move, ...]]:
    """Return (pieces with the chunks that are read, moves of their rows)."""
    overlaps = Overlaps(targets)
    moves: dict[Columns, list[Move]] = {}
    """Moves of all slices that any piece has; most pieces have the same slices."""

    def moves_of(slice_: Columns) -> list[Move]:
        if slice_ not in moves:
            table, col0, cols = slice_
            moves[slice_] = overlaps.moves(TableShard(table, 0, schema.tables[table].rows, col0, cols))
        return moves[slice_]

    def of_piece(piece: Piece, picked: Picked) -> Picked:
        slices = slices_of(picked.front.directory)
        return pick(picked, {each: moves_of(each) for each in slices if piece.generation >= bases.get(each[0], 0)})

    read = [piece.only(partial(of_piece, piece)) for piece in pieces]
    return tuple(piece for piece in read if piece.opened), tuple(move for each in moves.values() for move in each)


def _head_moves(
    schema: Schema, head: HeadState, targets: Sequence[TableShard], bases: Mapping[int, int]
) -> tuple[Move, ...]:
    sources = [
        TableShard(table, 0, schema.tables[table].rows, col0, cols)
        for table, col0, cols in head.columns
        if head.marker.generation >= bases.get(table, 0)
    ]
    overlaps = Overlaps(targets)
    return tuple(move for source in sources for move in overlaps.moves(source))


def pick(picked: Picked, moves: Mapping[Columns, Sequence[Move]]) -> Picked:
    """Return the chunks that may hold rows of one of the moves, which are given by their source slice."""
    directory = picked.front.directory
    first, last = directory["first"], directory["last"]
    chosen = np.zeros(len(directory), np.bool_)
    for slice_, place in slices_of(directory).items():
        for move in moves.get(slice_, ()):
            chosen[place] |= (first[place] < move.row0 + move.rows) & (last[place] >= move.row0)
    return picked.only(chosen[picked.chunks])


def _stream_reads(
    needed: Iterable[Interval],
    shards: Shards,
    targets: Sequence[TableShard],
    bases: Mapping[int, int],
) -> tuple[StreamRead, ...]:
    """Return the reads that have rows of these targets."""
    overlaps = Overlaps(targets)
    known: dict[tuple[int, int], tuple[Move, ...]] = {}
    reads = []
    for interval in needed:
        generation, rank = interval.commit.generation, interval.end.rank
        layout = shards[generation]
        mine, place = layout[rank], (id(layout), rank)
        if place not in known:  # most generations have the same layout
            known[place] = tuple(move for source in mine for move in overlaps.moves(source))
        moves = tuple(move for move in known[place] if generation >= bases.get(move.source.table, 0))
        if moves:
            reads.append(StreamRead(interval, moves, mine))
    return tuple(reads)


def check_pieces(pieces: Iterable[Piece], lineage: Lineage) -> None:
    """Check that each segment of the open pieces matches the tables of its own generation, which may be older ones.

    Raises:
        CorruptionError: a segment has other tables.
    """
    for piece in pieces:
        for picked in piece.opened:
            check_tables(picked.front, lineage.claims[piece.generation].schema, picked.ref.name)


def _check_indices(saved: Schema, here: Schema) -> None:
    """Check that tables have the same indices: shards name tables by index, so rows would end up in other tables."""
    there = saved.index()
    for name, index in here.index().items():
        if there[name] != index:
            raise SchemaMismatchError(
                f"the table has index {there[name]} in the log, but {index} in this model: the log's model was changed",
                hint="put the tables into the marker's order before making this plan",
                table=name,
            )


def _resplit_tables(schema: Schema, moves: Sequence[Move]) -> frozenset[int]:
    return frozenset(
        move.source.table for move in moves if schema.tables[move.source.table].has_row_state and not move.same_columns
    )


def _check_resplit(plan: RestorePlan, *, merge: bool) -> None:
    """Refuse a changed column split that has no exact result, unless ``merge`` allows merging the state."""
    tables = [plan.schema.tables[table] for table in sorted(plan.merged)]
    halves = ", ".join(table.name for table in tables if table.optimizer.startswith("emainplace"))
    if halves:
        raise ColumnResplitError(
            f"the column split of {halves} cannot change because each column shard keeps weights in its left "
            "half and their average in its right half",
            hint="keep the column split of these tables",
        )
    if tables and not merge:
        names = ", ".join(table.name for table in tables)
        raise ColumnResplitError(
            f"row-wise optimizer state has no exact value under the changed column split of {names}",
            hint='keep the column split of these tables, or set on_column_resplit="merge"',
        )


def _check_cover(schema: Schema, targets: Sequence[TableShard], moves: Sequence[Move]) -> None:
    """Check that every cell of every target has a source. The read itself checks that each row was really sent."""
    cells_of: dict[TableShard, set[tuple[int, int, int, int]]] = {target: set() for target in targets}
    for move in moves:
        cells_of[move.target].add((move.row0, move.rows, move.col0, move.cols))
    for target, cells in cells_of.items():
        if covered_cells(cells) < target.rows * target.cols:
            raise CorruptionError(
                "no source holds all of this shard", table=schema.tables[target.table].name, row0=target.row0
            )
