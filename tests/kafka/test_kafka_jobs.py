"""The live view and the report of a log on a real broker."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from tests import ranks, zoo
from tests.builders import claim, end
from tests.command import ask, doctor, run
from tests.distributed.test_changed_model_faults import ALONE, CHANGES, EVENTS, NEW, OLD, THREE, TWO, check
from tests.distributed.test_warm_start import begun, refused
from tests.evolving import restored
from tests.jobs_on_paper import PaperJob, tables
from tests.mapped_job import MappedJob
from tests.model import differences
from tests.parts import Feed, open_log
from tests.unit.test_sink_raw_ids import Shelf, is_true, never_an_old_owners
from torchrec_stream_ckpt import Source, StreamConfig, follow
from torchrec_stream_ckpt.inner import Control
from torchrec_stream_ckpt.util.types import MarkerId

pytestmark = pytest.mark.kafka


def test_a_job_on_a_broker_is_watched_and_reported(bootstrap: str, tmp_path: Path) -> None:
    uri, store = f"kafka://{bootstrap}/job-{uuid.uuid4().hex}", f"file://{tmp_path / 'store'}"
    log = open_log(uri)
    job = PaperJob(tmp_path, tables("a", "b"), world=2, log=log)
    first = job.run(3)
    job.step = first[1].step
    job.run(2, parent=MarkerId(1, 2))
    seen = ask("watch", uri, "--store", store, "--once", status=1)  # it is late
    assert (seen["newest"]["marker"], seen["generation"], seen["markers"]) == ("2:5", 2, 5)
    assert [rank["partition"] for rank in seen["ranks"]] == [0, 1]
    assert seen["restore"]["seconds"] == pytest.approx(seen["restore"]["num_bytes"] / 2 / 0.15e9)
    assert [alert["kind"] for alert in seen["alerts"]] == ["late"]
    Control(log).end(end(2))
    seen = ask("watch", uri, "--store", store, "--once")
    assert (seen["ended"]["outcome"], seen["alerts"]) == ("finished", [])
    run("report", uri, "--store", store, "--out", str(tmp_path / "report.html"))
    page = (tmp_path / "report.html").read_text()
    assert "2: 2 ranks, 2 markers" in page
    assert "are not in the log" not in page
    assert "the trainer has ended: finished at step 70" in page
    log.close()


# A sink that is fed over a real broker holds exactly the raw ids of the marker.


def test_raw_ids_over_a_broker_on_4_3_and_5_ranks(bootstrap: str, tmp_path: Path) -> None:
    uri = f"kafka://{bootstrap}/sink-{uuid.uuid4().hex}"
    log = open_log(uri)
    job, shelf = MappedJob(tmp_path, log=log, world=4), Shelf()
    shelf.watch = never_an_old_owners(job)
    job.begin()
    job.churn(40)
    job.commit()
    tombstones = 0
    for world in (4, 3, 5):
        if world != 4:
            job.begin(list(job.truths)[-1], world=world)
        for _ in range(2):
            job.churn(20)
            job.commit()
            with follow(uri, store=f"file://{tmp_path}", scratch=tmp_path) as follower:
                written = list(Feed(follower, shelf).updates(0))
            assert is_true(job, shelf), world
            tombstones += sum(sum(each.tombstones.values()) for each in written)
    assert tombstones > 5
    log.close()


# A model changes over a real broker: CLAIM, sweep and deltas of the new tables go there and come back.


def test_a_model_changes_over_a_broker(bootstrap: str, tmp_path: Path) -> None:
    uri = f"kafka://{bootstrap}/changed-{uuid.uuid4().hex}"
    settings = StreamConfig(uri=uri, store=f"file://{tmp_path}", marker_every=None)
    begun = ranks.run(2, zoo.start, OLD, TWO, settings, EVENTS)
    said = ranks.run(2, restored, NEW, TWO, settings, None, CHANGES, EVENTS)
    check(begun, said, "1:2")
    (state, _), *_ = ranks.run(1, zoo.resume, NEW, ALONE, settings, None, ())
    assert differences(said[0][2]["2:4"], state) == []
    check(begun, ranks.run(1, restored, NEW, ALONE, settings, "1:2", CHANGES, ()), "1:2")
    log = open_log(uri)
    made = Control(log).refresh().changes_made(MarkerId(2, 4))
    log.close()
    assert [each.digest for each in made] == [CHANGES.digest]


# A job on one Kafka log begins in a marker of another one, whose rows and dense state are in different places.


@pytest.mark.distributed
def test_a_changed_job_begins_in_another_jobs_topics_and_goes_on_in_its_own(bootstrap: str, tmp_path: Path) -> None:
    name = uuid.uuid4().hex
    old, new = (
        StreamConfig(uri=f"kafka://{bootstrap}/{which}-{name}", store=f"file://{tmp_path}/{which}", marker_every=None)
        for which in ("old", "new")
    )
    marks = ranks.run(2, zoo.start, OLD, TWO, old, EVENTS)
    said = ranks.run(2, refused, new, f"{old.uris[0]}@1:2")
    assert all("store is required with Kafka" in each for each in said), said
    said = ranks.run(2, refused, new, Source(new.uris[0], store=new.store))
    assert all("is this job's own log" in each for each in said), said
    found = ranks.run(3, begun, NEW, THREE, new, Source(old.uris[0], "1:2", old.store), CHANGES, EVENTS)
    check(marks, found, "1:2")
    (state, _), *_ = ranks.run(1, zoo.resume, NEW, ALONE, new, "1:2", ())
    assert differences(found[0][2]["1:2"], state) == []


# ``stream-ckpt doctor`` over a real broker, whose settings somebody has changed.


def alter(bootstrap: str, topic: str, **settings: str) -> None:
    from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource

    entries = [
        ConfigEntry(name.replace("_", "."), value, incremental_operation=AlterConfigOpType.SET)
        for name, value in settings.items()
    ]
    resource = ConfigResource(ConfigResource.Type.TOPIC, topic, incremental_configs=entries)
    client = AdminClient({"bootstrap.servers": bootstrap})
    client.incremental_alter_configs([resource])[resource].result(30)


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
