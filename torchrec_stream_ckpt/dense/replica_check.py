"""Compare state that several ranks hold alike before a marker is committed: one rank saves it for all of them.

Each rank adds up digests at its cut. A checksum over them is sent with the vote that all ranks cast in any case. Only
if checksums differ do the ranks exchange the digests themselves, to name the difference.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from torchrec_stream_ckpt.dense.canonical import Canonical
from torchrec_stream_ckpt.dense.dense_digests import digests
from torchrec_stream_ckpt.dense.gradients import GRADIENTS
from torchrec_stream_ckpt.errors import MarkerFailedError, ReplicaMismatchError

ALL = ""
"""Name for the group of all ranks."""
_TENSOR_HINT = (
    "load weights before DMP or DDP wraps the model, and step each dense optimizer on all ranks with averaged "
    "gradients; if replicas differ by design (local SGD), set replicas='rank0'"
)
_OBJECT_HINT = (
    "pass it in stateful_per_rank if each rank has its own state, or in stateful_rank0 to use rank 0's on all ranks"
)
_FROZEN_HINT = "set the same values on all ranks, or register it as a buffer, which is saved for each rank"
_GRADIENT_HINT = "mark at the accumulation boundary: after the optimizer's step, and before the next backward"
_WRAPPER_HINT = "step the wrapped optimizers equally on all ranks; if they differ by design, set replicas='rank0'"


@dataclass(frozen=True, slots=True)
class Scope:
    """Part of the dense state that a marker compares."""

    marker: int = 1
    limit_bytes: int | None = None
    """Number of bytes to compare at a time, by turns. None for all of them."""

    def spans(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, int]]:
        """Return the elements [first, end) of this marker's turn, by entry.

        Equal on ranks with the same names and sizes.
        """
        sizes = {name: _local(tensors[name]) for name in sorted(tensors)}
        total = sum(each.nbytes for each in sizes.values())
        if self.limit_bytes is None or total <= self.limit_bytes:
            return {name: (0, each.numel()) for name, each in sizes.items()}
        begin = (self.marker - 1) * self.limit_bytes % total
        found: dict[str, tuple[int, int]] = {}
        at = 0
        for name, each in sizes.items():
            for turn in (begin, begin - total):  # a turn past the last byte continues at the first one
                first, end = max(turn, at), min(turn + self.limit_bytes, at + each.nbytes)
                if first < end:
                    size = each.element_size()
                    before = found.get(name)
                    span = (first - at) // size, -((at - end) // size)
                    # If an entry is longer than a turn, the turn may cover its end and its beginning: then include
                    # everything between.
                    found[name] = span if before is None else (min(before[0], span[0]), max(before[1], span[1]))
            at += each.nbytes
        return found


@dataclass(frozen=True, slots=True)
class Held:
    """State of one rank to compare, as it was at a cut."""

    shapes: tuple[str, ...] = ()
    """Each tensor that every rank must have, with its place, shape and dtype."""
    digests: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Group of ranks -> tensor or object, by its title -> digest."""
    leaves: Mapping[str, Mapping[str, tuple[bytes, str]]] = field(default_factory=dict)
    """Object -> its content, as ``Canonical.leaves``."""
    frozen: frozenset[str] = frozenset()
    """Tensors that are frozen parameters."""
    entries: Mapping[str, int] = field(default_factory=dict)
    """Digests of tensors of which all elements were added up, by entry."""

    def checksums(self) -> dict[str, int]:
        """Return a number for each group of ranks that this one belongs to. Equal numbers mean equal state."""
        lines = {group: [f"{title}\t{each[title]}" for title in sorted(each)] for group, each in self.digests.items()}
        lines[ALL] = [*self.shapes, *lines.get(ALL, ())]
        return {group: _checksum(each) for group, each in lines.items()}


def shapes_of(tensors: Mapping[str, torch.Tensor], places: Mapping[str, str]) -> dict[str, str]:
    """Return entry -> its title, with shape and dtype.

    Args:
        tensors: Tensors of which each rank holds a copy.
        places: Entry -> place of its tensor.
    """
    return {
        name: f"{name}{f' ({places[name]})' if name in places else ''} {list(tensor.shape)} {tensor.dtype}"
        for name, tensor in sorted(tensors.items())
    }


def hold(
    alike: Mapping[str, torch.Tensor],
    apart: Mapping[str, Any],
    objects: Mapping[str, Any],
    places: Mapping[str, str],
    frozen: Collection[str],
    scope: Scope | None,
) -> Held:
    """Add up the state of this rank. Local. Tensors on a GPU are read back once.

    Args:
        alike: Tensors that every rank has whole, by entry.
        apart: Values of which ranks have parts. DTensors in it that several ranks hold alike are compared among those.
        objects: Title -> state of an object that is the same on all ranks.
        places: Entry -> place of its tensor, for people.
        frozen: Entries of frozen parameters.
        scope: Tensors whose bytes are compared. If None, neither bytes nor objects are compared, only names and shapes.

    Raises:
        UnsupportedError: An object holds something that cannot be walked.
    """
    titles = shapes_of(alike, places)
    shapes = tuple(titles.values())
    if scope is None:
        return Held(shapes)
    groups = {ALL: dict(alike)}
    for name, tensor in apart.items():
        if isinstance(tensor, DTensor) and (group := _replicas(tensor)):
            groups.setdefault(group, {})[name] = tensor
            titles[name] = f"{name} {list(tensor.shape)} {tensor.dtype}"
    spans = {name: span for tensors in groups.values() for name, span in scope.spans(tensors).items()}
    everything = {name: tensor for tensors in groups.values() for name, tensor in tensors.items()}
    whole = {name for name, span in spans.items() if span == (0, _local(everything[name]).numel())}
    found = digests(
        {name: everything[name] for name in spans}, {name: span for name, span in spans.items() if name not in whole}
    )
    walked = {title: Canonical.of(state, title) for title, state in objects.items()}
    by_group = {
        group: {titles[name]: f"{found[name]:016x}" for name in tensors if name in found}
        for group, tensors in groups.items()
    }
    by_group[ALL] |= {title: each.digest.hex() for title, each in walked.items()}
    leaves = {title: each.leaves for title, each in walked.items()}
    entries = {name: found[name] for name in whole}
    return Held(shapes, by_group, leaves, frozenset(titles[name] for name in frozen if name in titles), entries)


def all_same(checksums: Sequence[Mapping[str, int]]) -> bool:
    """Return whether the ranks of each group have the same :meth:`Held.checksums`."""
    pairs = {(group, number) for each in checksums for group, number in each.items()}
    return len(pairs) == len({group for group, _ in pairs})


def check_same(ranks: Sequence[Held]) -> None:
    """Reject a marker for which ranks would save different sets of tensors, or hold different values of them.

    Raises:
        MarkerFailedError: Names the first tensor that one rank holds and another does not, or in another shape.
        ReplicaMismatchError: Names the first tensor or object with different values, and the ranks.
    """
    for rank, other in enumerate(ranks):
        if different := sorted(set(ranks[0].shapes) ^ set(other.shapes)):
            raise MarkerFailedError(
                f"the dense state of ranks 0 and {rank} differs: only one of them has {different[0]}",
                hint="wrap every dense parameter in DDP or FSDP2, and step its optimizer on every rank",
            )
    found = list(_different(ranks))
    if found:
        raise _mismatch(ranks, *found[0], len({title for _, _, title in found}) - 1)


def _different(ranks: Sequence[Held]) -> Iterator[tuple[int, int, str]]:
    """Yield (a rank, another rank, title) of each digest that two ranks of a group do not share."""
    first: dict[tuple[str, str], tuple[int, str]] = {}
    for rank, held in enumerate(ranks):
        for group, titles in held.digests.items():
            for title, digest in titles.items():
                there, known = first.setdefault((group, title), (rank, digest))
                if known != digest:
                    yield there, rank, title


def _mismatch(ranks: Sequence[Held], one: int, other: int, title: str, more: int) -> ReplicaMismatchError:
    kind, hint = "", _TENSOR_HINT
    if title in ranks[one].frozen:
        kind, hint = "a frozen parameter: ", _FROZEN_HINT
    elif title.startswith(GRADIENTS):
        hint = _GRADIENT_HINT
    elif title in ranks[one].leaves:
        hint = _WRAPPER_HINT if title.startswith("the optimizer") else _OBJECT_HINT
    where = _leaf(ranks[one].leaves.get(title, {}), ranks[other].leaves.get(title, {}), one, other)
    rest = f", and {more} more" if more else ""
    return ReplicaMismatchError(
        f"ranks {one} and {other} hold different values of {kind}{title}{where}{rest}", hint=hint
    )


def _leaf(here: Mapping[str, tuple[bytes, str]], there: Mapping[str, tuple[bytes, str]], one: int, other: int) -> str:
    """Describe the place at which two objects differ, with both values, if known."""
    for place in [*here, *there]:
        mine, its = here.get(place), there.get(place)
        if mine != its:
            said = [each[1] if each is not None else "nothing" for each in (mine, its)]
            values = f" is {said[0]} on rank {one} and {said[1]} on rank {other}" if all(said) else ""
            return f": {place}{values}" if place else values.replace(" is ", ": it is ", 1)
    return ""


def _replicas(tensor: DTensor) -> str:
    """Return the name of the ranks that hold the same part of a tensor as this one. Empty if there are no others."""
    mesh, here = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    if here is None:
        return ""
    copied = [isinstance(each, Replicate) for each in tensor.placements]
    index = tuple(slice(None) if copy else place for copy, place in zip(copied, here, strict=True))
    ranks = mesh.mesh[index].reshape(-1).tolist()
    return f"ranks {', '.join(map(str, ranks))}" if len(ranks) > 1 else ""


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _checksum(lines: list[str]) -> int:
    return int.from_bytes(blake2b("\n".join(lines).encode(), digest_size=8).digest(), "little")
