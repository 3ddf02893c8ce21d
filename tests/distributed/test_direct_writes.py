"""A job that writes its log past the page cache, and everything that reads such a log: padding changes nothing."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests import jobs, ranks, stores, tiered, warm
from tests.model import PLAN_2, PLAN_3_OTHER, Spec, differences
from tests.parts import FileLog, Policy, trim_log
from torchrec_stream_ckpt import StreamConfig, follow
from torchrec_stream_ckpt.extras.follower.tables import FollowedTables
from torchrec_stream_ckpt.find.tiers import open_tiers
from torchrec_stream_ckpt.format import padding
from torchrec_stream_ckpt.format.frame import Kind, parse_header
from torchrec_stream_ckpt.inner import Control, open_store
from torchrec_stream_ckpt.log import direct, publisher
from torchrec_stream_ckpt.util.types import LogSpan, MarkerId

pytestmark = pytest.mark.distributed

STEPS, MARKER = 6, "1:1"  # at step 3; another one at step 6


def train(spec: Spec, settings: StreamConfig) -> tuple[str, Any]:
    """(rank) Train small tables as if they were large: frames of all sizes are padded, as often as there is room."""
    small = {"LEAST_BYTES": 512, "MOST_SHARE": 0.9}
    with (
        mock.patch.multiple(padding, **small),
        mock.patch.multiple(publisher, **small),
        mock.patch.object(direct, "LEAST_BYTES", 512),
    ):
        _, truths = jobs.train_with(spec, settings, STEPS, {})
    return "", truths


@pytest.fixture
def trained(disk: Path) -> tuple[Path, list[Any]]:
    """The log of two ranks, and for each the truth at each step."""
    folder = disk / "log"
    settings = StreamConfig(uri=f"file://{folder}", marker_every=3, log_writes="direct")
    return folder, [truths for _, truths in ranks.run(2, train, PLAN_2, settings)]


def kinds(folder: Path) -> Counter[Kind]:
    """Number of frames of each kind up to the newest marker."""
    log = FileLog(folder)
    newest = Control(log).refresh().newest
    assert newest is not None
    frames = (
        frame for each in newest.ranks for _, frame in log.read(LogSpan(newest.generation, each.partition, 0, each.end))
    )
    return Counter(parse_header(frame).kind for frame in frames)


def check(folder: Path, trained: list[Any], marker: str | None) -> None:
    """Restore on three ranks under another plan, and compare bit for bit."""
    settings = StreamConfig(uri=f"file://{folder}", marker_every=3, log_writes="direct")
    restored = warm.run(3, jobs.restore_with, PLAN_3_OTHER, settings, marker, 0, {})
    for rank, (state, step, _, _) in enumerate(restored):
        truth = trained[min(rank, len(trained) - 1)][step]
        assert step == (3 if marker else STEPS)
        assert differences(truth, state, rng=rank < len(trained)) == []


def test_padding_is_passed_over_by_all_who_read_a_log(trained: tuple[Path, list[Any]], tmp_path: Path) -> None:
    folder, truths = trained
    found = kinds(folder)
    assert found[Kind.PAD] >= 8
    with follow(f"file://{folder}", scratch=tmp_path) as follower, FollowedTables(follower) as tables:
        tables.advance()
        with tables.reading() as served:
            held = {name: tensor.clone() for name, tensor in served.tables.items()}
    copies = [shutil.copytree(folder, folder.with_name(name)) for name in ("log-2", "log-3")]
    check(folder, truths, None)
    check(copies[0], truths, MARKER)
    stores.fold(copies[1], Policy(rebase=0, compact="span2"))
    log, objects = FileLog(copies[1]), open_store(str(copies[1]))
    control = Control(log)
    trim_log(log, control, control.refresh().find(MarkerId.parse(MARKER)), objects.url)
    check(shutil.copytree(copies[1], folder.with_name("log-4")), truths, None)
    stores.lose_rows(copies[1])
    with follow(f"file://{copies[1]}", scratch=tmp_path) as follower, FollowedTables(follower) as tables:
        tables.advance()
        with tables.reading() as served:
            assert served.tables.keys() == held.keys()
            assert all(served.tables[name].equal(tensor) for name, tensor in held.items())
    check(copies[1], truths, MARKER)


def test_padding_goes_through_a_relay(disk: Path) -> None:
    settings = tiered.config(disk / "inner", disk / "outer", marker_every=3, log_writes="direct")
    truths = [truths for _, truths in ranks.run(2, train, PLAN_2, settings)]
    tiers = open_tiers(settings)
    tiered.relay(tiers, everything=True)
    assert kinds(disk / "outer") == kinds(disk / "inner")
    assert kinds(disk / "inner")[Kind.PAD] >= 8
    shutil.rmtree(disk / "inner")
    check(disk / "outer", truths, MARKER)
