"""A kernel of FBGEMM with two tables, its capture and a reader of its stream: for tests of any order of events.

The stream is read as a reader would: frame by frame, the last record of a row wins. Whenever a cut is in the stream to
its last row, the stream must say what the tables held when it was frozen, bit for bit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from hypothesis import strategies as st

from tests.inside import sender_of
from tests.parts import FrameBuffer, FrameRing, modules
from torchrec_stream_ckpt.capture.counts import Record, deferral
from torchrec_stream_ckpt.capture.hook import Capture
from torchrec_stream_ckpt.capture.sender import Drain
from torchrec_stream_ckpt.capture.shards import merge_schema
from torchrec_stream_ckpt.capture.staging import StreamIdentity
from torchrec_stream_ckpt.format.frame import HEADER_LEN
from torchrec_stream_ckpt.format.rows import decode_rows
from torchrec_stream_ckpt.model import FusedKernel

ROWS = (17, 9)
DIM = 4
FRAME_ROWS = 3
BUDGET_BYTES = 2_000

State = list[torch.Tensor]


class Job:
    """A kernel with two tables, its capture, and what a reader of its stream knows."""

    def __init__(
        self, budget_bytes: int = BUDGET_BYTES, defer: Callable[[torch.device], Record | None] = deferral
    ) -> None:
        self.tbe = SplitTableBatchedEmbeddingBagsCodegen(
            [(rows, DIM, EmbeddingLocation.HOST, ComputeDevice.CPU) for rows in ROWS],
            optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            learning_rate=0.1,
        )
        generator = torch.Generator().manual_seed(3)
        for weights in self.tbe.split_embedding_weights():
            weights.copy_(torch.rand(weights.shape, generator=generator))
        self.kernel = self._kernel()
        self.schema = merge_schema([[shard.table for shard in self.kernel.shards]])
        self.capture = Capture([self.kernel], self.schema, defer)
        self.ring = FrameRing(1, budget_bytes)
        self.taken: deque[FrameBuffer] = deque()
        self.read: State = [torch.full_like(values, float("nan")) for values in self.tables()]
        identity = StreamIdentity(b"0" * 16, 1, 0, self.schema.crc)
        self.capture.open(identity, self.ring, self._take, swept=range(len(ROWS)))
        for stager in sender_of(self.capture).stagers[0]:
            stager.layout = replace(stager.layout, max_rows=FRAME_ROWS)
        while not self.capture.swept:
            self.capture.sweep(Drain(0, 0), 1_000)
            self.log_takes(9)

        self.pending: list[torch.Tensor] = []
        self.cut: State | None = None
        self.given_up = 0
        self.cuts = 0

    def _kernel(self) -> FusedKernel:
        tables = [
            SimpleNamespace(
                name=f"t{number}",
                num_embeddings=rows,
                embedding_dim=DIM,
                local_rows=rows,
                local_cols=DIM,
                local_metadata=SimpleNamespace(shard_offsets=[0, 0]),
            )
            for number, rows in enumerate(ROWS)
        ]
        config = SimpleNamespace(embedding_tables=tables)
        optimizer = SimpleNamespace(param_groups=[{"lr": 0.1}])
        return modules.kernel_of("m", SimpleNamespace(config=config, emb_module=self.tbe, fused_optimizer=optimizer))

    def tables(self) -> State:
        """Weights and states: live views. A write to them between a forward and its backward goes unnoticed."""
        states = (state for states in self.kernel.states() for state in states)
        return [values.data for values in (*self.kernel.weights(), *states)]

    def _take(self, buffer: FrameBuffer) -> int:
        """The frame of one table: into what the reader knows."""
        header = buffer.header
        assert header is not None
        view = decode_rows(header, buffer.view()[HEADER_LEN:], self.schema.tables[header.table])
        ids = torch.from_numpy(view.ids.copy())
        for values, read in zip((view.weights, *view.states), self.read[header.table :: len(ROWS)], strict=True):
            read[ids] = torch.from_numpy(values.copy())
        self.taken.append(buffer)
        return 0

    def says(self, expected: State) -> bool:
        return all(torch.equal(read, values) for read, values in zip(self.read, expected, strict=True))

    # What may happen, in any order.

    def forward(self, first: list[int], second: list[int]) -> None:
        """A lookup, one bag a table."""
        ids = torch.tensor([*first, *second], dtype=torch.long)
        offsets = torch.tensor([0, len(first), len(first) + len(second)])
        self.pending.append(self.tbe(ids, offsets))

    def backward(self, number: int) -> None:
        if self.pending:
            self.pending.pop(number % len(self.pending)).sum().backward()

    def rewrite(self, table: int, rows: list[int]) -> None:
        """As an eviction does: what the kernel calls in front of a reset of rows, which it has for a GPU alone."""
        if rows:
            ids = torch.tensor(sorted({row % ROWS[table] for row in rows}))
            self.capture.outside.before_rewrite(0, ids + self.kernel.bases[table])
            for values in self.tables()[table :: len(ROWS)]:
                values[ids] = 0

    def load(self) -> None:
        self.capture.outside.before_load()
        for values in self.tables():
            values.add_(1)

    def write_in_place(self) -> None:
        for values in self.tables():
            values.mul_(2)
        self.capture.outside.mark_all()

    def write_unsaid(self, table: int) -> None:
        """Without a word; torch itself refuses the backward of a lookup that was made before."""
        self.pending.clear()
        self.kernel.weights()[table].mul_(2)
        for state in self.kernel.states()[table]:
            state.add_(1)

    def drain(self) -> None:
        """A step boundary: the rest of the cut, or what was touched."""
        if self.cut is None:
            if self.capture.look(due=True):
                self.capture.drain(Drain(1, 1))
        elif self.capture.push(Drain(1, 1)):
            self.finish()

    def freeze(self) -> None:
        if self.cut is None:
            self.cut = [values.clone() for values in self.tables()]
            self.cuts += 1
            self.capture.freeze(Drain(1, 1), self._give_up)

    def _give_up(self, _reason: str) -> None:
        self.given_up += 1
        self.cut = None

    def finish(self) -> None:
        """The stream holds the cut; nothing else."""
        assert self.cut is not None
        assert self.says(self.cut)
        self.capture.frozen.finish()
        self.cut = None

    def log_takes(self, frames: int) -> None:
        for _ in range(min(frames, len(self.taken))):
            self.ring.release(self.taken.popleft())

    def end(self) -> None:
        """A log that takes everything: the cut in flight is exact, and so is one of what is left."""
        for _ in range(2):
            self.freeze()
            for _ in range(sum(ROWS)):
                if self.cut is not None:
                    self.log_takes(9)
                    self.drain()
            assert self.cut is None
        assert self.says(self.tables())


def ids(table: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, ROWS[table] - 1), max_size=4)


EVENTS = st.one_of(
    st.tuples(st.just("forward"), ids(0), ids(1)),
    st.tuples(st.just("backward"), st.integers(0, 3)),
    st.tuples(st.just("backward"), st.integers(0, 3)),
    st.tuples(st.just("rewrite"), st.integers(0, 1), st.lists(st.integers(0, 30), max_size=3)),
    st.tuples(st.just("drain")),
    st.tuples(st.just("freeze")),
    st.tuples(st.just("freeze")),
    st.tuples(st.just("log_takes"), st.integers(1, 4)),
    st.tuples(st.just("load")),
    st.tuples(st.just("write_in_place")),
    st.tuples(st.just("write_unsaid"), st.integers(0, 1)),
)
