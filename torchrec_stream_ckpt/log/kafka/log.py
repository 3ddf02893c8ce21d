"""Kafka log: topics ``JOB.data`` (one partition per rank) and ``JOB.control`` (one partition).

Offsets are Kafka's own. Exactness does not depend on Kafka's transactions, but on the contents of the frames.
This module ensures that no frame is dropped, reordered or skipped without an error. The other modules of the package
have one role each: `brokers` finds leaders and ends of partitions, `topics` creates topics, `producer` sends, `reader`
reads, `arrivals` waits for records, `presence` checks acknowledged data, `control_topic` keeps control records,
`client` makes clients, `settings` configures them, `codes` sorts their errors, `reasons` and `probe` explain why there
is no answer, `health` judges settings, and `clocks` compares clocks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress

import confluent_kafka as ck

from torchrec_stream_ckpt.errors import CorruptionError, LogUnavailableError
from torchrec_stream_ckpt.format.frame import HEADER_LEN, parse_header
from torchrec_stream_ckpt.log.api import Finding, Freed, Incarnation, Rows, TrimRange
from torchrec_stream_ckpt.log.kafka import topics
from torchrec_stream_ckpt.log.kafka.arrivals import Arrivals
from torchrec_stream_ckpt.log.kafka.brokers import Brokers
from torchrec_stream_ckpt.log.kafka.control_topic import ControlTopic
from torchrec_stream_ckpt.log.kafka.health import TRIM_RIGHT
from torchrec_stream_ckpt.log.kafka.presence import Presence
from torchrec_stream_ckpt.log.kafka.producer import KafkaSender, KafkaWriter
from torchrec_stream_ckpt.log.kafka.reader import Reader
from torchrec_stream_ckpt.log.kafka.settings import check_options, data_settings
from torchrec_stream_ckpt.util.types import LogSpan
from torchrec_stream_ckpt.util.uris import KafkaUri, LogUri


class KafkaLog(Presence):
    """A log on a Kafka cluster.

    Args:
        uri: Brokers and job.
        options: Client settings of the user, security included.

    Raises:
        ConfigError: an option would break a guarantee.
    """

    def __init__(self, uri: KafkaUri, options: Mapping[str, str]) -> None:
        check_options(dict(options))
        self.uri: LogUri = uri
        self._control_topic = uri.control_topic
        brokers = Brokers(uri, options)
        super().__init__(brokers, Reader(brokers))
        self._control = ControlTopic(self._brokers, self._reader)

    def takes_blocks(self) -> bool:
        return False

    def prepare(
        self, partitions: int, identity: str | None = None, *, claimed: Incarnation | None = None
    ) -> Incarnation:
        """Create missing topics and partitions, as :func:`topics.prepare`."""
        return topics.prepare(self._brokers, partitions)

    def preflight(self) -> None:
        """Check access, as :func:`topics.preflight`."""
        topics.preflight(self._brokers)

    def examine(self) -> Iterator[Finding]:
        """Check the topics, as :func:`topics.examine`."""
        return topics.examine(self._brokers)

    def incarnation(self) -> Incarnation | None:
        """Return the ids of both topics. Returns None unless both exist."""
        return topics.incarnation(self._brokers)

    def open_writer(self, generation: int, partition: int, resume_at: int, *, again: bool = False) -> KafkaWriter:
        """Return a writer of one partition. Generations share a partition, because readers use offsets.

        Raises:
            StreamLostError: the partition ends before ``resume_at``.
        """
        self._brokers.require(self._data_topic, partition, "write", LogUnavailableError)
        if resume_at:
            self._brokers.look_around(self._data_topic, [partition])  # the last writer failed
            self.check_ends([LogSpan(generation, partition, resume_at, resume_at)])
        settings = data_settings(self._brokers.asked, self._brokers.options)
        return KafkaWriter(KafkaSender(self._brokers, self._data_topic, partition, settings))

    def read(self, span: LogSpan) -> Iterator[tuple[int, memoryview]]:
        """Return the frames of ``span``. The brokers are queried at once; frames are fetched during iteration."""
        records = self._reader.read(self._data_topic, span.partition, span.begin, span.end)
        return ((offset, memoryview(value)) for offset, value in records)

    def ends(self, generation: int, partitions: Collection[int], known: Mapping[int, int] = {}) -> dict[int, int]:
        edges = self._brokers.edges(self._data_topic, partitions)
        if any(edges[partition].high < end for partition, end in known.items()):
            edges = self._brokers.newest_edges(self._data_topic, edges)
        return {partition: edge.high for partition, edge in edges.items()}

    def watch(self) -> Arrivals:
        arrivals = Arrivals(self._brokers)
        self._reader.keep(arrivals)
        return arrivals

    def newest_rows(self, ends: Mapping[int, int] | None = None) -> Rows | None:
        topic, data = self._data_topic, self._brokers.describe().get(self._data_topic)
        edges = self._brokers.edges(topic, {each.id for each in data.partitions}) if data is not None else {}
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

    def trim(self, range_: TrimRange, *, dry_run: bool = False) -> Freed:
        """Delete records. Kafka deletes only from the front of a partition, here up to the first offset still needed.

        Records of a dead generation are deleted as far as they are before that offset. A generation that has committed
        nothing is after everything that was committed when it was claimed, so never before the end of the deleted data.
        """
        topic = self._data_topic
        self._brokers.require(topic, 0, "trim", LogUnavailableError)
        topics.check_right(self._brokers, topic, TRIM_RIGHT)
        ends = dict(sorted((span.partition, span.end) for span in range_.gone))  # the highest end of each partition
        for span in range_.kept:
            if span.partition in ends:
                ends[span.partition] = min(span.begin, ends[span.partition])
        lows = {partition: edge.low for partition, edge in self._brokers.edges(topic, ends).items()}
        ends = {partition: end for partition, end in ends.items() if end > lows[partition]}
        if ends and not dry_run:
            places = [ck.TopicPartition(topic, partition, end) for partition, end in ends.items()]
            self._brokers.answers(f"delete records of {topic}", lambda admin: admin.delete_records(places))
        return Freed("records", sum(end - lows[partition] for partition, end in ends.items()), None)

    def expect_append(self) -> None:
        """Prepare for an append, as :meth:`ControlTopic.expect_append`."""
        self._control.expect_append()

    def append_control(self, record: bytes, *, garbage: bool = False) -> int:
        """Append a record, as :meth:`ControlTopic.append`."""
        return self._control.append(record)

    def waits_for(self) -> str:
        """Describe the pending broker, as :meth:`ControlTopic.waits_for`."""
        return self._control.waits_for()

    def read_control(self, start: int = 0, *, garbage: bool = False) -> Iterator[tuple[int, bytes]]:
        """Read records, as :meth:`ControlTopic.read`."""
        return self._control.read(start)

    def control_base(self) -> int:
        """Return the topic's first offset."""
        return self._control.base()

    def control_next(self, offset: int, record: bytes) -> int:
        return offset + 1

    def prune_control(self, base: int) -> None:
        """Move the topic's first offset."""
        self._control.prune(base)

    def close(self) -> None:
        self._control.close()
        self._reader.close()
        self._brokers.close()
