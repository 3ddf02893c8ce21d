"""What of a marker's dense state goes where in this model: all of it by the same names, or what a change keeps."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from torchrec_stream_ckpt.evolve.dense_outcome import DenseEvolution
from torchrec_stream_ckpt.evolve.model_schema import DenseEntry, DenseOptimizer
from torchrec_stream_ckpt.evolve.table_outcome import DROPPED, EXACT, Evolution

T = TypeVar("T")

PER_RANK = "per_rank."
"""Begins the names of the user's objects that each rank has, where they stand beside the shared ones."""


@dataclass(frozen=True, slots=True)
class Match:
    """What the live model takes of a marker. All that is not named here stays as the model has it, bit for bit."""

    entries: Mapping[str, str]
    """Parameter or buffer of this model -> its name in the marker."""
    states: Mapping[str, Mapping[str, tuple[str, str]]]
    """Dense optimizer, by its key -> parameter whose state comes -> optimizer and parameter in the marker."""
    shared: Collection[str]
    """Objects of the user whose state of rank 0 comes."""
    per_rank: Collection[str]
    """Objects of the user whose state comes on each rank."""
    groups: Mapping[str, tuple[int | None, ...]] = field(default_factory=dict)
    """Dense optimizer -> for each of its param groups the one of the marker whose settings it takes."""
    settings: Mapping[str, str] | None = None
    """Fused tables whose hyperparameters come, with their names in the marker; None: all, by their own."""
    id_maps: Mapping[str, str] | None = None
    """Fused tables whose id maps would come, likewise: those that keep all their rows."""

    @classmethod
    def of(cls, tables: Evolution, dense: DenseEvolution) -> Match:
        """Join what becomes of a marker's tables and of its dense state."""
        states: dict[str, dict[str, tuple[str, str]]] = {
            each.key: {} for each in dense.optimizers if each.label != DROPPED
        }
        for state in dense.states:
            if state.source is not None:
                states[state.optimizer][state.parameter] = state.source
        kept = {each.name for each in dense.stateful if each.label == EXACT}
        live = {each.name: each for each in tables.tables if each.saved_name is not None and not each.is_dropped}
        return cls(
            dense.sources,
            states,
            {name for name in kept if not name.startswith(PER_RANK)},
            {name.removeprefix(PER_RANK) for name in kept if name.startswith(PER_RANK)},
            {each.key: each.groups for each in dense.optimizers},
            {name: each.saved_name or "" for name, each in live.items() if each.keeps_iteration},
            {name: each.saved_name or "" for name, each in live.items() if each.keeps_all_rows},
        )

    def there(self, live: Mapping[str, Any]) -> dict[str, Any]:
        """Of values by their names here those that are matched, by their names in the marker."""
        return {self.entries[name]: value for name, value in live.items() if name in self.entries}

    def here(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Of values by their names in the marker those that are matched, by their names here."""
        return {name: saved[there] for name, there in self.entries.items() if there in saved}

    def replicated(self, live: Mapping[str, T]) -> dict[str, T]:
        """Of tensors of replicated tables, by their entries here, those that come, by their entries in the marker."""
        found = {f"model.{there}": live.get(f"model.{name}") for name, there in self.entries.items()}
        for key, states in self.states.items():
            for name, (old_key, there) in states.items():
                prefix = f"optim.{key}.{name}."
                of_it = {entry.removeprefix(prefix): entry for entry in live if entry.startswith(prefix)}
                found |= {f"optim.{old_key}.{there}.{state}": live[entry] for state, entry in of_it.items()}
        return {entry: value for entry, value in found.items() if value is not None}

    def by_table(self, saved: Mapping[str, T]) -> dict[str, T]:
        """Of values by fused tables of the marker those that come, by the tables of this model."""
        if self.settings is None:
            return dict(saved)
        return {name: saved[there] for name, there in self.settings.items() if there in saved}


def dense_entry(name: str, value: Any) -> DenseEntry:
    """A parameter or buffer of a model; what a module keeps that is no tensor has no shape."""
    if not isinstance(value, torch.Tensor):
        return DenseEntry(name, (), "object")
    return DenseEntry(name, tuple(value.shape), str(value.dtype).removeprefix("torch."))


def optimizer_entry(key: str, kind: str, groups: Iterable[Mapping[str, Any]]) -> DenseOptimizer:
    """A dense optimizer, from its param groups with names."""
    return DenseOptimizer(key, kind, tuple(tuple(group["params"]) for group in groups))
