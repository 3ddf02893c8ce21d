"""The Kafka log: topics ``JOB.data`` (one partition a rank) and ``JOB.control`` (one partition).

Offsets are Kafka's own. Exactness does not rest on Kafka's transactions, but on what is in the frames;
this module sees to it that no frame is dropped, reordered or skipped without an error. The modules beside it have one
role each: `brokers` asks who leads and where partitions end, `topics` makes them, `producer` sends, `reader` reads,
`client` makes clients, `settings` configures them, `reasons` and `probe` say why there is no answer, `health` judges.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress

import confluent_kafka as ck

from torchrec_stream_ckpt.errors import CorruptionError, LogUnavailableError, PrunedError, StreamLostError
from torchrec_stream_ckpt.format.frame import HEADER_LEN, parse_header
from torchrec_stream_ckpt.layout import KafkaUri
from torchrec_stream_ckpt.log.api import Finding, Freed, Incarnation, Rows, TrimRange
from torchrec_stream_ckpt.log.kafka import topics
from torchrec_stream_ckpt.log.kafka.brokers import Brokers, Edge
from torchrec_stream_ckpt.log.kafka.client import DESTROYED_HINT, LOST_HINT
from torchrec_stream_ckpt.log.kafka.health import TRIM_RIGHT
from torchrec_stream_ckpt.log.kafka.producer import KafkaWriter, Sender, append
from torchrec_stream_ckpt.log.kafka.reader import Reader, not_there
from torchrec_stream_ckpt.log.kafka.settings import check_options, control_settings, data_settings
from torchrec_stream_ckpt.types import LogSpan, MarkPlace


class KafkaLog:
    """A log on a Kafka cluster.

    Args:
        uri: Brokers and job.
        options: Client settings of the user, security included.

    Raises:
        ConfigError: an option would break a promise.
    """

    def __init__(self, uri: KafkaUri, options: Mapping[str, str]) -> None:
        check_options(dict(options))
        self._data_topic, self._control_topic = uri.data_topic, uri.control_topic
        self._brokers = Brokers(uri, options)
        self._reader = Reader(self._brokers)
        self._appending = threading.Lock()
        self._control: Sender | None = None
        self._doubtful = True
        """Whether nobody has looked who leads the control partition, or the last append failed."""

    def prepare(self, partitions: int, identity: str | None = None) -> Incarnation:
        """As :func:`topics.prepare`."""
        return topics.prepare(self._brokers, partitions)

    def preflight(self) -> None:
        """As :func:`topics.preflight`."""
        topics.preflight(self._brokers)

    def examine(self) -> Iterator[Finding]:
        """As :func:`topics.examine`."""
        return topics.examine(self._brokers)

    def incarnation(self) -> Incarnation | None:
        """The ids of both topics, None unless both exist."""
        return topics.incarnation(self._brokers)

    def open_writer(self, generation: int, partition: int, resume_at: int, *, again: bool = False) -> KafkaWriter:
        """A writer of one partition; a generation needs no place of its own here, readers go by offsets.

        Raises:
            StreamLostError: the partition ends before ``resume_at``.
        """
        self._brokers.require(self._data_topic, partition, "write", LogUnavailableError)
        if resume_at:
            self._brokers.look_around(self._data_topic, [partition])  # the last writer gave up
            self._check_ends([LogSpan(generation, partition, resume_at, resume_at)])
        settings = data_settings(self._brokers.asked, self._brokers.options)
        return KafkaWriter(Sender(self._brokers, self._data_topic, partition, settings))

    def read(self, span: LogSpan) -> Iterator[tuple[int, memoryview]]:
        """Frames of ``span``; the brokers are asked at once, frames are fetched as they are asked for."""
        records = self._reader.read(self._data_topic, span.partition, span.begin, span.end)
        return ((offset, memoryview(value)) for offset, value in records)

    def ends(self, generation: int, partitions: Collection[int]) -> dict[int, int]:
        return {partition: edge.high for partition, edge in self._edges(partitions).items()}

    def newest_rows(self, ends: Mapping[int, int] | None = None) -> Rows | None:
        topic, data = self._data_topic, self._brokers.describe().get(self._data_topic)
        edges = self._edges({each.id for each in data.partitions}) if data is not None else {}
        filled = {partition: edge for partition, edge in edges.items() if edge.high}
        newest = 1
        for partition, edge in filled.items() if ends is not None else ():
            for _, frame in self._reader.read(
                topic, partition, max(edge.low, (ends or {}).get(partition, 0)), edge.high
            ):
                with suppress(CorruptionError):  # a stray
                    newest = max(newest, parse_header(frame[:HEADER_LEN]).generation)
        place = f"{topic}[{min(filled)}]" if filled else ""
        return Rows(newest, f"topic '{topic}' holds", f"topic '{self._control_topic}'", place) if filled else None

    def place(self, span: LogSpan) -> tuple[str, int]:
        return f"{self._data_topic}[{span.partition}]", span.begin

    def check_there(self, spans: Sequence[LogSpan]) -> None:
        """One look at both ends of all partitions: a retention eats from the front, a failure takes the tail.

        Raises:
            StreamLostError: a partition ends, or has ended, before what was acknowledged.
        """
        lows = self._check_ends(spans)
        for span in spans:
            if span.begin < lows[span.partition]:
                raise CorruptionError(
                    f"the log begins at offset {lows[span.partition]}, and rows from {span.begin} on are needed: "
                    "a retention ate them, or somebody deleted them",
                    hint=DESTROYED_HINT,
                    **self._where(span),
                )
        self._check_order(spans)

    def check_marks(self, marks: Sequence[MarkPlace]) -> None:
        """One fetch from all partitions; another one for each further MARK in a partition.

        A partition loses its end and nothing else. So a MARK that is there shows that all of before it is.

        Raises:
            StreamLostError: another frame is there, or none.
        """
        waiting = sorted(marks, key=lambda mark: -mark.end)
        while waiting:
            now = {mark.partition: mark for mark in reversed(waiting)}
            waiting = [mark for mark in waiting if now[mark.partition] is not mark]
            frames = self._reader.records_at({partition: mark.end - 1 for partition, mark in now.items()})
            for partition, mark in now.items():
                if not _has_checksum(frames[partition], mark.chain):
                    raise StreamLostError(
                        f"offset {mark.end - 1} does not hold the frame that was acknowledged there: "
                        "the tail was lost, and somebody else has written after that",
                        hint=LOST_HINT,
                        topic=self._data_topic,
                        partition=partition,
                        generation=mark.generation,
                    )

    def _check_ends(self, spans: Sequence[LogSpan]) -> dict[int, int]:
        """See whether each partition still ends where its spans do, or later; returns the partitions' first offsets."""
        edges = self._edges({span.partition for span in spans})
        short = self._short(spans, edges)
        if short is not None:
            edges = self._brokers.newest_edges(self._data_topic, edges)
            short = self._short(spans, edges)
        if short is not None:
            raise StreamLostError(
                f"the log ends at offset {edges[short.partition].high}, and had acknowledged all up to {short.end}: "
                "its tail was lost",
                hint=LOST_HINT,
                **self._where(short),
            )
        return {partition: edge.low for partition, edge in edges.items()}

    @staticmethod
    def _short(spans: Sequence[LogSpan], edges: Mapping[int, Edge]) -> LogSpan | None:
        """A span that ends after its partition."""
        return next((span for span in spans if edges[span.partition].high < span.end), None)

    def _check_control_leader(self) -> None:
        """A reader that begins at a broker which is cut off would take an older marker for the newest."""
        if self._doubtful:
            self._brokers.look_around(self._control_topic, [0])
            self._doubtful = False

    def _check_order(self, spans: Sequence[LogSpan]) -> None:
        """Offsets go through all generations: one that begins before an older one ends was written over a lost tail."""
        ends: dict[int, LogSpan] = {}
        for span in sorted(spans, key=lambda span: span.generation):
            older = ends.get(span.partition)
            if older is not None and older.generation < span.generation and span.begin < older.end:
                raise StreamLostError(
                    f"generation {older.generation} ends at offset {older.end}, and generation {span.generation} "
                    f"begins at {span.begin}: the tail between them was lost",
                    hint=LOST_HINT,
                    **self._where(older),
                )
            if older is None or span.end > older.end:
                ends[span.partition] = span

    def _where(self, span: LogSpan) -> dict[str, object]:
        return {"topic": self._data_topic, "partition": span.partition, "generation": span.generation}

    def trim(self, range_: TrimRange, *, dry_run: bool = False) -> Freed:
        """Kafka deletes from the front of a partition alone: up to the first offset there that anybody needs.

        What a dead generation sent goes as far as it lies in front of that. A generation that has committed nothing
        lies behind all that was committed when it was claimed, so never in front of the end of what is gone.
        """
        topic = self._data_topic
        self._brokers.require(topic, 0, "trim", LogUnavailableError)
        topics.check_right(self._brokers, topic, TRIM_RIGHT)
        ends: dict[int, int] = {}
        for span in range_.gone:
            ends[span.partition] = max(span.end, ends.get(span.partition, 0))
        for span in range_.kept:
            if span.partition in ends:
                ends[span.partition] = min(span.begin, ends[span.partition])
        lows = {partition: edge.low for partition, edge in self._edges(ends).items()}
        ends = {partition: end for partition, end in ends.items() if end > lows[partition]}
        if ends and not dry_run:
            places = [ck.TopicPartition(topic, partition, end) for partition, end in ends.items()]
            self._brokers.answers(f"delete records of {topic}", lambda admin: admin.delete_records(places))
        return Freed("records", sum(end - lows[partition] for partition, end in ends.items()), None)

    def _edges(self, partitions: Collection[int]) -> dict[int, Edge]:
        """Both ends, by partition of the data topic."""
        return self._brokers.edges(self._data_topic, partitions)

    def append_control(self, record: bytes, *, garbage: bool = False) -> int:
        """Append one record; see :meth:`Log.append_control`.

        Raises:
            LogUnavailableError: it is certainly not in the log.
            CommitUnknownError: nobody knows.
        """
        with self._appending:
            if self._control is None:
                # Also tells a dead broker from a lost answer: here nothing has been sent yet.
                self._brokers.require(self._control_topic, 0, "write", LogUnavailableError)
                self._check_control_leader()
                settings = control_settings(self._brokers.asked, self._brokers.options)
                self._control = Sender(self._brokers, self._control_topic, 0, settings)
            try:
                return append(self._control, record)
            except BaseException:
                # A producer with a failure behind it may be fatally ill: the next append takes another.
                self._drop_control()
                self._doubtful = True
                raise

    def read_control(self, start: int = 0, *, garbage: bool = False) -> Iterator[tuple[int, bytes]]:
        """Records from ``start`` to what is the end now; none while there is no topic yet."""
        if not start and self._control_topic not in self._brokers.describe():
            return iter(())
        self._check_control_leader()
        low, high, _ = self._brokers.edge(self._control_topic, 0, start)
        if start < low:
            raise PrunedError(f"the control topic begins at offset {low}, not at {start}", topic=self._control_topic)
        if start > high:
            raise not_there(self._control_topic, 0, (low, high), (start, high))
        return self._reader.records(self._control_topic, 0, start, high)

    def control_base(self) -> int:
        """The topic's first offset."""
        if self._control_topic not in self._brokers.describe():
            return 0
        return self._brokers.edge(self._control_topic, 0).low

    def control_next(self, offset: int, record: bytes) -> int:
        return offset + 1

    def prune_control(self, base: int) -> None:
        """Move the topic's first offset."""
        topic = self._control_topic
        self._brokers.require(topic, 0, "trim", LogUnavailableError)
        topics.check_right(self._brokers, topic, TRIM_RIGHT)
        if base > self._brokers.edge(topic, 0).low:
            place = ck.TopicPartition(topic, 0, base)
            self._brokers.answers(f"delete records of {topic}", lambda admin: admin.delete_records([place]))

    def close(self) -> None:
        with self._appending:
            self._drop_control()
        self._brokers.close()

    def _drop_control(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None


def _has_checksum(record: bytes | None, header_crc: int) -> bool:
    try:
        return record is not None and parse_header(record).header_crc == header_crc
    except CorruptionError:
        return False
