"""What ``stream-ckpt doctor`` finds, and what it says to do."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.builders import claim, commit
from tests.parts import FileLog, app
from tests.stores import History, contents
from tests.unit.folded_job import folded_job, store_of
from torchrec_stream_ckpt.errors import MarkerNotFoundError
from torchrec_stream_ckpt.inner import open_store
from torchrec_stream_ckpt.log.api import Finding, Severity
from torchrec_stream_ckpt.log.disk import examine_folder, file_system
from torchrec_stream_ckpt.log.kafka.health import examine_topic

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
        found = json.loads(CliRunner().invoke(app, ["doctor", f"file://{job.root}", *store, "--json"]).stdout)
        assert [each["found"] for each in found if each["check"] == "conditional puts"] == said
    assert contents(open_store(str(store_of(job)))) == before


def test_the_command_fails_when_the_newest_marker_cannot_be_restored(tmp_path: Path) -> None:
    log = FileLog(tmp_path)
    incarnation = log.prepare(1)
    log.append_control(claim(1, incarnation=incarnation.id, time_s=time.time() + 3600).to_frame())
    before = json.loads(CliRunner().invoke(app, ["doctor", f"file://{tmp_path}", "--json"]).stdout)
    verdicts = {finding["check"]: finding["verdict"] for finding in before}
    assert verdicts["newest marker"] == "warning"  # none yet
    assert verdicts["clock"] == "warning"
    log.append_control(commit(1, 1).to_frame())
    done = CliRunner().invoke(app, ["doctor", f"file://{tmp_path}"])
    assert done.exit_code == 1
    assert "Try: bring back the missing data" in done.output


def test_a_store_of_another_job_is_named_by_doctor_and_verify(tmp_path: Path) -> None:
    History(tmp_path / "job").generation(1, [1])
    uri, other = f"file://{tmp_path}/job", f"file://{tmp_path}/other"
    done = CliRunner().invoke(app, ["doctor", uri, "--store", other, "--json"])
    found = {each["check"]: each for each in json.loads(done.stdout)}
    assert found["store"]["found"].startswith("the store holds nothing of this job")
    assert found["store"]["hint"].startswith("check --store, or omit it: the job keeps its markers in ")
    assert "second copy of control records" not in found
    refused = CliRunner().invoke(app, ["verify", uri, "--store", other])
    assert isinstance(refused.exception, MarkerNotFoundError)
    assert str(refused.exception).startswith("the store holds nothing of this job")


def test_doctor_and_list_agree_about_what_can_be_restored(tmp_path: Path) -> None:
    """The first segment of a job without a store is gone: no older marker can be restored either."""
    job = folded_job(tmp_path / "log")
    shutil.rmtree(store_of(job))
    first = min(job.root.glob("data/p00000/*.seg"))
    first.unlink()
    rows = json.loads(CliRunner().invoke(app, ["list", f"file://{job.root}", "--json"]).stdout)["markers"]
    assert [row["restorable"] for row in rows] == [False] * 4
    arguments = ["doctor", f"file://{job.root}", "--store", str(job.root), "--json"]
    found = {each["check"]: each for each in json.loads(CliRunner().invoke(app, arguments).stdout)}
    assert "without it no marker can be restored" in found["newest marker"]["hint"]
