"""Continuous, bit-exact checkpoints for TorchRec: rows stream as they change, any marker restores on any plan."""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from torchrec_stream_ckpt.errors import TORCH_HINT, ReplicaNotReadyError, StreamCkptError
from torchrec_stream_ckpt.util.config import Source, StreamConfig, Takeover
from torchrec_stream_ckpt.util.moved import MovedFinder
from torchrec_stream_ckpt.util.types import Committed, MarkerId, MarkerReport, Restored
from torchrec_stream_ckpt.util.version import __version__ as __version__

if TYPE_CHECKING:
    from torchrec_stream_ckpt.checkpointer import StreamCheckpointer
    from torchrec_stream_ckpt.evolve.changes import Changes, DenseChanges, RowChange
    from torchrec_stream_ckpt.evolve.model_schema import ModelSchema
    from torchrec_stream_ckpt.evolve.row_maps import IdMap
    from torchrec_stream_ckpt.extras.follower.core import Follower, follow
    from torchrec_stream_ckpt.extras.follower.model import FollowedModel
    from torchrec_stream_ckpt.extras.follower.tables import FollowedTables
    from torchrec_stream_ckpt.extras.interchange.dcp_reader import StreamReader
    from torchrec_stream_ckpt.extras.interchange.marker_rows import OpenMarker, open_marker
    from torchrec_stream_ckpt.extras.planner import planner_constraints
    from torchrec_stream_ckpt.loaders.global_batches import GlobalBatches
    from torchrec_stream_ckpt.loaders.global_samples import GlobalSampler, sample_generator
    from torchrec_stream_ckpt.loaders.global_stream import GlobalStream
    from torchrec_stream_ckpt.loaders.tracked_loader import TrackedLoader
    from torchrec_stream_ckpt.script import init_ranks, log_to_stderr

__all__ = [
    "Changes",
    "Committed",
    "DenseChanges",
    "FollowedModel",
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
    "ReplicaNotReadyError",
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
    "init_ranks",
    "log_to_stderr",
    "open_marker",
    "planner_constraints",
    "sample_generator",
]


sys.meta_path.append(MovedFinder())

# Only training, and tables as tensors, need torch: the command line and the materializer read logs without it. What
# describes a change is lazy for the sake of the command line's start.
_LAZY = {
    "Changes": "evolve.changes",
    "DenseChanges": "evolve.changes",
    "FollowedModel": "extras.follower.model",
    "FollowedTables": "extras.follower.tables",
    "Follower": "extras.follower.core",
    "GlobalBatches": "loaders.global_batches",
    "GlobalSampler": "loaders.global_samples",
    "GlobalStream": "loaders.global_stream",
    "IdMap": "evolve.row_maps",
    "ModelSchema": "evolve.model_schema",
    "RowChange": "evolve.changes",
    "OpenMarker": "extras.interchange.marker_rows",
    "StreamCheckpointer": "checkpointer",
    "StreamReader": "extras.interchange.dcp_reader",
    "TrackedLoader": "loaders.tracked_loader",
    "follow": "extras.follower.core",
    "init_ranks": "script",
    "log_to_stderr": "script",
    "open_marker": "extras.interchange.marker_rows",
    "planner_constraints": "extras.planner",
    "sample_generator": "loaders.global_samples",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        try:
            return getattr(import_module(f"torchrec_stream_ckpt.{_LAZY[name]}"), name)
        except ModuleNotFoundError as error:
            raise ImportError(f"{name} needs {error.name}: {TORCH_HINT}") from error
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
