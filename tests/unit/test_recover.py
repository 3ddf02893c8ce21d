"""A log that was lost comes back from the store, as far as the store knows it."""

from __future__ import annotations

import os
import shlex
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests import stores
from tests.builders import JOB, OTHER_JOB, ROWWISE, claim, table
from tests.command import ask, run
from tests.parts import FileLog, Materializer, file_writer, open_dense, prepare_store
from tests.stores import History
from tests.tables import FIRST, write_tables
from tests.unit.test_interchange import SCHEMA, values
from torchrec_stream_ckpt.errors import ConfigError, CorruptionError, MarkerNotFoundError, UnsupportedError
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.inner import Control, open_store
from torchrec_stream_ckpt.log.control.loss_check import check_not_lost
from torchrec_stream_ckpt.util.layout import CONTROL_FILE, RECORDS_DIR, STORE_FILE, claim_name, dense_name
from torchrec_stream_ckpt.util.types import MarkerId
from torchrec_stream_ckpt.util.uris import parse_uri


@pytest.fixture
def lost(tmp_path: Path) -> Path:
    """A folder with a store, whose log is gone."""
    directory = tmp_path / "job"
    write_tables(directory, SCHEMA, values(), [[0], [0], [0, 2]])
    stores.fold(directory)
    stores.lose_log(directory)
    return directory


def test_the_markers_of_a_lost_log_can_be_read_again(lost: Path, tmp_path: Path) -> None:
    found = ask("recover", f"file://{lost}", "--store", lost)
    assert (found["job"], found["offered"], found["next_generation"]) == (JOB.hex(), ["1:1"], 2)
    (marker,) = ask("list", f"file://{lost}", "--store", lost)["markers"]
    assert (marker["marker"], marker["from"], marker["log"]) == ("1:1", "store", False)
    ask("export", f"file://{lost}", f"--to=safetensors://{tmp_path}/out")
    assert ask("recover", f"file://{lost}", "--store", lost)["appended"] == 0


def test_a_log_elsewhere_reads_its_rows_from_the_store(lost: Path, tmp_path: Path) -> None:
    ask("recover", f"file://{tmp_path}/new", "--store", lost)
    lineage = Control(FileLog(tmp_path / "new")).refresh()
    assert list(lineage.commits) == [FIRST]
    assert [trim.markers for trim in lineage.trims] == [(FIRST,)]
    assert lineage.spans(1, lineage.find(FIRST).ranks) == []
    ask("export", f"file://{tmp_path}/new", "--store", lost, f"--to=parquet://{tmp_path}/out")


@pytest.mark.parametrize("hits", [1, 2, 3])
def test_a_recovery_that_was_killed_is_finished_by_the_next(
    lost: Path, hits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("recover", f"file://{lost}", "--store", lost)
    count = 0

    def die(name: str) -> None:
        nonlocal count
        count += name == "recover.append"
        if count == hits:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("torchrec_stream_ckpt.maintain.recover.recover.failpoint", die)
        with pytest.raises((KeyboardInterrupt, AssertionError)):
            ask(*arguments)
    assert ask(*arguments)["appended"] == 4 - hits
    assert list(Control(FileLog(lost)).refresh().commits) == [FIRST]


def test_numbers_that_left_something_in_the_store_are_not_used_again(lost: Path) -> None:
    objects = open_store(str(lost))
    objects.put(f"{dense_name(JOB, MarkerId(7, 3))}/file", [b"of a marker that was never committed"])
    assert ask("recover", f"file://{lost}", "--store", lost)["next_generation"] == 8
    lineage = Control(FileLog(lost)).refresh()
    assert lineage.newest is not None
    assert (lineage.newest.id, lineage.claims[7].world) == (FIRST, 0)


def test_a_log_that_is_there_is_left_alone(lost: Path, tmp_path: Path) -> None:
    write_tables(tmp_path / "other", Schema((table("m.t", 4, 2, "float32", ROWWISE),)), short())
    before = (tmp_path / "other" / "control.log").read_bytes()
    with pytest.raises(ConfigError, match="the log is not empty"):
        ask("recover", f"file://{tmp_path}/other", "--store", lost)
    assert (tmp_path / "other" / "control.log").read_bytes() == before


def short() -> Any:
    weights = values()[2][0][:4, :2]
    return [(weights, (weights[:, 0],))]


def test_of_several_jobs_one_has_to_be_named(lost: Path) -> None:
    open_store(str(lost)).put(claim_name(OTHER_JOB, 1), [claim(1, job=OTHER_JOB).to_frame()])
    with pytest.raises(ConfigError, match="holds 2 jobs"):
        ask("recover", f"file://{lost}", "--store", lost)
    with pytest.raises(ConfigError, match="is not a job's id"):
        ask("recover", f"file://{lost}", "--store", lost, "--job", "mine")
    with pytest.raises(MarkerNotFoundError):
        ask("recover", f"file://{lost}", "--store", lost, "--job", OTHER_JOB.hex())
    assert ask("recover", f"file://{lost}", "--store", lost, "--job", JOB.hex())["offered"] == ["1:1"]


def test_signed_records_come_back_signed(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.touch(mode=0o600)
    key.write_bytes(bytes(range(32)))
    directory = tmp_path / "job"
    write_tables(directory, SCHEMA, values(), key_file=key)
    stores.fold(directory)
    stores.lose_log(directory)
    open_store(str(directory)).put(f"{dense_name(JOB, MarkerId(4, 1))}/file", [b"of a marker that was never committed"])
    arguments = ("recover", f"file://{directory}", "--store", directory)
    with pytest.raises(ConfigError, match="has a commit key"):
        ask(*arguments)
    assert ask(*arguments, "--commit-key-file", key)["offered"] == ["1:1"]
    lineage = Control(FileLog(directory), key).refresh()
    assert (list(lineage.commits), len(lineage.trims), lineage.unsigned) == ([FIRST], 1, 0)
    assert lineage.newest_generation == 4


def test_a_store_without_markers_recovers_nothing(tmp_path: Path) -> None:
    with pytest.raises(MarkerNotFoundError):
        ask("recover", f"file://{tmp_path}/log", "--store", f"{tmp_path}/store")
    assert not (tmp_path / "log").exists()


def test_a_lineage_with_a_gap_is_not_put_back(lost: Path) -> None:
    (manifest,) = lost.glob("manifests/*/*.json")
    shutil.copy(manifest, manifest.with_name("g00000001-m00000002.json"))
    with pytest.raises(CorruptionError):
        ask("recover", f"file://{lost}", "--store", lost)
    assert not os.path.exists(lost / "control.log")


def test_an_empty_log_over_its_own_store_is_no_fresh_start(lost: Path, tmp_path: Path) -> None:
    objects = open_store(str(lost))
    with pytest.raises(CorruptionError, match="was lost") as raised:
        check_not_lost(parse_uri(f"file://{lost}"), objects)
    assert f"stream-ckpt recover file://{lost} --store file://{lost}" in raised.value.hint
    for name in ("a folder", "it's"):  # the command can be pasted into a shell
        place = shutil.copytree(lost, tmp_path / name)
        with pytest.raises(CorruptionError) as raised:
            check_not_lost(parse_uri(f"file://{place}"), open_store(str(place)))
        command = raised.value.hint.removeprefix("recover it: ").partition(";")[0]
        assert shlex.split(command) == ["stream-ckpt", "recover", f"file://{place}", "--store", f"file://{place}"]
        with pytest.raises(MarkerNotFoundError) as missing:
            ask("list", f"file://{tmp_path}/no such {name}")
        assert f"doctor {shlex.quote(f'file://{tmp_path}/no such {name}')} --new" in missing.value.hint
    check_not_lost(parse_uri(f"file://{tmp_path}/another"), objects)
    check_not_lost(parse_uri(f"file://{lost}"), open_store(str(tmp_path / "nothing")))


def test_a_kafka_job_knows_its_own_markers_by_name(tmp_path: Path) -> None:
    objects = open_store(str(tmp_path))
    prepare_store(objects)
    objects.put(claim_name(JOB, 2), [claim(2, name="clicks").to_frame()])
    check_not_lost(parse_uri("kafka://broker:9092/views"), objects)
    with pytest.raises(CorruptionError, match="was lost"):
        check_not_lost(parse_uri("kafka://broker:9092/clicks"), objects)


def test_the_format_of_the_store_is_looked_at_whoever_names_the_job(lost: Path) -> None:
    (lost / STORE_FILE).write_bytes(b'{"format": 2}')
    for more in ((), ("--job", JOB.hex())):
        with pytest.raises(UnsupportedError, match="the store has format 2"):
            ask("recover", f"file://{lost}", "--store", lost, *more)
    assert not (lost / CONTROL_FILE).exists()


def test_a_job_may_be_named_in_upper_case(lost: Path) -> None:
    assert ask("recover", f"file://{lost}", "--store", lost, "--job", JOB.hex().upper())["job"] == JOB.hex()


def _die_at_the_trim(name: str) -> None:
    if name == "recover.trim":
        raise KeyboardInterrupt


def test_a_lost_trim_is_put_back_for_rows_that_the_store_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_writer, "SEGMENT_BYTES", 1)
    history = stores.History(tmp_path / "job")
    history.generation(1, [1, 2, 3])
    stores.fold(history.root, upto=MarkerId(1, 2))
    uri, control = f"file://{history.root}", history.root / CONTROL_FILE
    before = control.read_bytes()
    ask("trim", uri, "--store", history.root, "--upto", "1:2")
    control.write_bytes(before)
    shutil.rmtree(history.root / RECORDS_DIR)
    assert not history.lineage.trims
    with monkeypatch.context() as patch:  # a first recovery dies before it says so
        patch.setattr("torchrec_stream_ckpt.maintain.recover.control_recovery.failpoint", _die_at_the_trim)
        with pytest.raises((KeyboardInterrupt, AssertionError)):
            ask("recover", uri, "--store", history.root)
    assert not history.lineage.trims
    assert ask("recover", uri, "--store", history.root)["appended"] == 1
    (trim,) = history.lineage.trims
    assert (trim.markers, trim.store) == ((MarkerId(1, 2),), uri)
    history.log.check_there(history.lineage.spans(1, history.lineage.find(MarkerId(1, 3)).ranks))
    assert ask("recover", uri, "--store", history.root)["appended"] == 0


def test_rows_that_only_the_log_had_are_not_said_to_be_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_writer, "SEGMENT_BYTES", 1)
    history = stores.History(tmp_path / "job")
    history.generation(1, [1, 2, 3])
    stores.fold(history.root, upto=MarkerId(1, 2))
    stores.lose_rows(history.root)
    ask("recover", f"file://{history.root}", "--store", history.root)
    (trim,) = history.lineage.trims
    assert trim.markers == (MarkerId(1, 2),)
    with pytest.raises(CorruptionError, match="no segment with bytes 2176 to 2944 is there"):
        ask("verify", f"file://{history.root}", "--marker", "1:3")


def test_an_old_materializer_that_still_runs_does_not_stop_the_recovered_log(tmp_path: Path) -> None:
    """The old log had a marker more than the store: its materializer brings that one after the recovery."""
    old, new, store = (tmp_path / name for name in ("old", "new", "store"))
    before = History(old)
    before.generation(1, [1, 2, 3])
    objects = open_store(str(store))
    with ThreadPoolExecutor(2) as pool:
        late = Materializer(before.log, objects, lambda _: open_dense(str(old)), pool)
        lineage = before.lineage
        some = Lineage(lineage.claims, lineage.commits.only([MarkerId(1, 1), MarkerId(1, 2)]))
        assert list(late.catch_up(some)) == [MarkerId(1, 1), MarkerId(1, 2)]
        assert ask("recover", f"file://{new}", "--store", store)["offered"] == ["1:1", "1:2"]
        assert list(late.catch_up(lineage)) == [MarkerId(1, 3)]
    after = History(new)
    after.rows = before.rows
    after.generation(2, [3, 4], "1:2")
    log = [f"file://{new}", "--store", str(store)]
    run("materialize", *log, "--dense", str(new), "--once")
    for marker in (MarkerId(1, 2), MarkerId(2, 4)):
        assert stores.rows_of(objects, after.lineage, marker) == before.rows[marker]
    (collected,) = ask("gc", *log, "--newest", "1", "--grace", "0s")
    assert (collected["kept"], collected["dropped"]) == (["2:4"], ["1:1", "1:2", "2:3"])
    assert stores.rows_of(objects, after.lineage, MarkerId(2, 4)) == before.rows[MarkerId(2, 4)]
    assert stores.rows_of(objects, before.lineage, MarkerId(1, 3)) == before.rows[MarkerId(1, 3)], "it is left alone"
    assert ask("trim", *log, "--verify")["upto"] == "2:4"
