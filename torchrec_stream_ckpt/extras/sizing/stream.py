"""What is sent, and what that costs a step."""

from __future__ import annotations

from dataclasses import dataclass

from torchrec_stream_ckpt.extras.sizing.inputs import TableLoad, UnitCosts, Workload
from torchrec_stream_ckpt.format.frame import ALIGNMENT, HEADER_LEN
from torchrec_stream_ckpt.format.rows import RowLayout


def _drained(table: TableLoad, work: Workload) -> tuple[float, float]:
    """(rows, frames) of one table in a drain, all ranks.

    A table is taken to lie on ranks in proportion to its bytes, as a balanced plan has it on average: the number of its
    shards need not be whole. Each shard sends ceil(rows / rows of a frame) frames.
    """
    rows = table.touched.distinct(work.drain_s)
    shards = max(1.0, work.ranks * table.num_bytes / max(1, work.table_bytes))
    max_rows = RowLayout.of(table.spec, table.spec.dim).max_rows
    return rows, min(rows, max(shards, rows / max_rows + shards / 2))


def drain_bytes(work: Workload) -> float:
    """Bytes of the frames of one drain, all ranks: rows, and what frames add: 128 bytes, and on average half an
    alignment for each section."""
    total = 0.0
    for table in work.tables:
        rows, frames = _drained(table, work)
        sections = len(table.spec.states) + 2
        total += rows * table.row_bytes + frames * (HEADER_LEN + sections * ALIGNMENT / 2)
    return total


def drain_frames(work: Workload) -> float:
    """Frames of one drain, of a mean rank. The ring has one buffer of a whole frame for each, whatever it carries."""
    return sum(_drained(table, work)[1] for table in work.tables) / work.ranks


def stream_bytes_per_s(work: Workload) -> float:
    """Bytes a second into the log: what a drain sends, over the time between drains."""
    return drain_bytes(work) / work.drain_s


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of processor time that streaming adds to a step of one rank."""

    training_s: float
    """On the training thread: it waits for this."""
    publisher_s: float
    """On the publisher's, at the same time."""


def step_cost(work: Workload, costs: UnitCosts) -> StepCost:
    """Cost of a mean rank: ids marked every step; masks scanned, rows gathered and frames published every drain."""
    ids = sum(table.ids_per_step for table in work.tables) / work.ranks
    rows, num_bytes = work.distinct(work.drain_s) / work.ranks, drain_bytes(work) / work.ranks
    drain_s = (
        costs.step_s
        + costs.scan_s_per_row * work.rows / work.ranks
        + costs.drain_s_per_row * rows
        + costs.drain_s_per_byte * num_bytes
    )
    return StepCost(
        costs.mark_s_per_id * ids + drain_s / work.drain_every, costs.publish_s_per_byte * num_bytes / work.drain_every
    )


def step_time(train_s: float, cost: StepCost, ranks: int, cores: float) -> float:
    """Seconds of a step with streaming, on a host of ``ranks`` ranks (one training thread each) and ``cores`` cores.

    A rank waits for its own training thread; a host with fewer cores than threads also waits for the sum of all work
    over its cores. ``train_s`` is the step without streaming on the same host, so it holds that contention already.
    """
    busy = train_s * min(ranks, cores)
    own = train_s + cost.training_s
    return max(own, (busy + ranks * (cost.training_s + cost.publisher_s)) / cores)


def host_time(alone_s: float, processor_s: float, ranks: int, cores: float) -> float:
    """Seconds of what takes a rank ``alone_s`` when it is alone, and ``processor_s`` of processor time, if all ranks of
    a host do it at once: the longer of the two, one rank's own time and all work over all cores."""
    return max(alone_s, processor_s * ranks / cores)
