"""Give the disk back what a long run has written and nobody will read."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_KEEP_SIZE, _PUNCH_HOLE = 1, 2


def punch(folder: Path) -> None:
    """Segments of a file log keep their names and lengths, and lose their blocks; what is appended later is kept.

    Without this, a log of 65 MB a step would fill any disk. A restore of such a log fails, and none is asked for.

    Raises:
        OSError: the file system has no holes.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    for path in folder.rglob("*.seg"):
        fd = os.open(path, os.O_RDWR)
        try:
            size = ctypes.c_int64(os.fstat(fd).st_size)
            if size.value and libc.fallocate(fd, _KEEP_SIZE | _PUNCH_HOLE, ctypes.c_int64(0), size):
                error = ctypes.get_errno()
                raise OSError(error, f"no holes here ({os.strerror(error)}): BENCH_DIR names another folder")
        finally:
            os.close(fd)
