"""Digests of dense state after a restore has loaded it: of the live tensors, and of what was read for all else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.distributed.tensor import DTensor

from torchrec_stream_ckpt.dense import optimizer_state
from torchrec_stream_ckpt.dense.dense_digests import digests
from torchrec_stream_ckpt.dense.dense_prover import is_saved_here
from torchrec_stream_ckpt.dense.entry_matching import Match
from torchrec_stream_ckpt.dense.live_dense import LiveDense
from torchrec_stream_ckpt.dense.saved_dense import SavedDense


@dataclass(frozen=True, slots=True)
class LoadedDigests:
    """Digests on one rank, by entries of the marker."""

    whole: dict[str, int] = field(default_factory=dict)
    parts: dict[str, int] = field(default_factory=dict)
    """Of this rank's parts of sharded tensors: they add up over ranks."""


def loaded_digests(
    live: LiveDense, saved: SavedDense, match: Match | None, proves: Callable[[str], bool]
) -> LoadedDigests:
    """Digests of what live objects have taken of a marker. Local; what is on a GPU is read back once or twice.

    Args:
        live: The objects of this rank.
        saved: What the marker has, and what this rank has read of it.
        match: What of it a changed model takes; None: all, by the same names.
        proves: Whether an entry can be compared.
    """
    view = live.view()
    parameters = dict(view.named_parameters())
    tensors: dict[str, torch.Tensor] = {
        f"model.{name}": value for name, value in view.state_dict().items() if name in parameters
    }
    tensors |= optimizer_state.named_tensors(live.optimizers, parameters)
    there = match.replicated(tensors) if match is not None else tensors
    there = {name: tensor for name, tensor in there.items() if proves(name) and saved.has_like(name, tensor)}
    parts = {name: tensor for name, tensor in there.items() if isinstance(tensor, DTensor)}
    whole = {name: tensor for name, tensor in there.items() if name not in parts}
    mine = {name: tensor for name, tensor in parts.items() if is_saved_here(tensor)}
    return LoadedDigests({**saved.digests, **digests(whole)}, digests(mine))
