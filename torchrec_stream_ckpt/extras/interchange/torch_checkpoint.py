"""A checkpoint of ``torch.save``, one file or one per rank, opened for an import."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from torchrec_stream_ckpt.errors import ConfigError, CorruptionError, UnsupportedError
from torchrec_stream_ckpt.extras.interchange.contents import Part
from torchrec_stream_ckpt.extras.interchange.names import nearest
from torchrec_stream_ckpt.extras.interchange.torch_file import Shards, leaves, read_file

_OF_RANK = re.compile(r"(.*?)([0-9]+)(\.\w+)")
"""Name of a file of one rank: ``rank0.pt`` and the like."""
Offsets = tuple[int, ...]
Box = tuple[Offsets, tuple[int, ...]]
"""Offsets and sizes."""


@dataclass(slots=True)
class _Entry:
    """One tensor of the job, in the pieces in which it was saved."""

    size: tuple[int, ...]
    dtype: torch.dtype
    pieces: dict[Offsets, torch.Tensor]
    places: dict[Offsets, tuple[tuple[int, ...], int]] | None = None
    """(of a sharded tensor) Sizes and rank of each piece."""
    others: list[str] = field(default_factory=list)
    """(of an unsharded tensor) Files that have another value."""

    def part(self, offsets: Offsets, sizes: tuple[int, ...]) -> torch.Tensor:
        """Return a block of the tensor; a view if one piece has all of it."""
        room = None
        for begin, piece in self.pieces.items():
            low = [max(mine, wanted) for mine, wanted in zip(begin, offsets, strict=True)]
            high = [
                min(mine + length, wanted + count)
                for mine, length, wanted, count in zip(begin, piece.shape, offsets, sizes, strict=True)
            ]
            if any(first >= last for first, last in zip(low, high, strict=True)):
                continue
            found = piece[tuple(slice(a - at, b - at) for a, b, at in zip(low, high, begin, strict=True))]
            if tuple(found.shape) == sizes:
                return found
            room = torch.empty(sizes, dtype=self.dtype) if room is None else room
            room[tuple(slice(a - at, b - at) for a, b, at in zip(low, high, offsets, strict=True))] = found
        return torch.empty(sizes, dtype=self.dtype) if room is None else room

    @property
    def saved(self) -> TensorStorageMetadata:
        """Metadata of the tensor in DCP's form."""
        chunks = [
            ChunkStorageMetadata(torch.Size(offsets), torch.Size(piece.shape)) for offsets, piece in self.pieces.items()
        ]
        return TensorStorageMetadata(TensorProperties(dtype=self.dtype), torch.Size(self.size), chunks)


class TorchCheckpoint:
    """A file of ``torch.save``, or a folder with one file per rank. No pickled code in it is run.

    A tensor that is not sharded is taken from rank 0, whose file is read first. Files that have another value of it are
    noted. If that tensor is requested, an error names them.

    Args:
        path: The file, or the folder.
        of_rank_0: Entries of which rank 0's value is taken although other ranks have other values.

    Raises:
        ConfigError: there is no such file, or ``torch.save`` did not write it; or files of ranks do not fit each other.
        CorruptionError: a file is damaged, or the file of a rank is missing.
        UnsupportedError: a file has objects other than tensors and plain values.
    """

    def __init__(self, path: Path, of_rank_0: Collection[str] = ()) -> None:
        self.path = path
        self._of_rank_0 = frozenset(of_rank_0)
        self._entries: dict[str, _Entry] = {}
        self._values: dict[str, Any] = {}
        self._paths: dict[str, tuple[str, ...]] = {}
        for file in _files(path):
            self._take(file)
        self._check_whole()
        unknown = sorted(self._of_rank_0 - self._entries.keys())
        if unknown:
            hint = f"name a tensor of the files, such as {nearest(unknown[0], self._entries)}"
            raise ConfigError(f"--of-rank0 {unknown[0]}: the files have no such tensor", hint=hint, path=path)
        kept = {name: value for name, value in self._values.items() if "state" in self._paths[name]}
        self.unread: Sequence[str] = sorted(self._values.keys() - kept.keys())
        described: dict[str, Any] = {name: entry.saved for name, entry in self._entries.items()}
        described |= {name: BytesStorageMetadata() for name in kept}
        self.metadata = Metadata(described, planner_data=dict(self._paths))
        self.sharded: Collection[str] = {name for name, entry in self._entries.items() if entry.places is not None}

    def check(self, names: Sequence[str]) -> None:
        """Implement :meth:`Checkpoint.check`."""
        for name in names:
            entry = self._entries.get(name)
            if entry is not None and entry.others and name not in self._of_rank_0:
                raise ConfigError(
                    f"{name} differs between {entry.others[0]} and the file of rank 0",
                    hint="save tables as ShardedTensors, as in dmp.state_dict(), or whole; for a tensor that differs "
                    f"by rank, such as a buffer, import rank 0's: --of-rank0 {name}",
                    path=self.path,
                )

    def parts(self, wanted: Sequence[Part]) -> list[torch.Tensor]:
        """Implement :meth:`Checkpoint.parts`."""
        return [self._entries[name].part(offsets, sizes).contiguous() for name, offsets, sizes in wanted]

    def whole(self, names: Sequence[str]) -> dict[str, Any]:
        """Implement :meth:`Checkpoint.whole`."""
        return {name: self._whole(name) for name in names}

    def _whole(self, name: str) -> Any:
        entry = self._entries.get(name)
        return entry.part((0,) * len(entry.size), entry.size) if entry is not None else self._values[name]

    def _take(self, file: Path) -> None:
        seen: set[str] = set()
        for keys, value in leaves(read_file(file), file):
            name = ".".join(keys)
            if name in seen or self._paths.get(name, keys) != keys:
                raise ConfigError(f"two values of the file are named {name}", path=file)
            seen.add(name)
            self._paths[name] = keys
            if isinstance(value, Shards):
                self._take_shards(name, value, file)
            elif isinstance(value, torch.Tensor):
                self._take_tensor(name, value, file)
            else:
                self._values.setdefault(name, value)
        if both := sorted(self._values.keys() & self._entries.keys()):
            raise ConfigError(f"{both[0]} is a tensor in the file of one rank but not in that of another", path=file)

    def _take_tensor(self, name: str, value: torch.Tensor, file: Path) -> None:
        known = self._entries.setdefault(name, _Entry(tuple(value.shape), value.dtype, {(0,) * value.dim(): value}))
        if known.places is not None:
            raise ConfigError(f"{name} is sharded in the file of one rank but whole in that of another", path=file)
        (first,) = known.pieces.values()
        if first is not value and not _same_bits(first, value):
            known.others.append(file.name)

    def _take_shards(self, name: str, value: Shards, file: Path) -> None:
        dtypes = {tensor.dtype for tensor in value.own.values()} | ({value.dtype} if value.dtype is not None else set())
        if not dtypes:
            raise UnsupportedError(f"{name} is a ShardedTensor of unknown dtype", path=file)
        known = self._entries.setdefault(name, _Entry(value.size, min(dtypes, key=str), {}, value.places))
        alike = known.places == value.places and known.size == value.size and dtypes == {known.dtype}
        if not alike or known.pieces.keys() & value.own.keys():
            raise ConfigError(
                f"{name} is sharded differently than in the other files, so they are not from one job",
                hint="import a folder with the files of one step only",
                path=file,
            )
        known.pieces |= value.own

    def _check_whole(self) -> None:
        for name, entry in self._entries.items():
            if entry.places is None:
                continue
            lacking = {offsets: place for offsets, place in entry.places.items() if offsets not in entry.pieces}
            if lacking:
                offsets, (sizes, rank) = min(lacking.items())
                raise CorruptionError(
                    f"{name} is incomplete: {len(lacking)} of its {len(entry.places)} shards are missing, the first of "
                    f"size {sizes} at {offsets}" + (f", which rank {rank} had" if rank >= 0 else ""),
                    hint="name the folder with the files of all ranks: --from torch://DIR with rank0.pt, rank1.pt",
                    path=self.path,
                )
            boxes = [(offsets, sizes) for offsets, (sizes, _) in entry.places.items() if 0 not in sizes]
            inside = all(
                begin + length <= most
                for offsets, sizes in boxes
                for begin, length, most in zip(offsets, sizes, entry.size, strict=True)
            )
            area = sum(prod(sizes) for _, sizes in boxes)
            if not inside or area != prod(entry.size) or any(_overlap(*pair) for pair in combinations(boxes, 2)):
                raise CorruptionError(f"the shards of {name} do not tile its size {entry.size}", path=self.path)


def _overlap(one: Box, other: Box) -> bool:
    axes = zip(*one, *other, strict=True)
    return all(begin < there + far and there < begin + length for begin, length, there, far in axes)


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    flat = [each.contiguous().reshape(-1).view(torch.uint8) for each in (one, other)]
    return torch.equal(flat[0], flat[1])


def _files(path: Path) -> list[Path]:
    """Return the file itself, or the files of the ranks in their order."""
    if not path.is_dir():
        return [path]
    matches: Mapping[Path, re.Match[str] | None] = {
        each: _OF_RANK.fullmatch(each.name) for each in sorted(path.iterdir()) if not each.name.startswith(".")
    }
    ranks = {int(match[2]): each for each, match in matches.items() if match is not None}
    stems = {(match[1], match[3]) for match in matches.values() if match is not None}
    others = [each.name for each, match in matches.items() if match is None]
    if not ranks or others or len(stems) > 1 or sorted(ranks) != list(range(len(matches))):
        found = ", ".join(each.name for each in list(matches)[:8]) or "nothing"
        raise ConfigError(
            f"the folder must have one file for each rank from 0, found {found}",
            hint="name the files rank0.pt, rank1.pt and so on, and remove others; to import a single file, name it",
            path=path,
        )
    return [ranks[rank] for rank in range(len(ranks))]
