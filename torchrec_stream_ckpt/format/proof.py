"""Digests of live rows, by which a reader can prove a marker. Specified in docs/format.md, section The proof.

A digest is a sum, modulo 2^64, over the elements of a rectangle of one table: the bits of an element, times a key of
its row, times a key of its column. So digests of disjoint rectangles add up, whatever the plans of writer and reader.
The keys depend on the table's stable id, on the section (weights, or a state), on the global row and on the global
column. A row that is stale, swapped, or of another table changes the sum. (Multilinear hashing: Carter and Wegman
1979; Lemire and Kaser 2014. It detects accidents, not forgeries.)
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from torchrec_stream_ckpt.errors import CorruptionError
from torchrec_stream_ckpt.format.parsing import from_base64
from torchrec_stream_ckpt.native.kernel import kernel
from torchrec_stream_ckpt.util.mixing import GOLDEN, mixed

BLOCK_ROWS = 64
"""Rows of a block. A digest covers the rows of one block."""
POSITIONS = 1 << 16
"""Positions on the circle. A window is an interval of it."""
MAX_ID = 1 << 53
"""Upper bound of table ids (exclusive). Any JSON reader keeps integers below it exactly."""

Ints = npt.NDArray[np.int64]
Digests = npt.NDArray[np.uint64]
Words = npt.NDArray[np.signedinteger[Any]]

_PER_ROW = 1 << 63
_CHUNK_BYTES = 256 * 1024
"""Bytes that numpy adds up at a time, so that the elements stay in a cache while they are words of 8 bytes."""
_LARGE = 1024
"""Number of words from which on the native kernel is faster, including the call."""
_ONE = np.uint64(1)


@dataclass(frozen=True, slots=True)
class Window:
    """Window of blocks that a marker proves: those whose position is in [position, position + width) of the circle."""

    position: int
    width: int

    def blocks(self, table_id: int, begin: int, end: int) -> Ints:
        """Return the blocks of the window that have rows in [begin, end) of a table, ascending.

        Args:
            table_id: The table's stable id.
            begin: First global row.
            end: Row after the last one.
        """
        first, last = begin // BLOCK_ROWS, -(-end // BLOCK_ROWS)
        if begin >= end:
            return np.empty(0, np.int64)
        if last - first <= self.width:
            blocks = np.arange(first, last)
            return blocks[(_reversed_bits()[blocks % POSITIONS] + table_id - self.position) % POSITIONS < self.width]
        wanted = (np.arange(self.position, self.position + self.width) - table_id) % POSITIONS
        residues = np.sort(_reversed_bits()[wanted])
        rounds = np.arange(first // POSITIONS, (last - 1) // POSITIONS + 1, dtype=np.int64) * POSITIONS
        blocks = (rounds[:, None] + residues[None, :]).ravel()
        return blocks[np.searchsorted(blocks, first) : np.searchsorted(blocks, last)]

    @property
    def next(self) -> int:
        """Position at which the next window begins."""
        return (self.position + self.width) % POSITIONS

    @property
    def following(self) -> Window:
        """The next window."""
        return Window(self.next, self.width)


@dataclass(frozen=True, slots=True)
class Proved:
    """Progress of a generation's markers around the circle."""

    round_markers: int
    """Number of markers that prove every row once."""
    share: float
    """Share of the rows that was proved in this generation, 0 to 1."""
    oldest_markers: int
    """Age, in committed markers, of the oldest proof that no newer one has replaced."""

    @classmethod
    def by(cls, width: int, markers: int) -> Proved:
        """Return the progress after this number of committed markers, with windows of this width."""
        round_markers = -(-POSITIONS // width)
        return cls(round_markers, min(1.0, markers * width / POSITIONS), max(0, min(markers, round_markers) - 1))


@dataclass(frozen=True, slots=True)
class ReplicatedProof:
    """Proof in the MARK of rank 0 of one tensor of the dense state that belongs to a replicated table."""

    name: str
    """Name of the entry in the dense state: ``model.`` or ``optim.`` and so on."""
    rows: int
    cols: int
    """Number of columns. 1 for a tensor with one value per row."""
    digests: str
    """One number for each block of the window that has rows, ascending, encoded as in :class:`Proof`."""

    @classmethod
    def of(cls, name: str, rows: int, cols: int, digests: Digests) -> ReplicatedProof:
        return cls(name, rows, cols, _text_of(digests))

    @property
    def id(self) -> int:
        """Id used in place of a table's id, because these rows have no other."""
        return replicated_id(self.name)

    def numbers(self) -> Digests:
        """Return the digests, in their order."""
        return _numbers_of(self.digests)


@dataclass(frozen=True, slots=True)
class Proof:
    """Proof in a MARK of the live rows of its rank.

    ``digests`` is nested in this order: the rank's shards in the order of HELLO; for each shard, the blocks of the
    window that have rows of it, ascending; for each block, one number per section: weights, then the states in the
    schema's order.
    """

    position: int
    width: int
    digests: str
    """The numbers, as 8 little-endian bytes each, in base64."""
    replicated: tuple[ReplicatedProof, ...] = ()
    """Proofs of tables that are dense state, on rank 0 only. Sorted by name, no name twice."""

    @classmethod
    def of(cls, window: Window, digests: Digests, replicated: Iterable[ReplicatedProof] = ()) -> Proof:
        by_name = sorted(replicated, key=lambda each: each.name)
        return cls(window.position, window.width, _text_of(digests), tuple(by_name))

    @property
    def window(self) -> Window:
        return Window(self.position, self.width)

    def numbers(self) -> Digests:
        """Return the digests, in their order."""
        return _numbers_of(self.digests)

    def check(self, what: str) -> None:
        """Refuse values that no writer makes.

        Raises:
            CorruptionError: a window outside the circle, or digests that are not whole numbers in base64.
        """
        if self.position >= POSITIONS or not 1 <= self.width <= POSITIONS:
            raise CorruptionError(f"{what}: window [{self.position}, +{self.width}) is outside [0, {POSITIONS})")
        for text in (self.digests, *(each.digests for each in self.replicated)):
            if len(data := from_base64(text, f"{what}.digests")) % 8:
                raise CorruptionError(f"{what}: digests of {len(data)} bytes are not whole numbers")
        names = [each.name for each in self.replicated]
        if names != sorted(set(names)):
            raise CorruptionError(f"{what}: replicated tables must be sorted by name, without duplicates")


def replicated_id(name: str) -> int:
    """Return the number used in place of a table's id in the digests of an entry of the dense state."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") % MAX_ID


def positions(table_id: int, blocks: Ints) -> Ints:
    """Return the positions of a table's blocks on the circle."""
    return (_reversed_bits()[blocks % POSITIONS] + table_id) % POSITIONS


def words_of(values: npt.NDArray[Any]) -> Words:
    """Return the bits of (rows, columns) elements as signed integers. 8-byte elements are two words, low half first."""
    values = np.ascontiguousarray(values)
    if values.dtype.itemsize == 8:
        return values.view("<i4")
    return values.view(f"<i{values.dtype.itemsize}")


def row_keys(table_id: int, section: int, rows: Ints) -> Ints:
    """Return the key of each global row, odd; shape (rows,)."""
    seed = mixed(np.array([table_id * 64 + section], np.uint64))
    return (mixed(rows.view(np.uint64) * GOLDEN + seed) | _ONE).view(np.int64)


def column_keys(col0: int, cols: int, words_per_element: int = 1) -> Ints:
    """Return the keys of the words of columns [col0, col0 + cols) of a row, odd; shape (cols * words_per_element,)."""
    words = np.arange(col0 * words_per_element, (col0 + cols) * words_per_element, dtype=np.uint64)
    return (mixed(words + GOLDEN) | _ONE).view(np.int64)


def per_row_keys(col0: int, cols: int, words_per_element: int = 1) -> Ints:
    """Return the keys of a state with one value per row, for the columns of its shard; shape (words_per_element,)."""
    slice_ = mixed(np.array([_PER_ROW + (col0 << 32) + cols], np.uint64))
    halves = np.arange(words_per_element, dtype=np.uint64)
    return (mixed(slice_ + halves) | _ONE).view(np.int64)


def digest_rows(words: Words, columns: Ints, rows: Ints, index: Ints | None = None) -> Ints:
    """Return one number per row: the sum of its words, each times the key of its column, times the key of the row.

    Args:
        words: Shape (n, k), from :func:`words_of`.
        columns: Keys of the columns, shape (k,).
        rows: Keys of the rows, shape (n,), or one for all of them, shape (1,).
        index: The rows of ``words`` to digest, int64; ``rows`` has their keys. None for all of them, in order.
    """
    if (sums := native_digests(words, columns, rows, index)) is not None:
        return sums
    count = len(words) if index is None else len(index)
    found: Ints = np.empty(count, np.int64)
    step = max(1, _CHUNK_BYTES // max(1, 8 * words.shape[1]))
    for begin in range(0, count, step):
        part = words[begin : begin + step] if index is None else words[index[begin : begin + step]]
        np.einsum("ij,j->i", part.astype(np.int64), columns, out=found[begin : begin + step])
    found *= rows
    return found


def native_digests(words: Words, columns: Ints, rows: Ints, index: Ints | None = None) -> Ints | None:
    """Return :func:`digest_rows` by the native kernel. None if that cannot run, or is not faster."""
    count = len(words) if index is None else len(index)
    native = kernel() if count * words.shape[1] >= _LARGE else None
    if native is None or not native.digests or not words.flags.c_contiguous or not words.flags.aligned:
        return None
    columns = np.ascontiguousarray(columns, np.int64)
    rows = np.ascontiguousarray(np.broadcast_to(rows, count), np.int64)
    chosen = None
    if index is not None:  # the kernel trusts its callers
        assert not len(index) or (int(index.min()) >= 0 and int(index.max()) < len(words))
        index = np.ascontiguousarray(index, np.int64)
        chosen = index.ctypes.data
    assert len(columns) == words.shape[1]
    sums = np.empty(count, np.int64)
    addresses = (each.ctypes.data for each in (columns, rows, sums))
    native.digest(words.ctypes.data, words.itemsize, chosen, count, words.shape[1], *addresses)
    return sums


def digest_blocks(per_row: Ints, blocks: Ints) -> Digests:
    """Sum the results of :func:`digest_rows` by block.

    Args:
        per_row: One number per row, rows ascending by block.
        blocks: Number of rows of each block, each at least one.
    """
    starts = np.cumsum(blocks) - blocks
    return np.add.reduceat(per_row, starts).view(np.uint64) if len(blocks) else np.empty(0, np.uint64)


def _text_of(digests: Digests) -> str:
    return base64.b64encode(digests.astype("<u8").tobytes()).decode("ascii")


def _numbers_of(text: str) -> Digests:
    return np.frombuffer(base64.b64decode(text), "<u8")


@cache
def _reversed_bits() -> Ints:
    """Reverse the 16 bits of each number below 65,536, so that any interval of positions is spread over a table."""
    numbers, found = np.arange(POSITIONS), np.zeros(POSITIONS, np.int64)
    for bit in range(16):
        found |= ((numbers >> bit) & 1) << (15 - bit)
    return found
