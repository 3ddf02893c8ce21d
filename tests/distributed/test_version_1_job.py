"""A job that format version 1 wrote, with its store, is restored and gone on with: `tests/golden/v1/job.tar.xz`.

It holds a log of two ranks under PLAN_2 with markers at steps 5, 10 and 12, the segments and manifests that the
materializer of its day made of them, and the live state at each marker. It was written before there was a version 2,
and is never made anew.
"""

from __future__ import annotations

import shutil
import tarfile
from pathlib import Path

import pytest
import torch

from tests import jobs, stores, warm
from tests.command import ask
from tests.model import PLAN_1, PLAN_2, PLAN_3, differences
from tests.parts import FileLog, Policy
from torchrec_stream_ckpt import StreamConfig
from torchrec_stream_ckpt.inner import Control
from torchrec_stream_ckpt.util.types import MarkerId

pytestmark = pytest.mark.distributed

ARCHIVE = Path(__file__).parents[1] / "golden" / "v1" / "job.tar.xz"


@pytest.fixture
def old(tmp_path: Path) -> Path:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / "job"


def truths(old: Path) -> list[jobs.Truths]:
    found: list[jobs.Truths] = torch.load(old / "truth.pt", weights_only=True)
    return found


def test_its_markers_come_back_and_the_job_goes_on_in_version_4(old: Path) -> None:
    expected, settings = truths(old), StreamConfig(uri=f"file://{old / 'log'}", marker_every=5)
    gone_on = warm.run(3, jobs.restore_with, PLAN_3, settings, "1:2", 5, {})
    for rank, (state, step, _, _) in enumerate(gone_on):
        assert step == 10
        assert differences(expected[min(rank, 1)][10], state, rng=rank < 2) == []
    claims = Control(FileLog(old / "log")).refresh().claims
    assert [claim.version for claim in claims.values()] == [1, 4]
    assert [{table.id is None for table in claim.schema.tables} for claim in claims.values()] == [{True}, {False}]
    told = ask("verify", settings.uris[0], "--all", status=None)
    shares = {each["marker"]: each["proved"] for each in told if each["verdict"] == "whole"}
    assert shares == {"1:1": 0, "1:2": 0, "1:3": 0, "2:3": 1}  # markers of version 1 prove nothing
    for rank, (state, step, _, _) in enumerate(warm.run(1, jobs.restore_with, PLAN_1, settings, None, 0, {})):
        assert step == 15
        assert differences(gone_on[rank][3][15], state) == []


def test_its_store_serves_markers_of_both_versions(old: Path) -> None:
    expected, log = truths(old), old / "log"
    shutil.copytree(old / "store", log, dirs_exist_ok=True)
    settings = StreamConfig(uri=f"file://{log}", marker_every=5)
    gone_on = warm.run(2, jobs.restore_with, PLAN_2, settings, None, 3, {})
    assert all(differences(expected[rank][12], gone_on[rank][0]) == [] for rank in range(2))
    assert stores.fold(log, Policy(rebase=1e-9, compact="none")) == [
        MarkerId(2, 4)
    ]  # a base of segments of both versions
    for marker, step in (("1:1", 5), ("2:4", 15)):
        ((state, found, source),) = warm.run(1, jobs.restore_once, PLAN_1, settings, marker, {})
        assert (found, source) == (step, f"store {marker}")
        assert differences(expected[0][5] if step == 5 else gone_on[0][3][15], state) == []
