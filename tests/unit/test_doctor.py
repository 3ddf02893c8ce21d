"""What ``stream-ckpt doctor`` finds, and what it says to do."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from tests.builders import claim, commit
from tests.command import ask, call, doctor
from tests.parts import FileLog, FolderObjects
from tests.stores import History, contents
from tests.unit.folded_job import folded_job, store_of
from torchrec_stream_ckpt.errors import MarkerNotFoundError, StoreUnavailableError
from torchrec_stream_ckpt.inner import open_store
from torchrec_stream_ckpt.log.api import Finding, Severity
from torchrec_stream_ckpt.log.disk import examine_folder, file_system
from torchrec_stream_ckpt.log.kafka.health import BROKER_DEFAULTS, examine_new_topics, examine_topic
from torchrec_stream_ckpt.log.kafka.settings import NEW_TOPIC_SETTINGS

SAFE = {
    "max.message.bytes": "1048588",
    "min.insync.replicas": "2",
    "unclean.leader.election.enable": "false",
    "retention.ms": "-1",
    "retention.bytes": "-1",
    "cleanup.policy": "delete",
}
COPIES = [(3, 3), (3, 3)]
CLUSTER = "--bootstrap-server h:1"
RIGHTS = {"READ", "WRITE", "DESCRIBE", "DESCRIBE_CONFIGS", "ALTER"}


def not_well(findings: list[Finding]) -> dict[str, Finding]:
    assert all(bool(each.hint) == (each.verdict is not Severity.OK) for each in findings)
    return {each.check: each for each in findings if each.verdict is not Severity.OK}


def test_a_safe_topic_is_well() -> None:
    assert not_well(list(examine_topic("job.data", SAFE, COPIES, RIGHTS, cluster=CLUSTER))) == {}


@pytest.mark.parametrize(
    ("setting", "value", "verdict"),
    [
        ("retention.ms", "604800000", Severity.BAD),
        ("retention.bytes", "1000", Severity.BAD),
        ("cleanup.policy", "compact", Severity.BAD),
        ("unclean.leader.election.enable", "true", Severity.BAD),
        ("max.message.bytes", "500000", Severity.BAD),
        ("min.insync.replicas", "1", Severity.WARNING),
    ],
)
def test_a_setting_that_endangers_rows_is_named_with_the_command_that_mends_it(
    setting: str, value: str, verdict: Severity
) -> None:
    found = not_well(list(examine_topic("job.data", {**SAFE, setting: value}, COPIES, RIGHTS, cluster=CLUSTER)))
    (finding,) = found.values()
    assert (finding.check, finding.found, finding.verdict) == (f"job.data: {setting}", value, verdict)
    assert f"--entity-name job.data --add-config {setting}=" in finding.hint


def test_copies_that_are_few_or_behind_are_named() -> None:
    found = not_well(list(examine_topic("job.data", SAFE, [(1, 1), (1, 1)], RIGHTS, cluster=CLUSTER)))
    assert found.keys() == {"job.data: replication", "job.data: min.insync.replicas"}
    needed = found["job.data: min.insync.replicas"]  # one copy cannot have two in sync: the broker accepts nothing
    assert (needed.found, needed.verdict) == ("2", Severity.BAD)
    assert "--add-config min.insync.replicas=1" in needed.hint
    found = not_well(list(examine_topic("job.data", SAFE, [(3, 3), (3, 2)], RIGHTS, cluster=CLUSTER)))
    assert found["job.data: in sync"].found == "1 of 2 partitions are behind"


@pytest.mark.parametrize(("rights", "missing"), [(RIGHTS - {"WRITE"}, "WRITE"), ({"ALL"}, ""), (set(), "")])
def test_missing_rights_are_named(rights: set[str], missing: str) -> None:
    found = not_well(list(examine_topic("job.data", SAFE, COPIES, rights, cluster=CLUSTER)))
    assert [each.found for each in found.values()] == ([f"{missing} not allowed"] if missing else [])


def test_the_command_that_grants_a_right_names_the_login_of_this_client() -> None:
    (finding,) = not_well(
        list(examine_topic("job.data", SAFE, COPIES, RIGHTS - {"WRITE"}, cluster=CLUSTER, user="trainer"))
    ).values()
    assert finding.hint == (
        f"kafka-acls.sh {CLUSTER} --add --allow-principal User:trainer --topic job.data --operation WRITE"
    )


def test_memory_is_no_place_for_a_log(tmp_path: Path) -> None:
    assert file_system(Path("/proc")) == "proc"
    if file_system(Path("/dev/shm")) != "tmpfs":
        pytest.skip("no tmpfs at /dev/shm")
    found = not_well(list(examine_folder("log", Path("/dev/shm"))))
    assert "a reboot" in found["log: file system"].hint


def test_a_folder_that_cannot_be_written_is_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    assert not_well(list(examine_folder("log", tmp_path)))["log: rights"].verdict is Severity.BAD


def test_looking_leaves_nothing_behind(tmp_path: Path) -> None:
    checks = [each.check for each in examine_folder("log", tmp_path)]
    assert checks == ["log: rights", "log: file system", "log: free space", "log: sync"]
    assert list(tmp_path.iterdir()) == []


def test_a_store_is_asked_whether_it_refuses_names_that_are_taken(tmp_path: Path) -> None:
    job = folded_job(tmp_path / "log")
    before = contents(open_store(str(store_of(job))))
    for store, said in (
        ([], []),
        (["--store", str(store_of(job))], [f"file://{store_of(job)} refuses a name that exists"]),
    ):
        found = ask("doctor", f"file://{job.root}", *store, status=None)
        assert [each["found"] for each in found if each["check"] == "conditional puts"] == said
    assert contents(open_store(str(store_of(job)))) == before


def test_the_command_fails_when_the_newest_marker_cannot_be_restored(tmp_path: Path) -> None:
    log = FileLog(tmp_path)
    incarnation = log.prepare(1)
    log.append_control(claim(1, incarnation=incarnation.id, time_s=time.time() + 3600).to_frame())
    before = ask("doctor", f"file://{tmp_path}", status=None)
    verdicts = {finding["check"]: finding["verdict"] for finding in before}
    assert verdicts["newest marker"] == "warning"  # none yet
    assert verdicts["clock"] == "warning"
    log.append_control(commit(1, 1).to_frame())
    done = call("doctor", f"file://{tmp_path}")
    assert done.exit_code == 1
    assert "Try: bring back the missing data" in done.output


def test_a_store_of_another_job_is_named_by_doctor_and_verify(tmp_path: Path) -> None:
    History(tmp_path / "job").generation(1, [1])
    uri, other = f"file://{tmp_path}/job", f"file://{tmp_path}/other"
    _, found = doctor(uri, "--store", other)
    assert found["store"]["found"].startswith("the store holds nothing of this job")
    assert found["store"]["hint"].startswith("check --store, or omit it: the job keeps its markers in ")
    assert "second copy of control records" not in found
    refused = call("verify", uri, "--store", other)
    assert isinstance(refused.exception, MarkerNotFoundError)
    assert str(refused.exception).startswith("the store holds nothing of this job")


def test_doctor_and_list_agree_about_what_can_be_restored(tmp_path: Path) -> None:
    """The first segment of a job without a store is gone: no older marker can be restored either."""
    job = folded_job(tmp_path / "log")
    shutil.rmtree(store_of(job))
    first = min(job.root.glob("data/p00000/*.seg"))
    first.unlink()
    rows = ask("list", f"file://{job.root}", status=None)["markers"]
    assert [row["restorable"] for row in rows] == [False] * 4
    _, found = doctor(f"file://{job.root}", "--store", job.root)
    assert "without it no marker can be restored" in found["newest marker"]["hint"]


# ``stream-ckpt doctor --new`` tries a place before a job begins there, and leaves nothing.


Found = dict[str, dict[str, Any]]


def examine(*arguments: object) -> tuple[int, Found]:
    return doctor(*arguments, "--new")


def files_below(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


def test_a_place_for_a_log_and_its_store_is_tried_and_left_as_it_was(tmp_path: Path) -> None:
    status, found = examine(f"file://{tmp_path}/deep/er/log", "--store", tmp_path / "store")
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
    status, found = examine(f"file://{tmp_path}/log")
    assert status == 0
    assert found["log: conditional puts"]["verdict"] == "ok"
    assert {check for check in found if check.startswith("store")} == {"store"}
    assert files_below(tmp_path) == []


def test_a_uri_that_holds_a_job_is_bad_and_nothing_is_tried_there(tmp_path: Path) -> None:
    job = folded_job(tmp_path / "log")
    before = contents(open_store(str(store_of(job)))), files_below(job.root)
    status, found = examine(f"file://{job.root}", "--store", store_of(job))
    assert status == 1
    assert found.keys() == {"log", "versions"}
    assert found["log"]["verdict"] == "bad"
    assert "its newest marker is 1:4" in found["log"]["found"]
    assert "omit --new" in found["log"]["hint"]
    assert (contents(open_store(str(store_of(job)))), files_below(job.root)) == before


def test_a_log_with_a_claim_alone_holds_a_job_too(tmp_path: Path) -> None:
    log = FileLog(tmp_path)
    log.append_control(claim(1, incarnation=log.prepare(1).id).to_frame())
    status, found = examine(f"file://{tmp_path}")
    assert (status, "it has no marker" in found["log"]["found"]) == (1, True)


def test_the_store_of_a_lost_log_is_bad(tmp_path: Path) -> None:
    job = folded_job(tmp_path / "log")
    for path in sorted(job.root.rglob("*"), reverse=True):
        if not path.is_relative_to(store_of(job)):
            path.unlink() if path.is_file() else None
    store = store_of(job)
    assert examine(f"file://{tmp_path}/new", "--store", store)[1]["store"]["found"].endswith("holds 1 other job")
    (store / "STORE").unlink()
    status, found = examine(f"file://{tmp_path}/new", "--store", store)
    assert (status, found["store"]["verdict"]) == (1, "bad")
    assert "the object 'STORE'" in found["store"]["found"]


def test_a_store_that_may_not_be_written_is_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise StoreUnavailableError("permission denied", hint="grant s3:PutObject", store="s3://b/p")

    def refuse_too(*_: object) -> None:
        raise StoreUnavailableError("nothing may be deleted either", store="s3://b/p")

    monkeypatch.setattr(FolderObjects, "put", refuse)
    monkeypatch.setattr(FolderObjects, "delete", refuse_too)
    status, found = examine(f"file://{tmp_path}/log")
    assert status == 1
    assert (found["log: objects"]["verdict"], found["log: objects"]["hint"]) == ("bad", "grant s3:PutObject")


def test_a_place_without_a_log_leads_to_new(tmp_path: Path) -> None:
    done = call("doctor", f"file://{tmp_path}/log")
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
