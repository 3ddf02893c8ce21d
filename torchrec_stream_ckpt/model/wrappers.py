"""TorchRec's optimizer wrappers: the optimizers that they hold, and their own state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import HierarchicalModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torchrec.optim.clipping import GradientClippingOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.warmup import WarmupOptimizer

from torchrec_stream_ckpt.errors import SchemaMismatchError, UnsupportedError

State = dict[str, Any]


def walk(optimizer: Any) -> Iterator[Any]:
    """Yield an optimizer and all optimizers that it wraps or combines, outermost first."""
    yield optimizer
    if isinstance(optimizer, CombinedOptimizer):
        for _, child in optimizer.optimizers:
            yield from walk(child)
    elif type(optimizer) in (WarmupOptimizer, GradientClippingOptimizer, KeyedOptimizerWrapper):
        yield from walk(optimizer._optimizer)
    elif type(optimizer) is PostLocalSGDOptimizer:
        yield from walk(optimizer.optim)


def is_wrapper(optimizer: Any) -> bool:
    """Return whether :func:`wrapper_states` takes its own state, and nothing else of it is taken.

    Raises:
        UnsupportedError: It is post-local SGD with an averager whose state is unknown.
    """
    if type(optimizer) is PostLocalSGDOptimizer:
        averager = type(optimizer.averager)
        if averager not in (PeriodicModelAverager, HierarchicalModelAverager):
            raise UnsupportedError(
                f"the state of PostLocalSGDOptimizer's averager {averager.__name__} is not captured",
                hint="use torch's PeriodicModelAverager or HierarchicalModelAverager, whose only state is a counter",
            )
    return isinstance(optimizer, (WarmupOptimizer, GradientClippingOptimizer, PostLocalSGDOptimizer))


def wrapper_states(optimizer: torch.optim.Optimizer | None) -> list[State]:
    """Return the states of the wrappers, in the order of :func:`walk`: the same on all ranks, whatever the plan.

    A wrapper around ``dmp.fused_optimizer`` has no place for its state in any ``state_dict``.
    """
    return [_state(wrapper) for wrapper in _wrappers(optimizer)]


def wrapper_parameters(optimizer: torch.optim.Optimizer | None) -> list[torch.Tensor]:
    """Return parameters that wrappers created.

    :func:`wrapper_states` saves the values below them in the shared state.
    """
    return [wrapper._warmup_param for wrapper in _wrappers(optimizer) if isinstance(wrapper, WarmupOptimizer)]


def check_wrappers(optimizer: torch.optim.Optimizer | None, saved: list[State]) -> None:
    """Compare a job's wrappers with those of a marker.

    Raises:
        SchemaMismatchError: The job has others, or the warm-up has fewer stages than the marker has reached.
    """
    wrappers = list(_wrappers(optimizer))
    there, here = [state["class"] for state in saved], [type(wrapper).__name__ for wrapper in wrappers]
    if there != here:
        raise SchemaMismatchError(
            f"the optimizer wrappers differ: {', '.join(there) or 'none'} in the marker, "
            f"{', '.join(here) or 'none'} in this job",
            hint="wrap the optimizers in the same way and order as the job that wrote the marker",
        )
    for wrapper, state in zip(wrappers, saved, strict=True):
        if isinstance(wrapper, WarmupOptimizer) and state["stage"] >= len(wrapper._stages):
            raise SchemaMismatchError(
                f"the marker is in warm-up stage {state['stage']}, but this job has only {len(wrapper._stages)} stages",
                hint="pass WarmupOptimizer the stages of the job that wrote the marker",
            )


def load_wrapper_states(optimizer: torch.optim.Optimizer | None, saved: list[State]) -> None:
    """Restore the result of :func:`wrapper_states`. The rates that warm-up has set are in the param groups."""
    for wrapper, state in zip(_wrappers(optimizer), saved, strict=True):
        if isinstance(wrapper, WarmupOptimizer):
            at = (state["iteration"], state["stage"])
            wrapper.state.pop(wrapper._warmup_param, None)
            if at != (0, 0):  # before its first step it has none
                wrapper.state[wrapper._warmup_param] = {"warmup": torch.tensor(at, dtype=torch.long, device="cpu")}
        elif isinstance(wrapper, PostLocalSGDOptimizer):
            wrapper.averager.step = state["steps"]
        else:
            wrapper._step_num = state["steps"]


def _wrappers(optimizer: Any) -> Iterator[Any]:
    for part in walk(optimizer):
        if is_wrapper(part):
            yield part


def _state(wrapper: Any) -> State:
    """Return plain values. Clipping's last gradient norm is not state: the next step replaces it without reading it."""
    if isinstance(wrapper, WarmupOptimizer):
        iteration, stage = wrapper._get_warmup_state()
        return {"class": type(wrapper).__name__, "iteration": iteration, "stage": stage}
    steps = wrapper.averager.step if isinstance(wrapper, PostLocalSGDOptimizer) else wrapper._step_num
    return {"class": type(wrapper).__name__, "steps": steps}
