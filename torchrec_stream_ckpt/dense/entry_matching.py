"""Match entries of a marker's dense state with this model: all by the same names, or those that a change keeps."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from torchrec_stream_ckpt.evolve.dense_outcome import DenseEvolution
from torchrec_stream_ckpt.evolve.model_schema import DenseEntry, DenseOptimizer
from torchrec_stream_ckpt.evolve.row_maps import RowMap
from torchrec_stream_ckpt.evolve.table_outcome import DROPPED, EXACT, Evolution

T = TypeVar("T")

PER_RANK = "per_rank."
"""Prefix of the names of the user's per-rank objects where they are listed with the shared ones."""


@dataclass(frozen=True, slots=True)
class Match:
    """Parts of a marker that the live model takes. State that is not named here stays unchanged, bit for bit."""

    entries: Mapping[str, str]
    """Parameter or buffer of this model -> its name in the marker."""
    states: Mapping[str, Mapping[str, tuple[str, str]]]
    """Dense optimizer, by its key -> parameter whose state is restored -> optimizer and parameter in the marker."""
    shared: Collection[str]
    """Objects of the user whose state of rank 0 is restored."""
    per_rank: Collection[str]
    """Objects of the user whose state is restored on each rank."""
    groups: Mapping[str, tuple[int | None, ...]] = field(default_factory=dict)
    """Dense optimizer -> for each of its param groups, the group of the marker whose settings it takes."""
    settings: Mapping[str, str] | None = None
    """Fused tables whose hyperparameters are restored, with their names in the marker. None for all, by their own
    names."""
    id_maps: Mapping[str, str] | None = None
    """Fused tables whose id maps are restored, in the same form: tables that keep all their rows."""
    reassigned: Mapping[str, tuple[str, RowMap]] = field(default_factory=dict)
    """Fused tables whose raw ids get new rows: their names in the marker, and these rows."""

    @classmethod
    def of(cls, tables: Evolution, dense: DenseEvolution) -> Match:
        """Join the evolution of a marker's tables and of its dense state."""
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
            {name: (each.saved_name or "", each.rows_kept) for name, each in live.items() if each.reassigned},
        )

    def there(self, live: Mapping[str, Any]) -> dict[str, Any]:
        """Return the matched values of ``live``, by their names in the marker."""
        return {self.entries[name]: value for name, value in live.items() if name in self.entries}

    def here(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Return the matched values of ``saved``, by their names in this model."""
        return {name: saved[there] for name, there in self.entries.items() if there in saved}

    def replicated(self, live: Mapping[str, T]) -> dict[str, T]:
        """Return the restored tensors of replicated tables, by their entries in the marker.

        ``live`` has the entries here.
        """
        found = {f"model.{there}": live.get(f"model.{name}") for name, there in self.entries.items()}
        for key, states in self.states.items():
            for name, (old_key, there) in states.items():
                prefix = f"optim.{key}.{name}."
                of_it = {entry.removeprefix(prefix): entry for entry in live if entry.startswith(prefix)}
                found |= {f"optim.{old_key}.{there}.{state}": live[entry] for state, entry in of_it.items()}
        return {entry: value for entry, value in found.items() if value is not None}

    def by_table(self, saved: Mapping[str, T]) -> dict[str, T]:
        """Return the restored values of fused tables, by the tables of this model.

        ``saved`` has those of the marker.
        """
        if self.settings is None:
            return dict(saved)
        return {name: saved[there] for name, there in self.settings.items() if there in saved}


def dense_entry(name: str, value: Any) -> DenseEntry:
    """Return the entry of a parameter or buffer of a model. A value that is not a tensor has no shape."""
    if not isinstance(value, torch.Tensor):
        return DenseEntry(name, (), "object")
    return DenseEntry(name, tuple(value.shape), str(value.dtype).removeprefix("torch."))


def optimizer_entry(key: str, kind: str, groups: Iterable[Mapping[str, Any]]) -> DenseOptimizer:
    """Return a dense optimizer, from its param groups with names."""
    return DenseOptimizer(key, kind, tuple(tuple(group["params"]) for group in groups))
