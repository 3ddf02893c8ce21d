"""This library's own ways back to a marker, through the functions that ``StreamCheckpointer.restore`` calls."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from baselines import Ledger, Reads, UnavailableError
from stream import Trainer, marker_of
from workload import Tables, Workload

from torchrec_stream_ckpt.find.find import Search
from torchrec_stream_ckpt.find.job import Job
from torchrec_stream_ckpt.find.route import Route
from torchrec_stream_ckpt.find.tiers import TierState
from torchrec_stream_ckpt.log.control.partition import Control
from torchrec_stream_ckpt.log.files import FileLog
from torchrec_stream_ckpt.maintain.compactor import Policy
from torchrec_stream_ckpt.maintain.materializer import Materializer
from torchrec_stream_ckpt.model.kernels import LocalShard
from torchrec_stream_ckpt.proofs.seen_marks import SeenMarks
from torchrec_stream_ckpt.restore import apply
from torchrec_stream_ckpt.restore.plan import RestorePlan, plan_restore
from torchrec_stream_ckpt.store.api import open_store
from torchrec_stream_ckpt.store.dense import DenseFolder
from torchrec_stream_ckpt.util.layout import partition_dir
from torchrec_stream_ckpt.util.types import MarkerId, TableShard


class _NoScalars:
    """Numbers of a kernel that a benchmark has no use for."""

    reads_iteration = False

    def put_back(self, *_scalars: float) -> None:
        pass


class Kernel:
    """What a restore sees of a fused kernel: live views of its tables, and setters that a benchmark has no use for."""

    scalars = _NoScalars()

    def __init__(self, workload: Workload, tables: Tables) -> None:
        self.held = self.shards = tuple(LocalShard(spec, 0, spec.rows, 0, spec.dim) for spec in workload.schema.tables)
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


class FromLog:
    """No store: the log itself, from its first frame to the marker's. The trainer has built it already."""

    split = False

    def __init__(self, name: str, _folder: Path, trainer: Trainer, _keep: frozenset[int]) -> None:
        self.name = name
        self.ledger = Ledger()
        self._trainer = trainer

    def build(self, interval: int) -> None:
        span = self._trainer.spans[interval]
        self.ledger.add(span.end - span.begin)

    def restore(self, interval: int, tables: Tables) -> None:
        log = FileLog(self._trainer.root)
        _, plan = _plan(log, self._trainer.root, self._trainer.workload, marker_of(interval))
        apply.apply_rows(log, plan, _kernels(self._trainer.workload, tables))

    def restore_delta(self, interval: int, tables: Tables) -> float:
        raise UnavailableError("base and increments are one stream")

    def land(self, tables: Tables) -> None:
        pass

    def files(self, interval: int) -> Iterator[Path]:
        yield from sorted(partition_dir(self._trainer.root, 0).iterdir())

    def reads(self, interval: int) -> Reads:
        spans = self._trainer.spans[: interval + 1]
        return Reads(0, sum(span.end - span.begin for span in spans))


class FromStore:
    """The materializer's store in a folder; ``policy`` says what it writes beside the intervals."""

    split = True

    def __init__(self, policy: Policy, name: str, folder: Path, trainer: Trainer, _keep: frozenset[int]) -> None:
        self.name = name
        self.ledger = Ledger()
        self._folder = folder
        self._trainer = trainer
        self._control = Control(trainer.log)
        self._objects = open_store(str(folder))
        self._materializer = Materializer(
            trainer.log, self._objects, lambda _: DenseFolder(trainer.root), ThreadPoolExecutor(2), policy
        )

    def build(self, interval: int) -> None:
        """Fold the one marker that is new in the log."""
        done = list(self._materializer.catch_up(self._control.refresh()))
        assert done == [marker_of(interval)], done
        # Nothing in a store is ever written twice or taken away again.
        counts = self._materializer.counts
        stored = sum(entry.num_bytes for entry in self._objects.list(""))
        self.ledger = Ledger(stored, stored, counts.fold_bytes_read)

    def restore(self, interval: int, tables: Tables) -> None:
        """Everything anew, as a process that has just begun: log, store, lineage, manifests, plan."""
        log, objects = FileLog(self._trainer.root), open_store(str(self._folder))
        _, plan = self._plan(log, interval)
        apply.apply_rows(log, plan, _kernels(self._trainer.workload, tables), objects)

    def restore_delta(self, interval: int, tables: Tables) -> float:
        _, plan = self._plan(self._trainer.log, interval)
        behind = replace(plan, stored=tuple(piece for piece in plan.stored if piece.start is not None))
        begin = time.perf_counter()
        targets = apply._targets(plan, _kernels(self._trainer.workload, tables), SeenMarks(plan.path))
        apply.apply_store(behind, self._objects, targets)
        return time.perf_counter() - begin

    def land(self, tables: Tables) -> None:
        pass

    def files(self, interval: int) -> Iterator[Path]:
        """Without the segments that the marker does not need."""
        _, plan = self._plan(self._trainer.log, interval)
        needed = {self._folder / picked.ref.name for piece in plan.stored for picked in piece.opened}
        for entry in self._objects.list(""):
            path = self._folder / entry.name
            if path in needed or path.suffix != ".seg":
                yield path

    def reads(self, interval: int) -> Reads:
        """Chunks of the segments that the plan opens."""
        _, plan = self._plan(self._trainer.log, interval)
        base = [picked for piece in plan.stored if piece.start is None for picked in piece.opened]
        later = [picked for piece in plan.stored if piece.start is not None for picked in piece.opened]
        rows = sum(int(picked.entries["rows"].sum()) for picked in later)
        base_bytes, later_bytes = (sum(picked.num_bytes for picked in each) for each in (base, later))
        return Reads(base_bytes, later_bytes, rows, len(later))

    def _plan(self, log: FileLog, interval: int) -> tuple[Route, RestorePlan]:
        choice, plan = _plan(log, self._folder, self._trainer.workload, marker_of(interval))
        assert plan.reach == plan.marker, "the store does not serve all of it"
        return choice, plan


class Head:
    """The newest state kept in shared memory: a case of its own, ``benchmarks/head``."""

    split = False

    def __init__(self, name: str, _folder: Path, _trainer: Trainer, _keep: frozenset[int]) -> None:
        self.name = name
        self.ledger = Ledger()

    def build(self, interval: int) -> None:
        raise UnavailableError("measured in benchmarks/head")

    def restore(self, interval: int, tables: Tables) -> None:
        raise UnavailableError("measured in benchmarks/head")

    def restore_delta(self, interval: int, tables: Tables) -> float:
        raise UnavailableError("measured in benchmarks/head")

    def land(self, tables: Tables) -> None:
        pass

    def files(self, interval: int) -> Iterator[Path]:
        return iter(())

    def reads(self, interval: int) -> Reads:
        raise UnavailableError("measured in benchmarks/head")


def _plan(log: FileLog, store: Path, workload: Workload, marker: MarkerId) -> tuple[Route, RestorePlan]:
    job = Job(uri=str(store), log=log, control=Control(log), store=str(store))
    choice = Search(TierState.read(job), job).choose(marker)
    assert choice is not None
    shards = [TableShard(table, 0, spec.rows, 0, spec.dim) for table, spec in enumerate(workload.schema.tables)]
    plan = plan_restore(choice, workload.schema, shards)
    return choice, plan


def _kernels(workload: Workload, tables: Tables) -> list[Any]:
    return [Kernel(workload, tables)]
