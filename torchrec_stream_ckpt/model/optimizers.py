"""The fused optimizers of FBGEMM: the states of a row, and the changes of a row other than by its gradient.

Every kernel in this table updates only rows that its batch looked up (FBGEMM's optimizers.py: each loops over the
unique valid ids of the batch), some of them even if the gradient is zero. So the ids of a lookup are the exact safe
set. Code that rewrites whole tables on some steps is observed separately (``FusedKernel.on_rewrite``).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen

from torchrec_stream_ckpt.errors import ConfigError


@dataclass(frozen=True, slots=True)
class FusedOptimizer:
    """Properties of one kind of optimizer that the capture needs."""

    states: tuple[str, ...] = ()
    """Names of the states in the order of ``split_optimizer_states()``."""
    reads_iteration: bool = False
    """True if an update depends on the kernel's iteration."""


_MOMENTS = ("exp_avg", "exp_avg_sq")
_KNOWN = {
    "EXACT_SGD": FusedOptimizer(),
    "EXACT_ADAGRAD": FusedOptimizer(("sum",)),
    "EXACT_ROWWISE_ADAGRAD": FusedOptimizer(("sum",)),
    "EMAINPLACE_ROWWISE_ADAGRAD": FusedOptimizer(("sum",), reads_iteration=True),
    "ROWWISE_RMSPROP_AR": FusedOptimizer(("sum", "prev_iter"), reads_iteration=True),
    "ENSEMBLE_ROWWISE_ADAGRAD": FusedOptimizer(("sum", "sparse_ema"), reads_iteration=True),
    "ADAM": FusedOptimizer(_MOMENTS, reads_iteration=True),
    "PARTIAL_ROWWISE_ADAM": FusedOptimizer(_MOMENTS, reads_iteration=True),
    "LAMB": FusedOptimizer(_MOMENTS, reads_iteration=True),
    "PARTIAL_ROWWISE_LAMB": FusedOptimizer(_MOMENTS, reads_iteration=True),
}
_PER_ROW = {
    "EXACT_ROWWISE_ADAGRAD": "sum",
    "EMAINPLACE_ROWWISE_ADAGRAD": "sum",
    "ROWWISE_RMSPROP_AR": "sum",
    "ENSEMBLE_ROWWISE_ADAGRAD": "sum",
    "PARTIAL_ROWWISE_ADAM": "exp_avg_sq",
    "PARTIAL_ROWWISE_LAMB": "exp_avg_sq",
}
"""The state that has one value per row instead of one per weight."""
OPTIMIZERS = {EmbOptimType[name]: kind for name, kind in _KNOWN.items() if name in EmbOptimType.__members__}
"""The optimizers that this FBGEMM has."""


def optimizer_states(name: str) -> dict[str, bool]:
    """Return the states of rows under a fused optimizer, such as ``exact_rowwise_adagrad``: True for one value a row.

    States of its weight decay or bias correction, which follow them, are left out. They have one value a row.

    Raises:
        ConfigError: It is not captured.
    """
    known = {optimizer.name.lower(): kind.states for optimizer, kind in OPTIMIZERS.items()}
    if name not in known:
        raise ConfigError(f"{name!r} is not a supported fused optimizer", hint=f"use one of {', '.join(known)}")
    return {state: _PER_ROW.get(name.upper()) == state for state in known[name]}


def describe(tbe: SplitTableBatchedEmbeddingBagsCodegen) -> FusedOptimizer | None:
    """Return the states of this kernel's optimizer, with the counters of its weight decay.

    Returns None if it is unknown.
    """
    known = OPTIMIZERS.get(tbe.optimizer)
    if known is None:
        return None
    if tbe._used_rowwise_adagrad_with_counter:
        return FusedOptimizer((*known.states, "prev_iter", "row_counter"), reads_iteration=True)
    if tbe._used_rowwise_adagrad_with_global_weight_decay:
        return FusedOptimizer((*known.states, "prev_iter"), reads_iteration=True)
    if tbe.use_rowwise_bias_correction:
        return FusedOptimizer((*known.states, "row_counter"), reads_iteration=True)
    return known


def row_states(tbe: SplitTableBatchedEmbeddingBagsCodegen, names: tuple[str, ...]) -> list[tuple[torch.Tensor, ...]]:
    """Return live views of the optimizer's rows, one tuple per table, shape (rows,) or (rows, columns)."""
    if not names:
        return [() for _ in tbe.embedding_specs]
    tables = [tuple(states) for states in tbe.split_optimizer_states()]
    assert all(len(states) == len(names) for states in tables), f"{tbe.optimizer} has other states than {names}"
    return tables
