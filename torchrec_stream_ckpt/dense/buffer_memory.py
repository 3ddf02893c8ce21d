"""Find, compare and copy memory that tensors share, so that restored buffers share memory as they did."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from torchrec_stream_ckpt.util.types import grouped

Tensors = Mapping[str, torch.Tensor]
"""Tensors by name."""
Memory = tuple[str, int]
"""Identifies the storage of a tensor as long as the tensor is alive."""


def memory_of(tensor: torch.Tensor) -> Memory:
    """Return an equal value for tensors of one storage. Tensors without bytes share nothing."""
    try:
        first = tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError, ValueError):  # a sparse or lazy one has no storage
        first = 0
    return (str(tensor.device), first) if first else ("", id(tensor))


def together(*sides: Tensors) -> list[list[str]]:
    """Group the names of the first side so that names share memory on any side only within a group."""
    group: dict[str, set[str]] = {name: {name} for name in sides[0]}
    for side in sides:
        for first, *others in grouped((memory_of(side[name]), name) for name in group.keys() & side.keys()).values():
            for other in others:
                joined = group[first] | group[other]
                for name in joined:
                    group[name] = joined
    return [sorted(names) for names in {id(names): names for names in group.values()}.values()]


def is_alike(names: Iterable[str], one: Tensors, other: Tensors) -> bool:
    """Return whether tensors of both sides have equal shapes, dtypes and strides, and share memory in the same way."""
    places: dict[tuple[Memory, Memory], int] = {}
    left, right = set(), set()
    for name in names:
        if name not in one or name not in other or not _same_kind(one[name], other[name]):
            return False
        pair = memory_of(one[name]), memory_of(other[name])
        shift = int(one[name].storage_offset()) - int(other[name].storage_offset())
        if places.setdefault(pair, shift) != shift:
            return False
        left.add(pair[0])
        right.add(pair[1])
    return len(left) == len(right) == len(places)


def _same_kind(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.layout is not torch.strided or other.layout is not torch.strided:
        return False
    flags = (one.is_conj() == other.is_conj(), one.is_neg() == other.is_neg(), one.device == other.device)
    same = (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())
    return same and all(flags)


def overlaps(tensor: torch.Tensor) -> bool:
    """Return whether elements of a tensor share memory with each other: torch refuses to write to such a tensor."""
    return tensor.layout is torch.strided and any(
        size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def copy_into(live: torch.Tensor, saved: torch.Tensor) -> None:
    """Copy the bits of a tensor into another of the same kind, in place.

    In an expanded tensor, each element is copied once.
    """
    if overlaps(live):
        live, saved = _once(live), _once(saved)
    live.copy_(saved)


def _once(tensor: torch.Tensor) -> torch.Tensor:
    strides = tensor.stride()
    sizes = [1 if stride == 0 else size for size, stride in zip(tensor.shape, strides, strict=True)]
    return tensor.as_strided(sizes, strides)


def place(tensors: Tensors, devices: Mapping[str, torch.device]) -> dict[str, torch.Tensor]:
    """Move tensors to their devices, keeping strides and shared memory."""
    moved: dict[tuple[Memory, torch.device], torch.UntypedStorage] = {}
    placed = {}
    for name, tensor in tensors.items():
        device = devices[name]
        if tensor.device == device or tensor.layout is not torch.strided:
            placed[name] = tensor.to(device)
            continue
        plain = tensor.resolve_conj().resolve_neg()
        key = (memory_of(plain), device)
        if key not in moved:
            flat = torch.empty(0, dtype=torch.uint8, device=plain.device).set_(plain.untyped_storage())
            moved[key] = flat.to(device).untyped_storage()
        empty = torch.empty(0, dtype=plain.dtype, device=device)
        placed[name] = empty.set_(moved[key], plain.storage_offset(), plain.shape, plain.stride())
    return placed
