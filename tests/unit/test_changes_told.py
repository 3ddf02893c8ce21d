"""What a lineage was told of changed models: repeated after a loss, and by which a spare knows its trainer's model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.builders import JOB, claim, commit, table
from torchrec_stream_ckpt.errors import CorruptionError, SchemaMismatchError
from torchrec_stream_ckpt.format.claim_changes import MAX_TEXT_BYTES, ClaimChanges
from torchrec_stream_ckpt.format.claim_references import brief
from torchrec_stream_ckpt.format.control import Claim, parse_control
from torchrec_stream_ckpt.format.lineage import Lineage, told_to
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.restore.model_change import refuse_changed
from torchrec_stream_ckpt.util.types import MarkerId

A, B = table("a", 6), table("b", 8)
OLD = Schema((A, B)).named(None, JOB, 1)
GROWN = Schema((replace(OLD.tables[0], rows=9, id=None), OLD.tables[1])).renewed(OLD, JOB, 2)
GROWTH, LAYER, OTHER = (ClaimChanges.of(text) for text in (b'{"rows":{"a":9}}', b'{"dense":1}', b'{"dense":2}'))
REASSIGNED = ClaimChanges.of(b'{"reassigned":["a"]}')
HELD = MarkerId(2, 3)


def lineage(*records: object) -> Lineage:
    """A first model, marked as 1:1, and what followed."""
    return Lineage.of([claim(1, schema=OLD), commit(1, 1), *records])  # type: ignore[list-item]


def grown(generation: int = 2, parent: str | None = "1:1", *more: ClaimChanges) -> Claim:
    at = MarkerId.parse(parent) if parent is not None else None
    changes = ClaimChanges.of_several((*more, GROWTH))
    return claim(generation, parent=at, schema=GROWN, swept=(0, 1) if at is None else (0,), changes=changes)


def plain(generation: int, parent: str | None, schema: Schema) -> Claim:
    at = MarkerId.parse(parent) if parent is not None else None
    return claim(generation, parent=at, schema=schema, swept=() if at is not None else (0, 1))


@pytest.mark.parametrize(
    "trainer",
    [
        plain(3, "2:3", GROWN),
        grown(3),  # it was killed, and started again with the same changes
        grown(3, None),  # its log lost all markers
        plain(3, None, replace(GROWN, tables=tuple(replace(each, id=None) for each in GROWN.tables))),  # fresh=True
    ],
    ids=["restarted", "the same change again", "after a loss of all", "fresh"],
)
def test_a_spare_goes_on_with_a_trainer_of_its_model(trainer: Claim) -> None:
    refuse_changed(lineage(grown(), commit(2, 3), trainer), 3, HELD)


@pytest.mark.parametrize(
    "trainer",
    [
        plain(3, "1:1", OLD),
        plain(3, None, OLD),
        grown(3, "1:1", LAYER),
        grown(3, None, LAYER),
        replace(plain(3, "2:3", GROWN), changes=LAYER),
        replace(plain(3, "1:1", OLD), changes=LAYER),
    ],
    ids=["rolled back", "fresh", "one change more", "one more after a loss", "changed on top", "changed otherwise"],
)
def test_a_spare_refuses_a_trainer_of_another_model(trainer: Claim) -> None:
    with pytest.raises(SchemaMismatchError, match="the trainer's model differs from this spare's") as refused:
        refuse_changed(lineage(grown(), commit(2, 3), trainer), 3, HELD)
    assert (refused.value.where["generation"], refused.value.where["marker"]) == (3, HELD)


def test_a_spare_tells_a_change_of_the_dense_model_by_what_was_told() -> None:
    """Tables are the same: rolled back from it, or changed to another one, or to the same one."""
    changed = replace(plain(2, "1:1", OLD), changes=LAYER)
    for changes in (None, OTHER):
        trainer = lineage(changed, commit(2, 3), replace(plain(3, "1:1", OLD), changes=changes))
        with pytest.raises(SchemaMismatchError):
            refuse_changed(trainer, 3, HELD)
    again = replace(plain(3, "1:1", OLD), changes=LAYER)
    refuse_changed(lineage(changed, commit(2, 3), again), 3, HELD)


@pytest.mark.parametrize("with_effect", [False, True])
def test_a_spare_goes_on_with_a_trainer_whose_raw_ids_have_kept_their_rows(with_effect: bool) -> None:
    """``reassigned`` was declared; of a table with new rows only its id is another one."""
    schema = Schema((replace(OLD.tables[0], id=None), OLD.tables[1])).renewed(OLD, JOB, 2) if with_effect else OLD
    trainer = replace(plain(2, "1:1", schema), swept=(0,) if with_effect else (), changes=REASSIGNED)
    again = plain(3, "2:3", schema)
    whole = lineage(trainer, commit(2, 3), again)
    for generation in (2, 3):
        if with_effect:
            with pytest.raises(SchemaMismatchError):
                refuse_changed(whole, generation, MarkerId(1, 1))
        else:
            refuse_changed(whole, generation, MarkerId(1, 1))
    refuse_changed(whole, 3, MarkerId(2, 3))
    assert told_to(whole, whole.claims[3]) == [REASSIGNED], "a restore with once=True finds it"


def test_all_changes_since_a_marker_are_told_and_none_of_before() -> None:
    first, second = replace(plain(3, "2:3", GROWN), changes=LAYER), replace(plain(4, "3:4", GROWN), changes=OTHER)
    whole = lineage(grown(), commit(2, 3), first, commit(3, 4), second, commit(4, 5))
    told = {since: told_to(whole, whole.claims[4], since) for since in (None, MarkerId(1, 1), HELD, MarkerId(4, 5))}
    assert list(told.values()) == [[OTHER, LAYER, GROWTH], [OTHER, LAYER, GROWTH], [OTHER, LAYER], []]
    repeated = replace(plain(5, "1:1", GROWN), swept=(0, 1), changes=ClaimChanges.of_several(told[MarkerId(1, 1)]))
    after = lineage(grown(), commit(2, 3), repeated, commit(5, 2))
    assert after.changes_made(MarkerId(5, 2)) == [OTHER, LAYER, GROWTH]
    again = replace(plain(6, "1:1", GROWN), changes=ClaimChanges.of_several(told_to(after, repeated)))
    assert again.changes == repeated.changes


def test_changes_made_one_after_the_other_are_read_as_they_were_written() -> None:
    long = ClaimChanges.of(b"[" + b"1" * (MAX_TEXT_BYTES - 20) + b"]")
    made = ClaimChanges.of_several([LAYER, long, OTHER])
    assert made is not None
    assert [each.text is None for each in made.each] == [False, False, True], "no room for a third text"
    assert [each.digest for each in made.each] == [LAYER.digest, long.digest, OTHER.digest]
    found = parse_control(brief(claim(1, schema=OLD, changes=made), {}).to_frame())
    assert isinstance(found, Claim)
    assert found.changes == made
    assert ClaimChanges.of_several([]) is None
    assert ClaimChanges.of_several([LAYER]) == LAYER


@pytest.mark.parametrize(
    ("earlier", "match"),
    [
        ((replace(LAYER, earlier=(OTHER,)),), "has fields"),
        ((replace(LAYER, digest="5F" * 32),), "earlier.digest is"),
        ((), "earlier has 0 changes"),
        ((LAYER,) * 1001, "earlier has 1001 changes"),
    ],
)
def test_earlier_changes_that_no_writer_writes_are_refused(earlier: tuple[ClaimChanges, ...], match: str) -> None:
    frame = brief(claim(1, schema=OLD, changes=replace(GROWTH, earlier=earlier)), {}).to_frame()
    with pytest.raises(CorruptionError, match=match):
        parse_control(frame)
