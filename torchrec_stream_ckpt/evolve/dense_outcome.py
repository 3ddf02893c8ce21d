"""What becomes of a marker's dense state in a model that differs: plain values, from ``resolve_dense``."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from torchrec_stream_ckpt.evolve.model_schema import NO_TENSOR, DenseEntry
from torchrec_stream_ckpt.evolve.table_outcome import DROPPED, EXACT


@dataclass(frozen=True, slots=True)
class DenseOutcome:
    """What becomes of one dense parameter."""

    name: str
    """In this model; of a dropped one in the marker."""
    source: str | None
    """Its name in the marker, whose value is kept; None: it stays as the model has made it."""
    entry: DenseEntry
    """As this model has it; of a dropped one as the marker has it."""
    label: str
    """``exact``, ``fresh`` or ``dropped``."""

    @property
    def num_bytes(self) -> int:
        """Bytes of its values."""
        if self.entry.dtype == NO_TENSOR:
            return 0
        bits = re.match(r"[a-z]+(\d+)", self.entry.dtype)  # bool has no number
        return math.prod(self.entry.shape) * (int(bits[1]) // 8 if bits is not None else 1)


@dataclass(frozen=True, slots=True)
class StateOutcome:
    """What becomes of the state that a dense optimizer keeps for one parameter."""

    optimizer: str
    """Key of the optimizer in this job."""
    parameter: str
    source: tuple[str, str] | None
    """Key of the optimizer and name of the parameter in the marker; None: the state starts anew."""
    label: str
    """``exact`` or ``fresh``."""


@dataclass(frozen=True, slots=True)
class OptimizerOutcome:
    """What becomes of one dense optimizer but for the states of its parameters."""

    key: str
    kind: str
    """Its class; of a dropped one that in the marker."""
    saved_kind: str | None
    """Its class in the marker; None: it was added."""
    groups: tuple[int | None, ...]
    """For each param group of this job the one of the marker whose hyperparameters it takes; None: it has its own."""
    label: str
    """``exact``: all groups take those of the marker. ``by rule``: some do. ``fresh``, ``dropped``."""


@dataclass(frozen=True, slots=True)
class StatefulOutcome:
    """What becomes of one of the user's objects."""

    name: str
    label: str
    """``exact``: it loads what the marker has. ``fresh``, ``dropped``."""


@dataclass(frozen=True, slots=True)
class DenseEvolution:
    """How the dense state of a marker becomes that of this model. Dropped ones come last in each list."""

    entries: tuple[DenseOutcome, ...]
    states: tuple[StateOutcome, ...]
    """Of each parameter of each optimizer of this job."""
    optimizers: tuple[OptimizerOutcome, ...]
    stateful: tuple[StatefulOutcome, ...]

    @property
    def is_plain(self) -> bool:
        """True if all is the marker's, names included."""
        kept = all(entry.label == EXACT and entry.name == entry.source for entry in self.entries)
        stands = all(
            state.label == EXACT and state.source == (state.optimizer, state.parameter) for state in self.states
        )
        rest = [each.label for each in self.optimizers] + [each.label for each in self.stateful]
        return kept and stands and all(label == EXACT for label in rest)

    @property
    def sources(self) -> dict[str, str]:
        """Name in this model -> name in the marker, of the parameters that are kept."""
        return {entry.name: entry.source for entry in self.entries if entry.source is not None}

    @property
    def dropped(self) -> tuple[str, ...]:
        """Names of the parameters that only the marker has."""
        return tuple(entry.name for entry in self.entries if entry.label == DROPPED)
