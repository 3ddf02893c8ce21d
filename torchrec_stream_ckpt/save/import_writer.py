"""Write marker 1 of a new log without a job: one rank, from CLAIM and HELLO to MARK and COMMIT."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from threading import Event
from typing import Any

import numpy as np

from torchrec_stream_ckpt.dense.dcp import save_together
from torchrec_stream_ckpt.errors import LogUnavailableError, StoreUnavailableError
from torchrec_stream_ckpt.find.job import Tier
from torchrec_stream_ckpt.format.control import Claim, Commit, Hello, Mark
from torchrec_stream_ckpt.format.dense_files import DenseFile
from torchrec_stream_ckpt.format.frame import HEADER_LEN, Header, Kind
from torchrec_stream_ckpt.format.imported import check_may_import, import_nonce
from torchrec_stream_ckpt.format.rank_shards import RankShards
from torchrec_stream_ckpt.format.ring import FrameBuffer, FrameRing
from torchrec_stream_ckpt.format.rows import Array, RowLayout, view_rows
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.log.api import Log
from torchrec_stream_ckpt.log.publisher import Publisher
from torchrec_stream_ckpt.save.failed_markers import why_not_saved
from torchrec_stream_ckpt.save.generation import Opening, claim_generation
from torchrec_stream_ckpt.store.dense import name_files
from torchrec_stream_ckpt.util.failpoints import failpoint
from torchrec_stream_ckpt.util.layout import dense_name
from torchrec_stream_ckpt.util.types import MarkerId, RankEnd, TableShard

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


@dataclass(frozen=True, slots=True)
class WrittenImport:
    """The marker that an import has committed."""

    marker: MarkerId
    num_bytes: int
    """Bytes of rows in the log."""
    unfinished: int | None
    """The generation of an unfinished import into this log that this one replaces; None if the log was empty."""


def write_import(
    tier: Tier,
    schema: Schema,
    shards: Sequence[TableShard],
    batches: Iterator[Batch],
    state: dict[str, Any],
    step: int,
) -> WrittenImport:
    """Commit the first marker of a log that is empty, or that only an unfinished import has claimed.

    If the earlier import is still running, it is fenced.

    Args:
        tier: The log and its store.
        schema: Schema of the tables.
        shards: Their shards: disjoint, and together every table.
        batches: All rows of all shards.
        state: Dense state, in the form in which ``dense/saved_dense.py`` reads it.
        step: Step of the marker.

    Raises:
        ConfigError: the log is not empty.
        FencedError: another import has started in this log in the meantime.
        LogUnavailableError, StoreUnavailableError: one of them does not accept the data.
    """
    control, dense, config = tier.control, tier.dense, tier.config
    unfinished = check_may_import(control.refresh(), config.uris[-1])
    layout, swept, nonce = RankShards.of([shards]), tuple(range(len(schema.tables))), import_nonce()
    claim = claim_generation(tier, Opening(schema, 1, None, swept, layout, nonce=nonce))
    check_may_import(control.lineage, config.uris[-1])  # another one may have ended before that CLAIM
    end = write_stream(tier.log, claim, shards, batches, step, config.commit_timeout_s)
    failpoint("import.rows")
    marker = MarkerId(claim.generation, MARKER)
    files = _save_dense(tier, state, claim.job, marker)
    named, list_ = name_files(dense, claim.job, marker, files)
    commit = Commit(
        job=claim.job,
        generation=claim.generation,
        nonce=claim.nonce,
        marker=MARKER,
        step=step,
        ranks=(end,),
        dense=dense_name(claim.job, marker),
        dense_files=named,
        dense_list=list_,
        time_s=time.time(),
        store=config.store_url if config.store else "",
    )
    control.commit(commit, config.commit_timeout_s, Event())
    dense.settle(claim.job, marker)
    return WrittenImport(marker, end.num_bytes, unfinished)


def _save_dense(tier: Tier, state: dict[str, Any], job: bytes, marker: MarkerId) -> tuple[DenseFile, ...]:
    """Write the dense state into the store. Returns its files, now durable."""
    dense = tier.dense
    try:
        files = save_together(state, dense.writing(job, marker), None, direct=tier.dense_direct)
    except RuntimeError as error:
        raise StoreUnavailableError(
            f"dense state was not saved: {why_not_saved(error, dense.url)}",
            hint="free space there if it is full, and run the same import again: it starts over",
            store=dense.url,
        ) from error
    dense.publish(job, marker, files)
    return files


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
        return LogUnavailableError(
            f"the log did not accept the rows within {self._timeout_s:.0f} s ({why})",
            hint="repair the log, and run the same import again",
        )
