"""Write a file of a marker's dense state: hashed as it is written, and by direct writes if the disk allows them.

Data in fresh pages of the page cache, read from there again for a digest, costs more CPU time than its SHA-256.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import logging
import mmap
import os
from functools import cache
from pathlib import Path
from typing import Any

from torchrec_stream_ckpt.format.dense_files import DenseFile
from torchrec_stream_ckpt.format.padding import BLOCK
from torchrec_stream_ckpt.log.direct import REFUSALS, in_memory, refused, write_blocks
from torchrec_stream_ckpt.log.disk import file_system
from torchrec_stream_ckpt.util.durable import write_all

log = logging.getLogger(__name__)

PIECE_BYTES = 256 * BLOCK
"""Bytes that are written at a time. A file that is shorter goes through the page cache."""


class HashedFile(io.BufferedIOBase):
    """A file that is written from its begin on. One that exists is emptied; a link is not followed.

    Args:
        path: Path of the file.
        direct: True to bypass the page cache. A file system that refuses that gets the same bytes through it.
    """

    def __init__(self, path: Path, *, direct: bool) -> None:
        self._fd = -1  # for close(), which Python calls even if the rest of this fails
        self.failure: OSError | None = None
        """Error of a write. torch's archive hides it behind "unexpected pos"."""
        self._held = 0
        self._written = 0
        self._sha256 = hashlib.sha256()
        self._path = path
        self._direct = direct and not in_memory(path.parent)
        self._piece = mmap.mmap(-1, PIECE_BYTES)
        """Bytes that are not written yet, at an address that direct writes accept."""
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._written + self._held

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._sha256.update(view)
        rest = view
        while rest:
            part = rest[: PIECE_BYTES - self._held]
            if len(part) == PIECE_BYTES and not self._direct:
                self._put(rest)
                break
            self._piece[self._held : self._held + len(part)] = part
            self._held += len(part)
            rest = rest[len(part) :]
            if self._held == PIECE_BYTES:
                self._put_held()
        return len(view)

    def flush(self) -> None:
        """Write nothing. torch calls it after each tensor, and when it forgets a file that has failed and is closed."""

    def fileno(self) -> int:
        """Return the descriptor, for a sync. All bytes are written before."""
        self._put_held()
        return self._fd

    def close(self) -> None:
        if self.closed:
            return
        try:
            if self.failure is None:
                self._put_held()
        finally:
            super().close()
            if self._fd >= 0:
                os.close(self._fd)

    @property
    def digest(self) -> DenseFile:
        """Name, length and SHA-256 of all that was written."""
        return DenseFile(self._path.name, self.tell(), self._sha256.hexdigest())

    def _put_held(self) -> None:
        held, self._held = self._held, 0
        if held:
            self._put(memoryview(self._piece)[:held])

    def _put(self, data: memoryview) -> None:
        try:
            if self._direct and len(data) == PIECE_BYTES:
                self._put_blocks(data)
            else:
                self._put_buffered([data], self._written + len(data))
        except OSError as error:
            self.failure = error
            raise
        self._written += len(data)

    def _put_blocks(self, piece: memoryview) -> None:
        """Write the blocks of a piece directly, and the rest through the page cache."""
        rest, refusal = [piece], None
        if self._written % BLOCK:
            self._direct = False
        else:
            try:
                self._pass_cache(True)
                rest = write_blocks(self._fd, [piece], self._written)
            except OSError as error:
                if error.errno not in REFUSALS:
                    raise
                refusal = error
        if rest:
            self._put_buffered(rest, self._written + len(piece))
        if refusal is not None:
            self._direct = False
            _warn(refused(file_system(self._path.parent), refusal))

    def _put_buffered(self, parts: list[memoryview], end: int) -> None:
        """Write parts that end at file offset ``end`` through the page cache."""
        self._pass_cache(False)
        os.lseek(self._fd, end - sum(map(len, parts)), os.SEEK_SET)
        write_all(self._fd, parts)

    def _pass_cache(self, passes: bool) -> None:
        """Bypass the page cache from here on, or write through it. Does not open the path, which may be another's."""
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        wanted = flags | os.O_DIRECT if passes else flags & ~os.O_DIRECT
        if wanted != flags:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, wanted)


@cache
def _warn(reason: str) -> None:
    """Say once why dense state is written through the page cache."""
    log.warning("dense state is written through the page cache, which takes more CPU time: %s", reason)
