"""Jobs whose model changes from one restore to the next, and by plain code what each must hold afterwards."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from tests import zoo
from tests.laps import SPLIT, WHOLE, place
from tests.zoo import Marks
from tests.zoo_models import OPTIMIZERS, Model, Part, Plan, Table
from torchrec_stream_ckpt import StreamConfig
from torchrec_stream_ckpt.errors import SchemaMismatchError
from torchrec_stream_ckpt.evolve.changes import Changes, DenseChanges, RowChange
from torchrec_stream_ckpt.evolve.row_maps import IdMap
from torchrec_stream_ckpt.util.types import Restored

State = dict[str, torch.Tensor]
ROWS = (13, 30, 41, 57, 97)
STATES = {
    "sgd": (),
    "adagrad": (("sum", False),),
    "rowwise_adagrad": (("sum", True),),
    "emainplace_rowwise_adagrad": (("sum", True),),
    "rowwise_rmsprop_ar": (("sum", True), ("prev_iter", True)),
}
"""Of each optimizer: name, and whether a row has one value."""
HALVES = "emainplace_rowwise_adagrad"
PATHS = {"fp": "part0._embedding_bag_collection"}
"""Module of the tables, where it is not ``part0``."""


@dataclass(frozen=True)
class Origin:
    """Where a table's values come from."""

    name: str
    old: Table
    ids: tuple[tuple[int, int], ...] | None
    """Old and new id of each row that is kept; None: those that both have."""


@dataclass(frozen=True)
class Step:
    """A model, what it was before, and what has to be declared that nobody can guess."""

    model: Model
    splits: tuple[int, ...]
    """Column shards of each table."""
    origins: dict[str, Origin]
    """By name of this model's table; others start anew."""
    declared: Changes
    before: Model | None = None


# What a random change is.


def first(rng: random.Random) -> Step:
    """Any model."""
    kind = rng.choice(["ebc", "ebc", "weighted", "ec", "fp"])
    tables = tuple(_table(rng, kind, f"t{number}", f"f{number}") for number in range(rng.randint(2, 4)))
    model = Model((Part(kind, tables),), rng.choice(list(OPTIMIZERS)), int32=rng.random() < 0.3)
    return Step(model, tuple(_split(rng, table) for table in tables), {}, Changes())


def _table(rng: random.Random, kind: str, name: str, feature: str) -> Table:
    dim = 32 if kind == "ec" else rng.choice([8, 16, 32])
    return Table(name, rng.choice(ROWS), dim, (feature,), dtype=rng.choice(["fp32", "fp32", "fp16"]))


def _split(rng: random.Random, table: Table) -> int:
    return rng.choice([1, 1, 2]) if table.dim >= 16 else 1


def changed(rng: random.Random, step: Step, folder: Path) -> Step:
    """The same job after a week: some of its tables are others."""
    model, (part,) = step.model, step.model.parts
    path = PATHS.get(part.kind, "part0")
    optimizer = model.optimizer
    if optimizer != HALVES and rng.random() < 0.25:
        optimizer = rng.choice([name for name in OPTIMIZERS if name != HALVES])
    number = rng.randrange(10**6)
    tables, splits, origins = [], [], {}
    renamed, dropped, rows = {}, [], {}
    for table, split in zip(part.tables, step.splits, strict=True):
        if rng.random() < 0.2 and len(part.tables) > 1 and len(dropped) + 1 < len(part.tables):
            dropped.append(f"{path}.{table.name}")
            continue
        new, ids = table, None
        if rng.random() < 0.25:
            new = replace(new, name=f"{table.name}_{number}")
            renamed[f"{path}.{table.name}"] = f"{path}.{new.name}"
        if part.kind != "ec" and split == 1 and optimizer != HALVES and rng.random() < 0.3:
            new = replace(new, dim=rng.choice([8, 16, 32]))
        if optimizer != HALVES and rng.random() < 0.2:
            new = replace(new, dtype=rng.choice(["fp32", "fp16"]))
        if rng.random() < 0.5:
            new = replace(new, rows=rng.choice(ROWS))
            change = RowChange(new.rows, allow_dropped_rows=new.rows < table.rows)
            if rng.random() < 0.5:
                ids, change = _mapped(rng, table.rows, new.rows, folder / f"{table.name}_{number}.npz")
            if ids is not None or new.rows != table.rows:
                rows[f"{path}.{new.name}"] = change
        tables.append(new)
        splits.append(split)
        origins[new.name] = Origin(new.name, table, ids)
    for _ in range(rng.choice([0, 0, 1, 2])):
        number += 1
        tables.append(_table(rng, part.kind, f"n{number}", f"g{number}"))
        splits.append(_split(rng, tables[-1]))
    declared = Changes(renamed=renamed, dropped=tuple(dropped), rows=rows)
    new_model = replace(model, parts=(Part(part.kind, tuple(tables)),), optimizer=optimizer)
    return Step(new_model, tuple(splits), origins, declared, model)


def _mapped(rng: random.Random, old: int, new: int, file: Path) -> tuple[tuple[tuple[int, int], ...] | None, RowChange]:
    count = rng.randint(1, min(old, new))
    pairs = tuple(zip(sorted(rng.sample(range(old), count)), rng.sample(range(new), count), strict=True))
    IdMap(np.array([pair[0] for pair in pairs]), np.array([pair[1] for pair in pairs])).save(file)
    return pairs, RowChange(new, IdMap.load(file), allow_dropped_rows=True)


def plan_of(rng: random.Random, step: Step, world: int) -> Plan:
    host = rng.choice([ranks for ranks in (1, 2, 4) if world % ranks == 0])
    known = ("tw", "rw", "cw") if step.model.parts[0].kind == "ec" else (*WHOLE, "cw", "twcw")
    families = [rng.choice([f for f in (WHOLE if split == 1 else SPLIT) if f in known]) for split in step.splits]
    turn = rng.randrange(4)
    return Plan(world, host, tuple(place(family, world, host, turn + at) for at, family in enumerate(families)))


# What a job must hold.


def expected(step: Step, before: State, saved: State) -> State:
    """What the new model holds after the restore: ``before`` it, and what ``saved`` has of it."""
    assert step.before is not None
    old_optimizer, optimizer = step.before.optimizer, step.model.optimizer
    found = {name: value.clone() for name, value in before.items()}
    found["step"] = saved["step"]
    if step.origins and optimizer == old_optimizer:
        counters = saved[f"counters.part0.{next(iter(step.origins.values())).old.name}"]
        found |= {name: counters for name in before if name.startswith("counters.")}
    for origin in step.origins.values():
        (new,) = (table for part in step.model.parts for table in part.tables if table.name == origin.name)
        cols = min(new.dim, origin.old.dim)
        pairs = origin.ids if origin.ids is not None else [(row, row) for row in range(min(new.rows, origin.old.rows))]
        old_ids, new_ids = (torch.tensor([pair[side] for pair in pairs]) for side in (0, 1))
        for name in before:
            if name.startswith("model.part") and name.endswith(f".{new.name}.weight"):
                source = saved[name.removesuffix(f"{new.name}.weight") + f"{origin.old.name}.weight"]
                found[name][new_ids, :cols] = source[old_ids, :cols].to(found[name].dtype)
            state = re.fullmatch(rf"fused\.part0\.{new.name}\.(\d)( columns (\d+):\d+)?", name)
            if state is None or STATES[optimizer][int(state[1])] not in STATES[old_optimizer]:
                continue
            prefix = f"fused.part0.{origin.old.name}.{STATES[old_optimizer].index(STATES[optimizer][int(state[1])])}"
            if state[2] is None:
                found[name][new_ids, :cols] = saved[prefix][old_ids, :cols]
            else:
                (source,) = (value for key, value in saved.items() if key.startswith(f"{prefix} columns {state[3]}:"))
                found[name][new_ids] = source[old_ids]
    for name in before:
        is_dense = name.startswith("model.") and ".embedding" not in name and name in saved
        if is_dense and saved[name].shape == before[name].shape:
            found[name] = saved[name]
            prefix = f"dense.{name.removeprefix('model.')}."
            found = {key: value for key, value in found.items() if not key.startswith(prefix)}
            found |= {key: value for key, value in saved.items() if key.startswith(prefix)}
    return found


# What ranks run.


def restored(
    model: Model,
    plan: Plan,
    settings: StreamConfig,
    marker: str | None,
    declared: Changes,
    events: tuple[str, ...],
    source: str | None = None,
) -> tuple[State, State, Marks, Changes, Restored]:
    """A changed job: what it held before and after the restore, and at the markers that it sets from there on.

    With a ``source`` it begins in that marker of another job, by a warm start.
    """
    job = zoo.build(model, plan)
    job.step = 900
    zoo.train(job)  # a live, different state: what is kept replaces it, what is fresh is this very state
    before = zoo.truth(job)
    with zoo.attach(job, settings) as checkpointer:
        changes = declared
        if source is not None:
            try:
                found = checkpointer.warm_start(source, changes=declared)
            except SchemaMismatchError as refused:
                changes = pasted(str(refused))
                found = checkpointer.warm_start(source, changes=changes)
        else:
            try:
                checkpointer.plan(marker, changes=declared)
            except SchemaMismatchError as refused:
                changes = pasted(str(refused))
                checkpointer.plan(marker, changes=changes)
            found = checkpointer.restore(marker, changes=changes)
        assert found is not None
        after = zoo.truth(job)
        zoo.play(job, checkpointer, events)
    return before, after, job.marks, changes, found


def pasted(message: str) -> Changes:
    """What an error says would accept the model."""
    text = message.split("in Python:\nchanges = ")[1].split("\nor in a TOML file:")[0]
    names = {"Changes": Changes, "DenseChanges": DenseChanges, "RowChange": RowChange, "IdMap": IdMap}
    made = eval(text, names)
    assert isinstance(made, Changes)
    return made
