"""Constraints for TorchRec's planner that preserve column splits, so that a restore under its new plan is exact."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import replace

from torchrec.distributed.planner.types import ParameterConstraints

from torchrec_stream_ckpt.errors import ConfigError, UnsupportedError
from torchrec_stream_ckpt.evolve.changes import Changes
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.inner import find, open_job
from torchrec_stream_ckpt.util.config import Source, StreamConfig
from torchrec_stream_ckpt.util.types import MarkerId, TableShard, TableSpec

WHOLE = ("table_wise", "row_wise", "table_row_wise")
"""Kinds of sharding that keep all columns of a row together."""
SPLIT = ("column_wise", "table_column_wise", "grid_shard")
"""Kinds that split columns into equal widths."""

Constraints = dict[str, ParameterConstraints]


def planner_constraints(
    config: StreamConfig | str,
    marker: MarkerId | str | None = None,
    base: Mapping[str, ParameterConstraints] | None = None,
    *,
    source: Source | str | None = None,
    changes: Changes | None = None,
) -> Constraints:
    """Return ``EmbeddingShardingPlanner`` constraints under which a marker can be restored exactly, on any world size.

    The state of a row-wise optimizer belongs to a column shard, so a restore refuses a plan that splits the columns of
    such a table in another way. Tables whose optimizer has one value a weight may be split in any way; no table may
    become data-parallel. Reads the log and writes nothing. Any rank may call it, but TorchRec's ``collective_plan``
    only uses the constraints of rank 0::

        constraints = planner_constraints(config) if dist.get_rank() == 0 else {}
        planner = EmbeddingShardingPlanner(topology=topology, constraints=constraints)
        plan = planner.collective_plan(model, sharders, dist.group.WORLD)

    Args:
        config: The job's settings; a URI alone if they are all defaults.
        marker: The marker to restore, in any form that ``restore()`` accepts; None: the newest complete one.
        base: Your own constraints by table. They are kept, narrowed to those that the marker allows.
        source: Source of a warm start: its marker is used as long as this job has none.
        changes: Changes of the restore: a renamed table keeps the split that it had under its old name.

    Returns:
        Constraints by table name; only ``base`` if nothing was committed.

    Raises:
        MarkerNotFoundError: ``marker`` is not committed.
        ConfigError: ``base`` allows a table no sharding that keeps its split.
        UnsupportedError: a table was split into unequal widths, or in two ways in two modules: the planner makes no
            such plan.
        StreamCkptError: as ``StreamCheckpointer.restore()`` while it chooses a marker.
    """
    config = StreamConfig(uri=config) if isinstance(config, str) else config
    constraints = dict(base or {})
    with closing(open_job(config, copies=False)) as job:
        route = find(job, marker)
    if route is None and source is not None:
        there = source if isinstance(source, Source) else Source.of(source)
        with closing(open_job(there.settings(config), copies=False)) as job:
            route = find(job, there.marker)
    if route is not None:
        schema = route.schema
        widths = _widths(schema, route.own_shards)
        for name, tables in _by_name(schema, changes.renamed if changes is not None else {}).items():
            mine = constraints.get(name, ParameterConstraints())
            constraints[name] = constrain(name, {table: widths[table.name] for table in tables}, mine)
    return constraints


def _widths(schema: Schema, shards: Iterable[TableShard]) -> dict[str, tuple[int, ...]]:
    """Return the widths of each table's column shards, from left to right."""
    splits: dict[str, set[tuple[int, int]]] = {table.name: set() for _, table in schema.live}
    for shard in shards:
        splits[schema.tables[shard.table].name].add((shard.col0, shard.cols))
    return {name: tuple(cols for _, cols in sorted(split)) for name, split in splits.items()}


def _by_name(schema: Schema, renamed: Mapping[str, str]) -> dict[str, list[TableSpec]]:
    """Group tables by their own name, in whatever module they are, because the planner knows only that name."""
    tables: dict[str, list[TableSpec]] = {}
    for _, table in schema.live:
        name = renamed.get(table.name, table.name)
        tables.setdefault(name.rpartition(".")[2], []).append(table)
    return tables


def constrain(
    name: str, widths: Mapping[TableSpec, tuple[int, ...]], base: ParameterConstraints
) -> ParameterConstraints:
    """Narrow ``base`` to plans that keep the column split of each table of this name. Pure.

    Args:
        name: Name of the tables in the planner.
        widths: Widths of the column shards of each table.
        base: Constraints of the user.

    Raises:
        ConfigError, UnsupportedError: as in :func:`planner_constraints`.
    """
    splits = {split for table, split in widths.items() if table.has_row_state}
    if len(splits) > 1:
        raise UnsupportedError(
            f"tables with this name are split in {len(splits)} ways, but the planner distinguishes tables only by name",
            hint="give each table a unique name, or write the plan by hand",
            table=name,
        )
    split = next(iter(splits), ())
    if len(set(split)) > 1:
        raise UnsupportedError(
            f"its columns are split into widths of {', '.join(map(str, split))}, but the planner needs equal ones",
            hint="write the plan by hand",
            table=name,
        )
    kinds = (*WHOLE, *SPLIT) if not split else WHOLE if len(split) == 1 else SPLIT
    # The planner uses grid_shard for a table only if a constraint asks for it.
    asked = base.sharding_types or [kind for kind in kinds if kind != "grid_shard"]
    kept = [kind for kind in asked if kind in kinds]
    if not kept:
        shards = f"{len(split) or 'any number of'} column shards"
        raise ConfigError(
            f"{', '.join(asked)} would change the column split, because the marker has {shards}",
            hint=f"allow one of {', '.join(kinds)}",
            table=name,
        )
    return replace(base, sharding_types=kept, min_partition=split[0] if len(split) > 1 else base.min_partition)
