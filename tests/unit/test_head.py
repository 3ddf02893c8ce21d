"""HEAD holds what its marker says, bit for bit, or is not used; whoever writes it may die or find no room."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.builders import JOB, trim
from tests.parts import FileLog, GcRules, Materializer, Policy, Retention, collect, locate, open_dense
from tests.sampled import sampled
from tests.stores import choose
from tests.synthetic import PLAIN, ROWWISE, SCHEMA, WIDE, Image, image_of_log
from tests.unit.warm_head import Warm, counted_builds, whole
from torchrec_stream_ckpt.errors import CorruptionError
from torchrec_stream_ckpt.find.route import warm
from torchrec_stream_ckpt.format import head as head_format
from torchrec_stream_ckpt.format.dense import digest_files
from torchrec_stream_ckpt.format.head import HeadState, SliceLayout, column_slices, head_slice_name
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.format.segment import decode_chunk
from torchrec_stream_ckpt.inner import Catalog
from torchrec_stream_ckpt.store.reader import read_chunks
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
