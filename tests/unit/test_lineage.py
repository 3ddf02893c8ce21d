"""Who owns a generation and which markers exist: decided by the order of the control partition alone."""

from __future__ import annotations

import pytest

from tests.builders import OTHER_JOB, SCHEMA, claim, commit, trim
from torchrec_stream_ckpt.errors import CorruptionError, MarkerNotFoundError
from torchrec_stream_ckpt.format.lineage import Lineage, towards
from torchrec_stream_ckpt.util.types import LogSpan, MarkerId, RankEnd


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


@pytest.mark.parametrize("record", [claim(2, job=OTHER_JOB), commit(1, 1, job=OTHER_JOB), trim("1:1", job=OTHER_JOB)])
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
    with pytest.raises(CorruptionError, match=f"generation 2 has parent {parent}, which is not older"):
        lineage.path(MarkerId(2, 1))


def test_a_parent_that_was_fenced_before_its_commit_is_not_there() -> None:
    lineage = Lineage.of([claim(1), claim(2, parent=MarkerId(1, 1)), commit(1, 1), commit(2, 2)])
    with pytest.raises(MarkerNotFoundError, match="marker 1:1 is not committed"):
        lineage.path(MarkerId(2, 2))


def reach(lineage: Lineage) -> list[str]:
    return [str(marker) for marker in lineage.trims.reach.values()]


def test_nothing_is_trimmed_until_somebody_says_so() -> None:
    assert (branches().trims.reach, branches().trims.newest, branches().trims.of(1)) == ({}, None, None)


def test_a_trim_takes_each_generation_up_to_its_own_marker() -> None:
    lineage = branches()
    lineage.apply(trim("1:2", "3:3"))
    assert reach(lineage) == ["1:2", "3:3"]
    assert lineage.trims.newest == lineage.trims.of(1) == lineage.trims.of(3) == trim("1:2", "3:3")
    assert (lineage.trims.of(2), lineage.trims.of(4)) == (None, None)


def test_a_later_trim_never_takes_back_an_earlier_one() -> None:
    lineage = branches()
    for record in (trim("1:2", "3:4"), trim("1:1", "2:3"), trim("1:2", "3:3")):
        lineage.apply(record)
    assert reach(lineage) == ["1:2", "3:4", "2:3"]
    assert lineage.trims.newest == lineage.trims.of(3) == trim("1:2", "3:4")
    assert lineage.trims.of(2) == trim("1:1", "2:3")


def test_of_two_trims_of_one_marker_the_later_one_says_where_the_store_is() -> None:
    lineage = branches()
    for store in ("file:///old", "file:///new"):
        lineage.apply(trim("1:2", store=store))
    assert lineage.trims.of(1) == lineage.trims.newest == trim("1:2", store="file:///new")


@pytest.mark.parametrize("markers", [("1:3",), ("1:9", "3:4"), ("2:1",)])
def test_a_trim_of_a_marker_that_is_not_committed_counts_for_nothing(markers: tuple[str, ...]) -> None:
    lineage = branches()
    lineage.apply(trim(*markers))
    lineage.apply(commit(4, 6))  # and none that comes later makes it count
    assert (lineage.trims.reach, len(lineage.trims), lineage.stale) == ({}, 0, 1)


def test_a_trim_in_front_of_its_commit_counts_for_nothing() -> None:
    lineage = Lineage.of([claim(1), trim("1:1"), commit(1, 1)])
    assert (lineage.trims.reach, lineage.stale) == ({}, 1)


def test_the_log_has_to_hold_what_is_not_trimmed() -> None:
    def ends(*at: int) -> list[RankEnd]:
        return [RankEnd(rank, rank, 5, end, 2, 0, 0, 0) for rank, end in enumerate(at)]

    lineage = Lineage.of([claim(1), commit(1, 1, ends(10, 20)), commit(1, 2, ends(30, 20)), commit(1, 3, ends(40, 50))])
    whole = [LogSpan(1, 0, 5, 40), LogSpan(1, 1, 5, 50)]
    assert lineage.spans(1, ends(40, 50)) == whole
    lineage.apply(trim("1:2"))
    assert lineage.spans(1, ends(40, 50)) == [LogSpan(1, 0, 30, 40), LogSpan(1, 1, 20, 50)]
    assert lineage.spans(1, ends(30, 21)) == [LogSpan(1, 1, 20, 21)]
    assert lineage.spans(1, ends(10, 20)) == []
    assert lineage.spans(1, ends(40, 50), {}) == whole
    assert lineage.spans(2, ends(40, 50)) == [LogSpan(2, 0, 5, 40), LogSpan(2, 1, 5, 50)]


def test_a_restore_is_told_of_the_markers_that_lead_to_it_alone() -> None:
    records = [claim(1), commit(1, 1), commit(1, 2), commit(1, 3), claim(2, parent=MarkerId(1, 1)), commit(2, 2)]
    records += [claim(3, parent=MarkerId(1, 2)), commit(3, 3), commit(3, 4), trim("1:1")]
    lineage = Lineage.of(records)
    told = towards(lineage, MarkerId(3, 3))
    assert (list(told.claims), ids(told)) == ([1, 3], ["1:1", "1:2", "3:3"])
    for marker in (MarkerId(3, 3), MarkerId(1, 2)):
        assert told.path(marker) == lineage.path(marker)
        assert told.chain(marker) == lineage.chain(marker)
        assert told.bases(marker) == lineage.bases(marker)


def test_a_marker_that_is_added_follows_on_the_one_before_it() -> None:
    lineage = Lineage.of([claim(1), commit(1, 1), commit(1, 4)])
    assert (lineage.previous(MarkerId(1, 1)), lineage.previous(MarkerId(1, 4))) == (None, MarkerId(1, 1))
    lineage.apply(commit(1, 6))
    assert lineage.previous(MarkerId(1, 6)) == MarkerId(1, 4)
    assert lineage.newest_of(1) == MarkerId(1, 6)
    assert [each.marker for each in lineage.chain(MarkerId(1, 4))] == [1, 4]


def test_generations_with_the_same_tables_keep_them_once() -> None:
    named = SCHEMA.named(None, b"j" * 16, 1)
    other = SCHEMA.named(None, b"k" * 16, 1)
    records = [claim(1, schema=named), claim(2, schema=SCHEMA.named(None, b"j" * 16, 1)), claim(3, schema=other)]
    claims = Lineage.of(records).claims
    assert claims[2].schema is claims[1].schema
    assert [table.id for table in claims[3].schema.tables] == [table.id for table in other.tables]


def test_a_lineage_that_is_put_together_knows_what_was_trimmed() -> None:
    lineage = Lineage.of([claim(1), commit(1, 1), commit(1, 2), trim("1:1")])
    again = Lineage(lineage.claims, lineage.commits, lineage.trims)
    assert again.trims.reach == lineage.trims.reach == {1: MarkerId(1, 1)}
