"""Communication hooks of DDP: one with a state of its own is refused by name, unless that state is handed over."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import nn

from torchrec_stream_ckpt.adapter import comm_hooks
from torchrec_stream_ckpt.errors import UnsupportedError

_PLAIN = (type(None), bool, int, float, str, dist.ProcessGroup)
"""What no hook can write to, and a process group, which belongs to the job and not to its state."""
_OF_DDP = ("_AllreduceUpcastHookState",)
"""What DDP itself registers for mixed precision: streams and settings."""


def check_comm_hooks(model: nn.Module, handed: Iterable[object]) -> None:
    """Refuse hooks with a state that is in no marker.

    Args:
        model: The live model.
        handed: The user's stateful objects. The state of a hook is one of them, or an attribute of one.

    Raises:
        UnsupportedError: names the hook and its state.
    """
    held = {id(value) for item in handed for value in (item, *getattr(item, "__dict__", {}).values())}
    for path, hook, state in comm_hooks(model):
        if isinstance(state, _PLAIN) or _name(state) in _OF_DDP or id(state) in held:
            continue
        raise UnsupportedError(
            f"the DDP communication hook {hook} keeps a {_name(state)}, which is in no marker",
            hint="register a hook without a state (allreduce_hook, fp16_compress_hook, bf16_compress_hook), or hand "
            f"the {_name(state)} over: stateful_per_rank={{'hook': ...}}, an object with state_dict() and "
            "load_state_dict() that holds it as an attribute",
            module=path,
        )


def _name(state: Any) -> str:
    return type(state).__name__
