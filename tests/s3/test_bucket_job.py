"""A whole job with nothing but a bucket: trained, folded, trimmed, followed, and restored on other ranks."""

from __future__ import annotations

import os
import shutil
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import jobs, ranks
from tests.command import run
from tests.followers import wait_for
from tests.model import PLAN_2, PLAN_3, Spec, differences, trainer, truth
from tests.parts import open_log
from tests.s3.server import KEY, SECRET, S3Server
from torchrec_stream_ckpt import Source, StreamConfig, follow
from torchrec_stream_ckpt.inner import Control, Log
from torchrec_stream_ckpt.log.bucket.control_objects import record_name

pytestmark = pytest.mark.distributed

STEPS = 7  # markers are at steps 3 and 6, and at the end


@pytest.fixture
def uri(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """Endpoint and login come from the environment, as they do in a cluster."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server.endpoint)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    return f"s3://{s3_server.bucket}/{uuid.uuid4().hex}/job"


def restored(settings: StreamConfig, marker: str | None, truths: dict[int, object], step: int, source: str) -> None:
    state, at_step, came_from = ranks.run(3, jobs.restore_once, PLAN_3, settings, marker, {})[0]
    assert (at_step, source in came_from) == (step, True), came_from
    assert differences(truths[step], state) == []


def test_a_job_needs_nothing_but_a_bucket(uri: str, s3_server: S3Server, tmp_path: Path) -> None:
    # Ranks are forks of a server that was started before, so they do not see these variables.
    settings = StreamConfig(uri=uri, store_options=s3_server.options(), marker_every=3)
    assert settings.store_url == uri
    truths = ranks.run(2, jobs.train_with, PLAN_2, settings, STEPS, {})[0][1]
    restored(settings, None, truths, STEPS, "log")
    restored(settings, "1:1", truths, 3, "log")
    assert "1:2" in run("list", uri)
    with follow(uri, scratch=tmp_path) as follower:
        rows = [len(each.ids) for update in follower.updates(0) for each in update.changes()]
        assert (sum(rows) > 0, str(follower.marker)) == (True, "1:3")

    run("materialize", uri, "--once", "--rebase", "0.000001")
    for verb in (("scrub", uri, "--store", uri), ("verify", uri, "--all", "--store", uri), ("doctor", uri)):
        run(*verb)
    run("trim", uri, "--store", uri)
    run("gc", uri, "--store", uri, "--newest", "1")
    restored(settings, None, truths, STEPS, "store")
    assert os.environ["AWS_ENDPOINT_URL"] not in run("list", uri, "--json")


def test_a_lost_node_goes_on_from_an_outer_bucket_and_a_commit_key_passes_over_foreign_records(
    uri: str, s3_server: S3Server, tmp_path: Path
) -> None:
    """The bucket gets every third marker, and the newest one when the job ends."""
    key, inner = tmp_path / "key", tmp_path / "inner"
    key.write_bytes(bytes(range(32)))
    key.chmod(0o600)
    settings = StreamConfig(
        uri=(f"file://{inner}", uri),
        outer_every=3,
        store_options=s3_server.options(),
        marker_every=2,
        commit_key_file=key,
    )
    truths = ranks.run(2, jobs.train_with, PLAN_2, settings, STEPS, {})[0][1]
    log = open_log(uri, s3_server.options())
    wait_for(lambda: _markers(log, key) == {"1:3": 6, "1:4": STEPS})  # the relay outlives the trainer
    restored(settings, None, truths, STEPS, "inner: log")
    shutil.rmtree(inner)
    end = len(list(log.read_control(garbage=True)))
    foreign = s3_server.objects / uri.removeprefix("s3://") / record_name(end)
    foreign.parent.mkdir(parents=True, exist_ok=True)
    foreign.write_bytes(b"not ours" * 40)
    restored(settings, None, truths, STEPS, "outer: log")
    restored(settings, "1:3", truths, 6, "outer: log")
    log.close()


def _markers(log: Log, key: Path) -> dict[str, int]:
    return {str(marker): commit.step for marker, commit in Control(log, key).refresh().commits.items()}


def _begun(spec: Spec, settings: StreamConfig, source: Source) -> tuple[dict[str, torch.Tensor], Any]:
    """The state after a warm start, and where it came from."""
    job = trainer(spec)
    job.step()
    checkpointer = jobs.attach(job, settings)
    found = checkpointer.warm_start(source)
    state = truth(job)
    checkpointer.mark().result(60)
    checkpointer.close()
    return state, (str(found.id), found.step, found.origin)


def test_a_job_begins_in_a_bucket_with_a_marker_of_a_job_in_another(uri: str, s3_server: S3Server) -> None:
    other = StreamConfig(uri=f"{uri}/other", store_options=s3_server.options(), marker_every=3)
    truths = ranks.run(2, jobs.train_with, PLAN_2, other, STEPS, {})[0][1]
    settings = StreamConfig(uri=f"{uri}/own", store_options=s3_server.options(), marker_every=3)
    source = Source(other.uri, marker="1:1")  # with the options of the job that reads it
    for rank, (state, found) in enumerate(ranks.run(3, _begun, PLAN_3, settings, source)):
        assert found == ("1:1", 3, other.uri)
        assert differences(truths[3], state, rng=rank == 0) == []
    shutil.rmtree(s3_server.objects / f"{uri}/other".removeprefix("s3://"))
    state, step, _ = ranks.run(2, jobs.restore_once, PLAN_2, settings, None, {})[0]
    assert step == 3
    assert differences(truths[3], state) == []
