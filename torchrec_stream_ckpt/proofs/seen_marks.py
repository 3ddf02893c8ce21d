"""MARKs of the markers of a path as a reader reads them, and the marker that proves each block."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from torchrec_stream_ckpt.errors import CorruptionError
from torchrec_stream_ckpt.find.route import Path
from torchrec_stream_ckpt.format.control import Mark, TableScalars
from torchrec_stream_ckpt.format.entry_digests import DenseProof
from torchrec_stream_ckpt.format.frame import Header
from torchrec_stream_ckpt.format.proof import BLOCK_ROWS, POSITIONS, Digests, Ints, Proof, Window, positions
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.proofs.rowsums import Slice
from torchrec_stream_ckpt.store.reader import Told
from torchrec_stream_ckpt.util.types import MarkerId, TableShard, grouped

Places = npt.NDArray[np.int32]
"""Markers by their places on a path. -1 for no marker."""

NEVER = 2**31 - 1
"""Value instead of the place of the marker that last sent a row: the block cannot be checked."""
_ROUNDS = 2
"""Rounds of windows kept of each rank: one proves all rows, the other compensates for markers without a proof."""


@dataclass(frozen=True, slots=True)
class RankReport:
    """Report of one rank at a marker."""

    shards: tuple[TableShard, ...]
    proof: Proof | None
    dense: DenseProof | None = None


class Marks:
    """MARKs of committed markers, as one reader reads them. Only the newest rounds of windows of each rank are kept."""

    def __init__(self) -> None:
        self._said: dict[int, dict[int, RankReport]] = {}
        """Reports by place, then rank."""
        self._of_rank: dict[int, list[tuple[int, int]]] = {}
        """Rank -> (place, width), ascending."""
        self._widths: dict[int, int] = {}
        """Rank -> sum of these widths."""
        self.floor = 0
        """At places below this one, some reports were dropped."""
        self._dense: dict[int, tuple[int, DenseProof]] = {}
        """Rank -> (place, its proof of dense state). Only the newest one."""

    def dense(self, place: int) -> dict[int, DenseProof]:
        """Return the dense proofs of a marker, by rank. Only the newest place has some."""
        return {rank: proof for rank, (at, proof) in self._dense.items() if at == place}

    def add_dense(self, place: int, rank: int, proof: DenseProof | None) -> None:
        """Add the proof of dense state of ``rank`` at a marker."""
        if proof is not None and place >= self._dense.get(rank, (-1, None))[0]:
            self._dense[rank] = place, proof

    def add(self, place: int, rank: int, shards: tuple[TableShard, ...], proof: Proof | None) -> None:
        """Add the report of ``rank`` at a marker. Nothing happens if it is known.

        Raises:
            CorruptionError: The proof has more or fewer digests than its shards have.
        """
        said = self._said.setdefault(place, {})
        if rank in said:
            return
        said[rank] = RankReport(shards, proof)
        kept = self._of_rank.setdefault(rank, [])
        insort(kept, (place, width := proof.width if proof is not None else 0))
        total = self._widths.get(rank, 0) + width
        while total - kept[0][1] >= _ROUNDS * POSITIONS:
            gone, width = kept.pop(0)
            total -= width
            self.floor = max(self.floor, gone + 1)
            del self._said[gone][rank]
        self._widths[rank] = total

    def windows(self) -> dict[int, Window | None]:
        """Return the window by place.

        None if the marker proves nothing: a rank has no proof, or two have different windows.
        """
        found: dict[int, Window | None] = {}
        for place, said in self._said.items():
            if said:
                found[place] = common_window(each.proof for each in said.values())
        return found

    def at(self, place: int) -> Mapping[int, RankReport]:
        """Return the reports at a marker, by rank."""
        return self._said.get(place, {})


def common_window(proofs: Iterable[Proof | None]) -> Window | None:
    """Return the window of a marker. Returns None if a rank has no proof, or two have different windows."""
    windows = {proof.window if proof is not None else None for proof in proofs}
    return windows.pop() if len(windows) == 1 else None


def agree(windows: Iterable[Mapping[int, Window | None]], floor: int) -> dict[int, Window]:
    """Return the windows of markers that prove something, on which all readers agree.

    Args:
        windows: Windows that each reader found.
        floor: Places below it are not complete.
    """
    found = grouped(pair for each in windows for pair in each.items())
    agreed: dict[int, Window] = {}
    for place in sorted(found):
        window, *others = set(found[place])
        if window is not None and not others and place >= floor:
            agreed[place] = window
    return agreed


class SeenMarks:
    """Data that a reader of rows collects: MARKs, and the marker that last sent a row of each block."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.marks = Marks()
        self.sent: dict[TableShard, Places] = {}
        """The places of the blocks for each shard of the reader."""
        self.scalars: list[TableScalars] = []
        """The kernels' own state at the last marker, as far as it was read."""

    def begin(self, shard: TableShard, marker: MarkerId | None) -> Places:
        """Return the places of a shard's blocks. If the shard is new, they start at ``marker``.

        If ``marker`` is None, no row has arrived.
        """
        if shard not in self.sent:
            first, last = blocks_of(shard)
            self.sent[shard] = np.full(last - first, -1 if marker is None else self.path.place(marker), np.int32)
        return self.sent[shard]

    def mark(self, header: Header, shards: tuple[TableShard, ...], mark: Mark) -> None:
        """Add a MARK that was read."""
        place = self.path.place_of(header)
        if place is not None:
            self.marks.add(place, header.rank, shards, mark.proof)
            self.marks.add_dense(place, header.rank, mark.dense_proof)

    def told(self, told: Told) -> None:
        """Add the records of a store or a HEAD about markers on the path."""
        for marker, notes in told.items():
            place = self.path.place(marker)
            if place < len(self.path.chain) and self.path.chain[place] == marker:
                for rank, each in enumerate(notes):
                    self.marks.add(place, rank, each.shards, each.mark.proof)
                    self.marks.add_dense(place, rank, each.mark.dense_proof)


class Circle:
    """The marker that proved a block last, and the ones before."""

    def __init__(self, windows: Mapping[int, Window]) -> None:
        self._windows = windows
        self._newest = np.full(POSITIONS, -1, np.int32)
        for place in sorted(windows):
            self._newest[_turn(windows[place])] = place

    def newest(self, table_id: int, begin: int, end: int) -> Places:
        """Return, for each of the blocks [begin, end) of a table, the place of the newest marker that proves it.

        -1 for none.
        """
        return self._newest[positions(table_id, np.arange(begin, end, dtype=np.int64))]

    def before(self, table_id: int, block: int, place: int) -> int | None:
        """Return the newest marker before ``place`` that proves a block. Returns None if no earlier marker does."""
        at = int(positions(table_id, np.array([block], np.int64))[0])
        older = (each for each in sorted(self._windows, reverse=True) if each < place)
        return next(
            (each for each in older if (at - self._windows[each].position) % POSITIONS < self._windows[each].width),
            None,
        )


def _turn(window: Window) -> Ints:
    return np.arange(window.position, window.position + window.width, dtype=np.int64) % POSITIONS


def digests_of(said: RankReport, tables: Sequence[tuple[int | None, int]]) -> list[tuple[TableShard, Ints, Digests]]:
    """Return (shard, its blocks, digests of shape (blocks, sections)) of each shard of a rank.

    Args:
        said: A report with a proof.
        tables: (id, sections) by index.

    Raises:
        CorruptionError: The proof has more or fewer digests than its shards have.
    """
    assert said.proof is not None
    window, numbers, found = said.proof.window, said.proof.numbers(), []
    for shard in said.shards:
        id_, sections = tables[shard.table]
        blocks = window.blocks(id_, shard.row0, shard.row0 + shard.rows) if id_ is not None else np.empty(0, np.int64)
        found.append((shard, blocks, sections))
    ends = [*accumulate(len(blocks) * sections for _, blocks, sections in found)]
    if (ends[-1] if ends else 0) != len(numbers):
        raise CorruptionError(f"a proof has {len(numbers)} digests, but its shards require {ends[-1] if ends else 0}")
    parts = np.split(numbers, ends[:-1])
    return [
        (shard, blocks, part.reshape(-1, sections))
        for (shard, blocks, sections), part in zip(found, parts, strict=False)
    ]


def summed_digests(
    said: Iterable[RankReport], schema: Schema, window: Window
) -> dict[int, tuple[Ints, Digests, set[Slice]]]:
    """Return by table (blocks of the window, sums of the digests of all ranks, the column slices that they hold).

    Raises as :func:`digests_of`.
    """
    found: dict[int, tuple[Ints, Digests, set[Slice]]] = {}
    for index, spec in enumerate(schema.tables):
        if spec.id is not None:
            blocks = window.blocks(spec.id, 0, spec.rows)
            found[index] = blocks, np.zeros((len(blocks), 1 + len(spec.states)), np.uint64), set()
    tables = [(spec.id, 1 + len(spec.states)) for spec in schema.tables]
    for each in said:
        for shard, numbers, digests in digests_of(each, tables):
            if shard.table in found:
                blocks, expected, own = found[shard.table]
                own.add((shard.col0, shard.cols))
                expected[np.searchsorted(blocks, numbers)] += digests
    return found


def blocks_of(shard: TableShard) -> tuple[int, int]:
    """Return the blocks [first, end) that have rows of a shard."""
    return shard.row0 // BLOCK_ROWS, -(-(shard.row0 + shard.rows) // BLOCK_ROWS)
