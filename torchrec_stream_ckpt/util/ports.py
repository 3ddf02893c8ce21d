"""Ports on this host that outgoing connections do not take, and a request to a port where a Kafka broker listens.

Requests use versions without tagged fields: numbers are big-endian, and strings have a length of two bytes. No client
library is needed.
"""

from __future__ import annotations

import secrets
import socket
import struct
from contextlib import suppress
from pathlib import Path

_FIRST_PORT = 10_000
_MAX_ANSWER_BYTES = 2**20
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """Return a port for ``MASTER_PORT`` that is free on this host, for a script that starts its ranks by itself.

    The system gives the ports of a range of its own to outgoing connections, at any time: one that it has just named as
    free may be taken before rank 0 listens on it. So the port is below that range.
    """
    end = int(_EPHEMERAL.read_text().split()[0]) if _EPHEMERAL.exists() else 32_768
    for _ in range(1000 if end > _FIRST_PORT else 0):
        port = _FIRST_PORT + secrets.randbelow(end - _FIRST_PORT)
        with socket.socket() as probe, suppress(OSError):  # another process listens there
            probe.bind(("", port))
            return port
    with socket.create_server(("", 0)) as probe:
        named: int = probe.getsockname()[1]
    return named


def ask_broker(connection: socket.socket, api: int, version: int, body: bytes) -> bytes:
    """Return a broker's answer without its header. Every failure is an ``OSError``."""
    request = struct.pack(">hhi", api, version, 1) + kafka_string("stream-ckpt") + body
    connection.sendall(struct.pack(">i", len(request)) + request)
    with connection.makefile("rb") as answers:
        head = answers.read(4)
        length = int.from_bytes(head)
        if len(head) == 4 and not 4 <= length <= _MAX_ANSWER_BYTES:
            raise OSError(f"the broker sent an answer with the invalid length of {length} bytes")
        answer = answers.read(length)
    if len(head) < 4 or len(answer) < length:
        raise OSError("the broker closed the connection")
    return answer[4:]


def kafka_string(text: str) -> bytes:
    """Return a string as it stands in a request."""
    data = text.encode()
    return struct.pack(">h", len(data)) + data
