"""Rows that differ from a marker's proof: their description, and the rows that have to be sent again."""

from __future__ import annotations

from dataclasses import dataclass

from torchrec_stream_ckpt.errors import ProofMismatchError
from torchrec_stream_ckpt.find.route import Path
from torchrec_stream_ckpt.format.manifest import TableRows
from torchrec_stream_ckpt.format.proof import BLOCK_ROWS
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.proofs.compare import Tally
from torchrec_stream_ckpt.proofs.proof_status import blocks_differ
from torchrec_stream_ckpt.proofs.seen_marks import Circle
from torchrec_stream_ckpt.util.types import MarkerId, RowRange

_SAID = 8
"""Most blocks that a message names."""


@dataclass(frozen=True, slots=True)
class UnprovedBlock:
    """One block of one table, its weights or one of its states."""

    table: str
    state: str
    """``weights``, or the name of a state."""
    begin: int
    """First row."""
    end: int
    proved: MarkerId
    """The marker whose proof it does not match."""
    before: MarkerId | None
    """The previous marker that proved it. None if it is not known."""

    def __str__(self) -> str:
        before = f"before it by {self.before}" if self.before is not None else "not before it"
        return f"{self.table} {self.state} rows [{self.begin}, {self.end}) (proved by {self.proved}, {before})"


@dataclass(frozen=True, slots=True)
class Unproved:
    """All differing blocks."""

    count: int
    """Number of blocks, each once for weights and once for each state."""
    blocks: tuple[UnprovedBlock, ...]
    """Sorted. Only the first ones if there are many."""
    tables: tuple[str, ...]
    """Tables of all of them."""

    def rows(self, schema: Schema) -> tuple[RowRange, ...]:
        """Return all rows that have to be sent again."""
        if self.count > len(self.blocks):  # not all are named
            return tuple(RowRange(table.name, 0, table.rows) for _, table in schema.live if table.name in self.tables)
        return tuple(sorted({RowRange(block.table, block.begin, block.end) for block in self.blocks}))

    def table_rows(self, schema: Schema) -> list[TableRows]:
        """Return all rows that have to be sent again, for a verdict."""
        ids = {table.name: table.id for _, table in schema.live}
        return [
            TableRows(id_, begin, end) for name, begin, end in self.rows(schema) if (id_ := ids.get(name)) is not None
        ]

    def error(self, marker: MarkerId) -> ProofMismatchError:
        """Return the error that a reader of ``marker`` raises."""
        first = self.blocks[0]
        named = "; ".join(str(block) for block in self.blocks[:_SAID])
        more = f"; and {self.count - _SAID} more" if self.count > _SAID else ""
        return ProofMismatchError(
            f"{blocks_differ(self.count)} of the live tables at a cut: {named}{more}",
            hint="restore a marker before the one that proved them, or continue with these rows: restore(..., "
            "accept_unproved=True), on a command line --accept-unproved",
            marker=marker,
            table=first.table,
            state=first.state,
            rows=f"{first.begin}-{first.end - 1}",
            proved=first.proved,
            proved_before=first.before,
        )


@dataclass(frozen=True, slots=True)
class Compared:
    """Result of a comparison with proofs."""

    checked: int = 0
    """Cells, counted once for weights and once for each state."""
    total: int = 0
    unproved: Unproved | None = None
    """Differing blocks. None if none differ."""

    @property
    def share(self) -> float:
        return self.checked / max(1, self.total)

    def __add__(self, other: Compared) -> Compared:
        found = [each for each in (self.unproved, other.unproved) if each is not None]
        blocks = tuple(block for each in found for block in each.blocks)
        tables = tuple(sorted({table for each in found for table in each.tables}))
        unproved = Unproved(sum(each.count for each in found), blocks, tables) if found else None
        return Compared(self.checked + other.checked, self.total + other.total, unproved)


def name_blocks(tally: Tally, schema: Schema, path: Path, circle: Circle) -> Unproved | None:
    """Name the blocks that differ. Returns None if none differ."""
    found = []
    for each in tally.named:
        table, id_ = schema.tables[each.table], path.id(each.table)
        before = circle.before(id_, each.block, each.place) if id_ is not None else None
        begin = each.block * BLOCK_ROWS
        found.append(
            UnprovedBlock(
                table.name,
                table.states[each.section - 1].name if each.section else "weights",
                begin,
                min(begin + BLOCK_ROWS, table.rows),
                path.chain[each.place],
                path.chain[before] if before is not None else None,
            )
        )
    tables = tuple(schema.tables[table].name for table in sorted(tally.tables))
    return Unproved(tally.count, tuple(found), tables) if tally.count else None
