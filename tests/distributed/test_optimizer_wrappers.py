"""What stands around optimizers: warm-up, clipping, an AMP scaler. Their state and the next rates come back exactly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, OptimizerWrapper
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

from tests import warm
from tests.dense_job import Parameters, attach, build, go_on
from tests.model import PLAN_2, PLAN_3, Trainer, batch, differences, trainer, truth
from tests.parts import fused_kernels
from tests.starts import from_both_starts
from torchrec_stream_ckpt import StreamCheckpointer, StreamConfig
from torchrec_stream_ckpt.errors import MarkerFailedError, SchemaMismatchError, UnsupportedError

pytestmark = pytest.mark.distributed

STEPS = 7
MARKERS = (0, 2, 4)
"""Before the first step, in the first stage of the warm-up, in the second one."""


def _warm(optimizer: KeyedOptimizer, lr: float, stages: int = 2) -> WarmupOptimizer:
    both = [
        WarmupStage(policy=WarmupPolicy.LINEAR, max_iters=3, value=0.1),
        WarmupStage(policy=WarmupPolicy.POLY, max_iters=20, value=0.7, decay_iters=30),
    ]
    return WarmupOptimizer(optimizer, both[:stages], lr=lr)


def _clip(optimizer: KeyedOptimizer) -> GradientClippingOptimizer:
    return GradientClippingOptimizer(optimizer, clipping=GradientClipping.NORM, max_gradient=0.05)


def around_each(fused: KeyedOptimizer, dense: KeyedOptimizer) -> KeyedOptimizer:
    return CombinedOptimizer([("fused", _warm(fused, 0.2)), ("dense", _warm(_clip(dense), 0.02))])


def around_all(fused: KeyedOptimizer, dense: KeyedOptimizer) -> KeyedOptimizer:
    return _warm(CombinedOptimizer([fused, _clip(dense)]), 0.03)


def clipping_around_warm_up(fused: KeyedOptimizer, dense: KeyedOptimizer) -> KeyedOptimizer:
    return CombinedOptimizer([fused, _clip(_warm(dense, 0.02))])


def a_shorter_warm_up(fused: KeyedOptimizer, dense: KeyedOptimizer) -> KeyedOptimizer:
    return CombinedOptimizer([("fused", _warm(fused, 0.2)), ("dense", _warm(_clip(dense), 0.02, stages=0))])


NESTS: dict[str, Callable[[KeyedOptimizer, KeyedOptimizer], KeyedOptimizer]] = {
    nest.__name__: nest for nest in (around_each, around_all, clipping_around_warm_up, a_shorter_warm_up)
}


@dataclass
class Seen:
    """All that is compared of a job at one step."""

    state: dict[str, torch.Tensor]
    wrappers: list[tuple[Any, ...]]
    rates: list[float]
    """Of the dense param groups."""
    kernels: set[tuple[float, float]]
    """Learning rates of the fused kernels: now, and from the next step on."""


def _build(nest: str) -> Trainer:
    job = trainer({2: PLAN_2, 3: PLAN_3}[dist.get_world_size()])
    fused, keyed = (optimizer for _, optimizer in job.optimizer.optimizers)
    job.optimizer = NESTS[nest](fused, keyed)
    return job


def _wrappers(optimizer: Any) -> list[tuple[Any, ...]]:
    """What each wrapper holds, outermost first."""
    if isinstance(optimizer, CombinedOptimizer):
        return [found for _, child in optimizer.optimizers for found in _wrappers(child)]
    if isinstance(optimizer, WarmupOptimizer):
        state = {key: value.tolist() for key, value in optimizer.state.get(optimizer._warmup_param, {}).items()}
        return [("warm-up", state), *_wrappers(optimizer._optimizer)]
    if isinstance(optimizer, GradientClippingOptimizer):
        return [("clipping", optimizer._step_num), *_wrappers(optimizer._optimizer)]
    return []


def _look(job: Trainer) -> Seen:
    return Seen(
        truth(job),
        _wrappers(job.optimizer),
        [group["lr"] for group in job.dense.param_groups],
        {(kernel.scalars.learning_rate, kernel.scalars.next_learning_rate) for kernel in fused_kernels(job.dmp)},
    )


def _attach(job: Trainer, uri: str, **stateful: Any) -> StreamCheckpointer:
    settings = StreamConfig(uri=uri, marker_every=None)
    return StreamCheckpointer(
        job.dmp, job.optimizer, config=settings, stateful={"loader": job, **stateful}, paranoid=True
    )


def _train(nest: str, uri: str) -> tuple[dict[int, Seen], list[float]]:
    job = _build(nest)
    with _attach(job, uri) as checkpointer:
        seen, losses = {}, []
        for step in range(STEPS + 1):
            seen[step] = _look(job)
            if step in MARKERS:
                checkpointer.mark().result(60)
            losses.append(job.step())
            checkpointer.step()
        return seen, losses


def _restore(nest: str, uri: str, steps: list[int], stepped: bool) -> list[tuple[Seen, Seen, list[float]]]:
    """The markers of these steps, one job after another: right behind the restore, and at the last step."""
    found = []
    for step in steps:
        job = _build(nest)
        for _ in range(3 * stepped):
            job.step()
        with _attach(job, uri) as checkpointer:
            assert checkpointer.restore((1, MARKERS.index(step) + 1)) is not None
            at_once, losses = _look(job), []
            for _ in range(step, STEPS):
                losses.append(job.step())
                checkpointer.step()
            found.append((at_once, _look(job), losses))
    return found


@pytest.mark.parametrize(
    ("nest", "targets"),
    [
        ("around_each", {2: [0, 2, 4], 3: [4]}),
        ("around_all", {2: [2], 3: [4]}),
        ("clipping_around_warm_up", {2: [4], 3: [0]}),
    ],
)
@pytest.mark.covers(optimizer="in WarmupOptimizer and GradientClippingOptimizer", kernel="fused", pipeline="plain")
def test_wrappers_and_the_next_rates_come_back(nest: str, targets: dict[int, list[int]], tmp_path: Path) -> None:
    uri = f"file://{tmp_path}"
    trained = warm.run(2, _train, nest, uri)
    seen, losses = trained[0]
    assert len({(seen[step].rates[0], *seen[step].kernels) for step in range(STEPS)}) == STEPS
    for world, steps in targets.items():
        fresh, stepped = from_both_starts(warm.run, world, _restore, nest, uri, steps)
        for rank, restored in (*enumerate(fresh), *enumerate(stepped)):
            seen, losses = trained[min(rank, 1)]
            for step, (at_once, later, losses_here) in zip(steps, restored, strict=True):
                assert differences(seen[step].state, at_once.state, rng=rank < 2) == []
                for expected, found in ((seen[step], at_once), (seen[STEPS], later)):
                    assert found.wrappers == expected.wrappers
                    assert found.rates == expected.rates
                    assert found.kernels == expected.kernels
                if world == 2:
                    assert losses_here == losses[step:STEPS]
                    assert differences(seen[STEPS].state, later.state) == []


class Unknown(OptimizerWrapper):
    """Somebody's own wrapper."""


class OwnWarmup(WarmupOptimizer):
    """May keep more than what it is derived from."""


def _refusals(uri: str) -> dict[str, str]:
    said = {}
    settings = StreamConfig(uri=uri, marker_every=None)
    job = trainer(PLAN_2)
    fused, keyed = (optimizer for _, optimizer in job.optimizer.optimizers)
    for name, optimizer in {
        "around dense": CombinedOptimizer([fused, Unknown(keyed)]),
        "around fused": CombinedOptimizer([Unknown(fused), keyed]),
        "derived": CombinedOptimizer([fused, _clip(OwnWarmup(keyed, []))]),
    }.items():
        with pytest.raises(UnsupportedError) as refused:
            StreamCheckpointer(job.dmp, optimizer, config=settings)
        said[name] = str(refused.value)

    job = _build("around_each")
    for _ in range(4):
        job.step()
    with StreamCheckpointer(job.dmp, job.optimizer, config=settings) as checkpointer:
        checkpointer.mark().result(60)
    for nest in ("clipping_around_warm_up", "a_shorter_warm_up"):
        job = _build(nest)
        checkpointer = StreamCheckpointer(job.dmp, job.optimizer, config=settings)
        with pytest.raises(SchemaMismatchError) as mismatch:
            checkpointer.restore()
        said[nest] = str(mismatch.value)
        checkpointer.close()
    return said


def test_other_wrappers_are_refused_by_name(tmp_path: Path) -> None:
    said = warm.run(2, _refusals, f"file://{tmp_path}")[0]
    assert "the optimizer Unknown may have state" in said["around dense"]
    assert "the optimizer Unknown may have state" in said["around fused"]
    assert "the optimizer OwnWarmup may have state" in said["derived"]
    assert (
        "the optimizer wrappers differ: WarmupOptimizer, WarmupOptimizer, GradientClippingOptimizer in the marker, "
        "GradientClippingOptimizer, WarmupOptimizer in this job" in said["clipping_around_warm_up"]
    )
    assert "the marker is in warm-up stage 1, but this job has only 1 stages" in said["a_shorter_warm_up"]


# An AMP scaler is a Stateful like any other.

Scaled = tuple[dict[str, Any], dict[str, torch.Tensor]]


def _scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)


def _scaled_steps(job: Trainer, scaler: torch.amp.GradScaler, checkpointer: StreamCheckpointer, last: int) -> Scaled:
    while job.step_number < last:
        job.step_number += 1
        job.optimizer.zero_grad()
        scaler.scale(job.dmp(*batch(job.step_number))).backward()
        scaler.step(job.dense)
        scaler.update()
        checkpointer.step()
    return scaler.state_dict(), truth(job)


def _scale(uri: str, restore: bool) -> tuple[Scaled, Scaled]:
    """At the marker behind step 3, and behind step 6."""
    job, scaler = trainer(PLAN_2), _scaler()
    with _attach(job, uri, scaler=scaler) as checkpointer:
        if restore:
            assert checkpointer.restore() is not None
            at_marker = scaler.state_dict(), truth(job)
        else:
            at_marker = _scaled_steps(job, scaler, checkpointer, 3)
            checkpointer.mark().result(60)
        return at_marker, _scaled_steps(job, scaler, checkpointer, 6)


def test_an_amp_scaler_goes_on_where_it_was(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}"
    trained = warm.run(2, _scale, uri, False)
    for then, now in zip(trained, warm.run(2, _scale, uri, True), strict=True):
        for (scale, state), (scale_now, state_now) in zip(then, now, strict=True):
            assert scale_now == scale
            assert differences(state, state_now) == []
        assert (then[0][0]["scale"], then[0][0]["_growth_tracker"]) == (8.0, 1)
        assert (then[1][0]["scale"], then[1][0]["_growth_tracker"]) == (32.0, 0)


# State that is a view of an attribute of its optimizer is refused by name: a restore would part the two.


class Flat(torch.optim.Optimizer):
    """Momenta are views of one buffer, which decays as a whole."""

    def __init__(self, parameters: Parameters, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        self.flat = torch.zeros(0)
        self.begin()

    def begin(self) -> None:
        self.flat = torch.zeros(sum(each.numel() for each in self.param_groups[0]["params"]))
        self.place()

    def place(self) -> None:
        at = 0
        for each in self.param_groups[0]["params"]:
            self.state[each]["m"] = self.flat[at : at + each.numel()].view_as(each)
            at += each.numel()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if not self.state:
            Flat.begin(self)
        self.flat.mul_(0.5)
        for each in self.param_groups[0]["params"]:
            each.sub_(self.state[each]["m"].add_(each.grad), alpha=self.param_groups[0]["lr"])


class Late(Flat):
    """Has its buffer from the first step on, in a list."""

    def begin(self) -> None: ...

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        self.buffers = [self.flat]


class Saying(Flat):
    """Has a ``state_dict()`` of its own."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "flat": self.flat}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        flat = state_dict["flat"]
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "flat"})
        self.flat.copy_(flat)
        self.place()


class Apart(Flat):
    """Its attribute has memory of its own."""

    def begin(self) -> None:
        self.scale = torch.ones(2)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for each in self.param_groups[0]["params"]:
            each.sub_(each.grad, alpha=self.param_groups[0]["lr"])


def _said(kind: type[Flat], uri: str) -> str:
    """What refuses the attach, or the marker after a step; nothing if a marker is committed."""
    job = build("SGD")
    job.optimizer = kind(list(job.dmp.module.over.parameters()), 0.05)
    try:
        checkpointer = attach(job, uri)
    except UnsupportedError as error:
        return str(error)
    with checkpointer:
        go_on(job, checkpointer, 1)
        try:
            checkpointer.mark().result(60)
        except MarkerFailedError as error:
            return str(error)
    return ""


def _all_said(uri: str) -> list[str]:
    return [_said(kind, f"{uri}/{kind.__name__}") for kind in (Flat, Late, Saying, Apart)]


def test_state_that_shares_memory_with_an_attribute_is_refused_by_name(tmp_path: Path) -> None:
    text = "state 'm' of over.0.weight shares memory with the optimizer's attribute"
    for flat, late, saying, apart in warm.run(2, _all_said, f"file://{tmp_path}"):
        assert f"the Flat (optimizer0): {text} 'flat'" in flat
        assert f"the Late (optimizer0): {text} '" in late
        assert f"the Saying (optimizer0): {text} 'flat'" in saying
        assert apart == ""
