"""Wait for new records: a fetch that the broker answers once there is a record (long poll)."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any

import confluent_kafka as ck

from torchrec_stream_ckpt.log.kafka.brokers import Brokers
from torchrec_stream_ckpt.log.kafka.client import make_client
from torchrec_stream_ckpt.log.kafka.reasons import Reasons
from torchrec_stream_ckpt.log.kafka.settings import arrival_settings
from torchrec_stream_ckpt.util.signal_safe import SafeEvent

_SLICE_S = 0.2
"""Longest time until a wait notices :meth:`Arrivals.wake`. No broker is asked anything between."""
_RECORDS = 1000


class Arrivals:
    """Waits for records after the ends that the partitions had at the previous wait. A :class:`Watch`.

    Errors of the fetch are ignored, because the reader that it wakes reports them: a wait then ends with its time.

    Args:
        brokers: Brokers of the log.
    """

    by = "fetch"

    def __init__(self, brokers: Brokers) -> None:
        self._brokers = brokers
        self._woken = SafeEvent()
        self._consumer: Any = None
        self._places: frozenset[tuple[str, int]] = frozenset()

    def wait(self, timeout_s: float, partitions: Collection[int] = ()) -> bool:
        uri = self._brokers.uri
        places = frozenset({(uri.control_topic, 0), *((uri.data_topic, each) for each in partitions)})
        if places != self._places:
            return self._assign(places, timeout_s)
        deadline = time.monotonic() + timeout_s
        while not self._woken.is_set() and (left := deadline - time.monotonic()) > 0:
            batch = self._consumer.consume(1, timeout=min(left, _SLICE_S))
            if any(message.error() is None for message in batch):
                self._consumer.consume(_RECORDS, timeout=0)  # what has arrived with it wakes nobody again
                return True
        return False

    def _assign(self, places: frozenset[tuple[str, int]], timeout_s: float) -> bool:
        """Fetch from the current ends on. Returns True: records may have arrived before them."""
        by_topic: dict[str, list[int]] = {}
        for topic, partition in places:
            by_topic.setdefault(topic, []).append(partition)
        there = self._brokers.describe()
        if not by_topic.keys() <= there.keys():  # nobody has created the topics
            self._woken.wait(min(timeout_s, 1.0))
            return False
        ends = {topic: self._brokers.edges(topic, each) for topic, each in by_topic.items()}
        if self._consumer is None:
            reasons = Reasons(self._brokers.options)
            settings = arrival_settings(self._brokers.asked, self._brokers.options)
            self._consumer = make_client(ck.Consumer, settings, reasons)
        self._consumer.assign([ck.TopicPartition(topic, each, ends[topic][each].high) for topic, each in places])
        self._places = places
        return True

    def wake(self) -> None:
        self._woken.set()

    def close(self) -> None:
        self._woken.set()
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            consumer.close()
