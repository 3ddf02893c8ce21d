"""Rows that this rank holds, and the job's schema that all ranks agree on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torchrec_stream_ckpt.errors import UnsupportedError
from torchrec_stream_ckpt.format.control import TableScalars
from torchrec_stream_ckpt.format.rows import RowLayout
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.model import FusedKernel
from torchrec_stream_ckpt.util.types import TableShard, TableSpec


def local_tables(kernels: Iterable[FusedKernel]) -> list[TableSpec]:
    """Return the tables of which this rank holds a part."""
    return [shard.table for kernel in kernels for shard in kernel.shards]


def merge_schema(tables_by_rank: Iterable[Iterable[TableSpec]]) -> Schema:
    """Merge the tables of all ranks into the schema of the job.

    Raises:
        UnsupportedError: Two shards of one table differ in dtype or optimizer.
    """
    tables: dict[str, TableSpec] = {}
    for local in tables_by_rank:
        for table in local:
            if tables.setdefault(table.name, table) != table:
                raise UnsupportedError(
                    f"shards of one table differ: {tables[table.name]} and {table}",
                    hint="give all shards of a table the same dtype and optimizer, on all ranks",
                    table=table.name,
                )
    return Schema(tuple(tables[name] for name in sorted(tables)))


def check_rows_fit(kernels: Iterable[FusedKernel]) -> None:
    """Reject a shard if one of its rows, weights and states together, is larger than a frame.

    Raises:
        UnsupportedError: Names the table.
    """
    for shard in (shard for kernel in kernels for shard in kernel.shards):
        try:
            RowLayout.of(shard.table, shard.cols)
        except ValueError as error:
            raise UnsupportedError(
                str(error), hint="split its columns into more shards (column-wise)", table=shard.table.name
            ) from None


def check_held_once(shards_by_rank: Sequence[Sequence[TableShard]], schema: Schema) -> None:
    """Reject tables of which several ranks hold, and train, the same rows.

    Raises:
        UnsupportedError: Names the first such table and the ranks that hold it.
    """
    cells = dict.fromkeys(range(len(schema.tables)), 0)
    for shard in (shard for shards in shards_by_rank for shard in shards):
        cells[shard.table] += shard.rows * shard.cols
    for number, table in enumerate(schema.tables):
        if cells[number] > table.rows * table.dim:
            ranks = [rank for rank, shards in enumerate(shards_by_rank) if any(each.table == number for each in shards)]
            raise UnsupportedError(
                "several ranks hold the same rows: the model is sharded within groups of ranks, not over all ranks",
                hint="shard it over all ranks: ShardingEnv.from_process_group(torch.distributed.group.WORLD)",
                table=table.name,
                ranks=",".join(map(str, ranks)),
            )


def local_shards(kernels: Iterable[FusedKernel], schema: Schema) -> tuple[TableShard, ...]:
    """Return the shards of this rank that hold rows, in the order of its kernels."""
    index = schema.index()
    return tuple(shard.table_shard(index) for kernel in kernels for shard in kernel.held)


def scalars_of(kernels: Iterable[FusedKernel], index: Mapping[str, int]) -> tuple[TableScalars, ...]:
    """Return the kernels' own state, one record per shard. The iteration counts trained batches."""
    return tuple(
        TableScalars(
            index[shard.table.name],
            shard.row0,
            shard.rows,
            shard.col0,
            shard.cols,
            kernel.scalars.iteration - kernel.lookups.in_flight,
            kernel.scalars.max_counter,
            kernel.scalars.learning_rate,
            kernel.scalars.next_learning_rate,
        )
        for kernel in kernels
        for shard in kernel.held
    )
