"""gc of the inner tier beside a relay: the outer tier gets all that is whole, whatever was away or damaged."""

from __future__ import annotations

import shutil
from concurrent.futures import Executor
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests import stores, tiered
from tests.parts import Dropped, GcRules, Retention, TierState, app, collect
from tests.synthetic import image_of_log
from tests.tiered import TieredJob, relay
from torchrec_stream_ckpt.errors import StoreUnavailableError, StreamCkptError
from torchrec_stream_ckpt.format.control import Commit
from torchrec_stream_ckpt.inner import Relay
from torchrec_stream_ckpt.maintain.gc.retention import GcPlan
from torchrec_stream_ckpt.store.pins import note_reached
from torchrec_stream_ckpt.util.layout import OUTER_DIR, dense_file_name, dropped_name
from torchrec_stream_ckpt.util.types import MarkerId


@pytest.fixture
def job(tmp_path: Path) -> TieredJob:
    """Two markers on both tiers, six more on the inner one alone."""
    made = TieredJob(tmp_path / "inner", settings=tiered.config(tmp_path / "inner", tmp_path / "outer"))
    made.begin()
    made.markers(2)
    relay(made.tiers)
    made.markers(6)
    return made


def gc(job: TieredJob, pool: Executor, newest: int = 3) -> GcPlan:
    stores.fold(job.tiers.folder)
    lineage, objects = job.tiers.inner.control.refresh(), job.tiers.inner.objects
    return collect(objects, lineage, lineage.job, GcRules(retention=Retention(newest=newest), grace_s=0.0), pool)


def ids(*numbers: int) -> tuple[MarkerId, ...]:
    return tuple(MarkerId(1, number) for number in numbers)


def outer(job: TieredJob) -> list[str]:
    """Markers of the outer tier; each holds what the trainer wrote."""
    lineage = TierState.read(job.tiers).outer
    for marker in lineage.commits:
        assert image_of_log(job.tiers.outer.log, lineage, marker) == job.truth(marker)
    return [str(marker) for marker in lineage.commits]


def test_gc_leaves_what_the_outer_tier_does_not_have_yet(job: TieredJob, pool: Executor) -> None:
    done = gc(job, pool)
    assert (done.dropping, done.awaited) == (ids(1, 2), ids(3, 4, 5, 6, 7, 8))
    assert "6 markers stay until stream-ckpt relay has copied them to the outer tier: 1:3, 1:4" in done.describe()
    assert relay(job.tiers) == [f"1:{number}" for number in range(3, 9)]
    assert outer(job) == [f"1:{number}" for number in range(1, 9)]
    after = gc(job, pool)
    assert (after.dropping, after.awaited) == (ids(3, 4, 5), ())


def test_gc_leaves_only_the_markers_that_the_outer_tier_is_to_get(tmp_path: Path, pool: Executor) -> None:
    job = TieredJob(tmp_path / "in", settings=tiered.config(tmp_path / "in", tmp_path / "out", every=3))
    job.begin()
    job.markers(7)
    assert gc(job, pool, newest=1).kept == ids(3, 6, 7)


def test_what_no_relay_will_copy_any_more_is_left_to_the_retention(job: TieredJob, pool: Executor) -> None:
    job.begin("1:8")
    job.markers(1)
    done = gc(job, pool, newest=1)
    assert (done.kept, done.awaited) == ((MarkerId(2, 9),), (MarkerId(2, 9),))


def test_an_inner_store_that_says_nothing_of_its_relay_loses_nothing_that_it_may_need(
    job: TieredJob, pool: Executor
) -> None:
    shutil.rmtree(job.tiers.folder / OUTER_DIR)  # as programs before this rule have left it
    assert gc(job, pool).dropping == ()
    assert relay(job.tiers)[-1] == "1:8"
    assert gc(job, pool).dropping == ids(1, 2, 3, 4, 5)


def give_up(job: TieredJob, number: int) -> None:
    """As a gc did that knew of no outer tier."""
    marker, objects = MarkerId(1, number), job.tiers.inner.objects
    lineage = job.tiers.inner.control.refresh()
    objects.put(
        dropped_name(lineage.job, marker), [Dropped(lineage.find(marker), lineage.previous(marker), 1e9).to_bytes()]
    )
    objects.delete(dense_file_name(lineage.job, marker, "__0_0.distcp"))


def flip(job: TieredJob, number: int) -> None:
    path = job.tiers.folder / dense_file_name(job.claim.job, MarkerId(1, number), "__0_0.distcp")
    data = bytearray(path.read_bytes())
    data[5] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(("hurt", "why"), [(give_up, "given up by retention"), (flip, "altered")])
def test_the_relay_passes_over_what_is_given_up_or_damaged_by_name_and_goes_on(
    job: TieredJob, hurt: object, why: str
) -> None:
    hurt(job, 4)  # type: ignore[operator]
    passed: list[tuple[Commit, StreamCkptError]] = []
    one = Relay(job.tiers, pass_over=lambda commit, error: passed.append((commit, error)))
    assert [str(commit.id) for commit in one.catch_up()] == ["1:3", "1:5", "1:6", "1:7", "1:8"]
    sent = one.frames_bytes
    job.markers(1)
    assert [str(commit.id) for commit in one.catch_up()] == ["1:9"]
    one.close()
    ((commit, error),) = passed
    assert commit.id == MarkerId(1, 4)
    assert why in str(error)
    newest = TierState.read(job.tiers).inner.commits[MarkerId(1, 9)]
    there = TierState.read(job.tiers).inner.commits[MarkerId(1, 2)]
    assert one.frames_bytes == newest.num_bytes - there.num_bytes > sent, "no row is sent twice"
    assert outer(job) == ["1:1", "1:2", "1:3", "1:5", "1:6", "1:7", "1:8", "1:9"]


def test_a_newest_marker_that_is_damaged_is_tried_once_and_said_once(job: TieredJob) -> None:
    flip(job, 8)
    passed: list[MarkerId] = []
    one = Relay(job.tiers, pass_over=lambda commit, error: passed.append(commit.id))
    assert [str(commit.id) for commit in one.catch_up()] == ["1:3", "1:4", "1:5", "1:6", "1:7"]
    assert [list(one.catch_up()), list(one.catch_up(everything=True))] == [[], []]
    one.close()
    assert passed == [MarkerId(1, 8)]


def test_the_relay_passes_over_what_a_person_gave_up(job: TieredJob, pool: Executor) -> None:
    stores.fold(job.tiers.folder)
    lineage, objects = job.tiers.inner.control.refresh(), job.tiers.inner.objects
    done = collect(objects, lineage, lineage.job, GcRules(give_up={MarkerId(1, 4): "it is lost"}, grace_s=0.0), pool)
    assert done.dropping == ids(4)
    passed: list[str] = []
    one = Relay(job.tiers, pass_over=lambda commit, error: passed.append(f"{commit.id}: {error.message}"))
    try:
        list(one.catch_up())
    finally:
        one.close()
    assert [said.rpartition(" on ")[0] for said in passed] == ["1:4: marker 1:4 was given up by hand"]
    assert "1:4" not in outer(job)


def test_the_command_names_what_it_passed_over_and_fails(job: TieredJob) -> None:
    flip(job, 4)
    done = CliRunner().invoke(app, ["relay", *job.settings.uris, "--once"])
    assert done.exit_code == 1
    assert "marker 1:4 cannot be copied to the outer tier and is skipped: " in done.output
    assert outer(job)[-1] == "1:8"


def test_an_inner_store_that_takes_nothing_does_not_stop_the_relay(
    job: TieredJob, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its disk may be full because the outer tier was away: then the relay is what makes room."""

    def full(*_: object) -> None:
        raise StoreUnavailableError("no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("torchrec_stream_ckpt.tiers.relay.note_reached", full)
        assert relay(job.tiers) == [f"1:{number}" for number in range(3, 9)]
    assert "no space left on device" in caplog.text
    assert len(outer(job)) == 8


def test_a_new_generation_of_which_no_relay_has_said_anything_is_left_to_it(job: TieredJob, pool: Executor) -> None:
    """As where the relay could not say it: what it said of an older generation speaks for that one alone."""
    job.begin("1:8")
    job.markers(3)
    for said in (job.tiers.folder / OUTER_DIR).rglob("g00000002-*"):
        said.unlink()
    note_reached(job.tiers.inner.objects, job.claim.job, MarkerId(1, 8), 1)
    assert gc(job, pool, newest=1).awaited == (MarkerId(2, 9), MarkerId(2, 10), MarkerId(2, 11))


def trim(job: TieredJob, upto: str) -> tuple[int, str]:
    """Exit status and output of ``stream-ckpt trim`` of the inner log, whose store has all of its markers."""
    stores.fold(job.tiers.folder)
    inner = f"file://{job.tiers.folder}"
    done = CliRunner().invoke(app, ["trim", inner, "--store", inner, "--upto", upto])
    return done.exit_code, str(done.output) + str(done.exception or "")


def test_a_trim_of_the_inner_log_leaves_what_the_outer_tier_does_not_have_yet(job: TieredJob) -> None:
    status, said = trim(job, "latest")
    assert status == 0, said
    assert "the log after marker 1:2 stays until stream-ckpt relay has copied it" in said
    assert "of the log up to 1:2" in said
    assert relay(job.tiers) == [f"1:{number}" for number in range(3, 9)]
    status, said = trim(job, "latest")
    assert (status, "stays until" in said) == (0, False), said
    assert "of the log up to 1:8" in said
    job.markers(1)
    assert relay(job.tiers) == ["1:9"]


def test_a_trim_up_to_a_marker_that_the_outer_tier_lacks_is_refused(job: TieredJob) -> None:
    status, said = trim(job, "1:5")
    assert status == 1
    assert "the outer tier has this generation up to marker 1:2" in said
    assert "--upto 1:2" in said
    assert relay(job.tiers)[-1] == "1:8"
    assert trim(job, "1:5")[0] == 0


def test_a_trim_up_to_a_marker_that_does_not_exist_blames_no_tier(job: TieredJob) -> None:
    stores.fold(job.tiers.folder)
    for marker in ("1:99", "7:1"):
        status, said = trim(job, marker)
        assert (status, f"marker {marker} is not committed" in said) == (1, True), said


def test_a_trim_of_an_inner_log_of_which_no_relay_has_said_anything_is_refused(job: TieredJob) -> None:
    shutil.rmtree(job.tiers.folder / OUTER_DIR)
    status, said = trim(job, "latest")
    assert status == 1
    assert "the outer tier has no marker of this generation" in said
