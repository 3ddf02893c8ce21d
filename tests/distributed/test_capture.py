"""Whatever a loop does between two markers: no changed row is missed, whole state compared bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import nn
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.train_pipeline import TrainPipelineBase
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from tests import jobs, ranks
from tests.jobs import attach, gradient_accumulation, two_forwards_before_their_backwards
from tests.model import FEATURES, PLAN_2, PLAN_3, Trainer, batch, differences, trainer, truth
from tests.parts import installed
from tests.pool import Pool
from torchrec_stream_ckpt import StreamCheckpointer, StreamConfig
from torchrec_stream_ckpt.errors import UnsupportedError

pytestmark = pytest.mark.distributed


def plain(job: Trainer, checkpointer: StreamCheckpointer) -> None:
    job.step()
    checkpointer.step()


def forward_without_backward(job: Trainer, checkpointer: StreamCheckpointer) -> None:
    plain(job, checkpointer)
    job.dmp(*batch(50))
    checkpointer.step()
    plain(job, checkpointer)


def evaluation(job: Trainer, checkpointer: StreamCheckpointer) -> None:
    plain(job, checkpointer)
    job.dmp.eval()
    with torch.no_grad():
        job.dmp(*batch(51))
    job.dmp.train()
    checkpointer.step()
    plain(job, checkpointer)


def drain_between_forward_and_backward(job: Trainer, checkpointer: StreamCheckpointer) -> None:
    job.optimizer.zero_grad()
    loss = job.dmp(*batch(60))
    checkpointer.step()
    loss.backward()
    job.optimizer.step()
    checkpointer.step()


def an_exception_in_the_middle_of_a_step(job: Trainer, checkpointer: StreamCheckpointer) -> None:
    job.optimizer.zero_grad()
    loss = job.dmp(*batch(66))
    loss.backward()  # tables have changed, dense parameters have not
    checkpointer.step()
    plain(job, checkpointer)


def empty_batches(job: Trainer, checkpointer: StreamCheckpointer) -> None:
    for everywhere in (True, False):
        dense, sparse, label = batch(67)
        if everywhere or dist.get_rank() == 0:
            lengths = torch.zeros_like(sparse.lengths())
            sparse = KeyedJaggedTensor(
                keys=[name for name, _ in FEATURES], values=torch.empty(0, dtype=torch.long), lengths=lengths
            )
        job.optimizer.zero_grad()
        job.dmp(dense, sparse, label).backward()
        job.optimizer.step()
        checkpointer.step()


def loading_a_state_dict(job: Trainer, checkpointer: StreamCheckpointer) -> None:
    before = {name: copy.deepcopy(value) for name, value in job.dmp.state_dict().items()}
    plain(job, checkpointer)
    job.dmp.load_state_dict(before)
    checkpointer.step()


def a_learning_rate_schedule(job: Trainer, checkpointer: StreamCheckpointer) -> None:
    for rate in (0.05, 0.02):
        for group in job.optimizer.param_groups:
            group["lr"] = rate
        plain(job, checkpointer)


def rows_that_stay_hot(job: Trainer, checkpointer: StreamCheckpointer) -> None:
    for _ in range(8):
        job.step_number = 3
        plain(job, checkpointer)


class _Batch(Pipelineable):
    """What TorchRec's pipelines want of a batch."""

    def __init__(self, number: int) -> None:
        self.parts = batch(number)

    def to(self, device: torch.device, non_blocking: bool = False) -> _Batch:
        return self

    def record_stream(self, stream: Any) -> None: ...


class _Piped(torch.nn.Module):
    """The model as a pipeline calls it: one batch in, (loss, output) out."""

    def __init__(self, dmp: torch.nn.Module) -> None:
        super().__init__()
        self.dmp = dmp

    def forward(self, batch: _Batch) -> tuple[torch.Tensor, torch.Tensor]:
        loss = self.dmp(*batch.parts)
        return loss, loss.detach()


def calls_under_another_default_device(job: Trainer, checkpointer: StreamCheckpointer) -> None:
    """As ``torch.set_default_device()`` leaves it: what is the host's stays on the host."""
    for _ in range(3):
        job.step()
        with torch.device("meta"):
            checkpointer.step()
    with torch.device("meta"):
        checkpointer.mark().result(60)
    job.step()
    with torch.device("meta"):
        checkpointer.step()


def train_pipeline_base(job: Trainer, checkpointer: StreamCheckpointer) -> None:
    pipeline = TrainPipelineBase(_Piped(job.dmp), job.optimizer, torch.device("cpu"))
    source = iter([_Batch(number) for number in range(70, 75)])
    for _ in range(5):
        pipeline.progress(source)
        checkpointer.step()


CASES: list[Callable[[Trainer, StreamCheckpointer], None]] = [
    plain,
    forward_without_backward,
    evaluation,
    drain_between_forward_and_backward,
    two_forwards_before_their_backwards,
    gradient_accumulation,
    an_exception_in_the_middle_of_a_step,
    empty_batches,
    loading_a_state_dict,
    a_learning_rate_schedule,
    rows_that_stay_hot,
    calls_under_another_default_device,
    train_pipeline_base,
]


def _do(uri: str, name: str) -> tuple[dict[str, torch.Tensor], list[tuple[int, float, float]]]:
    """A base marker, the case, a second marker: the truth at the second."""
    job = trainer(PLAN_2)
    with jobs.attach(job, StreamConfig(uri=uri, marker_every=None)) as checkpointer:
        plain(job, checkpointer)
        checkpointer.mark().result(60)
        (case,) = (case for case in CASES if case.__name__ == name)
        case(job, checkpointer)
        checkpointer.mark().result(60)
        return truth(job), _scalars(job)


def _scalars(job: Trainer) -> list[tuple[int, float, float]]:
    """Iteration and learning rates of every kernel: state that no state_dict holds."""
    from tests.parts import fused_kernels

    scalars = [kernel.scalars for kernel in fused_kernels(job.dmp)]
    return [(each.iteration, each.learning_rate, each.next_learning_rate) for each in scalars]


def _restore(uri: str) -> tuple[dict[str, torch.Tensor], list[tuple[int, float, float]]]:
    job = trainer(PLAN_3 if dist.get_world_size() == 3 else PLAN_2)
    job.step()
    with jobs.attach(job, StreamConfig(uri=uri)) as checkpointer:
        assert checkpointer.restore() is not None
        return truth(job), _scalars(job)


PITFALLS = {
    drain_between_forward_and_backward: (1,),
    evaluation: (3,),
    forward_without_backward: (3, 24, 25),
}
PIPELINES = {plain: "plain", train_pipeline_base: "TrainPipelineBase"}


def _marked(case: Callable[[Trainer, StreamCheckpointer], None]) -> Any:
    """The case as a parameter, with what docs/coverage.md says of it."""
    pipeline = PIPELINES.get(case) or f"plain: {case.__name__.replace('_', ' ')}"
    cell = {"optimizer": "EXACT_ROWWISE_ADAGRAD", "kernel": "fused", "module": "EmbeddingBagCollection"}
    plan = "table-, row-, column-wise and data-parallel in one"
    marks = [pytest.mark.covers(**cell, plan=plan, pipeline=pipeline), pytest.mark.pitfall(*PITFALLS.get(case, ()))]
    return pytest.param(case.__name__, marks=marks)


@pytest.mark.parametrize("name", [_marked(case) for case in CASES])
def test_no_changed_row_is_missed(name: str, pool: Pool, tmp_path: Path) -> None:
    uri = f"file://{tmp_path}"
    done = pool.run(2, _do, uri, name)
    for rank, (state, scalars) in enumerate(pool.run(2, _restore, uri)):
        assert differences(done[rank][0], state) == []
        assert scalars == done[rank][1]
    assert differences(done[0][0], pool.run(3, _restore, uri)[0][0]) == []


# A TorchRec or FBGEMM that lacks what the capture hooks into is refused at attach, before anything is hooked.


def _hooks(job: Trainer) -> list[str]:
    """What hangs on the kernels and on the sharded module."""
    hooked = [name for module in job.dmp.modules() for name in _of(module)]
    for lookup in job.dmp.module.ebc._lookups:
        hooked += [name for kernel in lookup.modules() for name in _of(kernel)]
    return hooked


def _of(module: nn.Module) -> list[str]:
    patched = {"ema_inplace", "ensemble_and_swap", "reset_embedding_weight_momentum", "reshard"} & vars(module).keys()
    return [*patched, *map(str, module._forward_hooks), *map(str, module._load_state_dict_pre_hooks)]


def _attach_without_hook_points(uri: str) -> tuple[list[str], int]:
    """What the refusals say where rank 1 lacks something, and how many hooks an attach really sets."""
    said = []
    job = trainer(PLAN_2)
    before = _hooks(job)
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.delattr(SplitTableBatchedEmbeddingBagsCodegen, "ema_inplace")
        with pytest.raises(UnsupportedError) as caught:
            attach(job, StreamConfig(uri=uri))
        said.append(str(caught.value))
        assert _hooks(job) == before
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            embeddings: ShardedEmbeddingBagCollection = job.dmp.module.ebc
            patch.setattr(embeddings, "_lookups_of_tomorrow", embeddings._lookups, raising=False)
            patch.delattr(embeddings, "_lookups")
        with pytest.raises(UnsupportedError) as caught:
            attach(job, StreamConfig(uri=uri))
        said.append(str(caught.value))
    assert _hooks(job) == before
    with attach(job, StreamConfig(uri=uri)) as checkpointer:
        job.step()
        checkpointer.step()
        hooked = len(_hooks(job)) - len(before)
        assert checkpointer.mark().result(60).step == 1
    return said, hooked


@pytest.mark.pitfall(34)
def test_missing_hook_point_on_one_rank_is_refused_on_all_and_hooks_nothing(tmp_path: Path) -> None:
    for said, hooked in ranks.run(2, _attach_without_hook_points, f"file://{tmp_path}"):
        method, lookups = said
        assert "has no ema_inplace" in method
        assert "has no _lookups," in lookups
        assert "module=ebc" in lookups
        assert f"found {installed()}" in method
        assert hooked > 0
