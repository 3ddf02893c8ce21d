"""What the commands say of two tiers, and which combinations are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.parts import FileLog, TierState, app
from tests.tiered import TieredJob, relay
from tests.unit.test_tiers import another_node, call, three_markers
from torchrec_stream_ckpt.errors import (
    ConfigError,
    MarkerNotFoundError,
    TrimmedError,
)
from torchrec_stream_ckpt.util.config import StreamConfig


@pytest.fixture
def job(tmp_path: Path) -> TieredJob:
    return three_markers(tmp_path)


def test_the_command_copies_and_says_how_far_behind_the_outer_tier_is(job: TieredJob) -> None:
    inner, outer = job.settings.uris
    before = call("relay", inner, outer, "--status")
    assert (before["lag_markers"], before["inner_newest"], before["outer_newest"]) == (3, "1:3", None)
    assert before["lag_bytes"] == sum(end.num_bytes for end in TierState.read(job.tiers).unrelayed[-1].ranks)
    events = call("relay", inner, outer, "--once", "--every", "2")
    assert [(each["event"], each.get("marker")) for each in events] == [
        ("marker", "1:2"),
        ("marker", "1:3"),
        ("stop", None),
    ]
    assert events[-1]["frames_bytes"] == before["lag_bytes"]
    assert call("relay", inner, outer, "--status")["lag_markers"] == 0
    assert [each["restorable"] for each in call("list", outer)["markers"]] == [True, True]
    for uris, error in (((inner, f"{outer}-nowhere"), MarkerNotFoundError), ((outer, outer), ConfigError)):
        with pytest.raises(error):
            call("relay", *uris)


def test_an_inner_log_that_stands_on_the_outer_one_is_listed(job: TieredJob) -> None:
    relay(job.tiers)
    node = another_node(job, "second")
    node.begin("1:3")
    node.markers(1)
    listed = {each["marker"]: each for each in call("list", str(node.settings.uris[0]))["markers"]}
    assert listed["2:4"]["trimmed"] == job.settings.uris[1]
    assert not listed["2:4"]["restorable"]
    relay(node.tiers)
    assert all(each["restorable"] for each in call("list", job.settings.uris[1])["markers"])


def test_markers_that_the_inner_log_took_over_are_elsewhere_and_not_damaged(job: TieredJob) -> None:
    relay(job.tiers)
    node = another_node(job, "second")
    node.begin("1:3")
    node.markers(1)
    inner, outer = node.settings.uris
    said = call("verify", inner, "--all")
    assert [each["marker"] for each in said] == ["2:4", "1:3", "1:2", "1:1"]
    assert {(each["verdict"], each.get("trimmed")) for each in said} == {("not read", outer)}
    listed = call("list", inner)["markers"]
    assert {each["trimmed"] for each in listed} == {outer}
    with pytest.raises(TrimmedError, match="if it belongs to the outer tier of this job"):
        call("verify", inner, "--marker", "1:3")
    # A bit of its own dense state is damage, wherever the rows are.
    dense = next(node.tiers.folder.glob("dense/*/*/__0_0.distcp"))
    dense.write_bytes(bytes(1000))
    (own, *others), status = verdicts(inner)
    assert (own["marker"], own["verdict"], status) == ("2:4", "damaged", 1)
    assert {each["verdict"] for each in others} == {"not read"}


def verdicts(uri: str) -> tuple[list[dict[str, Any]], int]:
    """Of all markers, and the exit status."""
    done = CliRunner().invoke(app, ["verify", uri, "--all", "--json"], catch_exceptions=False)
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
            call("materialize", inner, "--store", store, "--once")
        assert f"materialize OUTER --store {store}" in refused.value.hint
    call("materialize", inner, "--store", inner, "--once")
    call("materialize", outer, "--store", outer, "--once")


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
