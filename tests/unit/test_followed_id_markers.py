"""Lookups by raw id at markers: the stream says what changes in the id maps, and only loads read whole maps."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch

from tests import builders
from tests.followers import LOAD, MARKER, lose_frames
from tests.mapped_job import FREE, ONE, PLAIN, SCHEMA, TWO, MappedJob
from tests.parts import Policy
from tests.stores import fold
from torchrec_stream_ckpt import FollowedTables, follow
from torchrec_stream_ckpt.errors import ConfigError, CorruptionError
from torchrec_stream_ckpt.extras.follower import followed_maps
from torchrec_stream_ckpt.extras.follower.updates import UpdateKind
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.util.types import MarkerId

SIZES = {ONE: 0, TWO: 0}
"""One rank has all rows, so any hash size fits."""


def _job(folder: Path, seed: int = 0, schema: Schema = SCHEMA) -> MappedJob:
    return MappedJob(folder, world=1, seed=seed, schema=schema, announces=("ids",))


def _check(job: MappedJob, tables: FollowedTables, gone: set[int]) -> None:
    """Each raw id has its row; one that was ever seen and has no row now is unknown."""
    newest = list(job.truths)[-1]
    assert tables.stats.marker == newest
    for name in SIZES:
        truth, rows = job.truths[newest][name], job.at[newest][1][name]
        probes = sorted(truth.keys() | gone)
        found = tables.lookup(name, torch.tensor(probes))
        for raw_id, weights in zip(probes, found.numpy(), strict=True):
            assert weights.tobytes() == truth.get(raw_id, rows[-1].tobytes()), (name, raw_id)
        gone |= truth.keys()


@pytest.mark.parametrize("seed", range(3))
def test_every_marker_has_its_raw_ids_and_only_loads_read_whole_maps(tmp_path: Path, seed: int) -> None:
    """Evictions, moves, skipped markers, restarts, rewinds, and rows that only a store has."""
    job, random, gone = _job(tmp_path / "log", seed), np.random.default_rng(seed), {55, 56}
    job.begin()
    job.churn(40)
    job.commit()
    kinds: list[UpdateKind] = []
    read = 0
    with (
        FollowedTables(follow(f"file://{job.root}", scratch=tmp_path), input_hash_sizes=SIZES) as tables,
        patch.object(followed_maps, "read_id_maps", wraps=followed_maps.read_id_maps) as whole,
    ):
        for number in range(16):
            kinds += [each.kind for each in tables.advance()]
            _check(job, tables, gone)
            if number in (5, 9, 11):
                markers = [each for each in job.truths if each.generation == job.generation]
                job.begin(markers[0] if number == 11 else markers[-1])
            for _ in range(int(random.integers(1, 3))):
                job.churn()
                job.touch(2)
                job.commit()
            if number == 8:
                fold(job.root, Policy(rebase=0, compact="none"))
                lose_frames(job)
            read += number in (0, 6, 9, 10, 12)  # the first load; the markers after these events
            assert whole.call_count == read, number
        tables.advance()
        _check(job, tables, gone)
    assert kinds.count(LOAD) == 2
    assert kinds.count(MARKER) >= 13


def test_work_is_that_of_the_changed_ids_whatever_the_size_of_the_map(tmp_path: Path) -> None:
    """At 32 times the rows, the same memory is taken for the same changes, and the dense state is not opened."""
    taken = []
    for rows in (1_000, 32_000):
        job = _job(tmp_path / str(rows), schema=Schema((builders.table(ONE, rows, 4), builders.table(PLAIN, 25, 4))))
        job.owners = {ONE: np.arange(1000, 1000 + rows)}
        job.begin()
        job.commit()
        with FollowedTables(follow(f"file://{job.root}", scratch=tmp_path), input_hash_sizes={ONE: 0}) as tables:
            tables.advance()
            for number in range(2):
                job.owners[ONE][:25] += 10**6
                job.send(ONE, range(40))
                commit = job.commit()
                for path in (job.root / commit.dense).iterdir():
                    path.unlink()
                tracemalloc.start()
                (update,) = tables.advance()
                peak = tracemalloc.get_traced_memory()[1]
                tracemalloc.stop()
                assert update.kind is MARKER
                assert len(update.ids or ()) == 2
                probes = torch.arange(1000, 1050)
                expected = job.at[commit.id][1][ONE][[*[rows - 1] * 25, *range(25, 50)]]
                assert tables.lookup(ONE, probes).numpy().tobytes() == expected.tobytes()
                moved = torch.arange(1000, 1025) + 10**6 * (number + 1)
                assert tables.lookup(ONE, moved).numpy().tobytes() == job.at[commit.id][1][ONE][:25].tobytes()
        taken.append(peak)
    assert taken[1] < 1.5 * taken[0]


def test_events_that_contradict_the_map_leave_the_marker_served_and_lead_to_a_load(tmp_path: Path) -> None:
    job = _job(tmp_path / "log")
    job.begin()
    job.owners[ONE][:3] = [5, 6, FREE]
    job.commit()
    with FollowedTables(follow(f"file://{job.root}", scratch=tmp_path), input_hash_sizes=SIZES) as tables:
        tables.advance()
        job.sent[ONE][:3] = [6, 5, FREE]
        job.send(ONE, range(5))
        job.commit()
        with pytest.raises(CorruptionError, match="raw id 6 loses row 0, which it does not have"):
            tables.advance()
        assert tables.lookup(ONE, torch.tensor([5, 6])).numpy().tobytes() == b"".join(
            job.truths[MarkerId(1, 1)][ONE][each] for each in (5, 6)
        )
        assert [each.kind for each in tables.advance()] == [LOAD]
        _check(job, tables, {7})


def test_the_greatest_int64_is_refused_between_markers(tmp_path: Path) -> None:
    job = _job(tmp_path / "log")
    job.begin()
    job.owners[ONE][:2] = [-(2**63), 2**63 - 2]
    job.commit()
    with FollowedTables(follow(f"file://{job.root}", mode="rows"), input_hash_sizes=SIZES) as tables:
        tables.advance()
        found = tables.lookup(ONE, torch.tensor([-(2**63), 2**63 - 2])).numpy()
        assert found.tobytes() == job.at[MarkerId(1, 1)][1][ONE][:2].tobytes()
        with pytest.raises(ConfigError, match="between markers it is not known which are free"):
            tables.lookup(ONE, torch.tensor([0, 2**63 - 1]))
