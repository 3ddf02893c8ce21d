"""Managed collision modules follow live trainers: each raw id gets the row that the trainer looks up."""

from __future__ import annotations

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec.modules.mc_modules import LFU_EvictionPolicy
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests import collided, hashed, ranks
from tests.collided import ENDS, FEATURES, POLICIES, TABLES, Net, answers, attach
from tests.hash_zch import trainable
from tests.served import WIDTHS, collection, quantize_parts, quantized
from torchrec_stream_ckpt import FollowedModel, follow
from torchrec_stream_ckpt.extras.follower.updates import UpdateKind

pytestmark = pytest.mark.distributed

Rows = dict[str, torch.Tensor]
"""What the trainer looks up for each probe, by table."""
LONGEST = max(size for *_, size in TABLES)


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


def _hammer(case: Case, model: FollowedModel, ended: threading.Event) -> list[tuple[str, dict[str, bytes]]]:
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
                        reader = reader or pool.submit(_hammer, case, models["int8"], ended)
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
