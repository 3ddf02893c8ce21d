"""Compare the rows of readers with the proofs of markers, block by block.

Digests add up over any split of rows and columns. So each reader subtracts the digests that it found from those in the
markers. A rectangle of a rank of the marker counts at the one reader that holds its first cell. A block that one reader
holds whole must give 0 there. For a block that several readers share, the sum over all of them must be 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torchrec_stream_ckpt.find.route import Path
from torchrec_stream_ckpt.format.proof import BLOCK_ROWS, Digests, Ints
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.proofs.seen_marks import Circle, Marks, Places, RankReport, blocks_of, digests_of
from torchrec_stream_ckpt.util.types import TableShard, grouped

Flags = npt.NDArray[np.bool_]

MAX_NAMED = 1000
"""Most differing blocks that a reader names. All of them are counted."""


@dataclass(frozen=True, slots=True, order=True)
class Differing:
    """One block that differs from a marker's proof."""

    table: int
    block: int
    section: int
    """0 for weights; 1 and up for the states in the schema's order."""
    place: int
    """Place of the marker that proved it."""


@dataclass(slots=True)
class TableCheck:
    """Blocks [begin, end) of one table."""

    table: int
    begin: int
    difference: Digests
    """Digests of the markers minus those found, shape (blocks, sections)."""
    open: Flags
    """True if it can be checked, as far as this reader knows. Shape (blocks, sections)."""
    place: Places
    """Place of the marker that proves each block."""
    cells: npt.NDArray[np.int64]
    """Cells of this reader's shards in each block."""


@dataclass(frozen=True, slots=True)
class Tally:
    """Result of a check, on one reader or on all."""

    checked: int = 0
    """Cells, counted once for weights and once for each state."""
    total: int = 0
    named: tuple[Differing, ...] = ()
    """Blocks that differ, sorted."""
    more: int = 0
    """Number of differing blocks that are not named."""
    tables: frozenset[int] = frozenset()
    """Tables of all blocks that differ."""

    @property
    def count(self) -> int:
        """Number of blocks that differ, once for weights and once for each state."""
        return len(self.named) + self.more

    @property
    def share(self) -> float:
        return self.checked / self.total if self.total else 0.0

    def __add__(self, other: Tally) -> Tally:
        named = tuple(sorted({*self.named, *other.named}))
        more = self.more + other.more + len(named[MAX_NAMED:])
        tables = self.tables | other.tables
        return Tally(self.checked + other.checked, self.total + other.total, named[:MAX_NAMED], more, tables)


class Check:
    """Checks the rows of one reader.

    Args:
        schema: Tables, by the indices that shards have.
        path: Path to the marker that the reader holds.
        marks: MARKs of the path's markers that the reader read.
        circle: Markers that prove each block. The same for all readers.
        sent: For each shard of this reader, the place of the last marker that sent a row of each of its blocks.
    """

    def __init__(
        self, schema: Schema, path: Path, marks: Marks, circle: Circle, sent: Mapping[TableShard, Places]
    ) -> None:
        self._path, self._marks, self._circle = path, marks, circle
        self._tables = schema.tables
        self._shards = _of_tables(sent)
        self.tables = {table: self._open(table, shards, sent) for table, shards in self._shards.items()}
        self._by_id = {path.id(table): self.tables[table] for table in reversed(self.tables)}

    def _open(self, table: int, shards: Sequence[TableShard], sent: Mapping[TableShard, Places]) -> TableCheck:
        begin = min(blocks_of(shard)[0] for shard in shards)
        end = max(blocks_of(shard)[1] for shard in shards)
        id_, sections = self._path.id(table), 1 + len(self._tables[table].states)
        place, cells = np.full(end - begin, -1, np.int32), np.zeros(end - begin, np.int64)
        if id_ is not None:
            place = self._circle.newest(id_, begin, end)
        fits = (place >= 0) & self._path.same_table(table)[np.maximum(place, 0)]
        for shard in shards:
            first, last = blocks_of(shard)
            fits[first - begin : last - begin] &= sent[shard] <= place[first - begin : last - begin]
            cells[first - begin : last - begin] += _rows_of(shard) * shard.cols
        open_ = np.repeat(fits[:, None], sections, 1)
        return TableCheck(table, begin, np.zeros((end - begin, sections), np.uint64), open_, place, cells)

    def expect(self) -> None:
        """Add up the markers' digests of the blocks that can be checked.

        Raises:
            CorruptionError: A proof has more or fewer digests than its shards have.
        """
        for place, said in self._wanted():
            self._expect(place, said)

    def blocks_of(self, table_id: int, begin: int, end: int) -> Ints:
        """Return the blocks that must be found among the rows [begin, end) of a table, ascending."""
        check = self._by_id[table_id]
        first, last = begin // BLOCK_ROWS, -(-end // BLOCK_ROWS)
        return first + np.flatnonzero(check.open[first - check.begin : last - check.begin, 0])

    def found(self, table: int, blocks: Ints, digests: Digests) -> None:
        """Subtract the reader's digests of some blocks: one shard's part of them, shape (blocks, sections)."""
        check = self.tables[table]
        check.difference[blocks - check.begin] -= digests

    def _wanted(self) -> Iterator[tuple[int, RankReport]]:
        """Yield the reports of each rank at each marker that proves a block here."""
        wanted = np.zeros(len(self._path.chain), bool)
        for check in self.tables.values():
            wanted[check.place[check.open[:, 0]]] = True
        for place in np.flatnonzero(wanted).tolist():
            for said in self._marks.at(place).values():
                if said.proof is not None:
                    yield place, said

    def _expect(self, place: int, said: RankReport) -> None:
        generation = self._path.chain[place].generation  # its tables may have had other states
        tables = list(zip(self._path.ids[generation], self._path.sections[generation], strict=True))
        for source, blocks, digests in digests_of(said, tables):
            check = self.tables.get(source.table)
            if check is None or not len(blocks) or tables[source.table][0] != self._path.id(source.table):
                continue
            for shard in self._shards[source.table]:
                self._take(check, place, source, shard, blocks, digests)

    def _take(
        self, check: TableCheck, place: int, source: TableShard, shard: TableShard, blocks: Ints, digests: Digests
    ) -> None:
        """Add a marker rank's digests of its shard, as far as they concern the reader's shard."""
        overlaps = source.col0 < shard.col0 + shard.cols and shard.col0 < source.col0 + source.cols
        here = (blocks * BLOCK_ROWS < shard.row0 + shard.rows) & ((blocks + 1) * BLOCK_ROWS > shard.row0)
        chosen = np.flatnonzero(here)
        if not overlaps or not len(chosen):
            return
        numbers = blocks[chosen] - check.begin
        mine = check.open[numbers, 0] & (check.place[numbers] == place)
        chosen, numbers = chosen[mine], numbers[mine]
        if (source.col0, source.cols) != (shard.col0, shard.cols):
            for position, state in enumerate(self._tables[check.table].states, 1):
                if state.per_row:
                    check.open[numbers, position] = False
        if shard.col0 <= source.col0 < shard.col0 + shard.cols:
            first = np.maximum(blocks[chosen] * BLOCK_ROWS, source.row0)
            first_cell = (first >= shard.row0) & (first < shard.row0 + shard.rows)
            check.difference[numbers[first_cell]] += digests[chosen[first_cell]]

    def tally(self, shared: Mapping[int, Ints]) -> Tally:
        """Compare the blocks that this reader holds whole: all except those in ``shared``, by table."""
        total = Tally()
        for table, check in self.tables.items():
            whole = np.ones(len(check.place), np.bool_)
            inside = shared.get(table, np.empty(0, np.int64)) - check.begin
            whole[inside[(inside >= 0) & (inside < len(whole))]] = False
            total += tally_of(check, np.flatnonzero(whole))
        return total

    def part(self, table: int, blocks: Ints) -> tuple[Digests, Digests]:
        """Return (difference, 1 where it cannot check) of a table's shared blocks, to be added up over readers.

        Values are zero for a block of which it holds no row.
        """
        sections = 1 + len(self._tables[table].states)
        difference, closed = np.zeros((len(blocks), sections), np.uint64), np.zeros((len(blocks), sections), np.uint64)
        if (check := self.tables.get(table)) is not None:
            here = np.flatnonzero((blocks >= check.begin) & (blocks < check.begin + len(check.place)))
            numbers = blocks[here] - check.begin
            difference[here] = check.difference[numbers]
            closed[here] = ~check.open[numbers] & (check.cells[numbers, None] > 0)
        return difference, closed

    def close(self, table: int, blocks: Ints, difference: Digests, closed: Digests) -> Tally:
        """Evaluate shared blocks by the sums over all readers. Each reader counts its own cells."""
        check = self.tables.get(table)
        if check is None:
            return Tally()
        here = np.flatnonzero((blocks >= check.begin) & (blocks < check.begin + len(check.place)))
        numbers = blocks[here] - check.begin
        check.open[numbers], check.difference[numbers] = closed[here] == 0, difference[here]
        return tally_of(check, numbers[check.cells[numbers] > 0])


def tally_of(check: TableCheck, numbers: Ints) -> Tally:
    """Count the results of some blocks of a table, by their numbers from its first one."""
    open_ = check.open[numbers]
    cells = check.cells[numbers]
    bad = np.argwhere(open_ & (check.difference[numbers] != 0))
    named = tuple(
        Differing(check.table, check.begin + int(numbers[row]), int(section), int(check.place[numbers[row]]))
        for row, section in bad[:MAX_NAMED].tolist()
    )
    tables = frozenset({check.table} if len(bad) else ())
    checked, total = int((open_ * cells[:, None]).sum()), int(cells.sum()) * open_.shape[1]
    return Tally(checked, total, named, len(bad) - len(named), tables)


def shared_blocks(schema: Schema, readers: Sequence[Sequence[TableShard]]) -> dict[int, Ints]:
    """Return for each table the blocks that no single reader holds whole. The result is the same on every reader.

    Args:
        schema: Tables, by the indices that shards have.
        readers: The shards of each reader. Together they hold each cell once.
    """
    found: dict[int, Ints] = {}
    held = _by_table(readers)
    for table, spec in enumerate(schema.tables):
        by_reader = held.get(table, [])
        if len(by_reader) < 2:
            continue
        if any(shard.cols < spec.dim for shards in by_reader for shard in shards):
            found[table] = np.arange(-(-spec.rows // BLOCK_ROWS), dtype=np.int64)
            continue
        edges = {shard.row0 // BLOCK_ROWS for shards in by_reader for shard in shards if shard.row0 % BLOCK_ROWS}
        if edges:
            found[table] = np.array(sorted(edges), np.int64)
    return found


def _by_table(readers: Sequence[Sequence[TableShard]]) -> dict[int, list[list[TableShard]]]:
    """Return for each table the shards with cells, by reader. Readers without such shards are left out."""
    return grouped(pair for shards in readers for pair in _of_tables(shards).items())


def _of_tables(shards: Iterable[TableShard]) -> dict[int, list[TableShard]]:
    """Return for each table its shards with cells."""
    return grouped((shard.table, shard) for shard in shards if shard.rows and shard.cols)


def _rows_of(shard: TableShard) -> npt.NDArray[np.int64]:
    """Return the number of rows of a shard in each of its blocks."""
    first, last = blocks_of(shard)
    edges = np.clip(np.arange(first, last + 1) * BLOCK_ROWS, shard.row0, shard.row0 + shard.rows)
    return np.diff(edges)
