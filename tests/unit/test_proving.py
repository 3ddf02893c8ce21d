"""Digests of live tables are the sums that the page says, of whatever dtype, shard and state."""

from __future__ import annotations

import random
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
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.parts import FrameRing, modules
from tests.plain_proof import plain_digest, plain_digests, shards_of
from tests.sampled import sampled
from torchrec_stream_ckpt.capture.oracle import Oracle
from torchrec_stream_ckpt.capture.prover import Load, Prover, Taken, Tensors, window_width
from torchrec_stream_ckpt.capture.shards import local_shards, merge_schema
from torchrec_stream_ckpt.format.control import Mark
from torchrec_stream_ckpt.format.frame import HEADER_LEN, Header, Kind
from torchrec_stream_ckpt.format.proof import BLOCK_ROWS, POSITIONS, Proved, Window, replicated_id
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.model import FusedKernel, proving
from torchrec_stream_ckpt.model.proving import digests, replicated_digests
from torchrec_stream_ckpt.save.rank_cut import put_mark

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


# The windows of one rank: how wide, when they move on; and that a proof is of its cut, whenever it is added up.


MIB = 2**20


class Rank:
    """A kernel with two shards, a replicated table, and their prover."""

    def __init__(self, width: int = POSITIONS // 3) -> None:
        self.kernel = kernel_of([(0, ROWS, 0, DIM), (70, 90, 4, 8)], EmbOptimType.EXACT_ADAGRAD)
        self.schema = schema_of(self.kernel)
        self.replicated: Tensors = {"model.r": torch.rand(130, 4)}
        self.prover = Prover([self.kernel], self.schema, lambda: self.replicated, Window(0, width))

    def change(self) -> None:
        for tensor in (*self.kernel.weights(), *self.replicated.values()):
            tensor.data.mul_(-1.5)

    def expected(self) -> list[int]:
        """Of the shards as they are now, in the next window."""
        by_shard = plain_digests(shards_of([self.kernel]), self.schema, self.prover.window)
        return [number for shard in by_shard for block in shard for number in block]


def numbers(taken: Taken) -> list[int]:
    found: list[int] = taken.proof().numbers().tolist()
    return found


def test_a_proof_is_of_the_moment_at_which_its_rows_were_taken() -> None:
    rank = Rank()
    expected, taken = rank.expected(), rank.prover.take()
    rank.change()
    assert numbers(taken) == expected != rank.expected()
    assert numbers(taken) == expected


@settings(max_examples=sampled(30, 15))
@given(st.integers(0, 2**32))
def test_each_marker_has_its_own_rows_whenever_they_are_added_up(seed: int) -> None:
    """Also that of a marker that was given up while the log stood still."""
    rank, choose = Rank(), random.Random(seed)
    waiting: list[tuple[Taken, list[int]]] = []
    committed = 0
    for _ in range(6):
        rank.change()
        position = rank.prover.window.position
        waiting.append((rank.prover.take(), rank.expected()))
        while waiting and choose.random() < 0.6:
            taken, expected = waiting.pop(0)
            assert numbers(taken) == expected
        is_committed = choose.random() < 0.5
        committed += is_committed
        rank.prover.settled(Window(position, rank.prover.window.width), committed=is_committed)
        assert rank.prover.window.position == committed * rank.prover.window.width % POSITIONS
    for taken, expected in waiting:
        assert numbers(taken) == expected
    assert rank.prover.proved == Proved.by(POSITIONS // 3, committed)


def test_a_state_that_an_optimizer_has_made_since_is_taken_with_the_rest() -> None:
    rank = Rank(POSITIONS)
    assert [each.name for each in rank.prover.take().proof().replicated] == ["model.r"]
    rank.prover.settled(rank.prover.window, committed=True)
    rank.replicated = {**rank.replicated, "optim.o.r.sum": torch.rand(130)}
    found = {each.name: each.cols for each in rank.prover.take().proof().replicated}
    assert found == {"model.r": 4, "optim.o.r.sum": 1}


def test_a_mark_has_its_digests_once_its_frame_is_ready() -> None:
    rank, ring = Rank(), FrameRing(2_000_000, 0)
    expected, taken = rank.expected(), rank.prover.take()
    buffer = ring.acquire()
    assert buffer is not None
    put_mark(buffer, Header(Kind.MARK, bytes(16), 1), Mark(1, 2, ()), taken)
    rank.change()
    length = len(buffer.view())
    assert buffer.ready is not None
    for _ in range(2):  # the oracle looks at it, then the publisher
        buffer.ready()
        assert len(buffer.view()) == length
        mark = Mark.from_json(buffer.view()[HEADER_LEN:])
        assert mark.proof == taken.proof()
        assert mark.proof is not None
        assert mark.proof.numbers().tolist() == expected


def test_the_rank_that_holds_most_says_how_wide_a_window_is() -> None:
    small, large = Load(100 * MIB, 1000), Load(1240 * MIB, 40_000)  # 1.3 * 10^9 bytes
    assert window_width([small, large], 4 * MIB) == POSITIONS * 4 // 1240
    assert Proved.by(window_width([small, large], 4 * MIB), 0).round_markers <= 500
    assert window_width([Load(MIB, 10)], 4 * MIB) == POSITIONS
    assert window_width([Load(0, 0)], 1) == POSITIONS
    assert window_width([Load(2**45, 10)], 1) == 1


@given(rows=st.integers(1, 10**9), states=st.integers(0, 4), dim=st.integers(1, 8), proof_bytes=st.integers(1, 2**34))
def test_a_mark_with_a_proof_fits_a_frame(rows: int, states: int, dim: int, proof_bytes: int) -> None:
    blocks = -(-rows // 64)
    width = window_width([Load(rows * 4 * (dim + states), blocks * (1 + states))], proof_bytes)
    assert blocks * (1 + states) * (width / POSITIONS) * 8 * 4 / 3 <= 250_000 or width == 1


def test_the_oldest_proof_is_a_round_old_once_all_is_proved() -> None:
    assert Proved.by(POSITIONS // 3, 0) == Proved(4, 0.0, 0)
    assert [Proved.by(POSITIONS // 4, markers).oldest_markers for markers in range(7)] == [0, 0, 1, 2, 3, 3, 3]
    assert [Proved.by(POSITIONS // 4, markers).share for markers in range(6)] == [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]
