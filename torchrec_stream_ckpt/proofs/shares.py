"""The window of one marker in shares: rows of some tables. Any process can read and sum a share on its own.

The digest of a block is a sum over its rows, and no share splits a block. So the blocks of all shares are concatenated,
and the result does not depend on the number of shares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torchrec_stream_ckpt.format.proof import BLOCK_ROWS, POSITIONS, Digests, Ints, Window
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.format.segment import slices_of
from torchrec_stream_ckpt.proofs.rowsums import Slice, TableSums, compare_sums
from torchrec_stream_ckpt.proofs.seen_marks import NEVER, Places, SeenMarks
from torchrec_stream_ckpt.proofs.unproved import Compared
from torchrec_stream_ckpt.store.api import Readable
from torchrec_stream_ckpt.store.catalog import Picked, Piece
from torchrec_stream_ckpt.store.ranges import read_window
from torchrec_stream_ckpt.util.types import TableShard

SHARE_BYTES = 64 * 2**20
"""Bytes that a share reads, approximately."""


@dataclass(frozen=True, slots=True)
class ShareRows:
    """Rows [begin, end) of one table: whole blocks."""

    table: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class FoundBlocks:
    """Result of a share for the blocks of one table that belong to the window."""

    table: int
    blocks: Ints
    """Block numbers, ascending."""
    sent: Places
    """For each block, whether any row of it was sent, as in ``SeenMarks.sent``."""
    digests: Mapping[Slice, Digests]
    """Digests by column slice of the marker's generation, shape (blocks, sections)."""


@dataclass(frozen=True, slots=True)
class ShareFound:
    """Result of a share."""

    tables: tuple[FoundBlocks, ...]
    num_bytes: int
    """Bytes that were read."""


@dataclass(frozen=True, slots=True, eq=False)
class WindowShare:
    """All data that a process needs to read one share and to sum it up. The result depends on this alone."""

    window: Window
    schema: Schema
    """Schema of the marker's generation."""
    own: Mapping[int, tuple[Slice, ...]]
    """By table, the column slices of the marker's generation."""
    slices: Mapping[int, tuple[Slice, ...]]
    """By table, all column slices in which rows arrive."""
    tables: tuple[ShareRows, ...]
    """Each table once."""
    pieces: tuple[tuple[Schema, tuple[Picked, ...]], ...]
    """Chunks that have such rows, the oldest piece first, each with the schema of its generation."""
    num_bytes: int
    """Bytes to read, approximately."""

    def read(
        self, objects: Readable, pool: Executor, tell: Callable[[int], None] = lambda _: None, *, whole: bool = False
    ) -> ShareFound:
        """Read the share and sum it up.

        Args:
            objects: The store.
            pool: Threads to read with.
            tell: Called with the bytes of each chunk.
            whole: True to read chunks whole, and to compare their checksums.

        Raises:
            CorruptionError: An object of the store is missing or, as far as it was read whole, altered.
            StoreUnavailableError: The store does not answer.
        """
        specs, sums, sent = self.schema.tables, {}, {}
        for each in self.tables:
            table = each.table
            sums[table] = TableSums(specs[table], self.slices.get(table, ()), self.own.get(table, ()))
            sent[table] = sums[table].allocate(self.window, each.begin, each.end)
        rows = {each.table: (each.begin, each.end) for each in self.tables}
        ids, num_bytes = [spec.id for spec in specs], 0
        for schema, picked in self.pieces:
            for read in read_window(objects, picked, schema, ids, self.window, pool, whole=whole, rows=rows):
                for found in read.chunks:
                    sums[found.table].take(found.col0, found.cols, found.rows, 0)
                num_bytes += read.num_bytes
                tell(read.num_bytes)
        return ShareFound(
            tuple(self._found(each, sums[each.table], sent[each.table]) for each in self.tables), num_bytes
        )

    def _found(self, rows: ShareRows, sums: TableSums, sent: Places) -> FoundBlocks:
        blocks = self.window.blocks(_id(self.schema, rows.table), rows.begin, rows.end)
        digests = {own: sums.digests(own, blocks) for own in sums.own}
        return FoundBlocks(rows.table, blocks, sent[blocks - rows.begin // BLOCK_ROWS], digests)


def cut_window(
    schema: Schema,
    window: Window,
    shards: Sequence[TableShard],
    pieces: Sequence[tuple[Schema, Piece]],
    share_bytes: int,
) -> list[WindowShare]:
    """Split a window into shares.

    Args:
        schema: Schema of the marker's generation.
        window: The window that the marker proves.
        shards: Shards of the ranks of its generation.
        pieces: Pieces that lead to the marker, open, the oldest first, each with the schema of its generation.
        share_bytes: Bytes that a share reads, approximately.
    """
    if not window.width:
        return []
    own: dict[int, set[Slice]] = {}
    for shard in shards:
        own.setdefault(shard.table, set()).add((shard.col0, shard.cols))
    slices: dict[int, set[Slice]] = {}
    table_bytes = np.zeros(len(schema.tables))
    for picked in (picked for _, piece in pieces for picked in piece.opened):
        entries = picked.entries
        for table, col0, cols in slices_of(entries):
            slices.setdefault(table, set()).add((col0, cols))
        known = entries[entries["table"] < len(table_bytes)]
        table_bytes += np.bincount(known["table"], known["num_bytes"], len(table_bytes))
    shares = []
    for tables, num_bytes in _gathered(schema, table_bytes * window.width / POSITIONS, share_bytes):
        within = tuple((of, left) for of, piece in pieces if (left := tuple(_within(piece.opened, tables))))
        shares.append(
            WindowShare(
                window,
                schema,
                {each.table: tuple(sorted(own.get(each.table, ()))) for each in tables},
                {each.table: tuple(sorted(slices.get(each.table, ()))) for each in tables},
                tables,
                within,
                num_bytes,
            )
        )
    return shares


def _gathered(
    schema: Schema, table_bytes: npt.NDArray[np.float64], share_bytes: int
) -> Iterator[tuple[tuple[ShareRows, ...], int]]:
    """Yield rows of tables that are read together, with their bytes: about the same number for each share."""
    gathered: list[ShareRows] = []
    gathered_bytes = 0.0
    for table, spec in enumerate(schema.tables):
        if spec.id is None or not spec.rows:
            continue
        count = max(1, -(-int(table_bytes[table]) // share_bytes))
        step = -(-spec.rows // (count * BLOCK_ROWS)) * BLOCK_ROWS
        for begin in range(0, spec.rows, step):
            end = min(spec.rows, begin + step)
            if gathered and gathered[-1].table == table:
                gathered[-1] = ShareRows(table, gathered[-1].begin, end)
            else:
                gathered.append(ShareRows(table, begin, end))
            gathered_bytes += table_bytes[table] * (end - begin) / spec.rows
            if gathered_bytes >= share_bytes:
                yield tuple(gathered), int(gathered_bytes)
                gathered, gathered_bytes = [], 0.0
    if gathered:
        yield tuple(gathered), int(gathered_bytes)


def _within(opened: Sequence[Picked], tables: Sequence[ShareRows]) -> Iterator[Picked]:
    """Yield the chunks that have such rows."""
    for picked in opened:
        entries = picked.entries
        chosen = np.zeros(len(entries), np.bool_)
        for each in tables:
            overlaps = (entries["last"] >= each.begin) & (entries["first"] < each.end)
            chosen |= (entries["table"] == each.table) & overlaps
        if chosen.any():
            yield picked.only(chosen).alone()


def compare_shares(schema: Schema, seen: SeenMarks, found: Sequence[ShareFound]) -> Compared:
    """Compare a window by all of its shares.

    Args:
        schema: Schema of the marker's generation.
        seen: MARKs of its ranks.
        found: Result of each share.
    """
    by_table: dict[int, list[FoundBlocks]] = {}
    for each in (each for share in found for each in share.tables):
        by_table.setdefault(each.table, []).append(each)
    together = {table: _together(parts) for table, parts in by_table.items()}
    for table, each in together.items():
        rows = schema.tables[table].rows
        sent = np.full(-(-rows // BLOCK_ROWS), NEVER, np.int32)
        sent[each.blocks] = each.sent
        for col0, cols in each.digests:
            seen.sent[TableShard(table, 0, rows, col0, cols)] = sent

    def digests(table: int, own: Slice, blocks: Ints) -> Digests:
        return together[table].digests[own][np.searchsorted(together[table].blocks, blocks)]

    return compare_sums(schema, seen, digests)


def _together(parts: Sequence[FoundBlocks]) -> FoundBlocks:
    """Join all blocks of one table."""
    blocks = np.concatenate([each.blocks for each in parts])
    order = np.argsort(blocks)
    digests = {own: np.concatenate([each.digests[own] for each in parts])[order] for own in parts[0].digests}
    return FoundBlocks(parts[0].table, blocks[order], np.concatenate([each.sent for each in parts])[order], digests)


def _id(schema: Schema, table: int) -> int:
    found = schema.tables[table].id
    assert found is not None
    return found
