"""Continuous, bit-exact checkpoints for TorchRec: rows stream as they change, any marker restores on any plan."""

from typing import TYPE_CHECKING, Any

from torchrec_stream_ckpt.config import StreamConfig
from torchrec_stream_ckpt.errors import StreamCkptError
from torchrec_stream_ckpt.loader import TrackedLoader
from torchrec_stream_ckpt.types import Committed, MarkerId, Restored

if TYPE_CHECKING:
    from torchrec_stream_ckpt.checkpointer import StreamCheckpointer

__all__ = [
    "Committed",
    "MarkerId",
    "Restored",
    "StreamCheckpointer",
    "StreamCkptError",
    "StreamConfig",
    "TrackedLoader",
]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # Only training needs torch: the command line and the materializer read logs without it.
    if name == "StreamCheckpointer":
        try:
            from torchrec_stream_ckpt.checkpointer import StreamCheckpointer
        except ModuleNotFoundError as error:
            raise ImportError(
                f"StreamCheckpointer needs {error.name}: install the extra 'cpu' or 'cuda' (see CONTRIBUTING.md)"
            ) from error

        return StreamCheckpointer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
