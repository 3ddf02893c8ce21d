"""Proofs of the markers of a generation: each covers a window of live rows, one after the other around the circle.

A cut copies the rows of the window, which were chosen ahead. The thread that writes the frame adds them up later. The
window moves on once the marker is committed: a marker that was given up proves nothing.
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
"""Live tensors of replicated tables, by their entry in the dense state."""

_TEXT_BYTES = MAX_FRAME_BYTES // 4
"""Approximate limit of the digests in a MARK, in bytes. A MARK is one frame and has other content, too."""
_NUMBER_BYTES = 8 * 4 / 3
"""Bytes of one digest in base64."""


@dataclass(frozen=True, slots=True)
class Load:
    """Amount of data that one rank has to prove."""

    num_bytes: int
    """Bytes of weights and states."""
    numbers: int
    """Number of digests of all data."""

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
    """Return the width of the windows of all ranks.

    Args:
        loads: Load of each rank.
        proof_bytes: Bytes of rows that a rank reads for a marker.
    """
    heaviest = max(1, *(load.num_bytes for load in loads))
    most = max(1, *(load.numbers for load in loads))
    by_text = int(POSITIONS * _TEXT_BYTES / (most * _NUMBER_BYTES))
    return max(1, min(POSITIONS, POSITIONS * proof_bytes // heaviest, by_text))


def _blocks(rows: int) -> int:
    return -(-rows // BLOCK_ROWS)


def _row_bytes(table: TableSpec, cols: int) -> int:
    """Bytes of a row without its id."""
    layout = RowLayout.of(table, cols)
    return layout.row_bytes - layout.sections[0].row_bytes


@dataclass(frozen=True, slots=True)
class _Prepared:
    """The next window, with its rows chosen."""

    window: Window
    pieces: tuple[BlockRows, ...]
    """Pieces of shards, in the order of HELLO, followed by those of replicated tensors."""
    replicated: Tensors
    """Replicated tensors that existed when the window was prepared."""
    room: Room
    """Memory for the rows."""

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
    """The rows of a window as they were at a cut. Usable on any thread, but on one at a time.

    Args:
        prepared: The window and its rows.
        copied: Copies of the rows.
        give_back: Gets the room once the copies are no longer needed.
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
        """Return a proof of the final length, with all digests zero. Never waits."""
        return self._prepared.proof(
            [np.zeros((len(piece.blocks), len(piece.sections)), np.uint64) for piece in self._prepared.pieces]
        )

    def proof(self) -> Proof:
        """Return the proof. Waits for copies from a device. The sums are computed once."""
        if self._copied is not None:
            self._proof = self._prepared.proof([numbers for _, numbers in self._copied.digests()])
            self._copied = None
            self._give_back(self._prepared.room)
        assert self._proof is not None
        return self._proof


class Prover:
    """Takes the windows of one generation on one rank. The training thread takes, the commit thread moves the window.

    Args:
        kernels: All kernels of this rank.
        schema: Schema of the CLAIM, with ids.
        replicated: Returns the tensors that this rank proves in addition to its kernels. Called only on the training
            thread.
        window: The first window. Its width is the same for all windows on all ranks.
    """

    def __init__(self, kernels: Sequence[FusedKernel], schema: Schema, replicated: Replicated, window: Window) -> None:
        self._kernels, self._schema, self._replicated = kernels, schema, replicated
        self._device = kernels[0].device if kernels else torch.device("cpu")
        self.window = window
        """The next window."""
        self._committed = 0
        self._tensors = replicated()
        self._spare: Room | None = None
        """A room whose rows have been added up."""
        self._ready: _Prepared | None = self._prepare()

    @property
    def proved(self) -> Proved:
        """Rows proved by the committed markers of this generation. Thread-safe."""
        return Proved.by(self.window.width, self._committed)

    def take(self) -> Taken:
        """(training thread, while no code writes rows) Copy the rows of the window in their current state."""
        self._tensors = self._replicated()
        ready, self._ready = self._ready, None
        if ready is None or not ready.fits(self._tensors):  # an optimizer has created its state
            ready = self._prepare()
        copied = CopiedRows(self._kernels, ready.pieces, list(self._tensors.values()), ready.room)
        return Taken(ready, copied, self._take_back)

    def settled(self, window: Window, *, committed: bool) -> None:
        """(commit thread) Choose the rows of the next window ahead of its cut. The marker of ``window`` is decided."""
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
            room, self._spare = self._spare or Room(pinned=self._device.type == "cuda", touched=True), None
            room.reserve(pieces)
        return _Prepared(self.window, tuple(pieces), dict(self._tensors), room)

    def _take_back(self, room: Room) -> None:
        """(publisher thread) Keep a room for reuse."""
        self._spare = room

    def _on_device(self) -> AbstractContextManager[object]:
        """(GPU) Allocate pinned memory on the tables' GPU, whatever thread asks for it."""
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()
