"""The id maps of managed collision in a marker: one piece per table shard, merged if a restore has larger shards.

A shard's map records which raw id has which of its rows, and raw ids are assigned to ranks by separate ranges. So maps
can be merged exactly, as TorchRec does on a load, but never split: the rows of the ids that would move to another shard
are spread over the whole shard.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from torchrec_stream_ckpt.errors import SchemaMismatchError
from torchrec_stream_ckpt.model import COUNTERS, NO_ID, CollisionMap

PREFIX = "collision"

State = dict[str, torch.Tensor]
Pieces = dict[str, dict[str, State]]
"""{table: {first row: {field: tensor}}}"""


def read_pieces(maps: Iterable[CollisionMap]) -> Pieces:
    """Return the live state of this rank's maps."""
    pieces: Pieces = {}
    for each in maps:
        pieces.setdefault(each.table, {})[str(each.row0)] = each.read()
    return pieces


def empty_pieces(entries: Mapping[str, Any], maps: Iterable[CollisionMap], names: Mapping[str, str]) -> Pieces:
    """Return empty tensors for those pieces of a marker that make up this rank's maps.

    Args:
        entries: Entries of the marker.
        maps: Maps that are restored from it.
        names: Their tables, with the names in the marker.

    Raises:
        SchemaMismatchError: They cannot be merged from whole pieces. Names the table and both row ranges.
    """
    saved: dict[str, dict[int, State]] = {}
    for name, entry in entries.items():
        if name.startswith(f"{PREFIX}."):
            table, row0, field = name.removeprefix(f"{PREFIX}.").rsplit(".", 2)
            tensor = torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu")
            saved.setdefault(table, {}).setdefault(int(row0), {})[field] = tensor
    return {names[each.table]: _whole(each, saved.get(names[each.table], {})) for each in maps}


def _whole(here: CollisionMap, saved: Mapping[int, State]) -> dict[str, State]:
    """Return the saved pieces, in the order of their rows, whose union is exactly the shard ``here``."""
    ranges = [(row0, row0 + saved[row0]["map_rows"].numel()) for row0 in sorted(saved)]
    first, last = here.row0, here.row0 + here.rows
    edges = {edge for piece in ranges for edge in piece}
    if not {first, last} <= edges:
        texts = ", ".join(f"[{row0}, {end})" for row0, end in ranges if row0 < last and end > first) or "none"
        raise SchemaMismatchError(
            f"the id map of rows {here.rows_text} is not a union of whole maps of the marker, which has rows {texts}",
            hint=f"restore on {len(ranges)} ranks, or on fewer ranks whose shards are unions of those row ranges",
            table=here.table,
        )
    fields = here.read().keys()
    for piece in saved.values():
        if piece.keys() != fields:
            raise SchemaMismatchError(
                f"the id map keeps {_policy(piece)} in the marker and {_policy(fields)} in this job",
                hint="use the eviction policy of the job that wrote the marker",
                table=here.table,
            )
    return {str(row0): saved[row0] for row0, end in ranges if first <= row0 and end <= last}


def _policy(fields: Iterable[str]) -> str:
    return ", ".join(sorted(field for field in fields if field.startswith("map_")))


def merge_pieces(maps: Iterable[CollisionMap], pieces: Pieces, names: Mapping[str, str]) -> list[State]:
    """Return the state of each map, from the pieces of :func:`empty_pieces`.

    Raises:
        SchemaMismatchError: Raw ids would be looked up on another rank, or the pieces differ in a counter.
    """
    return [_merge(each, list(pieces[names[each.table]].values())) for each in maps]


def _merge(here: CollisionMap, pieces: Sequence[State]) -> State:
    merged = {field: torch.cat([piece[field] for piece in pieces]) for field in pieces[0]}
    merged["counters"] = _agreed_counters(here, pieces)
    ids = torch.cat([merged["map_raw_ids"], merged["history_ids"]])
    strangers = here.count_strangers(ids[ids != NO_ID])
    if strangers:
        raise SchemaMismatchError(
            f"{strangers} raw ids of rows {here.rows_text} belong to another rank in this job",
            hint="keep input_hash_size, and restore on a number of ranks that splits it at the same row ranges",
            table=here.table,
        )
    # As MCHManagedCollisionModule sorts a loaded map. This does not change a map of one piece.
    order = torch.argsort(merged["map_raw_ids"], stable=True)
    return {field: values[order] if field.startswith("map_") else values for field, values in merged.items()}


def _agreed_counters(here: CollisionMap, pieces: Sequence[State]) -> torch.Tensor:
    """Return the counters, which all pieces must share, and the sum of their history capacities."""
    *counters, capacities = torch.stack([piece["counters"] for piece in pieces], dim=1)
    for name, values in zip(COUNTERS, (*counters, capacities < 0), strict=True):
        if values.unique().numel() > 1:
            raise SchemaMismatchError(
                f"the marker's id maps of rows {here.rows_text} have different values of {name}: {values.tolist()}",
                hint="restore on as many ranks as wrote the marker",
                table=here.table,
            )
    interval = int(counters[COUNTERS.index("_eviction_interval")][0])
    if interval != here.interval:
        raise SchemaMismatchError(
            f"the eviction interval is {interval} in the marker and {here.interval} in this job",
            hint="keep the marker's interval: TorchRec compares the steps since the last eviction for equality",
            table=here.table,
        )
    capacity = capacities[0] if capacities[0] < 0 else capacities.sum()
    return torch.stack([*(values[0] for values in counters), capacity])
