"""Outcomes of a marker's dense state in a changed model: plain values, from ``compare_dense``."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from torchrec_stream_ckpt.evolve.model_schema import NO_TENSOR, DenseEntry
from torchrec_stream_ckpt.evolve.table_outcome import DROPPED, EXACT


@dataclass(frozen=True, slots=True)
class DenseOutcome:
    """Outcome of one dense parameter."""

    name: str
    """Name in this model; for a dropped parameter, name in the marker."""
    source: str | None
    """Name in the marker whose value is kept; None if it keeps the value that the model initialized."""
    entry: DenseEntry
    """Entry in this model; for a dropped parameter, entry in the marker."""
    label: str
    """``exact``, ``fresh`` or ``dropped``."""

    @property
    def num_bytes(self) -> int:
        """Size of its values, in bytes."""
        if self.entry.dtype == NO_TENSOR:
            return 0
        bits = re.match(r"[a-z]+([0-9]+)", self.entry.dtype)  # bool has no number
        return math.prod(self.entry.shape) * (int(bits[1]) // 8 if bits is not None else 1)


@dataclass(frozen=True, slots=True)
class StateOutcome:
    """Outcome of the state that a dense optimizer keeps for one parameter."""

    optimizer: str
    """Key of the optimizer in this job."""
    parameter: str
    source: tuple[str, str] | None
    """Key of the optimizer and name of the parameter in the marker; None if the state is reset."""
    label: str
    """``exact`` or ``fresh``."""


@dataclass(frozen=True, slots=True)
class OptimizerOutcome:
    """Outcome of one dense optimizer, except for the states of its parameters."""

    key: str
    kind: str
    """Its class in this job; for a dropped optimizer, its class in the marker."""
    saved_kind: str | None
    """Its class in the marker; None if it was added."""
    groups: tuple[int | None, ...]
    """For each param group of this job, the marker's group whose hyperparameters it takes; None if it keeps its own."""
    label: str
    """``exact`` if all groups take those of the marker, ``by rule`` if some do; otherwise ``fresh`` or ``dropped``."""


@dataclass(frozen=True, slots=True)
class StatefulOutcome:
    """Outcome of one of the user's objects."""

    name: str
    label: str
    """``exact`` if it loads the marker's state; otherwise ``fresh`` or ``dropped``."""


@dataclass(frozen=True, slots=True)
class DenseEvolution:
    """Outcomes of all dense state of a marker. Dropped items are last in each list."""

    entries: tuple[DenseOutcome, ...]
    states: tuple[StateOutcome, ...]
    """States of each parameter of each optimizer of this job."""
    optimizers: tuple[OptimizerOutcome, ...]
    stateful: tuple[StatefulOutcome, ...]

    @property
    def is_plain(self) -> bool:
        """True if everything is the same as in the marker, including names."""
        kept = all(entry.label == EXACT and entry.name == entry.source for entry in self.entries)
        stands = all(
            state.label == EXACT and state.source == (state.optimizer, state.parameter) for state in self.states
        )
        rest = [each.label for each in self.optimizers] + [each.label for each in self.stateful]
        return kept and stands and all(label == EXACT for label in rest)

    @property
    def sources(self) -> dict[str, str]:
        """Name in this model -> name in the marker, for parameters that are kept."""
        return {entry.name: entry.source for entry in self.entries if entry.source is not None}

    @property
    def dropped(self) -> tuple[str, ...]:
        """Names of the parameters that only the marker has."""
        return tuple(entry.name for entry in self.entries if entry.label == DROPPED)
