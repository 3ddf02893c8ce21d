"""What the materializer does about rows and dense state that are lost for good."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests import builders, synthetic
from tests.builders import digest_files
from tests.parts import FileLog, GcRules, Materializer, ReadBack, Retention, arm, check_synced, collect, open_dense
from tests.stores import choose
from tests.synthetic import Job, image_of_store, images_of_chain
from tests.unit.folded_job import (
    check_folded,
    command,
    folded_job,
    ids,
    lineage_of,
    lose_frames,
    materialize,
    store_of,
    truth_of,
)
from torchrec_stream_ckpt.errors import MarkerNotFoundError, StoreUnavailableError
from torchrec_stream_ckpt.format.frame import Buffer
from torchrec_stream_ckpt.inner import Catalog, Control, Holdings, Objects, open_store
from torchrec_stream_ckpt.util.layout import DATA_DIR, claim_name, damaged_name, dense_name
from torchrec_stream_ckpt.util.types import MarkerId


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """Three markers, folded; the fourth is committed and not folded yet."""
    return folded_job(tmp_path / "log")


def test_rows_that_the_log_lost_are_named_with_what_remains_and_what_to_do(job: Job) -> None:
    job.touch(1)
    job.commit()
    shutil.copytree(job.root, job.root.parent / "truth")
    lose_frames(job)
    status, _, said = materialize(job)
    assert status == 1
    assert re.search(
        r"Error: .*not in the store yet: 1:4 to 1:5 \(2 markers\); the store has 3 markers, 1:3 the newest", said
    ), said
    assert re.search(r"Try: restore the log data, .* restart the job from marker 1:3 .*--pass-over-lost", said), said
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
    assert (status, " is based on marker 1:4, which is lost" in said, "--pass-over-lost" in said) == (1, True, True)
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
        read_back = ReadBack(objects, synthetic.JOB, pool, {})
        synced = check_synced(Holdings.load(objects, Control(job.log).refresh()), None, pool, read_back, whole=True)
    assert (synced.upto.id, {each.id for each in synced.others}) == (MarkerId(2, 1), ids(1, 5))
    with ThreadPoolExecutor(1) as pool:
        rules = GcRules(retention=Retention(newest=1), grace_s=0.0)
        assert collect(objects, None, synthetic.JOB, rules, pool).kept == (MarkerId(2, 1),)
    commit, image = list(images_of_chain(FileLog(truth_of(job)), lineage_of(job), MarkerId(2, 1)))[-1]
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
    held = rf"the store file://{store_of(job)} holds it, and this store lacks 1:4"
    assert re.search(rf"log up to marker 1:4 was trimmed on .*; {held}", said)
    assert re.search(rf"Try: fold into that store: --store file://{store_of(job)}", said)


def test_the_store_of_a_trimmed_log_was_put_back_to_an_earlier_copy(job: Job) -> None:
    before = shutil.copytree(store_of(job), job.root.parent / "before")
    assert materialize(job)[0] == 0
    trim = builders.trim("1:4", store=f"file://{store_of(job)}")
    job.log.append_control(trim.to_frame())
    lose_frames(job)
    shutil.rmtree(store_of(job))
    before.rename(store_of(job))
    status, _, said = command(f"file://{job.root}", "--store", str(store_of(job)), "--once", "--json")
    assert status == 1
    assert re.search(rf"and the store file://{store_of(job)}, which held it, lacks it now: 1:4", said)
    assert re.search(r"Try: check whether the store is mounted and whole .*bring it back from another copy", said)


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
    assert re.search(r"Error: dense state is missing", said), said
    assert re.search(r"Try: restore it from a copy, name its place \(--dense\), .*--pass-over-lost", said), said
    status, events, _ = materialize(job, "--pass-over-lost")
    assert status == 0
    assert [event["marker"] for event in events if event["event"] == "passed_over"] == ["1:1"]
    catalog = Catalog.load(open_store(str(store_of(job))), synthetic.JOB)
    assert catalog.markers == {MarkerId(1, 1), MarkerId(1, 2)}, "later markers stand on its rows"
    assert catalog.dropped == {MarkerId(1, 1)}
    copied = store_of(job) / dense_name(synthetic.JOB, MarkerId(1, 2)) / ".metadata"
    assert copied.read_bytes() == b"state of marker 2"
    assert materialize(job) == (0, [materialize(job)[1][0], materialize(job)[1][1]], "")


def killed_before_a_loss_was_noted(tmp_path: Path) -> Job:
    """The first marker lacks its dense state: its manifest is in the store, and nothing says so yet."""
    job = job_with_dense_state(tmp_path / "log")
    shutil.rmtree(job.root / dense_name(synthetic.JOB, MarkerId(1, 1)))
    arm("materialize.manifest_put=raise@1")
    try:
        with pytest.raises(OSError, match="failpoint"):
            materialize(job, "--pass-over-lost")
    finally:
        arm("")
    return job


@pytest.mark.parametrize("between", [True, False], ids=["told to pass", "not told to pass in between"])
def test_a_kill_before_the_loss_of_dense_state_was_noted_leaves_no_marker_without_it(
    tmp_path: Path, between: bool
) -> None:
    job = killed_before_a_loss_was_noted(tmp_path)
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


@pytest.mark.parametrize("damage", [b"", b"damaged"], ids=["empty", "other bytes"])
def test_a_damaged_claim_does_not_stop_a_loss_of_dense_state_from_being_noted(tmp_path: Path, damage: bytes) -> None:
    """A process was killed before it had noted the loss; the one after it stopped at the CLAIM, each time."""
    job = killed_before_a_loss_was_noted(tmp_path)
    claim = claim_name(synthetic.JOB, 1)
    (store_of(job) / claim).write_bytes(damage)
    status, events, said = materialize(job, "--pass-over-lost")
    assert (status, said) == (0, "")
    assert [event["name"] for event in events if event["event"] == "repaired"] == [claim]
    objects = open_store(str(store_of(job)))
    assert bytes(objects.read(claim)) == lineage_of(job).claims[1].to_frame()
    assert bytes(objects.read(damaged_name(claim, 1))) == damage
    catalog = Catalog.load(objects, synthetic.JOB)
    assert (catalog.markers, catalog.dropped) == (ids(1, 1, 2), ids(1, 1))
    check_folded(job, [1, 2])


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

        def create(self, name: str, parts: Sequence[Buffer]) -> bool:
            if name.startswith(kind) and self._times:
                self._times = 0
                raise StoreUnavailableError("away")
            return self._objects.create(name, parts)

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
        collect(objects, None, synthetic.JOB, rules, pool, lambda: {"a host": 1e6})
        assert not (store_of(job) / dense_name(synthetic.JOB, MarkerId(1, 1)) / ".metadata").exists()
        assert list(materializer.catch_up(control.refresh())) == []
    assert lost == []
    assert "retention" in Catalog.load(objects, synthetic.JOB).drop_of(MarkerId(1, 1)).reason
