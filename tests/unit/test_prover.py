"""The windows of one rank: how wide, when they move on; and that a proof is of its cut, whenever it is added up."""

from __future__ import annotations

import random

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.parts import FrameRing
from tests.plain_proof import plain_digests, shards_of
from tests.sampled import sampled
from tests.unit.test_proving import DIM, ROWS, kernel_of, schema_of
from torchrec_stream_ckpt.capture.prover import Load, Prover, Taken, Tensors, window_width
from torchrec_stream_ckpt.format.control import Mark
from torchrec_stream_ckpt.format.frame import HEADER_LEN, Header, Kind
from torchrec_stream_ckpt.format.proof import POSITIONS, Proved, Window
from torchrec_stream_ckpt.save.rank_cut import put_mark

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
