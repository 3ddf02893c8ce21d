"""What a restore will do, computed before anything is done: a pure value that prints.

How many cells of a table some rectangles cover together: in O(n log n), for a log may name many of them.

Which part of which source shard lands in which target shard: intervals, nothing else.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
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
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.format.segment import check_tables, slices_of
from torchrec_stream_ckpt.restore.views import Views
from torchrec_stream_ckpt.store.catalog import Picked, Piece
from torchrec_stream_ckpt.util.types import MarkerId, TableShard, TableSpec

Columns = tuple[int, int, int]
"""A slice of a table: (table, first column, columns)."""


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
        """True if both shards hold the very same columns: then a state of one value a row is exact."""
        return (self.source.col0, self.source.cols) == (self.target.col0, self.target.cols)

    def between(self, row0: int, end: int) -> Move | None:
        """Its part with rows [row0, end); None when there is none."""
        first, last = max(self.row0, row0), min(self.row0 + self.rows, end)
        return replace(self, row0=first, rows=last - first) if first < last else None


def intersect(source: TableShard, target: TableShard) -> Move | None:
    """Return the part that the two shards have in common; None: there is none."""
    if source.table != target.table:
        return None
    row0, col0 = max(source.row0, target.row0), max(source.col0, target.col0)
    rows = min(source.row0 + source.rows, target.row0 + target.rows) - row0
    cols = min(source.col0 + source.cols, target.col0 + target.cols) - col0
    return Move(source, target, row0, rows, col0, cols) if rows > 0 and cols > 0 else None


def by_slice(moves: Iterable[Move]) -> dict[Columns, list[Move]]:
    """Moves by the slice that they come from."""
    found: dict[Columns, list[Move]] = {}
    for move in moves:
        found.setdefault((move.source.table, move.source.col0, move.source.cols), []).append(move)
    return found


Rectangle = tuple[int, int, int, int]
"""First row, rows, first column, columns."""


def covered_cells(rectangles: Collection[Rectangle]) -> int:
    """Cells of the union: a line is swept over the rows, and a tree keeps how many columns it meets."""
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
    """A segment tree over the intervals between ``edges``: how many columns at least one open rectangle has."""

    def __init__(self, edges: list[int]) -> None:
        self._edges = edges
        self._size = max(1, len(edges) - 1)
        self._open = [0] * (4 * self._size)
        """Rectangles that are open over the whole interval of a node, and not over that of its parent."""
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
    """Read what one rank has sent, and make these moves."""

    interval: Interval
    moves: tuple[Move, ...]
    shards: tuple[TableShard, ...] = ()
    """What the rank held."""


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """All that one rank will read and write to have a marker: ``warm``, then ``stored``, then ``reads`` in order."""

    marker: MarkerId
    step: int
    world: int
    """Number of ranks that wrote the marker."""
    schema: Schema
    targets: tuple[TableShard, ...]
    reads: tuple[StreamRead, ...]
    merged: frozenset[int]
    """Tables whose row-wise state has no exact value under this plan's column split, and will be merged."""
    stored: tuple[Piece, ...] = ()
    """Oldest first, with the chunks that are read: of a piece that holds every row they are written straight, of others
    a row is written if no newer piece has given it."""
    cold: tuple[Move, ...] = ()
    """What is copied from there; their sources are column slices of whole tables."""
    reach: MarkerId | None = None
    """The marker up to which HEAD and the store serve; None: all comes from the log."""
    head: MarkerId | None = None
    """The marker that HEAD gives, if it is used."""
    warm: tuple[Move, ...] = ()
    """What is copied from HEAD; their sources are its column slices."""
    live: MarkerId | None = None
    """The marker that the targets hold already: only what was sent behind it is read."""
    path: Path = field(default_factory=Path, repr=False)
    """The markers that lead to it; with ``live``, those behind that one."""
    based_on: MarkerId | None = None
    """The marker that HEAD or the base of the store gives; None: there is neither."""
    scalars: tuple[TableScalars, ...] = field(default=(), repr=False)
    """Of all ranks at the reach, if nothing comes after it."""
    views: Views | None = field(default=None, repr=False)
    """Which part of each live shard a target is, where the model has changed; None: the targets are the live shards."""
    report: EvolutionReport | None = field(default=None, repr=False)
    """What becomes of the marker in a model that has changed."""

    @property
    def index(self) -> dict[str, int]:
        """The index of each live table, by its name."""
        return (self.views.evolution.schema if self.views is not None else self.schema).index()

    def is_same(self, table: int) -> bool:
        """Return whether a live table is one of the marker that goes on."""
        return self.views is None or self.views.outcomes[table].goes_on

    @property
    def moves(self) -> list[Move]:
        """All of them once, in no order."""
        return _distinct(self.warm, self.cold, self.reads)

    @property
    def source(self) -> str:
        """Where rows come from, the oldest first: ``head 1:40``, ``store 1:40 + log``, ``log``."""
        parts = [f"live {self.live}"] if self.live is not None else []
        parts += [f"head {self.head}"] if self.head is not None else []
        if self.reach != self.head:
            parts.append(f"store {self.reach}")
        if self.marker not in (self.reach, self.live):
            parts.append("log")
        return " + ".join(parts)

    def describe(self) -> str:
        """The plan in words, one line a stream and a move."""
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
    """Their moves, each once."""
    return list(dict.fromkeys((*warm, *cold, *(move for read in reads for move in read.moves))))


def plan_restore(route: Route, schema: Schema, targets: Sequence[TableShard], *, merge: bool = False) -> RestorePlan:
    """Plan what brings a marker into ``targets``. Pure: reads and writes nothing.

    Args:
        route: The way to the marker, :meth:`~Route.complete`.
        schema: The tables of the restoring job.
        targets: The shards of this rank. If the route begins at a marker, they hold that one.
        merge: Allow a changed column split of a row-wise optimizer (``on_column_resplit="merge"``).

    Raises:
        SchemaMismatchError: a table is missing or differs, or has another index; names it and both values.
        ColumnResplitError: row-wise state has no exact answer under the new columns.
        CorruptionError: the sources do not cover a target.
    """
    plan = plan_reads(route, schema, targets)
    _check_resplit(plan, merge=merge)
    return plan


def plan_evolved(route: Route, views: Views, shards: Sequence[TableShard], *, merge: bool = False) -> RestorePlan:
    """``plan_restore`` for a model that has changed: targets are the parts of its shards that come from the marker.

    Args:
        route: As there.
        views: Of ``shards``.
        shards: Of this rank, by the indices of the new schema.
        merge: As there; columns are compared as far as they are kept.

    Raises:
        ColumnResplitError, CorruptionError: as there.
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
    """Return whether a state of one value a row that is kept comes from another split of the columns that are kept."""
    states = schema.tables[move.source.table].states
    kept = any(states[source].per_row for _, source in outcome.states if source is not None)
    cols = min(move.source.col0 + move.source.cols, outcome.cols_kept) - move.source.col0
    return kept and (move.source.col0, cols) != (move.target.col0, move.target.cols)


def plan_reads(route: Route, schema: Schema, targets: Sequence[TableShard]) -> RestorePlan:
    """``plan_restore`` for one that only reads: whether states can be put together is not asked."""
    check_schema(route.schema, schema)
    _check_indices(route.schema, schema)
    check_pieces(route.pieces, route.lineage)
    schema, head, bases = route.schema, route.head, route.bases  # the tables of the marker have their ids
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
    """(what is read of the pieces, where it goes)."""
    by_table = _by_table(targets)
    moves: dict[Columns, list[Move]] = {}
    """Of all slices that a piece has: most have the same ones."""

    def moves_of(slice_: Columns) -> list[Move]:
        if slice_ not in moves:
            table, col0, cols = slice_
            moves[slice_] = [
                move
                for target in by_table.get(table, ())
                if (move := intersect(TableShard(table, 0, schema.tables[table].rows, col0, cols), target)) is not None
            ]
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
    return tuple(move for source in sources for target in targets if (move := intersect(source, target)) is not None)


def pick(picked: Picked, moves: Mapping[Columns, Sequence[Move]]) -> Picked:
    """The chunks that may hold rows of one of the moves, which are given by the slice that they come from."""
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
    """Those that have rows of these targets."""
    by_table = _by_table(targets)
    known: dict[tuple[int, int], tuple[Move, ...]] = {}
    reads = []
    for interval in needed:
        generation, rank = interval.commit.generation, interval.end.rank
        layout = shards[generation]
        mine, place = layout[rank], (id(layout), rank)
        if place not in known:  # most generations have the same layout
            known[place] = tuple(
                move
                for source in mine
                for target in by_table.get(source.table, ())
                if (move := intersect(source, target)) is not None
            )
        moves = tuple(move for move in known[place] if generation >= bases.get(move.source.table, 0))
        if moves:
            reads.append(StreamRead(interval, moves, mine))
    return tuple(reads)


def _by_table(targets: Sequence[TableShard]) -> dict[int, list[TableShard]]:
    by_table: dict[int, list[TableShard]] = {}
    for target in targets:
        by_table.setdefault(target.table, []).append(target)
    return by_table


def check_pieces(pieces: Iterable[Piece], lineage: Lineage) -> None:
    """Each segment of open pieces must be of the tables of its own generation: an older one may have had others.

    Raises:
        CorruptionError: it is of others.
    """
    for piece in pieces:
        for picked in piece.opened:
            check_tables(picked.front, lineage.claims[piece.generation].schema, picked.ref.name)


def _check_indices(saved: Schema, here: Schema) -> None:
    """Shards name their tables by index: the same tables in another order would get each other's rows."""
    there = saved.index()
    for name, index in here.index().items():
        if there[name] != index:
            raise SchemaMismatchError(
                f"the table has index {there[name]} in the log and {index} here: the model has changed before",
                hint="put the tables into the order of the marker before this plan is made",
                table=name,
            )


def check_schema(saved: Schema, here: Schema) -> None:
    """Compare the log's tables with the model's.

    Raises:
        SchemaMismatchError: names the first table that differs, the field, and both values.
    """
    there_by_name = {table.name: table for _, table in saved.live}
    here_by_name = {table.name: table for _, table in here.live}
    for name in sorted(there_by_name.keys() ^ here_by_name.keys()):
        side = "the log" if name in there_by_name else "this model"
        raise SchemaMismatchError(
            f"only {side} has a sharded table of this name",
            hint="declare what was renamed, added or dropped, in restore(changes=...); fresh=True needs another log; "
            "a table cannot change between data-parallel and sharded",
            table=name,
        )
    for name, there in there_by_name.items():
        _check_table(there, here_by_name[name])


def _check_table(there: TableSpec, here: TableSpec) -> None:
    for name in ("rows", "dim", "dtype", "optimizer", "states"):
        saved, found = getattr(there, name), getattr(here, name)
        if saved != found:
            raise SchemaMismatchError(
                f"{name} is {saved} in the log and {found} in this model",
                hint="restore with the tables that the log was written with, or use another URI",
                table=there.name,
            )


def _resplit_tables(schema: Schema, moves: Sequence[Move]) -> frozenset[int]:
    return frozenset(
        move.source.table for move in moves if schema.tables[move.source.table].has_row_state and not move.same_columns
    )


def _check_resplit(plan: RestorePlan, *, merge: bool) -> None:
    """Refuse a changed column split where there is no exact answer, unless ``merge`` asks for the rule of one."""
    tables = [plan.schema.tables[table] for table in sorted(plan.merged)]
    halves = ", ".join(table.name for table in tables if table.optimizer.startswith("emainplace"))
    if halves:
        raise ColumnResplitError(
            f"each column shard of {halves} keeps weights on its left and their average on its right: under the "
            "changed column split they would change places",
            hint="keep the column split of these tables",
        )
    if tables and not merge:
        names = ", ".join(table.name for table in tables)
        raise ColumnResplitError(
            f"row-wise optimizer state has no exact value under the changed column split of {names}",
            hint='keep the column split of these tables, or set on_column_resplit="merge"',
        )


def _check_cover(schema: Schema, targets: Sequence[TableShard], moves: Sequence[Move]) -> None:
    """Every cell of every target has a source. (That each row was really sent is checked when it is read.)"""
    cells_of: dict[TableShard, set[tuple[int, int, int, int]]] = {target: set() for target in targets}
    for move in moves:
        cells_of[move.target].add((move.row0, move.rows, move.col0, move.cols))
    for target, cells in cells_of.items():
        if covered_cells(cells) < target.rows * target.cols:
            raise CorruptionError(
                "no source holds all of this shard", table=schema.tables[target.table].name, row0=target.row0
            )
