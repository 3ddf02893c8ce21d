"""Resolve optimizers and objects for an imported marker, of which only the names of states by parameter are known."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torchrec_stream_ckpt.evolve.dense_outcome import OptimizerOutcome, StatefulOutcome, StateOutcome
from torchrec_stream_ckpt.evolve.findings import Findings
from torchrec_stream_ckpt.evolve.model_schema import DenseOptimizer, ModelSchema
from torchrec_stream_ckpt.evolve.table_outcome import BY_RULE, FRESH
from torchrec_stream_ckpt.evolve.text import nearest

States = Mapping[str, Collection[str]]
"""Names of the states that an imported marker has, by parameter."""
IMPORTED = "imported"
"""Placeholder for the optimizer that has the states, because a checkpoint does not name it."""

_KEEPS: dict[str, tuple[frozenset[str], frozenset[str]]] = {
    "Adagrad": (frozenset({"step", "sum"}), frozenset()),
    "Adam": (frozenset({"step", "exp_avg", "exp_avg_sq"}), frozenset({"max_exp_avg_sq"})),
    "AdamW": (frozenset({"step", "exp_avg", "exp_avg_sq"}), frozenset({"max_exp_avg_sq"})),
    "RMSprop": (frozenset({"step", "square_avg"}), frozenset({"momentum_buffer", "grad_avg"})),
    "SGD": (frozenset(), frozenset({"momentum_buffer"})),
}
"""For torch's own optimizers, the states of each parameter, and further states that some settings add."""


class ImportedOptimizers:
    """Match imported states with optimizers of this job: by parameter, if the names of the states fit.

    Args:
        states: States in the marker.
        here: Schema of this model.
        found: Receives all findings.
        kept: For each parameter of this model whose value is kept, its name in the marker.
    """

    def __init__(self, states: States, here: ModelSchema, found: Findings, kept: Mapping[str, str]) -> None:
        self._states = states
        self._here = {each.key: each for each in here.optimizers}
        self._found = found
        self._kept = kept
        self._declared = found.declared.dense.optimizer

    def outcomes(self) -> tuple[OptimizerOutcome, ...]:
        """Return the outcome of each optimizer; hyperparameters are those of this job."""
        return tuple(
            OptimizerOutcome(each.key, each.kind, None, (None,) * len(each.groups), FRESH)
            for each in self._here.values()
        )

    def states(self) -> tuple[StateOutcome, ...]:
        """Return the outcome of the state of each parameter."""
        for name in reset_states(self._found, self._here):
            if self._kept.get(name) not in self._states:
                self._found.problems.append(f"dense.optimizer: {name!r}: its state is reset without this declaration")
        return tuple(
            outcome for each in self._here.values() for outcome in self._of(each, anew=self._declared.get(each.key))
        )

    def _of(self, optimizer: DenseOptimizer, anew: str | None) -> list[StateOutcome]:
        kept = {name: self._kept[name] for name in optimizer.parameters if self._kept.get(name) in self._states}
        wrong = {name: said for name, old in kept.items() if (said := self._misfit(optimizer.kind, old))}
        if anew is not None and anew != optimizer.kind:
            self._found.problems.append(
                f"dense.optimizer: {optimizer.key!r}: {anew!r} is declared, but this job has {optimizer.kind!r}"
            )
        elif anew is not None and not kept:
            self._found.problems.append(f"dense.optimizer: {optimizer.key!r}: the marker has no state for it")
        elif anew is None and wrong:
            name, said = min(wrong.items())
            self._found.differs(
                f"dense {optimizer.key!r}: {optimizer.kind} here; the marker has {said} for {name!r}",
                "dense.optimizer",
                optimizer.key,
                optimizer.kind,
            )
        outcomes = []
        for name in optimizer.parameters:
            stays = name in kept and anew is None and self._declared.get(name) != FRESH
            source = (IMPORTED, kept[name]) if stays else None
            outcomes.append(StateOutcome(optimizer.key, name, source, BY_RULE if stays else FRESH))
        return outcomes

    def _misfit(self, kind: str, name: str) -> str:
        """Describe states that an optimizer of this class does not accept; empty if it does or the class is unknown."""
        if kind not in _KEEPS:
            return ""
        needed, more = _KEEPS[kind]
        states = set(self._states[name])
        return "" if needed <= states <= needed | more else ", ".join(sorted(states)) or "no state"


def reset_states(found: Findings, here: Mapping[str, DenseOptimizer], saved: Collection[str] = ()) -> list[str]:
    """Return the parameters whose state is declared to be reset. Records declarations of neither these nor optimizers.

    Args:
        found: The declared changes; receives the problems.
        here: Optimizers of this job, by key.
        saved: Keys of the marker's optimizers.
    """
    trained, names = {name for each in here.values() for name in each.parameters}, []
    for name, said in found.declared.dense.optimizer.items():
        if name in here or name in saved:
            continue
        if name not in trained:
            found.problems.append(
                f"dense.optimizer: {name!r} is neither an optimizer nor a parameter that one trains"
                f"{nearest(name, (*here, *saved, *trained))}"
            )
        elif said != FRESH:
            found.problems.append(f"dense.optimizer: {name!r}: the value for a parameter must be 'fresh', got {said!r}")
        else:
            names.append(name)
    return names


def imported_stateful(here: ModelSchema, found: Findings) -> tuple[StatefulOutcome, ...]:
    """Return the outcome of the user's objects: all are fresh, because an imported checkpoint has none."""
    declared = found.declared
    for name in declared.stateful_added:
        if name not in here.stateful:
            said = f"stateful_added: {name!r}: this job has no such object{nearest(name, here.stateful)}"
            found.problems.append(said)
    for name in declared.stateful_dropped:
        found.problems.append(f"stateful_dropped: {name!r}: the marker was imported and has no stateful objects")
    return tuple(StatefulOutcome(name, FRESH) for name in here.stateful)
