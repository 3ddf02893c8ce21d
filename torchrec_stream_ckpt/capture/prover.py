"""What the markers of a generation prove: a window of live rows each, one after the other around the circle.

A cut copies the rows of the window, which were chosen ahead; they are added up later, on the thread that writes the
frame. The window moves on once the marker is committed: a marker that was given up proves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from torchrec_stream_ckpt.format.frame import MAX_FRAME_BYTES
from torchrec_stream_ckpt.format.proof import (
    BLOCK_ROWS,
    POSITIONS,
    Digests,
    Proof,
    Proved,
    ReplicatedProof,
    Window,
    replicated_id,
)
from torchrec_stream_ckpt.format.rows import RowLayout
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.model import FusedKernel
from torchrec_stream_ckpt.model.proving import BlockRows, CopiedRows, Room, pieces_of, replicated_piece
from torchrec_stream_ckpt.util.types import TableSpec

Tensors = Mapping[str, torch.Tensor]
Replicated = Callable[[], Tensors]
"""Live tensors of replicated tables, by their entries in the dense state."""

_TEXT_BYTES = MAX_FRAME_BYTES // 4
"""What the digests of a MARK take at most, about: it is one frame, with other things in it."""
_NUMBER_BYTES = 8 * 4 / 3
"""What one digest takes in base64."""


@dataclass(frozen=True, slots=True)
class Load:
    """What one rank has to prove."""

    num_bytes: int
    """Of weights and states."""
    numbers: int
    """Digests of all of it."""

    @classmethod
    def of(cls, kernels: Sequence[FusedKernel], replicated: Tensors) -> Load:
        shards = [shard for kernel in kernels for shard in kernel.held]
        num_bytes = sum(shard.rows * _row_bytes(shard.table, shard.cols) for shard in shards)
        numbers = sum(_blocks(shard.rows) * (1 + len(shard.table.states)) for shard in shards)
        tensors = replicated.values()
        return cls(
            num_bytes + sum(tensor.nbytes for tensor in tensors),
            numbers + sum(_blocks(len(tensor)) for tensor in tensors),
        )


def window_width(loads: Collection[Load], proof_bytes: int) -> int:
    """How wide the windows of all ranks are.

    Args:
        loads: Of each rank.
        proof_bytes: How many bytes of rows a rank reads for a marker.
    """
    heaviest = max(1, *(load.num_bytes for load in loads))
    most = max(1, *(load.numbers for load in loads))
    by_text = int(POSITIONS * _TEXT_BYTES / (most * _NUMBER_BYTES))
    return max(1, min(POSITIONS, POSITIONS * proof_bytes // heaviest, by_text))


def _blocks(rows: int) -> int:
    return -(-rows // BLOCK_ROWS)


def _row_bytes(table: TableSpec, cols: int) -> int:
    """Without the id."""
    layout = RowLayout.of(table, cols)
    return layout.row_bytes - layout.sections[0].row_bytes


@dataclass(frozen=True, slots=True)
class _Prepared:
    """The next window, its rows chosen."""

    window: Window
    pieces: tuple[BlockRows, ...]
    """Of shards, in the order of HELLO, then of replicated tensors."""
    replicated: Tensors
    """Those that were there."""
    room: Room
    """Where the rows go."""

    def fits(self, replicated: Tensors) -> bool:
        """Return whether these are the same tensors, by name and shape."""
        here, there = ({name: tensor.shape for name, tensor in each.items()} for each in (self.replicated, replicated))
        return list(here.items()) == list(there.items())

    def proof(self, digests: Sequence[Digests]) -> Proof:
        """Build the proof that MARK carries, from the numbers of each piece."""
        of_shards = [np.empty(0, np.uint64)]
        of_replicated = []
        names = list(self.replicated)
        for piece, numbers in zip(self.pieces, digests, strict=True):
            if piece.kernel >= 0:
                of_shards.append(numbers.ravel())
            else:
                name = names[piece.position]
                rows = len(self.replicated[name])
                of_replicated.append(ReplicatedProof.of(name, rows, piece.cols, numbers.ravel()))
        return Proof.of(self.window, np.concatenate(of_shards), of_replicated)


class Taken:
    """The rows of a window as they were at a cut. For any thread, but one at a time.

    Args:
        prepared: Which rows.
        copied: Their copies.
        give_back: Gets the room once the copies are not needed any longer.
    """

    def __init__(self, prepared: _Prepared, copied: CopiedRows, give_back: Callable[[Room], None]) -> None:
        self._prepared = prepared
        self._copied: CopiedRows | None = copied
        self._give_back = give_back
        self._proof: Proof | None = None

    @property
    def window(self) -> Window:
        return self._prepared.window

    def blank(self) -> Proof:
        """As long as the proof will be, without a digest in it. Waits for nothing."""
        return self._prepared.proof(
            [np.zeros((len(piece.blocks), len(piece.sections)), np.uint64) for piece in self._prepared.pieces]
        )

    def proof(self) -> Proof:
        """The digests. Waits for copies from a device; adds up once."""
        if self._copied is not None:
            self._proof = self._prepared.proof([numbers for _, numbers in self._copied.digests()])
            self._copied = None
            self._give_back(self._prepared.room)
        assert self._proof is not None
        return self._proof


class Prover:
    """Takes the windows of one generation on one rank. The training thread takes, the commit thread moves on.

    Args:
        kernels: All of this rank.
        schema: That of the CLAIM, with ids.
        replicated: What this rank proves beside its kernels; asked on the training thread alone.
        window: The first one. Its width is that of all, on all ranks.
    """

    def __init__(self, kernels: Sequence[FusedKernel], schema: Schema, replicated: Replicated, window: Window) -> None:
        self._kernels, self._schema, self._replicated = kernels, schema, replicated
        self._device = kernels[0].device if kernels else torch.device("cpu")
        self.window = window
        """The next one."""
        self._committed = 0
        self._tensors = replicated()
        self._spare: Room | None = None
        """A room whose rows were added up."""
        self._ready: _Prepared | None = self._prepare()

    @property
    def proved(self) -> Proved:
        """What the committed markers of this generation prove; on any thread."""
        return Proved.by(self.window.width, self._committed)

    def take(self) -> Taken:
        """(training thread, while nothing writes rows) Copy the rows of the window as they are now."""
        self._tensors = self._replicated()
        ready, self._ready = self._ready, None
        if ready is None or not ready.fits(self._tensors):  # an optimizer has made its state
            ready = self._prepare()
        copied = CopiedRows(self._kernels, ready.pieces, list(self._tensors.values()), ready.room)
        return Taken(ready, copied, self._take_back)

    def settled(self, window: Window, *, committed: bool) -> None:
        """(commit thread) The marker with this window is decided: choose the rows of the next one, ahead of its cut."""
        if committed:
            self._committed += 1
            self.window = window.following
        self._ready = self._prepare()

    def _prepare(self) -> _Prepared:
        with self._on_device():
            pieces = pieces_of(self._kernels, self._schema, self.window.blocks)
            for position, (name, tensor) in enumerate(self._tensors.items()):
                blocks = self.window.blocks(replicated_id(name), 0, len(tensor))
                pieces.append(replicated_piece(name, tensor, position, blocks))
            room, self._spare = self._spare or Room(pinned=self._device.type == "cuda"), None
            room.reserve(pieces)
        return _Prepared(self.window, tuple(pieces), dict(self._tensors), room)

    def _take_back(self, room: Room) -> None:
        """(publisher thread)"""
        self._spare = room

    def _on_device(self) -> AbstractContextManager[object]:
        """(GPU) Pinned memory belongs to the tables' GPU, whatever thread asks for it."""
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()
