"""Files in the page cache and out of it."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from common import UnavailableError

_BLOCK = 8 << 20
_DROP_CACHES = Path("/proc/sys/vm/drop_caches")
WARM, COLD = "warm", "cold"
STATES = (WARM, COLD)


@dataclass(frozen=True)
class Part:
    """Bytes of a file."""

    path: Path
    begin: int
    end: int


def files_under(*places: Path) -> Iterator[Path]:
    """Files of folders, and those that are named themselves; nothing of a place that is not there."""
    for place in places:
        yield from (path for path in (place, *place.rglob("*")) if path.is_file() and path.stat().st_size)


def prepare(state: str, *places: Path) -> None:
    """Have what lies there in the page cache (``WARM``) or out of it (``COLD``).

    Raises:
        UnavailableError: it does not leave the page cache.
    """
    found = list(files_under(*places))
    if state == WARM:
        warm(found)
    else:
        chill(found, drop_caches=False)


def warm(parts: Iterable[Path | Part]) -> None:
    """Have files, or parts of them, in the page cache."""
    block = memoryview(bytearray(_BLOCK))
    for each in parts:
        part = each if isinstance(each, Part) else Part(each, 0, each.stat().st_size)
        with open(part.path, "rb", buffering=0) as file:
            file.seek(part.begin)
            left = part.end - part.begin
            while left > 0 and (count := file.readinto(block[: min(left, _BLOCK)])):
                left -= count


def chill(paths: Sequence[Path], *, drop_caches: bool) -> None:
    """Have the files out of the page cache.

    Raises:
        UnavailableError: they are still there: some file systems live in it.
    """
    gc.collect()  # maps that nothing refers to any more
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fdatasync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
    if drop_caches:
        _DROP_CACHES.write_text("1\n")
    there = resident(paths)
    if there > 0.02:
        raise UnavailableError(f"{there:.0%} of what should be cold stays in the page cache")


def resident(paths: Iterable[Path]) -> float:
    """Which part of the files is in the page cache."""
    libc = ctypes.CDLL(None, use_errno=True)
    pages = cached = 0
    for path in paths:
        if not (size := path.stat().st_size):
            continue
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as view:
            count = -(-size // mmap.PAGESIZE)
            vector = (ctypes.c_ubyte * count)()
            first = ctypes.c_char.from_buffer(view)
            failed = libc.mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(size), vector)
            del first
            if failed:
                raise OSError(ctypes.get_errno(), "mincore")
            pages += count
            cached += int((torch.frombuffer(vector, dtype=torch.uint8) & 1).sum())
    return cached / max(1, pages)


def can_drop_caches() -> bool:
    return os.access(_DROP_CACHES, os.W_OK)
