"""Digests of live tables, for the proof in a MARK and for the comparison by a reader after a restore.

Rows are copied first and added up later: a cut only waits for the copy. The sums may be computed on any thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, groupby

import numpy as np
import torch

from torchrec_stream_ckpt.format.proof import (
    BLOCK_ROWS,
    Digests,
    Ints,
    Words,
    column_keys,
    digest_blocks,
    digest_rows,
    per_row_keys,
    replicated_id,
    row_keys,
    words_of,
)
from torchrec_stream_ckpt.format.rows import RowLayout
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.model import FusedKernel, LocalShard
from torchrec_stream_ckpt.util.types import TableShard

BlocksOf = Callable[[int, int, int], Ints]
"""(id of a table, first row, row after the last one) -> blocks of these rows. ``Window.blocks`` is one
such function."""

_ALIGNED = 64
_PART_ROWS = 1 << 16
"""Rows that a reader copies at a time."""
_WORDS = {1: "|i1", 2: "<i2", 4: "<i4", 8: "<i8"}


@dataclass(frozen=True, slots=True)
class TensorSection:
    """One tensor of a shard: its weights, or a state."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    """Shape of one row: its columns. Empty if there is one value per row."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSection:
        return cls(tensor.dtype, tuple(tensor.shape[1:]))

    @property
    def row_bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class BlockRows:
    """The part of some blocks that one shard has."""

    kernel: int
    """Index of the kernel on the rank. -1 for a tensor of a replicated table."""
    position: int
    """Index of the shard in the kernel, or of the tensor."""
    id: int
    """Id of the table."""
    row0: int
    """First global row of the shard."""
    col0: int
    cols: int
    sections: tuple[TensorSection, ...]
    """Weights, followed by states in the schema's order."""
    blocks: Ints
    """Block numbers, ascending."""
    counts: Ints
    """Number of rows of each block that the shard has."""
    rows: torch.Tensor
    """Local rows, int64, on a CPU. Pinned if the shard is on a GPU."""


@dataclass(frozen=True, slots=True)
class ShardDigests:
    """Digests of one live shard's part of some blocks."""

    shard: TableShard
    blocks: Ints
    """Ascending, shape (n,)."""
    digests: Digests
    """Shape (n, sections): weights first, then states in the schema's order."""


def pieces_of(kernels: Sequence[FusedKernel], schema: Schema, blocks_of: BlocksOf) -> list[BlockRows]:
    """Return this rank's part of some blocks: a piece for each shard in HELLO, in its order.

    Args:
        kernels: All kernels of this rank.
        schema: Schema of a generation, whose tables have ids.
        blocks_of: Chooses the blocks.
    """
    return [
        _shard_piece(kernels, number, position, id_, blocks_of(id_, shard.row0, shard.row0 + shard.rows))
        for number, position, shard, id_ in _held(kernels, schema)
    ]


def _held(kernels: Sequence[FusedKernel], schema: Schema) -> Iterator[tuple[int, int, LocalShard, int]]:
    """Yield (index of the kernel, index of the shard in it, the shard, id of its table) of each shard in HELLO."""
    ids = {table.name: table.id for _, table in schema.live}
    for number, kernel in enumerate(kernels):
        for position, shard in enumerate(kernel.shards):
            if shard.rows and shard.cols:
                id_ = ids.get(shard.table.name)
                if id_ is None:  # changed since the marker: no proof covers its rows
                    continue
                yield number, position, shard, id_


def _shard_piece(kernels: Sequence[FusedKernel], number: int, position: int, id_: int, blocks: Ints) -> BlockRows:
    kernel = kernels[number]
    shard = kernel.shards[position]
    counts, rows = _rows_of(blocks, shard.row0, shard.rows)
    if kernel.device.type == "cuda":
        rows = rows.pin_memory()
    sections = tuple(
        TensorSection(getattr(torch, each.dtype), () if each.per_row else (each.width,))
        for each in RowLayout.of(shard.table, shard.cols).sections[1:]
    )
    return BlockRows(number, position, id_, shard.row0, shard.col0, shard.cols, sections, blocks, counts, rows)


def replicated_piece(name: str, tensor: torch.Tensor, position: int, blocks: Ints) -> BlockRows:
    """Return the piece of one tensor of a replicated table.

    Args:
        name: Its entry in the dense state.
        tensor: Shape (rows,) or (rows, columns).
        position: Index among the replicated tensors.
        blocks: Blocks, ascending.
    """
    counts, rows = _rows_of(blocks, 0, len(tensor))
    id_ = replicated_id(name)
    return BlockRows(-1, position, id_, 0, 0, columns_of(tensor), (TensorSection.of(tensor),), blocks, counts, rows)


def columns_of(tensor: torch.Tensor) -> int:
    """Return the number of columns. 1 if there is one value per row."""
    return tensor.shape[1] if tensor.dim() == 2 else 1


def _rows_of(blocks: Ints, row0: int, rows: int) -> tuple[Ints, torch.Tensor]:
    """Return (number of rows of each block in a shard, all of these as local rows)."""
    begins = np.maximum(blocks * BLOCK_ROWS, row0)
    counts = np.minimum((blocks + 1) * BLOCK_ROWS, row0 + rows) - begins
    ends = np.cumsum(counts)
    local = np.arange(ends[-1] if len(ends) else 0) + np.repeat(begins - row0 - (ends - counts), counts)
    return counts, torch.from_numpy(local)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of one tensor, and the data that identifies them in their digest."""

    piece: BlockRows
    section: int
    per_row: bool
    values: Words
    """Bits of the elements, shape (rows, columns)."""
    in_place: bool
    """True if these are all rows of the live tensor, and not copies of those of the piece."""

    def digests(self) -> Digests:
        piece = self.piece
        words = words_of(self.values)
        per_element = words.shape[1] // self.values.shape[1]
        keys = per_row_keys if self.per_row else column_keys
        columns = keys(piece.col0, piece.cols, per_element)
        rows = row_keys(piece.id, self.section, piece.rows.numpy() + piece.row0)
        return digest_blocks(
            digest_rows(words, columns, rows, piece.rows.numpy() if self.in_place else None), piece.counts
        )


class Room:
    """Memory for copied rows, reused.

    Args:
        pinned: Pinned memory, for a GPU.
        touched: Write all of it when it is allocated, so that a later copy waits for no page of memory: for a cut,
            which stops the training.
    """

    def __init__(self, *, pinned: bool, touched: bool) -> None:
        self._pinned = pinned
        self._allocate = torch.zeros if touched else torch.empty
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.targets: list[list[torch.Tensor]] = []
        """For each piece, the target of each of its sections."""

    def reserve(self, pieces: Sequence[BlockRows]) -> None:
        """Create targets for these pieces, in the memory of the previous ones."""
        sizes = [piece.rows.numel() * section.row_bytes for piece in pieces for section in piece.sections]
        begins = [0, *accumulate(-(-size // _ALIGNED) * _ALIGNED for size in sizes)]
        if self._memory.numel() < begins[-1]:
            more = begins[-1] + begins[-1] // 8  # windows differ slightly
            self._memory = self._allocate(more, dtype=torch.uint8, device="cpu", pin_memory=self._pinned)
        places = iter(zip(begins, sizes, strict=False))
        self.targets = [
            [self._target(*next(places), piece.rows.numel(), section) for section in piece.sections] for piece in pieces
        ]

    def _target(self, begin: int, size: int, rows: int, section: TensorSection) -> torch.Tensor:
        return self._memory[begin : begin + size].view(section.dtype).view(rows, *section.shape)


class SplitTensors:
    """Live views of the shards of some kernels. FBGEMM splits all of a kernel at once, however few are needed.

    Keep this object as long as the tables do not move: a split per shard takes time quadratic in the number of tables.
    """

    def __init__(self, kernels: Sequence[FusedKernel]) -> None:
        self._kernels = kernels
        self._found: dict[int, tuple[list[torch.Tensor], list[tuple[torch.Tensor, ...]]]] = {}

    def of(self, number: int) -> tuple[list[torch.Tensor], list[tuple[torch.Tensor, ...]]]:
        """Return (weights, states) of all shards of a kernel."""
        if number not in self._found:
            kernel = self._kernels[number]
            self._found[number] = kernel.weights(), kernel.states()
        return self._found[number]


class CopiedRows:
    """Copies of the live rows of some pieces. On a GPU they may be in flight.

    Create this on the training thread, at a moment when no thread writes rows. All other methods may run on any thread.

    Args:
        kernels: All kernels of this rank.
        pieces: Pieces of ``kernels`` and of ``replicated``.
        replicated: Tensors of replicated tables, by the position of their pieces.
        room: Memory for the copies.
        split: Views of the shards, if they were split before.
    """

    @torch.no_grad()
    def __init__(
        self,
        kernels: Sequence[FusedKernel],
        pieces: Sequence[BlockRows],
        replicated: Sequence[torch.Tensor],
        room: Room,
        split: SplitTensors | None = None,
    ) -> None:
        split = split or SplitTensors(kernels)
        self._copies: list[tuple[BlockRows, list[torch.Tensor]]] = list(zip(pieces, room.targets, strict=True))
        self._waits: list[tuple[torch.device, torch.cuda.Event]] = []
        for number, group in groupby(self._copies, lambda copy: copy[0].kernel):
            if number < 0:
                self._copy_replicated(group, replicated)
            else:
                self._copy_kernel(kernels[number], group, *split.of(number))

    def _copy_kernel(
        self,
        kernel: FusedKernel,
        copies: Iterable[tuple[BlockRows, list[torch.Tensor]]],
        weights: Sequence[torch.Tensor],
        states: Sequence[tuple[torch.Tensor, ...]],
    ) -> None:
        with kernel.order.reading():
            for piece, (first, *others) in copies:
                at = piece.position
                _copy(weights[at], piece.rows, first, partial(kernel.newest, at))
                for state, target in zip(states[at], others, strict=True):
                    _copy(state, piece.rows, target)
            self._note(kernel.device)

    def _copy_replicated(
        self, copies: Iterable[tuple[BlockRows, list[torch.Tensor]]], tensors: Sequence[torch.Tensor]
    ) -> None:
        for piece, (target,) in copies:
            source = tensors[piece.position]
            _copy(source, piece.rows, target)
            self._note(source.device)

    def _note(self, device: torch.device) -> None:
        """(GPU) Record an event after the copies so far on the current stream."""
        if device.type == "cuda":
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(device))
            self._waits.append((device, event))

    def digests(self) -> Iterator[tuple[BlockRows, Digests]]:
        """Yield (piece, digests of shape (blocks, sections)) of each piece. Waits for copies from a device."""
        for device, event in self._waits:
            with torch.cuda.device(device):  # the waiting thread has not selected a device
                event.synchronize()
        for piece, copies in self._copies:
            yield piece, _summed(piece, copies)


def _summed(piece: BlockRows, sections: Iterable[torch.Tensor], *, in_place: bool = False) -> Digests:
    """Return the digests of the rows of a piece, given for each of its sections; ``in_place`` as in :class:`_Rows`."""
    columns = [
        _Rows(piece, number, number > 0 and rows.dim() == 1, _bits(rows), in_place).digests()
        for number, rows in enumerate(sections)
    ]
    return np.stack(columns, 1)


@torch.no_grad()
def _in_place(
    kernels: Sequence[FusedKernel],
    piece: BlockRows,
    replicated: Sequence[torch.Tensor],
    split: SplitTensors | None,
) -> list[torch.Tensor] | None:
    """Return the live tensors of a piece. None if they are on a GPU, or their rows do not lie one after the other."""
    if piece.kernel < 0:
        tensors = [replicated[piece.position]]
    else:
        assert split is not None
        weights, states = split.of(piece.kernel)
        tensors = [weights[piece.position], *states[piece.position]]
    return None if any(each.is_cuda or not each.is_contiguous() for each in tensors) else tensors


def _copy(
    source: torch.Tensor,
    rows: torch.Tensor,
    target: torch.Tensor,
    newest: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = lambda _, values: values,
) -> None:
    if source.is_cuda:
        there = rows.to(source.device, non_blocking=True)
        target.copy_(newest(there, source.index_select(0, there)), non_blocking=True)
    else:
        torch.index_select(source, 0, rows, out=target)


def _bits(values: torch.Tensor) -> Words:
    """Return the bits of values of any dtype, shape (rows, columns)."""
    flat = values.reshape(-1).view(torch.uint8).numpy()
    return flat.view(_WORDS[values.element_size()]).reshape(len(values), columns_of(values))


def digests(kernels: Sequence[FusedKernel], schema: Schema, blocks_of: BlocksOf) -> Iterator[ShardDigests]:
    """Yield digests of the live rows of some blocks, shard by shard in the order of HELLO.

    On a GPU the host waits. On a CPU rows are read in place, so no other thread may write rows meanwhile.

    Args:
        kernels: All kernels of this rank.
        schema: Schema of a generation, whose tables have ids.
        blocks_of: Chooses the blocks, for example ``window.blocks``.
    """
    index, split = schema.index(), SplitTensors(kernels)
    room = Room(pinned=any(kernel.device.type == "cuda" for kernel in kernels), touched=False)
    for number, position, shard, id_ in _held(kernels, schema):
        blocks = blocks_of(id_, shard.row0, shard.row0 + shard.rows)
        pieces = map(partial(_shard_piece, kernels, number, position, id_), _parts(blocks))
        found = [np.empty((0, 1 + len(shard.table.states)), np.uint64), *_digested(kernels, pieces, (), room, split)]
        yield ShardDigests(shard.table_shard(index), blocks, np.concatenate(found))


def replicated_digests(name: str, tensor: torch.Tensor, blocks_of: BlocksOf) -> tuple[Ints, Digests]:
    """Return (blocks, one digest for each) of a live tensor of a replicated table, as :func:`digests`."""
    blocks = blocks_of(replicated_id(name), 0, len(tensor))
    pieces = map(partial(replicated_piece, name, tensor, 0), _parts(blocks))
    room = Room(pinned=tensor.is_cuda, touched=False)
    found = [np.empty((0, 1), np.uint64), *_digested((), pieces, (tensor,), room)]
    return blocks, np.concatenate(found)[:, 0]


def _parts(blocks: Ints) -> Iterator[Ints]:
    """Split blocks into parts, so that neither their rows nor the copies take much memory."""
    step = _PART_ROWS // BLOCK_ROWS
    return (blocks[begin : begin + step] for begin in range(0, len(blocks), step))


def _digested(
    kernels: Sequence[FusedKernel],
    pieces: Iterable[BlockRows],
    replicated: Sequence[torch.Tensor],
    room: Room,
    split: SplitTensors | None = None,
) -> Iterator[Digests]:
    for piece in pieces:
        if (sections := _in_place(kernels, piece, replicated, split)) is not None:
            yield _summed(piece, sections, in_place=True)
            continue
        room.reserve([piece])
        for _, found in CopiedRows(kernels, [piece], replicated, room, split).digests():
            yield found
