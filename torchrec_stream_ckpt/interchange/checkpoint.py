"""A checkpoint of another kind, as an import reads it: entries by name, tensors in parts."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint.metadata import Metadata

Part = tuple[str, tuple[int, ...], tuple[int, ...]]
"""An entry, offsets in it, sizes."""


class Checkpoint(Protocol):
    """What ``dcp_checkpoint.py`` and ``torch_checkpoint.py`` open."""

    @property
    def path(self) -> Path:
        """Where it is."""

    @property
    def metadata(self) -> Metadata:
        """Its entries, as DCP describes them; ``planner_data`` has the path of keys to each, if it is known."""

    @property
    def sharded(self) -> Collection[str]:
        """Entries that were sharded when they were saved, as far as the checkpoint says it."""

    @property
    def unread(self) -> Sequence[str]:
        """What stands in it besides the entries, and has no place in a marker."""

    def check(self, names: Sequence[str]) -> None:
        """Refuse entries of which ranks have saved different values, where there can be one.

        Raises:
            ConfigError: names the first one.
        """

    def parts(self, wanted: Sequence[Part]) -> list[torch.Tensor]:
        """These parts of entries, on the CPU; not to be written.

        Raises:
            CorruptionError: a file is gone or damaged.
        """

    def whole(self, names: Sequence[str]) -> dict[str, Any]:
        """Whole tensors and plain values, on the CPU; not to be written.

        Raises:
            CorruptionError: a file is gone or damaged.
        """
