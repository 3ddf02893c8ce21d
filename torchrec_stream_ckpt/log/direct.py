"""Direct writes, which bypass the page cache (O_DIRECT): whether a folder takes them, and the writes themselves.

Data in fresh pages of the page cache costs more CPU time than everything else that the publisher does
(docs/performance.md). A direct write needs a file offset, memory addresses and lengths that are multiples of a block.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import uuid
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

import numpy as np

from torchrec_stream_ckpt.format.padding import BLOCK, LEAST_BYTES
from torchrec_stream_ckpt.log.disk import file_system

log = logging.getLogger(__name__)

DIRECT = "direct"
BUFFERED = "buffered"
_IN_MEMORY = ("tmpfs", "ramfs")
REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)
"""Errors of a file system without direct writes, if it then takes the same bytes through the page cache. All
other errors are those of any write. If a limit on file sizes (RLIMIT_FSIZE) ends inside a block, ext4 returns EINVAL
too."""


def in_memory(folder: Path) -> str:
    """Return the reason why a folder in memory is not written directly, which some kernels would accept. Empty if it
    is on a disk."""
    kind = file_system(folder)
    return f"{kind} has no disk" if kind in _IN_MEMORY else ""


def refusal(folder: Path) -> str:
    """Return why files in an existing folder cannot get direct writes. Empty if they can.

    Writes one block into a file and deletes it.

    Raises:
        OSError: no file can be written there in either way. A limit on file sizes that ends inside a block looks like a
            refusal to a direct write; only the other way names it.
    """
    if reason := in_memory(folder):
        return reason
    kind = file_system(folder)
    path = folder / f".direct-{uuid.uuid4().hex}"
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT | os.O_CLOEXEC, 0o600)
        try:
            with mmap.mmap(-1, BLOCK) as block:
                os.pwrite(fd, block, 0)
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno not in REFUSALS:
            raise
        path.write_bytes(bytes(BLOCK))
        return refused(kind, error)
    finally:
        path.unlink(missing_ok=True)
    return ""


def refused(kind: str, error: OSError) -> str:
    """Return the reason that a refused direct write gives."""
    return f"{kind} refuses direct writes: {error.strerror}"


def runs(parts: Sequence[memoryview], position: int) -> Iterator[tuple[bool, list[memoryview]]]:
    """Split consecutive parts, of which the first goes to file offset ``position``, by how they can be written.

    Yields (whether they can be written directly, the parts).
    """
    marked = []
    for part in parts:
        marked.append((position % BLOCK == 0 and _fits(part), part))
        position += len(part)
    for fits, group in groupby(marked, key=lambda each: each[0]):
        yield fits, [part for _, part in group]


def _fits(part: memoryview) -> bool:
    return (
        len(part) >= LEAST_BYTES
        and len(part) % BLOCK == 0
        and int(np.frombuffer(part, np.uint8).ctypes.data) % BLOCK == 0
    )


def write_blocks(fd: int, parts: Sequence[memoryview], position: int) -> list[memoryview]:
    """Write parts of whole blocks at file offset ``position``.

    Returns the rest that has to be written through the page cache: after a write that ended inside a block.

    Raises:
        OSError: not all of them were written.
    """
    rest = list(parts)
    while rest:
        written = os.pwritev(fd, rest, position)
        position += written
        left = written
        while rest and left >= len(rest[0]):
            left -= len(rest.pop(0))
        if left:
            rest[0] = rest[0][left:]
        if written % BLOCK or not written:
            break
    return rest
