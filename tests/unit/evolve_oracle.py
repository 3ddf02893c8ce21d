"""What a restore with declared changes has to leave in a model, in plain numpy: row by row, by names alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from torchrec_stream_ckpt.evolve.changes import Changes

Array = npt.NDArray[Any]
Table = dict[str, Array]
"""``weights`` (rows, dim), and each state by its name, (rows,) or (rows, dim)."""


def evolved_tables(
    saved: dict[str, Table], fresh: dict[str, Table], changes: Changes
) -> tuple[dict[str, Table], dict[str, Table]]:
    """The tables of the new model, and for each value whether it is the marker's."""
    old_names = {new: old for old, new in changes.renamed.items()}
    values: dict[str, Table] = {}
    kept: dict[str, Table] = {}
    for name, table in fresh.items():
        values[name] = {key: array.copy() for key, array in table.items()}
        kept[name] = {key: np.zeros(array.shape, bool) for key, array in table.items()}
        if name not in changes.added:
            _bring(saved[old_names.get(name, name)], values[name], kept[name], _new_ids(name, changes))
    return values, kept


def _new_ids(name: str, changes: Changes) -> dict[int, int] | None:
    change = changes.rows.get(name)
    if change is None or change.ids is None:
        return None
    return dict(zip(change.ids.old_ids.tolist(), change.ids.new_ids.tolist(), strict=True))


def _bring(old: Table, new: Table, kept: Table, new_ids: dict[int, int] | None) -> None:
    columns = min(old["weights"].shape[1], new["weights"].shape[1])
    for row in range(len(old["weights"])):
        target = row if new_ids is None else new_ids.get(row)
        if target is None or target >= len(new["weights"]):
            continue
        for key, array in old.items():
            if key not in new or array.ndim != new[key].ndim:
                continue
            if key != "weights" and array.dtype != new[key].dtype:
                continue
            if array.ndim == 1:
                new[key][target] = array[row]
                kept[key][target] = True
            else:
                new[key][target, :columns] = array[row, :columns].astype(new[key].dtype)
                kept[key][target, :columns] = True


def evolved_dense(
    saved: dict[str, Array], fresh: dict[str, Array], changes: Changes
) -> tuple[dict[str, Array], set[str]]:
    """The dense parameters of the new model, and the names of the marker's among them. Renames are by plain names."""
    old_names = {new: old for old, new in changes.dense.renamed.items()}
    values, kept = {}, set()
    for name, array in fresh.items():
        old = saved.get(old_names.get(name, name))
        values[name] = array.copy()
        if name in changes.dense.fresh or name in changes.dense.reshaped or old is None:
            continue
        values[name] = old.copy()
        kept.add(name)
    return values, kept
