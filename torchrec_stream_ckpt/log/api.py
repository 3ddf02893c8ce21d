"""The interface of a log: ordered data partitions, one control partition. Two backends, one contract suite.

Frames go in and come out whole; a log knows nothing of what is in them but where each one ends.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from torchrec_stream_ckpt.errors import ConfigError
from torchrec_stream_ckpt.util.options import Options, read_options
from torchrec_stream_ckpt.util.types import LogSpan, MarkPlace
from torchrec_stream_ckpt.util.uris import FileUri, KafkaUri, parse_uri


@dataclass(frozen=True, slots=True)
class Incarnation:
    """Which log this is: a topic that was deleted and made again under its name is another one."""

    id: str
    partitions: int

    def holds_rows_of(self, incarnation: str) -> bool:
        """Return whether rows written to ``incarnation`` are here: a control topic may have been recreated."""
        return incarnation.partition("+")[0] == self.id.partition("+")[0]


class Severity(StrEnum):
    """What a finding means for whoever runs the log."""

    OK = "ok"
    WARNING = "warning"
    BAD = "bad"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    check: str
    found: str
    verdict: Severity = Severity.OK
    hint: str = ""
    """What to do, unless it is well."""

    @classmethod
    def of(cls, check: str, found: str, *, well: bool, hint: str, otherwise: Severity = Severity.WARNING) -> Finding:
        """OK when it is ``well``; else ``otherwise``, with the hint."""
        return cls(check, found) if well else cls(check, found, otherwise, hint)


@dataclass(frozen=True, slots=True)
class Rows:
    """What there is of rows in a log, whatever its control partition says."""

    generation: int
    """The newest one that something is known to be of; 1 where the log cannot tell without reading."""
    what: str
    """Who holds them, for a message: ``the file log holds``."""
    control: str
    """Name of what holds the control partition."""
    place: str
    """Where some of them are."""


@dataclass(frozen=True, slots=True)
class Ack:
    """One frame is durable, at log offsets [offset, end)."""

    offset: int
    end: int


@dataclass(frozen=True, slots=True)
class TrimRange:
    """What of a log is no longer needed, and what is needed around it."""

    gone: tuple[LogSpan, ...]
    """Pieces of committed streams that no reader needs again."""
    kept: tuple[LogSpan, ...]
    """Pieces of committed streams that a reader may need: of these, nothing may go."""
    dead: frozenset[int]
    """Generations of which nothing is needed, and that can commit nothing more."""


@dataclass(frozen=True, slots=True)
class Freed:
    """What a trim deleted, or would delete."""

    what: str
    """What the log counts: segments, or records."""
    count: int
    num_bytes: int | None
    """None where the log does not tell."""


class DataWriter(Protocol):
    """One rank's end of a data partition. Called from one thread. Errors are final for this writer:
    open another one and send again what was not acknowledged."""

    def send(self, frame: memoryview) -> None:
        """Hand over one frame. Its bytes must stay as they are until it is acknowledged.

        Raises:
            LogUnavailableError: the frame was not taken.
        """

    def poll(self, timeout_s: float) -> list[Ack]:
        """Frames that became durable since the last call, in the order of ``send``; waits at most ``timeout_s``.

        Raises:
            LogUnavailableError: what was sent and not acknowledged may or may not be in the log.
            StreamLostError: what was acknowledged is gone.
        """

    def waits_for(self) -> str:
        """Who has to acknowledge what was sent, in words, as far as that is known within 2 s. Never raises."""

    def close(self) -> None:
        """Let go of files and connections; does not wait for what is not acknowledged."""


class LogReader(Protocol):
    """What a restore needs of a log. Safe to call from several threads."""

    def incarnation(self) -> Incarnation | None:
        """The log as it is now, or None when there is none yet."""

    def read(self, span: LogSpan) -> Iterator[tuple[int, memoryview]]:
        """(offset, frame) of everything in ``span``, in order. A frame may be kept.

        Raises:
            CorruptionError: the span is not there as a whole, or a frame's end cannot be told.
            LogUnavailableError: the log does not answer.
        """

    def check_there(self, spans: Sequence[LogSpan]) -> None:
        """Look whether the spans are still there, as far as names, sizes and both ends tell; reads no frames.

        Raises:
            StreamLostError: the log ends before one of them does.
            CorruptionError: something took another part of one away.
            LogUnavailableError: the log does not answer.
        """

    def place(self, span: LogSpan) -> tuple[str, int]:
        """Where the first byte of ``span`` is, for a message: a file or a partition, and the offset there."""


class Log(LogReader, Protocol):
    """A log as its users see it. Safe to call from several threads."""

    uri: FileUri | KafkaUri

    def prepare(self, partitions: int, identity: str | None = None) -> Incarnation:
        """(rank 0) Make the log, or add what is missing for ``partitions``; never takes anything away.

        Args:
            partitions: How many there shall be.
            identity: (recovery) What a file log that has lost its identity was called; rows may be there then.

        Raises:
            CorruptionError: the log has lost its identity, and ``identity`` is not given.
        """

    def preflight(self) -> None:
        """(rank 0) Whether a trainer could use the log: it answers, lets us in and allows what is needed.

        Raises:
            LogUnavailableError: it does not; names the true cause.
        """

    def open_writer(self, generation: int, partition: int, resume_at: int, *, again: bool = False) -> DataWriter:
        """(each rank) Open a stream, or go on with one.

        What a writer of this very stream has left behind ``resume_at`` counts as never sent. A stream that is new is
        opened exclusively: nothing that is there is touched.

        Args:
            generation: Of the stream.
            partition: Where it goes.
            resume_at: End of the last acknowledged frame, 0 in a new generation.
            again: An earlier process may have begun it; without that, only this object may have.

        Raises:
            StreamLostError: the log ends before ``resume_at``.
            LogUnavailableError: it does not answer.
        """

    def check_marks(self, marks: Sequence[MarkPlace]) -> None:
        """See that each MARK is where it was acknowledged: another writer may have written over a lost tail.

        Raises:
            StreamLostError: another frame is there, or none.
            CorruptionError: something took it away.
            LogUnavailableError: the log does not answer.
        """

    def ends(self, generation: int, partitions: Collection[int]) -> dict[int, int]:
        """Where what a generation may have sent ends now, by data partition; 0 where there is nothing yet.

        For who reads what no marker has: a log of files may end inside a frame that is being written.

        Raises:
            LogUnavailableError: the log does not answer.
        """

    def newest_rows(self, ends: Mapping[int, int] | None = None) -> Rows | None:
        """Rows of the newest generation that has any, as names tell; None where there is no row.

        Args:
            ends: Where the rows of generations that are known end, by partition: what lies behind that is read, where
                names do not tell.

        Raises:
            LogUnavailableError: the log does not answer.
        """

    def trim(self, range_: TrimRange, *, dry_run: bool = False) -> Freed:
        """Delete what ``range_`` gives up, as far as that can be deleted by itself; the rest goes with a later trim.

        May be called while trainers write and readers read, at any time again, and by several at once.

        Args:
            range_: What may go. What is in neither of its lists stays, unless a generation is dead.
            dry_run: Delete nothing; the answer is the same, and so are the errors about rights.

        Raises:
            LogUnavailableError: the log does not answer, or does not let us delete.
        """

    def expect_append(self) -> None:
        """Prepare what a control record will wait for otherwise: one will be appended soon. Waits for nobody, and never
        raises: the append tells what is wrong."""

    def append_control(self, record: bytes, *, garbage: bool = False) -> int:
        """Append one record to the control partition and return its offset once it is durable.

        Args:
            record: The record.
            garbage: There may be something else than records, which readers with a commit key pass over.

        Raises:
            CommitUnknownError: no answer; only reading tells whether it is there.
        """

    def waits_for(self) -> str:
        """Name what has to acknowledge a control record, in words, as far as it is known within 2 s. Never raises."""

    def read_control(self, start: int = 0, *, garbage: bool = False) -> Iterator[tuple[int, bytes]]:
        """(offset, record) of all records from offset ``start`` that are durable now; ends at the last one.

        With ``garbage``, something else than records is given as well, in pieces, and reading goes on after it.

        Raises:
            CorruptionError: a record is damaged (a torn tail is none).
            PrunedError: the partition begins after ``start``.
        """

    def control_base(self) -> int:
        """Where the control partition begins: 0, unless the records that a snapshot stands for were deleted."""

    def control_next(self, offset: int, record: bytes) -> int:
        """Where reading goes on after what :meth:`read_control` has given."""

    def prune_control(self, base: int) -> None:
        """Delete the records before offset ``base``, where one begins. Offsets keep their meaning.

        Others may append and read meanwhile. The caller has made sure that snapshots say what goes.

        Raises:
            LogUnavailableError: the log does not answer, or does not let us delete.
        """

    def examine(self) -> Iterator[Finding]:
        """Look at what the log's safety rests on, outside of this program; leaves nothing behind.

        Raises:
            LogUnavailableError: the log does not answer.
        """

    def close(self) -> None: ...


def open_log(uri: str, options: Options = None) -> Log:
    """Open the log that ``uri`` names; touches nothing until it is used.

    Args:
        uri: ``file://DIR`` or ``kafka://BROKERS/JOB``.
        options: Kafka client settings (security included), or a file of ``key=value`` lines.
    """
    parsed = parse_uri(uri)
    if isinstance(parsed, FileUri):
        from torchrec_stream_ckpt.log.files import FileLog

        if options:
            raise ConfigError("client options are for Kafka, this is a file log", hint="leave them out")
        return FileLog(parsed.directory)
    from torchrec_stream_ckpt.log.kafka.log import KafkaLog

    return KafkaLog(parsed, load_options(options))


def load_options(options: Options) -> dict[str, str]:
    """Kafka client settings from a mapping, or from a properties file."""
    return {key: str(value) for key, value in read_options(options, "client").items()}
