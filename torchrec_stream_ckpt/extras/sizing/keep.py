"""Sizes of stored data: the log with its brokers, and the store."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torchrec_stream_ckpt.extras.sizing.folds import fold_load
from torchrec_stream_ckpt.extras.sizing.inputs import Deployment, UnitCosts, Workload
from torchrec_stream_ckpt.extras.sizing.requests import LOG_OBJECT_BYTES
from torchrec_stream_ckpt.extras.sizing.stream import stream_bytes_per_s


@dataclass(frozen=True, slots=True)
class BrokerNeed:
    """A cluster for the stream."""

    brokers: int
    network_in_bytes_per_s: float
    """All brokers: clients and replication."""
    network_out_bytes_per_s: float
    """All brokers: replication and the materializer."""
    disk_write_bytes_per_s: float
    broker_disk_bytes: float
    """Disk space of each broker."""
    bound: str
    """Resource that decides the number of brokers."""


def log_bytes(work: Workload, where: Deployment) -> float:
    """Compute the largest disk use of the log: the sweep, and the data between two trims (a day's without trims).

    All copies are counted.

    A trim frees whole segments only: 1 GB per partition on Kafka, 256 MB per rank in files, 8 MiB in a bucket
    (docs/operations.md).
    """
    segment = {"kafka": 1e9, "file": 256e6, "bucket": LOG_OBJECT_BYTES}[where.log] * work.ranks
    between = stream_bytes_per_s(work) * (where.trim_s or 86_400.0)
    return (work.table_bytes + between + min(segment, between)) * where.copies


def broker_need(work: Workload, where: Deployment, costs: UnitCosts) -> BrokerNeed | None:
    """Compute the brokers for the stream: enough for its network, disk speed and disk space, and at least one per copy.

    With r bytes per second and f copies: r*f arrive over the network (r from clients) and are written to disk, r*(f-1)
    + r are sent (to the other copies, and once to the materializer).
    """
    if where.log != "kafka":
        return None
    rate, copies = stream_bytes_per_s(work), where.replication
    moved, room = rate * copies, log_bytes(work, where)
    bounds = {
        "copies": float(copies),
        "network": moved / (costs.network_bytes_per_s * costs.use),
        "disk speed": moved / (costs.disk_bytes_per_s * costs.use),
        "disk room": room / (costs.disk_bytes * costs.use),
    }
    bound = max(bounds, key=lambda name: bounds[name])
    brokers = math.ceil(bounds[bound])
    return BrokerNeed(brokers, moved, moved, moved, room / brokers / costs.use, bound)


def delta_bytes(work: Workload, where: Deployment) -> float:
    """Return the most bytes that the store holds after the newest base: ``rebase`` bases; without rebase a day's
    markers."""
    if where.rebase:
        return where.rebase * work.table_bytes
    return 86_400.0 / work.marker_s * work.distinct_bytes(work.marker_s)


def store_bytes(work: Workload, where: Deployment, age_s: float) -> float:
    """Compute the bytes of the store when the job is ``age_s`` old.

    Each kept marker has its interval (rows that changed in it, once), its part of the spans, and its dense state. A
    base is written whenever the pieces since the last one exceed ``rebase`` bases. Of markers older than
    ``keep_all_s``, one per ``then_every_s`` is kept, with the rows since the previous kept one (``gc --compact``) or
    since its base.
    """
    load = fold_load(work, where)
    interval, base_s = load.interval_bytes, load.cycle * work.marker_s
    recent_s = age_s if where.keep_all_s is None else min(age_s, where.keep_all_s)
    recent = max(1.0, recent_s / work.marker_s) * (interval + load.span_written + work.dense_bytes)
    bases = 1.0 + math.floor(recent_s / base_s)
    old = 0.0
    if age_s > recent_s and where.then_every_s is not None:
        old_s = age_s - recent_s
        kept = old_s / max(where.then_every_s, work.marker_s)
        old = kept * (work.dense_bytes + interval + work.distinct_bytes(min(where.then_every_s, base_s)))
        bases += min(kept, math.floor(old_s / base_s))
    return recent + old + bases * work.table_bytes


def materializer_cores(work: Workload, where: Deployment, costs: UnitCosts) -> float:
    """Return the number of cores that are always busy: they fold the log once, and merge spans and bases."""
    merged = fold_load(work, where).read / work.marker_s
    return stream_bytes_per_s(work) / costs.fold_bytes_per_s + merged / costs.merge_bytes_per_s


def store_write_bytes_per_s(work: Workload, where: Deployment) -> float:
    """Return the bytes per second written to the store: intervals, spans, bases, and dense state with each marker."""
    load = fold_load(work, where)
    return (load.interval_bytes + load.written + work.dense_bytes) / work.marker_s
