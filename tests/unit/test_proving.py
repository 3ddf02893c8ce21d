"""Digests of live tables are the sums that the page says, of whatever dtype, shard and state."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)

from tests.plain_proof import plain_digest, plain_digests, shards_of
from torchrec_stream_ckpt.capture.oracle import Oracle
from torchrec_stream_ckpt.capture.shards import local_shards, merge_schema
from torchrec_stream_ckpt.format.proof import BLOCK_ROWS, POSITIONS, Window, replicated_id
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.model import FusedKernel, modules, proving
from torchrec_stream_ckpt.model.proving import digests, replicated_digests

WHOLE = Window(5, POSITIONS)
ROWS, DIM = 200, 12


def kernel_of(
    shards: list[tuple[int, int, int, int]],
    optimizer: EmbOptimType = EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    precision: SparseType = SparseType.FP32,
) -> FusedKernel:
    """A kernel of shards (first row, rows, first column, columns) of tables of their own, with random bits in them."""
    tbe = SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, cols, EmbeddingLocation.HOST, ComputeDevice.CPU) for _, rows, _, cols in shards],
        optimizer=optimizer,
        weights_precision=precision,
    )
    tables = [
        SimpleNamespace(
            name=f"t{number}",
            num_embeddings=ROWS,
            embedding_dim=DIM,
            local_rows=rows,
            local_cols=cols,
            local_metadata=SimpleNamespace(shard_offsets=[row0, col0]),
        )
        for number, (row0, rows, col0, cols) in enumerate(shards)
    ]
    config = SimpleNamespace(embedding_tables=tables)
    kernel = modules.kernel_of("m", SimpleNamespace(config=config, emb_module=tbe, fused_optimizer=None))
    generator = torch.Generator().manual_seed(len(shards))
    for tensor in (*kernel.weights(), *(state for states in kernel.states() for state in states)):
        bits = tensor.detach().view(torch.int16 if tensor.element_size() == 2 else torch.int32)
        bits.copy_(torch.randint(-(2**15), 2**15, bits.shape, generator=generator))
    return kernel


def schema_of(*kernels: FusedKernel) -> Schema:
    return merge_schema([[shard.table for shard in kernel.shards] for kernel in kernels]).named(None, bytes(16), 1)


def as_lists(kernel: FusedKernel, schema: Schema, window: Window) -> list[list[list[int]]]:
    return [found.digests.tolist() for found in digests([kernel], schema, window.blocks)]


KINDS: list[Any] = [
    pytest.param(EmbOptimType.EXACT_SGD, SparseType.FP32, id="sgd"),
    pytest.param(EmbOptimType.EXACT_ROWWISE_ADAGRAD, SparseType.FP32, id="rowwise"),
    pytest.param(EmbOptimType.EXACT_ADAGRAD, SparseType.FP16, id="adagrad fp16"),
    pytest.param(EmbOptimType.EMAINPLACE_ROWWISE_ADAGRAD, SparseType.FP32, id="ema"),
]


@pytest.mark.parametrize(("optimizer", "precision"), KINDS)
def test_digests_are_those_of_plain_integers(optimizer: EmbOptimType, precision: SparseType) -> None:
    kernel = kernel_of([(0, ROWS, 0, DIM), (70, 90, 4, 8), (128, 3, 0, 4)], optimizer, precision)
    schema = schema_of(kernel)
    assert as_lists(kernel, schema, WHOLE) == plain_digests(shards_of([kernel]), schema, WHOLE)


@pytest.mark.parametrize("position", range(0, POSITIONS, POSITIONS // 8))
def test_a_window_has_its_own_blocks_alone(position: int) -> None:
    kernel = kernel_of([(0, ROWS, 0, DIM), (70, 90, 4, 8)])
    schema, window = schema_of(kernel), Window(position, POSITIONS // 8)
    assert as_lists(kernel, schema, window) == plain_digests(shards_of([kernel]), schema, window)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.uint8, torch.int64, torch.float16])
@pytest.mark.parametrize("shape", [(130, 6), (130,)])
def test_a_replicated_table_has_one_number_a_block(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8).view(dtype).view(shape)
    blocks, found = replicated_digests("model.x", tensor, WHOLE.blocks)
    id_, cols = replicated_id("model.x"), tensor[:1].numel()
    assert blocks.tolist() == [0, 1, 2]
    expected = [plain_digest(tensor, block, id_, 0, 0, 0, cols, per_row=False) for block in range(3)]
    assert found.tolist() == expected


def test_shards_of_two_ranks_add_up_to_the_whole_table() -> None:
    whole = kernel_of([(0, ROWS, 0, DIM)], EmbOptimType.EXACT_ADAGRAD)
    cells = [(0, 100, 0, 4), (100, 100, 0, 4), (0, 100, 4, 8), (100, 100, 4, 8)]
    parts = [kernel_of([cell], EmbOptimType.EXACT_ADAGRAD) for cell in cells]
    for part, (row0, rows, col0, cols) in zip(parts, cells, strict=True):
        for target, source in zip(
            (part.weights()[0], *part.states()[0]), (whole.weights()[0], *whole.states()[0]), strict=True
        ):
            target.detach().copy_(source.detach()[row0 : row0 + rows, col0 : col0 + cols])
    schema = schema_of(whole)
    (expected,) = digests([whole], schema, WHOLE.blocks)
    sums: dict[int, Any] = {}
    for part in parts:
        for found in digests([part], schema, WHOLE.blocks):
            for block, numbers in zip(found.blocks.tolist(), found.digests, strict=True):
                sums[block] = sums.get(block, np.zeros(2, np.uint64)) + numbers
    assert {block: numbers.tolist() for block, numbers in sums.items()} == dict(
        zip(expected.blocks.tolist(), expected.digests.tolist(), strict=True)
    )


def test_shards_stand_in_the_order_of_hello_and_empty_ones_are_left_out() -> None:
    kernel = kernel_of([(0, 10, 0, 4), (20, 0, 0, 4), (0, 70, 0, 8)])
    schema = schema_of(kernel)
    found = [each.shard for each in digests([kernel], schema, WHOLE.blocks)]
    assert tuple(found) == local_shards([kernel], schema)
    assert len(found) == 2


@pytest.mark.parametrize("tables", [4, 40])
def test_a_kernel_is_split_once_however_many_tables_it_has(tables: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """FBGEMM splits all tables of a kernel at once: a split for each table takes time with the square of them."""
    kernel = kernel_of([(0, 8, 0, DIM)] * tables)
    schema, splits = schema_of(kernel), Counter[str]()
    for name in ("split_embedding_weights", "split_optimizer_states"):
        real = getattr(SplitTableBatchedEmbeddingBagsCodegen, name)

        def counted(tbe: Any, real: Any = real, name: str = name) -> Any:
            splits[name] += 1
            return real(tbe)

        monkeypatch.setattr(SplitTableBatchedEmbeddingBagsCodegen, name, counted)
    assert len(as_lists(kernel, schema, WHOLE)) == tables
    assert set(splits.values()) == {1}
    oracle = Oracle([kernel], schema)
    for act in (lambda: oracle.begin(()), oracle.hold, oracle.let_go, lambda: oracle.compare(())):
        splits.clear()
        act()
        assert set(splits.values()) <= {1}


def test_digests_allocate_once_and_write_no_memory_that_they_overwrite(monkeypatch: pytest.MonkeyPatch) -> None:
    """A restore compares all rows of a rank: zeros first would be a second pass over as much memory."""
    kernel = kernel_of([(0, ROWS, 0, DIM), (0, ROWS, 0, DIM), (0, ROWS // 2, 0, DIM)])
    schema = schema_of(kernel)
    expected = as_lists(kernel, schema, WHOLE)
    monkeypatch.setattr(proving, "_in_place", lambda *_: None)
    made: list[int] = []
    allocate = torch.empty

    def counted(size: int, **options: Any) -> torch.Tensor:
        if size:
            made.append(size)
        return allocate(size, **options).fill_(0xA5)

    monkeypatch.setattr(proving.torch, "zeros", None)
    monkeypatch.setattr(proving.torch, "empty", counted)
    assert as_lists(kernel, schema, WHOLE) == expected
    assert len(made) == 1, "one for all shards"


@pytest.mark.parametrize("apart", [1, 2])
def test_digests_of_rows_adjacent_or_not_copy_nothing_and_are_those_of_copies(
    apart: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = kernel_of([(0, ROWS, 0, DIM), (64, ROWS, 0, DIM), (30, ROWS // 2, 0, DIM)])
    schema, copies = schema_of(kernel), []
    real = proving.CopiedRows

    def copied(*args: Any) -> Any:
        copies.append(args)
        return real(*args)

    monkeypatch.setattr(proving, "CopiedRows", copied)

    def some(_: int, begin: int, end: int) -> Any:
        first, last = begin // BLOCK_ROWS, -(-end // BLOCK_ROWS)
        return np.arange(first, last, apart)

    def found() -> list[Any]:
        return [(each.shard, each.blocks.tolist(), each.digests.tolist()) for each in digests([kernel], schema, some)]

    in_place = found()
    assert not copies
    monkeypatch.setattr(proving, "_in_place", lambda *_: None)
    assert found() == in_place
    assert copies
    assert all(numbers for _, _, numbers in in_place)
