"""What a marker of many ranks costs rank 0: the CLAIM, and the votes of all ranks, which are simulated."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from axis import Axis
from common import without_fsync

from tests.builders import SCHEMA
from tests.synthetic import Job
from torchrec_stream_ckpt import StreamConfig
from torchrec_stream_ckpt.dense.dense_state import DenseState
from torchrec_stream_ckpt.dense.replica_check import Held
from torchrec_stream_ckpt.errors import MarkerFailedError
from torchrec_stream_ckpt.find.job import open_tier
from torchrec_stream_ckpt.format.rank_shards import RankShards
from torchrec_stream_ckpt.log.control.partition import Control
from torchrec_stream_ckpt.log.publisher import Publisher
from torchrec_stream_ckpt.ranks.collective import Team
from torchrec_stream_ckpt.save.coordinator import Coordinator, CutOrder, MarkerVote
from torchrec_stream_ckpt.save.generation import Generation, Opening, claim_generation
from torchrec_stream_ckpt.save.rank_cut import Seal
from torchrec_stream_ckpt.store.dense import open_dense
from torchrec_stream_ckpt.util.types import RankEnd

Measure = Callable[[str, Callable[[], Any]], Any]
VOTE_CALLS = ("claim", "votes and COMMIT", "votes that differ")
_TIMEOUT_S = 300.0


class _Ranks:
    """Stands in for a team: the other ranks say what rank 0 says, each with its own end of a stream."""

    rank = 0

    def __init__(self, ends: list[RankEnd]) -> None:
        self._ends = ends
        self.differ = False

    def agree(self, tag: tuple[int, int], value: Any, *_: object) -> list[Any]:
        said = [value] * len(self._ends)
        if isinstance(value, MarkerVote) and value.end is not None:
            return [replace(value, end=end) for end in self._ends]
        if self.differ and isinstance(value, MarkerVote):
            said[-1] = replace(value, held={group: number + 1 for group, number in value.held.items()})
        if self.differ and isinstance(value, Held):
            said[-1] = replace(value, shapes=("another weight",))
        return said


class _Coordinator(Coordinator):
    """Rank 0's own part of a marker is in the log already."""

    end: RankEnd

    def prepare(self, cut: CutOrder, _: float) -> MarkerVote:
        return MarkerVote(cut.marker, cut.step, "", end=self.end)


def ends_of(job: Job) -> list[RankEnd]:
    """Where the streams of all ranks end, whose MARKs are in the log."""
    return [
        replace(stream.end(job._begins[stream.rank], job._ends[stream.rank], partition=stream.rank), num_bytes=0)
        for stream in job.streams
    ]


def votes_of(ranks: int, folder: Path, measure: Measure) -> None:
    """Claim a generation of so many ranks, and commit its first marker."""
    with without_fsync():
        job = Job(folder / "log", world=ranks, schema=SCHEMA)
        job.begin()
        job.commit()
        layout = measure("claim", lambda: _claim(job, folder))
        assert len(layout) == ranks
        job.begin()
        job.give_up()
        claim, ends = job.claims[job.generation], ends_of(job)
        dense = open_dense(str(folder / "dense"))
        dense.prepare(claim.job)
        publisher = cast(Publisher, None)  # what it would do is done: all frames are in the log
        generation = Generation(job.log, Control(job.log), claim, publisher, 0, 0, dense, "")
        generation.control.refresh()
        team = _Ranks(ends)
        state = SimpleNamespace(held=Held(shapes=("a weight",)), saving=None, finish_copy=lambda: "")
        coordinator = _Coordinator(generation, cast(DenseState, state), cast(Team, team), _TIMEOUT_S)
        coordinator.end = ends[0]
        measure("votes and COMMIT", lambda: _settle(coordinator, job.marker))
        team.differ = True
        measure("votes that differ", lambda: _differing(coordinator, job.marker + 1))
        coordinator.close(_TIMEOUT_S)


def _claim(job: Job, folder: Path) -> RankShards:
    """Rank 0 has the shards of all ranks, and claims the next generation."""
    layout = RankShards.of([stream.shards for stream in job.streams])
    config = StreamConfig(uri=f"file://{folder / 'log'}", store=str(folder / "dense"))
    with contextlib.closing(open_tier(config, copies=False)) as tier:
        tables = tuple(range(len(job.schema.tables)))
        claim = claim_generation(tier, Opening(job.schema, job.world, None, tables, layout))
    job.claims[claim.generation] = claim
    job.generation = claim.generation
    assert layout is not None
    return layout


def _settle(coordinator: Coordinator, marker: int) -> None:
    coordinator.begin(CutOrder(marker, marker, Seal())).result(_TIMEOUT_S)


def _differing(coordinator: Coordinator, marker: int) -> None:
    with contextlib.suppress(MarkerFailedError):
        _settle(coordinator, marker)
    assert "the dense state of ranks 0 and " in str(coordinator.failure)


VOTES = {"votes": Axis("ranks that vote", votes_of, 16, 1024, kind="votes")}
