"""A store behind an S3 server that throttles, fails, breaks connections and falls silent: nothing is lost."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.parts import Entry, prepare_store, prove_writable, put_once, refuses_taken_names
from tests.s3.faults import FAULTS, Fault, FaultyProxy, Kind
from tests.s3.server import SECRET, S3Server
from torchrec_stream_ckpt.errors import CorruptionError, StoreUnavailableError
from torchrec_stream_ckpt.inner import Objects, open_store
from torchrec_stream_ckpt.maintain.gc.gc_delete import delete_all
from torchrec_stream_ckpt.store import write_once

pytestmark = pytest.mark.usefixtures("short_pauses")

LARGE = bytes(range(256)) * 4096 * 11
"""11 MiB: an upload of three parts, if they are short ones."""

USES: dict[Kind, Callable[[Objects], Any]] = {
    "put": lambda store: store.put("a/y", [b"new"]),
    "get": lambda store: bytes(store.read("a/x")),
    "head": lambda store: store.size("a/x"),
    "list": lambda store: list(store.list("a/")),
    "delete": lambda store: store.delete("a/z"),
    "create": lambda store: store.put("a/large", [LARGE]),
    "part": lambda store: put_once(store, "a/large", [LARGE]),
    "complete": lambda store: put_once(store, "a/large", [LARGE]),
}
UPLOAD: tuple[Kind, ...] = ("create", "part", "complete")
BODILESS = {("head", "half"), ("delete", "half")}
CASES = [(kind, fault) for kind in USES for fault in FAULTS if kind not in UPLOAD and (kind, fault) not in BODILESS]
CASES += [("create", "slow down"), ("part", "broken before"), ("complete", "broken after")]
LASTING: list[tuple[Kind, Fault, str]] = [
    ("put", "slow down", "cannot write it: the store is still too busy after all retries"),
    ("get", "error", "cannot read it: the store still fails after all retries"),
    ("head", "slow down", "cannot inspect it: the store is still too busy after all retries"),
    ("list", "broken before", "cannot list the objects below s3://tests/[^ ]*: the connection was lost"),
    ("delete", "silence", "cannot delete it: the connection was lost"),
    ("part", "slow down", "cannot write it: the store is still too busy after all retries"),
]


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[FaultyProxy]:
    found = FaultyProxy(s3_server.port)
    yield found
    found.close()


def opened(server: S3Server, proxy: FaultyProxy, attempts: int, read_timeout_s: float = 1.0) -> Objects:
    """With our own patience, but for time-outs: a test does not wait for a minute."""
    retries = {"mode": "standard", "max_attempts": attempts}
    config = {"connect_timeout": 5, "read_timeout": read_timeout_s, "retries": retries}
    options = server.options(endpoint_url=proxy.endpoint, config_kwargs=json.dumps(config))
    found = open_store(f"s3://{server.bucket}/{uuid.uuid4().hex}", options)
    found.put("a/x", [b"old"])
    found.put("a/z", [b"to be deleted"])
    proxy.taken()
    return found


def after(use: Kind) -> set[Entry]:
    """What the store holds once a use is through."""
    held = {"a/x": 3, "a/z": 13}
    held |= {"a/y": 3} if use == "put" else {}
    held |= {"a/large": len(LARGE)} if use in ("create", "part", "complete") else {}
    held = {name: size for name, size in held.items() if (use, name) != ("delete", "a/z")}
    return {Entry(name, size) for name, size in held.items()}


@pytest.mark.usefixtures("short_parts")
@pytest.mark.parametrize(("kind", "fault"), CASES)
def test_what_passes_is_outlasted(s3_server: S3Server, proxy: FaultyProxy, kind: Kind, fault: Fault) -> None:
    store = opened(s3_server, proxy, attempts=3, read_timeout_s=1.0 if fault == "silence" else 30.0)
    times = 1 if kind in UPLOAD else 2
    proxy.harm(kind, fault, times)
    done = USES[kind](store)
    assert proxy.fired[kind, fault] == times
    proxy.heal()
    assert set(store.list("")) == after(kind)
    if kind == "list":
        assert set(done) == {Entry("a/x", 3), Entry("a/z", 13)}
    else:
        assert done == {"get": b"old", "head": 3}.get(kind)
    if kind in UPLOAD:
        assert store.read("a/large") == LARGE
    if kind == "complete":
        with pytest.raises(CorruptionError, match="the store already holds different bytes under this name"):
            put_once(store, "a/large", [bytes(len(LARGE))])
        assert store.read("a/large", 0, 1000) == LARGE[:1000]
    store.close()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_deletion_of_many_outlasts_what_passes(s3_server: S3Server, proxy: FaultyProxy, fault: Fault) -> None:
    store = opened(s3_server, proxy, attempts=3, read_timeout_s=1.0 if fault == "silence" else 30.0)
    proxy.harm("delete many", fault, 2)
    with ThreadPoolExecutor(2) as pool:
        assert delete_all(store, [["a/x", "a/gone", "a/z"]], pool) == set()
    assert proxy.fired["delete many", fault] == 2
    proxy.heal()
    assert list(store.list("")) == []
    store.close()


def test_a_request_deletes_many_objects_and_a_store_that_does_not_know_it_deletes_one_by_one(
    s3_server: S3Server, proxy: FaultyProxy
) -> None:
    store = opened(s3_server, proxy, attempts=1)
    names = [f"b/{number}" for number in range(9)]
    with ThreadPoolExecutor(2) as pool:
        for asked in ({"delete many": 1}, {"delete many": 1, "delete": 9}):
            for name in names:
                store.put(name, [b"x"])
            proxy.taken()
            assert delete_all(store, [names], pool) == set()
            assert proxy.taken() == asked
            assert {entry.name for entry in store.list("")} == {"a/x", "a/z"}
            proxy.refuse("delete many", 501, "NotImplemented")
        proxy.refuse("delete", 403, "AccessDenied")
        with pytest.raises(StoreUnavailableError, match="cannot delete it: permission denied by the store") as refused:
            delete_all(store, [["a/x"]], pool)
    assert refused.value.where["name"] == "a/x"
    store.close()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_put_whose_answer_was_lost_has_succeeded(s3_server: S3Server, proxy: FaultyProxy, fault: Fault) -> None:
    """The client asks again, and hears that the name is taken: by itself."""
    store = opened(s3_server, proxy, attempts=3, read_timeout_s=1.0 if fault == "silence" else 30.0)
    proxy.harm("put", fault, 2)
    put_once(store, "a/y", [b"new"])
    assert proxy.fired["put", fault] == 2
    assert store.read("a/y") == b"new"
    proxy.heal()
    assert proxy.taken()["get"] == 1 + (fault in ("broken after", "half"))
    with pytest.raises(CorruptionError, match="the store already holds different bytes under this name"):
        put_once(store, "a/y", [b"old"])
    assert set(store.list("")) == after("put")
    store.close()


@pytest.mark.parametrize("code", ["ConditionalRequestConflict", "PreconditionFailed"])
def test_a_name_that_is_taken_by_nothing_is_said(
    s3_server: S3Server, proxy: FaultyProxy, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_once, "_PAUSE_S", 0.001)
    store = opened(s3_server, proxy, attempts=3)
    proxy.refuse("put", 409 if code.startswith("C") else 412, code)
    with pytest.raises(StoreUnavailableError, match="the name is taken, but has no such object") as failed:
        put_once(store, "a/y", [b"new"])
    assert failed.value.where["name"] == "a/y"
    assert proxy.taken()["put"] == 6
    proxy.heal()
    assert set(store.list("")) == {Entry("a/x", 3), Entry("a/z", 13)}
    store.close()


@pytest.mark.parametrize("kinds", [("put", "complete"), ("complete",)], ids=["all", "completions"])
@pytest.mark.parametrize("answers", [True, False], ids=["501", "ignored"])
def test_a_store_without_conditional_puts_is_looked_at_first_and_said(
    s3_server: S3Server, proxy: FaultyProxy, answers: bool, kinds: tuple[Kind, ...], caplog: pytest.LogCaptureFixture
) -> None:
    store = opened(s3_server, proxy, attempts=3)
    prepare_store(store)
    proxy.know_no_conditions(None if answers else s3_server.objects, kinds)
    assert refuses_taken_names(store) is False
    prove_writable(store)
    proxy.taken()
    put_once(store, "a/y", [b"new"])
    assert proxy.taken() == {"head": 1, "put": 1}
    put_once(store, "a/y", [b"new"])
    with pytest.raises(CorruptionError, match="the store already holds different bytes under this name"):
        put_once(store, "a/y", [b"newer"])
    assert store.read("a/y") == b"new"
    assert "put" not in proxy.taken()
    said = f"the store at {store.url}: it does not support conditional puts"
    assert sum(said in each for each in caplog.messages) == 1
    assert store.read("STORE") == b'{"format": 1}'
    proxy.heal()
    store.close()


def test_a_store_is_asked_about_large_objects_by_a_small_upload_that_leaves_nothing(
    s3_server: S3Server, proxy: FaultyProxy
) -> None:
    store = opened(s3_server, proxy, attempts=3)
    prepare_store(store)
    proxy.taken()
    assert refuses_taken_names(store) is True
    asked = proxy.taken()
    assert [asked[kind] for kind in ("put", "create", "part", "complete", "abort")] == [1, 1, 1, 1, 1]
    assert store.read("STORE") == b'{"format": 1}'
    proxy.refuse("abort", 403, "AccessDenied")
    assert refuses_taken_names(store) is True, "a rule of the bucket takes the part"
    proxy.refuse("create", 403, "AccessDenied")
    with pytest.raises(StoreUnavailableError, match="permission denied by the store"):
        refuses_taken_names(store)
    proxy.heal()
    store.close()


@pytest.mark.usefixtures("short_parts")
@pytest.mark.parametrize(("kind", "fault", "said"), LASTING)
def test_what_lasts_is_named_with_its_object_and_leaves_all_else(
    s3_server: S3Server, proxy: FaultyProxy, kind: Kind, fault: Fault, said: str
) -> None:
    store = opened(s3_server, proxy, attempts=1, read_timeout_s=0.2 if fault == "silence" else 30.0)
    proxy.harm(kind, fault)
    with pytest.raises(StoreUnavailableError, match=said) as failed:
        USES[kind](store)
    parts = 3 if kind == "part" else 1
    again = 2 if fault == "broken before" else 1  # aiohttp: once more over a new connection, where that does no harm
    assert 1 <= proxy.fired[kind, fault] <= 5 * 2 * parts * again, "two tries of botocore, five times by s3fs"
    assert failed.value.where["store"] == store.url
    assert failed.value.where["name"].startswith("a/")
    assert failed.value.hint
    assert SECRET not in str(failed.value)
    proxy.heal()
    assert set(store.list("")) == {Entry("a/x", 3), Entry("a/z", 13)}
    assert store.read("a/x") == b"old"
    store.close()


def test_by_default_a_busy_store_is_asked_twenty_times(s3_server: S3Server, proxy: FaultyProxy) -> None:
    """Four tries of botocore, five times by s3fs, with pauses in between: docs/store.md says how long that takes."""
    options = s3_server.options(endpoint_url=proxy.endpoint)
    del options["config_kwargs"]
    store = open_store(f"s3://{s3_server.bucket}/{uuid.uuid4().hex}", options)
    proxy.harm("put", "slow down")
    with pytest.raises(StoreUnavailableError, match="the store is still too busy"):
        store.put("a/x", [b"x"])
    assert proxy.fired["put", "slow down"] == 20
    proxy.heal()
    store.put("a/x", [b"x"])
    assert store.read("a/x") == b"x"
    store.close()


@pytest.mark.parametrize("size", [0, 5, 101 * 2**20])
def test_requests_of_each_use_are_those_that_the_plan_counts(
    s3_server: S3Server, proxy: FaultyProxy, size: int
) -> None:
    store = opened(s3_server, proxy, attempts=3, read_timeout_s=20.0)
    put_once(store, "a/y", [bytes(size)])
    upload = {"create": 1, "part": 3, "complete": 1} if size > 100 * 2**20 else {"put": 1}
    assert proxy.taken() == upload
    assert len(store.read("a/y")) == size
    assert proxy.taken() == {"get": 1}
    for use in ("head", "list"):
        USES[use](store)
        assert proxy.taken() == {use: 1}
    if size:
        store.read("a/y", 1, 3)
        assert proxy.taken() == {"get": 1}
    store.delete("a/y")
    assert proxy.taken() == {"delete": 1}
    assert store.size("a/y") is None
    assert proxy.taken() == {"head": 1}, "no listing beside it"
    store.close()


# Rights and clocks: what a real store says, said by a server in its place.


@pytest.mark.parametrize(
    ("code", "status", "said", "hint"),
    [
        ("AccessDenied", 403, "permission denied by the store", "permissions that docs/security.md lists"),
        ("RequestTimeTooSkewed", 403, "this machine's clock is wrong", "set the clock"),
        ("AuthorizationHeaderMalformed", 400, "the bucket is in another region", "client_kwargs.region_name"),
        ("NoSuchBucket", 404, "the bucket 'tests' does not exist", "create the bucket"),
        ("ExpiredToken", 400, "the session's token has expired", "AWS_ACCESS_KEY_ID"),
    ],
)
def test_what_a_store_refuses_is_one_clear_error(
    s3_server: S3Server, proxy: FaultyProxy, code: str, status: int, said: str, hint: str
) -> None:
    store = opened(s3_server, proxy, attempts=3)
    for kind in ("delete", "put", "get"):
        proxy.refuse(kind, status, code)
        with pytest.raises(StoreUnavailableError, match=said) as refused:
            USES[kind](store)
        assert hint in refused.value.hint
        assert proxy.taken()[kind] == 1, "what no retry can change is not tried again"
    proxy.heal()
    assert set(store.list("")) == {Entry("a/x", 3), Entry("a/z", 13)}
    store.close()


@pytest.mark.parametrize("size", [2 * 2**20, 8 * 2**20])
def test_a_large_put_that_is_never_answered_is_tried_again(s3_server: S3Server, proxy: FaultyProxy, size: int) -> None:
    """Its body is not held back until the server asks for it: the client's time-outs do not hold for that wait."""
    store = opened(s3_server, proxy, attempts=3)
    proxy.harm("put", "silence", 1)
    data = bytes(range(256)) * (size // 256)
    assert store.create("a/y", [data])
    assert proxy.fired["put", "silence"] == 1
    assert bytes(store.read("a/y")) == data
    store.close()
