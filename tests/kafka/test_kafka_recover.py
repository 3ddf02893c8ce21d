"""A lost log comes back in new topics; a Kafka job whose topics were deleted does not begin anew."""

from __future__ import annotations

import time
import uuid
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient

from tests import ranks, stores
from tests.command import ask, call, run
from tests.jobs import attach, restore_once, train_with
from tests.model import PLAN_2, Spec, differences, trainer
from tests.own_broker import OwnBroker
from tests.parts import open_log
from tests.tables import FIRST, write_tables
from tests.unit.test_interchange import SCHEMA, values
from torchrec_stream_ckpt import StreamConfig
from torchrec_stream_ckpt.errors import ConfigError, CorruptionError
from torchrec_stream_ckpt.inner import Control
from torchrec_stream_ckpt.util.uris import KafkaUri, parse_uri

pytestmark = pytest.mark.kafka


def restore_anything(spec: Spec, settings: StreamConfig) -> str:
    checkpointer = attach(trainer(spec), settings)
    try:
        return str(checkpointer.restore())
    except CorruptionError as error:
        return str(error)
    finally:
        checkpointer.close()


@pytest.mark.distributed
def test_a_control_topic_that_is_gone_is_refused_on_every_rank_and_put_back(bootstrap: str, tmp_path: Path) -> None:
    uri, store = f"kafka://{bootstrap}/gone-{uuid.uuid4().hex[:8]}", str(tmp_path / "store")
    settings = StreamConfig(uri=uri, store=store, marker_every=4)
    truths = ranks.run(2, train_with, PLAN_2, settings, 6, {})[0][1]
    parsed = parse_uri(uri)
    assert isinstance(parsed, KafkaUri)
    admin: Any = AdminClient({"bootstrap.servers": bootstrap})
    admin.delete_topics([parsed.control_topic])[parsed.control_topic].result(120)
    deadline = time.monotonic() + 120
    while parsed.control_topic in admin.list_topics(timeout=120).topics:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    for said in ranks.run(2, restore_anything, PLAN_2, settings):
        assert f"topic '{parsed.data_topic}' holds rows, but topic '{parsed.control_topic}'" in said
        assert f"stream-ckpt recover {uri} --store file://{store}" in said
    found = ask("recover", uri, "--store", store)
    assert (found["offered"], found["next_generation"]) == (["1:1", "1:2"], 3)
    state, step, _ = ranks.run(2, restore_once, PLAN_2, settings, None, {})[0]
    assert step == 6
    assert differences(truths[6], state) == []


@pytest.mark.distributed
def test_a_control_topic_that_lost_its_end_is_refused_on_every_rank_and_put_back_in_place(
    victim: OwnBroker, tmp_path: Path
) -> None:
    uri, store = victim.uri, str(tmp_path / "store")
    settings = StreamConfig(uri=uri, store=store, marker_every=2)
    truths = ranks.run(2, train_with, PLAN_2, settings, 8, {})[0][1]
    run("materialize", uri, "--store", store, "--once")
    log = open_log(uri)
    before, markers = list(log.read_control()), [str(each) for each in Control(log).refresh().commits]
    log.close()
    victim.cut("job.control-0", lambda size: size * 2 // 3)
    log = open_log(uri)
    left = list(log.read_control())
    log.close()
    assert 1 < len(left) < len(before) - 1
    assert left == before[: len(left)]
    for said in ranks.run(2, restore_anything, PLAN_2, settings):
        assert "the end of the log's control partition was lost" in said
        assert f"stream-ckpt recover {uri} --store file://{store}" in said
    listed = call("list", uri, "--store", store)
    assert "newer records" in listed.stderr
    (tmp_path / "store" / "records").rename(tmp_path / "records")  # no second copy: the trainer had another store
    listed = call("list", uri, "--store", store)
    lost = f"the store holds marker {markers[-1]}, which is not in the log: the end of the log's control partition"
    assert lost in listed.stderr
    verified = call("verify", uri, "--store", store)
    assert verified.exit_code == 1
    assert lost in verified.stderr
    assert "is whole" in verified.stdout
    (tmp_path / "records").rename(tmp_path / "store" / "records")
    found = ask("recover", uri, "--store", store)
    assert (found["offered"], found["next_generation"]) == (markers, 3)
    state, step, _ = ranks.run(2, restore_once, PLAN_2, settings, None, {})[0]
    assert step == 8
    assert differences(truths[8], state) == []


def test_the_markers_of_a_store_come_back_in_new_topics(bootstrap: str, tmp_path: Path) -> None:
    write_tables(tmp_path / "job", SCHEMA, values())
    stores.fold(tmp_path / "job")
    uri = f"kafka://{bootstrap}/recovered-{uuid.uuid4().hex[:8]}"
    arguments = ["recover", uri, "--store", str(tmp_path / "job")]
    assert ask(*arguments)["offered"] == [str(FIRST)]
    log = open_log(uri)
    lineage = Control(log).refresh()
    assert list(lineage.commits) == [FIRST]
    assert lineage.spans(1, lineage.find(FIRST).ranks) == []
    assert ask(*arguments)["appended"] == 0
    target = f"parquet://{tmp_path}/out"
    run("export", uri, "--store", str(tmp_path / "job"), "--to", target)
    assert len(list((tmp_path / "out").iterdir())) == len(SCHEMA.tables)
    log.append_control(lineage.claims[1].to_frame())
    log.close()
    with pytest.raises(ConfigError, match="the log must be empty"):
        ask(*arguments)
