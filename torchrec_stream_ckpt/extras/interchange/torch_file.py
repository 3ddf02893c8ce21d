"""Read a file that ``torch.save`` has written, without running any pickled code in it.

It is opened by ``torch.load(weights_only=True)``, which makes only tensors and plain values. A ``ShardedTensor`` of
TorchRec is read as the parts from which it was pickled. Inert classes replace torch's own, which would require a
process group.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torchrec_stream_ckpt.errors import ConfigError, CorruptionError, UnsupportedError

_SHARDED = "torch.distributed._shard.sharded_tensor.api.ShardedTensor"
_GETATTR = "builtins.getattr"
"""Global of a pickle that gets ``ShardedTensor.ProcessGroupState``."""
_PARTS = (
    "torch.distributed._shard.metadata.ShardMetadata",
    "torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING",
    "torch.distributed._shard.sharded_tensor.metadata.ShardedTensorMetadata",
    "torch.distributed._shard.sharded_tensor.metadata.TensorProperties",
    "torch.distributed._shard.sharded_tensor.shard.Shard",
    "torch.distributed._shard.sharding_spec.api.EnumerableShardingSpec",
    "torch.distributed._shard.sharding_spec.chunk_sharding_spec.ChunkShardingSpec",
    "torch.distributed.remote_device._remote_device",
)
"""Globals with which a ``ShardedTensor`` is pickled."""
_MOST_LEVELS = 32
_SAVE_ANEW = "save only tensors, dictionaries and numbers: torch.save(dmp.state_dict(), FILE)"


@dataclass(frozen=True, slots=True)
class Shards:
    """The part of a ``ShardedTensor`` that one rank has saved."""

    size: tuple[int, ...]
    """Size of the whole tensor."""
    own: dict[tuple[int, ...], torch.Tensor]
    """This rank's shards, by their offsets."""
    places: dict[tuple[int, ...], tuple[tuple[int, ...], int]]
    """Sizes and rank of each shard of all ranks, by its offsets."""
    dtype: torch.dtype | None
    """Dtype in its own metadata; None if the metadata have no dtype."""


def read_file(path: Path) -> Mapping[str, Any]:
    """Return the dictionary of a file.

    Its tensors are mapped, and read when they are used. All bytes are read once to compare checksums.

    Raises:
        ConfigError: there is no such file, or it holds no dictionary.
        CorruptionError: it is truncated, or a record of it does not match its checksum.
        UnsupportedError: it holds objects other than tensors and plain values, and the error names them; or it has an
            older format.
    """
    _check_bytes(path)
    try:
        with torch.serialization.safe_globals(
            [(_Sharded, _SHARDED), (_inert, _GETATTR), *((_Inert, name) for name in _PARTS)]
        ):
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # the bytes may cause any error
        objects = _objects(path)
        if objects:
            raise UnsupportedError(
                f"the file has pickled objects that are neither tensors nor plain values: {', '.join(objects)}; "
                "none of them was run",
                hint=_SAVE_ANEW,
                path=path,
            ) from None
        raise UnsupportedError(
            f"the file cannot be read without running pickled code ({_reason(error)})",
            hint=_SAVE_ANEW,
            path=path,
        ) from None
    if not isinstance(found, dict):
        raise ConfigError(
            f"the file holds a {type(found).__name__}, not a dictionary",
            hint=f"import a state dict: {_SAVE_ANEW}",
            path=path,
        )
    return found


def leaves(value: Any, path: Path, keys: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the values of nested dictionaries, with the keys that lead to each: tensors, :class:`Shards`, or others.

    Raises:
        UnsupportedError: a tensor is of a kind that is not imported, or dictionaries are nested without an end.
    """
    if isinstance(value, dict):
        if len(keys) == _MOST_LEVELS:
            raise UnsupportedError(f"its dictionaries are nested more than {_MOST_LEVELS} deep", path=path)
        for key, inner in value.items():
            yield from leaves(inner, path, (*keys, str(key)))
    elif isinstance(value, _Sharded):
        yield keys, _shards(value, ".".join(keys), path)
    elif isinstance(value, torch.Tensor):
        _check_kind(value, ".".join(keys), path)
        yield keys, _resolved(value)
    else:
        yield keys, value


def _resolved(value: torch.Tensor) -> torch.Tensor:
    """Make a tensor's bits its values: it may be saved with a flag to negate or conjugate them."""
    return value.detach().resolve_conj().resolve_neg()


def _check_kind(value: torch.Tensor, name: str, path: Path) -> None:
    plain = type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided
    if not plain or value.is_quantized or value.device.type != "cpu":
        raise UnsupportedError(
            f"{name} cannot be imported: a {type(value).__name__} ({value.layout}, {value.dtype}, {value.device})",
            hint="save a plain tensor instead, such as DTensor.full_tensor()",
            path=path,
        )


# Checks of the bytes, before any of them is opened.


def _check_bytes(path: Path) -> None:
    try:
        with open(path, "rb") as file:
            begin = file.read(4)
        if not zipfile.is_zipfile(path):
            raise _no_archive(path, begin)
        with zipfile.ZipFile(path) as archive:
            names = {name.rpartition("/")[2] for name in archive.namelist()}
            if "data.pkl" not in names or "constants.pkl" in names:
                raise _no_archive(path, b"")
            damaged = archive.testzip()
    except OSError as error:
        raise ConfigError(f"the file cannot be read: {error.strerror}", path=path) from None
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, EOFError, RuntimeError) as error:
        raise CorruptionError(f"the file is damaged: {error}", hint="use another copy of the file", path=path) from None
    if damaged is not None:
        raise CorruptionError(
            f"the record {damaged} does not match its checksum",
            hint="use another copy; under set_crc32_options(False) a file has no checksums: save it without that",
            path=path,
        )


def _no_archive(path: Path, begin: bytes) -> Exception:
    if begin[:2] == b"PK":
        return CorruptionError("the file is truncated: it is a zip archive without its end", path=path)
    if begin[:1] == b"\x80":
        return UnsupportedError(
            "the file is a pickle, not a zip archive of torch.save",
            hint="convert a file of torch before 1.6: torch.save(torch.load(FILE, weights_only=True), NEW)",
            path=path,
        )
    return ConfigError(
        "the file was not written by torch.save",
        hint="name a file of torch.save: --from torch://FILE; for a torch.jit.save program, save its state_dict()",
        path=path,
    )


def _reason(error: Exception) -> str:
    """Return torch's message without its advice."""
    lines = [line.strip() for line in str(error).rpartition("WeightsUnpickler error:")[2].splitlines() if line.strip()]
    return f"{lines[0]:.200}" if lines else type(error).__name__


def _objects(path: Path) -> list[str]:
    """Return the names of pickled objects that are not allowed."""
    try:
        found = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except Exception:  # the bytes may cause any error: the first one is then reported
        return []
    return sorted(set(found) - {_SHARDED, _GETATTR, *_PARTS})


# ShardedTensor.


class _Inert:
    """Replaces an object of a pickle: keeps the state that it was given, and does nothing."""

    def __init__(self, *args: Any) -> None:
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def get(self, name: str) -> Any:
        """Return one attribute; None if the pickle has none of this name."""
        parts = self.state if isinstance(self.state, tuple) else (self.state,)
        return next((part[name] for part in parts if isinstance(part, dict) and name in part), None)


def _inert(*_: Any) -> type[_Inert]:
    """Replaces ``getattr``: every result is inert, too."""
    return _Inert


class _Sharded(torch.Tensor):
    """Replaces a ``ShardedTensor``, which is a tensor without values of its own."""

    state: Any

    @classmethod
    def __torch_dispatch__(cls, *_: Any) -> Any:
        raise TypeError("a ShardedTensor is taken apart, not computed with")

    def __setstate__(self, state: Any) -> None:
        self.state = state


def _shards(value: _Sharded, name: str, path: Path) -> Shards:
    wrong = UnsupportedError(f"{name} is a ShardedTensor of an unknown form", path=path)
    state = getattr(value, "state", None)
    if not isinstance(state, tuple) or len(state) < 2 or not isinstance(state[1], _Inert):
        raise wrong
    local, metadata = state[:2]
    size, places = _numbers(metadata.get("size")), {}
    for each in metadata.get("shards_metadata") or ():
        offsets, sizes, rank = _place(each)
        if offsets is None or sizes is None or size is None or not len(offsets) == len(sizes) == len(size):
            raise wrong
        places[offsets] = sizes, rank
    own: dict[tuple[int, ...], torch.Tensor] = {}
    for shard in local if isinstance(local, list) else ():
        tensor = shard.get("tensor") if isinstance(shard, _Inert) else None
        offsets, sizes, _ = _place(shard.get("metadata")) if isinstance(shard, _Inert) else (None, None, 0)
        if not isinstance(tensor, torch.Tensor) or offsets not in places or sizes != tuple(tensor.shape):
            raise wrong
        _check_kind(tensor, name, path)
        own[offsets] = _resolved(tensor)
    if size is None or not isinstance(local, list):
        raise wrong
    properties = metadata.get("tensor_properties")
    kinds = properties.state if isinstance(properties, _Inert) and isinstance(properties.state, tuple) else ()
    dtype = next((each for each in kinds if isinstance(each, torch.dtype)), None)
    return Shards(size, own, places, dtype)


def _place(metadata: Any) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None, int]:
    """Return offsets, sizes and rank of a shard. The rank is -1 if it is not recorded."""
    if not isinstance(metadata, _Inert):
        return None, None, -1
    placement = metadata.get("placement")
    rank = placement.get("_rank") if isinstance(placement, _Inert) else None
    return _numbers(metadata.get("shard_offsets")), _numbers(metadata.get("shard_sizes")), -1 if rank is None else rank


def _numbers(value: Any) -> tuple[int, ...] | None:
    known = isinstance(value, list | tuple) and all(isinstance(each, int) and each >= 0 for each in value)
    return tuple(value) if known else None
