"""The materializer follows a log on a real broker, and outlasts one that is not there."""

from __future__ import annotations

import os
import signal
import uuid
from pathlib import Path

import pytest

from tests.faults.materializer import start, wait
from tests.own_broker import OwnBroker
from tests.parts import open_log
from tests.synthetic import JOB, ROWWISE, Job, image_of_store, images_of_chain
from tests.unit.folded_job import events_of, has
from torchrec_stream_ckpt.inner import Control, open_store
from torchrec_stream_ckpt.util.types import MarkerId

pytestmark = pytest.mark.kafka


def test_a_log_on_a_broker_is_followed_and_killed_and_followed_on(bootstrap: str, tmp_path: Path) -> None:
    uri = f"kafka://{bootstrap}/job-{uuid.uuid4().hex}"
    log = open_log(uri)
    job = Job(tmp_path, world=1, log=log)
    arguments = [uri, "--store", str(tmp_path / "store"), "--poll-s", "0.1", "--json", "--rebase", "0.5"]
    output = tmp_path / "output"
    output.touch()
    process = start(arguments, output)
    try:
        wait("it to wait", has(output, "waiting"), output)
        job.begin()
        job.touch()
        parent = job.commit().id
        wait("the marker", has(output, "marker", marker="1:1", lag_markers=0), output)
        process.kill()
        process.join()
        job.touch()
        job.commit()  # a branch of its own
        job.begin(parent, world=2, swept=[ROWWISE], splits=[2, 2, 1])
        job.touch()
        job.commit()
        process = start(arguments, output)
        wait("the last marker", has(output, "marker", marker="2:1", lag_markers=0), output)
        os.kill(process.pid or 0, signal.SIGTERM)
        process.join(40)
        assert process.exitcode == 0
    finally:
        process.kill()
        process.join()
    objects, lineage = open_store(str(tmp_path / "store")), Control(log).refresh()
    assert lineage.job == JOB
    for leaf in (MarkerId(1, 2), MarkerId(2, 1)):
        for commit, image in images_of_chain(log, lineage, leaf):
            assert image_of_store(objects, lineage, commit.id) == image
    log.close()


def test_a_broker_that_is_not_there_is_waited_for(victim: OwnBroker, tmp_path: Path) -> None:
    uri = victim.uri
    log = open_log(uri)
    job = Job(tmp_path, world=1, log=log)
    job.begin()
    job.commit()
    log.close()
    victim.stop()
    output = tmp_path / "output"
    output.touch()
    process = start([uri, "--store", str(tmp_path / "store"), "--poll-s", "0.1", "--json"], output)
    try:
        wait("its complaint", has(output, "trouble"), output)
        trouble = next(event for event in events_of(output) if event["event"] == "trouble")
        assert "connection refused" in str(trouble["message"])
        assert trouble["hint"]
        victim.begin()
        wait("the marker", has(output, "marker", marker="1:1"), output)
        wait("the end of that round", has(output, "recovered"), output)
    finally:
        process.kill()
        process.join()
