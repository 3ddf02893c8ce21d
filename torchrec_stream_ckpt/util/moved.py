"""Old import paths of public names: the error of an import names the new path."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType

_PACKAGE = "torchrec_stream_ckpt"
_MOVED = frozenset(
    {"config", "follower", "global_samples", "global_stream", "interchange", "loader", "planner", "types"}
)
"""Modules that users may have imported from. The package itself exports their public names."""


class MovedFinder(MetaPathFinder):
    """The last finder: it gets a module of this package only if no file of that name exists."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        """Raise ModuleNotFoundError for an old path. Ignore other modules."""
        parent, _, name = fullname.rpartition(".")
        if parent == _PACKAGE and name in _MOVED:
            raise ModuleNotFoundError(
                f"{fullname} has moved: import its public names by `from {_PACKAGE} import ...`", name=fullname
            )
