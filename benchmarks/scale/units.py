"""The unit costs of this machine, each measured in this run through the code that jobs run, on one rank."""

from __future__ import annotations

import dataclasses
import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from common import all_cores_s
from crc32c import crc32c
from live import (
    ZIPF,
    Markers,
    Shape,
    attach,
    build,
    dense_bytes_of,
    drain,
    fold,
    markers_over_kafka,
    medians,
    sent,
    settle,
    timed_marker,
    timed_restores,
)

from tests.inside import inside
from torchrec_stream_ckpt.capture.touched import TouchedRows
from torchrec_stream_ckpt.extras.sizing.failure import GATHERS, SYNCS
from torchrec_stream_ckpt.extras.sizing.inputs import UnitCosts
from torchrec_stream_ckpt.format.frame import MAX_FRAME_BYTES
from torchrec_stream_ckpt.log.api import open_log

ALL = ("log", "store", "head")
_SMALL = {"tables": 8, "rows": 20_000, "dim": 16, "batch": 64, "ids": 1}
TINY = Shape(**_SMALL, over=16, restores=ALL)
"""Its tables are just large enough that a marker of each of two ranks proves as many bytes as that of a large job."""
FRAMES = Shape(**_SMALL, over=16, more_drains=300)
HEAVY = Shape(**_SMALL, over=2048)
NARROW = Shape(tables=8, rows=200_000, dim=16, batch=64, ids=1, over=16, drained=50_000, restores=())
WIDE = Shape(tables=8, rows=100_000, dim=128, batch=64, ids=1, over=16, drained=10_000, restores=ALL)
PROBES = {
    "tiny": (1, TINY),
    "frames": (1, FRAMES),
    "pair": (2, TINY),
    "heavy": (1, HEAVY),
    "narrow": (1, NARROW),
    "wide": (1, WIDE),
}
"""Name -> ranks and job."""
OVER_KAFKA = ("tiny", "pair")
"""Those that commit markers over a broker, too."""
REPEATS = 7
MEGABYTE = 1_000_000
Costs = tuple[UnitCosts, dict[str, float]]
"""Unit costs, and the processor seconds behind some of them."""


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
    markers: Markers
    """With nothing to send."""
    kafka: Markers | None
    log_bytes: int
    store_bytes: int
    restores: dict[str, tuple[float, float]]
    """Source -> seconds, and processor seconds."""


def probe(rank: int, ranks: int, shape: Shape, folder: Path, head: Path, bootstrap: str | None) -> Sample:
    """Measure one job; runs on each of its ranks."""
    live = build(shape, rank, ranks)
    checkpointer = attach(live, folder)
    live.steps(1, checkpointer)
    checkpointer.mark().result(600)
    settle(checkpointer)
    masks = inside(checkpointer).masks
    scan_s = _median(lambda: [mask.touched.find() for mask in masks])
    step_s = max(0.0, _median(lambda: drain(checkpointer)) - scan_s)
    drained = min(shape.rows, shape.drained) * shape.tables
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
    timed = [timed_marker(live, checkpointer, settled=True) for _ in range(REPEATS + 1)]
    log_bytes = sent(checkpointer)
    checkpointer.close()
    kafka = None
    if bootstrap is not None:
        kafka = markers_over_kafka(live, folder.with_name(f"{folder.name}-kafka"), bootstrap, REPEATS, settled=True)
    restores = {"log": timed_restores(live, folder, None, "log", 3)} if "log" in shape.restores else {}
    if "store" in shape.restores:
        if rank == 0:
            fold(folder, head)
        dist.barrier()
        restores["store"] = timed_restores(live, folder, None, "store ", 5)
        restores["head"] = timed_restores(live, folder, head, "head ", 5)
    row_bytes = 8 + 4 * shape.dim + 4
    return Sample(
        rows=shape.rows * shape.tables,
        row_bytes=row_bytes,
        dense_bytes=dense_bytes_of(folder),
        step_s=step_s,
        scan_s=scan_s,
        drain_s=max(0.0, statistics.median(walls[2:]) - scan_s - step_s),
        drained=drained,
        drained_bytes=drained_bytes,
        publish_s=statistics.median(publish[2:]),
        publish_cpu_s=statistics.median(cpus[2:]),
        markers=medians(timed[1:]),
        kafka=kafka,
        log_bytes=log_bytes,
        store_bytes=(shape.rows * shape.tables + drained) * row_bytes,
        restores=restores,
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

        def synced(part: memoryview) -> None:
            file.write(part)
            os.fdatasync(file.fileno())

        sync_s = _median(lambda: synced(memoryview(block)), 60)
        small_s = _median(lambda: synced(memoryview(block)[:4096]), 60)
    return {
        "crc32c_gigabytes_a_second": MEGABYTE / crc_s / 1e9,
        "append_gigabytes_a_second": MEGABYTE / append_s / 1e9,
        "append_and_sync_a_megabyte_ms": 1000 * sync_s,
        "append_and_sync_4_kb_ms": 1000 * small_s,
    }


def broker_produce(bootstrap: str, megabytes: int = 300) -> tuple[float, float]:
    """What a broker acknowledges to one producer, which is the log's own writer.

    Returns:
        Megabytes a second, and processor seconds of both for a gigabyte.
    """
    payload = np.random.default_rng(0).integers(0, 256, MEGABYTE - 1000, np.uint8)
    log = open_log(f"kafka://{bootstrap}/produce")
    log.prepare(1)
    writer = log.open_writer(1, 0, 0)
    _produce(writer, payload, 20)  # the first message of an idempotent producer waits for its id
    begin, cpu = time.perf_counter(), all_cores_s()
    _produce(writer, payload, megabytes)
    seconds, cpu = time.perf_counter() - begin, all_cores_s() - cpu
    log.close()
    num_bytes = megabytes * payload.nbytes
    return num_bytes / 1e6 / seconds, cpu / num_bytes * 1e9


def _produce(writer: Any, payload: Any, count: int) -> None:
    waiting = 0
    for _ in range(count):
        writer.send(memoryview(payload))
        waiting += 1
        while waiting > 32:
            waiting -= len(writer.poll(1.0))
    while waiting:
        waiting -= len(writer.poll(1.0))


def solve(samples: dict[str, Sample], sync_s: float) -> Costs:
    """Unit costs out of the probes: what the tiny job takes is fixed, the heavy one has more dense state only, the
    wide one more rows, the pair two ranks; rows and bytes of a drain are told apart by two widths.

    Returns:
        The costs over files, and the processor seconds behind them: ranks share cores.
    """
    tiny, frames, pair, heavy, narrow, wide = (samples[name] for name in PROBES)
    drain = np.linalg.solve(
        np.array([[each.drained, each.drained_bytes] for each in (narrow, wide)], float),
        np.array([narrow.drain_s, wide.drain_s]) - tiny.drain_s,
    ).clip(0.0)
    dense = heavy.dense_bytes - tiny.dense_bytes
    values = wide.rows * (wide.row_bytes - 8) - tiny.rows * (tiny.row_bytes - 8)

    def restored(which: int) -> dict[str, float]:
        def more(one: Sample, source: str, units: float) -> float:
            return max(0.0, one.restores[source][which] - tiny.restores[source][which]) / units

        frame_s = more(frames, "log", FRAMES.more_drains * FRAMES.tables)
        row_s = more(wide, "log", wide.log_bytes - tiny.log_bytes)
        return {
            "dense_read_s_per_byte": more(heavy, "log", dense),
            "restore_s_per_byte": more(wide, "store", wide.store_bytes - tiny.store_bytes),
            "head_s_per_byte": more(wide, "head", values),
            "log_s_per_byte": max(0.0, row_s - frame_s / MAX_FRAME_BYTES),
            "read_frame_s": frame_s,
            "restore_s": tiny.restores["log"][which],
            "restore_doubling_s": max(0.0, pair.restores["log"][which] - tiny.restores["log"][which]),
        }

    walls, cpus = markers_of(tiny.markers, pair.markers, sync_s)
    more = {
        name: (max(0.0, getattr(heavy.markers, of) - getattr(tiny.markers, of)) / dense)
        for name, of in (("cut_s_per_byte", "mark_cpu_s"), ("dense_s_per_byte", "marker_cpu_s"))
    }
    costs = UnitCosts(
        mark_s_per_id=mark_s_per_id(),
        scan_s_per_row=wide.scan_s / wide.rows,
        drain_s_per_row=float(drain[0]),
        drain_s_per_byte=float(drain[1]),
        step_s=tiny.step_s + tiny.drain_s,
        publish_s_per_byte=wide.publish_s / wide.drained_bytes,
        cut_s_per_byte=max(0.0, heavy.markers.mark_s - tiny.markers.mark_s) / dense,
        sync_s=sync_s,
        dense_s_per_byte=max(0.0, heavy.markers.marker_s - tiny.markers.marker_s) / dense,
        imbalance=1.0,
        **walls,
        **restored(0),
    )
    return costs, {"publish_s_per_byte": wide.publish_cpu_s / wide.drained_bytes, **more, **cpus, **restored(1)}


def markers_of(one: Markers, two: Markers, sync_s: float) -> tuple[dict[str, float], dict[str, float]]:
    """The fixed costs of a marker: seconds, and processor seconds, of the tiny job on one rank and on two."""
    walls = {
        "cut_s": one.mark_s,
        "marker_s": max(0.0, one.marker_s - SYNCS * sync_s),
        "gather_s": max(0.0, two.marker_s - one.marker_s) / GATHERS,
    }
    cpus = {
        "cut_s": one.mark_cpu_s,
        "marker_s": one.marker_cpu_s,
        "gather_s": max(0.0, two.marker_cpu_s - one.marker_cpu_s) / GATHERS,
    }
    return walls, cpus


def over_kafka(costs: Costs, samples: dict[str, Sample], megabytes_a_second: float, cpu_s_a_gigabyte: float) -> Costs:
    """The same costs over a broker on this machine, whose processor time counts as the publisher's."""
    one, two = samples["tiny"].kafka, samples["pair"].kafka
    assert one is not None
    assert two is not None
    walls, cpus = markers_of(one, two, costs[0].sync_s)
    walls["publish_s_per_byte"] = 1e-6 / megabytes_a_second
    cpus["publish_s_per_byte"] = 1e-9 * cpu_s_a_gigabyte
    return dataclasses.replace(costs[0], **walls), costs[1] | cpus
