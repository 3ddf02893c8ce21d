"""Non-tensor state of modules and wrappers: taken for a marker, or rejected by the name of its owner."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from torchrec_stream_ckpt.dense.stateful_objects import blob_of, try_blob_of
from torchrec_stream_ckpt.errors import StreamCkptError, UnsupportedError

WRAPPERS = "the optimizer's wrappers"
"""Name of their state in messages."""
_EXTRA = "_extra_state"


def model_state(view: nn.Module) -> dict[str, Any]:
    """Return the current ``state_dict()`` of the dense model.

    Raises:
        UnsupportedError: It fails. Names the module.
    """
    try:
        return view.state_dict()
    except StreamCkptError:
        raise
    except Exception as error:  # whatever the user's code raises
        found = next(_failing(view), "the state_dict() of the model")
        raise UnsupportedError(
            f"{found} fails: {type(error).__name__}: {error}",
            hint="make it callable at any step boundary after the attach",
        ) from error


def buffers_blob(view: nn.Module, buffers: Mapping[str, Any]) -> torch.Tensor:
    """Encode buffers and extra state of the modules.

    Raises:
        UnsupportedError: Something cannot be pickled. Names the module.
    """
    try:
        return blob_of("the buffers of the model", buffers)
    except UnsupportedError:
        for name, value in buffers.items():
            try_blob_of(_title(view, name), value)
        raise


def try_extra_state(view: nn.Module, state: Mapping[str, Any]) -> None:
    """Raise the errors that :func:`buffers_blob` would raise for non-tensor values in the state of a model."""
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            try_blob_of(_title(view, name), value)


def _title(view: nn.Module, name: str) -> str:
    path, _, key = name.rpartition(".")
    module = dict(view.named_modules()).get(path)
    owner = f"module '{path}' ({type(module).__name__})"
    return f"the extra state of {owner}" if key == _EXTRA else f"'{key}' in the state_dict() of {owner}"


def _failing(view: nn.Module) -> Iterator[str]:
    """Yield the modules whose extra state cannot be taken."""
    for path, module in view.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            try:
                module.get_extra_state()
            except Exception:  # whatever the user's code raises
                yield f"get_extra_state() of module '{path}' ({type(module).__name__})"
