"""``torchx run --scheduler local_cwd``, for real: ranks are killed from outside, and the job is launched again."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.command import ask
from tests.golden.make_torchx import SERVICE, TRAIN
from tests.launched import Launched, signal_to
from tests.parts import open_log
from tests.s3.faults import FaultyProxy
from tests.s3.server import S3Server
from tests.s3.sts import TokenService
from torchrec_stream_ckpt.inner import Control

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]

RECIPE = ("--synthetic", "small", "--sharding", "row_wise", "--marker_every", "10", "--epochs", "1")
RECIPE += ("--limit_train_batches", "1000000", "--log_every", "1000000")


def launch(folder: Path, number: int, j: str) -> Launched:
    command = ["torchx.cli.main", "run", "-s", "local_cwd", TRAIN, "-j", j, "--", *RECIPE]
    return Launched(
        [*command, "--stream_ckpt", f"file://{folder / 'ckpt'}"], folder / f"launch-{number}.log", {"HOME": str(folder)}
    )


def launch_in_bucket(folder: Path, number: int, j: str, uri: str) -> Launched:
    """With a script that rests after each step: a marker in a bucket takes many of them, and all cores otherwise."""
    command = ["torchx.cli.main", "run", "-s", "local_cwd", TRAIN, "-j", j, "--script", "tests/paced_rank.py"]
    command += ["--", *RECIPE, "--stream_ckpt", uri]
    return Launched(command, folder / f"launch-{number}.log", {"HOME": str(folder)})


def launch_service(folder: Path) -> Launched:
    command = ["torchx.cli.main", "run", "-s", "local_cwd", SERVICE, "--uri", f"file://{folder / 'ckpt'}"]
    command += ["--store", f"file://{folder / 'store'}", "--", "--json", "--poll-s", "0.2"]
    return Launched(command, folder / "service.log", {"HOME": str(folder)})


def markers(folder: Path) -> list[dict[str, Any]]:
    """What ``stream-ckpt list --json`` tells of the markers, oldest first."""
    found: list[dict[str, Any]] = ask("list", f"file://{folder / 'ckpt'}")["markers"]
    return found


def test_ranks_that_were_killed_are_launched_again_as_one_and_the_materializer_goes_on(tmp_path: Path) -> None:
    with launch_service(tmp_path) as service:
        with launch(tmp_path, 1, "1x2") as job:
            job.wait_for(r"marker 1:3 committed", 240)
            service.wait_for(r'"marker": "1:\d+"', 240)
            ranks = job.ranks()
            assert len(ranks) == 2
            for pid in ranks:
                signal_to(pid, signal.SIGKILL)
            assert job.process.wait(180) != 0
            assert job.ranks() == []
        before = markers(tmp_path)
        assert {entry["ranks"] for entry in before} == {2}

        with launch(tmp_path, 2, "1x1") as job:
            said = job.wait_for(r"training on (\d) ranks", 240)
            assert said[1] == "1"
            job.wait_for(r"marker 2:\d+ committed", 240)
            assert len(job.ranks()) == 1
            service.wait_for(r'"marker": "2:\d+"', 240)
    after = [entry for entry in markers(tmp_path) if entry["generation"] == 2]
    newest = before[-1]
    assert {(entry["parent"], entry["ranks"]) for entry in after} == {(newest["marker"], 1)}
    # A marker that is due while one is in flight is cut a step or more later.
    assert after[0]["step"] >= newest["step"] // 10 * 10 + 10
    assert all(entry["restorable"] for entry in before + after)


@pytest.mark.slow  # the role: s3/test_identity; a job that goes on: s3/test_bucket_job; torchx: the test before
def test_a_job_in_a_bucket_has_the_role_of_its_pod_and_goes_on_with_more_ranks(
    s3_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing but the environment names endpoint and login, as in a cluster."""
    token, proxy = tmp_path / "token", FaultyProxy(s3_server.port)
    token.write_text("of this pod")
    service = TokenService(token, renew_s=1.0)
    proxy.accept_session = service.sessions.__contains__
    login = {"AWS_ENDPOINT_URL_S3": proxy.endpoint, "AWS_EC2_METADATA_DISABLED": "true"}
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (login | service.environment(token)).items():
        monkeypatch.setenv(name, value)
    uri = f"s3://{s3_server.bucket}/{tmp_path.name}/job"
    try:
        with launch_in_bucket(tmp_path, 1, "1x1", uri) as job:
            job.wait_for(r"marker 1:2 committed", 240)
            (rank,) = job.ranks()
            signal_to(rank, signal.SIGKILL)
            assert job.process.wait(180) != 0
        log = open_log(uri)
        newest = Control(log).refresh().newest
        assert newest is not None
        with launch_in_bucket(tmp_path, 2, "1x2", uri) as job:
            job.wait_for(rf"restored marker {newest.id} ", 240)
            job.wait_for(r"marker 2:\d+ committed", 240)
            assert len(job.ranks()) == 2
        lineage = Control(log).refresh()
        assert (lineage.claims[2].parent, lineage.claims[2].world) == (newest.id, 2)
        log.close()
    finally:
        proxy.close()
        service.close()
    assert len(service.sessions) > 3  # each process of the job asks for its own
