"""The second copy of control records: a lost piece of a log is named, put back, and never a fresh start."""

from __future__ import annotations

import fnmatch
import json
import os
from collections.abc import Sequence
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from typer.testing import CliRunner

from tests import stores
from tests.builders import JOB, OTHER_JOB, claim, commit, trim
from tests.parts import FileLog, app
from tests.synthetic import Job
from tests.unit.copied_job import check, copied, copied_offsets, image, key, offsets, recover, trainer
from torchrec_stream_ckpt.cli.common import open_job
from torchrec_stream_ckpt.errors import (
    ConfigError,
    CorruptionError,
    MarkerNotFoundError,
    StoreUnavailableError,
    StreamLostError,
)
from torchrec_stream_ckpt.find.job import Job as OpenedJob
from torchrec_stream_ckpt.format.frame import Buffer
from torchrec_stream_ckpt.inner import Control, Objects, open_store
from torchrec_stream_ckpt.log.control import copies
from torchrec_stream_ckpt.log.control.loss_check import check_whole
from torchrec_stream_ckpt.log.control.snapshots import shorten_control
from torchrec_stream_ckpt.store.records import Copied, put_copy, read_copy
from torchrec_stream_ckpt.util.layout import dense_name, partition_dir, segment_name
from torchrec_stream_ckpt.util.types import MarkerId
from torchrec_stream_ckpt.util.uris import parse_uri

LAST = MarkerId(2, 3)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A job of two generations and five markers, whose records are copied."""
    return copied(tmp_path)


def lineage_of(root: Path) -> list[str]:
    return [str(marker) for marker in Control(FileLog(root)).refresh().commits]


def delete(root: Path, *patterns: str) -> None:
    """As a cleaner does that knows names alone."""
    for path in sorted(root.rglob("*")):
        if path.is_file() and any(fnmatch.fnmatch(path.name, pattern) for pattern in patterns):
            path.unlink()


@pytest.mark.parametrize(
    ("patterns", "said"),
    [
        (["*.log"], "holds rows, but control.log"),
        (["control*"], "holds rows, but control.log"),
        (["LOG"], "the file log holds control records, but its identity file is missing"),
        (["LOG", "control*"], "the file log holds rows, but its identity file is missing"),
    ],
    ids=str,
)
def test_what_a_cleaner_took_is_named_and_put_back(root: Path, patterns: Sequence[str], said: str) -> None:
    before = image(root)
    rows = {path: path.read_bytes() for path in root.rglob("*.seg")}
    delete(root, *patterns)
    with pytest.raises(CorruptionError, match=said) as refused:
        check(root)
    assert f"stream-ckpt recover file://{root} --store" in refused.value.hint
    with pytest.raises(CorruptionError, match="holds"), open_job(OpenedJob.open(f"file://{root}")):
        pass
    found = recover(root)
    assert found["offered"] == ["1:1", "1:2", "2:1", "2:2", "2:3"] == lineage_of(root)
    assert image(root) == before
    assert {path: path.read_bytes() for path in root.rglob("*.seg")} == rows
    check(root)
    assert recover(root)["appended"] == 0


@pytest.mark.parametrize("pattern", ["*.log", "*.seg", "control*", "LOG", "*LOG*", "*log*", "*.lock"])
def test_no_pattern_of_a_logs_files_takes_the_copy(root: Path, pattern: str) -> None:
    objects, log = open_store(str(root)), key(root)
    before = read_copy(objects, JOB, log)
    assert len(before) == 7
    delete(root, pattern)
    assert read_copy(objects, JOB, log) == before


def test_without_rows_and_records_what_is_left_in_its_folder_is_no_new_log(root: Path) -> None:
    delete(root, "*.seg", "control*", "LOG")
    with pytest.raises(CorruptionError, match="the store holds its markers: the log was lost"):
        check(root)
    with pytest.raises(MarkerNotFoundError, match="its second copy lists 5, up to 2:3, but their rows are lost"):
        recover(root)


def test_nothing_anywhere_is_a_new_job(tmp_path: Path) -> None:
    check(tmp_path / "new")


def test_a_store_elsewhere_knows_whose_log_it_was(tmp_path: Path) -> None:
    objects = open_store(str(tmp_path / "store"))
    job = Job(tmp_path / "job")
    job.begin()
    job.commit()
    control = trainer(job.root, objects=objects)
    control.refresh()
    assert control.copies is not None
    control.copies.now()
    for name, lost in (("job", True), ("another", False)):
        uri = parse_uri(f"file://{tmp_path}/{name}")
        empty = FileLog(tmp_path / "empty")
        if lost:
            with pytest.raises(CorruptionError, match="the log was lost"):
                check_whole(empty, Control(empty), uri, objects)
        else:
            check_whole(empty, Control(empty), uri, objects)


def test_what_the_copy_lacks_comes_from_manifests(root: Path) -> None:
    stores.fold(root)
    objects = open_store(str(root))
    entries = [entry for entry in read_copy(objects, JOB, key(root)) if entry[0] < offsets(root)[-2]]
    for name in Copied.load(objects, JOB, key(root)).names:
        objects.delete(name.name)
    put_copy(objects, JOB, key(root), 1, [*entries, (10**6, trim("1:1").to_frame())])
    before = image(root)
    (root / "control.log").unlink()
    found = recover(root)
    assert (found["offered"], found["next_generation"]) == (["1:1", "1:2", "2:1", "2:2", "2:3"], 4)
    assert image(root) == before
    assert Control(FileLog(root)).refresh().trims.reach == {1: MarkerId(1, 1)}


def test_a_copy_that_is_behind_is_well_and_makes_up_for_it(root: Path) -> None:
    FileLog(root).append_control(commit(2, 4, nonce="nonce-2").to_frame())
    FileLog(root).append_control(commit(2, 5, nonce="nonce-2").to_frame())
    control = trainer(root)
    control.check_copy()
    control.commit(commit(2, 6, nonce="nonce-2"), 5.0, Event())
    control.close()
    assert copied_offsets(root) == [offset for offset, _ in FileLog(root).read_control()]


def test_what_only_marks_speak_of_is_not_committed(root: Path) -> None:
    objects, last = open_store(str(root)), offsets(root)[-1]
    copied = Copied.load(objects, JOB, key(root))
    entries = [entry for entry in copied.read() if entry[0] < last]
    for name in copied.names:
        objects.delete(name.name)
    put_copy(objects, JOB, key(root), 1, entries)
    (root / "control.log").unlink()
    assert recover(root)["offered"][-1] == "2:2"
    for name in Copied.load(objects, JOB, key(root)).names:
        objects.delete(name.name)
    (root / "control.log").unlink()
    with pytest.raises(MarkerNotFoundError, match="neither the log nor the store has a record of a commit"):
        recover(root, "--job", JOB.hex())


@pytest.mark.parametrize("where", ["segment", "dense", "copy"])
def test_the_next_generation_is_above_all_that_are_named_anywhere(root: Path, where: str) -> None:
    objects, schema = open_store(str(root)), Control(FileLog(root)).refresh().claims[LAST.generation].schema
    if where == "segment":
        (partition_dir(root, 1) / segment_name(9, 0)).touch()
    elif where == "dense":
        objects.put(f"{dense_name(JOB, MarkerId(9, 1))}/file", [b"never committed"])
    else:
        put_copy(objects, JOB, key(root), 1, [(10**6, claim(9, parent=LAST, schema=schema).to_frame())])
    (root / "control.log").unlink()
    assert recover(root)["next_generation"] == 11
    assert lineage_of(root)[-1] == "2:3"


def test_what_a_key_does_not_vouch_for_is_not_used(tmp_path: Path) -> None:
    key_file = tmp_path / "key"
    key_file.touch(mode=0o600)
    key_file.write_bytes(bytes(range(32)))
    control, objects = trainer(tmp_path / "job", key_file), open_store(str(tmp_path / "job"))
    identity = FileLog(tmp_path / "job").prepare(1).id
    control.claim(claim(1, incarnation=identity))
    control.commit(commit(1, 1), 5.0, Event())
    control.close()
    control = trainer(tmp_path / "job", key_file)
    put_copy(objects, JOB, key(tmp_path / "job"), 1, [(10**6, commit(1, 9).to_frame())])
    control.check_copy()
    control.commit(commit(1, 2), 5.0, Event())
    control.close()
    (tmp_path / "job" / "control.log").unlink()
    with pytest.raises(ConfigError, match="has a commit key"):
        recover(tmp_path / "job")
    assert recover(tmp_path / "job", "--commit-key-file", str(key_file))["offered"] == ["1:1", "1:2"]
    lineage = Control(FileLog(tmp_path / "job"), key_file).refresh()
    assert (lineage.unsigned, lineage.claims[1].mac != "") == (0, True)


class Failing:
    """A store that takes no copies."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self.fails = True

    def put(self, name: str, parts: Sequence[Buffer]) -> None:
        if self.fails:
            raise StoreUnavailableError("no room", name=name)
        self._objects.put(name, parts)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._objects, name)


def test_a_copy_that_fails_fails_no_commit_is_said_once_and_made_up_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "_KEPT_BYTES", 1500)  # all is read again
    FileLog(tmp_path).prepare(1)
    store = Failing(open_store(str(tmp_path)))
    control = trainer(tmp_path, objects=store)
    control.claim(claim(1))
    for marker in range(1, 6):
        control.commit(commit(1, marker), 5.0, Event())
    control.close()
    assert control.copies is not None
    assert control.copies.failed
    assert [
        each.levelname for each in caplog.records if "cannot write the second copy of control records" in each.message
    ].count("WARNING") == 1
    assert read_copy(store, JOB, key(tmp_path)) == []
    store.fails = False
    control.commit(commit(1, 6), 5.0, Event())
    control.close()
    assert len(read_copy(store, JOB, key(tmp_path))) == 7


def test_many_objects_become_one(tmp_path: Path) -> None:
    FileLog(tmp_path).prepare(1)
    objects = open_store(str(tmp_path))
    for first in (1, 50):
        control = trainer(tmp_path)
        if first == 1:
            control.claim(claim(1))
        control.check_copy()
        for marker in range(first, first + 49):
            control.commit(commit(1, marker), 5.0, Event())
            control.close()
    assert len(Copied.load(objects, JOB, key(tmp_path)).names) < 70
    assert [offset for offset, _ in read_copy(objects, JOB, key(tmp_path))] == [
        offset for offset, _ in FileLog(tmp_path).read_control()
    ]


def test_after_a_snapshot_the_copy_is_as_short_as_the_log(root: Path) -> None:
    control = trainer(root)
    control.check_copy()
    control.trim(trim("1:2", given_up=(MarkerId(1, 1),)))
    shorten_control(FileLog(root), Control(FileLog(root)), at_once=True)
    control.commit(commit(2, 4), 5.0, Event())
    control.close()
    # The last COMMIT is in the same object, or in one of its own if the thread that copies was at the snapshot before.
    assert {name.epoch for name in Copied.load(open_store(str(root)), JOB, key(root)).names} == {2}
    check(root)
    (root / "control.log").unlink()
    assert recover(root)["offered"] == ["1:2", "2:1", "2:2", "2:3", "2:4"]


def test_a_damaged_object_of_the_copy_gives_what_is_whole(root: Path) -> None:
    (path,) = (root / "records" / JOB.hex()).iterdir()
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    assert 0 < len(read_copy(open_store(str(root)), JOB, key(root))) < 7


def test_a_segment_that_is_there_is_never_opened_by_a_new_stream(tmp_path: Path) -> None:
    log = FileLog(tmp_path)
    log.prepare(1)
    path = partition_dir(tmp_path, 0) / segment_name(5, 0)
    path.write_bytes(b"of somebody else")
    with pytest.raises(StreamLostError, match="already exists, written by another program"):
        log.open_writer(5, 0, 0)
    assert path.read_bytes() == b"of somebody else"


def test_records_of_another_job_in_the_copy_are_not_used(root: Path) -> None:
    put_copy(open_store(str(root)), JOB, key(root), 1, [(10**6, claim(7, job=OTHER_JOB).to_frame())])
    check(root)
    (root / "control.log").unlink()
    assert recover(root)["next_generation"] == 4


def test_doctor_says_how_much_is_copied(root: Path) -> None:
    def look() -> dict[str, str]:
        done = CliRunner().invoke(app, ["doctor", f"file://{root}", "--json"])
        (found,) = [each for each in json.loads(done.stdout) if each["check"].startswith("second copy")]
        return {key: str(value) for key, value in found.items()}

    assert look()["verdict"] == "ok"
    for marker in (4, 5, 6):
        FileLog(root).append_control(commit(2, marker).to_frame())
    assert look()["verdict"] == "warning"
    assert "3 records are missing" in look()["found"]
    os.truncate(root / "control.log", offsets(root)[5])
    assert look()["verdict"] == "bad"
    assert "stream-ckpt recover" in look()["hint"]
