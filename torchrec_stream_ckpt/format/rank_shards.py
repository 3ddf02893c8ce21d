"""Shards that each rank of a generation holds, its *layout*, as in CLAIM: column by column, compressed.

A layout stays packed in memory and is unpacked when it is read. Generations with the same layout share one object, and
one that is sent to other ranks is as small as in the log.
"""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import overload

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from torchrec_stream_ckpt.errors import CorruptionError
from torchrec_stream_ckpt.format.parsing import from_base64, unpacked
from torchrec_stream_ckpt.format.rank_ends import MAX_RANKS
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.util.types import TableShard

COLUMNS = ("table", "row0", "rows", "col0", "cols")
"""The packed columns, in order."""
MAX_SHARDS = 2**20
MAX_TEXT = 262_144
"""Limit of the string in CLAIM, in characters."""
_MAX_BYTES = 4 + 4 * MAX_RANKS + 8 * len(COLUMNS) * MAX_SHARDS
"""Limit of the uncompressed bytes."""
_COUNT = struct.Struct("<I")

Table = npt.NDArray[np.uint64]
"""Shape (shards, columns)."""


class RankShards(Sequence[tuple[TableShard, ...]]):
    """The shards of ranks 0, 1, 2, ... in order.

    Args:
        packed: Decoded string of a CLAIM.

    Raises:
        CorruptionError: it is not valid.
    """

    def __init__(self, packed: bytes) -> None:
        self._packed = packed
        plain = unpacked(packed, _MAX_BYTES, "CLAIM.layout")
        self._counts, self._table = _parse(plain)
        self.crc = crc32c(plain)
        """CRC32C of the uncompressed bytes. Layouts with the same bytes are equal."""

    @classmethod
    def of(cls, ranks: Sequence[Sequence[TableShard]]) -> RankShards | None:
        """Pack shards. Returns None if they are more than a CLAIM can hold."""
        counts = [len(shards) for shards in ranks]
        if not 1 <= len(counts) <= MAX_RANKS or sum(counts) > MAX_SHARDS:
            return None
        values = [getattr(shard, name) for shards in ranks for shard in shards for name in COLUMNS]
        table = np.array(values, np.uint64).reshape(-1, len(COLUMNS))
        less = table.copy()
        for before, at in _neighbors(counts):
            less[at] -= table[before]
        plain = _COUNT.pack(len(counts)) + np.array(counts, "<u4").tobytes() + less.T.astype("<u8").tobytes()
        packed = zlib.compress(plain, 6)
        return cls(packed) if -(-len(packed) // 3) * 4 <= MAX_TEXT else None

    @classmethod
    def from_text(cls, text: str) -> RankShards:
        """Read the string of a CLAIM.

        Raises:
            CorruptionError: it is not canonical base64 of a packed layout.
        """
        if len(text) > MAX_TEXT:
            raise CorruptionError(f"CLAIM.layout has {len(text)} characters, more than {MAX_TEXT}")
        return cls(from_base64(text, "CLAIM.layout"))

    def to_text(self) -> str:
        """Return the string for a CLAIM."""
        return base64.b64encode(self._packed).decode("ascii")

    def check(self, schema: Schema) -> None:
        """Raise CorruptionError if a shard is outside its table."""
        table, row0, rows, col0, cols = self._table.T
        known = table < len(schema.tables)
        at = np.where(known, table, 0).astype(np.int64)
        # One extra entry, so that a schema without tables has one.
        most_rows, most_cols = (np.array([*sizes, 0], np.uint64)[at] for sizes in zip(*_sizes(schema), strict=True))
        inside = known & (rows <= most_rows) & (cols <= most_cols)
        # Unsigned: the difference is meaningful only if the size is within bounds.
        inside &= (row0 <= most_rows - rows) & (col0 <= most_cols - cols)
        if not inside.all():
            first = TableShard(*self._table[int(np.argmin(inside))].tolist())
            raise CorruptionError(f"CLAIM.layout: {first} is outside its table")

    @cached_property
    def _ranks(self) -> tuple[tuple[TableShard, ...], ...]:
        shards = [TableShard(*row) for row in self._table.tolist()]
        return tuple(tuple(shards[begin:end]) for begin, end in _ranges(self._counts))

    def __len__(self) -> int:
        return len(self._counts)

    @overload
    def __getitem__(self, rank: int) -> tuple[TableShard, ...]: ...
    @overload
    def __getitem__(self, rank: slice) -> tuple[tuple[TableShard, ...], ...]: ...
    def __getitem__(self, rank: int | slice) -> tuple[TableShard, ...] | tuple[tuple[TableShard, ...], ...]:
        return self._ranks[rank]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RankShards):
            return NotImplemented
        same = self._packed == other._packed or (
            self._counts == other._counts and np.array_equal(self._table, other._table)
        )
        return bool(same)

    def __hash__(self) -> int:
        return hash(self.crc)

    def __reduce__(self) -> tuple[type[RankShards], tuple[bytes]]:
        return RankShards, (self._packed,)

    def __repr__(self) -> str:
        return f"RankShards({len(self)} ranks, {len(self._table)} shards)"


def _sizes(schema: Schema) -> list[tuple[int, int]]:
    return [(table.rows, table.dim) for table in schema.tables] or [(0, 0)]


def _parse(plain: bytes) -> tuple[list[int], Table]:
    """Return the number of shards of each rank, and all shards."""
    ranks = _COUNT.unpack_from(plain)[0] if len(plain) >= _COUNT.size else 0
    begin = _COUNT.size + 4 * ranks
    if not 1 <= ranks <= MAX_RANKS or len(plain) < begin:
        raise CorruptionError("CLAIM.layout has an impossible number of ranks")
    counts: list[int] = np.frombuffer(plain, "<u4", ranks, _COUNT.size).tolist()
    shards = sum(counts)
    if shards > MAX_SHARDS or len(plain) != begin + 8 * len(COLUMNS) * shards:
        raise CorruptionError("CLAIM.layout has an impossible number of shards")
    columns = np.frombuffer(plain, "<u8", len(COLUMNS) * shards, begin).reshape(len(COLUMNS), shards)
    table = columns.T.astype(np.uint64)
    for before, at in _neighbors(counts):
        table[at] += table[before]
    return counts, table


def _ranges(counts: Sequence[int]) -> list[tuple[int, int]]:
    ends = np.cumsum([0, *counts]).tolist()
    return list(pairwise(ends))


def _neighbors(counts: Sequence[int]) -> list[tuple[slice, slice]]:
    """Return, for each pair of adjacent ranks, (earlier, later) ranges of shards with the same positions."""
    both = [(begin, at, min(at - begin, end - at)) for (begin, at), (_, end) in pairwise(_ranges(counts))]
    return [(slice(begin, begin + same), slice(at, at + same)) for begin, at, same in both if same]
