"""Hash ZCH (``HashZchManagedCollisionModule``) that trains on a CPU, where FBGEMM's operator only reads.

Inside ``with trainable() as clock:`` modules of hash ZCH train as they do on a GPU, one id after the other. Each rank
that trains enters it, before its first step. ``clock.hour`` is the hour by which eviction policies count; only the test
moves it. What reads (eval mode, ``_readonly`` features) goes to FBGEMM's own kernel; ``tests/unit/test_hash_zch.py``
compares both. The product has no part of this. TorchRec's calls of the operator are told by ``exp_hours``, which only
TorchRec passes; all others go to FBGEMM as well.

A GPU takes the ids of a batch in any order; this is one of those orders. ``runtime_meta`` is written here as TorchRec
describes it (how often an id was seen while it had its row), since no source of that kernel is public.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import fbgemm_gpu  # noqa: F401
import numpy as np
import torch
from torchrec.modules import hash_mc_evictions

FREE = -1
"""Identity and metadata of a row without an owner."""

_OPERATOR = torch.ops.fbgemm.zero_collision_hash


@dataclass
class Clock:
    """Stands in for the module ``time`` of TorchRec's eviction policies."""

    hour: int

    def time(self) -> float:
        return self.hour * 3600.0


@contextmanager
def trainable(hour: int = 1000) -> Iterator[Clock]:
    """Let modules of hash ZCH in this process train on a CPU."""
    clock = Clock(hour)
    with (
        patch.object(torch.ops.fbgemm, "zero_collision_hash", _answer),
        patch.object(hash_mc_evictions, "time", clock),
    ):
        yield clock


def _answer(*positional: Any, **call: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Do what the operator does on a GPU: the row of each id, and the rows that have changed hands."""
    if "exp_hours" not in call:
        found: tuple[torch.Tensor, torch.Tensor] = _OPERATOR(*positional, **call)
        return found
    rows = len(call["identities"])
    first, last = call["offsets"], call["offsets"] + call["local_sizes"]
    if ((first < 0) | (last > rows)).any():
        strangers = call["input"][(first < 0) | (last > rows)].tolist()
        raise IndexError(f"raw ids {strangers} belong to buckets outside of the {rows} rows of this shard")
    return _read(call) if call["readonly"] else _train(call)


def _read(call: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """FBGEMM's kernel, without the arguments that only a GPU takes: it reads none of them, either."""
    ignored = {"metadata": None, "input_metadata": None, "eviction_threshold": -1, "opt_in_rands": None}
    certain = {"opt_in_prob": 50} if call["opt_in_prob"] == 100 else {}
    return _OPERATOR(**call | ignored | certain)


def _hashed(ids: torch.Tensor, sizes: torch.Tensor) -> list[int]:
    """The hash of each id modulo a size, from FBGEMM's kernel: where it points if it may not probe at all."""
    nothing = torch.full((max(1, int(sizes.max())), 1), FREE) if len(ids) else torch.empty(0, 1, dtype=torch.int64)
    found, _ = _OPERATOR(
        ids, nothing, 0, circular_probe=True, readonly=True, local_sizes=sizes, offsets=torch.zeros_like(sizes)
    )
    return found.tolist()


class _Table:
    """The arrays of one call, which it changes in place."""

    def __init__(self, call: dict[str, Any]) -> None:
        def column(name: str) -> Any:
            return None if call[name] is None else call[name].detach().numpy()[:, 0]

        self.owners, self.metadata, self.seen = column("identities"), column("metadata"), column("runtime_meta")
        self.threshold = call["eviction_threshold"]
        self.evicted: list[int] = []

    def note(self, row: int, metadata: int) -> int:
        """An id has (or has got) a row."""
        if self.metadata is not None:
            self.metadata[row] = max(self.metadata[row], metadata)
        if self.seen is not None:
            self.seen[row] += 1
        return row

    def expired(self, row: int, metadata: int) -> bool:
        if self.metadata is None:
            return False
        assert self.metadata[row] != FREE, f"row {row} has an owner and no metadata: a GPU waits for it forever"
        return bool(self.metadata[row] < min(self.threshold, metadata))

    def take(self, row: int, raw_id: int, metadata: int) -> int:
        """An id gets the row of one that has expired."""
        self.owners[row] = raw_id
        self.evicted.append(row)
        if self.seen is not None:
            self.seen[row] = 0
        return self.note(row, metadata)


def _train(call: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor | None]:
    ids, sizes = call["input"], call["local_sizes"]
    lru, chance = call["eviction_policy"] == 1, call["opt_in_prob"]
    assert call["exp_hours"] == -1
    assert call["circular_probe"]
    assert chance == -1 or not lru, (
        "with LRU eviction FBGEMM ignores opt_in_prob while it trains, but not while it reads"
    )
    reserved = 0 if chance == -1 else call["num_reserved_slots"]
    blocks = sizes - reserved
    homes = _hashed(ids, blocks)
    # Where an id goes that gets no row of its own.
    shared = homes
    if reserved:
        hashes = _hashed(ids, torch.full_like(sizes, reserved))
        shared = [block + each for block, each in zip(blocks.tolist(), hashes, strict=True)]
    table = _Table(call)
    metadata = [0] * len(ids) if call["input_metadata"] is None else call["input_metadata"].tolist()
    opted_in = [True] * len(ids) if call["opt_in_rands"] is None else (call["opt_in_rands"] < chance).tolist()
    rows = []
    for raw_id, home, other, block, offset, value, chosen in zip(
        ids.tolist(), homes, shared, blocks.tolist(), call["offsets"].tolist(), metadata, opted_in, strict=True
    ):
        probes = (offset + (home + np.arange(call["max_probe"])) % block).tolist()
        known = raw_id in table.owners[probes[: _until_free(table, probes)]]
        if not (known or chosen):
            row = offset + other
            if table.metadata is not None:
                table.metadata[row] = max(table.metadata[row], value)
        else:
            find = _least_recent if lru else _first
            found = find(table, probes, raw_id, value, known)
            row = found if found is not None else -1 if call["disable_fallback"] else offset + other
        rows.append(row)
    evicted = torch.tensor(sorted(set(table.evicted)), dtype=torch.int64) if table.metadata is not None else None
    return torch.tensor(rows, dtype=torch.int64), evicted


def _until_free(table: _Table, probes: list[int]) -> int:
    free = np.flatnonzero(table.owners[probes] == FREE)
    return int(free[0]) if len(free) else len(probes)


def _first(table: _Table, probes: list[int], raw_id: int, metadata: int, known: bool) -> int | None:
    """The first row that is the id's own, is free, or (if the id has none) has expired. Time to live."""
    for row in probes:
        if table.owners[row] in (raw_id, FREE):
            table.owners[row] = raw_id
            return table.note(row, metadata)
        if not known and table.expired(row, metadata):
            return table.take(row, raw_id, metadata)
    return None


def _least_recent(table: _Table, probes: list[int], raw_id: int, metadata: int, _: bool) -> int | None:
    """The first row that is the id's own or is free, else the one that has expired first. Least recently used."""
    for row in probes:
        if table.owners[row] in (raw_id, FREE):
            table.owners[row] = raw_id
            return table.note(row, metadata)
    expired = [row for row in probes if table.expired(row, metadata)]
    return table.take(min(expired, key=lambda row: table.metadata[row]), raw_id, metadata) if expired else None
