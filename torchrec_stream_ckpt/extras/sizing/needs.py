"""All needs of a job, in one value."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torchrec_stream_ckpt.extras.sizing.bills import Share, store_shares, total
from torchrec_stream_ckpt.extras.sizing.failure import (
    RankMemory,
    RestoreTime,
    commit_time,
    loss_window,
    mark_time,
    rank_memory,
    restore_time,
    sweep_time,
)
from torchrec_stream_ckpt.extras.sizing.inputs import Deployment, UnitCosts, Workload
from torchrec_stream_ckpt.extras.sizing.keep import (
    BrokerNeed,
    broker_need,
    log_bytes,
    materializer_cores,
    store_bytes,
    store_write_bytes_per_s,
)
from torchrec_stream_ckpt.extras.sizing.stream import drain_frames, step_cost, stream_bytes_per_s
from torchrec_stream_ckpt.format.frame import MAX_FRAME_BYTES

AGES_S = (3600.0, 86_400.0, 7 * 86_400.0, 30 * 86_400.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Needs of the job, in bytes and seconds; see the functions for the formulas."""

    rows_per_s: float
    stream_bytes_per_s: float
    rank_bytes_per_s: float
    publisher_use: float
    """Used fraction of the busiest rank's publisher thread. Above 1 the log lags and drains become coarser."""
    frames_per_drain: float
    """Frames of the busiest rank."""
    ring_frames: int
    """Frames that its ring holds. If a drain has more, the rest waits for the next one."""
    sweep_bytes: float
    sweep_s: float
    step_overhead_s: float
    broker: BrokerNeed | None
    partitions: int
    log_bytes: float
    """Disk use of the log between trims, all copies."""
    log_growth_bytes_per_day: float
    store_interval_bytes: float
    store_write_bytes_per_s: float
    store_bytes: tuple[tuple[float, float], ...]
    """(age of the job in seconds, bytes of the store)."""
    materializers: int
    """Workers of the materializer's engine, a core each: they fold and merge."""
    mark_s: float
    """Time for which ``mark()`` stops training."""
    commit_s: float
    """Time from ``mark()`` to the COMMIT."""
    marker_s: float
    """Actual time between markers: at least the time of a commit."""
    loss_mean_s: float
    loss_worst_s: float
    restore: RestoreTime
    memory: RankMemory
    month: Mapping[str, Share]
    """Requests and bytes of an object store in a month, by kind of work."""
    month_usd: float
    """Price of all these requests."""


def plan(work: Workload, where: Deployment | None = None, costs: UnitCosts | None = None) -> Plan:
    """Compute all of the above for one job."""
    where, costs = where or Deployment(), costs or UnitCosts()
    rate = stream_bytes_per_s(work)
    rank_rate = rate / work.ranks * costs.imbalance
    marker_s, mean_s, worst_s = loss_window(work, where, costs)
    broker, month = broker_need(work, where, costs), store_shares(work, where, costs)
    return Plan(
        rows_per_s=work.distinct(work.drain_s) / work.drain_s,
        stream_bytes_per_s=rate,
        rank_bytes_per_s=rank_rate,
        publisher_use=rank_rate * costs.publish_s_per_byte,
        frames_per_drain=drain_frames(work) * costs.imbalance,
        ring_frames=max(2, where.ring_bytes // MAX_FRAME_BYTES),
        sweep_bytes=work.table_bytes,
        sweep_s=sweep_time(work, where, costs),
        step_overhead_s=step_cost(work, costs),
        broker=broker,
        partitions=work.ranks + 1,
        log_bytes=log_bytes(work, where),
        log_growth_bytes_per_day=rate * 86_400.0 * where.copies,
        store_interval_bytes=work.distinct_bytes(work.marker_s),
        store_write_bytes_per_s=store_write_bytes_per_s(work, where),
        store_bytes=tuple((age_s, store_bytes(work, where, age_s)) for age_s in AGES_S),
        materializers=max(1, math.ceil(materializer_cores(work, where, costs) / costs.use)),
        mark_s=mark_time(work, costs),
        commit_s=commit_time(work, where, costs),
        marker_s=marker_s,
        loss_mean_s=mean_s,
        loss_worst_s=worst_s,
        restore=restore_time(work, where, costs),
        memory=rank_memory(work, where, costs),
        month=month,
        month_usd=total(month).cost(costs),
    )
