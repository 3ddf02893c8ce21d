"""How much a value of this model is one of the marker's."""

from __future__ import annotations

from collections.abc import Iterable

EXACT = "exact"
"""Every kept value has the marker's bits, and means the same."""
BY_RULE = "by rule"
"""Kept by a rule that docs/evolve.md has: cast to another dtype, or read by another optimizer."""
FRESH = "fresh"
"""Exactly what the model had before the restore."""
DROPPED = "dropped"
"""Only the marker has it."""

_FROM_WEAK = (DROPPED, FRESH, BY_RULE, EXACT)


def weakest(labels: Iterable[str]) -> str:
    """The label that promises least."""
    return min(labels, key=_FROM_WEAK.index)
