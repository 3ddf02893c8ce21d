"""The materializer with damaged input and stores, and beside gc."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests import builders, synthetic
from tests.parts import FileLog, GcRules, Materializer, Policy, Retention, collect, open_dense
from tests.synthetic import Job, image_of_log, image_of_store
from tests.unit.folded_job import (
    check_folded,
    check_refused,
    command,
    folded_job,
    materialize,
    newest_bytes,
    store_of,
)
from torchrec_stream_ckpt.inner import Catalog, Control, open_store
from torchrec_stream_ckpt.util.layout import DATA_DIR, STORE_FILE, manifest_name
from torchrec_stream_ckpt.util.types import MarkerId


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """Three markers, folded; the fourth is committed and not folded yet."""
    return folded_job(tmp_path / "log")


Alter = Callable[[bytearray, int], None]
"""Of the bytes of a log, and where a frame begins in them."""


def flipped(at: int) -> Alter:
    def alter(data: bytearray, begin: int) -> None:
        data[begin + at] ^= 1

    return alter


def restated(change: Callable[[builders.Header], None]) -> Alter:
    """Another header, whose checksum is right."""

    def alter(data: bytearray, begin: int) -> None:
        header = builders.parse_header(data[begin : begin + 128])
        change(header)
        header.pack_into(memoryview(data)[begin : begin + 128])

    return alter


def _of_another_job(header: builders.Header) -> None:
    header.job = builders.OTHER_JOB


def _of_another_schema(header: builders.Header) -> None:
    header.schema_crc ^= 1


@pytest.mark.parametrize(
    ("alter", "said"),
    [
        pytest.param(flipped(128 + 3), "payload checksum does not match .*rank=0, seq=", id="payload"),
        pytest.param(flipped(40), "header checksum does not match", id="header"),
        pytest.param(restated(_of_another_job), "frame of another job", id="another job"),
        pytest.param(restated(_of_another_schema), "schema differs from the CLAIM", id="another schema"),
    ],
)
def test_an_altered_frame_is_refused(job: Job, alter: Alter, said: str) -> None:
    newest_bytes(job, alter)
    check_refused(job, materialize(job), said, "copy of the log")


def test_a_frame_that_is_missing_is_a_gap(job: Job) -> None:
    first = job.streams[1].frames[-3:]  # two of rows, and MARK

    def drop(data: bytearray, begin: int) -> None:
        assert data[begin : begin + len(first[0])] == first[0]
        # Where it was stands the frame behind it, sent twice: nothing is shorter than it was.
        data[begin : begin + len(first[0])] = first[1] + first[2] * 20
        del data[begin + sum(map(len, first)) :]

    newest_bytes(job, drop, rank=1)
    status, _, said = materialize(job)
    assert status == 1
    assert re.search(r"found seq \d+ after|ends inside a frame|no longer has", said), said
    assert "Try: " in said
    check_folded(job, [1, 2, 3])


def test_a_damaged_manifest_is_set_aside_and_made_anew(job: Job) -> None:
    path = store_of(job) / manifest_name(synthetic.JOB, MarkerId(1, 3))
    good = path.read_bytes()
    harmed = good.replace(b'"rows":', b'"rows":1', 1)
    path.write_bytes(harmed)
    status, events, said = materialize(job)
    assert (status, said) == (0, "")
    (repair,) = (event for event in events if event["event"] == "repaired")
    assert (repair["name"], "manifest was altered" in str(repair["reason"])) == (
        str(path.relative_to(store_of(job))),
        True,
    )
    assert (store_of(job) / str(repair["aside"])).read_bytes() == harmed
    assert path.read_bytes() == good
    check_folded(job, [1, 2, 3, 4])


def test_a_segment_that_the_store_lost_is_folded_again_from_the_log(job: Job) -> None:
    (lost,) = store_of(job).glob("segments/*/g00000001-r00001-m00000003-p000.seg")
    content = lost.read_bytes()
    lost.unlink()
    (store_of(job) / "segments" / synthetic.JOB.hex() / "g00000001-r00001-m00000004-p000.seg").unlink(missing_ok=True)
    status, events, said = materialize(job)
    assert (status, said) == (0, "")
    assert [event["name"] for event in events if event["event"] == "repaired"] == [str(lost.relative_to(store_of(job)))]
    assert lost.read_bytes() == content
    check_folded(job, [1, 2, 3, 4])


def test_a_segment_that_store_and_log_have_lost_is_named(job: Job) -> None:
    (lost,) = store_of(job).glob("segments/*/g00000001-r00001-m00000003-p000.seg")
    lost.unlink()
    begin = Control(job.log).refresh().commits[MarkerId(1, 2)].ranks[1].end
    files = {int(path.stem.split("-")[1]): path for path in (job.root / DATA_DIR / "p00001").iterdir()}
    base = max(each for each in files if each <= begin)
    data = bytearray(files[base].read_bytes())
    data[begin - base + 128 + 3] ^= 1  # what the log has of it
    files[base].write_bytes(data)
    status, _, said = materialize(job)
    assert status == 1
    assert re.search(r"Error: segments of a marker in the store are missing .*marker=1:3, rank=1", said), said
    assert re.search(r"Try: restore them, or delete the marker's manifest", said), said


def orphans(job: Job, damage: str, marker: int = 4) -> dict[Path, bytes]:
    """All is folded, then the fourth manifest lost, and a marker's segments damaged; returns what they were."""
    assert materialize(job)[0] == 0
    (store_of(job) / manifest_name(synthetic.JOB, MarkerId(1, 4))).unlink()
    paths = sorted(store_of(job).glob(f"segments/*/g00000001-*-m{marker:08d}-p000.seg"))
    whole = {path: path.read_bytes() for path in paths}
    assert len(whole) == job.world
    for path, other in zip(paths, reversed(paths), strict=True):
        data = bytearray(whole[path])
        data[30] ^= 1
        path.write_bytes({"altered": bytes(data), "cut": whole[path][:-8], "foreign": whole[other]}[damage])
    return whole


@pytest.mark.parametrize("damage", ["altered", "cut", "foreign"])
@pytest.mark.parametrize("more", [(), ("--pass-over-lost",)], ids=["strict", "pass over"])
def test_a_damaged_segment_that_no_manifest_names_is_folded_again(job: Job, damage: str, more: tuple[str, ...]) -> None:
    whole = orphans(job, damage)
    damaged = {path: path.read_bytes() for path in whole}
    status, events, said = materialize(job, *more)
    assert (status, said) == (0, "")
    assert [event["event"] for event in events] == ["start", *["repaired"] * len(whole), "marker", "stop"]
    asides = {store_of(job) / str(event["name"]): event["aside"] for event in events if event["event"] == "repaired"}
    assert {path: (store_of(job) / str(asides[path])).read_bytes() for path in whole} == damaged
    assert {path: path.read_bytes() for path in whole} == whole
    check_folded(job, [1, 2, 3, 4])


def test_a_damaged_segment_of_another_materializer_does_not_stop_this_one(job: Job) -> None:
    whole = orphans(job, "altered")
    with ThreadPoolExecutor(2) as pool:
        dense = open_dense(str(job.root))
        second = Materializer(job.log, open_store(str(store_of(job))), lambda _: dense, pool)
        assert list(second.catch_up(Control(job.log).refresh())) == [MarkerId(1, 4)]
    assert {path: path.read_bytes() for path in whole} == whole
    check_folded(job, [1, 2, 3, 4])


def test_damaged_segments_that_a_manifest_names_are_folded_again(job: Job) -> None:
    whole = orphans(job, "altered", marker=3)
    for path in store_of(job).glob("segments/*/g00000001-*-m00000004-p000.seg"):
        path.unlink()
    status, events, said = materialize(job, "--pass-over-lost")
    assert (status, said) == (0, "")
    mended = [event["name"] for event in events if event["event"] == "repaired"]
    assert sorted(mended) == sorted(str(path.relative_to(store_of(job))) for path in whole)
    assert "passed_over" not in {event["event"] for event in events}
    assert {path: path.read_bytes() for path in whole} == whole
    check_folded(job, [1, 2, 3, 4])


def test_a_store_of_a_newer_format_is_refused(job: Job) -> None:
    (store_of(job) / STORE_FILE).write_text('{"format": 99}')
    check_refused(job, materialize(job), "the store has format 99", "upgrade torchrec_stream_ckpt")


def test_a_store_that_holds_another_history_is_refused(job: Job) -> None:
    shutil.copytree(store_of(job), job.root.parent / "mine")
    other = Job(job.root.parent / "elsewhere" / "log", seed=99)
    other.begin()
    other.touch(5)
    other.commit()
    assert command(f"file://{other.root}", "--store", str(store_of(job)), "--once")[0] == 1
    status, _, said = command(f"file://{other.root}", "--store", str(store_of(job)), "--once", "--json")
    assert status == 1
    assert re.search(r"Error: the store holds marker 1:3, which is not in the log", said), said
    assert re.search(r"Try: .*name a separate store", said), said
    check_folded(job, [1, 2, 3])


def test_a_log_that_was_put_back_is_told_from_its_store(job: Job) -> None:
    control = job.root / "control.log"
    whole = control.read_bytes()
    third = max(index for index in range(0, len(whole), 64) if whole[index : index + 4] == b"TRSC")
    control.write_bytes(whole[:third])
    assert len(Control(FileLog(job.root)).refresh().commits) == 3
    job.log = FileLog(job.root)
    fourth = job.commit()
    assert fourth.id == MarkerId(1, 5)
    assert materialize(job)[0] == 0
    control.write_bytes(whole)
    status, _, said = materialize(job)
    assert status == 1
    assert "the store holds marker 1:5, which is not in the log" in said


def test_a_log_that_was_made_again_under_its_name_is_refused(job: Job) -> None:
    (job.root / "LOG").write_text("f" * 32)
    check_refused(job, materialize(job), "deleted and recreated", "put the old log back")


def test_folds_are_made_of_what_gc_has_left(job: Job, tmp_path: Path) -> None:
    """It lists the store once for many markers: pieces that it knows of may be gone, and others in their place."""
    lineage, rules = Control(job.log).refresh(), GcRules(retention=Retention(newest=1), grace_s=0.0, compact=True)
    with ThreadPoolExecutor(2) as pool:
        objects = open_store(str(tmp_path / "anew"))
        folding = Materializer(
            job.log, objects, lambda _: open_dense(str(job.root)), pool, Policy(rebase=0, compact="none")
        )
        markers = folding.catch_up(lineage)
        assert [next(markers) for _ in range(3)][-1] == MarkerId(1, 3)
        gone = collect(objects, lineage, synthetic.JOB, rules, pool).now
        assert any("m00000002" in entry.name for entry in gone)
        folding.compactor.policy = Policy(rebase=1e-6, compact="none")
        assert list(markers) == [MarkerId(1, 4)]
    assert (None, MarkerId(1, 4)) in Catalog.load(objects, synthetic.JOB).folds
    assert folding.counts.fold_bytes > 0
    image = image_of_log(job.log, lineage, MarkerId(1, 4))
    assert image_of_store(objects, lineage, MarkerId(1, 4)) == image
