"""This library's own ways back to a marker, through the functions that ``StreamCheckpointer.restore`` calls."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from baselines import Ledger, UnavailableError
from stream import Trainer, marker_of
from workload import Tables, Workload

from torchrec_stream_ckpt.commit.control import Control
from torchrec_stream_ckpt.layout import partition_dir
from torchrec_stream_ckpt.log.files import FileLog
from torchrec_stream_ckpt.restore.apply import apply_rows
from torchrec_stream_ckpt.restore.choose import choose
from torchrec_stream_ckpt.restore.plan import plan_restore
from torchrec_stream_ckpt.types import TableShard, TableSpec


@dataclass(frozen=True)
class _Shard:
    table: TableSpec
    row0: int
    rows: int
    col0: int
    cols: int


class Kernel:
    """What a restore sees of a fused kernel: live views of its tables, and setters that a benchmark has no use for."""

    reads_iteration = False

    def __init__(self, workload: Workload, tables: Tables) -> None:
        self.shards = tuple(_Shard(spec, 0, spec.rows, 0, spec.dim) for spec in workload.schema.tables)
        self._cuts = list(pairwise(workload.bases.tolist()))
        self._tables = tables

    def weights(self) -> list[torch.Tensor]:
        return [self._tables.weights[begin:end] for begin, end in self._cuts]

    def states(self) -> list[tuple[torch.Tensor, ...]]:
        return [(self._tables.sums[begin:end],) for begin, end in self._cuts]

    def prepare_write(self) -> None:
        pass

    def finish_write(self) -> None:
        pass

    def set_scalars(self, *_scalars: float) -> None:
        pass


def whole_tables(workload: Workload) -> list[TableShard]:
    """The shards of a job of one rank."""
    return [TableShard(table, 0, spec.rows, 0, spec.dim) for table, spec in enumerate(workload.schema.tables)]


class FromLog:
    """No store: the log itself, from its first frame to the marker's."""

    split = False

    def __init__(self, name: str, _folder: Path, trainer: Trainer, _keep: frozenset[int]) -> None:
        self.name = name
        self.ledger = Ledger()
        self._trainer = trainer

    def build(self, interval: int) -> None:
        span = self._trainer.spans[interval]
        self.ledger.add(span.end - span.begin)

    def restore_base(self, interval: int, tables: Tables) -> None:
        """Base and what came behind it are one stream."""

    def restore_delta(self, interval: int, tables: Tables) -> None:
        workload, log = self._trainer.workload, FileLog(self._trainer.root)
        chosen = choose(log, Control(log).refresh(), self._trainer.root, marker_of(interval))
        assert chosen is not None
        shards = whole_tables(workload)
        plan = plan_restore(chosen.lineage, chosen.commit.id, chosen.hellos, workload.schema, shards)
        kernels: list[Any] = [Kernel(workload, tables)]
        apply_rows(log, plan, kernels)

    def land(self, tables: Tables) -> None:
        pass

    def files(self, interval: int) -> Iterator[Path]:
        yield from sorted(partition_dir(self._trainer.root, 0).iterdir())


class FromStore:
    """The materializer's store; not in this tree yet."""

    split = True

    def __init__(self, name: str, _folder: Path, _trainer: Trainer, _keep: frozenset[int]) -> None:
        self.name = name
        self.ledger = Ledger()

    def build(self, interval: int) -> None:
        raise UnavailableError("this tree cannot restore from a store")

    def restore_base(self, interval: int, tables: Tables) -> None:
        raise UnavailableError("this tree cannot restore from a store")

    def restore_delta(self, interval: int, tables: Tables) -> None:
        raise UnavailableError("this tree cannot restore from a store")

    def land(self, tables: Tables) -> None:
        pass

    def files(self, interval: int) -> Iterator[Path]:
        return iter(())
