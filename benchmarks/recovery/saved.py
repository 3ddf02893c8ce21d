"""``torch.save`` of the same tables, one file at the newest marker: what jobs without a checkpointer do."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import torch
from baselines import Ledger, Reads, UnavailableError
from stream import Trainer
from workload import Tables, Workload


def by_table(workload: Workload, tables: Tables) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """(weights, states) of each table, views."""
    cuts = zip(workload.schema.tables, pairwise(workload.bases.tolist()), strict=True)
    return {spec.name: (tables.weights[begin:end], tables.sums[begin:end]) for spec, (begin, end) in cuts}


class TorchLoadAndCopy:
    """Written by the first one of these schemes; read by plain ``torch.load`` and copied into the live tables."""

    mmap = False
    split = False

    def __init__(self, name: str, folder: Path, trainer: Trainer, keep: frozenset[int]) -> None:
        self.name = name
        self.ledger = Ledger()
        self._newest = max(keep)
        self._trainer = trainer
        self._path = folder.parent / "torch-save.pt"

    def build(self, interval: int) -> None:
        if interval != self._newest or self._path.exists():
            return
        tables = by_table(self._trainer.workload, self._trainer.live)
        # Views of one storage would all save the whole of it.
        state = {name: {"weight": w.clone(), "sum": s.clone()} for name, (w, s) in tables.items()}
        with open(self._path, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        self.ledger.add(self._path.stat().st_size)

    def restore(self, interval: int, tables: Tables) -> None:
        self._copy(self._load(interval), tables)

    def restore_delta(self, interval: int, tables: Tables) -> float:
        raise UnavailableError("it is one image")

    def land(self, tables: Tables) -> None:
        """It is there."""

    def files(self, interval: int) -> Iterator[Path]:
        yield self._path

    def reads(self, interval: int) -> Reads:
        return Reads(0, self._path.stat().st_size)

    def _load(self, interval: int) -> dict[str, dict[str, torch.Tensor]]:
        if interval != self._newest:
            raise UnavailableError("one file, of the newest marker")
        state: dict[str, dict[str, torch.Tensor]] = torch.load(self._path, weights_only=True, mmap=self.mmap)
        return state

    def _copy(self, state: dict[str, dict[str, torch.Tensor]], tables: Tables) -> None:
        for name, (weights, sums) in by_table(self._trainer.workload, tables).items():
            weights.copy_(state[name]["weight"])
            sums.copy_(state[name]["sum"])


class TorchMmapAndCopy(TorchLoadAndCopy):
    """Mapped, and copied into the live tables: the fastest way that torch has."""

    mmap = True


class TorchLoad(TorchLoadAndCopy):
    """Plain ``torch.load``: into memory of its own, nothing is in the live tables yet."""

    def __init__(self, name: str, folder: Path, trainer: Trainer, keep: frozenset[int]) -> None:
        super().__init__(name, folder, trainer, keep)
        self._loaded: dict[str, dict[str, torch.Tensor]] = {}

    def restore(self, interval: int, tables: Tables) -> None:
        self._loaded = self._load(interval)

    def land(self, tables: Tables) -> None:
        self._copy(self._loaded, tables)
        self._loaded = {}
