"""Compare this host's clock with those of brokers, without leaving a record.

No request of the protocol reads a broker's clock. But a broker compares the time of each record with it if a topic has
bounds, refuses a batch whole if one record is out of bounds, and names every such record. So a batch whose first record
is certainly refused leaves nothing, and its other records show where the bounds are.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import confluent_kafka as ck

from torchrec_stream_ckpt.log.kafka.brokers import ANSWER_TIMEOUT_S, Brokers
from torchrec_stream_ckpt.log.kafka.client import CLIENT_ERRORS, make_client
from torchrec_stream_ckpt.log.kafka.health import Ahead, TimeBounds
from torchrec_stream_ckpt.log.kafka.reasons import Reasons
from torchrec_stream_ckpt.log.kafka.settings import admin_settings

_STEPS_S = (1.0, 10.0, 60.0, 600.0, 3600.0, 86400.0, 3650 * 86400.0)
_FUTURE_MS, _PAST_MS = 2**62, 1
"""Times that every bound refuses."""
# All records must be in one batch, whatever the user has set.
_ONE_BATCH = {
    "acks": "1",
    "retries": "0",
    "linger.ms": "60000",
    "batch.size": "100000",
    "batch.num.messages": "1000",
    "queue.buffering.max.messages": "1000",
    "queue.buffering.max.kbytes": "1000",
    "message.timeout.ms": "120000",
    "allow.auto.create.topics": "false",
}


def compare_clocks(brokers: Brokers, description: Any, bounds: Sequence[TimeBounds]) -> list[Ahead]:
    """Return how far this host's clock is ahead of that of each broker that leads a data partition.

    Args:
        brokers: Brokers of the log.
        description: Description of the data topic. Readers skip foreign records there, if a broker ever kept one.
        bounds: Bounds of the topics, those of the data topic first. If it has none, nothing is compared.
    """
    if not bounds[0].finite:
        return []
    leaders = {each.leader.id: each.id for each in description.partitions if each.leader is not None}
    steps = sorted({0.0 - step for step in _STEPS_S} | {*_STEPS_S} | {step for each in bounds for step in each.edges})
    found = (_compare(brokers, leader, partition, bounds[0], steps) for leader, partition in leaders.items())
    return [each for each in found if each is not None]


def _compare(brokers: Brokers, leader: int, partition: int, bounds: TimeBounds, steps: Sequence[float]) -> Ahead | None:
    """Return the difference between two of ``steps``. Returns None if the broker does not tell."""
    now_ms = time.time() * 1000
    if bounds.ahead_s is not None:  # accepted: how far this clock is ahead is at most the step
        first_ms, times_ms = _FUTURE_MS, [now_ms + 1000 * (bounds.ahead_s - step) for step in steps]
    else:  # accepted: it is at least the step
        assert bounds.behind_s is not None
        first_ms, times_ms = _PAST_MS, [now_ms - 1000 * (bounds.behind_s + step) for step in steps]
    answers = _send(brokers, partition, [first_ms, *map(int, times_ms)])
    if not set(answers[1:]) <= {"_INVALID_DIFFERENT_RECORD", "INVALID_RECORD"}:
        return None  # no answer, no right to write, or a broker before Kafka 2.4, which does not name records
    accepted = [answer == "_INVALID_DIFFERENT_RECORD" for answer in answers[1:]]
    rising = bounds.ahead_s is not None
    turn = accepted.index(rising) if rising in accepted else 0
    # All of them may be refused for another reason, such as a missing key in a compacted topic.
    return Ahead(leader, steps[turn - 1], steps[turn]) if turn else None


def _send(brokers: Brokers, partition: int, times_ms: Sequence[int]) -> list[str]:
    """Send one empty record for each time, all in one batch. Returns the name of each record's error, "" for none."""
    answers = [""] * len(times_ms)

    def note(number: int, error: Any, _: object) -> None:
        answers[number] = error.name() if error is not None else ""

    settings = admin_settings(brokers.asked, brokers.options) | _ONE_BATCH
    producer = make_client(ck.Producer, settings, Reasons(brokers.options))
    try:
        # Records that are produced before the leader is known are handed to it one by one, in several batches.
        producer.list_topics(brokers.uri.data_topic, timeout=ANSWER_TIMEOUT_S)
        for number, time_ms in enumerate(times_ms):
            producer.produce(
                brokers.uri.data_topic, b"", partition=partition, timestamp=time_ms, on_delivery=partial(note, number)
            )
        producer.flush(ANSWER_TIMEOUT_S + 1)
        producer.purge()
    except (*CLIENT_ERRORS, BufferError):
        return [""] * len(times_ms)
    return answers
