"""Resolve a marker's dense state against a changed model, by the declared changes. Reads and writes nothing."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TypeVar

from torchrec_stream_ckpt.evolve.dense_outcome import (
    DenseEvolution,
    DenseOutcome,
    OptimizerOutcome,
    StatefulOutcome,
    StateOutcome,
)
from torchrec_stream_ckpt.evolve.findings import Findings
from torchrec_stream_ckpt.evolve.imported import ImportedOptimizers, States, imported_stateful, reset_states
from torchrec_stream_ckpt.evolve.model_schema import NO_TENSOR, DenseEntry, DenseOptimizer, ModelSchema
from torchrec_stream_ckpt.evolve.table_outcome import BY_RULE, DROPPED, EXACT, FRESH
from torchrec_stream_ckpt.evolve.text import nearest
from torchrec_stream_ckpt.util.types import grouped, plain_name

T = TypeVar("T")
_PLAIN = re.compile(r"[\w.]+")


def compare_dense(
    saved: ModelSchema, here: ModelSchema, found: Findings, imported: States | None = None
) -> DenseEvolution:
    """Find the outcome of each dense parameter, of each dense optimizer and its states, and of the user's objects.

    Args:
        saved: Schema of the marker; its tables are ignored.
        here: Schema of this model.
        found: Findings, to which problems are added; the result is valid only without any.
        imported: States of an imported marker, whose optimizers and objects are ignored. None for other markers.
    """
    entries = _Entries(saved, here, found)
    outcomes = entries.outcomes()
    kept = {entry.name: entry.source for entry in outcomes if entry.source is not None}
    if imported is not None:
        taken = ImportedOptimizers(imported, here, found, kept)
        return DenseEvolution(outcomes, taken.states(), taken.outcomes(), imported_stateful(here, found))
    optimizers = _Optimizers(saved, here, found, entries.sources, kept)
    return DenseEvolution(outcomes, optimizers.states(), optimizers.outcomes(), _stateful(saved, here, found))


class _Entries:
    """Match dense parameters of the marker and of this model."""

    def __init__(self, saved: ModelSchema, here: ModelSchema, found: Findings) -> None:
        self._saved = {entry.name: entry for entry in saved.dense}
        self._here = {entry.name: entry for entry in here.dense}
        self._found = found
        self._declared = found.declared.dense
        self._new_names = self._renames()
        self._check_names()
        self.sources = self._sources()
        """For each parameter of this model that the marker has, in any shape, its name in the marker."""

    def outcomes(self) -> tuple[DenseOutcome, ...]:
        """Return the outcome of each parameter."""
        found, reshaped, twins = [], self._declared.reshaped, self._compiled()
        for name, entry in self._here.items():
            source = self.sources.get(name)
            if source is None:
                if name in twins:
                    said = f"dense {name!r}: the marker has it as {twins[name]!r}, its name from torch.compile"
                    self._found.differs(said, "dense.renamed", twins[name], name)
                elif name not in self._declared.fresh:
                    self._found.differs(f"dense {name!r}: only this model has it ({_of(entry)})", "dense.fresh", name)
            elif _of(self._saved[source]) != _of(entry):
                if name not in reshaped:
                    said = f"dense {name!r}: {_of(entry)} here, {_of(self._saved[source])} in the marker"
                    self._found.differs(said, "dense.reshaped", name)
                source = None
            elif name in reshaped:
                self._found.problems.append(f"dense.reshaped: {name!r}: marker and model both have {_of(entry)}")
            found.append(DenseOutcome(name, source, entry, EXACT if source is not None else FRESH))
        taken = {*self.sources.values(), *twins.values()}
        for name, entry in self._saved.items():
            if name not in taken:
                if name not in self._declared.dropped:
                    said = f"dense {name!r}: only the marker has it ({_of(entry)})"
                    self._found.differs(said, "dense.dropped", name)
                found.append(DenseOutcome(name, None, entry, DROPPED))
        return tuple(found)

    def _compiled(self) -> dict[str, str]:
        """For parameters that the marker has only under a name from ``torch.compile``, return that name."""
        declared = self._declared
        twins = {plain_name(name): name for name in self._saved if name not in declared.dropped}
        known = {*self.sources, *self._saved, *declared.fresh, *declared.renamed}
        return {name: old for name, old in twins.items() if name in self._here and not known & {name}}

    def _sources(self) -> dict[str, str]:
        declared = self._declared
        sources = {new: old for old, new in self._new_names.items() if new in self._here}
        leaving = {*declared.dropped, *self._new_names}
        for name in self._here:
            if name not in sources and name in self._saved and name not in leaving and name not in declared.fresh:
                sources[name] = name
        return sources

    def _check_names(self) -> None:
        declared, problem = self._declared, self._found.problems.append
        for name in declared.fresh:
            if name not in self._here:
                problem(f"dense.fresh: {name!r}: this model has no such parameter{nearest(name, self._here)}")
            elif name in self._new_names.values():
                problem(f"dense: {name!r} is both fresh and a new name")
            elif name in self._saved and name not in (*declared.dropped, *self._new_names):
                problem(f"dense.fresh: {name!r} is in the marker; to reset it, declare it dropped as well")
        for name in declared.dropped:
            if name not in self._saved:
                problem(f"dense.dropped: {name!r}: the marker has no such parameter{nearest(name, self._saved)}")
            elif name in self._new_names:
                problem(f"dense: {name!r} is both dropped and renamed")
        for name in declared.reshaped:
            if name not in self._here:
                problem(f"dense.reshaped: {name!r}: this model has no such parameter{nearest(name, self._here)}")
            elif name in declared.fresh:
                problem(f"dense: {name!r} is both fresh and reshaped")

    def _renames(self) -> dict[str, str]:
        """Return the new names of renamed parameters, by their name in the marker."""
        new_names: dict[str, str] = {}
        by: dict[str, str] = {}
        for pattern, template in self._declared.renamed.items():
            try:
                renamed = self._renamed(pattern, template)
            except re.error as error:
                self._found.problems.append(f"dense.renamed: {pattern!r} -> {template!r}: {error}")
                continue
            if not renamed:
                near = nearest(pattern, self._saved) if _PLAIN.fullmatch(pattern) else ""
                self._found.problems.append(f"dense.renamed: {pattern!r}: the marker has no such parameter{near}")
            for old, new in renamed.items():
                if old in by:
                    self._found.problems.append(f"dense.renamed: both {by[old]!r} and {pattern!r} rename {old!r}")
                elif new not in self._here:
                    self._found.problems.append(
                        f"dense.renamed: {old!r} becomes {new!r}: this model has no such parameter"
                        f"{nearest(new, self._here)}"
                    )
                elif old != new:
                    new_names[old] = new
                by[old] = pattern
        self._check_targets(new_names)
        return new_names

    def _renamed(self, pattern: str, template: str) -> dict[str, str]:
        """Return the new names of the parameters that one declaration renames, by their old name."""
        if pattern in self._saved:
            return {pattern: template}
        compiled = re.compile(pattern)
        matches = {name: compiled.fullmatch(name) for name in self._saved}
        return {name: match.expand(template) for name, match in matches.items() if match is not None}

    def _check_targets(self, new_names: Mapping[str, str]) -> None:
        for new, olds in grouped((new, old) for old, new in new_names.items()).items():
            if len(olds) > 1:
                self._found.problems.append(f"dense.renamed: {', '.join(map(repr, olds))} all become {new!r}")
            elif new in self._saved and new not in (*self._declared.dropped, *new_names):
                self._found.problems.append(
                    f"dense.renamed: {olds[0]!r} becomes {new!r}, another parameter of the marker; declare that one "
                    "dropped or renamed"
                )


class _Optimizers:
    """Match optimizer states of the marker and of this job.

    Args:
        same: For each parameter of this model that the marker has, its name in the marker.
        kept: The part of ``same`` with the same shape and dtype.
    """

    def __init__(
        self, saved: ModelSchema, here: ModelSchema, found: Findings, same: Mapping[str, str], kept: Mapping[str, str]
    ) -> None:
        self._saved = {each.key: each for each in saved.optimizers}
        self._here = {each.key: each for each in here.optimizers}
        self._found = found
        self._same = same
        self._kept = kept
        self._declared = found.declared.dense.optimizer
        self._holders = {name: each for each in saved.optimizers for name in each.parameters}

    def states(self) -> tuple[StateOutcome, ...]:
        """Return the outcome of each state: kept with its parameter if the optimizer has the same class."""
        found = []
        reset_states(self._found, self._here, self._saved)
        for each in self._here.values():
            for name in each.parameters:
                found.append(self._state(each, name))
        return tuple(found)

    def _state(self, optimizer: DenseOptimizer, name: str) -> StateOutcome:
        old = self._kept.get(name)
        holder = self._holders.get(old) if old is not None else None
        stays = old is not None and holder is not None and holder.kind == optimizer.kind
        if name in self._declared and name not in self._here:
            if not stays and self._declared[name] == FRESH:
                self._found.problems.append(f"dense.optimizer: {name!r}: its state is reset without this declaration")
            stays = False
        source = (holder.key, old) if stays and holder is not None and old is not None else None
        return StateOutcome(optimizer.key, name, source, EXACT if stays else FRESH)

    def outcomes(self) -> tuple[OptimizerOutcome, ...]:
        """Return the outcome of each optimizer."""
        gone = [each for key, each in self._saved.items() if key not in self._here]
        for each in gone:
            declared = self._declared.get(each.key)
            if declared is None:
                said = f"dense {each.key!r}: only the marker has it ({each.kind})"
                self._found.differs(said, "dense.optimizer", each.key, DROPPED)
            elif declared != DROPPED:
                self._found.problems.append(
                    f"dense.optimizer: {each.key!r}: the value must be 'dropped', got {declared!r}"
                )
        dropped = (OptimizerOutcome(each.key, each.kind, each.kind, (), DROPPED) for each in gone)
        return (*(self._outcome(each) for each in self._here.values()), *dropped)

    def _outcome(self, here: DenseOptimizer) -> OptimizerOutcome:
        saved, declared = self._saved.get(here.key), self._declared.get(here.key)
        difference = self._difference(saved, here)
        if not difference and declared is not None:
            self._found.problems.append(f"dense.optimizer: {here.key!r} does not differ from the marker")
        elif difference and declared is None:
            self._found.differs(f"dense {here.key!r}: {difference}", "dense.optimizer", here.key, here.kind)
        elif difference and declared != here.kind:
            said = f"dense.optimizer: {here.key!r}: {declared!r} is declared, but this job has {here.kind!r}"
            self._found.problems.append(said)
        if saved is None or difference:
            saved_kind = saved.kind if saved is not None else None
            return OptimizerOutcome(here.key, here.kind, saved_kind, (None,) * len(here.groups), FRESH)
        groups = self._groups(saved, here)
        return OptimizerOutcome(here.key, here.kind, saved.kind, groups, BY_RULE if None in groups else EXACT)

    def _difference(self, saved: DenseOptimizer | None, here: DenseOptimizer) -> str:
        """Describe the difference; empty if the parameters that both models have are in the same groups."""
        if saved is None:
            return f"only this job has it ({here.kind})"
        if saved.kind != here.kind:
            return f"{here.kind} here, {saved.kind} in the marker"
        there, now = self._common(saved, here)
        alike = [names for _, names in there] == [names for _, names in now]
        return "" if alike else "its param groups have different parameters in the marker"

    def _groups(self, saved: DenseOptimizer, here: DenseOptimizer) -> tuple[int | None, ...]:
        there, now = self._common(saved, here)
        taken = {mine: theirs for (theirs, _), (mine, _) in zip(there, now, strict=True)}
        if len(saved.groups) == len(here.groups):  # groups without a parameter in common are matched by place
            free = [place for place in range(len(here.groups)) if place not in taken and place not in taken.values()]
            taken |= {place: place for place in free if not here.groups[place] and not saved.groups[place]}
        return tuple(taken.get(position) for position in range(len(here.groups)))

    def _common(
        self, saved: DenseOptimizer, here: DenseOptimizer
    ) -> tuple[list[tuple[int, frozenset[str]]], list[tuple[int, frozenset[str]]]]:
        """Return (position, parameters) of groups, without empty ones, with common parameters by the marker's names."""
        common = set(self._same.values())
        now = [[self._same[name] for name in group if name in self._same] for group in here.groups]
        there = [[name for name in group if name in common] for group in saved.groups]
        return _numbered(there), _numbered(now)


def _of(entry: DenseEntry) -> str:
    """Describe shape and dtype, which must be equal."""
    if entry.dtype == NO_TENSOR:
        return NO_TENSOR
    return f"{' x '.join(map(str, entry.shape)) or 'one value of'} {entry.dtype}"


def _numbered(groups: Iterable[Iterable[str]]) -> list[tuple[int, frozenset[str]]]:
    return [(position, names) for position, group in enumerate(groups) if (names := frozenset(group))]


def _stateful(saved: ModelSchema, here: ModelSchema, found: Findings) -> tuple[StatefulOutcome, ...]:
    declared = found.declared
    anew = {*declared.stateful_added} & {*declared.stateful_dropped} & {*saved.stateful} & {*here.stateful}
    for name in here.stateful:
        if name not in anew and (name not in saved.stateful) != (name in declared.stateful_added):
            if name in declared.stateful_added:
                found.problems.append(
                    f"stateful_added: {name!r} is in the marker; to reset it, declare it dropped as well"
                )
            else:
                found.differs(f"stateful {name!r}: only this job has it", "stateful_added", name)
    gone = [name for name in saved.stateful if name not in here.stateful]
    for name in gone:
        if name not in declared.stateful_dropped:
            found.differs(f"stateful {name!r}: only the marker has it", "stateful_dropped", name)
    for name in declared.stateful_added:
        if name not in here.stateful:
            found.problems.append(
                f"stateful_added: {name!r}: this job has no such object{nearest(name, here.stateful)}"
            )
    for name in declared.stateful_dropped:
        if name not in gone and name not in anew:
            where = "this job has it" if name in here.stateful else "the marker has no such object"
            found.problems.append(f"stateful_dropped: {name!r}: {where}{nearest(name, set(saved.stateful) - {name})}")
    kept = (StatefulOutcome(name, EXACT if name in {*saved.stateful} - anew else FRESH) for name in here.stateful)
    return (*kept, *(StatefulOutcome(name, DROPPED) for name in gone))
