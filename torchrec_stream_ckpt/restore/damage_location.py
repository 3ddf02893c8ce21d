"""Locate damage in terms that a person can act on: the file, the offset in it, and the table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from torchrec_stream_ckpt.errors import CorruptionError, StreamCkptError
from torchrec_stream_ckpt.format.frame import Header, parse_header
from torchrec_stream_ckpt.format.interval import Interval
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.log.api import Incarnation, LogReader
from torchrec_stream_ckpt.store.catalog import Picked
from torchrec_stream_ckpt.util.types import LogSpan


def located(
    error: CorruptionError,
    log: LogReader,
    read: Iterable[Interval],
    schema: Schema,
    segments: Iterable[Picked] = (),
) -> CorruptionError:
    """Return ``error`` with the file, the offset and the table of its damage, if they can be determined.

    Args:
        error: The error that a read raised.
        log: The log that was read.
        read: Intervals that were read from the log.
        schema: Schema of the tables.
        segments: Segments that were read from the store.
    """
    try:
        found = in_segments(error, segments, schema) if "name" in error.where else _in_log(error, log, read, schema)
    except StreamCkptError:  # the damaged part may be unreadable: keep what the error itself reports
        found = {}
    return type(error)(error.message, hint=error.hint, **{**error.where, **found})


def _in_log(error: CorruptionError, log: LogReader, read: Iterable[Interval], schema: Schema) -> dict[str, object]:
    where = error.where
    for interval in read:
        commit, end = interval.commit, interval.end
        if (str(commit.generation), str(end.rank)) != (str(where.get("generation")), str(where.get("rank"))):
            continue
        found: dict[str, object] = {}
        offset, header = _frame(error, log, LogSpan(commit.generation, end.partition, end.begin, end.end))
        tables = interval.claim.schema.tables  # the marker may have other tables
        if header is not None and header.table < len(tables) and header.rows:
            found["table"] = tables[header.table].name
        if offset is not None and "path" not in where:
            path, within = log.place(LogSpan(commit.generation, end.partition, offset, end.end))
            found |= {"path": path, "offset": str(within)}
        return found
    return {}


def _frame(error: CorruptionError, log: LogReader, span: LogSpan) -> tuple[int | None, Header | None]:
    """Return offset and header of the frame with the number in ``error``.

    If that header cannot be read, returns the offset in ``error``, None if it has no offset, and no header.
    """
    for offset, frame in log.read(span):
        try:
            header = parse_header(frame)
        except CorruptionError:  # a stray, or the damage itself
            continue
        if str(header.seq) == str(error.where.get("seq")) and str(header.rank) == str(error.where.get("rank")):
            return offset, header
    named = error.where.get("offset")
    return (int(str(named)) if named is not None else None), None


def in_segments(error: CorruptionError, segments: Iterable[Picked], schema: Schema) -> dict[str, object]:
    """Return the table of a damaged chunk of one of these segments, as a field of an error."""
    name, offset = error.where.get("name"), error.where.get("offset")
    for picked in segments:
        if picked.ref.name == name and offset is not None:
            directory = picked.front.directory
            mine = directory[directory["offset"] == int(str(offset))]
            if len(mine) and int(mine["table"][0]) < len(schema.tables):
                return {"table": schema.tables[int(mine["table"][0])].name}
    return {}


class Placing:
    """A log reader that remembers the location of the frame that was read last."""

    def __init__(self, log: LogReader) -> None:
        self._log = log
        self._at: LogSpan | None = None

    def incarnation(self) -> Incarnation | None:
        return self._log.incarnation()

    def check_there(self, spans: Sequence[LogSpan]) -> None:
        self._log.check_there(spans)

    def place(self, span: LogSpan) -> tuple[str, int]:
        return self._log.place(span)

    def read(self, span: LogSpan) -> Iterator[tuple[int, memoryview]]:
        self._at = span
        for offset, frame in self._log.read(span):
            self._at = span._replace(begin=offset)
            yield offset, frame

    def where(self, error: CorruptionError) -> dict[str, object]:
        """Return file and offset of ``error``: the offset that it names, or that of the frame that was read last.

        Returns an empty dict if the error names a file, or nothing was read.
        """
        if "path" in error.where or self._at is None:
            return {}
        path, offset = self._log.place(self._at._replace(begin=int(str(error.where.get("offset", self._at.begin)))))
        return {"path": path, "offset": str(offset)}
