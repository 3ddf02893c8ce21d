"""Restore runs of rows from a store in a folder: read straight to where they belong, and checked there.

A base's chunks hold rows that lie side by side in a table as well. Reading them by way of a map would cost page faults
and a second pass over memory, twice the time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import torch
from crc32c import crc32c

from torchrec_stream_ckpt.errors import CorruptionError
from torchrec_stream_ckpt.format.frame import aligned
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.format.segment import ChunkEntry, chunk_layout, entries_of, slices_of
from torchrec_stream_ckpt.restore.plan import RestorePlan
from torchrec_stream_ckpt.restore.reshard import Columns, Move, by_slice
from torchrec_stream_ckpt.restore.target import Target
from torchrec_stream_ckpt.store.api import ReadsInto
from torchrec_stream_ckpt.store.catalog import Picked, Piece
from torchrec_stream_ckpt.types import TableShard

THREADS_AT_LEAST = 4
"""A disk is asked for more than one thing at a time."""


def read_runs(
    plan: RestorePlan, objects: ReadsInto, targets: Mapping[TableShard, Target]
) -> tuple[int, tuple[Piece, ...]]:
    """Write what of the base can be read straight into the targets; before anything else of the store.

    Returns:
        How many row records were written, and what is left to read.

    Raises:
        CorruptionError: the store is damaged.
    """
    runs: list[tuple[str, ChunkEntry, Move]] = []
    moves = by_slice(plan.cold)
    alone = _alone([picked for piece in plan.stored if piece.start is None for picked in piece.opened])

    def take(picked: Picked) -> Picked:
        taken = list(_runs(picked.only(alone[picked.ref.name]), moves, targets))
        runs.extend((picked.ref.name, entry, move) for _, entry, move in taken)
        return picked.only(~np.isin(picked.chunks, [number for number, _, _ in taken]))

    left = [piece.only(take) if piece.start is None else piece for piece in plan.stored]

    def copy(run: tuple[str, ChunkEntry, Move]) -> int:
        name, entry, move = run
        _copy(objects, plan.schema, name, entry, targets[move.target], move)
        return entry.rows

    with ThreadPoolExecutor(max(THREADS_AT_LEAST, torch.get_num_threads()), "stream-ckpt-restore") as pool:
        return sum(pool.map(copy, runs)), tuple(piece for piece in left if piece.opened)


def _alone(base: Sequence[Picked]) -> dict[str, npt.NDArray[np.bool_]]:
    """Find the chunks that have no id in common with another chunk of the base, as far as ranges tell; by segment.

    Parts of an interval may each hold a version of a row, and the last one counts: these are put in their order.
    """
    if not base:
        return {}
    entries = np.concatenate([each.entries for each in base])
    order = np.lexsort(tuple(entries[name] for name in ("first", "cols", "col0", "table")))
    entries, shared = entries[order], np.zeros(len(order), np.bool_)
    for place in slices_of(entries).values():
        first, last, here = entries["first"][place], entries["last"][place], shared[place]
        here[1:] |= first[1:] <= np.maximum.accumulate(last)[:-1]
        here[:-1] |= first[1:] <= last[:-1]
    alone = np.empty_like(shared)
    alone[order] = ~shared
    ends = np.cumsum([len(each.chunks) for each in base])
    return dict(zip((each.ref.name for each in base), np.split(alone, ends[:-1]), strict=True))


def _runs(
    picked: Picked, moves: Mapping[Columns, Sequence[Move]], targets: Mapping[TableShard, Target]
) -> Iterator[tuple[int, ChunkEntry, Move]]:
    """(number in the directory, entry, move) of chunks whose rows lie side by side in one target as well."""
    for number, entry in zip(picked.chunks.tolist(), entries_of(picked.entries), strict=True):
        if entry.last - entry.first + 1 != entry.rows:
            continue
        wanted = [
            move
            for move in moves.get((entry.table, entry.col0, entry.cols), ())
            if move.row0 <= entry.last and entry.first < move.row0 + move.rows
        ]
        if len(wanted) == 1 and targets[wanted[0].target].takes_run(wanted[0], entry.first, entry.rows):
            yield number, entry, wanted[0]


def _copy(objects: ReadsInto, schema: Schema, name: str, entry: ChunkEntry, target: Target, move: Move) -> None:
    """Read one chunk, its ids aside and its rows in place, and compare what has come with its checksum."""
    layout = chunk_layout(entry, schema, name)
    ids = np.empty(entry.rows, np.int64)
    sections = [ids.view(np.uint8).data, *target.run(entry.first, entry.rows)]
    assert [len(each) for each in sections] == [entry.rows * section.row_bytes for section in layout.sections]
    buffers = [each for section in sections for each in (section, _padding(len(section)))]
    objects.read_into(name, entry.offset, buffers)
    crc = 0
    for buffer in buffers:
        crc = crc32c(buffer, crc)
    if crc != entry.crc:
        raise CorruptionError("chunk's checksum does not match", name=name, offset=str(entry.offset))
    if not np.array_equal(ids, np.arange(entry.first, entry.last + 1)):
        raise CorruptionError("chunk's ids are not those that the directory names", name=name, offset=str(entry.offset))
    target.note_run(move, entry.first, entry.rows)


def _padding(num_bytes: int) -> memoryview:
    return memoryview(bytearray(aligned(num_bytes) - num_bytes))
