"""Managed collision: rows that evictions reset, the id maps, and what will be evicted next, all bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule
from torchrec.modules.mc_modules import (
    LFU_EvictionPolicy,
)

from tests import warm
from tests.collided import TABLES, Net, State, Truths, attach, evicted, go_on, job, refusal, restore, train
from tests.model import differences
from torchrec_stream_ckpt import FollowedTables, follow
from torchrec_stream_ckpt.errors import UnsupportedError

pytestmark = pytest.mark.distributed

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
    return pytest.param(case, marks=pytest.mark.covers(**cell, served="raw ids"))


@pytest.mark.sharder(
    "ManagedCollisionCollectionSharder",
    "ManagedCollisionEmbeddingBagCollectionSharder",
    "ManagedCollisionEmbeddingCollectionSharder",
)
@pytest.mark.pitfall(18, 19)
@pytest.mark.parametrize("case", [_covering(case) for case in CASES])
def test_a_marker_and_what_follows_it_come_back_bit_for_bit(case: str, tmp_path: Path) -> None:
    """Evictions are at steps 3, 6, 9, 12, 15 of one table and 4, 8, 12, 16 of the other."""
    uri, build, marked = f"file://{tmp_path}", CASES[case], [1, 7, 11, 12, 13]
    done = warm.run(2, train, uri, marked, 17, build)
    for table, *_ in TABLES:
        happened = [lost for truths in done for lost in evicted(truths, table).items()]
        assert sum(lost for _, lost in happened) > 10, happened
        assert sum(lost for step, lost in happened if step > 13) > 1, happened
    _check_lookups(uri, done, marked[-1])
    for rank, restored in enumerate(warm.run(2, restore, uri, marked, 17, build)):
        for first, truths in zip(marked, restored, strict=True):
            assert truths.keys() == set(range(first, 18))
            for step, (state, maps) in truths.items():
                expected, expected_maps = done[rank][step]
                assert differences(expected, state) == [], (first, step)
                assert differences(expected_maps, maps) == [], (first, step)


def _check_lookups(uri: str, done: list[Truths], step: int) -> None:
    """A replica at the newest marker answers for each raw id with the row that the trainer has for it."""
    sizes = {f"mc._embedding_module.{name}": size for name, *_, size in TABLES}
    with FollowedTables(follow(uri), input_hash_sizes=sizes) as tables:
        tables.advance()
        for name in sizes:
            table = name.rpartition(".")[2]
            (weights,) = [value for key, value in done[0][step][0].items() if key.endswith(f".{table}.weight")]
            for truths in done:
                maps = truths[step][1]
                raw_ids, rows = (maps[f"{table}._mch_{each}"] for each in ("sorted_raw_ids", "remapped_ids_mapping"))
                used = raw_ids != 2**63 - 1
                assert used.any()
                assert torch.equal(tables.lookup(name, raw_ids[used]), weights[rows[used]])


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
    with attach(each, uri, marker_every=None) as checkpointer:
        assert checkpointer.restore() is not None
        state = each.truth(), each.map_truth()
        return *state, go_on(each, checkpointer, last, [last])


def _restore_newest(uri: str) -> tuple[State, State]:
    each = job()
    each.step()
    with attach(each, uri) as checkpointer:
        assert checkpointer.restore() is not None
        return each.truth(), each.map_truth()


@pytest.mark.covers(plan="row-wise, fewer ranks whose shards are unions", module="managed collision", pipeline="plain")
def test_maps_of_smaller_shards_are_put_together(tmp_path: Path) -> None:
    """4 ranks, then 2, then 1: at each change the histories since the last eviction are not empty."""
    uri = f"file://{tmp_path}"
    done = warm.run(4, train, uri, [7], 7, {})
    tables, maps = done[0][7][0], [truths[7][1] for truths in done]
    for world, last in ((2, 13), (1, 17)):
        restored = warm.run(world, _restore_smaller, uri, last)
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
        assert sum(sum(evicted(truths, table).values()) for *_, truths in restored for table, *_ in TABLES) > 3
    (state,) = warm.run(1, _restore_newest, uri)
    assert differences(tables, state[0]) == []
    assert differences(maps[0], state[1]) == []


def _refused(uri: str, **build: Any) -> str:
    each = job(**build)
    each.step()
    return refusal(uri, each)


def _refusals(uri: str) -> dict[str, str]:
    said = {
        "interval": _refused(uri, intervals=(3, 5)),
        "policy": _refused(uri, policy="lru"),
    }
    kept, TABLES[0] = TABLES[0], (*TABLES[0][:5], 2048)
    try:
        return {**said, "hash size": _refused(uri)}
    finally:
        TABLES[0] = kept  # this process serves other tests, too


@pytest.mark.covers(
    module="managed collision",
    plan="shards that split the old ones",
    outcome="refused",
    why="`the id map of rows ... is not a union of whole maps of the marker`",
)
def test_what_has_no_exact_answer_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}"
    warm.run(2, train, uri, [3], 3, {})
    for said in warm.run(3, _refused, uri):
        assert "rows [0, 6) is not a union of whole maps of the marker, which has rows [0, 8)" in said
        assert "table=mc._embedding_module.one" in said
        assert "restore on 2 ranks" in said
        assert "reassigned=('mc._embedding_module.one', 'mc._embedding_module.two')" in said
    said = warm.run(2, _refusals, uri)[0]
    assert "the eviction interval is 4 in the marker and 5 in this job" in said["interval"]
    assert "keeps map_counts, map_last_access_iter, " in said["policy"]
    assert " in the marker and map_last_access_iter, " in said["policy"]
    assert "raw ids of rows [0, 8) belong to another rank" in said["hash size"]


class _OtherPolicy(LFU_EvictionPolicy):
    """A policy that may keep more than it says."""


class _OtherModule(HashZchManagedCollisionModule):
    """A module that may keep more than its parent."""


def _attach_refused(uri: str) -> list[str]:
    said = []
    other = Net("bag", LFU_EvictionPolicy(), weighted=False, intervals=(3, 4))
    other.mc._managed_collision_collection._managed_collision_modules["two"] = _OtherModule(
        zch_size=24, device=torch.device("cpu"), total_num_buckets=2
    )
    for net in (other, Net("bag", _OtherPolicy(), weighted=False, intervals=(3, 4))):
        each = job(net=net)
        with pytest.raises(UnsupportedError) as caught:
            attach(each, uri)
        said.append(str(caught.value))
    return said


@pytest.mark.covers(
    module="managed collision, own modules and eviction policies",
    outcome="refused",
    why="`the id map of ... is not captured`, `the eviction policy ... is not captured`",
)
def test_maps_whose_state_is_not_known_are_refused_at_attach(tmp_path: Path) -> None:
    module, policy = warm.run(2, _attach_refused, f"file://{tmp_path}")[0]
    assert "the id map of _OtherModule is not captured" in module
    assert "table=two" in module
    assert "_OtherPolicy is not captured" in policy


def _serve(uri: str) -> list[str]:
    each = job()
    with attach(each, uri, marker_every=None) as checkpointer:
        go_on(each, checkpointer, 6, [6])
    with FollowedTables(follow(uri)) as tables:
        tables.advance()
        dense = tables.dense()
    live = {name: value for name, value in each.dmp.state_dict().items() if name.startswith("top.")}
    found = {name: value for name, value in dense.model.items() if name in live}
    assert len(found) == len(live) == 2
    assert all(torch.equal(found[name], value) for name, value in live.items())
    return sorted(dense.model.keys() - live.keys())


def test_a_replica_gets_the_dense_parameters_of_a_job_with_id_maps(tmp_path: Path) -> None:
    assert warm.run(1, _serve, f"file://{tmp_path}") == [[]]
