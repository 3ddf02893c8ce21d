"""The stream of a one-rank job, written by the library's own codec and log: what its trainer would have sent."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from workload import Ids, Tables, Values, Workload

from tests.builders import digest_files
from torchrec_stream_ckpt.format.control import Claim, Commit, Hello, Mark, TableScalars
from torchrec_stream_ckpt.format.frame import (
    HEADER_LEN,
    MAX_FRAME_BYTES,
    Header,
    Kind,
    json_frame,
    parse_header,
    payload_of,
    seal,
)
from torchrec_stream_ckpt.format.rows import RowLayout, RowsView, decode_rows
from torchrec_stream_ckpt.log.files import FileLog
from torchrec_stream_ckpt.util.layout import dense_name
from torchrec_stream_ckpt.util.types import LogSpan, MarkerId, RankEnd, TableShard

GENERATION = 1
_NONCE = "recovery-benchmark"
_BATCH = 64  # frames that are made durable at once, as the publisher does


def marker_of(interval: int) -> MarkerId:
    """Marker 1 of the stream is the base, the one behind interval m is m + 1."""
    return MarkerId(GENERATION, interval + 1)


class Trainer:
    """Sends one interval after the other, and commits a marker behind each.

    Args:
        root: Folder of the file log.
        workload: What is trained.
        values: What the rows become.
    """

    def __init__(self, root: Path, workload: Workload, values: Values) -> None:
        self.workload = workload
        self.root = root
        self.log = FileLog(root)
        self.job = uuid.uuid5(uuid.NAMESPACE_OID, workload.name).bytes
        self.live = Tables.of(workload)
        """As the job has them behind the last interval."""
        self.spans: list[LogSpan] = []
        """Where the frames of each interval are."""
        self._values = values
        self._seq = self._chain = self._rows = self._bytes = self._end = 0
        self._buffers = [bytearray(MAX_FRAME_BYTES) for _ in range(_BATCH)]
        self._used = self._waiting = 0
        self.log.append_control(self._claim().to_frame())
        self._writer = self.log.open_writer(GENERATION, 0, 0)
        self._hello()

    @property
    def uri(self) -> str:
        return f"file://{self.root}"

    def interval(self) -> None:
        """Train one more interval: the base first."""
        number, begin = len(self.spans), self._end
        step = number * self.workload.steps
        for table, ids in self.workload.by_table(number):
            self._send_rows(table, ids, number, step)
        rows, num_bytes = self._rows, self._bytes
        self._send_json(Kind.MARK, Mark(rows, num_bytes, self._scalars(step)).to_json(), step, number + 1)
        self._flush()
        self.spans.append(LogSpan(GENERATION, 0, begin, self._end))
        end = RankEnd(0, 0, 0, self._end, self._seq, self._chain, rows, num_bytes)
        self.log.append_control(self._commit(number, step, end).to_frame())

    def close(self) -> None:
        self._writer.close()

    def _claim(self) -> Claim:
        incarnation, schema = self.log.prepare(1).id, self.workload.schema
        swept = tuple(range(len(schema.tables)))
        return Claim(self.job, GENERATION, _NONCE, "", None, 1, 1, incarnation, schema, swept, 0.0)

    def _commit(self, number: int, step: int, end: RankEnd) -> Commit:
        """With a dense directory that DCP has written: it holds no more than a step."""
        marker = marker_of(number)
        name = dense_name(self.job, marker)
        dcp.save({"step": torch.tensor(step)}, checkpoint_id=self.root / name, no_dist=True)
        files = digest_files(self.root / name, [path.name for path in (self.root / name).iterdir()])
        return Commit(self.job, GENERATION, _NONCE, marker.marker, step, (end,), name, files, 0.0, "")

    def _hello(self) -> None:
        tables = self.workload.schema.tables
        shards = tuple(TableShard(table, 0, spec.rows, 0, spec.dim) for table, spec in enumerate(tables))
        self._send_json(Kind.HELLO, Hello(1, self.workload.schema, shards).to_json(), 0, 0)

    def _scalars(self, step: int) -> tuple[TableScalars, ...]:
        tables = enumerate(self.workload.schema.tables)
        return tuple(TableScalars(table, 0, spec.rows, 0, spec.dim, step, 1.0, 0.1, 0.1) for table, spec in tables)

    def _send_rows(self, table: int, ids: Ids, number: int, step: int) -> None:
        spec = self.workload.schema.tables[table]
        layout = RowLayout.of(spec, spec.dim)
        for begin in range(0, len(ids), layout.max_rows):
            chosen = ids[begin : begin + layout.max_rows]
            offsets, length = layout.offsets(len(chosen))
            frame = memoryview(self._buffer())[: HEADER_LEN + length]
            parts = [
                torch.frombuffer(frame, dtype=dtype, count=len(chosen) * width, offset=HEADER_LEN + offset)
                for offset, dtype, width in zip(
                    offsets, (torch.int64, torch.float32, torch.float32), (1, spec.dim, 1), strict=True
                )
            ]
            linear = chosen + self.workload.bases[table]
            parts[0].copy_(torch.from_numpy(chosen))
            weights, sums = self._values.of(linear, number, out=parts[1].view(-1, spec.dim))
            parts[2].copy_(sums)
            self.live.put(torch.from_numpy(linear), weights, sums)
            self._send(
                Header(
                    Kind.ROWS,
                    self.job,
                    GENERATION,
                    step=step,
                    marker=number + 1,
                    table=table,
                    rows=len(chosen),
                    cols=spec.dim,
                    dtypes=tuple(section.code for section in layout.sections),
                    section_offsets=offsets,
                    payload_len=length,
                ),
                frame,
            )

    def _send_json(self, kind: Kind, text: bytes, step: int, marker: int) -> None:
        header = Header(kind, self.job, GENERATION, step=step, marker=marker)
        self._send(header, memoryview(json_frame(header, text)))

    def _buffer(self) -> bytearray:
        if self._used == _BATCH:
            self._flush()
        self._used += 1
        return self._buffers[self._used - 1]

    def _send(self, header: Header, frame: memoryview) -> None:
        header.schema_crc = self.workload.schema.crc
        header.seq, header.chain = self._seq, self._chain
        seal(header, frame)
        self._writer.send(frame)
        self._waiting += 1
        self._seq, self._chain = self._seq + 1, header.header_crc
        self._rows += header.rows
        self._bytes += len(frame)

    def _flush(self) -> None:
        while self._waiting:
            acks = self._writer.poll(60.0)
            self._waiting -= len(acks)
            self._end = acks[-1].end if acks else self._end
        self._used = 0


def read_rows(log: FileLog, span: LogSpan, workload: Workload) -> Iterator[tuple[int, RowsView]]:
    """(table, rows) of each ROWS frame of a span, its checksums compared."""
    for _, frame in log.read(span):
        header = parse_header(frame)
        if header.kind is Kind.ROWS:
            yield header.table, decode_rows(header, payload_of(header, frame), workload.schema.tables[header.table])


def linear_ids(table: int, rows: RowsView, workload: Workload) -> Ids:
    return np.add(rows.ids, workload.bases[table])
