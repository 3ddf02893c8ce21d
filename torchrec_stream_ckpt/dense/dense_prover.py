"""Digests of the dense state that a rank saves, made of the live objects at a cut: what its MARK proves.

They are never made of the copy that is saved: what changes on the way from there to a restored job is found by them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor, Replicate

from torchrec_stream_ckpt.dense.dense_digests import digests
from torchrec_stream_ckpt.format.entry_digests import PAIR_BYTES, bytes_digest, is_blob
from torchrec_stream_ckpt.format.frame import MAX_FRAME_BYTES

Tensors = Mapping[str, torch.Tensor]
"""By entry."""

MAX_ENTRIES = int(MAX_FRAME_BYTES // 4 / PAIR_BYTES)
"""Entries that a MARK proves at most: it is one frame, with other things in it."""


@dataclass(frozen=True, slots=True)
class ProvedEntries:
    """Entries with their digests, and where the next marker goes on."""

    digests: Mapping[str, int]
    after: str
    """Name of the last entry; empty if these are all."""


class DenseTurns:
    """Which entries of this rank each marker of one generation proves.

    All of them at the first marker, and where they have at most ``limit_bytes``; otherwise as many as have, by turns in
    the order of their names.

    Args:
        limit_bytes: Bytes that a marker after the first one proves.
        whole: Whether every marker proves all entries.
    """

    def __init__(self, limit_bytes: int, *, whole: bool = False) -> None:
        self._limit_bytes = limit_bytes
        self._whole = whole
        self._first = True
        self._after = ""

    def choose(self, sizes: Mapping[str, int]) -> tuple[list[str], str]:
        """(entries of the next marker, the name after which the one after it goes on).

        Args:
            sizes: Bytes of each entry.
        """
        names = sorted(sizes)
        limit = sum(sizes.values()) if self._whole or self._first else self._limit_bytes
        if sum(sizes.values()) <= limit and len(names) <= MAX_ENTRIES:
            return names, ""
        later = [name for name in names if name > self._after]
        chosen: list[str] = []
        left = limit
        for name in (*later, *(name for name in names if name <= self._after)):
            if chosen and (sizes[name] > left or len(chosen) == MAX_ENTRIES):
                break
            chosen.append(name)
            left -= sizes[name]
        return chosen, chosen[-1] if chosen else ""

    def settled(self, after: str, *, committed: bool) -> None:
        """A marker is decided: one that was given up has proved nothing.

        Args:
            after: As :meth:`choose` said.
            committed: Whether it counts.
        """
        if committed:
            self._first, self._after = False, after


def prove(tensors: Tensors, blobs: Tensors, turns: DenseTurns, known: Mapping[str, int]) -> ProvedEntries:
    """Digests of what this rank saves. Local; what is on a GPU is read back once.

    Args:
        tensors: Live ones, and parts of sharded ones.
        blobs: Encoded objects, as bytes.
        turns: Which of them are wanted.
        known: Digests of whole live tensors that were made at this cut already.
    """
    held = {name: tensor for name, tensor in tensors.items() if is_saved_here(tensor)}
    both = {**held, **blobs}
    sizes = {name: _local_bytes(tensor) for name, tensor in both.items()}
    names, after = turns.choose(sizes)
    found = {name: known[name] for name in names if name in known}
    return ProvedEntries(found | entry_digests({name: both[name] for name in names if name not in found}), after)


def differing(staged: Tensors, proved: Mapping[str, int]) -> Iterator[str]:
    """Names of entries of a staged copy that are not as they were proved."""
    found = entry_digests({name: staged[name] for name in proved if name in staged})
    return (name for name in sorted(proved) if found.get(name) != proved[name])


def entry_digests(entries: Tensors) -> dict[str, int]:
    """Digests of entries as they are saved and read: tensors of the job, and encoded objects."""
    blobs = {name: bytes_digest(name, blob.numpy()) for name, blob in entries.items() if is_blob(name)}
    return blobs | digests({name: tensor for name, tensor in entries.items() if name not in blobs})


def is_saved_here(tensor: torch.Tensor) -> bool:
    """Return whether a part of a sharded tensor is saved of this rank, and not of another that has the same part."""
    if not isinstance(tensor, DTensor):
        return True
    mesh = tensor.device_mesh
    replicated = [dim for dim, each in enumerate(tensor.placements) if isinstance(each, Replicate)]
    return all(mesh.get_local_rank(dim) == 0 for dim in replicated)


def _local_bytes(tensor: torch.Tensor) -> int:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes
