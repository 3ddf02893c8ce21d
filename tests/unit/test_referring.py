"""Schemas and layouts are kept once: what a CLAIM leaves to that of its parent's generation."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.builders import SCHEMA, claim, commit, table
from tests.parts import CommitKey, FileLog, body_of, fence_of, lineage_of
from tests.synthetic import Job, image_of_log
from torchrec_stream_ckpt.errors import CorruptionError
from torchrec_stream_ckpt.format.claim_references import alone, brief
from torchrec_stream_ckpt.format.control import Claim, parse_control
from torchrec_stream_ckpt.format.frame import MAX_FRAME_BYTES, parse_header, payload_of
from torchrec_stream_ckpt.format.lineage import Lineage, knows, towards
from torchrec_stream_ckpt.format.rank_shards import RankShards
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.inner import Control
from torchrec_stream_ckpt.util.types import MarkerId, TableShard

WHOLE = RankShards.of([(TableShard(0, 0, 6, 0, 4), TableShard(1, 0, 8, 0, 4))])
TURNED = RankShards.of([(TableShard(1, 0, 8, 0, 4), TableShard(0, 0, 6, 0, 4))])
assert WHOLE is not None
assert TURNED is not None
FIRST = claim(1, layout=WHOLE)


def said(record: Claim) -> dict[str, Any]:
    frame = record.to_frame()
    return json.loads(bytes(payload_of(parse_header(frame), frame)))


def read(record: Claim) -> Claim:
    found = parse_control(record.to_frame())
    assert isinstance(found, Claim)
    return found


def written(*layouts: RankShards | None) -> list[Claim]:
    """CLAIMs of generations with these layouts, each on the newest marker of the one before; as the log has them."""
    claims: dict[int, Claim] = {}
    for number, layout in enumerate(layouts, 1):
        parent = MarkerId(number - 1, number - 1) if number > 1 else None
        claims[number] = brief(claim(number, parent=parent, layout=layout), claims)
    return [read(each) for each in claims.values()]


def folded(claims: list[Claim]) -> Lineage:
    """The lineage of these, each with one marker."""
    return Lineage.of(each for one in claims for each in (one, commit(one.generation, one.generation)))


def test_a_restart_on_the_same_plan_writes_neither_schema_nor_layout_again() -> None:
    claims = written(WHOLE, WHOLE, WHOLE)
    for each in claims[1:]:
        assert said(each)["schema"] == {"tables": []}
        assert "layout" not in said(each)
        assert said(each)["same_schema"] == SCHEMA.crc
        assert said(each)["same_layout"] == WHOLE.crc
    found = folded(claims).claims
    assert {id(each.schema) for each in found.values()} == {id(found[1].schema)}
    assert {id(each.layout) for each in found.values()} == {id(found[1].layout)}
    assert found[3].schema.is_same(SCHEMA)
    assert found[3].layout == WHOLE


def test_another_plan_writes_its_layout_and_no_schema() -> None:
    claims = written(WHOLE, TURNED, TURNED, WHOLE)
    assert ["layout" in said(each) for each in claims] == [True, True, False, True]
    assert ["same_layout" in said(each) for each in claims] == [False, False, True, False]
    assert [said(each)["schema"] == {"tables": []} for each in claims] == [False, True, True, True]
    assert [each.layout for each in folded(claims).claims.values()] == [WHOLE, TURNED, TURNED, WHOLE]


def test_claims_with_and_without_a_layout_stand_on_each_other() -> None:
    claims = written(None, WHOLE, None, None, WHOLE, WHOLE)
    assert ["layout" in said(each) for each in claims] == [False, True, False, False, True, False]
    assert [each.layout for each in folded(claims).claims.values()] == [None, WHOLE, None, None, WHOLE, WHOLE]


def test_a_generation_without_a_parent_stands_for_itself() -> None:
    made = brief(claim(2, layout=WHOLE), {1: FIRST})
    assert (made.same_schema, made.same_layout) == (None, None)
    assert read(made).layout == WHOLE


def test_a_schema_whose_tables_have_other_ids_is_written() -> None:
    tables = tuple(replace(each, id=number) for number, each in enumerate(SCHEMA.tables, 1))
    made = brief(claim(2, parent=MarkerId(1, 1), layout=WHOLE, schema=Schema(tables)), {1: FIRST})
    assert made.same_schema is None
    assert made.same_layout == WHOLE.crc
    lineage = folded([FIRST, read(made)])
    assert [each.id for each in lineage.claims[2].schema.tables] == [1, 2]


def test_version_1_knows_none_of_it() -> None:
    old = claim(1, version=1)
    assert "layout" not in said(old)
    made = brief(claim(2, parent=MarkerId(1, 1), version=1), {1: old})
    assert made.same_schema is None
    assert read(made).version == 1
    for name, value in (("layout", WHOLE.to_text()), ("same_schema", 1), ("same_layout", 1)):
        text = json.dumps(said(old) | {name: value}).encode()
        with pytest.raises(CorruptionError, match="has fields"):
            Claim.from_json(parse_header(old.to_frame()), text)
    later = folded([old, read(brief(claim(2, parent=MarkerId(1, 1), layout=WHOLE), {1: old}))])
    assert later.claims[2].layout == WHOLE


def test_a_layout_that_makes_a_claim_too_large_is_left_out() -> None:
    name = "t" * 60
    large = Schema(tuple(table(f"{name}{number:06d}", 8, 4) for number in range(6_950)))
    layout = RankShards.of([tuple(TableShard(t, t % 8, t % 7 + 1, 0, 4) for t in range(0, 6_950, 3))])
    assert layout is not None
    made = brief(claim(1, schema=large, layout=layout), {})
    assert made.layout is None
    assert len(made.to_frame()) + len(layout.to_text()) > MAX_FRAME_BYTES - 1024 > len(made.to_frame())
    assert brief(claim(1, layout=layout, schema=Schema(large.tables[:100])), {}).layout is not None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: text | {"same_schema": 1}, "both tables and same_schema"),
        (lambda text: text | {"same_layout": 1}, "both layout and same_layout"),
        (lambda text: text | {"same_schema": 1, "schema": {"tables": []}, "parent": None}, "CLAIM has no parent"),
        (lambda text: text | {"same_layout": -1}, "CLAIM.same_layout is -1"),
        (lambda text: text | {"layout": 7}, "CLAIM.layout is 7"),
        (lambda text: text | {"layout": "x"}, "CLAIM.layout is not base64"),
    ],
)
def test_a_claim_that_says_two_things_is_refused(
    change: Callable[[dict[str, Any]], dict[str, Any]], words: str
) -> None:
    record = claim(2, parent=MarkerId(1, 1), layout=WHOLE)
    with pytest.raises(CorruptionError, match=words):
        Claim.from_json(parse_header(record.to_frame()), json.dumps(change(said(record))).encode())


SECOND = read(brief(claim(2, parent=MarkerId(1, 1), layout=WHOLE), {1: FIRST}))


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (None, SECOND, "takes its schema from generation 1, which is not in this log"),
        (FIRST, replace(SECOND, parent=MarkerId(2, 1)), "its schema from generation 2, which is not older"),
        (FIRST, replace(SECOND, same_schema=7), "its schema from generation 1, which has a different one.*00000007"),
        (FIRST, replace(SECOND, same_layout=7), "its layout from generation 1, which has a different one.*00000007"),
        (replace(FIRST, layout=None), SECOND, "its layout from generation 1, which does not have one"),
        (FIRST, replace(SECOND, world=2), "CLAIM.layout has 1 ranks, but CLAIM.world is 2"),
        (FIRST, replace(FIRST, generation=2, world=0), "CLAIM.layout has 1 ranks, but CLAIM.world is 0"),
        (replace(FIRST, schema=Schema(SCHEMA.tables[1:])), None, "is outside its table"),
    ],
)
def test_a_claim_that_leaves_something_to_another_one_that_has_it_not_is_refused(
    first: Claim | None, second: Claim | None, words: str
) -> None:
    records = [read(each) for each in (first, second) if each is not None]
    with pytest.raises(CorruptionError, match=words) as refused:
        Lineage.of(records)
    if "leaves" in words:
        assert "generation 2" in refused.value.message
        assert "stream-ckpt recover" in refused.value.hint
        assert refused.value.where["generation"] == 2


def test_a_claim_that_lost_its_number_is_not_asked_for_its_parent() -> None:
    lineage = Lineage.of([claim(3), read(replace(SECOND, parent=MarkerId(1, 1)))])
    assert lineage.stale == 1


def test_what_is_kept_of_a_lineage_is_written_as_it_was_read() -> None:
    claims = written(WHOLE, WHOLE, TURNED)
    lineage = folded(claims)
    frames = [each.to_frame() for each in claims]
    assert [lineage.claims[each].to_frame() for each in (1, 2, 3)] == frames
    again = lineage_of(body_of(lineage))
    assert again == lineage
    assert [each.layout for each in again.claims.values()] == [WHOLE, WHOLE, TURNED]
    assert all(knows(lineage, each) for each in claims)
    assert not knows(lineage, replace(claims[1], same_layout=7))
    told = towards(lineage, MarkerId(3, 3))
    assert [each.to_frame() for each in told.claims.values()] == frames


def test_what_goes_to_other_ranks_has_each_layout_and_schema_once() -> None:
    short, long = (pickle.dumps(folded(written(*[WHOLE] * count)).claims) for count in (2, 50))
    found = pickle.loads(long)
    assert {id(each.layout) for each in found.values()} == {id(found[1].layout)}
    assert {id(each.schema) for each in found.values()} == {id(found[1].schema)}
    assert (len(long) - len(short)) / 48 < 300


def test_a_fence_leaves_its_schema_to_its_parent_and_has_no_layout() -> None:
    fence = fence_of(folded(written(WHOLE, WHOLE)), "file:///log")
    assert (fence.generation, fence.world, fence.parent) == (3, 0, MarkerId(2, 2))
    assert fence.same_schema == SCHEMA.crc
    assert {"layout", "same_layout"}.isdisjoint(said(fence))
    lineage = folded(written(WHOLE, WHOLE))
    lineage.apply(read(fence))
    assert lineage.claims[3].schema is lineage.claims[1].schema


def test_a_claim_for_a_log_that_may_lack_its_parent_has_all_of_it() -> None:
    second = folded([FIRST, SECOND]).claims[2]
    lonely = read(alone(replace(second, mac="ab" * 32)))
    assert (lonely.mac, lonely.same_schema, lonely.same_layout) == ("", None, None)
    assert Lineage.of([lonely]).claims[2].layout == WHOLE
    assert alone(FIRST) is FIRST


def test_a_commit_key_vouches_for_the_record_as_it_is_written(tmp_path: Path) -> None:
    (key_file := tmp_path / "key").write_bytes(bytes(range(32)))
    key_file.chmod(0o600)
    key = CommitKey.load(key_file)
    log = FileLog(tmp_path / "log")
    log.prepare(1)
    records = [key.sign(each) for each in (FIRST, SECOND)]
    for record in records:
        log.append_control(record.to_frame())
    found = Control(log, key_file).refresh().claims
    assert found[2].layout is found[1].layout
    assert key.vouches_for(found[2]), "what was left out of the record is no part of what is signed"
    assert not key.vouches_for(replace(found[2], same_layout=7))


def test_a_claim_that_nobody_signed_gives_nothing_to_a_signed_one(tmp_path: Path) -> None:
    (key_file := tmp_path / "key").write_bytes(bytes(range(32)))
    key_file.chmod(0o600)
    log = FileLog(tmp_path / "log")
    log.prepare(1)
    log.append_control(FIRST.to_frame())
    log.append_control(CommitKey.load(key_file).sign(SECOND).to_frame())
    with pytest.raises(CorruptionError, match="generation 1, which is not in this log"):
        Control(log, key_file).refresh()


def test_a_claim_that_is_written_anew_for_another_log_is_signed_anew(tmp_path: Path) -> None:
    (key_file := tmp_path / "key").write_bytes(bytes(range(32)))
    key_file.chmod(0o600)
    key = CommitKey.load(key_file)
    (log := FileLog(tmp_path / "log")).prepare(1)
    signed = [folded([key.sign(FIRST), key.sign(SECOND)]).claims[each] for each in (1, 2)]
    Control(log, key_file).append(alone(signed[1]))
    (record,) = (record for _, record in log.read_control())
    assert parse_control(record) == key.sign(replace(signed[1], same_schema=None, same_layout=None))
    (other := FileLog(tmp_path / "other")).prepare(1)
    Control(other).append(signed[0])
    assert [record for _, record in other.read_control()] == [key.sign(FIRST).to_frame()]


def test_a_log_that_was_restarted_often_grows_by_less_than_a_kilobyte_each(tmp_path: Path) -> None:
    wide = Schema(tuple(table(f"t{number:03d}", 8, 4) for number in range(200)))
    job = Job(tmp_path, 2, schema=wide)
    job.begin()
    newest = job.commit()
    sizes = []
    for _ in range(3):
        before = (tmp_path / "control.log").stat().st_size
        job.begin(newest.id)
        sizes.append((tmp_path / "control.log").stat().st_size - before)
        newest = job.commit()
    assert max(sizes) < 1024 < len(job.claims[1].to_frame()) / 10
    lineage = Control(job.log).refresh()
    assert image_of_log(job.log, lineage, newest.id) == image_of_log(job.log, lineage, MarkerId(1, 1))


def test_a_claim_that_shall_stand_alone_goes_without_a_layout_that_finds_no_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second = folded(written(WHOLE, TURNED)).claims.values()
    assert second.same_schema is not None
    assert alone(second).layout == TURNED
    monkeypatch.setattr("torchrec_stream_ckpt.format.claim_references._ROOM", 100)
    found = alone(second)
    assert (found.schema, found.layout, found.same_schema) == (first.schema, None, None)
