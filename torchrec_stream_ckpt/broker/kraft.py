"""A single KRaft node (broker and controller in one process) that lives in one folder.

The folder holds::

    server.properties   made by the first start: ports and cluster stay for good
    log4j2.properties
    data/               Kafka's own
    broker.log          output of the broker, appended to
    broker.json         what runs: pid, birth of that pid, address
    broker.pid          the pid alone, for people
    broker.lock         held while starting and stopping
"""

from __future__ import annotations

import base64
import errno
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from torchrec_stream_ckpt.broker.process import ProcessId, spawn, wait_until
from torchrec_stream_ckpt.broker.runtime import find_java, kafka_jars, locked
from torchrec_stream_ckpt.errors import ConfigError, LogUnavailableError

HOST = "127.0.0.1"
PORT_FREE_TIMEOUT_S = 5.0
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 20.0
_TETHER = Path(__file__).with_name("tether.py")
_JVM = ("-Xms128m", "-Xmx512m", "-XX:+UseSerialGC", "-Xshare:auto", "-Djava.awt.headless=true")

# A killed broker is let in again only when its old session has run out: by default that is after 9 s.
_PROPERTIES = """\
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@{host}:{controller_port}
listeners=PLAINTEXT://{host}:{port},CONTROLLER://{host}:{controller_port}
advertised.listeners=PLAINTEXT://{host}:{port}
controller.listener.names=CONTROLLER
inter.broker.listener.name=PLAINTEXT
log.dirs={data}
auto.create.topics.enable=false
default.replication.factor=1
min.insync.replicas=1
offsets.topic.replication.factor=1
offsets.topic.num.partitions=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
transaction.state.log.num.partitions=1
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
group.initial.rebalance.delay.ms=0
broker.session.timeout.ms=3000
broker.heartbeat.interval.ms=500
"""

_LOG4J = """\
status = error
appender.out.type = Console
appender.out.name = out
appender.out.layout.type = PatternLayout
appender.out.layout.pattern = [%d] %p %m (%c)%n
rootLogger.level = WARN
rootLogger.appenderRef.out.ref = out
"""


@dataclass(frozen=True, slots=True)
class BrokerStatus:
    """What is known of the broker of one folder."""

    directory: Path
    running: bool
    pid: int | None
    bootstrap: str | None
    """HOST:PORT of the clients' listener; known from the first start on."""

    def uri(self, job: str = "JOB") -> str:
        """The log's URI for a job on this broker."""
        return f"kafka://{self.bootstrap}/{job}"


class Broker:
    """The broker of one folder. Any process may start, ask and stop it.

    Args:
        directory: Its folder; made by the first start.
    """

    def __init__(self, directory: Path) -> None:
        self._dir = directory.absolute()
        self._properties = self._dir / "server.properties"
        self._log = self._dir / "broker.log"
        self._state = self._dir / "broker.json"
        self._pid_file = self._dir / "broker.pid"

    def status(self) -> BrokerStatus:
        """Whether it runs, and where."""
        process = self._process()
        running = process is not None and process.alive()
        port = self._port()
        return BrokerStatus(
            directory=self._dir,
            running=running,
            pid=process.pid if process and running else None,
            bootstrap=f"{HOST}:{port}" if port else None,
        )

    def start(
        self, *, port: int | None = None, die_with: int | None = None, timeout_s: float = START_TIMEOUT_S
    ) -> BrokerStatus:
        """Start it and wait until it answers.

        Args:
            port: Port of the clients' listener; by default a free one, and from then on the same.
            die_with: Pid of a process that the broker must not outlive, such as ``os.getpid()``.
            timeout_s: Longest wait for an answer.

        Raises:
            ConfigError: it runs already, Java or Maven is missing, or the port is taken.
            LogUnavailableError: it ended or does not answer; the message holds the end of its log.
        """
        with self._locked():
            if (status := self.status()).running:
                raise ConfigError(
                    f"a broker runs in this folder already, as {status.bootstrap}",
                    hint=f"use {status.uri()}, or stop it: stream-ckpt broker stop --dir {self._dir}",
                    path=self._dir,
                    pid=status.pid,
                )
            self._configure(port)
            kafka = [find_java(), *_JVM, f"-Dlog4j2.configurationFile={self._dir / 'log4j2.properties'}"]
            kafka += ["-cp", f"{kafka_jars()}/*"]
            self._format(kafka)
            process = self._spawn([*kafka, "kafka.Kafka", str(self._properties)], die_with)
            self._await_ready(process, timeout_s)
            return self.status()

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> bool:
        """Stop it: SIGTERM, a bounded wait, SIGKILL. Returns whether there was something to stop.

        A pid that another process has taken meanwhile is left alone.
        """
        if not self._dir.is_dir():
            return False
        with self._locked():
            process = self._process()
            if process is None:
                return False
            stopped = self._end(process, timeout_s)
            self._state.unlink(missing_ok=True)
            self._pid_file.unlink(missing_ok=True)
            return stopped

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with locked(self._dir / "broker.lock"):
            yield

    def _end(self, process: ProcessId, timeout_s: float) -> bool:
        if not process.send(signal.SIGTERM):
            process.wait(0)
            return False
        if not process.wait(timeout_s):
            process.send(signal.SIGKILL)
            if not process.wait(10):
                raise LogUnavailableError("the broker does not end, not even by SIGKILL", pid=process.pid)
        return True

    def _process(self) -> ProcessId | None:
        """The process that the last start left behind, dead or alive."""
        try:
            state = json.loads(self._state.read_text())
            return ProcessId(int(state["pid"]), str(state["birth"]))
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"cannot read the state of the broker: {error!r}",
                hint="stop the broker by its pid if it runs, then delete this file",
                path=self._state,
            ) from None

    def _port(self) -> int | None:
        try:
            match = re.search(r"^listeners=PLAINTEXT://[^:]+:(\d+),", self._properties.read_text(), re.MULTILINE)
        except FileNotFoundError:
            return None
        return int(match[1]) if match else None

    def _configure(self, port: int | None) -> None:
        """Write the settings once: a later start finds its data and its address again."""
        known = self._port()
        if known is not None:
            if port not in (None, known):
                raise ConfigError(
                    f"this folder's broker has port {known}, not {port}",
                    hint=f"leave --port away, or stop it and set the port in {self._properties}",
                    path=self._dir,
                )
            _check_free(known)
            return
        with ExitStack() as held:
            # Both at once: the second must not be given the port of the first.
            chosen = _reserve(held, port or 0)
            controller = _reserve(held, 0)
        data = self._dir / "data"
        text = _PROPERTIES.format(host=HOST, port=chosen, controller_port=controller, data=data)
        (self._dir / "log4j2.properties").write_text(_LOG4J)
        _write(self._properties, text)

    def _format(self, kafka: list[str]) -> None:
        if (self._dir / "data" / "meta.properties").exists():
            return
        cluster = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        # An id that begins with a dash would be taken for an option.
        arguments = ["format", f"--cluster-id={cluster}", "--config", str(self._properties)]
        done = subprocess.run(
            [*kafka, "kafka.tools.StorageTool", *arguments], capture_output=True, text=True, timeout=120, check=False
        )
        if done.returncode:
            tail = " | ".join((done.stdout + done.stderr).strip().splitlines()[-4:])
            raise LogUnavailableError(f"cannot format the broker's storage: {tail}", path=self._dir)

    def _spawn(self, command: list[str], die_with: int | None) -> ProcessId:
        if die_with is not None:
            command = [*_tether(die_with), *command]
        process = spawn(command, self._log)
        _write(self._state, json.dumps({"pid": process.pid, "birth": process.birth, "port": self._port()}) + "\n")
        _write(self._pid_file, f"{process.pid}\n")
        return process

    def _await_ready(self, process: ProcessId, timeout_s: float) -> None:
        port = self._port()
        assert port is not None
        for _ in wait_until(time.monotonic() + timeout_s):
            if _answers(port):
                return
            if process.wait(0):
                raise self._failed("the broker ended while starting")
        self._end(process, 5)
        raise self._failed(f"the broker did not answer within {timeout_s:.0f} s and was stopped")

    def _failed(self, what: str) -> LogUnavailableError:
        lines = self._log.read_text(errors="replace").splitlines() if self._log.exists() else []
        tail = "\n".join(lines[-12:])
        return LogUnavailableError(f"{what}; the end of its log:\n{tail}", hint=f"read {self._log}", path=self._dir)


def _tether(pid: int) -> list[str]:
    master = ProcessId.of(pid)
    if master is None:
        raise ConfigError("the process that the broker should end with is gone", pid=pid)
    return [sys.executable, "-I", str(_TETHER), str(pid), master.birth]


def _reserve(held: ExitStack, port: int) -> int:
    """Bind a loopback port (0: any free one) until ``held`` is closed."""
    probe = held.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    deadline = time.monotonic() + (PORT_FREE_TIMEOUT_S if port else 0.0)
    while True:
        try:
            probe.bind((HOST, port))
            break
        except OSError as error:
            # A broker that was killed a moment ago holds its sockets until the kernel has taken it apart.
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                raise ConfigError(
                    f"port {port} on {HOST} cannot be used: {error.strerror}", hint="name another one with --port"
                ) from None
            time.sleep(0.05)
    taken: int = probe.getsockname()[1]
    return taken


def _check_free(port: int) -> None:
    with ExitStack() as held:
        _reserve(held, port)


def _answers(port: int) -> bool:
    """Whether a broker answers a Metadata request and counts itself among the living.

    The listener accepts connections long before requests are served, so an open port says little.
    """
    client = b"stream-ckpt"
    body = struct.pack(">hhih", 3, 1, 1, len(client)) + client + struct.pack(">i", 0)
    try:
        with socket.create_connection((HOST, port), timeout=1) as connection:
            connection.settimeout(5)
            connection.sendall(struct.pack(">i", len(body)) + body)
            answer = _read_exactly(connection, 12)
    except OSError:
        return False
    _, _, brokers = struct.unpack(">iii", answer) if len(answer) == 12 else (0, 0, 0)
    return bool(brokers > 0)


def _read_exactly(connection: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length and (piece := connection.recv(length - len(data))):
        data += piece
    return data


def _write(path: Path, text: str) -> None:
    """Replace a file as a whole: a reader sees the old text or the new one."""
    scratch = path.with_name(path.name + ".tmp")
    scratch.write_text(text)
    os.replace(scratch, path)
