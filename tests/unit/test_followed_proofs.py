"""A replica compares its weights with the proof of each marker, and serves no rows that are not as they were proved."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.command import call, run
from tests.evolved import EvolvingJob, random_schema
from tests.parts import Policy, UpdateKind
from tests.stores import fold
from tests.unit.test_proof_checker import ROUND, SCHEMA
from torchrec_stream_ckpt import FollowedTables, follow
from torchrec_stream_ckpt.errors import ProofMismatchError, ReplicaNotReadyError
from torchrec_stream_ckpt.format.proof import POSITIONS
from torchrec_stream_ckpt.format.rows import NUMPY_DTYPES
from torchrec_stream_ckpt.inner import Plane

LOST = np.arange(64, 70)
"""Rows of t_a, all of one block."""


@pytest.fixture
def job(tmp_path: Path) -> EvolvingJob:
    made = EvolvingJob(tmp_path / "log", schema=SCHEMA)
    made.first(SCHEMA)
    return made


@pytest.fixture
def tables(job: EvolvingJob, tmp_path: Path) -> Iterator[FollowedTables]:
    job.markers(1)
    with FollowedTables(follow(f"file://{job.root}", scratch=tmp_path, poll_s=0.01)) as tables:
        tables.advance()
        yield tables


def is_true(job: EvolvingJob, tables: FollowedTables) -> bool:
    """Whether what is served is the marker that it says, by the job's own word."""
    with tables.reading() as served:
        return all(
            np.array_equal(
                served.tables[table.spec.name].view(_bits(table.spec.dtype)).numpy(),
                table.arrays[0].view(f"i{table.arrays[0].itemsize}"),
            )
            for table in job.truth[served.marker].values()
        )


def _bits(dtype: str) -> torch.dtype:
    return {2: torch.int16, 4: torch.int32, 8: torch.int64}[np.dtype(NUMPY_DTYPES[dtype]).itemsize]


@pytest.mark.parametrize("seed", range(4))
def test_what_is_followed_is_as_it_was_proved_over_branches_changes_and_stores(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    job = EvolvingJob(tmp_path / "log", seed=seed, schema=random_schema(rng), width=[POSITIONS, 30_000][seed % 2])
    job.first(job.schema)
    tips = job.markers(1)
    with FollowedTables(follow(f"file://{job.root}", scratch=tmp_path)) as tables:
        for number in range(8):
            tables.advance()
            assert is_true(job, tables)
            if number % 3 == 2:
                parent = tips[rng.integers(len(tips))] if number == 5 else tips[-1]
                (job.change if rng.random() < 0.5 else job.go_on)(parent)
            tips += job.markers(1)
            if number == 3:
                fold(job.root, Policy(rebase=1e-9, compact="none"))
        stats = tables.follower.stats
        assert (stats.proofs, stats.unproved, stats.uncompared) == (8, 0, 0)


def lose_rows_of_the_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next rows that are put into a tensor are one less."""
    put, done = Plane.put, []

    def shorter(plane: Plane, places: object, values: np.ndarray, col0: int = 0) -> None:
        if not done and len(values) > 1:
            done.append(True)
            places, values = places[1:], values[1:]  # type: ignore[index]
        put(plane, places, values, col0)  # type: ignore[arg-type]

    monkeypatch.setattr(Plane, "put", shorter)


def test_a_row_that_was_placed_wrong_is_named_not_served_and_loaded_again(
    job: EvolvingJob, tables: FollowedTables, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.markers(1)
    lose_rows_of_the_replica(monkeypatch)
    with pytest.raises(ProofMismatchError) as raised:
        tables.advance()
    assert str(raised.value.where["proved"]) == "1:2"
    assert raised.value.where["table"] in {"t_a", "t_b"}
    assert "-" in str(raised.value.where["rows"])
    with pytest.raises(ReplicaNotReadyError, match=r"rows \[.*proved by 1:2"), tables.reading():
        pass
    (update,) = tables.advance()
    assert (update.kind, update.why) == (UpdateKind.LOAD, "rows differ from the proof of marker 1:2")
    assert is_true(job, tables)
    stats = tables.follower.stats
    assert (stats.proofs, stats.unproved, stats.doubted, stats.reloads) == (2, 1, 0, 1)


def test_a_thread_loads_again_by_itself(
    job: EvolvingJob, tables: FollowedTables, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.markers(1)
    lose_rows_of_the_replica(monkeypatch)
    tables.start()
    deadline = time.monotonic() + 60
    while tables.follower.stats.reloads < 1:
        assert time.monotonic() < deadline
        assert tables.failure is None
        time.sleep(0.01)
    assert is_true(job, tables)


class LosingJob(EvolvingJob):
    """Its tables change in some rows that are never sent."""

    def send(self, ids: np.ndarray) -> None:
        """Rows of t_a, as they are now."""
        for stream in self.streams:
            for shard in stream.shards:
                mine = ids[(ids >= shard.row0) & (ids < shard.row0 + shard.rows)]
                if shard.table == 0 and len(mine):
                    EvolvingJob.put_rows(self, stream, shard, mine)
        self.flush()


@pytest.fixture
def losing(tmp_path: Path) -> LosingJob:
    made = LosingJob(tmp_path / "log", schema=SCHEMA, width=POSITIONS)
    made.first(SCHEMA)
    made.markers(1)
    return made


def followed(job: EvolvingJob, scratch: Path, **more: bool) -> FollowedTables:
    return FollowedTables(follow(f"file://{job.root}", scratch=scratch, poll_s=0.01), **more)


def lose(job: LosingJob) -> None:
    """A marker whose live rows are not what was sent."""
    job.send(np.array([0, 300, 600]))
    job.live[0].arrays[0][LOST] = 7
    job.commit()


def test_rows_that_log_and_store_lack_are_not_served_until_they_are_sent_again(
    losing: LosingJob, tmp_path: Path
) -> None:
    with followed(losing, tmp_path) as tables:
        tables.advance()
        lose(losing)
        for _ in range(3):  # what changed, all rows, and when nothing new has come
            with pytest.raises(ProofMismatchError, match=r"t_a weights rows \[64, 128\) \(proved by 1:2"):
                tables.advance()
            with pytest.raises(ReplicaNotReadyError, match=r"t_a weights rows \[64, 128\)"), tables.reading():
                pass
        losing.width = 1  # later markers prove one block of 65,536
        losing.send(np.arange(64, 127))
        losing.commit()
        with pytest.raises(ProofMismatchError, match=r"rows \[64, 128\)"):
            tables.advance()  # one row of the block is missing
        assert tables.follower.stats.doubted == 1
        losing.send(np.arange(127, 128))
        losing.commit()
        tables.advance()
        assert is_true(losing, tables)
        assert tables.follower.stats.doubted == 0


def test_a_newer_proof_settles_what_was_doubted(losing: LosingJob, tmp_path: Path) -> None:
    with followed(losing, tmp_path) as tables:
        sent = losing.live[0].arrays[0].copy()
        lose(losing)
        for _ in range(2):
            with pytest.raises(ProofMismatchError):
                tables.advance()
            losing.commit()
        assert tables.follower.stats.reloads == 0  # a load has not brought them either
        losing.live[0].arrays[0][LOST] = sent[LOST]
        losing.commit()
        tables.advance()
        assert is_true(losing, tables)


def test_unproved_rows_are_served_to_those_who_accept_them(losing: LosingJob, tmp_path: Path) -> None:
    with followed(losing, tmp_path, accept_unproved=True) as tables:
        tables.advance()
        lose(losing)
        tables.advance()
        with tables.reading() as served:
            assert str(served.marker) == "1:2"
        port = tables.serve_metrics(0)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        assert 'stream_ckpt_follower_unproved_blocks_total{stream_job="log"} 1.0' in lines
        assert 'stream_ckpt_follower_doubted_blocks{stream_job="log"} 1.0' in lines
        assert 'stream_ckpt_follower_proofs_total{stream_job="log"} 2.0' in lines


def test_a_block_of_rows_is_compared_as_far_as_it_holds_blocks_whole(losing: LosingJob, tmp_path: Path) -> None:
    lose(losing)
    refused = []
    for number in range(3):
        source = follow(f"file://{losing.root}", scratch=tmp_path)
        with FollowedTables(source, shard=(number, 3)) as tables:
            try:
                tables.advance()
            except ProofMismatchError as error:
                refused.append((number, error.where["rows"]))
            assert source.stats.proofs == 1
    assert refused == [(0, "64-127")]


@pytest.mark.parametrize("encoding", ["int8", "bf16"])
def test_a_serving_stream_publishes_nothing_that_is_not_as_it_was_proved(
    losing: LosingJob, tmp_path: Path, encoding: str
) -> None:
    losing.live[0].arrays[0][:] = losing.live[1].arrays[0][:1, :1] * 0 + 1  # numbers that can be encoded
    losing.live[1].arrays[0][:] = 2
    losing.random = _Ones()  # type: ignore[assignment]
    losing.send(np.arange(700))
    for stream in losing.streams:
        for shard in stream.shards:
            if shard.table == 1:
                EvolvingJob.put_rows(losing, stream, shard, np.arange(shard.row0, shard.row0 + shard.rows))
    losing.flush()
    losing.commit()
    out = f"file://{tmp_path / 'out'}"
    arguments = ["follow", f"file://{losing.root}", "--once", "--serve", out, "--encoding", encoding]
    run(*arguments)
    lose(losing)
    done = call(*arguments)
    assert isinstance(done.exception, ProofMismatchError)
    assert "start it again" in done.exception.hint
    with follow(out, scratch=tmp_path) as replica:
        (update,) = replica.updates(0)
        assert update.origin == "1:2"


class _Ones:
    """In place of a generator: values that every encoding has a place for."""

    def bytes(self, count: int) -> bytes:
        return np.ones(count // 4, np.float32).tobytes()


def test_a_follower_without_tables_has_the_proof_and_compares_nothing(losing: LosingJob, tmp_path: Path) -> None:
    lose(losing)
    with follow(f"file://{losing.root}", scratch=tmp_path) as follower:
        for update in follower.updates(0):
            proof = update.proof()
            assert proof is not None
            assert sorted(proof.tables) == ["t_a", "t_b"]
            list(update.changes())
        assert follower.stats.proofs == 0


def test_a_round_of_small_windows_finds_what_one_marker_does_not_prove(losing: LosingJob, tmp_path: Path) -> None:
    losing.width = POSITIONS // ROUND
    with followed(losing, tmp_path) as tables:
        tables.advance()
        losing.live[0].arrays[0][LOST] = 7

        def follow_a_round() -> None:
            for _ in range(ROUND):
                losing.commit()
                tables.advance()

        with pytest.raises(ProofMismatchError):
            follow_a_round()
