"""A Redis server of our own, on loopback, from Debian's redis-tools: no service of the system is touched."""

from __future__ import annotations

from pathlib import Path

import redis

from tests.servers import Server
from torchrec_stream_ckpt.extras.broker.kraft import HOST
from torchrec_stream_ckpt.util.ports import free_port

PROGRAM = Path("/usr/bin/redis-check-rdb")
"""It is the server if it is called by the server's name."""
START_TIMEOUT_S = 60.0


class RedisServer(Server):
    """One server, ended with this process at the latest. It keeps port and data over :meth:`start`.

    Args:
        directory: An empty folder.
        settings: Of redis.conf.
    """

    def __init__(self, directory: Path, **settings: str) -> None:
        super().__init__(directory / "log")
        self._directory = directory
        directory.mkdir()
        self.port = free_port()
        # By default the port of a cluster's bus is 10,000 above: where outgoing connections may take it.
        self._settings = {"save": "", "appendonly": "no", "cluster_port": str(free_port())} | settings
        (directory / "redis-server").symlink_to(PROGRAM)

    @property
    def url(self) -> str:
        return f"redis://{HOST}:{self.port}/0"

    def client(self) -> redis.Redis:
        return redis.Redis(HOST, self.port)

    def start(self) -> None:
        settings = {"bind": HOST, "port": str(self.port), "dir": str(self._directory)} | self._settings
        arguments = [word for key, value in settings.items() for word in (f"--{key.replace('_', '-')}", value)]
        self.launch([self._directory / "redis-server", *arguments], START_TIMEOUT_S)

    def answers(self) -> bool:
        try:
            with self.client() as client:
                client.ping()
        except redis.ConnectionError:
            return False
        except redis.RedisError:
            pass  # it answers, and refuses or loads
        return True
