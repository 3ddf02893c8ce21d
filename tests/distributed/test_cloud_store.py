"""A whole job on Google's and on Azure's object store: trained, folded by a materializer that is killed, restored."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from tests import jobs, ranks, stores
from tests.clouds.servers import CLOUDS, CloudServer
from tests.command import run
from tests.model import PLAN_2, PLAN_3, differences
from torchrec_stream_ckpt import StreamConfig

pytestmark = pytest.mark.distributed

STEPS = 5  # markers are at step 3 and at the end


def killed(*arguments: str, at: str) -> None:
    """One command in a process of its own, which dies at a fail point."""
    done = subprocess.run(
        [sys.executable, "-c", "from torchrec_stream_ckpt.cli.main import main; main()", *arguments],
        env={**os.environ, "STREAM_CKPT_FAILPOINTS": f"{at}=kill"},
        timeout=200,
        capture_output=True,
        text=True,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr


@pytest.mark.parametrize("kind", CLOUDS)
def test_a_job_comes_back_on_other_ranks_from_a_cloud_alone(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server: CloudServer = request.getfixturevalue(f"{kind}_server")
    (tmp_path / "scratch").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "scratch"))  # of the ranks
    store, uri = server.url(uuid.uuid4().hex), f"file://{tmp_path}/log"
    settings = StreamConfig(uri=uri, store=store, store_options=server.options(), marker_every=3)
    truths = ranks.run(2, jobs.train_with, PLAN_2, settings, STEPS, {})[0][1]

    options = tmp_path / "options"
    options.write_text("".join(f"{name}={value}\n" for name, value in server.options().items()))
    there = (uri, "--store", store, "--store-options", str(options))
    fold = ("materialize", *there, "--once", "--rebase", "0.000001")
    killed(*fold, at="materialize.manifest")
    run(*fold)
    for other in (("scrub", *there), ("verify", uri, "--all", *there[1:]), ("gc", *there, "--newest", "2")):
        run(*other)
    stores.lose_rows(tmp_path / "log")

    for marker, step in ((None, STEPS), ("1:1", 3)):
        state, at_step, source = ranks.run(3, jobs.restore_once, PLAN_3, settings, marker, {})[0]
        assert at_step == step
        assert "store" in source
        assert differences(truths[step], state) == []
    assert list((tmp_path / "scratch").iterdir()) == []
