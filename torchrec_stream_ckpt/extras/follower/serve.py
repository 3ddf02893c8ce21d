"""Publish a serving stream: each marker of a job again, lossy and small, for replicas. A restore does not accept it.

A serving stream is a log of one rank. SERVE opens its generations instead of CLAIM, so a program that does not follow
serving streams refuses it with a clear error.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt

from torchrec_stream_ckpt.errors import ConfigError, LogUnavailableError
from torchrec_stream_ckpt.extras.follower.serving import Encoding, encode, rows_frame, served_schema, to_float32
from torchrec_stream_ckpt.extras.follower.unproved_blocks import IN_A_STREAM, compare_all, proof_of, refusal
from torchrec_stream_ckpt.extras.follower.updates import Update, UpdateKind
from torchrec_stream_ckpt.format.claim_changes import ClaimChanges, changes_of
from torchrec_stream_ckpt.format.control import Commit, Hello, Mark, Serve
from torchrec_stream_ckpt.format.frame import CHANGED_VERSION, VERSION, Header, Kind, json_frame
from torchrec_stream_ckpt.format.rows import Array, RowLayout, distinct
from torchrec_stream_ckpt.format.schema import Schema, canonical
from torchrec_stream_ckpt.inner import Compared, Job, WeightProof
from torchrec_stream_ckpt.util.options import Options
from torchrec_stream_ckpt.util.types import RankEnd, TableShard, TableSpec
from torchrec_stream_ckpt.util.uris import KafkaUri, parse_uri

ANSWER_S = 60.0
"""Longest wait for an answer of the serving log, in seconds."""
_IN_FLIGHT = 32
"""Number of frames that may be unacknowledged."""


class _Acknowledged(Protocol):
    @property
    def offset(self) -> int: ...

    @property
    def end(self) -> int: ...


class _FrameWriter(Protocol):
    """The methods of a log's writer that are used here."""

    def send(self, frame: memoryview) -> None: ...

    def poll(self, timeout_s: float) -> Sequence[_Acknowledged]: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class _Generation:
    """The generation that is open in the serving log."""

    claim: Serve
    writer: _FrameWriter
    seq: int = 0
    chain: int = 0
    marker: int = 0
    begin: int = -1
    end: int = 0
    rows: int = 0
    num_bytes: int = 0


class ServingWriter:
    """Writes the updates of a follower of markers to a serving log. Not thread-safe.

    It holds all tables in memory, as float32: if a job cuts tables by columns, a changed slice requires encoding the
    whole row again.

    Args:
        uri: The serving log, used for nothing else.
        encoding: ``int8`` or ``bf16``.
        kafka_options: Client settings for that log.
    """

    def __init__(self, uri: str, encoding: Encoding, kafka_options: Options = None) -> None:
        if encoding not in ("int8", "bf16"):
            raise ConfigError(f"encoding must be 'int8' or 'bf16', got {encoding!r}")
        parsed = parse_uri(uri)
        self._name = parsed.job if isinstance(parsed, KafkaUri) else ""
        self._encoding: Encoding = encoding
        self._job = Job.open(uri, kafka_options=kafka_options, serving=True)
        self._schema = Schema(())
        self._tables: list[npt.NDArray[np.float32]] = []
        self._open: _Generation | None = None
        self._sent: deque[bytearray] = deque()

    def close(self) -> None:
        if self._open is not None:
            self._open.writer.close()
        self._job.close()

    def put(self, update: Update) -> int:
        """Publish one update. On return, followers of the serving stream can see it.

        Returns:
            Number of bytes written.

        Raises:
            ConfigError: the log is a trainer's; or the update is not a marker.
            FencedError: another publisher has taken over this log.
            LogUnavailableError: the serving log does not answer.
            ProofMismatchError: rows differ from the marker's proof; nothing of it is published.
            UnsupportedError: a row cannot be encoded.
        """
        if update.kind is UpdateKind.LOAD:
            self._begin(update)
        elif update.kind is not UpdateKind.MARKER or self._open is None:
            raise ConfigError("a serving stream requires a follower of markers", hint="follow with mode='markers'")
        generation = self._open
        assert generation is not None
        before, generation.marker = generation.num_bytes, generation.marker + 1
        for table, ids in self._take(update).items():
            self._send_rows(update, table, ids)
        self._commit(update)
        return generation.num_bytes - before

    def _begin(self, update: Update) -> None:
        incarnation = self._job.log.prepare(1)
        lineage = self._job.control.refresh()
        if any(not isinstance(claim, Serve) for claim in lineage.claims.values()):
            raise ConfigError(
                "a serving stream requires a separate log, but a trainer writes to this one",
                hint="pass another URI for the serving stream",
            )
        before, self._schema = self._schema, served_schema(update.schema, self._encoding)
        changed = self._open is not None and bool(changes_of(before, self._schema))
        served = ClaimChanges.of(canonical({"served": update.origin}), (update.commit.job, update.marker))
        claim = Serve(
            job=lineage.job if lineage.claims else uuid.uuid5(uuid.NAMESPACE_OID, incarnation.id).bytes,
            generation=lineage.next_generation,
            nonce=uuid.uuid4().hex,
            name=self._name,
            parent=None,
            world=1,
            partitions=incarnation.partitions,
            incarnation=incarnation.id,
            schema=self._schema,
            swept=tuple(range(len(self._schema.tables))),
            time_s=time.time(),
            changes=served if changed else None,
            version=CHANGED_VERSION if changed else VERSION,
        )
        self._job.control.claim(claim)
        if self._open is not None:
            self._open.writer.close()
        self._open = _Generation(claim, self._job.log.open_writer(claim.generation, 0, 0))
        self._tables = [np.empty((table.rows, table.dim), np.float32) for table in self._schema.tables]
        shards = tuple(
            TableShard(index, 0, table.rows, 0, table.dim) for index, table in enumerate(self._schema.tables)
        )
        self._send(json_frame(self._header(Kind.HELLO, 0, 0), Hello(1, self._schema, shards).to_json()))

    def _take(self, update: Update) -> Mapping[int, npt.NDArray[np.int64]]:
        """Put the changes into the tables. Returns the rows to publish, by table.

        Raises:
            ProofMismatchError: rows differ from the marker's proof.
        """
        index = self._schema.index()
        touched: dict[int, list[npt.NDArray[np.int64]]] = {}
        for each in update.changes():
            table = index[each.table.name]
            values = to_float32(each.table, each.weights)
            self._tables[table][each.ids, each.col0 : each.col0 + values.shape[1]] = values
            if update.kind is not UpdateKind.LOAD:
                touched.setdefault(table, []).append(each.ids.copy())
        self._check(update, index)
        if update.kind is UpdateKind.LOAD:
            return {table: np.arange(len(values)) for table, values in enumerate(self._tables)}
        return {table: distinct(np.concatenate(ids)) for table, ids in touched.items()}

    def _check(self, update: Update, index: Mapping[str, int]) -> None:
        def compare(proof: WeightProof, table: TableSpec) -> Compared:
            if table.name not in index:
                return Compared()
            held = self._tables[index[table.name]]
            return proof.compare(table, 0, table.rows, partial(_as_trained, table, held))

        found = compare_all(update, proof_of(update), compare)
        if found.unproved is not None:
            raise refusal(found.unproved, update.marker, IN_A_STREAM)

    def _send_rows(self, update: Update, table: int, ids: npt.NDArray[np.int64]) -> None:
        generation = self._open
        assert generation is not None
        spec = self._schema.tables[table]
        for begin in range(0, len(ids), height := RowLayout.of(spec, spec.dim).max_rows):
            part = ids[begin : begin + height]
            arrays: list[Array] = [part, *encode(spec, self._encoding, self._tables[table][part])]
            header = self._header(Kind.ROWS, update.step, generation.marker)
            header.table = table
            self._send(rows_frame(header, spec, arrays))
            generation.rows += len(part)

    def _commit(self, update: Update) -> None:
        generation = self._open
        assert generation is not None
        rows, num_bytes = generation.rows, generation.num_bytes
        self._send(
            json_frame(self._header(Kind.MARK, update.step, generation.marker), Mark(rows, num_bytes, ()).to_json())
        )
        self._settle(0)
        end = RankEnd(0, 0, generation.begin, generation.end, generation.seq, generation.chain, rows, num_bytes)
        commit = Commit(
            job=generation.claim.job,
            generation=generation.claim.generation,
            nonce=generation.claim.nonce,
            marker=generation.marker,
            step=update.step,
            ranks=(end,),
            dense=update.origin,
            dense_files=(),
            time_s=update.commit.time_s,
            store="",
        )
        self._job.control.commit(commit, ANSWER_S, threading.Event())

    def _header(self, kind: Kind, step: int, marker: int) -> Header:
        assert self._open is not None
        claim = self._open.claim
        return Header(
            kind,
            claim.job,
            claim.generation,
            seq=self._open.seq,
            step=step,
            marker=marker,
            schema_crc=self._schema.crc,
            chain=self._open.chain,
        )

    def _send(self, frame: bytearray) -> None:
        generation = self._open
        assert generation is not None
        generation.writer.send(memoryview(frame))
        self._sent.append(frame)  # its bytes must stay until it is acknowledged
        generation.seq += 1
        generation.chain = int.from_bytes(frame[124:128], "little")
        generation.num_bytes += len(frame)
        self._settle(_IN_FLIGHT)

    def _settle(self, left: int) -> None:
        """Wait until at most ``left`` frames are unacknowledged."""
        generation = self._open
        assert generation is not None
        deadline = time.monotonic() + ANSWER_S
        while len(self._sent) > left:
            for ack in generation.writer.poll(0.2):
                self._sent.popleft()
                generation.begin = ack.offset if generation.begin < 0 else generation.begin
                generation.end = ack.end
                deadline = time.monotonic() + ANSWER_S
            if time.monotonic() > deadline:
                raise LogUnavailableError("the serving log accepts no frames", hint="repair it, then serve again")


def _as_trained(table: TableSpec, held: npt.NDArray[np.float32], ids: npt.NDArray[np.int64]) -> Array:
    """Return rows with the trainer's values. Types that float32 holds exactly are converted back without loss."""
    rows = held[ids]
    if table.dtype == "bfloat16":
        return (rows.view(np.uint32) >> 16).astype(np.uint16)
    return rows.astype(np.float16) if table.dtype == "float16" else rows
