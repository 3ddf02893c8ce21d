"""Processes of a feed, and Redis itself, end by SIGKILL at any point: at least once, nothing skipped, marker last."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis

from tests import forks
from tests.mapped_job import Dump, MappedJob
from tests.parts import Feed
from tests.sinks.redis_server import RedisServer
from torchrec_stream_ckpt import follow
from torchrec_stream_ckpt.extras.follower import redis_sink
from torchrec_stream_ckpt.extras.follower.redis_sink import RedisSink

PREFIX = "job:"
STATE = f"{PREFIX}_state"
WAIT_S = 200.0


class _DyingSink(RedisSink):
    """A sink whose process dies by SIGKILL before or after transaction number ``at``; -1: never."""

    at, after, pause_s = -1, False, 0.0

    def _run(self, *arguments: Any, **more: Any) -> None:
        time.sleep(self.pause_s)
        if self.at == 0 and not self.after:
            os.kill(os.getpid(), signal.SIGKILL)
        super()._run(*arguments, **more)
        if self.at == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self.at -= 1


def _feed(root: Path, url: str, pause_s: float, timeout_s: float | None, at: int, after: bool) -> None:
    """(process) Feed Redis in small transactions, with a sink that dies."""
    setattr(redis_sink, "_BATCH_ROWS", 5)  # noqa: B010
    sink = _DyingSink(url, PREFIX)
    sink.at, sink.after, sink.pause_s = at, after, pause_s
    with follow(f"file://{root}", poll_s=0.02, scratch=root.parent) as follower:
        for _ in Feed(follower, sink).updates(timeout_s):
            pass


@contextlib.contextmanager
def _feeding(job: MappedJob, server: RedisServer) -> Iterator[Any]:
    """A feed that follows until it is killed. It has begun to write."""
    job.churn()
    job.commit()
    process = forks.context.Process(target=_feed, args=(job.root, server.url, 0.002, None, -1, False))
    with server.client() as client:
        before, deadline = client.get(f"{PREFIX}_feed"), time.monotonic() + WAIT_S
        process.start()
        while client.get(f"{PREFIX}_feed") == before:
            assert process.exitcode is None, "the feed has ended"
            assert time.monotonic() < deadline
            time.sleep(0.005)
    try:
        yield process
    finally:
        process.kill()
        process.join()


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., RedisServer]]:
    servers = []

    def start(**settings: str) -> RedisServer:
        servers.append(RedisServer(tmp_path / f"redis{len(servers)}", **settings))
        servers[-1].start()
        return servers[-1]

    yield start
    for server in servers:
        server.kill()


def _begun(folder: Path) -> MappedJob:
    job = MappedJob(folder, world=2, seed=4)
    job.begin()
    job.churn(40)
    job.commit()
    return job


def _held(server: RedisServer) -> tuple[str, Dump]:
    """The position, and all rows by table and key."""
    found: Dump = {}
    with server.client() as client:
        for key in client.scan_iter():
            table, _, number = key.decode().removeprefix(PREFIX).rpartition(":")
            if table:
                found.setdefault(table, {})[int(number)] = client.get(key)  # type: ignore[assignment]
        return (client.hget(STATE, "position") or b"").decode(), found  # type: ignore[union-attr]


def _check(job: MappedJob, server: RedisServer) -> str:
    """Compare all rows with a full dump of the marker that Redis names, if it names one as complete. No key has a
    value that it never had in the job. Returns the position."""
    position, held = _held(server)
    for name, rows in held.items():
        for key, value in rows.items():
            assert any(truth[name].get(key) == value for truth in job.truths.values()), (name, key)
    if position and ">" not in position:
        (truth,) = [truth for marker, truth in job.truths.items() if str(marker) == position.partition("@")[0]]
        assert held == {name: rows for name, rows in truth.items() if rows}, position
    return position


def _await_newest(job: MappedJob, server: RedisServer) -> None:
    """Wait until Redis names the newest marker, and compare all rows with it."""
    deadline, newest = time.monotonic() + WAIT_S, list(job.truths)[-1]
    with server.client() as client:
        while True:
            position = (client.hget(STATE, "position") or b"").decode()  # type: ignore[union-attr]
            if position.startswith(f"{newest}@") and ">" not in position:
                break
            assert time.monotonic() < deadline, position
            time.sleep(0.01)
    assert _check(job, server).startswith(f"{newest}@")


def test_a_feed_that_is_killed_at_any_transaction_goes_on(tmp_path: Path, serve: Callable[..., RedisServer]) -> None:
    """In a load and in markers, at their first and last transactions and in between, several times in a row."""
    server, job, random = serve(), _begun(tmp_path / "log"), np.random.default_rng(6)
    ends = []
    for number in range(11):
        at, after = int(random.integers(0, 40 if number < 3 else 12)), bool(random.integers(2))
        ends.append(forks.status_of(_feed, job.root, server.url, 0.0, 0.0, at, after))
        position = _check(job, server)
        if ends[-1] == 0:
            assert position.startswith(f"{list(job.truths)[-1]}@")
        if number % 4 == 3:
            parent = [each for each in job.truths if each.generation == job.generation]
            job.begin(parent[0] if number == 7 else parent[-1])
        if number % 3:
            job.churn()
            job.touch(1)
            job.commit()
    assert ends.count(-signal.SIGKILL) >= 4
    assert set(ends) <= {0, -signal.SIGKILL}
    assert forks.status_of(_feed, job.root, server.url, 0.0, 0.0, -1, False) == 0
    position = _check(job, server)
    with server.client() as client:  # as if it had died between the last row and the position: all of it again
        base = position.partition(">")[0]
        client.hset(STATE, "position", f"{base}>{list(job.truths)[-1]}")
    job.churn()
    job.commit()
    assert forks.status_of(_feed, job.root, server.url, 0.0, 0.0, -1, False) == 0
    assert _check(job, server).startswith(f"{list(job.truths)[-1]}@")


@pytest.mark.parametrize("disk", ["every write", "old copies", "nothing"])
def test_redis_and_its_feed_are_killed_at_random_moments(
    tmp_path: Path, serve: Callable[..., RedisServer], disk: str
) -> None:
    """The job goes on meanwhile. Redis comes back with everything, with what it saved some time before, or empty."""
    settings = {"appendonly": "yes", "appendfsync": "always"} if disk == "every write" else {}
    server, job, random = serve(**settings), _begun(tmp_path / "log"), np.random.default_rng(len(disk))
    for number in range(2):
        with _feeding(job, server) as process:
            for _ in range(3):
                for _ in range(int(random.integers(1, 3))):
                    job.churn()
                    job.touch(1)
                    job.commit()
                time.sleep(random.random() * 0.15)
                if disk == "old copies" and random.random() < 0.7:
                    with server.client() as client, contextlib.suppress(redis.ResponseError):
                        client.save()
                    time.sleep(random.random() * 0.05)
                server.kill()
                server.start()
            job.churn()
            job.commit()  # a feed looks at Redis at the next marker
            if number % 2:
                _await_newest(job, server)
            assert process.exitcode is None, "the feed has ended"
        _check(job, server)
    with _feeding(job, server):
        _await_newest(job, server)
