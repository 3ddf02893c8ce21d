"""Tables along a lineage whose model changes: what an index means, and what a CLAIM may not say."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.builders import JOB, ROWWISE, claim, commit, table
from torchrec_stream_ckpt.errors import CorruptionError
from torchrec_stream_ckpt.find.route import Path
from torchrec_stream_ckpt.format.claim_changes import (
    MAX_TEXT_BYTES,
    ClaimChanges,
    TableChange,
    changes_of,
    check_follows,
    in_words,
    same_tables,
)
from torchrec_stream_ckpt.format.claim_references import alone, brief
from torchrec_stream_ckpt.format.control import Claim, parse_control
from torchrec_stream_ckpt.format.frame import parse_header
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.util.types import TOMBSTONE, MarkerId, TableShard

A, B, C = table("a", 6), table("b", 8, 4, "float32", ROWWISE), table("c", 3)
OLD = Schema((A, B)).named(None, JOB, 1)
PARENT = MarkerId(1, 1)


def evolved(*tables: object, generation: int = 2, parent: Schema = OLD) -> Schema:
    return Schema(tables).renewed(parent, JOB, generation)  # type: ignore[arg-type]


def test_a_table_that_goes_on_keeps_its_id_and_every_other_one_gets_a_new_one() -> None:
    a, b = OLD.tables
    schema = evolved(TOMBSTONE, replace(b, name="z"), C)
    assert [each.id for each in schema.tables[:2]] == [None, b.id]
    assert schema.tables[2].id not in {None, a.id, b.id}
    back = evolved(*schema.tables, replace(A, id=None), generation=3, parent=schema)
    assert back.tables[:3] == schema.tables
    assert [each.id for each in back.tables[:3]] == [each.id for each in schema.tables]
    assert back.tables[3].id not in {each.id for each in (*OLD.tables, *schema.tables)}


def test_a_plain_restore_takes_ids_by_name_in_the_order_of_the_lineage() -> None:
    saved = evolved(TOMBSTONE, replace(OLD.tables[1], name="z"), C)
    here = Schema((C, replace(B, name="z")))
    found = same_tables(saved, here)
    assert found == saved
    assert found.named(saved, JOB, 5).is_same(saved)
    assert same_tables(saved, Schema((C, B))) is None
    assert same_tables(saved, Schema((C,))) is None


def test_what_became_of_each_table_is_told_by_index_and_id() -> None:
    a, b = OLD.tables
    schema = evolved(replace(a, rows=9, id=None), replace(b, name="z"), C)
    found = [(what, before.name, now.name) for what, before, now in changes_of(OLD, schema)]
    assert found == [
        (TableChange.CHANGED, "a", "a"),
        (TableChange.RENAMED, "b", "z"),
        (TableChange.ADDED, "", "c"),
    ]
    assert [what for what, *_ in changes_of(schema, evolved(TOMBSTONE, *schema.tables[1:], parent=schema))] == [
        TableChange.DROPPED
    ]
    assert not list(changes_of(schema, schema))


@pytest.mark.parametrize(
    ("schema", "swept", "match"),
    [
        (Schema(OLD.tables[:1]), (), "fewer tables"),
        (evolved(*OLD.tables, C), (), "table c differs from the parent's"),
        (evolved(TOMBSTONE, OLD.tables[1]), (), "table a differs from the parent's"),
        (evolved(replace(A, rows=9), OLD.tables[1]), (1,), "table a differs from the parent's"),
        (evolved(replace(OLD.tables[0], rows=9), OLD.tables[1]), (0,), "table a has changed but keeps its id"),
    ],
)
def test_an_index_that_means_another_table_without_a_word_is_refused(
    schema: Schema, swept: tuple[int, ...], match: str
) -> None:
    with pytest.raises(CorruptionError, match=match) as caught:
        check_follows(OLD, schema, swept, 2)
    assert caught.value.where["generation"] == 2
    records = [claim(1, schema=OLD), commit(1, 1), claim(2, parent=PARENT, schema=schema, swept=swept)]
    with pytest.raises(CorruptionError, match=match):
        Lineage.of(records)


def test_the_index_of_a_dropped_table_is_never_used_again() -> None:
    dropped = evolved(TOMBSTONE, OLD.tables[1])
    with pytest.raises(CorruptionError, match="has the index of a dropped table"):
        check_follows(dropped, evolved(A, OLD.tables[1], generation=3, parent=dropped), (0,), 3)
    check_follows(dropped, dropped, (), 3)
    check_follows(dropped, evolved(*dropped.tables, A, generation=3, parent=dropped), (2,), 3)


def test_tables_of_version_1_are_the_same_if_all_else_is() -> None:
    check_follows(OLD.unnamed, OLD, (), 2)
    with pytest.raises(CorruptionError, match="table a differs from the parent's"):
        check_follows(OLD.unnamed, evolved(replace(A, rows=9), OLD.tables[1]), (), 2)


def test_a_claim_is_of_version_3_only_where_it_says_what_version_2_cannot() -> None:
    first = brief(claim(1, schema=OLD), {})
    assert first.version == 2
    schema = evolved(TOMBSTONE, OLD.tables[1])
    changes = ClaimChanges.of(b'{"dropped":["a"]}')
    second = brief(claim(2, parent=PARENT, schema=schema, swept=(0,), changes=changes), {1: first})
    assert second.version == 3
    third = brief(claim(3, parent=MarkerId(2, 1), schema=schema, swept=()), {1: first, 2: second})
    assert (third.version, third.same_schema) == (2, schema.crc)
    assert alone(third).version == 3
    for each in (second, third, alone(third)):
        assert parse_header(each.to_frame()).version == each.version
        assert parse_control(each.to_frame()).to_frame() == each.to_frame()
    root = brief(claim(4, schema=OLD, changes=ClaimChanges.of(b"{}", (JOB, MarkerId(3, 7)))), {})
    found = parse_control(root.to_frame())
    assert isinstance(found, Claim)
    assert found.changes is not None
    assert (root.version, found.changes.source) == (3, (JOB.hex(), MarkerId(3, 7)))


def test_changes_that_are_too_long_are_known_by_their_digest() -> None:
    long = b"[" + b"1," * MAX_TEXT_BYTES + b"1]"
    said = ClaimChanges.of(long)
    assert said.text is None
    made = brief(claim(1, schema=OLD, changes=said), {})
    found = parse_control(made.to_frame())
    assert isinstance(found, Claim)
    assert found.changes == said


@pytest.mark.parametrize(
    ("field", "value", "match"),
    [
        ("digest", "5F" * 32, "digest is"),
        ("text", "[]", "does not have the digest"),
        ("text", "é", "is not ASCII"),
        ("origin", "1:2", "origin is"),
    ],
)
def test_changes_that_no_writer_writes_are_refused(field: str, value: str, match: str) -> None:
    wrong = replace(ClaimChanges.of(b"{}"), **{field: value})
    frame = brief(claim(1, schema=OLD, changes=wrong), {}).to_frame()
    with pytest.raises(CorruptionError, match=match):
        parse_control(frame)


def test_a_change_in_a_frame_of_version_2_is_refused() -> None:
    schema = evolved(TOMBSTONE, OLD.tables[1])
    for more, match in (({"changes": ClaimChanges.of(b"{}")}, "has fields"), ({"schema": schema}, "must be sorted")):
        frame = claim(1, **more).to_frame()  # type: ignore[arg-type]
        with pytest.raises(CorruptionError, match=match):
            parse_control(frame)


def test_an_older_fence_with_the_tables_of_another_root_is_read() -> None:
    """Older programs wrote into a fence the tables of the newest generation, whatever its parent: here other ids."""
    other = Schema((replace(A, id=None), replace(B, id=None))).named(None, JOB, 2)
    fence = claim(3, parent=PARENT, schema=other, world=0, swept=(), layout=None)
    log = [claim(1, schema=OLD), commit(1, 1), claim(2, schema=other), fence]
    found = Lineage.of([parse_control(record.to_frame()) for record in log])  # type: ignore[misc]
    assert (found.newest_generation, found.claims[3].world, found.stale) == (3, 0, 0)
    with pytest.raises(CorruptionError, match="this generation does not send all its rows"):
        Lineage.of([*log[:3], replace(fence, world=1)])  # type: ignore[list-item]


def test_what_changed_is_told_by_what_is_other_than_before() -> None:
    a, b = OLD.tables
    wide = replace(ROWWISE, per_row=False)
    schema = evolved(replace(a, id=None), replace(b, states=(wide,), id=None, name="z"))
    assert in_words(OLD, schema) == [
        "a: rows have other ids",
        "b: renamed z, states momentum1 (float32 a row) -> momentum1 (float32 a weight)",
    ]
    assert in_words(OLD, evolved(a, replace(b, states=(), id=None)))[0].endswith("(float32 a row) -> none")


def test_an_earlier_marker_proves_a_table_by_its_id_and_not_by_its_index() -> None:
    schema = evolved(replace(OLD.tables[0], rows=9, id=None), OLD.tables[1], C)
    ids = {number: tuple(table.id for table in each.tables) for number, each in ((1, OLD), (2, schema))}
    path = Path((PARENT, MarkerId(1, 2), MarkerId(2, 3)), ids=ids)
    assert [path.same_table(index).tolist() for index in range(3)] == [
        [False, False, True],
        [True, True, True],
        [False, False, True],
    ]


def test_a_dropped_table_holds_no_shard() -> None:
    schema = evolved(TOMBSTONE, OLD.tables[1])
    assert not schema.holds(TableShard(0, 0, 1, 0, 1))
    assert schema.holds(TableShard(1, 0, 8, 0, 4))
