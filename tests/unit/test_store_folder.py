"""A store in a folder: what a kill, a full disk, a link and a reader without rights leave and see."""

from __future__ import annotations

import errno
import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.parts import FolderObjects, failpoints, prepare_store, put_once, refuses_taken_names
from tests.unit.folded_job import command, folded_job
from torchrec_stream_ckpt.cli import materialize as cli
from torchrec_stream_ckpt.errors import ConfigError, CorruptionError, MissingObjectError, StoreUnavailableError
from torchrec_stream_ckpt.inner import open_store
from torchrec_stream_ckpt.maintain.engine.parcel import SiteAddress
from torchrec_stream_ckpt.store.api import LooksFirst
from torchrec_stream_ckpt.store.remote import FsspecObjects, typed

DATA = b"0123456789" * 100


@pytest.fixture
def store(tmp_path: Path) -> FolderObjects:
    return FolderObjects(tmp_path / "store")


def files(store: FolderObjects) -> list[Path]:
    root = Path(store.url.removeprefix("file://"))
    return [path for path in root.rglob("*") if path.is_file()]


def refuse_links(*names: Path) -> None:
    """As a file system without hard links."""
    raise OSError(errno.EPERM, "Operation not permitted")


def put_in_a_process(store: FolderObjects, points: str, use: str = "put") -> int:
    """Put ``a/x`` in another process, and end it at a failpoint; returns its exit status."""
    program = (
        "import sys; from torchrec_stream_ckpt.store.api import open_store; "
        f"open_store(sys.argv[1]).{use}('a/x', [sys.argv[2].encode()])"
    )
    return subprocess.run(
        [sys.executable, "-c", program, store.url, DATA.decode()],
        env={**os.environ, "STREAM_CKPT_FAILPOINTS": points},
        timeout=300,
        check=False,
    ).returncode


@pytest.mark.parametrize(("use", "point"), [("put", "store.put"), ("put", "store.rename"), ("create", "store.rename")])
def test_a_writer_killed_before_the_rename_leaves_no_object(store: FolderObjects, use: str, point: str) -> None:
    assert put_in_a_process(store, f"{point}=kill", use) == -signal.SIGKILL
    assert list(store.list("")) == []
    assert store.size("a/x") is None
    left = len(DATA) if point == "store.rename" else 0
    assert len(files(store)) == bool(left)
    assert store.clear_leftovers() == left
    assert files(store) == []
    store.put("a/x", [DATA])
    assert store.read("a/x") == DATA


def test_a_writer_killed_behind_the_rename_leaves_the_whole_object(store: FolderObjects) -> None:
    assert put_in_a_process(store, "store.renamed=kill") == -signal.SIGKILL
    assert store.read("a/x") == DATA
    assert store.clear_leftovers() == 0


def test_a_writer_killed_between_its_two_names_leaves_the_whole_object(store: FolderObjects) -> None:
    assert put_in_a_process(store, "store.linked=kill", "create") == -signal.SIGKILL
    assert len(files(store)) == 2
    assert store.read("a/x") == DATA
    assert [entry.name for entry in store.list("")] == ["a/x"]
    assert store.clear_leftovers() == 0, "its bytes are the object's"
    assert [path.name for path in files(store)] == ["x"]
    assert store.read("a/x") == DATA


@pytest.mark.parametrize("links", [True, False], ids=["links", "no links"])
def test_of_two_files_for_one_name_the_first_stays(
    store: FolderObjects, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    if not links:
        monkeypatch.setattr(os, "link", refuse_links)
    assert store.create("a/x", [DATA])
    assert not store.create("a/x", [b"other"])
    assert store.read("a/x") == DATA
    assert [path.name for path in files(store)] == ["x"]


@pytest.mark.parametrize("links", [True, False], ids=["links", "no links"])
def test_many_writers_of_one_name_have_one_winner(
    store: FolderObjects, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    if not links:
        lexists = os.path.lexists

        def slowly(path: Path) -> bool:
            found = lexists(path)
            time.sleep(0.01)
            return found

        monkeypatch.setattr(os, "link", refuse_links)
        monkeypatch.setattr(os.path, "lexists", slowly)
    contents = [bytes([number]) * 5000 for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        for name in ("a/1", "a/2", "a/3", "a/4"):
            created = list(pool.map(lambda data, name=name: store.create(name, [data]), contents))
            assert created.count(True) == 1
            assert store.read(name) == contents[created.index(True)]
    assert len(files(store)) == 4


def test_a_name_that_is_taken_is_durable_as_well(store: FolderObjects, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its writer may have died between the name and the sync of the folder."""
    store.put("a/x", [DATA])
    synced: list[Path] = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(Path(os.readlink(f"/proc/self/fd/{fd}"))), fsync(fd)))
    root = Path(store.url.removeprefix("file://"))
    assert not store.create("a/x", [DATA])
    assert synced == [root / "a"]
    synced.clear()
    assert store.create("a/y", [DATA])
    assert synced == [root / "a"], "no more than a put"


def test_leftovers_of_a_living_writer_stay(store: FolderObjects) -> None:
    fd, path = store._create(Path(store.url.removeprefix("file://")) / "a")
    os.write(fd, DATA)
    assert store.clear_leftovers() == 0
    assert path.exists()
    os.close(fd)
    assert store.clear_leftovers() == len(DATA)
    assert not path.exists()


@pytest.mark.parametrize("point", ["store.put", "store.rename", "store.renamed"])
def test_a_disk_that_fails_is_said_and_leaves_nothing_half_written(store: FolderObjects, point: str) -> None:
    failpoints.arm(f"{point}=raise")
    try:
        with pytest.raises(StoreUnavailableError, match="cannot write it") as failed:
            store.put("a/x", [DATA])
    finally:
        failpoints.arm("")
    assert failed.value.where["path"] == Path(store.url.removeprefix("file://")) / "a/x"
    assert [path.name for path in files(store)] == (["x"] if point == "store.renamed" else [])


@pytest.mark.parametrize("call", ["fdatasync", "fsync"])
def test_a_sync_that_fails_is_an_error_and_is_not_tried_again(
    store: FolderObjects, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    store.put("a/first", [b"x"])
    calls = []

    def fail(fd: int) -> None:
        calls.append(fd)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(StoreUnavailableError, match="Input/output error"):
        store.put("a/x", [DATA])
    assert len(calls) == 1


def test_every_new_name_is_synced_in_its_folder(store: FolderObjects, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(Path(os.readlink(f"/proc/self/fd/{fd}"))), fsync(fd)))
    root = Path(store.url.removeprefix("file://"))
    store.put("a/b/x", [DATA])
    assert {root.parent, root, root / "a", root / "a/b"} <= set(synced)
    assert synced[-1] == root / "a/b"
    synced.clear()
    store.put("a/b/y", [DATA])
    assert synced == [root / "a/b"]


@pytest.mark.parametrize(
    ("call", "number", "hint"),
    [
        ("writev", errno.ENOSPC, "gc"),
        ("writev", errno.EDQUOT, "gc"),
        ("writev", errno.EIO, "repair the disk"),
        ("open", errno.EACCES, "permission"),
        ("open", errno.EROFS, "mount"),
        ("rename", errno.EACCES, "permission"),
    ],
)
def test_a_disk_that_takes_nothing_is_said_with_what_to_do(
    store: FolderObjects, monkeypatch: pytest.MonkeyPatch, call: str, number: int, hint: str
) -> None:
    store.put("a/x", [b"x"])

    def fail(*args: object, **kwargs: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(StoreUnavailableError, match=os.strerror(number)) as failed:
        store.put("a/y", [DATA])
    monkeypatch.undo()
    assert hint in failed.value.hint
    assert [path.name for path in files(store)] == ["x"]


def test_short_writes_are_gone_on_with(store: FolderObjects, monkeypatch: pytest.MonkeyPatch) -> None:
    writev = os.writev
    monkeypatch.setattr(os, "writev", lambda fd, parts: writev(fd, [bytes(parts[0])[:7]]))
    store.put("a/x", [DATA[:5], DATA[5:300], b"", DATA[300:]])
    assert store.read("a/x") == DATA


@pytest.mark.parametrize(
    "read",
    [lambda store: store.read("a/x"), lambda store: store.read_into("a/x", 0, [memoryview(bytearray(1000))])],
    ids=["read", "read_into"],
)
def test_an_object_that_becomes_shorter_while_it_is_read_is_named(
    store: FolderObjects, monkeypatch: pytest.MonkeyPatch, read: Callable[[FolderObjects], object]
) -> None:
    store.put("a/x", [DATA])
    preadv = os.preadv

    def cut_before(fd: int, buffers: list[memoryview], offset: int) -> int:
        os.truncate(f"/proc/self/fd/{fd}", 7)
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", cut_before)
    with pytest.raises(CorruptionError, match=r"was cut while it was read: it ends at 7 .*a/x"):
        read(store)


def test_links_are_no_objects(store: FolderObjects, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(DATA)
    store.put("a/x", [DATA])
    link = tmp_path / "store/a/link"
    link.symlink_to(secret)
    (tmp_path / "store/folder").symlink_to(tmp_path)
    os.mkfifo(tmp_path / "store/a/pipe")
    assert {entry.name for entry in store.list("")} == {"a/x"}
    assert store.size("a/link") is None
    with pytest.raises(CorruptionError, match="is a link to another place"):
        store.read("a/link")
    with pytest.raises(CorruptionError, match="is not a regular file"):
        store.read("a/pipe")


def test_a_link_in_the_place_of_an_object_is_replaced_not_followed(store: FolderObjects, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret")
    store.put("a/y", [b"y"])
    (tmp_path / "store/a/x").symlink_to(secret)
    store.put("a/x", [DATA])
    assert store.read("a/x") == DATA
    assert secret.read_bytes() == b"secret"


def test_nothing_is_below_an_object(store: FolderObjects) -> None:
    store.put("a/x", [DATA])
    assert store.size("a/x/y") is None
    assert list(store.list("a/x/")) == []
    store.delete("a/x/y")
    with pytest.raises(MissingObjectError):
        store.read("a/x/y")
    with pytest.raises(StoreUnavailableError, match="File exists"):
        store.put("a/x/y", [b"y"])


@pytest.mark.parametrize("links", [True, False], ids=["links", "no links"])
def test_a_folder_in_the_place_of_an_object_is_said(
    store: FolderObjects, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    store.put("a/x/y", [DATA])
    if not links:
        monkeypatch.setattr(os, "link", refuse_links)
    for use in (store.create, store.put, partial(put_once, store)):
        with pytest.raises(StoreUnavailableError, match="Is a directory") as failed:
            use("a/x", [DATA])
        assert "move away the folder" in failed.value.hint
    assert [path.name for path in files(store)] == ["y"]


def test_a_file_in_the_place_of_the_store_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    store = FolderObjects(tmp_path / "file")
    with pytest.raises(StoreUnavailableError, match="Not a directory"):
        list(store.list(""))
    with pytest.raises(StoreUnavailableError):
        store.put("x", [b"x"])


def test_a_folder_that_went_with_its_last_object_is_made_again(store: FolderObjects, tmp_path: Path) -> None:
    store.put("dense/job/marker/x", [b"x"])
    store.delete("dense/job/marker/x")
    assert not (tmp_path / "store/dense/job/marker").exists()
    assert (tmp_path / "store/dense/job").is_dir()
    store.put("dense/job/marker/y", [b"y"])
    assert store.read("dense/job/marker/y") == b"y"


def test_views_hold_no_files_open_once_they_are_gone(store: FolderObjects) -> None:
    store.put("large", [bytes(2**20)])
    before = len(os.listdir("/proc/self/fd"))
    views = [store.read("large") for _ in range(50)] + [store.read("large", 0, 100) for _ in range(50)]
    assert all(len(view) in (2**20, 100) for view in views)
    del views
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_plain_path_is_a_folder_and_takes_no_options(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "store"))
    store.put("x", [b"x"])
    assert store.url == f"file://{tmp_path}/store"
    with pytest.raises(ConfigError, match="store options are for object stores"):
        open_store(str(tmp_path), {"key": "k"})


# Opening a store in an object store: what is refused, how options are read, and that no error shows one.


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
