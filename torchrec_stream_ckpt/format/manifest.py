"""JSON objects of a store: manifests (one per marker), folds, and records of retention. Specified in docs/format.md.

Each is ``{"body": ..., "crc32c": ..., "format": 1, "kind": ...}``, some of format 2, in canonical JSON. The checksum is
that of the canonical body.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from itertools import pairwise
from typing import Any, ClassVar, Self, TypeAlias, get_args, get_type_hints

from crc32c import crc32c

from torchrec_stream_ckpt.errors import ConfigError, CorruptionError, located
from torchrec_stream_ckpt.format.control import Commit, parse_control
from torchrec_stream_ckpt.format.fields import record_of
from torchrec_stream_ckpt.format.frame import Buffer
from torchrec_stream_ckpt.format.parsing import from_base64
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


class StoreObject:
    """A JSON object of a store. Its fields are those of the dataclass, each written and read by its type."""

    __slots__ = ()
    KIND: ClassVar[str]
    NEWEST: ClassVar[int] = FORMAT
    """Newest format that is read."""
    OPTIONAL: ClassVar[frozenset[str]] = frozenset()
    """Fields that are left out if older programs can then read the object, and nothing is lost."""

    @property
    def format(self) -> int:
        """Format that the content needs."""
        return FORMAT

    @property
    def left_out(self) -> Set[str]:
        """Optional fields that are not written."""
        return self.OPTIONAL if self.format == FORMAT else frozenset()

    def to_bytes(self) -> bytes:
        codecs, left_out = _codecs(type(self)).items(), self.left_out
        body = {name: write(getattr(self, name)) for name, (write, _) in codecs if name not in left_out}
        return _sealed(canonical(body), self.KIND, self.format)

    @classmethod
    def from_bytes(cls, data: Buffer, where: str) -> Self:
        """Read and check an object.

        Raises:
            CorruptionError: it was altered, is of a newer format or of another kind; the error names the object.
        """
        codecs = _codecs(cls)
        body, version = _unwrap(data, cls, codecs.keys(), where)
        found = cls(**{name: read(body[name], where) for name, (_, read) in codecs.items() if name in body})
        found.check(where)
        if (found.format, found.left_out) != (version, codecs.keys() - body.keys()):
            raise CorruptionError(f"{cls.KIND} is not in canonical form", name=where)
        return found

    def check(self, where: str) -> None:
        """Check what the types of the fields leave open."""


@dataclass(frozen=True, slots=True)
class Manifest(StoreObject):
    """Object whose existence puts a marker in the store: all segments of its interval, and its dense state."""

    KIND: ClassVar[str] = "manifest"
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

    def check(self, where: str) -> None:
        _check_previous(self.commit, self.previous, where)
        if len(self.segments) != len(self.commit.ranks):
            raise CorruptionError("manifest does not list the segments of every rank", name=where)
        for rank, refs in enumerate(self.segments):
            names = (StoreSegment(self.commit.job, self.commit.id, rank, part).name for part in range(len(refs)))
            _check_names(refs, names, where)


@dataclass(frozen=True, slots=True)
class Fold(StoreObject):
    """The newest version of each row that changed in (start, end]. Without ``start`` it is a base and has all rows."""

    KIND: ClassVar[str] = "fold"
    NEWEST: ClassVar[int] = 2
    job: bytes
    start: MarkerId | None
    end: MarkerId
    chain: int
    """``RankEnd.chain`` of rank 0 at ``end``. Distinguishes histories that share a job and a marker's name."""
    segments: tuple[SegmentRef, ...]

    @property
    def format(self) -> int:
        dense = all(ref.name == self.name_of(part) for part, ref in enumerate(self.segments))
        return FORMAT if dense else 2

    def name_of(self, part: int) -> str:
        """Return the name of a part."""
        return FoldName(self.job, self.end, self.start).segment_name(part)

    def check(self, where: str) -> None:
        start, end = self.start, self.end
        if end is None or (start is not None and not start < end):
            raise CorruptionError(f"{start} is not before {end}", name=where)
        _check_chain(self.KIND, self.chain, where)
        name = FoldName(self.job, end, start)
        _check_names(self.segments, map(name.segment_name, _parts(self.segments, name)), where)


@dataclass(frozen=True, slots=True)
class Dropped(StoreObject):
    """Record that a marker was given up and is no longer offered.

    It keeps the lineage information of the manifest, so that the manifest may be deleted.
    """

    KIND: ClassVar[str] = "dropped"
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

    def check(self, where: str) -> None:
        _check_previous(self.commit, self.previous, where)


@dataclass(frozen=True, slots=True)
class Garbage(StoreObject):
    """Objects that were found unneeded at some time. They are deleted once no reader of that time can need them.

    A record without clocks, of format 1, gives no usable time, because the wall clocks of two hosts do not agree.
    """

    KIND: ClassVar[str] = "garbage"
    NEWEST: ClassVar[int] = 2
    OPTIONAL: ClassVar[frozenset[str]] = frozenset({"clocks", "newest", "idle_s"})
    time_s: float
    """Time when this was found, Unix time. For people."""
    names: tuple[str, ...]
    clocks: Mapping[str, float] = field(default_factory=dict)
    """Readings at that time of clocks that are never set, by name, in seconds."""
    newest: MarkerId | None = None
    """Newest marker of the job at that time. Used if a rule depends on the age of markers."""
    idle_s: float = 0.0
    """Time for which it had been the newest marker by then, at least, in seconds."""

    @property
    def format(self) -> int:
        return 2 if self.clocks else FORMAT


@dataclass(frozen=True, slots=True)
class Pin(StoreObject):
    """Record that retention must keep a marker."""

    KIND: ClassVar[str] = "pin"
    time_s: float
    """Time when the marker was pinned, Unix time."""


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
class Verdict(StoreObject):
    """Finding of a checker: rows of a marker that differ from the tables at a cut. It has no effect on its own."""

    KIND: ClassVar[str] = "verdict"
    job: bytes
    marker: MarkerId
    chain: int
    """Chain of the marker, as in :class:`Fold`."""
    rows: tuple[TableRows, ...]
    time_s: float
    """Time of the finding, Unix time."""

    def check(self, where: str) -> None:
        if self.marker is None:
            raise CorruptionError("verdict does not name a marker", name=where)
        _check_chain(self.KIND, self.chain, where)
        for rows in self.rows:
            if not rows.begin < rows.end:
                raise CorruptionError(f"verdict has an empty range of rows [{rows.begin}, {rows.end})", name=where)


def _check_chain(kind: str, chain: int, where: str) -> None:
    if chain >= 2**32:
        raise CorruptionError(f"{kind} has an invalid chain {chain!r:.80}", name=where)


def _check_previous(commit: Commit, previous: MarkerId | None, where: str) -> None:
    if previous is not None and not (previous < commit.id and previous.generation == commit.generation):
        raise CorruptionError(f"{previous} is not before {commit.id}", name=where)


def _check_names(refs: Iterable[SegmentRef], names: Iterable[str], where: str) -> None:
    """Check the names of the parts of one interval or fold. They follow from it, so none can belong to another one."""
    for ref, expected in zip(refs, names, strict=True):
        if ref.name != expected:
            raise CorruptionError(f"names {ref.name!r:.120}, expected {expected}", name=where)


def _commit(text: object, where: str) -> Commit:
    with located(name=where):
        commit = parse_control(from_base64(_text(text, where), "COMMIT"))
    if not isinstance(commit, Commit):
        raise CorruptionError("this object does not hold a COMMIT", name=where)
    return commit


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


def _seconds(value: object, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < _LATEST_S:
        raise CorruptionError(f"{value!r:.40} is not a time in seconds", name=where)
    return float(value)


def _sealed(body: bytes, kind: str, version: int) -> bytes:
    """Return the canonical JSON of an object with this canonical body."""
    return b'{"body":%s,"crc32c":"%08x","format":%d,"kind":"%s"}' % (body, crc32c(body), version, kind.encode("ascii"))


def _unwrap(data: Buffer, cls: type[StoreObject], names: Set[str], where: str) -> tuple[dict[str, Any], int]:
    """Check a JSON object with these fields. Returns its body, and its format."""
    kind, highest = cls.KIND, cls.NEWEST
    data = bytes(data)
    raw, text = _object(data, where)
    version: Any = raw.get("format")
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
    if _sealed(text, kind, version) != data:
        raise CorruptionError(f"{kind} was altered: its checksum does not match", name=where)
    if body.keys() not in (names, names - cls.OPTIONAL):
        raise CorruptionError(f"{kind} has fields {sorted(body)!r:.200}, expected {sorted(names)}", name=where)
    return body, version


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


def _parts(refs: Sequence[SegmentRef], fold: FoldName) -> Sequence[int]:
    """Return the numbers of a fold's parts, from their names. They ascend, and some may be omitted."""
    found = [parse_fold_segment(str(ref.name)) for ref in refs]
    parts = [part for each, part in filter(None, found) if each == fold]
    if len(parts) < len(found) or any(part <= before for before, part in pairwise(parts)):
        return range(len(found))  # the check that follows names the first one that belongs to another fold
    return parts


def _refs(items: object, where: str) -> tuple[SegmentRef, ...]:
    """Read the parts of one interval or fold."""
    refs = tuple(_ref(item, where) for item in _list(items, where))
    if not refs:
        raise CorruptionError("an interval or fold must have segments", name=where)
    return refs


def _ref(item: object, where: str) -> SegmentRef:
    if not isinstance(item, dict) or item.keys() != _REF_FIELDS:
        said = f"fields {sorted(item)!r:.200}" if isinstance(item, dict) else f"{item!r:.80}"
        raise CorruptionError(f"segment has {said}, expected {sorted(_REF_FIELDS)}", name=where)
    ref = SegmentRef(**item)
    for name, value in item.items():
        if name != "name" and (type(value) is not int or not 0 <= value < 1 << 64):
            raise CorruptionError(f"segment.{name} is {value!r:.80}, expected int", name=where)
    if not HEADER_LEN <= ref.front_bytes <= ref.num_bytes:
        raise CorruptionError(f"{ref.name} has impossible lengths", name=where)
    return ref


def _whole(value: object, where: str) -> int:
    if type(value) is not int or not 0 <= value < 1 << 64:
        raise CorruptionError(f"{value!r:.80} is not a whole number", name=where)
    return value


def _flag(value: object, where: str) -> bool:
    if not isinstance(value, bool):
        raise CorruptionError(f"{value!r:.80} is not true or false", name=where)
    return value


def _list(value: object, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise CorruptionError(f"{value!r:.80} is not a list", name=where)
    return value


def _clocks(value: object, where: str) -> dict[str, float]:
    if not isinstance(value, dict) or not value:
        raise CorruptionError(f"garbage has invalid clocks {value!r:.80}", name=where)
    return {name: _seconds(shown, where) for name, shown in value.items()}


def _each(read: Callable[[object, str], Any]) -> Callable[[object, str], tuple[Any, ...]]:
    return lambda value, where: tuple(read(item, where) for item in _list(value, where))


def _as_is(value: Any) -> Any:
    return value


def _dicts(items: Iterable[Any]) -> list[dict[str, Any]]:
    return [asdict(item) for item in items]


Codec: TypeAlias = tuple[Callable[[Any], Any], Callable[[Any, str], Any]]
"""Conversion of a field to JSON, and back from JSON that may be of any kind."""
_CODECS: dict[object, Codec] = {
    bytes: (bytes.hex, _job),
    bool: (_as_is, _flag),
    int: (_as_is, _whole),
    float: (_as_is, _seconds),
    str: (_as_is, _text),
    Commit: (_frame_text, _commit),
    MarkerId: (str, _marker),
    MarkerId | None: (_marker_text, _marker),
    Mapping[str, float]: (dict, _clocks),
    tuple[str, ...]: (list, _each(_text)),
    tuple[SegmentRef, ...]: (_dicts, _refs),
    tuple[tuple[SegmentRef, ...], ...]: (lambda ranks: [_dicts(refs) for refs in ranks], _each(_refs)),
}
"""Codec of a field of each type."""


def _codec(hint: object) -> Codec:
    """Return the codec of a type: of the table, or of several objects with the fields of a dataclass."""
    if hint in _CODECS:
        return _CODECS[hint]
    kind = get_args(hint)[0]

    def read(item: object, where: str) -> Any:
        with located(name=where):
            return record_of(item, kind, "rows")

    return _dicts, _each(read)


def _codecs_of(kind: type) -> dict[str, Codec]:
    hints = get_type_hints(kind)
    return {each.name: _codec(hints[each.name]) for each in fields(kind)}


_codecs: Callable[[type], dict[str, Codec]] = cache(_codecs_of)
"""Codec of each field of a kind of objects."""
