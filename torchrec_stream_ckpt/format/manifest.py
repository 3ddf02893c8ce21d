"""JSON objects of a store: manifests (one per marker), folds, and records of retention. Specified in docs/format.md.

Each is ``{"body": ..., "crc32c": ..., "format": 1, "kind": ...}``, some of format 2, in canonical JSON. The checksum is
that of the canonical body.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from itertools import pairwise
from typing import Any

from crc32c import crc32c

from torchrec_stream_ckpt.errors import ConfigError, CorruptionError
from torchrec_stream_ckpt.format.control import Commit, parse_control
from torchrec_stream_ckpt.format.fields import Fields
from torchrec_stream_ckpt.format.frame import Buffer
from torchrec_stream_ckpt.format.schema import canonical
from torchrec_stream_ckpt.format.segment import HEADER_LEN
from torchrec_stream_ckpt.util.layout import FoldName, StoreSegment, parse_fold_segment
from torchrec_stream_ckpt.util.types import MarkerId
from torchrec_stream_ckpt.util.units import day

FORMAT = 1
"""Format of a store: of its names, its segments and its JSON objects."""

_LATEST_S = 2.0**36
"""Latest accepted Unix time. ``time`` can still print its year."""
_JOB = re.compile(r"[0-9a-f]{32}")
RETENTION = "retention"
"""Reason of a marker that a rule gave up. A pin overrides it."""
BY_HAND = "hand"
"""Reason of a marker that a person gave up by name. A pin overrides it, too."""
_LOST_ROWS = "the loss of its rows"


@dataclass(frozen=True, slots=True)
class SegmentRef:
    """Reference to a segment, as in a manifest."""

    name: str
    num_bytes: int
    front_bytes: int
    """Bytes before its chunks: header, directory and notes."""
    header_crc: int
    """Checksum of its header, which vouches for the directory, which vouches for the chunks."""
    rows: int


_REF_FIELDS = {each.name for each in fields(SegmentRef)}


@dataclass(frozen=True, slots=True)
class Manifest:
    """Object whose existence puts a marker in the store: all segments of its interval, and its dense state."""

    commit: Commit
    """COMMIT as in the control partition, with its signature."""
    previous: MarkerId | None
    """Previous marker of its generation, where its interval begins. None for the generation's first marker."""
    segments: tuple[tuple[SegmentRef, ...], ...]
    """Segments by rank, each rank's in stream order: a row's newest version is in the last segment that has it."""

    @property
    def refs(self) -> tuple[SegmentRef, ...]:
        """Segments of all ranks."""
        return tuple(ref for of_rank in self.segments for ref in of_rank)

    @property
    def last(self) -> tuple[SegmentRef, ...]:
        """Last segment of each rank, which has the rank's notes."""
        return tuple(of_rank[-1] for of_rank in self.segments)

    def to_bytes(self) -> bytes:
        body = {
            "commit": _frame_text(self.commit),
            "previous": _marker_text(self.previous),
            "segments": [[asdict(each) for each in ranks] for ranks in self.segments],
        }
        return _wrap("manifest", body)

    @classmethod
    def from_bytes(cls, data: Buffer, where: str) -> Manifest:
        """Read and check a manifest.

        Raises:
            CorruptionError: it was altered, is of a newer format, or is not a manifest; the error names the object.
        """
        body = _unwrap(data, "manifest", where, {"commit", "previous", "segments"})
        commit, previous = _commit(body, where)
        ranks = tuple(
            _refs(each, partial(_interval_name, commit, rank), where)
            for rank, each in enumerate(_list(body["segments"], where))
        )
        if len(ranks) != len(commit.ranks):
            raise CorruptionError("manifest does not list the segments of every rank", name=where)
        return cls(commit, previous, ranks)


@dataclass(frozen=True, slots=True)
class Fold:
    """The newest version of each row that changed in (start, end]. Without ``start`` it is a base and has all rows."""

    job: bytes
    start: MarkerId | None
    end: MarkerId
    chain: int
    """``RankEnd.chain`` of rank 0 at ``end``. Distinguishes histories that share a job and a marker's name."""
    segments: tuple[SegmentRef, ...]

    def to_bytes(self) -> bytes:
        body = {
            "job": self.job.hex(),
            "start": _marker_text(self.start),
            "end": str(self.end),
            "chain": self.chain,
            "segments": [asdict(each) for each in self.segments],
        }
        dense = all(ref.name == self.name_of(part) for part, ref in enumerate(self.segments))
        return _wrap("fold", body, FORMAT if dense else 2)

    def name_of(self, part: int) -> str:
        """Return the name of a part."""
        return FoldName(self.job, self.end, self.start).segment_name(part)

    @classmethod
    def from_bytes(cls, data: Buffer, where: str) -> Fold:
        """Read and check a fold, as :meth:`Manifest.from_bytes`."""
        body = _unwrap(data, "fold", where, {"job", "start", "end", "chain", "segments"}, highest=2)
        job, start, end = _job(body["job"], where), _marker(body["start"], where), _marker(body["end"], where)
        if end is None or (start is not None and not start < end):
            raise CorruptionError(f"{start} is not before {end}", name=where)
        name = FoldName(job, end, start)
        refs = _refs(body["segments"], name.segment_name, where, _parts(body["segments"], name, where))
        fold = cls(job, start, end, _chain(body, "fold", where), refs)
        if fold.to_bytes() != data:
            raise CorruptionError("fold is not in canonical form", name=where)
        return fold


@dataclass(frozen=True, slots=True)
class Dropped:
    """Record that a marker was given up and is no longer offered.

    It keeps the lineage information of the manifest, so that the manifest may be deleted.
    """

    commit: Commit
    previous: MarkerId | None
    """Previous marker of the generation, as in the manifest."""
    time_s: float
    """Time when it was given up, Unix time."""
    reason: str = RETENTION
    """Reason why it was given up; see :attr:`lost` and :attr:`of_choice`."""

    @classmethod
    def of_lost(cls, commit: Commit, previous: MarkerId | None) -> Dropped:
        """Make the record for a marker whose rows can never be in the store. All workers write the same bytes."""
        return cls(commit, previous, commit.time_s, _LOST_ROWS)

    @property
    def lost(self) -> bool:
        """True if its rows were lost. Dependent markers are then lost, too, unless the rows arrived after all."""
        return self.reason == _LOST_ROWS

    @property
    def of_choice(self) -> bool:
        """True if a rule or a person gave it up, which a pin overrides. False if data that it needs was lost."""
        return self.reason in (RETENTION, BY_HAND)

    @property
    def day(self) -> str:
        """Day when it was given up, for people."""
        return day(self.time_s)

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
        """Read and check the record, as :meth:`Manifest.from_bytes`."""
        body = _unwrap(data, "dropped", where, {"commit", "previous", "time_s", "reason"})
        return cls(*_commit(body, where), _time(body, where), _text(body["reason"], where))


@dataclass(frozen=True, slots=True)
class Garbage:
    """Objects that were found unneeded at some time. They are deleted once no reader of that time can need them.

    A record without clocks, of format 1, gives no usable time, because the wall clocks of two hosts do not agree.
    """

    time_s: float
    """Time when this was found, Unix time. For people."""
    names: tuple[str, ...]
    clocks: Mapping[str, float] = field(default_factory=dict)
    """Readings at that time of clocks that are never set, by name, in seconds."""
    newest: MarkerId | None = None
    """Newest marker of the job at that time. Used if a rule depends on the age of markers."""
    idle_s: float = 0.0
    """Time for which it had been the newest marker by then, at least, in seconds."""

    def to_bytes(self) -> bytes:
        body: dict[str, Any] = {"time_s": self.time_s, "names": list(self.names)}
        if not self.clocks:
            return _wrap("garbage", body)
        more = {"clocks": dict(self.clocks), "newest": _marker_text(self.newest), "idle_s": self.idle_s}
        return _wrap("garbage", body | more, 2)

    @classmethod
    def from_bytes(cls, data: Buffer, where: str) -> Garbage:
        """Read and check the record, as :meth:`Manifest.from_bytes`."""
        body = _unwrap(data, "garbage", where, {"time_s", "names"}, {"clocks", "newest", "idle_s"})
        names = tuple(_text(name, where) for name in _list(body["names"], where))
        if "clocks" not in body:
            return cls(_time(body, where), names)
        clocks = body["clocks"]
        if not isinstance(clocks, dict) or not clocks:
            raise CorruptionError(f"garbage has invalid clocks {clocks!r:.80}", name=where)
        shown = {name: _seconds(value, where) for name, value in clocks.items()}
        newest, idle_s = _marker(body["newest"], where), _seconds(body["idle_s"], where)
        return cls(_time(body, where), names, shown, newest, idle_s)


@dataclass(frozen=True, slots=True)
class Pin:
    """Record that retention must keep a marker."""

    time_s: float
    """Time when the marker was pinned, Unix time."""

    def to_bytes(self) -> bytes:
        return _wrap("pin", {"time_s": self.time_s})


@dataclass(frozen=True, slots=True)
class TableRows:
    """A range of rows of a table."""

    table: int
    """The table's id."""
    begin: int
    """First row."""
    end: int
    """Row after the last one."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Finding of a checker: rows of a marker that differ from the tables at a cut. It has no effect on its own."""

    job: bytes
    marker: MarkerId
    chain: int
    """Chain of the marker, as in :class:`Fold`."""
    rows: tuple[TableRows, ...]
    time_s: float
    """Time of the finding, Unix time."""

    def to_bytes(self) -> bytes:
        body = {
            "job": self.job.hex(),
            "marker": str(self.marker),
            "chain": self.chain,
            "rows": [asdict(each) for each in self.rows],
            "time_s": self.time_s,
        }
        return _wrap("verdict", body)

    @classmethod
    def from_bytes(cls, data: Buffer, where: str) -> Verdict:
        """Read and check the finding, as :meth:`Manifest.from_bytes`."""
        body = _unwrap(data, "verdict", where, {"job", "marker", "chain", "rows", "time_s"})
        marker = _marker(body["marker"], where)
        if marker is None:
            raise CorruptionError("verdict does not name a marker", name=where)
        rows = tuple(_table_rows(item, where) for item in _list(body["rows"], where))
        return cls(_job(body["job"], where), marker, _chain(body, "verdict", where), rows, _time(body, where))


def _table_rows(item: object, where: str) -> TableRows:
    try:
        fields = Fields(canonical(item), "rows", TableRows)
        found = TableRows(*(fields.take(name, int) for name in ("table", "begin", "end")))
    except CorruptionError as error:
        raise CorruptionError(error.message, name=where) from None
    if not found.begin < found.end:
        raise CorruptionError(f"verdict has an empty range of rows [{found.begin}, {found.end})", name=where)
    return found


def _chain(body: Mapping[str, Any], what: str, where: str) -> int:
    chain = body["chain"]
    if type(chain) is not int or not 0 <= chain < 2**32:
        raise CorruptionError(f"{what} has an invalid chain {chain!r:.80}", name=where)
    return chain


def _commit(body: Mapping[str, Any], where: str) -> tuple[Commit, MarkerId | None]:
    """Return the COMMIT in an object, and the previous marker of its generation."""
    try:
        commit = parse_control(base64.b64decode(_text(body["commit"], where), validate=True))
    except ValueError as error:
        raise CorruptionError(f"not base64: {error}", name=where) from None
    except CorruptionError as error:
        raise CorruptionError(error.message, hint=error.hint, **{"name": where, **error.where}) from None
    if not isinstance(commit, Commit):
        raise CorruptionError("this object does not hold a COMMIT", name=where)
    previous = _marker(body["previous"], where)
    if previous is not None and not (previous < commit.id and previous.generation == commit.generation):
        raise CorruptionError(f"{previous} is not before {commit.id}", name=where)
    return commit, previous


def _interval_name(commit: Commit, rank: int, part: int) -> str:
    return StoreSegment(commit.job, commit.id, rank, part).name


def _frame_text(commit: Commit) -> str:
    return base64.b64encode(commit.to_frame()).decode("ascii")


def _marker_text(marker: MarkerId | None) -> str | None:
    return str(marker) if marker is not None else None


def _marker(text: object, where: str) -> MarkerId | None:
    if text is None:
        return None
    try:
        marker = MarkerId.parse(_text(text, where))
    except ConfigError as error:
        raise CorruptionError(error.message, name=where) from None
    if str(marker) != text:
        raise CorruptionError(f"{text!r:.80} is not the canonical form of marker {marker}", name=where)
    return marker


def _job(text: object, where: str) -> bytes:
    if not _JOB.fullmatch(_text(text, where)):
        raise CorruptionError(f"{text!r:.80} is not a job id", name=where)
    return bytes.fromhex(str(text))


def _text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise CorruptionError(f"{value!r:.80} is not a string", name=where)
    return value


def _time(body: Mapping[str, Any], where: str) -> float:
    return _seconds(body["time_s"], where)


def _seconds(value: object, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < _LATEST_S:
        raise CorruptionError(f"{value!r:.40} is not a time in seconds", name=where)
    return float(value)


def _wrap(kind: str, body: Mapping[str, Any], version: int = FORMAT) -> bytes:
    return _sealed(canonical(body), kind, version)


def _sealed(body: bytes, kind: str, version: int) -> bytes:
    """Return the canonical JSON of an object with this canonical body."""
    return b'{"body":%s,"crc32c":"%08x","format":%d,"kind":"%s"}' % (body, crc32c(body), version, kind.encode("ascii"))


def _unwrap(
    data: Buffer, kind: str, where: str, names: set[str], added: Set[str] = frozenset(), highest: int = FORMAT
) -> dict[str, Any]:
    """Check a JSON object and return its body.

    ``added`` are the fields that only format 2 has. ``highest`` is the newest format if there are no such fields.
    """
    data = bytes(data)
    raw, text = _object(data, where)
    version, highest = raw.get("format"), 2 if added else highest
    if type(version) is int and version > highest:
        raise CorruptionError(
            f"{kind} has format {version}, this program reads up to {highest}",
            hint="upgrade torchrec_stream_ckpt on the reading side",
            name=where,
        )
    body = raw.get("body")
    known = type(version) is int and FORMAT <= version <= highest and raw.keys() == {"format", "kind", "crc32c", "body"}
    if not known or raw["kind"] != kind or not isinstance(body, dict):
        raise CorruptionError(f"not a {kind} of this store", name=where)
    if _sealed(text, kind, raw["format"]) != data:
        raise CorruptionError(f"{kind} was altered: its checksum does not match", name=where)
    expected = names | added if version == 2 else names
    if body.keys() != expected:
        raise CorruptionError(f"{kind} has fields {sorted(body)!r:.200}, expected {sorted(expected)}", name=where)
    return body


def _object(data: bytes, where: str) -> tuple[dict[str, Any], bytes]:
    """Return a JSON object, and the canonical text of its body."""
    try:
        raw = json.loads(data.decode("ascii"))
        text = canonical(raw.get("body") if isinstance(raw, dict) else raw)  # raises for NaN and infinity
    except (ValueError, RecursionError) as error:
        raise CorruptionError(f"not JSON: {error}", name=where) from None
    if not isinstance(raw, dict):
        raise CorruptionError("not a JSON object", name=where)
    return raw, text


def _parts(items: object, fold: FoldName, where: str) -> list[int]:
    """Return the numbers of a fold's parts, from their names. They ascend, and some may be omitted."""
    found = [parse_fold_segment(str(item.get("name"))) for item in _list(items, where) if isinstance(item, dict)]
    parts = [part for each, part in filter(None, found) if each == fold]
    if len(parts) < len(found) or any(part <= before for before, part in pairwise(parts)):
        parts = list(range(len(found)))  # the check that follows names the first one that belongs to another fold
    return parts


def _refs(
    items: object, name_of: Callable[[int], str], where: str, parts: Sequence[int] | None = None
) -> tuple[SegmentRef, ...]:
    """Read the parts of one interval or fold. Their names follow from it, so none can belong to another one."""
    given = _list(items, where)
    numbers = parts if parts is not None and len(parts) == len(given) else range(len(given))
    refs = tuple(_ref(item, name_of(part), where) for part, item in zip(numbers, given, strict=True))
    if not refs:
        raise CorruptionError("an interval or fold must have segments", name=where)
    return refs


def _ref(item: object, expected: str, where: str) -> SegmentRef:
    if not isinstance(item, dict) or item.keys() != _REF_FIELDS:
        said = f"fields {sorted(item)!r:.200}" if isinstance(item, dict) else f"{item!r:.80}"
        raise CorruptionError(f"segment has {said}, expected {sorted(_REF_FIELDS)}", name=where)
    ref = SegmentRef(**item)
    for name, value in item.items():
        if name != "name" and (type(value) is not int or not 0 <= value < 1 << 64):
            raise CorruptionError(f"segment.{name} is {value!r:.80}, expected int", name=where)
    if ref.name != expected:
        raise CorruptionError(f"names {ref.name!r:.120}, expected {expected}", name=where)
    if not HEADER_LEN <= ref.front_bytes <= ref.num_bytes:
        raise CorruptionError(f"{ref.name} has impossible lengths", name=where)
    return ref


def _list(value: object, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise CorruptionError(f"{value!r:.80} is not a list", name=where)
    return value
