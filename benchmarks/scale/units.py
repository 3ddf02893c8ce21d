"""The unit costs of this machine, each measured in this run through the code that jobs run, on one rank."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from crc32c import crc32c
from live import ZIPF, Shape, attach, build, dense_bytes_of, drain, fold, sent, settle, timed_markers, timed_restores

from tests.inside import inside
from torchrec_stream_ckpt.capture.touched import TouchedRows
from torchrec_stream_ckpt.extras.broker.kraft import Broker
from torchrec_stream_ckpt.extras.sizing.inputs import UnitCosts
from torchrec_stream_ckpt.format.frame import MAX_FRAME_BYTES
from torchrec_stream_ckpt.log.api import open_log

TINY = Shape(tables=8, rows=64, dim=16, batch=64, ids=1, over=16)
FRAMES = Shape(tables=8, rows=64, dim=16, batch=64, ids=1, over=16, more_drains=300)
HEAVY = Shape(tables=8, rows=64, dim=16, batch=64, ids=1, over=2048)
NARROW = Shape(tables=8, rows=200_000, dim=16, batch=64, ids=1, over=16)
WIDE = Shape(tables=8, rows=100_000, dim=128, batch=64, ids=1, over=16)
PROBES = {
    "tiny": (1, TINY),
    "frames": (1, FRAMES),
    "pair": (2, TINY),
    "heavy": (1, HEAVY),
    "narrow": (1, NARROW),
    "wide": (1, WIDE),
}
"""Name -> ranks and job."""
DRAINED = {NARROW.dim: 50_000, WIDE.dim: 10_000}
"""By dim, rows of a table that a probe drains: no more frames than the ring takes."""
REPEATS = 7
MEGABYTE = 1_000_000


@dataclass
class Sample:
    """What one probe job of one rank showed. Seconds are medians; ``_cpu`` is processor time of all its threads."""

    rows: int
    row_bytes: int
    dense_bytes: int
    step_s: float
    scan_s: float
    drain_s: float
    """A drain of ``drained`` rows, scan and step left out."""
    drained: int
    drained_bytes: int
    publish_s: float
    publish_cpu_s: float
    marker_s: float
    marker_cpu_s: float
    log_bytes: int
    store_bytes: int
    log_s: float
    log_cpu_s: float
    store_s: float
    store_cpu_s: float
    head_s: float
    head_cpu_s: float


def probe(rank: int, ranks: int, shape: Shape, folder: Path, head: Path) -> Sample:
    """Measure one job; runs on each of its ranks."""
    live = build(shape, rank, ranks)
    checkpointer = attach(live, folder)
    live.steps(1, checkpointer)
    checkpointer.mark().result(600)
    settle(checkpointer)
    masks = inside(checkpointer).masks
    scan_s = _median(lambda: [mask.touched.find() for mask in masks])
    step_s = max(0.0, _median(lambda: drain(checkpointer)) - scan_s)
    drained = min(shape.rows, DRAINED[shape.dim]) * shape.tables
    walls, publish, cpus = [], [], []
    for _ in range(REPEATS + 2):
        _touch(masks, drained)
        before, cpu = sent(checkpointer), time.process_time()
        begin = time.perf_counter()
        drain(checkpointer)
        walls.append(time.perf_counter() - begin)
        own = time.process_time() - cpu
        settle(checkpointer)
        publish.append(time.perf_counter() - begin)
        cpus.append(time.process_time() - cpu - min(own, walls[-1]))
        drained_bytes = sent(checkpointer) - before
        assert drained_bytes > drained * 4, "all of it fits the ring"
    for _ in range(shape.more_drains):
        _touch(masks, drained)
        drain(checkpointer)
        settle(checkpointer)
    checkpointer.mark().result(600)
    marker_s, marker_cpu_s = (statistics.median(each[1:]) for each in timed_markers(live, checkpointer, REPEATS))
    log_bytes = sent(checkpointer)
    checkpointer.close()
    log_s, log_cpu_s = timed_restores(live, folder, None, "log", 3)
    if rank == 0:
        fold(folder, head)
    dist.barrier()
    store_s, store_cpu_s = timed_restores(live, folder, None, "store ", 5)
    head_s, head_cpu_s = timed_restores(live, folder, head, "head ", 5)
    return Sample(
        rows=shape.rows * shape.tables,
        row_bytes=8 + 4 * shape.dim + 4,
        dense_bytes=dense_bytes_of(folder),
        step_s=step_s,
        scan_s=scan_s,
        drain_s=max(0.0, statistics.median(walls[2:]) - scan_s - step_s),
        drained=drained,
        drained_bytes=drained_bytes,
        publish_s=statistics.median(publish[2:]),
        publish_cpu_s=statistics.median(cpus[2:]),
        marker_s=marker_s,
        marker_cpu_s=marker_cpu_s,
        log_bytes=log_bytes,
        store_bytes=(shape.rows * shape.tables + drained) * (8 + 4 * shape.dim + 4),
        log_s=log_s,
        log_cpu_s=log_cpu_s,
        store_s=store_s,
        store_cpu_s=store_cpu_s,
        head_s=head_s,
        head_cpu_s=head_cpu_s,
    )


def _touch(masks: list[TouchedRows], rows: int) -> None:
    """So many rows over all kernels, anywhere, each time the same ones."""
    total = sum(mask.total for mask in masks)
    for mask in masks:
        count = min(mask.total, rows * mask.total // total)
        mask.mark_rows(torch.randperm(mask.total, generator=torch.Generator().manual_seed(0))[:count])


def _median(function: Any, repeats: int = 4 * REPEATS) -> float:
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        function()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[repeats // 4 :])


def mark_s_per_id() -> float:
    """What ``TouchedRows.mark`` does with the ids of a lookup, on a table of a million rows under Zipf ids."""
    rows, count = 1_000_000, 200_000
    uniform = np.random.default_rng(0).random(count)
    popularity = (((rows + 1.0) ** (1 - ZIPF) - 1.0) * uniform + 1.0) ** (1 / (1 - ZIPF))
    ids = torch.from_numpy((popularity.astype(np.int64) - 1) * 2_654_435_761 % rows)
    mask = torch.zeros(rows + 1, dtype=torch.bool)
    return _median(lambda: mask.index_fill_(0, ids, True)) / count


def parts(scratch: Path) -> dict[str, float]:
    """Of what a published byte consists: checksum, append, sync. Gigabytes a second, and milliseconds."""
    block = np.random.default_rng(0).integers(0, 256, MEGABYTE, np.uint8)
    crc_s = _median(lambda: crc32c(memoryview(block)))
    with (scratch / "append").open("wb", buffering=0) as file:
        append_s = _median(lambda: file.write(memoryview(block)), 200)

        def synced() -> None:
            file.write(memoryview(block))
            os.fdatasync(file.fileno())

        sync_s = _median(synced, 60)
    return {
        "crc32c_gigabytes_a_second": MEGABYTE / crc_s / 1e9,
        "append_gigabytes_a_second": MEGABYTE / append_s / 1e9,
        "append_and_sync_a_megabyte_ms": 1000 * sync_s,
    }


def broker_produce(megabytes: int = 300) -> float:
    """Megabytes a second that one producer gets acknowledged by a broker on loopback, through the log's own writer."""
    payload = np.random.default_rng(0).integers(0, 256, MEGABYTE - 1000, np.uint8)
    with tempfile.TemporaryDirectory(prefix="scale-broker-") as folder:
        broker = Broker(Path(folder))
        try:
            log = open_log(f"kafka://{broker.start(die_with=os.getpid()).bootstrap}/scale")
            log.prepare(1)
            writer = log.open_writer(1, 0, 0)
            _produce(writer, payload, 20)  # the first message of an idempotent producer waits for its id
            begin = time.perf_counter()
            _produce(writer, payload, megabytes)
            seconds = time.perf_counter() - begin
            log.close()
        finally:
            broker.stop()
    return megabytes * payload.nbytes / 1e6 / seconds


def _produce(writer: Any, payload: Any, count: int) -> None:
    waiting = 0
    for _ in range(count):
        writer.send(memoryview(payload))
        waiting += 1
        while waiting > 32:
            waiting -= len(writer.poll(1.0))
    while waiting:
        waiting -= len(writer.poll(1.0))


def solve(samples: dict[str, Sample]) -> tuple[UnitCosts, dict[str, float]]:
    """Unit costs out of the probes: what the tiny job takes is fixed, the heavy one has more dense state only, the
    wide one more rows, the pair two ranks; rows and bytes of a drain are told apart by two widths.

    Returns:
        The costs, and the processor seconds behind them: ranks share cores.
    """
    tiny, frames, pair, heavy, narrow, wide = (samples[name] for name in PROBES)
    drain = np.linalg.solve(
        np.array([[each.drained, each.drained_bytes] for each in (narrow, wide)], float),
        np.array([narrow.drain_s, wide.drain_s]) - tiny.drain_s,
    ).clip(0.0)
    dense = heavy.dense_bytes - tiny.dense_bytes
    values = wide.rows * (wide.row_bytes - 8)

    def more(one: Sample, name: str, units: float) -> float:
        return max(0.0, getattr(one, name) - getattr(tiny, name)) / units

    frame_s = more(frames, "log_s", FRAMES.more_drains * FRAMES.tables)
    costs = UnitCosts(
        mark_s_per_id=mark_s_per_id(),
        scan_s_per_row=wide.scan_s / wide.rows,
        drain_s_per_row=float(drain[0]),
        drain_s_per_byte=float(drain[1]),
        step_s=tiny.step_s + tiny.drain_s,
        publish_s_per_byte=wide.publish_s / wide.drained_bytes,
        marker_s=tiny.marker_s,
        marker_doubling_s=max(0.0, pair.marker_s - tiny.marker_s),
        dense_s_per_byte=more(heavy, "marker_s", dense),
        dense_read_s_per_byte=more(heavy, "log_s", dense),
        restore_s_per_byte=more(wide, "store_s", wide.store_bytes),
        head_s_per_byte=more(wide, "head_s", values),
        log_s_per_byte=max(0.0, more(wide, "log_s", wide.log_bytes) - frame_s / MAX_FRAME_BYTES),
        read_frame_s=frame_s,
        restore_s=tiny.log_s,
        restore_doubling_s=max(0.0, pair.log_s - tiny.log_s),
        imbalance=1.0,
    )
    processor = {
        "publish_s_per_byte": wide.publish_cpu_s / wide.drained_bytes,
        "marker_s": tiny.marker_cpu_s,
        "marker_doubling_s": max(0.0, pair.marker_cpu_s - tiny.marker_cpu_s),
        "dense_s_per_byte": more(heavy, "marker_cpu_s", dense),
        "dense_read_s_per_byte": more(heavy, "log_cpu_s", dense),
        "read_frame_s": more(frames, "log_cpu_s", FRAMES.more_drains * FRAMES.tables),
        "restore_s": tiny.log_cpu_s,
        "restore_doubling_s": max(0.0, pair.log_cpu_s - tiny.log_cpu_s),
        "restore_s_per_byte": more(wide, "store_cpu_s", wide.store_bytes),
        "head_s_per_byte": more(wide, "head_cpu_s", values),
        "log_s_per_byte": more(wide, "log_cpu_s", wide.log_bytes),
    }
    return costs, processor
