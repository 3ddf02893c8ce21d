"""Hyperparameters: the marker's values are used, and values of the code that differ are reported in one line.

The rule is the same for all. Learning rates, ``eps``, weight decay and the like, of dense param groups and of fused
kernels, are restored from the marker, because schedules and callers change them while a job runs. To use another value,
set it after ``restore()``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from torchrec_stream_ckpt.errors import ConfigError, SchemaMismatchError
from torchrec_stream_ckpt.model import FusedKernel
from torchrec_stream_ckpt.util.types import grouped

_SCHEDULED = {"lr", "momentum", "betas"}
"""Settings that a schedule changes in its groups. They are restored with the schedule."""
Values = dict[str, dict[str, float]]
"""Values by table."""


def fused_values(kernels: Iterable[FusedKernel]) -> Values:
    """Return the hyperparameters of this rank's kernels, without learning rates, which are in MARK.

    Raises:
        ConfigError: A learning rate is not finite: MARK cannot hold it. Names the tables.
    """
    values: Values = {}
    for kernel in kernels:
        tables = [shard.table.name for shard in kernel.held]
        for rate in (kernel.scalars.learning_rate, kernel.scalars.next_learning_rate):
            if tables and not -float("inf") < rate < float("inf"):
                raise ConfigError(
                    f"the fused optimizer's learning rate must be finite, got {rate}",
                    hint="set a finite learning rate before the next marker",
                    tables=", ".join(tables),
                )
        values |= dict.fromkeys(tables, kernel.scalars.hyperparameters)
    return values


def set_fused_values(kernels: Iterable[FusedKernel], saved: Iterable[Values]) -> None:
    """Set each kernel's hyperparameters to those of its tables, from all ranks of a marker.

    Raises:
        SchemaMismatchError: Tables of one kernel had different ones.
    """
    for kernel, found in _of_kernels(kernels, saved):
        _check_alike(kernel, found)
        if found:
            kernel.scalars.set_hyperparameters(found[0])


def check_fused_values(kernels: Iterable[FusedKernel], saved: Iterable[Values]) -> Iterator[SchemaMismatchError]:
    """Yield the errors that :func:`set_fused_values` would raise."""
    for kernel, found in _of_kernels(kernels, saved):
        try:
            _check_alike(kernel, found)
        except SchemaMismatchError as error:
            yield error


def _of_kernels(kernels: Iterable[FusedKernel], saved: Iterable[Values]) -> Iterator[tuple[FusedKernel, list[Any]]]:
    everywhere = grouped(pair for values in saved for pair in values.items())
    for kernel in kernels:
        yield kernel, [each for shard in kernel.held for each in everywhere.get(shard.table.name, ())]


def _check_alike(kernel: FusedKernel, found: list[dict[str, float]]) -> None:
    for each in found[1:]:
        for name in sorted(each.keys() & found[0].keys()):
            if repr(each[name]) != repr(found[0][name]):
                raise SchemaMismatchError(
                    f"tables that share a kernel under this plan have different {name} in the marker: "
                    f"{found[0][name]}, {each[name]}",
                    hint="change the plan so that tables with different settings do not share a kernel",
                    tables=", ".join(shard.table.name for shard in kernel.held),
                )


def given(kernels: Iterable[FusedKernel], optimizers: Mapping[str, torch.optim.Optimizer]) -> dict[str, str]:
    """Return all hyperparameters of this rank as text: set by the code, or by the marker. Name -> value.

    Settings of a schedule are left out: the code sets the beginning of the schedule, so they differ after each restart.
    """
    found = {}
    for kernel in kernels:
        first = next((shard for shard in kernel.held if not shard.row0), None)
        if first is not None:  # tables that share a kernel share all of these
            rates = {} if kernel.scalars.is_scheduled else {"lr": kernel.scalars.next_learning_rate}
            for name, value in {**rates, **kernel.scalars.hyperparameters}.items():
                found[f"{first.table.name} {name}"] = repr(value)
    for key, optimizer in optimizers.items():
        for number, group in enumerate(optimizer.param_groups):
            for name in group.keys() - {"params"} - (_SCHEDULED if "initial_lr" in group else set()):
                found[f"{key} group {number} {name}"] = _text(group[name])
    return found


def told(code: Mapping[str, str], marker: Mapping[str, str]) -> str:
    """Describe the differences, with both values each. Empty if all are equal."""
    different = [name for name in sorted(code) if name in marker and code[name] != marker[name]]
    return "; ".join(f"{name} {marker[name]}, not {code[name]}" for name in different)


def _text(value: Any) -> str:
    return repr(value.tolist() if isinstance(value, torch.Tensor) else value)
