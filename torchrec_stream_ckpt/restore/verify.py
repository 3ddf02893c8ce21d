"""Read everything that a marker needs and check it, without a model: the stream, its coverage, the dense files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torchrec_stream_ckpt.errors import CorruptionError
from torchrec_stream_ckpt.format.control import Schema
from torchrec_stream_ckpt.format.frame import Header, Kind
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.format.rows import decode_rows
from torchrec_stream_ckpt.log.api import Log
from torchrec_stream_ckpt.log.stream import checked_payload, read_mark, read_stream
from torchrec_stream_ckpt.restore.choose import check_incarnation, check_not_trimmed, read_hellos
from torchrec_stream_ckpt.restore.plan import plan_reads
from torchrec_stream_ckpt.store.dense import DenseStore
from torchrec_stream_ckpt.types import MarkerId, TableShard, TableSpec


@dataclass(frozen=True, slots=True)
class Verified:
    """What was read and found whole."""

    marker: MarkerId
    generations: int
    streams: int
    frames: int
    rows: int
    num_bytes: int
    dense_files: int
    dense_bytes: int


def verify_marker(
    log: Log, lineage: Lineage, dense: DenseStore, marker: MarkerId, progress: Callable[[int], None] = lambda _: None
) -> Verified:
    """Check every byte that restoring ``marker`` would read.

    Args:
        log: The job's log.
        lineage: Its control partition.
        dense: Where its dense state lies.
        marker: A committed marker.
        progress: Called with the bytes of each frame.

    Raises:
        MarkerNotFoundError: it is not committed.
        CorruptionError: the first thing that is wrong, and where.
        TrimmedError: the log was trimmed, and the marker needs what is gone.
    """
    commit = lineage.find(marker)
    schema = lineage.claims[marker.generation].schema
    dense.verify(commit)
    check_not_trimmed(log, lineage, marker)
    check_incarnation(log, lineage, marker)
    hellos = read_hellos(log, lineage, marker)
    # A plan for one process that holds every table whole reads every stream, and proves that they cover it.
    whole = [TableShard(index, 0, table.rows, 0, table.dim) for index, table in enumerate(schema.tables)]
    plan = plan_reads(lineage, marker, hellos, schema, whole)
    coverage = _Coverage(schema)
    bases = lineage.bases(marker)
    streams = frames = rows = num_bytes = 0
    for ancestor in lineage.path(marker):
        for end in ancestor.ranks:
            streams += 1
            for header, frame in read_stream(log, ancestor, end):
                payload = checked_payload(header, frame, ancestor, end)
                if header.kind is Kind.ROWS:
                    coverage.add(header, payload, fresh=ancestor.generation >= bases.get(header.table, 0))
                elif header.kind is Kind.MARK:
                    read_mark(header, frame, ancestor, end)
                frames, rows, num_bytes = frames + 1, rows + header.rows, num_bytes + len(frame)
                progress(len(frame))
    coverage.check()
    dense_bytes = sum(file.num_bytes for file in commit.dense_files)
    return Verified(
        plan.marker,
        len(lineage.path(marker)),
        streams,
        frames,
        rows,
        num_bytes,
        len(commit.dense_files),
        dense_bytes,
    )


class _Coverage:
    """Which cells of each table have been sent: one row of flags for each column slice."""

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        self._sent: dict[tuple[int, int, int], npt.NDArray[np.bool_]] = {}
        self._records = [0] * len(schema.tables)

    def add(self, header: Header, payload: memoryview, *, fresh: bool) -> None:
        if header.table >= len(self._schema.tables):
            raise CorruptionError(f"table {header.table} is not in the schema", **header.place())
        table = self._schema.tables[header.table]
        view = decode_rows(header, payload, table)
        if fresh:
            key = (header.table, header.col0, header.cols)
            if key not in self._sent:
                self._sent[key] = _flags(table)
            self._sent[key][view.ids] = True
            self._records[header.table] += header.rows

    def check(self) -> None:
        for index, table in enumerate(self._schema.tables):
            missing = table.rows - self._records[index]
            if missing > 0:  # said before a table that only claims to be huge takes memory
                raise CorruptionError(f"{missing} rows are not in the log", table=table.name)
            slices = [(col0, cols, sent) for (of, col0, cols), sent in self._sent.items() if of == index]
            for column in sorted({edge for col0, cols, _ in slices for edge in (col0, col0 + cols)} | {0}):
                if column < table.dim:
                    sent = [flags for col0, cols, flags in slices if col0 <= column < col0 + cols]
                    missing = table.rows - int(np.logical_or.reduce(sent).sum()) if sent else table.rows
                    if missing:
                        raise CorruptionError(f"{missing} rows are not in the log", table=table.name, column=column)


def _flags(table: TableSpec) -> npt.NDArray[np.bool_]:
    """One a row; the system gives memory only for those that are set."""
    try:
        return np.zeros(table.rows, np.bool_)
    except (MemoryError, ValueError):
        raise CorruptionError(f"cannot keep account of {table.rows} rows", table=table.name) from None
