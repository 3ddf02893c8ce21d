"""New rows for the raw ids of a marker, where its id maps fit no shard of this job (``Changes.reassigned``).

This job's own routing says which shard each raw id belongs to. There raw ids get rows in the order in which the
eviction policy would keep them, so that the last ones of this order do not fit. Rows, optimizer rows and metadata come
along. The result is a function of the raw ids, their metadata and this job's shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch

from torchrec_stream_ckpt.dense.id_maps import State, agreed_counters
from torchrec_stream_ckpt.errors import SchemaMismatchError
from torchrec_stream_ckpt.evolve.row_maps import NewRows, RowMap
from torchrec_stream_ckpt.model import COUNTERS, FREE, NO_ID, CollisionMap, HashMap, IdMap, MapShard

Pieces = Mapping[str, State]
"""{first row: {field: tensor}} of all rows of one table, in order."""


def new_rows(here: IdMap, shards: Sequence[MapShard], pieces: Pieces) -> NewRows | None:
    """Give the raw ids of a marker rows of this job.

    Args:
        here: This rank's map of the table.
        shards: The shard of each rank.
        pieces: The maps of the marker.

    Returns:
        The same on each rank. None if each shard is a union of the marker's and has all of its raw ids.

    Raises:
        SchemaMismatchError: The pieces differ in a counter, or keep other metadata than this job.
    """
    return _hashed(here, shards, pieces) if isinstance(here, HashMap) else _sorted(here, shards, pieces)


def state_at(here: IdMap, rows: RowMap, pieces: Pieces) -> State:
    """Return the state of one map whose raw ids have the rows of :func:`new_rows`."""
    return _hash_state(here, rows, pieces) if isinstance(here, HashMap) else _sorted_state(here, rows, pieces)


def _joined(pieces: Pieces, but: Iterable[str] = ()) -> State:
    fields = next(iter(pieces.values())).keys() - set(but)
    return {field: torch.cat([piece[field] for piece in pieces.values()]) for field in fields}


def _row_map(old: Iterable[torch.Tensor], new: Iterable[torch.Tensor]) -> RowMap:
    there, here = torch.cat(list(old)).numpy(), torch.cat(list(new)).numpy()
    order = np.argsort(there, kind="stable")
    return RowMap(len(order), there[order], here[order])


# MCHManagedCollisionModule.


def _sorted(here: CollisionMap, shards: Sequence[MapShard], pieces: Pieces) -> NewRows | None:
    if _are_unions(here, shards, pieces):
        return None
    counters = dict(zip(COUNTERS, agreed_counters(here, list(pieces.values())).tolist(), strict=True))
    iteration = max(counters["_current_iter"], counters["_current_iter_tensor"])
    saved = _joined(pieces, ["counters"])
    (used,) = torch.where(saved["map_raw_ids"] != NO_ID)
    ids = saved["map_raw_ids"][used]
    metadata = {field.removeprefix("map_"): values[used] for field, values in saved.items() if field.startswith("map_")}
    order = here.by_priority(ids, metadata, iteration)
    ranks, rows = here.ranks_of(ids[order]), saved["map_rows"][used[order]]
    ends = torch.tensor([int(row0) + piece["map_rows"].numel() for row0, piece in pieces.items()], device="cpu")
    total, kept = sum(shard.rows for shard in shards), 0
    old, new = [], []
    for rank, shard in enumerate(shards):
        if shard.rows:
            mine = rows[ranks == rank][: shard.rows - 1]
            middle = (shard.row0 + shard.rows // 2) * int(ends[-1]) // total
            unknown = ends[torch.searchsorted(ends, middle, right=True)].reshape(1) - 1
            old += [mine, unknown]
            new.append(torch.arange(shard.row0, shard.row0 + len(mine), device="cpu"))
            new.append(torch.tensor([shard.row0 + shard.rows - 1], device="cpu"))
            kept += len(mine)
    return NewRows(_row_map(old, new), kept, len(used) - kept)


def _are_unions(here: CollisionMap, shards: Sequence[MapShard], pieces: Pieces) -> bool:
    """Return whether each piece is a part of one shard, which this job looks its raw ids up in."""
    if sum(shard.rows for shard in shards) != sum(piece["map_rows"].numel() for piece in pieces.values()):
        return False
    for row0, piece in pieces.items():
        first, end = int(row0), int(row0) + piece["map_rows"].numel()
        holders = [at for at, each in enumerate(shards) if each.row0 <= first and end <= each.row0 + each.rows]
        ids = torch.cat([piece["map_raw_ids"], piece["history_ids"]])
        if not holders or (here.ranks_of(ids[ids != NO_ID]) != holders[0]).any():
            return False
    return True


def _sorted_state(here: CollisionMap, rows: RowMap, pieces: Pieces) -> State:
    saved = _joined(pieces, ["counters"])
    old, new = (torch.from_numpy(each) for each in rows.within(here.row0, here.row0 + here.rows))
    places = torch.argsort(saved["map_rows"])
    used = saved["map_raw_ids"][places[old]] != NO_ID
    old, new = old[used], new[used]
    state = {}
    for field in saved:
        if field.startswith("map_") and field != "map_rows":
            values = torch.full((here.rows,), NO_ID if field == "map_raw_ids" else 0, device="cpu")
            values[new - here.row0] = saved[field][places[old]]
            state[field] = values
    order = torch.argsort(state["map_raw_ids"], stable=True)
    state = {"map_rows": here.row0 + order, **{field: values[order] for field, values in state.items()}}
    mine = here.ranks_of(saved["history_ids"]) == here.rank
    state |= {field: values[mine] for field, values in saved.items() if field.startswith("history_")}
    state["evicted_rows"] = new[torch.isin(old, saved["evicted_rows"])]
    counters = agreed_counters(here, list(pieces.values()))
    if counters[-1] >= 0:
        counters[-1] = max(-(-int(counters[-1]) // here.world), int(mine.sum()))
    return {**state, "counters": counters}


# HashZchManagedCollisionModule.


def _hashed(here: HashMap, shards: Sequence[MapShard], pieces: Pieces) -> NewRows | None:
    saved = _joined(pieces)
    layouts = [piece["hash_layout"].tolist() for piece in pieces.values()]
    buckets = next(iter(pieces.values()))["hash_buckets"]
    _check_widths(here, saved)
    layout = here.layout()
    reserved = {each[3] for each in layouts} | {shard.reserved for shard in shards}
    same = all(each[:3] == layout["hash_layout"].tolist()[:3] for each in layouts) and len(reserved) == 1
    if same and torch.equal(buckets, layout["hash_buckets"]):
        return None
    owners = saved["hash_raw_ids"].clone()
    owners[saved["hash_hidden"]] = FREE
    (used,) = torch.where(owners != FREE)
    used = used[torch.argsort(owners[used])]
    if "hash_metadata" in saved:
        used = used[torch.argsort(saved["hash_metadata"][used], descending=True, stable=True)]
    rows = here.place(owners[used], shards)
    fits = rows >= 0
    kept = int(fits.sum())
    return NewRows(_row_map([used[fits]], [rows[fits]]), kept, len(used) - kept)


def _check_widths(here: HashMap, saved: State) -> None:
    for field, live in here.by_row().items():
        there, now = saved[field].numel() / saved[here.ROWS].numel(), live.numel() / max(1, here.rows)
        if here.rows and there != now:
            raise SchemaMismatchError(
                f"{field} has {there:g} numbers for each row in the marker and {now:g} in this job",
                hint="keep write_runtime_meta_dim",
                table=here.table,
            )


def _hash_state(here: HashMap, rows: RowMap, pieces: Pieces) -> State:
    saved = _joined(pieces)
    old, new = (torch.from_numpy(each) for each in rows.within(here.row0, here.row0 + here.rows))
    state = here.layout()
    for field in here.by_row():
        there = saved[field].reshape(saved[here.ROWS].numel(), -1)
        unused = 0 if field == "hash_runtime" else FREE
        values = torch.full((here.rows, there.shape[1]), unused, dtype=there.dtype, device="cpu")
        values[new - here.row0] = there[old]
        state[field] = values.reshape(-1)
    state["hash_evicted"] = new[torch.isin(old, saved["hash_evicted"])]
    return state
