"""A Kafka cluster over several hosts: a controller and brokers, three copies of everything, two of them in sync."""

from __future__ import annotations

import base64
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.faults.hosts import Host
from torchrec_stream_ckpt.extras.broker.kraft import LOG4J
from torchrec_stream_ckpt.extras.broker.process import ProcessId, spawn, wait_until
from torchrec_stream_ckpt.extras.broker.runtime import KAFKA, find_java
from torchrec_stream_ckpt.extras.broker.wire import Connection

CONTROLLER_ID, CONTROLLER_PORT, PORT = 100, 9093, 9092
START_S = 90.0
_TETHER = Path(__file__).parents[2] / "torchrec_stream_ckpt" / "extras" / "broker" / "tether.py"
_JVM = ("-Xms64m", "-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto")
_QUIET = "-Dlog4j2.configurationFile={}"
_ALL = """\
controller.quorum.voters={controller_id}@{controller}:{controller_port}
controller.listener.names=CONTROLLER
log.dirs={data}
default.replication.factor=3
min.insync.replicas=2
"""
# Brokers that vanish are noticed within seconds, so that a test sees it; so do the others see that they are back.
_BROKER = """\
process.roles=broker
node.id={node}
listeners=PLAINTEXT://{address}:{port}
inter.broker.listener.name=PLAINTEXT
auto.create.topics.enable=false
broker.session.timeout.ms=3000
broker.heartbeat.interval.ms=500
replica.lag.time.max.ms=4000
replica.socket.timeout.ms=2000
controller.socket.timeout.ms=2000
"""
_CONTROLLER = """\
process.roles=controller
node.id={node}
listeners=CONTROLLER://{address}:{port}
broker.session.timeout.ms=3000
metadata.max.idle.interval.ms=5000
"""


def _new_id() -> str:
    """An id of Kafka's. None that begins with a dash: it would be taken for an option."""
    return "A" + base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")[1:]


class Node:
    """One Kafka process, on a host of its own.

    Args:
        host: Where it runs.
        number: Its node id.
        controller: Address of the controller.
        directory: Its folder.
        cluster: Id of the cluster.
    """

    def __init__(self, host: Host, number: int, controller: str, directory: Path, cluster: str) -> None:
        self.host, self.number = host, number
        self.data = directory / "data"
        self._dir, self._cluster = directory, cluster
        self._process: ProcessId | None = None
        directory.mkdir(parents=True)
        port = CONTROLLER_PORT if number == CONTROLLER_ID else PORT
        own = _CONTROLLER if number == CONTROLLER_ID else _BROKER
        every = _ALL.format(
            controller_id=CONTROLLER_ID, controller=controller, controller_port=CONTROLLER_PORT, data=self.data
        )
        self._properties = directory / "server.properties"
        self._properties.write_text(every + own.format(node=number, address=host.address, port=port))
        (directory / "log4j2.properties").write_text(LOG4J)

    def begin(self) -> None:
        """Start it, on an empty disk too; does not wait for it."""
        java = [find_java(), *_JVM, _QUIET.format(self._dir / "log4j2.properties"), "-cp", f"{KAFKA.fetched()}/*"]
        config = str(self._properties)
        self._format([*java, "kafka.tools.StorageTool", "format"], config)
        command = self.host.command(*java, "kafka.Kafka", config)
        command[0] = shutil.which(command[0]) or command[0]
        me = ProcessId.of(os.getpid())
        assert me is not None
        tether = [sys.executable, "-I", str(_TETHER), str(me.pid), me.birth]
        self._process = spawn([*tether, *command], self._dir / "broker.log")

    def _format(self, tool: list[str], config: str) -> None:
        if (self.data / "meta.properties").exists():
            return
        if self.number == CONTROLLER_ID:
            tool += [f"--cluster-id={self._cluster}", "--config", config]
            subprocess.run(tool, capture_output=True, timeout=500, check=True)
            return
        # All that a broker's empty disk is given; a JVM takes seconds to write it.
        self.data.mkdir()
        lines = ("version=1", f"cluster.id={self._cluster}", f"node.id={self.number}", f"directory.id={_new_id()}")
        (self.data / "meta.properties").write_text("\n".join(lines) + "\n")

    def await_ready(self, living: int) -> None:
        """(brokers; on a host that reaches it) Wait until it knows of ``living`` brokers."""
        for _ in wait_until(time.monotonic() + START_S, 0.1):
            if self.living() >= living:
                return
            assert self.alive(), f"{self.host.name} has ended:\n{self.tail()}"
        raise AssertionError(f"{self.host.name} does not answer:\n{self.tail()}")

    def living(self) -> int:
        """How many brokers it counts among the living; 0 when it does not answer."""
        try:
            with Connection((self.host.address, PORT)) as connection:
                return connection.brokers()
        except OSError:
            return 0

    def alive(self) -> bool:
        return self._process is not None and self._process.alive()

    def kill(self, signum: signal.Signals = signal.SIGKILL) -> bool:
        """End it; whether it ran, and is gone."""
        ran = self._process is not None and self._process.send(signum)
        return ran and self._process is not None and self._process.wait(60)

    def lose_disk(self) -> None:
        """All that it has stored is gone."""
        shutil.rmtree(self.data)

    def tail(self) -> str:
        return "\n".join((self._dir / "broker.log").read_text(errors="replace").splitlines()[-20:])


class Cluster:
    """A controller and brokers. Made, and asked, on a host that reaches all of them.

    Args:
        controller: Its host.
        hosts: One for each broker.
        directory: For their folders.
    """

    def __init__(self, controller: Host, hosts: Sequence[Host], directory: Path) -> None:
        cluster = _new_id()
        address = controller.address
        self.controller = Node(controller, CONTROLLER_ID, address, directory / "controller", cluster)
        self.brokers = {
            number: Node(host, number, address, directory / host.name, cluster) for number, host in enumerate(hosts, 1)
        }
        self.bootstrap = ",".join(f"{host.address}:{PORT}" for host in hosts)

    def start(self) -> None:
        self.controller.begin()
        self.begin(self.brokers)

    def begin(self, numbers: Iterable[int]) -> None:
        """Start brokers, and wait until they answer."""
        chosen = [self.brokers[number] for number in numbers]
        for node in chosen:
            node.begin()
        for node in chosen:
            node.await_ready(sum(each.alive() for each in self.brokers.values()))

    def close(self) -> None:
        for node in (*self.brokers.values(), self.controller):
            node.kill()
