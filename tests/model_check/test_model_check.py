"""All runs of the protocol keep its promises, and each of its rules is needed."""

from __future__ import annotations

from dataclasses import fields

import pytest

from tests.model_check.bounds import FULL, SMALL, Bound, BucketBound, RecordBound, SnapshotBound
from tests.model_check.bucket import BucketRules
from tests.model_check.bucket_stream import StreamRules
from tests.model_check.explore import explore
from tests.model_check.mutations import (
    BUCKET_MUTATIONS,
    MUTATIONS,
    RECORD_MUTATIONS,
    SECOND_LINES,
    SNAPSHOT_MUTATIONS,
    STREAM_MUTATIONS,
    BucketMutation,
    Mutation,
    RecordMutation,
    SnapshotMutation,
    StreamMutation,
)
from tests.model_check.records import RecordRules
from tests.model_check.rules import Rules
from tests.model_check.snapshots import SnapshotRules


@pytest.mark.parametrize("bound", SMALL, ids=str)
def test_every_run_of_a_small_machine_keeps_all_promises(
    bound: Bound | SnapshotBound | RecordBound | BucketBound,
) -> None:
    found = explore(bound.machine())
    assert found.broken is None, "\n".join([str(found.broken), *found.trace])
    assert found.states > 3_000


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("bound", FULL, ids=str)
def test_every_run_of_a_full_machine_keeps_all_promises(
    bound: Bound | SnapshotBound | RecordBound | BucketBound,
) -> None:
    found = explore(bound.machine())
    print(f"{bound}: {found.states:,} states, {found.depth} steps deep")
    assert found.broken is None, "\n".join([str(found.broken), *found.trace])
    assert found.states > 50_000


@pytest.mark.parametrize(
    "mutation",
    [*MUTATIONS, *SNAPSHOT_MUTATIONS, *RECORD_MUTATIONS, *BUCKET_MUTATIONS, *STREAM_MUTATIONS],
    ids=lambda mutation: mutation.name,
)
def test_without_this_rule_a_promise_breaks(
    mutation: Mutation | SnapshotMutation | RecordMutation | BucketMutation | StreamMutation,
) -> None:
    found = explore(mutation.machine(), most=100_000)
    assert found.broken is not None
    print(f"without {mutation.name}: {found.broken}", *found.trace, sep="\n  ")
    assert found.broken.promise == mutation.promise


@pytest.mark.parametrize("mutation", SECOND_LINES, ids=lambda mutation: mutation.name)
def test_without_this_rule_another_one_keeps_the_promise(mutation: Mutation | RecordMutation) -> None:
    assert explore(mutation.machine()).broken is None


def test_every_rule_is_dropped_by_a_mutation() -> None:
    dropped = {name for mutation in (*MUTATIONS, *RECORD_MUTATIONS, *SECOND_LINES) for name in mutation.rules}
    assert dropped == {field.name for rules in (Rules, RecordRules) for field in fields(rules)}
    of_buckets = [name for mutation in (*BUCKET_MUTATIONS, *STREAM_MUTATIONS) for name in mutation.rules]
    assert sorted(of_buckets) == sorted(field.name for rules in (BucketRules, StreamRules) for field in fields(rules))
    assert {mutation.rule for mutation in SNAPSHOT_MUTATIONS} == {field.name for field in fields(SnapshotRules)}
