"""The few requests of Kafka's protocol that starting a broker needs, so that this package needs no client library."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterable
from dataclasses import dataclass

from torchrec_stream_ckpt.util.ports import ask_broker, kafka_string

_METADATA, _SASL_HANDSHAKE, _CREATE_ACLS, _SASL_AUTHENTICATE = 3, 17, 30, 36
_TOPIC, _LITERAL, _ALLOW = 2, 3, 3
OPERATIONS = {"READ": 3, "WRITE": 4, "CREATE": 5, "ALTER": 7, "DESCRIBE": 8, "DESCRIBE_CONFIGS": 10}
"""Numbers of operations in ACLs."""
_ANSWER_S = 5.0


@dataclass(frozen=True, slots=True)
class Right:
    """Permission of a user for one operation on every topic."""

    user: str
    operation: str


class Connection:
    """A connection to a listener without TLS. Every failure is an ``OSError``."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._socket = socket.create_connection(address, timeout=1)
        self._socket.settimeout(_ANSWER_S)

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def log_in(self, user: str, password: str) -> None:
        """Log in by SASL, mechanism PLAIN."""
        self._check(ask_broker(self._socket, _SASL_HANDSHAKE, 1, kafka_string("PLAIN")), "SASL handshake")
        token = f"\0{user}\0{password}".encode()
        self._check(ask_broker(self._socket, _SASL_AUTHENTICATE, 0, struct.pack(">i", len(token)) + token), "login")

    def brokers(self) -> int:
        """Return the number of brokers that are alive."""
        answer = ask_broker(self._socket, _METADATA, 1, struct.pack(">i", 0))
        return int(struct.unpack_from(">i", answer)[0]) if len(answer) >= 4 else 0

    def allow(self, rights: Iterable[Right]) -> None:
        """Create ACLs, for every topic and from every host."""
        entries = [
            struct.pack(">b", _TOPIC)
            + kafka_string("*")
            + struct.pack(">b", _LITERAL)
            + kafka_string(f"User:{right.user}")
            + kafka_string("*")
            + struct.pack(">bb", OPERATIONS[right.operation], _ALLOW)
            for right in rights
        ]
        answer = ask_broker(self._socket, _CREATE_ACLS, 1, struct.pack(">i", len(entries)) + b"".join(entries))
        at = 8  # throttle time, number of results; each result: error code, message
        for _ in entries:
            self._check(answer[at : at + 4], "ACL")
            (length,) = struct.unpack_from(">h", answer, at + 2)
            at += 4 + max(0, length)

    @staticmethod
    def _check(answer: bytes, what: str) -> None:
        """Raise OSError unless an answer begins with error code 0."""
        code = struct.unpack_from(">h", answer)[0] if len(answer) >= 4 else -1
        if code:
            raise OSError(f"{what} was refused: error code {code}")
