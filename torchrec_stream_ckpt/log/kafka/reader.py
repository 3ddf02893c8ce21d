"""Read partitions: records in a span of offsets, or at one offset of each."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import confluent_kafka as ck

from torchrec_stream_ckpt.errors import CorruptionError, LogUnavailableError, PrunedError
from torchrec_stream_ckpt.log.kafka.arrivals import Arrivals
from torchrec_stream_ckpt.log.kafka.brokers import ANSWER_TIMEOUT_S, Brokers
from torchrec_stream_ckpt.log.kafka.client import has_code, make_client, plain, surfacing, value_of
from torchrec_stream_ckpt.log.kafka.reasons import DESTROYED_HINT, Reasons
from torchrec_stream_ckpt.log.kafka.settings import FETCH_WAIT_S, consumer_settings
from torchrec_stream_ckpt.util.uris import KafkaUri

READ_IDLE_TIMEOUT_S = 30.0
_BATCH_FRAMES = 32
_KEPT_IDLE_S = 2.0
"""Time without an answer after which a new client reads on instead of the one that was kept."""


@dataclass(slots=True)
class _Client:
    """A client that reads one partition, and its position."""

    consumer: Any
    reasons: Reasons
    asked: KafkaUri
    """Brokers that it asks first."""
    topic: str
    partition: int = -1
    position: int = 0
    """Offset of the next record."""
    arrived: deque[Any] = field(default_factory=deque)
    """Messages that are not handed out yet."""
    last: tuple[int, bytes] | None = None
    """The record before :attr:`position`: a reader of a stream begins with the frame at which it stopped."""
    rests_s: float | None = None
    """Time since which it fetches nothing. None if it fetches."""

    def go(self, partition: int, begin: int) -> _Client:
        """Fetch from an offset on."""
        self.consumer.assign([ck.TopicPartition(self.topic, partition, begin)])
        self.partition, self.position, self.last, self.rests_s = partition, begin, None, None
        return self

    def rest(self) -> None:
        """Fetch nothing more."""
        self.consumer.unassign()
        self.arrived.clear()
        self.rests_s = time.monotonic()

    def goes_on(self, partition: int, begin: int) -> bool:
        """Continue at an offset, if that needs no longer than a new client does. Returns False if not."""
        if self.rests_s is not None:
            if time.monotonic() - self.rests_s < FETCH_WAIT_S:  # it may wait for the answer of an older fetch
                return False
            self.go(partition, begin)
        here = begin == self.position or (self.last is not None and begin == self.last[0])
        return self.partition == partition and here


class Reader:
    """Reads the partitions of one log. Can be used from any thread.

    Each call has a separate client, unless :meth:`keep` was called: then two of them stay, one for each topic. While
    the log is watched, a client fetches further records until a read continues where the last one has stopped.

    Args:
        brokers: Brokers of the log.
    """

    def __init__(self, brokers: Brokers) -> None:
        self._brokers = brokers
        self._arrivals: Arrivals | None = None
        self._kept: dict[str, _Client] = {}
        """Clients that nobody uses now, by topic."""
        self._lock = threading.Lock()
        self._is_closed = False

    def keep(self, arrivals: Arrivals) -> None:
        """Keep clients between reads, for a reader that follows the log.

        Args:
            arrivals: Watch of this log, which holds records that nobody has read.
        """
        self._arrivals = arrivals

    def close(self) -> None:
        """Close the clients that are kept."""
        with self._lock:
            self._is_closed = True
        for topic in (self._brokers.uri.data_topic, self._brokers.uri.control_topic):
            self._close_kept(topic)

    def _close_kept(self, topic: str) -> None:
        with self._lock:
            kept = self._kept.pop(topic, None)
        if kept is not None:
            kept.consumer.close()

    def read(self, topic: str, partition: int, begin: int, end: int | None) -> Iterator[tuple[int, bytes]]:
        """Return (offset, record) in [begin, end), or up to the current end. The brokers are queried at once.

        Raises:
            CorruptionError: the partition does not have all of them.
        """
        if end is not None and self._arrivals is not None and self._arrivals.holds(topic, partition, begin, end):
            return self.records(topic, partition, begin, end)
        low, high, _ = self._brokers.edge(topic, partition, max(begin, end or 0))
        end = high if end is None else end
        if begin < low or max(begin, end) > high:
            raise not_there(topic, partition, (low, high), (begin, end))
        return self.records(topic, partition, begin, end)

    def records(self, topic: str, partition: int, begin: int, end: int) -> Iterator[tuple[int, bytes]]:
        """Yield all records in [begin, end). If a broker does not answer, another client asks the current leader."""
        if self._arrivals is not None:
            taken = begin
            begin = yield from self._arrivals.take(topic, partition, begin, end)
            if begin > taken:
                self._close_kept(topic)  # the records arrive once, by the client that waits for them
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
        kept = self._take_kept(topic, partition, begin) if begin < end else None
        if kept is not None:
            try:
                for offset, record in self._read_by(kept, begin, end, _KEPT_IDLE_S):
                    begin = offset + 1
                    yield offset, record
                return
            except (LogUnavailableError, CorruptionError):
                pass  # the error may be old: another client reads the rest
        if begin < end:
            yield from self._read_by(self._new(topic, partition, begin), begin, end, idle_s)

    def _read_by(self, client: _Client, begin: int, end: int, idle_s: float) -> Iterator[tuple[int, bytes]]:
        """Yield records by a client, which is then kept, or closed."""
        try:
            if client.last is not None and begin == client.last[0]:
                yield client.last
            yield from self._records(client, end, idle_s)
        except GeneratorExit:  # the caller wants no more now
            self._put_back(client, rests=False)
            raise
        except BaseException:
            client.consumer.close()
            raise
        self._put_back(client, rests=self._arrivals is None or not self._arrivals.is_waited_for)

    def _records(self, client: _Client, end: int, idle_s: float) -> Iterator[tuple[int, bytes]]:
        """Yield the records of a client before offset ``end``."""
        topic, partition, reasons, heard = client.topic, client.partition, client.reasons, time.monotonic()
        while client.position < end:
            if not client.arrived:
                most = min(_BATCH_FRAMES, end - client.position)
                client.arrived.extend(self._consume(client.consumer, most, reasons, topic))
                if client.arrived:
                    heard = time.monotonic()
                elif reasons.hopeless() or time.monotonic() - heard > idle_s:
                    raise reasons.unavailable(self._brokers.uri, f"read {topic}/{partition}", "no answer")
                continue
            message = client.arrived.popleft()
            if message.error() is not None:
                # The end of the partition in this broker.
                client.position = max(client.position, message.offset())
                continue
            if message.offset() >= end:
                client.arrived.appendleft(message)
                return
            client.position, client.last = message.offset() + 1, (message.offset(), value_of(message))
            yield client.last

    def _new(self, topic: str, partition: int, begin: int) -> _Client:
        asked, reasons = self._brokers.asked, Reasons(self._brokers.options)
        consumer = make_client(ck.Consumer, consumer_settings(asked, self._brokers.options), reasons)
        return _Client(consumer, reasons, asked, topic).go(partition, begin)

    def _take_kept(self, topic: str, partition: int, begin: int) -> _Client | None:
        """Return the client that is kept if it can continue at this offset. Otherwise it is closed."""
        with self._lock:
            kept = self._kept.pop(topic, None)
        if kept is None:
            return None
        if kept.asked == self._brokers.asked and kept.goes_on(partition, begin):
            kept.reasons.clear()
            return kept
        kept.consumer.close()
        return None

    def _put_back(self, client: _Client, *, rests: bool) -> None:
        """Keep a client for the next read, or close it."""
        keeps = self._arrivals is not None
        if keeps and rests:
            client.rest()
        with self._lock:
            if keeps and not self._is_closed and client.topic not in self._kept:
                self._kept[client.topic] = client
                return
        client.consumer.close()

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
                # Not more than one for each partition: it waits until there are as many as it asks for.
                for message in self._consume(consumer, len(offsets) - len(found), reasons, topic):
                    there = message.error() is None and message.offset() == offsets[message.partition()]
                    found.setdefault(message.partition(), value_of(message) if there else None)
            return found
        finally:
            consumer.close()

    def _consume(self, consumer: Any, count: int, reasons: Reasons, topic: str) -> list[Any]:
        """Return records and ends of the partition, once there are ``count`` or 0.2 s have passed. Raises all other
        results."""
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
