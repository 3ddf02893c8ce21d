"""JSON payloads: HELLO and MARK in the data partitions; CLAIM, COMMIT and TRIM in the control partition.

Readers refuse unknown shapes by name and never trust a length. Fields that the header also has must agree with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from typing import Any, ClassVar, TypeAlias

from torchrec_stream_ckpt.errors import CorruptionError, ServingStreamError, located
from torchrec_stream_ckpt.format.claim_changes import ClaimChanges
from torchrec_stream_ckpt.format.claim_features import IDS
from torchrec_stream_ckpt.format.dense_files import DenseFile, DenseList, check_files
from torchrec_stream_ckpt.format.end_note import End, Note
from torchrec_stream_ckpt.format.entry_digests import DenseProof
from torchrec_stream_ckpt.format.fields import Fields, PayloadRecord
from torchrec_stream_ckpt.format.frame import (
    CHANGED_VERSION,
    NEWEST_VERSION,
    VERSION,
    Buffer,
    Kind,
    parse_header,
    payload_of,
)
from torchrec_stream_ckpt.format.proof import Proof
from torchrec_stream_ckpt.format.rank_ends import RankEnds
from torchrec_stream_ckpt.format.rank_shards import RankShards
from torchrec_stream_ckpt.format.record import Meta, Record
from torchrec_stream_ckpt.format.schema import NO_TABLES, Schema, canonical, plain
from torchrec_stream_ckpt.format.snapshot import Snapshot
from torchrec_stream_ckpt.util.types import MarkerId, RankEnd, TableShard
from torchrec_stream_ckpt.util.units import day

MAX_PLACE_CHARS = 4096


@dataclass(frozen=True, slots=True)
class Hello:
    """First frame of a rank in a generation."""

    world: int
    schema: Schema
    shards: tuple[TableShard, ...]

    @property
    def version(self) -> int:
        """Format version of the frame that this payload needs."""
        return VERSION if self.schema.is_sorted else CHANGED_VERSION

    def to_json(self) -> bytes:
        return canonical(plain(self))

    @classmethod
    def from_json(cls, data: Buffer, version: int = VERSION) -> Hello:
        hello = cls(**Fields(data, "HELLO", cls, version).values(cls))
        for shard in hello.shards:
            if not hello.schema.holds(shard):
                raise CorruptionError(f"HELLO.shards: {shard} is outside its table")
        return hello


@dataclass(frozen=True, slots=True)
class TableScalars:
    """State of a fused kernel apart from its rows, with the shard that it was read for."""

    table: int
    row0: int
    rows: int
    col0: int
    cols: int
    iteration: int
    """Number of forward passes that the kernel has counted."""
    max_counter: float
    """Maximum that counter-based regularization has seen. 1 if it is not used."""
    learning_rate: float
    """Learning rate that the kernel used last."""
    next_learning_rate: float
    """Learning rate of the optimizer's param group for the next step."""


@dataclass(frozen=True, slots=True)
class Mark:
    """Confirms that this rank has sent every row of the marker in the header."""

    rows: int
    """Row records since HELLO."""
    num_bytes: int
    """Bytes of frames since HELLO, without this one."""
    scalars: tuple[TableScalars, ...]
    proof: Proof | None = None
    """Digests of live rows, taken at the cut. None in version 1, or if proofs are switched off."""
    dense_proof: DenseProof | None = None
    """Digests of dense state and scalars, taken at the cut. None before version 4, or if proofs are switched off."""

    @property
    def version(self) -> int:
        """Format version of the frame that this payload needs."""
        return VERSION if self.dense_proof is None else NEWEST_VERSION

    def to_json(self) -> bytes:
        return canonical(plain(self))

    @classmethod
    def from_json(cls, data: Buffer | dict[str, Any], version: int = VERSION) -> Mark:
        """Read the payload of a MARK, or the object in a segment's notes.

        Raises:
            CorruptionError: the payload is invalid.
        """
        mark = cls(**Fields(data, "MARK", cls, version).values(cls))
        if mark.dense_proof is not None:
            mark.dense_proof.check_scalars(map(astuple, mark.scalars), "MARK.scalars")
        return mark


@dataclass(frozen=True, slots=True, eq=False)
class Claim(PayloadRecord):
    """Record that opens a generation. The first CLAIM of a number, in log order, owns it."""

    KIND: ClassVar[Kind] = Kind.CLAIM

    job: bytes
    generation: int
    nonce: str
    """Distinguishes two claimants of one number."""
    name: str
    """Name of the job as its URI gives it. Empty for a file log."""
    parent: MarkerId | None
    world: int
    """Number of ranks that write this generation. 0 if an operator has ended the trainer of the previous one."""
    partitions: int
    incarnation: str
    """Identity of the log when it was claimed: Kafka's topic id, or the file log's own."""
    schema: Schema
    """Tables of the generation. Empty if ``same_schema`` is given and the record is not yet folded into a lineage."""
    swept: tuple[int, ...]
    """Tables that this generation sends whole. The others are deltas on the parent."""
    time_s: float
    """Wall clock, for people only. No decision reads it."""
    mac: str = ""
    """HMAC by the commit key, 64 hex digits. Empty without a key."""
    layout: RankShards | None = None
    """Shards that each rank holds. None if only the HELLOs have them. With ``same_layout``, see ``schema``."""
    same_schema: int | None = None
    """Checksum of the schema in the CLAIM of the parent's generation, if the record omits its own."""
    same_layout: int | None = None
    """Checksum of the layout in the CLAIM of the parent's generation, if the record omits its own."""
    changes: ClaimChanges | None = None
    """Changes of the model that were declared to the restore. None if no changes were declared."""
    announces: tuple[str, ...] | None = None
    """Features that programs of version 3 do not know, by the names in ``announced.py``. None if it uses none."""
    version: int = field(default=VERSION, compare=False)
    """Format version of the frame that was read, so that its bytes can be reproduced."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Claim):
            return NotImplemented
        return self is other or (self.KIND, self.body()) == (other.KIND, other.body())

    def __hash__(self) -> int:
        return hash((self.generation, self.nonce))

    @property
    def has_id_events(self) -> bool:
        """True if the streams record between markers which raw id has which row."""
        return IDS in (self.announces or ())

    def body(self) -> dict[str, Any]:
        schema = self.schema if self.same_schema is None else NO_TABLES
        fields = Record.body(replace(self, schema=schema, layout=None))
        if self.layout is not None and self.same_layout is None:
            fields["layout"] = self.layout.to_text()
        return fields | {"parent": str(self.parent) if self.parent else None}

    def check(self) -> None:
        """Check that it does not contain the parts that it leaves to another CLAIM."""
        if self.same_schema is not None and self.schema.tables:
            raise CorruptionError("CLAIM has both tables and same_schema")
        if self.same_layout is not None and self.layout is not None:
            raise CorruptionError("CLAIM has both layout and same_layout")
        if self.parent is None and (self.same_schema, self.same_layout) != (None, None):
            raise CorruptionError("CLAIM has no parent, but takes its schema or layout from a parent's CLAIM")


@dataclass(frozen=True, slots=True, eq=False)
class Serve(Claim):
    """CLAIM of a serving stream. Restores, lists and materializers refuse it by name."""

    KIND: ClassVar[Kind] = Kind.SERVE


@dataclass(frozen=True, slots=True)
class Commit(PayloadRecord):
    """Record that makes a marker exist once it is in the control partition, if its writer owns the job."""

    KIND: ClassVar[Kind] = Kind.COMMIT

    job: bytes
    generation: int
    nonce: str
    marker: int
    step: int
    ranks: Sequence[RankEnd]
    dense: str
    """Path of the dense state below the store."""
    dense_files: tuple[DenseFile, ...]
    """Dense files. Empty if there is a list of them; ``DenseStore.files`` always returns all."""
    time_s: float
    store: str
    """Place where the writer kept dense state. Empty if it is inside the file log. A reader may name another place."""
    mac: str = ""
    """HMAC by the commit key, 64 hex digits. Empty without a key."""
    meta: Meta | None = None
    """Metadata that the trainer gave the marker, by name. None if it gave none."""
    dense_list: DenseList | None = None
    """The list that names the dense files. None if ``dense_files`` has them."""
    version: int = field(default=VERSION, compare=False)
    """Format version of the frame that was read, so that its bytes can be reproduced."""

    @property
    def id(self) -> MarkerId:
        return MarkerId(self.generation, self.marker)

    @property
    def rows(self) -> int:
        """Row records of all ranks since HELLO."""
        return self._total("rows")

    @property
    def num_bytes(self) -> int:
        """Bytes of frames of all ranks since HELLO."""
        return self._total("num_bytes")

    @property
    def chain(self) -> int:
        """``RankEnd.chain`` of rank 0. Distinguishes histories that share a job and a marker's name."""
        return RankEnds.of(self.ranks).first("chain")

    def _total(self, name: str) -> int:
        return RankEnds.of(self.ranks).total(name)

    def is_same_marker(self, other: Commit) -> bool:
        """Return whether both are COMMITs of one marker: the same one, or its copies in both logs of a job with tiers.

        The copy has other positions in its log, its own signature, and another place of dense state.
        """
        if self == other:
            return True
        mine, theirs = (replace(each, ranks=(), store="", mac="") for each in (self, other))
        return mine == theirs and RankEnds.of(self.ranks).same_streams(RankEnds.of(other.ranks))

    @property
    def dense_count(self) -> int:
        """Number of dense files."""
        return self.dense_list.files if self.dense_list is not None else len(self.dense_files)

    @property
    def dense_bytes(self) -> int:
        """Bytes of all dense files."""
        if self.dense_list is not None:
            return self.dense_list.num_bytes
        return sum(file.num_bytes for file in self.dense_files)

    def body(self) -> dict[str, Any]:
        optional: dict[str, Any] = {"meta": dict(self.meta)} if self.meta is not None else {}
        if self.dense_list is not None:
            optional["dense_list"] = asdict(self.dense_list)
        old = self.version == 1
        same = ("generation", "nonce", "marker", "step", "dense", "time_s", "store", "mac")
        return {
            **{name: getattr(self, name) for name in same},
            "job": self.job.hex(),
            "ranks": [asdict(end) for end in self.ranks] if old else RankEnds.of(self.ranks).to_text(),
            "dense_files": [asdict(file) for file in self.dense_files],
            **optional,
        }

    def check(self) -> None:
        """Check that fields that name a place on a disk are plain paths and names."""
        _check_place("COMMIT.store", self.store)
        _check_place("COMMIT.dense", self.dense)
        check_files(self.dense_files, "COMMIT.dense_files")
        if self.dense_list is not None:
            self.dense_list.check("COMMIT.dense_list")
            if self.dense_files:
                raise CorruptionError("COMMIT has both dense_files and dense_list")


@dataclass(frozen=True, slots=True)
class Trim(PayloadRecord):
    """Record of an operator giving up log data: after it, data before the ends of some markers may be missing.

    The COMMITs of these markers say where those ends are. The record does not cover generations that no marker needs.
    """

    KIND: ClassVar[Kind] = Kind.TRIM

    job: bytes
    generation: int
    marker: int
    """Together with the generation: the marker that the store holds whole."""
    markers: tuple[MarkerId, ...]
    """For each generation whose data may be missing, the last marker affected. By generation, including this marker."""
    store: str
    """Place of that data, for people and for errors. A reader may name another place."""
    nonce: str
    """Distinguishes two records of one marker."""
    time_s: float
    """Wall clock, for people only."""
    mac: str = ""
    """HMAC by the commit key, 64 hex digits. Empty without a key."""
    given_up: tuple[MarkerId, ...] | None = None
    """Markers that the store gave up and that no other marker needs. Their COMMITs are no longer needed."""
    version: int = field(default=VERSION, compare=False)
    """Format version of the frame that was read, so that its bytes can be reproduced."""

    @property
    def id(self) -> MarkerId:
        return MarkerId(self.generation, self.marker)

    @property
    def day(self) -> str:
        """Day when it was written, for people."""
        return day(self.time_s)

    def reach(self, generation: int) -> MarkerId | None:
        """Return the marker up to which data of ``generation`` may be missing. Returns None if it was not trimmed."""
        return next((marker for marker in self.markers if marker.generation == generation), None)

    def body(self) -> dict[str, Any]:
        given_up = {"given_up": [str(marker) for marker in self.given_up]} if self.given_up is not None else {}
        return Record.body(self) | {"markers": [str(marker) for marker in self.markers]} | given_up

    def check(self) -> None:
        generations = [marker.generation for marker in self.markers]
        if generations != sorted(set(generations)) or self.id not in self.markers:
            raise CorruptionError("TRIM.markers must name each generation once, in order, and include its own marker")
        reach, given_up = {marker.generation: marker for marker in self.markers}, list(self.given_up or ())
        if given_up != sorted(set(given_up)) or any(each >= reach.get(each.generation, each) for each in given_up):
            raise CorruptionError("TRIM.given_up must be sorted, without duplicates, and before TRIM.markers")
        if not self.store:
            raise CorruptionError("TRIM.store is empty")
        _check_place("TRIM.store", self.store)


ControlRecord: TypeAlias = Claim | Commit | Trim | End | Note | Snapshot
_KINDS: dict[Kind, type[ControlRecord]] = {
    kind.KIND: kind for kind in (Claim, Commit, Trim, End, Note, Snapshot, Serve)
}


def parse_control(frame: Buffer, offset: int | None = None, *, serving: bool = False) -> ControlRecord:
    """Read one record of the control partition.

    Args:
        frame: The whole record.
        offset: Offset of the record, for messages.
        serving: Whether the reader accepts the lossy rows of a serving stream.

    Raises:
        CorruptionError: the bytes are invalid, or the frame does not belong in this partition.
        ServingStreamError: the log is a serving stream, and the reader does not accept one.
    """
    with located(control_offset=offset):
        header = parse_header(frame)
        payload = payload_of(header, frame)
        if header.kind is Kind.SERVE and not serving:
            raise ServingStreamError(
                "this is a serving stream: its rows are lossy, and have no optimizer state",
                hint="use the trainer's log; to follow a serving stream, run stream-ckpt follow",
            )
        if header.kind not in _KINDS:
            raise CorruptionError(f"{header.kind.name} frame in the control partition", **header.place())
        return _KINDS[header.kind].from_json(header, payload)


def parse_if_whole(record: bytes) -> ControlRecord | None:
    """Read one record, of a serving stream too; None if it is damaged."""
    try:
        return parse_control(record, serving=True)
    except CorruptionError:
        return None


def _check_place(what: str, place: str) -> None:
    if len(place) > MAX_PLACE_CHARS or not place.isprintable():
        raise CorruptionError(f"{what} is not a path: {place!r:.80}")
