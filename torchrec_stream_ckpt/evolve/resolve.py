"""Resolve a marker's tables against a changed model, by the declared changes. Reads and writes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from torchrec_stream_ckpt.errors import ChangesError, SchemaMismatchError
from torchrec_stream_ckpt.evolve.changes import RowChange
from torchrec_stream_ckpt.evolve.findings import Findings, Misfit
from torchrec_stream_ckpt.evolve.row_maps import IdMap, NewRows, RowMap
from torchrec_stream_ckpt.evolve.table_outcome import BY_RULE, DROPPED, EXACT, FRESH, Evolution, TableOutcome
from torchrec_stream_ckpt.evolve.text import nearest
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.util.types import TOMBSTONE, StateSpec, TableSpec, plain_name

TrainedRows = Callable[[int, RowMap], int | None]
"""Function of (a table's index in the marker, its kept rows) that counts the trained rows among the others.

Returns None if that is unknown.
"""
NewRowsOf = Callable[[str, str], NewRows | None]
"""Function of the names of a table in this model and in the marker that gives its raw ids rows of this job.

Returns None if each shard is a union of the marker's. Raises ChangesError if there is no id map, SchemaMismatchError if
it cannot be divided.
"""
HasIdMap = Callable[[str, str], bool | None]
"""Function of the names of a table in this model and in the marker that returns whether both have an id map for it.

Returns None if that is unknown.
"""


def compare_tables(
    saved: Schema,
    here: Sequence[TableSpec],
    found: Findings,
    trained_rows: TrainedRows | None = None,
    new_rows: NewRowsOf | None = None,
    has_id_map: HasIdMap | None = None,
) -> Evolution | None:
    """Find the outcome of each table of a marker. Adds problems and differences to ``found``; then returns None.

    Args:
        saved: Schema of the marker.
        here: Tables of this model, in any order.
        found: Has the declared changes.
        trained_rows: Counts trained rows among dropped ones; if None, each dropped row counts as trained.
        new_rows: If None, each table of ``Changes.reassigned`` counts as one whose raw ids get new rows.
        has_id_map: If None, nothing is known of id maps.
    """
    live = {table.name: table for table in here if not table.dropped}
    return _Tables(saved, live, found, trained_rows, new_rows, has_id_map).evolution()


class _Tables:
    """Comparison of a marker's tables with those of a model."""

    def __init__(
        self,
        saved: Schema,
        here: Mapping[str, TableSpec],
        found: Findings,
        trained_rows: TrainedRows | None,
        new_rows: NewRowsOf | None,
        has_id_map: HasIdMap | None,
    ) -> None:
        self._saved = saved
        self._index = saved.index()
        self._here = here
        self._found = found
        self._changes = found.declared
        self._trained_rows = trained_rows
        self._new_rows_of = new_rows
        self._has_id_map = has_id_map or (lambda *_: None)

    def evolution(self) -> Evolution | None:
        """Return the outcome of all tables; None if there are problems or undeclared differences."""
        before = len(self._found.problems), len(self._found.differences)
        self._check_names()
        self._check_keys()
        sources = self._sources()
        gone = self._gone(sources)
        kept = {name: self._outcome(name, source) for name, source in sorted(sources.items()) if source is not None}
        if (len(self._found.problems), len(self._found.differences)) != before:
            return None
        return self._arranged(kept, sorted(name for name, source in sources.items() if source is None), gone)

    def _arranged(self, kept: Mapping[str, TableOutcome], added: Sequence[str], gone: Mapping[int, str]) -> Evolution:
        """Put each table at its index: that of the marker, or for added tables one after the last."""
        specs = list(self._saved.tables)
        swept = set(gone)
        for index in gone:
            specs[index] = TOMBSTONE
        for outcome in kept.values():
            assert outcome.spec is not None
            specs[outcome.index] = outcome.spec
            if not outcome.goes_on:
                swept.add(outcome.index)
        fresh = []
        for name in added:
            spec = replace(self._here[name], id=None)
            fresh.append(_added(spec, len(specs)))
            swept.add(len(specs))
            specs.append(spec)
        dropped = [_dropped(self._saved.tables[index], index) for index in sorted(gone)]
        tables = (*sorted(kept.values(), key=lambda each: each.index), *fresh, *dropped)
        return Evolution(self._saved, Schema(tuple(specs)), tables, tuple(sorted(swept)), self._changes)

    # Match tables.

    def _check_names(self) -> None:
        """Find declared names that do not exist, or that are declared twice."""
        changes, problem = self._changes, self._found.problems.append
        for name in changes.dropped:
            self._known(f"dropped: {name!r}", name, self._index, "the marker")
            if name in changes.renamed:
                problem(f"{name!r} is both dropped and renamed")
        for name in changes.added:
            self._known(f"added: {name!r}", name, self._here, "this model")
            if name in changes.renamed.values():
                problem(f"{name!r} is both added and a new name")
            elif name in self._index and name not in (*changes.dropped, *changes.renamed):
                problem(f"added: {name!r} is a table of the marker; to reset it, declare it dropped as well")
        targets = list(changes.renamed.values())
        for old, new in changes.renamed.items():
            self._known(f"renamed: {old!r}", old, self._index, "the marker")
            self._known(f"renamed: {new!r}", new, self._here, "this model")
            if old == new:
                problem(f"renamed: {old!r} has the same name")
            elif new in self._index and new not in (*changes.dropped, *changes.renamed):
                problem(f"renamed: {new!r} is another table of the marker; declare that one dropped or renamed")
        for new in sorted({new for new in targets if targets.count(new) > 1}):
            problem(f"renamed: more than one table becomes {new!r}")

    def _check_keys(self) -> None:
        """Check that tables with a declared difference exist on both sides."""
        changes = self._changes
        for field_name in ("rows", "columns", "optimizer", "dtype", "reassigned"):
            for name in getattr(changes, field_name):
                what = f"{field_name}: {name!r}"
                if self._known(what, name, self._here, "this model") and name in changes.added:
                    self._found.problems.append(f"{what} is an added table, which has no earlier values")

    def _known(self, what: str, name: str, known: Iterable[str], where: str) -> bool:
        if name in known:
            return True
        self._found.problems.append(f"{what}: {where} has no such table{nearest(name, known)}")
        return False

    def _sources(self) -> dict[str, int | None]:
        """For each table of this model, return its index in the marker; None if it is fresh."""
        changes = self._changes
        new_names = {new: old for old, new in changes.renamed.items()}
        leaving = {*changes.dropped, *changes.renamed}
        sources: dict[str, int | None] = {}
        for name, spec in sorted(self._here.items()):
            old = new_names.get(name, name)
            stays = old in self._index and name not in changes.added and (old != name or old not in leaving)
            sources[name] = self._index[old] if stays else None
            if not stays and name not in changes.added and name not in new_names:
                if (twin := self._compiled(name)) is not None:
                    said = f"table {name!r}: the marker has it as {twin!r}, its name from torch.compile"
                    self._found.differs(said, "renamed", twin, name)
                    continue
                self._found.differs(f"table {name!r}: only this model has it ({_shape(spec)})", "added", name)
        return sources

    def _compiled(self, name: str) -> str | None:
        """Return the name from ``torch.compile`` of a table in the marker, if the marker has no other name for it."""
        if name not in self._here or name in (*self._index, *self._changes.added, *self._changes.renamed.values()):
            return None
        names = (old for old in self._index if plain_name(old) == name and old not in self._changes.dropped)
        return next(names, None)

    def _gone(self, sources: Mapping[str, int | None]) -> dict[int, str]:
        """Return the names of the marker's tables that this model does not have, by index."""
        taken = set(sources.values())
        gone = {index: name for name, index in self._index.items() if index not in taken}
        for index, name in gone.items():
            if name not in self._changes.dropped and name not in self._changes.renamed:
                if plain_name(name) != name and self._compiled(plain_name(name)) == name:
                    continue
                spec = self._saved.tables[index]
                self._found.differs(f"table {name!r}: only the marker has it ({_shape(spec)})", "dropped", name)
        return gone

    # The outcome of one table.

    def _outcome(self, name: str, source: int) -> TableOutcome:
        old, new = self._saved.tables[source], self._here[name]
        rows_kept, new_rows = self._rows(name, source), self._new_rows(name, old.name)
        reassigned = new_rows is not None or (self._new_rows_of is None and name in self._changes.reassigned)
        if new_rows is not None:
            rows_kept = new_rows.rows
        self._compare("columns", name, old.dim, new.dim, "{} columns")
        self._compare("dtype", name, old.dtype, new.dtype, "weights of {}")
        self._optimizer(name, old, new)
        same_rows = old.rows == new.rows == rows_kept.count and rows_kept.is_identity
        cols_kept = min(old.dim, new.dim)
        states = tuple((position, _position(state, old.states)) for position, state in enumerate(new.states))
        if not rows_kept.count:
            states = tuple((position, None) for position, _ in states)
        weights = EXACT if old.dtype == new.dtype else BY_RULE
        same_optimizer = (old.optimizer, old.states) == (new.optimizer, new.states)
        known = old.id is not None or old.name == new.name  # in logs of version 1, the name is the id
        goes_on = (
            known and same_rows and not reassigned and same_optimizer and (old.dim, old.dtype) == (new.dim, new.dtype)
        )
        return TableOutcome(
            name=name,
            saved_name=old.name,
            index=source,
            source=source,
            spec=replace(new, id=old.id if goes_on else None),
            saved_spec=old,
            goes_on=goes_on,
            rows_kept=rows_kept,
            cols_kept=cols_kept,
            states=states,
            weights_label=weights if rows_kept.count else FRESH,
            state_labels=tuple(_state_label(old, new, *pair) for pair in states),
            keeps_iteration=same_optimizer,
            reassigned=reassigned,
            raw_ids=(new_rows.kept, new_rows.dropped) if new_rows is not None else None,
        )

    def _new_rows(self, name: str, there: str) -> NewRows | None:
        """Return the new rows of a table's raw ids; None if it keeps its rows, or if this is not known here."""
        if name not in self._changes.reassigned:
            return None
        if self._new_rows_of is None:
            if self._has_id_map(name, there) is False:
                self._found.problems.append(
                    f"reassigned: {name!r}: the marker has no id map (managed collision) for this table"
                )
            return None
        try:
            return self._new_rows_of(name, there)
        except ChangesError as error:
            self._found.problems.append(f"reassigned: {name!r}: {error.message}")
        except SchemaMismatchError as error:
            self._found.misfits.append(Misfit.of(error))
        return None

    def _compare(self, field_name: str, name: str, old: object, new: object, words: str) -> None:
        """Check that one property of a table is equal or declared."""
        declared = getattr(self._changes, field_name).get(name)
        if old == new:
            if declared is not None:
                self._found.problems.append(f"{field_name}: {name!r}: marker and model both have {new!r}")
        elif declared is None:
            said = f"table {name!r}: {words.format(new)} here, {old} in the marker"
            self._found.differs(said, field_name, name, new)
        elif declared != new:
            self._found.problems.append(f"{field_name}: {name!r}: {declared!r} is declared, but this model has {new!r}")

    def _optimizer(self, name: str, old: TableSpec, new: TableSpec) -> None:
        if old.optimizer != new.optimizer or old.states == new.states:
            self._compare("optimizer", name, old.optimizer, new.optimizer, "trained by {}")
            return
        declared = self._changes.optimizer.get(name)
        if declared is None:
            said = f"table {name!r}: {new.optimizer} keeps {_kept(new)} here, {_kept(old)} in the marker"
            self._found.differs(said, "optimizer", name, new.optimizer)
        elif declared != new.optimizer:
            said = f"optimizer: {name!r}: {declared!r} is declared, but this model has {new.optimizer!r}"
            self._found.problems.append(said)

    def _rows(self, name: str, source: int) -> RowMap:
        """Return the rows that are kept."""
        saved = self._saved.tables[source]
        old, new = saved.rows, self._here[name].rows
        declared = self._changes.rows.get(name)
        kept, reassigned = RowMap(min(old, new)), name in self._changes.reassigned
        moves = old != new or (declared is not None and declared.ids is not None)
        needed = not reassigned and moves and self._has_id_map(name, saved.name) is True
        said = f"table {name!r}: {new} rows here, {old} in the marker"
        if needed:
            self._found.needs("reassigned", name)
            said += "; it has an id map (managed collision), so its raw ids need new rows"
        if declared is None:
            if old != new:
                lost = "" if reassigned or needed else self._lost(source, kept)
                change = RowChange(new, allow_dropped_rows=bool(lost))
                self._found.differs(f"{said}; {lost}" if lost else said, "rows", name, change)
            return kept
        what, problem = f"rows: {name!r}", self._found.problems.append
        if declared.rows != new:
            problem(f"{what}: {declared.rows} rows are declared, but this model has {new}")
            return kept
        if declared.ids is None and old == new:
            problem(f"{what}: marker and model both have {new} rows, but no ids are declared")
        if declared.ids is not None and (reassigned or needed):
            who = "reassigned" if reassigned else "its id map (managed collision)"
            problem(f"{what}: ids are declared, but {who} gives all rows to raw ids")
        elif needed:
            self._found.differences.append(said)
        elif declared.ids is not None:
            outside = _outside(declared.ids, old, new)
            self._found.problems += [f"{what}: {each}" for each in outside]
            if outside:
                return kept
            kept = RowMap.of(declared.ids)
        lost = "" if declared.allow_dropped_rows or reassigned or needed else self._lost(source, kept)
        if lost:
            problem(f"{what}: {lost}; set allow_dropped_rows to accept that")
        return kept

    def _lost(self, source: int, kept: RowMap) -> str:
        """Describe the trained rows that would be dropped; empty if none would be dropped."""
        going = self._saved.tables[source].rows - kept.count
        if not going or self._trained_rows is None:
            return f"{going} rows would be dropped, which may be trained" if going else ""
        trained = self._trained_rows(source, kept)
        if trained is None:
            return f"{going} rows would be dropped, which may be trained (they have no optimizer state that shows it)"
        return f"{going} rows would be dropped, {trained} of them trained" if trained else ""


def _added(spec: TableSpec, index: int) -> TableOutcome:
    return TableOutcome(
        name=spec.name,
        saved_name=None,
        index=index,
        source=None,
        spec=spec,
        saved_spec=None,
        weights_label=FRESH,
        states=tuple((position, None) for position in range(len(spec.states))),
        state_labels=(FRESH,) * len(spec.states),
    )


def _dropped(spec: TableSpec, index: int) -> TableOutcome:
    return TableOutcome(
        name=spec.name,
        saved_name=spec.name,
        index=index,
        source=index,
        spec=None,
        saved_spec=spec,
        weights_label=DROPPED,
    )


def _position(state: StateSpec, among: Sequence[StateSpec]) -> int | None:
    """Return the position of the state with the same name, dtype and kind of shape; None if no state matches."""
    return among.index(state) if state in among else None


def _state_label(old: TableSpec, new: TableSpec, position: int, source: int | None) -> str:
    if source is None:
        return FRESH
    narrowed = new.states[position].per_row and old.dim != new.dim
    return EXACT if old.optimizer == new.optimizer and not narrowed else BY_RULE


def _outside(ids: IdMap, old: int, new: int) -> list[str]:
    """Describe the ids of a map that are outside of the tables."""
    sides = (("old", ids.old_ids, old, "the marker"), ("new", ids.new_ids, new, "this model"))
    found = ((side, each[each >= rows], rows, where) for side, each, rows, where in sides)
    return [
        f"{len(ids)} {side} ids are outside the {rows} rows of {where}; the first is {ids[0]}"
        for side, ids, rows, where in found
        if len(ids)
    ]


def _shape(spec: TableSpec) -> str:
    return f"{spec.rows} x {spec.dim} {spec.dtype}, {spec.optimizer}"


def _kept(spec: TableSpec) -> str:
    states = (f"{state.name} ({state.dtype} a {'row' if state.per_row else 'weight'})" for state in spec.states)
    return ", ".join(states) or "no state"
