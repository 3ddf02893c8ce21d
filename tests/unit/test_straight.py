"""A base's chunks are read straight into the tables where they fit, and nothing of what is damaged counts as come."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.builders import table
from tests.parts import FolderObjects
from torchrec_stream_ckpt.errors import CorruptionError
from torchrec_stream_ckpt.format.manifest import SegmentRef
from torchrec_stream_ckpt.format.rows import RowLayout
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.format.segment import Chunk, SegmentId, SegmentKind, lay_out, parse_front
from torchrec_stream_ckpt.restore.apply import apply_store, read_runs
from torchrec_stream_ckpt.restore.plan import RestorePlan, intersect
from torchrec_stream_ckpt.restore.target import Target
from torchrec_stream_ckpt.store.catalog import Picked, Piece
from torchrec_stream_ckpt.util.types import MarkerId, StateSpec, TableShard

SPEC = table("t", 10, 4, "float32", StateSpec("sum", "float32", True))
SCHEMA = Schema((SPEC,))
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
        self.parts, _, _ = lay_out(segment, chunks, last=True, schema_crc=SCHEMA.crc)
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
            SCHEMA,
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
