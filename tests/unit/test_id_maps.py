"""Id maps are put together as TorchRec does it on a load, with what its state dicts leave out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    LFU_EvictionPolicy,
    LRU_EvictionPolicy,
    MCHEvictionPolicy,
    MCHManagedCollisionModule,
)
from torchrec.sparse.jagged_tensor import JaggedTensor

from torchrec_stream_ckpt.dense.id_maps import merge_pieces, read_pieces
from torchrec_stream_ckpt.errors import SchemaMismatchError
from torchrec_stream_ckpt.model import CollisionMap

ROWS, INTERVAL = 24, 3
LARGEST = 2**63 - 1
POLICIES: list[Callable[[], MCHEvictionPolicy]] = [LFU_EvictionPolicy, LRU_EvictionPolicy, DistanceLFU_EvictionPolicy]


def shards(
    count: int, policy: Callable[[], MCHEvictionPolicy] = LFU_EvictionPolicy, *, rows: int = ROWS, size: int = LARGEST
) -> list[MCHManagedCollisionModule]:
    """The modules that ``count`` ranks would have."""
    whole = MCHManagedCollisionModule(rows, torch.device("cpu"), policy(), INTERVAL, size)
    bounds = [rows * rank // count for rank in range(count + 1)]
    return [whole.rebuild_with_output_id_range((bounds[rank], bounds[rank + 1]), bounds) for rank in range(count)]


def maps(modules: list[MCHManagedCollisionModule]) -> list[CollisionMap]:
    return [CollisionMap("t", module, len(modules), rank) for rank, module in enumerate(modules)]


def profile(module: MCHManagedCollisionModule, step: int, rank: int, ranks: int) -> None:
    generator = torch.Generator().manual_seed(step)
    few = (torch.rand(20, generator=generator) ** 2 * 12).long() + step // 4 * 5
    ids = few * (LARGEST // ranks // 60) + rank * (LARGEST // ranks + 1)
    module.profile({"t": JaggedTensor(values=ids, lengths=torch.tensor([20]))})


def train(modules: list[MCHManagedCollisionModule], steps: int, *, evict: bool = True) -> None:
    for step in range(steps):
        for rank, module in enumerate(modules):
            profile(module, step, rank, len(modules))
            if evict:
                module.evict()


def move(sources: list[MCHManagedCollisionModule], target: MCHManagedCollisionModule) -> None:
    here = maps([target])
    (state,) = merge_pieces(here, read_pieces(maps(sources)), {each.table: each.table for each in here})
    here[0].write(state)


@pytest.mark.parametrize("policy", POLICIES)
def test_merged_maps_are_those_that_torchrec_loads(policy: Callable[[], MCHEvictionPolicy]) -> None:
    sources, (loaded,), (merged,) = shards(4, policy), shards(1, policy), shards(1, policy)
    train(sources, 11)
    saved = [source.state_dict() for source in sources]
    loaded.load_state_dict(
        {
            name: torch.cat([each[name] for each in saved]) if name.startswith("_mch_") else value
            for name, value in saved[0].items()
        }
    )
    move(sources, merged)
    for name, value in merged.state_dict().items():
        assert name == "_output_segments_tensor" or torch.equal(loaded.state_dict()[name], value)
    assert merged._output_segments_tensor.tolist() == [0, ROWS] + [-1] * 1023
    for source in sources:
        for raw_id, row in zip(source._mch_sorted_raw_ids, source._mch_remapped_ids_mapping, strict=True):
            if int(raw_id) != LARGEST:
                found = merged.remap({"t": JaggedTensor(values=raw_id.reshape(1), lengths=torch.tensor([1]))})
                assert int(found["t"].values()) == int(row)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("steps", [0, 1, 5, 6])
def test_a_moved_map_goes_on_as_the_old_one(steps: int, policy: Callable[[], MCHEvictionPolicy]) -> None:
    """Also when its last eviction has not reached the table yet, and into a map that has been used."""
    (source,), (target,) = shards(1, policy), shards(1, policy)
    train([source], steps, evict=False)
    train([target], 4)
    move([source], target)
    assert target._evicted == (steps >= INTERVAL)
    for step in range(steps, steps + 9):
        for module in (source, target):
            profile(module, step, 0, 1)
        assert target._current_history_buffer_offset == source._current_history_buffer_offset
        rows = [module.evict() for module in (source, target)]
        assert (rows[0] is None and rows[1] is None) or torch.equal(*rows)
        for name, value in source.state_dict().items():
            assert torch.equal(target.state_dict()[name], value)
    assert source._current_iter == steps + 9


def test_maps_at_different_iterations_are_not_merged() -> None:
    sources, (target,) = shards(2), shards(1)
    train(sources, 2)
    profile(sources[1], 3, 1, 2)
    with pytest.raises(SchemaMismatchError, match=r"rows \[0, 24\) have different values of _current_iter: \[2, 3\]"):
        move(sources, target)
    assert target._current_iter == -1


def test_a_map_without_history_is_not_merged_with_one_that_has_it() -> None:
    sources, (target,) = shards(2), shards(1)
    train(sources, 1)
    sources[0]._input_history_buffer_size = -1
    with pytest.raises(SchemaMismatchError, match="_input_history_buffer_size"):
        move(sources, target)


def test_raw_ids_of_another_rank_are_counted_as_the_input_dist_routes_them() -> None:
    modules = shards(3)
    ids = torch.tensor([0, 5, LARGEST // 3, LARGEST // 3 + 1, LARGEST // 3 * 2 + 2, LARGEST - 1])
    assert [each.count_strangers(ids) for each in maps(modules)] == [3, 5, 4]
