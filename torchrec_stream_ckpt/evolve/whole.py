"""Tables and dense state of a marker and a model compared together, so that one error names all that speaks against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchrec_stream_ckpt.evolve.changes import NO_CHANGES, Changes
from torchrec_stream_ckpt.evolve.dense import compare_dense
from torchrec_stream_ckpt.evolve.dense_outcome import DenseEvolution
from torchrec_stream_ckpt.evolve.findings import Findings
from torchrec_stream_ckpt.evolve.imported import States
from torchrec_stream_ckpt.evolve.model_schema import ModelSchema
from torchrec_stream_ckpt.evolve.outcome import Evolution
from torchrec_stream_ckpt.evolve.placement import check_placement
from torchrec_stream_ckpt.evolve.repeated import check_not_repeated
from torchrec_stream_ckpt.evolve.resolve import TrainedRows, compare_tables
from torchrec_stream_ckpt.format.changed import ClaimChanges
from torchrec_stream_ckpt.format.schema import Schema


@dataclass(frozen=True, slots=True)
class ModelEvolution:
    """How a marker becomes a model that may differ from it."""

    tables: Evolution
    dense: DenseEvolution | None
    """None: the dense state of the marker was not looked at."""
    already: bool = False
    """Whether the declared changes are those that the marker's lineage made last: nothing was left to do."""

    @property
    def is_plain(self) -> bool:
        """Whether nothing differs."""
        return self.tables.is_plain and (self.dense is None or self.dense.is_plain)


def evolve(
    saved: ModelSchema,
    here: ModelSchema,
    changes: Changes = NO_CHANGES,
    *,
    dense: bool = True,
    trained_rows: TrainedRows | None = None,
    made: Sequence[ClaimChanges] = (),
    again: bool = False,
    imported: States | None = None,
) -> ModelEvolution:
    """Find what becomes of a marker in a model.

    Args:
        saved: What the marker holds; its tables by index, tombstones included.
        here: What this model has.
        changes: What was declared.
        dense: Whether the dense state is compared, too.
        trained_rows: As of ``resolve``.
        made: What the changed generations on the marker's path were told, the newest first. A job that is started
            again with the changes of the newest one finds them made: where nothing differs any more, they are not made
            twice.
        again: Whether other changes may repeat what was made and is not seen, such as an id map: the user has named
            this marker.
        imported: (of a marker that was imported) Names of the states that it has of dense optimizers, by parameter.

    Raises:
        ChangesError: declarations are wrong; names all of them.
        SchemaMismatchError: something differs that was not declared; names all of it, and what accepts it. Or a table
            is sharded on one side and data-parallel on the other.
    """
    evolution, found = compare(
        saved, here, changes, dense=dense, trained_rows=trained_rows, made=made, imported=imported
    )
    found.check()
    assert evolution is not None
    if not again and not evolution.already:
        check_not_repeated(changes, made)
    return evolution


def compare(
    saved: ModelSchema,
    here: ModelSchema,
    changes: Changes = NO_CHANGES,
    *,
    dense: bool = True,
    trained_rows: TrainedRows | None = None,
    made: Sequence[ClaimChanges] = (),
    imported: States | None = None,
) -> tuple[ModelEvolution | None, Findings]:
    """As :func:`evolve`, but what speaks against it is returned: then there is no evolution.

    Raises:
        SchemaMismatchError: a table is sharded on one side and data-parallel on the other.
    """
    check_placement(saved, here, changes)
    if made and made[0].digest == changes.digest and not changes.is_empty:
        unchanged = Findings(NO_CHANGES)
        as_it_is = _compared(saved, here, unchanged, dense, trained_rows, imported)
        if as_it_is is not None:
            return ModelEvolution(as_it_is.tables, as_it_is.dense, already=True), unchanged
    found = Findings(changes)
    return _compared(saved, here, found, dense, trained_rows, imported), found


def _compared(
    saved: ModelSchema,
    here: ModelSchema,
    found: Findings,
    dense: bool,
    trained_rows: TrainedRows | None,
    imported: States | None,
) -> ModelEvolution | None:
    """None if something speaks against it, which ``found`` has."""
    tables = compare_tables(Schema(saved.tables), here.tables, found, trained_rows)
    rest = compare_dense(saved, here, found, imported) if dense else None
    return ModelEvolution(tables, rest) if tables is not None and not found.against else None
