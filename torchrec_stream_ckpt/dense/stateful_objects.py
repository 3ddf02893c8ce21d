"""The user's own objects whose state is in a marker: a loader, a schedule, a scaler."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist

from torchrec_stream_ckpt.dense.canonical import Canonical
from torchrec_stream_ckpt.dense.dcp import blob, try_blob
from torchrec_stream_ckpt.errors import ConfigError, UnsupportedError


@runtime_checkable
class Stateful(Protocol):
    """An object that the user hands over: a loader, a scheduler, a scaler."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


def title_of(name: str, item: Stateful) -> str:
    """Return the name of an object in messages."""
    return f"the Stateful {name!r} ({type(item).__name__})"


def state_of(name: str, item: Stateful) -> Any:
    """Return the current ``state_dict()`` of an object.

    Raises:
        UnsupportedError: It fails.
    """
    try:
        return item.state_dict()
    except Exception as error:  # whatever the user's code raises
        raise UnsupportedError(
            f"the state_dict() of {title_of(name, item)} fails: {type(error).__name__}: {error}",
            hint="make its state_dict() callable at any step boundary after the attach",
        ) from error


def refuse_unsaved(what: str, error: Exception) -> UnsupportedError:
    """Return the error for a state that cannot be saved, with the reason."""
    return UnsupportedError(
        f"{what} cannot be pickled: {error}",
        hint="keep only numbers, text, tensors, lists and dicts in it",
    )


def blob_of(what: str, state: object) -> torch.Tensor:
    """Encode a state.

    Args:
        what: Name of the state in messages.
        state: Any object.

    Raises:
        UnsupportedError: It cannot be pickled.
    """
    try:
        return blob(state)
    except Exception as error:  # whatever the objects in it raise
        raise refuse_unsaved(what, error) from error


def try_blob_of(what: str, state: object) -> None:
    """Raise the errors that :func:`blob_of` would raise."""
    try:
        try_blob(state)
    except Exception as error:  # whatever the objects in it raise
        raise refuse_unsaved(what, error) from error


def stateful_title(name: str, item: Stateful) -> str:
    """Return the name of an object's state in messages."""
    return f"the state_dict() of {title_of(name, item)}"


def check_given(given: Mapping[str, Mapping[str, Stateful]]) -> None:
    """Check the names and the kinds of the objects that are handed over.

    Args:
        given: Objects by name, by the argument that has them.

    Raises:
        ConfigError: A name or an object cannot be used. Names it.
    """
    for argument, items in given.items():
        if not isinstance(items, Mapping):
            raise ConfigError(
                f"{argument} must map names to objects, got {type(items).__name__}", hint="pass {'name': object}"
            )
        for name, item in items.items():
            if not isinstance(name, str):
                raise ConfigError(
                    f"{argument}: the name of an object must be a string, got {name!r} ({type(name).__name__})",
                    hint=f"use a string such as '{type(item).__name__.lower()}'",
                )
            if not isinstance(item, Stateful):
                raise ConfigError(
                    f"'{name}' ({type(item).__name__}) has no state_dict() and load_state_dict()",
                    hint="add both methods, or omit it; a TrackedLoader saves the position of its sampler",
                )
            if "." in name or not name or not name.isprintable():
                raise ConfigError(f"{name!r} is not a valid name for a Stateful", hint="use letters, digits and '_'")


def try_states(
    saved: Mapping[str, Stateful], compared: Mapping[str, Stateful], per_rank: Mapping[str, Stateful]
) -> None:
    """Take each object's state once as markers do, so that an unsupported object is rejected at the attach.

    Args:
        saved: Objects whose state on rank 0 is saved.
        compared: Objects in ``saved`` that all ranks compare.
        per_rank: Objects whose state each rank saves.

    Raises:
        UnsupportedError: Names the object, and the part of its state that cannot be saved or compared.
    """
    here = saved if dist.get_rank() == 0 else compared
    for name, item in [*here.items(), *per_rank.items()]:
        state = state_of(name, item)
        if dist.get_world_size() > 1 and compared.get(name) is item:
            Canonical.of(state, title_of(name, item))
        if dist.get_rank() == 0 or per_rank.get(name) is item:
            try_blob_of(stateful_title(name, item), state)
