"""Checked access to JSON payloads. Readers refuse unknown shapes by name and never trust a length."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Sequence, Set
from dataclasses import fields
from functools import cache
from sys import intern
from typing import Any, Self, TypeAlias, TypeVar, get_args, get_type_hints

from torchrec_stream_ckpt.errors import ConfigError, CorruptionError
from torchrec_stream_ckpt.format.claim_changes import MAX_EARLIER, ClaimChanges
from torchrec_stream_ckpt.format.claim_features import check_announced
from torchrec_stream_ckpt.format.dense_files import DenseList
from torchrec_stream_ckpt.format.entry_digests import DenseProof
from torchrec_stream_ckpt.format.frame import DTYPE_BYTES, NEWEST_VERSION, VERSION, Buffer, Header
from torchrec_stream_ckpt.format.proof import MAX_ID, Proof, ReplicatedProof
from torchrec_stream_ckpt.format.rank_ends import RankEnds
from torchrec_stream_ckpt.format.rank_shards import RankShards
from torchrec_stream_ckpt.format.record import MAC, Meta, Record, meta_of
from torchrec_stream_ckpt.format.schema import OPTIONAL, SINCE_3, SINCE_4, Schema
from torchrec_stream_ckpt.util.types import TOMBSTONE, MarkerId, RankEnd, StateSpec, TableSpec

T = TypeVar("T")

_OPTIONAL_OF = {1: set[str](), 2: OPTIONAL - SINCE_3 - SINCE_4, 3: OPTIONAL - SINCE_4, NEWEST_VERSION: OPTIONAL}
"""Optional fields that a payload may have, by the version of its frame."""


class Fields:
    """Checked access to the fields of one JSON payload.

    Args:
        data: The payload, or an object that :meth:`take` returned from another one.
        what: Its kind, for messages.
        kind: Dataclass whose fields the payload must have exactly. Optional fields may be missing.
        version: Version of the frame. It determines which optional fields are allowed.
        same: Header values of fields that are in both the header and the payload.
    """

    def __init__(
        self, data: Buffer | dict[str, Any], what: str, kind: type[Any], version: int = VERSION, **same: object
    ) -> None:
        self._what = what
        self._version = version
        try:
            self._raw = _DECODER.decode(bytes(data).decode("ascii")) if not isinstance(data, dict) else data
        except (ValueError, RecursionError) as error:
            raise CorruptionError(f"{what} is not JSON: {error}") from None
        if not isinstance(self._raw, dict):
            raise CorruptionError(f"{what} is not a JSON object")
        _exactly(self._raw, _names(kind), what, self._optional)
        for name, value in same.items():
            if _typed(self._raw[name], type(value), f"{what}.{name}") != value:
                raise CorruptionError(f"{what}.{name} is {self._raw[name]!r:.80}, but its header has {value!r}")

    @property
    def _optional(self) -> set[str]:
        return _OPTIONAL_OF[min(self._version, NEWEST_VERSION)]

    def take(self, name: str, kind: type[T]) -> T:
        return _typed(self._raw[name], kind, f"{self._what}.{name}")

    def __contains__(self, name: str) -> bool:
        return name in self._raw

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

    def ints(self, name: str) -> tuple[int, ...]:
        return tuple(_typed(item, int, f"{self._what}.{name}") for item in self.take(name, list))

    def each(self, name: str, kind: type[T]) -> tuple[T, ...]:
        return tuple(record_of(item, kind, f"{self._what}.{name}") for item in self.take(name, list))

    def rank_ends(self, name: str) -> RankEnds:
        """Return the ends of all ranks of a COMMIT, packed. Version 1 has them one by one."""
        if self._version > 1:
            return RankEnds.from_text(self.take(name, str))
        return RankEnds.of(self.each(name, RankEnd))

    def one(self, name: str, kind: type[T]) -> T:
        return record_of(self._raw[name], kind, f"{self._what}.{name}")

    def proof(self, name: str) -> Proof:
        """Read the proof of a MARK."""
        what = f"{self._what}.{name}"
        raw = dict(self.take(name, dict))
        items = _typed(raw.pop("replicated", None), list, f"{what}.replicated")
        replicated = tuple(record_of(item, ReplicatedProof, f"{what}.replicated") for item in items)
        proof = record_of(raw, Proof, what, replicated=replicated)
        proof.check(what)
        return proof

    def dense_proof(self, name: str) -> DenseProof:
        """Read the digests of dense state of a MARK."""
        proof = self.one(name, DenseProof)
        proof.check(f"{self._what}.{name}")
        return proof

    def announced(self, name: str) -> tuple[str, ...]:
        """Read the features that a CLAIM announces."""
        what = f"{self._what}.{name}"
        names = tuple(_typed(item, str, what) for item in self.take(name, list))
        check_announced(names, what)
        return names

    def meta(self, name: str) -> Meta:
        """Read the metadata of a marker."""
        what = f"{self._what}.{name}"
        try:
            return meta_of(self.take(name, dict))
        except ConfigError as error:
            raise CorruptionError(f"{what}: {error.message}") from None

    def changed(self, name: str) -> ClaimChanges:
        """Read a CLAIM's field about a change of the model."""
        changed = _changes(self._raw[name], f"{self._what}.{name}")
        changed.check(f"{self._what}.{name}")
        return changed

    def layout(self, name: str) -> RankShards:
        """Read the shards of all ranks in a CLAIM."""
        return RankShards.from_text(self.take(name, str))

    def schema(self, name: str) -> Schema:
        what = f"{self._what}.{name}"
        raw = self.take(name, dict)
        _exactly(raw, {"tables"}, what)
        optional = self._optional
        schema = Schema(tuple(_table(item, what, optional) for item in _typed(raw["tables"], list, what)))
        names, ids = [table.name for _, table in schema.live], [table.id for _, table in schema.live]
        if len(set(names)) < len(names) or (self._version < 3 and not schema.is_sorted):
            raise CorruptionError(f"{what}: tables must be sorted by name, without duplicates")
        if any(ids) and (None in ids or len(set(ids)) < len(ids)):
            raise CorruptionError(f"{what}: tables must have unique ids")
        return schema

    def values(self, kind: type) -> dict[str, Any]:
        """Read the fields of a dataclass, each by its type. Those that only the frame has are not included."""
        return {name: read(self, name) for name, read in _readers(kind).items()}


class PayloadRecord(Record):
    """A control record that is read from the JSON in its frame, each field by its type."""

    __slots__ = ()

    @classmethod
    def from_json(cls, header: Header, data: Buffer) -> Self:
        """Read the payload of a frame with this header.

        Raises:
            CorruptionError: the payload is invalid, or differs from the header.
        """
        place = {name: getattr(header, name) for name in _IN_BOTH if name in _names(cls)}
        raw = Fields(data, cls.KIND.name, cls, header.version, job=header.job.hex(), **place)
        mac = raw.matching("mac", MAC)
        given = {**raw.values(cls), **place, "job": header.job, "mac": mac, "version": header.version}
        record = cls(**given)
        record.check()
        return record

    def check(self) -> None:
        """Check what the types of the fields leave open."""


_IN_BOTH = ("generation", "marker", "step")
"""Fields of a record that its header has too."""
Reader: TypeAlias = Callable[[Fields, str], Any]
_READERS: dict[object, Reader] = {
    str: lambda raw, name: intern(raw.take(name, str)),
    int: lambda raw, name: raw.take(name, int),
    float: lambda raw, name: raw.take(name, float),
    tuple[int, ...]: Fields.ints,
    tuple[MarkerId, ...]: Fields.markers,
    tuple[str, ...]: Fields.announced,
    MarkerId | None: Fields.marker,
    Meta: Fields.meta,
    Schema: Fields.schema,
    RankShards: Fields.layout,
    ClaimChanges: Fields.changed,
    Sequence[RankEnd]: Fields.rank_ends,
    DenseList: lambda raw, name: raw.one(name, DenseList),
    Proof: Fields.proof,
    DenseProof: Fields.dense_proof,
}
"""Reader of a field of each type."""


def _reader(hint: Any) -> Reader:
    """Return the reader of a type: of the table, of one that may be omitted, or of objects of a dataclass."""
    if hint in _READERS:
        return _READERS[hint]
    kind, other = get_args(hint)
    if other is Ellipsis:
        return lambda raw, name: raw.each(name, kind)
    read = _reader(kind)
    return lambda raw, name: read(raw, name) if name in raw else None


def _readers_of(kind: type) -> dict[str, Reader]:
    others = _names(kind) - {*_IN_BOTH, "job", "mac"}
    return {name: _reader(hint) for name, hint in _hints(kind).items() if name in others}


_readers: Callable[[type], dict[str, Reader]] = cache(_readers_of)
"""Readers of the fields of a kind, by name."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has a duplicate name")
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


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_int=_whole, parse_float=_finite, parse_constant=_finite)
"""Decoder, made once because making one takes longer than reading a small record."""


def _exactly(raw: dict[str, Any], names: Set[str], what: str, optional: Collection[str] = ()) -> None:
    """Check that the fields are exactly ``names``. Optional ones may be missing, and must be if not allowed."""
    if raw.keys() == names and OPTIONAL.isdisjoint(names):
        return
    if not names - OPTIONAL <= raw.keys() <= names - OPTIONAL.difference(optional):
        raise CorruptionError(f"{what} has fields {sorted(raw)!r:.200}, expected {sorted(names)}")


def _typed(value: object, kind: type[T], what: str) -> T:
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind or (isinstance(value, int) and value < 0):
        raise CorruptionError(f"{what} is {value!r:.80}, expected {kind.__name__}")
    return value


def _payload_names(kind: type) -> frozenset[str]:
    return frozenset(item.name for item in fields(kind)) - {"version"}


_names: Callable[[type], frozenset[str]] = cache(_payload_names)
"""Names of the fields of a record's payload."""


_hints: Callable[[type], dict[str, Any]] = cache(get_type_hints)


def record_of(item: object, kind: type[T], what: str, **given: object) -> T:
    """Make an instance of the dataclass ``kind`` from a JSON object with exactly its fields, except those ``given``."""
    raw = _typed(item, dict, what)
    hints = _hints(kind)
    if given:
        hints = {name: hint for name, hint in hints.items() if name not in given}
    _exactly(raw, hints.keys(), what)
    return kind(**{name: _typed(raw[name], hint, f"{what}.{name}") for name, hint in hints.items()}, **given)


def _changes(item: object, what: str, *, nested: bool = False) -> ClaimChanges:
    raw = dict(_typed(item, dict, what))
    _exactly(raw, _names(ClaimChanges), what, SINCE_3 - {"earlier"} if nested else SINCE_3)
    earlier = _typed(raw.pop("earlier"), list, f"{what}.earlier") if "earlier" in raw else None
    if earlier is not None and (not earlier or len(earlier) > MAX_EARLIER):
        raise CorruptionError(f"{what}.earlier has {len(earlier)} changes, expected 1 to {MAX_EARLIER}")
    made = tuple(_changes(each, f"{what}.earlier", nested=True) for each in earlier) if earlier is not None else None
    return ClaimChanges(**{key: _typed(value, str, f"{what}.{key}") for key, value in raw.items()}, earlier=made)


_DROPPED = {"name": "", "rows": 0, "dim": 0, "dtype": "", "optimizer": "", "states": []}


def _table(item: object, what: str, optional: set[str]) -> TableSpec:
    raw = dict(_typed(item, dict, what))
    if raw == _DROPPED:
        return TOMBSTONE
    states = _typed(raw.pop("states", None), list, what)
    id_ = _typed(raw.pop("id"), int, f"{what}.id") if "id" in raw and "id" in optional else None
    if id_ is not None and id_ >= MAX_ID:
        raise CorruptionError(f"{what}.id is {id_}, expected a number below {MAX_ID}")
    given = tuple(record_of(state, StateSpec, what) for state in states)
    table = record_of(raw, TableSpec, what, states=given, id=id_)
    if table.dropped:
        raise CorruptionError(f"{what}: a table has no name")
    if not {table.dtype, *(state.dtype for state in table.states)} <= DTYPE_BYTES.keys():
        raise CorruptionError(f"{what}: table {table.name} has an unknown dtype")
    return table
