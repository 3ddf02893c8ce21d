"""``DMP.reshard`` moves rows between ranks in the middle of a job: the stream goes on, in a generation of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torchrec.distributed.sharding_plan import column_wise, construct_module_sharding_plan, table_wise
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.keyed import CombinedOptimizer

from tests import jobs, warm
from tests.model import PLAN_2, PLAN_3, Net, Spec, Trainer, differences, trainer, truth
from tests.parts import FileLog
from torchrec_stream_ckpt import StreamConfig
from torchrec_stream_ckpt.inner import Control

pytestmark = [pytest.mark.distributed, pytest.mark.pitfall(31)]

State = dict[str, torch.Tensor]
SHARDED: Spec = {**PLAN_2, "t_dp": ("tw", 0)}


def _move(job: Trainer, **moved: tuple[str, list[int]]) -> None:
    """Reshard some tables of a live job, and hand the new fused optimizer to the loop, as TorchRec wants it."""
    makers = {"tw": lambda to: table_wise(rank=to[0]), "cw": lambda to: column_wise(ranks=to)}
    world = dist.get_world_size()
    plan = construct_module_sharding_plan(
        Net().ebc,
        {name: makers[kind](to) for name, (kind, to) in {**dict.fromkeys(SHARDED, ("tw", [0])), **moved}.items()},
        sharder=job.dmp._sharder_map[EmbeddingBagCollection],
        local_size=world,
        world_size=world,
        device_type="cpu",
    )
    for parameter in plan.values():
        parameter.compute_kernel = "fused"
    job.dmp.reshard({"ebc": (0.0, {name: plan[name] for name in moved})}, "ebc")
    job.optimizer = CombinedOptimizer([job.dmp.fused_optimizer, job.optimizer.optimizers[-1][1]])


def _train(uri: str, optimizer: str) -> dict[int, State]:
    """Marker -> the truth; rows move between the markers, once and once more."""
    job = trainer(SHARDED, optimizer=optimizer)
    truths: dict[int, State] = {}
    with jobs.attach(job, StreamConfig(uri=uri, marker_every=None)) as checkpointer:

        def steps(count: int) -> None:
            for _ in range(count):
                job.step()
                checkpointer.step()

        def mark() -> None:
            truths[checkpointer.mark().result(60).marker] = truth(job)

        steps(3)
        mark()
        steps(2)
        _move(job, t_user=("tw", [1]), t_wide=("cw", [1, 0]))
        assert checkpointer.generation == 2
        steps(3)
        mark()
        _move(job, t_small=("tw", [0]))
        mark()
        steps(2)
        mark()
    return truths


def _restore(uri: str, optimizer: str, marker: str | None) -> tuple[State, int]:
    world = dist.get_world_size()
    spec: Spec = {**(PLAN_3 if world == 3 else PLAN_2), "t_dp": ("rw", None)}
    job = trainer(spec, optimizer=optimizer)
    job.step()
    with jobs.attach(job, StreamConfig(uri=uri)) as checkpointer:
        restored = checkpointer.restore(marker)
        assert restored is not None
        return truth(job), restored.marker


@pytest.mark.covers(
    kernel="fused", plan="moved by DMP.reshard", module="EmbeddingBagCollection", optimizer="EXACT_ROWWISE_ADAGRAD"
)
@pytest.mark.parametrize("optimizer", ["rowwise", "adagrad"])
def test_markers_around_a_reshard_are_exact(optimizer: str, tmp_path: Path) -> None:
    uri = f"file://{tmp_path}"
    truths = warm.run(2, _train, uri, optimizer)[0]
    layouts = [claim.layout for claim in Control(FileLog(tmp_path)).refresh().claims.values()]
    assert len({layout.crc for layout in layouts if layout is not None}) == len(layouts) == 3
    for world, marker in ((2, None), (3, None), (2, "2:3"), (3, "1:1")):
        state, number = warm.run(world, _restore, uri, optimizer, marker)[0]
        assert differences(truths[number], state, rng=False) == []
