"""The state of a kernel outside of rows: counters, learning rates and hyperparameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torchrec.optim.fused import FusedOptimizer

from torchrec_stream_ckpt.model.lookups import Lookups

_HYPERPARAMETERS = (
    "eps",
    "weight_decay",
    "beta1",
    "beta2",
    "momentum",
    "eta",
    "max_gradient",
    "max_norm",
    "counter_halflife",
    "adjustment_iter",
    "adjustment_ub",
    "tail_id_threshold",
    "weight_norm_coefficient",
    "lower_bound",
    "ar_alpha",
    "ema_beta",
    "min_shrinkage",
)
"""Numbers of ``optimizer_args`` that may change while a job runs. The learning rate is a separate scalar. Modes are not
among them: they define which states exist."""


@dataclass(eq=False)
class KernelScalars:
    """Counters, learning rates and hyperparameters of one kernel.

    Args:
        tbe: The kernel.
        optimizer: Sets its learning rate.
        lookups: Its forwards.
        reads_iteration: True if an update depends on ``iteration``.
    """

    tbe: SplitTableBatchedEmbeddingBagsCodegen
    optimizer: FusedOptimizer
    lookups: Lookups
    reads_iteration: bool

    @property
    def iteration(self) -> int:
        """Forward passes that the kernel has counted. Before the first one, the value set by ``set_optimizer_step``."""
        return int(self.tbe.iter_cpu.item()) or int(self.tbe.iter.item())

    @property
    def max_counter(self) -> float:
        """Largest count that counter-based regularization has seen. 1 if it is not used."""
        counter = self._counter()
        return float(counter.item()) if counter is not None else 1.0

    def _counter(self) -> torch.Tensor | None:
        """Return the counter. Returns None for Adam with a bias correction per row, which has none."""
        counter: torch.Tensor | None = getattr(self.tbe, "max_counter", None)
        return counter

    @property
    def learning_rate(self) -> float:
        """Rate that the kernel uses now."""
        return float(self.tbe.get_learning_rate())

    @property
    def next_learning_rate(self) -> float:
        """Rate in the fused optimizer's param group. The kernel takes it over at the next ``step``."""
        return float(self.optimizer.param_groups[0]["lr"])

    @property
    def is_scheduled(self) -> bool:
        """True if a schedule of torch controls the param group: it leaves ``initial_lr`` there."""
        return "initial_lr" in self.optimizer.param_groups[0]

    def put_back(self, iteration: int, max_counter: float, learning_rate: float, next_learning_rate: float) -> None:
        """Restore the values of the properties with these names."""
        # set_optimizer_step() sets only `iter`, while the kernels continue to count in `iter_cpu`.
        self.tbe.iter.fill_(iteration)
        self.tbe.iter_cpu.fill_(iteration)
        self.lookups.forget()
        counter = self._counter()
        if counter is not None:
            counter.fill_(max_counter)
        self.tbe.set_learning_rate(learning_rate)
        self.optimizer.param_groups[0]["lr"] = next_learning_rate

    @property
    def hyperparameters(self) -> dict[str, float]:
        """Numbers that the update reads, such as ``eps`` and ``weight_decay``, without the learning rate."""
        args = self.tbe.optimizer_args
        return {name: getattr(args, name) for name in _HYPERPARAMETERS if hasattr(args, name)}

    def set_hyperparameters(self, values: Mapping[str, float]) -> None:
        """Restore the values of ``hyperparameters``. Values that this FBGEMM does not have are ignored."""
        args = self.tbe.optimizer_args
        names = type(args).__annotations__  # a NamedTuple's fields, in order
        changed = {name: values[name] for name in self.hyperparameters if name in values}
        self.tbe.optimizer_args = type(args)(
            *(changed.get(name, value) for name, value in zip(names, args, strict=True))
        )
