"""What markers prove: digests of the live rows of the boundary, window after window, over restarts and plans."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests import zoo
from tests.command import run
from tests.laps import config
from tests.parts import fused_kernels
from tests.plain_proof import Said, Shards, in_window, plain_digest, plain_digests, said_in, shards_of
from tests.pool import Pool
from tests.zoo import MARK
from tests.zoo_models import OPTIMIZERS, Job, Model, Part, Place, Plan, Table
from torchrec_stream_ckpt import StreamCheckpointer, StreamConfig
from torchrec_stream_ckpt.errors import MarkerFailedError
from torchrec_stream_ckpt.format.proof import BLOCK_ROWS, POSITIONS, Window, replicated_id
from torchrec_stream_ckpt.util.types import MarkerId

pytestmark = pytest.mark.distributed

BAGS = (
    Table("t_tw", 150, 8, ("a",), dtype="fp16"),
    Table("t_few", 2, 8, ("c",)),
    Table("t_rw", 200, 8, ("b",)),
    Table("t_cw", 130, 32, ("d",)),
    Table("t_dp", 70, 4, ("e",)),
)
SEQUENCES = (Table("s_rw", 140, 12, ("f",)),)
PLACES = {
    2: (Place("tw", (1,)), Place("rw"), Place("rw"), Place("cw", (0, 1)), Place("dp"), Place("rw")),
    3: (Place("tw", (2,)), Place("rw"), Place("rw"), Place("cw", (2, 0)), Place("dp"), Place("rw")),
}
"""Some ranks hold no row of ``t_few``.

It is not the last table of its kernel: on a CPU, FBGEMM looks for the rows of an empty table in the following ones,
and for the last one it reads past the end of a list ("more than 2B rows" is what it found there).
"""

Found = dict[str, tuple[Shards, dict[str, torch.Tensor]]]
"""Marker -> this rank's shards, and the truth, at its boundary."""


def model(optimizer: str) -> Model:
    return Model((Part("ebc", BAGS), Part("ec", SEQUENCES)), optimizer)


def plan(world: int) -> Plan:
    return Plan(world, world, PLACES[world])


def play(job: Job, checkpointer: StreamCheckpointer, events: tuple[str, ...]) -> Found:
    """As ``zoo.play``, with the shards of this rank at each marker."""
    found, kernels = {}, fused_kernels(job.dmp)
    for event in events:
        if event == MARK:
            future = checkpointer.mark()
            state = shards_of(kernels), zoo.truth(job)
            found[str(future.result(60).id)] = state
        else:
            zoo.play(job, checkpointer, (event,))
    return found


def go_on(described: Model, where: StreamConfig, events: tuple[str, ...], marker: str | None = None) -> Found:
    """A job on as many ranks as there are; it restores what is there."""
    job = zoo.build(described, plan(torch.distributed.get_world_size()))
    with zoo.attach(job, where) as checkpointer:
        checkpointer.restore(marker)
        return play(job, checkpointer, events)


def numbers(said: Said) -> list[list[list[int]]]:
    """What a rank has said, by shard, block and section as the page has them."""
    proof = said.mark.proof
    assert proof is not None
    digests, found = iter(proof.numbers().tolist()), []
    for shard in said.hello.shards:
        table = said.hello.schema.tables[shard.table]
        first, last = shard.row0 // BLOCK_ROWS, (shard.row0 + shard.rows - 1) // BLOCK_ROWS
        blocks = [block for block in range(first, last + 1) if in_window(proof.window, table.id or 0, block)]
        found.append([[next(digests) for _ in range(1 + len(table.states))] for _ in blocks])
    assert not list(digests)
    return found


def replicated(said: Said) -> dict[str, list[int]]:
    assert said.mark.proof is not None
    return {each.name: each.numbers().tolist() for each in said.mark.proof.replicated}


def expected_replicated(state: dict[str, torch.Tensor], window: Window) -> dict[str, list[int]]:
    """Of the truth: the table that all ranks hold, and what Adam keeps of its rows."""
    name = "part0.embedding_bags.t_dp.weight"
    tensors = {f"model.{name}": state[f"model.{name}"]}
    tensors |= {f"optim.optimizer0.{name}.{key}": state[f"dense.{name}.{key}"] for key in ("exp_avg", "exp_avg_sq")}
    found = {}
    for entry, tensor in tensors.items():
        id_ = replicated_id(entry)
        blocks = [block for block in range(-(-len(tensor) // BLOCK_ROWS)) if in_window(window, id_, block)]
        found[entry] = [plain_digest(tensor, block, id_, 0, 0, 0, tensor.shape[1], per_row=False) for block in blocks]
    return found


def windows(uri: str) -> dict[MarkerId, Window]:
    """Of each committed marker; all of its ranks have the same."""
    found: dict[MarkerId, Window] = {}
    for said in said_in(uri):
        assert said.mark.proof is not None
        assert found.setdefault(said.commit.id, said.mark.proof.window) == said.mark.proof.window
    return found


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_each_rank_proves_its_live_rows_of_the_boundary(optimizer: str, pool: Pool, tmp_path: Path) -> None:
    where = config(tmp_path, proof_bytes=6_000, drain_every=2)
    events = ("train", "two_forwards", MARK, "train", "evaluate", MARK, "skip_backward", "train", MARK)
    by_rank: list[Found] = pool.run(3, go_on, model(optimizer), where, events)
    told = list(said_in(where.uris[0]))
    assert len(told) == 9
    for said in told:
        shards, state = by_rank[said.rank][str(said.commit.id)]
        assert said.mark.proof is not None
        window = said.mark.proof.window
        assert 0 < window.width < POSITIONS
        assert numbers(said) == plain_digests(shards, said.hello.schema, window)
        assert replicated(said) == (expected_replicated(state, window) if said.rank == 0 else {})


def test_a_small_job_proves_all_of_itself_at_each_marker(pool: Pool, tmp_path: Path) -> None:
    where = config(tmp_path)
    (found,) = pool.run(1, small, where, ("train", MARK, "train", MARK))
    for said in said_in(where.uris[0]):
        shards, _ = found[str(said.commit.id)]
        assert said.mark.proof is not None
        assert said.mark.proof.window.width == POSITIONS
        assert numbers(said) == plain_digests(shards, said.hello.schema, said.mark.proof.window)
        assert [len(blocks) for blocks in numbers(said)] == [3]


def test_without_proofs_a_marker_says_nothing(pool: Pool, tmp_path: Path) -> None:
    where = config(tmp_path, proof_bytes=0)
    pool.run(1, small, where, ("train", MARK))
    assert [said.mark.proof for said in said_in(where.uris[0])] == [None]


ONE = Model((Part("ebc", (Table("t", 150, 8, ("a",)),)),), "rowwise_adagrad")


def small(where: StreamConfig, events: tuple[str, ...]) -> Found:
    job = zoo.build(ONE, Plan(1, 1, (Place("tw", (0,)),)))
    with zoo.attach(job, where) as checkpointer:
        checkpointer.restore()
        return play(job, checkpointer, events)


class Failing:
    """A Stateful whose state cannot be had at some calls."""

    def __init__(self, at: set[int]) -> None:
        self.calls = 0
        self.at = at

    def state_dict(self) -> dict[str, Any]:
        self.calls += 1
        if self.calls in self.at:
            raise RuntimeError("not now")
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def _some_fail(where: StreamConfig) -> list[bool]:
    job = zoo.build(ONE, Plan(1, 1, (Place("tw", (0,)),)))
    handed = {"failing": Failing({3, 4})}  # its first call is at the attach
    outcomes = []
    with StreamCheckpointer(job.dmp, job.optimizer, config=where, stateful=handed) as checkpointer:
        for _ in range(6):
            zoo.play(job, checkpointer, ("train",))
            error = checkpointer.mark().exception(60)
            assert error is None or isinstance(error, MarkerFailedError)
            outcomes.append(error is None)
        stats = checkpointer.stats()
    assert stats.proof_round_markers == 3
    assert (stats.proved_ratio, stats.oldest_proof_markers) == (1.0, 2)
    return outcomes


def test_a_marker_that_fails_does_not_move_the_window(pool: Pool, tmp_path: Path) -> None:
    where = config(tmp_path, proof_bytes=2_000)
    assert pool.run(1, _some_fail, where) == [[True, False, False, True, True, True]]
    found = windows(where.uris[0])
    width = next(iter(found.values())).width
    assert [window.position for window in found.values()] == [at * width % POSITIONS for at in range(4)]


def _changed_past_hooks(where: StreamConfig) -> Shards:
    job = zoo.build(ONE, Plan(1, 1, (Place("tw", (0,)),)))
    with StreamCheckpointer(job.dmp, job.optimizer, config=where) as checkpointer:
        zoo.play(job, checkpointer, ("train",))
        (kernel,) = fused_kernels(job.dmp)
        kernel.weights()[0].data[149, 7] += 1.0  # its tensor counts no version
        checkpointer.mark().result(60)
        return shards_of([kernel])


def test_a_row_that_was_changed_past_all_hooks_is_in_the_proof(pool: Pool, tmp_path: Path) -> None:
    where = config(tmp_path)
    (shards,) = pool.run(1, _changed_past_hooks, where)
    (said,) = said_in(where.uris[0])
    assert said.mark.proof is not None
    assert numbers(said) == plain_digests(shards, said.hello.schema, said.mark.proof.window)


def test_windows_go_on_over_restarts_on_other_ranks_from_log_and_store(pool: Pool, tmp_path: Path) -> None:
    where = config(tmp_path, proof_bytes=6_000)
    (uri,), described = where.uris, model("rowwise_adagrad")
    pool.run(2, go_on, described, where, ("train", MARK, "train", MARK))
    pool.run(3, go_on, described, where, ("train", MARK, "train", MARK))
    run("materialize", uri, "--once")
    pool.run(2, go_on, described, where, ("train", MARK))
    path, found = ["1:1", "1:2", "2:3", "2:4", "3:5"], {str(marker): each for marker, each in windows(uri).items()}
    assert list(found) == path
    assert found["1:1"].position == 0
    assert found["1:1"].width != found["2:3"].width  # three ranks hold less each
    assert [found[before].next for before in path[:-1]] == [found[after].position for after in path[1:]]
    pool.run(3, go_on, described, where, ("train", MARK), "2:3")
    branch = windows(uri)[MarkerId(4, 4)]
    assert branch.position == found["2:3"].next


def test_a_job_that_had_no_proofs_begins_to_prove_itself(pool: Pool, tmp_path: Path) -> None:
    pool.run(1, small, config(tmp_path, proof_bytes=0), ("train", MARK))
    where = config(tmp_path, proof_bytes=2_000)
    pool.run(1, small, where, ("train", MARK, "train", MARK))
    first, second, third = (said.mark.proof for said in said_in(where.uris[0]))
    assert first is None
    assert second is not None
    assert third is not None
    assert (second.position, third.position) == (0, second.window.next)
