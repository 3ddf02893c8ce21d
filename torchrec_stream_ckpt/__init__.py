"""Continuous, bit-exact checkpoints for TorchRec: rows stream as they change, any marker restores on any plan."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from torchrec_stream_ckpt.config import Source, StreamConfig, Takeover
from torchrec_stream_ckpt.errors import TORCH_HINT, StreamCkptError
from torchrec_stream_ckpt.types import Committed, MarkerId, MarkerReport, Restored

if TYPE_CHECKING:
    from torchrec_stream_ckpt.checkpointer import StreamCheckpointer
    from torchrec_stream_ckpt.evolve.changes import Changes, DenseChanges, RowChange
    from torchrec_stream_ckpt.evolve.model_schema import ModelSchema
    from torchrec_stream_ckpt.evolve.row_maps import IdMap
    from torchrec_stream_ckpt.follower.core import Follower
    from torchrec_stream_ckpt.follower.follow import follow
    from torchrec_stream_ckpt.follower.tables import FollowedTables
    from torchrec_stream_ckpt.global_batches import GlobalBatches
    from torchrec_stream_ckpt.global_samples import GlobalSampler, sample_generator
    from torchrec_stream_ckpt.global_stream import GlobalStream
    from torchrec_stream_ckpt.interchange.dcp_reader import StreamReader
    from torchrec_stream_ckpt.interchange.marker_rows import OpenMarker, open_marker
    from torchrec_stream_ckpt.loader import TrackedLoader
    from torchrec_stream_ckpt.planner import planner_constraints

__all__ = [
    "Changes",
    "Committed",
    "DenseChanges",
    "FollowedTables",
    "Follower",
    "GlobalBatches",
    "GlobalSampler",
    "GlobalStream",
    "IdMap",
    "MarkerId",
    "MarkerReport",
    "ModelSchema",
    "OpenMarker",
    "Restored",
    "RowChange",
    "Source",
    "StreamCheckpointer",
    "StreamCkptError",
    "StreamConfig",
    "StreamReader",
    "Takeover",
    "TrackedLoader",
    "follow",
    "open_marker",
    "planner_constraints",
    "sample_generator",
]

__version__ = "0.1.0"


# Only training, and tables as tensors, need torch: the command line and the materializer read logs without it. What
# describes a change is lazy for the sake of the command line's start.
_LAZY = {
    "Changes": "evolve.changes",
    "DenseChanges": "evolve.changes",
    "FollowedTables": "follower.tables",
    "Follower": "follower.core",
    "GlobalBatches": "global_batches",
    "GlobalSampler": "global_samples",
    "GlobalStream": "global_stream",
    "IdMap": "evolve.row_maps",
    "ModelSchema": "evolve.model_schema",
    "RowChange": "evolve.changes",
    "OpenMarker": "interchange.marker_rows",
    "StreamCheckpointer": "checkpointer",
    "StreamReader": "interchange.dcp_reader",
    "TrackedLoader": "loader",
    "follow": "follower.follow",
    "open_marker": "interchange.marker_rows",
    "planner_constraints": "planner",
    "sample_generator": "global_samples",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        try:
            return getattr(import_module(f"torchrec_stream_ckpt.{_LAZY[name]}"), name)
        except ModuleNotFoundError as error:
            raise ImportError(f"{name} needs {error.name}: {TORCH_HINT}") from error
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
