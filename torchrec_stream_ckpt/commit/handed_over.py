"""The user's own objects: a loader, a schedule, a scaler, whose state a marker has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist

from torchrec_stream_ckpt.commit.canonical import Canonical
from torchrec_stream_ckpt.commit.dcp import blob
from torchrec_stream_ckpt.errors import UnsupportedError


@runtime_checkable
class Stateful(Protocol):
    """What the user hands over: a loader, a scheduler, a scaler."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


def title_of(name: str, item: Stateful) -> str:
    """What messages call an object."""
    return f"the Stateful {name!r} ({type(item).__name__})"


def state_of(name: str, item: Stateful) -> Any:
    """Return what its ``state_dict()`` says now.

    Raises:
        UnsupportedError: it fails.
    """
    try:
        return item.state_dict()
    except Exception as error:  # whatever the user's code raises
        raise UnsupportedError(
            f"the state_dict() of {title_of(name, item)} fails: {type(error).__name__}: {error}",
            hint="make its state_dict() work from the attach on, at any step boundary",
        ) from error


def blob_of(name: str, item: Stateful, state: Any) -> torch.Tensor:
    """Encode a state.

    Raises:
        UnsupportedError: it cannot be pickled.
    """
    try:
        return blob(state)
    except Exception as error:  # whatever the objects in it raise
        raise UnsupportedError(
            f"the state_dict() of {title_of(name, item)} cannot be pickled: {error}",
            hint="keep numbers, text, tensors, lists and dicts in it",
        ) from error


def try_states(items: Mapping[str, Stateful]) -> None:
    """Take the state of each object once, so that one that cannot be compared is refused when it is handed over.

    Raises:
        UnsupportedError: names the object, and what in its state cannot be compared.
    """
    for name, item in items.items():
        state = state_of(name, item)
        if dist.get_world_size() > 1:
            Canonical.of(state, title_of(name, item))
