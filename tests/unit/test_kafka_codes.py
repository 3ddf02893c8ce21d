"""Every error code of Kafka's protocol and of its client is sorted once, and none is given one cause if it has more."""

from __future__ import annotations

from collections import Counter

import confluent_kafka as ck
import pytest

from torchrec_stream_ckpt.log.kafka.codes import SORTED, Refusal, refusal_of
from torchrec_stream_ckpt.log.kafka.reasons import Reasons
from torchrec_stream_ckpt.util.uris import KafkaUri

CODES = {
    name: code
    for name, code in vars(ck.KafkaError).items()
    if name.removeprefix("_").isupper() and isinstance(code, int)
}
URI = KafkaUri("h:1", "j")


def test_every_code_is_sorted_once() -> None:
    assert len(CODES) > 150
    assert {name for name, count in Counter(name for name, _ in SORTED).items() if count > 1} == set()
    assert {name for name, _ in SORTED} == CODES.keys()


def test_a_code_is_looked_up_by_the_name_that_the_client_gives_it() -> None:
    assert {ck.KafkaError(code).name() for code in CODES.values()} == CODES.keys()
    assert refusal_of("A_CODE_OF_A_LATER_CLIENT") is Refusal.UNKNOWN


MAY_HAVE_ARRIVED = """
    _MSG_TIMED_OUT _TIMED_OUT _TRANSPORT _ALL_BROKERS_DOWN _PURGE_INFLIGHT _FATAL _AUTHENTICATION UNKNOWN
    DUPLICATE_SEQUENCE_NUMBER OUT_OF_ORDER_SEQUENCE_NUMBER UNKNOWN_PRODUCER_ID INVALID_PRODUCER_EPOCH PRODUCER_FENCED
    REQUEST_TIMED_OUT NETWORK_EXCEPTION NOT_ENOUGH_REPLICAS NOT_ENOUGH_REPLICAS_AFTER_APPEND KAFKA_STORAGE_ERROR
    NOT_LEADER_FOR_PARTITION LEADER_NOT_AVAILABLE UNKNOWN_TOPIC_OR_PART COORDINATOR_LOAD_IN_PROGRESS
"""


def test_a_record_that_may_have_arrived_is_never_refused() -> None:
    refused = {name for name, sort in SORTED if sort is Refusal.REFUSED}
    assert refused & {*MAY_HAVE_ARRIVED.split()} == set()


@pytest.mark.parametrize(
    ("name", "causes"),
    [
        ("INVALID_RECORD", ["compacted", "clock", "another reason"]),
        ("_INVALID_DIFFERENT_RECORD", ["compacted", "clock", "another reason"]),
        ("INVALID_TIMESTAMP", ["message.timestamp.before.max.ms", "message.timestamp.after.max.ms"]),
        ("MSG_SIZE_TOO_LARGE", ["max.message.bytes of the topic", "message.max.bytes of this client"]),
        ("UNKNOWN_TOPIC_OR_PART", ["does not exist", "does not know it"]),
    ],
)
def test_a_code_with_several_causes_is_explained_by_all_of_them(name: str, causes: list[str]) -> None:
    error = Reasons({}).unavailable(URI, "write j.data/0", f"{ck.KafkaError(CODES[name]).str()} ({name})")
    assert all(cause in error.message for cause in causes)
    assert "{" not in error.hint


def test_the_command_that_finds_the_cause_is_ready_to_run() -> None:
    assert "stream-ckpt doctor kafka://h:1/j" in Reasons({}).unavailable(URI, "write", "(INVALID_RECORD)").hint
