"""Raw ids are sent to shards as TorchRec's input dist sends them."""

from __future__ import annotations

import tracemalloc

import fbgemm_gpu  # noqa: F401
import numpy as np
import pytest
import torch

from torchrec_stream_ckpt.errors import ConfigError
from torchrec_stream_ckpt.extras.interchange.id_map import RawIdMap, shards_of
from torchrec_stream_ckpt.format.rows import ASSIGNED, EVICTED, IdEvents

LEAST, LARGEST = -(2**63), 2**63 - 1


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
    with pytest.raises(ConfigError, match=r"(?s)input_hash_size 1000 sends 2 raw ids.*table=t_a"):
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
