"""The second copy of control records: a lost piece of a log is named, put back, and never a fresh start."""

from __future__ import annotations

import fnmatch
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from threading import Event
from typing import Any
from unittest.mock import patch

import pytest

from tests import stores
from tests.builders import JOB, OTHER_JOB, claim, commit, trim
from tests.command import ask, call, doctor, finish
from tests.parts import Entry, FileLog, FolderObjects, TierState, shorten_control
from tests.synthetic import Job
from tests.unit.copied_job import check, copied, copied_offsets, image, keep, key, offsets, recover, trainer
from torchrec_stream_ckpt.cli import verify
from torchrec_stream_ckpt.cli.common import open_job
from torchrec_stream_ckpt.errors import (
    ConfigError,
    CorruptionError,
    MarkerNotFoundError,
    StoreUnavailableError,
    StreamLostError,
    UnsupportedError,
)
from torchrec_stream_ckpt.find.find import Search
from torchrec_stream_ckpt.format.frame import Buffer
from torchrec_stream_ckpt.inner import Control, Objects, find, open_store
from torchrec_stream_ckpt.inner import Job as OpenJob
from torchrec_stream_ckpt.inner import Job as OpenedJob
from torchrec_stream_ckpt.log.control import copies
from torchrec_stream_ckpt.log.control.loss_check import check_whole
from torchrec_stream_ckpt.store.records import Copied, damaged_copies, put_copy, read_copy
from torchrec_stream_ckpt.util.layout import STORE_FILE, dense_name, partition_dir, segment_name
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
        (found,) = [each for name, each in doctor(f"file://{root}")[1].items() if name.startswith("second copy")]
        return {key: str(value) for key, value in found.items()}

    assert look()["verdict"] == "ok"
    for marker in (4, 5, 6):
        FileLog(root).append_control(commit(2, marker).to_frame())
    assert look()["verdict"] == "warning"
    assert "3 records are missing" in look()["found"]
    os.truncate(root / "control.log", offsets(root)[5])
    assert look()["verdict"] == "bad"
    assert "stream-ckpt recover" in look()["hint"]


# A control log that lost its end: its copy says so, nothing older is offered, and recovery puts it back.


@pytest.mark.parametrize("left", [1, 3, 6])
def test_a_control_log_that_lost_its_end_offers_no_older_marker(root: Path, left: int) -> None:
    before, path = image(root), root / "control.log"
    entries = offsets(root)
    os.truncate(path, entries[left] + 40 * (left == 3))  # also in the middle of a record
    markers = {1: 5, 3: 3, 6: 1}[left]
    said = f"the second copy has {7 - left} newer records, {markers} of them markers, up to 2:3"
    with pytest.raises(CorruptionError, match=said) as no:
        trainer(root).check_copy()
    assert f"stream-ckpt recover file://{root} --store file://{root}" in no.value.hint
    assert recover(root)["appended"] == 7 - left + 1
    assert image(root) == before
    check(root)


def test_a_log_that_lost_its_end_gets_no_name_and_a_follower_says_so(root: Path) -> None:
    uri, given = f"file://{root}", ("--store", root)
    assert call("name", uri, "1:1", "prod", *given).exit_code == 0
    os.truncate(root / "control.log", offsets(root)[3])
    listed = finish("list", uri, *given)
    assert "the second copy has" in listed.stderr
    for arguments in (("1:1", "other"), ("--remove", "prod")):
        with pytest.raises(CorruptionError, match="the second copy has"):
            raise call("name", uri, *arguments, *given).exception
    assert call("follow", uri, "--once", *given).stderr.startswith(listed.stderr)


def examined(root: Path) -> dict[str, tuple[str, str, str]]:
    """Verdict, finding and hint of each check."""
    found = doctor(f"file://{root}", "--store", root)[1]
    return {name: (each["verdict"], each["found"], each["hint"]) for name, each in found.items()}


def names_the_loss(root: Path, error: CorruptionError) -> None:
    """``list`` and ``verify`` name a lost marker as a restore does."""
    arguments = (f"file://{root}", "--store", str(root), "--json")
    listed = finish("list", *arguments)
    assert listed.stderr == f"Warning: {error.headline}\nTry: {error.hint}\n"
    assert json.loads(listed.stdout)["markers"]
    with patch.object(verify, "find_spec", return_value=None):  # the dense state is not a real one
        for more in ([], ["--all"]):
            done = call("verify", arguments[0], *more, *arguments[1:])
            assert (done.exit_code, done.stderr) == (1, listed.stderr)
            assert json.loads(done.stdout)[0]["marker"] == json.loads(listed.stdout)["markers"][-1]["marker"]
        alone = finish("verify", *arguments, "--log")
    assert str(call("verify", arguments[0], "2:3", *arguments[1:]).exception) == str(error)
    assert (alone.exit_code, alone.stderr) == (0, "")


def restore(root: Path) -> MarkerId:
    """Return the marker that a restore finds, with the store in the log's folder."""
    with closing(OpenJob.open(f"file://{root}", store=str(root))) as job:
        job.control.refresh()
        route = find(job, None, check_dense=lambda *_: None)
        assert route is not None
        return route.commit.id


@pytest.mark.parametrize("lost", [1, 2])
def test_a_marker_that_only_the_store_has_was_lost_by_the_log(tmp_path: Path, lost: int) -> None:
    """No second copy knows it: the trainer kept its copy in another store, or died before it wrote it."""
    root = copied(tmp_path, dense=True)
    stores.fold(root)
    for each in Copied.load(open_store(str(root)), JOB, key(root)).names:
        open_store(str(root)).delete(each.name)
    before = image(root)
    assert restore(root) == MarkerId(2, 3)
    os.truncate(root / "control.log", offsets(root)[-lost])
    with pytest.raises(CorruptionError, match=r"the store holds marker 2:3, which is not in the log: the end") as no:
        restore(root)
    assert f"stream-ckpt recover file://{root} --store file://{root}" in no.value.hint
    told = examined(root)
    assert told["store"] == ("bad", no.value.headline, no.value.hint)
    names_the_loss(root, no.value)
    recover(root)
    assert restore(root) == MarkerId(2, 3)
    assert image(root) == before
    assert examined(root)["store"][0] == "ok"
    with patch.object(verify, "find_spec", return_value=None):
        whole = finish("verify", f"file://{root}", "--store", str(root))
    assert (whole.exit_code, whole.stderr) == (0, "")


def test_a_marker_that_is_committed_and_folded_meanwhile_was_not_lost(root: Path) -> None:
    stores.fold(root)
    rest, path = offsets(root)[-1], root / "control.log"
    whole = path.read_bytes()
    os.truncate(path, rest)
    with closing(OpenJob.open(f"file://{root}", store=str(root))) as job:
        job.control.refresh()
        look = Search(TierState.read(job), job, check_dense=lambda *_: None)
        look.choose(None)
        path.write_bytes(whole)
        look.check_known()


class Late(FolderObjects):
    """A store in which a trainer commits a marker, and copies it, as somebody is about to list it."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.before: Callable[[], object] = lambda: None

    def list(self, prefix: str = "") -> Iterator[Entry]:
        before, self.before = self.before, lambda: None
        before()
        return super().list(prefix)


def test_what_a_trainer_appends_and_copies_meanwhile_was_not_lost(root: Path) -> None:
    def commits() -> None:
        FileLog(root).append_control(commit(2, 4, nonce="nonce-2").to_frame())
        keep(root)

    objects = Late(root)
    control = trainer(root, objects=objects)
    objects.before = commits
    control.check_copy()
    assert control.lineage.newest is not None
    assert control.lineage.newest.id == MarkerId(2, 4)


@pytest.mark.parametrize("verb", ["list", "show", "verify", "list --json", "watch --once", "watch --once --json"])
def test_a_lost_end_is_said_once_with_what_puts_it_back(root: Path, verb: str) -> None:
    name, *options = verb.split()
    whole = call(name, f"file://{root}", *options)
    assert "control partition was lost" not in whole.output
    os.truncate(root / "control.log", offsets(root)[4])
    # No line is wrapped.
    said = call(name, f"file://{root}", *options, columns=1000)
    assert said.output.count("the end of the log's control partition was lost: it ends at 1:2") == 1
    assert "3 newer records, 3 of them markers, up to 2:3" in said.output
    assert f"stream-ckpt recover file://{root} --store file://{root}" in said.output


def test_a_fence_is_copied_at_once(root: Path) -> None:
    assert ask("fence", f"file://{root}", "--yes")["copied"]
    assert copied_offsets(root) == offsets(root)


def test_a_fence_does_not_wait_for_a_store_and_says_that_it_is_not_copied(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deaf, answers = Late(root), Event()
    monkeypatch.setattr("torchrec_stream_ckpt.find.job.open_store", lambda *_: deaf)
    monkeypatch.setattr("torchrec_stream_ckpt.cli.fence.STORE_S", 0.2)
    deaf.before = lambda: answers.wait(60)
    try:
        assert not ask("fence", f"file://{root}", "--yes")["copied"]
    finally:
        answers.set()
    assert copied_offsets(root) == offsets(root)[:-1]
    assert Control(FileLog(root)).refresh().newest_generation == 3


def test_a_log_that_lost_its_end_is_not_fenced_under_a_number_that_is_used(root: Path) -> None:
    before = image(root)
    os.truncate(root / "control.log", offsets(root)[3])
    with pytest.raises(CorruptionError, match="control partition was lost"):
        ask("fence", f"file://{root}", "--yes")
    assert recover(root)["offered"][-1] == "2:3"
    assert image(root) == before
    assert ask("fence", f"file://{root}", "--yes")["generation"] == 4


@pytest.mark.parametrize("folded", ["1:2", "2:3"])
def test_a_log_that_lost_its_end_is_not_trimmed(root: Path, folded: str) -> None:
    """A trim would take the second generation for a dead one, and its snapshot would take the copy's place."""
    stores.fold(root, upto=MarkerId.parse(folded))
    before, copied = image(root), copied_offsets(root)
    rows = {path: path.read_bytes() for path in root.rglob("*.seg")}
    os.truncate(root / "control.log", offsets(root)[4])
    for options in (["--dry-run"], []):
        done = call("trim", f"file://{root}", "--store", str(root), *options)
        assert isinstance(done.exception, CorruptionError)
        assert "control partition was lost" in str(done.exception)
    assert copied_offsets(root) == copied
    assert {path: path.read_bytes() for path in root.rglob("*.seg")} == rows
    assert recover(root)["offered"][-1] == "2:3"
    assert image(root) == before


def test_rows_of_a_generation_that_the_control_log_does_not_know_are_its_lost_end(root: Path) -> None:
    for name in Copied.load(
        open_store(str(root)), JOB, key(root)
    ).names:  # as of a job that began before there was a copy
        open_store(str(root)).delete(name.name)
    entries = offsets(root)
    os.truncate(root / "control.log", entries[2])
    with pytest.raises(CorruptionError, match=r"rows of generation 2, but control\.log ends at generation 1"):
        check(root)


def test_a_log_that_went_on_after_it_lost_its_end_is_not_joined(root: Path) -> None:
    entries = offsets(root)
    os.truncate(root / "control.log", entries[4])
    FileLog(root).append_control(claim(3, nonce="another", incarnation="x").to_frame())
    with pytest.raises(CorruptionError, match="control partition was lost"):
        trainer(root).check_copy()
    with pytest.raises(ConfigError, match="differs from its second copy"):
        recover(root)
    (root / "control.log").unlink()
    assert recover(root)["offered"][-1] == "2:3"


# Damage to the second copy of control records, and to ``STORE``: named, and repaired where that is provable.


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """A folded job whose control records are copied: one object for each record, and one for all but two of them."""
    kept = copied(tmp_path, dense=True)
    stores.fold(kept)
    objects, log = open_store(str(kept)), key(kept)
    for name in Copied.load(objects, JOB, log).names:
        objects.delete(name.name)
    entries = list(FileLog(kept).read_control())
    put_copy(objects, JOB, log, 1, entries[:-2])
    for each in entries[-2:]:
        put_copy(objects, JOB, log, 1, [each])
    assert damaged_copies(objects, JOB) == []
    return kept


def records(kept: Path) -> list[Path]:
    return sorted((kept / "records").rglob("*-e*"))


def flip(path: Path, place: int) -> bytes:
    whole = path.read_bytes()
    place %= len(whole)
    path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
    return whole


def scrub(kept: Path, *more: str) -> tuple[int, list[dict[str, Any]]]:
    done = finish("scrub", f"file://{kept}", "--store", str(kept), "--json", "--anew", *more)
    damaged: list[dict[str, Any]] = json.loads(done.stdout)[0]["damaged"]
    return done.exit_code, [each for each in damaged if each["name"].startswith("records/")]


def verified(kept: Path) -> tuple[int, str]:
    with patch.object(verify, "find_spec", return_value=None):  # the dense state is not a real one
        done = finish("verify", f"file://{kept}", "--store", str(kept))
    return done.exit_code, done.stderr


@pytest.mark.parametrize("number", [0, 2], ids=["many records", "one record"])
@pytest.mark.parametrize("place", [0, 12, 60, -1], ids=["offset", "header", "payload", "end"])
def test_a_flipped_byte_is_named_and_written_again_from_the_log(kept: Path, number: int, place: int) -> None:
    path = records(kept)[number]
    name = str(path.relative_to(kept))
    whole = flip(path, place)
    status, said = verified(kept)
    assert status == 1
    assert "the second copy of control records is damaged" in said
    assert name in said
    assert "--repair" in said
    (damage,) = scrub(kept)[1]
    assert (damage["name"], damage["state"]) == (name, "damaged")
    (damage,) = scrub(kept, "--repair")[1]
    assert (damage["name"], damage["state"], damage["source"]) == (name, "repaired", "the log")
    assert path.read_bytes() == whole
    assert (kept / "damaged" / name).exists()
    assert verified(kept)[0] == 0
    assert scrub(kept)[1] == []


def test_what_the_log_cannot_prove_stays_and_is_named_with_the_command_that_helps(kept: Path) -> None:
    """A merged object that was cut: it may have had fewer records. A record that the log has lost. Another log's."""
    many, _, last = records(kept)
    objects, before = open_store(str(kept)), {path: path.read_bytes() for path in records(kept)}

    def is_lost(path: Path, why: str) -> None:
        harmed = path.read_bytes()
        (damage,) = scrub(kept, "--repair")[1]
        assert damage["state"] == "lost"
        assert why in damage["lost"]
        assert "stream-ckpt recover URI --store URL" in damage["lost"]
        assert path.read_bytes() == harmed
        path.write_bytes(before.get(path, b""))

    many.write_bytes(before[many][:-3])
    is_lost(many, "it had other records than the log has at these offsets")
    with (kept / "control.log").open("r+b") as control:
        whole = control.read()
        control.truncate(offsets(kept)[-1])
    flip(last, 60)
    is_lost(last, f"the log has no such record at offset {len(whole) - len(before[last]) + 8}")
    (kept / "control.log").write_bytes(whole)
    other = put_copy(objects, JOB, "0" * 8, 1, list(FileLog(kept).read_control()))
    before[kept / other.name] = (kept / other.name).read_bytes()
    flip(kept / other.name, 60)
    is_lost(kept / other.name, "it is a copy of another log")
    assert damaged_copies(objects, JOB) == []


def test_the_first_object_of_an_epoch_is_copied_again_by_recover(kept: Path) -> None:
    """Its offsets give only an order: the log has other records there."""
    with closing(trainer(kept)) as control:
        control.refresh()
        assert control.copies is not None
    for path in records(kept):
        path.unlink()
    recover(kept)
    (path,) = records(kept)
    flip(path, 60)
    (damage,) = scrub(kept, "--repair")[1]
    assert damage["state"] == "lost"
    recover(kept)
    assert verified(kept)[0] == 0


@pytest.mark.parametrize("place", [0, 3, 10, 12])
def test_a_format_of_which_one_byte_was_altered_is_put_back(kept: Path, place: int) -> None:
    whole = flip(kept / STORE_FILE, place)
    with pytest.raises(CorruptionError, match="does not state the format") as no:
        scrub(kept)
    assert "scrub URI --store URL --repair" in no.value.hint
    assert scrub(kept, "--repair") == (0, []) or place == 10
    assert (kept / STORE_FILE).read_bytes() == whole
    assert (kept / "damaged" / STORE_FILE).exists()


@pytest.mark.parametrize("said", [b'{"format": 5}', b'{"fXrmat": 5}', b'{"format": 1', b"", b'{"format": 12}'])
def test_a_format_that_may_be_a_newer_ones_is_left_alone(kept: Path, said: bytes) -> None:
    (kept / STORE_FILE).write_bytes(said)
    with pytest.raises((CorruptionError, UnsupportedError), match="format") as no:
        scrub(kept, "--repair")
    assert '{"format": 1}' in no.value.hint
    assert (kept / STORE_FILE).read_bytes() == said
