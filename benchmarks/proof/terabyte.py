"""A job of 1 TB on one machine: its log is folded, its newest marker planned, and the share of one rank restored.

    python benchmarks/proof/terabyte.py [--ranks 1024] [--rows 242688000] [--markers 16] [--out FILE.json]

The first marker holds every row. It is a store as the materializer would have written it, to the byte count: for each
rank the segments, with directories, notes and headers that name real rows. The chunks of one rank hold rows; those of
the others are holes in sparse files, and reading one fails by its checksum. The log up to that marker was trimmed.
What comes after it is all real: frames of rows that changed, MARKs, COMMITs, the materializer, the plan, the restore,
and the comparison of every bit of the share.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path[1:1] = [str(Path(__file__).resolve().parents[2] / part) for part in ("benchmarks", "benchmarks/growth", "")]
# The other setting keeps what each thread has freed, up to 64 MiB: memory would be that of chance.
os.environ.setdefault("BENCH_ALLOCATOR", "default")

import start  # noqa: E402, F401
import numpy as np  # noqa: E402
import torch  # noqa: E402
from cache import COLD, WARM, prepare  # noqa: E402
from common import file_facts, parse, refuse_small_machine, scratch, tell, without_fsync  # noqa: E402
from counts import apart, timed  # noqa: E402
from crc32c import crc32c  # noqa: E402

from tests import builders  # noqa: E402
from tests.builders import JOB, Stream  # noqa: E402
from torchrec_stream_ckpt.errors import CorruptionError  # noqa: E402
from torchrec_stream_ckpt.flags import whole as at_least  # noqa: E402
from torchrec_stream_ckpt.format.control import Commit, Mark  # noqa: E402
from torchrec_stream_ckpt.format.frame import HEADER_LEN, Header, Kind, aligned, parse_header  # noqa: E402
from torchrec_stream_ckpt.format.manifest import Manifest, SegmentRef  # noqa: E402
from torchrec_stream_ckpt.format.notes import Notes  # noqa: E402
from torchrec_stream_ckpt.format.rank_shards import RankShards  # noqa: E402
from torchrec_stream_ckpt.format.rows import RowLayout  # noqa: E402
from torchrec_stream_ckpt.format.schema import Schema  # noqa: E402
from torchrec_stream_ckpt.format.segment import (  # noqa: E402
    ENTRY,
    SegmentId,
    SegmentKind,
    chunk_rows,
    front_length,
    pack_front,
)
from torchrec_stream_ckpt.inner import Control, Damaged, Region, Where, fill, find_marker  # noqa: E402
from torchrec_stream_ckpt.log.files import FileLog  # noqa: E402
from torchrec_stream_ckpt.maintain.fold import SEGMENT_BYTES  # noqa: E402
from torchrec_stream_ckpt.maintain.incomplete_markers import put_claim  # noqa: E402
from torchrec_stream_ckpt.maintain.materializer import Materializer  # noqa: E402
from torchrec_stream_ckpt.restore.plan import plan_reads  # noqa: E402
from torchrec_stream_ckpt.store.dense import open_dense  # noqa: E402
from torchrec_stream_ckpt.store.folder import FolderObjects  # noqa: E402
from torchrec_stream_ckpt.store.identity import prepare_store  # noqa: E402
from torchrec_stream_ckpt.util.layout import StoreSegment, manifest_name, partition_dir, segment_name  # noqa: E402
from torchrec_stream_ckpt.util.types import MarkerId, RankEnd, StateSpec, TableShard  # noqa: E402

FIRST = MarkerId(1, 1)
STATE = StateSpec("momentum1", "float32", True)
ASKED = {"read": "GET", "read_into": "GET", "size": "HEAD", "list": "LIST", "put": "PUT", "create": "PUT"}
"""Methods of a store, and the request that an object store would get."""
Rows = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Ids, weights, and the state of each row."""


@dataclass(frozen=True)
class Terabyte:
    """The job: every rank holds as many rows of every table."""

    root: Path
    ranks: int
    tables: int
    rows: int
    dim: int
    markers: int
    touched: int
    """Rows that are drawn for each table, rank and marker; one that is drawn twice is sent once."""
    rank: int
    """Whose share is restored."""

    @cached_property
    def schema(self) -> Schema:
        return Schema(
            tuple(builders.table(f"t{n:03d}", self.rows, self.dim, "float32", STATE) for n in range(self.tables))
        )

    @property
    def share(self) -> int:
        """Rows of a table that a rank holds."""
        return self.rows // self.ranks

    @property
    def layout(self) -> RowLayout:
        return RowLayout.of(self.schema.tables[0], self.dim)

    @property
    def row_bytes(self) -> int:
        """Weights and state, without the id."""
        return self.layout.row_bytes - 8

    @property
    def table_bytes(self) -> int:
        return self.tables * self.rows * self.row_bytes

    @property
    def store(self) -> Path:
        return self.root / "store"

    @property
    def uri(self) -> str:
        return f"file://{self.root / 'log'}"

    def shards(self, rank: int) -> tuple[TableShard, ...]:
        return tuple(TableShard(table, rank * self.share, self.share, 0, self.dim) for table in range(self.tables))

    def values(self, *seed: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
        random = np.random.default_rng(seed)
        return random.random((rows, self.dim), np.float32), random.random(rows, np.float32)

    def base(self, rank: int, table: int, row: int, rows: int) -> Rows:
        """Rows of a share as the first marker has them; ``row`` counts from the share's first one."""
        ids = np.arange(row, row + rows) + rank * self.share
        return ids, *self.values(0, rank, table, row, rows=rows)

    def changed(self, marker: int, rank: int, table: int) -> Rows:
        """Rows that a rank sends for a marker, the first ones of its share more often."""
        drawn = np.random.default_rng((1, marker, rank, table)).random(self.touched)
        ids = np.unique((self.share * drawn**4).astype(np.int64)) + rank * self.share
        return ids, *self.values(2, marker, rank, table, rows=len(ids))

    def parts(self) -> list[list[tuple[int, int, int]]]:
        """Chunks (table, row, rows) of each segment of a share, cut where the materializer cuts what frames bring."""
        found: list[list[tuple[int, int, int]]] = [[]]
        held = 0
        for table, row, rows in self.frames():
            if held >= SEGMENT_BYTES:
                found.append([])
                held = 0
            part, held = found[-1], held + rows * self.layout.row_bytes
            if part and part[-1][0] == table:
                part[-1] = (table, part[-1][1], part[-1][2] + rows)
            else:
                part.append((table, row, rows))
        most = chunk_rows(self.layout)
        return [
            [
                (table, row + begin, min(most, rows - begin))
                for table, row, rows in part
                for begin in range(0, rows, most)
            ]
            for part in found
        ]

    def frames(self) -> Iterator[tuple[int, int, int]]:
        """(table, row, rows) of each frame in which a rank sends its whole share."""
        for table in range(self.tables):
            for row in range(0, self.share, self.layout.max_rows):
                yield table, row, min(self.layout.max_rows, self.share - row)


@dataclass
class Resumed(Stream):
    """A stream of which frames between HELLO and the first MARK are not made: they were trimmed."""

    skipped: int = 0

    def header_of(self, kind: Kind, **fields: int) -> Header:
        header = super().header_of(kind, **fields)
        header.seq += self.skipped
        return header


def streams_of(job: Terabyte) -> Iterator[tuple[Resumed, list[RankEnd]]]:
    """Each rank's frames, and where its stream stands at each marker."""
    swept = [HEADER_LEN + job.layout.offsets(rows)[1] for _, _, rows in job.frames()]
    for rank in range(job.ranks):
        stream = Resumed(rank, shards=job.shards(rank), schema=job.schema, world=job.ranks)
        stream.skipped = len(swept)
        rows, at, ends = job.tables * job.share, len(stream.frames[0]) + sum(swept), []
        for marker in range(1, job.markers + 2):
            begin = len(stream.frames)
            for table in range(job.tables) if marker > 1 else ():
                found = job.changed(marker, rank, table)
                stream.put(table, found)
                rows += len(found[0])
            before = at + sum(map(len, stream.frames[begin:]))
            stream.json(Kind.MARK, Mark(rows, before, ()).to_json(), marker=marker, step=10 * marker)
            at = before + len(stream.frames[-1])
            chain = parse_header(stream.frames[-1]).header_crc
            ends.append(RankEnd(rank, rank, 0, at, len(swept) + len(stream.frames), chain, rows, at))
        yield stream, ends


def write_log(job: Terabyte) -> dict[str, Any]:
    """CLAIM, the frames after the first marker, all COMMITs, and the TRIM up to the first one; and that one's store."""
    log = FileLog(job.root / "log")
    layout = RankShards.of([job.shards(rank) for rank in range(job.ranks)])
    claim = builders.claim(
        1,
        world=job.ranks,
        partitions=job.ranks,
        incarnation=log.prepare(job.ranks).id,
        schema=job.schema,
        swept=tuple(range(job.tables)),
        layout=layout,
    )
    log.append_control(claim.to_frame())
    ends: list[list[RankEnd]] = []
    rows = num_bytes = 0
    for stream, mine in streams_of(job):
        trimmed = partition_dir(job.root / "log", stream.rank) / segment_name(1, mine[0].end)
        trimmed.write_bytes(b"".join(stream.frames[2:]))  # a writer refuses to go on where frames are missing
        ends.append(mine)
        rows += mine[-1].rows - mine[0].rows
        num_bytes += mine[-1].end - mine[0].end
    commits = [builders.commit(1, marker, each) for marker, each in enumerate(zip(*ends, strict=True), 1)]
    for commit in commits:
        log.append_control(commit.to_frame())
    write_first(job, log, commits[0])
    log.append_control(builders.trim(str(FIRST), store=f"file://{job.store}").to_frame())
    return {
        "rows sent after the first marker": rows,
        "bytes of the log": num_bytes,
        "bytes of the log that were trimmed": sum(each[0].end for each in ends),
    }


def write_first(job: Terabyte, log: FileLog, commit: Commit) -> None:
    """The store of the first marker: sparse, except for the share that is restored."""
    objects, parts = FolderObjects(job.store), job.parts()
    prepare_store(objects)
    put_claim(objects, Control(log).refresh(), commit)
    refs = []
    for rank in range(job.ranks):
        notes = Notes(job.shards(rank), Mark(commit.ranks[rank].rows, 0, ())).to_json()
        mine = []
        for number, chunks in enumerate(parts):
            last = number == len(parts) - 1
            segment = SegmentId(SegmentKind.INTERVAL, JOB, FIRST, rank, number, commit.ranks[rank].chain)
            name = StoreSegment(JOB, FIRST, rank, number).name
            mine.append(write_segment(job, name, segment, chunks, notes if last else b"", last=last))
        refs.append(tuple(mine))
    objects.put(manifest_name(JOB, FIRST), [Manifest(commit, None, tuple(refs)).to_bytes()])


def write_segment(
    job: Terabyte, name: str, segment: SegmentId, chunks: Sequence[tuple[int, int, int]], notes: bytes, *, last: bool
) -> SegmentRef:
    """One segment; its chunks are holes unless they are of the share that is restored."""
    path = job.store / name
    path.parent.mkdir(parents=True, exist_ok=True)
    front_bytes = front_length(len(chunks), len(notes))
    offset, entries = front_bytes, []
    with path.open("wb") as file:
        for table, row, rows in chunks:
            payload = chunk_of(job, table, row, rows) if segment.rank == job.rank else None
            num_bytes = job.layout.offsets(rows)[1]
            if payload is not None:
                file.seek(offset)
                file.write(payload)
            first = segment.rank * job.share + row
            crc = crc32c(payload) if payload is not None else 0
            entries.append((table, 0, job.dim, rows, first, first + rows - 1, offset, num_bytes, crc))
            offset += num_bytes
        front, crc = pack_front(
            segment, last=last, schema_crc=job.schema.crc, directory=np.array(entries, ENTRY), notes=notes
        )
        assert len(front) == front_bytes
        file.seek(0)
        file.write(front)
        file.truncate(offset)
    return SegmentRef(name, offset, front_bytes, crc, sum(rows for _, _, rows in chunks))


def chunk_of(job: Terabyte, table: int, row: int, rows: int) -> bytearray:
    """The bytes of a chunk of the share."""
    offsets, num_bytes = job.layout.offsets(rows)
    payload = bytearray(num_bytes)
    for offset, values in zip(offsets, job.base(job.rank, table, row, rows), strict=True):
        data = values.tobytes()
        assert offset + aligned(len(data)) <= num_bytes
        payload[offset : offset + len(data)] = data
    return payload


class Requests:
    """What is asked of a store in a folder, counted as an object store would get it."""

    def __init__(self) -> None:
        self.found: Counter[str] = Counter()
        self.bytes = 0
        self._lock = threading.Lock()
        for method in ASKED:
            setattr(FolderObjects, method, self._counted(method, getattr(FolderObjects, method)))

    def _counted(self, method: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        def ask(objects: FolderObjects, *args: Any) -> Any:
            found = plain(objects, *args)
            times = 1
            if method == "list":
                found = list(found)
                times = max(1, -(-len(found) // 1000))
            moved = sum(map(len, args[2])) if method == "read_into" else len(found) if method == "read" else 0
            with self._lock:
                self.found[ASKED[method]] += times
                self.bytes += moved
            return iter(found) if method == "list" else found

        return ask

    def of(self, act: Callable[[], Any]) -> tuple[dict[str, Any], Any]:
        """Seconds, memory and requests of a call, and its result."""
        self.found.clear()
        self.bytes, begin = 0, time.perf_counter()
        found, result = timed(act)
        row = {
            "seconds": round(time.perf_counter() - begin, 2),
            "cpu seconds": round(found["cpu_s"], 2),
            "memory, MB": round(found["memory_bytes"] / 1e6, 1),
            "requests": dict(sorted(self.found.items())),
            "bytes read": self.bytes,
        }
        return row, result


def materialize(job: Terabyte) -> dict[str, Any]:
    """(fork) Fold all markers, with the defaults of ``stream-ckpt materialize``, in one process of four threads."""
    log, objects, requests = FileLog(job.root / "log"), FolderObjects(job.store), Requests()
    lineage = Control(log).refresh()
    times: list[float] = []

    def fold() -> Materializer:
        with ThreadPoolExecutor(4) as pool:
            made = Materializer(log, objects, lambda _: open_dense(str(job.store)), pool)
            times.append(time.perf_counter())
            times.extend(time.perf_counter() for _ in made.catch_up(lineage))
            made.settle(lineage)
        return made

    row, made = requests.of(fold)
    assert made.counts.markers == job.markers
    each = [round(after - before, 2) for before, after in pairwise(times)]
    return {
        **row,
        "markers": made.counts.markers,
        "seconds of a marker": each,
        "bytes of spans": made.counts.fold_bytes,
    }


def regions_of(job: Terabyte, rank: int) -> list[Region]:
    """A rank's share of every table, to be filled."""
    found = []
    for shard in job.shards(rank):
        region = Region(shard)
        region.add(None, torch.empty(shard.rows, shard.cols))
        region.add(0, torch.empty(shard.rows))
        found.append(region)
    return found


def restore(job: Terabyte, state: str) -> dict[str, Any]:
    """(fork) Find the newest marker, plan, restore one rank's share, and compare each bit of it."""
    requests = Requests()
    prepare(state, *job.store.glob(f"segments/*/*-r{job.rank:05d}-*"), *job.store.glob("segments/*/f-*"))
    with Where(job.uri, str(job.store)).open() as opened:
        found, route = requests.of(lambda: find_marker(opened, None, Damaged(), None))
        assert (route.marker.marker, route.stored) == (job.markers + 1, route.marker)
        regions = regions_of(job, job.rank)
        shards = tuple(region.shard for region in regions)
        planned, plan = requests.of(lambda: plan_reads(route, route.schema, shards))
        del regions
        filled, regions = requests.of(lambda: _filled(route, opened, job, job.rank))
        wrong = sum(differing(job, region) for region in regions)
        hole = (job.rank + 1) % job.ranks
        try:
            _filled(route, opened, job, hole)
        except CorruptionError as error:
            refused = error.message
        else:
            raise SystemExit(f"terabyte: FAILED: rank {hole}, whose chunks are holes, was restored")
    picked = [each for piece in plan.stored for each in piece.opened]
    return {
        "find": {**found, "pieces": len(route.pieces), "segments": len(route.segments)},
        "plan": {
            **planned,
            "segments": len(picked),
            "chunks": sum(len(each.chunks) for each in picked),
            "bytes": sum(each.num_bytes for each in picked),
        },
        "restore": {**filled, "rows that differ": wrong},
        "a share of holes is refused": refused,
    }


def _filled(route: Any, opened: Any, job: Terabyte, rank: int) -> list[Region]:
    regions = regions_of(job, rank)
    fill(route, opened, regions)
    return regions


def differing(job: Terabyte, region: Region) -> int:
    """Rows of a restored shard that differ in a bit from what was sent last."""
    table, begin = region.shard.table, region.shard.row0
    weights, state = (region.wanted[each][0].numpy().view(np.int32) for each in (None, 0))
    newest = {each: job.changed(each, job.rank, table) for each in range(2, job.markers + 2)}
    wrong = 0
    for row, rows in ((row, rows) for part in job.parts() for where, row, rows in part if where == table):
        _, right, of_row = job.base(job.rank, table, row, rows)
        for ids, values, states in newest.values():
            here = (ids >= begin + row) & (ids < begin + row + rows)
            right[ids[here] - begin - row], of_row[ids[here] - begin - row] = values[here], states[here]
        place = slice(row, row + rows)
        same = (weights[place] == right.view(np.int32)).all(1) & (state[place] == of_row.view(np.int32))
        wrong += int((~same).sum())
    return wrong


def held(job: Terabyte) -> dict[str, Any]:
    """What lies in the store: objects, their bytes, and the bytes that the disk has for them."""
    found = [path.stat() for path in job.store.rglob("*") if path.is_file()]
    return {
        "objects": len(found),
        "bytes": sum(each.st_size for each in found),
        "bytes on the disk": sum(512 * each.st_blocks for each in found),
    }


def measure(job: Terabyte) -> dict[str, Any]:
    with without_fsync():
        written = apart(write_log, job)
    tell(f"log and first marker written: {written}")
    first = held(job)
    folded = apart(materialize, job)
    tell(f"folded: {folded['seconds']} s, {folded['memory, MB']} MB")
    facts = {
        "bytes of tables": job.table_bytes,
        "bytes of a share": job.table_bytes // job.ranks,
        "ranks": job.ranks,
        **written,
        "store of the first marker": first,
        "materializer": folded,
        "store": held(job),
    }
    for state in (COLD, WARM):
        facts[f"restore, {state}"] = apart(partial(restore, job), state)
        tell(f"{state}: {facts[f'restore, {state}']}")
    return facts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=at_least(2), default=1024)
    parser.add_argument("--tables", type=at_least(1), default=8)
    parser.add_argument("--rows", type=at_least(2), default=242_688_000, help="of each table, a multiple of --ranks")
    parser.add_argument("--dim", type=at_least(1), default=128)
    parser.add_argument("--markers", type=at_least(1), default=16, help="after the first one")
    parser.add_argument("--touched", type=at_least(1), default=50, help="rows a table, rank and marker")
    parser.add_argument("--out", type=Path, help="file the result as JSON")
    args = parse(parser, ranks=8, tables=3, rows=8 * 40_000, dim=16, markers=5, touched=500)
    if args.rows % args.ranks:
        parser.error(f"--rows {args.rows} is not a multiple of --ranks {args.ranks}")
    share = 4 * args.tables * (args.rows // args.ranks) * (args.dim + 1)
    sent = 600 * args.ranks * args.tables * args.touched * args.markers
    refuse_small_machine("proof", args, "a share, twice", memory=3 * share, disk=2 * share + 4 * sent)
    with scratch("terabyte") as folder:
        root = folder / "job"
        job = Terabyte(
            root, args.ranks, args.tables, args.rows, args.dim, args.markers, args.touched, rank=args.ranks // 3
        )
        facts = measure(job)
        shutil.rmtree(root)
    print(json.dumps(facts, indent=1))
    file_facts("proof", "terabyte.py", args.out, facts)
    if any(facts[f"restore, {state}"]["restore"]["rows that differ"] for state in (COLD, WARM)):
        raise SystemExit("terabyte: FAILED: the restored share differs from what was sent last")


if __name__ == "__main__":
    main()
