"""The JSON objects of a store: manifests, one a marker, folds, and what retention says. Specified in docs/format.md.

Each is ``{"body": ..., "crc32c": ..., "format": 1, "kind": ...}`` in canonical JSON; the checksum is that of the
canonical body.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from crc32c import crc32c

from torchrec_stream_ckpt.errors import ConfigError, CorruptionError
from torchrec_stream_ckpt.format.control import Commit, Fields, Mark, canonical, parse_control
from torchrec_stream_ckpt.format.frame import Buffer
from torchrec_stream_ckpt.types import MarkerId, TableShard

FORMAT = 1
"""Format of a store: of its names, its segments and its JSON objects."""

_LATEST_S = 2.0**36
"""Some year that ``time`` can print."""
_NAME = re.compile(r"[A-Za-z0-9_./-]{1,300}")


@dataclass(frozen=True, slots=True)
class SegmentRef:
    """A segment as a manifest names it."""

    name: str
    num_bytes: int
    front_bytes: int
    """Bytes in front of its chunks: header, directory and notes."""
    header_crc: int
    """Checksum of its header, which vouches for the directory, which vouches for the chunks."""
    rows: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """A marker is in the store once this object is there: all segments of its interval, and its dense state."""

    commit: Commit
    """As it stands in the control partition, signature and all."""
    previous: MarkerId | None
    """The marker before in its generation, where its interval begins; None at the generation's first one."""
    segments: tuple[tuple[SegmentRef, ...], ...]
    """By rank, each in the order of the stream: a row's newest version is in the last segment that has it."""

    def to_bytes(self) -> bytes:
        body = {
            "commit": _frame_text(self.commit),
            "previous": _marker_text(self.previous),
            "segments": [[asdict(each) for each in ranks] for ranks in self.segments],
        }
        return _wrap("manifest", body)

    @classmethod
    def from_bytes(cls, data: Buffer, where: str) -> Manifest:
        """Read and check one.

        Raises:
            CorruptionError: it is altered, of a newer format, or none at all; names the object.
        """
        body = _unwrap(data, "manifest", where, {"commit", "previous", "segments"})
        commit, previous = _commit(body, where)
        ranks = tuple(_refs(each, where) for each in _list(body["segments"], where))
        if len(ranks) != len(commit.ranks) or not all(ranks):
            raise CorruptionError("manifest does not name segments of each rank", name=where)
        return cls(commit, previous, ranks)


@dataclass(frozen=True, slots=True)
class Fold:
    """The newest version of each row that changed in (start, end]; of all rows without ``start``: a base."""

    job: bytes
    start: MarkerId | None
    end: MarkerId
    segments: tuple[SegmentRef, ...]

    def to_bytes(self) -> bytes:
        body = {
            "job": self.job.hex(),
            "start": _marker_text(self.start),
            "end": str(self.end),
            "segments": [asdict(each) for each in self.segments],
        }
        return _wrap("fold", body)

    @classmethod
    def from_bytes(cls, data: Buffer, where: str) -> Fold:
        """As :meth:`Manifest.from_bytes`."""
        body = _unwrap(data, "fold", where, {"job", "start", "end", "segments"})
        try:
            job, start = bytes.fromhex(str(body["job"])), _marker(body["start"])
            end = MarkerId.parse(str(body["end"]))
        except ValueError as error:
            raise CorruptionError(f"fold: {error}", name=where) from None
        return cls(job, start, end, _refs(body["segments"], where))


@dataclass(frozen=True, slots=True)
class Dropped:
    """A marker was given up: it is not offered any more.

    Holds what its manifest said of the lineage, so that the manifest may go.
    """

    commit: Commit
    previous: MarkerId | None
    """As in the manifest."""
    time_s: float
    """When, Unix time."""
    reason: str = "retention"
    """By what, for people."""

    @property
    def day(self) -> str:
        """When, for people."""
        return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(self.time_s))

    def to_bytes(self) -> bytes:
        body = {
            "commit": _frame_text(self.commit),
            "previous": _marker_text(self.previous),
            "time_s": self.time_s,
            "reason": self.reason,
        }
        return _wrap("dropped", body)

    @classmethod
    def from_bytes(cls, data: Buffer, where: str) -> Dropped:
        """As :meth:`Manifest.from_bytes`."""
        body = _unwrap(data, "dropped", where, {"commit", "previous", "time_s", "reason"})
        return cls(*_commit(body, where), _time(body, where), str(body["reason"]))


@dataclass(frozen=True, slots=True)
class Garbage:
    """Objects that nobody needed at some time; they go once that is long enough ago for all who were reading them."""

    time_s: float
    """When that was found, Unix time."""
    names: tuple[str, ...]

    def to_bytes(self) -> bytes:
        return _wrap("garbage", {"time_s": self.time_s, "names": list(self.names)})

    @classmethod
    def from_bytes(cls, data: Buffer, where: str) -> Garbage:
        """As :meth:`Manifest.from_bytes`."""
        body = _unwrap(data, "garbage", where, {"time_s", "names"})
        return cls(_time(body, where), tuple(str(name) for name in _list(body["names"], where)))


@dataclass(frozen=True, slots=True)
class Pin:
    """Retention must keep a marker."""

    time_s: float
    """Since when, Unix time."""

    def to_bytes(self) -> bytes:
        return _wrap("pin", {"time_s": self.time_s})


@dataclass(frozen=True, slots=True)
class Notes:
    """What the last segment of a rank's interval says beside rows."""

    shards: tuple[TableShard, ...]
    """What the rank holds in this generation, as its HELLO says."""
    mark: Mark

    def to_json(self) -> bytes:
        return canonical(asdict(self))

    @classmethod
    def from_json(cls, data: bytes, where: str) -> Notes:
        """As :meth:`Manifest.from_bytes`; the checksum is the segment's."""
        fields = Fields(data, f"notes of {where}", cls)
        return cls(fields.each("shards", TableShard), Mark.from_json(canonical(fields.take("mark", dict))))


def _commit(body: Mapping[str, Any], where: str) -> tuple[Commit, MarkerId | None]:
    """The COMMIT that an object holds, and the marker before it in its generation."""
    commit = parse_control(_raw(body["commit"], where))
    if not isinstance(commit, Commit):
        raise CorruptionError("this object does not hold a COMMIT", name=where)
    try:
        previous = _marker(body["previous"])
    except ConfigError as error:
        raise CorruptionError(error.message, name=where) from None
    if previous is not None and not (previous < commit.id and previous.generation == commit.generation):
        raise CorruptionError(f"{previous} is not in front of {commit.id}", name=where)
    return commit, previous


def _frame_text(commit: Commit) -> str:
    return base64.b64encode(commit.to_frame()).decode("ascii")


def _marker_text(marker: MarkerId | None) -> str | None:
    return str(marker) if marker is not None else None


def _marker(text: object) -> MarkerId | None:
    return MarkerId.parse(str(text)) if text is not None else None


def _time(body: Mapping[str, Any], where: str) -> float:
    value = body["time_s"]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < _LATEST_S:
        raise CorruptionError(f"{value!r:.40} is no time", name=where)
    return float(value)


def _wrap(kind: str, body: Mapping[str, Any]) -> bytes:
    return canonical({"format": FORMAT, "kind": kind, "crc32c": f"{crc32c(canonical(body)):08x}", "body": body})


def _unwrap(data: Buffer, kind: str, where: str, names: set[str]) -> dict[str, Any]:
    raw = _object(bytes(data), where)
    version = raw.get("format")
    if isinstance(version, int) and version > FORMAT:
        raise CorruptionError(
            f"{kind} has format {version}, this program reads up to {FORMAT}",
            hint="upgrade torchrec_stream_ckpt on the reading side",
            name=where,
        )
    body = raw.get("body")
    if raw.keys() != {"format", "kind", "crc32c", "body"} or version != FORMAT or not isinstance(body, dict):
        raise CorruptionError(f"not a {kind} of this store", name=where)
    if raw["kind"] != kind or raw["crc32c"] != f"{crc32c(canonical(body)):08x}":
        raise CorruptionError(f"{kind} was altered: its checksum does not match", name=where)
    if body.keys() != names:
        raise CorruptionError(f"{kind} has fields {sorted(body)!r:.200}, expected {sorted(names)}", name=where)
    return body


def _object(data: bytes, where: str) -> dict[str, Any]:
    try:
        raw = json.loads(data.decode("ascii"))
        canonical(raw)  # no number that is none
    except (ValueError, RecursionError) as error:
        raise CorruptionError(f"no JSON: {error}", name=where) from None
    if not isinstance(raw, dict):
        raise CorruptionError("no JSON object", name=where)
    return raw


def _refs(items: object, where: str) -> tuple[SegmentRef, ...]:
    refs = []
    for item in _list(items, where):
        fields = Fields(canonical(item), f"segment in {where}", SegmentRef)
        ref = SegmentRef(
            fields.take("name", str),
            fields.take("num_bytes", int),
            fields.take("front_bytes", int),
            fields.take("header_crc", int),
            fields.take("rows", int),
        )
        if not _NAME.fullmatch(ref.name) or ".." in ref.name or ref.front_bytes > ref.num_bytes:
            raise CorruptionError(f"{ref.name!r:.80} is no segment", name=where)
        refs.append(ref)
    return tuple(refs)


def _list(value: object, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise CorruptionError("segments are no list", name=where)
    return value


def _raw(text: object, where: str) -> bytes:
    try:
        return base64.b64decode(str(text), validate=True)
    except binascii.Error as error:
        raise CorruptionError(f"no base64: {error}", name=where) from None
