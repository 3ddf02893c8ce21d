"""Rows in Redis are those of the marker that it names, whoever dies and whatever Redis loses."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.builders import table
from tests.command import call, run
from tests.evolved import EvolvingJob
from tests.followers import LOAD, MARKER, begun, truth, weights_in
from tests.mapped_job import ONE, MappedJob
from tests.parts import Changed, Feed
from tests.sinks.redis_server import RedisServer
from tests.synthetic import Job
from tests.unit.test_proof_checker import SCHEMA as PROVED
from torchrec_stream_ckpt import Follower, follow
from torchrec_stream_ckpt.errors import ConfigError, FencedError, ProofMismatchError, SinkUnavailableError
from torchrec_stream_ckpt.extras.follower import redis_sink
from torchrec_stream_ckpt.extras.follower.redis_sink import RedisSink
from torchrec_stream_ckpt.extras.follower.sink import Written
from torchrec_stream_ckpt.extras.follower.tables import FollowedTables
from torchrec_stream_ckpt.format.schema import Schema

PREFIX = "job:"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis") / "data")
    server.start()
    yield server
    server.kill()


@pytest.fixture
def server(shared: RedisServer) -> RedisServer:
    with shared.client() as client:
        client.flushall()
        client.config_set("maxmemory", 0)
        client.config_set("maxmemory-policy", "noeviction")
        client.config_resetstat()
    return shared


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return begun(tmp_path / "log")


def fed(
    root: Path, server: RedisServer, sink: RedisSink | None = None, timeout_s: float = 0.0, **more: Any
) -> list[Written]:
    """What one process of a feed writes."""
    with follow(f"file://{root}", poll_s=0.05, scratch=root.parent, **more) as follower:
        sink = sink or RedisSink(server.url, PREFIX)
        written = list(Feed(follower, sink).updates(timeout_s))
        sink.close()
    return written


def kinds(written: list[Written]) -> list[tuple[str, str]]:
    return [(each.update.kind, str(each.update.marker)) for each in written]


def held(server: RedisServer, prefix: str = PREFIX) -> dict[str, bytes]:
    """All rows, by table, as bytes: only keys that there should be."""
    with server.client() as client:
        state = client.hgetall(f"{prefix}_state")
        tables = json.loads(state[b"tables"])
        names = {f"{prefix}{name}:{row}" for name, (rows, *_) in tables.items() for row in range(rows)}
        expected = names | {f"{prefix}_state", f"{prefix}_feed"}
        assert {key.decode() for key in client.keys(f"{prefix}*")} == expected
        return {
            name: b"".join(client.mget([f"{prefix}{name}:{row}" for row in range(rows)]))  # type: ignore[arg-type]
            for name, (rows, *_) in tables.items()
        }


def marker_of(server: RedisServer) -> str:
    with server.client() as client:
        state = client.hgetall(f"{PREFIX}_state")
    assert state[b"position"].startswith(state[b"marker"] + b"@")
    return state[b"marker"].decode()


def is_true(job: Job, server: RedisServer, written: list[Written]) -> bool:
    newest = written[-1].update.marker
    return marker_of(server) == str(newest) and held(server) == weights_in(truth(job, newest))


def test_rows_are_those_of_each_marker_and_only_changes_are_written(tmp_path: Path, server: RedisServer) -> None:
    job = Job(tmp_path / "log")
    job.begin(splits=[1, 1, 2])
    job.commit()
    written = fed(job.root, server)
    assert kinds(written) == [(LOAD, "1:1")]
    assert is_true(job, server, written)
    for number in (2, 3):
        job.touch(1)
        job.commit()
        written = fed(job.root, server)  # another process each time
        assert kinds(written) == [(MARKER, f"1:{number}")]
        assert is_true(job, server, written)
    assert fed(job.root, server) == []


class Stopping(RedisSink):
    """A sink that does something before it writes batch number ``at``."""

    def __init__(self, server: RedisServer, at: int, action: Callable[[], None]) -> None:
        super().__init__(server.url, PREFIX)
        self._left, self._action = at, action

    def put(self, changed: Changed) -> None:
        if self._left == 0:
            self._action()
        self._left -= 1
        super().put(changed)


class KilledError(Exception):
    """In place of SIGKILL: nothing of the feed runs after it."""


def killed() -> None:
    raise KilledError


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_feed_that_was_killed_goes_on_where_it_was(job: Job, server: RedisServer, at: int) -> None:
    job.commit()
    with pytest.raises(KilledError):
        fed(job.root, server, Stopping(server, at, killed))
    with server.client() as client:
        assert client.hget(f"{PREFIX}_state", "position") is None
    fed(job.root, server)
    job.touch(3)
    job.commit()
    with pytest.raises(KilledError):
        fed(job.root, server, Stopping(server, at, killed))
    with server.client() as client:
        assert client.hget(f"{PREFIX}_state", "position").endswith(b">1:2")
    job.touch(3)
    job.commit()
    written = fed(job.root, server)
    assert kinds(written) == [(MARKER, "1:3")]
    assert is_true(job, server, written)


@pytest.mark.parametrize("within", [True, False])
def test_rows_of_an_abandoned_branch_do_not_stay(job: Job, server: RedisServer, within: bool) -> None:
    parent = job.commit()
    fed(job.root, server)
    job.touch(3)
    job.commit()
    if within:
        with pytest.raises(KilledError):
            fed(job.root, server, Stopping(server, 1, killed))
    else:
        fed(job.root, server)
    job.begin(parent.id)
    job.touch(1)
    job.commit()
    written = fed(job.root, server)
    assert kinds(written) == [(LOAD, "2:1")]
    assert "continued from an older marker" in written[0].update.why
    assert is_true(job, server, written)


def test_another_log_under_the_same_name_is_loaded(tmp_path: Path, job: Job, server: RedisServer) -> None:
    job.commit()
    fed(job.root, server)
    job.root.rename(tmp_path / "old")
    other = Job(job.root, seed=1)
    other.begin()
    other.commit()  # by the builders, jobs and nonces are alike: only another generation differs
    other.begin(None)
    other.commit()
    with server.client() as client:
        client.hset(f"{PREFIX}_state", "position", "1:1@" + "f" * 32)
    written = fed(other.root, server)
    assert [each.update.why for each in written] == ["marker 1:1, which the replica holds, is not in this log"]
    assert is_true(other, server, written)


def test_a_second_feed_stops_the_first(job: Job, server: RedisServer) -> None:
    job.commit()
    fed(job.root, server)
    job.touch(3)
    job.commit()
    with pytest.raises(FencedError, match="another program feeds this sink"):
        fed(job.root, server, Stopping(server, 1, lambda: fed(job.root, server)))  # type: ignore[arg-type]
    assert marker_of(server) == "1:2"
    assert held(server) == weights_in(truth(job, job_marker(job)))


def job_marker(job: Job) -> Any:
    with follow(f"file://{job.root}") as follower:
        return next(follower.updates(0)).marker


@pytest.mark.parametrize("appendonly", ["yes", "no"])
@pytest.mark.parametrize("at", [0, 2])
def test_redis_that_is_killed_within_an_update(tmp_path: Path, job: Job, appendonly: str, at: int) -> None:
    server = RedisServer(tmp_path / "redis", appendonly=appendonly, appendfsync="always")
    server.start()
    job.commit()
    fed(job.root, server)
    job.touch(3)
    job.commit()

    def restart() -> None:
        server.kill()
        server.start()

    written = fed(job.root, server, Stopping(server, at, restart), timeout_s=0.5)
    assert kinds(written) == [(MARKER if appendonly == "yes" else LOAD, "1:2")]
    assert is_true(job, server, written)
    server.kill()


def test_redis_that_comes_back_without_its_last_writes_gets_them_again(tmp_path: Path, job: Job) -> None:
    """As after a loss of power with appendfsync everysec: what it holds is older than what it acknowledged."""
    server = RedisServer(tmp_path / "redis")
    server.start()
    job.commit()
    fed(job.root, server)
    job.touch(3)
    job.commit()

    def save() -> None:
        with server.client() as client:
            client.save()

    def lose() -> None:
        server.kill()
        server.start()

    class Losing(RedisSink):
        """Its server loses all between the first batch of an update and the last one."""

        calls = 0

        def put(self, changed: Changed) -> None:
            self.calls += 1
            if self.calls == 1:
                save()
            super().put(changed)
            if self.calls == 2:
                lose()

    sink = Losing(server.url, PREFIX)
    written = fed(job.root, server, sink, timeout_s=0.5)
    assert sink.calls > 3  # written again as a whole
    assert is_true(job, server, written)
    save()
    job.touch(3)
    job.commit()
    with follow(f"file://{job.root}", poll_s=0.05) as follower:
        feed = Feed(follower, sink)
        assert kinds(list(feed.updates(0))) == [(MARKER, "1:3")]
        lose()  # it holds 1:2 again, and the feed has written 1:3
        job.touch(1)
        job.commit()
        written = list(feed.updates(0.5))
    assert kinds(written) == [(LOAD, "1:4")]
    assert written[0].update.why == "the sink no longer holds the marker that was written last"
    assert is_true(job, server, written)
    server.kill()


def test_a_feed_waits_for_redis_and_then_gives_up(tmp_path: Path, job: Job) -> None:
    server = RedisServer(tmp_path / "redis")
    server.start()
    job.commit()
    with follow(f"file://{job.root}", poll_s=0.05, outage_s=0.5) as follower:
        feed = Feed(follower, RedisSink(server.url, PREFIX))
        server.kill()
        with pytest.raises(SinkUnavailableError, match="Redis does not answer"):
            list(feed.updates(10))
        assert follower.stats.outages == 1
    with pytest.raises(SinkUnavailableError, match="Redis does not answer"):
        RedisSink(server.url, PREFIX)


def test_a_full_redis_is_named_and_gets_the_rows_once_it_has_room(
    job: Job, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.commit()
    with server.client() as client:
        client.config_set("maxmemory", 1)
        with pytest.raises(SinkUnavailableError, match="Redis is full"):
            fed(job.root, server)

        pause = Follower.pause

        def room(follower: Follower) -> bool:
            client.config_set("maxmemory", 0)
            return pause(follower)

        client.config_set("maxmemory", 1)
        monkeypatch.setattr(Follower, "pause", room)
        written = fed(job.root, server, timeout_s=0.5)
    assert kinds(written) == [(LOAD, "1:1")]
    assert is_true(job, server, written)


def test_tables_that_the_model_dropped_are_deleted(tmp_path: Path, server: RedisServer) -> None:
    first = Schema((table("t_a", 70, 4), table("t_b", 50, 4), table("t_c", 30, 4)))
    second = Schema((table("t_a", 70, 4), table("t_b", 50, 8)))
    for number, schema in enumerate((first, second)):
        job = Job(tmp_path / f"log{number}", schema=schema, seed=number)
        job.begin()
        job.commit()
        with server.client() as client:
            client.hdel(f"{PREFIX}_state", "position")
        fed(job.root, server)
        assert set(held(server)) == {each.name for each in schema.tables}


def test_a_row_that_redis_lost_is_found_by_the_proofs_and_all_rows_are_written_again(
    tmp_path: Path, server: RedisServer
) -> None:
    job = EvolvingJob(tmp_path / "log", schema=PROVED)
    job.first(PROVED)
    job.markers(1)
    fed(job.root, server)
    with server.client() as client:
        for row in range(64, 128):
            client.delete(f"{PREFIX}t_a:{row}")
    job.markers(1)
    written = fed(job.root, server)
    assert kinds(written) == [(LOAD, "1:2")]
    assert written[0].update.why == "rows differ from the proof of marker 1:2"
    expected = {each.spec.name: each.arrays[0].tobytes() for each in job.truth[written[0].update.marker].values()}
    assert held(server) == expected


def test_rows_that_were_lost_everywhere_are_not_called_a_marker(
    tmp_path: Path, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = EvolvingJob(tmp_path / "log", schema=PROVED)
    job.first(PROVED)
    job.markers(1)

    def flipped(sink: RedisSink, changed: Changed) -> None:
        weights = changed.weights.copy()
        weights.view(np.uint8).reshape(-1)[0] ^= 1
        put(sink, Changed(changed.table, changed.col0, changed.ids, weights))

    put = RedisSink.put
    monkeypatch.setattr(RedisSink, "put", flipped)
    with pytest.raises(ProofMismatchError):
        fed(job.root, server)
    with server.client() as client:
        assert client.hget(f"{PREFIX}_state", "position") is None
    with follow(f"file://{job.root}") as follower:
        (written,) = Feed(follower, RedisSink(server.url, PREFIX), accept_unproved=True).updates(0)
        assert (kinds([written]), follower.stats.unproved > 0) == ([(LOAD, "1:1")], True)


def test_work_is_that_of_the_changed_rows_whatever_the_size_of_the_table(
    tmp_path: Path, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_sink, "_BATCH_ROWS", 10)
    calls = []
    for number, rows in enumerate((200, 2_000)):
        job = Job(tmp_path / f"log{number}", world=1, schema=Schema((table("t_a", rows, 4),)))
        job.begin()
        job.commit()
        with server.client() as client:
            client.flushall()
            fed(job.root, server)
            (stream,) = job.streams
            job.put_rows(stream, stream.shards[0], np.arange(25))
            job.flush()
            job.commit()
            client.config_resetstat()
            fed(job.root, server)
            calls.append({name: each["calls"] for name, each in client.info("commandstats").items()})
    assert calls[0] == calls[1]
    assert calls[0]["cmdstat_mset"] == 3


def test_logins_rights_and_settings_that_cannot_work_are_refused_by_name(
    tmp_path: Path, job: Job, server: RedisServer
) -> None:
    job.commit()
    with server.client() as client:
        client.acl_setuser(
            "reader", enabled=True, passwords=["+secret"], keys=["*"], commands=["+get", "+hget", "+info"]
        )
        with pytest.raises(ConfigError, match=r"Redis refuses: .*'set' command"):
            fed(job.root, server, RedisSink(server.url, PREFIX, {"username": "reader", "password": "secret"}))
        with pytest.raises(ConfigError, match="Redis refuses") as refused:
            RedisSink(server.url, PREFIX, {"username": "reader", "password": "wrong-one"})
        assert "wrong-one" not in str(refused.value)
        client.config_set("maxmemory-policy", "allkeys-lru")
        with pytest.raises(ConfigError, match="may evict rows: its maxmemory-policy is allkeys-lru"):
            RedisSink(server.url, PREFIX)
    cluster = RedisServer(tmp_path / "cluster", cluster_enabled="yes")
    cluster.start()
    with pytest.raises(ConfigError, match="a Redis cluster cannot be a sink"):
        RedisSink(cluster.url, PREFIX)
    cluster.kill()
    for url, said in {
        "redis://user:secret@host/0": "must not hold a login",
        "http://host/0": "is not the URL of a Redis server",
        "redis://": "is not the URL of a Redis server",
    }.items():
        with pytest.raises(ConfigError, match=said) as refused:
            RedisSink(url, PREFIX)
        assert "secret" not in str(refused.value)
    with pytest.raises(ConfigError, match="unknown name: db"):
        RedisSink(server.url, PREFIX, {"db": "1"})
    with pytest.raises(ConfigError, match="socket_timeout must be seconds"):
        RedisSink(server.url, PREFIX, {"socket_timeout": "soon"})


def test_what_cannot_go_on_from_a_position_is_refused(job: Job, server: RedisServer) -> None:
    with (
        follow(f"file://{job.root}", mode="rows") as follower,
        pytest.raises(ConfigError, match="a sink requires a follower of markers"),
    ):
        Feed(follower, RedisSink(server.url, PREFIX))
    with follow(f"file://{job.root}") as follower:
        with pytest.raises(ConfigError, match="'1:1' is not a position"):
            follower.resume("1:1")
        follower.resume("1:1@ab")
        with pytest.raises(ConfigError, match="new tables cannot continue from a position"):
            FollowedTables(follower)


def test_the_command_writes_it(job: Job, server: RedisServer) -> None:
    job.commit()
    arguments = ["follow", f"file://{job.root}", "--redis", server.url, "--once", "--json"]
    lines = []
    for _ in range(2):
        lines += run(*arguments).splitlines()
        job.touch(1)
        job.commit()
    assert [json.loads(line)["kind"] for line in lines] == ["load", "marker"]
    with server.client() as client:
        assert client.hget("log:_state", "marker") == b"1:2"
    for more, said in {
        ("--mode", "rows"): "--redis requires --mode markers, got rows",
        ("--serve", "file:///x"): "--serve and --redis exclude each other",
    }.items():
        failed = call(*arguments, *more)
        assert isinstance(failed.exception, ConfigError)
        assert said in str(failed.exception)


MAPPED_PREFIX = "a*b[c]?\\:"
"""It has all characters that a pattern gives a meaning."""


def by_raw_id(server: RedisServer) -> dict[str, dict[int, bytes]]:
    """All rows under the prefix, by table and key."""
    found: dict[str, dict[int, bytes]] = {}
    with server.client() as client:
        for key in client.scan_iter():
            name = key.decode()
            if name.startswith(MAPPED_PREFIX) and ":" in (rest := name.removeprefix(MAPPED_PREFIX)):
                table, _, number = rest.rpartition(":")
                found.setdefault(table, {})[int(number)] = client.get(key)  # type: ignore[assignment]
    return found


def fed_mapped(job: MappedJob, server: RedisServer, options: Any = None, timeout_s: float = 0.0) -> list[Written]:
    with follow(f"file://{job.root}", poll_s=0.05, scratch=job.root.parent) as follower:
        sink = RedisSink(server.url, MAPPED_PREFIX, options)
        try:
            return list(Feed(follower, sink).updates(timeout_s))
        finally:
            sink.close()


def holds_newest(job: MappedJob, server: RedisServer) -> bool:
    newest = list(job.truths)[-1]
    with server.client() as client:
        assert client.hget(f"{MAPPED_PREFIX}_state", "position").startswith(f"{newest}@".encode())  # type: ignore[union-attr]
        assert client.get("other:t:5") == b"of another program"
    return by_raw_id(server) == {name: rows for name, rows in job.truths[newest].items() if rows}


def mapped_job(folder: Path, server: RedisServer) -> MappedJob:
    job = MappedJob(folder, world=4)
    job.begin()
    job.churn(40)
    job.commit()
    with server.client() as client:
        client.set("other:t:5", b"of another program")
    return job


def test_redis_holds_exactly_the_raw_ids_of_the_marker(
    tmp_path: Path, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evictions, kills, and trainers on 4, 3 and 5 ranks, once on an older marker."""
    job, random = mapped_job(tmp_path / "log", server), np.random.default_rng(3)
    put, delete, left = RedisSink.put, RedisSink.delete, [10**9]

    def counted(call: Callable[..., None]) -> Callable[..., None]:
        def run(*arguments: Any) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise KilledError
            call(*arguments)

        return run

    monkeypatch.setattr(RedisSink, "put", counted(put))
    monkeypatch.setattr(RedisSink, "delete", counted(delete))
    assert kinds(fed_mapped(job, server)) == [(LOAD, "1:1")]
    assert holds_newest(job, server)
    killed = tombstones = 0
    for number in range(12):
        if number % 4 == 3:
            markers = [each for each in job.truths if each.generation == job.generation]
            job.begin(markers[0 if number == 7 else -1], world=3 if number == 3 else 5)
        job.churn()
        job.commit()
        left[0] = int(random.integers(6)) if number % 2 else 10**9
        try:
            written = fed_mapped(job, server)
        except KilledError:
            killed += 1
            continue
        assert holds_newest(job, server), number
        tombstones += sum(sum(each.tombstones.values()) for each in written)
    left[0] = 10**9
    job.churn()
    job.commit()
    fed_mapped(job, server)
    assert holds_newest(job, server)
    assert killed > 1
    assert tombstones > 5


def test_tombstones_that_redis_lost_are_written_again(tmp_path: Path) -> None:
    """Its disk has the deletions of a marker, and not those of the next one."""
    server = RedisServer(tmp_path / "redis")
    server.start()
    job = mapped_job(tmp_path / "log", server)
    fed_mapped(job, server)
    for _ in range(2):
        job.churn(20)
        job.commit()
        with server.client() as client:
            client.save()
        assert fed_mapped(job, server)[0].tombstones[ONE] > 0
        server.kill()
        server.start()
    job.churn()
    job.commit()
    assert kinds(fed_mapped(job, server)) == [(MARKER, "1:4")]
    assert holds_newest(job, server)
    server.kill()


def test_a_user_without_the_right_to_delete_is_refused_and_nothing_is_skipped(
    tmp_path: Path, server: RedisServer
) -> None:
    job = mapped_job(tmp_path / "log", server)
    needed = "info hget hset hdel hincrby get set mget mset setrange watch unwatch multi exec"
    rights = [f"+{name}" for name in needed.split()]
    login = {"username": "feeder", "password": "secret"}
    with server.client() as client:
        client.acl_setuser("feeder", enabled=True, passwords=["+secret"], keys=["*"], commands=rights)
        with pytest.raises(ConfigError, match=r"Redis refuses: .*'scan' command") as refused:
            fed_mapped(job, server, login)
        assert "+unlink +scan" in str(refused.value)
        client.acl_setuser("feeder", enabled=True, keys=["*"], commands=["+scan"], reset_keys=True)
        fed_mapped(job, server, login)
        assert holds_newest(job, server)
        gone = sorted(job.live(ONE))[:3]
        job.owners[ONE][np.isin(job.owners[ONE], gone)] = 2**63 - 1
        job.commit()
        with pytest.raises(ConfigError, match="'unlink' command"):
            fed_mapped(job, server, login)
        client.acl_setuser("feeder", enabled=True, keys=["*"], commands=["+unlink"], reset_keys=True)
        job.churn()
        job.commit()
        assert kinds(fed_mapped(job, server, login)) == [(MARKER, "1:3")]
        assert holds_newest(job, server)
        client.acl_deluser("feeder")


def test_a_table_that_the_model_dropped_goes_with_its_raw_ids(tmp_path: Path, server: RedisServer) -> None:
    job = mapped_job(tmp_path / "log", server)
    fed_mapped(job, server)
    other = MappedJob(tmp_path / "other", schema=Schema(job.schema.tables[1:]), seed=5)
    other.begin()
    other.churn(20)
    other.commit()
    with server.client() as client:
        client.hdel(f"{MAPPED_PREFIX}_state", "position")
    fed_mapped(other, server)
    assert holds_newest(other, server)
