"""The checks of the attach at every cut: a later change is captured exactly, or the marker is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as torch_optimizer
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

from tests import warm
from tests.dense_job import Keeping
from tests.jobs import attach
from tests.model import PLAN_2, Net, Trainer, batch, differences, trainer, truth
from torchrec_stream_ckpt import StreamCheckpointer, StreamConfig
from torchrec_stream_ckpt.errors import MarkerFailedError

pytestmark = pytest.mark.distributed


class PartlyFrozen(Net):
    """A layer that DDP never holds."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.top[0].requires_grad_(False)


def _job(net: type[Net] = Net) -> Trainer:
    wrapper = DefaultDataParallelWrapper(static_graph=False, find_unused_parameters=True)
    return trainer(PLAN_2, net=net, dropout=0.0, wrapper=wrapper)


def _train(job: Trainer, *others: torch.optim.Optimizer) -> None:
    """One step, of other optimizers too."""
    job.step_number += 1
    for optimizer in (job.optimizer, *others):
        optimizer.zero_grad()
    job.dmp(*batch(job.step_number)).backward()
    for optimizer in (job.optimizer, *others):
        optimizer.step()


# Each change returns optimizers that step from then on.


def unfreeze(job: Trainer) -> Any:
    job.dmp.module.top[0].requires_grad_(True)


def unfreeze_one_bias(job: Trainer) -> Any:
    job.dmp.module.top[0].bias.requires_grad_(True)


def unfreeze_on_one_rank(job: Trainer) -> Any:
    if dist.get_rank() == 1:
        job.dmp.module.top[0].requires_grad_(True)


def add_a_module(job: Trainer) -> Any:
    job.dmp.module.late = nn.Linear(3, 3)
    job.dense.add_param_group({"params": list(job.dmp.module.late.parameters())})


def add_a_trained_buffer(job: Trainer) -> Any:
    job.dmp.module.top.register_buffer("late", torch.zeros(2, requires_grad=True))


def add_a_lazy_buffer(job: Trainer) -> Any:
    job.dmp.module.top.register_buffer("late", nn.parameter.UninitializedBuffer())


def add_a_parameter(job: Trainer) -> Any:
    job.dmp.module.top.register_parameter("late", nn.Parameter(torch.ones(3)))


def replace_a_parameter(job: Trainer) -> Any:
    job.dmp.module.top[0].weight = nn.Parameter(job.dmp.module.top[0].weight.detach().clone())


def replace_a_module(job: Trainer) -> Any:
    job.dmp.module.top[2] = nn.Linear(16, 1)


def remove_a_module(job: Trainer) -> Any:
    del job.dmp.module.top[2]


def remove_ddp(job: Trainer) -> Any:
    job.dmp._dmp_wrapped_module = job.dmp.module


def replace_ddp_by_one_that_ignores_a_layer(job: Trainer) -> Any:
    module = job.dmp.module
    ignored = [name for name, _ in module.named_parameters() if "ebc" in name or "top.0" in name]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ignored)
    job.dmp._dmp_wrapped_module = DistributedDataParallel(module)


def apply_in_backward(job: Trainer) -> Any:
    _apply_optimizer_in_backward(torch.optim.Adam, list(job.dmp.module.top.parameters()), {"lr": 0.01})


def another_optimizer(job: Trainer) -> Any:
    return torch.optim.SGD(job.dmp.module.bottom.parameters(), lr=0.01)


def another_optimizer_in_a_combined_one(job: Trainer) -> Any:
    return CombinedOptimizer([_keyed(job, torch.optim.SGD(job.dmp.module.bottom.parameters(), lr=0.01))])


def a_warm_up(job: Trainer) -> Any:
    return WarmupOptimizer(_keyed(job, job.dense), [WarmupStage(WarmupPolicy.LINEAR, max_iters=9)], lr=0.1)


def another_optimizer_of_a_class_of_its_own(job: Trainer) -> Any:
    return Keeping(list(job.dmp.module.top[2].parameters()), lr=0.01)


def another_optimizer_on_one_rank(job: Trainer) -> Any:
    return torch.optim.Adam(job.dmp.module.bottom.parameters(), lr=0.01) if dist.get_rank() == 1 else None


def _keyed(job: Trainer, optimizer: torch.optim.Optimizer) -> KeyedOptimizerWrapper:
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    named = {name: each for name, each in job.dmp.module.named_parameters() if id(each) in held}
    return KeyedOptimizerWrapper(named, lambda _: optimizer)


def add_to_the_combined_optimizer(job: Trainer) -> Any:
    more = torch.optim.SGD(job.dmp.module.bottom.parameters(), lr=0.01)
    job.optimizer._optims.append(("more", _keyed(job, more)))


def leave_the_combined_optimizer(job: Trainer) -> Any:
    job.optimizer._optims.pop()


def replace_the_wrapped_optimizer(job: Trainer) -> Any:
    (_, keyed) = job.optimizer._optims[1]
    keyed._optimizer = torch.optim.Adam([each for group in job.dense.param_groups for each in group["params"]], lr=0.01)


Change = Callable[[Trainer], Any]
REFUSED: dict[Change, tuple[type[Net], str]] = {
    unfreeze: (PartlyFrozen, "the dense parameter top.0.weight is in neither DDP nor FSDP2"),
    unfreeze_one_bias: (PartlyFrozen, "the dense parameter top.0.bias is in neither DDP nor FSDP2"),
    unfreeze_on_one_rank: (PartlyFrozen, "rank 1: UnsupportedError: the dense parameter top.0."),
    add_a_module: (Net, "the dense parameter late.weight is in neither DDP nor FSDP2"),
    add_a_trained_buffer: (Net, "the buffer top.late has requires_grad"),
    add_a_lazy_buffer: (Net, "the buffer top.late is not initialized"),
    add_a_parameter: (Net, "the dense parameter top.late is not in any optimizer passed to StreamCheckpointer"),
    replace_a_parameter: (Net, "not in the model"),
    replace_a_module: (Net, "of shape (1, 16)"),
    remove_a_module: (Net, "of shape (1, 16)"),
    remove_ddp: (Net, "the dense parameter bottom.0.weight is in neither DDP nor FSDP2"),
    replace_ddp_by_one_that_ignores_a_layer: (Net, "the dense parameter top.0.weight is in neither DDP nor FSDP2"),
    apply_in_backward: (Net, "the dense parameter top.0.weight is updated in the backward"),
    another_optimizer: (Net, "SGD steps bottom.0.weight, but was not passed to StreamCheckpointer"),
    another_optimizer_in_a_combined_one: (Net, "SGD steps bottom.0.weight, but was not passed to"),
    a_warm_up: (Net, "that is not a parameter of the model"),
    another_optimizer_of_a_class_of_its_own: (Net, "Keeping steps top.2.weight, but was not passed to"),
    another_optimizer_on_one_rank: (Net, "rank 1: UnsupportedError: Adam steps bottom.0.weight, but was not passed"),
    add_to_the_combined_optimizer: (Net, "the optimizers passed to StreamCheckpointer changed after the attach"),
    leave_the_combined_optimizer: (Net, "the optimizers passed to StreamCheckpointer changed after the attach"),
    replace_the_wrapped_optimizer: (Net, "the optimizers passed to StreamCheckpointer changed after the attach"),
}
MENDED = {unfreeze_on_one_rank, another_optimizer}
STEPS = {
    another_optimizer,
    another_optimizer_in_a_combined_one,
    a_warm_up,
    another_optimizer_of_a_class_of_its_own,
    another_optimizer_on_one_rank,
}
"""Those whose effect needs a step."""


def _refused(uri: str) -> dict[str, str]:
    """What the marker after each change says. The one before it, and one after it is mended, are committed."""
    said = {}
    for number, (change, (net, _)) in enumerate(REFUSED.items()):
        job = _job(net)
        with attach(job, StreamConfig(uri=f"{uri}/{number}", marker_every=None)) as checkpointer:
            _train(job)
            checkpointer.step()
            checkpointer.mark().result(60)
            other = change(job)
            if change in STEPS:
                _train(job, *([other] if other is not None else []))
                checkpointer.step()
            with pytest.raises(MarkerFailedError) as caught:
                checkpointer.mark().result(60)
            said[change.__name__] = str(caught.value)
            if change in MENDED:
                del other
                if change is unfreeze_on_one_rank:
                    job.dmp.module.top[0].requires_grad_(False)
                checkpointer.mark().result(60)
    return said


def test_a_change_that_no_marker_would_hold_is_refused_by_name_on_all_ranks(tmp_path: Path) -> None:
    for said in warm.run(2, _refused, f"file://{tmp_path}"):
        wrong = {
            change.__name__: said[change.__name__]
            for change, (_, text) in REFUSED.items()
            if text not in said[change.__name__]
        }
        assert wrong == {}
        assert all("Try: " in text for text in said.values())


# What is captured exactly.


def freeze_for_a_while(job: Trainer) -> Any:
    job.dmp.module.top[0].requires_grad_(False)
    job.step()
    job.dmp.module.top[0].requires_grad_(True)


def add_a_buffer(job: Trainer) -> Any:
    job.dmp.module.top.register_buffer("late", torch.arange(3.0))


def replace_ddp(job: Trainer) -> Any:
    module = job.dmp.module
    job.dmp._dmp_wrapped_module = DistributedDataParallel(module)


def wrap_a_layer(job: Trainer) -> Any:
    """A module that joins, and holds nothing of its own."""
    job.dmp.module.top.append(nn.Flatten())


def another_model_trains(job: Trainer) -> Any:
    other = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(other.parameters())
    other(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    job.other = optimizer  # type: ignore[attr-defined]


def another_optimizer_is_gone(job: Trainer) -> Any:
    other = torch.optim.SGD(job.dmp.module.bottom.parameters(), lr=0.01)
    _train(job, other)


def combine_anew(job: Trainer) -> Any:
    """What TorchRec wants after ``DMP.reshard``: the fused optimizer is another one, the dense one is not."""
    job.optimizer = CombinedOptimizer([job.dmp.fused_optimizer, job.optimizer.optimizers[-1][1]])


CAPTURED = (
    combine_anew,
    freeze_for_a_while,
    add_a_buffer,
    replace_ddp,
    wrap_a_layer,
    another_model_trains,
    another_optimizer_is_gone,
)


def _changed(uri: str, restore: bool) -> list[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]]:
    """The truth at the marker after each change, and two steps later."""
    found = []
    for number, change in enumerate(CAPTURED):
        job = _job()
        if restore:
            change(job)
        with attach(job, StreamConfig(uri=f"{uri}/{number}", marker_every=None)) as checkpointer:
            if restore:
                assert checkpointer.restore() is not None
            else:
                job.step()
                checkpointer.step()
                change(job)
                job.step()
                checkpointer.step()
                checkpointer.mark().result(60)
            at = truth(job)
            for _ in range(2):
                job.step()
                checkpointer.step()
            found.append((at, truth(job)))
    return found


def test_a_change_that_markers_hold_comes_back_bit_for_bit(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}"
    then, now = (warm.run(2, _changed, uri, restore) for restore in (False, True))
    for trained, restored in zip(then, now, strict=True):
        for change, one, other in zip(CAPTURED, trained, restored, strict=True):
            assert [differences(*pair) for pair in zip(one, other, strict=True)] == [[], []], change.__name__


# Parameters that join an optimizer.


def _late_group(uri: str, restore: bool) -> Any:
    """A layer that DDP holds is frozen at the attach, and given to the optimizer later."""
    job = _job()
    top = list(job.dmp.module.top[0].parameters())
    for each in top:
        each.requires_grad_(False)
    rest = [each for group in job.dense.param_groups for each in group["params"] if all(each is not p for p in top)]
    job.dense = torch.optim.Adam(rest, lr=0.01)

    def unfreeze() -> None:
        for each in top:
            each.requires_grad_(True)
        job.dense.add_param_group({"params": top, "lr": 0.02})

    def steps(checkpointer: StreamCheckpointer) -> None:
        for _ in range(2):
            job.step_number += 1
            job.dense.zero_grad()
            job.dmp(*batch(job.step_number)).backward()
            job.dense.step()
            checkpointer.step()

    if restore:
        unfreeze()
    config = StreamConfig(uri=uri, marker_every=None)
    with StreamCheckpointer(job.dmp, job.dense, config=config, stateful={"job": job}) as checkpointer:
        if restore:
            assert checkpointer.restore() is not None
        else:
            steps(checkpointer)
            unfreeze()
            steps(checkpointer)
            checkpointer.mark().result(60)
        at = truth(job)
        steps(checkpointer)
        return at, truth(job)


def test_a_param_group_of_parameters_that_ddp_holds_is_captured(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}"
    then, now = (warm.run(2, _late_group, uri, restore) for restore in (False, True))
    for pair, pair_2 in zip(then, now, strict=True):
        assert "dense.top.0.weight.exp_avg" in pair[0]
        assert [differences(*each) for each in zip(pair, pair_2, strict=True)] == [[], []]


# Hooks.


def _two_jobs(uri: str) -> tuple[list[str], tuple[int, int]]:
    """Two jobs in one process: an optimizer that one of them did not get does not disturb the other."""
    before = (len(torch_optimizer._global_optimizer_pre_hooks), len(torch_optimizer._global_optimizer_post_hooks))
    jobs = [_job(), _job()]
    ours = [attach(job, StreamConfig(uri=f"{uri}/{n}", marker_every=None)) for n, job in enumerate(jobs)]
    stranger = torch.optim.SGD(jobs[0].dmp.module.bottom.parameters(), lr=0.01)
    said = []
    for number in range(2):
        for job, checkpointer in zip(jobs[number:], ours[number:], strict=True):
            _train(job, *([stranger] if job is jobs[0] else []))
            checkpointer.step()
            try:
                said.append(checkpointer.mark().result(60).__class__.__name__)
            except MarkerFailedError as error:
                said.append(str(error))
        ours[number].close()
    after = (len(torch_optimizer._global_optimizer_pre_hooks), len(torch_optimizer._global_optimizer_post_hooks))
    return said, (after[0] - before[0], after[1] - before[1])


def test_two_jobs_of_one_process_do_not_disturb_each_other_and_leave_no_hook(tmp_path: Path) -> None:
    for said, left in warm.run(2, _two_jobs, f"file://{tmp_path}"):
        assert "SGD steps bottom.0.weight, but was not passed to" in said[0]
        assert said[1:] == ["Committed", "Committed"]
        assert left == (0, 0)


class Holding(torch.optim.Optimizer):
    """Wraps an optimizer, and saves all of it with its own state, as optimizers do that average weights."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__([each for group in inner.param_groups for each in group["params"]], {"lr": 0.0})
        self.inner = inner

    def step(self, closure: Any = None) -> None:
        self.inner.step()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "inner": self.inner.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict.pop("inner"))
        super().load_state_dict(state_dict)


def _held(uri: str) -> None:
    job = _job()
    optimizer = Holding(job.dense)
    with StreamCheckpointer(job.dmp, optimizer, config=StreamConfig(uri=uri, marker_every=None)) as checkpointer:
        for _ in range(2):
            job.dmp(*batch(1)).backward()
            optimizer.step()
            optimizer.zero_grad()
            checkpointer.step()
            checkpointer.mark().result(60)


def test_an_optimizer_within_one_that_saves_it_was_handed_over(tmp_path: Path) -> None:
    warm.run(2, _held, f"file://{tmp_path}")
