"""Load the native kernel, choose its path for this processor, and call it.

Callers keep their way without it: it is missing where there was no C compiler, and it is the standard by which tests
judge the kernel. Calls release the GIL.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Sequence
from ctypes import POINTER, c_int, c_int32, c_int64, c_size_t, c_uint32, c_void_p
from functools import cache
from pathlib import Path

import numpy as np
from crc32c import crc32c

from torchrec_stream_ckpt.errors import ConfigError
from torchrec_stream_ckpt.native.build import LIBRARY, WITHOUT

log = logging.getLogger(__name__)

ABI = 1
"""Version of the library's functions. ``kernel.c`` has the same number."""
PATHS = ("plain", "sse42", "avx2", "avx512", "armv8")
"""Ways to compute a checksum, by the number that ``kernel.c`` gives them."""
VARIABLE = "STREAM_CKPT_KERNEL"
"""Environment variable: ``off``, or the best path that may be used."""
LARGE = 32 * 1024
"""Minimum size in bytes from which on a checksum by the kernel is faster, including the call."""
FASTER_THAN_CRC32C = ("avx512",)
"""Paths that read memory faster than the library crc32c. On an EPYC (Zen 3), 64 MiB: crc32c 12.7 GB/s, avx2 12.4."""
DIGESTS_FASTER = ("avx2", "avx512")
"""Paths that digest rows faster than numpy. 20.5 MB of rows, cold, on a Xeon: numpy 5.4 ms, plain 9.6, avx2 3.8, avx512
2.6."""
COPIES_FASTER = ("sse42", "avx2", "avx512")
"""Paths that copy past the caches. 50 MB on each of two ranks at once, on a Xeon: torch 8.0 to 9.2 ms, sse42 5.7,
avx512 5.0."""
_LENGTHS = (0, 1, 9, 64, 255, 256, 300, 511, 512, 600, 3071, 3072, 3100, 8000)


class Column(ctypes.Structure):
    """Weights or one state: rows of a live tensor, and the same rows packed in a frame. All numbers are in bytes."""

    _fields_ = [
        ("live", c_void_p),
        ("stride", c_int64),
        ("packed", c_void_p),
        ("pitch", c_int64),
        ("width", c_size_t),
    ]
    live: int
    stride: int
    packed: int
    pitch: int
    width: int


class Kernel:
    """The loaded library. It trusts its callers: addresses must be valid until the call returns.

    Args:
        library: The library, of our ABI.
        path: Path to compute checksums by, one of ``PATHS``, which this processor must have.
    """

    def __init__(self, library: ctypes.CDLL, path: str) -> None:
        self.path = path
        self._crc = library.stream_ckpt_crc
        self._crc.argtypes, self._crc.restype = (c_uint32, c_void_p, c_size_t), c_uint32
        self._gather = library.stream_ckpt_gather
        self._gather.restype = c_int64
        self._gather.argtypes = (c_void_p, c_size_t, c_void_p, c_size_t, c_int64, c_int64, POINTER(Column), c_size_t)
        self._place = library.stream_ckpt_place
        self._place.restype = c_int64
        self._place.argtypes = (
            *(c_void_p, c_size_t, c_int64, c_int64, c_int64, POINTER(Column), c_size_t),
            *(POINTER(c_void_p), c_size_t, c_void_p, c_int, c_int64, c_int32),
        )

        self._digest = getattr(library, "stream_ckpt_digest_rows", None)
        if self._digest is not None:
            self._digest.restype = c_int
            self._digest.argtypes = (c_void_p, c_int, c_void_p, c_size_t, c_size_t, c_void_p, c_void_p, c_void_p)
        self._copy = getattr(library, "stream_ckpt_copy", None)
        if self._copy is not None:
            self._copy.restype, self._copy.argtypes = None, (c_void_p, c_void_p, c_size_t)

    @property
    def digests(self) -> bool:
        """True if :meth:`digest` is there and faster than numpy. An older library may lack it."""
        return self._digest is not None and self.path in DIGESTS_FASTER

    def digest(
        self, values: int, width: int, index: int | None, rows: int, words: int, columns: int, keys: int, found: int
    ) -> None:
        """Write the digest of each row: the sum of its words, each times the key of its column, times the row's key.

        Args:
            values: Address of rows of ``words`` signed words, one after the other, at a multiple of ``width``.
            width: Bytes of a word: 1, 2 or 4.
            index: Address of the numbers of the rows, int64. None for the first ones.
            rows: Number of rows to digest.
            words: Words of a row.
            columns: Address of the keys of the columns, int64.
            keys: Address of the keys of the rows, int64.
            found: Address of ``rows`` int64.
        """
        assert self._digest is not None
        done = self._digest(values, width, index, rows, words, columns, keys, found)
        assert done == 0, width

    @property
    def copies(self) -> bool:
        """True if :meth:`copy` is there and faster than torch on one thread. An older library may lack it."""
        return self._copy is not None and self.path in COPIES_FASTER

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        """Copy memory that nobody reads soon, past the caches.

        Args:
            target: Address of memory that does not overlap the source.
            source: Address of the source.
            num_bytes: Length of both.
        """
        assert self._copy is not None
        self._copy(target, source, num_bytes)

    def crc(self, address: int, num_bytes: int, crc: int = 0) -> int:
        """Return the CRC32C of memory, after bytes with the checksum ``crc``."""
        return int(self._crc(crc, address, num_bytes))

    def gather(
        self,
        payload: int,
        num_bytes: int,
        rows: int,
        count: int,
        row0: int,
        limit: int,
        columns: ctypes.Array[Column],
    ) -> int | None:
        """Fill the payload of a frame with ids and rows.

        Args:
            payload: Address of ``num_bytes`` bytes. Bytes between sections stay as they are.
            num_bytes: Length of the payload.
            rows: Address of ``count`` rows of the tensors, int64.
            count: Number of rows.
            row0: Id of row 0 of the tensors.
            limit: Number of rows of the tensors.
            columns: All columns, in the order of the payload.

        Returns:
            The payload's checksum. None if a row is not in [0, limit); the tensors were not read.
        """
        crc = int(self._gather(payload, num_bytes, rows, count, row0, limit, columns, len(columns)))
        return None if crc < 0 else crc

    def place(
        self,
        ids: int,
        count: int,
        row0: int,
        rows: int,
        first: int,
        columns: ctypes.Array[Column],
        arrived: Sequence[int],
        sent: int | None,
        block_bits: int,
        first_block: int,
        place: int,
    ) -> int:
        """Write the rows whose ids are in [row0, row0+rows) into live tensors, and record them as arrived.

        Args:
            ids: Address of the id of each packed row, int64.
            count: Number of packed rows.
            row0: First wanted id.
            rows: Number of wanted ids. The tensors must have a row for each of them.
            first: Id of the first row of the tensors.
            columns: All columns.
            arrived: Addresses of flags by row of the tensors, one byte each.
            sent: Address of one int32 for each block of ids: raised to ``place``. May be None.
            block_bits: A block has 2^block_bits ids.
            first_block: Number of the block that ``sent`` begins with.
            place: The value for ``sent``.

        Returns:
            Number of written rows.
        """
        flags = (c_void_p * len(arrived))(*arrived)
        return int(
            self._place(
                *(ids, count, row0, rows, first, columns, len(columns)),
                *(flags, len(arrived), sent, block_bits, first_block, place),
            )
        )


def load(library: Path = LIBRARY, wanted: str = "") -> tuple[Kernel | None, str]:
    """Load the kernel from a file, with the best path of this processor.

    Args:
        library: The file.
        wanted: The best path that may be used, or ``off``. Empty: any.

    Returns:
        The kernel, or None; and what runs instead, or which path runs.

    Raises:
        ConfigError: ``wanted`` is not the name of a path.
    """
    if wanted and wanted not in (*PATHS, "off"):
        raise ConfigError(
            f"{VARIABLE} must be off or one of {', '.join(PATHS)}, got {wanted!r}", hint=f"unset {VARIABLE}"
        )
    if wanted == "off":
        return None, f"{VARIABLE} is off"
    if not library.exists():
        return None, "it was not compiled"
    try:
        found = ctypes.CDLL(str(library))
        abi = int(found.stream_ckpt_abi())
    except (OSError, AttributeError) as error:
        return None, _refuse(f"{library.name} cannot be loaded: {error}")
    if abi != ABI:
        return None, _refuse(f"{library} has version {abi}, this package needs {ABI}")
    for number in range(PATHS.index(wanted) if wanted else len(PATHS) - 1, -1, -1):
        if found.stream_ckpt_use(number) == 0:
            kernel = Kernel(found, PATHS[number])
            if _is_right(kernel):
                return kernel, f"path {kernel.path}"
            _refuse(f"path {kernel.path} computes wrong checksums on this processor, please report it")
    return None, "no path computes right checksums"


def _refuse(reason: str) -> str:
    log.warning("native kernel: %s; %s", reason, WITHOUT)
    return reason


def _is_right(kernel: Kernel) -> bool:
    """Compare some checksums with those of the library crc32c: a path may be new to this kind of processor."""
    data = (np.arange(max(_LENGTHS) + 1, dtype=np.uint32) * 2654435761 >> 13).astype(np.uint8)
    for length in _LENGTHS:
        for begin in (0, 1):
            part = data[begin : begin + length]
            if kernel.crc(part.ctypes.data, length, length) != crc32c(part.data, length):
                return False
    return True


@cache
def _loaded() -> tuple[Kernel | None, str]:
    return load(wanted=os.environ.get(VARIABLE, ""))


def kernel() -> Kernel | None:
    """Return the kernel of this process. Returns None if it is not to be used, or cannot be.

    Raises:
        ConfigError: the variable ``STREAM_CKPT_KERNEL`` names no path.
    """
    return _loaded()[0]


def describe() -> str:
    """Say which kernel this process uses: ``avx2``, or ``none`` and the reason."""
    found, reason = _loaded()
    return found.path if found is not None else f"none ({reason})"


def checksum(data: memoryview, crc: int = 0) -> int:
    """Return the CRC32C of a buffer, after bytes with the checksum ``crc``. By the kernel if that is faster."""
    if data.nbytes >= LARGE and (found := kernel()) is not None and found.path in FASTER_THAN_CRC32C:
        return found.crc(np.frombuffer(data, np.uint8).ctypes.data, data.nbytes, crc)
    return int(crc32c(data, crc))
