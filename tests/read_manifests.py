"""Reads a manifest both ways, at one go and item by item, and holds them to each other."""

from __future__ import annotations

from torchrec_stream_ckpt.errors import CorruptionError
from torchrec_stream_ckpt.format.frame import Buffer
from torchrec_stream_ckpt.format.manifest import Manifest
from torchrec_stream_ckpt.format.packed_commit import read_manifest, written_manifest


def both_ways(data: Buffer, where: str) -> Manifest:
    """What ``Manifest.from_bytes`` reads, or the error that it raises."""
    quick = written_manifest(data)
    try:
        slow = Manifest.from_bytes(data, where)
    except CorruptionError:
        assert quick is None, "one way reads what the other one refuses"
        raise
    assert quick is None or (quick == slow and repr(quick) == repr(slow)), "the two ways read different things"
    assert read_manifest(data, where) == slow
    return slow
