"""Size of the stream, and its cost per step."""

from __future__ import annotations

from torchrec_stream_ckpt.extras.sizing.inputs import TableLoad, UnitCosts, Workload
from torchrec_stream_ckpt.format.frame import ALIGNMENT, HEADER_LEN
from torchrec_stream_ckpt.format.rows import RowLayout


def _drained(table: TableLoad, work: Workload) -> tuple[float, float]:
    """Return (rows, frames) of one table in a drain, all ranks.

    A table is assumed to lie on ranks in proportion to its bytes, as in a balanced plan on average: the number of its
    shards need not be whole. Each shard sends ceil(rows / rows of a frame) frames.
    """
    rows = table.touched.distinct(work.drain_s)
    shards = max(1.0, work.ranks * table.num_bytes / max(1, work.table_bytes))
    max_rows = RowLayout.of(table.spec, table.spec.dim).max_rows
    return rows, min(rows, max(shards, rows / max_rows + shards / 2))


def drain_bytes(work: Workload) -> float:
    """Return the bytes of the frames of one drain, all ranks: the rows and the overhead of frames, which is 128 bytes,
    and on average half an alignment for each section."""
    total = 0.0
    for table in work.tables:
        rows, frames = _drained(table, work)
        sections = len(table.spec.states) + 2
        total += rows * table.row_bytes + frames * (HEADER_LEN + sections * ALIGNMENT / 2)
    return total


def drain_frames(work: Workload) -> float:
    """Return the frames of one drain, of a mean rank. The ring has one buffer of a whole frame for each, however full
    it is."""
    return sum(_drained(table, work)[1] for table in work.tables) / work.ranks


def stream_bytes_per_s(work: Workload) -> float:
    """Return the bytes per second into the log: the bytes of a drain, over the time between drains."""
    return drain_bytes(work) / work.drain_s


def step_cost(work: Workload, costs: UnitCosts) -> float:
    """Compute the seconds that streaming adds to a step on the training thread of a mean rank: ids marked every step;
    masks scanned and rows gathered every drain. The publisher's thread works at the same time."""
    ids = sum(table.ids_per_step for table in work.tables) / work.ranks
    rows, num_bytes = work.distinct(work.drain_s) / work.ranks, drain_bytes(work) / work.ranks
    drain_s = (
        costs.step_s
        + costs.scan_s_per_row * work.rows / work.ranks
        + costs.drain_s_per_row * rows
        + costs.drain_s_per_byte * num_bytes
    )
    return costs.mark_s_per_id * ids + drain_s / work.drain_every
