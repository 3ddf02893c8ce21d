"""A network that misbehaves: Toxiproxy between clients and a broker of our own, and a client that sees what it does."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import struct
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.servers import Server
from torchrec_stream_ckpt.extras.broker.kraft import HOST
from torchrec_stream_ckpt.util.ports import free_port

ROOT = Path(__file__).parents[2]


class NoToxiproxy(Exception):  # noqa: N818
    """It is not here and cannot be built; says why."""


def build() -> str:
    """Path of the program; the first call builds it."""
    done = subprocess.run(
        ["bash", str(ROOT / "scripts/toxiproxy.sh")], capture_output=True, text=True, timeout=500, check=False
    )
    if done.returncode:
        raise NoToxiproxy(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "its build failed")
    return done.stdout.strip()


class Proxy(Server):
    """A listening port that forwards to another one. Ends with this process.

    Args:
        listen: Where clients connect.
        upstream: The broker's own port.
        output: What Toxiproxy says goes there.
    """

    def __init__(self, listen: int, upstream: int, output: Path) -> None:
        self.port = listen
        program, self._api = build(), free_port()
        super().__init__(output)
        self.endpoint = f"http://{HOST}:{self._api}/version"
        self.launch([program, "-host", HOST, "-port", str(self._api), "-proxy-metrics"], 20)
        body = {"name": "broker", "listen": f"{HOST}:{listen}", "upstream": f"{HOST}:{upstream}"}
        self._call("POST", "/proxies", body)

    def enable(self, on: bool) -> None:
        """Off: connections are closed, and new ones refused."""
        self._call("POST", "/proxies/broker", {"enabled": on})

    @contextlib.contextmanager
    def toxic(self, kind: str, stream: str = "upstream", **attributes: int) -> Iterator[None]:
        """Behind the block it is taken away, and every connection that suffered under it is closed."""
        body = {"name": "toxic", "type": kind, "stream": stream, "attributes": attributes}
        self._call("POST", "/proxies/broker/toxics", body)
        try:
            yield
        finally:
            self._call("DELETE", "/proxies/broker/toxics/toxic")
            self.hang_up()

    def hang_up(self) -> None:
        """Close all connections; the proxy counts the bytes of a connection when it ends."""
        self.enable(False)
        self.enable(True)

    def num_bytes(self) -> int:
        """What clients have sent through it, over connections that have ended."""
        text = self._raw("GET", "/metrics").decode()
        match = re.search(r'toxiproxy_proxy_received_bytes_total\{direction="upstream".*\} (\S+)', text)
        return int(float(match[1])) if match else 0

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> None:
        self._raw(method, path, body)

    def _raw(self, method: str, path: str, body: dict[str, Any] | None = None) -> bytes:
        request = urllib.request.Request(f"http://{HOST}:{self._api}{path}", method=method)
        request.add_header("User-Agent", "chaos")  # it refuses what looks like a browser
        data = json.dumps(body).encode() if body is not None else None
        with urllib.request.urlopen(request, data, timeout=120) as answer:
            return bytes(answer.read())


def probe(port: int, timeout_s: float = 1.5) -> str:
    """What a client meets that asks a broker for its metadata: answer, refused, reset or silence."""
    client = b"chaos"
    body = struct.pack(">hhih", 3, 1, 1, len(client)) + client + struct.pack(">i", 0)
    try:
        with socket.create_connection((HOST, port), timeout=timeout_s) as connection:
            connection.settimeout(timeout_s)
            connection.sendall(struct.pack(">i", len(body)) + body)
            return "answer" if connection.recv(4) else "reset"
    except ConnectionRefusedError:
        return "refused"
    except (ConnectionResetError, BrokenPipeError):
        return "reset"
    except TimeoutError:
        return "silence"
