"""The bucket log against raw puts and gets of the same objects, its requests, and a trainer whose bucket is throttled.

    python benchmarks/bucket/run.py [--part stream restore commit attach throttle] [--latencies 0 5 30 100]
        [--megabytes 128] [--rounds 5] [--seconds 10] [--out FILE.json]

The object store is S3Proxy over a folder. A proxy before it delays each answer (``far.py``).

``stream``    from the first ``send()`` until all frames are acknowledged, against creates of the same objects, as many
              at a time, by the same store client
``restore``   all frames of a span, the listing of its objects included, against gets of the same objects, as many at a
              time
``commit``    one ``Control.commit`` against one put, and its requests in turn
``attach``    the first read of the control records after 100 and after 10,000 markers: its requests, and those of the
              commit after it
``throttle``  ``step()`` of a trainer whose bucket answers 503 SlowDown to all requests, or none, against that of one
              whose bucket answers
"""

from __future__ import annotations

import itertools
import json
import shutil
import statistics
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path[1:1] = [str(Path(__file__).resolve().parents[level]) for level in (1, 2)]

import start  # noqa: E402, F401
import numpy as np  # noqa: E402
from common import (  # noqa: E402
    Goal,
    Measured,
    Report,
    Taken,
    Times,
    arguments,
    at_least,
    in_turns,
    parse,
    refuse_small_machine,
    scratch,
    take_turns,
    tell,
    timed_cpu,
    unmeasured,
    without_fsync,
)
from far import FAULTS, Far, Request, far, in_turn  # noqa: E402
from job import spread  # noqa: E402
from throttled import AGAIN, PLAIN, WAYS, Block, Found, Load, train  # noqa: E402

from tests.builders import JOB  # noqa: E402
from tests.s3.jars import S3PROXY  # noqa: E402
from tests.s3.server import KEY, SECRET, S3Server  # noqa: E402
from tests.synthetic import Job  # noqa: E402
from torchrec_stream_ckpt.errors import StreamCkptError  # noqa: E402
from torchrec_stream_ckpt.format.control import Commit  # noqa: E402
from torchrec_stream_ckpt.format.frame import HEADER_LEN, MAX_FRAME_BYTES, Header, Kind, seal  # noqa: E402
from torchrec_stream_ckpt.inner import Control, Log, Objects, open_store  # noqa: E402
from torchrec_stream_ckpt.log.api import open_log  # noqa: E402
from torchrec_stream_ckpt.log.bucket.control_objects import ControlObjects  # noqa: E402
from torchrec_stream_ckpt.log.bucket.streams import READS_AHEAD, object_name, sizes_of  # noqa: E402
from torchrec_stream_ckpt.log.bucket.writer import OBJECT_BYTES, PUTS  # noqa: E402
from torchrec_stream_ckpt.util.layout import bucket_stream  # noqa: E402
from torchrec_stream_ckpt.util.types import LogSpan  # noqa: E402

PARTS = ("stream", "restore", "commit", "attach", "throttle")
OURS, RAW = "ours", "raw"
COMMIT, PUT = "commit", "one put"
SHARE_PERCENT = 60
TURNS = 3
ATTACH_MS = THROTTLE_MS = 30
PAYLOAD_BYTES = (MAX_FRAME_BYTES - HEADER_LEN) // 64 * 64
"""Of a frame."""
_POLL_S = 0.02
_WAIT_S = 60.0
READ_TIMEOUT_S = 2
"""Of the client that is throttled. It waits that long for an answer that never comes."""
PAUSE_S = 8
"""Most seconds without a request: the publisher's longest pause is 5 s, and the request before it waits READ_TIMEOUT_S
for its answer."""


class Place:
    """A prefix of the bucket that nothing else uses."""

    def __init__(self, server: S3Server, proxy: Far) -> None:
        prefix = uuid.uuid4().hex
        self.uri = f"s3://{server.bucket}/{prefix}"
        self.folder = server.objects / server.bucket / prefix
        self.proxy = proxy
        # Retries and time-outs are the library's own.
        region = json.dumps({"region_name": "us-east-1"})
        self.options = {"key": KEY, "secret": SECRET, "endpoint_url": proxy.endpoint, "client_kwargs": region}

    def log(self) -> Log:
        """Open the log. Its client is connected."""
        log = open_log(self.uri, self.options)
        log.prepare(1)
        return log

    def store(self) -> Objects:
        """Open a store next to the log, by a client as the log's. It is connected."""
        objects = open_store(f"{self.uri}-raw", self.options)
        objects.size("none")
        return objects

    def clear(self) -> None:
        """Delete all objects."""
        for folder in (self.folder, self.folder.with_name(f"{self.folder.name}-raw")):
            shutil.rmtree(folder, ignore_errors=True)


def frames_of(megabytes: int) -> list[memoryview]:
    """Return frames of random bytes. The last one is a MARK, after which no frame waits for more."""
    random, found = np.random.default_rng(0), []
    for seq in range(megabytes):
        data = bytearray(HEADER_LEN) + random.bytes(PAYLOAD_BYTES)
        seal(Header(Kind.ROWS, JOB, 1, seq=seq, payload_len=PAYLOAD_BYTES), data)
        found.append(memoryview(data))
    data = bytearray(HEADER_LEN)
    seal(Header(Kind.MARK, JOB, 1, seq=megabytes, marker=1), data)
    return [*found, memoryview(data)]


def objects_of(frames: Iterable[memoryview]) -> list[list[memoryview]]:
    """Return the frames of each object that the log's writer makes of them."""
    found: list[list[memoryview]] = [[]]
    for frame in frames:
        if sum(map(len, found[-1])) >= OBJECT_BYTES:
            found.append([])
        found[-1].append(frame)
    return found


def send(log: Log, generation: int, frames: Sequence[memoryview]) -> Taken:
    """Send frames, and wait for all acknowledgments."""
    writer, acks = log.open_writer(generation, 0, 0), []

    def run() -> None:
        for each in frames:
            writer.send(each)
        while len(acks) < len(frames):
            acks.extend(writer.poll(_POLL_S))

    taken = timed_cpu(run)
    writer.close()
    return taken


def stream(args: Any, report: Report, place: Place, name: str) -> None:
    frames, numbers = frames_of(args.megabytes), itertools.count(1)
    groups, objects, log = objects_of(frames), place.store(), place.log()

    def raw() -> Taken:
        round_ = next(numbers)
        with ThreadPoolExecutor(PUTS) as pool:

            def run() -> None:
                each = enumerate(groups)
                if not all(pool.map(lambda one: objects.create(f"raw/{round_}/{one[0]}", one[1]), each)):
                    raise SystemExit("Error: a name of a raw put was taken")

            taken = timed_cpu(run)
        for number in range(len(groups)):
            objects.delete(f"raw/{round_}/{number}")
        return taken

    def ours() -> Taken:
        generation = next(numbers)
        taken = send(log, generation, frames)
        folder = place.folder / bucket_stream(generation, 0)
        sizes = [path.stat().st_size for path in sorted(folder.iterdir())]
        if sizes != [sum(map(len, each)) for each in groups]:
            raise SystemExit(f"Error: the log has objects of {sizes} bytes, which are not those of the raw puts")
        shutil.rmtree(folder)
        return taken

    _shares(args, report, f"stream, {name}", {RAW: raw, OURS: ours}, sum(map(len, frames)))
    log.close()
    objects.close()


def restore(args: Any, report: Report, place: Place, name: str) -> None:
    frames = frames_of(args.megabytes)
    log = place.log()
    send(log, 1, frames)
    log.close()
    span = LogSpan(1, 0, 0, sum(map(len, frames)))
    objects = open_store(place.uri, place.options)
    names = [object_name(1, 0, offset) for offset in sizes_of(objects, 1, 0)]

    def raw() -> Taken:
        found: list[memoryview] = []
        with ThreadPoolExecutor(READS_AHEAD) as pool:
            taken = timed_cpu(lambda: found.extend(pool.map(objects.read, names)))
        _check(sum(map(len, found)) == span.end)
        return taken

    def ours() -> Taken:
        fresh, found = place.log(), []  # it has listed nothing yet
        taken = timed_cpu(lambda: found.extend(frame for _, frame in fresh.read(span)))
        fresh.close()
        _check(found == frames)
        return taken

    _shares(args, report, f"restore, {name}", {RAW: raw, OURS: ours}, span.end)
    objects.close()


def _check(same: bool) -> None:
    if not same:
        raise SystemExit("Error: other bytes were read than were written")


def _shares(args: Any, report: Report, name: str, variants: Mapping[str, Callable[[], Taken]], num_bytes: int) -> None:
    measured, spent = in_turns(variants, args.rounds)
    report.add(name, measured, RAW)
    report.add(f"{name}, CPU", spent, RAW)
    measured.times = {key: [num_bytes / each / 1e6 for each in own] for key, own in measured.times.items()}
    report.add(f"{name}, speed", measured, "none", unit="MB/s", scale=1)
    share = report.ratio(name, OURS)
    report.goals.append(Goal.at_least(f"{name}: share of raw", SHARE_PERCENT, 100 * share if share else None, "%"))


# Control records.


def begun(log: Log) -> Commit:
    """Begin a job without a trainer. Returns its first marker."""
    job = Job(Path("/nowhere"), world=1, log=log)
    job.begin()
    return job.commit()


def committed(control: Control, commit: Commit, proxy: Far) -> tuple[float, list[Request]]:
    """Commit a marker. Returns the seconds that it took, and the requests that it waited for."""
    begin = time.monotonic()
    control.commit(commit, _WAIT_S, threading.Event())
    end = time.monotonic()
    found = proxy.requests(begin, end)
    return end - begin, [each for each in found if each.end_s is not None and each.end_s <= end]


def kinds(requests: Iterable[Request]) -> dict[str, int]:
    return dict(sorted(Counter(each.kind for each in requests).items()))


def commit(args: Any, report: Report, place: Place, name: str) -> None:
    log, objects = place.log(), place.store()
    first, numbers = begun(log), itertools.count(2)
    control = Control(log)
    control.refresh()
    asked: list[list[Request]] = []

    def ours() -> float:
        number = next(numbers)
        taken, requests = committed(control, replace(first, marker=number, step=10 * number), place.proxy)
        asked.append(requests)
        return taken

    def raw() -> float:
        begin = time.perf_counter()
        objects.create(f"raw/{next(numbers)}", [first.to_frame()])
        return time.perf_counter() - begin

    report.add(f"commit, {name}", take_turns({PUT: raw, COMMIT: ours}, args.commits), PUT)
    turns = [in_turn(each) for each in asked[-args.commits :]]
    report.facts[f"commit, {name}: requests in turn"] = {"median": statistics.median(turns), "most": max(turns)}
    report.facts[f"commit, {name}: requests"] = kinds(asked[-1])
    log.close()
    objects.close()


def old_log(place: Place, markers: int) -> Commit:
    """Write a log of this many markers. Returns the newest one."""
    log = place.log()
    first = begun(log)
    log.close()
    records = ControlObjects(open_store(f"file://{place.folder}"))
    newest = first
    with without_fsync():  # through the folder: the server would take minutes
        for number in range(2, markers + 1):
            newest = replace(first, marker=number, step=10 * number)
            records.append(newest.to_frame())
    records.close()
    return newest


def attach(args: Any, report: Report, places: Mapping[int, Place]) -> None:
    newest = {markers: old_log(place, markers) for markers, place in places.items()}
    asked: dict[int, list[Request]] = {}
    after: dict[int, list[Request]] = {}

    def read(markers: int) -> float:
        place = places[markers]
        log = place.log()
        control = Control(log, spare=True)
        place.proxy.be(ATTACH_MS)
        begin = time.monotonic()
        found = control.refresh().newest
        end = time.monotonic()
        if found is None or found.id != newest[markers].id:
            raise SystemExit(f"Error: the newest marker is {found and found.id}, not {newest[markers].id}")
        asked[markers] = place.proxy.requests(begin, end)
        newest[markers] = replace(newest[markers], marker=newest[markers].marker + 1, step=newest[markers].step + 10)
        _, after[markers] = committed(control, newest[markers], place.proxy)
        log.close()
        return end - begin

    variants = {f"{markers:,} markers": (lambda markers=markers: read(markers)) for markers in places}
    young, old = variants
    report.add(f"attach, {ATTACH_MS} ms", take_turns(variants, args.rounds), young)
    for markers in places:
        report.facts[f"attach after {markers:,} markers: requests"] = {
            "all": len(asked[markers]),
            "in turn": in_turn(asked[markers]),
            **kinds(asked[markers]),
            "the commit after it": kinds(after[markers]),
        }
    more = len(after[args.old]) - len(after[args.young])
    report.goals.append(Goal.at_most(f"a commit after {old}: requests more than after {young}", 0, more, "requests"))


# Throttling.


def throttle(args: Any, report: Report, place: Place, folder: Path) -> None:
    config = {
        "connect_timeout": 5,
        "read_timeout": READ_TIMEOUT_S,
        "retries": {"mode": "standard", "max_attempts": 3},
        "max_pool_connections": 128,
    }
    options = {**place.options, "config_kwargs": json.dumps(config)}
    load = Load(args.rounds, 0 if args.quick else 1, args.seconds, args.step_s, args.rows, args.ids, THROTTLE_MS)
    found: Found = spread(train, 1, folder, place.uri, options, place.proxy, folder, load)
    report.facts |= {
        "throttle: a step every, ms": 1e3 * args.step_s,
        "throttle: markers, all restorable, the newest bit for bit": found.markers,
        "throttle: markers committed": _of_all(found, lambda each: each.committed),
        "throttle: markers failed": _of_all(found, lambda each: each.failed),
        "throttle: requests a second": _of_all(found, lambda each: each.requests / args.seconds),
        "throttle: longest time without a request, s": _of_all(found, lambda each: each.longest_pause_s),
    }
    points: dict[str, Callable[[Block], float]] = {
        "step(), mean": lambda each: statistics.fmean(each.calls_s),
        "step(), p99": lambda each: float(np.quantile(each.calls_s, 0.99)),
        "step(), worst": lambda each: max(each.calls_s),
        "training step, mean": lambda each: statistics.fmean(each.steps_s),
        "until a marker is committed": lambda each: each.until_marker_s,
    }
    for point, figure in points.items():
        times: Times = {way: [figure(each) for each in blocks] for way, blocks in found.blocks.items()}
        report.add(f"throttle: {point}", Measured(times), PLAIN)
    for point in ("step(), mean", "training step, mean"):
        rows = report.points[f"throttle: {point}"]["variants"]
        least, most = rows[AGAIN]["ratio_range"]
        noise = max(most, 1 / least)
        for fault in FAULTS:
            what = f"throttle: {point}, {fault}, of that without; at most the noise"
            report.goals.append(Goal.at_most(what, round(noise, 3), 1 / rows[fault]["ratio"], "times"))
    for fault in FAULTS:
        pause = max(each.longest_pause_s for each in found.blocks[fault])
        report.goals.append(Goal.at_most(f"throttle: longest time without a request, {fault}", PAUSE_S, pause, "s"))


def _of_all(found: Found, figure: Callable[[Block], float]) -> dict[str, float]:
    """Return the median over the blocks of each way."""
    return {way: round(statistics.median(map(figure, found.blocks[way])), 2) for way in WAYS}


def measure(args: Any, report: Report, stack: ExitStack) -> None:
    folder = stack.enter_context(scratch("bucket"))
    server = S3Server(folder)
    try:
        server.start()
    except (StreamCkptError, OSError, AssertionError) as error:
        unmeasured("bucket", args, f"no object store: {error}")
        raise SystemExit(0) from None
    stack.callback(server.kill)
    proxy = stack.enter_context(far(server.port))
    for part, run in {"stream": stream, "restore": restore, "commit": commit}.items():
        for latency_ms in args.latencies if part in args.part else ():
            place, name = Place(server, proxy), f"{latency_ms} ms"
            tell(f"{part}, {name}")
            proxy.be(latency_ms)
            run(args, report, place, name)
            proxy.be()
            place.clear()
    if "commit" in args.part:
        # Only in a far store do requests overlap that need not wait for each other.
        name = f"commit, {max(args.latencies)} ms: requests in turn"
        report.goals.append(Goal.at_most(name, TURNS, report.facts[name]["most"], "requests"))
    if "attach" in args.part:
        tell("attach")
        attach(args, report, {markers: Place(server, proxy) for markers in (args.young, args.old)})
        proxy.be()
    if "throttle" in args.part:
        throttle(args, report, Place(server, proxy), folder)


def main() -> None:
    parser = arguments(__doc__, rounds=5)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--latencies", nargs="+", type=at_least(0), default=[0, 5, 30, 100], metavar="MS")
    sizes = {"megabytes": 128, "commits": 20, "young": 100, "old": 10_000, "rows": 100_000, "ids": 256}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=at_least(4 if name == "ids" else 1), default=default)
    parser.add_argument("--seconds", type=float, default=10.0, help="of a block of training (throttle)")
    parser.add_argument("--step_s", type=float, default=0.03, help="from one step to the next one (throttle)")
    quick: dict[str, Any] = {"megabytes": 2, "rounds": 1, "commits": 1, "old": 300, "young": 20, "latencies": [5]}
    args = parse(parser, **quick, rows=200, ids=8, seconds=0.5)
    if args.old <= args.young:
        parser.error(f"--old {args.old}: the old log needs more markers than the young one, which has {args.young}")
    blocks = len(WAYS) * (args.rounds + 1) * args.seconds / args.step_s
    disk = 8_000_000 * args.megabytes + int(blocks * args.ids * 4 * 300) + 20_000 * args.old
    refuse_small_machine("bucket", args, "a server, a log and a trainer", memory=3 << 30, disk=(1 << 30) + disk)
    report = Report("bucket", args)
    report.facts |= {"server": str(S3PROXY), "puts at a time": PUTS, "gets at a time": READS_AHEAD}
    with ExitStack() as stack:
        measure(args, report, stack)
    report.finish()


if __name__ == "__main__":
    main()
