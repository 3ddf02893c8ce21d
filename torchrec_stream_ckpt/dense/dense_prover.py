"""Digests of the dense state that a rank saves, computed from the live objects at a cut, for the proof in its MARK.

They are never computed from the copy that is saved, so they reveal any change between the live objects and a restored
job.
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
"""Tensors by entry."""

MAX_ENTRIES = int(MAX_FRAME_BYTES // 4 / PAIR_BYTES)
"""Most entries that a MARK proves: it is one frame and has other content, too."""


@dataclass(frozen=True, slots=True)
class ProvedEntries:
    """Entries with their digests, and the position at which the next marker continues."""

    digests: Mapping[str, int]
    after: str
    """Name of the last entry. Empty if these are all entries."""


class DenseTurns:
    """Chooses the entries of this rank that each marker of one generation proves.

    The first marker proves all of them. A later one proves all if they have at most ``limit_bytes``. Otherwise it
    proves as many as have that, by turns in the order of their names.

    Args:
        limit_bytes: Bytes that a marker after the first one proves.
        whole: True if every marker proves all entries.
    """

    def __init__(self, limit_bytes: int, *, whole: bool = False) -> None:
        self._limit_bytes = limit_bytes
        self._whole = whole
        self._first = True
        self._after = ""

    def choose(self, sizes: Mapping[str, int]) -> tuple[list[str], str]:
        """Return (entries of the next marker, the name after which the marker after that continues).

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
        """Record the decision on a marker. A marker that was given up has proved nothing.

        Args:
            after: The name that :meth:`choose` returned.
            committed: True if the marker was committed.
        """
        if committed:
            self._first, self._after = False, after


def prove(tensors: Tensors, blobs: Tensors, turns: DenseTurns, known: Mapping[str, int]) -> ProvedEntries:
    """Return digests of the state that this rank saves. Local. Tensors on a GPU are read back once.

    Args:
        tensors: Live tensors, and parts of sharded ones.
        blobs: Encoded objects, as bytes.
        turns: Chooses the entries to prove.
        known: Digests of whole live tensors that were computed at this cut already.
    """
    held = {name: tensor for name, tensor in tensors.items() if is_saved_here(tensor)}
    both = {**held, **blobs}
    sizes = {name: _local_bytes(tensor) for name, tensor in both.items()}
    names, after = turns.choose(sizes)
    found = {name: known[name] for name in names if name in known}
    return ProvedEntries(found | entry_digests({name: both[name] for name in names if name not in found}), after)


def differing(staged: Tensors, proved: Mapping[str, int]) -> Iterator[str]:
    """Yield names of entries of a staged copy that differ from their proof."""
    found = entry_digests({name: staged[name] for name in proved if name in staged})
    return (name for name in sorted(proved) if found.get(name) != proved[name])


def entry_digests(entries: Tensors) -> dict[str, int]:
    """Return digests of entries as they are saved and read: tensors of the job, and encoded objects."""
    blobs = {name: bytes_digest(name, blob.numpy()) for name, blob in entries.items() if is_blob(name)}
    return blobs | digests({name: tensor for name, tensor in entries.items() if name not in blobs})


def is_saved_here(tensor: torch.Tensor) -> bool:
    """Return whether this rank, and not another one with the same part, saves this part of a sharded tensor."""
    if not isinstance(tensor, DTensor):
        return True
    mesh = tensor.device_mesh
    replicated = [dim for dim, each in enumerate(tensor.placements) if isinstance(each, Replicate)]
    return all(mesh.get_local_rank(dim) == 0 for dim in replicated)


def _local_bytes(tensor: torch.Tensor) -> int:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes
