"""Parts of the package that many tests use, apart from the inner API: one place that knows their modules.

So a part can move without a word in any test. A name is imported with its module when it is first used: tests of what
runs without torch do not import it.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

PARTS = {
    # The command line.
    "app": "cli.main",
    # Logs.
    "FileLog": "log.files",
    "open_log": "log.api",
    "trim_log": "log.control.trim",
    "Broker": "extras.broker.kraft",
    "UpdateKind": "extras.follower.updates",
    "arm": "util.failpoints",
    # Stores.
    "FolderObjects": "store.folder",
    "Entry": "store.api",
    "DenseStore": "store.dense",
    "open_dense": "store.dense",
    "prepare_store": "store.identity",
    "Manifest": "format.manifest",
    "Dropped": "format.manifest",
    # Where the bytes of a marker are.
    "locate": "find.route",
    "fence_of": "save.generation",
    "TierState": "find.tiers",
    # What maintains a store.
    "Policy": "maintain.compactor",
    "Materializer": "maintain.materializer",
    "Scrubber": "maintain.scrub.scrubber",
    "collect": "maintain.gc.gc",
    "GcRules": "maintain.gc.gc",
    "Retention": "maintain.gc.retention",
    "check_synced": "maintain.gc.trim_check",
    "verify_marker": "verify.verify",
    # What trains.
    "fused_kernels": "model",
    "installed": "model.versions",
    "Drain": "capture.sender",
    "FrameBuffer": "format.ring",
    "FrameRing": "format.ring",
}
"""Name -> its module."""


def __getattr__(name: str) -> Any:
    if name in PARTS:
        return getattr(import_module(f"torchrec_stream_ckpt.{PARTS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
