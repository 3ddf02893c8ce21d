"""Forms of a marker's name: ``2:17``, ``latest``, ``best:auc:max``, or a name that ``stream-ckpt name`` gave."""

from __future__ import annotations

import re
from dataclasses import dataclass

from torchrec_stream_ckpt.errors import ConfigError

LATEST = "latest"
"""Name of the newest marker."""
BEST = "best:"
"""Prefix of ``KEY:max`` or ``KEY:min``."""
ALIAS_PATTERN = r"[A-Za-z][A-Za-z0-9._-]{0,47}"
"""Pattern of the names that ``stream-ckpt name`` gives."""
_ALIAS = re.compile(ALIAS_PATTERN)
_TAKEN = frozenset({"all", "best", "first", "last", LATEST, "lost", "newest", "none", "oldest", "root"})
_OTHERS = re.compile(rf"[0-9]{{1,9}}:[0-9]{{1,18}}|{LATEST}|{BEST}[A-Za-z0-9_.-]{{1,64}}:(?:max|min)")


@dataclass(frozen=True, slots=True)
class Alias:
    """Name that an operator has given to a marker, and can move to another one."""

    name: str

    @classmethod
    def parse(cls, text: str) -> Alias:
        """Check a name.

        Raises:
            ConfigError: the text is not valid, or has another meaning.
        """
        if not isinstance(text, str) or not is_alias(text):
            raise ConfigError(
                f"{text!r:.80} is not a name for a marker",
                hint="use a letter, then letters, digits, '.', '_' and '-', at most 48 in all; "
                f"not {', '.join(sorted(_TAKEN))}",
            )
        return cls(text)

    def __str__(self) -> str:
        return self.name


def is_alias(text: str) -> bool:
    """Return whether an operator may give this name to a marker."""
    return _ALIAS.fullmatch(text) is not None and text not in _TAKEN


def is_marker_name(text: str) -> bool:
    """Return whether a text has one of the forms that name a marker."""
    return _OTHERS.fullmatch(text) is not None or is_alias(text)
