"""Stores of Google and of Azure: what differs from S3, and what is said of bad input."""

from __future__ import annotations

import base64
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.clouds.servers import ACCOUNT, CLOUDS, SECRET, Azurite, CloudServer
from tests.parts import Entry, check_store, prepare_store, put_once
from torchrec_stream_ckpt.errors import ConfigError, CorruptionError, StoreUnavailableError
from torchrec_stream_ckpt.inner import Objects, open_store
from torchrec_stream_ckpt.store.api import KeepsTime
from torchrec_stream_ckpt.store.identity import place_of
from torchrec_stream_ckpt.util.ports import free_port

USES: dict[str, Callable[[Objects], Any]] = {
    "put": lambda store: store.put("a/x", [b"x"]),
    "read": lambda store: store.read("a/x"),
    "range": lambda store: store.read("a/x", 1, 2),
    "size": lambda store: store.size("a/x"),
    "list": lambda store: list(store.list("")),
    "list a prefix": lambda store: list(store.list("a/")),
    "check": check_store,
    "prepare": prepare_store,
}


@pytest.fixture(params=list(CLOUDS))
def server(request: pytest.FixtureRequest) -> CloudServer:
    found = request.getfixturevalue(f"{request.param}_server")
    assert isinstance(found, CloudServer)
    return found


@pytest.mark.parametrize("use", USES)
def test_a_bucket_that_is_not_there_is_no_empty_store(server: CloudServer, use: str) -> None:
    place = f"{server.scheme}://no-such-bucket/x"
    store = open_store(place, server.options())
    with pytest.raises(StoreUnavailableError, match="the bucket 'no-such-bucket' does not exist") as refused:
        USES[use](store)
    assert refused.value.where["store"] == place
    assert refused.value.hint == "create the bucket, or correct the store's URL"
    store.close()


def test_an_upload_of_several_requests_comes_back_whole_and_in_ranges(server: CloudServer) -> None:
    large = bytes(range(256)) * 4096 * 65  # more than one request of an upload takes
    store = open_store(server.url(uuid.uuid4().hex), server.options())
    put_once(store, "a/large", [large])
    assert store.size("a/large") == len(large)
    with pytest.raises(CorruptionError, match="the store already holds different bytes under this name"):
        put_once(store, "a/large", [bytes(len(large))])
    for begin in (0, 4 * 2**20 - 1, 50 * 2**20 - 1, 64 * 2**20):
        assert store.read("a/large", begin, begin + 2**20) == large[begin : begin + 2**20]
    assert store.read("a/large") == large
    store.close()


@pytest.mark.slow  # Azure's client tries for a minute and a half, Google's for half a minute
def test_an_address_at_which_nobody_answers_is_said(server: CloudServer) -> None:
    nowhere = f"http://127.0.0.1:{free_port()}"
    changed = {"endpoint_url": nowhere}
    if isinstance(server, Azurite):
        changed = {"connection_string": server.connection().replace(server.endpoint, nowhere)}
    store = open_store(server.url("x"), server.options(**changed))
    with pytest.raises(StoreUnavailableError, match="no server answers at this address") as refused:
        store.size("a/x")
    assert refused.value.where["name"] == "a/x"
    store.close()


def test_a_wrong_key_is_said_at_every_use_and_never_shown(abfs_server: CloudServer) -> None:
    assert isinstance(abfs_server, Azurite)
    wrong = base64.b64encode(b"not the key").decode()
    store = open_store(abfs_server.url("x"), {"connection_string": abfs_server.connection(wrong)})
    for use in USES.values():
        with pytest.raises(
            StoreUnavailableError, match=r"does not accept these credentials|wrong credentials"
        ) as refused:
            use(store)
        assert refused.value.hint
        assert not any(secret in str(refused.value) for secret in (SECRET, wrong))
    store.close()


def test_the_account_of_a_connection_tells_stores_apart_without_its_key(abfs_server: CloudServer) -> None:
    store = open_store(abfs_server.url("x"), abfs_server.options())
    assert isinstance(store, KeepsTime)
    assert place_of(store) == f"{abfs_server.url('x')} at {abfs_server.endpoint}/{ACCOUNT}"
    store.close()


def test_what_the_store_says_of_the_time_of_an_object_never_goes_back(server: CloudServer) -> None:
    store = open_store(server.url(uuid.uuid4().hex), server.options())
    assert isinstance(store, KeepsTime)
    store.put("a/x", [b"x"])
    store.put("a/y", [b"x"])
    first, second = store.put_at("a/x"), store.put_at("a/y")
    assert first is not None
    assert second is not None
    assert first <= second
    store.close()


def test_options_that_do_not_fit_are_said(server: CloudServer, tmp_path: Path) -> None:
    token = tmp_path / "token.json"
    token.write_text("{")
    options = {"connection_string": "nonsense"} if isinstance(server, Azurite) else {"token": str(token)}
    with pytest.raises(ConfigError, match="the store's options are not") as refused:
        open_store(server.url("x"), server.options(**options))
    assert refused.value.where["url"] == server.url("x")


def test_objects_of_others_beside_the_store_are_not_seen(server: CloudServer) -> None:
    place = uuid.uuid4().hex
    for suffix in ("", "-other", "/in"):
        store = open_store(server.url(place + suffix), server.options())
        store.put("x", [suffix.encode()])
        store.close()
    store = open_store(server.url(place), server.options())
    assert set(store.list("")) == {Entry("x", 0), Entry("in/x", 3)}
    assert list(store.list("x/")) == []
    store.close()
