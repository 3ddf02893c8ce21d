"""The stand-in for hash ZCH on a GPU gives each raw id the row in which FBGEMM's own kernel finds it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torchrec.modules.hash_mc_evictions import HashZchEvictionConfig, HashZchEvictionPolicyName
from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule
from torchrec.sparse.jagged_tensor import JaggedTensor

from tests.hash_zch import FREE, trainable

ROWS, BUCKETS, TTL = 48, 4, 2
ENDS = [-(2**63), 2**63 - 1, -2, 0, 1]
SINGLE = HashZchEvictionPolicyName.SINGLE_TTL_EVICTION
LRU = HashZchEvictionPolicyName.LRU_EVICTION

CASES: dict[str, dict[str, Any]] = {
    "no eviction": {},
    "few probes": {"max_probe": 2},
    "time to live": {"eviction_policy_name": SINGLE},
    "least recently used": {"eviction_policy_name": LRU, "max_probe": 5},
    "some opt in": {"eviction_policy_name": SINGLE, "opt_in_prob": 60, "percent_reserved_slots": 25},
    "all opt in": {"opt_in_prob": 100, "percent_reserved_slots": 10},
    "no fallback": {"disable_fallback": True, "max_probe": 3},
    "counted": {"eviction_policy_name": SINGLE, "track_id_freq": True},
}


def built(**more: Any) -> HashZchManagedCollisionModule:
    if "eviction_policy_name" in more:
        more = {"eviction_config": HashZchEvictionConfig(features=["f"], single_ttl=TTL), **more}
    defaults: dict[str, Any] = {"max_probe": 8, "total_num_buckets": BUCKETS}
    return HashZchManagedCollisionModule(zch_size=ROWS, device=torch.device("cpu"), **defaults | more)


def remapped(module: HashZchManagedCollisionModule, ids: list[int]) -> list[int]:
    """The row of each id, -1 for one that has none."""
    features = {"f": JaggedTensor(torch.tensor(ids, dtype=torch.int64), lengths=torch.ones(len(ids)).long())}
    if not module._disable_fallback:
        return module.remap(features)["f"].values().tolist()
    # Such a module leaves ids without a row out. So each is asked alone.
    found = []
    for raw_id in ids:
        one = {"f": JaggedTensor(torch.tensor([raw_id]), lengths=torch.ones(1, dtype=torch.int64))}
        found += module.remap(one)["f"].values().tolist() or [-1]
        module._evicted_indices = []
    return found


def read(module: HashZchManagedCollisionModule, ids: list[int]) -> list[int]:
    """What FBGEMM's kernel answers."""
    module.eval()
    try:
        return remapped(module, ids)
    finally:
        module.train()


def owners(module: HashZchManagedCollisionModule) -> list[int]:
    return module._hash_zch_identities[:, 0].tolist()


def drawn(step: int) -> list[int]:
    random = np.random.default_rng(step)
    return [*random.integers(step * 4, 40 + step * 4, 20).tolist(), *random.choice(ENDS, 2).tolist()]


@pytest.mark.parametrize("case", CASES)
def test_each_id_is_read_where_it_was_trained(case: str) -> None:
    module, lost, shared, found = built(**CASES[case]), 0, 0, 0
    torch.manual_seed(1)
    with trainable() as clock:
        for step in range(14):
            clock.hour += step % 3 == 0
            before, ids = owners(module), drawn(step)
            rows = remapped(module, ids)
            evicted = module.evict()
            after = owners(module)
            changed = [row for row in range(ROWS) if before[row] not in (FREE, after[row])]
            assert ([] if evicted is None else evicted.tolist()) == changed
            lost += len(changed)
            taken = [raw_id for raw_id in after if raw_id != FREE]
            assert len(set(taken)) == len(taken)
            assert read(module, taken) == [row for row, raw_id in enumerate(after) if raw_id != FREE]
            last = dict(zip(ids, rows, strict=True))
            assert read(module, list(last)) == list(last.values())
            found += len(last.keys() & set(taken))
            shared += len(last.keys() - set(taken))
    assert (lost > 0) == ("eviction_policy_name" in CASES[case])
    assert min(shared, found) > 40


@pytest.mark.parametrize("case", ["no eviction", "time to live", "least recently used", "all opt in"])
@pytest.mark.parametrize("input_hash_size", [0, 400])
def test_shards_train_as_the_whole(case: str, input_hash_size: int) -> None:
    whole = built(input_hash_size=input_hash_size, **CASES[case])
    half = ROWS // 2
    parts = [whole.rebuild_with_output_id_range((low, low + half), device=torch.device("cpu")) for low in (0, half)]
    block = 400 // BUCKETS
    with trainable() as clock:
        for step in range(9):
            clock.hour += step % 2
            ids = [abs(each) % 400 for each in drawn(step)]
            rows = remapped(whole, ids)
            everywhere = whole.evict()
            evicted = []
            for rank, part in enumerate(parts):
                bucket = [each // block if input_hash_size else each % BUCKETS for each in ids]
                mine = [each for each, at in zip(ids, bucket, strict=True) if at // 2 == rank]
                assert remapped(part, mine) == [row for row, at in zip(rows, bucket, strict=True) if at // 2 == rank]
                gone = part.evict()
                evicted += [] if gone is None else gone.tolist()
            assert evicted == ([] if everywhere is None else everywhere.tolist())
            assert owners(parts[0]) + owners(parts[1]) == owners(whole)
        with pytest.raises(IndexError, match=r"raw ids \[399\] belong to buckets outside of the 24 rows"):
            remapped(parts[0], [399])


def test_metadata_is_the_hour_of_expiry_and_counts_start_anew() -> None:
    module = built(eviction_policy_name=SINGLE, track_id_freq=True, total_num_buckets=1, max_probe=ROWS)
    counts = module._hash_zch_runtime_meta
    assert counts is not None
    with trainable(hour=500) as clock:
        first = remapped(module, [*range(ROWS), 7, 7])
        assert set(first) == set(range(ROWS))
        assert module._hash_zch_metadata[:, 0].tolist() == [502] * ROWS
        assert counts[first[7], 0] == 3
        clock.hour = 502
        assert remapped(module, [100]) == read(module, [100])  # nothing has expired: it shares a row
        remapped(module, [7])
        assert module._hash_zch_metadata[first[7], 0] == 504
        clock.hour = 503
        (row,) = remapped(module, [100])
        assert row != first[7]
        assert module.evict().tolist() == [row]
        assert (module._hash_zch_metadata[row, 0], counts[row, 0]) == (505, 1)
        old = first.index(row)
        assert owners(module)[row] == 100
        assert old not in owners(module)
        module._hash_zch_metadata[row] = FREE
        with pytest.raises(AssertionError, match="a GPU waits for it forever"):
            remapped(module, [200 + each for each in range(ROWS)])


def test_the_raw_id_of_free_rows_owns_none() -> None:
    """It trains the first free row, and marks it as seen; if a row has expired, it frees that one."""
    module = built(eviction_policy_name=SINGLE, total_num_buckets=1, max_probe=ROWS)
    with trainable(hour=500) as clock:
        (row,) = remapped(module, [-1])
        assert set(owners(module)) == {FREE}
        assert module._hash_zch_metadata[row, 0] == 502
        remapped(module, list(range(ROWS)))
        assert FREE not in owners(module)
        assert module.evict() is None or module.evict() is None
        clock.hour = 503
        (freed,) = remapped(module, [-1])
        assert freed == row
        assert module.evict().tolist() == [row]
        assert [each for each, owner in enumerate(owners(module)) if owner == FREE] == [row]


def test_outside_of_it_nothing_trains() -> None:
    with trainable():
        pass
    with pytest.raises(RuntimeError, match="Expected readonly to be true"):
        remapped(built(), [1])
