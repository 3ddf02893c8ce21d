"""Features that a CLAIM of version 4 announces, which older programs do not know. Specified in docs/format.md.

An older program refuses the generation at its CLAIM, before it has read or deleted a part of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torchrec_stream_ckpt.errors import CorruptionError, UnsupportedError

ALIGNED = "aligned"
"""The streams may contain PAD frames."""
DENSE_PROOF = "dense_proof"
"""A MARK may contain digests of dense state."""
IDS = "ids"
"""The streams may contain IDS frames, which a store has to keep."""
OBJECTS = "objects"
"""Offsets in data partitions are (object, byte), packed as by :class:`ObjectEnd`."""
KNOWN = (ALIGNED, DENSE_PROOF, IDS, OBJECTS)
"""All names, sorted."""

_BYTE_BITS = 40


class ObjectEnd(NamedTuple):
    """Position in a stream whose unit is an object."""

    object: int
    """Number of the object, from 0, below 2^24."""
    byte: int
    """Byte offset in the object, below 2^40. Just after its last byte, this is the length of the object."""

    def pack(self) -> int:
        """Pack the position into one number. Numbers are in stream order.

        Raises:
            UnsupportedError: a number is too large.
        """
        if not (0 <= self.object < 1 << 64 - _BYTE_BITS and 0 <= self.byte < 1 << _BYTE_BITS):
            raise UnsupportedError(
                f"object {self.object}, byte {self.byte} is outside the range of a log of objects",
                hint="start a new generation with larger objects",
            )
        return self.object << _BYTE_BITS | self.byte

    @classmethod
    def unpack(cls, packed: int) -> ObjectEnd:
        """Return the position that a 64-bit number packs."""
        return cls(packed >> _BYTE_BITS, packed & ((1 << _BYTE_BITS) - 1))


def check_announced(names: Sequence[str], what: str) -> None:
    """Refuse a list that no writer makes.

    Raises:
        CorruptionError: a name is unknown, or the list is empty, unsorted or has a name twice.
    """
    if unknown := sorted(set(names) - set(KNOWN)):
        raise CorruptionError(
            f"{what} has {unknown[0]!r:.80}, which this version does not support",
            hint="upgrade torchrec_stream_ckpt on the reading side",
        )
    if not names or list(names) != sorted(set(names)):
        raise CorruptionError(f"{what} must be sorted, without duplicates, and not empty")


def check_readable(names: Sequence[str], generation: int) -> None:
    """Refuse a generation whose log this program cannot read.

    Raises:
        UnsupportedError: its unit is an object.
    """
    if OBJECTS in names:
        raise UnsupportedError(
            "this version does not support a log of objects",
            hint="upgrade torchrec_stream_ckpt on the reading side",
            generation=generation,
        )
