"""A proxy before an S3 server that counts requests by what they are, and harms those that it is told to harm."""

from __future__ import annotations

import http.client
import re
import socket
import socketserver
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from email.message import Message
from pathlib import Path
from typing import Literal, get_args
from urllib.parse import parse_qs, unquote, urlsplit

from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from tests.s3.server import KEY, SECRET

HOST = "127.0.0.1"

Kind = Literal["put", "get", "head", "list", "delete", "delete many", "create", "part", "complete", "abort", "rules"]
"""Of a request; four are those of a multipart upload, the last one asks for a setting of the bucket."""
Fault = Literal["slow down", "error", "broken before", "broken after", "half", "silence"]
"""503 SlowDown; 500; the connection breaks before the server hears of it, after it has done it, within its answer; no
answer until :meth:`FaultyProxy.close`."""
FAULTS: tuple[Fault, ...] = get_args(Fault)
_BODY = "<?xml version='1.0'?><Error><Code>{code}</Code><Message>{said}</Message><RequestId>x</RequestId></Error>"
_ANSWERS = {
    "slow down": (503, _BODY.format(code="SlowDown", said="Please reduce your request rate.")),
    "error": (500, _BODY.format(code="InternalError", said="We encountered an internal error. Please try again.")),
}
_UNSET = {
    "versioning": "",
    "object-lock": "ObjectLockConfigurationNotFoundError",
    "lifecycle": "NoSuchLifecycleConfiguration",
}
"""Codes of S3 for a setting of a bucket that was never set."""
_ENTRY = re.compile(rb"<Contents>.*?<Key>(.*?)</Key>.*?</Contents>", re.DOTALL)
"""An object of a listing."""
_OF_SESSION = {"authorization", "x-amz-security-token", "x-amz-date", "x-amz-content-sha256", "expect", "connection"}
_HOP = {"connection", "transfer-encoding", "content-length", "keep-alive"}


@dataclass
class Held:
    """A put that came, and that the server does not hear of until :meth:`release`; its client may be dead by then."""

    part: str
    """Of the object's name."""
    came: threading.Event = field(default_factory=threading.Event)
    go: threading.Event = field(default_factory=threading.Event)
    answered: threading.Event = field(default_factory=threading.Event)
    status: int = 0
    """The server's answer; 0 before."""

    def release(self) -> int:
        """Let the server hear of it; the status that it answers."""
        self.go.set()
        assert self.answered.wait(60)
        return self.status


class FaultyProxy:
    """Listens on loopback and forwards to an S3 server, whose signatures stay whole: it changes no header.

    Args:
        port: The server's.
    """

    def __init__(self, port: int) -> None:
        self.upstream = port
        self.asked: Counter[Kind] = Counter()
        """Requests that came, harmed ones among them."""
        self.fired: Counter[tuple[Kind, Fault]] = Counter()
        self.consents = 0
        """Requests whose client waited until it was told to send the body."""
        self._faults: dict[Kind, tuple[Fault, int]] = {}
        self._refused: dict[Kind, tuple[int, str]] = {}
        self._conditions: str | None = None
        """What is done about puts with a condition; None: they are the server's."""
        self._unknown_in: tuple[Kind, ...] = ()
        """Requests with a condition that the server does not know."""
        self._rules: Mapping[str, str] | None = None
        """Settings of buckets; None: they are the server's."""
        self._held: Held | None = None
        self._meeting: tuple[str, threading.Barrier] | None = None
        self.met = 0
        """Groups of requests that came at the same time."""
        self.accept_session: Callable[[str], bool] | None = None
        """Whether the token of a session is valid; None: all are."""
        self._lag_s = 0.0
        self._put_at: dict[str, float] = {}
        """Objects by the time at which they were put."""
        self.hidden = 0
        """Names that were left out of listings."""
        self._lock = threading.Lock()
        self._closed = threading.Event()
        proxy = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                proxy.serve(self)

        class Server(socketserver.ThreadingTCPServer):
            daemon_threads = True
            allow_reuse_address = True
            request_queue_size = 128

            def handle_error(self, request: object, client_address: object) -> None:
                """A client that went away is no error of ours."""

        self._server = Server((HOST, 0), Handler)
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        return f"http://{HOST}:{self.port}"

    def harm(self, kind: Kind, fault: Fault, times: int = 10**9) -> None:
        """Harm the next requests of a kind."""
        with self._lock:
            self._faults[kind] = fault, times

    def refuse(self, kind: Kind, status: int, code: str, said: str = "") -> None:
        """Answer all further requests of a kind by an error of S3, whatever the server would say."""
        with self._lock:
            self._refused[kind] = status, _BODY.format(code=code, said=said or code)

    def meet(self, part: str, parties: int) -> None:
        """From here on, let requests whose target contains ``part`` pass ``parties`` at a time, counted in ``met``."""
        self.met = 0
        self._meeting = part, threading.Barrier(parties, self._count_meeting)

    def _count_meeting(self) -> None:
        self.met += 1

    def be_set(self, rules: Mapping[str, str]) -> None:
        """Report these settings of all buckets: XML of S3 by ``versioning``, ``object-lock`` or ``lifecycle``.

        Those that are missing were never set.
        """
        with self._lock:
            self._rules = rules

    def know_no_conditions(self, objects: Path | None, kinds: tuple[Kind, ...] = ("put", "complete")) -> None:
        """Be a store without conditional puts: one that answers 501, or, given the server's folder, ignores them."""
        with self._lock:
            self._conditions, self._unknown_in = "" if objects is None else str(objects), kinds

    def hold(self, part: str) -> Held:
        """Hold the next put of an object whose name contains ``part``."""
        with self._lock:
            self._held = Held(part)
            return self._held

    def lag(self, seconds: float) -> None:
        """Leave objects that were put within the last ``seconds`` out of listings."""
        self._lag_s = seconds

    def heal(self) -> None:
        """Harm nothing from here on."""
        with self._lock:
            self._faults.clear()
            self._refused.clear()
            self._rules = None
            self._conditions = None
            self._lag_s = 0.0

    def taken(self) -> Counter[Kind]:
        """What was asked since the last call."""
        with self._lock:
            found, self.asked = self.asked, Counter()
        return found

    def close(self) -> None:
        self._closed.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def serve(self, client: socketserver.StreamRequestHandler) -> None:
        while line := client.rfile.readline():
            method, target, _ = line.decode("latin-1").split()
            headers = http.client.parse_headers(client.rfile)
            if "100-continue" in (headers.get("Expect") or "").lower():
                self.consents += 1
                client.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            assert headers.get("Transfer-Encoding") is None, "this proxy does not read chunked bodies"
            body = client.rfile.read(int(headers.get("Content-Length") or 0))
            kind = kind_of(method, target)
            fault = self._fault(kind)
            if self._meeting is not None and self._meeting[0] in target:
                self._meeting[1].wait(60)
            answer = self._refused.get(kind) or (_ANSWERS.get(fault) if fault else None)
            session = headers.get("X-Amz-Security-Token") or ""
            if self.accept_session is not None and not self.accept_session(session):
                answer = 400, _BODY.format(code="ExpiredToken", said="The provided token has expired.")
            if kind == "rules" and self._rules is not None and answer is None:
                answer = self._rule(rule_of(target))
            if self._conditions is not None and headers.get("If-None-Match") and kind in self._unknown_in:
                if self._conditions:  # what the server does not see, it overwrites
                    Path(self._conditions, unquote(urlsplit(target).path).strip("/")).unlink(missing_ok=True)
                else:
                    answer = 501, _BODY.format(code="NotImplemented", said="A header that you provided is not known.")
            if answer is not None:
                status, said = answer
                data = b"" if method == "HEAD" else said.encode()
                _answer(client, status, {"Content-Type": "application/xml"}, data, len(data))
                continue
            if fault == "silence":
                self._closed.wait()
                return
            if fault == "broken before":
                _hang_up(client.connection)
                return
            if session:  # which the server does not know
                headers = self._signed_again(method, target, headers, body)
            held = self._hold(target) if kind == "put" else None
            status, found, data = self._forward(method, target, headers, body)
            if held is not None:
                held.status = status
                held.answered.set()
            if kind in ("put", "complete") and status == 200:
                self._put_at[_key_of(target)] = time.monotonic()
            elif kind == "list" and self._lag_s:
                data = _ENTRY.sub(self._shown, data)
            if fault == "broken after":
                _hang_up(client.connection)
                return
            length = int(found.get("Content-Length", 0)) if method == "HEAD" else len(data)
            kept = {name: value for name, value in found.items() if name.lower() not in _HOP}
            if fault == "half":
                _answer(client, status, kept, data[: len(data) // 2], max(length, 1))
                _hang_up(client.connection)
                return
            _answer(client, status, kept, data, length)

    def _rule(self, name: str) -> tuple[int, str]:
        assert self._rules is not None
        if name in self._rules:
            return 200, self._rules[name]
        code = _UNSET[name]
        return (404, _BODY.format(code=code, said=code)) if code else (200, "<VersioningConfiguration/>")

    def _hold(self, target: str) -> Held | None:
        with self._lock:
            held = self._held
            if held is None or held.part not in _key_of(target):
                return None
            self._held = None
        held.came.set()
        held.go.wait()
        return held

    def _shown(self, entry: re.Match[bytes]) -> bytes:
        """An entry of a listing; nothing if it lags."""
        at = self._put_at.get(unquote(entry[1].decode()), 0.0)
        if time.monotonic() - at > self._lag_s:
            return entry[0]
        self.hidden += 1
        return b""

    def _fault(self, kind: Kind) -> Fault | None:
        with self._lock:
            self.asked[kind] += 1
            fault, times = self._faults.get(kind, (None, 0))
            if fault is None or not times:
                return None
            self._faults[kind] = fault, times - 1
            self.fired[kind, fault] += 1
            return fault

    def _signed_again(self, method: str, target: str, headers: Message, body: bytes) -> Message:
        """Sign a request of a session with the keys alone."""
        kept = {name: value for name, value in headers.items() if name.lower() not in _OF_SESSION}
        request = AWSRequest(method, f"http://{HOST}:{self.upstream}{target}", kept, body)
        S3SigV4Auth(Credentials(KEY, SECRET), "s3", "us-east-1").add_auth(request)
        return request.headers

    def _forward(
        self, method: str, target: str, headers: Mapping[str, str], body: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection(HOST, self.upstream, timeout=60)
        try:
            connection.putrequest(method, target, skip_host=True, skip_accept_encoding=True)
            for name, value in headers.items():
                if name.lower() not in ("expect", "connection"):
                    connection.putheader(name, value)
            connection.endheaders(body or None)
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()
        finally:
            connection.close()


def _key_of(target: str) -> str:
    """The object that a request is about, without its bucket."""
    return unquote(urlsplit(target).path.strip("/").partition("/")[2])


def rule_of(target: str) -> str:
    """The setting of a bucket that a request asks for; empty for other requests."""
    query = parse_qs(urlsplit(target).query, keep_blank_values=True)
    return next((name for name in _UNSET if name in query), "")


def kind_of(method: str, target: str) -> Kind:
    """What a request is, by its method and target."""
    split = urlsplit(target)
    query, key = parse_qs(split.query, keep_blank_values=True), split.path.strip("/").partition("/")[2]
    if "uploadId" in query or "uploads" in query:
        if method == "POST":
            return "create" if "uploads" in query else "complete"
        return "part" if method == "PUT" else "abort"
    if method == "GET":
        return "get" if key else "rules" if rule_of(target) else "list"
    found: Mapping[str, Kind] = {"PUT": "put", "HEAD": "head", "DELETE": "delete", "POST": "delete many"}
    return found[method]


def _answer(
    client: socketserver.StreamRequestHandler, status: int, headers: Mapping[str, str], data: bytes, length: int
) -> None:
    lines = [f"HTTP/1.1 {status} {http.client.responses.get(status, 'x')}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if status not in (204, 304):
        lines.append(f"Content-Length: {length}")
    client.wfile.write("\r\n".join([*lines, "", ""]).encode("latin-1") + data)
    client.wfile.flush()


def _hang_up(connection: socket.socket) -> None:
    connection.shutdown(socket.SHUT_RDWR)
