"""``stream-ckpt doctor`` over a real broker, whose settings somebody has changed."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.builders import claim
from tests.parts import app, open_log

pytestmark = pytest.mark.kafka


def alter(bootstrap: str, topic: str, **settings: str) -> None:
    from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource

    entries = [
        ConfigEntry(name.replace("_", "."), value, incremental_operation=AlterConfigOpType.SET)
        for name, value in settings.items()
    ]
    resource = ConfigResource(ConfigResource.Type.TOPIC, topic, incremental_configs=entries)
    client = AdminClient({"bootstrap.servers": bootstrap})
    client.incremental_alter_configs([resource])[resource].result(30)


def doctor(uri: str, *options: str) -> tuple[int, dict[str, dict[str, Any]]]:
    done = CliRunner().invoke(app, ["doctor", uri, *options, "--json"])
    return done.exit_code, {finding["check"]: finding for finding in json.loads(done.stdout)}


def test_what_endangers_a_log_on_a_real_broker_is_named(bootstrap: str) -> None:
    job = f"job-{uuid.uuid4().hex}"
    uri = f"kafka://{bootstrap}/{job}"
    log = open_log(uri)
    log.prepare(2)
    log.close()

    status, found = doctor(uri)
    assert status == 0
    assert found["brokers"]["found"].startswith("1 in cluster ")
    assert found[f"{job}.data: replication"]["verdict"] == "warning"  # one broker, one copy
    assert found[f"{job}.data: in sync"]["verdict"] == "ok"
    assert found[f"{job}.control: retention.ms"] == {
        "check": f"{job}.control: retention.ms",
        "found": "-1",
        "verdict": "ok",
        "hint": "",
    }

    alter(bootstrap, f"{job}.data", retention_ms="86400000", unclean_leader_election_enable="true")
    status, found = doctor(uri)
    assert status == 1
    assert {check for check, finding in found.items() if finding["verdict"] == "bad"} == {
        f"{job}.data: retention.ms",
        f"{job}.data: unclean.leader.election.enable",
    }


def test_a_new_job_is_tried_without_making_its_topics(bootstrap: str, tmp_path: Path) -> None:
    job = f"job-{uuid.uuid4().hex}"
    uri = f"kafka://{bootstrap}/{job}"
    status, found = doctor(uri, "--new")
    assert (status, found["store"]["found"]) == (1, "is not named")
    status, found = doctor(uri, "--new", "--store", str(tmp_path / "store"))
    assert status == 0
    for topic in ("data", "control"):
        assert "message.timestamp.type=LogAppendTime" in found[f"{job}.{topic}: creation"]["found"]
    assert found["new topics: max.message.bytes"] == {
        "check": "new topics: max.message.bytes",
        "found": "1048588",
        "verdict": "ok",
        "hint": "",
    }
    assert found["new topics: replication"]["verdict"] == "warning"  # one broker
    assert "default.replication.factor" in found["new topics: replication"]["hint"]
    log = open_log(uri)
    assert log.incarnation() is None
    assert list(tmp_path.iterdir()) == []

    incarnation = log.prepare(1)
    status, found = doctor(uri, "--new", "--store", str(tmp_path / "store"))
    assert (status, found[f"{job}.data: retention.ms"]["verdict"]) == (0, "ok")  # topics that are there and empty
    log.append_control(claim(1, incarnation=incarnation.id).to_frame())
    log.close()
    status, found = doctor(uri, "--new", "--store", str(tmp_path / "store"))
    assert (status, found["log"]["verdict"]) == (1, "bad")
    assert "holds a job in generation 1" in found["log"]["found"]
