"""HEAD holds what its marker says, bit for bit, or is not used; whoever writes it may die or find no room."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.builders import JOB, OTHER_JOB, digest_files, trim
from tests.evolved import EvolvingJob
from tests.parts import (
    FileLog,
    GcRules,
    HeadWriter,
    Materializer,
    Policy,
    ProofRule,
    Retention,
    WindowCheck,
    collect,
    decode_chunk,
    locate,
    open_dense,
    read_chunks,
)
from tests.sampled import sampled
from tests.stores import choose
from tests.synthetic import PLAIN, ROWWISE, SCHEMA, WIDE, Image, image_of_log
from tests.unit.test_proof_checker import ROUND
from tests.unit.test_proof_checker import SCHEMA as PROVED
from tests.unit.test_proof_format import lose_a_row
from tests.unit.warm_head import Warm, counted_builds, image_of_head, whole
from torchrec_stream_ckpt.errors import CorruptionError
from torchrec_stream_ckpt.find.route import warm
from torchrec_stream_ckpt.format import head as head_format
from torchrec_stream_ckpt.format.head import HEAD_FILE, HeadState, SliceLayout, column_slices, head_slice_name
from torchrec_stream_ckpt.format.proof import POSITIONS
from torchrec_stream_ckpt.format.rows import RowsView
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.inner import Catalog, Control, open_store
from torchrec_stream_ckpt.maintain import head as head_writer
from torchrec_stream_ckpt.proofs.window import check_head
from torchrec_stream_ckpt.store.head import Head, HeadDamagedError
from torchrec_stream_ckpt.util.layout import (
    DATA_DIR,
    dense_name,
)
from torchrec_stream_ckpt.util.types import MarkerId, TableShard

ALWAYS = Policy(rebase=1e-9, compact="none")


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as threads:
        yield threads


@pytest.fixture(params=[100, 2**20], ids=["small blocks", "blocks"])
def warmed(
    request: pytest.FixtureRequest, tmp_path: Path, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> Warm:
    monkeypatch.setattr(head_format, "BLOCK_BYTES", request.param)
    return Warm(tmp_path, pool)


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry each time that HEAD is built anew."""
    return counted_builds(monkeypatch)


def test_it_follows_each_marker_in_place(warmed: Warm, built: list[int]) -> None:
    warmed.job.begin()
    for marker in range(1, 6):
        warmed.job.touch()
        warmed.job.commit()
        warmed.follow()
        warmed.check(MarkerId(1, marker))
    assert len(built) == 1


@pytest.mark.parametrize(
    ("first", "count", "more", "builds"),
    [
        pytest.param(2, 3, {"parent": MarkerId(1, 2), "world": 3}, 1, id="several markers, a new generation"),
        pytest.param(2, 1, {"parent": MarkerId(1, 2), "swept": [ROWWISE]}, 1, id="a table that was sent whole again"),
        pytest.param(3, 1, {"parent": MarkerId(1, 1)}, 2, id="a branch, which is built anew"),
    ],
)
def test_it_goes_on_in_place_unless_the_history_is_another_one(
    warmed: Warm, built: list[int], first: int, count: int, more: dict[str, Any], builds: int
) -> None:
    warmed.markers(first)
    warmed.follow()
    warmed.markers(count, **more)
    warmed.follow()
    warmed.check(MarkerId(2, count))
    assert len(built) == builds


def test_another_column_split_is_built_anew(warmed: Warm, built: list[int]) -> None:
    """Tables without row-wise state are not sent again for it: their rows come under two splits."""
    warmed.markers(2)
    warmed.follow()
    splits = [0, 0, 0]
    splits[PLAIN], splits[ROWWISE], splits[WIDE] = 2, 4, 2
    warmed.markers(2, parent=MarkerId(1, 2), splits=splits, swept=[ROWWISE])
    warmed.follow()
    warmed.check(MarkerId(2, 2))
    with contextlib.closing(whole(warmed.head())) as head:
        assert [sum(each.table == table for each in head.state.slices) for table in range(3)] == [2, 4, 2]
    assert not warmed.path(head_slice_name(ROWWISE, 8)).exists()
    assert len(built) == 2
    warmed.markers(1, parent=MarkerId(2, 2), splits=[1, 4, 1])
    warmed.follow()
    warmed.check(MarkerId(3, 1))
    assert len(built) == 3
    assert len(list(warmed.path("").glob("t*"))) == 6


@pytest.mark.parametrize("seed", range(sampled(4, 2)))
def test_any_history_leads_to_what_its_newest_marker_says(
    tmp_path: Path, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(head_format, "BLOCK_BYTES", 64)
    warmed, random = Warm(tmp_path, pool, Policy(rebase=0.5, compact="none")), np.random.default_rng(seed)
    warmed.markers(1)
    markers = [MarkerId(1, 1)]
    for _ in range(12):
        if random.random() < 0.4:
            parent = markers[int(random.integers(len(markers)))]
            splits = [int(random.choice([1, 2])), warmed.job.splits[parent.generation][ROWWISE], 1]
            swept = [ROWWISE] if random.random() < 0.3 else []
            if swept:
                splits[ROWWISE] = int(random.choice([1, 2, 4]))
            warmed.job.begin(parent, world=int(random.integers(1, 4)), swept=swept, splits=splits)
        warmed.job.touch(int(random.integers(1, 5)))
        markers.append(warmed.job.commit().id)
        if random.random() < 0.7:
            warmed.follow()
            warmed.check(markers[-1])


@pytest.mark.parametrize(
    "policy", [Policy(rebase=1e-9, compact="none"), Policy(rebase=0, compact="span16")], ids=["bases", "spans"]
)
def test_folds_of_the_store_lead_to_the_same_rows(tmp_path: Path, pool: ThreadPoolExecutor, policy: Policy) -> None:
    warmed = Warm(tmp_path, pool, policy)
    warmed.markers(1)
    warmed.follow()
    warmed.job.touch()
    for _ in range(17):
        warmed.job.commit()
        warmed.job.touch(1)
    warmed.follow()
    warmed.check(MarkerId(1, 18))


def test_it_serves_its_own_path_and_its_own_log_only(warmed: Warm) -> None:
    warmed.markers(3)
    warmed.follow()
    warmed.markers(1, parent=MarkerId(1, 1))
    with contextlib.closing(whole(warmed.head())) as head:
        state = head.state
    lineage = warmed.lineage
    assert warm(state, lineage, MarkerId(1, 3)) is state
    assert warm(state, lineage, MarkerId(1, 2)) is None  # older than HEAD
    assert warm(state, lineage, MarkerId(2, 1)) is None  # another branch
    other = Schema((*SCHEMA.tables[:2], replace(SCHEMA.tables[2], states=())))
    lineage.claims[1] = replace(lineage.claims[1], schema=other)
    assert warm(state, lineage, MarkerId(1, 3)) is None
    lineage = warmed.lineage
    lineage.commits[MarkerId(1, 3)] = warmed.job.commit()
    assert warm(state, lineage, MarkerId(1, 3)) is None  # the log was put back and went another way


def test_what_is_behind_it_comes_from_the_store(warmed: Warm) -> None:
    warmed.markers(2)
    warmed.follow()
    with contextlib.closing(whole(warmed.head())) as head:
        state = head.state
    warmed.job.touch()
    third = warmed.job.commit()
    route = locate(warmed.lineage, third.id, Catalog.load(warmed.objects, JOB), head=state)
    assert (route.stored, route.pieces, route.head) == (MarkerId(1, 2), (), state)
    warmed.follow()
    route = locate(warmed.lineage, third.id, Catalog.load(warmed.objects, JOB), head=state)
    assert (route.stored, len(route.pieces), route.head) == (third.id, 1, state)


def left_behind(tmp_path: Path, pool: ThreadPoolExecutor) -> Warm:
    """HEAD is at 1:3; another host went on to 1:8, where a base is; gc took what lies between, trim all frames."""
    warmed = Warm(tmp_path, pool, Policy(rebase=0, compact="none"))
    warmed.markers(3)
    warmed.follow()
    folder = tmp_path / dense_name(JOB, MarkerId(1, 8))
    folder.mkdir(parents=True)
    (folder / ".metadata").write_bytes(b"dense state")
    for marker in range(4, 9):
        warmed.job.touch()
        warmed.job.commit(dense_files=digest_files(folder, [".metadata"]) if marker == 8 else ())
    dense = open_dense(str(tmp_path))
    list(Materializer(warmed.job.log, warmed.objects, lambda _: dense, pool, ALWAYS).catch_up(warmed.lineage))
    collect(
        warmed.objects, None, JOB, GcRules(retention=Retention(newest=1), grace_s=0.0), pool, lambda: {"a host": 1e6}
    )
    shutil.copytree(warmed.log_dir, tmp_path / "truth")
    warmed.job.log.append_control(trim("1:8", store=warmed.objects.url).to_frame())
    shutil.rmtree(warmed.log_dir / DATA_DIR)
    (warmed.log_dir / DATA_DIR).mkdir()
    return warmed


def test_one_that_gc_has_left_behind_is_not_used(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    warmed = left_behind(tmp_path, pool)
    newest, lineage = MarkerId(1, 8), warmed.lineage
    assert Catalog.load(warmed.objects, JOB).cover(lineage.chain(newest)[3:], MarkerId(1, 3)) == ()
    with contextlib.closing(whole(warmed.head())) as head:
        choice = choose(
            warmed.job.log, lineage, open_dense(str(tmp_path)), None, warmed.objects, lambda job: head.state
        )
    assert choice is not None
    assert (choice.stored, choice.head, choice.commit.id) == (newest, None, newest)
    image = Image(SCHEMA)
    picked = [each for piece in choice.pieces for each in piece.opened]
    for each, entry, data in read_chunks(warmed.objects, picked, pool):
        image.put(entry.table, entry.col0, decode_chunk(entry, data, SCHEMA, each.ref.name))
    assert image == image_of_log(FileLog(tmp_path / "truth"), lineage, newest)


def test_one_that_leads_as_far_as_the_store_is_used(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    warmed = Warm(tmp_path, pool, ALWAYS)
    warmed.markers(3)
    warmed.follow()
    warmed.job.touch()
    fourth = warmed.job.commit()
    with contextlib.closing(whole(warmed.head())) as head:
        for commit in (fourth, warmed.lineage.commits[MarkerId(1, 3)]):
            route = locate(warmed.lineage, commit.id, Catalog.load(warmed.objects, JOB), head=head.state)
            assert (route.stored, route.head) == (MarkerId(1, 3), head.state)


def test_one_that_gc_has_left_behind_is_built_anew(
    tmp_path: Path, pool: ThreadPoolExecutor, built: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    warmed = left_behind(tmp_path, pool)
    assert warmed.writer.follow(warmed.lineage, Catalog.load(warmed.objects, JOB), MarkerId(1, 8))
    assert "rebuilding HEAD: the store has a gap" in caplog.text
    warmed.job.log = FileLog(tmp_path / "truth")
    warmed.check(MarkerId(1, 8))
    assert len(built) == 2


def test_a_state_survives_its_bytes(warmed: Warm) -> None:
    warmed.markers(1)
    warmed.follow()
    with contextlib.closing(whole(warmed.head())) as head:
        assert HeadState.from_bytes(head.state.to_bytes()) == head.state


def test_slices_must_tile_each_table() -> None:
    gap = [(TableShard(0, 0, 40, 0, 4), TableShard(1, 0, 60, 0, 4)), (TableShard(2, 0, 30, 0, 8),)]
    with pytest.raises(CorruptionError, match="overlap or omit columns"):
        column_slices(SCHEMA, gap)
    overlap = [(*gap[0], TableShard(1, 0, 60, 2, 6)), gap[1]]
    with pytest.raises(CorruptionError, match="overlap"):
        column_slices(SCHEMA, overlap)


def test_blocks_hold_all_bytes_of_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_format, "BLOCK_BYTES", 7)
    layout = SliceLayout.of(SCHEMA.tables[ROWWISE], 8)
    for row in (0, 13, 59):
        expected = {
            (offset + byte) // 7
            for offset, section in zip(layout.offsets, layout.sections, strict=True)
            for byte in range(row * section.row_bytes, (row + 1) * section.row_bytes)
        }
        assert set(np.flatnonzero(layout.blocks_with(np.array([row]))).tolist()) == expected


# A HEAD with damage is never used, and never taken for a whole one by its writer.


def flip(path: Path, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x40]))


@pytest.mark.parametrize("offset", [0, 33, 4096 + 5, -1], ids=["first", "weights", "state", "checksum"])
def test_a_flipped_bit_is_caught(warmed: Warm, offset: int) -> None:
    warmed.markers(1)
    warmed.follow()
    path = warmed.path(head_slice_name(ROWWISE, 0))
    flip(path, offset % path.stat().st_size)
    with contextlib.closing(whole(warmed.head())) as head, pytest.raises(HeadDamagedError, match="was altered"):
        image_of_head(head, SCHEMA)


def test_the_writer_blesses_no_flipped_bit(warmed: Warm, built: list[int]) -> None:
    warmed.markers(1)
    warmed.follow()
    flip(warmed.path(head_slice_name(ROWWISE, 0)), 40)  # row 1
    stream = next(each for each in warmed.job.streams if each.rank == 0)
    stream.put(ROWWISE, [np.arange(1), np.ones((1, 8), np.float32), np.ones(1, np.float32)])
    warmed.job.flush()
    warmed.job.commit()
    warmed.follow()
    warmed.check(MarkerId(1, 2))
    assert len(built) == 2


def test_a_short_or_lost_file_is_an_error_that_says_so(warmed: Warm) -> None:
    warmed.markers(1)
    warmed.follow()
    os.truncate(warmed.path(head_slice_name(PLAIN, 0)), 100)
    warmed.path(head_slice_name(WIDE, 0)).unlink()
    with contextlib.closing(whole(warmed.head())) as head:
        for each in head.state.slices:
            if each.table != ROWWISE:
                with pytest.raises(HeadDamagedError, match=r"too short|cannot be read"):
                    head.arrays(each, SCHEMA)


@pytest.mark.parametrize("damage", ["altered", "cut", "of another version"])
def test_an_unreadable_state_is_no_head(warmed: Warm, damage: str, built: list[int]) -> None:
    warmed.markers(1)
    warmed.follow()
    path = warmed.path(HEAD_FILE)
    if damage == "altered":
        flip(path, 50)
    elif damage == "cut":
        os.truncate(path, 60)
    else:
        body = path.read_bytes().partition(b"\n")[2].replace(b'"format":1', b'"format":2')
        path.write_bytes(b"%08x\n%b" % (head_format.crc32c(body), body))
    assert warmed.head() is None
    warmed.follow()
    warmed.check(MarkerId(1, 1))
    assert len(built) == 2


def test_a_head_of_another_job_is_none(warmed: Warm) -> None:
    warmed.markers(1)
    warmed.follow()
    shutil.copytree(warmed.path(""), warmed.root / OTHER_JOB.hex())
    assert Head.open(warmed.root, OTHER_JOB) is None


def test_a_damaged_store_leaves_the_head_where_it_is(warmed: Warm) -> None:
    warmed.markers(1)
    warmed.follow()
    second = warmed.job.commit()
    cold = Materializer(warmed.job.log, warmed.objects, lambda _: open_dense(str(warmed.root)), warmed.pool)
    list(cold.catch_up(warmed.lineage))
    for entry in list(warmed.objects.list("segments/")):
        if "m00000002" in entry.name:
            warmed.objects.delete(entry.name)
    catalog = Catalog.load(warmed.objects, JOB)
    with pytest.raises(CorruptionError):
        warmed.writer.follow(warmed.lineage, catalog, second.id)
    warmed.check(MarkerId(1, 1))


# HEAD is compared with the proof of each marker that it stops at, and built anew if it lacks what the store has.


class Followed:
    """A job, its store and its HEAD."""

    def __init__(self, folder: Path, pool: ThreadPoolExecutor, width: int) -> None:
        self.job = EvolvingJob(folder / "log", schema=PROVED, width=width)
        self.job.first(PROVED)
        self.differing: list[WindowCheck] = []
        objects = open_store(str(folder / "store"))
        self.writer = HeadWriter(folder / "head", objects, pool, wait_s=0.05)
        self.materializer = Materializer(
            self.job.log,
            objects,
            lambda _: open_dense(str(self.job.root)),
            pool,
            Policy(rebase=0, compact="none"),
            head=self.writer,
            proofs=ProofRule(lambda _: objects, self.differing.append),
        )

    def follow(self) -> str:
        """Fold what is there; what was wrong with HEAD."""
        assert list(self.materializer.catch_up(self.lineage))
        problem = self.materializer.head_problem
        return problem.headline if problem is not None else ""

    @property
    def lineage(self) -> object:
        return Control(self.job.log).refresh()

    def check(self) -> WindowCheck:
        """HEAD as it is now."""
        found = self.writer.read(self.lineage.job, partial(check_head, self.lineage))  # type: ignore[attr-defined, arg-type]
        assert found is not None
        return found


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    return counted_builds(monkeypatch)


def lose_a_row_of_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next rows that HEAD takes are one less."""
    write, done = head_writer.SortedSlice.write, []

    def shorter(target: object, view: RowsView, col0: int, cols: int) -> None:
        if not done and len(view.ids) > 1:
            done.append(True)
            view = RowsView(view.ids[1:], view.weights[1:], tuple(state[1:] for state in view.states))
        write(target, view, col0, cols)  # type: ignore[arg-type]

    monkeypatch.setattr(head_writer.SortedSlice, "write", shorter)


def test_a_head_that_is_whole_is_compared_and_stays(
    tmp_path: Path, pool: ThreadPoolExecutor, builds: list[int]
) -> None:
    job = Followed(tmp_path, pool, POSITIONS)
    for _ in range(3):
        job.job.markers(1)
        assert job.follow() == ""
        check = job.check()
        assert (check.differing, check.compared.checked) == (0, check.compared.total)
    assert len(builds) == 1


def test_a_row_that_head_lacks_is_found_within_a_round_and_head_is_built_anew(
    tmp_path: Path, pool: ThreadPoolExecutor, builds: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Followed(tmp_path, pool, POSITIONS // ROUND)
    job.job.markers(1)
    assert job.follow() == ""
    job.job.markers(1)
    lose_a_row_of_head(monkeypatch)
    said = [job.follow()]
    for _ in range(ROUND):
        job.job.give_up()  # no row changes meanwhile
        job.job.commit()
        said.append(job.follow())
    (wrong,) = filter(None, said)
    assert "1 blocks of rows in HEAD differ from the tables at the cut" in wrong
    assert "rows [" in wrong
    assert len(builds) == 2
    assert job.check().differing == 0
    assert job.differing == []  # the store has it


def test_a_row_that_the_store_lacks_too_is_not_heads_fault(
    tmp_path: Path, pool: ThreadPoolExecutor, builds: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Followed(tmp_path, pool, POSITIONS)
    job.job.markers(1)
    assert job.follow() == ""
    lose_a_row(monkeypatch, "segment")
    for stream in job.job.streams:
        for shard in stream.shards:
            job.job.put_rows(stream, shard, np.arange(shard.row0, shard.row0 + shard.rows))
    job.job.commit()
    assert job.follow() == ""
    (check,) = job.differing
    assert job.check().compared.unproved == check.compared.unproved
    assert len(builds) == 1
    assert job.writer.marker == MarkerId(1, 2)


def test_a_head_that_is_in_use_is_compared_the_next_time(
    tmp_path: Path, pool: ThreadPoolExecutor, builds: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Followed(tmp_path, pool, POSITIONS)
    job.job.markers(1)
    assert job.follow() == ""
    job.job.markers(1)
    lose_a_row_of_head(monkeypatch)
    free = job.writer.free
    monkeypatch.setattr(job.writer, "free", lambda _: False)  # a restore copies from it
    assert "in HEAD" in job.follow()
    assert job.check().differing
    monkeypatch.setattr(job.writer, "free", free)
    list(job.materializer.catch_up(job.lineage))  # type: ignore[arg-type]
    assert (job.check().differing, len(builds)) == (0, 2)
