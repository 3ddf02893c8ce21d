"""A real job on N ranks of this machine, and what the model says of it from the unit costs of one rank."""

from __future__ import annotations

import math
import os
import random
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch.distributed as dist
from live import (
    Markers,
    Shape,
    attach,
    build,
    dense_bytes_of,
    fold,
    markers_over_kafka,
    medians,
    sent,
    settle,
    timed_marker,
    timed_restores,
)
from units import Costs

from torchrec_stream_ckpt.extras.sizing.failure import OWN_SYNCS, SYNCS, commit_time, mark_time
from torchrec_stream_ckpt.extras.sizing.inputs import Deployment, UnitCosts
from torchrec_stream_ckpt.extras.sizing.stream import drain_bytes, drain_frames, step_cost

BLOCK = 10


@dataclass
class Measured:
    """One job. Seconds are medians over rounds."""

    off_s: float
    """A step without streaming."""
    step_s: float
    """A step with a drain behind it, until all has been acknowledged."""
    step_bytes: float
    """All ranks."""
    markers: Markers
    """Right after a step, before the log has acknowledged its rows."""
    kafka: Markers | None
    log_restore_s: float
    store_restore_s: float
    head_restore_s: float
    dense_bytes: int
    log_bytes: int
    """Of all ranks, up to the marker that is restored."""


def measure(
    rank: int, ranks: int, shape: Shape, folder: Path, head: Path, rounds: int, bootstrap: str | None
) -> Measured:
    """Runs on each rank."""
    plain, live = build(shape, rank, ranks), build(shape, rank, ranks)
    checkpointer = attach(live, folder)
    plain.steps(BLOCK, None)
    for _ in range(3):
        live.steps(BLOCK, checkpointer)
        settle(checkpointer)
    checkpointer.mark().result(600)
    off, on, marks, sizes = [], [], [], []
    order = random.Random(0)
    for _ in range(rounds):
        for streaming in order.sample([True, False], 2):
            settle(checkpointer)
            before, begin = sent(checkpointer), time.perf_counter()
            if streaming:
                live.steps(BLOCK, checkpointer)
            else:
                plain.steps(BLOCK, None)
            settle(checkpointer)
            (on if streaming else off).append((time.perf_counter() - begin) / BLOCK)
            if streaming:
                sizes.append((sent(checkpointer) - before) / BLOCK)
        marks.append(timed_marker(live, checkpointer, settled=False))
    total = _sum(sent(checkpointer))
    step_bytes = _sum(statistics.median(sizes))
    checkpointer.close()
    kafka = None
    if bootstrap is not None:
        kafka = markers_over_kafka(live, folder.with_name(f"{folder.name}-kafka"), bootstrap, rounds, settled=False)
    log_s, _ = timed_restores(live, folder, None, "log", 3)
    if rank == 0:
        fold(folder, head)
    dist.barrier()
    store_s, _ = timed_restores(live, folder, None, "store ", 3)
    head_s, _ = timed_restores(live, folder, head, "head ", 3)
    return Measured(
        off_s=statistics.median(off),
        step_s=statistics.median(on),
        step_bytes=step_bytes,
        markers=medians(marks),
        kafka=kafka,
        log_restore_s=log_s,
        store_restore_s=store_s,
        head_restore_s=head_s,
        dense_bytes=dense_bytes_of(folder),
        log_bytes=int(total),
    )


def _sum(mine: float) -> float:
    gathered: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(gathered, float(mine))
    return sum(gathered)


def step_time(train_s: float, training_s: float, publisher_s: float, ranks: int, cores: float) -> float:
    """Compute the seconds of a step with streaming, on a host of ``ranks`` ranks and ``cores`` cores.

    Streaming adds ``training_s`` to the training thread of each rank, and ``publisher_s`` of processor time beside it.
    A rank waits for its own training thread; a host with fewer cores than threads also waits for the sum of all work
    over its cores. ``train_s`` is the step without streaming on the same host, so it already includes that contention.
    """
    busy = train_s * min(ranks, cores)
    return max(train_s + training_s, (busy + ranks * (training_s + publisher_s)) / cores)


def host_time(alone_s: float, processor_s: float, ranks: int, cores: float) -> float:
    """Compute the seconds of work that all ranks of a host do in step.

    Alone, one rank needs ``alone_s``, of which it uses ``processor_s`` of processor time. Its waits stay as long; its
    processor time stretches once there are more ranks than cores.
    """
    return max(0.0, alone_s - processor_s) + max(min(alone_s, processor_s), processor_s * ranks / cores)


def on_host(costs: UnitCosts, cpu: dict[str, float], ranks: int, cores: float) -> UnitCosts:
    """The costs of ranks that share cores, and one disk or broker, which takes the bytes and syncs of all in turn.

    ``cpu`` has the processor seconds behind some of them.
    """
    shared = {name: host_time(getattr(costs, name), alone, ranks, cores) for name, alone in cpu.items()}
    shared["publish_s_per_byte"] = costs.publish_s_per_byte * ranks
    shared["sync_s"] = costs.sync_s * (SYNCS + OWN_SYNCS * (ranks - 1)) / SYNCS
    return replace(costs, **shared)


def predict(
    shape: Shape, ranks: int, off_s: float, dense_bytes: int, log_bytes: int, costs: dict[str, Costs]
) -> dict[str, float]:
    """The same values from the model, which is given the step without streaming and the length of the log."""
    cores = float(os.cpu_count() or 1)
    work = shape.workload(ranks, off_s, dense_bytes)
    alone, cpu = costs["file"]
    here, rounds = on_host(alone, cpu, ranks, cores), math.log2(ranks)
    num_bytes = drain_bytes(work)
    published_s = num_bytes / ranks * cpu["publish_s_per_byte"]
    step_s = max(
        step_time(off_s, step_cost(work, alone), published_s, ranks, cores), num_bytes / ranks * here.publish_s_per_byte
    )
    fixed_s = here.restore_s + here.restore_doubling_s * rounds + dense_bytes * here.dense_read_s_per_byte
    frames = drain_frames(work) * log_bytes / num_bytes
    # What lies in the store behind its base: rows that changed in so many seconds, each once.
    stored = work.table_bytes + work.distinct_bytes(log_bytes / num_bytes * off_s)
    values = work.table_bytes - 8.0 * work.rows
    found = {"step_bytes": num_bytes, "step_s": step_s, "added_s": step_s - off_s}
    for log, (its, its_cpu) in costs.items():
        shared, where = on_host(its, its_cpu, ranks, cores), Deployment(log=log, replication=1)
        found[f"{log}_mark_s"] = mark_time(work, shared)
        found[f"{log}_marker_s"] = commit_time(work, where, shared)
    return found | {
        "log_restore_s": fixed_s + log_bytes / ranks * here.log_s_per_byte + frames * here.read_frame_s,
        "store_restore_s": fixed_s + stored / ranks * here.restore_s_per_byte,
        "head_restore_s": fixed_s + values / ranks * here.head_s_per_byte,
    }
