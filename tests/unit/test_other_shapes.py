"""Rows of a marker into a live table of another shape: against a target of the marker's own shape, copied by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.test_target import DIM, IDS, ROWS, RUNS, SPLITS, random_bits, raw, targets_of, view
from torchrec_stream_ckpt.errors import CorruptionError
from torchrec_stream_ckpt.format.rows import RowsView
from torchrec_stream_ckpt.restore.plan import Move, intersect
from torchrec_stream_ckpt.restore.target import Target
from torchrec_stream_ckpt.util.types import TableShard

DTYPES, FLAT = ("float16", "float32", "float32", "bfloat16"), (False, True, False, False)


def live(rng: np.random.Generator, rows: int, cols: int) -> list[torch.Tensor]:
    """What a live model holds, any bits."""
    tensors = targets_of(TableShard(0, 0, rows, 0, cols), DTYPES, FLAT)
    for tensor, dtype in zip(tensors, DTYPES, strict=True):
        raw(tensor)[...] = random_bits(rng, dtype, *tensor.shape).view(raw(tensor).dtype)
    return tensors


def moves_into(shard: TableShard, splits: list[tuple[int, int]]) -> list[Move]:
    sources = [TableShard(0, 0, ROWS, *split) for split in splits]
    return [move for source in sources if (move := intersect(source, shard)) is not None]


@given(
    st.data(),
    st.integers(0, 2**32),
    st.sampled_from(SPLITS),
    st.sampled_from(SPLITS),
    st.lists(st.tuples(st.sampled_from(["base", "log", "store"]), IDS | RUNS), max_size=6),
)
def test_rows_land_where_the_map_says_and_no_other_cell_changes(
    data: st.DataObject,
    seed: int,
    old: list[tuple[int, int]],
    new: list[tuple[int, int]],
    batches: list[tuple[str, list[int]]],
) -> None:
    rng = np.random.default_rng(seed)
    shard = TableShard(0, 3, 30, 0, data.draw(st.sampled_from([DIM, 4, 1])))
    height = data.draw(st.integers(1, 45))
    count = data.draw(st.integers(0, min(height, shard.rows)))
    numbers = np.full(shard.rows, -1, np.int64)
    kept = rng.permutation(shard.rows)[:count]
    numbers[kept] = rng.permutation(height)[:count]
    moves = moves_into(shard, [*old, *new])
    there, plain = live(rng, height, 8), targets_of(shard, DTYPES, FLAT)
    views = [tensor[:, : shard.cols] if tensor.dim() == 2 else tensor for tensor in there]
    for mine, seen in zip(plain, views, strict=True):
        raw(mine)[kept] = raw(seen)[numbers[kept]]
    expected = [raw(tensor).copy() for tensor in there]
    targets = (
        Target(shard, plain[0], plain[1:], moves, merged=False),
        Target(shard, views[0], [*views[1:3], None], moves, merged=False, numbers=numbers),
    )
    for kind, ids in sorted(batches, key=lambda batch: ("base", "store", "log").index(batch[0])):
        move = data.draw(st.sampled_from(moves))
        rows = view(rng, move.source, DTYPES, FLAT, ids)
        for target in targets:
            (target.put if kind == "log" else target.put_sorted)(move, rows)
    for section, (mine, array) in enumerate(zip(plain[:3], expected, strict=False)):
        part = array[:, : shard.cols] if array.ndim == 2 else array
        part[numbers[kept]] = raw(mine)[kept]
        assert raw(there[section]).tobytes() == array.tobytes(), section
    assert raw(there[3]).tobytes() == expected[3].tobytes(), "a state that is not wanted"


def test_only_rows_that_are_kept_have_to_come() -> None:
    shard = TableShard(0, 10, 4, 0, 2)
    (move,) = moves_into(shard, [(0, 2)])
    for missing, numbers in ((0, [1, -1, 0, -1]), (1, [1, 2, 0, -1])):
        target = Target(shard, torch.zeros(5, 2), (), [move], merged=False, numbers=np.array(numbers))
        target.put(move, RowsView(np.array([10, 12]), np.ones((2, 2), np.float32), ()))
        if missing:
            with pytest.raises(CorruptionError, match="1 rows of this shard are missing from all sources"):
                target.finish("t")
        else:
            target.finish("t")


@pytest.mark.parametrize("there", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("here", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("numbers", [None, np.array([2, -1, 0])])
def test_weights_of_another_dtype_are_rounded_as_torch_does_it(
    there: str, here: str, numbers: np.ndarray | None
) -> None:
    shard = TableShard(0, 0, 3, 0, 2)
    (move,) = moves_into(shard, [(0, 2)])
    values = torch.tensor([[1 / 3, 1e-7], [70000.0, -0.0], [2.0**-24, 5.5]]).to(getattr(torch, there))
    weights = torch.full((3, 2), 9.0, dtype=getattr(torch, here))
    expected = weights.clone()
    target = Target(shard, weights, (), [move], merged=False, numbers=numbers, dtype=there)
    bits = raw(values).view(np.uint16) if there == "bfloat16" else raw(values)
    assert not target.takes_run(move, 0, 3)
    target.put(move, RowsView(np.arange(3), bits, ()))
    target.finish("t")
    chosen = [0, 1, 2] if numbers is None else [0, 2]
    for row in chosen:
        expected[row if numbers is None else numbers[row]] = values[row].to(expected.dtype)
    assert torch.equal(weights.view(torch.uint8), expected.view(torch.uint8))


def test_a_merged_state_lands_where_the_map_says() -> None:
    shard = TableShard(0, 0, 3, 0, 4)
    moves = moves_into(shard, [(0, 1), (1, 3)])
    state = torch.full((4,), 7.0)
    target = Target(shard, torch.zeros(4, 4), (state,), moves, merged=True, numbers=np.array([3, -1, 0]))
    for move, values in zip(moves, ([4.0, 0.0, 8.0], [8.0, 0.0, 0.0]), strict=True):
        rows = RowsView(np.arange(3), np.ones((3, move.cols), np.float32), (np.array(values, np.float32),))
        target.put(move, rows)
    target.finish("t")
    assert state.tolist() == [2.0, 7.0, 7.0, 7.0]


def test_a_state_that_is_not_wanted_keeps_a_chunk_from_being_read_straight() -> None:
    shard = TableShard(0, 0, 3, 0, 2)
    (move,) = moves_into(shard, [(0, 2)])
    weights, state = torch.zeros(3, 2), torch.zeros(3)
    assert Target(shard, weights, (state,), [move], merged=False).takes_run(move, 0, 3)
    assert not Target(shard, weights, (None,), [move], merged=False).takes_run(move, 0, 3)
    assert not Target(shard, weights, (state,), [move], merged=False, numbers=np.arange(3)).takes_run(move, 0, 3)
