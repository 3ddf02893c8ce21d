"""A job with managed collision: its model, its batches, and how it trains and restores."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar
from unittest.mock import patch

import pyarrow.parquet
import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed import sharding_plan
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.mc_embedding import ManagedCollisionEmbeddingCollectionSharder
from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import row_wise
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
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from tests import ranks
from tests.command import run
from tests.model import assemble, differences
from tests.packed import gathered
from tests.wrapped import wrapped
from torchrec_stream_ckpt import StreamCheckpointer, StreamConfig
from torchrec_stream_ckpt.errors import SchemaMismatchError

# name, rows, dim, features, steps between two evictions, raw ids
TABLES = [("one", 16, 8, ["a", "b"], 3, 4096), ("two", 24, 8, ["c"], 4, 1000)]
FEATURES = [(feature, size) for _, _, _, features, _, size in TABLES for feature in features]
BATCH = 12
BY_BUCKETS = "num_buckets" in inspect.signature(row_wise).parameters
"""True if ``row_wise`` deals out whole buckets of hash ZCH. An older TorchRec has that below it only, and needs as
many buckets on each rank."""
ENDS = torch.tensor([-(2**63), -1, 2**63 - 2, 2**63 - 1])

POLICIES = {
    "lfu": lambda: LFU_EvictionPolicy(),
    "lru": lambda: LRU_EvictionPolicy(decay_exponent=1.5),
    "distance_lfu": lambda: DistanceLFU_EvictionPolicy(threshold_filtering_func=average_threshold_filter),
}

State = dict[str, torch.Tensor]


@contextmanager
def tables_of(*rows: int) -> Iterator[None]:
    """Let the tables have other numbers of rows, in this process."""
    before = list(TABLES)
    TABLES[:] = [(name, number, *rest) for number, (name, _, *rest) in zip(rows, before, strict=True)]
    try:
        yield
    finally:
        TABLES[:] = before  # this process serves other tests, too


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
    ends: bool = False
    """The ends of int64 are among the raw ids."""

    def step(self) -> None:
        self.step_number += 1
        self.optimizer.zero_grad()
        self.dmp(batch(self.step_number, weighted=self.weighted, int64_ends=self.ends)).backward()
        self.optimizer.step()

    def evaluate(self) -> None:
        self.dmp.eval()
        with torch.no_grad():
            self.dmp(batch(1000 + self.step_number, weighted=self.weighted, int64_ends=self.ends))
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
    buckets: int | None = None,
) -> Job:
    torch.manual_seed(7)
    net = net or Net(kind, POLICIES[policy](), weighted=weighted, intervals=intervals)
    fused = {"optimizer": optimizer, "learning_rate": 0.1}
    sharder: Any = (
        ManagedCollisionEmbeddingBagCollectionSharder(EmbeddingBagCollectionSharder(fused_params=fused))
        if kind == "bag"
        else ManagedCollisionEmbeddingCollectionSharder(EmbeddingCollectionSharder(fused_params=fused))
    )
    dmp = wrapped(net, {name: _by_buckets(buckets) for name, *_ in TABLES}, sharder, part="mc")
    keyed = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(dmp.named_parameters())), lambda p: torch.optim.Adam(p, lr=0.01)
    )
    torch.manual_seed(100 + dist.get_rank())
    return Job(dmp, CombinedOptimizer([dmp.fused_optimizer, keyed]), keyed._optimizer, weighted)


def _by_buckets(buckets: int | None) -> Callable[..., Any]:
    """``row_wise`` with shards of whole buckets."""
    if BY_BUCKETS:
        return row_wise(num_buckets=buckets)
    inner, split = row_wise(), partial(sharding_plan.calculate_shard_sizes_and_offsets, num_buckets=buckets)

    def generate(*arguments: Any) -> Any:
        with patch.object(sharding_plan, "calculate_shard_sizes_and_offsets", split):
            return inner(*arguments)

    return generate


def batch(step: int, *, weighted: bool, int64_ends: bool = False) -> KeyedJaggedTensor:
    """This rank's slice of global batch ``step``: six hot ids, others every three steps, among cold ones.

    With ``int64_ends``, each end of int64 is there for a few features, as often as hot ids.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(2000 + step)
    low, high = (each * (BATCH // world) for each in (rank, rank + 1))  # TorchRec wants as many on each rank
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
    if int64_ends:
        together[:: 3 + step % 2] = ENDS[torch.arange(len(together[:: 3 + step % 2])) % len(ENDS)]
    return KeyedJaggedTensor(
        keys=[feature for feature, _ in FEATURES],
        values=together,
        lengths=torch.cat(lengths),
        weights=(together % 5 + 1).float() if weighted else None,
    )


def attach(each: Job, uri: str, **more: Any) -> StreamCheckpointer:
    return StreamCheckpointer(each.dmp, each.optimizer, config=StreamConfig(uri=uri, **more), stateful={"loader": each})


Truths = dict[int, tuple[State, State]]


def go_on(each: Job, checkpointer: StreamCheckpointer, last: int, marked: Collection[int] = ()) -> Truths:
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


def until_killed(each: Job, checkpointer: StreamCheckpointer, result: Any, folder: Path) -> NoReturn:
    """(all ranks) Leave rank 0's result in the folder, and train on, past all markers, until SIGKILL."""
    if dist.get_rank() == 0:
        torch.save(result, folder / "result.tmp")
    for _ in range(2):
        each.step()
        checkpointer.step()
    dist.barrier()
    if dist.get_rank() == 0:
        (folder / "result.tmp").rename(folder / "result")
    while True:
        time.sleep(1)


def killed(world: int, folder: Path, function: Callable[..., Any], *args: Any) -> Any:
    """Run ``function(*args, folder)``, which ends in :func:`until_killed`, on fresh ranks. Returns rank 0's result.

    The folder is made.
    """
    folder.mkdir()
    job = ranks.start(world, function, *args, folder)
    try:
        job.wait_for(folder / "result")
    finally:
        job.close()  # SIGKILL
    return torch.load(folder / "result", weights_only=False)


def train(uri: str, marked: list[int], last: int, build: dict[str, Any], make: Callable[..., Job] = job) -> Truths:
    each = make(**build)
    with attach(each, uri, marker_every=None) as checkpointer:
        return go_on(each, checkpointer, last, marked)


def restore(
    uri: str, marked: list[int], last: int, build: dict[str, Any], make: Callable[..., Job] = job
) -> list[Truths]:
    """For each marker a new job that has trained otherwise: its state after the restore, and at each later step."""
    found = []
    for position in range(len(marked)):
        each = make(**build)
        each.step_number = 500
        for _ in range(position):
            each.step()
        with attach(each, uri, marker_every=None) as checkpointer:
            restored = checkpointer.restore(f"1:{position + 1}")
            assert restored is not None
            state = (each.truth(), each.map_truth())
            found.append({restored.step: state, **go_on(each, checkpointer, last)})
    return found


def refusal(uri: str, each: Job) -> str:
    """The error of a restore; nothing may have been written."""
    before = each.truth(), each.map_truth()
    with attach(each, uri) as checkpointer:
        for call in (checkpointer.plan, checkpointer.restore):
            with pytest.raises(SchemaMismatchError) as caught:
                call()
        assert differences(before[0], each.truth()) == []
        assert differences(before[1], each.map_truth()) == []
    return str(caught.value)


def rows_in_files(uri: str, tables: Iterable[str], folder: Path) -> dict[str, dict[int, list[float]]]:
    """The row of each raw id, by table, as an export and a sink of Parquet files have it alike."""
    changes, exported = folder / "changes", folder / "exported"
    for more in (
        ["follow", uri, "--parquet", str(changes), "--once"],
        ["export", uri, "--to", f"parquet://{exported}"],
    ):
        run(*more)
    (newest,) = (each for each in changes.iterdir() if each.is_dir())
    found = {}
    for name in tables:
        rows = pyarrow.parquet.read_table(exported / f"{name}.parquet")
        whole = dict(zip(*(rows[each].to_pylist() for each in ("raw_id", "vector")), strict=True))
        whole.pop(None, None)
        rows = pyarrow.parquet.read_table(newest / f"{name}.parquet")
        assert dict(zip(*(rows[each].to_pylist() for each in ("raw_id", "weights")), strict=True)) == whole
        found[name] = whole
    return found


def evicted(truths: Truths, table: str) -> dict[int, int]:
    """How many raw ids lost their row, by step."""
    ids = {step: set(maps[f"{table}._mch_sorted_raw_ids"].tolist()) for step, (_, maps) in sorted(truths.items())}
    return {step: len(ids[step - 1] - ids[step]) for step in ids if step - 1 in ids}


def ranks_of(module: Any, probes: torch.Tensor, world: int) -> torch.Tensor:
    """Return the rank to which TorchRec sends each raw id of a managed collision module, int64 of shape (n,)."""
    lengths, *_, places = torch.ops.fbgemm.block_bucketize_sparse_features(
        torch.tensor([len(probes)]),
        probes,
        bucketize_pos=False,
        sequence=True,
        block_sizes=torch.tensor([-(-module.input_size() // module.buckets())]),
        total_num_blocks=torch.tensor([[module.buckets()]]),
        my_size=world,
    )
    return torch.repeat_interleave(torch.arange(world), lengths.long())[places.long()]


def answers(each: Job, probes: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """(all ranks) The live row of each raw id, as the modules of TorchRec look it up on the rank that it is sent to.

    Args:
        each: The job.
        probes: Raw ids, by table.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    state, found = each.truth(), {}
    for name, ids in probes.items():
        module = each.maps()[name]
        if isinstance(module, HashZchManagedCollisionModule):
            first = module._output_segments[module._start_bucket]
            _, _, begins = module.input_mapper(ids)  # of buckets
            mine = (first <= begins) & (begins < first + module.output_size())
        else:
            mine = ranks_of(module, ids, world) == rank
        rows = torch.zeros(len(ids), dtype=torch.int64)
        rows[mine] = rows_of(module, ids[mine])
        dist.all_reduce(rows)
        (weights,) = [value for key, value in state.items() if key.endswith(f".{name}.weight")]
        found[f"mc._embedding_module.{name}"] = weights[rows]
    return found


def rows_of(module: Any, ids: torch.Tensor) -> torch.Tensor:
    """The row that an id map looks up for each raw id, global, while it does not train."""
    config = getattr(module, "_eviction_config", None)
    # TorchRec hands the number of ids of each feature to the maps in place of weights.
    numbers = torch.tensor([len(ids), *[0] * (len(config.features) - 1)]) if config else None
    features = {"f": JaggedTensor(values=ids, lengths=torch.tensor([len(ids)]), weights=numbers)}
    trains = module.training
    module.eval()
    found: torch.Tensor = _remap(module, module.remap, features)["f"].values()
    module.train(trains)
    return found


def look_up_alone(each: Job) -> None:
    """(all ranks) Train the id maps by the next batch, and leave the rows that they evict as they are."""
    each.step_number += 1
    each.dmp.module.mc._managed_collision_collection(batch(each.step_number, weighted=each.weighted))


def reset(each: Job) -> None:
    """(all ranks) Look a batch up, which resets evicted rows in the tables."""
    with ExitStack() as stack:
        for module in each.maps().values():
            stack.enter_context(patch.object(module, "remap", partial(_remap, module, module.remap)))
        each.evaluate()


def _remap(module: Any, real: Callable[..., Any], *args: Any, **more: Any) -> Any:
    """Modules of hash ZCH look nothing up while they know of evicted rows."""
    due = getattr(module, "_evicted_indices", [])
    if due:
        module._evicted_indices = []
    found = real(*args, **more)
    if due:
        module._evicted_indices = due + module._evicted_indices
    return found


def due(each: Job) -> dict[str, dict[int, int]]:
    """(all ranks) Raw id -> rank of the rows that :func:`reset` would reset, by table."""
    mine = {}
    for table, module in each.maps().items():
        if hasattr(module, "_mch_sorted_raw_ids"):
            rows = module._evicted_emb_indices.tolist() if module._evicted else []
        else:
            first = module._output_segments[module._start_bucket]
            rows = [first + row for part in module._evicted_indices for row in part.tolist()]
        ids, places, _ = _found(module)
        owners = dict(zip(places, ids, strict=True))
        mine[table] = {owners[row]: dist.get_rank() for row in rows}
    return _together(mine)


Owned = dict[int, tuple[bytes, ...]]
"""Raw id -> weights first, then optimizer states, then what its id map keeps of it."""


def _found(module: Any) -> tuple[list[int], list[int], list[torch.Tensor]]:
    """The raw ids of a shard, the row in which a lookup finds each, and what the map keeps of it."""
    if hasattr(module, "_mch_sorted_raw_ids"):
        used = module._mch_sorted_raw_ids != 2**63 - 1
        kept = [
            buffer[used] for name, buffer in module.named_buffers() if name in ("_mch_counts", "_mch_last_access_iter")
        ]
        return module._mch_sorted_raw_ids[used].tolist(), module._mch_remapped_ids_mapping[used].tolist(), kept
    first = module._output_segments[module._start_bucket]
    identities = module._hash_zch_identities[:, 0]
    ids = torch.unique(identities[identities != -1])
    looked = rows_of(module, ids)
    here = identities[looked - first] == ids  # an id that a lookup does not find has no row
    ids, looked = ids[here], looked[here]
    parts = (module._hash_zch_metadata, module._hash_zch_runtime_meta)
    return ids.tolist(), looked.tolist(), [part[looked - first] for part in parts if part is not None]


def owned(each: Job) -> dict[str, Owned]:
    """(all ranks) The dictionary, by table."""
    state = each.truth()
    mine: dict[str, Owned] = {}
    for table, rows, *_ in TABLES:
        columns = [
            value for key, value in sorted(state.items()) if f".{table}.weight" in key and value.shape[:1] == (rows,)
        ]
        assert len(columns) > 1
        ids, places, kept = _found(each.maps()[table])
        mine[table] = {
            raw_id: tuple(
                value.numpy().tobytes()
                for value in (*(column[row] for column in columns), *(part[at] for part in kept))
            )
            for at, (raw_id, row) in enumerate(zip(ids, places, strict=True))
        }
    return _together(mine)


T = TypeVar("T")


def _together(mine: dict[str, dict[int, T]]) -> dict[str, dict[int, T]]:
    """(all ranks) What all ranks know of raw ids, each of which is known to one of them."""
    whole: dict[str, dict[int, T]] = {table: {} for table, *_ in TABLES}
    for each_rank in gathered(mine):
        for table, mine_there in each_rank.items():
            assert not mine_there.keys() & whole[table].keys()
            whole[table] |= mine_there
    return whole
