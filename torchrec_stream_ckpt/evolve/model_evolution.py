"""Tables and dense state of a marker and a model compared together, so that one error names all that speaks against.

Tables that are sharded on one side and data-parallel on the other: no declaration makes one of the other.

Declarations that a model does not show once they are made, so that making them twice would go unseen.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchrec_stream_ckpt.errors import ChangesError, SchemaMismatchError
from torchrec_stream_ckpt.evolve.changes import NO_CHANGES, Changes
from torchrec_stream_ckpt.evolve.dense import compare_dense
from torchrec_stream_ckpt.evolve.dense_outcome import DenseEvolution
from torchrec_stream_ckpt.evolve.findings import Findings
from torchrec_stream_ckpt.evolve.imported import States
from torchrec_stream_ckpt.evolve.model_schema import ModelSchema
from torchrec_stream_ckpt.evolve.resolve import TrainedRows, compare_tables
from torchrec_stream_ckpt.evolve.table_outcome import Evolution
from torchrec_stream_ckpt.format.claim_changes import ClaimChanges
from torchrec_stream_ckpt.format.schema import Schema


def check_not_repeated(changes: Changes, made: Iterable[ClaimChanges]) -> None:
    """Refuse to make unseen declarations again that the lineage has made as a part of other changes.

    A file of changes that is edited after the job has made it would otherwise move rows that were moved already.

    Args:
        changes: What was declared for the newest marker.
        made: What the generations on its path were told.

    Raises:
        ChangesError: names all such declarations.
    """
    unseen = _unseen(changes.record)
    said: set[str] = set()
    for each in made:
        said |= unseen if each.text is None else unseen & _unseen(json.loads(each.text))
    if said:
        lines = "\n".join(f"  {each}" for each in sorted(said))
        raise ChangesError(
            f"the newest marker has had such changes already, and would have them once more:\n{lines}",
            hint="leave out what was made; or, to make it once more, name the marker, and give the "
            "changes another label",
        )


def _unseen(record: Mapping[str, Any]) -> set[str]:
    """Which declarations of a record hold for the changed model as well."""
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
    """Names of which the marker and the model have both, before the change and after it."""
    pairs = renamed.items()
    both = {(old, new) for old, new in pairs if old in {*renamed.values(), *added} and new in {*renamed, *dropped}}
    return {f"{where}{old!r} is renamed {new!r}" for old, new in both}


def _mapping(record: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = record.get(name, {})
    return value if isinstance(value, Mapping) else {}


def _row(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


_BELOW = ("embedding_bags", "embeddings")
"""Where the modules of TorchRec keep their tables."""


def check_placement(saved: ModelSchema, here: ModelSchema, changes: Changes) -> None:
    """Refuse a table that is sharded in the marker and data-parallel here, or the other way round.

    A table that is declared dropped, or added, passes: the user has said that it starts anew.

    Raises:
        SchemaMismatchError: names all such tables.
    """
    there = [name for name in _data_parallel(saved, here) if name not in changes.dropped]
    now = [name for name in _data_parallel(here, saved) if name not in changes.added]
    if not there and not now:
        return
    said = [f"{name}: sharded in the marker, data-parallel in this model" for name in there]
    said += [f"{name}: data-parallel in the marker, sharded in this model" for name in now]
    raise SchemaMismatchError(
        "\n  ".join(["a table cannot change between data-parallel and sharded:", *said]),
        hint="keep the sharding type of these tables: planner_constraints() gives it to the planner",
    )


def _data_parallel(one: ModelSchema, other: ModelSchema) -> Iterator[str]:
    """Tables that are sharded in ``one`` and dense parameters of ``other``."""
    dense = {entry.name for entry in other.dense}
    sharded = {table.name for table in other.tables}
    for table in one.tables:
        if not table.dropped and table.name not in sharded and any(name in dense for name in _weights(table.name)):
            yield table.name


def _weights(table: str) -> Iterable[str]:
    """Return what the weights of a data-parallel table are called among dense parameters."""
    module, _, name = table.rpartition(".")
    return (".".join(filter(None, (module, below, name, "weight"))) for below in _BELOW)


@dataclass(frozen=True, slots=True)
class ModelEvolution:
    """How a marker becomes a model that may differ from it."""

    tables: Evolution
    dense: DenseEvolution | None
    """None: the dense state of the marker was not looked at."""
    already: bool = False
    """True if the declared changes are those that the marker's lineage made last: nothing was left to do."""

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
