"""What markers prove: digests of the live rows of the boundary, window after window, over restarts and plans."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import ranks
from tests.jobs import attach
from tests.model import PLAN_2, Spec, trainer, truth
from tests.plain_proof import Said, Shards, in_window, plain_digest, plain_digests, said_in, shards_of
from torchrec_stream_ckpt import StreamConfig
from torchrec_stream_ckpt.adapter import fused_kernels
from torchrec_stream_ckpt.format.proof import BLOCK_ROWS, POSITIONS

pytestmark = pytest.mark.distributed

SMALL = 9_000
"""Bytes of a window: about a quarter of what the tables of a rank take."""


def _train(uri: str, spec: Spec, build: dict[str, Any], proof_bytes: int) -> dict[int, tuple[Shards, dict[str, Any]]]:
    """Four markers; by marker, this rank's shards and the truth at its boundary."""
    job = trainer(spec, **build)
    found = {}
    with attach(job, StreamConfig(uri=uri, marker_every=None, drain_every=2, proof_bytes=proof_bytes)) as checkpointer:
        checkpointer.restore()
        kernels = fused_kernels(job.dmp)
        for _ in range(4):
            for _ in range(3):
                job.step()
                checkpointer.step()
            future = checkpointer.mark()
            state = shards_of(kernels), truth(job)
            found[future.result(60).marker] = state
            job.step()  # later steps change what later markers say alone
            checkpointer.step()
    return found


def _numbers(said: Said) -> list[list[list[int]]]:
    """By shard, block and section, as the page says that they stand."""
    proof = said.mark.proof
    assert proof is not None
    numbers, found = iter(proof.numbers().tolist()), []
    for shard in said.hello.shards:
        table = said.hello.schema.tables[shard.table]
        first, last = shard.row0 // BLOCK_ROWS, (shard.row0 + shard.rows - 1) // BLOCK_ROWS
        blocks = [block for block in range(first, last + 1) if in_window(proof.window, table.id or 0, block)]
        found.append([[next(numbers) for _ in range(1 + len(table.states))] for _ in blocks])
    assert not list(numbers)
    return found


@pytest.mark.parametrize(
    "build",
    [
        pytest.param({"optimizer": "rowwise"}, id="rowwise"),
        pytest.param({"optimizer": "adagrad", "dtype": "fp16"}, id="adagrad fp16"),
    ],
)
@pytest.mark.parametrize("proof_bytes", [SMALL, 2**22])
def test_each_rank_proves_its_live_rows_of_the_boundary(
    build: dict[str, Any], proof_bytes: int, tmp_path: Path
) -> None:
    uri = f"file://{tmp_path}"
    by_rank = ranks.run(2, _train, uri, PLAN_2, build, proof_bytes)
    for said in said_in(uri):
        shards, state = by_rank[said.rank][said.commit.marker]
        assert said.mark.proof is not None
        window = said.mark.proof.window
        assert (window.width == POSITIONS) == (proof_bytes > SMALL)
        assert _numbers(said) == plain_digests(shards, said.hello.schema, window)
        assert bool(said.mark.proof.replicated) == (said.rank == 0)
        for each in said.mark.proof.replicated:
            kind, name = each.name.split(".", 1)
            tensor = state[each.name if kind == "model" else f"dense.{name.split('.', 1)[1]}"]
            assert (each.rows, each.cols) == tuple(tensor.shape)
            blocks = [block for block in range(-(-each.rows // BLOCK_ROWS)) if in_window(window, each.id, block)]
            expected = [plain_digest(tensor, block, each.id, 0, 0, 0, each.cols, per_row=False) for block in blocks]
            assert each.numbers().tolist() == expected
