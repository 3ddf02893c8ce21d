"""A store on a real S3 server: who is let in, what is said, and what a server that dies leaves."""

from __future__ import annotations

import json
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.parts import Entry, check_store, prepare_store
from tests.s3.server import KEY, SECRET, S3Server
from torchrec_stream_ckpt.errors import StoreUnavailableError
from torchrec_stream_ckpt.inner import Objects, open_store
from torchrec_stream_ckpt.store import clouds
from torchrec_stream_ckpt.util.ports import free_port


def parts() -> list[bytes]:
    """101 MiB, more than one request of an upload takes. Made when they are needed: forks would copy their pages."""
    return [bytes([number]) * 2**20 for number in range(101)]


USES: dict[str, Callable[[Objects], Any]] = {
    "put": lambda store: store.put("a/x", [b"x"]),
    "read": lambda store: store.read("a/x"),
    "range": lambda store: store.read("a/x", 1, 2),
    "size": lambda store: store.size("a/x"),
    "list": lambda store: list(store.list("")),
    "list a prefix": lambda store: list(store.list("a/")),
    "delete": lambda store: store.delete("a/x"),
    "check": check_store,
    "prepare": prepare_store,
}


def url(server: S3Server) -> str:
    return f"s3://{server.bucket}/{uuid.uuid4().hex}"


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[S3Server]:
    """A server that a test may stop."""
    server = S3Server(tmp_path)
    server.start()
    yield server
    server.kill()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"key": "AKNOBODY"}, "the store does not know this access key"),
        ({"secret": "not-the-secret"}, "the secret key does not match the access key"),
    ],
)
def test_wrong_credentials_are_told_apart_at_every_use(s3_server: S3Server, changed: dict[str, str], said: str) -> None:
    store = open_store(url(s3_server), s3_server.options(**changed))
    for use in USES.values():
        with pytest.raises(StoreUnavailableError, match=said) as refused:
            use(store)
        assert refused.value.hint
        assert not any(secret in str(refused.value) for secret in (SECRET, "not-the-secret"))
    store.close()


def test_a_bucket_that_is_not_there_is_said_at_every_use_but_deleting(s3_server: S3Server) -> None:
    store = open_store("s3://no-such-bucket/x", s3_server.options())
    for use in (use for name, use in USES.items() if name != "delete"):
        with pytest.raises(StoreUnavailableError, match="the bucket 'no-such-bucket' does not exist") as refused:
            use(store)
        assert refused.value.where["store"] == "s3://no-such-bucket/x"
    store.close()


def test_no_credentials_at_all_are_said(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    options = {name: value for name, value in s3_server.options().items() if name not in ("key", "secret")}
    store = open_store(url(s3_server), options)
    with pytest.raises(StoreUnavailableError, match="no credentials were found"):
        store.put("a/x", [b"x"])
    store.close()


def test_options_of_a_file_open_the_store(s3_server: S3Server, tmp_path: Path) -> None:
    path = tmp_path / "options"
    path.write_text(
        f"key = {KEY}\nsecret = {SECRET}\nendpoint_url = {s3_server.endpoint}\nclient_kwargs.region_name = us-east-1\n"
    )
    store = open_store(url(s3_server), path)
    store.put("a/x", [b"x"])
    assert list(store.list("")) == [Entry("a/x", 1)]
    store.close()


def test_an_address_at_which_nobody_answers_is_said(s3_server: S3Server) -> None:
    store = open_store("s3://bucket/x", s3_server.options(endpoint_url=f"http://127.0.0.1:{free_port()}"))
    with pytest.raises(StoreUnavailableError, match="no server answers at this address"):
        store.read("a/x")
    store.close()


def test_an_upload_of_several_requests_comes_back_whole_and_in_ranges(s3_server: S3Server) -> None:
    store = open_store(url(s3_server), s3_server.options())
    whole = b"".join(parts())
    store.put("a/large", parts())
    assert store.size("a/large") == len(whole)
    for begin in (0, 49 * 2**20 + 7, 50 * 2**20 - 1, 100 * 2**20):
        assert store.read("a/large", begin, begin + 2**20) == whole[begin : begin + 2**20]
    assert store.read("a/large") == whole
    store.delete("a/large")
    store.close()


def test_more_objects_than_one_answer_lists_are_all_listed(s3_server: S3Server) -> None:
    place = url(s3_server)
    store = open_store(place, s3_server.options())
    folder = s3_server.objects / place.removeprefix("s3://") / "a"
    folder.mkdir(parents=True)
    for number in range(1005):
        (folder / f"{number:05d}").write_bytes(b"x")
    assert {entry.name for entry in store.list("a/")} == {f"a/{number:05d}" for number in range(1005)}
    store.close()


def test_a_server_that_dies_under_an_upload_leaves_no_object(own_server: S3Server) -> None:
    store = open_store(url(own_server), own_server.options())
    store.put("a/small", [b"x"])
    died = threading.Event()

    def kill_once_bytes_arrive() -> None:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and _stored(own_server) < 2**20:
            time.sleep(0.001)
        own_server.kill()
        died.set()

    with ThreadPoolExecutor(1) as pool:
        killer = pool.submit(kill_once_bytes_arrive)
        with pytest.raises(StoreUnavailableError, match="cannot write it") as failed:
            store.put("a/large", parts())
        killer.result(60)
    assert died.is_set()
    assert SECRET not in str(failed.value)
    with pytest.raises(StoreUnavailableError, match="no server answers at this address"):
        store.size("a/small")
    own_server.start()
    assert set(store.list("")) == {Entry("a/small", 1)}
    assert store.size("a/large") is None
    store.put("a/large", parts())
    assert store.read("a/large", 2**20, 2**20 + 5) == bytes([1]) * 5
    store.close()


def _stored(server: S3Server) -> int:
    """Bytes of all files that the server keeps, those of unfinished uploads among them."""
    total = 0
    for path in server.objects.rglob("*"):
        try:
            total += path.lstat().st_size if path.is_file() else 0
        except FileNotFoundError:
            continue
    return total


@pytest.mark.usefixtures("short_pauses")
def test_a_server_that_says_nothing_is_given_up(s3_server: S3Server) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=64) as silent:  # connects, and nobody ever answers
        config = {"read_timeout": 0.05, "retries": {"max_attempts": 1}}
        options = s3_server.options(
            endpoint_url=f"http://127.0.0.1:{silent.getsockname()[1]}", config_kwargs=json.dumps(config)
        )
        store = open_store("s3://bucket/x", options)
        with pytest.raises(StoreUnavailableError, match="the connection was lost"):  # or the test hangs
            store.read("a/x")
        store.close()


def test_a_server_that_takes_no_bytes_is_given_up_with_its_name_and_the_time(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It accepts connections and never reads: the buffers of the sockets are full long before 64 MiB are sent."""
    monkeypatch.setattr(clouds, "LEAST_BYTES_PER_S", 2**30)
    monkeypatch.setattr("s3fs.core.S3FileSystem.retries", 1)
    with socket.create_server(("127.0.0.1", 0), backlog=64) as deaf:
        address = f"127.0.0.1:{deaf.getsockname()[1]}"
        config = {"connect_timeout": 5, "read_timeout": 0.1, "retries": {"total_max_attempts": 1}}
        store = open_store(
            "s3://bucket/x", s3_server.options(endpoint_url=f"http://{address}", config_kwargs=json.dumps(config))
        )
        with pytest.raises(StoreUnavailableError, match="cannot write it") as failed:  # or the test hangs
            store.put("a/x", [bytes(2**26)])
        store.close()
    assert f"{address} did not take {2**26} bytes and answer within 5.2 s" in failed.value.message
    assert failed.value.where["store"] == "s3://bucket/x"
