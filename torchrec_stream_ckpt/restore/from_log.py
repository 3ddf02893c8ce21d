"""Restore rows from the log.

Frames are read in order, checked by one set of threads and written by another. Each table always has the same writing
thread. The log holds a row as often as it was sent, and the last copy counts. So the frames of one table are written in
order, and those of different tables in parallel.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from torchrec_stream_ckpt.format.control import TableScalars
from torchrec_stream_ckpt.format.frame import Header, Kind
from torchrec_stream_ckpt.format.interval import Interval
from torchrec_stream_ckpt.format.rows import RowsView, decode_rows
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.log.api import LogReader
from torchrec_stream_ckpt.log.stream import check_hello, checked_payload, read_mark, read_stream
from torchrec_stream_ckpt.proofs.seen_marks import Met
from torchrec_stream_ckpt.restore.plan import Move, RestorePlan, by_slice
from torchrec_stream_ckpt.restore.target import Target
from torchrec_stream_ckpt.util.failpoints import failpoint
from torchrec_stream_ckpt.util.types import MarkerId, TableShard

BATCH_BYTES = 8 * 2**20
BATCH_FRAMES = 64
BATCHES = 8
"""Number of batches to read ahead of the batch that is waited for."""
THREADS_AT_LEAST = 2
"""Minimum number of threads: one checks while another writes, whatever number torch uses for one operation."""


@dataclass(frozen=True, slots=True)
class _Frame:
    """A frame of rows, with the moves that take rows of it."""

    interval: Interval
    header: Header
    data: memoryview
    moves: Sequence[Move]
    place: int
    """Position in the path of the marker that the frame was sent for."""


def apply_log(
    plan: RestorePlan, log: LogReader, targets: Mapping[TableShard, Target], met: Met
) -> tuple[int, list[TableScalars]]:
    """Write the rows of ``plan.reads`` into the targets, and add the MARKs that are read to ``met``.

    Memory: ``BATCHES`` + 1 batches of frames if the log is not a directory.

    Returns:
        Number of row records that were written, and the kernels' own state at the plan's marker.

    Raises:
        CorruptionError: the log is damaged or incomplete.
    """
    scalars: list[TableScalars] = []
    placed: deque[Future[int]] = deque()
    applied = 0
    with ExitStack() as stack:
        threads = max(THREADS_AT_LEAST, torch.get_num_threads())
        checkers = stack.enter_context(ThreadPoolExecutor(threads, "stream-ckpt-check"))
        lanes = [stack.enter_context(ThreadPoolExecutor(1, "stream-ckpt-place")) for _ in range(threads)]
        for batch in _batches(_frames(plan, log, scalars, met)):
            checked = checkers.submit(_check, plan.schema, batch)
            for number, lane in enumerate(lanes):
                mine = [at for at, frame in enumerate(batch) if frame.header.table % threads == number]
                if mine:
                    placed.append(lane.submit(_place, batch, checked, mine, targets))
            while len(placed) > BATCHES * threads:
                applied += placed.popleft().result()
        applied += sum(each.result() for each in placed)
    return applied, scalars


def _frames(plan: RestorePlan, log: LogReader, scalars: list[TableScalars], met: Met) -> Iterator[_Frame]:
    """Yield the frames with rows for this rank, oldest first; add the kernel state in the last MARK to ``scalars``."""
    for read in plan.reads:
        interval = read.interval
        moves = by_slice(read.moves)
        for header, data in read_stream(log, interval.commit, interval.end, interval.after):
            if header.kind is Kind.ROWS:
                wanted = moves.get((header.table, header.col0, header.cols))
                if wanted:
                    yield _Frame(
                        interval, header, data, wanted, met.path.place(MarkerId(header.generation, header.marker))
                    )
            elif header.kind is Kind.MARK and met.path.place_of(header) is not None:
                mark = read_mark(header, data, interval.commit, interval.end)
                met.mark(header, read.shards, mark)
                if header.seq == interval.end.frames - 1 and interval.commit.id == plan.marker:
                    scalars += mark.scalars
            elif header.kind is Kind.HELLO:
                check_hello(header, data, interval.claim, interval.commit, interval.end)


def _batches(frames: Iterator[_Frame]) -> Iterator[list[_Frame]]:
    batch: list[_Frame] = []
    num_bytes = 0
    for frame in frames:
        batch.append(frame)
        num_bytes += len(frame.data)
        if num_bytes >= BATCH_BYTES or len(batch) == BATCH_FRAMES:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch


def _check(schema: Schema, batch: Sequence[_Frame]) -> list[RowsView]:
    return [
        decode_rows(
            frame.header,
            checked_payload(frame.header, frame.data, frame.interval.commit, frame.interval.end),
            schema.tables[frame.header.table],
        )
        for frame in batch
    ]


@torch.no_grad()
def _place(
    batch: Sequence[_Frame],
    checked: Future[list[RowsView]],
    numbers: Sequence[int],
    targets: Mapping[TableShard, Target],
) -> int:
    """Wait until a batch is checked, then write the rows of the frames of one lane."""
    rows = checked.result()
    applied = 0
    for number in numbers:
        applied += sum(
            targets[move.target].put(move, rows[number], batch[number].place) for move in batch[number].moves
        )
        failpoint("restore.frame")
    return applied
