"""Id maps of hash ZCH are cut and joined by rows, whatever the shards."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torchrec.modules.hash_mc_evictions import HashZchEvictionConfig, HashZchEvictionPolicyName
from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule
from torchrec.sparse.jagged_tensor import JaggedTensor

from tests.hash_zch import FREE, trainable
from torchrec_stream_ckpt.dense.id_maps import empty_pieces, merge_pieces, read_pieces
from torchrec_stream_ckpt.errors import SchemaMismatchError
from torchrec_stream_ckpt.evolve.findings import NewRowsNeededError
from torchrec_stream_ckpt.model import HashMap

ROWS, BUCKETS = 48, 12
NO_ID = 2**63 - 1
EVICTING = {
    "eviction_policy_name": HashZchEvictionPolicyName.SINGLE_TTL_EVICTION,
    "eviction_config": HashZchEvictionConfig(features=["t"], single_ttl=1),
}
COLUMNS = ("_hash_zch_identities", "_hash_zch_metadata", "_hash_zch_runtime_meta")


def shards(count: int, rows: int = ROWS, **more: Any) -> list[HashZchManagedCollisionModule]:
    """The modules that ``count`` ranks would have."""
    more = {"max_probe": 2, "total_num_buckets": BUCKETS, "write_runtime_meta_dim": 3, **EVICTING, **more}
    whole = HashZchManagedCollisionModule(zch_size=rows, device=torch.device("cpu"), **more)
    bounds = [rows * rank // count for rank in range(count + 1)]
    return [
        whole.rebuild_with_output_id_range((bounds[rank], bounds[rank + 1]), device=torch.device("cpu"))
        for rank in range(count)
    ]


def maps(modules: list[HashZchManagedCollisionModule]) -> list[HashMap]:
    return [HashMap("t", module) for module in modules]


def ids_of(module: HashZchManagedCollisionModule, step: int) -> torch.Tensor:
    drawn = torch.from_numpy(np.random.default_rng(step).integers(0, 90, 40) + step * 30)
    buckets = drawn % BUCKETS
    return drawn[(module._start_bucket <= buckets) & (buckets < module._end_bucket)]


def profile(module: HashZchManagedCollisionModule, step: int) -> None:
    ids = ids_of(module, step)
    module.remap(
        {"t": JaggedTensor(values=ids, lengths=torch.ones(len(ids), dtype=torch.int64))},
        write_weights=torch.stack([ids, -ids, ids * 0 + step], 1),
    )


def train(modules: list[HashZchManagedCollisionModule], steps: int) -> int:
    """Returns how many rows were evicted."""
    lost = 0
    with trainable() as clock:
        for step in range(steps):
            clock.hour = 1000 + step
            for module in modules:
                profile(module, step)
                rows = module.evict()
                lost += 0 if rows is None else len(rows)
    return lost


def move(sources: list[HashZchManagedCollisionModule], targets: list[HashZchManagedCollisionModule]) -> None:
    pieces = read_pieces(maps(sources))
    for here in maps(targets):
        (state,) = merge_pieces([here], {"t": dict(pieces["t"])}, {"t": "t"})
        here.write(state)


def whole(modules: list[HashZchManagedCollisionModule]) -> list[torch.Tensor]:
    return [torch.cat([getattr(module, name) for module in modules]) for name in COLUMNS]


@pytest.mark.parametrize(("before", "after"), [(1, 4), (4, 1), (3, 2), (2, 6), (6, 4), (3, 3)])
def test_any_shards_that_begin_with_a_bucket_go_on_as_the_old_ones(before: int, after: int) -> None:
    sources, targets = shards(before), shards(after)
    assert train(sources, 4) > 3
    train(targets, 2)
    move(sources, targets)
    assert all(map(torch.equal, whole(sources), whole(targets)))
    assert (whole(sources)[2] != 0).any()
    assert train(sources, 7) == train(targets, 7) > 0
    assert all(map(torch.equal, whole(sources), whole(targets)))


def test_rows_whose_reset_is_due_come_along() -> None:
    sources, targets = shards(2), shards(3)
    train(sources, 3)
    with trainable(hour=2000):
        for module in sources:
            profile(module, 9)
    move(sources, targets)
    due = [
        [rows for rows in map(HashZchManagedCollisionModule.evict, each) if rows is not None]
        for each in (sources, targets)
    ]
    assert len(torch.cat(due[0])) > 3
    assert torch.equal(*map(torch.cat, due))


def test_a_raw_id_in_two_rows_counts_where_lookups_find_it() -> None:
    """A row before its own has become free, and the raw id has come again."""
    (module,) = shards(1, total_num_buckets=1, max_probe=ROWS, eviction_policy_name=None)
    with trainable():
        profile(module, 0)
    (live,) = maps([module])
    before = live.owners()
    module.eval()
    (place,) = np.flatnonzero(before == np.max(before[before != NO_ID]))
    raw_id = int(before[place])
    other = int(np.flatnonzero(before == NO_ID)[0])
    identities = module._hash_zch_identities.detach()
    identities[other] = raw_id
    assert identities.flatten().tolist().count(raw_id) == 2
    found = module.remap({"t": JaggedTensor(values=torch.tensor([raw_id]), lengths=torch.ones(1, dtype=torch.int64))})
    (row,) = found["t"].values().tolist()
    assert np.flatnonzero(live.owners() == raw_id).tolist() == [row]
    state = live.read()
    assert state["hash_hidden"].tolist() == [{place: other, other: place}[row]]
    assert sorted(live.owners(np.array([place, other])).tolist()) == [raw_id, raw_id]


def test_a_map_tells_which_rows_have_lost_their_raw_ids() -> None:
    _, module = shards(2)
    live = HashMap("t", module)
    remove = live.watch()
    train([module], 1)
    version, before = live.version, live.owners()
    assert live.lost(version) is None
    with trainable(hour=2000):
        profile(module, 5)
    module.evict()
    assert live.version != version
    rows = live.lost(version)
    assert rows is not None
    after = live.owners()
    assert rows.tolist() == np.flatnonzero((before != NO_ID) & (before != after)).tolist()
    assert len(rows) > 1
    assert live.owners(rows).tolist() == after[rows].tolist()
    with torch.no_grad():
        module._hash_zch_identities.fill_(FREE)  # as a load does
    assert live.lost(version) is None
    remove()
    assert "evict" not in vars(module)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"max_probe": 4}, "max_probe is 2 in the marker and 4 in this job"),
        ({"input_hash_size": 500}, "input_hash_size is 0 in the marker and 500 in this job"),
        (
            {"total_num_buckets": 6},
            "the marker has 12 buckets of raw ids and this job 6; .* row 4 there and row 8 here",
        ),
        ({"opt_in_prob": 50, "percent_reserved_slots": 30}, "opt_in_prob is -1 in the marker and 50 in this job"),
        ({"write_runtime_meta_dim": 2}, "hash_runtime has 3 numbers for each row in the marker and 2 in this job"),
    ],
)
def test_what_looks_for_raw_ids_elsewhere_is_refused(change: dict[str, Any], said: str) -> None:
    sources, targets = shards(2), shards(1, **change)
    train(sources, 2)
    before = [each.clone() for each in whole(targets)]
    with pytest.raises(SchemaMismatchError, match=said):
        move(sources, targets)
    assert all(map(torch.equal, before, whole(targets)))


def test_a_larger_table_needs_new_rows_and_a_marker_that_lacks_some_cannot_give_them() -> None:
    entries = {
        f"collision.t.{row0}.{field}": SimpleNamespace(size=value.size(), properties=SimpleNamespace(dtype=value.dtype))
        for row0, state in read_pieces(maps(shards(2)))["t"].items()
        for field, value in state.items()
    }
    (larger,) = maps(shards(1, rows=2 * ROWS))
    with pytest.raises(NewRowsNeededError, match=r"all rows \[0, 96\): it has rows \[0, 24\), \[24, 48\)"):
        empty_pieces(entries, [larger], {"t": "t"})
    lacking = {name: entry for name, entry in entries.items() if ".0." not in name}
    with pytest.raises(SchemaMismatchError, match=r"it has rows \[24, 48\)") as refused:
        empty_pieces(lacking, [larger], {"t": "t"})
    assert not isinstance(refused.value, NewRowsNeededError)
    assert refused.value.hint == "restore another marker"
    with pytest.raises(SchemaMismatchError, match="this model has a managed-collision id map for this table"):
        empty_pieces({}, [larger], {"t": "t"})
