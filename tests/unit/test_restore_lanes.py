"""Restores from the store by several threads: each row is its newest version, whatever the store and its damage."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from tests import builders
from tests.parts import (
    FileLog,
    FolderObjects,
    Materializer,
    Picked,
    Piece,
    Policy,
    RestorePlan,
    SegmentId,
    SegmentKind,
    SegmentRef,
    Target,
    fold,
    intersect,
    lay_out,
    locate,
    merge,
    open_dense,
    parse_front,
    plan_reads,
    reader,
    segment,
)
from tests.sampled import sampled
from tests.stores import HeldObjects
from tests.synthetic import Image, Job, images_of_all
from torchrec_stream_ckpt.errors import CorruptionError, StoreUnavailableError
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.format.proof import BLOCK_ROWS
from torchrec_stream_ckpt.format.rows import RowLayout
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.format.segment import Chunk
from torchrec_stream_ckpt.inner import Catalog, Control, Route
from torchrec_stream_ckpt.proofs.seen_marks import SeenMarks, blocks_of
from torchrec_stream_ckpt.restore import apply
from torchrec_stream_ckpt.restore.apply import apply_log, apply_store, read_runs
from torchrec_stream_ckpt.util.types import MarkerId, StateSpec, TableShard, TableSpec

ROWWISE, FULL = StateSpec("sum", "float32", True), StateSpec("exp_avg", "float16", False)
SCHEMA = Schema(
    (
        builders.table(
            "t_bits", 70, 4, "bfloat16", StateSpec("count", "int64", True), StateSpec("mask", "uint8", False)
        ),
        builders.table("t_plain", 200, 4),
        builders.table("t_rowwise", 150, 8, "float32", ROWWISE),
        builders.table("t_tiny", 1, 2),
        builders.table("t_wide", 90, 8, "float16", FULL, StateSpec("half", "bfloat16", True)),
    )
)
INTERVALS = Policy(rebase=0, compact="none")
POLICIES = (INTERVALS, Policy(rebase=0.5, compact="none"), Policy(rebase=0, compact="span2"), Policy(rebase=1.0))
UNTOUCHED = 0xAB


class Into(HeldObjects):
    """Objects that are read to where they are wanted, as those of a folder."""

    def read_into(self, name: str, begin: int, buffers: Sequence[memoryview]) -> None:
        for buffer in buffers:
            buffer[:] = self.read(name, begin, begin + len(buffer))
            begin += len(buffer)


class Asked(HeldObjects):
    """Calls something before chunks are read."""

    def __init__(self, held: Mapping[str, bytes], before: Callable[[], object]) -> None:
        super().__init__(held)
        self._before = before

    def read(self, name: str, begin: int = 0, end: int | None = None) -> memoryview:
        if begin:
            self._before()
        return super().read(name, begin, end)


@dataclass
class SentJob(Job):
    """Knows which rows were sent for which marker."""

    sent: list[tuple[MarkerId, TableShard, np.ndarray]] = field(default_factory=list)

    def note(self, shard: TableShard, arrays: Sequence[np.ndarray]) -> None:
        self.sent.append((MarkerId(self.generation, self.marker + 1), shard, arrays[0]))


@dataclass
class Live:
    """A shard of a model: its tensors, and where they have a marker's rows, if these have other numbers there."""

    shard: TableShard
    numbers: np.ndarray | None
    spec: TableSpec

    def __post_init__(self) -> None:
        spec, rows, cols = self.spec, self.shard.rows, self.shard.cols
        shapes = [(spec.dtype, False), *((state.dtype, state.per_row) for state in spec.states)]
        self.planes = [
            torch.empty((rows,) if per_row else (rows, cols), dtype=getattr(torch, dtype)) for dtype, per_row in shapes
        ]
        self.clear()

    def clear(self) -> None:
        for plane in self.planes:
            plane.view(torch.uint8).fill_(UNTOUCHED)

    def target(self, plan: RestorePlan, seen: SeenMarks) -> Target:
        moves = [move for move in plan.moves if move.target == self.shard]
        weights, *states = self.planes
        sent = seen.begin(self.shard, plan.based_on)
        return Target(self.shard, weights, states, moves, merged=False, sent=sent, numbers=self.numbers)

    def check(self, image: Image) -> None:
        """Every bit is the image's, and rows that no row of the marker comes to are as they were."""
        shard, states = self.shard, self.spec.states
        numbers = self.numbers if self.numbers is not None else np.arange(shard.rows)
        for section, plane in enumerate(self.planes):
            if section and states[section - 1].per_row:
                cells = image.arrays[shard.table, section, shard.col0, shard.cols]
            else:
                cells = image.arrays[shard.table, section][:, shard.col0 : shard.col0 + shard.cols]
            cells = cells[shard.row0 : shard.row0 + shard.rows]
            assert cells[..., -1].all(), "somebody has sent it"
            expected = np.full((shard.rows, plane[0].numel() * plane.itemsize), UNTOUCHED, np.uint8)
            expected[numbers[numbers >= 0]] = cells[..., :-1].reshape(shard.rows, -1)[numbers >= 0]
            found = plane.reshape(shard.rows, -1).view(torch.uint8).numpy()
            assert np.array_equal(found, expected), (shard, section, np.flatnonzero((found != expected).any(1)))


def lives(job: Job, marker: MarkerId, rng: np.random.Generator) -> list[Live]:
    """The shards of some rank: of all tables, cut at random, and some with an id map."""
    found = []
    for table, spec in enumerate(SCHEMA.tables):
        parts = job.splits[marker.generation][table] if spec.has_row_state else int(rng.integers(1, 3))
        edges = sorted({0, spec.rows, *rng.integers(0, spec.rows + 1, rng.integers(0, 3)).tolist()})
        for (row0, end), part in ((rows, part) for rows in pairwise(edges) for part in range(parts)):
            cols, rows = spec.dim // parts, end - row0
            numbers = np.where(rng.random(rows) < 0.8, rng.permutation(rows), -1) if rng.random() < 0.3 else None
            found.append(Live(TableShard(table, row0, rows, part * cols, cols), numbers, spec))
    return [found[place] for place in rng.permutation(len(found))]


def random_job(root: Path, rng: np.random.Generator) -> SentJob:
    """Three generations on other ranks, columns and markers."""
    job, markers = SentJob(root, seed=int(rng.integers(1000)), schema=SCHEMA), list[MarkerId]()
    for _ in range(3):
        parent = markers[rng.integers(len(markers))] if markers else None
        splits = rng.integers(1, 3, len(SCHEMA.tables))
        if parent is not None:
            before = np.array(job.splits[parent.generation])
            splits = np.where(rng.random(len(splits)) < 0.3, splits, before)
            cut_anew = np.flatnonzero(splits != before).tolist()
            # Only row-wise state makes a trainer send a table again.
            swept = [table for table in cut_anew if SCHEMA.tables[table].has_row_state or rng.random() < 0.3]
        job.begin(
            parent, world=int(rng.integers(1, 4)), splits=splits.tolist(), swept=swept if parent is not None else None
        )
        for _ in range(rng.integers(2, 5)):
            for _ in range(rng.integers(1, 3)):
                job.touch(int(rng.integers(1, 4)))
            markers.append(job.commit().id)
    return job


def stored(job: Job, policy: Policy = INTERVALS) -> Into:
    """Its log, folded."""
    objects = Into({})
    with ThreadPoolExecutor(2) as pool:
        materializer = Materializer(job.log, objects, lambda _: open_dense(str(job.root)), pool, policy)
        list(materializer.catch_up(lineage_of(job)))
    return objects


def lineage_of(job: Job) -> Lineage:
    return Control(FileLog(job.root)).refresh()


def restore(
    job: Job, marker: MarkerId, objects: HeldObjects, shards: Sequence[Live]
) -> tuple[Route, SeenMarks, Mapping[str, CorruptionError]]:
    """As a job does: once more around each segment that turns out to be damaged, into the same tensors."""
    damaged, lineage = dict[str, CorruptionError](), lineage_of(job)
    while True:
        route = locate(lineage, marker, Catalog.of_job(objects, lineage), damaged=damaged).complete(job.log)
        plan = plan_reads(route, route.schema, [each.shard for each in shards])
        seen = SeenMarks(plan.path)
        targets = {each.shard: each.target(plan, seen) for each in shards}
        try:
            if plan.stored:
                apply_store(plan, objects, targets)
            apply_log(plan, job.log, targets, seen)
            for shard, target in targets.items():
                target.finish(plan.schema.tables[shard.table].name)
            return route, seen, damaged
        except CorruptionError as error:
            assert not still_writing()
            name = route.segment_of(error)
            assert name is not None
            assert name not in damaged
            damaged[name] = error


def still_writing() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name.startswith(("stream-ckpt-re", "stream-ckpt-pl"))]


def check_sent(job: SentJob, route: Route, seen: SeenMarks, shard: TableShard, *, exactly: bool) -> None:
    """What is known as the newest marker that sent a row of each block is that one, or after a fold perhaps a newer."""
    (first, last), chain = blocks_of(shard), list(route.path.chain)
    newest = np.full(last - first, -1)
    for marker, source, ids in job.sent:
        ids = ids[(ids >= shard.row0) & (ids < shard.row0 + shard.rows)]
        overlap = source.col0 < shard.col0 + shard.cols and shard.col0 < source.col0 + source.cols
        counts = source.table == shard.table and marker.generation >= route.bases.get(shard.table, 0)
        if overlap and counts and marker in chain:
            newest[ids // BLOCK_ROWS - first] = np.maximum(newest[ids // BLOCK_ROWS - first], chain.index(marker))
    found = seen.sent[shard]
    assert (found == newest).all() if exactly else (found >= newest).all()


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets how many torch has; afterwards it has as many as before."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("seed", range(sampled(24, 6)))
def test_every_marker_of_random_stores_is_what_all_its_frames_in_their_order_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: Callable[[int], None], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    for module in (fold, merge):
        monkeypatch.setattr(module, "SEGMENT_BYTES", (2**27, 3000)[seed % 2])
    monkeypatch.setattr(segment, "CHUNK_BYTES", int(rng.choice([1500, 4000])))
    monkeypatch.setattr(reader, "RANGE_BYTES", int(rng.choice([1, 5000, 2**24])))
    monkeypatch.setattr(apply, "WINDOW_BYTES", int(rng.choice([1, 2**28])))
    job, policy = random_job(tmp_path / "log", rng), POLICIES[seed % len(POLICIES)]
    into, read_around = stored(job, policy), 0
    for commit, image in images_of_all(job.log, lineage_of(job)):
        shards = lives(job, commit.id, rng)
        threads(int(rng.integers(1, 6)))
        objects = into if rng.random() < 0.7 else HeldObjects(into.held)
        route, seen, damaged = restore(job, commit.id, objects, shards)
        assert (route.stored, dict(damaged)) == (commit.id, {})
        for each in shards:
            each.check(image)
            check_sent(job, route, seen, each.shard, exactly=policy == INTERVALS)
        picked = route.segments[rng.integers(len(route.segments))]
        held = type(objects)(into.held)
        if len(picked.chunks):
            at = int(rng.choice(picked.entries["offset"]))
            data = bytearray(held.held[picked.ref.name])
            data[at] ^= 1
            held.held[picked.ref.name] = bytes(data)
        for each in shards:
            each.clear()
        _, _, damaged = restore(job, commit.id, held, shards)
        read_around += bool(damaged)
        for each in shards:
            each.check(image)
    assert read_around


@pytest.mark.parametrize("objects", [Into, HeldObjects])
def test_a_row_that_several_parts_of_the_first_interval_have_is_that_of_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, objects: type[HeldObjects]
) -> None:
    """Only the second part is a run, which could be read straight to its place, and the third one goes over it."""
    monkeypatch.setattr(fold, "SEGMENT_BYTES", 1)
    schema = Schema((builders.table("t", 40, 4),))
    job = Job(tmp_path / "log", world=1, schema=schema)
    job.begin(swept=())
    whole = TableShard(0, 0, 40, 0, 4)
    for ids in (range(0, 40, 3), range(40), range(5, 9), range(6, 30, 2)):
        job.put_rows(job.streams[0], whole, np.array(ids))
    job.flush()
    marker = job.commit().id
    store = stored(job)
    assert len(list(store.list("segments/"))) == 5, "the last one has the notes"
    live = Live(whole, None, schema.tables[0])
    restore(job, marker, objects(store.held), [live])
    ((_, image),) = images_of_all(job.log, lineage_of(job))
    live.check(image)


@pytest.mark.parametrize("error", [StoreUnavailableError("it is away"), KeyboardInterrupt()], ids=["away", "interrupt"])
def test_when_one_lane_fails_none_writes_on_and_the_next_restore_is_whole(
    tmp_path: Path, threads: Callable[[int], None], error: BaseException
) -> None:
    rng = np.random.default_rng(5)
    job = random_job(tmp_path / "log", rng)
    *_, (commit, image) = images_of_all(job.log, lineage_of(job))
    reads = iter(range(10**6))

    def fail() -> None:
        if next(reads) == 4:
            raise error

    shards, asked = lives(job, commit.id, rng), Asked(stored(job).held, fail)
    threads(3)
    with pytest.raises(type(error)):
        restore(job, commit.id, asked, shards)
    assert not still_writing()
    assert torch.get_num_threads() == 3
    restore(job, commit.id, asked, shards)
    for each in shards:
        each.check(image)


def test_restores_at_once_leave_torch_as_many_threads_as_it_had(tmp_path: Path, threads: Callable[[int], None]) -> None:
    """The second one begins while the first has one thread an operation, and ends after it."""
    rng = np.random.default_rng(6)
    job = random_job(tmp_path / "log", rng)
    *_, (commit, image) = images_of_all(job.log, lineage_of(job))
    held, shards = stored(job).held, [lives(job, commit.id, rng) for _ in range(2)]
    first, second, over = (threading.Event() for _ in range(3))

    def run(number: int, inside: threading.Event, until: threading.Event) -> None:
        def meet() -> None:
            inside.set()
            assert until.wait(600)

        restore(job, commit.id, Asked(held, meet), shards[number])

    threads(3)
    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(run, 0, first, second)
        assert first.wait(600)
        two = pool.submit(run, 1, second, over)
        one.result()
        over.set()
        two.result()
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(torch.get_num_threads).result() == 3
    for each in (*shards[0], *shards[1]):
        each.check(image)


def test_a_shard_that_is_next_to_nothing_beside_others_has_a_lane() -> None:
    shards = (TableShard(0, 0, 2**60, 0, 1), TableShard(0, 2**60, 1, 0, 1))
    plan = RestorePlan(MarkerId(1, 1), 0, 1, SCHEMA, shards, (), frozenset())
    lanes = apply.split_lanes(plan, 2)
    assert sum(window.rows for lane in lanes for window in lane) == 2**60 + 1


# A base's chunks are read straight into the tables where they fit, and nothing of what is damaged counts as come.


SPEC = builders.table("t", 10, 4, "float32", StateSpec("sum", "float32", True))
ONE_TABLE = Schema((SPEC,))
NAME = "segments/x.seg"


def payload(ids: list[int], weights: np.ndarray, sums: np.ndarray) -> bytes:
    offsets, length = RowLayout.of(SPEC, SPEC.dim).offsets(len(ids))
    data = bytearray(length)
    for offset, section in zip(offsets, (np.array(ids), weights, sums), strict=True):
        data[offset : offset + section.nbytes] = section.tobytes()
    return bytes(data)


class Base:
    """A store in a folder with one segment of whole rows, and tables to restore them into."""

    def __init__(
        self, folder: Path, runs: list[list[int]], targets: list[TableShard], ids_within: list[int] | None = None
    ) -> None:
        rng = np.random.default_rng(0)
        self.weights, self.sums = rng.random((10, 4), np.float32), rng.random(10, np.float32)
        chunks = [
            Chunk(0, 0, 4, np.array(ids), payload(ids_within or ids, self.weights[ids], self.sums[ids])) for ids in runs
        ]
        segment = SegmentId(SegmentKind.FOLD, b"j" * 16, MarkerId(1, 1), 0, 0)
        self.parts, _, _ = lay_out(segment, chunks, last=True, schema_crc=ONE_TABLE.crc)
        self.objects = FolderObjects(folder)
        self.objects.put(NAME, self.parts)
        self.path = folder / NAME
        self.shards = targets
        self.planes = {shard: (torch.full((shard.rows, 4), -1.0), torch.full((shard.rows,), -1.0)) for shard in targets}

    def plan(self) -> RestorePlan:
        source = TableShard(0, 0, 10, 0, 4)
        moves = tuple(move for shard in self.shards if (move := intersect(source, shard)) is not None)
        self.targets = {
            shard: Target(shard, weights, (sums,), [move for move in moves if move.target == shard], merged=False)
            for shard, (weights, sums) in self.planes.items()
        }
        front = parse_front(b"".join(self.parts), NAME)
        ref = SegmentRef(NAME, front.num_bytes, front.front_bytes, front.header_crc, front.rows)
        picked = Picked(ref, front, np.arange(len(front.directory)))
        return RestorePlan(
            MarkerId(1, 1),
            0,
            1,
            ONE_TABLE,
            tuple(self.shards),
            (),
            frozenset(),
            (Piece(None, MarkerId(1, 1), (ref,), 0, (picked,)),),
            moves,
        )

    def read(self) -> tuple[int, list[np.void]]:
        """What was read straight, and the chunks that are left."""
        plan = self.plan()
        rows, rest = read_runs(plan, self.objects, self.targets)
        return rows, [entry for piece in rest for picked in piece.opened for entry in picked.entries]


def test_runs_land_in_place_and_are_whole(tmp_path: Path) -> None:
    base = Base(tmp_path, [[0, 1, 2, 3], [4, 5, 6, 7, 8, 9]], [TableShard(0, 0, 10, 0, 4)])
    assert base.read() == (10, [])
    ((weights, sums),) = base.planes.values()
    assert torch.equal(weights, torch.from_numpy(base.weights))
    assert torch.equal(sums, torch.from_numpy(base.sums))
    base.targets[base.shards[0]].finish("t")


def test_what_does_not_lie_side_by_side_is_left(tmp_path: Path) -> None:
    halves = [TableShard(0, 0, 5, 0, 4), TableShard(0, 5, 5, 0, 4)]
    base = Base(tmp_path, [[0, 1, 3], [4, 5], [6, 7], [8]], halves)
    rows, left = base.read()
    assert rows == 3
    assert [(int(entry["first"]), int(entry["last"])) for entry in left] == [(0, 3), (4, 5)]
    weights, _ = base.planes[halves[1]]
    assert torch.equal(weights[1:4], torch.from_numpy(base.weights[6:9]))
    assert torch.equal(weights[[0, 4]], torch.full((2, 4), -1.0))


class _Reads(FolderObjects):
    """Counts the bytes of chunks that are read by way of a buffer."""

    num_bytes = 0

    def read(self, name: str, begin: int = 0, end: int | None = None) -> memoryview:
        data = super().read(name, begin, end)
        self.num_bytes += len(data)
        return data


def test_what_was_read_straight_is_not_read_again_with_the_rest_of_its_segment(tmp_path: Path) -> None:
    base = Base(tmp_path, [[0, 1, 3], list(range(4, 10))], [TableShard(0, 0, 10, 0, 4)])
    objects, plan, there = _Reads(tmp_path), base.plan(), [0, 1, *range(3, 10)]
    assert apply_store(plan, objects, base.targets) == len(there)
    ((weights, sums),) = base.planes.values()
    assert torch.equal(weights[there], torch.from_numpy(base.weights[there]))
    assert torch.equal(sums[there], torch.from_numpy(base.sums[there]))
    assert objects.num_bytes == plan.stored[0].opened[0].front.directory["num_bytes"][0]


def test_columns_of_a_wider_table_are_left(tmp_path: Path) -> None:
    base = Base(tmp_path, [list(range(10))], [TableShard(0, 0, 10, 0, 2)])
    base.planes = {shard: (torch.zeros(10, 2), torch.zeros(10)) for shard in base.shards}
    rows, left = base.read()
    assert (rows, len(left)) == (0, 1)


@pytest.mark.parametrize("back", [1, 60, 200], ids=["padding", "states", "weights"])
def test_a_flipped_byte_is_caught(tmp_path: Path, back: int) -> None:
    base = Base(tmp_path, [list(range(10))], [TableShard(0, 0, 10, 0, 4)])
    data = bytearray(base.path.read_bytes())
    data[-back] ^= 1
    base.path.write_bytes(data)
    with pytest.raises(CorruptionError, match="checksum does not match"):
        base.read()
    with pytest.raises(CorruptionError, match="10 rows of this shard are missing from all sources"):
        base.targets[base.shards[0]].finish("t")


def test_ids_that_are_not_the_directory_s_are_caught(tmp_path: Path) -> None:
    """Their checksum is right: whoever wrote the segment has told the directory something else."""
    base = Base(tmp_path, [[0, 1, 2]], [TableShard(0, 0, 10, 0, 4)], ids_within=[0, 2, 1])
    with pytest.raises(CorruptionError, match="ids differ from its directory entry"):
        base.read()
    with pytest.raises(CorruptionError, match="10 rows of this shard are missing from all sources"):
        base.targets[base.shards[0]].finish("t")
