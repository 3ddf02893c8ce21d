"""Write folders and files that survive a power loss, and move all bytes of buffers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

_MOST_PARTS = 1024
"""Parts that one call moves. Linux rejects more."""


def make_dirs(path: Path) -> None:
    """Create a folder and its missing parents. Their names are durable afterwards."""
    made = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in made:
        fsync_dir(folder.parent)


def fsync_dir(path: Path) -> None:
    """Make the names in a folder durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def fsync_contents(folder: Path) -> None:
    """Make the names in a folder durable, and the bytes of its files."""
    for path in folder.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    fsync_dir(folder)


def write_synced(path: Path, data: bytes) -> None:
    """Write a file. Its bytes are durable afterwards, its name is not."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def write_all(fd: int, parts: Iterable[memoryview]) -> None:
    """Write all bytes of ``parts``, views of bytes, one after the other. They are not synced.

    Raises:
        OSError: Not all of them were written.
    """
    _move(parts, lambda some: os.writev(fd, some))


def read_all(fd: int, begin: int, parts: Iterable[memoryview]) -> None:
    """Fill ``parts``, views of bytes, one after the other, with a file's bytes from ``begin`` on.

    Raises:
        EOFError: The file is shorter.
    """

    def read(some: list[memoryview]) -> int:
        nonlocal begin
        if not (count := os.preadv(fd, some, begin)):
            raise EOFError(f"it ends at {begin}")
        begin += count
        return count

    _move(parts, read)


def _move(parts: Iterable[memoryview], call: Callable[[list[memoryview]], int]) -> None:
    """Call the system until it has moved all bytes of ``parts``."""
    rest = [part for part in parts if len(part)]
    rest.reverse()
    while rest:
        count = call(rest[: -_MOST_PARTS - 1 : -1])
        while rest and count >= len(rest[-1]):
            count -= len(rest.pop())
        if count:
            rest[-1] = rest[-1][count:]


def nearest_folder(path: Path) -> Path:
    """Return ``path`` if it exists, otherwise the nearest folder above it that does."""
    return next(each for each in (path, *path.parents) if each.exists())
