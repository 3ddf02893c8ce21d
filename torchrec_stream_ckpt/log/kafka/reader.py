"""Read partitions: records in a span of offsets, or at one offset of each."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import confluent_kafka as ck

from torchrec_stream_ckpt.errors import CorruptionError, LogUnavailableError, PrunedError
from torchrec_stream_ckpt.log.kafka.brokers import ANSWER_TIMEOUT_S, Brokers
from torchrec_stream_ckpt.log.kafka.client import has_code, make_client, plain, surfacing
from torchrec_stream_ckpt.log.kafka.reasons import DESTROYED_HINT, Reasons
from torchrec_stream_ckpt.log.kafka.settings import consumer_settings

READ_IDLE_TIMEOUT_S = 30.0
_BATCH_FRAMES = 32


class Reader:
    """Reads the partitions of one log. Each call has a separate client. Can be used from any thread.

    Args:
        brokers: Brokers of the log.
    """

    def __init__(self, brokers: Brokers) -> None:
        self._brokers = brokers

    def read(self, topic: str, partition: int, begin: int, end: int | None) -> Iterator[tuple[int, bytes]]:
        """Return (offset, record) in [begin, end), or up to the current end. The brokers are queried at once.

        Raises:
            CorruptionError: the partition does not have all of them.
        """
        low, high, _ = self._brokers.edge(topic, partition, max(begin, end or 0))
        end = high if end is None else end
        if begin < low or max(begin, end) > high:
            raise not_there(topic, partition, (low, high), (begin, end))
        return self.records(topic, partition, begin, end)

    def records(self, topic: str, partition: int, begin: int, end: int) -> Iterator[tuple[int, bytes]]:
        """Yield all records in [begin, end). If a broker does not answer, another client asks the current leader."""
        several = "," in self._brokers.uri.brokers
        try:
            idle_s = ANSWER_TIMEOUT_S if several else READ_IDLE_TIMEOUT_S
            for offset, record in self._read_on(topic, partition, begin, end, idle_s):
                begin = offset + 1
                yield offset, record
        except LogUnavailableError:
            if not several:
                raise
        else:
            return
        self._brokers.look_around(topic, [partition])
        yield from self._read_on(topic, partition, begin, end, READ_IDLE_TIMEOUT_S)

    def _read_on(self, topic: str, partition: int, begin: int, end: int, idle_s: float) -> Iterator[tuple[int, bytes]]:
        """Yield records in [begin, end). Offsets may have gaps, so the position decides, not a count."""
        if begin >= end:
            return
        reasons = Reasons(self._brokers.options)
        consumer = make_client(ck.Consumer, consumer_settings(self._brokers.asked, self._brokers.options), reasons)
        try:
            consumer.assign([ck.TopicPartition(topic, partition, begin)])
            position, heard = begin, time.monotonic()
            while position < end:
                batch = self._consume(consumer, min(_BATCH_FRAMES, end - position), reasons, topic)
                if batch:
                    heard = time.monotonic()
                elif reasons.hopeless() or time.monotonic() - heard > idle_s:
                    raise reasons.unavailable(self._brokers.uri, f"read {topic}/{partition}", "no answer")
                for message in batch:
                    if message.error() is not None:
                        # The end of the partition in this broker.
                        position = max(position, message.offset())
                        continue
                    if message.offset() >= end:
                        return
                    position = message.offset() + 1
                    yield message.offset(), _value(message)
        finally:
            consumer.close()

    def records_at(self, offsets: Mapping[int, int]) -> dict[int, bytes | None]:
        """Return the record at one offset of each data partition. None if the partition ends before it or has a gap.

        If there are several brokers, one that is cut off may lack the record. Then the brokers that know the newest
        leader are asked.
        """
        several = "," in self._brokers.uri.brokers
        try:
            found = self._fetch_at(offsets)
            if not several or None not in found.values():
                return found
        except LogUnavailableError:
            if not several:
                raise
        self._brokers.look_around(self._brokers.uri.data_topic, offsets)
        return self._fetch_at(offsets)

    def _fetch_at(self, offsets: Mapping[int, int]) -> dict[int, bytes | None]:
        topic, reasons, found = self._brokers.uri.data_topic, Reasons(self._brokers.options), dict[int, bytes | None]()
        consumer = make_client(ck.Consumer, consumer_settings(self._brokers.asked, self._brokers.options), reasons)
        try:
            consumer.assign([ck.TopicPartition(topic, partition, offset) for partition, offset in offsets.items()])
            deadline = time.monotonic() + ANSWER_TIMEOUT_S
            while len(found) < len(offsets):
                if reasons.hopeless() or time.monotonic() > deadline:
                    raise reasons.unavailable(self._brokers.uri, f"read {topic}", "no answer")
                for message in self._consume(consumer, _BATCH_FRAMES, reasons, topic):
                    there = message.error() is None and message.offset() == offsets[message.partition()]
                    found.setdefault(message.partition(), _value(message) if there else None)
            return found
        finally:
            consumer.close()

    def _consume(self, consumer: Any, count: int, reasons: Reasons, topic: str) -> list[Any]:
        """Return records and ends of the partition. Raises all other results."""
        doing = f"read {topic}"
        with surfacing(reasons, self._brokers.uri, doing):
            batch = consumer.consume(count, timeout=0.2)
        # The client looks for the group that we had to name. We use no group, so no permission for it is needed.
        batch = [each for each in batch if not has_code(each.error(), ck.KafkaError.GROUP_AUTHORIZATION_FAILED)]
        for message in batch:
            error = message.error()
            if error is None or error.code() == ck.KafkaError._PARTITION_EOF:
                continue
            if error.code() in (ck.KafkaError._AUTO_OFFSET_RESET, ck.KafkaError.OFFSET_OUT_OF_RANGE):
                raise self.out_of_range(topic, message.partition(), message.offset())
            if error.code() in (ck.KafkaError.UNKNOWN_TOPIC_OR_PART, ck.KafkaError._UNKNOWN_PARTITION):
                raise CorruptionError(f"topic '{topic}' was deleted while it was read", hint=DESTROYED_HINT)
            raise reasons.unavailable(self._brokers.uri, doing, plain(error))
        return batch

    def out_of_range(self, topic: str, partition: int, offset: int) -> CorruptionError | LogUnavailableError:
        """Return the error for a broker without a record at ``offset``: it was deleted, or did not reach this
        broker."""
        edge = self._brokers.newest_edges(topic, self._brokers.edges(topic, [partition]))[partition]
        if edge.low <= offset <= edge.high:
            return LogUnavailableError(
                f"the broker that answered is behind the leader of {topic}[{partition}]: it has nothing at "
                f"offset {offset}, but the partition has [{edge.low}, {edge.high})",
                hint="check whether a broker is cut off from the others; then try again",
            )
        # Any appender of snapshots may delete the front of the control topic. Its readers then start again.
        kind = PrunedError if topic == self._brokers.uri.control_topic else CorruptionError
        return kind(f"topic '{topic}' lost offsets while it was read", hint=DESTROYED_HINT, offset=offset)


def not_there(topic: str, partition: int, there: tuple[int, int], asked: tuple[int, int]) -> CorruptionError:
    """Return the error for offsets that a partition does not have."""
    return CorruptionError(
        f"offsets [{asked[0]}, {asked[1]}) are required, but the log has [{there[0]}, {there[1]}): retention "
        "deleted them, or the topic was deleted and recreated",
        hint=DESTROYED_HINT,
        topic=topic,
        partition=partition,
    )


def _value(message: Any) -> bytes:
    """Return a record's bytes. Empty for a record without a value, which is not a frame."""
    value = message.value()
    return value if isinstance(value, bytes) else b""
