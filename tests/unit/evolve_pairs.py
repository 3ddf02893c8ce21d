"""Random pairs of models, a marker's and the one that it is restored into, with the changes that lie between them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tests.unit.evolve_oracle import Array, Table
from torchrec_stream_ckpt.evolve.changes import Changes, DenseChanges, RowChange
from torchrec_stream_ckpt.evolve.model_schema import DenseOptimizer, ModelSchema
from torchrec_stream_ckpt.evolve.row_maps import IdMap
from torchrec_stream_ckpt.inner import DenseEntry
from torchrec_stream_ckpt.util.types import TOMBSTONE, StateSpec, TableSpec

_SUM = StateSpec("sum", "float32", per_row=True)
_WIDE_SUM = StateSpec("sum", "float32", per_row=False)
_MOMENTS = (StateSpec("exp_avg", "float32", per_row=False), StateSpec("exp_avg_sq", "float32", per_row=False))
_PARTIAL = (_MOMENTS[0], replace(_MOMENTS[1], per_row=True))
OPTIMIZERS: dict[str, tuple[StateSpec, ...]] = {
    "exact_sgd": (),
    "exact_adagrad": (_WIDE_SUM,),
    "exact_rowwise_adagrad": (_SUM,),
    "ensemble_rowwise_adagrad": (_SUM, StateSpec("sparse_ema", "float16", per_row=False)),
    "adam": _MOMENTS,
    "lamb": _MOMENTS,
    "partial_rowwise_adam": _PARTIAL,
    "adam_half": (replace(_MOMENTS[0], dtype="float16"), _MOMENTS[1]),
}
DIMS, DTYPES = (1, 2, 4, 8), ("float32", "float16")
SHAPES = ((), (3,), (2, 2), (4, 1))
KINDS = ("Adam", "SGD", "Adagrad")


@dataclass
class Edits:
    """What lies between two models, as it is made."""

    added: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    renamed: dict[str, str] = field(default_factory=dict)
    rows: dict[str, RowChange] = field(default_factory=dict)
    columns: dict[str, int] = field(default_factory=dict)
    optimizer: dict[str, str] = field(default_factory=dict)
    dtype: dict[str, str] = field(default_factory=dict)


class Draw:
    """Random choices of one seed."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self._names = 0

    def one(self, items: Any) -> Any:
        return items[int(self.rng.integers(len(items)))]

    def other(self, items: Any, than: Any) -> Any:
        return self.one([item for item in items if item != than])

    def chance(self, share: float) -> bool:
        return bool(self.rng.random() < share)

    def count(self, low: int, high: int) -> int:
        return int(self.rng.integers(low, high + 1))

    def name(self, prefix: str) -> str:
        """A new one, that sorts anywhere."""
        self._names += 1
        return f"{prefix}{self.one('abcxyz')}{self._names}"

    def spec(self, name: str) -> TableSpec:
        optimizer = self.one(list(OPTIMIZERS))
        return TableSpec(name, self.count(1, 12), self.one(DIMS), self.one(DTYPES), optimizer, OPTIMIZERS[optimizer])

    def saved(self) -> ModelSchema:
        """A marker's: tables in any order, some dropped before."""
        count = self.count(0, 6)
        tables = [replace(self.spec(self.name("t")), id=100 + number) for number in range(count)]
        for _ in range(self.count(0, 2)):
            tables.insert(self.count(0, len(tables)), TOMBSTONE)
        entries = tuple(self.entry(self.name("p")) for _ in range(self.count(0, 5)))
        names = [entry.name for entry in entries]
        stateful = tuple(self.name("s") for _ in range(self.count(0, 2)))
        return ModelSchema(tuple(tables), entries, self.optimizers(names), stateful)

    def entry(self, name: str) -> DenseEntry:
        return DenseEntry(name, self.one(SHAPES), self.one(DTYPES))

    def optimizers(self, names: list[str]) -> tuple[DenseOptimizer, ...]:
        """One or two, of one or two groups each; some parameters are in none."""
        groups: list[list[str]] = [[], [], []]
        for name in names:
            if self.chance(0.9):
                groups[self.count(0, 2)].append(name)
        first = DenseOptimizer("optimizer0", self.one(KINDS), (tuple(groups[0]), tuple(groups[1])))
        return (first, DenseOptimizer("optimizer1", self.one(KINDS), (tuple(groups[2]),)))[: self.count(1, 2)]

    # The model of now.

    def tables(self, saved: ModelSchema) -> tuple[list[TableSpec], Edits]:
        """Tables of the new model and what lies between."""
        edits, tables = Edits(), []
        live = [table for table in saved.tables if not table.dropped]
        stay = [table for table in live if not self.chance(0.2)]
        names = {table.name: table.name for table in stay}
        for table in stay:
            if self.chance(0.2):
                names[table.name] = self.name("t")
        if len(stay) > 1 and self.chance(0.25):  # names go round
            round_ = [table.name for table in stay[: self.count(2, len(stay))]]
            names |= dict(zip(round_, [*round_[1:], round_[0]], strict=True))
        edits.renamed = {old: new for old, new in names.items() if old != new}
        edits.dropped = [table.name for table in live if table.name not in names]
        for table in stay:
            tables.append(self._edited(table, names[table.name], edits))
        free = [name for name in edits.dropped + list(edits.renamed) if name not in names.values()]
        for _ in range(self.count(0, 2)):
            name = self.one(free) if free and self.chance(0.3) else self.name("t")
            if name not in edits.added:
                edits.added.append(name)
                tables.append(self.spec(name))
        return sorted(tables, key=lambda each: each.name), edits

    def _edited(self, old: TableSpec, name: str, edits: Edits) -> TableSpec:
        new = replace(old, name=name, id=None)
        if self.chance(0.3):
            new = self._rows(old, new, edits)
        if self.chance(0.25):
            edits.columns[name] = self.other(DIMS, old.dim)
            new = replace(new, dim=edits.columns[name])
        if self.chance(0.15):
            edits.dtype[name] = self.other(DTYPES, old.dtype)
            new = replace(new, dtype=edits.dtype[name])
        if self.chance(0.25):
            edits.optimizer[name] = self.other(list(OPTIMIZERS), old.optimizer)
            new = replace(new, optimizer=edits.optimizer[name], states=OPTIMIZERS[edits.optimizer[name]])
        return new

    def _rows(self, old: TableSpec, new: TableSpec, edits: Edits) -> TableSpec:
        rows = self.count(1, 14)
        ids = None
        if self.chance(0.5):
            if shuffled := self.chance(0.3):  # each row stays, most under another id
                rows = old.rows
            pairs = rows if shuffled else self.count(1, min(rows, old.rows))
            ids = IdMap(self.rng.permutation(old.rows)[:pairs], self.rng.permutation(rows)[:pairs])
        elif rows == old.rows:
            rows += 1
        kept = len(ids) if ids is not None else min(rows, old.rows)
        edits.rows[new.name] = RowChange(rows, ids, allow_dropped_rows=kept < old.rows or self.chance(0.2))
        return replace(new, rows=rows)

    def dense(self, saved: ModelSchema) -> tuple[ModelSchema, DenseChanges, tuple[str, ...], tuple[str, ...]]:
        """Dense part of the new model, what lies between, and objects that come and go."""
        fresh: list[str] = []
        dropped: list[str] = []
        reshaped: list[str] = []
        renamed: dict[str, str] = {}
        entries = []
        for entry in saved.dense:
            if self.chance(0.2):
                dropped.append(entry.name)
                continue
            new = replace(entry, name=self.name("p")) if self.chance(0.2) else entry
            if new.name != entry.name:
                renamed[entry.name] = new.name
            if self.chance(0.2):
                new = replace(new, shape=self.other(SHAPES, entry.shape))
                reshaped.append(new.name)
            entries.append(new)
        for _ in range(self.count(0, 2)):
            name = self.one(dropped) if dropped and self.chance(0.3) else self.name("p")
            if name not in fresh:
                fresh.append(name)
                entries.append(self.entry(name))
        optimizers, said = self._trained(saved, renamed, dropped, fresh)
        come = tuple(self.name("s") for _ in range(self.count(0, 1)))
        go = tuple(name for name in saved.stateful if self.chance(0.2))
        stateful = (*(name for name in saved.stateful if name not in go), *come)
        changes = DenseChanges(
            renamed=renamed, fresh=tuple(fresh), dropped=tuple(dropped), reshaped=tuple(reshaped), optimizer=said
        )
        return ModelSchema((), tuple(entries), optimizers, stateful), changes, come, go

    def _trained(
        self, saved: ModelSchema, renamed: dict[str, str], dropped: list[str], fresh: list[str]
    ) -> tuple[tuple[DenseOptimizer, ...], dict[str, str]]:
        """The optimizers of the new model: of other classes or of those that were, fresh parameters in some group."""
        said: dict[str, str] = {}
        optimizers = []
        for each in saved.optimizers:
            groups = [[renamed.get(name, name) for name in group if name not in dropped] for group in each.groups]
            if self.chance(0.2):
                said[each.key] = self.other(KINDS, each.kind)
            optimizers.append(replace(each, kind=said.get(each.key, each.kind), groups=tuple(map(tuple, groups))))
        for name in fresh:
            place = self.count(0, len(optimizers) - 1)
            first, *rest = optimizers[place].groups
            optimizers[place] = replace(optimizers[place], groups=((*first, name), *rest))
        return tuple(optimizers), said

    # Values.

    def table(self, spec: TableSpec) -> Table:
        """Random bits of finite values."""
        shapes = {"weights": ((spec.rows, spec.dim), spec.dtype)}
        for state in spec.states:
            shapes[state.name] = ((spec.rows,) if state.per_row else (spec.rows, spec.dim), state.dtype)
        return {key: self.array(shape, dtype) for key, (shape, dtype) in shapes.items()}

    def array(self, shape: tuple[int, ...], dtype: str) -> Array:
        return np.asarray(self.rng.standard_normal(shape)).astype(dtype)


@dataclass(frozen=True)
class Pair:
    """A marker's model, the one of now, and what was declared."""

    saved: ModelSchema
    here: ModelSchema
    changes: Changes


def pair(draw: Draw, saved: ModelSchema) -> Pair:
    """Another model than ``saved``, or the same one."""
    tables, edits = draw.tables(saved)
    dense, declared, come, go = draw.dense(saved)
    changes = Changes(**vars(edits), dense=declared, stateful_added=come, stateful_dropped=go)
    return Pair(saved, replace(dense, tables=tuple(tables)), changes)
