"""Lookups by raw id in the tables of a replica: at each marker what TorchRec looks up, and never of two markers."""

from __future__ import annotations

import copy
import hashlib
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec.modules.mc_modules import LFU_EvictionPolicy
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests import collided, hashed, ranks
from tests.collided import ENDS, FEATURES, POLICIES, TABLES, Net, answers, attach, job, rows_in_files
from tests.hash_zch import trainable
from tests.parts import UpdateKind, followed_maps
from tests.served import WIDTHS, collection, quantize_parts, quantized
from torchrec_stream_ckpt import FollowedModel, FollowedTables, follow
from torchrec_stream_ckpt.errors import ConfigError, ReplicaNotReadyError, SchemaMismatchError

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


# Managed collision modules follow live trainers: each raw id gets the row that the trainer looks up.


Rows = dict[str, torch.Tensor]
"""What the trainer looks up for each probe, by table."""


class Case:
    """A job, and modules that follow it.

    Args:
        kind: bag or sequence.
        hash_zch: How the modules of hash ZCH are built; None for sorted maps.
        more: How the job of sorted maps is built.
    """

    def __init__(self, kind: str = "bag", hash_zch: dict[str, Any] | None = None, **more: Any) -> None:
        self.kind, self.hash_zch, self.more = kind, hash_zch, more
        self.weighted = bool(more.get("weighted"))

    def job(self, clock: Any) -> collided.Job:
        if self.hash_zch is not None:
            return hashed.job(clock, self.kind, **self.hash_zch)
        each = collided.job(self.kind, **self.more)
        each.ends = self.weighted
        return each

    def probes(self, name: str) -> torch.Tensor:
        """All raw ids that a table can have; the ends of int64 too, if the module does not hash them."""
        (size,) = [size for table, *_, size in TABLES if table == name]
        ids = torch.arange(size)
        return torch.cat([ids, ENDS]) if self.weighted else ids

    def module(self, width: str) -> nn.Module:
        """The trainer's model, unsharded, with other values."""
        policy = POLICIES[self.more.get("policy", "distance_lfu")]()
        if self.hash_zch is not None:
            policy = LFU_EvictionPolicy()
        net = Net(self.kind, policy, weighted=self.weighted, intervals=(3, 4))
        maps: Any = net.mc._managed_collision_collection
        if self.hash_zch is not None:
            for name, module in hashed.modules(**self.hash_zch, is_inference=True).items():
                maps._managed_collision_modules[name] = module
        inner: Any = net.mc._embedding_module
        inner.to_empty(device="cpu")
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.fill_(3)
        return quantize_parts(net.eval(), width).eval()

    def look_up(self, module: nn.Module) -> Rows:
        """What a module finds for the probes of each feature."""
        values = [self.probes(name) for name, _, _, features, *_ in TABLES for _ in features]
        counts = torch.tensor([len(each) for each in values])
        lengths = (torch.arange(int(counts.max())) < counts[:, None]).long()
        ids = torch.cat(values)
        batch = KeyedJaggedTensor(
            [feature for feature, _ in FEATURES],
            ids,
            lengths=lengths.flatten(),
            weights=torch.ones(len(ids)) if self.weighted else None,
        )
        with torch.no_grad():
            found, _ = module.get_submodule("mc")(batch)
        return {
            feature: (found[feature] if self.kind == "bag" else found[feature].values())[: len(each)]
            for (feature, _), each in zip(FEATURES, values, strict=True)
        }

    def expected(self, rows: Rows, width: str) -> Rows:
        """The trainer's rows by feature, quantized from scratch."""
        found = {}
        for name, _, _, features, *_ in TABLES:
            weights = rows[f"mc._embedding_module.{name}"]
            if width != "float":
                module = quantized(collection("ebc", {name: weights}), width)
                count = len(weights)
                ids = KeyedJaggedTensor([f"f_{name}"], torch.arange(count), lengths=torch.ones(count).long())
                weights = module(ids).values()
            found |= dict.fromkeys(features, weights)
        return found


def _bits(rows: Rows) -> dict[str, bytes]:
    return {name: each.numpy().tobytes() for name, each in rows.items()}


def _hammer_module(case: Case, model: FollowedModel, ended: threading.Event) -> list[tuple[str, dict[str, bytes]]]:
    seen = []
    while not ended.wait(0.01):
        with model.reading() as served:
            seen.append((str(served.marker), _bits(case.look_up(served.module))))
    return seen


def _train_and_serve(case: Case, uri: str, begin: int, steps: int) -> tuple[int, Rows, torch.Tensor]:
    """Train with a marker at each step; on rank 0 modules follow, while a thread looks up.

    Returns:
        The evictions of this rank, the trainer's rows at the last marker, and its dense weights.
    """
    models = {}
    if dist.get_rank() == 0:
        models = {width: FollowedModel(case.module(width), follow(uri)) for width in ("float", "int8")}
    expected: dict[str, dict[str, bytes]] = {}
    ended, truths = threading.Event(), {}
    pool, reader = ThreadPoolExecutor(1), None
    rows: Rows = {}
    dense = torch.empty(0)
    with trainable() as clock:
        each = case.job(clock)
        try:
            with attach(each, uri, marker_every=None) as checkpointer:
                if begin:
                    assert checkpointer.restore() is not None
                for _ in range(steps):
                    each.step()
                    checkpointer.step()
                    truths[each.step_number] = ({}, each.map_truth())
                    dense = each.truth()["top.weight"]
                    rows = answers(each, {name: case.probes(name) for name, *_ in TABLES})
                    marker = str(checkpointer.mark().result(60).id)
                    expected[marker] = _bits(case.expected(rows, "int8"))
                    for width, model in models.items():
                        model.advance()
                        with model.reading() as served:
                            assert str(served.marker) == marker
                            found = case.look_up(served.module)
                        assert _bits(found) == _bits(case.expected(rows, width)), (marker, width)
                    if models:
                        reader = reader or pool.submit(_hammer_module, case, models["int8"], ended)
        finally:
            ended.set()
    if reader is not None:
        seen = reader.result(60)
        assert len({marker for marker, _ in seen}) > 1
        assert all(found == expected[marker] for marker, found in seen)
    for model in models.values():
        model.close()
    lost = hashed.evicted if case.hash_zch is not None else collided.evicted
    evictions = sum(sum(lost(truths, table).values()) for table, *_ in TABLES)
    return evictions, rows, dense


def _check(
    case: Case, model: FollowedModel, width: str, rows: Rows, dense: torch.Tensor, *, alone: bool = False
) -> None:
    """``alone``: one rank has all rows, so that a copy, which has TorchRec's own lookup, finds the same."""
    with model.reading() as served:
        assert _bits(case.look_up(served.module)) == _bits(case.expected(rows, width)), width
        assert torch.equal(served.module.get_parameter("top.weight"), dense)
        if alone:
            assert _bits(case.look_up(copy.deepcopy(served.module))) == _bits(case.expected(rows, width)), width


SERVED = {"pipeline": "plain", "served": "model"}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            Case(policy="lru", weighted=True),
            marks=pytest.mark.covers(
                plan="row-wise, fewer ranks whose shards are unions",
                module="managed collision",
                **SERVED,
            ),
            id="bag",
        ),
        pytest.param(
            Case("sequence", policy="lru"),
            marks=pytest.mark.covers(
                plan="row-wise, fewer ranks whose shards are unions",
                module="managed collision",
                **SERVED,
            ),
            id="sequence",
        ),
        pytest.param(
            Case(hash_zch=dict(hashed.SINGLE)),
            marks=pytest.mark.covers(
                plan="row-wise, any ranks whose shards begin at bucket limits", module="hash ZCH", **SERVED
            ),
            id="hash",
        ),
    ],
)
def test_every_marker_gives_raw_ids_what_the_trainer_looks_up(case: Case, tmp_path: Path) -> None:
    """On two ranks, and after a restore on one: known and unknown raw ids, float and quantized."""
    uri = f"file://{tmp_path}"
    done = ranks.run(2, _train_and_serve, case, uri, 0, 8)
    assert sum(evictions for evictions, *_ in done) > 3
    models = {width: FollowedModel(case.module(width), follow(uri)) for width in ("float", *WIDTHS)}
    for width, model in models.items():
        assert [update.kind for update in model.advance()] == [UpdateKind.LOAD]
        _check(case, model, width, *done[0][1:])
    done = ranks.run(1, _train_and_serve, case, uri, 8, 3)
    for width, model in models.items():
        assert [update.kind for update in model.advance()] == [UpdateKind.MARKER]
        _check(case, model, width, *done[0][1:], alone=True)
        model.close()
