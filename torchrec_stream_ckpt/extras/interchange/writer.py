"""Write a generation without a job: the stream of one rank, from HELLO to the MARK of marker 1."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from torchrec_stream_ckpt.errors import LogUnavailableError
from torchrec_stream_ckpt.format.control import Claim, Hello, Mark
from torchrec_stream_ckpt.format.frame import HEADER_LEN, Header, Kind
from torchrec_stream_ckpt.format.ring import FrameBuffer, FrameRing
from torchrec_stream_ckpt.format.rows import Array, RowLayout, view_rows
from torchrec_stream_ckpt.log.api import Log
from torchrec_stream_ckpt.log.publisher import Publisher
from torchrec_stream_ckpt.util.types import RankEnd, TableShard

MARKER = 1
_RING_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of one shard, in order."""

    shard: TableShard
    row0: int
    weights: Array
    """Shape (rows, cols)."""
    states: tuple[Array, ...]
    """Optimizer states in the schema's order; shape (rows,) or (rows, cols)."""


def write_stream(
    log: Log, claim: Claim, shards: Sequence[TableShard], batches: Iterator[Batch], step: int, timeout_s: float
) -> RankEnd:
    """Write rank 0's stream of a generation that has been claimed.

    Returns its end at the marker. Everything up to there is then durable.

    Args:
        log: The log.
        claim: The generation.
        shards: Its shards: disjoint, and together every table.
        batches: All rows of all shards.
        step: Step of the marker.
        timeout_s: How long the log may take for the frames that fit the ring.

    Raises:
        LogUnavailableError: the log did not accept the rows.
    """
    ring = FrameRing(_RING_BYTES, 0)
    publisher = Publisher(lambda resume_at: log.open_writer(claim.generation, 0, resume_at), ring)
    stream = _RankStream(claim, ring, publisher, step, timeout_s)
    try:
        hello = Hello(1, claim.schema, tuple(shards))
        stream.put_json(Kind.HELLO, hello.to_json(), marker=0, version=hello.version)
        for batch in batches:
            stream.put(batch)
        rows, num_bytes = publisher.rows, publisher.num_bytes
        # Without scalars: a restore leaves the counters and learning rates of the kernels unchanged.
        seq = stream.put_json(Kind.MARK, Mark(rows, num_bytes, ()).to_json(), marker=MARKER)
        durable = publisher.wait_mark(seq, timeout_s)
        if durable is None:
            raise stream.slow()
        return RankEnd(0, 0, durable.begin, durable.end, durable.frames, durable.chain, rows, num_bytes)
    finally:
        publisher.close(0.0)


class _RankStream:
    def __init__(self, claim: Claim, ring: FrameRing, publisher: Publisher, step: int, timeout_s: float) -> None:
        self._claim = claim
        self._ring = ring
        self._publisher = publisher
        self._step = step
        self._timeout_s = timeout_s
        self._schema_crc = claim.schema.crc

    def put_json(self, kind: Kind, text: bytes, **fields: int) -> int:
        """Send HELLO or MARK; returns its seq."""
        buffer = self._acquire()
        buffer.put_json(self._header(kind, **fields), text)
        return self._publisher.submit(buffer)

    def put(self, batch: Batch) -> None:
        """Send rows, filling each frame."""
        layout = RowLayout.of(self._claim.schema.tables[batch.shard.table], batch.shard.cols)
        for begin in range(0, len(batch.weights), layout.max_rows):
            rows = slice(begin, min(begin + layout.max_rows, len(batch.weights)))
            ids = np.arange(batch.row0 + rows.start, batch.row0 + rows.stop)
            self._put_frame(layout, batch.shard, ids, [batch.weights[rows], *(state[rows] for state in batch.states)])

    def _put_frame(self, layout: RowLayout, shard: TableShard, ids: Array, values: Sequence[Array]) -> None:
        buffer = self._acquire()
        offsets, length = layout.offsets(len(ids))
        payload = buffer.array.data[HEADER_LEN : HEADER_LEN + length]
        view = view_rows(layout, len(ids), payload)
        for target, source in zip((view.ids, view.weights, *view.states), (ids, *values), strict=True):
            target[...] = source
        buffer.header = self._header(
            Kind.ROWS,
            marker=MARKER,
            table=shard.table,
            rows=len(ids),
            col0=shard.col0,
            cols=shard.cols,
            dtypes=layout.codes,
            section_offsets=offsets,
            payload_len=length,
        )
        self._publisher.submit(buffer)

    def _header(self, kind: Kind, **fields: object) -> Header:
        claim = self._claim
        values: dict[str, object] = {"step": self._step, "schema_crc": self._schema_crc, **fields}
        return Header(kind, claim.job, claim.generation, **values)  # type: ignore[arg-type]

    def _acquire(self) -> FrameBuffer:
        buffer = self._ring.acquire(wait_s=self._timeout_s)
        if buffer is None:
            raise self.slow()
        return buffer

    def slow(self) -> LogUnavailableError:
        why = self._publisher.failure or "it is slow"
        return LogUnavailableError(f"the log did not accept the rows in {self._timeout_s:.0f} s ({why})")
