"""Who owns a generation and which markers exist: decided by the order of the control partition alone."""

from __future__ import annotations

import pytest

from tests.builders import OTHER_JOB, claim, commit
from torchrec_stream_ckpt.errors import CorruptionError, MarkerNotFoundError
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.types import MarkerId


def ids(lineage: Lineage) -> list[str]:
    return [str(marker) for marker in lineage.commits]


def test_an_empty_log_has_no_generation_and_no_marker() -> None:
    lineage = Lineage()
    assert (lineage.newest_generation, lineage.newest) == (0, None)


def test_the_first_claim_of_a_number_wins() -> None:
    lineage = Lineage.of([claim(1, nonce="first"), claim(1, nonce="second")])
    assert lineage.claims[1].nonce == "first"
    assert lineage.stale == 1


def test_a_commit_of_the_claimant_that_lost_is_ignored() -> None:
    lineage = Lineage.of([claim(1, nonce="first"), claim(1, nonce="second"), commit(1, 1, nonce="second")])
    assert (ids(lineage), lineage.stale) == ([], 2)


def test_a_higher_claim_fences_lower_generations() -> None:
    lineage = Lineage.of([claim(1), commit(1, 1), claim(2, parent=MarkerId(1, 1)), commit(1, 2), commit(2, 2)])
    assert (ids(lineage), lineage.stale) == (["1:1", "2:2"], 1)


def test_a_lower_claim_never_comes_back() -> None:
    lineage = Lineage.of([claim(3), claim(2), commit(2, 1)])
    assert (list(lineage.claims), ids(lineage), lineage.stale) == ([3], [], 2)


def test_generation_zero_is_never_owned() -> None:
    assert Lineage.of([claim(0)]).claims == {}


def test_a_commit_in_front_of_its_claim_is_ignored() -> None:
    lineage = Lineage.of([commit(1, 1), claim(1)])
    assert (ids(lineage), lineage.stale) == ([], 1)


def test_a_commit_that_came_twice_counts_once() -> None:
    lineage = Lineage.of([claim(1), commit(1, 1, step=10), commit(1, 1, step=99)])
    assert (ids(lineage), lineage.find(MarkerId(1, 1)).step, lineage.stale) == (["1:1"], 10, 1)


def test_a_commit_that_lands_behind_a_later_marker_is_ignored() -> None:
    lineage = Lineage.of([claim(1), commit(1, 1), commit(1, 3), commit(1, 2)])
    assert (ids(lineage), lineage.stale) == (["1:1", "1:3"], 1)
    assert lineage.newest is not None
    assert lineage.newest.id == MarkerId(1, 3)


@pytest.mark.parametrize("record", [claim(2, job=OTHER_JOB), commit(1, 1, job=OTHER_JOB)])
def test_a_record_of_another_job_is_refused(record: object) -> None:
    lineage = Lineage.of([claim(1)])
    with pytest.raises(CorruptionError, match=r"control record of job 0{31}8 in the log of job 0{31}7"):
        lineage.apply(record)  # type: ignore[arg-type]


def test_a_marker_that_was_never_committed_names_those_that_were() -> None:
    lineage = Lineage.of([claim(1), *(commit(1, marker) for marker in range(1, 8))])
    with pytest.raises(MarkerNotFoundError, match=r"marker 1:9 is not committed .*1:3, 1:4, 1:5, 1:6, 1:7\)"):
        lineage.find(MarkerId(1, 9))
    with pytest.raises(MarkerNotFoundError, match="none at all"):
        Lineage().find(MarkerId(1, 1))


def branches() -> Lineage:
    """Generation 2 went on from 1:1, generation 3 from 1:2 (so 2 is abandoned), generation 4 from 3:4."""
    return Lineage.of(
        [
            claim(1),
            commit(1, 1),
            commit(1, 2),
            claim(2, parent=MarkerId(1, 1), swept=(1,)),
            commit(2, 2),
            commit(2, 3),
            claim(3, parent=MarkerId(1, 2)),
            commit(3, 3),
            commit(3, 4),
            claim(4, parent=MarkerId(3, 4), swept=(0,)),
            commit(4, 5),
        ]
    )


@pytest.mark.parametrize(
    ("marker", "path"),
    [
        ("1:2", ["1:2"]),
        ("2:3", ["1:1", "2:3"]),
        ("3:3", ["1:2", "3:3"]),
        ("4:5", ["1:2", "3:4", "4:5"]),
    ],
)
def test_the_path_follows_parents_and_leaves_branches_aside(marker: str, path: list[str]) -> None:
    assert [str(one.id) for one in branches().path(MarkerId.parse(marker))] == path


@pytest.mark.parametrize(
    ("marker", "bases"), [("1:1", {0: 1, 1: 1}), ("2:2", {0: 1, 1: 2}), ("3:4", {0: 1, 1: 1}), ("4:5", {0: 4, 1: 1})]
)
def test_a_base_is_the_newest_generation_on_the_path_that_sent_the_table_whole(
    marker: str, bases: dict[int, int]
) -> None:
    assert branches().bases(MarkerId.parse(marker)) == bases


@pytest.mark.parametrize("parent", [MarkerId(2, 1), MarkerId(3, 1)])
def test_a_parent_that_is_not_older_is_refused(parent: MarkerId) -> None:
    lineage = Lineage.of([claim(2, parent=parent), commit(2, 1)])
    with pytest.raises(CorruptionError, match=f"generation 2 names {parent} as its parent"):
        lineage.path(MarkerId(2, 1))


def test_a_parent_that_was_fenced_before_its_commit_is_not_there() -> None:
    lineage = Lineage.of([claim(1), claim(2, parent=MarkerId(1, 1)), commit(1, 1), commit(2, 2)])
    with pytest.raises(MarkerNotFoundError, match="marker 1:1 is not committed"):
        lineage.path(MarkerId(2, 2))
