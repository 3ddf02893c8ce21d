"""Digests of dense state after a restore: of live tensors, and of the data read for all other state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from torchrec_stream_ckpt.dense import optimizer_state
from torchrec_stream_ckpt.dense.dense_digests import digests
from torchrec_stream_ckpt.dense.dense_prover import is_saved_here
from torchrec_stream_ckpt.dense.entry_matching import Match
from torchrec_stream_ckpt.dense.live_dense import LiveDense
from torchrec_stream_ckpt.dense.saved_dense import SavedDense
from torchrec_stream_ckpt.format.dense_proof import MODULUS
from torchrec_stream_ckpt.format.entry_digests import id_entry, pairs_digest
from torchrec_stream_ckpt.format.rows import NO_ID


@dataclass(frozen=True, slots=True)
class LoadedDigests:
    """Digests on one rank, by entries of the marker."""

    whole: dict[str, int] = field(default_factory=dict)
    parts: dict[str, int] = field(default_factory=dict)
    """Digests of this rank's parts of sharded tensors. They add up over ranks."""


def loaded_digests(
    live: LiveDense, saved: SavedDense, match: Match | None, proves: Callable[[str], bool]
) -> LoadedDigests:
    """Return digests of the state that live objects took from a marker. Local. GPU tensors are read back once or twice.

    Args:
        live: The objects of this rank.
        saved: The dense state of the marker, and the part that this rank has read.
        match: Parts of it that a changed model takes. If None, all parts by the same names.
        proves: Returns whether an entry can be compared.
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
    return LoadedDigests({**saved.digests, **digests(whole)}, digests(mine) | _map_digests(live, match, proves))


def _map_digests(live: LiveDense, match: Match | None, proves: Callable[[str], bool]) -> dict[str, int]:
    """Return digests of the pairs of row and raw id in this rank's id maps."""
    found: dict[str, int] = {}
    names = match.id_maps if match is not None else None
    for each in live.id_maps:
        table = each.table if names is None else names.get(each.table)
        if table is None or not proves(id_entry(table)):
            continue
        owners = each.owners()
        rows = np.flatnonzero(owners != NO_ID)
        digest = pairs_digest(table, rows + each.row0, owners[rows])
        found[id_entry(table)] = (found.get(id_entry(table), 0) + digest) % MODULUS
    return found
