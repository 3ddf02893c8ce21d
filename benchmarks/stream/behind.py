"""The cost of direct writes for readers on the same host: a stream and a reader that follows it, paired, interleaved.

    python benchmarks/stream/behind.py [--megabytes 512] [--rounds 5] [--batch 40] [--pause 0.1] [--out FILE.json]

A writer sends frames of 1 MB as a rank that drains each step: a batch of ``--batch`` MB, then a pause. A process of
its own reads all that is acknowledged and compares each checksum, as a relay, a follower and a materializer do. Each
round has four variants: the log through the page cache and past it, with and without the reader. CPU is that of all
threads of a process, the kernel's work for it included. ``until read`` ends when the reader has seen the last frame,
``until sent`` when the log has acknowledged it; both have the pauses in them.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

sys.path[1:1] = [str(Path(__file__).resolve().parents[level]) for level in (0, 1, 2)]

import start  # noqa: E402, F401
import run as stream_run  # noqa: E402
from common import (  # noqa: E402
    Measured,
    Report,
    Times,
    UnavailableError,
    arguments,
    at_least,
    fresh_processes,
    parse,
    refuse_small_machine,
    scratch,
    take_turns,
)

from torchrec_stream_ckpt.format.frame import HEADER_LEN, parse_header, payload_of  # noqa: E402
from torchrec_stream_ckpt.log.api import open_log  # noqa: E402
from torchrec_stream_ckpt.log.direct import refusal  # noqa: E402
from torchrec_stream_ckpt.util.types import LogSpan  # noqa: E402

WAYS = ("buffered", "direct")
ALONE, READ = "alone", "with a reader"


def read(pipe: Connection) -> None:
    """(process) For each (uri, generation, offset to read up to): read; then say the CPU seconds since the last 0."""
    position, begin = 0, time.process_time()
    while (order := pipe.recv()) is not None:
        uri, generation, end = order
        if not end:
            position, begin = 0, time.process_time()
            pipe.send(0.0)
            continue
        for _, frame in open_log(uri).read(LogSpan(generation, 0, position, end)):
            payload_of(parse_header(frame), frame)
        position = end
        pipe.send(time.process_time() - begin)


def main() -> None:
    parser = arguments(__doc__, rounds=5)
    parser.add_argument("--megabytes", type=at_least(2), default=512)
    parser.add_argument("--batch", type=at_least(1), default=40, help="MB that are sent at a time")
    parser.add_argument("--pause", type=float, default=0.1, help="seconds between two batches")
    args = parse(parser, megabytes=4, rounds=1, batch=2, pause=0.01)
    refuse_small_machine("stream", args, "logs", memory=2 << 30, disk=4_000_000 * args.megabytes)
    report = Report("stream", args, script="behind.py")
    size = HEADER_LEN + stream_run.LENGTH
    batches = max(1, args.megabytes // args.batch)
    frames = max(1, args.batch * 1_000_000 // size)
    report.facts |= {"bytes": batches * frames * size, "batches": batches}
    cpu: dict[str, Times] = {who: {} for who in ("writer", "reader", "both")}
    sent: Times = {}
    context = fresh_processes()
    pipe, theirs = context.Pipe()
    process = context.Process(target=read, args=(theirs,), daemon=True)
    process.start()
    with scratch("behind") as folder:
        if reason := refusal(folder):
            raise UnavailableError(reason)
        generations = iter(range(1, 1000))

        def one(way: str, who: str) -> Callable[[], float]:
            def run() -> float:
                generation, uri = next(generations), f"file://{folder}/log"
                stream = stream_run.Stream(open_log(uri, direct=way == "direct"), generation, aligned=way == "direct")
                pipe.send((uri, generation, 0))
                pipe.recv()
                begin, used, waiting, theirs_s, asked = time.perf_counter(), time.process_time(), False, 0.0, 0
                end = 0
                for _ in range(batches):
                    stream.push(frames)
                    end = stream.end
                    if who == READ and not waiting:
                        pipe.send((uri, generation, end))
                        waiting, asked = True, end
                    until = time.perf_counter() + args.pause
                    while (left := until - time.perf_counter()) > 0:
                        if waiting and pipe.poll(left):
                            theirs_s, waiting = pipe.recv(), False
                        elif not waiting:
                            time.sleep(left)
                name = f"{way}, {who}"
                sent.setdefault(name, []).append(time.perf_counter() - begin)
                mine_s = time.process_time() - used
                if waiting:
                    theirs_s = pipe.recv()
                if who == READ and asked < end:
                    pipe.send((uri, generation, end))
                    theirs_s = pipe.recv()
                taken = time.perf_counter() - begin
                stream.close()
                shutil.rmtree(folder / "log")
                for key, value in (("writer", mine_s), ("reader", theirs_s), ("both", mine_s + theirs_s)):
                    cpu[key].setdefault(name, []).append(value)
                return taken

            return run

        variants = {f"{way}, {who}": one(way, who) for way in WAYS for who in (ALONE, READ)}
        found = take_turns(variants, args.rounds)
    pipe.send(None)
    process.join()
    read_by = [name for name in found.times if name.endswith(READ)]
    report.add("until read", Measured({name: found.times[name] for name in read_by}), f"buffered, {READ}")
    report.add("until sent", last(sent, args.rounds), f"buffered, {ALONE}")
    for who, times in cpu.items():
        kept = last({name: times[name] for name in (times if who == "writer" else read_by)}, args.rounds)
        report.add(f"CPU, {who}", kept, f"buffered, {ALONE if who == 'writer' else READ}")
    report.finish()


def last(times: Times, rounds: int) -> Measured:
    """Without the warm-up."""
    return Measured({name: own[-rounds:] for name, own in times.items()})


if __name__ == "__main__":
    main()
