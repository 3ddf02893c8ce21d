"""A single KRaft node (broker and controller in one process) that keeps its files in one folder.

The folder holds::

    server.properties   written by the first start; ports and cluster id never change afterwards
    log4j2.properties
    data/               Kafka's own files
    broker.log          output of the broker; each start appends to it
    broker.json         the running process: pid, birth of that pid, address
    broker.lock         held while starting and stopping
    clients/, security/ of a secure broker: see :mod:`~torchrec_stream_ckpt.extras.broker.security`
"""

from __future__ import annotations

import base64
import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote

from torchrec_stream_ckpt.errors import ConfigError, LogUnavailableError
from torchrec_stream_ckpt.extras.broker.process import ProcessId, spawn, wait_until
from torchrec_stream_ckpt.extras.broker.runtime import KAFKA, find_java, locked
from torchrec_stream_ckpt.extras.broker.security import ADMIN, PROTOCOLS, READER, TRAINER, Security, write_secret
from torchrec_stream_ckpt.extras.broker.wire import OPERATIONS, Connection, Right
from torchrec_stream_ckpt.util.ports import free_port

HOST = "127.0.0.1"
PORT_FREE_TIMEOUT_S = 5.0
START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 20.0
_PORT_RACES = 2
_PORT_TAKEN = b"Address already in use"
_TETHER = Path(__file__).with_name("tether.py")
_JVM = ("-Xms128m", "-Xmx512m", "-XX:+UseSerialGC", "-Xshare:auto", "-Djava.awt.headless=true")

# A killed broker can register again only after its old session has expired: by default after 9 s. An idle one writes an
# empty record every 0.5 s by default, which takes a third of its CPU time.
_PROPERTIES = """\
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@{host}:{controller_port}
listeners={listeners},CONTROLLER://{host}:{controller_port}
advertised.listeners={listeners}
controller.listener.names=CONTROLLER
inter.broker.listener.name={own_listener}
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
metadata.max.idle.interval.ms=5000
"""

LOG4J = """\
status = error
appender.out.type = Console
appender.out.name = out
appender.out.layout.type = PatternLayout
appender.out.layout.pattern = [%d] %p %m (%c)%n
rootLogger.level = WARN
rootLogger.appenderRef.out.ref = out
"""

_RIGHTS = [
    *(Right(TRAINER, operation) for operation in OPERATIONS),
    *(Right(READER, operation) for operation in ("READ", "DESCRIBE", "DESCRIBE_CONFIGS")),
]
"""Rights of the users on every topic, granted by the first start."""


@dataclass(frozen=True, slots=True)
class BrokerStatus:
    """State of the broker of one folder."""

    directory: Path
    running: bool
    pid: int | None
    bootstrap: str | None
    """HOST:PORT of the clients' listener, known after the first start. For a secure broker, the listener with TLS and
    login."""
    listeners: dict[str, str] = field(default_factory=dict)
    """HOST:PORT of every listener for clients, by protocol."""
    clients: Path | None = None
    """Folder of the client option files of a secure broker."""

    def uri(self, job: str = "JOB") -> str:
        """Return the log URI of a job on this broker."""
        return f"kafka://{self.bootstrap}/{job}"


class Broker:
    """The broker of one folder. Any process may start, query and stop it.

    Args:
        directory: The broker's folder; the first start creates it.
    """

    def __init__(self, directory: Path) -> None:
        self._dir = directory.absolute()
        if not str(self._dir).isprintable() or any(sign in str(self._dir) for sign in ",\\"):
            raise ConfigError(
                "a broker's folder must not have a comma, a backslash or a control character in its path",
                hint="choose another folder",
                path=self._dir,
            )
        self._properties = self._dir / "server.properties"
        self._log = self._dir / "broker.log"
        self._state = self._dir / "broker.json"
        self._lock = self._dir / "broker.lock"
        self._security = Security(self._dir)

    def status(self) -> BrokerStatus:
        """Return whether the broker runs, and its addresses."""
        process = self._process()
        running = process is not None and process.alive()
        listeners = {protocol: f"{HOST}:{port}" for protocol, port in self._ports().items()}
        return BrokerStatus(
            directory=self._dir,
            running=running,
            pid=process.pid if process and running else None,
            bootstrap=next(iter(listeners.values()), None),
            listeners=listeners,
            clients=self._security.clients if self._security.exists() else None,
        )

    def start(
        self,
        *,
        port: int | None = None,
        secure: bool = False,
        die_with: int | None = None,
        timeout_s: float = START_TIMEOUT_S,
    ) -> BrokerStatus:
        """Start the broker and wait until it answers.

        Args:
            port: Port of the clients' listener. The default is a free port, which later starts use again.
            secure: (first start) Use TLS, logins and rights, on three listeners: SASL_SSL, SASL_PLAINTEXT and SSL.
            die_with: Pid of a process that the broker must not outlive, such as ``os.getpid()``.
            timeout_s: Longest wait for an answer.

        Raises:
            ConfigError: the broker already runs, Java or Maven is missing, or the port is in use.
            LogUnavailableError: the broker ended or does not answer; the message holds the end of its log.
        """
        with locked(self._lock):
            if (status := self.status()).running:
                raise ConfigError(
                    f"a broker already runs in this folder, at {status.bootstrap}",
                    hint=f"use {status.uri()}, or stop it: stream-ckpt broker stop --dir {quote(str(self._dir))}",
                    path=self._dir,
                    pid=status.pid,
                )
            java, first = find_java(), not self._ports()
            # An interrupted first start may have written only one of the two: complete them.
            self._configure(port, java if secure or (self._security.exists() and not self._ports()) else None)
            kafka = [java, *_JVM, f"-Dlog4j2.configurationFile={self._dir / 'log4j2.properties'}"]
            kafka += ["-cp", f"{KAFKA.fetched()}/*"]
            self._format(kafka)
            for races_left in range(_PORT_RACES if first else 0, -1, -1):
                began = self._log.stat().st_size if self._log.exists() else 0
                process = self._spawn([*kafka, "kafka.Kafka", str(self._properties)], die_with)
                try:
                    self._await_ready(process, timeout_s)
                    break
                except LogUnavailableError:
                    # Another process may take a free port between our check and the broker's bind.
                    if not races_left or _PORT_TAKEN not in self._log.read_bytes()[began:]:
                        raise
                    self._choose_ports_anew(port)
            return self.status()

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> bool:
        """Stop the broker: SIGTERM, a bounded wait, SIGKILL. Returns whether there was a process to stop.

        If another process has taken the pid in the meantime, it is left alone.
        """
        if not self._dir.is_dir():
            return False
        with locked(self._lock):
            process = self._process()
            if process is None:
                return False
            stopped = self._end(process, timeout_s)
            self._state.unlink(missing_ok=True)
            return stopped

    def _end(self, process: ProcessId, timeout_s: float) -> bool:
        if not process.send(signal.SIGTERM):
            process.wait(0)
            return False
        if not process.wait(timeout_s):
            process.send(signal.SIGKILL)
            if not process.wait(10):
                raise LogUnavailableError("the broker is still running after SIGKILL", pid=process.pid)
        return True

    def _process(self) -> ProcessId | None:
        """Return the process of the last start, dead or alive."""
        try:
            state = json.loads(self._state.read_text())
            return ProcessId(int(state["pid"]), str(state["birth"]))
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"the broker's state file cannot be read: {error!r}",
                hint="stop the broker by its pid if it is running, then delete this file",
                path=self._state,
            ) from None

    def _ports(self) -> dict[str, int]:
        """Return the port of each listener for clients, the preferred one first; empty before the first start."""
        try:
            match = re.search(r"^listeners=(.*)$", self._properties.read_text(), re.MULTILINE)
        except FileNotFoundError:
            return {}
        found = re.findall(r"(\w+)://[^:]+:([0-9]+)", match[1]) if match else []
        return {protocol: int(port) for protocol, port in found if protocol != "CONTROLLER"}

    def _configure(self, port: int | None, secured_by: str | None) -> None:
        """Write the settings once, so that a later start finds the same data and address.

        Args:
            port: Port of the first listener.
            secured_by: Path of a Java whose keytool makes the certificates; None for a broker without security.
        """
        known = self._ports()
        if known:
            self._check_same(known, port, secure=secured_by is not None)
            return
        protocols = PROTOCOLS if secured_by else ("PLAINTEXT",)
        with ExitStack() as held:
            # Reserve all ports at once, so that the second listener is not given the port of the first.
            ports = [_reserve(held, 0 if number else port or 0) for number in range(len(protocols))]
            controller = _reserve(held, 0)
        text = _PROPERTIES.format(
            host=HOST,
            listeners=",".join(f"{protocol}://{HOST}:{port}" for protocol, port in zip(protocols, ports, strict=True)),
            own_listener=protocols[-1],
            controller_port=controller,
            data=self._dir / "data",
        )
        (self._dir / "log4j2.properties").write_text(LOG4J)
        _write(self._properties, text + (self._security.make(secured_by) if secured_by else ""))

    def _choose_ports_anew(self, kept: int | None) -> None:
        """(first start) Choose other ports than before, except for the one that the caller named."""
        text = self._properties.read_text()
        ports = re.compile(rf"(?<={re.escape(HOST)}:)[0-9]+")
        old = set(map(int, ports.findall(text))) - {kept}
        with ExitStack() as held:
            new = {port: _reserve(held, 0) for port in old}
        _write(self._properties, ports.sub(lambda found: str(new.get(int(found[0]), found[0])), text))

    def _check_same(self, known: dict[str, int], port: int | None, *, secure: bool) -> None:
        first = next(iter(known.values()))
        if secure and not self._security.exists():
            raise ConfigError(
                "the broker in this folder was created without security, which cannot be added",
                hint="name another folder with --dir",
            )
        if port not in (None, first):
            raise ConfigError(
                f"the broker in this folder uses port {first}, not {port}",
                hint=f"omit --port, or stop it and set the port in {self._properties}",
                path=self._dir,
            )
        for taken in known.values():
            with ExitStack() as held:
                _reserve(held, taken)

    def _format(self, kafka: list[str]) -> None:
        if (self._dir / "data" / "meta.properties").exists():
            return
        cluster = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        # An id that begins with a dash would be read as an option.
        arguments = ["format", f"--cluster-id={cluster}", "--config", str(self._properties)]
        if self._security.exists():
            arguments += self._security.format_arguments()
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
        _write(self._state, json.dumps({"pid": process.pid, "birth": process.birth, "ports": self._ports()}) + "\n")
        return process

    def _await_ready(self, process: ProcessId, timeout_s: float) -> None:
        for _ in wait_until(time.monotonic() + timeout_s):
            if self._answers():
                return
            if process.wait(0):
                raise self._failed("the broker ended while starting")
        self._end(process, 5)
        raise self._failed(f"the broker did not answer within {timeout_s:.0f} s and was stopped")

    def _answers(self) -> bool:
        """Return whether the broker answers a Metadata request and lists itself as alive.

        The listener accepts connections long before requests are served, so an open port proves little.
        """
        ports = self._ports()
        try:
            with Connection((HOST, ports.get("PLAINTEXT") or ports["SASL_PLAINTEXT"])) as connection:
                if self._security.exists():
                    connection.log_in(ADMIN, self._security.options(ADMIN)["sasl.password"])
                alive = connection.brokers() > 0
                if alive and self._security.is_new():
                    # Only once: a right that an operator revokes later stays revoked.
                    connection.allow(_RIGHTS)
                    self._security.forget_arguments()
                return alive
        except OSError:
            return False

    def _failed(self, what: str) -> LogUnavailableError:
        lines = self._log.read_text(errors="replace").splitlines() if self._log.exists() else []
        tail = "\n".join(lines[-12:])
        return LogUnavailableError(f"{what}; the end of its log:\n{tail}", hint=f"read {self._log}", path=self._dir)


def _tether(pid: int) -> list[str]:
    master = ProcessId.of(pid)
    if master is None:
        raise ConfigError(
            "the broker is to stop when this process ends, but it has already ended",
            hint="start it from a process that keeps running, or omit die_with (--with-parent)",
            pid=pid,
        )
    return [sys.executable, "-I", str(_TETHER), str(pid), master.birth]


def _reserve(held: ExitStack, port: int) -> int:
    """Bind a loopback port until ``held`` is closed. 0: one that stays free while the broker is stopped, as no outgoing
    connection is given it."""
    probe = held.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    deadline = time.monotonic() + PORT_FREE_TIMEOUT_S
    while True:
        try:
            probe.bind((HOST, port or free_port()))
            break
        except OSError as error:
            # A broker that was just killed holds its sockets until the kernel has cleaned it up.
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                raise ConfigError(
                    f"port {port} on {HOST} cannot be used: {error.strerror}", hint="name another port with --port"
                ) from None
            time.sleep(0.05)
    taken: int = probe.getsockname()[1]
    return taken


def _write(path: Path, text: str) -> None:
    """Replace a file atomically: a reader sees the old text or the new one."""
    scratch = path.with_name(path.name + ".tmp")
    write_secret(scratch, text)
    os.replace(scratch, path)
