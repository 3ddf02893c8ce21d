"""Id maps of hash ZCH are cut and joined by rows, whatever the shards."""

from __future__ import annotations

import inspect
import tracemalloc
from types import SimpleNamespace
from typing import Any

import fbgemm_gpu  # noqa: F401
import numpy as np
import pytest
import torch
from torchrec.modules.hash_mc_evictions import HashZchEvictionConfig, HashZchEvictionPolicyName
from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule, TrainInputMapper
from torchrec.sparse.jagged_tensor import JaggedTensor

from tests.hash_zch import FREE, trainable
from torchrec_stream_ckpt.dense.id_maps import empty_pieces, merge_pieces, read_pieces
from torchrec_stream_ckpt.errors import ConfigError, SchemaMismatchError, UnsupportedError
from torchrec_stream_ckpt.evolve.findings import NewRowsNeededError
from torchrec_stream_ckpt.extras.interchange.hash_rows import HashLayout, hashes
from torchrec_stream_ckpt.extras.interchange.id_map import RawIdMap, shards_of
from torchrec_stream_ckpt.format.rows import ASSIGNED, EVICTED, IdEvents
from torchrec_stream_ckpt.model import HashMap

ROWS, BUCKETS = 48, 12
NO_ID = 2**63 - 1
EVICTING = {
    "eviction_policy_name": HashZchEvictionPolicyName.SINGLE_TTL_EVICTION,
    "eviction_config": HashZchEvictionConfig(features=["t"], single_ttl=1),
}
GIVES_VALUES = "write_runtime_meta_dim" in inspect.signature(HashZchManagedCollisionModule).parameters
"""True if this TorchRec keeps values that a lookup gives for its rows. An older one only counts lookups there."""
RUNTIME: dict[str, Any] = {"write_runtime_meta_dim": 3} if GIVES_VALUES else {"track_id_freq": True}
COLUMNS = ("_hash_zch_identities", "_hash_zch_metadata", "_hash_zch_runtime_meta")


def shards(count: int, rows: int = ROWS, **more: Any) -> list[HashZchManagedCollisionModule]:
    """The modules that ``count`` ranks would have."""
    more = {"max_probe": 2, "total_num_buckets": BUCKETS, **RUNTIME, **EVICTING, **more}
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
    values = {"write_weights": torch.stack([ids, -ids, ids * 0 + step], 1)} if GIVES_VALUES else {}
    module.remap({"t": JaggedTensor(values=ids, lengths=torch.ones(len(ids), dtype=torch.int64))}, **values)


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
        pytest.param(
            {"write_runtime_meta_dim": 2},
            "hash_runtime has 3 numbers for each row in the marker and 2 in this job",
            marks=pytest.mark.skipif(not GIVES_VALUES, reason="this TorchRec has no write_runtime_meta_dim"),
        ),
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


# A reader without FBGEMM finds the row that FBGEMM's kernel looks up for a raw id of hash ZCH.


EDGES = np.array([0, 5, 12, 12 + 7, 30])
LEAST, LARGEST = -(2**63), 2**63 - 1
ENDS = np.array([LEAST, LEAST + 1, -2, 0, 1, LARGEST - 1])


def layout(size: int = 0, opt_in: int = -1, reserved: int = -1, *, drops: bool = False) -> HashLayout:
    return HashLayout.of(EDGES, np.array([size, 8, opt_in, reserved, int(drops)]), "t")


def looked_up(raw_ids: np.ndarray, size: int, opt_in: int, reserved: int) -> np.ndarray:
    """What FBGEMM's kernel finds in a table without raw ids."""
    sizes = torch.from_numpy(np.diff(EDGES))
    mapper = TrainInputMapper(size, len(EDGES) - 1, sizes, torch.from_numpy(EDGES[:-1].copy()))
    values, local_sizes, offsets = mapper(torch.from_numpy(raw_ids))
    identities = torch.full((int(EDGES[-1]), 1), -1)
    more: dict[str, Any] = {"circular_probe": True, "readonly": True, "local_sizes": local_sizes, "offsets": offsets}
    found, _ = torch.ops.fbgemm.zero_collision_hash(
        values, identities, 4, opt_in_prob=opt_in, num_reserved_slots=reserved, **more
    )
    return found.numpy()


@pytest.mark.parametrize(("opt_in", "reserved"), [(-1, -1), (60, 2)])
@pytest.mark.parametrize("size", [0, 1000, 4003])
def test_an_unknown_raw_id_has_the_row_that_the_kernel_falls_back_to(size: int, opt_in: int, reserved: int) -> None:
    raw_ids = np.random.default_rng(1).integers(0, size or LARGEST, 500)
    raw_ids = np.concatenate([raw_ids, ENDS]) if not size else np.append(raw_ids, [0, size - 1])
    rows = layout(size, opt_in, reserved).shared_rows(raw_ids)
    assert rows.tolist() == looked_up(raw_ids, size, opt_in, reserved).tolist()


def test_hashes_are_spread_over_all_words() -> None:
    found = hashes(np.arange(4096))
    assert len(np.unique(found)) == 4096
    assert (np.bincount((found >> np.uint64(60)).astype(np.int64), minlength=16) > 180).all()


def test_raw_ids_that_torchrec_cannot_look_up_are_refused() -> None:
    assert layout(1000).buckets_of(np.array([0, 249, 250, 999])).tolist() == [0, 0, 1, 3]
    for raw_id in (1000, -1, LEAST, LARGEST):
        with pytest.raises(ConfigError, match=f"raw id {raw_id} is outside of input_hash_size 1000"):
            layout(1000).shared_rows(np.array([5, raw_id]))
    with pytest.raises(UnsupportedError, match=r"(?s)omits unknown raw ids of this table.*table=t"):
        layout(drops=True)


def test_known_raw_ids_have_their_rows_and_events_change_them() -> None:
    ids = np.full(30, LARGEST)
    ids[[1, 3]] = 4, 8  # both in bucket 0
    known = RawIdMap(0, ((ids[:12], np.arange(12)), (ids[12:], np.arange(12, 30))), "t", layout())
    others = np.array([12, 5])
    assert known.rows_of(np.array([8, 4])).tolist() == [3, 1]
    assert known.rows_of(others).tolist() == layout().shared_rows(others).tolist()
    events = IdEvents(np.array([3, 3, 0]), np.array([8, 12, 8]), np.array([EVICTED, ASSIGNED, ASSIGNED], np.uint8))
    known.apply(known.after([(0, events)], "t"))
    assert known.rows_of(np.array([4, 8, 12])).tolist() == [1, 0, 3]
    for raw_id in (-1, LARGEST):
        with pytest.raises(ConfigError, match=f"raw id {raw_id} is reserved"):
            known.rows_of(np.array([4, raw_id]))
    stray = IdEvents(np.array([4]), np.array([5]), np.array([ASSIGNED], np.uint8))
    with pytest.raises(ConfigError, match=", 1 raw ids of the marker belong to another of its 4 buckets"):
        known.after([(0, stray)], "t")


# Raw ids are sent to shards as TorchRec's input dist sends them.


@pytest.mark.parametrize("size", [0, 1, 2, 1000, 4096, 2**40 + 1, LARGEST - 1, LARGEST])
@pytest.mark.parametrize("shards", [1, 2, 3, 4, 5, 7])
def test_raw_ids_go_to_the_shard_that_the_operator_chooses(size: int, shards: int) -> None:
    around = [size // shards * number + step for number in range(shards) for step in (-1, 0, 1)]
    edges = [LEAST, LEAST + 1, -2, -1, 0, 1, 5, size - 1, LARGEST - 1, LARGEST, *around]
    ids = torch.tensor([min(max(each, LEAST), LARGEST) for each in edges] + list(range(100, 160)))
    counted, _, _, _, places = torch.ops.fbgemm.block_bucketize_sparse_features(
        torch.tensor([ids.numel()]),
        ids,
        bucketize_pos=False,
        sequence=True,
        block_sizes=torch.tensor([-(-size // shards)]),
        total_num_blocks=torch.tensor([[shards]]),
        my_size=shards,
    )
    chosen = torch.repeat_interleave(torch.arange(shards), counted.long())[places.long()]
    assert shards_of(ids.numpy(), size, shards).tolist() == chosen.tolist()


def test_a_wrong_hash_size_is_noticed_by_the_raw_ids_of_the_marker() -> None:
    shards = tuple(
        (np.array([first, first + 9, LARGEST]), np.array([row, row + 2, row + 1])) for first, row in [(0, 0), (50, 3)]
    )
    with pytest.raises(ConfigError, match=r"(?s)by input_hash_size 1000, 2 raw ids.*table=t_a"):
        RawIdMap(1000, shards, "t_a")
    assert RawIdMap(100, shards).rows_of(np.array([9, 8, 59, 60, 0])).tolist() == [2, 2, 5, 5, 0]


def test_shards_without_rows_answer_nothing_and_refuse_ids_that_are_sent_to_them() -> None:
    """As of a table whose rows all lie on the first two of five ranks. TorchRec fails for an id of another one, too."""
    empty = np.empty(0, np.int64)
    held = (np.array([5, LARGEST]), np.array([0, 1])), (np.array([25, LARGEST]), np.array([3, 2]))
    known = RawIdMap(100, (*held, *((empty, empty),) * 3))
    assert known.rows_of(np.array([5, 6, 25, 26])).tolist() == [0, 1, 3, 3]
    assert known.rows_of(empty).tolist() == []
    with pytest.raises(ConfigError, match="raw id 45 is sent to shard 2 of 5, which has no rows"):
        known.rows_of(np.array([5, 45]))


def test_the_greatest_int64_has_the_first_free_row_until_the_order_of_free_rows_is_unknown() -> None:
    """As in TorchRec, which keeps the order of free rows, and frees a row only to give it away at once."""
    known = RawIdMap(0, ((np.array([LEAST, 5, LARGEST, LARGEST, LARGEST]), np.array([4, 0, 2, 1, 3])),))
    probes = np.array([LEAST, 5, LARGEST, 6])
    assert known.rows_of(probes).tolist() == [4, 0, 2, 4]

    def change(rows: list[int], raw_ids: list[int], kinds: list[int]) -> None:
        events = IdEvents(np.array(rows), np.array(raw_ids), np.array(kinds, np.uint8))
        known.apply(known.after([(0, events)], "t"))

    change([2, 0, 0], [6, 5, 7], [ASSIGNED, EVICTED, ASSIGNED])
    assert known.rows_of(probes).tolist() == [4, 4, 1, 2]
    change([1, 3], [LARGEST - 1, -1], [ASSIGNED, ASSIGNED])
    assert known.rows_of(np.array([LARGEST, LARGEST - 1, -1])).tolist() == [4, 1, 3]  # no free row: unknown
    change([3], [-1], [EVICTED])
    assert known.rows_of(np.array([-1, 6])).tolist() == [4, 2]
    with pytest.raises(ConfigError, match="raw id 9223372036854775807 is TorchRec's mark of free rows"):
        known.rows_of(probes)


def test_a_change_costs_the_same_whatever_the_number_of_raw_ids() -> None:
    """Compare the most memory that 50 changes take, for 1,000 and for 100,000 raw ids."""
    taken = []
    for rows in (1_000, 100_000):
        known = RawIdMap(0, ((np.arange(rows) * 977, np.arange(rows)),))
        kinds = np.array([EVICTED, ASSIGNED] * 25, np.uint8)
        events = IdEvents(np.repeat(np.arange(25), 2), np.repeat(np.arange(25) * 977, 2), kinds)
        tracemalloc.start()
        known.apply(known.after([(0, events)], "t"))
        taken.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert known.pairs() == {number * 977: number for number in range(rows)}
    assert taken[1] < 2 * taken[0] < 200_000


def test_a_map_that_grows_and_forgets_is_a_dictionary() -> None:
    random, held = np.random.default_rng(1), dict[int, int]()
    known = RawIdMap(0, ((np.full(3_000, LARGEST), np.arange(3_000)),))
    for _ in range(60):
        lost = random.permutation(list(held))[: len(held) // 3].astype(np.int64)
        rows = np.array([held.pop(each) for each in lost.tolist()], np.int64)
        events = [(0, IdEvents(rows, lost, np.full(len(rows), EVICTED, np.uint8)))]
        free = np.array(sorted(set(range(3_000)) - set(held.values())))[:500]
        new = random.permutation(2**16)[: len(free)] << int(random.integers(48))
        new = np.array([each for each in np.unique(new).tolist() if each not in held], np.int64)
        events.append((0, IdEvents(free[: len(new)], new, np.full(len(new), ASSIGNED, np.uint8))))
        held |= dict(zip(new.tolist(), free[: len(new)].tolist(), strict=True))
        known.apply(known.after(events, "t"))
        assert known.pairs() == held
        probes = np.concatenate([new, lost])
        assert known.rows_of(probes).tolist() == [held.get(each, 2_999) for each in probes.tolist()]
