"""Hash ZCH (multi-probe ZCH): the raw id of each row of a table, when each expires, and counters by row.

A raw id belongs to a bucket, and a bucket to a fixed range of the table's rows, whatever the plan. Within its bucket a
raw id has the first free row from its hash on. So the state of a row depends on the row only, and not on the ranks.

TorchRec's operator writes this state in place without a new version of its tensors. Rows that an eviction resets are
noticed by ``FusedKernel.on_rewrite``: TorchRec passes them to the kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule

from torchrec_stream_ckpt.errors import UnsupportedError
from torchrec_stream_ckpt.model import versions
from torchrec_stream_ckpt.model.patch import wrap

Ints = npt.NDArray[np.int64]

FREE = -1
"""Raw id that TorchRec writes for a free row."""

LAYOUT = ("input_hash_size", "max_probe", "opt_in_prob", "reserved slots per bucket", "disable_fallback")
"""The order of the field ``hash_layout``. The third and fourth are -1 if all raw ids are accepted."""


class MapShard(NamedTuple):
    """Rows [row0, row0+rows) of a table, which one id map assigns to raw ids."""

    row0: int
    rows: int
    reserved: int = -1
    """(hash ZCH) Rows at the end of each bucket for raw ids that are not accepted; -1 if all are accepted."""


class HashMap:
    """The id map of one table shard: rows [row0, row0+rows) of ``table``.

    Its state is a dict of 1-D tensors:

    ``hash_raw_ids``
        Raw id of each row of the shard, int64; ``FREE`` for free ones.
    ``hash_metadata``
        (with eviction) Hour at which each row expires, int32.
    ``hash_runtime``
        (if the module keeps it) Counts or values of each row, int64, row by row.
    ``hash_hidden``
        Rows whose raw id lookups find in another row, or not at all. Rows are global. Usually empty.
    ``hash_evicted``
        Rows that are still to be reset in the table. Rows are global. Empty at a step boundary.
    ``hash_buckets``
        First row of each bucket of the whole table, and the end of the last one.
    ``hash_layout``
        See ``LAYOUT``.
    """

    ROWS = "hash_raw_ids"
    """A field with one number for each row."""

    def __init__(self, table: str, module: HashZchManagedCollisionModule) -> None:
        self.table = table
        self.row0 = module._output_segments[module._start_bucket]
        self.rows = module._zch_size
        self._module = module
        self._rows_lost: list[torch.Tensor] = []
        """Rows of the shard that were evicted since :meth:`lost`."""
        self._evictions = 0

    @property
    def shard(self) -> MapShard:
        """Its rows."""
        return MapShard(self.row0, self.rows, self._module.get_reserved_slots_per_bucket())

    @property
    def rows_text(self) -> str:
        """The rows, as text for errors."""
        return f"[{self.row0}, {self.row0 + self.rows})"

    def watch(self) -> Callable[[], None]:
        """Observe evictions. Returns the remover."""
        return wrap(self._module, "evict", self._evict)

    def _evict(self, real: Callable[[], torch.Tensor | None]) -> torch.Tensor | None:
        rows = real()
        if rows is not None and rows.numel():
            self._rows_lost.append(rows - self.row0)
            self._evictions += 1
            if sum(map(len, self._rows_lost)) > 2 * self.rows:  # no stream is open that asks for them
                self._rows_lost = [torch.unique(torch.cat(self._rows_lost))]
        return rows

    @property
    def version(self) -> tuple[int, ...]:
        """Numbers that differ after an eviction, and after other code has written which raw id has which row."""
        identities = self._module._hash_zch_identities
        return identities.data_ptr(), identities._version, self._evictions

    def lost(self, seen: tuple[int, ...] | None) -> npt.NDArray[np.int64] | None:
        """Return and forget rows of the shard that may have lost their raw id since version ``seen``. None if any."""
        evicted, self._rows_lost = self._rows_lost, []
        if seen is None or seen[:2] != self.version[:2] or not evicted:
            return None
        rows: npt.NDArray[np.int64] = torch.unique(torch.cat(evicted)).cpu().numpy()
        return rows

    def owners(self, rows: npt.NDArray[np.int64] | None = None) -> npt.NDArray[np.int64]:
        """Return the raw id of each row of the shard, the greatest int64 for free and hidden ones.

        On a GPU the host waits.

        Args:
            rows: Rows of the shard to read, hidden ones included. If None, all.
        """
        ids = self._module._hash_zch_identities.detach().flatten()
        if rows is None:
            ids = torch.where(self._is_hidden(), FREE, ids)
        else:
            ids = ids[torch.from_numpy(rows).to(ids.device)]
        found: npt.NDArray[np.int64] = torch.where(ids == FREE, torch.iinfo(torch.int64).max, ids).cpu().numpy()
        return found

    def _is_hidden(self) -> torch.Tensor:
        """Return for each row whether lookups do not find its raw id there, bool of shape (rows,).

        A raw id can have two rows: it gets another one if a row before its own has become free. Threads of TorchRec's
        operator can do that, too.
        """
        module = self._module
        identities = module._hash_zch_identities.detach()
        (used,) = torch.where(identities.flatten() != FREE)
        offset = module._output_global_offset_tensor
        values, sizes, offsets = module.input_mapper(
            identities.flatten()[used], None if offset is None else offset.to(used.device)
        )
        found = self._look_up(values, identities, sizes, offsets, module.get_reserved_slots_per_bucket())
        hidden = torch.zeros(self.rows, dtype=torch.bool, device=used.device)
        hidden[used] = found != used
        return hidden

    def _look_up(
        self, raw_ids: torch.Tensor, identities: torch.Tensor, sizes: torch.Tensor, offsets: torch.Tensor, reserved: int
    ) -> torch.Tensor:
        """Return the row of ``identities`` in which lookups find each raw id, -1 if in none.

        ``sizes`` and ``offsets`` are those of the buckets of the raw ids.
        """
        found: torch.Tensor = torch.ops.fbgemm.zero_collision_hash(
            input=raw_ids,
            identities=identities,
            max_probe=self._module._max_probe,
            circular_probe=True,
            readonly=True,
            local_sizes=sizes,
            offsets=offsets,
            disable_fallback=True,
            # A lookup asks only whether some raw ids are rejected. FBGEMM's operator for CPUs does not take 100.
            opt_in_prob=min(self._module._opt_in_prob, 1),
            num_reserved_slots=reserved,
        )[0]
        return found

    def place(self, raw_ids: torch.Tensor, shards: Sequence[MapShard]) -> torch.Tensor:
        """(CPU) Return a row of the table for each raw id, in which lookups of this module find it, -1 if it has none.

        Args:
            raw_ids: The raw ids, each once. Each gets the first row of its probes that none before it has.
            shards: All shards of the table.
        """
        module, rows = self._module, torch.full_like(raw_ids, -1)
        block = -(-module._input_hash_size // module.buckets())
        routed = raw_ids != FREE
        if block:
            routed &= (raw_ids >= 0) & (raw_ids // block < module.buckets())
        (at,) = torch.where(routed)
        _, sizes, begins = module.input_mapper(raw_ids[at])
        for shard in shards:
            mine = (shard.row0 <= begins) & (begins < shard.row0 + shard.rows) & (sizes > max(0, shard.reserved))
            if mine.any():
                here = at[mine]
                found = self._place(raw_ids[here], sizes[mine], begins[mine] - shard.row0, shard)
                rows[here] = torch.where(found < 0, -1, found + shard.row0)
        return rows

    def _place(
        self, raw_ids: torch.Tensor, sizes: torch.Tensor, offsets: torch.Tensor, shard: MapShard
    ) -> torch.Tensor:
        """Return the row of one shard for each raw id, counted from its first one; -1 if it has none."""
        rows = torch.full_like(raw_ids, -1)
        blocks = sizes - max(0, shard.reserved)
        homes, _ = torch.ops.fbgemm.zero_collision_hash(
            input=raw_ids,
            identities=torch.full((int(blocks.max()), 1), FREE, dtype=torch.int64, device="cpu"),
            max_probe=0,  # so it returns the hash
            circular_probe=True,
            readonly=True,
            local_sizes=blocks,
            offsets=torch.zeros_like(offsets),
        )
        left = torch.arange(len(raw_ids), device="cpu")
        while len(left):
            starts = [each[left].numpy() for each in (homes, blocks, offsets)]
            rows[left] = torch.from_numpy(first_free(*starts, probes=self._module._max_probe, rows=shard.rows))
            (placed,) = torch.where(rows >= 0)
            identities = torch.full((shard.rows, 1), FREE, dtype=torch.int64, device="cpu")
            identities[rows[placed], 0] = raw_ids[placed]
            found = self._look_up(raw_ids[placed], identities, sizes[placed], offsets[placed], shard.reserved)
            lost = placed[found != rows[placed]]
            if not len(lost):
                break
            rows[lost] = -1
            left = left[~torch.isin(left, lost)]
        return rows

    def layout(self) -> dict[str, torch.Tensor]:
        """Return the fields that define where a raw id may be."""
        module = self._module
        layout = (
            module._input_hash_size,
            module._max_probe,
            module._opt_in_prob,
            module.get_reserved_slots_per_bucket(),
            int(module._disable_fallback),
        )
        return {
            "hash_buckets": torch.tensor(module._output_segments, dtype=torch.int64, device="cpu"),
            "hash_layout": torch.tensor(layout, dtype=torch.int64, device="cpu"),
        }

    def by_row(self) -> dict[str, torch.Tensor]:
        """Return live views of the fields with the same number of values for each row."""
        module = self._module
        found = {
            self.ROWS: module._hash_zch_identities,
            "hash_metadata": module._hash_zch_metadata,
            "hash_runtime": module._hash_zch_runtime_meta,
        }
        return {field: tensor.detach().view(-1) for field, tensor in found.items() if tensor is not None}

    def read(self) -> dict[str, torch.Tensor]:
        """Return the current state. Fields by row are live views, valid until the next forward."""
        (hidden,) = torch.where(self._is_hidden())
        evicted = [rows.long() for rows in self._module._evicted_indices]
        none = torch.empty(0, dtype=torch.int64, device="cpu")
        return {
            **self.by_row(),
            "hash_hidden": hidden + self.row0,
            "hash_evicted": torch.cat(evicted) + self.row0 if evicted else none,
            **self.layout(),
        }

    @torch.no_grad()
    def write(self, state: dict[str, torch.Tensor]) -> None:
        """Restore a state in place. ``hash_hidden`` follows from the rest."""
        module = self._module
        for field, tensor in self.by_row().items():
            tensor.copy_(state[field])
        evicted = state["hash_evicted"] - self.row0
        module._evicted_indices = [evicted.to(module.device)] if evicted.numel() else []


def first_free(homes: Ints, blocks: Ints, offsets: Ints, *, probes: int, rows: int) -> Ints:
    """Return the row that each raw id gets if one after the other takes the first free one of its probes; -1 for none.

    The result is that of a loop over raw ids. Here all of them probe at a time, and an earlier one takes a row from a
    later one, which goes on with its next probe.

    Args:
        homes: Where the probes of each raw id begin, counted from ``offsets``.
        blocks: Number of rows after which they begin again, likewise.
        offsets: First row of its bucket.
        probes: Most rows that a raw id may try.
        rows: Number of rows.
    """
    none = len(homes)
    owners, found, tried = np.full(rows, none), np.full(none, -1), np.zeros(none, np.int64)
    left = np.arange(none)
    while len(left := left[tried[left] < np.minimum(probes, blocks[left])]):
        wanted = offsets[left] + (homes[left] + tried[left]) % blocks[left]
        tried[left] += 1
        before = owners[wanted]
        np.minimum.at(owners, wanted, left)
        won = owners[wanted] == left
        lost = before[won & (before < none)]
        found[lost] = -1
        found[left[won]] = wanted[won]
        left = np.concatenate([left[~won], lost])
    return found


def hash_map(table: str, module: HashZchManagedCollisionModule, path: str) -> HashMap:
    """Return the id map of a module.

    Args:
        table: Name of the table in the log.
        module: The module.
        path: Name of its wrapper, for errors.

    Raises:
        UnsupportedError: It was built for inference, or stores other numbers than raw ids.
    """
    versions.HASH_MAP.require(module, module=path, table=table)
    versions.INPUT_MAPPER.require(module.input_mapper, module=path, table=table)
    if module._is_inference:
        raise UnsupportedError(
            "the hash ZCH module is in inference mode, without the state that training writes",
            hint="omit is_inference, or call reset_training_mode() before",
            module=path,
            table=table,
        )
    if module.input_mapper._inference_dispatch_div_train_world_size:
        raise UnsupportedError(
            "the hash ZCH module divides raw ids (inference_dispatch_div_train_world_size), and keeps only quotients",
            hint="omit inference_dispatch_div_train_world_size",
            module=path,
            table=table,
        )
    return HashMap(table, module)
