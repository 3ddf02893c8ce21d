"""Managed collision: rows that evictions reset, the id maps, and what will be evicted next, all bit for bit."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.mc_embedding import ManagedCollisionEmbeddingCollectionSharder
from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    LFU_EvictionPolicy,
    LRU_EvictionPolicy,
    ManagedCollisionCollection,
    ManagedCollisionModule,
    MCHEvictionPolicy,
    MCHManagedCollisionModule,
    average_threshold_filter,
)
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests import ranks
from tests.model import assemble, differences
from torchrec_stream_ckpt import StreamCheckpointer, StreamConfig
from torchrec_stream_ckpt.errors import SchemaMismatchError, UnsupportedError

pytestmark = pytest.mark.distributed

# name, rows, dim, features, steps between two evictions, raw ids
TABLES = [("one", 16, 8, ["a", "b"], 3, 4096), ("two", 24, 8, ["c"], 4, 1000)]
FEATURES = [(feature, size) for _, _, _, features, _, size in TABLES for feature in features]
BATCH = 12

POLICIES = {
    "lfu": lambda: LFU_EvictionPolicy(),
    "lru": lambda: LRU_EvictionPolicy(decay_exponent=1.5),
    "distance_lfu": lambda: DistanceLFU_EvictionPolicy(threshold_filtering_func=average_threshold_filter),
}

State = dict[str, torch.Tensor]


def _modulo(ids: torch.Tensor, size: int) -> torch.Tensor:
    return ids % size


class Net(nn.Module):
    """A managed collision module, and a dense layer over what it looks up."""

    def __init__(self, kind: str, policy: MCHEvictionPolicy, *, weighted: bool, intervals: tuple[int, ...]) -> None:
        super().__init__()
        self.kind, self.weighted = kind, weighted
        config: Any = EmbeddingBagConfig if kind == "bag" else EmbeddingConfig
        configs = [
            config(name=name, num_embeddings=rows, embedding_dim=dim, feature_names=features)
            for name, rows, dim, features, _, _ in TABLES
        ]
        modules: dict[str, ManagedCollisionModule] = {
            name: MCHManagedCollisionModule(
                zch_size=rows,
                device=torch.device("cpu"),
                eviction_policy=policy,
                eviction_interval=interval,
                input_hash_size=size,
                input_hash_func=None if weighted else _modulo,
            )
            for (name, rows, _, _, _, size), interval in zip(TABLES, intervals, strict=True)
        }
        collisions = ManagedCollisionCollection(modules, configs, need_preprocess=not weighted)
        device = torch.device("meta")
        if kind == "bag":
            bags = EmbeddingBagCollection(tables=configs, is_weighted=weighted, device=device)
            self.mc: nn.Module = ManagedCollisionEmbeddingBagCollection(
                bags, collisions, return_remapped_features=not weighted
            )
        else:
            tables = EmbeddingCollection(tables=configs, device=device)
            self.mc = ManagedCollisionEmbeddingCollection(
                tables, collisions, return_remapped_features=True, allow_in_place_embed_weight_update=True
            )
        self.top = nn.Linear(1, 1)

    def forward(self, sparse: KeyedJaggedTensor) -> torch.Tensor:
        embedded, remapped = self.mc(sparse)
        assert self.weighted or remapped.keys() == sparse.keys()
        values = [embedded[name] if self.kind == "bag" else embedded[name].values() for name, _ in FEATURES]
        pooled = torch.stack([(each**2).sum() for each in values]).sum()
        return ((self.top(pooled.reshape(1, 1) / BATCH) - 1) ** 2).mean()


@dataclass
class Job:
    """A live job on one rank."""

    dmp: DistributedModelParallel
    optimizer: CombinedOptimizer
    dense: torch.optim.Optimizer
    weighted: bool
    step_number: int = 0

    def step(self) -> None:
        self.step_number += 1
        self.optimizer.zero_grad()
        self.dmp(_batch(self.step_number, weighted=self.weighted)).backward()
        self.optimizer.step()

    def evaluate(self) -> None:
        self.dmp.eval()
        with torch.no_grad():
            self.dmp(_batch(1000 + self.step_number, weighted=self.weighted))
        self.dmp.train()

    def state_dict(self) -> dict[str, Any]:
        return {"step_number": self.step_number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step_number = state["step_number"]

    def maps(self) -> dict[str, MCHManagedCollisionModule]:
        return dict(self.dmp.module.mc._managed_collision_collection._managed_collision_modules.items())

    def truth(self) -> State:
        """Tables and states whole, the same on every rank; dense and random state."""
        state: State = {}
        sharded: dict[str, ShardedTensor] = {}
        for name, value in self.dmp.state_dict().items():
            if isinstance(value, ShardedTensor) and "_mch_" not in name:
                sharded[name] = value
            elif not isinstance(value, ShardedTensor):
                state[name] = value.clone()
        for name, values in self.dmp.fused_optimizer.state_dict()["state"].items():
            sharded |= {f"{name}.{key}": value for key, value in values.items() if isinstance(value, ShardedTensor)}
        state |= assemble(sharded)
        for number, values in enumerate(self.dense.state.values()):
            state |= {f"dense.{number}.{key}": torch.as_tensor(value).clone() for key, value in values.items()}
        return {key: value for key, value in state.items() if "_output_segments" not in key} | {
            "rng": torch.get_rng_state()
        }

    def map_truth(self) -> State:
        """Every buffer, counter and history of this rank's id maps, read from TorchRec's modules."""
        state: State = {}
        for table, module in self.maps().items():
            values: dict[str, Any] = {
                name: buffer.clone() for name, buffer in module.named_buffers() if not name.startswith("_history_")
            }
            seen = module._current_history_buffer_offset
            if seen:
                values["_history_accumulator"] = module._history_accumulator[:seen].clone()
                values |= {f"_history_{key}": value[:seen].clone() for key, value in module._history_metadata.items()}
            for name in ("_current_iter", "_last_eviction_iter", "_evicted", "_input_history_buffer_size"):
                values[name] = torch.tensor(int(getattr(module, name)))
            state |= {f"{table}.{name}": value for name, value in values.items()}
        return state


def job(
    kind: str = "bag",
    policy: str = "distance_lfu",
    optimizer: EmbOptimType = EmbOptimType.EXACT_ADAGRAD,
    *,
    weighted: bool = False,
    intervals: tuple[int, ...] = (3, 4),
    net: Net | None = None,
) -> Job:
    torch.manual_seed(7)
    net = net or Net(kind, POLICIES[policy](), weighted=weighted, intervals=intervals)
    fused = {"optimizer": optimizer, "learning_rate": 0.1}
    sharder: Any = (
        ManagedCollisionEmbeddingBagCollectionSharder(EmbeddingBagCollectionSharder(fused_params=fused))
        if kind == "bag"
        else ManagedCollisionEmbeddingCollectionSharder(EmbeddingCollectionSharder(fused_params=fused))
    )
    plan = construct_module_sharding_plan(
        net.mc,
        {name: row_wise() for name, *_ in TABLES},
        sharder=sharder,
        local_size=dist.get_world_size(),
        world_size=dist.get_world_size(),
        device_type="cpu",
    )
    for parameter in plan.values():
        parameter.compute_kernel = "fused"
    dmp = DistributedModelParallel(
        net,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=torch.device("cpu"),
        plan=ShardingPlan(plan={"mc": plan}),
        sharders=[sharder],
    )
    keyed = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(dmp.named_parameters())), lambda p: torch.optim.Adam(p, lr=0.01)
    )
    torch.manual_seed(100 + dist.get_rank())
    return Job(dmp, CombinedOptimizer([dmp.fused_optimizer, keyed]), keyed._optimizer, weighted)


def _batch(step: int, *, weighted: bool) -> KeyedJaggedTensor:
    """This rank's slice of global batch ``step``: six hot ids, others every three steps, among cold ones."""
    rank, world = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(2000 + step)
    low, high = rank * BATCH // world, (rank + 1) * BATCH // world
    values, lengths = [], []
    for _, size in FEATURES:
        length = torch.randint(1, 5, (BATCH,), generator=generator)
        cold = torch.randint(0, size, (int(length.sum()),), generator=generator)
        hot = (torch.randint(0, 6, cold.shape, generator=generator) + step // 3 * 12) * 97 % size
        ids = torch.where(torch.rand(cold.shape, generator=generator) < 0.6, hot, cold)
        ends = torch.cat([torch.zeros(1, dtype=torch.long), length.cumsum(0)])
        values.append(ids[ends[low] : ends[high]])
        lengths.append(length[low:high])
    together = torch.cat(values)
    return KeyedJaggedTensor(
        keys=[feature for feature, _ in FEATURES],
        values=together,
        lengths=torch.cat(lengths),
        weights=(together % 5 + 1).float() if weighted else None,
    )


def _attach(each: Job, uri: str, **more: Any) -> StreamCheckpointer:
    return StreamCheckpointer(each.dmp, each.optimizer, config=StreamConfig(uri=uri, **more), stateful={"loader": each})


Truths = dict[int, tuple[State, State]]


def _go_on(each: Job, checkpointer: StreamCheckpointer, last: int, marked: Collection[int] = ()) -> Truths:
    """Train, with markers behind some steps: (truth, map truth) by step."""
    truths: Truths = {}
    while each.step_number < last:
        each.step()
        if each.step_number % 5 == 0:
            each.evaluate()
        checkpointer.step()
        if each.step_number in marked:
            checkpointer.mark().result(60)
        truths[each.step_number] = (each.truth(), each.map_truth())
    return truths


def _train(uri: str, marked: list[int], last: int, build: dict[str, Any]) -> Truths:
    each = job(**build)
    with _attach(each, uri, marker_every=None) as checkpointer:
        return _go_on(each, checkpointer, last, marked)


def _restore(uri: str, marked: list[int], last: int, build: dict[str, Any]) -> list[Truths]:
    """For each marker a new job that has trained otherwise: its state behind the restore, and at each later step."""
    found = []
    for position in range(len(marked)):
        each = job(**build)
        each.step_number = 500
        for _ in range(position):
            each.step()
        with _attach(each, uri, marker_every=None) as checkpointer:
            restored = checkpointer.restore(f"1:{position + 1}")
            assert restored is not None
            state = (each.truth(), each.map_truth())
            found.append({restored.step: state, **_go_on(each, checkpointer, last)})
    return found


def _evicted(truths: Truths, table: str) -> dict[int, int]:
    """How many raw ids lost their row, by step."""
    ids = {step: set(maps[f"{table}._mch_sorted_raw_ids"].tolist()) for step, (_, maps) in sorted(truths.items())}
    return {step: len(ids[step - 1] - ids[step]) for step in ids if step - 1 in ids}


CASES: dict[str, dict[str, Any]] = {
    "bag-lfu": {"kind": "bag", "policy": "lfu"},
    "bag-lru-weighted-sgd": {"policy": "lru", "weighted": True, "optimizer": EmbOptimType.EXACT_SGD},
    "sequence-distance_lfu": {"kind": "sequence", "policy": "distance_lfu"},
}


_MODULES = {"bag": "ManagedCollisionEmbeddingBagCollection", "sequence": "ManagedCollisionEmbeddingCollection"}


def _covering(case: str) -> Any:
    """The case as a parameter, with the cell of docs/coverage.md that it shows."""
    build = CASES[case]
    module = f"{_MODULES[build.get('kind', 'bag')]}, {build['policy']} eviction"
    optimizer = build.get("optimizer", EmbOptimType.EXACT_ADAGRAD).name
    cell = {"optimizer": optimizer, "kernel": "fused", "plan": "row-wise", "module": module, "pipeline": "plain"}
    return pytest.param(case, marks=pytest.mark.covers(**cell))


@pytest.mark.pitfall(18, 19)
@pytest.mark.parametrize("case", [_covering(case) for case in CASES])
def test_a_marker_and_what_follows_it_come_back_bit_for_bit(case: str, tmp_path: Path) -> None:
    """Evictions are at steps 3, 6, 9, 12, 15 of one table and 4, 8, 12, 16 of the other."""
    uri, build, marked = f"file://{tmp_path}", CASES[case], [1, 7, 11, 12, 13]
    done = ranks.run(2, _train, uri, marked, 17, build)
    for table, *_ in TABLES:
        happened = [lost for truths in done for lost in _evicted(truths, table).items()]
        assert sum(lost for _, lost in happened) > 10, happened
        assert sum(lost for step, lost in happened if step > 13) > 1, happened
    for rank, restored in enumerate(ranks.run(2, _restore, uri, marked, 17, build)):
        for first, truths in zip(marked, restored, strict=True):
            assert truths.keys() == set(range(first, 18))
            for step, (state, maps) in truths.items():
                expected, expected_maps = done[rank][step]
                assert differences(expected, state) == [], (first, step)
                assert differences(expected_maps, maps) == [], (first, step)


def _merged(done: list[State], table: str, last_row: int) -> dict[str, list[int]]:
    """The maps of several shards as one, by plain Python: sorted by raw id, ranks in order where it is the same."""
    names = [name.removeprefix(f"{table}.") for name in done[0] if name.startswith(f"{table}._mch_")]
    columns = {name: [value for maps in done for value in maps[f"{table}.{name}"].tolist()] for name in names}
    slots = columns.pop("_mch_slots")
    assert sum(slot + 1 for slot in slots) == last_row + 1
    order = sorted(range(last_row + 1), key=lambda position: columns["_mch_sorted_raw_ids"][position])
    return {name: [values[position] for position in order] for name, values in columns.items()}


def _restore_smaller(uri: str, last: int) -> tuple[State, State, Truths]:
    """The state behind the restore, and at the markers of this job as it goes on."""
    each = job()
    each.step_number = 500
    each.step()
    with _attach(each, uri, marker_every=None) as checkpointer:
        assert checkpointer.restore() is not None
        state = each.truth(), each.map_truth()
        return *state, _go_on(each, checkpointer, last, [last])


def _restore_newest(uri: str) -> tuple[State, State]:
    each = job()
    each.step()
    with _attach(each, uri) as checkpointer:
        assert checkpointer.restore() is not None
        return each.truth(), each.map_truth()


@pytest.mark.covers(plan="row-wise, fewer ranks whose shards are unions", module="managed collision", pipeline="plain")
def test_maps_of_smaller_shards_are_put_together(tmp_path: Path) -> None:
    """4 ranks, then 2, then 1: at each change the histories since the last eviction are not empty."""
    uri = f"file://{tmp_path}"
    done = ranks.run(4, _train, uri, [7], 7, {})
    tables, maps = done[0][7][0], [truths[7][1] for truths in done]
    for world, last in ((2, 13), (1, 17)):
        restored = ranks.run(world, _restore_smaller, uri, last)
        for rank, (found, found_maps, _) in enumerate(restored):
            assert differences(tables, found, rng=False) == []
            mine = maps[rank * len(maps) // world : (rank + 1) * len(maps) // world]
            for table, rows, *_ in TABLES:
                for name, values in _merged(mine, table, rows // world - 1).items():
                    assert found_maps[f"{table}.{name}"].tolist() == values, (world, name)
                for name in ("_history_accumulator", "_history_last_access_iter", "_input_history_buffer_size"):
                    values = [value for maps in mine for value in maps[f"{table}.{name}"].reshape(-1).tolist()]
                    found_values = found_maps[f"{table}.{name}"].reshape(-1).tolist()
                    assert values
                    assert found_values == (values if name.startswith("_history") else [sum(values)])
                for name in ("_current_iter", "_current_iter_tensor", "_last_eviction_iter", "_evicted"):
                    assert int(found_maps[f"{table}.{name}"]) == int(mine[0][f"{table}.{name}"])
        tables, maps = restored[0][2][last][0], [truths[last][1] for *_, truths in restored]
        assert sum(sum(_evicted(truths, table).values()) for *_, truths in restored for table, *_ in TABLES) > 3
    (state,) = ranks.run(1, _restore_newest, uri)
    assert differences(tables, state[0]) == []
    assert differences(maps[0], state[1]) == []


def _refused(uri: str, **build: Any) -> str:
    """What a restore says; nothing may have been written."""
    each = job(**build)
    each.step()
    before = each.truth(), each.map_truth()
    with _attach(each, uri) as checkpointer:
        for call in (checkpointer.plan, checkpointer.restore):
            with pytest.raises(SchemaMismatchError) as caught:
                call()
        assert differences(before[0], each.truth()) == []
        assert differences(before[1], each.map_truth()) == []
    return str(caught.value)


def _refusals(uri: str) -> dict[str, str]:
    said = {
        "interval": _refused(uri, intervals=(3, 5)),
        "policy": _refused(uri, policy="lru"),
    }
    TABLES[0] = (*TABLES[0][:5], 2048)
    return {**said, "hash size": _refused(uri)}


@pytest.mark.covers(
    module="managed collision",
    plan="shards that split the old ones",
    outcome="refused",
    why="`the id map of rows ... cannot be put together from whole ones`",
)
def test_what_has_no_exact_answer_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}"
    ranks.run(2, _train, uri, [3], 3, {})
    for said in ranks.run(3, _refused, uri):
        assert "rows [0, 6) cannot be put together from whole ones: the marker has rows [0, 8)" in said
        assert "table=mc._embedding_module.one" in said
        assert "restore on 2 ranks" in said
    said = ranks.run(2, _refusals, uri)[0]
    assert "the eviction interval is 4 in the marker and 5 in this job" in said["interval"]
    assert "keeps map_counts, map_last_access_iter, " in said["policy"]
    assert "this job's map_last_access_iter, map_raw_ids" in said["policy"]
    assert "raw ids of rows [0, 8) are looked up on another rank" in said["hash size"]


class _OtherPolicy(LFU_EvictionPolicy):
    """A policy that may keep more than it says."""


def _attach_refused(uri: str) -> list[str]:
    said = []
    torch.manual_seed(0)
    hashed = Net("bag", LFU_EvictionPolicy(), weighted=False, intervals=(3, 4))
    hashed.mc._managed_collision_collection._managed_collision_modules["two"] = HashZchManagedCollisionModule(
        zch_size=24, device=torch.device("cpu"), total_num_buckets=2
    )
    for net in (hashed, Net("bag", _OtherPolicy(), weighted=False, intervals=(3, 4))):
        each = job(net=net)
        with pytest.raises(UnsupportedError) as caught:
            _attach(each, uri)
        said.append(str(caught.value))
    return said


@pytest.mark.pitfall(20)
@pytest.mark.covers(
    module="hash ZCH, own eviction policies",
    outcome="refused",
    why="`the id map of HashZchManagedCollisionModule is not captured`",
)
def test_maps_whose_state_is_not_known_are_refused_at_attach(tmp_path: Path) -> None:
    hashed, policy = ranks.run(2, _attach_refused, f"file://{tmp_path}")[0]
    assert "HashZchManagedCollisionModule is not captured" in hashed
    assert "table=two" in hashed
    assert "_OtherPolicy is not captured" in policy
