"""One live shard while it is being restored: where rows go, and which have arrived."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from torchrec_stream_ckpt.errors import CorruptionError
from torchrec_stream_ckpt.format.proof import BLOCK_ROWS
from torchrec_stream_ckpt.format.rows import Array, RowsView
from torchrec_stream_ckpt.proofs.seen_marks import NEVER, blocks_of
from torchrec_stream_ckpt.proofs.seen_marks import Places as Markers
from torchrec_stream_ckpt.restore.plan import Move
from torchrec_stream_ckpt.restore.row_writers import CastPlane, Ints, Places, Plane, RowPlane, Unwanted
from torchrec_stream_ckpt.util.types import TableShard


class Target:
    """A shard's weights and states.

    Args:
        shard: Which one.
        weights: Live, shape (rows, cols); or ``Unwanted``.
        states: Live, shape (rows,) or (rows, cols); None or ``Unwanted`` where what comes is not wanted.
        moves: All that will be made into it.
        merged: Whether states with one value a row are to be merged over column shards.
        sent: For each block with rows of the shard, the place of the newest marker that sent one; kept up to date;
            None: it is not asked for.
        numbers: For each row of the shard its row in ``weights`` and ``states``, -1: it has none there and need not
            come; None: they are the same.
        dtype: Of the weights that come, where ``weights`` has another one.
    """

    def __init__(
        self,
        shard: TableShard,
        weights: torch.Tensor | Unwanted,
        states: Sequence[torch.Tensor | Unwanted | None],
        moves: Sequence[Move],
        *,
        merged: bool,
        sent: Markers | None = None,
        numbers: Ints | None = None,
        dtype: str | None = None,
    ) -> None:
        self._shard = shard
        self._first_block, last_block = blocks_of(shard)
        self._sent = sent if sent is not None else np.full(last_block - self._first_block, -1, np.int32)
        plane = Plane if numbers is None else partial(RowPlane, rows=numbers)
        self._weights: Plane | CastPlane | Unwanted
        if isinstance(weights, Unwanted):
            self._weights = weights
        else:
            self._weights = plane(weights) if dtype is None else CastPlane(plane(weights), dtype)
        self._states = [plane(state) if isinstance(state, torch.Tensor) else state for state in states]
        self._wanted = numbers >= 0 if numbers is not None else np.True_
        self._merged = merged
        self._cuts = sorted({edge for move in moves for edge in (move.col0, move.col0 + move.cols)})
        """Columns between two cuts always arrive together."""
        self._arrived = np.zeros((max(1, len(self._cuts) - 1), shard.rows), np.bool_)
        # Row-wise state as one column shard of the source has it, kept apart until all have arrived.
        self._pieces = {(move.col0, move.cols): [np.zeros(shard.rows) for _ in states] for move in moves if merged}

    def put(self, move: Move, rows: RowsView, place: int = NEVER) -> int:
        """Put those rows that this move takes over all that came before; returns how many.

        Args:
            move: Which rows.
            rows: Of a frame.
            place: Of the marker that it was sent for; left out: it is not known.
        """
        chosen = np.flatnonzero((rows.ids >= move.row0) & (rows.ids < move.row0 + move.rows))
        if not len(chosen):
            return 0
        if len(chosen) < len(rows.ids):
            rows = RowsView(rows.ids[chosen], rows.weights[chosen], tuple(state[chosen] for state in rows.states))
        self._put(move, _places(rows.ids - self._shard.row0), rows.weights, rows.states)
        self._note_sent(rows.ids, place)
        return len(rows.ids)

    def _note_sent(self, ids: npt.NDArray[np.int64], place: int) -> None:
        """Streams come one after the other, so that an older marker may follow a newer one."""
        blocks = ids // BLOCK_ROWS - self._first_block
        self._sent[blocks] = np.maximum(self._sent[blocks], np.int32(place))

    def put_block(self, move: Move, weights: Array, states: Sequence[Array]) -> None:
        """Put all rows of a move, given in their order. Safe from several threads for different rows."""
        begin = move.row0 - self._shard.row0
        self._put(move, slice(begin, begin + move.rows), weights, states)

    def put_sorted(self, move: Move, rows: RowsView, place: int | None = None) -> int:
        """As :meth:`put`, of rows whose ids ascend. Safe from several threads for rows of different blocks.

        Args:
            move: Which rows.
            rows: Of a chunk.
            place: Of the marker that it was sent for; None: of a base.
        """
        begin, end = _between(rows.ids, move)
        if begin == end:
            return 0
        if place is not None:
            self._note_sent(rows.ids[begin:end], place)
        local = rows.ids[begin:end] - self._shard.row0
        first, last = int(local[0]), int(local[-1])
        places = slice(first, last + 1) if last - first + 1 == len(local) else local
        self._put(move, places, rows.weights[begin:end], [state[begin:end] for state in rows.states])
        return end - begin

    def takes_run(self, move: Move, first: int, rows: int) -> bool:
        """Return whether rows [first, first+rows) come with all columns of this shard, side by side in memory."""
        shard = self._shard
        inside = move.row0 <= first and first + rows <= move.row0 + move.rows
        whole = move.same_columns and (move.col0, move.cols) == (shard.col0, shard.cols)
        planes = (self._weights, *self._states)
        straight = all(plane is not None and plane.is_straight for plane in planes)
        return inside and whole and not self._merged and straight

    def run(self, first: int, rows: int) -> list[memoryview]:
        """The memory of rows that :meth:`takes_run`: weights, then states. Safe from several threads."""
        begin = first - self._shard.row0
        return [plane.run(begin, rows) for plane in (self._weights, *self._states) if plane is not None]

    def note_run(self, move: Move, first: int, rows: int) -> None:
        """Note that rows have arrived through :meth:`run`."""
        begin = first - self._shard.row0
        for cut in self._columns(move):
            self._arrived[cut][begin : begin + rows] = True

    def _put(self, move: Move, places: Places, weights: Array, states: Sequence[Array]) -> None:
        """Write rows, and note that they have arrived."""
        self._write(move, places, weights, states)
        for cut in self._columns(move):
            self._arrived[cut][places] = True

    def _columns(self, move: Move) -> range:
        """The columns of a move, by their cuts."""
        return range(bisect_left(self._cuts, move.col0), bisect_left(self._cuts, move.col0 + move.cols))

    def _write(self, move: Move, places: Places, weights: Array, states: Sequence[Array]) -> None:
        """Write rows that have all columns of the move's source."""
        here, there = move.col0 - self._shard.col0, move.col0 - move.source.col0
        columns = slice(there, there + move.cols)
        self._weights.put(places, weights[:, columns], here)
        for position, (target, source) in enumerate(zip(self._states, states, strict=True)):
            if target is None:
                continue
            if source.ndim == 2:
                target.put(places, source[:, columns], here)
            elif self._merged:
                self._pieces[move.col0, move.cols][position][places] = source
            else:
                target.put(places, source)

    def finish(self, table: str) -> None:
        """Check that every cell of a row that is wanted has come, then merge row-wise state where the plan says so.

        Row-wise Adagrad keeps, for each column shard, the sum over steps of the mean of g^2 over the
        shard's own columns. The mean of the sources, weighted by the columns that each of them gives, is
        what one shard would hold for the same gradients; a split copies the value (docs/guarantees.md).
        """
        missing = int((~self._arrived.all(0) & self._wanted).sum())
        if missing:
            shard = self._shard
            raise CorruptionError(
                f"{missing} rows of this shard are in no source", table=table, row0=shard.row0, col0=shard.col0
            )
        for position, target in enumerate(self._states):
            if self._merged and isinstance(target, Plane) and target.tensor.dim() == 1:
                # All sources have one column split: a generation that changed it has sent the table whole.
                assert sum(cols for _, cols in self._pieces) == self._shard.cols
                mean = np.zeros(self._shard.rows)
                for (_, cols), piece in self._pieces.items():
                    mean += piece[position] * (cols / self._shard.cols)
                target.take(torch.from_numpy(mean))


def _between(ids: npt.NDArray[np.int64], move: Move) -> tuple[int, int]:
    """Where the rows of a move begin and end, among ids that ascend."""
    end = move.row0 + move.rows
    if ids[0] >= move.row0 and ids[-1] < end:
        return 0, len(ids)
    first, last = np.searchsorted(ids, (move.row0, end)).tolist()
    return first, last


def _places(local: npt.NDArray[np.int64]) -> Places:
    """A slice if rows lie side by side: copying a run costs less than placing rows."""
    first, count = int(local[0]), len(local)
    is_run = int(local[-1]) - first + 1 == count and bool((local[1:] > local[:-1]).all())
    return slice(first, first + count) if is_run else local
