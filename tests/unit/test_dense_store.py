"""Dense state of markers in an object store: carried there and back, compared before anybody opens it."""

from __future__ import annotations

import gc
import hashlib
import os
import random
import uuid
from dataclasses import replace
from pathlib import Path

import pytest

from tests.builders import commit, digest_files
from tests.parts import DenseStore, open_dense
from torchrec_stream_ckpt.errors import ConfigError, CorruptionError, MissingObjectError, StoreUnavailableError
from torchrec_stream_ckpt.format.control import Commit
from torchrec_stream_ckpt.format.dense_files import LIST_NAME, DenseFile, listed, parse_list
from torchrec_stream_ckpt.inner import Objects, open_store
from torchrec_stream_ckpt.store import dense_objects
from torchrec_stream_ckpt.store.dense import name_files
from torchrec_stream_ckpt.util.layout import dense_file_name, dense_name

FILES = {
    ".metadata": b"pickled",
    "__0_0.distcp": random.Random(0).randbytes(2500),
    "__1_0.distcp": b"",
    "__1_1.distcp": b"rank 1",
}


@pytest.fixture(autouse=True)
def small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest of the files is read in three ranges."""
    monkeypatch.setattr(dense_objects, "_RANGE_BYTES", 1000)


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where scratch folders go."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def objects() -> Objects:
    return open_store(f"memory://{uuid.uuid4().hex}")


@pytest.fixture
def made() -> Commit:
    files = tuple(DenseFile(name, len(data), hashlib.sha256(data).hexdigest()) for name, data in FILES.items())
    return replace(commit(1, 1), dense_files=files)


def carried(objects: Objects, made: Commit) -> None:
    """As the ranks of a job do it: each carries its own files."""
    for mine in ([".metadata", "__0_0.distcp"], ["__1_0.distcp", "__1_1.distcp"]):
        store = DenseStore(objects)
        if ".metadata" in mine:
            store.prepare(made.job)
        assert store.is_seen(made.job)
        folder = store.writing(made.job, made.id)
        folder.mkdir()
        for name in mine:
            (folder / name).write_bytes(FILES[name])
        store.publish(made.job, made.id, [file for file in made.dense_files if file.name in mine])
        store.settle(made.job, made.id)
        assert not folder.exists()
    del store
    gc.collect()  # Python 3.12 keeps it in a cycle, with the frame of a call


def test_what_ranks_wrote_comes_back_in_a_folder_of_the_reader(objects: Objects, made: Commit, scratch: Path) -> None:
    carried(objects, made)
    store = open_dense(objects.url)
    assert store.folder is None
    assert store.why_not(made) == ""
    store.verify(made)
    local = store.local(made)
    assert {path.name: path.read_bytes() for path in local.iterdir()} == FILES
    assert local.parent.parent == scratch
    assert oct(local.parent.stat().st_mode)[-3:] == "700"
    assert store.local(made) == local
    store.release()
    assert not local.exists()
    assert store.local(made) == local
    store.close()
    assert list(scratch.iterdir()) == []


def test_no_scratch_is_left_by_a_store_that_nobody_closed(objects: Objects, made: Commit, scratch: Path) -> None:
    carried(objects, made)
    store = open_dense(objects.url)
    store.verify(made)
    assert list(scratch.iterdir()) != []
    del store
    gc.collect()
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["gone", "longer", "shorter", "altered"])
def test_a_file_that_is_not_what_was_committed_is_never_given(
    objects: Objects, made: Commit, scratch: Path, name: str, damage: str
) -> None:
    carried(objects, made)
    data, place = FILES[name], dense_file_name(made.job, made.id, name)
    if not data and damage in ("shorter", "altered"):
        data = b"x"
    damaged = {"longer": data + b"x", "shorter": data[:-1], "altered": data[:-1] + b"y"}
    objects.delete(place)
    if damage != "gone" and damaged[damage] != FILES[name]:
        objects.put(place, [damaged[damage]])
    store = open_dense(objects.url)
    for use in (store.verify, store.local):
        with pytest.raises(CorruptionError, match=r"dense state (is missing|was altered)") as refused:
            use(made)
        assert refused.value.where == {"store": objects.url, "name": place}
    if damage != "altered":
        assert store.why_not(made).startswith("dense state ")
        assert name in store.why_not(made)
    assert [path for folder in scratch.iterdir() for path in folder.iterdir()] == []


@pytest.mark.parametrize("name", ["../x", "a/b", "..", "", "x y"])
def test_a_name_that_leads_elsewhere_is_not_fetched(objects: Objects, made: Commit, name: str) -> None:
    planted = replace(made, dense_files=(*made.dense_files, DenseFile(name, 1, "0" * 64)))
    carried(objects, made)
    with pytest.raises(CorruptionError):
        open_dense(objects.url).verify(planted)


def test_a_marker_without_metadata_is_not_fetched(objects: Objects, made: Commit) -> None:
    carried(objects, made)
    with pytest.raises(CorruptionError, match=r"does not list DCP's \.metadata file"):
        open_dense(objects.url).verify(replace(made, dense_files=made.dense_files[1:]))


def test_a_marker_that_was_given_up_leaves_nothing(objects: Objects, made: Commit) -> None:
    other = replace(made, marker=2)
    carried(objects, made)
    carried(objects, other)
    DenseStore(objects).discard(made.job, made.id)
    assert list(objects.list(f"{dense_name(made.job, made.id)}/")) == []
    DenseStore(objects).verify(other)


def test_a_rank_that_sees_another_store_is_told_so(objects: Objects, made: Commit) -> None:
    DenseStore(objects).prepare(made.job)
    assert DenseStore(objects).is_seen(made.job)
    assert not open_dense(f"{objects.url}-another").is_seen(made.job)


def test_no_room_for_scratch_is_said(objects: Objects, made: Commit, monkeypatch: pytest.MonkeyPatch) -> None:
    carried(objects, made)
    monkeypatch.setattr("tempfile.tempdir", "/nowhere")
    for use in (lambda: open_dense(objects.url).is_seen(made.job), lambda: open_dense(objects.url).verify(made)):
        with pytest.raises(ConfigError, match="cannot create a scratch folder") as refused:
            use()
        assert "TMPDIR" in refused.value.hint


def test_a_full_disk_of_the_reader_is_no_damage_of_the_marker(
    objects: Objects, made: Commit, monkeypatch: pytest.MonkeyPatch
) -> None:
    carried(objects, made)

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, os.strerror(28))

    store = open_dense(objects.url)
    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(StoreUnavailableError, match="No space left on device"):
        store.verify(made)


def test_a_folder_that_holds_a_marker_is_not_synced_again(
    tmp_path: Path, made: Commit, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    store = open_dense(f"file://{tmp_path}/store")
    store.prepare(made.job, held=True)  # the COMMIT names it, and it is missing: it is made again
    assert store.is_seen(made.job)
    assert synced
    synced.clear()
    store.prepare(made.job, held=True)
    assert not synced
    store.prepare(made.job)
    assert len(synced) == 3


MANY = {".metadata": b"pickled", **{f"__{rank}_0.distcp": b"rank %d" % rank for rank in range(40)}}


@pytest.fixture(params=["folder", "memory"])
def listing(request: pytest.FixtureRequest, tmp_path: Path, made: Commit) -> tuple[DenseStore, Objects, Commit]:
    """A marker of many files as a job writes it: a store, its objects, and the COMMIT."""
    url = f"file://{tmp_path}/store" if request.param == "folder" else f"memory://{uuid.uuid4().hex}"
    store, objects = open_dense(url), open_store(url)
    store.prepare(made.job)
    assert store.is_seen(made.job)
    folder = store.writing(made.job, made.id)
    folder.mkdir(parents=True)
    for name, data in MANY.items():
        (folder / name).write_bytes(data)
    files = digest_files(folder, MANY)
    store.publish(made.job, made.id, files)
    named, said = name_files(store, made.job, made.id, files)
    store.settle(made.job, made.id)
    assert named == ()
    return store, objects, replace(made, dense_files=named, dense_list=said)


def test_many_files_are_named_by_a_list_beside_them(listing: tuple[DenseStore, Objects, Commit]) -> None:
    store, _, made = listing
    assert made.dense_count == len(MANY)
    assert made.dense_bytes == sum(map(len, MANY.values()))
    assert len(made.to_frame()) < 1100
    assert {file.name: file.num_bytes for file in store.files(made)} == {n: len(data) for n, data in MANY.items()}
    assert store.why_not(made) == ""
    store.verify(made)
    local = {path.name: path.read_bytes() for path in store.local(made).iterdir()}
    assert {name: data for name, data in local.items() if name != LIST_NAME} == MANY
    store.close()


@pytest.mark.parametrize("name", [LIST_NAME, "__7_0.distcp"])
@pytest.mark.parametrize("damage", ["gone", "longer", "altered"])
def test_a_listed_file_or_a_list_that_is_damaged_is_named(
    listing: tuple[DenseStore, Objects, Commit], name: str, damage: str
) -> None:
    store, objects, made = listing
    place = dense_file_name(made.job, made.id, name)
    data = bytes(objects.read(place))
    objects.delete(place)
    if damage != "gone":
        objects.put(place, [data + b" " if damage == "longer" else data[:-1] + b"?"])
    with pytest.raises(MissingObjectError if damage == "gone" else CorruptionError) as refused:
        store.verify(made)
    assert name in str(refused.value)
    if name == LIST_NAME:
        with pytest.raises(CorruptionError):
            store.files(made)
    if damage != "altered":
        assert name in store.why_not(made)
    store.close()


def test_a_list_that_names_what_its_commit_does_not_is_refused() -> None:
    said, data = listed([DenseFile(".metadata", 1, "ab" * 32)])
    assert parse_list(data, said, "x")
    for wrong in (replace(said, files=2), replace(said, num_bytes=2)):
        with pytest.raises(CorruptionError, match="differs from its COMMIT"):
            parse_list(data, wrong, "x")
    for text in (b"null", b"[1]", b'[{"name":1}]', b"[" * 9000, b"\xff", data.replace(b",", b", ")):
        forged = replace(said, list_bytes=len(text), sha256=hashlib.sha256(text).hexdigest())
        with pytest.raises(CorruptionError, match="the list of dense files"):
            parse_list(text, forged, "x")
    for name in (LIST_NAME, "../x", ".."):
        planted, text = listed([DenseFile(name, 1, "ab" * 32)])
        with pytest.raises(CorruptionError, match="is not a file name"):
            parse_list(text, planted, "x")
