"""Where rows land: any slices, dtypes and orders, against cells in a dictionary."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import JOB, SCHEMA
from tests.golden import make_store
from tests.parts import Manifest, Policy, Target, intersect, locate, open_dense, plan_reads, verify_marker
from tests.stores import History, choose, fold, lose_rows
from torchrec_stream_ckpt.errors import CorruptionError
from torchrec_stream_ckpt.format.proof import BLOCK_ROWS
from torchrec_stream_ckpt.format.rows import Array, RowsView
from torchrec_stream_ckpt.inner import Catalog, Plane
from torchrec_stream_ckpt.maintain.merge import merge
from torchrec_stream_ckpt.native.kernel import kernel
from torchrec_stream_ckpt.restore import apply, target
from torchrec_stream_ckpt.restore.apply import apply_store
from torchrec_stream_ckpt.restore.plan import Move
from torchrec_stream_ckpt.util.layout import FoldName, StoreSegment, manifest_name
from torchrec_stream_ckpt.util.types import MarkerId, TableShard

DIM, ROWS = 6, 40
DTYPES = {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2", "float64": "<f8", "int8": "|i1", "uint8": "|u1"}
SPLITS = ([(0, 6)], [(0, 3), (3, 3)], [(0, 2), (2, 1), (3, 3)])


def zeros(dtype: str, *shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=getattr(torch, dtype))


def raw(tensor: torch.Tensor) -> Array:
    """As numpy has it: bfloat16 as its bits."""
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def random_bits(rng: np.random.Generator, dtype: str, *shape: int) -> Array:
    """Any bits: NaNs with a payload, infinities, denormals."""
    kind = np.dtype(DTYPES[dtype])
    size = int(np.prod(shape)) * kind.itemsize
    return np.frombuffer(rng.bytes(size), kind).reshape(shape)


@dataclass
class Truth:
    """Every cell by itself: what came last."""

    shard: TableShard
    cells: dict[tuple[str, int, int], bytes] = field(default_factory=dict)

    def take(self, source: TableShard, rows: RowsView) -> None:
        for place, number in enumerate(rows.ids.tolist()):
            row = number - self.shard.row0
            for col in range(
                max(source.col0, self.shard.col0), min(source.col0 + source.cols, self.shard.col0 + self.shard.cols)
            ):
                if not 0 <= row < self.shard.rows:
                    continue
                for name, array in enumerate((rows.weights, *rows.states)):
                    if array.ndim == 2:
                        self.cells[str(name), row, col - self.shard.col0] = array[place, col - source.col0].tobytes()
                    else:
                        self.cells[str(name), row, 0] = array[place].tobytes()

    def check(self, planes: Sequence[torch.Tensor]) -> None:
        for name, plane in enumerate(planes):
            array = raw(plane)
            for row in range(self.shard.rows):
                for col in range(self.shard.cols if array.ndim == 2 else 1):
                    expected = self.cells.get((str(name), row, col), bytes(array.itemsize))
                    found = array[row, col] if array.ndim == 2 else array[row]
                    assert found.tobytes() == expected, (name, row, col)


def view(
    rng: np.random.Generator, source: TableShard, dtypes: Sequence[str], flat: Sequence[bool], ids: Sequence[int]
) -> RowsView:
    shapes = [(len(ids),) if one else (len(ids), source.cols) for one in flat]
    weights, *states = (random_bits(rng, dtype, *shape) for dtype, shape in zip(dtypes, shapes, strict=True))
    return RowsView(np.array(ids, np.int64), weights, tuple(states))


def targets_of(shard: TableShard, dtypes: Sequence[str], flat: Sequence[bool]) -> list[torch.Tensor]:
    return [
        zeros(dtype, *((shard.rows,) if one else (shard.rows, shard.cols)))
        for dtype, one in zip(dtypes, flat, strict=True)
    ]


IDS = st.sets(st.integers(0, ROWS - 1), min_size=1, max_size=ROWS).map(sorted)
RUNS = st.tuples(st.integers(0, ROWS - 1), st.integers(1, ROWS)).map(
    lambda run: list(range(run[0], min(ROWS, sum(run))))
)


@given(
    st.data(),
    st.integers(0, 2**32),
    st.sampled_from(SPLITS),
    st.sampled_from(SPLITS),
    st.integers(0, 20),
    st.integers(1, 20),
)
def test_any_cells_land_as_in_a_dictionary(
    data: st.DataObject, seed: int, old: list[tuple[int, int]], new: list[tuple[int, int]], row0: int, rows: int
) -> None:
    rng = np.random.default_rng(seed)
    col0, cols = data.draw(st.sampled_from([(0, 6), (0, 3), (3, 3), (1, 4), (5, 1)]))
    dtypes = data.draw(st.lists(st.sampled_from(sorted(DTYPES)), min_size=1, max_size=3))
    shard = TableShard(0, row0, rows, col0, cols)
    flat = [False] * len(dtypes)
    planes = targets_of(shard, dtypes, flat)
    sources = [TableShard(0, 0, ROWS, *split) for split in {*old, *new}]
    moves = [move for source in sources if (move := intersect(source, shard)) is not None]
    target = Target(shard, planes[0], tuple(planes[1:]), moves, merged=False)
    truth = Truth(shard)
    for kind in ("base", "store", "log"):
        for _ in range(data.draw(st.integers(0, 4))):
            move = data.draw(st.sampled_from(moves))
            ids = data.draw(IDS | RUNS)
            is_block = kind == "base" and data.draw(st.booleans())
            if kind == "log":
                ids = data.draw(st.permutations(ids))
            elif is_block:
                ids = range(move.row0, move.row0 + move.rows)
            rows_ = view(rng, move.source, dtypes, flat, ids)
            if is_block:
                target.put_block(move, rows_.weights, rows_.states)
            else:
                taken = target.put(move, rows_) if kind == "log" else target.put_sorted(move, rows_)
                assert taken == sum(row0 <= number < row0 + rows for number in ids)
            truth.take(move.source, rows_)
    truth.check(planes)


@given(
    st.integers(0, 2**32),
    st.lists(st.tuples(st.booleans(), IDS | RUNS), max_size=6),
    st.sampled_from(["float32", "float64", "int8", "bfloat16"]),
)
def test_states_of_one_value_a_row_land_with_their_rows(
    seed: int, batches: list[tuple[bool, list[int]]], dtype: str
) -> None:
    rng = np.random.default_rng(seed)
    shard = TableShard(0, 7, 25, 0, DIM)
    dtypes, flat = ["float16", dtype, "float32"], [False, True, False]
    planes = targets_of(shard, dtypes, flat)
    move = intersect(TableShard(0, 0, ROWS, 0, DIM), shard)
    assert move is not None
    target, truth = Target(shard, planes[0], tuple(planes[1:]), [move], merged=False), Truth(shard)
    for is_store, ids in sorted(batches, key=lambda batch: not batch[0]):
        rows = view(rng, move.source, dtypes, flat, ids)
        (target.put_sorted if is_store else target.put)(move, rows)
        truth.take(move.source, rows)
    truth.check(planes)


def test_what_comes_later_goes_over_what_came_before_and_the_marker_that_sent_it_is_noted() -> None:
    shard = TableShard(0, 0, 3 * BLOCK_ROWS, 0, 1)
    plane, sent = zeros("float32", shard.rows, 1), np.full(3, -1, np.int32)
    move = intersect(shard, shard)
    assert move is not None
    target = Target(shard, plane, (), [move], merged=False, sent=sent)

    def rows(ids: Sequence[int], value: float) -> RowsView:
        return RowsView(np.array(ids), np.full((len(ids), 1), value, np.float32), ())

    target.put_sorted(move, rows(range(shard.rows), 1))
    assert sent.tolist() == [-1, -1, -1]
    target.put_sorted(move, rows([0, 1, 2 * BLOCK_ROWS], 2), 4)
    target.put_sorted(move, rows([1, 2], 3), 7)
    target.put(move, rows([2], 4), 8)
    assert plane[:3, 0].tolist() == [2, 3, 4]
    assert (plane[3, 0], plane[2 * BLOCK_ROWS, 0]) == (1, 2)
    assert sent.tolist() == [8, -1, 4]
    target.finish("t")


@pytest.mark.parametrize("given_by", ["put", "put_sorted"])
def test_a_cell_that_never_came_is_missed(given_by: str) -> None:
    shard = TableShard(0, 10, 4, 0, 2)
    moves = [move for col in range(2) if (move := intersect(TableShard(0, 0, 20, col, 1), shard)) is not None]
    target = Target(shard, zeros("float32", 4, 2), (), moves, merged=False)
    for move, ids in zip(moves, ([10, 11, 12, 13], [9, 10, 12]), strict=True):
        getattr(target, given_by)(move, RowsView(np.array(ids), np.ones((len(ids), 1), np.float32), ()))
    with pytest.raises(CorruptionError, match="2 rows of this shard are missing from all sources") as refused:
        target.finish("t")
    assert refused.value.where == {"table": "t", "row0": 10, "col0": 0}


@pytest.mark.parametrize("merged", [False, True])
def test_an_empty_shard_wants_nothing(merged: bool) -> None:
    shard = TableShard(0, 10, 0, 0, 2)
    target = Target(shard, zeros("float32", 0, 2), (zeros("float32", 0),), [], merged=merged)
    move = Move(TableShard(0, 0, 20, 0, 2), shard, 10, 0, 0, 2)
    rows = RowsView(np.arange(8, 12), np.ones((4, 2), np.float32), (np.ones(4, np.float32),))
    if not merged:
        assert target.put(move, rows) == 0
        target.finish("t")


@given(st.integers(0, 2**32), st.lists(st.tuples(st.integers(0, 2), IDS), max_size=6))
def test_merged_states_are_the_mean_weighted_by_columns(seed: int, batches: list[tuple[int, list[int]]]) -> None:
    rng = np.random.default_rng(seed)
    shard = TableShard(0, 5, 30, 0, DIM)
    sources = [TableShard(0, 0, ROWS, *split) for split in SPLITS[2]]
    moves = [move for source in sources if (move := intersect(source, shard)) is not None]
    weights, state = zeros("float32", 30, DIM), zeros("float32", 30)
    target = Target(shard, weights, (state,), moves, merged=True)
    truth = [np.zeros(ROWS) for _ in sources]
    for source in range(3):
        values = rng.random(ROWS).astype(np.float32)
        rows = RowsView(np.arange(ROWS), random_bits(rng, "float32", ROWS, sources[source].cols), (values,))
        target.put(moves[source], rows)
        truth[source][:] = values
    for source, ids in batches:
        values = rng.random(len(ids)).astype(np.float32)
        rows = RowsView(np.array(ids), random_bits(rng, "float32", len(ids), sources[source].cols), (values,))
        target.put_sorted(moves[source], rows)
        truth[source][ids] = values
    target.finish("t")
    mean = np.zeros(30)
    for source, values_ in zip(sources, truth, strict=True):
        mean += values_[5:35] * (source.cols / DIM)
    assert state.numpy().tobytes() == mean.astype(np.float32).tobytes()


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("window_bytes", [1, 10**9], ids=["windows", "whole"])
@pytest.mark.parametrize(
    "policy", [Policy(rebase=0, compact="none"), Policy(rebase=1e-9, compact="none")], ids=["intervals", "bases"]
)
def test_threads_restore_windows_of_a_table_as_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int, window_bytes: int, policy: Policy
) -> None:
    history = History(tmp_path)
    history.generation(1, [1, 2, 3, 4, 5])
    history.generation(2, [4, 5, 6], "1:3")
    fold(tmp_path, policy)
    lose_rows(tmp_path)
    monkeypatch.setattr(apply, "WINDOW_BYTES", window_bytes)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for marker in (MarkerId(1, 5), MarkerId(2, 6)):
            assert restored(history, marker) == history.rows[marker]
    finally:
        torch.set_num_threads(before)


def restored(history: History, marker: MarkerId) -> dict[tuple[int, int], bytes]:
    """All rows at a marker, restored into four shards."""
    choice = choose(history.log, history.lineage, open_dense(str(history.root)), marker, history.objects)
    assert choice is not None
    shards = [TableShard(0, 0, 6, 0, 4), TableShard(1, 0, 3, 0, 4), TableShard(1, 3, 5, 0, 4)]
    plan = plan_reads(choice, SCHEMA, shards)
    assert not plan.reads
    planes = {shard: (zeros("float32", shard.rows, 4), zeros("float32", shard.rows)) for shard in shards}
    targets = {
        shard: Target(
            shard,
            weights,
            (state,) if shard.table else (),
            [move for move in plan.moves if move.target == shard],
            merged=False,
        )
        for shard, (weights, state) in planes.items()
    }
    assert apply_store(plan, history.objects, targets) >= 14
    rows = {}
    for shard, (weights, state) in planes.items():
        targets[shard].finish("t")
        for row in range(shard.rows):
            tail = state[row].numpy().tobytes() if shard.table else b""
            rows[shard.table, shard.row0 + row] = weights[row].numpy().tobytes() + tail
    return rows


@pytest.mark.parametrize("folds", [1, 5], ids=["the newest", "all"])
@pytest.mark.parametrize("damage", ["segment gone", "segment altered", "segment cut", "fold altered"])
def test_rows_are_read_around_damaged_folds(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, folds: int, damage: str
) -> None:
    history, newest = History(tmp_path), MarkerId(1, 6)
    history.generation(1, range(1, 7))
    fold(tmp_path, Policy(rebase=1e-9, compact="none"))  # a base at each marker but the first
    lose_rows(tmp_path)
    assert Catalog.load(history.objects, JOB).folds == {(None, MarkerId(1, marker)) for marker in range(2, 7)}
    for marker in range(7 - folds, 7):
        name = FoldName(JOB, MarkerId(1, marker), None)
        path = tmp_path / (name.name if damage == "fold altered" else name.segment_name(0))
        data = bytearray(path.read_bytes())
        data[60] ^= 1
        path.unlink()
        if damage != "segment gone":
            path.write_bytes(data[:50] if damage == "segment cut" else data)
    found = verify_marker(history.log, history.lineage, open_dense(str(tmp_path)), newest, objects=history.objects)
    assert found.reach == newest
    assert f"reading the store without {folds} damaged folds" in caplog.text
    caplog.clear()
    assert restored(history, newest) == history.rows[newest]
    assert f"reading the store without {folds} damaged folds" in caplog.text
    route = locate(history.lineage, newest, Catalog.load(history.objects, JOB))
    assert (route.stored, len(route.pieces)) == (newest, 2 if folds == 1 else 6)


def test_where_a_damaged_fold_is_all_there_is_the_log_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    history, newest = History(tmp_path), MarkerId(1, 3)
    history.generation(1, [1, 2, 3])
    fold(tmp_path, Policy(rebase=1e-9, compact="none"))
    for marker in (1, 2, 3):
        (tmp_path / StoreSegment(JOB, MarkerId(1, marker), 0, 0).name).unlink()
    for marker in (2, 3):
        (tmp_path / FoldName(JOB, MarkerId(1, marker), None).segment_name(0)).unlink()
    assert locate(history.lineage, newest, Catalog.load(history.objects, JOB)).stored is None
    assert "the store cannot provide marker 1:3; reading the log" in caplog.text
    assert "Try: stream-ckpt scrub URI --store URL --repair" in caplog.text
    choice = choose(history.log, history.lineage, open_dense(str(tmp_path)), newest, history.objects)
    assert choice is not None
    assert choice.stored is None
    assert choice.shards.keys() == {1}


def forge(history: History, damage: Callable[[bytearray], object]) -> None:
    """Alter the segment of marker 1:1, its checksums and its manifest with it."""
    objects, marker = history.objects, MarkerId(1, 1)
    name, where = StoreSegment(JOB, marker, 0, 0).name, manifest_name(JOB, marker)
    manifest = Manifest.from_bytes(objects.read(where), where)
    ((ref,),) = manifest.segments
    data = bytearray(objects.read(name))
    damage(data)
    make_store.sealed(data)
    forged = replace(ref, header_crc=int.from_bytes(data[124:128], "little"))
    for each, held in ((name, data), (where, replace(manifest, segments=((forged,),)).to_bytes())):
        objects.delete(each)
        objects.put(each, [held])


def test_a_table_that_the_schema_does_not_have_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    history = History(tmp_path)
    history.generation(1, [1])
    fold(tmp_path)
    forge(history, lambda data: make_store.put(data, "I", make_store.entry_at(1, "table"), 7))
    with pytest.raises(CorruptionError, match="of table 7, which are not in the schema"):
        restored(history, MarkerId(1, 1))
    cover = Catalog.load(history.objects, JOB).cover(history.lineage.chain(MarkerId(1, 1)))
    with ThreadPoolExecutor(1) as pool, pytest.raises(CorruptionError, match="of table 7, which are not"):
        merge(history.objects, history.lineage, cover, pool)


def test_a_shard_outside_of_its_table_is_refused_where_the_log_goes_on(tmp_path: Path) -> None:
    history = History(tmp_path)
    history.generation(1, [1, 2])
    fold(tmp_path, upto=MarkerId(1, 1))
    forge(history, lambda data: data.__setitem__(slice(None), data.replace(b'"table":1}', b'"table":9}')))
    with pytest.raises(CorruptionError, match=r"the store lists a rank's shard .* outside its table"):
        choose(history.log, history.lineage, open_dense(str(tmp_path)), MarkerId(1, 2), history.objects)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [3, 33, 500])
def test_rows_that_are_put_by_number_land_alike_with_and_without_the_kernel(
    dtype: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(count)
    places = rng.integers(0, ROWS, count)  # twice, too: the later one stays
    values = random_bits(rng, dtype, count, DIM)
    for cut in (slice(0, DIM), slice(2, 5)):
        for packed in (values, values[::-1]):
            found = []
            for native in (kernel(), None):
                monkeypatch.setattr(target, "kernel", lambda native=native: native)
                tensors = [zeros(dtype, ROWS, DIM), zeros(dtype, ROWS, 2 * DIM)[:, 3 : 3 + DIM], zeros(dtype, ROWS)]
                for tensor in tensors[:2]:
                    Plane(tensor).put(places, packed[:, cut], cut.start)
                Plane(tensors[2]).put(places, packed[:, 0])
                found.append([raw(tensor.contiguous()).tobytes() for tensor in tensors])
                for place in (ROWS, 2**40):
                    with pytest.raises(IndexError):
                        Plane(tensors[0]).put(np.full(count, place), packed)
            assert found[0] == found[1]


# Rows of a marker into a live table of another shape: against a target of the marker's own shape, copied by hand.


MIXED, FLAT = ("float16", "float32", "float32", "bfloat16"), (False, True, False, False)


def live(rng: np.random.Generator, rows: int, cols: int) -> list[torch.Tensor]:
    """What a live model holds, any bits."""
    tensors = targets_of(TableShard(0, 0, rows, 0, cols), MIXED, FLAT)
    for tensor, dtype in zip(tensors, MIXED, strict=True):
        raw(tensor)[...] = random_bits(rng, dtype, *tensor.shape).view(raw(tensor).dtype)
    return tensors


def moves_into(shard: TableShard, splits: list[tuple[int, int]]) -> list[Move]:
    sources = [TableShard(0, 0, ROWS, *split) for split in splits]
    return [move for source in sources if (move := intersect(source, shard)) is not None]


@given(
    st.data(),
    st.integers(0, 2**32),
    st.sampled_from(SPLITS),
    st.sampled_from(SPLITS),
    st.lists(st.tuples(st.sampled_from(["base", "log", "store"]), IDS | RUNS), max_size=6),
)
def test_rows_land_where_the_map_says_and_no_other_cell_changes(
    data: st.DataObject,
    seed: int,
    old: list[tuple[int, int]],
    new: list[tuple[int, int]],
    batches: list[tuple[str, list[int]]],
) -> None:
    rng = np.random.default_rng(seed)
    shard = TableShard(0, 3, 30, 0, data.draw(st.sampled_from([DIM, 4, 1])))
    height = data.draw(st.integers(1, 45))
    count = data.draw(st.integers(0, min(height, shard.rows)))
    numbers = np.full(shard.rows, -1, np.int64)
    kept = rng.permutation(shard.rows)[:count]
    numbers[kept] = rng.permutation(height)[:count]
    moves = moves_into(shard, [*old, *new])
    there, plain = live(rng, height, 8), targets_of(shard, MIXED, FLAT)
    views = [tensor[:, : shard.cols] if tensor.dim() == 2 else tensor for tensor in there]
    for mine, seen in zip(plain, views, strict=True):
        raw(mine)[kept] = raw(seen)[numbers[kept]]
    expected = [raw(tensor).copy() for tensor in there]
    targets = (
        Target(shard, plain[0], plain[1:], moves, merged=False),
        Target(shard, views[0], [*views[1:3], None], moves, merged=False, numbers=numbers),
    )
    for kind, ids in sorted(batches, key=lambda batch: ("base", "store", "log").index(batch[0])):
        move = data.draw(st.sampled_from(moves))
        rows = view(rng, move.source, MIXED, FLAT, ids)
        for each in targets:
            (each.put if kind == "log" else each.put_sorted)(move, rows)
    for section, (mine, array) in enumerate(zip(plain[:3], expected, strict=False)):
        part = array[:, : shard.cols] if array.ndim == 2 else array
        part[numbers[kept]] = raw(mine)[kept]
        assert raw(there[section]).tobytes() == array.tobytes(), section
    assert raw(there[3]).tobytes() == expected[3].tobytes(), "a state that is not wanted"


def test_only_rows_that_are_kept_have_to_come() -> None:
    shard = TableShard(0, 10, 4, 0, 2)
    (move,) = moves_into(shard, [(0, 2)])
    for missing, numbers in ((0, [1, -1, 0, -1]), (1, [1, 2, 0, -1])):
        target = Target(shard, torch.zeros(5, 2), (), [move], merged=False, numbers=np.array(numbers))
        target.put(move, RowsView(np.array([10, 12]), np.ones((2, 2), np.float32), ()))
        if missing:
            with pytest.raises(CorruptionError, match="1 rows of this shard are missing from all sources"):
                target.finish("t")
        else:
            target.finish("t")


@pytest.mark.parametrize("there", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("here", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("numbers", [None, np.array([2, -1, 0])])
def test_weights_of_another_dtype_are_rounded_as_torch_does_it(
    there: str, here: str, numbers: np.ndarray | None
) -> None:
    shard = TableShard(0, 0, 3, 0, 2)
    (move,) = moves_into(shard, [(0, 2)])
    values = torch.tensor([[1 / 3, 1e-7], [70000.0, -0.0], [2.0**-24, 5.5]]).to(getattr(torch, there))
    weights = torch.full((3, 2), 9.0, dtype=getattr(torch, here))
    expected = weights.clone()
    target = Target(shard, weights, (), [move], merged=False, numbers=numbers, dtype=there)
    bits = raw(values).view(np.uint16) if there == "bfloat16" else raw(values)
    assert not target.takes_run(move, 0, 3)
    target.put(move, RowsView(np.arange(3), bits, ()))
    target.finish("t")
    chosen = [0, 1, 2] if numbers is None else [0, 2]
    for row in chosen:
        expected[row if numbers is None else numbers[row]] = values[row].to(expected.dtype)
    assert torch.equal(weights.view(torch.uint8), expected.view(torch.uint8))


def test_a_merged_state_lands_where_the_map_says() -> None:
    shard = TableShard(0, 0, 3, 0, 4)
    moves = moves_into(shard, [(0, 1), (1, 3)])
    state = torch.full((4,), 7.0)
    target = Target(shard, torch.zeros(4, 4), (state,), moves, merged=True, numbers=np.array([3, -1, 0]))
    for move, values in zip(moves, ([4.0, 0.0, 8.0], [8.0, 0.0, 0.0]), strict=True):
        rows = RowsView(np.arange(3), np.ones((3, move.cols), np.float32), (np.array(values, np.float32),))
        target.put(move, rows)
    target.finish("t")
    assert state.tolist() == [2.0, 7.0, 7.0, 7.0]


def test_a_state_that_is_not_wanted_keeps_a_chunk_from_being_read_straight() -> None:
    shard = TableShard(0, 0, 3, 0, 2)
    (move,) = moves_into(shard, [(0, 2)])
    weights, state = torch.zeros(3, 2), torch.zeros(3)
    assert Target(shard, weights, (state,), [move], merged=False).takes_run(move, 0, 3)
    assert not Target(shard, weights, (None,), [move], merged=False).takes_run(move, 0, 3)
    assert not Target(shard, weights, (state,), [move], merged=False, numbers=np.arange(3)).takes_run(move, 0, 3)
