"""The proof of one marker for weights alone, for a reader that holds tables without optimizer states."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from torchrec_stream_ckpt.format.proof import BLOCK_ROWS, Digests, Ints, Proof, digest_blocks, row_keys
from torchrec_stream_ckpt.format.rows import Array
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.proofs.rowsums import plain_sums
from torchrec_stream_ckpt.proofs.seen_marks import RankReport, common_window, summed_digests
from torchrec_stream_ckpt.proofs.unproved import Compared, Unproved, UnprovedBlock
from torchrec_stream_ckpt.util.types import MarkerId, TableSpec

ReadRows = Callable[[Ints], Array]
"""Reads weights of some rows of a table, ids ascending. Returns shape (n, dim), bfloat16 as its bits."""
SumsOf = Callable[[Ints], Ints]
"""Returns :meth:`WeightProof.row_sums` of some rows of a table, ids ascending."""

_PART_BLOCKS = 1 << 10
"""Blocks whose rows are read at a time."""


@dataclass(frozen=True, slots=True)
class WeightProof:
    """Digests of the weights of the blocks in the window of one marker.

    A digest has one number for each section of a row (docs/format.md), and that of the weights is separate. So weights
    are compared exactly, without the states.
    """

    marker: MarkerId
    tables: Mapping[str, tuple[Ints, Digests]]
    """By table name: blocks, ascending, and the digest of the weights of each, over all columns."""
    proof: Proof
    """Proof of rank 0 for replicated tables, which are part of the dense state."""

    @classmethod
    def of(cls, marker: MarkerId, schema: Schema, said: Sequence[RankReport]) -> WeightProof | None:
        """Return the proof of a marker. Returns None if it proves nothing.

        Args:
            marker: The marker.
            schema: The tables of its generation, with ids.
            said: Report of each of its ranks.

        Raises:
            CorruptionError: A proof has more or fewer digests than its shards have.
        """
        window = common_window(each.proof for each in said)
        if window is None:
            return None
        summed = summed_digests(said, schema, window).items()
        tables = {schema.tables[index].name: (blocks, digests[:, 0].copy()) for index, (blocks, digests, _) in summed}
        assert said[0].proof is not None
        return cls(marker, tables, said[0].proof)

    def compare(self, table: TableSpec, row0: int, rows: int, read: ReadRows) -> Compared:
        """Compare a reader's rows of one table. Blocks that it does not hold whole are left out.

        Args:
            table: A table of the marker.
            row0: First row that the reader holds.
            rows: Number of rows that it holds from there on.
            read: Returns them.
        """
        return self.compare_sums(table, row0, rows, lambda ids: plain_sums(read(ids), 0, table.dim))

    @staticmethod
    def row_sums(weights: Array) -> Ints:
        """Return one number per whole row: what a reader keeps that does not keep the weights.

        Args:
            weights: Shape (n, dim), bfloat16 as its bits.
        """
        return plain_sums(weights, 0, weights.shape[1])

    def compare_sums(self, table: TableSpec, row0: int, rows: int, sums: SumsOf) -> Compared:
        """Compare rows by their numbers. Arguments as in :meth:`compare`."""
        checked, found, total = 0, [], table.rows * table.dim
        for blocks, expected in self._parts(table, row0, rows):
            ends = np.minimum((blocks + 1) * BLOCK_ROWS, table.rows)
            counts = ends - blocks * BLOCK_ROWS
            digests = _digests(table, blocks, counts, sums)
            checked += int(counts.sum()) * table.dim
            found += [
                UnprovedBlock(table.name, "weights", int(block) * BLOCK_ROWS, int(end), self.marker, None)
                for block, end, fits in zip(blocks, ends, digests == expected, strict=True)
                if not fits
            ]
        return Compared(checked, total, Unproved(len(found), tuple(found), (table.name,)) if found else None)

    def _parts(self, table: TableSpec, row0: int, rows: int) -> Iterator[tuple[Ints, Digests]]:
        """Yield blocks inside [row0, row0 + rows) with their proved digests, a part at a time."""
        blocks, expected = self.tables.get(table.name, (np.empty(0, np.int64), np.empty(0, np.uint64)))
        last = row0 + rows
        whole = (blocks * BLOCK_ROWS >= row0) & (np.minimum((blocks + 1) * BLOCK_ROWS, table.rows) <= last)
        blocks, expected = blocks[whole], expected[whole]
        for begin in range(0, len(blocks), _PART_BLOCKS):
            yield blocks[begin : begin + _PART_BLOCKS], expected[begin : begin + _PART_BLOCKS]


def _digests(table: TableSpec, blocks: Ints, counts: Ints, sums: SumsOf) -> Digests:
    """Return one digest per block of the weights that a reader holds."""
    assert table.id is not None
    ids = (blocks[:, None] * BLOCK_ROWS + np.arange(BLOCK_ROWS)).ravel()
    ids = ids[ids < table.rows]
    return digest_blocks(sums(ids) * row_keys(table.id, 0, ids), counts)
