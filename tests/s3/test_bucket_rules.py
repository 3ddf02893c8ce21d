"""A log in a bucket that keeps versions, locks objects or deletes them by a rule: what is said, what is refused."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.command import doctor
from tests.contract.test_log_contract import control_record
from tests.parts import open_log, prove_writable
from tests.s3.faults import FaultyProxy
from tests.s3.server import S3Server
from torchrec_stream_ckpt.errors import ConfigError, LogUnavailableError, StoreUnavailableError
from torchrec_stream_ckpt.inner import Log, open_store

VERSIONED = "<VersioningConfiguration><Status>Enabled</Status></VersioningConfiguration>"
LOCKED = (
    "<ObjectLockConfiguration><ObjectLockEnabled>Enabled</ObjectLockEnabled><Rule><DefaultRetention>"
    "<Mode>GOVERNANCE</Mode><Days>30</Days></DefaultRetention></Rule></ObjectLockConfiguration>"
)
PROTECTED = "Access Denied because object protected by object lock."


def lifecycle(prefix: str, does: str) -> str:
    filtered = f"<Filter><Prefix>{prefix}</Prefix></Filter>"
    rule = f"<Rule><ID>clean up</ID>{filtered}<Status>Enabled</Status>{does}</Rule>"
    return f"<LifecycleConfiguration>{rule}</LifecycleConfiguration>"


DELETES = "<Expiration><Days>30</Days></Expiration>"
OLD_VERSIONS = "<NoncurrentVersionExpiration><NoncurrentDays>1</NoncurrentDays></NoncurrentVersionExpiration>"


class Place:
    """A prefix of a bucket, behind a proxy that reports settings of the bucket."""

    def __init__(self, server: S3Server, folder: Path) -> None:
        self.proxy = FaultyProxy(server.port)
        self.prefix = uuid.uuid4().hex
        self.uri = f"s3://{server.bucket}/{self.prefix}"
        self.behind = server.objects / server.bucket / self.prefix
        self.options = server.options(endpoint_url=self.proxy.endpoint)
        self.file = folder / "options"
        self.file.write_text("".join(f"{name}={value}\n" for name, value in self.options.items()))

    def log(self) -> Log:
        return open_log(self.uri, self.options)

    def doctor(self, *arguments: str) -> tuple[int, dict[str, dict[str, Any]]]:
        return doctor(*arguments, "--store-options", self.file)


@pytest.fixture
def place(s3_server: S3Server, tmp_path: Path) -> Iterator[Place]:
    found = Place(s3_server, tmp_path)
    yield found
    found.proxy.close()


def verdicts(found: dict[str, dict[str, Any]], kind: str = "log") -> list[str]:
    return [found[f"{kind}: {check}"]["verdict"] for check in ("versions", "object lock", "lifecycle")]


def test_a_lifecycle_rule_that_deletes_is_refused_by_name_and_nothing_is_left(place: Place) -> None:
    place.proxy.be_set({"lifecycle": lifecycle(place.prefix, DELETES)})
    log = place.log()
    with pytest.raises(ConfigError, match=f"'clean up' .prefix '{place.prefix}'. deletes objects 30 days") as refused:
        log.prepare(1)
    assert f"limit it to keys outside '{place.prefix}/'" in refused.value.hint
    assert not place.behind.exists()
    status, found = place.doctor(place.uri, "--new")
    assert (status, verdicts(found)) == (1, ["ok", "ok", "bad"])
    place.proxy.be_set({"lifecycle": lifecycle("another", DELETES)})
    log.prepare(1)
    log.close()
    place.proxy.be_set({"lifecycle": lifecycle("", DELETES)})  # set while the job runs: the next start says it
    status, found = place.doctor(place.uri)
    assert (status, verdicts(found)) == (1, ["ok", "ok", "bad"])


def test_a_lifecycle_rule_is_refused_for_a_store_as_well(place: Place, tmp_path: Path) -> None:
    place.proxy.be_set({"lifecycle": lifecycle("", DELETES)})
    store = open_store(place.uri, place.options)
    with pytest.raises(ConfigError, match="the lifecycle rule 'clean up'"):
        prove_writable(store)
    store.close()
    status, found = place.doctor(f"file://{tmp_path / 'log'}", "--new", "--store", place.uri)
    assert (status, verdicts(found, "store")) == (1, ["ok", "ok", "bad"])


def test_versions_and_locks_are_said_and_a_job_goes_on(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    place.proxy.be_set({"versioning": VERSIONED, "object-lock": LOCKED})
    log = place.log()
    with caplog.at_level(logging.WARNING):
        log.prepare(1)
    assert "no lifecycle rule deletes old ones: what gc and trim delete frees no room" in caplog.text
    assert "GOVERNANCE, 30 days" in caplog.text
    status, found = place.doctor(place.uri)
    assert (status, verdicts(found)) == (0, ["warning", "warning", "ok"])
    caplog.clear()
    place.proxy.be_set({"versioning": VERSIONED, "lifecycle": lifecycle("", OLD_VERSIONS)})
    log.prepare(1)
    assert "room" not in caplog.text
    assert verdicts(place.doctor(place.uri)[1]) == ["ok", "ok", "ok"]
    assert log.append_control(control_record(1)) == 0
    log.close()


@pytest.mark.parametrize("refused", [True, False])
def test_what_cannot_be_checked_is_said_and_fails_nothing(
    place: Place, refused: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """This user lacks the rights; or the server, as this one, does not know the requests."""
    if refused:
        place.proxy.refuse("rules", 403, "AccessDenied")
    log = place.log()
    log.prepare(1)
    log.close()
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]
    status, found = place.doctor(place.uri)
    assert (status, verdicts(found)) == (0, ["ok", "ok", "ok"])
    said = [found[f"log: {check}"]["found"] for check in ("object lock", "lifecycle")]
    assert all(each.startswith("could not be checked") for each in said)
    assert ("lacks s3:GetLifecycleConfiguration" in said[1]) == refused
    assert ("does not have the request" in said[1]) != refused


def test_a_delete_that_a_lock_refuses_is_told_from_a_missing_right(place: Place) -> None:
    log = place.log()
    log.prepare(1)
    for number in range(1, 4):
        log.append_control(control_record(number))
    for kind in ("delete", "delete many"):
        place.proxy.refuse(kind, 403, "AccessDenied", PROTECTED)  # type: ignore[arg-type]
    with pytest.raises(LogUnavailableError, match="protects the object by an object lock or a retention") as refused:
        log.prune_control(2)
    assert "when the retention is over" in refused.value.hint
    assert [number for number, _ in log.read_control(2)] == [2]  # and what counts is as before
    assert log.append_control(control_record(9)) == 3
    place.proxy.refuse("delete", 403, "AccessDenied")
    store = open_store(place.uri, place.options)
    with pytest.raises(StoreUnavailableError, match="permission denied"):
        store.delete("LOG")
    store.close()
    log.close()
