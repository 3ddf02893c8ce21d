"""The few requests of Kafka's protocol that starting a broker needs, so that this package needs no client library.

All requests use versions without tagged fields: numbers are big-endian, and strings have a length of two bytes.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType

_METADATA, _SASL_HANDSHAKE, _CREATE_ACLS, _SASL_AUTHENTICATE = 3, 17, 30, 36
_TOPIC, _LITERAL, _ALLOW = 2, 3, 3
OPERATIONS = {"READ": 3, "WRITE": 4, "CREATE": 5, "ALTER": 7, "DESCRIBE": 8, "DESCRIBE_CONFIGS": 10}
"""Numbers of operations in ACLs."""
_MAX_ANSWER_BYTES = 2**20
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

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._socket.close()

    def log_in(self, user: str, password: str) -> None:
        """Log in by SASL, mechanism PLAIN."""
        self._check(self._ask(_SASL_HANDSHAKE, 1, _string("PLAIN")), "SASL handshake")
        token = f"\0{user}\0{password}".encode()
        self._check(self._ask(_SASL_AUTHENTICATE, 0, struct.pack(">i", len(token)) + token), "login")

    def brokers(self) -> int:
        """Return the number of brokers that are alive."""
        answer = self._ask(_METADATA, 1, struct.pack(">i", 0))
        return int(struct.unpack_from(">i", answer)[0]) if len(answer) >= 4 else 0

    def allow(self, rights: Iterable[Right]) -> None:
        """Create ACLs, for every topic and from every host."""
        entries = [
            struct.pack(">b", _TOPIC)
            + _string("*")
            + struct.pack(">b", _LITERAL)
            + _string(f"User:{right.user}")
            + _string("*")
            + struct.pack(">bb", OPERATIONS[right.operation], _ALLOW)
            for right in rights
        ]
        answer = self._ask(_CREATE_ACLS, 1, struct.pack(">i", len(entries)) + b"".join(entries))
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

    def _ask(self, api: int, version: int, body: bytes) -> bytes:
        request = struct.pack(">hhi", api, version, 1) + _string("stream-ckpt") + body
        self._socket.sendall(struct.pack(">i", len(request)) + request)
        (length,) = struct.unpack(">i", self._read(4))
        if not 4 <= length <= _MAX_ANSWER_BYTES:
            raise OSError(f"the broker sent an answer with the invalid length of {length} bytes")
        return self._read(length)[4:]

    def _read(self, length: int) -> bytes:
        data = b""
        while len(data) < length:
            piece = self._socket.recv(length - len(data))
            if not piece:
                raise OSError("the broker closed the connection")
            data += piece
        return data


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack(">h", len(data)) + data
