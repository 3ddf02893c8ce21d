"""What merging costs a store: bytes read, requests of a plan, CPU of catching up, and what spans of each radix write.

    python benchmarks/merge/run.py [--rows 3000000] [--intervals 50] [--markers 1000] [--out FILE.json]

One table of 64 float32 columns with a row-wise state, then intervals of random rows, together as large as the table.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path[1:1] = [str(Path(__file__).resolve().parents[2] / part) for part in ("benchmarks", "benchmarks/recovery", "")]

import start  # noqa: E402, F401
import numpy as np  # noqa: E402
from common import command_of, machine, parse, refuse_small_machine, tell  # noqa: E402
from radix import Layout  # noqa: E402
from workload import Workload  # noqa: E402

from tests import builders  # noqa: E402
from tests.jobs_on_paper import PaperJob, tables  # noqa: E402
from tests.synthetic import Job  # noqa: E402
from torchrec_stream_ckpt.find.route import locate  # noqa: E402
from torchrec_stream_ckpt.flags import positive, whole  # noqa: E402
from torchrec_stream_ckpt.format.lineage import Lineage  # noqa: E402
from torchrec_stream_ckpt.format.schema import Schema  # noqa: E402
from torchrec_stream_ckpt.log.api import Log  # noqa: E402
from torchrec_stream_ckpt.log.control.partition import Control  # noqa: E402
from torchrec_stream_ckpt.maintain.compactor import Policy  # noqa: E402
from torchrec_stream_ckpt.maintain.materializer import Materializer  # noqa: E402
from torchrec_stream_ckpt.maintain.merge import merge  # noqa: E402
from torchrec_stream_ckpt.read.rows import TableReader, open_rows  # noqa: E402
from torchrec_stream_ckpt.store.api import Entry  # noqa: E402
from torchrec_stream_ckpt.store.catalog import Catalog  # noqa: E402
from torchrec_stream_ckpt.store.dense import open_dense  # noqa: E402
from torchrec_stream_ckpt.store.folder import FolderObjects  # noqa: E402
from torchrec_stream_ckpt.util.types import StateSpec  # noqa: E402

DIM = 64


class Counting(FolderObjects):
    """Counts what it hands out, and takes its time for each request."""

    def __init__(self, root: Path, delay_s: float = 0.0) -> None:
        super().__init__(root)
        self.read_bytes: Counter[str] = Counter()
        self.requests = 0
        self._delay_s = delay_s
        self._lock = threading.Lock()

    def read(self, name: str, begin: int = 0, end: int | None = None) -> memoryview:
        found = super().read(name, begin, end)
        with self._lock:
            self.requests += 1
            self.read_bytes["folds" if "/f-" in name else "intervals"] += len(found)
        time.sleep(self._delay_s)
        return found

    def size(self, name: str) -> int | None:
        self.requests += 1
        time.sleep(self._delay_s)
        return super().size(name)

    def list(self, prefix: str) -> Iterator[Entry]:
        found = list(super().list(prefix))
        pages = max(1, -(-len(found) // 1000))
        self.requests += pages
        time.sleep(pages * self._delay_s)
        return iter(found)


def fold(log: Log, lineage: Lineage, store: Path, policy: Policy) -> list[float]:
    """Bring the store up to the log; the CPU seconds of each marker."""
    with ThreadPoolExecutor(4) as pool:
        materializer = Materializer(log, FolderObjects(store), lambda _: open_dense(str(store)), pool, policy)
        at = [time.process_time(), *(time.process_time() for _ in materializer.catch_up(lineage))]
    return np.diff(at).tolist()


def merging(scratch: Path, rows: int, intervals: int) -> dict[str, Any]:
    """A base over all intervals, and an export's windows, by the bytes that the store hands out."""
    schema = Schema((builders.table("t", rows, DIM, "float32", StateSpec("momentum1", "float32", True)),))
    job = Job(scratch / "log", world=1, schema=schema)
    job.begin()
    job.commit()
    for _ in range(intervals):
        stream = job.streams[0]
        ids = np.sort(job.random.choice(rows, max(1, rows // intervals), replace=False))
        job.put_rows(stream, stream.shards[0], ids)
        job.flush()
        job.commit()
    lineage, store = Control(job.log).refresh(), scratch / "store"
    fold(job.log, lineage, store, Policy(rebase=0, compact="none"))
    newest, objects = max(lineage.commits), Counting(store)
    cover = Catalog.load(objects, lineage.job).cover(lineage.chain(newest))
    num_bytes = sum(piece.num_bytes for piece in cover)
    objects.read_bytes.clear()
    objects.requests, cpu, begin = 0, time.process_time(), time.perf_counter()
    with open_rows(job.log, lineage, newest, objects, scratch) as found:
        table = TableReader(found, 0)
        for row0, count in table.windows():
            table.read(row0, count)
    windows = _taken(objects, num_bytes, cpu, begin)
    objects.read_bytes.clear()
    objects.requests, cpu, begin = 0, time.process_time(), time.perf_counter()
    with ThreadPoolExecutor(4) as pool:
        merged = merge(objects, lineage, cover, pool, scratch=scratch)
    base = _taken(objects, num_bytes, cpu, begin)
    base["written_bytes"] = sum(ref.num_bytes for ref in merged.segments)
    return {"rows": rows, "intervals": intervals, "held_bytes": num_bytes, "a base": base, "windows": windows}


def _taken(objects: Counting, num_bytes: int, cpu: float, begin: float) -> dict[str, Any]:
    return {
        "read_of_held": objects.read_bytes["intervals"] / num_bytes,
        "read_back_bytes": objects.read_bytes["folds"],
        "requests": objects.requests,
        "cpu_s": time.process_time() - cpu,
        "wall_s": time.perf_counter() - begin,
    }


def plan(lineage: Lineage, store: Path, delay_s: float, summaries: bool) -> dict[str, Any]:
    """List a store, and plan a restore of its newest marker: ``planned_s`` is both, and ``listed_s`` a part of it."""
    objects, begin, cpu = Counting(store, delay_s), time.perf_counter(), time.process_time()
    catalog = Catalog.of_job(objects, lineage)
    listed_s = time.perf_counter() - begin
    route = locate(lineage, max(lineage.commits), catalog, summaries=summaries)
    return {
        "pieces": len(route.pieces),
        "summarized": route.summarized,
        "requests": objects.requests,
        "listed_s": listed_s,
        "planned_s": time.perf_counter() - begin,
        "cpu_s": time.process_time() - cpu,
    }


def planning(scratch: Path, markers: int, delay_s: float) -> list[dict[str, Any]]:
    """Listing a store, and planning a restore of its newest marker; and what catching up had cost."""
    job = PaperJob(scratch / "log", tables("t", rows=40, dim=4))
    job.run(markers)
    lineage, found = Control(job.log).refresh(), []
    for compact in ("none", "span2", "span4", "span8", "span16"):
        store = scratch / compact
        cpu = fold(job.log, lineage, store, Policy(rebase=0, compact=compact))  # type: ignore[arg-type]
        plans = {wanted: [plan(lineage, store, delay_s, wanted) for _ in range(3)] for wanted in (True, False)}
        tenth = max(1, markers // 10)
        found.append(
            {
                "compact": compact,
                "markers": markers,
                "delay_s": delay_s,
                "pieces": plans[True][0]["pieces"],
                "with summaries": plans[True],
                "without": plans[False],
                "summary_bytes": sum(path.stat().st_size for path in store.glob("summaries/*/*")),
                "manifest_bytes": sum(path.stat().st_size for path in store.glob("manifests/*/*")),
                "catch_up_ms_a_marker": {
                    "first tenth": 1e3 * float(np.mean(cpu[:tenth])),
                    "last tenth": 1e3 * float(np.mean(cpu[-tenth:])),
                },
            }
        )
        shutil.rmtree(store)
    return found


def radixes(rows: int, intervals: int) -> list[dict[str, Any]]:
    """Counted, not timed: what each policy writes and what restores read."""
    workload = Workload("spans", rows, DIM, 2560, intervals)
    touched = [np.asarray(ids) for ids in workload.touched[: intervals + 1]]
    naive = np.cumsum([len(ids) for ids in touched[1:]])
    found = []
    for rebase in (0.0, 1.0):
        for radix in (0, 2, 4, 8, 16):
            layout = Layout(radix, rebase)
            reads = list(layout.replay(touched))
            delta = [each.delta_rows / naive[each.marker - 1] for each in reads]
            whole = [each.rows / (len(touched[0]) + naive[each.marker - 1]) for each in reads]
            at = sorted({len(reads) // 3, len(reads)})
            found.append(
                {
                    "rebase": rebase,
                    "radix": radix,
                    "written_of_delta": layout.written / int(naive[-1]),
                    "merged_of_delta": layout.merged / int(naive[-1]),
                    "folds": layout.folds,
                    "delta_of_naive": float(np.mean(delta)),
                    "delta_of_naive_worst": float(max(delta[len(delta) // 15 :])),
                    "delta_of_naive_at": {str(marker): float(delta[marker - 1]) for marker in at},
                    "whole_of_naive": float(np.mean(whole)),
                    "pieces_most": max(each.pieces for each in reads),
                }
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=whole(100), default=3_000_000, help="of the table that is merged")
    parser.add_argument("--intervals", type=whole(2), default=50, help="that are merged")
    parser.add_argument("--markers", type=whole(20), default=1000, help="of the store that a plan is for")
    parser.add_argument("--delay-s", type=positive, default=0.03, help="of each request of a plan")
    parser.add_argument("--workload-rows", type=whole(1000), default=10_000_000, help="of the spans")
    parser.add_argument("--workload-intervals", type=whole(15), default=150, help="of the spans")
    parser.add_argument("--scratch", type=Path, default=None, help="where temporary folders are made")
    parser.add_argument("--out", type=Path, default=None)
    args = parse(parser, rows=3000, intervals=5, markers=40, delay_s=0.001, workload_rows=2000, workload_intervals=20)
    size = 272 * args.rows
    what = "the table that is merged, its intervals and what is merged of them"
    refuse_small_machine("merge", args, what, memory=2 << 30, disk=(1 << 28) + 6 * size, folder=args.scratch)
    report: dict[str, Any] = {"case": "merge", "command": command_of("merge"), "machine": machine()}
    with tempfile.TemporaryDirectory(dir=args.scratch) as folder:
        tell("merging")
        report["merging"] = merging(Path(folder, "merging"), args.rows, args.intervals)
    with tempfile.TemporaryDirectory(dir=args.scratch) as folder:
        tell("planning")
        report["planning"] = planning(Path(folder), args.markers, args.delay_s)
    tell("spans")
    report["spans"] = radixes(args.workload_rows, args.workload_intervals)
    text = json.dumps(report, indent=1)
    if args.out is not None:
        args.out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
