"""Compare tables and dense state of a marker and a model together, so that one error names all findings.

The module also refuses tables that are sharded on one side and data-parallel on the other, which no declaration can
convert, and repeated declarations that are not visible in the model after they were made.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torchrec_stream_ckpt.errors import ChangesError, SchemaMismatchError
from torchrec_stream_ckpt.evolve.changes import NO_CHANGES, Changes
from torchrec_stream_ckpt.evolve.dense import compare_dense
from torchrec_stream_ckpt.evolve.dense_outcome import DenseEvolution
from torchrec_stream_ckpt.evolve.findings import Findings
from torchrec_stream_ckpt.evolve.imported import States
from torchrec_stream_ckpt.evolve.model_schema import ModelSchema
from torchrec_stream_ckpt.evolve.resolve import HasIdMap, NewRowsOf, TrainedRows, compare_tables
from torchrec_stream_ckpt.evolve.table_outcome import Evolution
from torchrec_stream_ckpt.format.claim_changes import ClaimChanges
from torchrec_stream_ckpt.format.schema import Schema


def check_not_repeated(changes: Changes, made: Iterable[ClaimChanges]) -> None:
    """Refuse declarations that no longer show in the model and that the lineage already made with others.

    Otherwise a file of changes that is edited after the job has made them would move rows a second time.

    Args:
        changes: The changes declared for the newest marker.
        made: The changes of the generations on its path.

    Raises:
        ChangesError: there are such declarations; the error names all of them.
    """
    unseen = _unseen(changes.record)
    said: set[str] = set()
    for each in made:
        said |= unseen if each.text is None else unseen & _unseen(json.loads(each.text))
    if said:
        lines = "\n".join(f"  {each}" for each in sorted(said))
        raise ChangesError(
            f"these changes were already made before the newest marker, and would be applied twice:\n{lines}",
            hint="remove these changes; or, to apply them again, name the marker and give the changes another label",
        )


def _unseen(record: Mapping[str, Any]) -> set[str]:
    """Return the declarations of a record that would also be valid for the changed model."""
    found = {f"rows: {name!r} has an id map" for name, row in _mapping(record, "rows").items() if "ids" in _row(row)}
    added, dropped = set(record.get("added", ())), set(record.get("dropped", ()))
    found |= {f"{name!r} is dropped and added" for name in added & dropped}
    objects = set(record.get("stateful_added", ())) & set(record.get("stateful_dropped", ()))
    found |= {f"stateful {name!r} is dropped and added" for name in objects}
    found |= _renamed(_mapping(record, "renamed"), added, dropped, "")
    dense = _mapping(record, "dense")
    fresh, gone = set(dense.get("fresh", ())), set(dense.get("dropped", ()))
    found |= {f"dense: {name!r} is dropped and fresh" for name in fresh & gone}
    found |= _renamed(_mapping(dense, "renamed"), fresh, gone, "dense: ")
    states = _mapping(dense, "optimizer").items()
    return found | {f"dense.optimizer: the state of {name!r} is fresh" for name, kind in states if kind == "fresh"}


def _renamed(renamed: Mapping[str, str], added: set[str], dropped: set[str], where: str) -> set[str]:
    """Describe renames whose names both the marker and the model have, before and after the change."""
    pairs = renamed.items()
    both = {(old, new) for old, new in pairs if old in {*renamed.values(), *added} and new in {*renamed, *dropped}}
    return {f"{where}{old!r} is renamed {new!r}" for old, new in both}


def _mapping(record: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = record.get(name, {})
    return value if isinstance(value, Mapping) else {}


def _row(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


_BELOW = ("embedding_bags", "embeddings")
"""Attributes in which TorchRec modules keep their tables."""


def check_placement(saved: ModelSchema, here: ModelSchema, changes: Changes) -> None:
    """Refuse a table that is sharded in the marker and data-parallel here, or the reverse.

    A table that is declared as dropped or added is accepted, because the user has declared that it starts fresh.

    Raises:
        SchemaMismatchError: there are such tables; the error names all of them.
    """
    there = [name for name in _data_parallel(saved, here) if name not in changes.dropped]
    now = [name for name in _data_parallel(here, saved) if name not in changes.added]
    if not there and not now:
        return
    said = [f"{name}: sharded in the marker, data-parallel in this model" for name in there]
    said += [f"{name}: data-parallel in the marker, sharded in this model" for name in now]
    raise SchemaMismatchError(
        "\n  ".join(["a table cannot change between data-parallel and sharded:", *said]),
        hint="keep the sharding type of these tables: pass planner_constraints() to the planner",
    )


def _data_parallel(one: ModelSchema, other: ModelSchema) -> Iterator[str]:
    """Yield the tables that are sharded in ``one`` and are dense parameters in ``other``."""
    dense = {entry.name for entry in other.dense}
    sharded = {table.name for table in other.tables}
    for table in one.tables:
        if not table.dropped and table.name not in sharded and any(name in dense for name in _weights(table.name)):
            yield table.name


def _weights(table: str) -> Iterable[str]:
    """Return the possible names of a data-parallel table's weights among dense parameters."""
    module, _, name = table.rpartition(".")
    return (".".join(filter(None, (module, below, name, "weight"))) for below in _BELOW)


@dataclass(frozen=True, slots=True)
class ModelEvolution:
    """Outcomes of all parts of a marker in a model that may differ from it."""

    tables: Evolution
    dense: DenseEvolution | None
    """Outcomes of the dense state; None if it was not compared."""
    already: bool = False
    """True if the declared changes are the last ones that the marker's lineage made. Then only raw ids are left to get
    new rows, if this job's ranks require it."""

    @property
    def is_plain(self) -> bool:
        """True if nothing differs."""
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
    has_id_map: HasIdMap | None = None,
) -> ModelEvolution:
    """Find the outcome of each part of a marker in a model.

    Args:
        saved: Schema of the marker; its tables by index, including tombstones.
        here: Schema of this model.
        changes: The declared changes.
        dense: Also compare the dense state.
        trained_rows: Same as in ``resolve``.
        made: Changes of the changed generations on the marker's path, the newest first. If a job is restarted with the
            changes of the newest one, and nothing differs any more, the changes are not made twice.
        again: Accept other changes that repeat invisible ones, such as an id map, because the user has named this
            marker.
        imported: (for an imported marker) Names of the dense optimizer states that it has, by parameter.
        has_id_map: Same as in ``compare_tables``. If None, nothing is known of id maps.

    Raises:
        ChangesError: declarations are wrong; the error names all of them.
        SchemaMismatchError: there are undeclared differences; the error names all of them, and the changes to declare.
            Or a table is sharded on one side and data-parallel on the other.
    """
    evolution, found = compare(
        saved,
        here,
        changes,
        dense=dense,
        trained_rows=trained_rows,
        made=made,
        imported=imported,
        has_id_map=has_id_map,
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
    new_rows: NewRowsOf | None = None,
    has_id_map: HasIdMap | None = None,
) -> tuple[ModelEvolution | None, Findings]:
    """Compare like :func:`evolve`, but return the findings. If any prevents the restore, the evolution is None.

    ``new_rows`` and ``has_id_map`` are those of ``compare_tables``.

    Raises:
        SchemaMismatchError: a table is sharded on one side and data-parallel on the other.
    """
    check_placement(saved, here, changes)
    known = partial(_compared, saved, here, dense, trained_rows, imported, new_rows, has_id_map)
    if made and made[0].digest == changes.digest and not changes.is_empty:
        unchanged = Findings(replace(NO_CHANGES, reassigned=changes.reassigned if new_rows is not None else ()))
        as_it_is = known(unchanged)
        if as_it_is is not None:
            return replace(as_it_is, already=True), unchanged
    found = Findings(changes)
    return known(found), found


def _compared(
    saved: ModelSchema,
    here: ModelSchema,
    dense: bool,
    trained_rows: TrainedRows | None,
    imported: States | None,
    new_rows: NewRowsOf | None,
    has_id_map: HasIdMap | None,
    found: Findings,
) -> ModelEvolution | None:
    """Compare once, adding findings to ``found``. Returns None if any prevents the restore."""
    tables = compare_tables(Schema(saved.tables), here.tables, found, trained_rows, new_rows, has_id_map)
    rest = compare_dense(saved, here, found, imported) if dense else None
    return ModelEvolution(tables, rest) if tables is not None and not found.against else None
