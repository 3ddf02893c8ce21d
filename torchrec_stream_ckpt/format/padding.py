"""Lengths of padding that makes frames begin and end at blocks, for direct writes. Specified in docs/format.md."""

from __future__ import annotations

from torchrec_stream_ckpt.format.frame import HEADER_LEN, MAX_FRAME_BYTES

BLOCK = 4096
"""Bytes of a block. A multiple of every logical sector in use (512, 4096), and of the page of most machines."""
LEAST_BYTES = 256 * 1024
"""Size from which on a frame is padded. The system call and the padding of a smaller one cost as much as its pages."""
MOST_SHARE = 0.01
"""Largest part of a stream's bytes that may be padding."""


def gap(position: int) -> int:
    """Return the length of the PAD frame that leads from ``position`` to a block. 0 if a block begins there."""
    missing = -position % BLOCK
    return missing if missing == 0 or missing >= HEADER_LEN else missing + BLOCK


def with_padding(num_bytes: int) -> int:
    """Return the memory of a frame of up to ``num_bytes`` and its padding. Frames that are not padded need no more."""
    return -(-(num_bytes + HEADER_LEN) // BLOCK) * BLOCK if num_bytes >= LEAST_BYTES else num_bytes


BUFFER_BYTES = with_padding(MAX_FRAME_BYTES)
"""Memory of any frame and its padding."""
