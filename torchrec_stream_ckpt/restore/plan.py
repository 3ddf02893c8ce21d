"""What a restore will do, computed before anything is done: a pure value that prints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from torchrec_stream_ckpt.errors import ColumnResplitError, CorruptionError, SchemaMismatchError
from torchrec_stream_ckpt.format.control import TableScalars
from torchrec_stream_ckpt.format.head import HeadState
from torchrec_stream_ckpt.format.interval import Interval
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.format.segment import check_tables, slices_of
from torchrec_stream_ckpt.restore.cover import covered_cells
from torchrec_stream_ckpt.restore.reshard import Move, intersect
from torchrec_stream_ckpt.route.path import Path
from torchrec_stream_ckpt.route.route import Route, Shards
from torchrec_stream_ckpt.store.catalog import Picked
from torchrec_stream_ckpt.store.reader import Held
from torchrec_stream_ckpt.types import MarkerId, TableShard, TableSpec


@dataclass(frozen=True, slots=True)
class StreamRead:
    """Read what one rank has sent, and make these moves."""

    interval: Interval
    moves: tuple[Move, ...]
    shards: tuple[TableShard, ...] = ()
    """What the rank held."""


@dataclass(frozen=True, slots=True)
class StoreRead:
    """Read these chunks of a segment, and make these moves."""

    picked: Picked
    moves: tuple[Move, ...]
    is_base: bool
    """Of the oldest piece: written straight. Else a row is written if no newer piece has given it."""
    end: MarkerId
    """The marker that the piece leads to."""


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
    stored: tuple[StoreRead, ...] = ()
    """Oldest first."""
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

    @property
    def moves(self) -> list[Move]:
        """All of them once, in no order."""
        return _distinct(self.warm, self.stored, self.reads)

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
            num_bytes = sum(read.picked.num_bytes for read in self.stored)
            lines.append(f"  the store up to marker {self.reach}: {len(self.stored)} segments, {num_bytes} bytes")
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
        for position in sorted(self.merged):
            lines.append(f"  merge the row-wise state of {self.schema.tables[position].name}: not bit-exact")
        return "\n".join(lines)


def _distinct(warm: Sequence[Move], stored: Sequence[StoreRead], reads: Sequence[StreamRead]) -> list[Move]:
    """Their moves, each once: most pieces of a store have the same ones."""
    of_reads = (move for each in (stored, reads) for read in each for move in read.moves)
    return list(dict.fromkeys((*warm, *of_reads)))


def plan_restore(route: Route, schema: Schema, targets: Sequence[TableShard], *, merge: bool = False) -> RestorePlan:
    """Plan what brings a marker into ``targets``. Pure: reads and writes nothing.

    Args:
        route: The way to the marker, :meth:`~Route.complete`.
        schema: The tables of the restoring job.
        targets: The shards of this rank. If the route begins at a marker, they hold that one.
        merge: Allow a changed column split of a row-wise optimizer (``on_column_resplit="merge"``).

    Raises:
        SchemaMismatchError: a table is missing or differs; names it and both values.
        ColumnResplitError: row-wise state has no exact answer under the new columns.
        CorruptionError: the sources do not cover a target.
    """
    plan = plan_reads(route, schema, targets)
    _check_resplit(plan, merge=merge)
    return plan


def plan_reads(route: Route, schema: Schema, targets: Sequence[TableShard]) -> RestorePlan:
    """``plan_restore`` for one that only reads: whether states can be put together is not asked."""
    check_schema(route.schema, schema)
    schema, held, bases = route.schema, route.held, route.bases  # the tables of the marker have their ids
    stored = list(_store_reads(schema, held, targets, bases)) if held is not None else []
    head = held.head if held is not None else None
    warm = _head_moves(schema, head, targets, bases) if head is not None else ()
    reads = _stream_reads(route.intervals, route.shards, targets, bases)
    moves = _distinct(warm, stored, reads)
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
        tuple(read for read in stored if len(read.picked.chunks)),
        held.reach if held is not None else None,
        head.marker if head is not None else None,
        warm,
        live=route.since,
        path=route.path,
        based_on=head.marker if head is not None else held.pieces[0].end if held is not None else None,
        scalars=held.scalars if held is not None and held.reach == route.marker else (),
    )


def _store_reads(
    schema: Schema, held: Held, targets: Sequence[TableShard], bases: Mapping[int, int]
) -> Iterator[StoreRead]:
    by_table = _by_table(targets)

    @cache  # most pieces have the same columns
    def moves_of(slices: tuple[tuple[int, int, int], ...]) -> tuple[Move, ...]:
        return tuple(
            move
            for table, col0, cols in slices
            for target in by_table.get(table, ())
            if (move := intersect(TableShard(table, 0, schema.tables[table].rows, col0, cols), target)) is not None
        )

    for number, piece in enumerate(held.pieces):
        for picked in piece.opened:
            check_tables(picked.front, schema, picked.ref.name)
            slices = slices_of(picked.front.directory)
            moves = moves_of(tuple(each for each in slices if piece.generation >= bases.get(each[0], 0)))
            is_base = held.head is None and not number
            yield StoreRead(pick(picked, moves), moves, is_base, piece.end)


def _head_moves(
    schema: Schema, head: HeadState, targets: Sequence[TableShard], bases: Mapping[int, int]
) -> tuple[Move, ...]:
    sources = [
        TableShard(table, 0, schema.tables[table].rows, col0, cols)
        for table, col0, cols in head.columns
        if head.marker.generation >= bases.get(table, 0)
    ]
    return tuple(move for source in sources for target in targets if (move := intersect(source, target)) is not None)


def pick(picked: Picked, moves: Sequence[Move]) -> Picked:
    """The chunks that may hold rows of one of the moves."""
    directory = picked.front.directory
    first, last, slices = directory["first"], directory["last"], slices_of(directory)
    chosen = np.zeros(len(directory), np.bool_)
    for move in moves:
        source = move.source
        if (place := slices.get((source.table, source.col0, source.cols))) is not None:
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


def check_schema(saved: Schema, here: Schema) -> None:
    """Compare the log's tables with the model's.

    Raises:
        SchemaMismatchError: names the first table that differs, the field, and both values.
    """
    there_by_name = {table.name: table for table in saved.tables}
    here_by_name = {table.name: table for table in here.tables}
    for name in sorted(there_by_name.keys() ^ here_by_name.keys()):
        side = "the log" if name in there_by_name else "this model"
        raise SchemaMismatchError(
            f"only {side} has a sharded table of this name",
            hint="a table cannot change between data-parallel and sharded, nor be renamed",
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
