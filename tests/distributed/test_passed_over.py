"""Ranks that restore without a name: they pass over the same markers, whichever of them alone meets the damage."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests import jobs
from tests.model import PLAN_1, Spec, differences, trainer, truth
from tests.parts import FileLog
from tests.pool import Pool
from torchrec_stream_ckpt import MarkerId, StreamConfig
from torchrec_stream_ckpt.errors import StreamCkptError
from torchrec_stream_ckpt.format.frame import HEADER_LEN, Kind, parse_header
from torchrec_stream_ckpt.inner import Control
from torchrec_stream_ckpt.util.types import LogSpan

pytestmark = pytest.mark.distributed

SHARDED = [name for name, (kind, _) in PLAN_1.items() if kind != "dp"]
MARKERS = 5
Truths = list[dict[str, torch.Tensor]]
Said = tuple[str, tuple[str, ...], dict[str, torch.Tensor]]
"""What was restored, or the error; what was passed over; the truth then."""


def whole_tables(world: int) -> Spec:
    """Each on one rank: it alone reads the stream of the rank that had it."""
    return {**PLAN_1, **{name: ("tw", number % world) for number, name in enumerate(SHARDED)}}


def _train(settings: StreamConfig) -> Truths:
    job = trainer(whole_tables(dist.get_world_size()))
    truths = []
    with jobs.attach(job, settings) as checkpointer:
        checkpointer.restore()
        for _ in range(MARKERS):
            job.step()
            checkpointer.step()
            checkpointer.mark().result(60)
            truths.append(truth(job))
    return truths


def _restore(settings: list[StreamConfig]) -> tuple[Said, set[int]]:
    """With a setting a rank; and the ranks of the old job of which this one reads the stream."""
    job = trainer(whole_tables(dist.get_world_size()))
    job.step()
    with jobs.attach(job, settings[dist.get_rank()], paranoid=False) as checkpointer:
        plan = checkpointer.plan()
        assert plan is not None
        read = {each.interval.end.rank for each in plan.reads}
        try:
            restored = checkpointer.restore()
        except StreamCkptError as error:
            return (f"{type(error).__name__}: {error}", (), {}), read
        assert restored is not None
        return (str(restored.id), restored.skipped, truth(job)), read


def _harm(folder: Path, marker: int, rank: int) -> None:
    """One bit of a row that only this marker, and those after it, have."""
    log = FileLog(folder)
    commits = Control(log).refresh().commits
    before, end = (commits[MarkerId(1, number)].ranks[rank] for number in (marker - 1, marker))
    for offset, frame in log.read(LogSpan(1, end.partition, before.end, end.end)):
        if parse_header(frame).kind is Kind.ROWS:
            found = (folder / "data" / f"p{rank:05d}").glob("g00000001-*.seg")
            begin, segment = max(pair for each in found if (pair := (int(each.stem.split("-")[1]), each))[0] <= offset)
            data = bytearray(segment.read_bytes())
            data[offset - begin + HEADER_LEN + 3] ^= 1
            segment.write_bytes(data)
            return
    raise AssertionError("the marker has no rows of this rank")


def _settings(folder: Path, most: int = 3) -> StreamConfig:
    return StreamConfig(uri=f"file://{folder}", marker_every=None, max_fallback=most)


@pytest.mark.parametrize("world", [2, 4])
def test_one_rank_alone_meets_the_damage_and_all_pass_over_the_same_markers(
    world: int, tmp_path: Path, pool: Pool
) -> None:
    truths: list[Truths] = pool.run(world, _train, _settings(tmp_path / "whole"))
    last = world - 1
    # What harms a marker harms all that follow it.
    for name, harmed in (("alone", {3: last}), ("in turn", {3: last, 4: 0, 5: 1})):
        copy = shutil.copytree(tmp_path / "whole", tmp_path / name)
        for marker, rank in harmed.items():
            _harm(copy, marker, rank)
        found = pool.run(world, _restore, [_settings(copy)] * world)
        assert [read for _, read in found] == [{rank} for rank in range(world)], "a rank reads more than its own stream"
        (said, skipped, _), _ = found[0]
        assert {each[:2] for each, _ in found} == {(said, skipped)}
        assert said == "1:2"
        assert [each.split(": ")[0] for each in skipped] == ["1:5", "1:4", "1:3"]
        for rank, ((_, _, state), _) in enumerate(found):
            assert differences(truths[rank][1], state) == []


@pytest.mark.parametrize("world", [2, 4])
def test_all_ranks_allow_as_many_markers_as_rank_0_does(world: int, tmp_path: Path, pool: Pool) -> None:
    pool.run(world, _train, _settings(tmp_path / "whole"))
    for marker in (MARKERS, MARKERS - 1):
        _harm(tmp_path / "whole", marker, world - 1)
    for most in (1, 2):
        copy = shutil.copytree(tmp_path / "whole", tmp_path / f"{most}")
        others = [_settings(copy, 3 - most)] * (world - 1)  # rank 0 alone decides
        found = [said for said, _ in pool.run(world, _restore, [_settings(copy, most), *others])]
        assert {said[:2] for said in found} == {found[0][:2]}
        if most == 1:
            assert found[0][0].startswith("CorruptionError: ")
            assert "marker=1:5, older=1:4: " in found[0][0]
        else:
            assert found[0][0] == "1:3"
