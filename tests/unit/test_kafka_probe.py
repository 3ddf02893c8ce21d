"""What a port gives away, and what silence does not: a cause is named only where the listener has shown it."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from torchrec_stream_ckpt.log.kafka.probe import find_cause, knock, leader_in
from torchrec_stream_ckpt.util.uris import KafkaUri

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
