"""Every error code of Kafka's protocol and of its client is sorted once, and none is given one cause if it has more."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import confluent_kafka as ck
import pytest

from torchrec_stream_ckpt.log.kafka.codes import Refusal, refusal_of
from torchrec_stream_ckpt.log.kafka.probe import find_cause, knock, leader_in
from torchrec_stream_ckpt.log.kafka.reasons import Reasons
from torchrec_stream_ckpt.util.uris import KafkaUri

CODES = {
    name: code
    for name, code in vars(ck.KafkaError).items()
    if name.removeprefix("_").isupper() and isinstance(code, int)
}
URI = KafkaUri("h:1", "j")


# Failures of the connection or of the client, errors of a producer's state, of groups, transactions and other
# requests that are never made here, and two that are not errors.
UNKNOWN = """
    _ALL_BROKERS_DOWN _APPLICATION _ASSIGNMENT_LOST _ASSIGN_PARTITIONS _AUTHENTICATION _AUTO_OFFSET_RESET
    _BAD_COMPRESSION _BAD_MSG _CONFLICT _CRIT_SYS_RESOURCE _DESTROY _DESTROY_BROKER _EXISTING_SUBSCRIPTION _FAIL _FATAL
    _FENCED _FS _GAPLESS_GUARANTEE _INCONSISTENT _INTR _KEY_DESERIALIZATION _LOG_TRUNCATION _MAX_POLL_EXCEEDED
    _MSG_TIMED_OUT _NODE_UPDATE _NOOP _NO_OFFSET _OUTDATED _PARTIAL _PARTITION_EOF _PURGE_INFLIGHT _PURGE_QUEUE
    _RESOLVE _REVOKE_PARTITIONS _SSL _STATE _TIMED_OUT _TIMED_OUT_QUEUE _TRANSPORT _UNDERFLOW _UNKNOWN_BROKER
    _UNKNOWN_GROUP _VALUE_DESERIALIZATION

    NO_ERROR UNKNOWN

    DUPLICATE_SEQUENCE_NUMBER INVALID_PRODUCER_EPOCH INVALID_PRODUCER_ID_MAPPING OUT_OF_ORDER_SEQUENCE_NUMBER
    PRODUCER_FENCED UNKNOWN_PRODUCER_ID

    DUPLICATE_VOTER ELECTION_NOT_NEEDED FEATURE_UPDATE_FAILED FENCED_INSTANCE_ID FENCED_MEMBER_EPOCH FENCED_STATE_EPOCH
    GROUP_ID_NOT_FOUND GROUP_MAX_SIZE_REACHED GROUP_SUBSCRIBED_TO_TOPIC ILLEGAL_GENERATION INCONSISTENT_GROUP_PROTOCOL
    INCONSISTENT_VOTER_SET INVALID_COMMIT_OFFSET_SIZE INVALID_RECORD_STATE INVALID_REGISTRATION
    INVALID_REGULAR_EXPRESSION INVALID_SESSION_TIMEOUT INVALID_SHARE_SESSION_EPOCH INVALID_TRANSACTION_TIMEOUT
    INVALID_TXN_STATE INVALID_UPDATE_VERSION INVALID_VOTER_KEY MEMBER_ID_REQUIRED NON_EMPTY_GROUP
    NO_REASSIGNMENT_IN_PROGRESS OFFSET_METADATA_TOO_LARGE PRINCIPAL_DESERIALIZATION_FAILURE REBALANCE_IN_PROGRESS
    SHARE_SESSION_LIMIT_REACHED SHARE_SESSION_NOT_FOUND STALE_MEMBER_EPOCH STREAMS_INVALID_TOPOLOGY
    STREAMS_INVALID_TOPOLOGY_EPOCH STREAMS_TOPOLOGY_FENCED TELEMETRY_TOO_LARGE TRANSACTION_ABORTABLE
    TRANSACTION_COORDINATOR_FENCED UNKNOWN_MEMBER_ID UNKNOWN_SUBSCRIPTION_ID UNRELEASED_INSTANCE_ID
    UNSTABLE_OFFSET_COMMIT UNSUPPORTED_ASSIGNOR VOTER_NOT_FOUND
"""


def test_every_code_was_looked_at() -> None:
    """A code that a later client adds must be sorted here or in ``codes.py``."""
    assert len(CODES) > 150
    assert {name for name in CODES if refusal_of(name) is Refusal.UNKNOWN} == {*UNKNOWN.split()}


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
    refused = {name for name in CODES if refusal_of(name) is Refusal.REFUSED}
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


# What a port gives away, and what silence does not: a cause is named only where the listener has shown it.


TLS = {"security.protocol": "SASL_SSL", "sasl.mechanism": "SCRAM-SHA-512"}
HANG_S = 120.0
LOGIN = TLS | {"security.protocol": "SASL_PLAINTEXT"}


@contextmanager
def listener(serve: Callable[[socket.socket], object]) -> Iterator[KafkaUri]:
    """A port of this machine whose connections are treated by ``serve``."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    serve(connection)

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield KafkaUri(f"127.0.0.1:{server.getsockname()[1]}", "job")
        server.shutdown(socket.SHUT_RDWR)
        thread.join(5)


def answering(code: int, *mechanisms: str) -> Callable[[socket.socket], None]:
    """A listener without TLS that answers a SASL handshake, and hangs up on anything else."""

    def serve(connection: socket.socket) -> None:
        request = connection.recv(4096)
        if len(request) < 14 or struct.unpack_from(">h", request, 4)[0] != 17:
            return
        names = b"".join(struct.pack(">h", len(name)) + name.encode() for name in mechanisms)
        answer = struct.pack(">ihi", 1, code, len(mechanisms)) + names
        connection.sendall(struct.pack(">i", len(answer)) + answer)

    return serve


@pytest.mark.parametrize("options", [{}, TLS, LOGIN], ids=["plaintext", "TLS", "login"])
def test_silence_is_no_cause(options: dict[str, str]) -> None:
    over = threading.Event()
    with listener(lambda connection: over.wait(HANG_S)) as uri:
        assert find_cause(uri, options) is None
        over.set()


@pytest.mark.parametrize("options", [{}, TLS, LOGIN], ids=["plaintext", "TLS", "login"])
@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\xff" * 64, b"\0\0\0\4\0\0\0\1"])
def test_a_port_that_is_no_broker_is_no_cause(options: dict[str, str], said: bytes) -> None:
    with listener(lambda connection: connection.sendall(said)) as uri:
        assert find_cause(uri, options) is None


def test_nobody_at_the_port_is_no_cause() -> None:
    assert find_cause(KafkaUri("127.0.0.1:1", "job"), TLS) is None


@pytest.mark.parametrize(
    ("serve", "options", "what"),
    [
        (answering(33, "PLAIN"), TLS, "does not support TLS, but this client uses it"),
        (answering(34), TLS, "does not support TLS, but this client uses it"),
        (answering(34), LOGIN, "does not accept a login"),
        (answering(33, "PLAIN", "GSSAPI"), {}, "requires a login by GSSAPI, PLAIN"),
        (answering(33, "PLAIN", "GSSAPI"), LOGIN, "does not support SASL mechanism SCRAM-SHA-512, only GSSAPI, PLAIN"),
    ],
)
def test_what_a_listener_shows_is_named(
    serve: Callable[[socket.socket], None], options: dict[str, str], what: str
) -> None:
    with listener(serve) as uri:
        cause = find_cause(uri, options)
    assert cause is not None
    assert what in cause.what


def test_a_listener_that_fits_is_no_cause() -> None:
    with listener(answering(33, "SCRAM-SHA-512", "PLAIN")) as uri:
        assert find_cause(uri, LOGIN) is None
    with listener(answering(34)) as uri:
        assert find_cause(uri, {}) is None


def statistics(leader: int, address: str) -> str:
    """The part of librdkafka's statistics that is looked at."""
    brokers = {f"{address}/2": {"nodeid": 2, "nodename": address}, "first": {"nodeid": -1, "nodename": "elsewhere:1"}}
    return json.dumps({"brokers": brokers, "topics": {"job.data": {"partitions": {"3": {"leader": leader}}}}})


def test_the_leader_of_a_partition_is_named_and_knocked_at() -> None:
    with listener(lambda connection: None) as uri:
        leader = leader_in(statistics(2, uri.brokers), "job.data", 3)
        assert str(leader) == f"broker 2 at {uri.brokers}"
        assert leader is not None
        assert knock(leader.place) == (True, "its port accepts connections")
    assert knock(leader.place) == (False, "it cannot be reached from here: Connection refused")


@pytest.mark.parametrize("said", ["", statistics(-1, "h:1"), statistics(7, "h:1"), "{}"])
def test_a_client_that_knows_no_leader_names_none(said: str) -> None:
    assert leader_in(said, "job.data", 3) is None
