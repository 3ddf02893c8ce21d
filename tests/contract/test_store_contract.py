"""What every store promises, whatever its backend."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from crc32c import crc32c

from tests.clouds.servers import CLOUDS
from tests.parts import Entry, check_store, prepare_store, prove_writable, put_once, refuses_taken_names
from torchrec_stream_ckpt.errors import CorruptionError, MissingObjectError, UnsupportedError
from torchrec_stream_ckpt.inner import Objects, open_store

LARGE = bytes(range(256)) * 4096
"""1 MiB: a folder gives a view of a map."""


@dataclass
class Backend:
    """One store under test, and how to open it."""

    url: str
    options: dict[str, Any] | None = None

    def open(self) -> Objects:
        return open_store(self.url, self.options)


@pytest.fixture(params=["folder", "memory", "s3", "gs", "abfs"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Backend:
    if request.param == "folder":
        return Backend(f"file://{tmp_path}/store")
    if request.param == "memory":
        return Backend(f"memory://{uuid.uuid4().hex}/store")
    if request.param in CLOUDS:
        cloud = request.getfixturevalue(f"{request.param}_server")
        return Backend(cloud.url(f"{uuid.uuid4().hex}/store"), cloud.options())
    server = request.getfixturevalue("s3_server")
    return Backend(f"s3://{server.bucket}/{uuid.uuid4().hex}/store", server.options())


@pytest.fixture
def store(backend: Backend) -> Iterator[Objects]:
    objects = backend.open()
    yield objects
    objects.close()


def listed(store: Objects, prefix: str = "") -> set[Entry]:
    entries = list(store.list(prefix))
    assert len(entries) == len(set(entries))
    return set(entries)


def test_an_object_comes_back_as_its_parts_one_behind_the_other(store: Objects) -> None:
    store.put("a/b.seg", [b"head", bytearray(b""), memoryview(b"er"), LARGE])
    assert bytes(store.read("a/b.seg")) == b"header" + LARGE
    assert store.size("a/b.seg") == 6 + len(LARGE)


def test_thousands_of_parts_make_one_object(store: Objects) -> None:
    parts = [bytes([number % 251]) * (number % 7) for number in range(5000)]
    store.put("parts", parts)
    assert bytes(store.read("parts")) == b"".join(parts)


def test_parts_of_another_item_size_count_in_bytes(store: Objects) -> None:
    store.put("words", [memoryview(LARGE).cast("Q"), b"end"])
    assert bytes(store.read("words")) == LARGE + b"end"


@pytest.mark.parametrize("parts", [[], [b""], [b"", b""]])
def test_an_object_may_be_empty(store: Objects, parts: list[bytes]) -> None:
    store.put("empty", parts)
    assert bytes(store.read("empty")) == bytes(store.read("empty", 0, 0)) == b""
    assert store.size("empty") == 0
    assert listed(store) == {Entry("empty", 0)}


@pytest.mark.parametrize(
    ("begin", "end"),
    [(0, None), (0, 10), (5, 10), (5, 5), (4096, 700_000), (4097, 700_001), (300_000, None), (2**20 - 1, 2**20)],
)
def test_a_range_is_read(store: Objects, begin: int, end: int | None) -> None:
    store.put("large", [LARGE])
    assert store.read("large", begin, end) == LARGE[begin:end]


def test_the_end_of_an_object_is_an_empty_range(store: Objects) -> None:
    store.put("large", [LARGE])
    assert bytes(store.read("large", len(LARGE))) == bytes(store.read("large", len(LARGE), len(LARGE))) == b""


@pytest.mark.parametrize(("begin", "end"), [(0, 11), (10, 11), (11, None), (11, 11), (20, 30), (5, 4), (-1, 4)])
def test_a_range_beyond_an_object_is_refused(store: Objects, begin: int, end: int | None) -> None:
    store.put("short", [b"0123456789"])
    with pytest.raises(CorruptionError):
        store.read("short", begin, end)


def test_what_is_read_cannot_be_written(store: Objects) -> None:
    store.put("large", [LARGE])
    for view in (store.read("large"), store.read("large", 3, 9)):
        assert view.readonly


def test_what_was_read_outlives_its_object(store: Objects) -> None:
    store.put("large", [LARGE])
    whole = store.read("large")
    store.delete("large")
    store.put("large", [bytes(len(LARGE))])
    assert whole == LARGE


def test_an_object_that_is_not_there_is_named(store: Objects) -> None:
    store.put("dir/other", [b"x"])
    for name in ("gone", "dir/gone", "dir"):
        assert store.size(name) is None
        for begin, end in ((0, None), (0, 0), (2, None), (2, 4)):
            with pytest.raises(MissingObjectError) as missing:
                store.read(name, begin, end)
            assert name in str(missing.value)


def test_a_list_has_all_objects_below_a_prefix_and_no_others(store: Objects) -> None:
    sizes = {"top": 1, "a/x": 2, "a/b/y": 3, "a/b/c/z": 4, "ab/x": 5, "b/.metadata": 6, "b/__0_0.distcp": 7}
    for name, size in sizes.items():
        store.put(name, [bytes(size)])
    assert listed(store) == {Entry(name, size) for name, size in sizes.items()}
    for prefix in ("a/", "a/b/", "b/", "c/", "top/"):
        assert listed(store, prefix) == {Entry(name, sizes[name]) for name in sizes if name.startswith(prefix)}


def test_a_store_that_nobody_has_written_to_lists_nothing(store: Objects) -> None:
    assert listed(store) == set()
    assert listed(store, "a/") == set()
    assert store.size("a") is None
    store.delete("a")


def test_stores_whose_urls_begin_alike_do_not_mix(backend: Backend) -> None:
    stores = [open_store(f"{backend.url}{suffix}", backend.options) for suffix in ("", "2", "/in")]
    for number, each in enumerate(stores):
        each.put("x/name", [bytes(number)])
    assert [listed(each, "x/") for each in stores] == [{Entry("x/name", number)} for number in range(3)]


def test_what_one_user_writes_another_sees_at_once(backend: Backend, store: Objects) -> None:
    other = backend.open()
    assert listed(other, "a/") == set()
    assert other.size("a/x") is None
    store.put("a/x", [b"new"])
    assert listed(other, "a/") == {Entry("a/x", 3)}
    assert bytes(other.read("a/x")) == b"new"
    store.delete("a/x")
    assert listed(other, "a/") == set()
    assert other.size("a/x") is None
    other.close()


def test_a_deleted_object_is_gone_and_may_be_deleted_again(store: Objects) -> None:
    for name in ("a/x", "a/y", "dense/job/marker/file"):
        store.put(name, [b"x"])
        store.delete(name)
        store.delete(name)
    assert listed(store) == set()
    store.put("dense/job/marker/file", [b"again"])
    assert bytes(store.read("dense/job/marker/file")) == b"again"


@pytest.mark.parametrize(
    "name",
    [
        "",
        "/etc/passwd",
        "../x",
        "a/../x",
        "a/..",
        "./x",
        "a//b",
        "a/",
        "a\\b",
        "a\nb",
        "a b",
        "a*",
        "[a]",
        "a?b",
        "\xe4",
        "x" * 801,
        ".put-x",
        "a/.put-x",
        "a\0b",
        "memory://x",
        "x" * 201,
    ],
)
def test_names_that_lead_elsewhere_are_refused(store: Objects, name: str) -> None:
    for use in (lambda: store.put(name, [b"x"]), lambda: store.read(name), lambda: store.size(name)):
        with pytest.raises(CorruptionError, match="is not the name of an object"):
            use()
    with pytest.raises(CorruptionError, match="is not the name of an object"):
        store.delete(name)


def test_two_writers_of_one_name_leave_it_whole_for_every_reader(backend: Backend) -> None:
    done = threading.Event()

    def write() -> None:
        own = backend.open()
        for _ in range(10):
            own.put("a/same", [LARGE])
        own.close()

    def read() -> int:
        own, seen = backend.open(), 0
        while not done.is_set():
            size = own.size("a/same")
            assert size in (None, len(LARGE))
            if size is not None:
                assert own.read("a/same") == LARGE
                seen += 1
        return seen

    with ThreadPoolExecutor(3) as pool:
        reader = pool.submit(read)
        try:
            for writer in [pool.submit(write) for _ in range(2)]:
                writer.result(60)
        finally:
            done.set()
        reader.result(60)
    assert backend.open().read("a/same") == LARGE


@pytest.mark.parametrize("first", [b"", b"first", LARGE])
def test_a_name_that_is_taken_keeps_its_object(backend: Backend, store: Objects, first: bytes) -> None:
    other = backend.open()
    assert store.create("a/once", [first[:3], first[3:]])
    for second in (b"second", first, b""):
        assert not store.create("a/once", [second])
        assert not other.create("a/once", [second])
    assert bytes(other.read("a/once")) == first
    assert listed(store) == {Entry("a/once", len(first))}
    store.put("a/once", [b"a repair"])
    assert bytes(other.read("a/once")) == b"a repair"
    store.delete("a/once")
    assert other.create("a/once", [b"anew"])
    assert bytes(store.read("a/once")) == b"anew"
    other.close()


def test_the_same_bytes_are_put_once_by_all_and_other_bytes_are_refused(backend: Backend, store: Objects) -> None:
    put_once(store, "a/once", [b"the ", b"", b"same"])
    put_once(store, "a/once", [b"the same"])
    other = backend.open()
    put_once(other, "a/once", [b"the", b" same"])
    for parts in ([b"the same."], [b"the sane"], [b"the sam"], []):
        with pytest.raises(CorruptionError, match="the store already holds different bytes under this name") as refused:
            put_once(other, "a/once", parts)
        mine = b"".join(parts)
        assert refused.value.where["name"] == "a/once"
        assert refused.value.where["there"] == f"8 bytes, CRC32C {crc32c(b'the same'):08x}"
        assert refused.value.where["written"] == f"{len(mine)} bytes, CRC32C {crc32c(mine):08x}"
        assert bytes(store.read("a/once")) == b"the same"
    other.close()


def test_a_store_says_that_it_refuses_names_that_are_taken(store: Objects) -> None:
    assert refuses_taken_names(store) is None
    prepare_store(store)
    assert refuses_taken_names(store) is True
    assert bytes(store.read("STORE")) == b'{"format": 1}'


def test_a_format_that_is_said_is_not_said_anew(store: Objects, caplog: pytest.LogCaptureFixture) -> None:
    prove_writable(store)
    assert bytes(store.read("STORE")) == b'{"format": 1}'
    store.put("STORE", [b'{"format": 1, "more": 2}'])
    prove_writable(store)
    assert bytes(store.read("STORE")) == b'{"format": 1, "more": 2}'
    assert caplog.messages == []


def test_one_store_serves_several_threads(store: Objects) -> None:
    def work(number: int) -> bytes:
        name, data = f"threads/{number}", bytes([number]) * (1 + 40_000 * number)
        store.put(name, [data])
        assert store.size(name) == len(data)
        return bytes(store.read(name, 0, len(data)))[:1]

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, range(24))) == [bytes([number]) for number in range(24)]
    assert len(listed(store, "threads/")) == 24


def test_clearing_leftovers_takes_no_object(store: Objects) -> None:
    store.put("a/x", [b"x"])
    assert store.clear_leftovers() == 0
    assert listed(store) == {Entry("a/x", 1)}


def test_a_store_says_its_format_once_it_is_written_to(store: Objects) -> None:
    assert not check_store(store)
    prepare_store(store)
    prepare_store(store)
    assert check_store(store)
    assert bytes(store.read("STORE")) == b'{"format": 1}'


def test_a_store_of_a_newer_format_is_refused_by_name(store: Objects) -> None:
    store.put("STORE", [b'{"format": 2, "more": []}'])
    for use in (check_store, prepare_store):
        with pytest.raises(UnsupportedError, match="has format 2, this version reads up to 1") as refused:
            use(store)
        assert str(refused.value.hint).startswith("upgrade torchrec_stream_ckpt; if no newer version was ever used")


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"{",
        b"[]",
        b"1",
        b"{}",
        b'{"format": "1"}',
        b'{"format": true}',
        b'{"format": 0}',
        b"\xff\xfe",
        b"[" * 60_000,
        b'{"format": 1' + b" " * 70_000 + b"}",
    ],
)
def test_a_store_whose_format_cannot_be_read_is_refused(store: Objects, said: bytes) -> None:
    store.put("STORE", [said])
    for use in (check_store, prepare_store):
        with pytest.raises(CorruptionError, match="does not state the format"):
            use(store)
