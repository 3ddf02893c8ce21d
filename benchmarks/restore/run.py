"""The newest marker against ``torch.load`` and ``dcp.load`` of the same tables: first loads of fresh processes, paired.

    python benchmarks/restore/run.py [--rows 2500000] [--rounds 5] [--out FILE.json]

Two tables of 2,500,000 x 64 float32 with row-wise Adagrad, 1.3 GB, sharded by rows. One job of one rank streams them
all, trains some steps on a tenth of the rows, commits a marker, and saves the same state by ``torch.save`` and by DCP
(sharded tensors, as TorchRec hands them out). Fresh processes with the same tables then restore, on one rank and on
two: each of them loads once, as a restart does, with the page cache warm and cold.

``torch.load + copy``        read the whole file, and copy into the live tables (this rank's rows of them)
``torch.load, mmap + copy``  the same with the file mapped: only this rank's rows of it are read
``dcp.load``                 in place, into sharded tensors of the live tables
``ours, log``                ``StreamCheckpointer.restore()``: lineage, plan, rows, dense state, a new generation
``ours, store``              the same from the store in a local folder into which a materializer has folded the log
``StreamReader, log`` and ``store``  ``dcp.load`` of the same marker, tables and states at once, in place, by our reader

The same job over a Kafka broker on loopback, if one can be started (``--no-kafka`` leaves it out):

``raw consume``        every record of the log's partition, by one consumer of our settings, and nothing done with it
``ours, kafka``        ``StreamCheckpointer.restore()`` from that log

Every restore is compared with the saved tables, bit for bit. The time is that of the slowest rank.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

sys.path[1:1] = [str(Path(__file__).resolve().parents[level]) for level in (1, 2)]

import start  # noqa: E402, F401
import torch  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from cache import COLD, STATES, WARM  # noqa: E402
from common import (  # noqa: E402
    Goal,
    Measured,
    Report,
    UnavailableError,
    arguments,
    at_least,
    check_disk,
    check_memory,
    parse,
    scratch,
    take_turns,
)
from device import add_device  # noqa: E402
from job import Job, Shape, build, first, slowest, spread  # noqa: E402

from torchrec_stream_ckpt import StreamCheckpointer, StreamCkptError, StreamConfig, StreamReader  # noqa: E402
from torchrec_stream_ckpt.log.control.partition import Control  # noqa: E402
from torchrec_stream_ckpt.log.files import FileLog  # noqa: E402
from torchrec_stream_ckpt.maintain.materializer import Materializer  # noqa: E402
from torchrec_stream_ckpt.store.api import open_store  # noqa: E402
from torchrec_stream_ckpt.store.dense import open_dense  # noqa: E402
from torchrec_stream_ckpt.util.types import Restored  # noqa: E402

LOAD, MAPPED, DCP, LOG, STORE = (
    "torch.load + copy",
    "torch.load, mmap + copy",
    "dcp.load",
    "ours, log",
    "ours, store",
)
RAW, KAFKA, READER = "raw consume", "ours, kafka", "StreamReader"
SOURCES = {LOG: "log", STORE: "store", KAFKA: "log"}
JOB = "restore"


def attach(job: Job, uri: str, store: Path) -> StreamCheckpointer:
    config = StreamConfig(uri=uri, store=f"file://{store}", marker_every=None, head=None)
    return StreamCheckpointer(job.model, job.optimizer, config=config)


def train(shape: Shape, folder: Path, steps: int, uri: str) -> dict[str, Any]:
    """(one rank) Make everything that is restored from."""
    folder.mkdir(exist_ok=True)
    job = build(shape)
    touched = max(shape.rows) // 10 // steps // 10 * 10
    with attach(job, uri, folder / "store") as checkpointer:
        checkpointer.mark().result(600)
        for _ in range(steps):
            job.train([torch.randint(0, rows, (touched,)) for rows in shape.rows], bags=touched // 10)
            checkpointer.step()
        checkpointer.mark().result(600)
    torch.save({name: value.local_shards()[0].tensor for name, value in job.sharded().items()}, folder / "tables.pt")
    dcp.save(job.sharded(), checkpoint_id=folder / "dcp")
    log_bytes = sum(path.stat().st_size for path in (folder / "log").rglob("*.seg*") if path.is_file())
    return {"bytes of tables and states": job.num_bytes, "bytes of the log / tables": log_bytes / job.num_bytes}


def fold(folder: Path) -> None:
    """What a materializer does beside training: the log into the store. Dense state alone stays in another one."""
    shutil.copytree(folder / "store", folder / "dense")
    log, store = FileLog(folder / "log"), f"file://{folder / 'store'}"
    objects, dense = open_store(store), open_dense(store)
    with ThreadPoolExecutor(2) as pool:
        list(Materializer(log, objects, lambda _: dense, pool).catch_up(Control(log).refresh()))


class Restores:
    """One load of one rank, in a process that has done nothing else."""

    def __init__(self, shape: Shape, folder: Path, uri: str) -> None:
        self._job, self._folder, self._uri = build(shape), folder, uri
        self._memory = shape.table_bytes * 5 // 4
        """What a load may allocate besides the tables: all of them, at most."""
        self.cpu_s = 0.0
        """CPU seconds of the last load, of all threads of this rank."""

    def _mine(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        shard = self._job.sharded()[name].local_shards()[0]
        begin = shard.metadata.shard_offsets[0]
        return whole[begin : begin + len(shard.tensor)]

    def run(self, variant: str) -> float:
        """Seconds; then the truth is read, and compared."""
        if variant == RAW:
            return slowest(lambda: consume(self._uri))
        for tensor in self._job.tensors.values():
            tensor.zero_()
        memory = self._memory
        ways: dict[str, Callable[[], float]] = {
            LOAD: lambda: self._slowest(self._load, memory),
            MAPPED: lambda: self._slowest(partial(self._load, mmap=True), memory),
            DCP: lambda: self._slowest(self._dcp, memory),
            **{name: partial(self._ours, name) for name in SOURCES},
            **{reader(name): lambda n=name: self._slowest(partial(self._reader, n), memory) for name in (LOG, STORE)},
        }
        taken = ways[variant]()
        saved = torch.load(self._folder / "tables.pt", mmap=True, map_location="cpu")
        for name, value in self._job.sharded().items():
            found = value.local_shards()[0].tensor
            if not torch.equal(found, self._mine(name, saved[name]).to(found.device)):
                raise RuntimeError(f"{name} was restored wrongly")
        return taken

    def _slowest(self, action: Callable[[], object], memory: int) -> float:
        """(all ranks) Seconds that the slowest rank takes; notes the CPU time of this one."""

        def counted() -> None:
            begin = time.process_time()
            action()
            self.cpu_s = time.process_time() - begin

        return slowest(counted, memory)

    @torch.no_grad()
    def _load(self, *, mmap: bool = False) -> None:
        loaded = torch.load(self._folder / "tables.pt", map_location="cpu", mmap=mmap)
        for name, value in self._job.sharded().items():
            value.local_shards()[0].tensor.copy_(self._mine(name, loaded[name]))

    @torch.no_grad()
    def _dcp(self) -> None:
        dcp.load(self._job.sharded(), checkpoint_id=self._folder / "dcp")

    @torch.no_grad()
    def _reader(self, ours: str) -> None:
        model = {name: value for name, value in self._job.sharded().items() if not name.startswith("optim.")}
        state = {"model": model, "optim": {"state": self._job.model.fused_optimizer.state_dict()["state"]}}
        store = f"file://{self._store(ours)}"
        source = StreamReader(self._uri, store=store, model_key="model", optimizer_key="optim")
        dcp.load(state, storage_reader=source)

    def _store(self, ours: str) -> Path:
        return self._folder / ("dense" if ours == LOG else "store")

    def _ours(self, name: str) -> float:
        found: list[Restored | None] = []
        with contextlib.closing(attach(self._job, self._uri, self._store(name))) as checkpointer:
            taken = self._slowest(lambda: found.append(checkpointer.restore()), self._memory)
        if found[0] is None or not found[0].source.startswith(SOURCES[name]):
            raise RuntimeError(f"restored {found[0]}, not from the {SOURCES[name]}")
        return taken


def reader(ours: str) -> str:
    """The variant that reads the same as ``ours`` by ``dcp.load``."""
    return f"{READER}, {SOURCES[ours]}"


def consume(uri: str) -> None:
    """All records of a log's data partitions, by a client of our own settings that does nothing else."""
    import confluent_kafka as ck

    from torchrec_stream_ckpt.log.kafka.settings import consumer_settings
    from torchrec_stream_ckpt.util.uris import KafkaUri, parse_uri

    log = parse_uri(uri)
    assert isinstance(log, KafkaUri)
    consumer = ck.Consumer(consumer_settings(log, {}))
    try:
        partitions = consumer.list_topics(log.data_topic).topics[log.data_topic].partitions
        places = [ck.TopicPartition(log.data_topic, number, 0) for number in partitions]
        left = sum(consumer.get_watermark_offsets(place)[1] for place in places)
        consumer.assign(places)
        while left > 0:
            left -= sum(message.error() is None for message in consumer.consume(min(64, left), timeout=1))
    finally:
        consumer.close()


def load(shape: Shape, folder: Path, uri: str, variant: str) -> float:
    """(all ranks) Seconds of one load."""
    return Restores(shape, folder, uri).run(variant)


def measure(
    args: argparse.Namespace, shape: Shape, folder: Path, ranks: int, state: str, names: Sequence[str], uri: str
) -> Measured:
    """Each variant in processes of its own, by turns."""
    places = [folder] if not uri.startswith("kafka") else []
    group = folder.parent
    variants = {
        name: partial(first, load, ranks, group, state, places, shape, folder, uri, name, device=args.device)
        for name in names
    }
    return take_turns(variants, args.rounds, warm_up=0)


def point_of(ours: str, ranks: int, state: str) -> str:
    return f"{ours.partition(', ')[2]}, on {ranks}" + (f", {COLD}" if state == COLD else "")


def main() -> None:
    parser = arguments(__doc__, rounds=5)
    parser.add_argument("--rows", type=at_least(1), default=2_500_000)
    parser.add_argument("--dim", type=at_least(4), default=64)
    parser.add_argument("--steps", type=at_least(1), default=10)
    parser.add_argument("--ranks", type=at_least(1), nargs="+", default=[1, 2])
    parser.add_argument("--no-kafka", action="store_true", help="without the broker and the job on it")
    add_device(parser)
    args = parse(parser, rows=2000, dim=8, steps=2, ranks=[1], rounds=1)
    if args.rows < 100 * args.steps:
        parser.error(
            f"--rows {args.rows} --steps {args.steps}: the steps touch a tenth of the rows, at least 10 each: "
            f"pass at least --rows {100 * args.steps}"
        )
    report = Report("restore", args)
    try:
        _measure_all(args, report)
    except UnavailableError as error:
        report.facts["not measured"] = str(error)
    for ranks in args.ranks:
        for ours, state in itertools.product((LOG, STORE), STATES):
            point = point_of(ours, ranks, state)
            report.goals.append(Goal.at_least(f"{point}: dcp.load / ours", 1, report.paired(point, DCP, ours)))
            mapped = report.paired(point, MAPPED, ours)
            report.goals.append(Goal.at_least(f"{point}: torch.load, mmap + copy / ours", 1, mapped))
            slower = report.paired(point, reader(ours), ours)
            report.goals.append(Goal.at_most(f"{point}: StreamReader / ours", 1.2, slower, "x"))
        if not args.no_kafka:
            share = report.paired(f"kafka, on {ranks}", RAW, KAFKA)
            share = share if share is None else 100 * share
            report.goals.append(Goal.at_least(f"kafka, on {ranks}: of raw consume's speed", 60, share, "%"))
    report.finish()


def _measure_all(args: argparse.Namespace, report: Report) -> None:
    shape = Shape((args.rows, args.rows), args.dim, sharding="row_wise", device=args.device)
    what = f"tables of {shape.table_bytes / 1e9:.1f} GB, live and loaded"
    check_memory((2 << 30) + 4 * shape.table_bytes, what)
    check_disk(7 * shape.table_bytes, what)
    with scratch("restore") as base:
        folder = base / "job"
        uri = f"file://{folder / 'log'}"
        report.facts |= spread(train, 1, base, shape, folder, args.steps, uri, device=args.device)
        fold(folder)
        names = (LOAD, MAPPED, DCP, LOG, STORE, reader(LOG), reader(STORE))
        for ranks, state in itertools.product(args.ranks, STATES):
            found = measure(args, shape, folder, ranks, state, names, uri)
            for ours, other in ((LOG, STORE), (STORE, LOG)):
                here = {name: times for name, times in found.times.items() if name not in (other, reader(other))}
                report.add(point_of(ours, ranks, state), Measured(here, found.unavailable), LOAD)
    if not args.no_kafka:
        with scratch("restore") as folder:
            _measure_kafka(args, report, shape, folder)


def _measure_kafka(args: argparse.Namespace, report: Report, shape: Shape, folder: Path) -> None:
    from torchrec_stream_ckpt.extras.broker.kraft import Broker

    broker = Broker(folder / "broker")
    try:
        uri = broker.start(die_with=os.getpid()).uri(JOB)
    except (StreamCkptError, OSError) as error:
        report.leave_out("kafka", f"no broker: {error}")
        return
    try:
        spread(train, 1, folder, shape, folder / "job", args.steps, uri, device=args.device)
        for ranks in args.ranks:
            found = measure(args, shape, folder / "job", ranks, WARM, (RAW, KAFKA), uri)
            report.add(f"kafka, on {ranks}", found, RAW)
    finally:
        broker.stop()


if __name__ == "__main__":
    main()
