"""Ends of all ranks' streams at a marker, as in COMMIT: column by column, in few bytes per rank.

They stay packed in memory as well and are unpacked when they are read, because a reader holds the COMMITs of thousands
of markers and uses the streams of few.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np

from torchrec_stream_ckpt.errors import CorruptionError
from torchrec_stream_ckpt.format.parsing import from_base64
from torchrec_stream_ckpt.util.types import LogSpan, RankEnd

COLUMNS = ("partition", "begin", "end", "frames", "chain", "rows", "num_bytes")
"""The packed columns, in order. The rank is the index."""
MAX_RANKS = 65_536
"""Limit of ranks. Columns of width 0 take no bytes, so without it a few bytes could describe any number of ranks."""
_FRONT = struct.Struct(f"<I{len(COLUMNS)}B{len(COLUMNS)}Q")
"""Number of ranks, bytes of a value in each column, least value of each column."""
FRONT_LEN = _FRONT.size
_IN_ORDER = "COMMIT.ranks must be 0, 1, 2, ..., each with a HELLO and a MARK"
_FRAMES = COLUMNS.index("frames")
_OF_STREAM = tuple(COLUMNS.index(name) for name in ("frames", "chain", "rows", "num_bytes"))
"""Columns that do not depend on the log that has the stream."""


def _check_front(packed: bytes) -> bool:
    """Check the front of packed ends. Returns False if the frames must be checked too, because a rank may have too few.

    Raises:
        CorruptionError: no packed ends begin like this.
    """
    if len(packed) < FRONT_LEN:
        raise CorruptionError("COMMIT.ranks is cut short")
    fields = _FRONT.unpack_from(packed)
    count, widths, least = fields[0], fields[1 : 1 + len(COLUMNS)], fields[1 + len(COLUMNS) :]
    widest = max(widths)
    if not 1 <= count <= MAX_RANKS or widest > 8 or len(packed) != FRONT_LEN + count * sum(widths):
        raise CorruptionError("COMMIT.ranks has impossible lengths")
    fits = widest < 8 and max(least) < 1 << 63  # true for each column then
    if not fits and any(low + (1 << 8 * width) > 1 << 64 for low, width in zip(least, widths, strict=True)):
        raise CorruptionError("COMMIT.ranks has a number of more than 64 bits")
    return bool(least[_FRAMES] >= 2)


class RankEnds(Sequence[RankEnd]):
    """Ends of ranks 0, 1, 2, ... in order, unpacked one by one.

    Args:
        packed: Decoded string of a COMMIT.

    Raises:
        CorruptionError: it is not valid.
    """

    __slots__ = ("_packed",)

    def __init__(self, packed: bytes) -> None:
        self._packed = packed
        if not _check_front(packed) and min(self._column(_FRAMES)) < 2:
            raise CorruptionError(_IN_ORDER)

    @classmethod
    def of(cls, ends: Sequence[RankEnd]) -> RankEnds:
        """Pack ends. They must be those of ranks 0, 1, 2, ... in order."""
        if isinstance(ends, RankEnds):
            return ends
        if not ends or [end.rank for end in ends] != list(range(len(ends))):
            raise CorruptionError(_IN_ORDER)
        columns = [[getattr(end, name) for end in ends] for name in COLUMNS]
        least, widths = [], []
        for column in columns:
            low, width = min(column), -(-(max(column) - min(column)).bit_length() // 8)
            fits = width < 8 and low + (1 << 8 * width) <= 1 << 64
            least.append(low if fits else 0)
            widths.append(width if fits else 8)
        data = [
            b"".join((value - low).to_bytes(width, "little") for value in column)
            for column, low, width in zip(columns, least, widths, strict=True)
        ]
        return cls(_FRONT.pack(len(ends), *widths, *least) + b"".join(data))

    @classmethod
    def from_text(cls, text: str) -> RankEnds:
        """Read the string of a COMMIT.

        Raises:
            CorruptionError: it is not canonical base64 of packed ends.
        """
        return cls(from_base64(text, "COMMIT.ranks"))

    def to_text(self) -> str:
        """Return the string for a COMMIT."""
        return base64.b64encode(self._packed).decode("ascii")

    def total(self, name: str) -> int:
        """Return the sum of one column over all ranks."""
        count, widths, least = self._front()
        place = COLUMNS.index(name)
        if not widths[place]:
            return count * least[place]
        sums: list[int] = self._bytes(place, count, widths).sum(axis=0, dtype=np.uint64).tolist()
        return count * least[place] + sum(value << 8 * byte for byte, value in enumerate(sums))

    def same_streams(self, other: RankEnds) -> bool:
        """Return whether the streams are the same, at any positions in their logs."""
        return all(self._column(place) == other._column(place) for place in _OF_STREAM)

    def spans(self, generation: int) -> list[LogSpan]:
        """Return the spans of the log that the streams of all ranks occupy, from HELLO to MARK."""
        columns = (self._column(COLUMNS.index(name)) for name in ("partition", "begin", "end"))
        return [LogSpan(generation, *each) for each in zip(*columns, strict=True)]

    def __len__(self) -> int:
        count: int = self._front()[0]
        return count

    @overload
    def __getitem__(self, rank: int) -> RankEnd: ...
    @overload
    def __getitem__(self, rank: slice) -> tuple[RankEnd, ...]: ...
    def __getitem__(self, rank: int | slice) -> RankEnd | tuple[RankEnd, ...]:
        if isinstance(rank, slice):
            return tuple(self)[rank]
        count, widths, least = self._front()
        rank = range(count)[rank]
        values, at = [], FRONT_LEN
        for width, low in zip(widths, least, strict=True):
            place = at + rank * width
            values.append(low + int.from_bytes(self._packed[place : place + width], "little"))
            at += count * width
        return RankEnd(rank, *values)

    def first(self, name: str) -> int:
        """Read the value of one column for rank 0."""
        count, widths, least = self._front()
        place = COLUMNS.index(name)
        at = FRONT_LEN + count * sum(widths[:place])
        return least[place] + int.from_bytes(self._packed[at : at + widths[place]], "little")

    def __iter__(self) -> Iterator[RankEnd]:
        return map(RankEnd, range(len(self)), *map(self._column, range(len(COLUMNS))))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, RankEnds):
            return self._packed == other._packed or tuple(self) == tuple(other)
        return tuple(self) == other if isinstance(other, tuple) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))

    def _front(self) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        front = _FRONT.unpack_from(self._packed)
        return front[0], front[1 : 1 + len(COLUMNS)], front[1 + len(COLUMNS) :]

    def _column(self, place: int) -> list[int]:
        count, widths, least = self._front()
        wide = np.zeros((count, 8), np.uint8)
        wide[:, : widths[place]] = self._bytes(place, count, widths)
        values: list[int] = (wide.view("<u8")[:, 0] + np.uint64(least[place])).tolist()
        return values

    def _bytes(self, place: int, count: int, widths: Sequence[int]) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
        """Return one column, a row of bytes for each rank."""
        begin = FRONT_LEN + count * sum(widths[:place])
        column = np.frombuffer(self._packed, np.uint8, count * widths[place], begin)
        return column.reshape(count, widths[place])
