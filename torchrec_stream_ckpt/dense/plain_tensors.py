"""Read tensors of DCP's files without its planner, which costs milliseconds for each load, however small.

DCP saves each tensor as an archive of ``torch.save``. This module reads those that are exactly like the archive of a
contiguous tensor, byte for byte apart from the values. All others are left to DCP.
"""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Iterable, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any
from zipfile import ZIP_STORED, BadZipFile, ZipFile

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from torchrec_stream_ckpt.dense.exact_pickle import described_tensor
from torchrec_stream_ckpt.util.durable import read_all

_PART = 4096
"""Bytes that are read from each end of an archive. A tensor begins before the end of the first part."""
_LOCAL = struct.Struct("<4s5H3I2H")


def read_plain(state: Mapping[str, Any], metadata: Metadata, folder: Path) -> set[str]:
    """Fill tensors of ``state`` in place, as DCP would.

    Args:
        state: Targets by the names of their entries.
        metadata: DCP's metadata of the files in ``folder``.
        folder: Directory of the files.

    Returns:
        The names of the entries that were read. DCP has to read the others, or to say why it cannot.
    """
    places = ((name, _place(name, target, metadata)) for name, target in state.items())
    by_file: dict[str, list[tuple[str, int, int]]] = {}
    for name, place in places:
        if place is not None:
            file, offset, length = place
            by_file.setdefault(file, []).append((name, offset, length))
    return {name for file, parts in by_file.items() for name in _read_file(folder / file, parts, state)}


def _place(name: str, target: object, metadata: Metadata) -> tuple[str, int, int] | None:
    """Return (file, offset, length) of the archive for a target. None if the target or the entry is not plain."""
    entry = metadata.state_dict_metadata.get(name)
    if type(target) not in (torch.Tensor, torch.nn.Parameter) or not isinstance(entry, TensorStorageMetadata):
        return None
    assert isinstance(target, torch.Tensor)
    if target.device.type != "cpu" or target.layout != torch.strided or not target.is_contiguous():
        return None
    if target.size() != entry.size or target.dtype != entry.properties.dtype or len(entry.chunks) != 1:
        return None
    (chunk,) = entry.chunks
    found = (metadata.storage_data or {}).get(MetadataIndex(name, chunk.offsets))
    if chunk.sizes != entry.size or found is None or getattr(found, "transform_descriptors", None):
        return None
    return found.relative_path, found.offset, found.length


def _read_file(path: Path, parts: Iterable[tuple[str, int, int]], state: Mapping[str, torch.Tensor]) -> list[str]:
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return []  # DCP names the file
    try:
        return [name for name, offset, length in parts if _read_one(file, offset, length, state[name])]
    finally:
        os.close(file)


def _read_one(file: int, offset: int, length: int, target: torch.Tensor) -> bool:
    """Fill one target. Returns whether it was filled; if not, its archive is unlike those that we know."""
    head = os.pread(file, min(length, 2 * _PART), offset)
    tail = head if length <= len(head) else os.pread(file, _PART, offset + length - _PART)
    begin = _values(head, tail, length, target)
    if begin is None:
        return False
    values = target.detach().reshape(-1).view(torch.uint8).numpy().data
    if len(head) == length:
        values[:] = head[begin : begin + len(values)]
    else:
        try:
            read_all(file, offset + begin, [values])
        except EOFError:
            return False
    torch.autograd.graph.increment_version(target)  # numpy's writes are not counted
    return True


def _values(head: bytes, tail: bytes, length: int, target: torch.Tensor) -> int | None:
    """Return where in an archive the values of a tensor like ``target`` begin. None if it holds anything else.

    Args:
        head: Its first bytes.
        tail: Its last bytes.
        length: Length of the archive.
        target: Contiguous tensor.
    """
    num_bytes = target.numel() * target.element_size()
    files = _directory(tail, length)
    if not {"data.pkl", "byteorder"} <= files.keys() or {name for name in files if name.startswith("data/")} != (
        {"data/0"}
    ):
        return None
    described, order, values = (_content(head, files[name]) for name in ("data.pkl", "byteorder", "data/0"))
    if described is None or order is None or values is None:
        return None
    wanted = described_tensor(target.size(), target.dtype), sys.byteorder.encode()
    if (head[slice(*described)], head[slice(*order)]) != wanted:
        return None
    begin, end = values
    return begin if end - begin == num_bytes and end <= length else None


def _directory(tail: bytes, length: int) -> dict[str, tuple[int, int]]:
    """Return (begin of its header, size) of each stored file of an archive, by its name. Empty if it has another form.

    Args:
        tail: The last bytes of the archive.
        length: Length of the archive.
    """
    before = length - len(tail)
    try:
        with ZipFile(BytesIO(tail)) as archive:
            files = archive.infolist()
    except (BadZipFile, ValueError, NotImplementedError, struct.error):
        return {}
    return {
        file.filename.partition("/")[2]: (before + file.header_offset, file.file_size)
        for file in files
        if file.compress_type == ZIP_STORED and not file.flag_bits & 1
    }


def _content(head: bytes, file: tuple[int, int]) -> tuple[int, int] | None:
    """Return (begin, end) of a file's bytes in the archive. None if its header is not in ``head``."""
    begin, size = file
    if not 0 <= begin <= len(head) - _LOCAL.size:
        return None
    mark, *_, name, extra = _LOCAL.unpack_from(head, begin)
    content = begin + _LOCAL.size + name + extra
    return (content, content + size) if mark == b"PK\3\4" else None
