"""A real job on N ranks of this machine, and what the model says of it from the unit costs of one rank."""

from __future__ import annotations

import math
import os
import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from live import Shape, attach, build, dense_bytes_of, fold, sent, settle, timed_restores

from torchrec_stream_ckpt.extras.sizing.inputs import UnitCosts
from torchrec_stream_ckpt.extras.sizing.stream import (
    StepCost,
    drain_bytes,
    drain_frames,
    host_time,
    step_cost,
    step_time,
)

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
    marker_s: float
    """From mark() right behind a step until its COMMIT."""
    log_restore_s: float
    store_restore_s: float
    head_restore_s: float
    dense_bytes: int
    log_bytes: int
    """Of all ranks, up to the marker that is restored."""


def measure(rank: int, ranks: int, shape: Shape, folder: Path, head: Path, rounds: int) -> Measured:
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
        live.steps(1, checkpointer)
        dist.barrier()
        begin = time.perf_counter()
        checkpointer.mark().result(600)
        marks.append(time.perf_counter() - begin)
    total = _sum(sent(checkpointer))
    step_bytes = _sum(statistics.median(sizes))
    checkpointer.close()
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
        marker_s=statistics.median(marks),
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


def predict(
    shape: Shape, ranks: int, off_s: float, dense_bytes: int, log_bytes: int, costs: UnitCosts, cpu: dict[str, float]
) -> dict[str, float]:
    """The same values from the model. It is told the step without streaming, and how long the log has become.

    ``cpu`` has the processor seconds behind some of the costs: with more ranks than cores those add up.
    """
    cores = float(os.cpu_count() or 1)
    work = shape.workload(ranks, off_s, dense_bytes)
    cost = step_cost(work, costs)
    num_bytes = drain_bytes(work)
    mine = num_bytes / ranks
    publish_s = host_time(mine * costs.publish_s_per_byte, mine * cpu["publish_s_per_byte"], ranks, cores)
    step_s = step_time(off_s, StepCost(cost.training_s, mine * cpu["publish_s_per_byte"]), ranks, cores)
    own_dense = dense_bytes / ranks
    dense_s = host_time(own_dense * costs.dense_s_per_byte, own_dense * cpu["dense_s_per_byte"], ranks, cores)
    fixed_s = host_time(costs.restore_s, cpu["restore_s"], ranks, cores) + host_time(
        dense_bytes * costs.dense_read_s_per_byte, dense_bytes * cpu["dense_read_s_per_byte"], ranks, cores
    )

    rounds = math.log2(ranks)
    fixed_s += host_time(costs.restore_doubling_s, cpu["restore_doubling_s"], ranks, cores) * rounds
    marker_s = host_time(costs.marker_s, cpu["marker_s"], ranks, cores)
    marker_s += host_time(costs.marker_doubling_s, cpu["marker_doubling_s"], ranks, cores) * rounds

    def restore_s(name: str, all_bytes: float) -> float:
        share = all_bytes / ranks
        return fixed_s + host_time(share * getattr(costs, name), share * cpu[name], ranks, cores)

    frames = drain_frames(work) * log_bytes / num_bytes
    frames_s = host_time(frames * costs.read_frame_s, frames * cpu["read_frame_s"], ranks, cores)
    # What lies in the store behind its base: rows that changed in so many seconds, each once.
    delta = log_bytes / num_bytes * off_s
    stored = work.table_bytes + work.distinct_bytes(delta)
    return {
        "step_bytes": num_bytes,
        "step_s": max(step_s, publish_s),
        "added_s": max(step_s, publish_s) - off_s,
        "marker_s": max(publish_s, dense_s) + marker_s,
        "log_restore_s": restore_s("log_s_per_byte", log_bytes) + frames_s,
        "store_restore_s": restore_s("restore_s_per_byte", stored),
        "head_restore_s": restore_s("head_s_per_byte", work.table_bytes - 8.0 * work.rows),
    }
