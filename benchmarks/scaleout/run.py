"""A materializer by one core and by several, what a byte of its work costs, and a day of it at full size.

Beside it, the same for a scrub, whose threads read (``tasks``).

    python benchmarks/scaleout/run.py [--rows 3000000] [--intervals 24] [--rounds 3] [--out FILE.json]

One table of 64 float32 columns with a row-wise state, four ranks, then intervals of random rows.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path[1:1] = [str(Path(__file__).resolve().parents[level]) for level in (1, 2)]

import start  # noqa: E402, F401
import numpy as np  # noqa: E402
import tasks  # noqa: E402
from at_hand import have_at_hand  # noqa: E402
from crc32c import crc32c  # noqa: E402
from simulate import Day, simulate  # noqa: E402

from tests import builders  # noqa: E402
from tests.synthetic import Job  # noqa: E402
from torchrec_stream_ckpt.flags import positive, whole  # noqa: E402
from torchrec_stream_ckpt.format.schema import Schema  # noqa: E402
from torchrec_stream_ckpt.log.control.partition import Control  # noqa: E402
from torchrec_stream_ckpt.log.files import FileLog  # noqa: E402
from torchrec_stream_ckpt.maintain import compactor, interval_folder  # noqa: E402
from torchrec_stream_ckpt.maintain.compactor import Policy  # noqa: E402
from torchrec_stream_ckpt.maintain.engine.api import Engine, InProcess, Site  # noqa: E402
from torchrec_stream_ckpt.maintain.engine.parcel import SiteAddress  # noqa: E402
from torchrec_stream_ckpt.maintain.engine.processes import Processes  # noqa: E402
from torchrec_stream_ckpt.maintain.materializer import Materializer  # noqa: E402
from torchrec_stream_ckpt.store.dense import open_dense  # noqa: E402
from torchrec_stream_ckpt.store.folder import FolderObjects  # noqa: E402
from torchrec_stream_ckpt.util.types import StateSpec  # noqa: E402

DIM, RANKS = 64, 4
# Workers import this file again, and need no torch: what imports it is imported where it is used.


def tell(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text} (load {os.getloadavg()[0]:.2f})", file=sys.stderr)


EXAMPLE = {"table_bytes": 545e9, "interval_bytes": 46.5e9, "frame_bytes": 2.9e9 * 30, "ranks": 1024, "marker_s": 30.0}
"""The example of docs/sizing.md, on 1,024 ranks."""
SPAN_BYTES = {1.0: (124.7e9, 285.6e9), 3.0: (124.7e9, 285.6e9, 479.6e9)}
"""By ``--rebase``, of spans of 4, 16 and 64 of its markers: those that are due before a base is."""


def trained(root: Path, rows: int, intervals: int) -> Job:
    """A log: the table, and then intervals of a twelfth of it, so that a base is due at every twelfth marker or so."""
    schema = Schema((builders.table("t", rows, DIM, "float32", StateSpec("momentum1", "float32", True)),))
    job = Job(root, world=RANKS, schema=schema)
    job.begin()
    job.commit()
    for _ in range(intervals):
        for stream in job.streams:
            for shard in stream.shards:
                count = max(1, shard.rows // 8)
                job.put_rows(stream, shard, np.sort(shard.row0 + job.random.choice(shard.rows, count, replace=False)))
        job.flush()
        job.commit()
    return job


_together: Any = None
"""(in a process of several) What all of them wait for before their clocks start."""


def _join(barrier: Any) -> None:
    global _together
    _together = barrier


def side_by_side(pool: Executor, root: Path, scratch: Path, count: int) -> dict[str, float]:
    """``count`` processes that share nothing do one core's work each: what this machine can give."""
    stores = [scratch / f"store-{number}" for number in range(count)]
    folds = [pool.submit(fold, root, store, 1, Policy(), 1, number) for number, store in enumerate(stores)]
    return {"wall_s": max(each.result()["wall_s"] for each in folds)}


_kept: dict[Path, tuple[ThreadPoolExecutor, Engine]] = {}
"""By store: what has run before stays, as a service's threads and workers do, with the memory that they have."""


def _engine(root: Path, store: Path, workers: int) -> tuple[ThreadPoolExecutor, Engine]:
    if store not in _kept:
        objects, log, pool = FolderObjects(store), FileLog(root), ThreadPoolExecutor(4)
        address = SiteAddress(uri=f"file://{root}", kafka_options=None, store=objects.url, store_options=None)
        site = Site(log, objects, pool)
        _kept[store] = pool, InProcess(site) if workers == 1 else Processes(site, address, workers)
    return _kept[store]


def close_all() -> None:
    for pool, engine in _kept.values():
        engine.close()
        pool.shutdown()
    _kept.clear()


def fold(root: Path, store: Path, workers: int, policy: Policy, cores: int, first: int = 0) -> dict[str, float]:
    """Fold and merge a log into a new store, on ``cores`` cores: wall and CPU seconds, and what was read."""
    usable = os.sched_getaffinity(0)
    os.sched_setaffinity(0, set(sorted(usable)[first : first + cores]))
    try:
        (pool, engine), log = _engine(root, store, workers), FileLog(root)
        lineage, dense = Control(log).refresh(), open_dense(str(root))
        materializer = Materializer(log, FolderObjects(store), lambda _: dense, pool, policy, engine=lambda _: engine)
        pids = engine.pids if isinstance(engine, Processes) else []
        have_at_hand(2 * sum(log_bytes(root)))  # a store is about as large
        if _together is not None:
            _together.wait()
        begin, cpu = time.perf_counter(), _cpu(pids)
        list(materializer.catch_up(lineage))
        materializer.settle(lineage)
        wall_s, cpu_s = time.perf_counter() - begin, _cpu(pids) - cpu
    finally:
        os.sched_setaffinity(0, usable)
    counts = materializer.counts
    return {
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "frames_bytes": counts.frames_bytes,
        "segment_bytes": counts.segment_bytes,
        "fold_bytes_read": counts.fold_bytes_read,
        "fold_bytes": counts.fold_bytes,
    }


def log_bytes(root: Path) -> Iterator[int]:
    return (path.stat().st_size for path in root.rglob("*.seg*") if path.is_file())


def _cpu(pids: Iterable[int]) -> float:
    """Seconds of this process and of others."""
    ticks = 0
    for pid in pids:
        ticks += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]))
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def measured(root: Path, scratch: Path, workers: int, rounds: int) -> dict[str, Any]:
    """One core and ``workers`` cores in turns, on the same log; the bytes of both stores are compared.

    The first round does not count: all have their memory then, as a service has.
    """
    variants = {
        "one core": (1, Policy(), 1),
        f"{workers} cores": (workers, Policy(), workers),
        "folds alone, one core": (1, Policy(rebase=0, compact="none"), 1),
    }
    beside = f"{workers} processes that share nothing"
    found: dict[str, list[dict[str, float]]] = {name: [] for name in (*variants, beside)}
    written: dict[str, int] = {}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, _join, (context.Barrier(workers),)) as pool:
        for number in range(-1, rounds):
            for name in random.Random(number).sample(sorted(found), len(found)):
                tell(f"round {number + 1} of {rounds}: {name}")
                folder = scratch / name.replace(" ", "-")
                row = (
                    side_by_side(pool, root, folder, workers) if name == beside else fold(root, folder, *variants[name])
                )
                if number < 0 and name != beside and not name.startswith("folds"):
                    objects = FolderObjects(folder)
                    names = sorted(entry.name for entry in objects.list(""))
                    written[name] = hash(tuple((each, crc32c(objects.read(each))) for each in names))
                elif number >= 0:
                    found[name].append(row)
                shutil.rmtree(folder)
    close_all()
    assert len(set(written.values())) == 1, "the stores differ"
    one, several = (found[name] for name in list(variants)[:2])
    ratios = [a["wall_s"] / b["wall_s"] for a, b in zip(one, several, strict=True)]
    most = [workers * a["wall_s"] / b["wall_s"] for a, b in zip(one, found[beside], strict=True)]
    return {
        "workers": workers,
        "rounds": found,
        "one_core_over_several": {"median": statistics.median(ratios), "each": ratios},
        "one_core_over_what_shares_nothing": {"median": statistics.median(most), "each": most},
        "cpu_of_several_over_one": statistics.median(
            b["cpu_s"] / a["cpu_s"] for a, b in zip(one, several, strict=True)
        ),
    }


def unit_costs(report: dict[str, Any]) -> dict[str, float]:
    """Core seconds of a byte: CPU time, which other work on this machine changes little."""
    alone, one = report["rounds"]["folds alone, one core"], report["rounds"]["one core"]
    fold_s = statistics.median(each["cpu_s"] / each["frames_bytes"] for each in alone)
    merge_s = statistics.median(
        (both["cpu_s"] - each["cpu_s"]) / both["fold_bytes_read"] for both, each in zip(one, alone, strict=True)
    )
    return {"fold_s_per_byte": fold_s, "merge_s_per_byte": merge_s}


def task_cost(root: Path, store: Path, count: int = 200) -> float:
    """Seconds of the materializer for each task that a worker does."""
    objects, log = FolderObjects(store), FileLog(root)
    address = SiteAddress(uri=f"file://{root}", kafka_options=None, store=objects.url, store_options=None)
    with ThreadPoolExecutor(1) as pool:
        engine = Processes(Site(log, objects, pool), address, 2)
        engine.wait([engine.submit(tasks.Nothing())], 60.0)
        cpu = time.process_time()
        futures = [engine.submit(tasks.Nothing()) for _ in range(count)]
        while left := [future for future in futures if not future.done()]:
            engine.wait(left, 1.0)
        engine.close()
    return (time.process_time() - cpu) / count


def main() -> None:
    from common import command_of, machine, parse, refuse_small_machine

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=whole(1000), default=2_000_000)
    parser.add_argument("--intervals", type=whole(10), default=20)
    parser.add_argument("--rounds", type=whole(1), default=5)
    parser.add_argument("--workers", type=whole(2), default=2)
    parser.add_argument("--hours", type=positive, default=24.0, help="that are simulated")
    parser.add_argument("--scratch", type=Path, default=None, help="where temporary folders are made")
    parser.add_argument("--out", type=Path, default=None)
    args = parse(parser, rows=4000, intervals=10, rounds=1, hours=1.0)
    room = 22 * 272 * args.rows  # the log, and the stores of two processes at once
    refuse_small_machine(
        "scaleout", args, "a log and its stores", memory=(2 << 30) + room // 2, disk=room, folder=args.scratch
    )
    if args.rows < 1_000_000:  # a smoke test: nothing is small then
        from torchrec_stream_ckpt.maintain.engine import api

        api.SMALL_BYTES, interval_folder.BATCH_BYTES, compactor.TASK_BYTES = 0, 1, 1
    report: dict[str, Any] = {"case": "scaleout", "command": command_of("scaleout"), "machine": machine()}
    with tempfile.TemporaryDirectory(dir=args.scratch) as folder:
        tell("writing the log")
        root = Path(folder, "log")
        trained(root, args.rows, args.intervals)
        report["measured"] = measured(root, Path(folder), args.workers, args.rounds)
        report["unit_costs"] = unit_costs(report["measured"]) | {"task_s": task_cost(root, Path(folder, "none"))}
        tell("scrubs")
        store = Path(folder, "store")
        fold(root, store, args.workers, Policy(), args.workers)
        close_all()
        report["tasks"] = tasks.tasks(root, store, args.workers, args.rounds)
    report["load_average_after"] = os.getloadavg()[0]
    tell("simulating")
    report["example"] = EXAMPLE
    report["simulated"] = [
        simulate(
            Day(
                **EXAMPLE,
                workers=workers,
                hours=args.hours,
                rebase=rebase,
                span_bytes=SPAN_BYTES[rebase] if spans else (),
                store_bytes_per_s=store,
                **report["unit_costs"],
            )
        )
        for spans in (True, False)
        for rebase, store in ((1.0, 3e9), (1.0, 12e9), (3.0, 6e9))
        for workers in (8, 16, 24, 37)
    ]
    text = json.dumps(report, indent=1)
    if args.out is not None:
        args.out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
