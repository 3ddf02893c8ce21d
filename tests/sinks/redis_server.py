"""A Redis server of our own, on loopback, from Debian's redis-tools: no service of the system is touched."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import redis

from torchrec_stream_ckpt.extras.broker import tether
from torchrec_stream_ckpt.extras.broker.kraft import HOST
from torchrec_stream_ckpt.extras.broker.process import birth_of
from torchrec_stream_ckpt.script import free_port

PROGRAM = Path("/usr/bin/redis-check-rdb")
"""It is the server if it is called by the server's name."""
START_TIMEOUT_S = 60.0


class RedisServer:
    """One server, ended with this process at the latest. It keeps port and data over :meth:`start`.

    Args:
        directory: An empty folder.
        settings: Of redis.conf.
    """

    def __init__(self, directory: Path, **settings: str) -> None:
        self._directory = directory
        directory.mkdir()
        self.port = free_port()
        self._settings = {"save": "", "appendonly": "no"} | settings
        (directory / "redis-server").symlink_to(PROGRAM)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://{HOST}:{self.port}/0"

    def client(self) -> redis.Redis:
        return redis.Redis(HOST, self.port)

    def start(self) -> None:
        settings = {"bind": HOST, "port": str(self.port), "dir": str(self._directory)} | self._settings
        arguments = [word for key, value in settings.items() for word in (f"--{key.replace('_', '-')}", value)]
        tied = [sys.executable, "-I", tether.__file__, str(os.getpid()), str(birth_of(os.getpid()))]
        with open(self._directory / "log", "ab") as output:
            self._process = subprocess.Popen(
                [*tied, str(self._directory / "redis-server"), *arguments], stdout=output, stderr=output
            )
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._answers():
            assert self._process.poll() is None, (self._directory / "log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def kill(self) -> None:
        """End it at once."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(20)
            self._process = None

    def _answers(self) -> bool:
        try:
            with self.client() as client:
                client.ping()
        except redis.ConnectionError:
            return False
        except redis.RedisError:
            pass  # it answers, and refuses or loads
        return True
