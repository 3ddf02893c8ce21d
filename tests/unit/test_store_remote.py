"""Opening a store in an object store: what is refused, how options are read, and that no error shows one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.parts import prepare_store
from tests.unit.folded_job import command, folded_job
from torchrec_stream_ckpt.cli import materialize as cli
from torchrec_stream_ckpt.errors import ConfigError, CorruptionError, StoreUnavailableError
from torchrec_stream_ckpt.inner import open_store
from torchrec_stream_ckpt.maintain.engine.parcel import SiteAddress
from torchrec_stream_ckpt.store.api import LooksFirst
from torchrec_stream_ckpt.store.identity import refuses_taken_names
from torchrec_stream_ckpt.store.remote import FsspecObjects, typed
from torchrec_stream_ckpt.util import failpoints

WAITS: dict[str, Any] = {"default": None, "own": {"config_kwargs": '{"read_timeout": 7}'}}


def client_of(store: FsspecObjects) -> Any:
    return store._fs


def test_a_protocol_that_nobody_knows_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="'nosuch://' is not a protocol of fsspec"):
        open_store("nosuch://bucket/x")


@pytest.mark.parametrize("url", ["sftp://host/x", "hdfs://host/x", "ftp://host/x", "http://host/x"])
def test_a_protocol_that_shows_half_an_upload_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="incomplete uploads"):
        open_store(url)


def test_a_library_that_is_missing_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "s3", raising=False)
    with pytest.raises(ConfigError, match="the package for 's3://' is not installed") as refused:
        open_store("s3://bucket/x")
    assert refused.value.hint == "pip install 'torchrec_stream_ckpt[s3]'"


def test_options_are_typed_by_how_they_look() -> None:
    given = {
        "key": "123",
        "anon": "false",
        "use_ssl": "true",
        "client_kwargs.region_name": "eu-west-1",
        "client_kwargs.verify": "/ca.pem",
        "config_kwargs": '{"retries": {"max_attempts": 1}}',
        "max_concurrency": 4,
    }
    assert typed(given) == {
        "key": "123",
        "anon": False,
        "use_ssl": True,
        "client_kwargs": {"region_name": "eu-west-1", "verify": "/ca.pem"},
        "config_kwargs": {"retries": {"max_attempts": 1}},
        "max_concurrency": 4,
    }


def test_s3_waits_no_longer_than_its_options_say() -> None:
    waits = {}
    for name, options in WAITS.items():
        store = open_store("s3://bucket", options)
        assert isinstance(store, FsspecObjects)
        waits[name] = client_of(store).config_kwargs
    assert waits["default"]["retries"]["max_attempts"] == 3
    assert waits["own"]["read_timeout"] == 7
    assert "retries" not in waits["own"]


def test_options_come_from_a_file_as_well(tmp_path: Path) -> None:
    path = tmp_path / "options"
    path.write_text("# of the store\nglobal_store = true\n")
    open_store("memory://from-a-file", path).put("x", [b"x"])
    assert bytes(open_store("memory://from-a-file").read("x")) == b"x"
    path.write_text("secret\n")
    with pytest.raises(ConfigError, match="store options must be key=value lines"):
        open_store("memory://from-a-file", path)


@pytest.mark.parametrize("options", [{"config_kwargs": "{hush"}, {"a": "hush", "a.b": "hush"}])
def test_no_error_about_options_shows_a_value(options: dict[str, str]) -> None:
    with pytest.raises(ConfigError) as refused:
        open_store("memory://x", options)
    assert "hush" not in str(refused.value)


def test_a_failure_below_fsspec_is_ours_and_names_the_object(monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store("memory://failing")
    assert isinstance(store, FsspecObjects)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("the library broke")

    monkeypatch.setattr(client_of(store), "pipe_file", fail)
    with pytest.raises(StoreUnavailableError, match="cannot write it: RuntimeError: the library broke") as failed:
        store.put("a/x", [b"x"])
    assert failed.value.where == {"store": "memory://failing", "name": "a/x"}


def test_what_a_store_refuses_of_a_deletion_of_many_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    store, asked = open_store("s3://bucket/x", {"anon": "true"}), list[Any]()
    assert isinstance(store, FsspecObjects)

    def call_s3(*call: Any, **given: Any) -> Any:
        asked.append((call[0], given["Bucket"], [each["Key"] for each in given["Delete"]["Objects"]]))
        return {"Errors": [{"Key": "x/segments/b", "Code": "AccessDenied"}]} if len(asked) == 1 else {}

    monkeypatch.setattr(client_of(store), "call_s3", call_s3)
    names = ["segments/a", "segments/b"]
    assert [store.delete_many(names) for _ in range(2)] == [["segments/b"], []]
    assert asked == [("delete_objects", "bucket", ["x/segments/a", "x/segments/b"])] * 2
    monkeypatch.delattr(client_of(store), "call_s3")  # any error
    monkeypatch.setattr(type(client_of(store)), "call_s3", None)
    assert store.delete_many(names) == names
    assert isinstance(memory := open_store("memory://many"), FsspecObjects)
    assert memory.delete_many(names) == names


def test_a_put_that_fails_leaves_no_object() -> None:
    store = open_store("memory://failpoint")
    failpoints.arm("store.upload=raise")
    try:
        with pytest.raises(StoreUnavailableError):
            store.put("a/x", [b"x"])
    finally:
        failpoints.arm("")
    assert store.size("a/x") is None


def test_what_a_caller_was_handling_is_no_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    """A repair asks a store that has gone away: that is no damage, whatever was damaged before."""
    store = open_store("memory://away")
    assert isinstance(store, FsspecObjects)
    store.put("a/x", [b"x"])
    uses: dict[str, Callable[[], object]] = {
        "cat_file": lambda: store.read("a/x"),
        "pipe_file": lambda: store.create("a/x", [b"x"]),
    }
    for call, use in uses.items():

        def fail(*args: Any, **kwargs: Any) -> None:
            raise ConnectionError("nobody answers")

        with monkeypatch.context() as patch:
            patch.setattr(client_of(store), call, fail)
            try:
                try:
                    raise FileExistsError("416")
                except FileExistsError as error:
                    error.code = 416  # type: ignore[attr-defined]
                    raise CorruptionError("an object is shorter than the requested range") from error
            except CorruptionError:
                with pytest.raises(StoreUnavailableError, match="nobody answers"):
                    use()


def ignoring(url: str, monkeypatch: pytest.MonkeyPatch) -> FsspecObjects:
    """A store that puts an object over one of the same name, whatever it is asked."""
    store = open_store(url)
    assert isinstance(store, FsspecObjects)
    pipe_file = client_of(store).pipe_file
    monkeypatch.setattr(client_of(store), "pipe_file", lambda path, data, mode="overwrite": pipe_file(path, data))
    return store


def test_a_store_that_ignores_conditions_is_looked_at_first(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = ignoring("memory://ignores", monkeypatch)
    prepare_store(store)
    assert store.create("a/x", [b"x"])
    assert store.create("a/x", [b"y"]), "nobody has asked it so far"
    assert refuses_taken_names(store) is False
    assert not store.create("a/x", [b"z"])
    assert store.create("a/y", [b"y"])
    assert bytes(store.read("a/x")) == b"y"
    assert refuses_taken_names(store) is False
    assert bytes(store.read("STORE")) == b'{"format": 1}'
    assert len(caplog.messages) == 1
    assert "the store at memory://ignores: it does not support conditional puts" in caplog.messages[0]


def test_a_materializer_finds_out_at_its_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, store = folded_job(tmp_path / "job" / "log"), ignoring("memory://materialized", monkeypatch)
    monkeypatch.setattr(cli, "open_store", lambda *_: store)
    assert command(f"file://{job.root}", "--store", store.url, "--once", "--json", "--engine", "local:1")[0] == 0
    assert store.looks_first


def test_workers_know_which_store_ignores_conditions() -> None:
    address = SiteAddress(uri=None, kafka_options=None, store="memory://worker", store_options=None)
    for ignores in (False, True):
        objects = replace(address, looks_first=ignores).open().objects
        assert isinstance(objects, LooksFirst)
        assert objects.looks_first == ignores
