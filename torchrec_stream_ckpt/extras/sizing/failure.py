"""Cost of a failure: training that is lost, time until the state is restored, and the memory for it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torchrec_stream_ckpt.extras.sizing.inputs import Deployment, UnitCosts, Workload
from torchrec_stream_ckpt.extras.sizing.keep import broker_need, delta_bytes
from torchrec_stream_ckpt.extras.sizing.stream import drain_bytes, drain_frames, stream_bytes_per_s

ID_BYTES = 8
SYNCS = 6
"""Durable writes in turn that rank 0 waits for at a marker over files: MARK, the dense state's file, DCP's metadata,
the names of both in two folders, and COMMIT."""
OWN_SYNCS = 2
"""The part of them that every rank makes: its MARK and its dense file."""
GATHERS = 8
"""Collectives of a marker after ``mark()``, which makes one: three votes and the outcome, and DCP's."""
LOG_ALONE_S = 86_400.0
"""Age of a job without a materializer for which its restore is planned."""
MASK_BYTES_PER_ROW = 3
"""Bool masks over the rows of a rank: touched, frozen, and on a CPU unswept (``capture/touched.py``)."""
COMMIT_BYTES, COMMIT_BYTES_PER_RANK = 1500, 25
"""Memory of rank 0 for a marker: its COMMIT, in which the stream ends of the ranks stay packed
(``format/rank_ends.py``)."""


@dataclass(frozen=True, slots=True)
class RestoreTime:
    """Seconds until all ranks hold the newest marker, without ``restart_s``."""

    cold_s: float
    warm_s: float
    head_s: float
    log_s: float
    """Without a store, so without trims: the base and all rows sent in ``LOG_ALONE_S``."""
    restart_s: float


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Host memory that a rank needs in addition to training, and memory of each host for a HEAD."""

    ring_bytes: float
    mask_bytes: float
    """Bytes on the tables' device."""
    dense_bytes: float
    marker_bytes: float
    """Part of the marker budget: rows of a cut that do not fit the ring."""
    head_bytes: float
    """Bytes per host, if it keeps a HEAD."""
    day_bytes: float
    """Bytes of rank 0 for each day: the markers that the control log names."""

    @property
    def rank_bytes(self) -> float:
        return self.ring_bytes + self.mask_bytes + self.dense_bytes + self.marker_bytes


def mark_time(work: Workload, costs: UnitCosts) -> float:
    """Return the seconds for which ``mark()`` stops training, apart from the drain that it replaces: one collective,
    and copies of the rows that a rank proves and of its part of the dense state."""
    copied_s = work.dense_bytes / work.ranks * costs.cut_s_per_byte
    return costs.cut_s + costs.gather_s * math.log2(work.ranks) + copied_s


def commit_time(work: Workload, where: Deployment, costs: UnitCosts) -> float:
    """Return the seconds from ``mark()`` to the COMMIT.

    The busiest rank publishes its last drain. The brokers take those of all ranks: at least one of them works for each
    copy, and they were planned for a part of their speed. Meanwhile the rank saves its part of the dense state, no
    faster than the store accepts it. Syncs and collectives come on top.
    """
    drained = drain_bytes(work)
    rows_s = drained / work.ranks * costs.imbalance * costs.publish_s_per_byte
    if where.log == "kafka":
        broker_s = drained / min(costs.disk_bytes_per_s, costs.network_bytes_per_s)
        rows_s = max(rows_s, min(broker_s, work.drain_s * costs.use))
    own_s = work.dense_bytes / work.ranks * costs.dense_s_per_byte
    dense_s = max(own_s, work.dense_bytes / (costs.store_bytes_per_s * costs.use))
    rounds_s = GATHERS * costs.gather_s * math.log2(work.ranks)
    return costs.marker_s + SYNCS * costs.sync_s + rounds_s + max(rows_s, dense_s)


def loss_window(work: Workload, where: Deployment, costs: UnitCosts) -> tuple[float, float, float]:
    """Return (seconds between markers, mean seconds of training lost by a failure, most seconds lost).

    One marker is in flight at a time, so markers are at least one commit apart. A failure falls evenly into the
    interval (Young 1974, "A first order approximation to the optimum checkpoint interval"): half of it is lost on
    average, all of it at most, and in both cases the commit that was in flight.
    """
    commit_s = commit_time(work, where, costs)
    apart_s = max(work.marker_s, commit_s)
    return apart_s, apart_s / 2 + commit_s, apart_s + commit_s


def read_log_time(work: Workload, seconds: float, costs: UnitCosts) -> float:
    """Return the seconds in which the busiest rank reads the data sent in a time: its bytes, and its frames."""
    drains = seconds / work.drain_s
    own_bytes = drain_bytes(work) / work.ranks
    return drains * costs.imbalance * (own_bytes * costs.log_s_per_byte + drain_frames(work) * costs.read_frame_s)


def restore_time(work: Workload, where: Deployment, costs: UnitCosts) -> RestoreTime:
    """Compute the seconds of a restore of the newest marker by the busiest of all ranks.

    The time is the bytes over the rank's speed. A cold restore is also limited by the total speed of the store and the
    hosts' networks. The store has a base and, at worst, a whole delta (:func:`delta_bytes`); the log has the rows that
    one marker interval sent after them. A log alone has the base and all rows sent since; it is read no faster than the
    disks of all brokers together.
    """
    share = costs.imbalance / work.ranks
    stored = work.table_bytes + delta_bytes(work, where)
    tail = read_log_time(work, work.marker_s, costs)
    rounds_s = costs.restore_doubling_s * math.log2(work.ranks)
    fixed = costs.restore_s + rounds_s + tail + work.dense_bytes * costs.dense_read_s_per_byte
    warm = stored * share * costs.restore_s_per_byte
    hosts = max(1.0, work.ranks / costs.ranks_per_host)
    pipe_of_hosts = hosts * costs.host_network_bytes_per_s * costs.use
    pipe = min(costs.store_bytes_per_s * costs.use, pipe_of_hosts)
    logged = work.table_bytes + stream_bytes_per_s(work) * LOG_ALONE_S
    need = broker_need(work, where, costs)
    source = min(costs.disk_bytes_per_s, costs.network_bytes_per_s) * costs.use * need.brokers if need else pipe
    base = work.table_bytes * share * costs.log_s_per_byte
    values = work.table_bytes - ID_BYTES * work.rows
    return RestoreTime(
        cold_s=max(warm, stored / pipe) + fixed,
        warm_s=warm + fixed,
        head_s=values * share * costs.head_s_per_byte + fixed,
        log_s=max(base + read_log_time(work, LOG_ALONE_S, costs), logged / min(source, pipe_of_hosts)) + fixed,
        restart_s=costs.restart_s,
    )


def rank_memory(work: Workload, where: Deployment, costs: UnitCosts) -> RankMemory:
    """Compute the bytes of the busiest rank: ring (Kafka's client holds the same again), masks, its part of the dense
    state (copied at a marker), and the rows that a cut sends beyond the ring, within the budget."""
    share = costs.imbalance / work.ranks
    cut = drain_bytes(work) * share
    return RankMemory(
        ring_bytes=where.ring_bytes * (2 if where.log == "kafka" else 1),
        mask_bytes=MASK_BYTES_PER_ROW * work.rows * share,
        dense_bytes=work.dense_bytes / work.ranks,
        marker_bytes=min(where.marker_budget_bytes, max(0.0, cut - where.ring_bytes)),
        head_bytes=work.table_bytes - ID_BYTES * work.rows,
        day_bytes=86_400.0 / loss_window(work, where, costs)[0] * (COMMIT_BYTES + COMMIT_BYTES_PER_RANK * work.ranks),
    )


def sweep_time(work: Workload, where: Deployment, costs: UnitCosts) -> float:
    """Return the seconds until every row was sent once, so that the first marker can be cut: ``sweep_bytes`` per step
    and rank, but no faster than a publisher sends."""
    rank_bytes_per_s = min(where.sweep_bytes * work.steps_per_s, 1.0 / costs.publish_s_per_byte)
    return work.table_bytes * costs.imbalance / work.ranks / rank_bytes_per_s
