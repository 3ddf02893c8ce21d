"""Lookups by raw id in the tables of a replica: at each marker what TorchRec looks up, and never of two markers."""

from __future__ import annotations

import hashlib
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from tests import ranks
from tests.collided import ENDS, TABLES, answers, attach, job, rows_in_files
from torchrec_stream_ckpt import FollowedTables, follow
from torchrec_stream_ckpt.errors import ConfigError, ReplicaNotReadyError, SchemaMismatchError
from torchrec_stream_ckpt.extras.follower import followed_maps

pytestmark = pytest.mark.distributed

SIZES = {f"mc._embedding_module.{name}": size for name, *_, size in TABLES}


def _probes(size: int) -> torch.Tensor:
    """All raw ids there can be, and the ends of int64."""
    return torch.cat([torch.arange(size), ENDS])


def _digest(answer: torch.Tensor) -> str:
    return hashlib.sha256(answer.numpy().tobytes()).hexdigest()


def _hammer(tables: FollowedTables, ended: threading.Event) -> set[str]:
    """Look all raw ids of the first table up, over and over. Returns the digests of the answers."""
    name, seen = next(iter(SIZES)), set()
    while not ended.wait(0.01):
        seen.add(_digest(tables.lookup(name, _probes(SIZES[name]))))
    return seen


def _train_and_follow(uri: str, begin: int, steps: int, ends: bool = False) -> int:
    """Train with a marker at each step; on rank 0 a replica follows, while a thread looks up. Returns the evictions."""
    each = job(policy="lru", weighted=True) if ends else job()
    each.ends = ends
    tables = FollowedTables(follow(uri), input_hash_sizes=SIZES) if dist.get_rank() == 0 else None
    read_id_maps = followed_maps.read_id_maps
    whole = Mock(wraps=read_id_maps)
    followed_maps.read_id_maps = whole
    answered: set[str] = set()
    ended, lost = threading.Event(), 0
    pool, reader = ThreadPoolExecutor(1), None
    try:
        with attach(each, uri, marker_every=None) as checkpointer:
            if begin:
                assert checkpointer.restore() is not None
            for _ in range(steps):
                before = set(each.maps()["one"]._mch_sorted_raw_ids.tolist())
                each.step()
                checkpointer.step()
                lost += len(before - set(each.maps()["one"]._mch_sorted_raw_ids.tolist()) - {2**63 - 1})
                expected = answers(each, {name: _probes(size) for name, *_, size in TABLES})
                checkpointer.mark().result(60)
                answered.add(_digest(next(iter(expected.values()))))
                if tables is not None:
                    tables.advance()
                    for name, size in SIZES.items():
                        assert torch.equal(tables.lookup(name, _probes(size)), expected[name]), (each.step_number, name)
                    reader = reader or pool.submit(_hammer, tables, ended)
    finally:
        ended.set()
        followed_maps.read_id_maps = read_id_maps
    if tables is not None:
        assert whole.call_count == 1  # the load; from there on the stream says what changes
        assert reader is not None
        seen = reader.result(60)
        assert len(answered) == steps
        assert len(seen) > 1
        assert seen <= answered
        tables.close()
    return lost


@pytest.mark.covers(
    plan="row-wise, fewer ranks whose shards are unions", module="managed collision", pipeline="plain", served="raw ids"
)
def test_every_marker_answers_for_raw_ids_as_the_trainer_over_fewer_ranks(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}"
    assert sum(ranks.run(2, _train_and_follow, uri, 0, 7)) > 0
    assert sum(ranks.run(1, _train_and_follow, uri, 7, 6)) > 0


def test_the_ends_of_int64_are_trained_followed_restored_exported_and_written_to_a_sink(tmp_path: Path) -> None:
    """-2^63 is an id like any other. 2^63-1 is TorchRec's mark of a free row: it trains one, and never gets it."""
    uri = f"file://{tmp_path / 'log'}"
    ranks.run(2, _train_and_follow, uri, 0, 8, True)
    ranks.run(1, _train_and_follow, uri, 8, 4, True)
    for name, whole in rows_in_files(uri, SIZES, tmp_path).items():
        assert whole.keys() >= {-(2**63), -1, 2**63 - 2}
        assert 2**63 - 1 not in whole
        with FollowedTables(follow(uri), input_hash_sizes=SIZES) as tables:
            tables.advance()
            assert dict(zip(whole, tables.lookup(name, torch.tensor(list(whole))).tolist(), strict=True)) == whole


def _refused(uri: str) -> None:
    each = job()
    with attach(each, uri, marker_every=None) as checkpointer:
        each.step()
        checkpointer.step()
        checkpointer.mark().result(60)
    one = next(iter(SIZES))
    with FollowedTables(follow(uri), input_hash_sizes=SIZES) as tables:
        with pytest.raises(ReplicaNotReadyError):
            tables.lookup(one, ENDS)
        tables.advance()
        with pytest.raises(ConfigError, match="raw ids of this table are not followed"):
            tables.lookup("other", ENDS)
        with pytest.raises(ConfigError, match=r"raw ids are torch.int32 \(4,\)"):
            tables.lookup(one, ENDS.int())
        assert tables.lookup(one, ENDS[:0]).shape == (0, 8)
    with (
        FollowedTables(follow(uri), input_hash_sizes={"other": 5}) as tables,
        pytest.raises(SchemaMismatchError, match="input_hash_sizes names this table"),
    ):
        tables.advance()
    for more in ({"slices": True}, {"shard": (0, 2)}):
        with follow(uri) as follower, pytest.raises(ConfigError, match="looked up in whole tables, and between"):
            FollowedTables(follower, input_hash_sizes=SIZES, **more)


def test_what_cannot_be_answered_exactly_is_refused(tmp_path: Path) -> None:
    ranks.run(1, _refused, f"file://{tmp_path}")
