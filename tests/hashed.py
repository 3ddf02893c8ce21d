"""A job with hash ZCH: that of :mod:`tests.collided` with other modules. It trains inside ``hash_zch.trainable()``."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.modules.hash_mc_evictions import HashZchEvictionConfig, HashZchEvictionPolicyName
from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule
from torchrec.modules.mc_modules import LFU_EvictionPolicy

from tests import collided
from tests.collided import TABLES, Net, State, Truths
from tests.hash_zch import FREE, Clock, trainable

BUCKETS = 4
PARTS = ("_hash_zch_identities", "_hash_zch_metadata", "_hash_zch_runtime_meta")

SINGLE = {"eviction_policy_name": HashZchEvictionPolicyName.SINGLE_TTL_EVICTION}
EACH = {"eviction_policy_name": HashZchEvictionPolicyName.PER_FEATURE_TTL_EVICTION}
LRU = {"eviction_policy_name": HashZchEvictionPolicyName.LRU_EVICTION}


@dataclass
class HashJob(collided.Job):
    """A live job on one rank. Every second step the clock of evictions moves by an hour."""

    clock: Clock | None = None

    def step(self) -> None:
        assert self.clock is not None
        self.clock.hour = 1000 + self.step_number // 2
        super().step()

    def map_truth(self) -> State:
        """All state of this rank's id maps, read from TorchRec's modules."""
        state: State = {}
        for table, module in self.maps().items():
            assert module._evicted_indices == []
            for name in PARTS:
                value = getattr(module, name)
                if value is not None:
                    state[f"{table}.{name}"] = value.detach().clone()
        return state


def modules(sized: bool = True, **more: Any) -> dict[str, HashZchManagedCollisionModule]:
    """A module for each table; ``sized``: with its input_hash_size."""
    return {
        name: HashZchManagedCollisionModule(
            zch_size=rows,
            device=torch.device("cpu"),
            input_hash_size=size if sized else 0,
            eviction_config=HashZchEvictionConfig(
                features=features, single_ttl=1, per_feature_ttl=[1 + number for number in range(len(features))]
            ),
            **{"total_num_buckets": BUCKETS, "max_probe": 3, **more},
        )
        for name, rows, _, features, _, size in TABLES
    }


def job(clock: Clock, kind: str = "bag", optimizer: EmbOptimType = EmbOptimType.EXACT_ADAGRAD, **more: Any) -> HashJob:
    net = Net(kind, LFU_EvictionPolicy(), weighted=False, intervals=(3, 4))
    for name, module in modules(**more).items():
        net.mc._managed_collision_collection._managed_collision_modules[name] = module
    made = collided.job(kind, optimizer=optimizer, net=net, buckets=more.get("total_num_buckets", BUCKETS))
    return HashJob(made.dmp, made.optimizer, made.dense, weighted=False, clock=clock)


def train(uri: str, marked: list[int], last: int, build: dict[str, Any]) -> Truths:
    with trainable() as clock:
        return collided.train(uri, marked, last, build, partial(job, clock))


def restore(uri: str, marked: list[int], last: int, build: dict[str, Any]) -> list[Truths]:
    """As :func:`tests.collided.restore`."""
    with trainable() as clock:
        return collided.restore(uri, marked, last, build, partial(job, clock))


def evicted(truths: Truths, table: str) -> dict[int, int]:
    """How many rows got another raw id, by step."""
    owners = {step: maps[f"{table}._hash_zch_identities"] for step, (_, maps) in sorted(truths.items())}
    return {
        step: int(((owners[step - 1] != FREE) & (owners[step - 1] != owners[step])).sum())
        for step in owners
        if step - 1 in owners
    }


def whole(done: list[State]) -> State:
    """The maps of all ranks as one: rows lie in the order of ranks."""
    return {name: torch.cat([maps[name] for maps in done]) for name in done[0]}
