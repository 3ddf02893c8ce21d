"""Continuous, bit-exact checkpoints for TorchRec: rows stream as they change, any marker restores on any plan."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from torchrec_stream_ckpt.config import StreamConfig
from torchrec_stream_ckpt.errors import StreamCkptError
from torchrec_stream_ckpt.loader import TrackedLoader
from torchrec_stream_ckpt.types import Committed, MarkerId, Restored

if TYPE_CHECKING:
    from torchrec_stream_ckpt.checkpointer import StreamCheckpointer
    from torchrec_stream_ckpt.follower.core import Follower, follow
    from torchrec_stream_ckpt.follower.tables import FollowedTables

__all__ = [
    "Committed",
    "FollowedTables",
    "Follower",
    "MarkerId",
    "Restored",
    "StreamCheckpointer",
    "StreamCkptError",
    "StreamConfig",
    "TrackedLoader",
    "follow",
]

__version__ = "0.1.0"


_LAZY = {
    "StreamCheckpointer": "torchrec_stream_ckpt.checkpointer",
    "FollowedTables": "torchrec_stream_ckpt.follower.tables",
    "Follower": "torchrec_stream_ckpt.follower.core",
    "follow": "torchrec_stream_ckpt.follower.core",
}


def __getattr__(name: str) -> Any:
    # Only training, and tables as tensors, need torch: the command line and the materializer read logs without it.
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(_LAZY[name]), name)
    except ModuleNotFoundError as error:
        raise ImportError(
            f"{name} needs {error.name}: install the extra 'cpu' or 'cuda' (see CONTRIBUTING.md)"
        ) from error
