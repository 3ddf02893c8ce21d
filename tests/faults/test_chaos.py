"""The short form of the scenarios; ``make chaos`` runs the long one, and some that take too long for here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.faults import (
    brokers,
    buckets,
    disks,
    frozen,
    kills,
    materializer,
    power,
    surgery,
    survivors,
    topics,
    workers,
)
from tests.faults.__main__ import report
from tests.faults.board import Board
from tests.faults.subject import Form
from tests.s3.server import S3Server
from tests.sampled import marks_of

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1800)]

Scenario = Callable[[Form], None]
ON_FILES: list[Scenario] = [
    kills.kills_on_files,
    kills.kills_while_drains_are_slow,
    survivors.one_rank_dies,
    survivors.zombies_on_files,
    survivors.clock_jumps,
    disks.log_full,
    disks.store_full,
    disks.errors_of_a_disk,
    disks.short_writes,
    materializer.kills_of_the_materializer,
    workers.kills_of_workers,
    surgery.frames_on_files,
    surgery.files_tampered_with,
    power.power_loss,
]
DIRECT: list[Scenario] = [
    kills.kills_on_files,
    survivors.zombies_on_files,
    disks.errors_of_a_direct_disk,
    disks.direct_log_full,
    disks.short_writes,
]
"""What writes a log, once more for one that is written past the page cache."""
ON_KAFKA: list[Scenario] = [
    kills.kills_on_kafka,
    survivors.zombies_on_kafka,
    surgery.frames_on_kafka,
    topics.topics_tampered_with,
]
ON_BUCKET: list[Scenario] = [
    kills.kills_on_bucket,
    survivors.zombies_on_bucket,
    buckets.late_puts,
    buckets.two_trainers_at_one_instant,
    buckets.objects_tampered_with,
    buckets.kills_in_one_bucket,
]
LIKE_OTHERS = (
    *(workers.kills_of_workers, surgery.files_tampered_with),  # processes/test_engine, distributed/test_damage
    surgery.frames_on_kafka,  # on files, here
    *(survivors.zombies_on_bucket, buckets.objects_tampered_with),  # s3/test_bucket_log, s3/test_bucket_job
    buckets.kills_in_one_bucket,  # of a materializer on files, here
)
"""Left to the long form: a cheaper test shows the same, or this one on another log."""
LIKE_BUFFERED = (kills.kills_on_files, survivors.zombies_on_files, disks.short_writes)
"""The same for direct writes, which unit/test_direct_torn cuts anywhere; distributed/test_direct_writes has a job."""


def cells(scenarios: list[Scenario], like_others: tuple[Scenario, ...] = LIKE_OTHERS) -> list[Any]:
    left = [each for each in scenarios if each not in like_others]
    return [pytest.param(each, id=each.__name__, marks=marks_of(each, left)) for each in scenarios]


def judge(form: Form) -> None:
    """Every fault fired, and no marker is lost or wrong. What this machine cannot do is said, as a skip."""
    Console(width=160).print(form.board.table())
    form.board.check()
    if missing := [f"{row.fault}: {row.not_run}" for row in form.board.rows.values() if row.not_run]:
        pytest.skip(f"did not run: {'; '.join(missing)}")


def deaths(form: Form) -> int:
    """Kills of which there is evidence: the guarantees name their number."""
    return sum(row.fired for row in form.board.rows.values() if row.fault.startswith("SIGKILL"))


@pytest.mark.slow
def test_a_rank_that_was_frozen_for_longer_than_a_marker_may_take_costs_no_marker(tmp_path: Path) -> None:
    form = Form(tmp_path, Board())
    survivors.one_rank_freezes(form)
    judge(form)


@pytest.mark.slow
@pytest.mark.parametrize(
    "scenario",
    [frozen.ranks_freeze_in_markers, frozen.ranks_freeze_in_restores, frozen.ranks_freeze_in_closes],
    ids=lambda each: each.__name__,
)
def test_a_rank_that_is_frozen_in_a_call_is_named_and_no_call_waits_for_it_for_good(
    scenario: Scenario, tmp_path: Path
) -> None:
    form = Form(tmp_path, Board())
    scenario(form)
    judge(form)


@pytest.mark.slow
@pytest.mark.kafka
def test_a_broker_that_is_frozen_in_the_middle_of_a_commit_is_named_on_all_ranks(tmp_path: Path) -> None:
    form = Form(tmp_path, Board())
    frozen.broker_freezes_in_commits(form)
    judge(form)


@pytest.mark.parametrize("scenario", cells(ON_FILES))
def test_no_marker_is_lost_or_wrong(scenario: Scenario, tmp_path: Path) -> None:
    form = Form(tmp_path, Board())
    scenario(form)
    judge(form)
    if scenario is kills.kills_on_files:
        assert deaths(form) == len(kills.FILE_KILLS)


@pytest.mark.parametrize("scenario", cells(DIRECT, LIKE_BUFFERED))
def test_no_marker_is_lost_or_wrong_past_the_page_cache(scenario: Scenario, disk: Path) -> None:
    form = Form(disk, Board(), log_writes="direct")
    scenario(form)
    judge(form)


@pytest.mark.kafka
@pytest.mark.parametrize("scenario", cells(ON_KAFKA))
def test_no_marker_is_lost_or_wrong_on_kafka(scenario: Scenario, bootstrap: str, tmp_path: Path) -> None:
    form = Form(tmp_path, Board(), bootstrap=bootstrap)
    scenario(form)
    judge(form)
    if scenario is kills.kills_on_kafka:
        assert deaths(form) == len(kills.KAFKA_KILLS)


@pytest.mark.parametrize("scenario", cells(ON_BUCKET))
def test_no_marker_is_lost_or_wrong_in_a_bucket(scenario: Scenario, s3_server: S3Server, tmp_path: Path) -> None:
    form = Form(tmp_path, Board(), server=s3_server)
    scenario(form)
    judge(form)
    if scenario is kills.kills_on_bucket:
        assert deaths(form) == len(kills.BUCKET_KILLS)


@pytest.mark.kafka
def test_no_marker_is_lost_or_wrong_when_the_broker_or_the_way_to_it_fails(tmp_path: Path) -> None:
    form = Form(tmp_path, Board())
    brokers.broker_and_network_fail(form)
    judge(form)


def test_each_kill_of_the_short_form_is_at_a_point_that_the_log_passes() -> None:
    for where, found in (("files", kills.FILE_KILLS), ("kafka", kills.KAFKA_KILLS), ("bucket", kills.BUCKET_KILLS)):
        assert {name for name, _ in found} - {""} <= {*kills.points_of(where)}


def test_the_materializer_is_killed_fifteen_times_in_the_short_form_and_two_hundred_in_the_long_one(
    tmp_path: Path,
) -> None:
    for full, count in ((False, 15), (True, 200)):
        kills = materializer.kills_of(Form(tmp_path, Board(), full=full))
        assert len(kills) == count
        assert set(kills) == {"", *materializer.POINTS}


def test_a_hundred_kills_and_more_in_the_long_form(tmp_path: Path) -> None:
    """At every point, on every kind of log."""
    form, count = Form(tmp_path, Board(), full=True), 0
    for where in ("files", "kafka", "bucket"):
        found = kills.long_form(form.draw("any"), where)
        assert {name for name, _ in found} - {""} == {*kills.points_of(where)}
        count += len(found)
    assert count >= 150


def test_a_fault_that_did_not_fire_fails() -> None:
    board = Board()
    board.row("a fault").injected = 1
    with pytest.raises(AssertionError, match="fired 0 of 1"):
        board.check()
    board.row("a fault").fired = board.row("a fault").compared = 1
    board.check()
    board.row("a fault").lose("1:1 is gone")
    with pytest.raises(AssertionError, match="1 lost, 0 wrong: 1:1 is gone"):
        board.check()


def test_faults_at_several_points_and_logs_share_a_row_of_the_page() -> None:
    board = Board()
    for number, name in enumerate(("cut.drained, files", "mark.durable, files", "mark.durable, kafka"), 1):
        row = board.row(f"SIGSTOP at {name}")
        row.injected = row.fired = row.compared = number
        row.remark = f"failed after {10 * number} s"
    board.row("SIGSTOP at mark.durable, kafka").late = [f"close() took 7 s: {'a rank was lost ' * 9}"]
    board.row("SIGSTOP at dense.part, files").injected = 1
    board.row("SIGSTOP at dense.part, files").remark = f'"the part that was in flight: {"it " * 40}"'
    assert board.markdown().splitlines()[2:] == [
        "| SIGSTOP at 2 points, files and kafka | 6 | 6 | 0 | failed after 10 to 30 s; close() took 7 s |",
        '| SIGSTOP at dense.part, files | 0 of 1 | 0 | 0 | "the part that was in flight ..." |',
        "| all | 6 of 7 | 6 | 0 | |",
    ]
    board.row("SIGSTOP at dense.part, files").wrong = 2
    head, align, *_, last = board.markdown().splitlines()
    assert (head, align) == ("| fault | fired | compared | refused | wrong | remark |", "|---|---:|---:|---:|---:|---|")
    assert last == "| all | 6 of 7 | 6 | 0 | 2 | |"


def test_the_page_is_the_filed_run() -> None:
    board, docs = Board(), Path(__file__).parents[2] / "docs"
    board.load(docs / "chaos.json")
    assert report(board) == (docs / "chaos.md").read_text()
