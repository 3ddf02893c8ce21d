"""Report the outcome of a marker, as text and as JSON: for people before a restore, and for the log after it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from torchrec_stream_ckpt.evolve.changes import Changes
from torchrec_stream_ckpt.evolve.dense_outcome import DenseEvolution
from torchrec_stream_ckpt.evolve.imported import States
from torchrec_stream_ckpt.evolve.model_evolution import ModelEvolution, evolve
from torchrec_stream_ckpt.evolve.model_schema import ModelSchema
from torchrec_stream_ckpt.evolve.table_outcome import DROPPED, EXACT, FRESH, TableOutcome
from torchrec_stream_ckpt.util.units import size


@dataclass(frozen=True, slots=True)
class EvolvedPart:
    """Outcome of one table, dense parameter, optimizer or object of the user."""

    kind: str
    """``table``, ``dense``, ``optimizer`` or ``stateful``."""
    name: str
    """Name in this model; for a dropped part, name in the marker."""
    saved_name: str | None
    """Name in the marker; None if only this model has it."""
    change: str
    """Description of the change; empty if nothing has changed."""
    labels: dict[str, str]
    """Labels of weights and states, or of value and state: ``exact``, ``by rule``, ``fresh`` or ``dropped``."""
    rows: tuple[int, int, int] | None = None
    """(tables) Number of rows kept, fresh, and dropped."""
    num_bytes: tuple[int, int, int] | None = None
    """(tables and parameters) Bytes kept, fresh, and dropped; for a parameter, without its state."""
    sent_whole: bool = False
    """(tables) True if the new generation sends all of its rows."""
    raw_ids: tuple[int, int] | None = None
    """(tables whose raw ids get new rows) Number of raw ids kept, and dropped because they do not fit. None if that
    depends on a job's ranks."""

    @property
    def label(self) -> str:
        """Its labels as text."""
        said = set(self.labels.values())
        return said.pop() if len(said) == 1 else ", ".join(f"{part} {label}" for part, label in self.labels.items())


@dataclass(frozen=True, slots=True)
class EvolutionReport:
    """Report of the outcome of a marker."""

    parts: tuple[EvolvedPart, ...]
    dense: bool
    """True if the dense state was compared."""
    digest: str
    """Digest of the declared changes."""

    @staticmethod
    def compare(saved: ModelSchema, here: ModelSchema, changes: Changes, imported: States) -> EvolutionReport:
        """Report on an imported checkpoint in a model. Arguments and errors are those of :func:`evolve`."""
        return EvolutionReport.of(evolve(saved, here, changes, imported=imported))

    @staticmethod
    def of(evolution: ModelEvolution) -> EvolutionReport:
        """Make the report of a comparison."""
        parts = [_table(each) for each in evolution.tables.tables]
        if evolution.dense is not None:
            parts += _dense(evolution.dense)
        return EvolutionReport(tuple(parts), evolution.dense is not None, evolution.tables.changes.digest)

    @property
    def record(self) -> dict[str, Any]:
        """The report for JSON."""
        parts = [
            {
                **asdict(part),
                "rows": _named(part.rows),
                "num_bytes": _named(part.num_bytes),
                "raw_ids": dict(zip(("kept", "dropped"), part.raw_ids, strict=True)) if part.raw_ids else None,
            }
            for part in self.parts
        ]
        return {"digest": self.digest, "dense_compared": self.dense, "parts": parts}

    @property
    def total_bytes(self) -> tuple[int, int, int]:
        """Bytes kept, fresh and dropped, of tables and parameters."""
        found = [part.num_bytes for part in self.parts if part.num_bytes is not None]
        kept, fresh, dropped = (sum(each[place] for each in found) for place in range(3))
        return kept, fresh, dropped

    @property
    def kept_in_part(self) -> tuple[str, ...]:
        """Tables that keep rows of the marker and are sent completely; the marker's proofs do not cover them."""
        tables = (part for part in self.parts if part.sent_whole and part.rows is not None and part.rows[0])
        return tuple(part.name for part in tables)

    @property
    def swept_bytes(self) -> int:
        """Bytes of the tables that the new generation sends completely."""
        return sum(sum(part.num_bytes[:2]) for part in self.parts if part.sent_whole and part.num_bytes is not None)

    def lines(self) -> Iterator[str]:
        """Yield one line for each part that has changed, and one with totals."""
        for part in self.parts:
            if part.change:
                yield f"{part.kind} {part.name}: {part.change}; {part.label}"
        kept, fresh, dropped = map(size, self.total_bytes)
        yield f"kept {kept}, fresh {fresh}, dropped {dropped}; sent whole {size(self.swept_bytes)}"


def _named(counts: tuple[int, int, int] | None) -> dict[str, int] | None:
    return dict(zip(("kept", "fresh", "dropped"), counts, strict=True)) if counts is not None else None


def _table(outcome: TableOutcome) -> EvolvedPart:
    labels = {"weights": outcome.weights_label}
    if outcome.spec is not None:
        states = (outcome.spec.states[position].name for position, _ in outcome.states)
        labels |= dict(zip(states, outcome.state_labels, strict=True))
    return EvolvedPart(
        kind="table",
        name=outcome.name,
        saved_name=outcome.saved_name,
        change=", ".join(_said(outcome)),
        labels=labels,
        rows=(outcome.rows_kept.count, outcome.rows_fresh, outcome.rows_dropped),
        num_bytes=(outcome.bytes_kept, outcome.bytes_fresh, outcome.bytes_dropped),
        sent_whole=not outcome.goes_on and not outcome.is_dropped,
        raw_ids=outcome.raw_ids,
    )


def _said(outcome: TableOutcome) -> Iterator[str]:
    """Yield descriptions of the differences from the marker."""
    old, new = outcome.saved_spec, outcome.spec
    if old is None or new is None:
        yield DROPPED if new is None else "added"
        return
    if old.name != new.name:
        yield f"was {old.name}"
    if outcome.reassigned:
        yield from _reassigned(outcome)
        if old.rows != new.rows:
            yield f"rows {old.rows:,} -> {new.rows:,}"
    elif not outcome.rows_kept.is_identity:
        yield f"{outcome.rows_kept.count:,} rows moved by id map, {old.rows:,} -> {new.rows:,}"
    elif old.rows != new.rows:
        yield f"rows {old.rows:,} -> {new.rows:,}"
    elif outcome.rows_kept.count != old.rows:
        yield f"{outcome.rows_kept.count:,} of {old.rows:,} rows kept by id map"
    if old.dim != new.dim:
        yield f"columns {old.dim} -> {new.dim}"
    if old.dtype != new.dtype:
        yield f"{old.dtype} -> {new.dtype}"
    if old.optimizer != new.optimizer:
        yield f"{old.optimizer} -> {new.optimizer}"
    elif old.states != new.states:
        yield f"different states of {new.optimizer}"


def _reassigned(outcome: TableOutcome) -> Iterator[str]:
    if outcome.raw_ids is None:
        yield "raw ids get new rows, unless the job's shards are unions of the marker's"
    else:
        yield "new rows for {:,} raw ids, {:,} do not fit and are dropped".format(*outcome.raw_ids)


def _dense(evolution: DenseEvolution) -> Iterator[EvolvedPart]:
    states = {state.parameter: state.label for state in evolution.states}
    for entry in evolution.entries:
        labels = {"value": entry.label}
        if entry.label != DROPPED and entry.name in states:
            labels["state"] = states[entry.name]
        renamed = entry.source is not None and entry.source != entry.name
        said = f"was {entry.source}" if renamed else "" if entry.label == EXACT else entry.label
        if not said and labels.get("state") == FRESH:
            said = "state is reset"
        num_bytes = {EXACT: (entry.num_bytes, 0, 0), FRESH: (0, entry.num_bytes, 0), DROPPED: (0, 0, entry.num_bytes)}
        saved_name = entry.name if entry.label == DROPPED else entry.source
        yield EvolvedPart("dense", entry.name, saved_name, said, labels, num_bytes=num_bytes[entry.label])
    for each in evolution.optimizers:
        said = "" if each.label == EXACT else each.label
        if each.saved_kind is not None and each.label not in (EXACT, DROPPED):
            own = sum(group is None for group in each.groups)
            said = (
                f"{each.saved_kind} -> {each.kind}"
                if each.kind != each.saved_kind
                else f"{own} groups with this job's settings"
            )
        saved_name = each.key if each.saved_kind is not None else None
        yield EvolvedPart("optimizer", each.key, saved_name, said, {"hyperparameters": each.label})
    for item in evolution.stateful:
        said = "" if item.label == EXACT else item.label
        saved_name = item.name if item.label != FRESH else None
        yield EvolvedPart("stateful", item.name, saved_name, said, {"state": item.label})
