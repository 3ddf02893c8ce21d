"""Servers that tests start on loopback, tied to a process: they end with it at the latest."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

from torchrec_stream_ckpt.extras.broker import tether
from torchrec_stream_ckpt.extras.broker.process import birth_of


class Server:
    """A program that is started, asked until it answers, and killed.

    Args:
        log: File of what it prints.
    """

    endpoint: str

    def __init__(self, log: Path) -> None:
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def launch(
        self,
        command: Sequence[str | Path],
        timeout_s: float,
        *,
        owner: int | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """Start it, and wait until it answers.

        Args:
            owner: The process that it ends with, by default this one.
        """
        owner = owner or os.getpid()
        tied = [sys.executable, "-I", tether.__file__, str(owner), str(birth_of(owner))]
        with open(self._log, "ab") as output:
            self._process = subprocess.Popen([*tied, *command], stdout=output, stderr=output, env=env)
        deadline = time.monotonic() + timeout_s
        while not self.answers():
            assert self._process.poll() is None, f"it ended: {self.said()}"
            assert time.monotonic() < deadline, f"it does not answer: {self.said()}"
            time.sleep(0.05)

    def answers(self) -> bool:
        """Return whether it answers a request, by HTTP unless a kind of server asks in another way."""
        try:
            urllib.request.urlopen(self.endpoint, timeout=5).close()
        except urllib.error.HTTPError as refused:
            refused.close()
            return True  # it wants credentials
        except OSError:
            return False
        return True

    def said(self) -> str:
        return self._log.read_text()[-2000:]

    def kill(self) -> None:
        """End it at once."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(20)
            self._process = None
