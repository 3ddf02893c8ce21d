"""Raw ids are sent to shards as TorchRec's input dist sends them."""

from __future__ import annotations

import fbgemm_gpu  # noqa: F401
import numpy as np
import pytest
import torch

from torchrec_stream_ckpt.errors import ConfigError
from torchrec_stream_ckpt.extras.interchange.id_map import RawIdMap, shards_of

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
    assert RawIdMap(100, shards).strangers() == 0
    assert RawIdMap(1000, shards).strangers() == 2
    assert RawIdMap(100, shards).rows_of(np.array([9, 8, 59, 60, 0])).tolist() == [2, 2, 5, 5, 0]


def test_shards_without_rows_answer_nothing_and_refuse_ids_that_are_sent_to_them() -> None:
    """As of a table whose rows all lie on the first two of five ranks. TorchRec fails for an id of another one, too."""
    empty = np.empty(0, np.int64)
    held = (np.array([5, LARGEST]), np.array([0, 1])), (np.array([25, LARGEST]), np.array([3, 2]))
    known = RawIdMap(100, (*held, *((empty, empty),) * 3))
    assert known.strangers() == 0
    assert known.rows_of(np.array([5, 6, 25, 26])).tolist() == [0, 1, 3, 3]
    assert known.rows_of(empty).tolist() == []
    with pytest.raises(ConfigError, match="raw id 45 is sent to shard 2 of 5, which has no rows"):
        known.rows_of(np.array([5, 45]))
