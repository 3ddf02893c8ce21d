"""Write folders and files that survive a power loss, and write all bytes of a buffer."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

_MOST_PARTS = 512
"""Parts that one call writes. A system may reject more than 1024."""


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
    rest = [part for part in parts if len(part)]
    rest.reverse()
    while rest:
        written = os.writev(fd, rest[: -_MOST_PARTS - 1 : -1])
        while rest and written >= len(rest[-1]):
            written -= len(rest.pop())
        if written:
            rest[-1] = rest[-1][written:]


def nearest_folder(path: Path) -> Path:
    """Return ``path`` if it exists, otherwise the nearest folder above it that does."""
    return next(each for each in (path, *path.parents) if each.exists())
