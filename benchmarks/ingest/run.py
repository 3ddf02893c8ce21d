"""How fast the materializer folds a log, and what memory it takes: one rank, one interval, one core.

    python benchmarks/ingest/run.py [--log file|kafka] [--megabytes 1000] [--rounds 3] [--out FILE.json]

The log holds one table of 64 float32 columns with a row-wise optimizer state, in frames of 1 MB, of random rows. A
round folds it into a fresh store, in a process of its own. Every frame's header, chain and checksum is looked at, rows
are sorted, segments are written and synced. CPU is that of the whole process, the kernel's share included.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path[1:1] = [str(Path(__file__).resolve().parents[level]) for level in (1, 2)]

import start  # noqa: E402, F401
import numpy as np  # noqa: E402
from cache import COLD, STATES, WARM, files_under, prepare  # noqa: E402
from common import at_least, fresh_processes, machine, parse, refuse_small_machine  # noqa: E402

from tests import builders  # noqa: E402
from torchrec_stream_ckpt.errors import StreamCkptError  # noqa: E402
from torchrec_stream_ckpt.extras.broker.kraft import Broker  # noqa: E402
from torchrec_stream_ckpt.format.control import Hello, Mark  # noqa: E402
from torchrec_stream_ckpt.format.frame import Header, Kind, json_frame, seal  # noqa: E402
from torchrec_stream_ckpt.format.interval import Interval  # noqa: E402
from torchrec_stream_ckpt.format.rows import RowLayout  # noqa: E402
from torchrec_stream_ckpt.format.schema import Schema  # noqa: E402
from torchrec_stream_ckpt.log.api import Ack, open_log  # noqa: E402
from torchrec_stream_ckpt.log.control.partition import Control  # noqa: E402
from torchrec_stream_ckpt.maintain.fold import fold_interval  # noqa: E402
from torchrec_stream_ckpt.store.api import open_store  # noqa: E402
from torchrec_stream_ckpt.util.types import RankEnd, StateSpec, TableShard  # noqa: E402

STATE = StateSpec("momentum1", "float32", True)
DIM = 64


def frames(schema: Schema, num_bytes: int, draw: np.random.Generator) -> Iterator[bytes]:
    """HELLO, so many bytes of rows, MARK."""
    spec, seq, chain, sent = schema.tables[0], 0, 0, 0
    rows = RowLayout.of(spec, spec.dim).max_rows
    weights = draw.standard_normal((rows, spec.dim)).astype(np.float32)
    shards = (TableShard(0, 0, spec.rows, 0, spec.dim),)

    def header(kind: Kind) -> Header:
        return Header(kind, builders.JOB, 1, seq=seq, chain=chain, schema_crc=schema.crc)

    hello = header(Kind.HELLO)
    yield bytes(json_frame(hello, Hello(1, schema, shards).to_json()))
    chain = hello.header_crc
    while sent < num_bytes:
        seq += 1
        ids = draw.choice(spec.rows, rows, replace=False, shuffle=False).astype(np.int64)
        like, frame = builders.rows_frame(spec, [ids, weights, weights[:, 0]], table=0)
        like.seq, like.chain, like.schema_crc = seq, chain, schema.crc
        seal(like, frame)
        chain, sent = like.header_crc, sent + len(frame)
        yield bytes(frame)
    seq += 1
    mark = header(Kind.MARK)
    mark.marker, mark.step = 1, 10
    yield bytes(json_frame(mark, Mark(0, sent, ()).to_json()))


def write_log(uri: str, num_bytes: int, rows: int) -> None:
    """A log with one marker."""
    schema = Schema((builders.table("t", rows, DIM, "float32", STATE),))
    log = open_log(uri)
    incarnation = log.prepare(1).id
    log.append_control(builders.claim(1, schema=schema, incarnation=incarnation).to_frame())
    writer, count, total, chain = log.open_writer(1, 0, 0), 0, 0, 0
    kept: list[bytes] = []
    acks: list[Ack] = []

    def wait(most: int) -> None:
        """Until at most so many frames are on their way."""
        while len(kept) > most:
            arrived = writer.poll(1.0)
            del kept[: len(arrived)]
            acks.extend(arrived)

    for frame in frames(schema, num_bytes, np.random.default_rng(0)):
        kept.append(frame)
        writer.send(memoryview(frame))
        count, total = count + 1, total + len(frame)
        chain = int.from_bytes(frame[124:128], "little")
        wait(16)
    wait(0)
    begin, end = acks[0].offset, acks[-1].end
    rank = RankEnd(0, 0, begin, end, count, chain, 0, total)
    log.append_control(builders.commit(1, 1, [rank]).to_frame())
    log.close()


def fold(uri: str, store: str) -> dict[str, float]:
    """Fold the marker; how long it took and what it needed."""
    log = open_log(uri)
    lineage = Control(log).refresh()
    (commit,) = lineage.commits.values()
    interval = Interval(lineage.claims[1], commit, commit.ranks[0], None)
    memory = Memory()
    cpu, begin = time.process_time(), time.perf_counter()
    refs = fold_interval(log, open_store(store), interval, None)
    took_s, cpu_s = time.perf_counter() - begin, time.process_time() - cpu
    memory.close()
    return {
        "megabytes": interval.num_bytes / 1e6,
        "wall_s": took_s,
        "cpu_s": cpu_s,
        "megabytes_a_second": interval.num_bytes / 1e6 / took_s,
        "megabytes_a_cpu_second": interval.num_bytes / 1e6 / cpu_s,
        "written_megabytes": sum(ref.num_bytes for ref in refs) / 1e6,
        "segments": len(refs),
        "memory_megabytes": (memory.peak - memory.before) / 1e6,
    }


class Memory:
    """Most memory that is not a view of a file: the page cache lends those, and takes them back. Sampled."""

    def __init__(self) -> None:
        self.before = self.peak = self._now()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(0.005):
            self.peak = max(self.peak, self._now())

    @staticmethod
    def _now() -> int:
        fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
        return int(fields["RssAnon"].split()[0]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--log", choices=("file", "kafka"), default="file")
    parser.add_argument("--megabytes", type=at_least(1), default=1000)
    parser.add_argument("--rows", type=at_least(1), default=10_000_000, help="of the table")
    parser.add_argument("--rounds", type=at_least(1), default=5)
    parser.add_argument("--out", type=Path, help="file the result as JSON")
    args = parse(parser, megabytes=2, rows=4000, rounds=1)
    least = RowLayout.of(builders.table("t", args.rows, DIM, "float32", STATE), DIM).max_rows
    if args.rows < least:
        parser.error(f"--rows {args.rows}: a frame holds {least} rows, each one once: pass at least {least}")
    room = 4_000_000 * args.megabytes
    refuse_small_machine("ingest", args, "a log and a store", memory=2 << 30, disk=room)
    report: dict[str, Any] = {"case": "ingest", "date": time.strftime("%Y-%m-%d"), "machine": machine()}
    report["command"] = f"python benchmarks/ingest/run.py --log {args.log} --megabytes {args.megabytes}"
    with tempfile.TemporaryDirectory(prefix="ingest-", dir=os.environ.get("BENCH_DIR")) as scratch:
        uri, broker = f"file://{scratch}/log", None
        if args.log == "kafka":
            broker = Broker(Path(scratch) / "broker")
            try:
                uri = f"kafka://{broker.start(die_with=os.getpid()).bootstrap}/ingest"
            except (StreamCkptError, OSError) as error:
                finish(args, report | {"not measured": f"no broker: {error}"})
                return
        try:
            write_log(uri, args.megabytes * 1_000_000, args.rows)
            found: dict[str, list[dict[str, float]]] = {state: [] for state in STATES}
            for number in range(args.rounds):
                for state in STATES:
                    found[state].append(one_round(uri, Path(scratch), state, number))
        finally:
            if broker is not None:
                broker.stop()
    for name, state in (("median", WARM), ("median_cold", COLD)):
        rounds = found[state]
        report[name] = {key: round(statistics.median(each[key] for each in rounds), 2) for key in rounds[0]}
    report["rounds"], report["rounds_cold"] = found[WARM], found[COLD]
    finish(args, report)


def one_round(uri: str, scratch: Path, state: str, number: int) -> dict[str, float]:
    """A fold in a process of its own, into a store that goes again."""
    records = scratch / ("broker" if uri.startswith("kafka") else "log")
    prepare(state, *(path for path in files_under(records) if path.suffix in (".log", ".seg")))
    store = scratch / f"store-{number}-{state}"
    with fresh_processes().Pool(1) as pool:
        found = pool.apply(fold, (uri, str(store)))
    shutil.rmtree(store)
    return found


def finish(args: argparse.Namespace, report: dict[str, Any]) -> None:
    print(json.dumps({key: value for key, value in report.items() if not key.startswith("rounds")}, indent=2))
    if args.out is not None:
        args.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
