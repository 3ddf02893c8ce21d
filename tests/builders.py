"""Small values that tests of several rooms need: schemas, claims, and whole streams of frames. Imports no torch."""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tests.parts import Ack
from torchrec_stream_ckpt.format.control import Claim, Commit, Hello, Mark, Trim
from torchrec_stream_ckpt.format.dense_files import DenseFile
from torchrec_stream_ckpt.format.end_note import End
from torchrec_stream_ckpt.format.frame import HEADER_LEN, Header, Kind, json_frame, parse_header, seal
from torchrec_stream_ckpt.format.rows import NUMPY_DTYPES, RowLayout, events_frame_bytes, put_events
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.inner import Log
from torchrec_stream_ckpt.log.api import DataWriter
from torchrec_stream_ckpt.util.types import MarkerId, RankEnd, StateSpec, TableShard, TableSpec

JOB = uuid.UUID(int=7).bytes
OTHER_JOB = uuid.UUID(int=8).bytes


def digest_files(path: Path, names: Iterable[str]) -> tuple[DenseFile, ...]:
    """Names, sizes and SHA-256 of files of a dense directory, as a COMMIT has them."""
    files = []
    for name in sorted(names):
        with (path / name).open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            files.append(DenseFile(name, file.tell(), sha256))
    return tuple(files)


def table(name: str = "t", rows: int = 8, dim: int = 4, dtype: str = "float32", *states: StateSpec) -> TableSpec:
    return TableSpec(name, rows, dim, dtype, "sgd" if not states else "adagrad", states)


ROWWISE = StateSpec("momentum1", "float32", True)
SCHEMA = Schema((table("t_item", 6, 4), table("t_user", 8, 4, "float32", ROWWISE)))


def claim(generation: int, *, nonce: str = "", parent: MarkerId | None = None, **more: object) -> Claim:
    values: dict[str, object] = {
        "job": JOB,
        "nonce": nonce or f"nonce-{generation}",
        "name": "",
        "world": 1,
        "partitions": 1,
        "incarnation": "log-1",
        "schema": SCHEMA,
        "swept": () if parent else tuple(range(len(SCHEMA.tables))),
        "time_s": 0.0,
    }
    return Claim(generation=generation, parent=parent, **{**values, **more})  # type: ignore[arg-type]


def commit(generation: int, marker: int, ranks: Sequence[RankEnd] = (), **more: object) -> Commit:
    values: dict[str, object] = {
        "job": JOB,
        "nonce": f"nonce-{generation}",
        "step": 10 * marker,
        "ranks": tuple(ranks) or (RankEnd(0, 0, 0, 1, 2, 0, 0, 0),),
        "dense": "",
        "dense_files": (),
        "time_s": 0.0,
        "store": "",
    }
    return Commit(generation=generation, marker=marker, **{**values, **more})  # type: ignore[arg-type]


def end(generation: int, outcome: str = "finished", **more: object) -> End:
    values: dict[str, object] = {"job": JOB, "nonce": f"nonce-{generation}", "step": 70, "reason": "", "time_s": 0.0}
    return End(generation=generation, outcome=outcome, **{**values, **more})  # type: ignore[arg-type]


def trim(*markers: str, store: str = "file:///store", **more: object) -> Trim:
    """A TRIM of these markers, as ``GENERATION:MARKER``; it is for the last one."""
    reach = tuple(map(MarkerId.parse, markers))
    values: dict[str, object] = {"job": JOB, "nonce": f"nonce-{'-'.join(markers)}", "time_s": 0.0}
    fields = {**values, "generation": reach[-1].generation, "marker": reach[-1].marker, **more}
    return Trim(markers=reach, store=store, **fields)  # type: ignore[arg-type]


def rows_frame(spec: TableSpec, arrays: Sequence[np.ndarray], **fields: int) -> tuple[Header, bytearray]:
    """Header and unsealed bytes of a ROWS frame; ``arrays`` are ids, weights and states."""
    cols = fields.pop("cols", spec.dim)
    layout = RowLayout.of(spec, cols)
    offsets, length = layout.offsets(len(arrays[0]))
    frame = bytearray(HEADER_LEN + length)
    for section, offset, array in zip(layout.sections, offsets, arrays, strict=True):
        data = np.ascontiguousarray(array).view(NUMPY_DTYPES[section.dtype]).tobytes()
        frame[HEADER_LEN + offset : HEADER_LEN + offset + len(data)] = data
    header = Header(
        Kind.ROWS,
        JOB,
        fields.pop("generation", 1),
        rows=len(arrays[0]),
        cols=cols,
        dtypes=tuple(section.code for section in layout.sections),
        section_offsets=offsets,
        payload_len=length,
        **fields,
    )
    return header, frame


@dataclass
class Stream:
    """Makes the frames of one rank in one generation, numbered and chained as a publisher does."""

    rank: int = 0
    generation: int = 1
    job: bytes = JOB
    frames: list[bytes] = field(default_factory=list)
    shards: tuple[TableShard, ...] = (TableShard(0, 0, 6, 0, 4), TableShard(1, 0, 8, 0, 4))
    schema: Schema = SCHEMA
    world: int = 1
    filling: int = 0
    """Number of the marker that rows are sent for, as their headers say it."""

    def __post_init__(self) -> None:
        hello = Hello(self.world, self.schema, self.shards)
        self.json(Kind.HELLO, hello.to_json(), version=hello.version)

    def json(self, kind: Kind, text: bytes, **fields: int) -> bytes:
        header = self.header_of(kind, **fields)
        self.frames.append(bytes(json_frame(header, text)))
        return self.frames[-1]

    def rows(self, ids: Iterable[int], value: float = 0.0) -> bytes:
        """Rows of table 1, all their values the same."""
        chosen = np.array(list(ids), np.int64)
        weights = np.full((len(chosen), 4), value, np.float32)
        return self.put(1, [chosen, weights, weights[:, 0]])

    def put(self, table: int, arrays: Sequence[np.ndarray], col0: int = 0) -> bytes:
        """Rows of one table: ids, weights of shape (rows, cols) and states."""
        spec = self.schema.tables[table]
        place = {"table": table, "col0": col0, "cols": arrays[1].shape[1], "marker": self.filling}
        header, frame = rows_frame(spec, arrays, **place)
        return self._add(header, frame)

    def _add(self, header: Header, frame: bytearray) -> bytes:
        """Number, chain and seal a ROWS frame."""
        like = self.header_of(Kind.ROWS)
        for name in ("job", "generation", "rank", "seq", "chain", "schema_crc"):
            setattr(header, name, getattr(like, name))
        seal(header, frame)
        self.frames.append(bytes(frame))
        return self.frames[-1]

    def events(self, table: int, rows: np.ndarray, raw_ids: np.ndarray, kind: int) -> bytes:
        """Id events of one kind."""
        header = Header(Kind.IDS, self.job, self.generation, table=table, marker=self.filling)
        memory = np.zeros(events_frame_bytes(len(rows)), np.uint8)
        put_events(header, memory, rows, raw_ids, kind)
        return self._add(header, bytearray(memory))

    def items(self, ids: Iterable[int], value: float = 0.0) -> bytes:
        """Rows of table 0, which has no optimizer state."""
        chosen = np.array(list(ids), np.int64)
        return self.put(0, [chosen, np.full((len(chosen), 4), value, np.float32)])

    def mark(self, marker: int = 1) -> bytes:
        """The MARK that ``commit(generation, marker)`` asks for."""
        return self.json(Kind.MARK, Mark(0, sum(map(len, self.frames)), ()).to_json(), marker=marker, step=10 * marker)

    def header_of(self, kind: Kind, **fields: int) -> Header:
        chain = parse_header(self.frames[-1]).header_crc if self.frames else 0
        return Header(
            kind,
            self.job,
            self.generation,
            self.rank,
            seq=len(self.frames),
            chain=chain,
            schema_crc=self.schema.crc,
            **fields,  # type: ignore[arg-type]
        )

    def end(self, begin: int, end: int, *, partition: int = 0, frames: int | None = None) -> RankEnd:
        """Where this stream stood once its frames, or the first ``frames`` of them, were at offsets [begin, end)."""
        count = len(self.frames) if frames is None else frames
        chain = parse_header(self.frames[count - 1]).header_crc
        return RankEnd(self.rank, partition, begin, end, count, chain, 0, 0)


def write(
    log: Log,
    frames: Iterable[bytes],
    *,
    generation: int = 1,
    partition: int = 0,
    at: int = 0,
    timeout_s: float = 120.0,
    through: DataWriter | None = None,
) -> list[Ack]:
    """Append frames and return where they are, once they are durable; ``through`` a writer that stays open."""
    sent, acks = list(frames), []
    deadline = time.monotonic() + timeout_s
    writer = through or log.open_writer(generation, partition, at)
    for frame in sent:
        writer.send(memoryview(frame))
    while True:
        acks += writer.poll(min(timeout_s, 0.2))
        if len(acks) == len(sent) or time.monotonic() >= deadline:
            break
    if through is None:
        writer.close()
    assert len(acks) == len(sent)
    return acks
