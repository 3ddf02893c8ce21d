"""Restore the gradients of a marker in place: values, zeros, or None."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from torchrec_stream_ckpt.dense.gradients import GRADIENT, INDICES, VALUES, Gradients
from torchrec_stream_ckpt.dense.optimizer_state import empty_like
from torchrec_stream_ckpt.dense.saved_dense import SavedDense
from torchrec_stream_ckpt.model import set_gradient


def load_gradients(
    gradients: Gradients, saved: SavedDense, parameters: Mapping[str, nn.Parameter], entries: Mapping[str, str]
) -> None:
    """Load the gradients of the matched parameters. If an older marker has none, they stay unchanged.

    Args:
        gradients: Notes which gradients were loaded.
        saved: The dense state of the marker.
        parameters: The live parameters, by name.
        entries: Live parameter or buffer -> its name in the marker.
    """
    described = (saved.tree or {}).get("gradients")
    if described is None:
        return
    matched = {there: parameters[name] for name, there in entries.items() if name in parameters}
    loaded = _values(saved, described, matched)
    zeros = set(described["zeros"])
    for name, parameter in matched.items():
        value = torch.zeros_like(parameter) if name in zeros else loaded.get(name)
        set_gradient(parameter, value.detach() if value is not None else None)
    gradients.loaded([matched[name] for name in zeros if name in matched])


def _values(
    saved: SavedDense, described: Mapping[str, Any], parameters: Mapping[str, nn.Parameter]
) -> dict[str, torch.Tensor]:
    """Return the gradients with values in the marker, and sparse ones without values."""
    room = {
        entry: empty_like(saved.entries[entry], parameter if part == GRADIENT else None)
        for name, parameter in parameters.items()
        for part in (GRADIENT, INDICES, VALUES)
        if (entry := f"{part}.{name}") in saved.entries
    }
    read = saved.read(room) if room else {}
    found = {name: read[f"{GRADIENT}.{name}"] for name in parameters if f"{GRADIENT}.{name}" in read}
    for name, said in described["sparse"].items():
        if name in parameters:
            shape, dim = parameters[name].shape, said["dim"]
            indices = torch.empty((dim, 0), dtype=torch.int64)
            values = torch.empty((0, *shape[dim:]), dtype=parameters[name].dtype)
            if said["values"]:
                indices, values = read[f"{INDICES}.{name}"], read[f"{VALUES}.{name}"]
            found[name] = torch.sparse_coo_tensor(indices, values, shape, is_coalesced=said["coalesced"])
    return found
