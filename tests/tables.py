"""A log that holds given tables, made without a job."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from threading import Event

import numpy as np

from tests.builders import JOB, claim, commit, digest_files
from tests.parts import FileLog
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.inner import Batch, Control
from torchrec_stream_ckpt.save.import_writer import write_stream
from torchrec_stream_ckpt.util.layout import dense_name
from torchrec_stream_ckpt.util.types import MarkerId, TableShard

Tables = Sequence[tuple[np.ndarray, tuple[np.ndarray, ...]]]
"""By table of the schema: weights, states."""

FIRST = MarkerId(1, 1)


def write_tables(
    directory: Path,
    schema: Schema,
    tables: Tables,
    cuts: Sequence[Sequence[int]] | None = None,
    key_file: Path | None = None,
) -> tuple[FileLog, Lineage]:
    """A log whose marker 1:1 holds ``tables``, with column shards that begin at ``cuts``."""
    log = FileLog(directory)
    incarnation = log.prepare(1)
    control = Control(log, key_file)
    opened = claim(1, schema=schema, swept=tuple(range(len(schema.tables))), incarnation=incarnation.id)
    control.claim(opened)
    shards = [
        TableShard(index, 0, table.rows, begin, stop - begin)
        for index, table in enumerate(schema.tables)
        for edges in [[*(cuts[index] if cuts else [0]), table.dim]]
        for begin, stop in pairwise(edges)
    ]
    end = write_stream(log, opened, shards, (_batch(shard, schema, tables) for shard in shards), 10, 60)
    folder = directory / dense_name(JOB, FIRST)
    folder.mkdir(parents=True)
    (folder / ".metadata").write_bytes(b"no state")
    control.commit(commit(1, 1, [end], dense_files=digest_files(folder, [".metadata"])), 60, Event())
    return log, control.refresh()


def _batch(shard: TableShard, schema: Schema, tables: Tables) -> Batch:
    weights, states = tables[shard.table]
    columns = slice(shard.col0, shard.col0 + shard.cols)
    mine = tuple(state if state.ndim == 1 else state[:, columns] for state in states)
    return Batch(shard, 0, weights[:, columns], mine)
