"""``stream-ckpt doctor --new`` tries a place before a job begins there, and leaves nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.builders import claim
from tests.parts import FileLog, FolderObjects, app
from tests.stores import contents
from tests.unit.folded_job import folded_job, store_of
from torchrec_stream_ckpt.errors import StoreUnavailableError
from torchrec_stream_ckpt.inner import open_store
from torchrec_stream_ckpt.log.kafka.health import BROKER_DEFAULTS, examine_new_topics
from torchrec_stream_ckpt.log.kafka.settings import NEW_TOPIC_SETTINGS

Found = dict[str, dict[str, Any]]


def doctor(*arguments: object) -> tuple[int, Found]:
    done = CliRunner().invoke(app, ["doctor", *map(str, arguments), "--new", "--json"])
    return done.exit_code, {each["check"]: each for each in json.loads(done.stdout)}


def files_below(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


def test_a_place_for_a_log_and_its_store_is_tried_and_left_as_it_was(tmp_path: Path) -> None:
    status, found = doctor(f"file://{tmp_path}/deep/er/log", "--store", tmp_path / "store")
    assert status == 0
    assert f"{tmp_path} is examined instead" in found["log: folder"]["found"]
    for place in ("log", "store"):
        for check in ("rights", "file system", "free space", "sync", "objects", "write speed"):
            assert f"{place}: {check}" in found
    assert found["store: conditional puts"]["found"] == "a name that exists is refused"
    assert "log: conditional puts" not in found
    assert "run this on each node" in found["not tried: other nodes"]["found"]
    assert files_below(tmp_path) == []


def test_a_store_inside_the_log_is_tried_once(tmp_path: Path) -> None:
    status, found = doctor(f"file://{tmp_path}/log")
    assert status == 0
    assert found["log: conditional puts"]["verdict"] == "ok"
    assert {check for check in found if check.startswith("store")} == {"store"}
    assert files_below(tmp_path) == []


def test_a_uri_that_holds_a_job_is_bad_and_nothing_is_tried_there(tmp_path: Path) -> None:
    job = folded_job(tmp_path / "log")
    before = contents(open_store(str(store_of(job)))), files_below(job.root)
    status, found = doctor(f"file://{job.root}", "--store", store_of(job))
    assert status == 1
    assert found.keys() == {"log", "versions"}
    assert found["log"]["verdict"] == "bad"
    assert "its newest marker is 1:4" in found["log"]["found"]
    assert "omit --new" in found["log"]["hint"]
    assert (contents(open_store(str(store_of(job)))), files_below(job.root)) == before


def test_a_log_with_a_claim_alone_holds_a_job_too(tmp_path: Path) -> None:
    log = FileLog(tmp_path)
    log.append_control(claim(1, incarnation=log.prepare(1).id).to_frame())
    status, found = doctor(f"file://{tmp_path}")
    assert (status, "it has no marker" in found["log"]["found"]) == (1, True)


def test_the_store_of_a_lost_log_is_bad(tmp_path: Path) -> None:
    job = folded_job(tmp_path / "log")
    for path in sorted(job.root.rglob("*"), reverse=True):
        if not path.is_relative_to(store_of(job)):
            path.unlink() if path.is_file() else None
    store = store_of(job)
    assert doctor(f"file://{tmp_path}/new", "--store", store)[1]["store"]["found"].endswith("holds 1 other job")
    (store / "STORE").unlink()
    status, found = doctor(f"file://{tmp_path}/new", "--store", store)
    assert (status, found["store"]["verdict"]) == (1, "bad")
    assert "the object 'STORE'" in found["store"]["found"]


def test_a_store_that_may_not_be_written_is_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise StoreUnavailableError("permission denied", hint="grant s3:PutObject", store="s3://b/p")

    def refuse_too(*_: object) -> None:
        raise StoreUnavailableError("nothing may be deleted either", store="s3://b/p")

    monkeypatch.setattr(FolderObjects, "put", refuse)
    monkeypatch.setattr(FolderObjects, "delete", refuse_too)
    status, found = doctor(f"file://{tmp_path}/log")
    assert status == 1
    assert (found["log: objects"]["verdict"], found["log: objects"]["hint"]) == ("bad", "grant s3:PutObject")


def test_a_place_without_a_log_leads_to_new(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["doctor", f"file://{tmp_path}/log"])
    assert f"stream-ckpt doctor file://{tmp_path}/log --new" in str(done.exception)


@pytest.mark.parametrize(
    ("setting", "value", "verdict"),
    [
        ("max.message.bytes", "900000", "bad"),
        ("segment.bytes", "500000", "bad"),
        ("min.insync.replicas", "4", "bad"),
        ("min.insync.replicas", "1", "warning"),
        ("unclean.leader.election.enable", "true", "bad"),
    ],
)
def test_a_default_of_the_brokers_that_endangers_new_topics_is_named(setting: str, value: str, verdict: str) -> None:
    good = {
        "max.message.bytes": "1048588",
        "segment.bytes": "1073741824",
        "min.insync.replicas": "2",
        "unclean.leader.election.enable": "false",
        **NEW_TOPIC_SETTINGS,
    }
    assert {str(each.verdict) for each in examine_new_topics(good, 3)} == {"ok"}
    (bad,) = [each for each in examine_new_topics({**good, setting: value}, 3) if each.hint]
    assert (bad.check, bad.found, str(bad.verdict)) == (f"new topics: {setting}", value, verdict)
    assert f"change {BROKER_DEFAULTS[setting]} of the brokers" in bad.hint
