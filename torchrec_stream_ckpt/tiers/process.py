"""The relay as a process of its own, beside the trainer's rank 0: started, and again if it dies; let go at the end."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import IO, Any

from torchrec_stream_ckpt.config import StreamConfig
from torchrec_stream_ckpt.options import read_options

log = logging.getLogger(__name__)

FENCED = 3
"""Exit status of a relay: another trainer owns the job."""
LINGER_S = 120.0
"""How long a relay goes on behind its trainer's end."""
_POLL_S = 0.5
_RESTART_S = (0.5, 30.0)
_STABLE_S = 60.0
_left: list[subprocess.Popen[bytes]] = []
"""Relays that still copy when their trainer has let go: no finalizer shall complain about them."""


class RelayProcess:
    """Keeps one relay running until :meth:`close`.

    Args:
        config: The job's, with both tiers.
    """

    def __init__(self, config: StreamConfig) -> None:
        self._order = json.dumps(
            {"config": _plain(config), "parent": os.getpid(), "linger_s": LINGER_S, "poll_s": _POLL_S},
            default=str,
        ).encode()
        self._closing = threading.Event()
        self._starting = threading.Lock()
        self._process = self._spawn()
        self._thread = threading.Thread(target=self._watch, name="stream-ckpt-relay", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        """Of the relay that runs now, or ran last."""
        return self._process.pid

    def close(self, timeout_s: float) -> bool:
        """Let it copy what is there, and end; whether it has, in ``timeout_s``. Else it goes on by itself, bounded."""
        with self._starting:
            self._closing.set()
            if self._process.poll() not in (None, 0, FENCED):
                self._process = self._spawn()  # it died, and what it had not copied yet would stay here
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            code = self._process.wait(max(0.0, timeout_s))
        except subprocess.TimeoutExpired:
            _left.append(self._process)
            return False
        self._thread.join(1.0)
        return code == 0

    def _spawn(self) -> subprocess.Popen[bytes]:
        # Fail points that a test arms in the trainer are not meant for its relay.
        environment = {key: value for key, value in os.environ.items() if not key.startswith("STREAM_CKPT_FAILPOINTS")}
        process = subprocess.Popen(
            [sys.executable, "-m", "torchrec_stream_ckpt.tiers.child"],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,  # a signal for the trainer's group ends the trainer alone
        )
        _say(process.stdin, self._order)
        return process

    def _watch(self) -> None:
        pause_s = _RESTART_S[0]
        while True:
            begin = time.monotonic()
            code = self._process.wait()
            if self._closing.is_set() or code == FENCED:
                return
            pause_s = _RESTART_S[0] if time.monotonic() - begin > _STABLE_S else pause_s
            log.warning("the relay to the outer tier has ended (status %d), it is started again", code)
            if self._closing.wait(pause_s):
                return
            pause_s = min(2 * pause_s, _RESTART_S[1])
            with self._starting:
                if self._closing.is_set():
                    return
                assert self._process.stdin is not None
                self._process.stdin.close()
                self._process = self._spawn()


def _say(pipe: IO[bytes] | None, order: bytes) -> None:
    assert pipe is not None
    try:
        pipe.write(order + b"\n")
    except BrokenPipeError:
        return  # it has ended already: whoever watches it sees that


def _plain(config: StreamConfig) -> dict[str, Any]:
    """The configuration as JSON; options are read here, so that relative paths mean the same."""
    fields: dict[str, Any] = asdict(config)
    fields["uri"] = list(config.uris)
    fields["commit_key_file"] = os.path.abspath(config.commit_key_file) if config.commit_key_file else None
    for name, what in (("kafka_options", "client"), ("store_options", "store")):
        options = getattr(config, name)
        if not isinstance(options, Mapping) and options is not None:
            fields[name] = dict(read_options(options, what))
    return fields
