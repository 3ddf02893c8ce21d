"""Wait for new records by a fetch that the broker answers once there is one (long poll), and hold them for a reader."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Collection, Generator
from dataclasses import dataclass, field
from typing import Any

import confluent_kafka as ck

from torchrec_stream_ckpt.log.kafka.brokers import Brokers
from torchrec_stream_ckpt.log.kafka.client import CLIENT_ERRORS, has_code, make_client, value_of
from torchrec_stream_ckpt.log.kafka.reasons import Reasons
from torchrec_stream_ckpt.log.kafka.settings import arrival_settings
from torchrec_stream_ckpt.util.signal_safe import SafeEvent
from torchrec_stream_ckpt.util.types import grouped

_SLICE_S = 0.2
"""Longest time until a wait notices :meth:`Arrivals.wake`. No broker is asked anything between."""
_RECORDS = 1000
_BATCH = 32
_SILENT_S = 1.0
"""Time without a record after which the reader's own client is asked for one that exists."""
_AFTER_ERROR_S = 0.5
"""Time from an error of the fetch until the reader looks, and finds whether the broker answers."""
HELD_BYTES = 64 * 2**20
"""Most bytes of records that nobody has read. If there are more, all are dropped, and the reader fetches them again."""

Place = tuple[str, int]
"""Topic and partition."""


@dataclass(slots=True)
class _Held:
    """Records of one partition that have arrived and were not read."""

    first: int
    """Offset from which on all records are held, or are still to arrive."""
    upto: int
    """Offset of the next record to arrive."""
    epoch: int
    """Leader epoch of the partition at the first wait. A later leader may lack records that are held."""
    records: deque[tuple[int, bytes]] = field(default_factory=deque)
    last: tuple[int, bytes] | None = None
    """The record that was read last: a reader of a stream begins with the frame at which it stopped."""

    def read(self) -> tuple[int, bytes]:
        """Return the next record; only one that was read before it is forgotten."""
        self.last = self.records.popleft()
        self.first = self.last[0]
        return self.last


class Arrivals:
    """Waits for records after the ends that the partitions had at the first wait, and holds them. A :class:`Watch`.

    Errors of the fetch end a wait after :data:`_AFTER_ERROR_S`, and the reader that it wakes reports them. The next
    wait begins again at the ends.

    Args:
        brokers: Brokers of the log.
    """

    by = "fetch"

    def __init__(self, brokers: Brokers) -> None:
        self._brokers = brokers
        self._woken = SafeEvent()
        self._consumer: Any = None
        self._held: dict[Place, _Held] = {}
        self._num_bytes = 0
        self._has_news = False
        """True if records have arrived while others were read."""
        self._is_sound = True
        """False after an error: records may be missing from here on."""
        self._thread = 0
        """The thread that waits, and may read."""

    # Waiting.

    def wait(self, timeout_s: float, partitions: Collection[int] = ()) -> bool:
        uri = self._brokers.uri
        places = frozenset({(uri.control_topic, 0), *((uri.data_topic, each) for each in partitions)})
        self._thread = threading.get_ident()
        if places != self._held.keys() or not self._is_sound or self._num_bytes > HELD_BYTES:
            return self._assign(places, timeout_s)
        deadline = time.monotonic() + timeout_s
        while not self._woken.is_set() and (left := deadline - time.monotonic()) > 0:
            if not self._is_sound:  # records may have arrived
                return not self._woken.wait(min(left, _AFTER_ERROR_S))
            if self._has_news or self._receive(1, min(left, _SLICE_S)):
                self._receive(_RECORDS, 0)  # records that have arrived with it wake nobody again
                self._has_news = False
                return True
        return False

    def _assign(self, places: frozenset[Place], timeout_s: float) -> bool:
        """Fetch from the current ends on. Returns True: records may have arrived before them."""
        self._drop()
        by_topic = grouped(places)
        there = self._brokers.describe()
        if not by_topic.keys() <= there.keys():  # nobody has created the topics
            self._woken.wait(min(timeout_s, 1.0))
            return False
        ends = {topic: self._brokers.edges(topic, each) for topic, each in by_topic.items()}
        # A new client, because one that waits for an answer asks nothing else.
        settings = arrival_settings(self._brokers.asked, self._brokers.options)
        self._consumer = make_client(ck.Consumer, settings, Reasons(self._brokers.options))
        self._consumer.assign([ck.TopicPartition(topic, each, ends[topic][each].high) for topic, each in places])
        for topic, each in places:
            _, end, epoch = ends[topic][each]
            self._held[topic, each] = _Held(end, end, epoch)
        return True

    def _receive(self, most: int, timeout_s: float) -> set[Place]:
        """Hold records that arrive, waiting until there are ``most``, or the time has passed. Returns their places."""
        found: set[Place] = set()
        try:
            batch = self._consumer.consume(most, timeout=timeout_s)
        except CLIENT_ERRORS:
            self._is_sound = False
            return found
        for message in batch:
            error, place = message.error(), (message.topic(), message.partition())
            held = self._held.get(place)
            if error is None and held is not None:
                value = value_of(message)
                held.records.append((message.offset(), value))
                held.upto = message.offset() + 1
                self._num_bytes += len(value)
                found.add(place)
            elif has_code(error, ck.KafkaError._PARTITION_EOF) and held is not None:
                held.upto = max(held.upto, message.offset())
            elif not has_code(error, ck.KafkaError.GROUP_AUTHORIZATION_FAILED):
                self._is_sound = False
        return found

    # Reading.

    @property
    def is_waited_for(self) -> bool:
        """True after a wait: the reader follows the log as it grows."""
        return self._consumer is not None

    def holds(self, topic: str, partition: int, begin: int, end: int) -> bool:
        """Return whether all records of a span have arrived. For the thread that waits; on others, there are none."""
        held = self._held_from(topic, partition, begin)
        return held is not None and held.upto >= end

    def take(self, topic: str, partition: int, begin: int, end: int) -> Generator[tuple[int, bytes], None, int]:
        """Yield (offset, record) in [begin, end), as far as this object has them or they arrive soon.

        Records before ``begin`` are forgotten. The partition must hold the span.

        Returns:
            The offset from which on the caller has to read the rest itself.
        """
        held = self._held_from(topic, partition, begin)
        if held is None:
            return begin
        if held.last is not None and begin <= held.last[0] < end:
            begin = held.last[0] + 1
            yield held.last
        heard = time.monotonic()
        while held.last is None or held.last[0] < begin:  # otherwise another read has gone further
            if held.records and held.records[0][0] < end:
                record = held.read()
                self._num_bytes -= len(record[1])
                if record[0] >= begin:
                    begin = record[0] + 1
                    yield record
                continue
            if held.records or held.upto >= end:  # offsets without a record may be missing
                self._has_news = self._has_news or bool(held.records)
                return end
            if not self._is_sound or self._held.get((topic, partition)) is not held:
                break
            upto, places = held.upto, self._receive(min(_BATCH, end - held.upto), _SLICE_S)
            self._has_news = self._has_news or bool(places - {(topic, partition)})
            if held.upto > upto:
                heard = time.monotonic()
            if time.monotonic() - heard > _SILENT_S or self._num_bytes > HELD_BYTES:
                self._is_sound = False
        return begin

    def _held_from(self, topic: str, partition: int, begin: int) -> _Held | None:
        """Return the records of a partition, if they begin at or before ``begin``."""
        if not self._is_sound or self._consumer is None or self._thread != threading.get_ident():
            return None
        held = self._held.get((topic, partition))
        if held is not None and self._brokers.epochs.get((topic, partition), held.epoch) != held.epoch:
            self._is_sound = False
            return None
        return held if held is not None and held.first <= begin else None

    def wake(self) -> None:
        self._woken.set()

    def close(self) -> None:
        self._woken.set()
        self._drop()

    def _drop(self) -> None:
        consumer, self._consumer = self._consumer, None
        self._held, self._num_bytes, self._has_news, self._is_sound = {}, 0, False, True
        if consumer is not None:
            consumer.close()
