"""A HEAD with damage is never used, and never taken for a whole one by its writer."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests.builders import JOB, OTHER_JOB
from tests.parts import Materializer, open_dense
from tests.synthetic import PLAIN, ROWWISE, SCHEMA, WIDE
from tests.unit.warm_head import Warm, counted_builds, image_of_head, whole
from torchrec_stream_ckpt.errors import CorruptionError
from torchrec_stream_ckpt.format import head as head_format
from torchrec_stream_ckpt.format.head import HEAD_FILE, head_slice_name
from torchrec_stream_ckpt.inner import Catalog
from torchrec_stream_ckpt.store.head import Head, HeadDamagedError
from torchrec_stream_ckpt.util.types import MarkerId


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
