"""A manifest as this library writes it: checked by one expression when it is read, and not made again to be compared.

A plan reads the manifests of all markers that lead to one. To read a manifest item by item takes four times as long as
to see that it is whole. So one whose bytes are exactly those that its writer makes (canonical JSON, with a COMMIT as
:mod:`packed_commit` takes it) is checked at once. Whatever differs in any way goes through
:meth:`Manifest.from_bytes`, which says what is wrong. Both ways refuse the same bytes, and read the same.
"""

from __future__ import annotations

import re
from binascii import a2b_base64

from crc32c import crc32c

from torchrec_stream_ckpt.format.control import Commit
from torchrec_stream_ckpt.format.frame import Buffer
from torchrec_stream_ckpt.format.manifest import Manifest, SegmentRef
from torchrec_stream_ckpt.format.packed_commit import BASE64, NUMBER, written_commit
from torchrec_stream_ckpt.format.segment import HEADER_LEN
from torchrec_stream_ckpt.layout import StoreSegment
from torchrec_stream_ckpt.types import MarkerId

_GENERATION, _MARKER = "(?:0|[1-9][0-9]{0,8})", "(?:0|[1-9][0-9]{0,17})"
"""As :meth:`MarkerId.parse` takes them."""
_NAME = "[A-Za-z0-9/._-]{1,400}"
"""Of a segment: which one it has to be is compared later."""
_REF = rf'\{{"front_bytes":{NUMBER},"header_crc":{NUMBER},"name":"{_NAME}","num_bytes":{NUMBER},"rows":{NUMBER}\}}'
_OF_RANK = rf"{_REF}(?:,{_REF})*"
_MANIFEST = re.compile(
    (
        rf'\{{"body":(?P<body>\{{"commit":"(?P<commit>{BASE64})"'
        rf',"previous":(?:null|"(?P<generation>{_GENERATION}):(?P<marker>{_MARKER})")'
        rf',"segments":\[\[(?P<segments>{_OF_RANK}(?:\],\[{_OF_RANK})*)\]\]\}})'
        r',"crc32c":"(?P<crc>[0-9a-f]{8})","format":1,"kind":"manifest"\}'
    ).encode("ascii")
)
_EACH_REF = re.compile(
    rb'\{"front_bytes":([0-9]+),"header_crc":([0-9]+),"name":"([^"]+)","num_bytes":([0-9]+),"rows":([0-9]+)\}'
)


def read_manifest(data: Buffer, where: str) -> Manifest:
    """Read and check one; raises as :meth:`Manifest.from_bytes`."""
    found = written_manifest(data)
    return found if found is not None else Manifest.from_bytes(data, where)


def written_manifest(data: Buffer) -> Manifest | None:
    """Read a manifest that is exactly as its writer makes it; None for every other one, and for what is none."""
    match = _MANIFEST.fullmatch(bytes(data))
    if match is None or f"{crc32c(match['body']):08x}" != match["crc"].decode("ascii") or len(match["commit"]) % 4:
        return None
    commit = written_commit(a2b_base64(match["commit"]))
    if commit is None:
        return None
    previous = None
    if match["generation"] is not None:
        previous = MarkerId(int(match["generation"]), int(match["marker"]))
        if not (previous < commit.id and previous.generation == commit.generation):
            return None
    of_ranks = match["segments"].split(b"],[")
    if len(of_ranks) != len(commit.ranks):
        return None
    segments = tuple(_refs(commit, rank, text) for rank, text in enumerate(of_ranks))
    return Manifest(commit, previous, segments) if all(segments) else None


def _refs(commit: Commit, rank: int, text: bytes) -> tuple[SegmentRef, ...]:
    """The segments of a rank; none if one is not what it has to be."""
    refs = []
    for part, (front_bytes, header_crc, name, num_bytes, rows) in enumerate(_EACH_REF.findall(text)):
        ref = SegmentRef(name.decode("ascii"), int(num_bytes), int(front_bytes), int(header_crc), int(rows))
        expected = StoreSegment(commit.job, commit.id, rank, part).name
        if ref.name != expected or not HEADER_LEN <= ref.front_bytes <= ref.num_bytes:
            return ()
        refs.append(ref)
    return tuple(refs)
