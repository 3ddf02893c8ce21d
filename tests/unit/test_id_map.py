"""Raw ids are sent to shards as TorchRec's input dist sends them."""

from __future__ import annotations

import fbgemm_gpu  # noqa: F401
import numpy as np
import pytest
import torch

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
