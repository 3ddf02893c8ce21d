"""A whole job with nothing but a bucket: trained, folded, trimmed, followed, and restored on other ranks."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests import jobs, ranks
from tests.model import PLAN_2, PLAN_3, differences
from tests.parts import app
from tests.s3.server import KEY, SECRET, S3Server
from torchrec_stream_ckpt import StreamConfig, follow

pytestmark = pytest.mark.distributed

STEPS = 7  # markers are at steps 3 and 6, and at the end


def command(*arguments: str) -> str:
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    return done.output


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
    assert "1:2" in command("list", uri)
    with follow(uri, scratch=tmp_path) as follower:
        rows = [len(each.ids) for update in follower.updates(0) for each in update.changes()]
        assert (sum(rows) > 0, str(follower.marker)) == (True, "1:3")

    command("materialize", uri, "--once", "--rebase", "0.000001")
    for verb in (("scrub", uri, "--store", uri), ("verify", uri, "--all", "--store", uri), ("doctor", uri)):
        command(*verb)
    command("trim", uri, "--store", uri)
    command("gc", uri, "--store", uri, "--newest", "1")
    restored(settings, None, truths, STEPS, "store")
    assert os.environ["AWS_ENDPOINT_URL"] not in command("list", uri, "--json")
