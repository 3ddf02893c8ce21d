"""A control log that lost its end: its copy says so, nothing older is offered, and recovery puts it back."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from threading import Event
from typing import Any
from unittest.mock import patch

import pytest
from typer.testing import CliRunner

from tests import stores
from tests.builders import JOB, claim, commit
from tests.parts import Entry, FileLog, FolderObjects, app
from tests.unit.copied_job import check, copied, copied_offsets, image, keep, key, offsets, recover, trainer
from torchrec_stream_ckpt.cli import verify
from torchrec_stream_ckpt.errors import (
    ConfigError,
    CorruptionError,
)
from torchrec_stream_ckpt.find.find import Search, find
from torchrec_stream_ckpt.find.tiers import TierState
from torchrec_stream_ckpt.inner import Control, Job, open_store
from torchrec_stream_ckpt.store.records import Copied
from torchrec_stream_ckpt.util.types import MarkerId


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A job of two generations and five markers, whose records are copied."""
    return copied(tmp_path)


def fence(root: Path) -> dict[str, Any]:
    done = CliRunner().invoke(app, ["fence", f"file://{root}", "--yes", "--json"])
    if done.exception is not None:
        raise done.exception
    found: dict[str, Any] = json.loads(done.stdout)
    return found


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


def doctor(root: Path) -> dict[str, tuple[str, str, str]]:
    """Verdict, finding and hint of each check."""
    done = CliRunner().invoke(app, ["doctor", f"file://{root}", "--store", str(root), "--json"])
    return {each["check"]: (each["verdict"], each["found"], each["hint"]) for each in json.loads(done.stdout)}


def names_the_loss(root: Path, error: CorruptionError) -> None:
    """``list`` and ``verify`` name a lost marker as a restore does."""
    arguments = (f"file://{root}", "--store", str(root), "--json")
    listed = CliRunner().invoke(app, ["list", *arguments], catch_exceptions=False)
    assert listed.stderr == f"Warning: {error.headline}\nTry: {error.hint}\n"
    assert json.loads(listed.stdout)["markers"]
    with patch.object(verify, "find_spec", return_value=None):  # the dense state is not a real one
        for more in ([], ["--all"]):
            done = CliRunner().invoke(app, ["verify", arguments[0], *more, *arguments[1:]])
            assert (done.exit_code, done.stderr) == (1, listed.stderr)
            assert json.loads(done.stdout)[0]["marker"] == json.loads(listed.stdout)["markers"][-1]["marker"]
        alone = CliRunner().invoke(app, ["verify", *arguments, "--log"], catch_exceptions=False)
    assert str(CliRunner().invoke(app, ["verify", arguments[0], "2:3", *arguments[1:]]).exception) == str(error)
    assert (alone.exit_code, alone.stderr) == (0, "")


def restore(root: Path) -> MarkerId:
    """Return the marker that a restore finds, with the store in the log's folder."""
    with closing(Job.open(f"file://{root}", store=str(root))) as job:
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
    told = doctor(root)
    assert told["store"] == ("bad", no.value.headline, no.value.hint)
    names_the_loss(root, no.value)
    recover(root)
    assert restore(root) == MarkerId(2, 3)
    assert image(root) == before
    assert doctor(root)["store"][0] == "ok"
    with patch.object(verify, "find_spec", return_value=None):
        whole = CliRunner().invoke(app, ["verify", f"file://{root}", "--store", str(root)], catch_exceptions=False)
    assert (whole.exit_code, whole.stderr) == (0, "")


def test_a_marker_that_is_committed_and_folded_meanwhile_was_not_lost(root: Path) -> None:
    stores.fold(root)
    rest, path = offsets(root)[-1], root / "control.log"
    whole = path.read_bytes()
    os.truncate(path, rest)
    with closing(Job.open(f"file://{root}", store=str(root))) as job:
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
    whole = CliRunner().invoke(app, [name, f"file://{root}", *options])
    assert "control partition was lost" not in whole.output
    os.truncate(root / "control.log", offsets(root)[4])
    # No line is wrapped.
    said = CliRunner().invoke(app, [name, f"file://{root}", *options], env={"COLUMNS": "1000"})
    assert said.output.count("the end of the log's control partition was lost: it ends at 1:2") == 1
    assert "3 newer records, 3 of them markers, up to 2:3" in said.output
    assert f"stream-ckpt recover file://{root} --store file://{root}" in said.output


def test_a_fence_is_copied_at_once(root: Path) -> None:
    assert fence(root)["copied"]
    assert copied_offsets(root) == offsets(root)


def test_a_fence_does_not_wait_for_a_store_and_says_that_it_is_not_copied(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deaf, answers = Late(root), Event()
    monkeypatch.setattr("torchrec_stream_ckpt.find.job.open_store", lambda *_: deaf)
    monkeypatch.setattr("torchrec_stream_ckpt.cli.fence.STORE_S", 0.2)
    deaf.before = lambda: answers.wait(60)
    try:
        assert not fence(root)["copied"]
    finally:
        answers.set()
    assert copied_offsets(root) == offsets(root)[:-1]
    assert Control(FileLog(root)).refresh().newest_generation == 3


def test_a_log_that_lost_its_end_is_not_fenced_under_a_number_that_is_used(root: Path) -> None:
    before = image(root)
    os.truncate(root / "control.log", offsets(root)[3])
    with pytest.raises(CorruptionError, match="control partition was lost"):
        fence(root)
    assert recover(root)["offered"][-1] == "2:3"
    assert image(root) == before
    assert fence(root)["generation"] == 4


@pytest.mark.parametrize("folded", ["1:2", "2:3"])
def test_a_log_that_lost_its_end_is_not_trimmed(root: Path, folded: str) -> None:
    """A trim would take the second generation for a dead one, and its snapshot would take the copy's place."""
    stores.fold(root, upto=MarkerId.parse(folded))
    before, copied = image(root), copied_offsets(root)
    rows = {path: path.read_bytes() for path in root.rglob("*.seg")}
    os.truncate(root / "control.log", offsets(root)[4])
    for options in (["--dry-run"], []):
        done = CliRunner().invoke(app, ["trim", f"file://{root}", "--store", str(root), *options])
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
