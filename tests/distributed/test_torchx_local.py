"""``torchx run --scheduler local_cwd``, for real: ranks are killed from outside, and the job is launched again."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.golden.make_torchx import SERVICE, TRAIN
from tests.launched import ROOT, Launched, launcher_env, signal_to

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]

CLI = "from torchrec_stream_ckpt.cli.main import main; main()"
RECIPE = ("--synthetic", "small", "--sharding", "row_wise", "--marker_every", "10", "--epochs", "1")
RECIPE += ("--limit_train_batches", "1000000", "--log_every", "1000000")


def launch(folder: Path, number: int, j: str) -> Launched:
    command = ["torchx.cli.main", "run", "-s", "local_cwd", TRAIN, "-j", j, "--", *RECIPE]
    return Launched(
        [*command, "--stream_ckpt", f"file://{folder / 'ckpt'}"], folder / f"launch-{number}.log", {"HOME": str(folder)}
    )


def launch_service(folder: Path) -> Launched:
    command = ["torchx.cli.main", "run", "-s", "local_cwd", SERVICE, "--uri", f"file://{folder / 'ckpt'}"]
    command += ["--store", f"file://{folder / 'store'}", "--", "--json", "--poll-s", "0.2"]
    return Launched(command, folder / "service.log", {"HOME": str(folder)})


def markers(folder: Path) -> list[dict[str, Any]]:
    """What ``stream-ckpt list --json`` tells of the markers, oldest first."""
    command = [sys.executable, "-c", CLI, "list", f"file://{folder / 'ckpt'}", "--json"]
    done = subprocess.run(
        command, env=launcher_env(), cwd=ROOT, capture_output=True, text=True, timeout=300, check=True
    )
    found: list[dict[str, Any]] = json.loads(done.stdout)["markers"]
    return found


def test_ranks_that_were_killed_are_launched_again_as_three_and_the_materializer_goes_on(tmp_path: Path) -> None:
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

        with launch(tmp_path, 2, "1x3") as job:
            said = job.wait_for(r"training on (\d) ranks", 240)
            assert said[1] == "3"
            job.wait_for(r"marker 2:\d+ committed", 240)
            assert len(job.ranks()) == 3
            service.wait_for(r'"marker": "2:\d+"', 240)
    after = [entry for entry in markers(tmp_path) if entry["generation"] == 2]
    newest = before[-1]
    assert {(entry["parent"], entry["ranks"]) for entry in after} == {(newest["marker"], 3)}
    # A marker that is due while one is in flight is cut a step or more later.
    assert after[0]["step"] >= newest["step"] // 10 * 10 + 10
    assert all(entry["restorable"] for entry in before + after)
