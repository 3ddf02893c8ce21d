"""Two tiers of a log: what the relay copies, which marker is the newest, which tier gives it. File logs, no ranks."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests import tiered
from tests.command import ask, finish
from tests.parts import FileLog, TierState, state_of, verify_marker
from tests.synthetic import Image, image_of_log
from tests.tiered import TieredJob, lose, relay
from torchrec_stream_ckpt.errors import (
    ConfigError,
    CorruptionError,
    FencedError,
    MarkerNotFoundError,
    StreamCkptError,
    TrimmedError,
)
from torchrec_stream_ckpt.format.end_note import End
from torchrec_stream_ckpt.inner import Relay, Route
from torchrec_stream_ckpt.inner import find as find_in
from torchrec_stream_ckpt.save.generation import check_same_log
from torchrec_stream_ckpt.util.config import StreamConfig
from torchrec_stream_ckpt.util.layout import CONTROL_FILE, DATA_DIR, DENSE_DIR, dense_name
from torchrec_stream_ckpt.util.types import MarkerId


def three_markers(root: Path) -> TieredJob:
    """Three markers on the inner tier, none on the outer one."""
    made = TieredJob(root / "inner", settings=tiered.config(root / "inner", root / "outer"))
    made.begin()
    made.markers(3)
    return made


@pytest.fixture
def job(tmp_path: Path) -> TieredJob:
    return three_markers(tmp_path)


def another_node(job: TieredJob, name: str) -> TieredJob:
    """The same job on a node of another disk."""
    inner = job.tiers.folder.parent / name
    settings = replace(job.settings, uri=(f"file://{inner}", job.settings.uris[1]))
    return TieredJob(inner, settings=settings, seed=sum(name.encode()))


def find(job: TieredJob, marker: str = "") -> Route:
    found = find_in(job.tiers, MarkerId.parse(marker) if marker else None)
    assert found is not None
    return found


def image(job: TieredJob, found: Route) -> Image:
    """What a restore would write."""
    return image_of_log(found.place.log(job.tiers), found.lineage, found.marker)  # type: ignore[arg-type]


def where(found: Route) -> str:
    return f"{found.marker} {found.place}"


def test_the_last_word_comes_to_the_outer_log_after_the_newest_marker(tmp_path: Path) -> None:
    made = TieredJob(tmp_path / "inner", settings=tiered.config(tmp_path / "inner", tmp_path / "outer", every=2))
    claim = made.begin()
    made.markers(3)
    assert relay(made.tiers) == ["1:2"]
    last = End(claim.job, 1, claim.nonce, 7, "failed", "ValueError", 0.0)
    made.tiers.inner.control.end(last)
    assert relay(made.tiers) == ["1:3"]  # nothing more is to come
    assert relay(made.tiers) == []
    outer = TierState.read(made.tiers).outer
    assert outer.ended == last
    assert outer.stale == 0
    again = another_node(made, "inner-2")
    again.begin("1:3")
    assert relay(again.tiers) == []
    assert TierState.read(again.tiers).outer.ended is None


def test_the_outer_log_is_a_log_of_its_own_with_the_same_frames(job: TieredJob) -> None:
    assert relay(job.tiers) == ["1:1", "1:2", "1:3"]
    inner, outer = TierState.read(job.tiers).inner, TierState.read(job.tiers).outer
    for marker, mine in inner.commits.items():
        theirs = outer.commits[marker]
        assert theirs.dense_files == mine.dense_files
        for here, there in zip(mine.ranks, theirs.ranks, strict=True):
            assert (here.frames, here.chain, here.rows) == (there.frames, there.chain, there.rows)
        assert image_of_log(job.tiers.outer.log, outer, marker) == job.truth(marker)
        verify_marker(job.tiers.outer.log, outer, job.tiers.outer.dense, marker)
    assert relay(job.tiers) == []


def test_every_nth_marker_and_the_last_one_go_out(job: TieredJob) -> None:
    tiers = replace(job.tiers, every=2)
    assert relay(tiers) == ["1:2"]
    job.markers(2)
    assert relay(tiers) == ["1:4"]
    job.markers(1)
    assert relay(tiers) == ["1:6"]
    job.markers(1)
    assert relay(tiers) == []
    assert relay(tiers, everything=True) == ["1:7"]
    outer = TierState.read(job.tiers).outer
    assert [str(marker) for marker in outer.commits] == ["1:2", "1:4", "1:6", "1:7"]
    for marker in outer.commits:
        assert image_of_log(job.tiers.outer.log, outer, marker) == job.truth(marker)
    kept = {path.name for path in (job.tiers.outer.dense.folder / DENSE_DIR).glob("*/*")}  # type: ignore[operator]
    assert kept == {dense_name(job.claim.job, marker).rpartition("/")[2] for marker in outer.commits}


def test_one_relay_goes_on_over_markers_that_it_does_not_commit(job: TieredJob) -> None:
    one = Relay(replace(job.tiers, every=10))
    assert list(one.catch_up()) == []
    sent = one.frames_bytes
    job.markers(1)
    assert list(one.catch_up()) == []
    assert sent < one.frames_bytes == sum(end.num_bytes for end in TierState.read(job.tiers).unrelayed[-1].ranks)
    # Somebody else copies meanwhile: what this one knows of the outer log is not true any more.
    assert relay(replace(job.tiers, every=2)) == ["1:2", "1:4"]
    job.markers(1)
    assert [str(commit.id) for commit in one.catch_up(everything=True)] == ["1:5"]
    assert one.frames_bytes > sent
    one.close()
    outer = TierState.read(job.tiers).outer
    assert image_of_log(job.tiers.outer.log, outer, MarkerId(1, 5)) == job.truth(MarkerId(1, 5))


def test_a_relay_whose_trainer_died_before_it_had_started_copies_what_there_is(job: TieredJob) -> None:
    order = {"config": {"uri": job.settings.uris, "outer_every": 4}, "parent": 0, "linger_s": 60.0, "poll_s": 0.1}
    command = [sys.executable, "-m", "torchrec_stream_ckpt.extras.tiers.process"]
    done = subprocess.run(command, input=json.dumps(order), text=True, capture_output=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert TierState.read(job.tiers).outer.newest.id == MarkerId(1, 3)  # type: ignore[union-attr]


def test_damage_is_not_copied(job: TieredJob) -> None:
    relay(job.tiers)
    job.markers(1)
    segment = max(each for each in (job.tiers.folder / DATA_DIR / "p00001").iterdir() if each.stat().st_size)
    with segment.open("r+b") as file:
        file.seek(segment.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(CorruptionError):
        relay(job.tiers)
    assert TierState.read(job.tiers).outer.newest.id == MarkerId(1, 3)  # type: ignore[union-attr]


def test_the_inner_tier_is_the_nearest_source_and_the_outer_one_serves_without_it(
    job: TieredJob, caplog: pytest.LogCaptureFixture
) -> None:
    relay(job.tiers, upto="1:2")
    assert where(find(job)) == "1:3 inner"
    assert where(find(job, "1:1")) == "1:1 inner"
    truth = job.truth(MarkerId(1, 2))
    lose(job.tiers)
    with caplog.at_level(logging.WARNING):
        found = find(job)
    assert where(found) == "1:2 outer"
    assert "an unknown number of markers" in caplog.text
    assert image(job, found) == truth
    with pytest.raises(MarkerNotFoundError, match="1:3 is not committed"):
        find(job, "1:3")


def test_damage_of_the_inner_tier_is_named_and_the_outer_one_serves(
    job: TieredJob, caplog: pytest.LogCaptureFixture
) -> None:
    relay(job.tiers, upto="1:2")
    shutil.rmtree(job.tiers.folder / DATA_DIR / "p00001")
    found = find(job)
    assert where(found) == "1:2 outer"
    assert found.skipped[0].startswith("1:3: ")
    assert "the inner tier cannot provide marker 1:3" in caplog.text
    assert "p00001" in caplog.text
    with pytest.raises(StreamCkptError, match="marker 1:3 exists only in the inner tier, and is damaged there"):
        find(job, "1:3")


def test_dense_state_that_is_gone_on_the_inner_tier_comes_from_the_outer_one(job: TieredJob) -> None:
    relay(job.tiers)
    shutil.rmtree(job.tiers.folder / dense_name(job.claim.job, MarkerId(1, 3)))
    assert where(find(job)) == "1:3 outer"
    assert where(find(job, "1:2")) == "1:2 inner"


def test_a_damaged_control_log_of_the_inner_tier_is_named(job: TieredJob) -> None:
    with (job.tiers.folder / CONTROL_FILE).open("r+b") as file:
        file.write(b"nonsense")
    with pytest.raises(CorruptionError, match="the inner log cannot be read") as caught:
        TierState.read(tiered.open_tiers(job.settings))
    assert "move" in caught.value.hint


@pytest.mark.parametrize("relayed", ["", "1:1", "1:3"])
def test_an_inner_log_that_lost_its_end_is_recovered_in_place_and_goes_on_under_the_outer_order(
    job: TieredJob, relayed: str
) -> None:
    if relayed:
        relay(job.tiers, upto=relayed)
    truth, control, path = job.truth(MarkerId(1, 3)), job.tiers.inner.control, job.tiers.folder / CONTROL_FILE
    control.refresh()
    assert control.copies is not None
    control.copies.now()
    os.truncate(path, [offset for offset, _ in job.log.read_control()][2])
    job.tiers = tiered.open_tiers(job.settings)
    with pytest.raises(CorruptionError, match="2 newer records, 2 of them markers, up to 1:3") as lost:
        find(job)
    uri = job.settings.uris[0]
    assert f"stream-ckpt recover {uri} --store {uri}" in lost.value.hint
    assert ask("recover", uri, "--store", uri)["offered"] == ["1:1", "1:2", "1:3"]
    job.tiers = tiered.open_tiers(job.settings)
    job.log = job.tiers.inner.log
    assert where(find(job)) == "1:3 inner"
    assert image(job, find(job)) == truth
    # 2 is the number of the fence, which the inner log alone knows.
    assert job.begin("1:3").generation == 3
    assert TierState.read(job.tiers).outer.claims.keys() == {1, 3}
    job.markers(1)
    assert where(find(job)) == "3:4 inner"
    relay(job.tiers)
    lose(job.tiers)
    assert where(find(job)) == "3:4 outer"


def test_a_generation_on_the_same_node_stands_on_a_marker_that_was_not_copied(job: TieredJob) -> None:
    job.tiers = replace(job.tiers, every=10)
    job.begin("1:3")
    assert [str(each) for each in TierState.read(job.tiers).outer.commits] == ["1:3"]
    job.markers(2)
    found = find(job)
    assert where(found) == "2:5 inner"
    assert image(job, found) == job.truth(MarkerId(2, 5))
    relay(job.tiers, everything=True)
    lose(job.tiers)
    assert where(find(job)) == "2:5 outer"


def test_after_a_node_was_lost_the_inner_log_stands_on_the_outer_one(job: TieredJob) -> None:
    relay(job.tiers)
    truth = job.truth(MarkerId(1, 3))
    node = another_node(job, "second")
    found = find(node)
    assert where(found) == "1:3 outer"
    assert image(node, found) == truth
    claim = node.begin("1:3", world=3)
    assert (claim.generation, claim.swept) == (2, ())
    node.markers(2)
    # The inner log alone says what it lacks; with the outer one it has all.
    lineage = node.tiers.inner.control.refresh()
    with pytest.raises(TrimmedError, match=str(job.settings.uris[1])):
        verify_marker(node.log, lineage, node.tiers.inner.dense, MarkerId(2, 5))
    found = find(node)
    assert where(found) == "2:5 inner + outer"
    mixed = image(node, found)
    relay(node.tiers)
    outer = TierState.read(node.tiers).outer
    assert mixed == image_of_log(node.tiers.outer.log, outer, MarkerId(2, 5))
    # And so on: the same node again, then a third one.
    assert node.begin("2:5").swept == ()
    node.markers(1)
    assert where(find(node)) == "3:6 inner + outer"
    mixed = image(node, find(node))
    relay(node.tiers)
    assert mixed == image_of_log(node.tiers.outer.log, TierState.read(node.tiers).outer, MarkerId(3, 6))
    third = another_node(job, "third")
    third.begin("3:6")
    third.markers(1)
    assert where(find(third)) == "4:7 inner + outer"


def test_a_trainer_is_told_of_a_generation_whose_parent_its_log_does_not_have(tmp_path: Path) -> None:
    here = TieredJob(tmp_path / "inner", settings=tiered.config(tmp_path / "inner", tmp_path / "outer"))
    here.begin()
    here.markers(1)
    relay(here.tiers)
    there = another_node(here, "second")
    there.begin("1:1")
    there.markers(1)
    relay(there.tiers)
    here.begin("1:1")  # back to before that, and without its generation
    there.begin("2:2")
    outer = here.tiers.outer.control.refresh()
    assert outer.claims[4].same_schema is not None
    assert outer.claims[4].same_layout is not None
    with pytest.raises(FencedError, match="generation 4 has taken over"):
        relay(here.tiers)
    inner = here.tiers.inner.control.refresh()
    assert list(inner.claims) == [1, 3, 4]
    assert inner.claims[4].schema.is_same(outer.claims[4].schema)
    assert inner.claims[4].layout == outer.claims[4].layout
    assert inner.claims[4].nonce == outer.claims[4].nonce
    assert where(find(here)) == "2:2 outer"


def test_a_zombie_on_another_node_has_nothing_to_say(job: TieredJob) -> None:
    """Its inner log goes on behind the marker on which another node's generation stands."""
    relay(job.tiers, upto="1:2")
    node = another_node(job, "second")
    node.begin("1:2")
    node.markers(1)
    relay(node.tiers)
    zombie = job
    zombie.markers(3)
    # Before and behind its being told, its newer markers are not the newest.
    assert where(find(zombie)) == "2:3 outer"
    with pytest.raises(FencedError, match="generation 2 has taken over"):
        relay(zombie.tiers)
    assert zombie.tiers.inner.control.refresh().newest_generation == 2
    assert relay(zombie.tiers) == []
    assert where(find(zombie)) == "2:3 outer"
    assert state_of(zombie.tiers) | {"lag_s": 0} == {
        "inner": str(zombie.settings.uris[0]),
        "outer": str(zombie.settings.uris[1]),
        "generation": 2,
        "fenced": True,
        "inner_newest": None,
        "outer_newest": "2:3",
        "lag_markers": 0,
        "lag_bytes": 0,
        "lag_s": 0,
        "abandoned": 4,
    }
    # By name they are there; what goes on from one begins a new base, on both tiers.
    found = find(zombie, "1:6")
    assert where(found) == "1:6 inner"
    assert image(zombie, found) == zombie.truth(MarkerId(1, 6))
    claim = zombie.begin("1:6")
    assert (claim.generation, claim.parent, len(claim.swept)) == (3, None, len(zombie.schema.tables))


def test_a_restart_on_the_zombies_node_goes_on_with_the_outer_line(job: TieredJob) -> None:
    relay(job.tiers, upto="1:2")
    node = another_node(job, "second")
    node.begin("1:2")
    node.markers(1)
    relay(node.tiers)
    job.markers(1)
    claim = job.begin("2:3")
    assert (claim.generation, str(claim.parent)) == (3, "2:3")
    job.markers(1)
    assert where(find(job)) == "3:4 inner + outer"
    mixed = image(job, find(job))
    relay(job.tiers)
    assert mixed == image_of_log(job.tiers.outer.log, TierState.read(job.tiers).outer, MarkerId(3, 4))


def test_a_marker_that_others_have_gone_behind_begins_a_new_base(job: TieredJob) -> None:
    """Only every second one is on the outer tier: 1:1 cannot come there any more."""
    relay(replace(job.tiers, every=2))
    claim = job.begin("1:1")
    assert (claim.parent, len(claim.swept)) == (None, len(job.schema.tables))
    job.markers(1)
    relay(job.tiers)
    lose(job.tiers)
    assert where(find(job)) == "2:2 outer"


def test_a_rank_that_does_not_see_the_inner_folder_is_told_what_is_supported(job: TieredJob, tmp_path: Path) -> None:
    inner = job.tiers.inner
    check_same_log(inner.log, inner.dense, inner.config, job.claim, 1)
    with pytest.raises(ConfigError, match="does not see the same log") as caught:
        check_same_log(FileLog(tmp_path / "its-own-disk"), inner.dense, inner.config, job.claim, 1)
    assert "an inner tier requires a job on one node, or a folder that all nodes share" in caught.value.hint


def test_logs_that_do_not_belong_together_are_refused(job: TieredJob, tmp_path: Path) -> None:
    other = TieredJob(tmp_path / "other", settings=tiered.config(tmp_path / "other", tmp_path / "far"))
    other.begin()
    crossed = replace(job.settings, uri=(job.settings.uris[0], other.settings.uris[1]))
    with pytest.raises(ConfigError, match="different jobs"):
        TierState.read(tiered.open_tiers(crossed))
    empty = replace(job.settings, uri=(job.settings.uris[0], f"file://{tmp_path}/nothing"))
    with pytest.raises(CorruptionError, match="the outer log is empty, but the inner one holds 3 markers"):
        TierState.read(tiered.open_tiers(empty))


# What the commands say of two tiers, and which combinations are refused.


def test_the_command_copies_and_says_how_far_behind_the_outer_tier_is(job: TieredJob) -> None:
    inner, outer = job.settings.uris
    before = ask("relay", inner, outer, "--status")
    assert (before["lag_markers"], before["inner_newest"], before["outer_newest"]) == (3, "1:3", None)
    assert before["lag_bytes"] == sum(end.num_bytes for end in TierState.read(job.tiers).unrelayed[-1].ranks)
    events = ask("relay", inner, outer, "--once", "--every", "2")
    assert [(each["event"], each.get("marker")) for each in events] == [
        ("marker", "1:2"),
        ("marker", "1:3"),
        ("stop", None),
    ]
    assert events[-1]["frames_bytes"] == before["lag_bytes"]
    assert ask("relay", inner, outer, "--status")["lag_markers"] == 0
    assert [each["restorable"] for each in ask("list", outer)["markers"]] == [True, True]
    for uris, error in (((inner, f"{outer}-nowhere"), MarkerNotFoundError), ((outer, outer), ConfigError)):
        with pytest.raises(error):
            ask("relay", *uris)


def test_an_inner_log_that_stands_on_the_outer_one_is_listed(job: TieredJob) -> None:
    relay(job.tiers)
    node = another_node(job, "second")
    node.begin("1:3")
    node.markers(1)
    listed = {each["marker"]: each for each in ask("list", str(node.settings.uris[0]))["markers"]}
    assert listed["2:4"]["trimmed"] == job.settings.uris[1]
    assert not listed["2:4"]["restorable"]
    relay(node.tiers)
    assert all(each["restorable"] for each in ask("list", job.settings.uris[1])["markers"])


def test_markers_that_the_inner_log_took_over_are_elsewhere_and_not_damaged(job: TieredJob) -> None:
    relay(job.tiers)
    node = another_node(job, "second")
    node.begin("1:3")
    node.markers(1)
    inner, outer = node.settings.uris
    said = ask("verify", inner, "--all")
    assert [each["marker"] for each in said] == ["2:4", "1:3", "1:2", "1:1"]
    assert {(each["verdict"], each.get("trimmed")) for each in said} == {("not read", outer)}
    listed = ask("list", inner)["markers"]
    assert {each["trimmed"] for each in listed} == {outer}
    with pytest.raises(TrimmedError, match="if it belongs to the outer tier of this job"):
        ask("verify", inner, "--marker", "1:3")
    # A bit of its own dense state is damage, wherever the rows are.
    dense = next(node.tiers.folder.glob("dense/*/*/__0_0.distcp"))
    dense.write_bytes(bytes(1000))
    (own, *others), status = verdicts(inner)
    assert (own["marker"], own["verdict"], status) == ("2:4", "damaged", 1)
    assert {each["verdict"] for each in others} == {"not read"}


def verdicts(uri: str) -> tuple[list[dict[str, Any]], int]:
    """Of all markers, and the exit status."""
    done = finish("verify", uri, "--all", "--json")
    return json.loads(done.stdout), done.exit_code


FORMS = [
    (("kafka://h:1/a", "kafka://h:1/b"), {}, "nearest tier must be a folder"),
    (("kafka://h:1/a", "file:///b"), {}, "nearest tier must be a folder"),
    (("file:///a", "file:///a/"), {}, "both are"),
    (("file:///a", "file:///b", "file:///c"), {}, "two tiers, got 3"),
    ((), {}, "two tiers, got 0"),
    (("file:///a",), {"outer_every": 2}, "uri names only one log"),
    (("file:///a", "file:///b"), {"outer_every": 0}, "a whole number of at least 1"),
    (("file:///a", "file:///b"), {"store": "/a"}, "lost with this node"),
    (("file:///a", "kafka://h:1/b"), {}, "store is required"),
]


@pytest.mark.parametrize(("uris", "more", "message"), FORMS)
def test_wrong_combinations_are_refused_with_the_right_form(
    uris: tuple[str, ...], more: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        StreamConfig(uri=uris, store=more.pop("store", None), **more)  # type: ignore[arg-type]
    assert caught.value.hint


def test_an_inner_log_is_not_folded_into_the_store_of_the_outer_tier(job: TieredJob, tmp_path: Path) -> None:
    """Its markers that were not copied would be lost with the node, and the outer log would refuse that store."""
    relay(job.tiers, upto="1:2")
    inner, outer = job.settings.uris
    for store in (outer, f"file://{tmp_path}/store"):
        with pytest.raises(ConfigError, match="is the inner tier of a job") as refused:
            ask("materialize", inner, "--store", store, "--once")
        assert f"materialize OUTER --store {store}" in refused.value.hint
    ask("materialize", inner, "--store", inner, "--once")
    ask("materialize", outer, "--store", outer, "--once")


def test_a_file_log_alone_is_what_it_was(tmp_path: Path) -> None:
    assert StreamConfig(uri=f"file://{tmp_path}").outer is None
    assert FileLog(tmp_path).incarnation() is None


def test_two_tiers_in_one_folder_are_refused_whatever_leads_there(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    real.mkdir()
    link.symlink_to(real)
    for other, message in (
        (link, "both are"),
        (tmp_path / "x" / ".." / "real", "both are"),
        (real / "inside", "inside the other"),
        (link / "inside", "inside the other"),
        (tmp_path, "inside the other"),
    ):
        with pytest.raises(ConfigError, match=message):
            StreamConfig(uri=(f"file://{real}", f"file://{other}"))
    StreamConfig(uri=(f"file://{real}", f"file://{tmp_path / 'really'}"))
