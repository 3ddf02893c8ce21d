"""Tables that are sharded on one side and data-parallel on the other: no declaration makes one of the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torchrec_stream_ckpt.errors import SchemaMismatchError
from torchrec_stream_ckpt.evolve.changes import Changes
from torchrec_stream_ckpt.evolve.model_schema import ModelSchema

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
