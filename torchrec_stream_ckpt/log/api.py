"""Log interface: ordered data partitions and one control partition. Three backends, one contract suite.

Frames are written and read whole. A log knows nothing of their contents except where each one ends.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from torchrec_stream_ckpt.errors import ConfigError
from torchrec_stream_ckpt.log.watch import Watch
from torchrec_stream_ckpt.util.layout import MAX_PARTITIONS
from torchrec_stream_ckpt.util.options import Options, read_options
from torchrec_stream_ckpt.util.types import LogSpan, MarkPlace
from torchrec_stream_ckpt.util.uris import BucketUri, FileUri, LogUri, parse_uri


@dataclass(frozen=True, slots=True)
class Incarnation:
    """Identity of a log. A topic that was deleted and recreated under its name is another log."""

    id: str
    partitions: int

    def holds_rows_of(self, incarnation: str) -> bool:
        """Return whether rows written to ``incarnation`` are in this log, even if its control topic was recreated."""
        return incarnation.partition("+")[0] == self.id.partition("+")[0]


class Severity(StrEnum):
    """Severity of a finding, for the operator of the log."""

    OK = "ok"
    WARNING = "warning"
    BAD = "bad"


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check."""

    check: str
    found: str
    verdict: Severity = Severity.OK
    hint: str = ""
    """Suggested action. Empty if the verdict is OK."""

    @classmethod
    def of(cls, check: str, found: str, *, well: bool, hint: str, otherwise: Severity = Severity.WARNING) -> Finding:
        """Make an OK finding if ``well``. Otherwise its severity is ``otherwise``, with the hint."""
        return cls(check, found) if well else cls(check, found, otherwise, hint)


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows that exist in a log, whatever its control partition says."""

    generation: int
    """Newest generation known to have rows. 1 if the log cannot know it without reading."""
    what: str
    """Holder of the rows, for a message: ``the file log holds``."""
    control: str
    """Name of the holder of the control partition."""
    place: str
    """Place of some of the rows."""


@dataclass(frozen=True, slots=True)
class Ack:
    """Acknowledgment that one frame is durable, at log offsets [offset, end)."""

    offset: int
    end: int


@dataclass(frozen=True, slots=True)
class TrimRange:
    """Parts of a log that are no longer needed, and needed parts around them."""

    gone: tuple[LogSpan, ...]
    """Pieces of committed streams that no reader needs again."""
    kept: tuple[LogSpan, ...]
    """Pieces of committed streams that a reader may need. None of these may be deleted."""
    dead: frozenset[int]
    """Generations of which nothing is needed, and that can commit nothing more."""

    def ends(self) -> dict[tuple[int, int], int]:
        """Return the offset up to which each stream (generation, partition) may be deleted, for logs by streams."""
        ends: dict[tuple[int, int], int] = {}
        for span in self.gone:
            stream = span.generation, span.partition
            ends[stream] = min(span.end, ends.get(stream, span.end))
        return ends


@dataclass(frozen=True, slots=True)
class Freed:
    """Data that a trim deleted, or would delete."""

    what: str
    """Unit of the count: segments, or records."""
    count: int
    num_bytes: int | None
    """Deleted bytes. None if the log cannot report them."""


def check_ranks(partitions: int) -> None:
    """Check that a log by streams can have a partition for each rank.

    Raises:
        ConfigError: there are too many.
    """
    if partitions > MAX_PARTITIONS:
        raise ConfigError(
            f"{partitions} ranks are too many: a log has at most {MAX_PARTITIONS} partitions",
            hint=f"train on at most {MAX_PARTITIONS} ranks",
        )


class DataWriter(Protocol):
    """Writer of one rank to a data partition. Called from one thread.

    Errors are final for this writer: open another one and send all unacknowledged frames again.
    """

    how: str
    """Way in which frames are written, for people: ``direct``, or ``buffered`` and the reason."""

    @property
    def origin(self) -> int | None:
        """Offset from which blocks count. None if the log gains nothing from frames that lie at blocks."""

    def send(self, frame: memoryview) -> None:
        """Hand over one frame, followed by padding if the log has an :attr:`origin`. It is acknowledged as one.

        Its bytes must not change until then.

        Raises:
            LogUnavailableError: the frame was not accepted.
        """

    def poll(self, timeout_s: float) -> list[Ack]:
        """Return frames that became durable since the last call, in the order of ``send``. Waits at most ``timeout_s``.

        Raises:
            LogUnavailableError: unacknowledged frames may or may not be in the log.
            StreamLostError: acknowledged frames are missing.
        """

    def waits_for(self) -> str:
        """Describe who has to acknowledge the frames sent, as far as that is known within 2 s. Never raises."""

    def close(self) -> None:
        """Release files and connections. Does not wait for unacknowledged frames."""


class LogReader(Protocol):
    """Methods of a log that a restore needs. Safe to call from several threads."""

    def incarnation(self) -> Incarnation | None:
        """Return the log's current identity. Returns None if the log does not exist yet."""

    def read(self, span: LogSpan) -> Iterator[tuple[int, memoryview]]:
        """Yield (offset, frame) of everything in ``span``, in order. The caller may keep a frame.

        Raises:
            CorruptionError: the span is incomplete, or the end of a frame cannot be determined.
            LogUnavailableError: the log does not answer.
        """

    def check_there(self, spans: Sequence[LogSpan]) -> None:
        """Check that the spans still exist, judging by names, sizes and both ends. Reads no frames.

        Raises:
            StreamLostError: the log ends before one of them does.
            CorruptionError: another part of one was deleted.
            LogUnavailableError: the log does not answer.
        """

    def place(self, span: LogSpan) -> tuple[str, int]:
        """Return the place of the first byte of ``span``, for a message: file or partition, and the offset there."""


class Log(LogReader, Protocol):
    """A log as its users see it. Safe to call from several threads."""

    uri: LogUri

    def prepare(
        self, partitions: int, identity: str | None = None, *, claimed: Incarnation | None = None
    ) -> Incarnation:
        """(rank 0) Create the log, or add partitions that are missing. Never deletes anything.

        Args:
            partitions: Required number of partitions.
            identity: (recovery) Former identity of a file log that has lost it. The log may contain rows in this case.
            claimed: The log as a CLAIM in it has recorded it. Its partitions were durable before that CLAIM was
                appended, so a log of files does not sync them again.

        Raises:
            CorruptionError: the log has lost its identity, and ``identity`` is not given.
        """

    def takes_blocks(self) -> bool:
        """(rank 0) Return whether writers use direct writes, so that frames should be aligned to blocks.

        Raises:
            LogUnavailableError: the log does not answer.
        """

    def preflight(self) -> None:
        """(rank 0) Check that a trainer could use the log: it answers, accepts our login and grants the permissions.

        Raises:
            LogUnavailableError: a trainer could not; the error names the true cause.
        """

    def open_writer(self, generation: int, partition: int, resume_at: int, *, again: bool = False) -> DataWriter:
        """(each rank) Open a new stream, or resume one.

        Frames that a writer of the same stream has left after ``resume_at`` count as never sent. A new stream is opened
        exclusively: no existing data is touched.

        Args:
            generation: Generation of the stream.
            partition: Partition that it is written to.
            resume_at: End of the last acknowledged frame. 0 in a new generation.
            again: True if an earlier process may have begun the stream. If False, only this object may have.

        Raises:
            StreamLostError: the log ends before ``resume_at``.
            LogUnavailableError: it does not answer.
        """

    def check_marks(self, marks: Sequence[MarkPlace]) -> None:
        """Check that each MARK is where it was acknowledged. Another writer may have overwritten a lost tail.

        Raises:
            StreamLostError: another frame is there, or none.
            CorruptionError: the MARK was deleted.
            LogUnavailableError: the log does not answer.
        """

    def ends(self, generation: int, partitions: Collection[int], known: Mapping[int, int] = {}) -> dict[int, int]:
        """Return the current ends of a generation's possible data, by data partition. 0 if it has no data yet.

        This is for readers of data that no marker has. A log of files may end inside a frame that is being written.

        Args:
            generation: The generation.
            partitions: Data partitions.
            known: Ends that some of them have had. An older end counts only if the newest leader reports it: one that
                is cut off from the other brokers still answers.

        Raises:
            LogUnavailableError: the log does not answer.
        """

    def watch(self) -> Watch:
        """Return an object that waits for new data of this log, for one reader. Accesses nothing until it is used."""

    def newest_rows(self, ends: Mapping[int, int] | None = None) -> Rows | None:
        """Return the rows of the newest generation that has any, judging by names. Returns None if there are no rows.

        Args:
            ends: Ends of the rows of known generations, by partition. If names do not tell, data after these ends is
                read.

        Raises:
            LogUnavailableError: the log does not answer.
        """

    def trim(self, range_: TrimRange, *, dry_run: bool = False) -> Freed:
        """Delete the data that ``range_`` gives up. A later trim deletes pieces that cannot be deleted separately yet.

        It may be called repeatedly and by several callers at once, while trainers write and readers read.

        Args:
            range_: Data that may be deleted. Data in neither of its lists is kept, unless its generation is dead.
            dry_run: Delete nothing. The result is the same, and so are the errors about permissions.

        Raises:
            LogUnavailableError: the log does not answer, or refuses the deletion.
        """

    def expect_append(self) -> None:
        """Prepare for a control record that will be appended soon, so that it need not wait later.

        Does not wait and never raises: the append reports errors.
        """

    def append_control(self, record: bytes, *, garbage: bool = False) -> int:
        """Append one record to the control partition and return its offset once it is durable.

        Args:
            record: The record.
            garbage: True if the partition may contain non-records, which readers with a commit key skip.

        Raises:
            CommitUnknownError: there was no answer; only a read shows whether the record exists.
        """

    def waits_for(self) -> str:
        """Describe who has to acknowledge a control record, as far as it is known within 2 s. Never raises."""

    def read_control(self, start: int = 0, *, garbage: bool = False) -> Iterator[tuple[int, bytes]]:
        """Yield (offset, record) of all records from offset ``start`` that are durable now. Ends at the last one.

        With ``garbage``, non-records are yielded as well, in pieces, and reading continues after them.

        Raises:
            CorruptionError: a record is damaged (a torn tail is not an error).
            PrunedError: the partition begins after ``start``.
        """

    def control_base(self) -> int:
        """Return the first offset of the control partition: 0, unless records that a snapshot replaces were deleted."""

    def control_next(self, offset: int, record: bytes) -> int:
        """Return the offset at which to continue after a record from :meth:`read_control`."""

    def prune_control(self, base: int) -> None:
        """Delete the records before offset ``base``, where a record begins. Offsets keep their meaning.

        Others may append and read meanwhile. The caller has checked that snapshots cover the deleted records.

        Raises:
            LogUnavailableError: the log does not answer, or refuses the deletion.
        """

    def examine(self) -> Iterator[Finding]:
        """Check the external conditions that the log's safety depends on. Leaves nothing in the log.

        If the log does not exist, checks whether a job could create it, and what it would be like.

        Raises:
            LogUnavailableError: the log does not answer.
        """

    def close(self) -> None: ...


def open_log(uri: str, options: Options = None, *, direct: bool = False) -> Log:
    """Open the log at ``uri``. Nothing is accessed until the log is used.

    Args:
        uri: ``file://DIR``, ``kafka://BROKERS/JOB`` or ``s3://BUCKET/PREFIX``.
        options: Kafka client settings (security included), or settings of the object store; or a file of ``key=value``
            lines.
        direct: Its writers use direct writes, if the file system can.
    """
    parsed = parse_uri(uri)
    if isinstance(parsed, BucketUri):
        from torchrec_stream_ckpt.log.bucket.log import BucketLog

        return BucketLog(parsed, options)
    if isinstance(parsed, FileUri):
        from torchrec_stream_ckpt.log.files import FileLog

        if options:
            raise ConfigError("client options are for Kafka logs, but this is a file log", hint="omit them")
        return FileLog(parsed.directory, direct=direct)
    from torchrec_stream_ckpt.log.kafka.log import KafkaLog

    return KafkaLog(parsed, load_options(options))


def options_for(uri: str, kafka_options: Options, store_options: Options) -> Options:
    """Return those of a job's options that belong to its log. A bucket takes the same as a store in it."""
    return store_options if isinstance(parse_uri(uri), BucketUri) else kafka_options


def load_options(options: Options) -> dict[str, str]:
    """Return Kafka client settings from a mapping, or from a properties file."""
    return {key: str(value) for key, value in read_options(options, "client").items()}
