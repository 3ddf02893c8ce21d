"""``stream-ckpt materialize``: what it does with bad input, with what is away, with others, and with the log."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests import builders, synthetic
from tests.faults.disks import CannotMount, fill, small_disk
from tests.faults.materializer import start, wait
from tests.synthetic import Job, image_of_log, image_of_store, images_of_chain
from torchrec_stream_ckpt.cli.events import Panel, line
from torchrec_stream_ckpt.cli.main import main
from torchrec_stream_ckpt.control.partition import Control
from torchrec_stream_ckpt.errors import LogUnavailableError, MarkerNotFoundError, StoreUnavailableError
from torchrec_stream_ckpt.failpoints import arm
from torchrec_stream_ckpt.format.dense import digest_files
from torchrec_stream_ckpt.format.frame import Buffer
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.layout import CONTROL_LOCK, DATA_DIR, STORE_FILE, dense_name, manifest_name
from torchrec_stream_ckpt.log.files import FileLog
from torchrec_stream_ckpt.materialize import materialize_service as service_module
from torchrec_stream_ckpt.materialize import materializer as materializer_module
from torchrec_stream_ckpt.materialize.crew import Crew
from torchrec_stream_ckpt.materialize.gc import GcRules, collect
from torchrec_stream_ckpt.materialize.head import HeadWriter
from torchrec_stream_ckpt.materialize.materialize_service import MaterializeService
from torchrec_stream_ckpt.materialize.materializer import Materializer, Policy
from torchrec_stream_ckpt.materialize.retention import Retention
from torchrec_stream_ckpt.materialize.synced import check_synced
from torchrec_stream_ckpt.metrics import METRICS
from torchrec_stream_ckpt.route.find import choose
from torchrec_stream_ckpt.service import Event
from torchrec_stream_ckpt.store.api import Objects, open_store
from torchrec_stream_ckpt.store.catalog import Catalog
from torchrec_stream_ckpt.store.dense import open_dense
from torchrec_stream_ckpt.store.holdings import Holdings
from torchrec_stream_ckpt.types import MarkerId

Run = tuple[int, list[dict[str, object]], str]


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """Three markers, folded; the fourth is committed and not folded yet."""
    job = Job(tmp_path / "log")
    job.begin()
    for _ in range(3):
        job.touch(2)
        job.commit()
    assert materialize(job)[0] == 0
    job.touch(2)
    job.commit()
    return job


def store_of(job: Job) -> Path:
    return job.root.parent / "store"


def materialize(job: Job, *more: str) -> Run:
    """Exit status, events and stderr of ``stream-ckpt materialize --once --json``."""
    return command(f"file://{job.root}", "--store", str(store_of(job)), "--once", "--json", *more)


def command(*arguments: str) -> Run:
    """The same for any arguments, in this process."""
    out, err, before = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = ["stream-ckpt", "materialize", *arguments]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
        status = 0
    except SystemExit as end:
        status = int(end.code or 0)
    finally:
        sys.argv = before
    return status, [json.loads(line) for line in out.getvalue().splitlines()], err.getvalue()


def check_refused(job: Job, run: Run, error: str, hint: str) -> None:
    """It ended with status 1, says what and what to try, and everything that was folded is as it was."""
    status, events, said = run
    assert status == 1
    assert re.search(rf"^Error: .*{error}", said, re.M), said
    assert re.search(rf"^Try: .*{hint}", said, re.M), said
    assert "Traceback" not in said
    assert [event["event"] for event in events] == ["start", "stop"]
    check_folded(job, [1, 2, 3])


def check_folded(job: Job, markers: list[int]) -> None:
    """These markers are in the store, from it alone bit for bit what an undamaged log says."""
    objects, lineage = open_store(str(store_of(job))), Control(FileLog(truth_of(job))).refresh()
    ids = [MarkerId(1, marker) for marker in markers]
    assert sorted(Catalog.load(objects, synthetic.JOB).markers) == ids
    for commit, image in images_of_chain(FileLog(truth_of(job)), lineage, ids[-1]):
        assert image_of_store(objects, lineage, commit.id) == image


def truth_of(job: Job) -> Path:
    """A copy of the log, made before it is damaged; the log itself if there is none."""
    copy = job.root.parent / "truth"
    return copy if copy.exists() else job.root


def newest_bytes(job: Job, change: Callable[[bytearray, int], None], rank: int = 0) -> None:
    """Alter what one rank sent for the fourth marker; ``change`` gets the file and where that begins."""
    shutil.copytree(job.root, job.root.parent / "truth")
    lineage = Control(job.log).refresh()
    begin = lineage.commits[MarkerId(1, 3)].ranks[rank].end
    (path,) = (
        path
        for path in (job.root / DATA_DIR / f"p{rank:05d}").iterdir()
        if int(path.stem.split("-")[1]) <= begin < int(path.stem.split("-")[1]) + path.stat().st_size
    )
    data = bytearray(path.read_bytes())
    change(data, begin - int(path.stem.split("-")[1]))
    path.write_bytes(data)


def lose_frames(job: Job) -> None:
    """As a trim, or somebody: whole segments are gone."""
    for path in (job.root / DATA_DIR).rglob("*.seg"):
        path.unlink()


# Bad input.


def test_an_altered_payload_is_refused(job: Job) -> None:
    def alter(data: bytearray, begin: int) -> None:
        data[begin + 128 + 3] ^= 1

    newest_bytes(job, alter)
    check_refused(job, materialize(job), "payload checksum does not match .*rank=0, seq=", "copy of the log")


def test_an_altered_header_is_refused(job: Job) -> None:
    def alter(data: bytearray, begin: int) -> None:
        data[begin + 40] ^= 1

    newest_bytes(job, alter)
    check_refused(job, materialize(job), "header checksum does not match", "copy of the log")


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
    assert re.search(r"found seq \d+ behind|ends inside a frame|no longer has", said), said
    assert "Try: " in said
    check_folded(job, [1, 2, 3])


def test_a_frame_of_another_job_is_refused(job: Job) -> None:
    def alter(data: bytearray, begin: int) -> None:
        header = builders.parse_header(data[begin : begin + 128])
        header.job = builders.OTHER_JOB
        header.pack_into(memoryview(data)[begin : begin + 128])

    newest_bytes(job, alter)
    check_refused(job, materialize(job), "frame of another job", "copy of the log")


def test_a_schema_that_changes_in_mid_log_is_refused(job: Job) -> None:
    def alter(data: bytearray, begin: int) -> None:
        header = builders.parse_header(data[begin : begin + 128])
        header.schema_crc ^= 1
        header.pack_into(memoryview(data)[begin : begin + 128])

    newest_bytes(job, alter)
    check_refused(job, materialize(job), "another schema than the CLAIM", "copy of the log")


def test_a_damaged_manifest_is_refused_and_made_anew_once_it_is_deleted(job: Job) -> None:
    path = store_of(job) / manifest_name(synthetic.JOB, MarkerId(1, 2))
    good = path.read_bytes()
    path.write_bytes(good.replace(b'"rows":', b'"rows":1', 1))
    status, _, said = materialize(job)
    assert status == 1
    assert re.search(r"Error: .*manifest was altered.*m00000002.json", said), said
    assert re.search(r"Try: .*delete it: stream-ckpt materialize makes it anew", said), said
    path.unlink()
    assert materialize(job)[0] == 0
    assert path.read_bytes() == good
    check_folded(job, [1, 2, 3, 4])


def test_a_segment_that_the_store_lost_is_named(job: Job) -> None:
    (lost,) = store_of(job).glob("segments/*/g00000001-r00001-m00000003-p000.seg")
    content = lost.read_bytes()
    lost.unlink()
    status, _, said = materialize(job)
    assert status == 1
    assert re.search(r"Error: the store has lost segments .*marker=1:3, rank=1", said), said
    assert re.search(r"Try: bring them back, or delete the marker's manifest", said), said
    (store_of(job) / manifest_name(synthetic.JOB, MarkerId(1, 3))).unlink()
    assert materialize(job)[0] == 0
    assert lost.read_bytes() == content
    check_folded(job, [1, 2, 3, 4])


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
    status, events, said = materialize(job, *more)
    assert (status, said) == (0, "")
    assert [event["event"] for event in events] == ["start", "marker", "stop"]
    assert {path: path.read_bytes() for path in whole} == whole
    check_folded(job, [1, 2, 3, 4])


def test_a_damaged_segment_of_another_worker_does_not_stop_the_first(job: Job) -> None:
    whole = orphans(job, "altered")
    with ThreadPoolExecutor(2) as pool:
        dense = open_dense(str(job.root))
        leader = Materializer(
            job.log, open_store(str(store_of(job))), lambda _: dense, pool, mine=lambda partition: partition == 0
        )
        assert list(leader.catch_up(Control(job.log).refresh())) == [MarkerId(1, 4)]
    assert {path: path.read_bytes() for path in whole} == whole
    check_folded(job, [1, 2, 3, 4])


def test_a_damaged_segment_that_a_manifest_names_loses_no_other_marker(job: Job) -> None:
    whole = orphans(job, "altered", marker=3)
    for path in store_of(job).glob("segments/*/g00000001-*-m00000004-p000.seg"):
        path.unlink()
    status, events, said = materialize(job, "--pass-over-lost")
    assert status == 1
    assert re.search(r"Error: the store has lost segments .*marker=1:3, rank=0", said), said
    assert [event["event"] for event in events] == ["start", "stop"]
    (store_of(job) / manifest_name(synthetic.JOB, MarkerId(1, 3))).unlink()  # as the hint says
    assert materialize(job)[0] == 0
    assert {path: path.read_bytes() for path in whole} == whole
    check_folded(job, [1, 2, 3, 4])


def test_a_store_of_a_newer_format_is_refused(job: Job) -> None:
    (store_of(job) / STORE_FILE).write_text('{"format": 99}')
    check_refused(job, materialize(job), "the store is of format 99", "upgrade torchrec_stream_ckpt")


def test_a_store_that_holds_another_history_is_refused(job: Job) -> None:
    shutil.copytree(store_of(job), job.root.parent / "mine")
    other = Job(job.root.parent / "elsewhere" / "log", seed=99)
    other.begin()
    other.touch(5)
    other.commit()
    assert command(f"file://{other.root}", "--store", str(store_of(job)), "--once")[0] == 1
    status, _, said = command(f"file://{other.root}", "--store", str(store_of(job)), "--once", "--json")
    assert status == 1
    assert re.search(r"Error: the store holds marker 1:3, which the log does not know", said), said
    assert re.search(r"Try: .*a store of its own", said), said
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
    assert "the store holds marker 1:5, which the log does not know" in said


def test_rows_that_the_log_lost_are_named_with_what_remains_and_what_to_do(job: Job) -> None:
    job.touch(1)
    job.commit()
    shutil.copytree(job.root, job.root.parent / "truth")
    lose_frames(job)
    status, _, said = materialize(job)
    assert status == 1
    assert re.search(r"Error: .*lost is 1:4 to 1:5 \(2 markers\); the store has 3 markers, 1:3 the newest", said), said
    assert re.search(r"Try: bring the log data back, .* restart the job from marker 1:3 .*--pass-over-lost", said), said
    check_folded(job, [1, 2, 3])
    # What the hint says works: a generation that stands on what remains goes on.
    job.begin(MarkerId(1, 3))
    job.touch(2)
    job.commit()
    status, events, said = materialize(job, "--pass-over-lost")
    assert (status, said) == (0, "")
    assert [(event["event"], event.get("marker")) for event in events] == [
        ("start", None),
        ("passed_over", "1:4"),
        ("passed_over", "1:5"),
        ("marker", "2:1"),
        ("stop", None),
    ]
    assert [event["event"] for event in materialize(job)[1]] == ["start", "stop"], "they are not looked for again"
    check_second_generation(job)


def check_second_generation(job: Job) -> None:
    """2:1 stands on 1:3: the store has it, bit for bit what an undamaged log says."""
    shutil.copytree(job.root / DATA_DIR, truth_of(job) / DATA_DIR, dirs_exist_ok=True)
    shutil.copy(job.root / "control.log", truth_of(job))
    lineage = Control(FileLog(truth_of(job))).refresh()
    objects = open_store(str(store_of(job)))
    for commit, image in images_of_chain(FileLog(truth_of(job)), lineage, MarkerId(2, 1)):
        assert image_of_store(objects, lineage, commit.id) == image


def test_lost_markers_are_given_up_with_all_that_stands_on_them_and_the_log_is_trimmed(job: Job) -> None:
    before = set((job.root / DATA_DIR).rglob("*.seg"))
    job.touch(2)
    shutil.copytree(job.root, job.root.parent / "truth")
    for path in before:
        path.unlink()
    assert materialize(job, "--pass-over-lost")[0] == 0
    job.commit()  # its own rows are there
    status, _, said = materialize(job)
    assert (status, "it stands on marker 1:4, which is lost" in said, "--pass-over-lost" in said) == (1, True, True)
    assert [event.get("marker") for event in materialize(job, "--pass-over-lost")[1]] == [None, "1:5", None]
    objects, lineage = open_store(str(store_of(job))), Control(job.log).refresh()
    catalog = Catalog.load(objects, synthetic.JOB)
    assert (catalog.markers, catalog.dropped) == (ids(1, 1, 2, 3), ids(1, 4, 5))
    assert catalog.lineage().commits == lineage.commits, "the store alone knows how they follow on each other"
    for known in (lineage, catalog.lineage()):
        assert Holdings.load(objects, known).look(MarkerId(1, 5)).reach == MarkerId(1, 3)
    with pytest.raises(MarkerNotFoundError, match="marker 1:5 was given up by the loss of its rows"):
        choose(job.log, lineage, open_dense(str(store_of(job))), MarkerId(1, 5), objects)
    job.begin(MarkerId(1, 3))
    job.touch(2)
    job.commit()
    assert [event.get("marker") for event in materialize(job)[1]] == [None, "2:1", None]
    check_second_generation(job)
    catalog.refresh()
    assert (catalog.markers, catalog.dropped) == (ids(1, 1, 2, 3) | ids(2, 1), ids(1, 4, 5))
    with ThreadPoolExecutor(1) as pool:
        synced = check_synced(Holdings.load(objects, Control(job.log).refresh()), None, pool, whole=True)
    assert (synced.upto.id, {each.id for each in synced.others}) == (MarkerId(2, 1), ids(1, 5))
    with ThreadPoolExecutor(1) as pool:
        rules = GcRules(retention=Retention(newest=1), grace_s=0.0)
        assert collect(objects, None, synthetic.JOB, rules, pool).kept == (MarkerId(2, 1),)
    commit, image = list(images_of_chain(FileLog(truth_of(job)), lineage_of(job), MarkerId(2, 1)))[-1]
    assert image_of_store(objects, lineage_of(job), commit.id) == image


def lineage_of(job: Job) -> Lineage:
    return Control(job.log).refresh()


def ids(generation: int, *markers: int) -> set[MarkerId]:
    return {MarkerId(generation, marker) for marker in markers}


def test_what_one_worker_has_lost_holds_up_none_of_the_others(tmp_path: Path) -> None:
    job = Job(tmp_path / "log")
    job.begin()
    job.touch(2)
    job.commit()
    rank1 = set((job.root / DATA_DIR / "p00001").iterdir())
    for _ in range(2):
        job.touch(2)
        job.commit()
    for path in set((job.root / DATA_DIR / "p00001").iterdir()) - rank1:
        path.unlink()
    objects, passed = open_store(str(store_of(job))), list[MarkerId]()
    with ThreadPoolExecutor(1) as pool:
        leader, other = (
            Materializer(
                FileLog(job.root),
                objects,
                lambda _: open_dense(str(job.root)),
                pool,
                mine=mine,
                pass_over=lambda commit, _: passed.append(commit.id),
            )
            for mine in (lambda partition: partition == 0, lambda partition: partition != 0)
        )
        assert list(other.catch_up(lineage_of(job))) == []
        assert (passed, list(objects.list("dropped/"))) == ([], []), "1:1, on which it stands, is not there yet"
        assert list(leader.catch_up(lineage_of(job))) == [MarkerId(1, 1)]
        assert list(other.catch_up(lineage_of(job))) == []
        assert (passed, other.missing) == ([MarkerId(1, 2), MarkerId(1, 3)], [])
        job.begin(MarkerId(1, 1))
        job.touch(2)
        job.commit()
        assert list(leader.catch_up(lineage_of(job))) == []
        assert [commit.id for commit in leader.missing] == [MarkerId(2, 1)]
        assert list(other.catch_up(lineage_of(job))) == []
        assert list(leader.catch_up(lineage_of(job))) == [MarkerId(2, 1)]
        assert (leader.missing, len(passed)) == ([], 2)
    catalog = Catalog.load(objects, synthetic.JOB)
    assert (catalog.markers, catalog.dropped) == (ids(1, 1) | ids(2, 1), ids(1, 2, 3))
    commit, image = list(images_of_chain(job.log, lineage_of(job), MarkerId(2, 1)))[-1]
    assert image_of_store(objects, lineage_of(job), commit.id) == image


def test_two_stores_for_a_job_whose_log_was_trimmed_behind_one_of_them(job: Job) -> None:
    other = job.root.parent / "other"
    shutil.copytree(store_of(job), other)
    assert materialize(job)[0] == 0
    trim = builders.trim("1:4", store=f"file://{store_of(job)}")
    job.log.append_control(trim.to_frame())
    lose_frames(job)
    assert materialize(job)[0] == 0, "the store that has it all goes on"
    status, _, said = command(f"file://{job.root}", "--store", str(other), "--once", "--json")
    assert status == 1
    assert re.search(rf"log up to marker 1:4 was trimmed on .*lacks 1:4: the store file://{store_of(job)} has", said)
    assert re.search(rf"Try: fold into that one: --store file://{store_of(job)}", said)


def test_a_log_that_was_made_again_under_its_name_is_refused(job: Job) -> None:
    (job.root / "LOG").write_text("f" * 32)
    check_refused(job, materialize(job), "deleted and made again", "bring the old log back")


def job_with_dense_state(root: Path) -> Job:
    """Two markers; nothing is folded yet."""
    job = Job(root)
    job.begin()
    for marker in (1, 2):
        job.touch(1)
        folder = job.root / dense_name(synthetic.JOB, MarkerId(1, marker))
        folder.mkdir(parents=True)
        (folder / ".metadata").write_bytes(b"state of marker %d" % marker)
        job.commit(
            dense_files=digest_files(folder, [".metadata"]), dense=dense_name(synthetic.JOB, MarkerId(1, marker))
        )
    return job


def test_a_marker_whose_dense_state_is_gone_stops_it_unless_told_to_pass(tmp_path: Path) -> None:
    job = job_with_dense_state(tmp_path / "log")
    shutil.rmtree(job.root / dense_name(synthetic.JOB, MarkerId(1, 1)))
    status, _, said = materialize(job)
    assert status == 1
    assert re.search(r"Error: dense state is gone", said), said
    assert re.search(r"Try: bring it back, say where it is \(--dense\)", said), said
    status, events, _ = materialize(job, "--pass-over-lost")
    assert status == 0
    assert [event["marker"] for event in events if event["event"] == "passed_over"] == ["1:1"]
    catalog = Catalog.load(open_store(str(store_of(job))), synthetic.JOB)
    assert catalog.markers == {MarkerId(1, 1), MarkerId(1, 2)}, "later markers stand on its rows"
    assert catalog.dropped == {MarkerId(1, 1)}
    copied = store_of(job) / dense_name(synthetic.JOB, MarkerId(1, 2)) / ".metadata"
    assert copied.read_bytes() == b"state of marker 2"
    assert materialize(job) == (0, [materialize(job)[1][0], materialize(job)[1][1]], "")


@pytest.mark.parametrize("between", [True, False], ids=["told to pass", "not told to pass in between"])
def test_a_kill_before_the_loss_of_dense_state_was_noted_leaves_no_marker_without_it(
    tmp_path: Path, between: bool
) -> None:
    job = job_with_dense_state(tmp_path / "log")
    shutil.rmtree(job.root / dense_name(synthetic.JOB, MarkerId(1, 1)))
    arm("materialize.manifest_put=raise@1")
    try:
        with pytest.raises(OSError, match="failpoint"):
            materialize(job, "--pass-over-lost")
    finally:
        arm("")
    if not between:
        assert materialize(job)[0] == 0
    catalog = Catalog.load(open_store(str(store_of(job))), synthetic.JOB)
    assert catalog.markers - catalog.dropped == {MarkerId(1, marker) for marker in ((1,) if between else (1, 2))}
    status, events, _ = materialize(job, "--pass-over-lost")
    assert status == 0
    assert [event["marker"] for event in events if event["event"] == "passed_over"] == ["1:1"]
    catalog.refresh()
    assert catalog.markers == {MarkerId(1, 1), MarkerId(1, 2)}
    assert catalog.dropped == {MarkerId(1, 1)}
    assert catalog.drop_of(MarkerId(1, 1)).reason == "the loss of its dense state"
    assert [event["event"] for event in materialize(job, "--pass-over-lost")[1]] == ["start", "stop"]


@pytest.mark.parametrize("kind", ["manifests/", "dropped/"])
def test_an_outage_while_a_loss_of_dense_state_is_noted_loses_nothing_else(tmp_path: Path, kind: str) -> None:
    job = job_with_dense_state(tmp_path / "log")
    shutil.rmtree(job.root / dense_name(synthetic.JOB, MarkerId(1, 1)))
    passed = list[MarkerId]()

    class Away:
        """Is away once."""

        def __init__(self, objects: Objects) -> None:
            self._objects, self._times = objects, 1

        def put(self, name: str, parts: Sequence[Buffer]) -> None:
            if name.startswith(kind) and self._times:
                self._times = 0
                raise StoreUnavailableError("away")
            self._objects.put(name, parts)

        def __getattr__(self, name: str) -> object:
            return getattr(self._objects, name)

    objects = Away(open_store(str(store_of(job))))
    with ThreadPoolExecutor(2) as pool:
        materializer = Materializer(
            job.log,
            objects,  # type: ignore[arg-type]
            lambda _: open_dense(str(job.root)),
            pool,
            pass_over=lambda commit, _: passed.append(commit.id),
        )
        with pytest.raises(StoreUnavailableError, match="away"):
            list(materializer.catch_up(Control(job.log).refresh()))
        list(materializer.catch_up(Control(job.log).refresh()))
    assert passed == [MarkerId(1, 1)] * 2
    catalog = Catalog.load(open_store(str(store_of(job))), synthetic.JOB)
    assert catalog.markers == {MarkerId(1, 1), MarkerId(1, 2)}
    assert catalog.dropped == {MarkerId(1, 1)}
    check_folded(job, [1, 2])


def test_dense_state_that_the_store_has_lost_is_copied_again_where_it_is_not_gone(tmp_path: Path) -> None:
    job = job_with_dense_state(tmp_path / "log")
    assert materialize(job)[0] == 0
    lost = store_of(job) / dense_name(synthetic.JOB, MarkerId(1, 1)) / ".metadata"
    lost.unlink()
    status, events, _ = materialize(job, "--pass-over-lost")
    assert (status, [event["event"] for event in events]) == (0, ["start", "stop"])
    assert lost.read_bytes() == b"state of marker 1"
    assert Catalog.load(open_store(str(store_of(job))), synthetic.JOB).dropped == frozenset()


def test_what_gc_gives_up_in_between_is_not_taken_for_lost(tmp_path: Path) -> None:
    job = job_with_dense_state(tmp_path / "log")
    assert materialize(job)[0] == 0
    objects, control, lost = open_store(str(store_of(job))), Control(job.log), list[MarkerId]()
    rules = GcRules(retention=Retention(newest=1), grace_s=0.0)
    with ThreadPoolExecutor(2) as pool:
        materializer = Materializer(
            job.log,
            objects,
            lambda _: open_dense(str(tmp_path / "nothing")),
            pool,
            pass_over=lambda commit, _: lost.append(commit.id),
        )
        materializer.compare(synthetic.JOB, control.refresh)  # lists the store
        collect(objects, None, synthetic.JOB, rules, pool, lambda: 1e6)
        assert not (store_of(job) / dense_name(synthetic.JOB, MarkerId(1, 1)) / ".metadata").exists()
        assert list(materializer.catch_up(control.refresh())) == []
    assert lost == []
    assert "retention" in Catalog.load(objects, synthetic.JOB).drop_of(MarkerId(1, 1)).reason


def test_no_log_no_store_and_no_port_are_named(tmp_path: Path, job: Job) -> None:
    status, _, said = command(f"file://{tmp_path}/nothing", "--once")
    assert (status, "there is no log here" in said, "Try: check the URI" in said) == (1, True, True)
    status, _, said = command(f"file://{job.root}", "--store", "gopher://x", "--once")
    assert status == 1
    assert "Try: " in said
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        status, _, said = materialize(job, "--metrics-port", str(taken.getsockname()[1]))
    assert status == 1
    assert re.search(r"Error: cannot serve metrics at 127.0.0.1:\d+: Address already in use", said), said
    assert "Try: choose another --metrics-port" in said


def test_without_prometheus_client_the_extra_is_named(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    status, _, said = materialize(job, "--metrics-port", "9464")
    assert status == 1
    assert "Try: pip install 'torchrec_stream_ckpt[metrics]'" in said


def test_rights_that_are_missing_are_named(job: Job) -> None:
    """As another user: this one may be root."""
    if os.geteuid():
        pytest.skip("only root can become another user")
    for path in job.root.parent.parents:
        os.chmod(path, os.stat(path).st_mode | 0o011)
    os.chmod(job.root.parent, 0o755)
    done = subprocess.run(
        [sys.executable, "-c", AS_NOBODY, f"file://{job.root}", "--store", str(store_of(job)), "--once"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 1
    assert re.search(r"Error: cannot write it: Permission denied", done.stderr), done.stderr
    assert "Try: run as a user who may do it" in done.stderr
    check_folded(job, [1, 2, 3])


AS_NOBODY = """
import contextlib, os, sys
import torchrec_stream_ckpt.store.folder
from torchrec_stream_ckpt.cli.main import main
arguments = sys.argv[1:]
sys.argv = ["stream-ckpt", "materialize", "file:///nowhere/at/all", "--once"]
with contextlib.redirect_stderr(None), contextlib.suppress(SystemExit):
    main()  # imports what it needs: the other user may not read where Python is
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
sys.argv = ["stream-ckpt", "materialize", *arguments]
main()
"""


# Disks and outages.


@pytest.fixture
def serving(job: Job) -> Iterator[Callable[..., Path]]:
    """Starts services in processes of their own; returns the file that takes what they print."""
    started = []

    def serve(*more: str) -> Path:
        output = job.root.parent / f"output-{len(started)}"
        output.touch()
        arguments = [f"file://{job.root}", "--store", str(store_of(job)), "--poll-s", "0.02", "--json", *more]
        started.append(start(arguments, output))
        serve.process = started[-1]  # type: ignore[attr-defined]
        return output

    yield serve
    for process in started:
        process.kill()
        process.join()


def events_of(output: Path) -> list[dict[str, object]]:
    """Whole lines that were printed to stdout; what went to stderr stands between them."""
    lines = output.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("\n")]


def has(output: Path, event: str, **fields: object) -> Callable[[], bool]:
    """Whether an event of these fields was printed."""
    wanted = {"event": event, **fields}
    return lambda: any(wanted.items() <= each.items() for each in events_of(output))


def test_a_full_disk_is_outlasted(job: Job, serving: Callable[..., Path]) -> None:
    disk = job.root.parent / "disk"
    try:
        with small_disk(disk, 2 * 2**20):
            ballast = fill(disk, 16 * 2**10)
            output = serving("--store", str(disk / "store"))
            wait("the full disk", lambda: "No space left" in output.read_text(), output)
            assert not list((disk / "store").rglob(".put-*"))
            ballast.unlink()
            wait("the fourth marker", has(output, "marker", marker="1:4"), output)
            kinds = [event["event"] for event in events_of(output)]
            assert kinds.count("trouble") == kinds.count("recovered") == 1, "it is said once"
            lineage, objects = Control(job.log).refresh(), open_store(str(disk / "store"))
            for commit, image in images_of_chain(job.log, lineage, MarkerId(1, 4)):
                assert image_of_store(objects, lineage, commit.id) == image
    except CannotMount as error:
        pytest.skip(str(error))


def test_a_log_on_a_read_only_mount_is_folded_and_nothing_is_locked(job: Job) -> None:
    (job.root / CONTROL_LOCK).unlink()
    mount = job.root.parent / "read-only"
    mount.mkdir()
    done = subprocess.run(["mount", "--bind", "-o", "ro", str(job.root), str(mount)], capture_output=True, check=False)
    if done.returncode:
        pytest.skip("this user may not mount")
    try:
        with pytest.raises(OSError, match="Read-only"):
            (mount / CONTROL_LOCK).touch()
        before = {path: path.stat().st_mtime_ns for path in job.root.rglob("*")}
        assert command(f"file://{mount}", "--store", str(store_of(job)), "--once")[0] == 0
    finally:
        subprocess.run(["umount", "-l", str(mount)], check=True)
    assert {path: path.stat().st_mtime_ns for path in job.root.rglob("*")} == before
    check_folded(job, [1, 2, 3, 4])


def test_it_waits_for_a_log_and_its_first_marker_and_ends_by_sigterm(
    tmp_path: Path, job: Job, serving: Callable[..., Path]
) -> None:
    late = Job(tmp_path / "late" / "log")
    output = tmp_path / "output"
    output.touch()
    process = start([f"file://{late.root}", "--poll-s", "0.02", "--json"], output)  # the store: where the job says
    try:
        wait("it to wait", has(output, "waiting"), output)
        late.begin()
        late.touch()
        late.commit(store=f"file://{tmp_path}/kept")
        wait("the marker", has(output, "marker", marker="1:1", lag_markers=0), output)
        os.kill(process.pid or 0, signal.SIGTERM)
        process.join(20)
        assert process.exitcode == 0
        assert events_of(output)[-1]["event"] == "stop"
        assert not list((tmp_path / "kept" / "workers").rglob("*-*")), "it signed off"
    finally:
        process.kill()
        process.join()
    assert Catalog.load(open_store(str(tmp_path / "kept")), synthetic.JOB).markers == {MarkerId(1, 1)}


def test_once_that_a_signal_ends_early_says_so(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    fold = materializer_module.fold_interval

    def struck(*arguments: Any) -> object:
        os.kill(os.getpid(), signal.SIGTERM)
        return fold(*arguments)

    monkeypatch.setattr(materializer_module, "fold_interval", struck)
    status, events, said = materialize(job)
    assert (status, said) == (1, "")
    assert (events[-1]["event"], events[-1]["lag_markers"]) == ("stop", 1)
    check_folded(job, [1, 2, 3])
    monkeypatch.undo()
    assert materialize(job)[0] == 0


def test_a_store_of_a_newer_format_gets_no_sign_of_life(job: Job) -> None:
    (store_of(job) / STORE_FILE).write_bytes(b'{"format": 2}')
    before = sorted(store_of(job).rglob("*"))
    status, _, said = command(f"file://{job.root}", "--store", str(store_of(job)))
    assert (status, "the store is of format 2" in said) == (1, True)
    assert sorted(store_of(job).rglob("*")) == before


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        (("--poll-s", "inf"), 2, "Invalid value for '--poll-s'"),
        (("--poll-s", "nan"), 2, "Invalid value for '--poll-s'"),
        (("--lease-s", "inf"), 2, "Invalid value for '--lease-s'"),
        (("--lease-s", "nan"), 2, "Invalid value for '--lease-s'"),
        (("--rebase", "nan"), 2, "Invalid value for '--rebase'"),
        (("--metrics-port", "0"), 2, "Invalid value for '--metrics-port'"),
        (("--head", ""), 1, "Error: the folder for HEAD has no name"),
    ],
)
def test_numbers_and_names_that_are_none_are_refused(job: Job, options: tuple[str, str], error: int, said: str) -> None:
    status, events, told = command(f"file://{job.root}", "--store", str(store_of(job)), "--json", *options)
    assert (status, events) == (error, [])
    assert said in told


def test_folds_are_made_of_what_gc_has_left(job: Job, tmp_path: Path) -> None:
    """It lists the store once for many markers: pieces that it knows of may be gone, and others in their place."""
    lineage, rules = Control(job.log).refresh(), GcRules(retention=Retention(newest=1), grace_s=0.0, compact=True)
    with ThreadPoolExecutor(2) as pool:
        objects = open_store(str(tmp_path / "anew"))
        folding = Materializer(job.log, objects, lambda _: open_dense(str(job.root)), pool, Policy(rebase=0))
        markers = folding.catch_up(lineage)
        assert [next(markers) for _ in range(3)][-1] == MarkerId(1, 3)
        gone = collect(objects, lineage, synthetic.JOB, rules, pool).now
        assert any("m00000002" in entry.name for entry in gone)
        folding._policy = Policy(rebase=1e-6)
        assert list(markers) == [MarkerId(1, 4)]
    assert (None, MarkerId(1, 4)) in Catalog.load(objects, synthetic.JOB).folds
    assert folding.counts.fold_bytes > 0
    image = image_of_log(job.log, lineage, MarkerId(1, 4))
    assert image_of_store(objects, lineage, MarkerId(1, 4)) == image


def test_events_of_head_say_where_it_stands_and_why_not(job: Job) -> None:
    head = job.root.parent / "head"
    head.write_text("a file in the way")
    status, events, _ = materialize(job, "--head", str(head))
    (event,) = (each for each in events if each["event"] == "head")
    assert (status, event["marker"]) == (0, None)
    assert str(event["problem"]).startswith("HEAD cannot be written: File exists")
    said = line(Event("head", event))
    assert said.startswith("HEAD is nowhere: HEAD cannot be written")
    assert "\n  Try: " in said
    head.unlink()
    job.touch(2)
    job.commit()
    _, events, _ = materialize(job, "--head", str(head))
    (event,) = (each for each in events if each["event"] == "head")
    assert event == {"event": "head", "marker": "1:5", "problem": None, "hint": ""}
    assert line(Event("head", event)) == "HEAD is at marker 1:5"


def test_head_is_said_once_for_each_change(job: Job, tmp_path: Path) -> None:
    events, head = list[Event](), tmp_path / "head"
    with ThreadPoolExecutor(2) as pool:
        objects = open_store(str(store_of(job)))
        writer = HeadWriter(head, objects, pool)
        materializer = Materializer(job.log, objects, lambda _: open_dense(str(job.root)), pool, head=writer)
        service = MaterializeService(Control(job.log).refresh, lambda _: materializer, events.append)
        head.write_text("in the way")
        for _ in range(2):
            service._round(once=True)
        assert service.head_marker is None
        head.unlink()
        for _ in range(2):
            service._round(once=True)
    assert [each.fields["marker"] for each in events if each.event == "head"] == [None, "1:4"]
    assert service.head_marker == MarkerId(1, 4)


class Flaky:
    """A service whose log, then store are away for some rounds."""

    def __init__(self, job: Job, failures: list[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
        self.failures, self.events, self.waits = failures, list[Event](), list[float]()
        self.service = MaterializeService(self.read, lambda _: None, self.events.append)
        monkeypatch.setattr(self.service._stop, "wait", self.wait)
        self._control = Control(FileLog(job.root))

    def read(self) -> object:
        if self.failures:
            raise self.failures.pop(0)
        return self._control.refresh()

    def wait(self, seconds: float) -> None:
        self.waits.append(seconds)
        if not self.failures and len(self.events) and self.events[-1].event in ("recovered", "waiting"):
            self.service.stop()


def test_what_is_away_is_tried_again_more_and_more_slowly_and_said_once(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    away, full = LogUnavailableError("away", hint="mend it"), StoreUnavailableError("full", hint="make room")
    flaky = Flaky(job, [away] * 7 + [full, away], monkeypatch)
    flaky.service.run(once=False, poll_s=0.5)
    said = [(event.event, event.fields.get("message")) for event in flaky.events]
    trouble = [("trouble", "away"), ("trouble", "full"), ("trouble", "away")]
    assert said == [*trouble, ("waiting", None), ("recovered", None), ("stop", None)]
    assert flaky.waits == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0, 30.0, 0.5]
    assert flaky.service.status.errors == 3
    assert service_module.LAST_RETRY_S == 30.0


def test_once_does_not_wait_for_what_is_away(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    flaky = Flaky(job, [LogUnavailableError("away")], monkeypatch)
    with pytest.raises(LogUnavailableError, match="away"):
        flaky.service.run(once=True, poll_s=0.5)
    assert flaky.waits == []


# Several.


def test_a_worker_takes_everything_until_it_has_seen_another_one_live(tmp_path: Path) -> None:
    objects = open_store(str(tmp_path))
    first, second = (Crew(objects, synthetic.JOB, lease_s=1000.0) for _ in range(2))
    first.beat()
    second.beat()
    assert [crew.mine(0) for crew in (first, second)] == [True, True], "neither has seen the other's sign change"
    for _ in range(2):
        first.beat()
        second.beat()
    assert first.size == second.size == 2
    for partition in range(5):
        assert first.mine(partition) != second.mine(partition)
    second.close()
    first.beat()
    assert all(first.mine(partition) for partition in range(5))
    first.close()
    assert list(objects.list("workers/")) == []


def test_a_worker_that_stands_still_is_dead_and_its_sign_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    objects = open_store(str(tmp_path))
    first, second = (Crew(objects, synthetic.JOB, lease_s=3.0) for _ in range(2))
    for _ in range(3):
        first.beat()
        second.beat()
        now[0] += 1.0
    assert first.size == 2
    for _ in range(2):
        first.beat()
        now[0] += 3.5
    first.beat()
    assert first.size == 1
    assert [entry.name for entry in objects.list("workers/") if second.name in entry.name] == []
    second.beat()  # it was only stopped
    first.beat()
    second.beat()
    first.beat()
    assert first.size == 2


def test_a_standby_takes_over_when_the_worker_is_killed(job: Job, serving: Callable[..., Path]) -> None:
    outputs, processes = [], []
    for _ in range(3):
        outputs.append(serving("--lease-s", "0.6"))
        processes.append(serving.process)  # type: ignore[attr-defined]
    everything = lambda marker: any(has(output, "marker", marker=marker)() for output in outputs)  # noqa: E731
    wait("the fourth marker", lambda: everything("1:4"), outputs[0])
    for number in (0, 1):
        processes[number].kill()
        processes[number].join()
        job.touch(2)
        marker = str(job.commit().id)
        wait(marker, lambda marker=marker: marker_is_there(job, marker), outputs[2])
    wait("its line", has(outputs[2], "marker", marker="1:6"), outputs[2])
    check_folded(job, [1, 2, 3, 4, 5, 6])


def marker_is_there(job: Job, marker: str) -> bool:
    return (store_of(job) / manifest_name(synthetic.JOB, MarkerId.parse(marker))).exists()


# Seeing it.


def test_metrics_say_where_it_stands(job: Job, serving: Callable[..., Path]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    output = serving("--metrics-port", str(port))
    wait("the fourth marker", has(output, "marker", marker="1:4"), output)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    values = {line.split()[0]: float(line.split()[1]) for line in text.splitlines() if not line.startswith("#")}
    assert values.keys() == {metric.name for metric in METRICS.values()}
    prefix = "stream_ckpt_materializer"
    assert values[f"{prefix}_markers_total"] == 1
    assert values[f"{prefix}_newest_marker"] == 4
    assert values[f"{prefix}_head_marker"] == 0
    assert values[f"{prefix}_lag_markers"] == values[f"{prefix}_errors_total"] == 0
    (event,) = (each for each in events_of(output) if each["event"] == "marker")
    assert values[f"{prefix}_frames_read_bytes_total"] == event["frames_bytes"] > 0  # type: ignore[operator]
    assert values[f"{prefix}_segments_written_bytes_total"] == event["segment_bytes"]


def test_the_keys_of_json_lines_stay_as_they_are(job: Job) -> None:
    _, events, _ = materialize(job)
    counts = {"markers", "frames_bytes", "segment_bytes", "fold_bytes_read", "fold_bytes", "dense_bytes"}
    lag = {"lag_markers", "lag_bytes", "lag_s"}
    assert [set(event) for event in events] == [
        {"event", "uri", "store", "once"},
        {"event", "marker", "step", "committed_s", "took_s"} | lag | counts,
        {"event", "lag_markers"} | counts,
    ]
    assert events[1]["frames_bytes"] == sum(
        end.num_bytes - before.num_bytes
        for end, before in zip(
            *(Control(job.log).refresh().commits[MarkerId(1, marker)].ranks for marker in (4, 3)), strict=True
        )
    )


def test_the_lag_is_what_is_committed_and_not_in_the_store(job: Job) -> None:
    for _ in range(2):
        job.touch(1)
        job.commit()
    _, events, _ = materialize(job)
    lags = [(event["marker"], event["lag_markers"]) for event in events if event["event"] == "marker"]
    assert lags == [("1:4", 2), ("1:5", 1), ("1:6", 0)]
    sizes = [event["lag_bytes"] for event in events if event["event"] == "marker"]
    assert sizes[0] > sizes[1] > sizes[2] == 0  # type: ignore[operator]


def test_the_live_table_says_what_it_does(job: Job) -> None:
    service = MaterializeService(lambda: None, lambda _: None)
    service._wait_for("a log")
    cells = [list(column.cells) for column in Panel(service, lambda: "file:///kept").render().columns]
    said = dict(zip(*cells, strict=True))
    assert said["store"] == "file:///kept"
    assert said["now"] == "waiting for a log"
    assert said["lag"] == "0 markers, 0 B, 0 s"
