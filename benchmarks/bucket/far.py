"""A proxy before an object store, in a separate process: it makes the store far, counts requests, and throttles them.

Answers pass through it late, as from a store with that much latency: a ``100 Continue``, and the beginning of each
answer. Bodies pass as fast as they come, so the bandwidth is the machine's.
"""

from __future__ import annotations

import http.client
import json
import multiprocessing
import select
import socketserver
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from email.message import Message
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

sys.path[1:1] = [str(Path(__file__).resolve().parents[2])]

from tests.s3.faults import kind_of  # noqa: E402

HOST = "127.0.0.1"
SLOW_DOWN, SILENCE = "503", "silence"
FAULTS = (SLOW_DOWN, SILENCE)
"""What all requests get: an answer that asks for fewer of them, or none."""
_CONTROL = "/-/"
_PIECE_BYTES = 1 << 20
_TIMEOUT_S = 60.0
_BODY = b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_OWN = {"connection", "transfer-encoding", "content-length", "keep-alive"}


class Request(NamedTuple):
    """A request, by the clock that all processes of this host share."""

    kind: str
    begin_s: float
    end_s: float | None
    """Before the last part of its answer was sent. None without an answer."""


@dataclass(frozen=True)
class Far:
    """A running proxy, for any process of this host."""

    port: int

    @property
    def endpoint(self) -> str:
        return f"http://{HOST}:{self.port}"

    def be(self, latency_ms: float = 0, fault: str = "") -> None:
        """Answer so from here on. Forgets all requests.

        Args:
            latency_ms: Of each answer.
            fault: One of FAULTS, or empty.
        """
        self._call("be", {"latency_s": latency_ms / 1e3, "fault": fault})

    def requests(self, since_s: float, until_s: float) -> list[Request]:
        """Return the requests that began between two times of the monotonic clock."""
        found = [Request(*each) for each in self._call("requests", {})]
        return [each for each in found if since_s <= each.begin_s <= until_s]

    def _call(self, name: str, given: dict[str, Any]) -> Any:
        connection = http.client.HTTPConnection(HOST, self.port, timeout=_TIMEOUT_S)
        try:
            connection.request("POST", f"{_CONTROL}{name}", json.dumps(given))
            return json.loads(connection.getresponse().read())
        finally:
            connection.close()


def in_turn(requests: Sequence[Request]) -> int:
    """Return the length of the longest chain in which each request began after the answer to the one before it."""
    found, end_s = 0, float("-inf")
    for each in sorted((each for each in requests if each.end_s is not None), key=lambda each: each.end_s or 0.0):
        if each.begin_s >= end_s:
            found, end_s = found + 1, each.end_s or 0.0
    return found


@contextmanager
def far(port: int) -> Iterator[Far]:
    """Run a proxy before the server at a port of this host. It ends with this process at the latest."""
    context = multiprocessing.get_context("fork")  # it needs none of what this process has imported
    mine, theirs = context.Pipe()
    process = context.Process(target=_run, args=(port, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        yield Far(mine.recv())
    finally:
        process.terminate()
        process.join()


def _run(upstream: int, pipe: Connection) -> None:
    proxy = _Proxy(upstream)

    class Handler(socketserver.StreamRequestHandler):
        disable_nagle_algorithm = True

        def handle(self) -> None:
            proxy.serve(self)

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True
        request_queue_size = 128

        def handle_error(self, request: object, client_address: object) -> None:
            """A client that went away is not an error of the case."""

    server = Server((HOST, 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    pipe.send(server.server_address[1])
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])


class _Proxy:
    """Forwards requests to a server, and changes no header that is signed."""

    def __init__(self, upstream: int) -> None:
        self._upstream = upstream
        self._latency_s, self._fault = 0.0, ""
        self._requests: list[list[Any]] = []

    def serve(self, client: socketserver.StreamRequestHandler) -> None:
        """Answer the requests of one connection."""
        upstream: http.client.HTTPConnection | None = None
        piece = memoryview(bytearray(_PIECE_BYTES))
        try:
            while line := client.rfile.readline():
                method, target, _ = line.decode("latin-1").split()
                headers = http.client.parse_headers(client.rfile)
                length = int(headers.get("Content-Length") or 0)
                if target.startswith(_CONTROL):
                    self._control(client, target.removeprefix(_CONTROL), json.loads(client.rfile.read(length)))
                    continue
                request = [kind_of(method, target), time.monotonic(), None]
                self._requests.append(request)
                latency_s, fault = self._latency_s, self._fault
                if fault == SILENCE:
                    client.rfile.read()  # until the client gives up
                    return
                if "100-continue" in (headers.get("Expect") or "").lower():
                    time.sleep(latency_s)
                    client.wfile.write(_CONTINUE)
                if fault == SLOW_DOWN:
                    client.rfile.read(length)
                    time.sleep(latency_s)
                    request[2] = time.monotonic()
                    body = b"" if method == "HEAD" else _BODY
                    client.wfile.write(_head(503, {"Content-Type": "application/xml"}, len(_BODY)) + body)
                    continue
                upstream = self._connected(upstream)
                if not _forward(upstream, client, method, target, headers, piece):
                    return
                answer = upstream.getresponse()
                time.sleep(latency_s)
                _answer(client, method, answer, piece, request)
        finally:
            if upstream is not None:
                upstream.close()

    def _control(self, client: socketserver.StreamRequestHandler, name: str, given: dict[str, Any]) -> None:
        found: Any = None
        if name == "be":
            self._latency_s, self._fault, self._requests = given["latency_s"], given["fault"], []
        else:
            found = self._requests
        data = json.dumps(found).encode()
        client.wfile.write(_head(200, {}, len(data)) + data)

    def _connected(self, upstream: http.client.HTTPConnection | None) -> http.client.HTTPConnection:
        """Return a connection to the server: the given one, unless the server has closed it."""
        if upstream is not None:
            if upstream.sock is not None and not select.select([upstream.sock], [], [], 0)[0]:
                return upstream
            upstream.close()
        upstream = http.client.HTTPConnection(HOST, self._upstream, timeout=_TIMEOUT_S)
        upstream.connect()
        return upstream


def _forward(
    upstream: http.client.HTTPConnection,
    client: socketserver.StreamRequestHandler,
    method: str,
    target: str,
    headers: Message,
    piece: memoryview,
) -> bool:
    """Send a request on, piece by piece. Returns whether the client has sent all of it."""
    upstream.putrequest(method, target, skip_host=True, skip_accept_encoding=True)
    for name, value in headers.items():
        if name.lower() not in ("expect", "connection"):
            upstream.putheader(name, value)
    upstream.endheaders()
    left = int(headers.get("Content-Length") or 0)
    while left:
        count = client.rfile.readinto1(piece[: min(left, len(piece))])  # type: ignore[attr-defined]
        if not count:
            return False
        upstream.send(piece[:count])
        left -= count
    return True


def _answer(
    client: socketserver.StreamRequestHandler,
    method: str,
    answer: http.client.HTTPResponse,
    piece: memoryview,
    request: list[Any],
) -> None:
    """Send an answer on, piece by piece, and note when it ends."""
    headers = {name: value for name, value in answer.getheaders() if name.lower() not in _OWN}
    body = b""
    if method == "HEAD":
        length, left = int(answer.headers.get("Content-Length") or 0), 0
    elif answer.length is None:  # in chunks, which only short answers are
        body = answer.read()
        length, left = len(body), 0
    else:
        length = left = answer.length
    head = _head(answer.status, headers, length) + body
    if not left:
        answer.read()
        request[2] = time.monotonic()
        client.wfile.write(head)
        return
    client.wfile.write(head)
    while left:
        count = answer.readinto(piece[: min(left, len(piece))])
        if not count:
            raise ConnectionError("the server has cut its answer")
        left -= count
        if not left:
            answer.read()
            request[2] = time.monotonic()
        client.wfile.write(piece[:count])


def _head(status: int, headers: dict[str, str], length: int) -> bytes:
    lines = [f"HTTP/1.1 {status} {http.client.responses.get(status, '')}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if status not in (204, 304):
        lines.append(f"Content-Length: {length}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1")
