"""The id maps of managed collision in a marker: one piece per table shard.

A shard's map records which raw id has which of its rows, and raw ids are assigned to ranks by separate ranges. So maps
can be merged exactly, as TorchRec does on a load, but never split: the rows of the ids that would move to another shard
are spread over the whole shard.

Those of hash ZCH can be split: a raw id stays within its bucket, which has the same rows under every plan. A restore
takes its rows from the pieces that have some of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

from torchrec_stream_ckpt.errors import SchemaMismatchError
from torchrec_stream_ckpt.evolve.findings import NewRowsNeededError
from torchrec_stream_ckpt.model import COUNTERS, LAYOUT, NO_ID, CollisionMap, HashMap, IdMap

PREFIX = "collision"

State = dict[str, torch.Tensor]
Pieces = dict[str, dict[str, State]]
"""{table: {first row: {field: tensor}}}"""


def read_pieces(maps: Iterable[IdMap]) -> Pieces:
    """Return the live state of this rank's maps."""
    pieces: Pieces = {}
    for each in maps:
        pieces.setdefault(each.table, {})[str(each.row0)] = each.read()
    return pieces


def all_pieces(entries: Mapping[str, Any], here: IdMap, name: str) -> dict[str, State]:
    """Return empty tensors for all pieces of one table of a marker, in the order of their rows.

    Args:
        entries: Entries of the marker.
        here: A map of the table in this job.
        name: Name of the table in the marker.

    Raises:
        SchemaMismatchError: They are of another kind, or lack rows. Names the table, and both fields.
    """
    saved = _empty(entries).get(name, {})
    _check_kind(here, saved)
    _check_policy(here, saved)
    ranges = [(row0, row0 + saved[row0][here.ROWS].numel()) for row0 in sorted(saved)]
    if [row0 for row0, _ in ranges] != [0, *(end for _, end in ranges[:-1])]:
        raise SchemaMismatchError(
            f"the marker does not have the id map of all rows: it has rows {_texts(ranges, 0, ranges[-1][1])}",
            hint="restore another marker",
            table=here.table,
        )
    return {str(row0): saved[row0] for row0, _ in ranges}


def empty_pieces(entries: Mapping[str, Any], maps: Iterable[IdMap], names: Mapping[str, str]) -> Pieces:
    """Return empty tensors for those pieces of a marker that make up this rank's maps.

    Args:
        entries: Entries of the marker.
        maps: Maps that are restored from it.
        names: Their tables, with the names in the marker.

    Raises:
        SchemaMismatchError: The pieces do not make up a map, or are those of another kind. Names the table, and both
            row ranges or fields.
    """
    saved = _empty(entries)
    return {names[each.table]: _chosen(each, saved.get(names[each.table], {})) for each in maps}


def _empty(entries: Mapping[str, Any]) -> dict[str, dict[int, State]]:
    """Return empty tensors for all pieces of a marker, by table and first row."""
    saved: dict[str, dict[int, State]] = {}
    for name, entry in entries.items():
        if name.startswith(f"{PREFIX}."):
            table, row0, field = name.removeprefix(f"{PREFIX}.").rsplit(".", 2)
            tensor = torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu")
            saved.setdefault(table, {}).setdefault(int(row0), {})[field] = tensor
    return saved


def _chosen(here: IdMap, saved: Mapping[int, State]) -> dict[str, State]:
    """Return the saved pieces, in the order of their rows, that make up the shard ``here``."""
    _check_kind(here, saved)
    ranges = [(row0, row0 + saved[row0][here.ROWS].numel()) for row0 in sorted(saved)]
    found = _overlapping(here, ranges) if isinstance(here, HashMap) else _whole(here, ranges)
    _check_policy(here, saved)
    return {str(row0): saved[row0] for row0 in found}


def no_id_map(table: str) -> SchemaMismatchError:
    """Return the error of a marker without an id map for a table of this job that has one."""
    return SchemaMismatchError(
        "this model has a managed-collision id map for this table, but the marker does not",
        hint="omit managed collision for it, or declare it dropped and added, which initializes it again",
        table=table,
    )


def _check_kind(here: IdMap, saved: Mapping[int, State]) -> None:
    if not saved:
        raise no_id_map(here.table)
    other = next((piece for piece in saved.values() if here.ROWS not in piece), None)
    if other is not None:
        raise SchemaMismatchError(
            f"the id map keeps {', '.join(sorted(other))} in the marker, and this job's module {here.ROWS}",
            hint="use the kind of managed collision module of the job that wrote the marker",
            table=here.table,
        )


def _check_policy(here: IdMap, saved: Mapping[int, State]) -> None:
    fields = here.read().keys()
    for piece in saved.values():
        if piece.keys() != fields:
            raise SchemaMismatchError(
                f"the id map keeps {_policy(piece)} in the marker and {_policy(fields)} in this job",
                hint="use the eviction policy of the job that wrote the marker"
                + (", its track_id_freq and its write_runtime_meta_dim" if isinstance(here, HashMap) else ""),
                table=here.table,
            )


def _whole(here: CollisionMap, ranges: Sequence[tuple[int, int]]) -> list[int]:
    """Return the first rows of the pieces whose union is exactly the shard ``here``."""
    first, last = here.row0, here.row0 + here.rows
    edges = {edge for piece in ranges for edge in piece}
    if not {first, last} <= edges:
        raise NewRowsNeededError(
            f"the id map of rows {here.rows_text} is not a union of whole maps of the marker, which has rows "
            f"{_texts(ranges, first, last)}",
            hint=f"restore on {len(ranges)} ranks, or on fewer ranks whose shards are unions of those row ranges",
            table=here.table,
        )
    return [row0 for row0, end in ranges if first <= row0 and end <= last]


def _overlapping(here: HashMap, ranges: Sequence[tuple[int, int]]) -> list[int]:
    """Return the first rows of the pieces that have rows of the shard ``here``. Of an empty one, any piece."""
    first, last = here.row0, here.row0 + here.rows
    found = [(row0, end) for row0, end in ranges if row0 < last and end > first] or list(ranges[:1])
    gapless = all(end == row0 for (_, end), (row0, _) in pairwise(found))
    if not gapless or (here.rows and not found[0][0] <= first < last <= found[-1][1]):
        whole = ranges[0][0] == 0 and all(end == row0 for (_, end), (row0, _) in pairwise(ranges))
        kind, hint = (
            (NewRowsNeededError, "keep num_embeddings") if whole else (SchemaMismatchError, "restore another marker")
        )
        raise kind(
            f"the marker does not have the id map of all rows {here.rows_text}: it has rows "
            f"{_texts(ranges, first, last)}",
            hint=hint,
            table=here.table,
        )
    return [row0 for row0, _ in found]


def _texts(ranges: Sequence[tuple[int, int]], first: int, last: int) -> str:
    return ", ".join(f"[{row0}, {end})" for row0, end in ranges if row0 < last and end > first) or "none"


def _policy(fields: Iterable[str]) -> str:
    return ", ".join(sorted(field for field in fields if field.startswith(("map_", "hash_"))))


def merge_pieces(maps: Iterable[IdMap], pieces: Pieces, names: Mapping[str, str]) -> list[State]:
    """Return the state of each map, from the pieces of :func:`empty_pieces`.

    Raises:
        SchemaMismatchError: Raw ids would be looked up on another rank or in other rows, or the pieces differ in a
            counter.
    """
    return [
        _slice(each, mine) if isinstance(each, HashMap) else _merge(each, list(mine.values()))
        for each, mine in ((each, pieces[names[each.table]]) for each in maps)
    ]


def _slice(here: HashMap, pieces: Mapping[str, State]) -> State:
    layout = here.layout()
    for piece in pieces.values():
        _check_layout(here, piece, layout)
    first, last = here.row0, here.row0 + here.rows
    state = dict(layout)
    for field in ("hash_hidden", "hash_evicted"):
        rows = torch.cat([piece[field] for piece in pieces.values()])
        state[field] = rows[(first <= rows) & (rows < last)]
    for field, live in here.by_row().items():
        parts = []
        for row0, piece in pieces.items():
            width = piece[field].numel() // max(1, piece[here.ROWS].numel())
            begin, end = (max(0, row - int(row0)) * width for row in (first, last))
            parts.append(piece[field][begin:end])
        state[field] = torch.cat(parts)
        if state[field].numel() != live.numel():
            there, now = (tensor.numel() / here.rows for tensor in (state[field], live))
            raise SchemaMismatchError(
                f"{field} has {there:g} numbers for each row in the marker and {now:g} in this job",
                hint="keep write_runtime_meta_dim",
                table=here.table,
            )
    return state


def _check_layout(here: HashMap, piece: State, layout: State) -> None:
    """Compare where the marker and this job look for a raw id."""
    there, now = piece["hash_buckets"].tolist(), layout["hash_buckets"].tolist()
    if there != now:
        place = next((place for place, (old, new) in enumerate(zip(there, now, strict=False)) if old != new), 0)
        raise NewRowsNeededError(
            f"the marker has {len(there) - 1} buckets of raw ids and this job {len(now) - 1}; the first that differs "
            f"begins with row {there[place]} there and row {now[place]} here",
            hint="keep total_num_buckets and output_segments, because a raw id is looked for in the rows of its bucket "
            "only",
            table=here.table,
        )
    values = (piece["hash_layout"].tolist(), layout["hash_layout"].tolist())
    for name, old, new in zip(LAYOUT[:4], *(each[:4] for each in values), strict=True):
        if old != new:
            raise NewRowsNeededError(
                f"{name} is {old} in the marker and {new} in this job",
                hint="keep it, because raw ids would be looked for in other rows than those that they have",
                table=here.table,
            )


def _merge(here: CollisionMap, pieces: Sequence[State]) -> State:
    merged = {field: torch.cat([piece[field] for piece in pieces]) for field in pieces[0]}
    merged["counters"] = agreed_counters(here, pieces)
    ids = torch.cat([merged["map_raw_ids"], merged["history_ids"]])
    strangers = here.count_strangers(ids[ids != NO_ID])
    if strangers:
        raise NewRowsNeededError(
            f"{strangers} raw ids of rows {here.rows_text} belong to another rank in this job",
            hint="keep input_hash_size, and restore on a number of ranks that splits it at the same row ranges",
            table=here.table,
        )
    # As MCHManagedCollisionModule sorts a loaded map. This does not change a map of one piece.
    order = torch.argsort(merged["map_raw_ids"], stable=True)
    return {field: values[order] if field.startswith("map_") else values for field, values in merged.items()}


def agreed_counters(here: CollisionMap, pieces: Sequence[State]) -> torch.Tensor:
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
