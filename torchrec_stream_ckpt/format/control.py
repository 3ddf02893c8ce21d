"""The JSON payloads: HELLO and MARK in the data partitions; CLAIM, COMMIT and TRIM in the control partition.

JSON is canonical (sorted keys, no spaces, ASCII), so that the checksum of a schema is well defined.
Readers refuse unknown shapes by name and never trust a length. Fields that the header holds too must agree.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import time
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache, cached_property
from itertools import count
from typing import Any, TypeAlias, TypeVar, get_type_hints

from crc32c import crc32c

from torchrec_stream_ckpt.errors import ConfigError, CorruptionError, ServingStreamError
from torchrec_stream_ckpt.format.frame import (
    DTYPE_BYTES,
    VERSION,
    Buffer,
    Header,
    Kind,
    json_frame,
    parse_header,
    payload_of,
)
from torchrec_stream_ckpt.format.proof import MAX_ID, Proof, ReplicatedProof
from torchrec_stream_ckpt.types import MarkerId, RankEnd, StateSpec, TableShard, TableSpec

T = TypeVar("T")

MAX_PLACE_CHARS = 4096
_OPTIONAL = {"proof", "id"}
"""Fields that are left out where they have no value. No payload of version 1 has one."""
_MAC = re.compile(r"(?:[0-9a-f]{64})?")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_FILE_NAME = re.compile(r"[A-Za-z0-9_.-]{1,255}")
_SIGNED = "torchrec_stream_ckpt {kind} version 1\n"
"""In front of what is signed: an HMAC of one kind of record, or of anything else, is none of another."""


def plain(record: Any) -> dict[str, Any]:
    """A record as JSON has it: without optional fields that have no value."""
    return asdict(record, dict_factory=lambda items: {name: value for name, value in items if _stands(name, value)})


def _stands(name: str, value: object) -> bool:
    return value is not None or name not in _OPTIONAL


def canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


@dataclass(frozen=True)
class Schema:
    """All tables of a job, sorted by name; a table's index here is its id in frames."""

    tables: tuple[TableSpec, ...]

    def index(self) -> dict[str, int]:
        return {table.name: position for position, table in enumerate(self.tables)}

    def holds(self, shard: TableShard) -> bool:
        """Whether ``shard`` lies inside a table of this schema."""
        if shard.table >= len(self.tables):
            return False
        table = self.tables[shard.table]
        return shard.row0 + shard.rows <= table.rows and shard.col0 + shard.cols <= table.dim

    @cached_property
    def crc(self) -> int:
        return crc32c(canonical([plain(table) for table in self.tables]))

    @cached_property
    def unnamed(self) -> Schema:
        """The same tables without ids: how a generation of version 1 has them."""
        return Schema(tuple(replace(table, id=None) for table in self.tables))

    def named(self, parent: Schema | None, job: bytes, generation: int) -> Schema:
        """The same tables, each with its stable id: that of the parent's table of its name, or a new one.

        Args:
            parent: The schema that the generation stands on; None: all tables are new.
            job: Of the log.
            generation: The one that is about to be claimed.
        """
        known = {table.name: table for table in parent.tables} if parent is not None else {}
        taken = {table.id for table in known.values()}
        tables = []
        for table in self.tables:
            before = known.get(table.name)
            id_ = before.id if before is not None else None
            if id_ is None:  # a table of version 1 gets the same id in whatever generation comes next
                id_ = _new_id(job, 0 if before is not None else generation, table.name, taken)
            taken.add(id_)
            tables.append(replace(table, id=id_))
        return Schema(tuple(tables))


def _new_id(job: bytes, generation: int, name: str, taken: set[int | None]) -> int:
    """Below 2^53, and not among ``taken``. A function of what it names, so that a retried claim has the same ids."""
    for salt in count():
        text = f"{job.hex()} {generation} {salt} {name}".encode()
        id_ = int.from_bytes(hashlib.sha256(text).digest()[:8], "little") % MAX_ID
        if id_ not in taken:
            return id_
    raise AssertionError


@dataclass(frozen=True, slots=True)
class Hello:
    """First frame of a rank in a generation."""

    world: int
    schema: Schema
    shards: tuple[TableShard, ...]

    def to_json(self) -> bytes:
        return canonical(plain(self))

    @classmethod
    def from_json(cls, data: Buffer, version: int = VERSION) -> Hello:
        raw = Fields(data, "HELLO", cls, version)
        hello = cls(raw.take("world", int), raw.schema("schema"), raw.each("shards", TableShard))
        for shard in hello.shards:
            if not hello.schema.holds(shard):
                raise CorruptionError(f"HELLO.shards: {shard} is outside its table")
        return hello


@dataclass(frozen=True, slots=True)
class TableScalars:
    """State of the fused kernel that is no row, with the shard that it was read for."""

    table: int
    row0: int
    rows: int
    col0: int
    cols: int
    iteration: int
    """Number of forward passes that the kernel has counted."""
    max_counter: float
    """What counter-based regularization has seen at most; 1 where it is not used."""
    learning_rate: float
    """What the kernel used last."""
    next_learning_rate: float
    """What its optimizer's param group says for the next step."""


@dataclass(frozen=True, slots=True)
class Mark:
    """This rank has sent every row that belongs to the marker in the header."""

    rows: int
    """Row records since HELLO."""
    num_bytes: int
    """Bytes of frames since HELLO, this one not counted."""
    scalars: tuple[TableScalars, ...]
    proof: Proof | None = None
    """Digests of live rows, taken at the cut; None in version 1, and where proofs are switched off."""

    def to_json(self) -> bytes:
        return canonical(plain(self))

    @classmethod
    def from_json(cls, data: Buffer, version: int = VERSION) -> Mark:
        raw = Fields(data, "MARK", cls, version)
        return cls(raw.take("rows", int), raw.take("num_bytes", int), raw.each("scalars", TableScalars), raw.proof())


@dataclass(frozen=True, slots=True)
class Claim:
    """A trainer opens a generation. The first CLAIM of a number, in log order, owns it."""

    job: bytes
    generation: int
    nonce: str
    """Tells two claimants of one number apart."""
    name: str
    """Name of the job as its URI gives it; empty for a file log."""
    parent: MarkerId | None
    world: int
    """Ranks that write this generation; 0: nobody, an operator has ended the trainer of the one before."""
    partitions: int
    incarnation: str
    """Identity of the log when it was claimed: Kafka's topic id, or the file log's own."""
    schema: Schema
    swept: tuple[int, ...]
    """Tables that this generation sends whole; the others stand on the parent."""
    time_s: float
    """Wall clock, for people only: no decision reads it."""
    mac: str = ""
    """HMAC by the commit key, 64 hex digits; empty without one."""
    version: int = field(default=VERSION, compare=False)
    """Of the frame that it came in: its bytes can be made again."""

    def to_frame(self) -> bytes:
        return bytes(
            json_frame(Header(Kind.CLAIM, self.job, self.generation, version=self.version), canonical(self._body()))
        )

    def signed_bytes(self) -> bytes:
        """What the HMAC covers: all fields but itself."""
        return _SIGNED.format(kind="CLAIM").encode() + canonical(self._body() | {"mac": ""})

    def _body(self) -> dict[str, Any]:
        return _body(self) | {"job": self.job.hex(), "parent": str(self.parent) if self.parent else None}

    @classmethod
    def from_json(cls, header: Header, data: Buffer) -> Claim:
        raw = Fields(data, "CLAIM", cls, header.version, job=header.job.hex(), generation=header.generation)
        return cls(
            job=header.job,
            generation=header.generation,
            nonce=raw.take("nonce", str),
            name=raw.take("name", str),
            parent=raw.marker("parent"),
            world=raw.take("world", int),
            partitions=raw.take("partitions", int),
            incarnation=raw.take("incarnation", str),
            schema=raw.schema("schema"),
            swept=tuple(raw.ints("swept")),
            time_s=raw.take("time_s", float),
            mac=raw.matching("mac", _MAC),
            version=header.version,
        )


@dataclass(frozen=True, slots=True)
class Serve(Claim):
    """As CLAIM, of a serving stream: who restores, lists or materializes refuses it by name."""

    def to_frame(self) -> bytes:
        return bytes(
            json_frame(Header(Kind.SERVE, self.job, self.generation, version=self.version), canonical(self._body()))
        )

    def signed_bytes(self) -> bytes:
        return _SIGNED.format(kind="SERVE").encode() + canonical(self._body() | {"mac": ""})


@dataclass(frozen=True, slots=True)
class DenseFile:
    name: str
    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Commit:
    """A marker exists from the moment this record is in the control partition, if its writer owns the job."""

    job: bytes
    generation: int
    nonce: str
    marker: int
    step: int
    ranks: tuple[RankEnd, ...]
    dense: str
    """Path of the dense state below the store."""
    dense_files: tuple[DenseFile, ...]
    time_s: float
    store: str
    """Where the writer kept dense state, empty for inside the file log; a reader may name another place."""
    mac: str = ""
    """HMAC by the commit key, 64 hex digits; empty without one."""
    version: int = field(default=VERSION, compare=False)
    """Of the frame that it came in: its bytes can be made again."""

    @property
    def id(self) -> MarkerId:
        return MarkerId(self.generation, self.marker)

    def to_frame(self) -> bytes:
        header = Header(
            Kind.COMMIT, self.job, self.generation, step=self.step, marker=self.marker, version=self.version
        )
        return bytes(json_frame(header, canonical(self._body())))

    def signed_bytes(self) -> bytes:
        """What the HMAC covers: all fields but itself. The nonce ties it to its generation's CLAIM."""
        return _SIGNED.format(kind="COMMIT").encode() + canonical(self._body() | {"mac": ""})

    def _body(self) -> dict[str, Any]:
        return _body(self) | {"job": self.job.hex()}

    @classmethod
    def from_json(cls, header: Header, data: Buffer) -> Commit:
        same = {"job": header.job.hex(), "generation": header.generation, "marker": header.marker, "step": header.step}
        raw = Fields(data, "COMMIT", cls, header.version, **same)
        commit = cls(
            job=header.job,
            generation=header.generation,
            nonce=raw.take("nonce", str),
            marker=header.marker,
            step=header.step,
            ranks=raw.each("ranks", RankEnd),
            dense=raw.take("dense", str),
            dense_files=raw.each("dense_files", DenseFile),
            time_s=raw.take("time_s", float),
            store=raw.take("store", str),
            mac=raw.matching("mac", _MAC),
            version=header.version,
        )
        numbers = [end.rank for end in commit.ranks]
        if not numbers or numbers != list(range(len(numbers))) or min(end.frames for end in commit.ranks) < 2:
            raise CorruptionError("COMMIT.ranks must be 0, 1, 2, ..., each with a HELLO and a MARK", **header.place())
        _check_places(commit)
        return commit


@dataclass(frozen=True, slots=True)
class Trim:
    """An operator gives log data up: from this record on, what lies in front of some markers' ends may be gone.

    Where those ends are, their COMMITs say. The data of a generation that no marker needs has no part in this.
    """

    job: bytes
    generation: int
    marker: int
    """With the generation: the marker that the store holds whole."""
    markers: tuple[MarkerId, ...]
    """For each generation of which data may be gone, the marker up to which; by generation, this one among them."""
    store: str
    """Where that data is, for people and for errors: a reader may be told another place."""
    nonce: str
    """Tells two records of one marker apart."""
    time_s: float
    """Wall clock, for people only."""
    mac: str = ""
    """HMAC by the commit key, 64 hex digits; empty without one."""
    version: int = field(default=VERSION, compare=False)
    """Of the frame that it came in: its bytes can be made again."""

    @property
    def id(self) -> MarkerId:
        return MarkerId(self.generation, self.marker)

    @property
    def day(self) -> str:
        """When it was written, for people."""
        try:
            return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(self.time_s))
        except (OverflowError, ValueError, OSError):
            return "an unknown day"

    def reach(self, generation: int) -> MarkerId | None:
        """The marker up to which data of ``generation`` may be gone."""
        return next((marker for marker in self.markers if marker.generation == generation), None)

    def to_frame(self) -> bytes:
        header = Header(Kind.TRIM, self.job, self.generation, marker=self.marker, version=self.version)
        return bytes(json_frame(header, canonical(self._body())))

    def signed_bytes(self) -> bytes:
        """What the HMAC covers: all fields but itself."""
        return _SIGNED.format(kind="TRIM").encode() + canonical(self._body() | {"mac": ""})

    def _body(self) -> dict[str, Any]:
        return _body(self) | {"job": self.job.hex(), "markers": [str(marker) for marker in self.markers]}

    @classmethod
    def from_json(cls, header: Header, data: Buffer) -> Trim:
        same = {"job": header.job.hex(), "generation": header.generation, "marker": header.marker}
        raw = Fields(data, "TRIM", cls, header.version, **same)
        trim = cls(
            job=header.job,
            generation=header.generation,
            marker=header.marker,
            markers=raw.markers("markers"),
            store=raw.take("store", str),
            nonce=raw.take("nonce", str),
            time_s=raw.take("time_s", float),
            mac=raw.matching("mac", _MAC),
            version=header.version,
        )
        generations = [marker.generation for marker in trim.markers]
        if generations != sorted(set(generations)) or trim.id not in trim.markers:
            raise CorruptionError("TRIM.markers must name each generation once, in order, and its own marker")
        if not trim.store:
            raise CorruptionError("TRIM.store is empty")
        _check_place("TRIM.store", trim.store)
        return trim


def _body(record: Claim | Commit | Trim) -> dict[str, Any]:
    """The fields of a record that stand in its payload."""
    return {name: value for name, value in plain(record).items() if name != "version"}


ControlRecord: TypeAlias = Claim | Commit | Trim


def parse_control(frame: Buffer, offset: int | None = None, *, serving: bool = False) -> ControlRecord:
    """Read one record of the control partition.

    Args:
        frame: The whole record.
        offset: Where it stands, for messages.
        serving: Whether the reader takes the lossy rows of a serving stream.

    Raises:
        CorruptionError: bad bytes, or a frame that does not belong there.
        ServingStreamError: the log is a serving stream, and the reader takes none.
    """
    try:
        return _parse_control(frame, serving=serving)
    except CorruptionError as error:
        raise CorruptionError(error.message, hint=error.hint, **{"control_offset": offset, **error.where}) from None


def _parse_control(frame: Buffer, *, serving: bool) -> ControlRecord:
    header = parse_header(frame)
    payload = payload_of(header, frame)
    if header.kind is Kind.CLAIM:
        return Claim.from_json(header, payload)
    if header.kind is Kind.COMMIT:
        return Commit.from_json(header, payload)
    if header.kind is Kind.TRIM:
        return Trim.from_json(header, payload)
    if header.kind is Kind.SERVE and not serving:
        raise ServingStreamError(
            "this is a serving stream: its rows are lossy, and have no optimizer state",
            hint="give the log of the trainer; a serving stream can be followed: stream-ckpt follow",
        )
    if header.kind is Kind.SERVE:
        return Serve.from_json(header, payload)
    raise CorruptionError(f"{header.kind.name} frame in the control partition", **header.place())


def _check_place(what: str, place: str) -> None:
    if len(place) > MAX_PLACE_CHARS or not place.isprintable():
        raise CorruptionError(f"{what} is no path: {place!r:.80}")


def _check_places(commit: Commit) -> None:
    """What names a place on a disk can name no other than it seems to."""
    _check_place("COMMIT.store", commit.store)
    _check_place("COMMIT.dense", commit.dense)
    names = [file.name for file in commit.dense_files]
    if len(set(names)) != len(names):
        raise CorruptionError("COMMIT.dense_files names a file twice")
    for file in commit.dense_files:
        if not _FILE_NAME.fullmatch(file.name) or file.name in (".", ".."):
            raise CorruptionError(f"COMMIT.dense_files: {file.name!r:.80} is no name of a file")
        if not _SHA256.fullmatch(file.sha256):
            raise CorruptionError(f"COMMIT.dense_files: {file.sha256!r:.80} is no SHA-256")


class Fields:
    """Checked access to the fields of one JSON payload.

    Args:
        data: The payload.
        what: Its kind, for messages.
        kind: The dataclass whose fields it must have, no more and no less. Optional ones may be missing.
        version: Of the frame: a payload of version 1 has no optional field.
        same: What the header says of fields that stand in both.
    """

    def __init__(self, data: Buffer, what: str, kind: type[Any], version: int = VERSION, **same: object) -> None:
        self._what = what
        self._version = version
        try:
            self._raw = json.loads(
                bytes(data).decode("ascii"),
                object_pairs_hook=_unique,
                parse_int=_whole,
                parse_float=_finite,
                parse_constant=_finite,
            )
        except (ValueError, RecursionError) as error:
            raise CorruptionError(f"{what} is no JSON: {error}") from None
        if not isinstance(self._raw, dict):
            raise CorruptionError(f"{what} is no JSON object")
        _exactly(self._raw, {item.name for item in fields(kind)} - {"version"}, what, self._optional)
        for name, value in same.items():
            if _typed(self._raw[name], type(value), f"{what}.{name}") != value:
                raise CorruptionError(f"{what}.{name} is {self._raw[name]!r:.80}, its header says {value!r}")

    @property
    def _optional(self) -> set[str]:
        return _OPTIONAL if self._version > 1 else set()

    def take(self, name: str, kind: type[T]) -> T:
        return _typed(self._raw[name], kind, f"{self._what}.{name}")

    def matching(self, name: str, pattern: re.Pattern[str]) -> str:
        text = self.take(name, str)
        if not pattern.fullmatch(text):
            raise CorruptionError(f"{self._what}.{name} is {text!r:.80}, expected {pattern.pattern}")
        return text

    def marker(self, name: str) -> MarkerId | None:
        return None if self._raw[name] is None else self._marker(name, self._raw[name])

    def markers(self, name: str) -> tuple[MarkerId, ...]:
        return tuple(self._marker(name, item) for item in self.take(name, list))

    def _marker(self, name: str, item: object) -> MarkerId:
        what = f"{self._what}.{name}"
        try:
            return MarkerId.parse(_typed(item, str, what))
        except ConfigError as error:
            raise CorruptionError(f"{what}: {error.message}") from None

    def ints(self, name: str) -> list[int]:
        return [_typed(item, int, f"{self._what}.{name}") for item in self.take(name, list)]

    def each(self, name: str, kind: type[T]) -> tuple[T, ...]:
        return tuple(_record(item, kind, f"{self._what}.{name}") for item in self.take(name, list))

    def proof(self) -> Proof | None:
        """That of a MARK; None where it is left out."""
        if "proof" not in self._raw:
            return None
        what = f"{self._what}.proof"
        raw = dict(self.take("proof", dict))
        items = _typed(raw.pop("replicated", None), list, f"{what}.replicated")
        replicated = tuple(_record(item, ReplicatedProof, f"{what}.replicated") for item in items)
        proof = _record(raw, Proof, what, replicated=replicated)
        proof.check(what)
        return proof

    def schema(self, name: str) -> Schema:
        what = f"{self._what}.{name}"
        raw = self.take(name, dict)
        _exactly(raw, {"tables"}, what)
        optional = self._optional
        schema = Schema(tuple(_table(item, what, optional) for item in _typed(raw["tables"], list, what)))
        names, ids = [table.name for table in schema.tables], [table.id for table in schema.tables]
        if names != sorted(set(names)):
            raise CorruptionError(f"{what}: tables are not sorted by name, each once")
        if any(ids) and (None in ids or len(set(ids)) < len(ids)):
            raise CorruptionError(f"{what}: tables have no id of their own")
        return schema


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands twice in one object")
    return found


def _whole(text: str) -> int:
    value = int(text)
    if value.bit_length() > 64:
        raise ValueError("a number has more than 64 bits")
    return value


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not finite")
    return value


def _exactly(raw: dict[str, Any], names: set[str], what: str, optional: Collection[str] = ()) -> None:
    """No field more, none less but optional ones; where these are not allowed, they must be missing."""
    if not names - _OPTIONAL <= raw.keys() <= names - _OPTIONAL.difference(optional):
        raise CorruptionError(f"{what} has fields {sorted(raw)!r:.200}, expected {sorted(names)}")


def _typed(value: object, kind: type[T], what: str) -> T:
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind or (isinstance(value, int) and value < 0):
        raise CorruptionError(f"{what} is {value!r:.80}, expected {kind.__name__}")
    return value


_hints: Callable[[type], dict[str, Any]] = cache(get_type_hints)


def _record(item: object, kind: type[T], what: str, **given: object) -> T:
    """An instance of the dataclass ``kind`` from a JSON object with just its fields, less those ``given``."""
    raw = _typed(item, dict, what)
    hints = {name: hint for name, hint in _hints(kind).items() if name not in given}
    _exactly(raw, set(hints), what)
    return kind(**{name: _typed(raw[name], hint, f"{what}.{name}") for name, hint in hints.items()}, **given)


def _table(item: object, what: str, optional: set[str]) -> TableSpec:
    raw = dict(_typed(item, dict, what))
    states = _typed(raw.pop("states", None), list, what)
    id_ = _typed(raw.pop("id"), int, f"{what}.id") if "id" in raw and "id" in optional else None
    if id_ is not None and id_ >= MAX_ID:
        raise CorruptionError(f"{what}.id is {id_}, expected a number below {MAX_ID}")
    given = tuple(_record(state, StateSpec, what) for state in states)
    table = _record(raw, TableSpec, what, states=given, id=id_)
    if not {table.dtype, *(state.dtype for state in table.states)} <= DTYPE_BYTES.keys():
        raise CorruptionError(f"{what}: table {table.name} has an unknown dtype")
    return table
