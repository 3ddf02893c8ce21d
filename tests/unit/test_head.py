"""HEAD holds what its marker says, bit for bit, or is not used; whoever writes it may die or find no room."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.builders import JOB, OTHER_JOB, trim
from tests.stores import choose
from tests.synthetic import PLAIN, ROWWISE, SCHEMA, WIDE, Image, Job, image_of_log
from torchrec_stream_ckpt.cli.main import app
from torchrec_stream_ckpt.control.partition import Control
from torchrec_stream_ckpt.errors import ConfigError, CorruptionError, StoreUnavailableError
from torchrec_stream_ckpt.format import head as head_format
from torchrec_stream_ckpt.format.dense import digest_files
from torchrec_stream_ckpt.format.head import HeadState, SliceLayout, column_slices
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.format.rows import RowsView
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.format.segment import decode_chunk
from torchrec_stream_ckpt.layout import (
    DATA_DIR,
    HEAD_FILE,
    default_head_root,
    dense_name,
    head_slice_name,
    parse_head_slice,
)
from torchrec_stream_ckpt.log.files import FileLog
from torchrec_stream_ckpt.materialize import head as head_writer
from torchrec_stream_ckpt.materialize.compactor import Policy
from torchrec_stream_ckpt.materialize.gc import GcRules, collect
from torchrec_stream_ckpt.materialize.head import HeadWriter
from torchrec_stream_ckpt.materialize.materializer import Materializer
from torchrec_stream_ckpt.materialize.retention import Retention
from torchrec_stream_ckpt.route.held import hold, warm
from torchrec_stream_ckpt.store.api import open_store
from torchrec_stream_ckpt.store.catalog import Catalog
from torchrec_stream_ckpt.store.dense import open_dense
from torchrec_stream_ckpt.store.head import Head, HeadDamagedError, HeadFolder, head_root
from torchrec_stream_ckpt.store.reader import read_chunks
from torchrec_stream_ckpt.types import MarkerId, TableShard

ALWAYS = Policy(rebase=1e-9)
POINTS = ("head.dirty", "head.chunk", "head.clean")
"""Where a writer is killed."""


class Warm:
    """A job, its store, and a HEAD beside it."""

    def __init__(self, folder: Path, pool: ThreadPoolExecutor, policy: Policy | None = None) -> None:
        self.log_dir, self.root, self.pool = folder / "log", folder / "head", pool
        self.job = Job(self.log_dir, world=2)
        self.objects = open_store(str(folder / "store"))
        self.writer = HeadWriter(self.root, self.objects, pool, wait_s=0.05)
        self.materializer = Materializer(
            self.job.log, self.objects, lambda _: open_dense(str(folder)), pool, policy, head=self.writer
        )

    def markers(self, count: int, **first: object) -> None:
        """A generation with so many markers."""
        self.job.begin(**first)  # type: ignore[arg-type]
        for _ in range(count):
            self.job.touch()
            self.job.commit()

    @property
    def lineage(self) -> Lineage:
        return Control(FileLog(self.log_dir)).refresh()

    def follow(self) -> None:
        list(self.materializer.catch_up(self.lineage))

    def path(self, name: str) -> Path:
        return self.root / JOB.hex() / name

    def head(self) -> Head | None:
        return Head.open(self.root, JOB, wait_s=0.05)

    def check(self, marker: MarkerId) -> None:
        """HEAD is at the marker, and every bit and checksum of it is right."""
        with contextlib.closing(whole(self.head())) as head:
            assert head.state.marker == marker
            assert image_of_head(head, SCHEMA) == image_of_log(self.job.log, self.lineage, marker)


def whole(head: Head | None) -> Head:
    assert head is not None
    return head


def image_of_head(head: Head, schema: Schema) -> Image:
    image = Image(schema)
    for each in head.state.slices:
        arrays = head.arrays(each, schema)
        arrays.check(0, arrays.layout.blocks)
        weights, *states = arrays.arrays
        image.put(each.table, each.col0, RowsView(np.arange(arrays.layout.rows), weights, tuple(states)))
    return image


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
    times: list[int] = []
    make_room = head_writer._make_room

    def count(*args: object) -> None:
        times.append(1)
        make_room(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(head_writer, "_make_room", count)
    return times


def test_it_follows_each_marker_in_place(warmed: Warm, built: list[int]) -> None:
    warmed.job.begin()
    for marker in range(1, 6):
        warmed.job.touch()
        warmed.job.commit()
        warmed.follow()
        warmed.check(MarkerId(1, marker))
    assert len(built) == 1


def test_it_takes_several_markers_at_once_and_a_new_generation(warmed: Warm, built: list[int]) -> None:
    warmed.markers(2)
    warmed.follow()
    warmed.markers(3, parent=MarkerId(1, 2), world=3)
    warmed.follow()
    warmed.check(MarkerId(2, 3))
    assert len(built) == 1


def test_a_table_that_was_sent_whole_again_is_taken_from_there(warmed: Warm, built: list[int]) -> None:
    warmed.markers(2)
    warmed.follow()
    warmed.markers(1, parent=MarkerId(1, 2), swept=[ROWWISE])
    warmed.follow()
    warmed.check(MarkerId(2, 1))
    assert len(built) == 1


def test_a_branch_is_built_anew(warmed: Warm, built: list[int]) -> None:
    warmed.markers(3)
    warmed.follow()
    warmed.markers(1, parent=MarkerId(1, 1))
    warmed.follow()
    warmed.check(MarkerId(2, 1))
    assert len(built) == 2


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


@pytest.mark.parametrize("seed", range(4))
def test_any_history_leads_to_what_its_newest_marker_says(
    tmp_path: Path, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(head_format, "BLOCK_BYTES", 64)
    warmed, random = Warm(tmp_path, pool, Policy(rebase=0.5)), np.random.default_rng(seed)
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


@pytest.mark.parametrize("policy", [Policy(rebase=1e-9), Policy(rebase=0, compact="span16")], ids=["bases", "spans"])
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


@pytest.mark.parametrize("point", POINTS)
def test_a_writer_that_is_killed_leaves_none_and_the_next_one_builds_it_anew(
    tmp_path: Path, pool: ThreadPoolExecutor, built: list[int], point: str
) -> None:
    warmed = Warm(tmp_path, pool)
    warmed.markers(1)
    warmed.follow()
    warmed.job.touch(8)
    warmed.job.commit()
    program = """
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from torchrec_stream_ckpt.control.partition import Control
from torchrec_stream_ckpt.log.files import FileLog
from torchrec_stream_ckpt.materialize.head import HeadWriter
from torchrec_stream_ckpt.materialize.materializer import Materializer
from torchrec_stream_ckpt.store.api import open_store
from torchrec_stream_ckpt.store.dense import open_dense
folder = Path(sys.argv[1])
with ThreadPoolExecutor(2) as pool:
    log, objects = FileLog(folder / "log"), open_store(str(folder / "store"))
    head = HeadWriter(folder / "head", objects, pool)
    dense = open_dense(str(folder))
    list(Materializer(log, objects, lambda _: dense, pool, head=head).catch_up(Control(log).refresh()))
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        env={**os.environ, "STREAM_CKPT_FAILPOINTS": f"{point}=kill"},
        timeout=300,
        check=False,
    )
    assert done.returncode == -9
    assert warmed.head() is None
    warmed.follow()
    warmed.check(MarkerId(1, 2))
    assert len(built) == 2


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
    held = hold(Catalog.load(warmed.objects, JOB), warmed.lineage, third.id, head=state)
    assert held is not None
    assert (held.reach, held.pieces, held.head) == (MarkerId(1, 2), (), state)
    warmed.follow()
    held = hold(Catalog.load(warmed.objects, JOB), warmed.lineage, third.id, head=state)
    assert held is not None
    assert (held.reach, len(held.pieces), held.head) == (third.id, 1, state)


def left_behind(tmp_path: Path, pool: ThreadPoolExecutor) -> Warm:
    """HEAD is at 1:3; another host went on to 1:8, where a base is; gc took what lies between, trim all frames."""
    warmed = Warm(tmp_path, pool, Policy(rebase=0))
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
    assert choice.held is not None
    assert (choice.held.reach, choice.held.head, choice.commit.id) == (newest, None, newest)
    image = Image(SCHEMA)
    picked = [each for piece in choice.held.pieces for each in piece.opened]
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
            held = hold(Catalog.load(warmed.objects, JOB), warmed.lineage, commit.id, head=head.state)
            assert held is not None
            assert (held.reach, held.head) == (MarkerId(1, 3), head.state)


def test_one_that_gc_has_left_behind_is_built_anew(
    tmp_path: Path, pool: ThreadPoolExecutor, built: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    warmed = left_behind(tmp_path, pool)
    assert warmed.writer.follow(warmed.lineage, Catalog.load(warmed.objects, JOB), MarkerId(1, 8))
    assert "HEAD is built anew: the store has a gap" in caplog.text
    warmed.job.log = FileLog(tmp_path / "truth")
    warmed.check(MarkerId(1, 8))
    assert len(built) == 2


def test_a_folder_that_others_can_write_to_is_refused(warmed: Warm, caplog: pytest.LogCaptureFixture) -> None:
    warmed.markers(1)
    warmed.follow()
    warmed.root.chmod(0o777)
    assert warmed.head() is None
    assert "belongs to another user" in caplog.text
    with pytest.raises(ConfigError, match="belongs to another user"):
        HeadFolder(warmed.root, JOB, create=True)
    warmed.root.chmod(0o700)
    whole(warmed.head()).close()
    warmed.path("").chmod(0o720)
    assert warmed.head() is None


def test_a_folder_of_another_user_is_refused(warmed: Warm, monkeypatch: pytest.MonkeyPatch) -> None:
    warmed.root.mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ConfigError, match="belongs to another user"):
        HeadFolder(warmed.root, JOB, create=True)


def test_a_link_is_refused(warmed: Warm) -> None:
    warmed.markers(1)
    warmed.follow()
    elsewhere = warmed.root.rename(warmed.root.with_name("elsewhere"))
    warmed.root.symlink_to(elsewhere)
    assert warmed.head() is None
    with pytest.raises(ConfigError, match="a link"):
        HeadFolder(warmed.root, JOB, create=True)


@pytest.mark.parametrize("place", ["a file", "a folder in a file"])
def test_a_folder_that_cannot_be_made_is_an_error_that_says_so(warmed: Warm, place: str) -> None:
    warmed.markers(1)
    in_the_way = warmed.root if place == "a file" else warmed.root.parent / "way"
    in_the_way.write_text("")
    if place != "a file":
        warmed.writer = HeadWriter(in_the_way / "head", warmed.objects, warmed.pool)
        warmed.materializer._head = warmed.writer
    warmed.follow()
    assert isinstance(warmed.materializer.head_problem, StoreUnavailableError)
    assert "HEAD cannot be written" in warmed.materializer.head_problem.message
    assert warmed.materializer.held == {MarkerId(1, 1)}
    in_the_way.unlink()
    warmed.follow()
    assert warmed.materializer.head_problem is None
    assert warmed.writer.marker == MarkerId(1, 1)


@pytest.mark.parametrize("call", ["open", "mkdir"])
@pytest.mark.parametrize("number", [errno.EACCES, errno.ENOSPC])
def test_a_folder_without_right_or_room_is_an_error_that_says_so(
    warmed: Warm, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    warmed.markers(1)
    made = getattr(os, call)

    def fail(path: object, *arguments: object, **more: object) -> object:
        if more.get("dir_fd") is not None:
            raise OSError(number, os.strerror(number))
        return made(path, *arguments, **more)

    monkeypatch.setattr(os, call, fail)
    warmed.follow()
    problem = warmed.materializer.head_problem
    assert isinstance(problem, StoreUnavailableError)
    assert problem.message == f"HEAD cannot be written: {os.strerror(number)}"
    assert problem.hint


def test_too_little_room_is_said_before_anything_is_written(warmed: Warm, monkeypatch: pytest.MonkeyPatch) -> None:
    warmed.markers(1)
    monkeypatch.setattr(HeadFolder, "free_bytes", lambda _: 100)
    warmed.follow()
    problem = warmed.materializer.head_problem
    assert problem is not None
    assert "HEAD needs 2" in problem.message
    assert "bytes more, 100 are free" in problem.message
    assert warmed.head() is None
    assert list(warmed.path("").glob("t*")) == []
    warmed.job.touch()
    warmed.job.commit()
    assert list(warmed.materializer.catch_up(warmed.lineage)) == [MarkerId(1, 2)]
    monkeypatch.undo()
    warmed.follow()
    assert whole(warmed.head()).state.marker == MarkerId(1, 2)


@pytest.mark.parametrize("first", [True, False])
def test_when_memory_runs_out_the_head_goes_and_the_materializer_stays(
    warmed: Warm, monkeypatch: pytest.MonkeyPatch, first: bool
) -> None:
    warmed.markers(1)
    if not first:
        warmed.follow()
        warmed.path(HEAD_FILE).unlink()
        warmed.job.commit()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert list(warmed.materializer.catch_up(warmed.lineage)) == [MarkerId(1, 1 if first else 2)]
    problem = warmed.materializer.head_problem
    assert problem is not None
    assert problem.message == "HEAD cannot be written: No space left on device"
    assert warmed.head() is None
    assert list(warmed.path("").glob("t*")) == []


def test_the_writer_waits_for_readers_but_not_for_ever(warmed: Warm) -> None:
    warmed.markers(1)
    warmed.follow()
    warmed.job.commit()
    with contextlib.closing(whole(warmed.head())), contextlib.closing(whole(warmed.head())):
        warmed.follow()
        assert warmed.writer.marker == MarkerId(1, 1)
    warmed.follow()
    warmed.check(MarkerId(1, 2))


def test_a_reader_waits_for_the_writer_but_not_for_ever(warmed: Warm) -> None:
    warmed.markers(1)
    warmed.follow()
    with contextlib.closing(HeadFolder(warmed.root, JOB)) as folder:
        assert folder.lock(exclusive=True, wait_s=0)
        assert warmed.head() is None
    whole(warmed.head()).close()


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


def test_a_state_survives_its_bytes(warmed: Warm) -> None:
    warmed.markers(1)
    warmed.follow()
    with contextlib.closing(whole(warmed.head())) as head:
        assert HeadState.from_bytes(head.state.to_bytes()) == head.state


def test_slices_must_tile_each_table() -> None:
    gap = [(TableShard(0, 0, 40, 0, 4), TableShard(1, 0, 60, 0, 4)), (TableShard(2, 0, 30, 0, 8),)]
    with pytest.raises(CorruptionError, match="leave columns out"):
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


def test_the_service_keeps_one_when_it_is_told_to(warmed: Warm) -> None:
    warmed.markers(2)
    store, head = warmed.root.with_name("served"), warmed.root
    arguments = ["materialize", f"file://{warmed.log_dir}", "--store", str(store), "--once", "--head", str(head)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    warmed.check(MarkerId(1, 2))


def test_names_and_places() -> None:
    assert parse_head_slice(head_slice_name(3, 16)) == (3, 16)
    assert parse_head_slice("t3-c16") is None
    assert head_root(None) is None
    assert head_root("auto") == default_head_root()
    assert head_root("/x/y") == Path("/x/y")
    with pytest.raises(ConfigError, match="the folder for HEAD has no name"):
        head_root("")
