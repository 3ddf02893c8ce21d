"""Ports on this host that outgoing connections do not take."""

from __future__ import annotations

import secrets
import socket
from contextlib import suppress
from pathlib import Path

_FIRST_PORT = 10_000
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
