"""Resolve a marker against a changed model, with the same result on every rank, before any row is read."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from torchrec_stream_ckpt.dense.dense_state import DenseState
from torchrec_stream_ckpt.dense.entry_matching import Match
from torchrec_stream_ckpt.dense.id_maps import no_id_map
from torchrec_stream_ckpt.dense.live_dense import LiveDense
from torchrec_stream_ckpt.dense.saved_dense import SavedDense
from torchrec_stream_ckpt.errors import ChangesError, MarkerNotFoundError, SchemaMismatchError, UnsupportedError
from torchrec_stream_ckpt.evolve.changes import NO_CHANGES, Changes
from torchrec_stream_ckpt.evolve.findings import Findings
from torchrec_stream_ckpt.evolve.model_evolution import ModelEvolution, check_not_repeated, compare
from torchrec_stream_ckpt.evolve.model_schema import ModelSchema
from torchrec_stream_ckpt.evolve.report import EvolutionReport
from torchrec_stream_ckpt.evolve.row_maps import NewRows
from torchrec_stream_ckpt.evolve.table_outcome import Evolution, TableOutcome
from torchrec_stream_ckpt.find.route import Route
from torchrec_stream_ckpt.format.claim_changes import ClaimChanges
from torchrec_stream_ckpt.format.control import Claim
from torchrec_stream_ckpt.format.lineage import Lineage, told_to
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.model import MapShard
from torchrec_stream_ckpt.util.types import MarkerId, TableSpec

log = logging.getLogger(__name__)

_COLUMN_HALVES = "emainplace"
"""Prefix of optimizers that keep weights in the left half of each column shard, and their average in the right half."""


@dataclass(frozen=True, slots=True)
class Evolved:
    """Resolved changes from a marker to the model that restores it."""

    model: ModelEvolution
    match: Match
    """Entries of the dense state that are restored."""
    record: ClaimChanges
    """Record of the changes for the CLAIM of the new generation."""

    @property
    def tables(self) -> Evolution:
        """Outcome of every table."""
        return self.model.tables

    @property
    def report(self) -> EvolutionReport:
        """Report of the changes for people."""
        return EvolutionReport.of(self.model)

    @property
    def schema(self) -> Schema:
        """Schema of the new generation."""
        return self.model.tables.schema


def model_schema(schema: Schema, dense: LiveDense) -> ModelSchema:
    """Describe the live model. Local."""
    return ModelSchema(tuple(table for _, table in schema.live), *dense.described())


def declared(changes: Changes | None) -> Changes | None:
    """Check the ``changes`` argument of a user. Returns None if no change is declared. Local.

    Raises:
        ChangesError: the argument is of another type.
    """
    if changes is None or (isinstance(changes, Changes) and changes.is_empty):
        return None
    if not isinstance(changes, Changes):
        raise ChangesError(
            f"changes must be a Changes object, got {changes!r:.80}",
            hint="pass Changes(...), or Changes.load(FILE) for a TOML file",
        )
    return changes


def nothing_to_change(uri: str) -> MarkerNotFoundError:
    """Return the error for changes that are declared for a job without a marker."""
    return MarkerNotFoundError(
        "`changes` was given, but this job has no committed marker to apply them to",
        hint="check the URI; for a new job, omit the changes",
        uri=uri,
    )


@dataclass(frozen=True, slots=True)
class MarkerComparison:
    """Result of comparing a marker with this job before anything is written."""

    model: ModelEvolution | None
    """Evolution of the marker; None if there are findings against it, or everything that has a name is the same."""
    found: Findings
    """All findings against it on this rank."""


def compared(
    route: Route,
    schema: Schema,
    dense: DenseState,
    saved: SavedDense,
    changes: Changes | None,
    shards: Sequence[Mapping[str, MapShard]],
) -> MarkerComparison:
    """Compare a marker with this job: tables, dense model, optimizers, buffers, objects, random state. Local.

    Args:
        route: The marker.
        schema: Tables of this model.
        dense: The live dense state.
        saved: The dense state of the marker.
        changes: The declared changes; None if no change is declared.
        shards: The id maps of managed collision of each rank.

    Raises:
        SchemaMismatchError: a table is sharded on one side and data-parallel on the other.
    """
    live = dense.live
    there, here = dense.loader.entries(saved)
    names = set(live.stateful_named)
    same = (
        _tables(route.schema) == _tables(schema)
        and set(there) == set(here)
        and saved.optimizers_named == live.optimizers_named
        and (names == set(saved.described()[2]))
    )
    if changes is None and same and not saved.imported:
        return MarkerComparison(None, Findings(NO_CHANGES, misfits=dense.loader.misfits(saved, None, whole=True)))

    @cache
    def new_rows(table: str, there: str) -> NewRows | None:
        return dense.loader.new_rows(saved, shards, table, there)

    model, found = compare(
        replace(ModelSchema(route.schema.tables, *saved.described()), dense=there),
        replace(model_schema(schema, live), dense=here),
        changes if changes is not None else NO_CHANGES,
        made=route.lineage.changes_made(route.marker),
        imported=saved.imported_states,
        new_rows=new_rows,
        has_id_map=lambda table, there: there in saved.collisions and any(table in each for each in shards),
    )
    match = None
    if model is not None and model.dense is not None and not model.is_plain and _is_left(model):
        match = Match.of(model.tables, model.dense)
    whole = model is not None or changes is None
    found.misfits += dense.loader.misfits(saved, match if changes is not None else None, whole=whole)
    return MarkerComparison(model, found)


def evolved(
    route: Route,
    model: ModelEvolution,
    saved: SavedDense,
    changes: Changes,
    *,
    collisions: frozenset[str],
    again: bool,
) -> Evolved | None:
    """Resolve the declared changes from a marker to this model. Returns None if the marker is of this model. Local.

    Args:
        route: The marker.
        model: Evolution of the marker, from :func:`compared`.
        saved: The dense state of the marker.
        changes: The declared changes.
        collisions: Tables that have an id map of managed collision on any rank.
        again: Accept changes that repeat earlier ones of which nothing is visible.

    Raises:
        ChangesError: the changes repeat earlier ones.
        UnsupportedError: a change cannot be made exactly; the error names the table.
    """
    if not _is_left(model):
        log.info(
            "marker %s already has these changes, so nothing is changed; to apply them again, change their "
            "label and name the marker",
            route.marker,
        )
        return None
    if not again and not model.already:
        check_not_repeated(changes, route.lineage.changes_made(route.marker))
    if model.is_plain and not changes.reassigned:
        return None
    for outcome in model.tables.tables:
        _check_outcome(outcome, collisions, saved.collisions)
    assert model.dense is not None
    return Evolved(model, Match.of(model.tables, model.dense), ClaimChanges.of(changes.canonical()))


def _is_left(model: ModelEvolution) -> bool:
    """Return whether changes are left to make: all of them, or new rows for raw ids, which depend on the ranks."""
    return not model.already or any(outcome.reassigned for outcome in model.tables.tables)


def refuse_changed(lineage: Lineage, generation: int, held: MarkerId) -> None:
    """(a spare, rank 0) Refuse a generation whose model is not that of the marker that the spare holds.

    Args:
        lineage: Lineage of the log.
        generation: The generation that the spare would continue from, or fence.
        held: The marker that the tables of the spare hold.

    Raises:
        SchemaMismatchError: the generation has another model: it was restored into a changed one, or back into an older
            one.
    """
    if generation <= held.generation or _is_same_model(lineage, lineage.claims[generation], held):
        return
    raise SchemaMismatchError(
        "the trainer's model differs from this spare's: it was restored with changes, or from a marker before a change",
        hint="restart the spare with the trainer's model",
        generation=generation,
        marker=held,
    )


def _is_same_model(lineage: Lineage, claim: Claim, held: MarkerId) -> bool:
    """Return whether a generation has the model of a marker: same tables, same declared changes with an effect.

    For a generation that is based on no marker and declares no changes (``fresh=True``), only the tables are compared.
    """
    own = lineage.claims[held.generation]
    if own.schema is not claim.schema and _tables(own.schema) != _tables(claim.schema):
        return False
    told, held_by = ([each.digest for each in told_to(lineage, at, effective=True)] for at in (claim, own))
    fresh = not told and _root(lineage, claim) != _root(lineage, own)
    return fresh or told == held_by


def _tables(schema: Schema) -> dict[str, TableSpec]:
    """Return the live tables by name, ignoring ids and indices."""
    return {table.name: replace(table, id=None) for _, table in schema.live}


def _root(lineage: Lineage, claim: Claim) -> int:
    """Return the first of the generations that ``claim`` is based on."""
    while claim.parent is not None:
        claim = lineage.claims[claim.parent.generation]
    return claim.generation


def _check_outcome(outcome: TableOutcome, collisions: frozenset[str], saved: frozenset[str]) -> None:
    """Refuse changes that cannot be made exactly.

    Args:
        outcome: Outcome of a table.
        collisions: Names in this model of the tables with an id map of managed collision.
        saved: Names in the marker of the tables with such a map there.

    Raises:
        UnsupportedError: the change cannot be made exactly; the error names the table.
    """
    old, new = outcome.saved_spec, outcome.spec
    if old is None or new is None:
        return
    if old.id is None:
        raise UnsupportedError(
            "the marker has format version 1, whose tables have no ids: changes cannot be matched to its tables",
            hint="restore it without changes, commit a marker, and restore that one with the changes",
            table=old.name,
        )
    halves = [spec.optimizer.startswith(_COLUMN_HALVES) for spec in (old, new)]
    if any(halves) and (old.dim != new.dim or halves[0] != halves[1] or old.dtype != new.dtype):
        raise UnsupportedError(
            f"columns, dtype or optimizer cannot change because {old.optimizer if halves[0] else new.optimizer} "
            "keeps weights in the left half of each column shard and their average in the right half",
            hint="keep the table's columns, dtype and optimizer, or declare it dropped and added, which initializes "
            "it again",
            table=outcome.name,
        )
    if outcome.saved_name in saved and outcome.name not in collisions:
        raise SchemaMismatchError(
            "the marker has a managed-collision id map for this table, but this model does not",
            hint="keep managed collision for it, or declare it dropped and added, which initializes it again",
            table=outcome.name,
        )
    if outcome.name in collisions and outcome.saved_name not in saved:
        raise no_id_map(outcome.name)
