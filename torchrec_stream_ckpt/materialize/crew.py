"""The other workers of this job: by their signs of life in the store, each worker knows which partitions are its own.

The output of a materializer is a function of the log, so two that fold one partition waste work and spoil nothing. So
there is no lock, and no clock that two machines would have to share: a worker is alive while its sign of life changes,
by the watch of the worker that looks.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time

from torchrec_stream_ckpt.errors import StoreUnavailableError
from torchrec_stream_ckpt.layout import WORKERS_DIR, parse_worker_name, worker_name
from torchrec_stream_ckpt.store.api import Objects

_BEATS_PER_LEASE = 3

log = logging.getLogger(__name__)


class Crew:
    """One worker among those of a job; gives signs of life on a thread of its own.

    A worker that starts takes all partitions, until it has seen another one's sign change: what a dead one has left
    behind holds no other one up.

    Args:
        objects: The store.
        job: The job.
        lease_s: A worker whose sign has not changed for so long counts as dead.
    """

    def __init__(self, objects: Objects, job: bytes, lease_s: float) -> None:
        self.name = secrets.token_hex(8)
        self._objects = objects
        self._job = job
        self._lease_s = lease_s
        self._beat = 0
        self._seen: dict[str, tuple[int, float, bool]] = {}
        """By name: the newest beat, when it was first seen, whether it has been seen to change."""
        self._alive: tuple[str, ...] = (self.name,)
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="crew", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def mine(self, partition: int) -> bool:
        """Whether a data partition is this worker's, as far as it knows. Safe on any thread."""
        alive = self._alive
        return alive[partition % len(alive)] == self.name

    @property
    def size(self) -> int:
        """Workers that are alive."""
        return len(self._alive)

    def beat(self) -> None:
        """Give a sign of life and look for those of the others.

        Raises:
            StoreUnavailableError: the store does not answer.
        """
        self._objects.put(worker_name(self._job, self.name, self._beat + 1), [b""])
        if self._beat:
            self._objects.delete(worker_name(self._job, self.name, self._beat))
        self._beat += 1
        now, found = time.monotonic(), self._list()
        for name, beat in found.items():
            before = self._seen.get(name)
            if before is None:
                self._seen[name] = (beat, now, False)
            elif beat != before[0]:
                self._seen[name] = (beat, now, True)
        for name, (beat, since, _) in list(self._seen.items()):
            if name not in found or now - since > self._lease_s:
                del self._seen[name]
                self._objects.delete(worker_name(self._job, name, beat))
        self._alive = tuple(sorted({self.name, *(name for name, seen in self._seen.items() if seen[2])}))

    def close(self) -> None:
        """Sign off; the others take over at once."""
        self._done.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._beat:
            self._objects.delete(worker_name(self._job, self.name, self._beat))

    def _list(self) -> dict[str, int]:
        """The newest beat of each other worker."""
        found: dict[str, int] = {}
        for entry in self._objects.list(f"{WORKERS_DIR}/{self._job.hex()}/"):
            parsed = parse_worker_name(entry.name)
            if parsed is not None and parsed[1] != self.name:
                found[parsed[1]] = max(parsed[2], found.get(parsed[1], 0))
        return found

    def _run(self) -> None:
        while not self._done.is_set():
            try:
                self.beat()
            except StoreUnavailableError as error:  # the work itself reports it, because it needs the store, too
                log.debug("a sign of life could not be written: %s", error.headline)
            self._done.wait(self._lease_s / _BEATS_PER_LEASE)
