"""One publisher's throughput against a raw append, and a raw produce, of the same bytes: paired, interleaved.

    python benchmarks/stream/run.py [--megabytes 2048] [--log file kafka] [--rounds 5] [--out FILE.json]

Frames of 1 MB whose rows lie in memory already are submitted as the ring gives space, until all are acknowledged. Ours
numbers, chains and checksums them and hands them to the log.

``file``   raw: the same buffers by ``writev`` into one file, ``fdatasync`` every 64 of them (as many as the publisher
           makes durable at once) on a thread of its own, while the next are written, as ours does; ``raw, in turn``
           syncs in between. ``file, without fsync``: nobody syncs
           ``direct``: direct writes (``log_writes="direct"``); ``raw, direct`` are buffers of as many whole
           blocks, at pages, by ``pwritev`` with O_DIRECT. ``checksum from the gather``: the payloads' checksums are
           known when a frame is submitted, as the native kernel gives them to a trainer
           Before each of them as many bytes are written and removed, so that all find page cache at hand: a virtual
           machine that has given it back takes seconds for 2 GB of it, whoever writes
``kafka``  raw: the same buffers by an idempotent producer of the same settings, to one partition of the same broker
           (the library's own, a single node that does not sync), acknowledged by all replicas

The point ``..., CPU`` has the CPU time of all threads of this process in the same runs (a broker's is not in it).
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path[1:1] = [str(Path(__file__).resolve().parents[level]) for level in (1, 2)]

import start  # noqa: E402, F401
import numpy as np  # noqa: E402
from common import (  # noqa: E402
    WITH_FSYNC,
    WITHOUT_FSYNC,
    Goal,
    Measured,
    Report,
    Taken,
    UnavailableError,
    add_fsync,
    arguments,
    at_least,
    in_turns,
    parse,
    refuse_small_machine,
    scratch,
    timed_cpu,
    without_fsync,
)

from torchrec_stream_ckpt.errors import StreamCkptError  # noqa: E402
from torchrec_stream_ckpt.format.frame import HEADER_LEN, Header, Kind  # noqa: E402
from torchrec_stream_ckpt.format.padding import BLOCK, with_padding  # noqa: E402
from torchrec_stream_ckpt.format.ring import Bytes, FrameRing  # noqa: E402
from torchrec_stream_ckpt.format.rows import RowLayout  # noqa: E402
from torchrec_stream_ckpt.log.api import Log, open_log  # noqa: E402
from torchrec_stream_ckpt.log.direct import refusal  # noqa: E402
from torchrec_stream_ckpt.log.publisher import Publisher  # noqa: E402
from torchrec_stream_ckpt.native.kernel import checksum  # noqa: E402
from torchrec_stream_ckpt.util.types import StateSpec, TableSpec  # noqa: E402

OURS, RAW, IN_TURN = "ours", "raw", "raw, in turn"
DIRECT, RAW_DIRECT = "ours, direct", "raw, direct"
GATHERED = "ours, direct, checksum from the gather"
TABLE = TableSpec("t", 10_000_000, 64, "float32", "exact_rowwise_adagrad", (StateSpec("sum", "float32", True),))
LAYOUT = RowLayout.of(TABLE, TABLE.dim)
OFFSETS, LENGTH = LAYOUT.offsets(LAYOUT.max_rows)
RING_BYTES = 64 << 20
BATCH = 64


def header() -> Header:
    codes = tuple(section.code for section in LAYOUT.sections)
    rows = LAYOUT.max_rows
    return Header(
        Kind.ROWS, bytes(16), 1, table=0, rows=rows, cols=64, dtypes=codes, section_offsets=OFFSETS, payload_len=LENGTH
    )


def at_page(size: int, random: np.random.Generator) -> Bytes:
    """Random bytes that begin at a page."""
    memory = random.integers(0, 256, size + BLOCK, np.uint8)
    begin = -memory.ctypes.data % BLOCK
    return memory[begin : begin + size]


class Stream:
    """Ours: ring, publisher and log, kept from round to round.

    Args:
        log: The log.
        generation: Number of the generation.
        aligned: Frames are padded to whole blocks.
        gathered: Frames are submitted with the checksums of their payloads.
    """

    def __init__(self, log: Log, generation: int, *, aligned: bool = False, gathered: bool = False) -> None:
        log.prepare(1)
        random = np.random.default_rng(0)
        self._ring = FrameRing(RING_BYTES, 0, lambda size: at_page(size, random), padded=aligned)
        self._publisher = Publisher(
            lambda resume_at: log.open_writer(generation, 0, resume_at), self._ring, aligned=aligned
        )
        self._gathered, self._checksums = gathered, dict[int, int]()
        self.push(BATCH)  # a first answer of the log, and pages of the ring

    def push(self, frames: int) -> Taken:
        def run() -> None:
            for _ in range(frames):
                buffer = self._ring.acquire(wait_s=60)
                if buffer is None:
                    raise UnavailableError(f"the log takes no frames ({self._publisher.failure})")
                buffer.header = header()
                if self._gathered:
                    if buffer.address not in self._checksums:
                        payload = buffer.array.data[HEADER_LEN : HEADER_LEN + LENGTH]
                        self._checksums[buffer.address] = checksum(payload)
                    buffer.payload_crc = self._checksums[buffer.address]
                self._publisher.submit(buffer)
            while self._publisher.pending:
                time.sleep(0.0005)

        return timed_cpu(run)

    @property
    def end(self) -> int:
        """Offset up to which the log has acknowledged frames."""
        return self._publisher.flight.acked.end

    def close(self) -> None:
        self._publisher.close(10)


def raw_append(
    path: Path, frames: list[Any], count: int, syncer: ThreadPoolExecutor | None = None, flags: int = 0
) -> Taken:
    """Into a new file each time; a ``syncer`` makes it durable beside the next writes, otherwise they wait."""

    def run() -> None:
        fd, syncing = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | flags), None
        for begin in range(0, count, BATCH):
            pending = [frames[number % BATCH] for number in range(begin, min(begin + BATCH, count))]
            while pending:
                written = os.writev(fd, pending)
                while pending and written >= len(pending[0]):
                    written -= len(pending.pop(0))
                if written:
                    pending[0] = pending[0][written:]
            if syncing is not None:
                syncing.result()
            if syncer is None:
                os.fdatasync(fd)
            else:
                syncing = syncer.submit(os.fdatasync, fd)
        if syncing is not None:
            syncing.result()
        os.close(fd)

    try:
        return timed_cpu(run)
    finally:
        path.unlink()


def warm_pages(path: Path, frames: list[Any], count: int) -> None:
    """Memory for the page cache of what is written next: whoever wrote after a pause would pay for it alone."""
    with path.open("wb", buffering=0) as file:
        for number in range(count):
            file.write(frames[number % BATCH])
    path.unlink()


def raw_produce(producer: Any, topic: str, frames: list[Any], count: int) -> Taken:
    failed: list[Any] = []

    def run() -> None:
        for number in range(count):
            while True:
                try:
                    report = lambda error, _: failed.append(error) if error else None  # noqa: E731
                    producer.produce(topic, frames[number % BATCH], partition=0, on_delivery=report)
                    break
                except BufferError:
                    producer.poll(0.05)
            producer.poll(0)
        producer.flush()

    taken = timed_cpu(run)
    if failed:
        raise UnavailableError(f"the broker has not taken {len(failed)} records ({failed[0]})")
    return taken


def files(args: Any, count: int, frames: list[Any]) -> tuple[Measured, Measured]:
    with scratch("stream") as folder, ThreadPoolExecutor(1) as syncer:
        generations = iter(range(1, 1000))

        def ours(direct: bool = False, gathered: bool = False) -> Taken:
            """Into a log of its own each time, so that the disk never holds many."""
            if direct:
                check_direct()
            log = open_log(f"file://{folder}/log", direct=direct)
            stream = Stream(log, next(generations), aligned=direct, gathered=gathered)
            try:
                return stream.push(count)
            finally:
                stream.close()
                shutil.rmtree(folder / "log")

        def check_direct() -> None:
            if reason := refusal(folder):
                raise UnavailableError(reason)

        def raw_direct() -> Taken:
            check_direct()
            return raw_append(folder / "raw", blocks, count, syncer, os.O_DIRECT)

        def warm(run: Callable[[], Taken]) -> Callable[[], Taken]:
            def then() -> Taken:
                warm_pages(folder / "warm", buffers, count)
                return run()

            return then

        buffers = [each.data for each in frames]
        blocks = [at_page(with_padding(len(each)), np.random.default_rng(2)).data for each in frames]
        variants: dict[str, Callable[[], Taken]] = {
            RAW: warm(lambda: raw_append(folder / "raw", buffers, count, syncer)),
            IN_TURN: warm(lambda: raw_append(folder / "raw", buffers, count)),
            OURS: warm(ours),
            RAW_DIRECT: warm(raw_direct),
            DIRECT: warm(lambda: ours(direct=True)),
            GATHERED: warm(lambda: ours(direct=True, gathered=True)),
        }
        return in_turns(variants, args.rounds)


def unsynced(args: Any, count: int, frames: list[Any]) -> tuple[Measured, Measured]:
    with without_fsync():
        return files(args, count, frames)


def kafka(args: Any, count: int, frames: list[Any]) -> tuple[Measured, Measured]:
    from torchrec_stream_ckpt.extras.broker.kraft import Broker

    with scratch("stream") as folder, ExitStack() as stack:
        try:
            broker = Broker(folder / "broker")
            bootstrap = broker.start(die_with=os.getpid()).bootstrap
        except (StreamCkptError, OSError) as error:
            raise UnavailableError(f"no broker: {error}") from None
        stack.callback(broker.stop)
        import confluent_kafka
        from confluent_kafka.admin import AdminClient, NewTopic

        from torchrec_stream_ckpt.log.kafka.settings import data_settings
        from torchrec_stream_ckpt.util.uris import parse_uri

        uri = f"kafka://{bootstrap}/bench"
        stream = Stream(open_log(uri), 1)
        stack.callback(stream.close)
        admin = AdminClient({"bootstrap.servers": bootstrap})
        admin.create_topics([NewTopic("raw", 1, 1)])["raw"].result()
        producer = confluent_kafka.Producer(data_settings(parse_uri(uri), {}))
        raw_produce(producer, "raw", frames, BATCH)  # its id, half a second, and the topic's leader
        variants: dict[str, Callable[[], Taken]] = {
            RAW: lambda: raw_produce(producer, "raw", frames, count),
            OURS: lambda: stream.push(count),
        }
        return in_turns(variants, args.rounds)


def main() -> None:
    parser = arguments(__doc__, rounds=5)
    parser.add_argument("--megabytes", type=at_least(1), default=2048)
    parser.add_argument("--log", nargs="+", choices=("file", "kafka"), default=["file", "kafka"])
    add_fsync(parser)
    args = parse(parser, megabytes=2, rounds=1)
    refuse_small_machine("stream", args, "frames", memory=2 << 30, disk=2_000_000 * args.megabytes * (2 + args.rounds))
    report = Report("stream", args)
    size = HEADER_LEN + LENGTH
    random = np.random.default_rng(1)
    frames = [random.integers(0, 256, size, np.uint8) for _ in range(BATCH)]
    count = max(BATCH, args.megabytes * 1_000_000 // size)
    report.facts |= {"frames": count, "bytes": count * size}
    runs = {"file": files, "file, without fsync": unsynced, "kafka": kafka}
    left_out = {
        name for name, mode in (("file", WITH_FSYNC), ("file, without fsync", WITHOUT_FSYNC)) if mode not in args.fsync
    }
    for name, run in runs.items():
        if name.partition(",")[0] not in args.log or name in left_out:
            continue
        try:
            measured, spent = run(args, count, frames)
        except UnavailableError as error:
            report.facts[f"{name} is not measured"] = str(error)
            report.goals.append(Goal.at_least(f"{name}: share of raw", 65, None, "%"))
            continue
        report.add(name, measured, RAW)
        report.add(f"{name}, CPU", spent, RAW)
        speeds = {key: [count * size / each / 1e6 for each in own] for key, own in measured.times.items()}
        measured.times = speeds
        report.add(f"{name}, speed", measured, "none", unit="MB/s", scale=1)
        share = report.ratio(name, OURS)
        report.goals.append(Goal.at_least(f"{name}: share of raw", 65, 100 * share if share else None, "%"))
        if name == "file":
            for way, what in ((DIRECT, ""), (GATHERED, ", checksum from the gather")):
                share = report.paired(name, RAW_DIRECT, way)
                found = 100 * share if share else None
                report.goals.append(Goal.at_least(f"{name}: share of raw, direct{what}", 90, found, "%"))
    report.finish()


if __name__ == "__main__":
    main()
