"""gc of the inner tier beside a relay: the outer tier gets all that is whole, whatever was away or damaged."""

from __future__ import annotations

import shutil
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests import stores, tiered
from tests.command import ask, attempt, run
from tests.parts import (
    Dropped,
    GcPlan,
    GcRules,
    Policy,
    Retention,
    TierState,
    collect,
    decode_chunk,
    read_chunks,
    trim_log,
)
from tests.synthetic import SCHEMA, Image, image_of_log
from tests.tiered import TieredJob, lose, relay
from tests.unit.read_job import flipped
from torchrec_stream_ckpt import open_marker
from torchrec_stream_ckpt.errors import (
    ConfigError,
    CorruptionError,
    MarkerNotFoundError,
    StoreUnavailableError,
    StreamCkptError,
)
from torchrec_stream_ckpt.format.control import Commit
from torchrec_stream_ckpt.format.frame import HEADER_LEN, Kind
from torchrec_stream_ckpt.format.rows import decode_rows
from torchrec_stream_ckpt.inner import Damaged, Relay, Route, find, read_stream
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
    said = run("relay", *job.settings.uris, "--once", status=1)
    assert "marker 1:4 cannot be copied to the outer tier and is skipped: " in said
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
    return attempt("trim", inner, "--store", inner, "--upto", upto)


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


# A marker that only the inner log has, over what the outer tier holds of its generation: trimmed, folded, given up.
#
# The same over Kafka, whose offsets are others: ``tests/kafka/test_kafka_tiers_joined.py``.


def node(root: Path, number: int, every: int = 1) -> TieredJob:
    inner = root / f"node{number}"
    return TieredJob(inner, settings=tiered.config(inner, root / "outer", every=every), seed=number)


def second_node(root: Path, every: int = 1) -> TieredJob:
    """A job whose first node was lost: its second one goes on from the outer tier, which was folded and trimmed."""
    first = node(root, 1, every)
    first.begin()
    first.markers(3)
    relay(first.tiers, everything=True)
    upkeep(first)
    lose(first.tiers)
    second = node(root, 2, every)
    second.begin("1:3")
    return second


def upkeep(job: TieredJob, *, newest: int | None = None) -> None:
    """Materialize and trim the outer tier; with ``newest``, give older markers up in between."""
    tier = job.tiers.outer
    folder = Path(tier.uri.removeprefix("file://"))
    stores.fold(folder)
    lineage = tier.control.refresh()
    if newest is not None:
        rules = GcRules(retention=Retention(newest=newest), grace_s=0.0, compact=True)
        with ThreadPoolExecutor(2) as pool:
            collect(tier.objects, lineage, lineage.job, rules, pool)
    last = lineage.newest
    assert last is not None
    trim_log(tier.log, tier.control, last, tier.objects.url)


def image(job: TieredJob, route: Route) -> Image:
    """What a restore of the newest marker writes, read as it reads it: pieces of the store, then intervals of logs."""
    image = Image(route.schema)
    with ThreadPoolExecutor(2) as pool:
        for piece in route.pieces:
            for each, entry, data in read_chunks(route.place.objects(job.tiers), piece.opened, pool):
                if piece.generation >= route.bases.get(entry.table, 0):
                    image.put(entry.table, entry.col0, decode_chunk(entry, data, route.schema, each.ref.name))
    log = route.place.log(job.tiers)
    for interval in route.intervals:
        for header, frame in read_stream(log, interval.commit, interval.end, interval.after):
            if header.kind is Kind.ROWS and header.generation >= route.bases.get(header.table, 0):
                payload = memoryview(frame)[HEADER_LEN:]
                view = decode_rows(header, payload, interval.claim.schema.tables[header.table])
                image.put(header.table, header.col0, view)
    route.place.dense(job.tiers).verify(route.commit)
    return image


def check(job: TieredJob, expected: str, truth: Image, place: str = "inner + outer") -> Route:
    route = find(job.tiers, None)
    assert route is not None
    assert (str(route.marker), str(route.place)) == (expected, place)
    assert image(job, route) == truth
    return route


def truth_of(job: TieredJob) -> Image:
    """The rows at the newest marker of the inner log, read before any log is trimmed."""
    route = find(job.tiers, None)
    assert route is not None
    return image(job, route)


@pytest.mark.parametrize("every", [1, 2])
def test_an_uncopied_marker_is_read_after_upkeep_of_the_outer_tier(every: int, tmp_path: Path) -> None:
    """The outer store has given up the marker that the generation began on: only later ones of it are left there."""
    job = second_node(tmp_path, every)
    job.markers(4)
    copied = relay(job.tiers)
    job.markers(3)
    newest = "2:10"
    truth = truth_of(job)
    upkeep(job, newest=1)
    route = check(job, newest, truth)
    assert route.place.ends
    assert str(route.place.upto) == copied[-1]
    assert str(route.stored) == copied[-1]
    assert relay(job.tiers, everything=True)[-1] == newest
    assert find(job.tiers, None) is not None


def test_an_uncopied_marker_is_read_across_both_logs(tmp_path: Path) -> None:
    """The outer store ends before the marker at which the logs are joined: one interval lies in both of them."""
    job = second_node(tmp_path)
    job.markers(2)
    relay(job.tiers)
    stores.fold(tmp_path / "outer")
    job.markers(3)
    relay(job.tiers)
    job.markers(2)
    truth = truth_of(job)
    for tier, last in ((job.tiers.outer, MarkerId(2, 5)), (job.tiers.inner, MarkerId(2, 8))):
        trim_log(tier.log, tier.control, tier.control.refresh().find(last), job.tiers.outer.objects.url)
    route = check(job, "2:10", truth)
    assert str(route.stored) == "2:5"


def test_a_new_nodes_log_cannot_be_folded_and_the_error_says_how_its_disk_is_freed(tmp_path: Path) -> None:
    job = second_node(tmp_path)
    job.markers(2)
    relay(job.tiers)
    with pytest.raises(CorruptionError, match=r"trimmed on .*; the store .* holds it") as refused:
        stores.fold(tmp_path / "node2")
    assert "materialize the outer log" in refused.value.hint
    assert f"stream-ckpt trim URI --store file://{tmp_path}/outer" in refused.value.hint


def test_the_inner_disk_is_freed_of_markers_that_the_outer_tier_skips(tmp_path: Path) -> None:
    """Only if somebody says so: they are nowhere else."""
    job = second_node(tmp_path, every=2)
    job.markers(4)
    assert relay(job.tiers) == ["2:4", "2:6"]
    job.markers(1)
    truth = truth_of(job)
    stores.fold(tmp_path / "outer")
    inner, outer = job.settings.uris
    with pytest.raises(
        ConfigError, match="a trim would lose 2:5: this log has them, and the outer tier skips them"
    ) as no:
        ask("trim", inner, "--store", outer)
    assert "--give-up-skipped" in no.value.hint
    assert ask("trim", inner, "--store", outer, "--give-up-skipped")["upto"] == "2:6"
    check(job, "2:8", truth)
    assert {each["marker"] for each in ask("list", inner)["markers"]} >= {"2:6", "2:7", "2:8"}
    assert ask("trim", inner, "--store", outer)["upto"] == "2:6"
    with pytest.raises(MarkerNotFoundError, match="marker 2:5 is not committed"):
        find(job.tiers, "2:5")
    with pytest.raises(ConfigError, match="is for the log of an inner tier"):
        ask("trim", outer, "--store", outer, "--give-up-skipped")


# An object of the inner tier's store is damaged: the outer tier's store has one of the same name, which is whole.


NEWEST = MarkerId(1, 3)
DAMAGED = "segments/*/g00000001-r00001-m0000000{}-p000.seg"


@pytest.fixture
def twin(tmp_path: Path) -> TieredJob:
    """Three markers on both tiers, in a store on each."""
    made = TieredJob(tmp_path / "inner", settings=tiered.config(tmp_path / "inner", tmp_path / "outer"))
    made.begin()
    made.markers(3)
    relay(made.tiers)
    for tier in ("inner", "outer"):
        stores.fold(tmp_path / tier, Policy(rebase=0, compact="none"))
    return made


def trim_both(twin: TieredJob) -> None:
    """Only the stores have rows."""
    for tier in (twin.tiers.inner, twin.tiers.outer):
        commit = tier.control.refresh().commits[NEWEST]
        trim_log(tier.log, tier.control, commit, tier.objects.url)
        stores.lose_rows(Path(tier.uri.removeprefix("file://")))


def harm(twin: TieredJob, *tiers: str, marker: int = 2) -> str:
    """Flip a bit of a chunk; returns the name of the segment."""
    for tier in tiers:
        path = next((twin.root.parent / tier).glob(DAMAGED.format(marker)))
        path.write_bytes(flipped(path.read_bytes()))
    return path.name


def uris(twin: TieredJob) -> tuple[str, str]:
    return f"file://{twin.root.parent}/inner", f"file://{twin.root.parent}/outer"


def read(twin: TieredJob, expected: Image) -> None:
    """All rows of all tables and states, table by table, are those of a marker."""
    with open_marker(uris(twin), str(NEWEST), scratch=twin.root.parent) as marker:
        for index, spec in SCHEMA.live:
            table = marker.tables[spec.name]
            for number, section in enumerate((table, *table.states.values())):
                key = (index, number) if not number or not spec.states[number - 1].per_row else (index, number, 0, 8)
                bits = np.ascontiguousarray(section[:]).tobytes()
                assert bits == expected.arrays[key][:, :, :-1].tobytes()


@pytest.mark.parametrize("trimmed", [False, True])
def test_rows_of_an_open_marker_come_from_the_other_tier(twin: TieredJob, trimmed: bool) -> None:
    expected = twin.truth(NEWEST)
    if trimmed:
        trim_both(twin)
    harm(twin, "inner")
    read(twin, expected)


def test_rows_of_an_open_marker_come_from_the_other_tier_when_the_nearest_log_cannot_be_read(twin: TieredJob) -> None:
    expected = twin.truth(NEWEST)
    for path in (twin.root.parent / "inner").glob("data/p*/*.seg"):
        path.write_bytes(flipped(path.read_bytes(), path.stat().st_size // 2))
    harm(twin, "inner")
    read(twin, expected)


def test_rows_that_no_tier_has_are_named(twin: TieredJob) -> None:
    expected = twin.truth(NEWEST)
    trim_both(twin)
    name = harm(twin, "inner", "outer")
    with pytest.raises(CorruptionError, match=name):
        read(twin, expected)


def test_what_is_damaged_in_one_store_is_read_from_the_other_under_the_same_name(twin: TieredJob) -> None:
    trim_both(twin)
    name, damaged = harm(twin, "inner"), Damaged()
    route = find(twin.tiers, None, damaged=damaged)
    assert route is not None
    assert str(route.place) == "inner"
    full = next(each.ref.name for each in route.segments if each.ref.name.endswith(name))
    damaged.elsewhere(route, CorruptionError("chunk's checksum does not match", name=full), may_pass=True)
    found = find(twin.tiers, None, damaged=damaged)
    assert found is not None
    assert (found.marker, str(found.place), found.skipped) == (NEWEST, "outer", ())
    assert found.stored == NEWEST
    assert full in {each.ref.name for each in found.segments}
