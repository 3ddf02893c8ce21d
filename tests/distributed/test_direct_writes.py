"""A job that writes its log past the page cache, and everything that reads such a log: padding changes nothing."""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests import jobs, ranks, stores, tiered, warm
from tests.laps import cell_model, lap, plan
from tests.model import PLAN_2, PLAN_3_OTHER, Spec, differences, trainer
from tests.padded import pad_small_frames
from tests.parts import FileLog, Policy, open_tiers, trim_log
from tests.pool import Pool
from torchrec_stream_ckpt import StreamConfig, follow
from torchrec_stream_ckpt.dense import hashed_file
from torchrec_stream_ckpt.extras.follower.tables import FollowedTables
from torchrec_stream_ckpt.format.frame import Kind, parse_header
from torchrec_stream_ckpt.inner import Control, open_store
from torchrec_stream_ckpt.log import direct
from torchrec_stream_ckpt.util.types import LogSpan, MarkerId

pytestmark = pytest.mark.distributed

STEPS, MARKER = 6, "1:1"  # at step 3; another one at step 6


def train(spec: Spec, settings: StreamConfig) -> tuple[str, Any]:
    """(rank) Train small tables as if they were large."""
    pad_small_frames()
    with mock.patch.object(hashed_file, "write_blocks", wraps=hashed_file.write_blocks) as dense:
        _, truths = jobs.train_with(spec, settings, STEPS, {})
    assert dense.call_count
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


@pytest.mark.parametrize(("kind", "optimizer"), [("ebc", "rowwise_adagrad"), ("ec", "adagrad")])
def test_a_cell_of_the_matrix_is_exact(kind: str, optimizer: str, disk: Path) -> None:
    """As in test_matrix.py: 4 ranks on two hosts, restored on 2 ranks, and that on 3."""
    model, families = cell_model(kind, optimizer)
    plans = plan(families, 4, 2, 0), plan(families, 2, 1, 1), plan(families, 3, 1, 2)
    with closing(Pool()) as pool:
        pool.prepare(4, pad_small_frames)
        done = lap(pool, model, plans, disk / "log", log_writes="direct")
    assert done.wrong == ()
    assert kinds(disk / "log")[Kind.PAD]


def in_memory(settings: StreamConfig) -> str:
    """(rank) How the log is written after a marker."""
    job = trainer(PLAN_2)
    with jobs.attach(job, settings, paranoid=False) as checkpointer:
        job.step()
        checkpointer.step()
        checkpointer.mark().result(60)
        return checkpointer.stats().log_writes


def test_a_log_in_memory_is_written_through_the_page_cache_and_stats_say_so() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="direct-") as folder:
        if direct.file_system(Path(folder)) != "tmpfs":
            pytest.skip("/dev/shm is not a tmpfs")
        settings = StreamConfig(uri=f"file://{folder}/log", log_writes="direct", store=f"file://{folder}/store")
        assert ranks.run(2, in_memory, settings) == ["buffered (tmpfs has no disk)"] * 2
