"""Run the relay as a separate process next to the trainer's rank 0.

The relay is restarted if it dies, and released at the end. Rank 0 starts
``python -m torchrec_stream_ckpt.extras.tiers.process`` and sends its settings as one line of JSON on stdin.

The relay watches its standard input and its parent. If either is gone, the trainer has ended. The relay then still
copies what the trainer has captured, for a bounded time. Because the settings arrive on stdin, secrets among the
options appear on no command line. Imports no torch.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import IO, Any

from torchrec_stream_ckpt.errors import FencedError, StreamCkptError
from torchrec_stream_ckpt.extras.tiers.relay_service import RelayService
from torchrec_stream_ckpt.inner import Tiers, open_job
from torchrec_stream_ckpt.util.config import StreamConfig
from torchrec_stream_ckpt.util.options import read_options
from torchrec_stream_ckpt.util.service import Event

log = logging.getLogger("torchrec_stream_ckpt.relay")

FENCED = 3
"""Exit status of a relay if another trainer owns the job."""
LINGER_S = 120.0
"""Longest time, in seconds, that a relay continues after its trainer has ended."""
_POLL_S = 0.5
RESTART_S = (0.5, 30.0)
_STABLE_S = 60.0
_left: list[subprocess.Popen[bytes]] = []
"""Relays that still copy when their trainer has released them. They are kept so that no finalizer complains about
them."""


class RelayProcess:
    """Keeps one relay running until :meth:`close`.

    Args:
        config: The job's configuration, with both tiers.
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
        """Process id of the relay that runs now, or ran last."""
        return self._process.pid

    def close(self, timeout_s: float) -> bool:
        """Let the relay copy what exists, and end. Returns whether it ended within ``timeout_s``. If not, it continues
        by itself for a bounded time."""
        with self._starting:
            self._closing.set()
            if self._process.poll() not in (None, 0, FENCED):
                self._process = self._spawn()  # it died, and data that it had not copied would stay here
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
            [sys.executable, "-m", "torchrec_stream_ckpt.extras.tiers.process"],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,  # a signal for the trainer's group ends only the trainer
        )
        _say(process.stdin, self._order)
        return process

    def _watch(self) -> None:
        pause_s = RESTART_S[0]
        while True:
            begin = time.monotonic()
            code = self._process.wait()
            if self._closing.is_set() or code == FENCED:
                return
            pause_s = RESTART_S[0] if time.monotonic() - begin > _STABLE_S else pause_s
            log.warning("the relay to the outer tier ended with status %d, and is started again", code)
            if self._closing.wait(pause_s):
                return
            pause_s = min(2 * pause_s, RESTART_S[1])
            with self._starting:
                if self._closing.is_set():
                    return
                assert self._process.stdin is not None
                self._process.stdin.close()
                self._process = self._spawn()


def _say(pipe: IO[bytes] | None, order: bytes) -> None:
    assert pipe is not None
    with contextlib.suppress(BrokenPipeError):  # it has already ended: the watcher notices that
        pipe.write(order + b"\n")


def _plain(config: StreamConfig) -> dict[str, Any]:
    """Return the configuration as JSON. Options are read here, so that relative paths keep their meaning."""
    fields: dict[str, Any] = asdict(config)
    fields["uri"] = list(config.uris)
    fields["commit_key_file"] = os.path.abspath(config.commit_key_file) if config.commit_key_file else None
    for name, what in (("kafka_options", "client"), ("store_options", "store")):
        options = getattr(config, name)
        if not isinstance(options, Mapping) and options is not None:
            fields[name] = dict(read_options(options, what))
    return fields


def main() -> int:
    """Run until the trainer is gone and everything is copied. Returns 0 then, ``FENCED`` if fenced, or 1 on an
    error."""
    said: dict[str, Any] = json.loads(sys.stdin.buffer.readline())
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    try:
        tiers = open_job(StreamConfig(**said["config"]))
        assert isinstance(tiers, Tiers)
        service = RelayService(tiers, _report, _gone(said["parent"]), said["linger_s"])
        with contextlib.closing(tiers.inner), contextlib.closing(tiers.outer):
            done = service.run(poll_s=said["poll_s"])
    except FencedError as error:
        log.warning("%s", error.headline)
        return FENCED
    except StreamCkptError as error:
        log.error("%s", error)
        return 1
    if not done:
        log.warning("the trainer has ended, but the outer tier lacks markers that it committed")
    return 0 if done else 1


def _gone(parent: int) -> Callable[[], bool]:
    """Return a function that returns whether the trainer has ended or has released the relay."""

    def gone() -> bool:
        if os.getppid() != parent:
            return True
        ready, _, _ = select.select([sys.stdin.fileno()], [], [], 0)
        return bool(ready) and not os.read(sys.stdin.fileno(), 1)

    return gone


def _report(event: Event) -> None:
    fields = event.fields
    if event.event == "trouble":
        log.warning("the outer tier receives no markers, training and the inner tier continue: %s", fields["message"])
    elif event.event == "recovered":
        log.warning("the outer tier receives markers again")
    elif event.event == "passed":
        log.warning(
            "marker %s cannot be copied to the outer tier and is skipped: %s", fields["marker"], fields["message"]
        )
    elif event.event == "marker":
        log.debug("marker %s is on the outer tier", fields["marker"])


if __name__ == "__main__":
    sys.exit(main())
