"""END and NOTE: when they count, and what a record refuses to hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.golden import make
from torchrec_stream_ckpt.errors import ConfigError, CorruptionError
from torchrec_stream_ckpt.format.control import Claim, Commit, parse_control
from torchrec_stream_ckpt.format.end_note import End, Note, Outcome
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.format.record import MAX_META_BYTES, meta_of
from torchrec_stream_ckpt.util.types import MarkerId, RankEnd

FIRST = MarkerId(1, make.MARKER)


def commit(marker: int = make.MARKER, generation: int = 1) -> Commit:
    return replace(make.commit(RankEnd(0, 0, 0, 10, 2, 1, 0, 0)), marker=marker, generation=generation)


def claim(generation: int = 1) -> Claim:
    return replace(make.claim(), generation=generation)


def test_the_last_word_counts_until_somebody_claims_a_higher_generation() -> None:
    lineage = Lineage.of([claim(), commit(), make.end_record()])
    assert lineage.ended == make.end_record()
    lineage.apply(claim(2))
    assert lineage.ended is None
    assert lineage.ends[1].outcome == Outcome.FAILED


def test_no_marker_counts_after_the_last_word_of_its_generation() -> None:
    lineage = Lineage.of([claim(), commit(), make.end_record(), commit(2)])
    assert list(lineage.commits) == [FIRST]
    assert lineage.stale == 1


@pytest.mark.parametrize("end", [replace(make.end_record(), nonce="other"), replace(make.end_record(), generation=3)])
def test_the_last_word_of_somebody_else_is_ignored(end: End) -> None:
    lineage = Lineage.of([claim(), commit(), end])
    assert lineage.ended is None
    assert lineage.stale == 1


def test_a_fenced_trainer_has_no_last_word() -> None:
    assert Lineage.of([claim(), claim(2), make.end_record()]).ends == {}


def test_later_metadata_of_a_marker_stands_over_older() -> None:
    lineage = Lineage.of([claim(), commit(), make.note(), replace(make.note(), meta=meta_of({"auc": 0.9, "x": 1}))])
    assert dict(lineage.meta(FIRST)) == {"auc": 0.9, "run": "nightly", "x": 1}


def test_metadata_of_a_marker_that_does_not_exist_is_ignored() -> None:
    lineage = Lineage.of([claim(), make.note()])
    assert lineage.notes == {}
    assert lineage.stale == 1


@pytest.mark.parametrize(
    ("meta", "why"),
    [
        ({"a b": 1}, "metadata name .* is not valid"),
        ({"": 1}, "metadata name .* is not valid"),
        ({"x": float("nan")}, "metadata x must be .*, got nan"),
        ({"x": float("inf")}, "metadata x must be .*, got inf"),
        ({"x": 2**53}, "below 2"),
        ({"x": True}, "metadata x must be .*, got True"),
        ({"x": [1]}, r"metadata x must be .*, got \[1\]"),
        ({"x": "y" * MAX_META_BYTES}, "too large"),
    ],
)
def test_metadata_that_a_record_cannot_hold_is_refused_by_name(meta: dict[str, object], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        meta_of(meta)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda text: text.replace(b'"failed"', b'"bored"_'), "JSON"),
        (lambda text: text.replace(b'"failed"', b'"FAILED"'), "expected one of finished, preempted, failed"),
        (lambda text: text.replace(b"ValueError", b"Value\\u000a"), "not a short line"),
    ],
)
def test_a_last_word_that_no_trainer_writes_is_refused(change: Callable[[bytes], bytes], why: str) -> None:
    payload = bytes(memoryview(make.end_record().to_frame())[128:])
    header = make.end_record().header()
    with pytest.raises(CorruptionError, match=why):
        End.from_json(header, change(payload))


def test_signed_records_are_vouched_for_as_all_others() -> None:
    for record in (make.end_record(), make.note()):
        signed = make.KEY.sign(record)
        assert make.KEY.vouches_for(parse_control(signed.to_frame()))
        changed = replace(signed, time_s=0.0)
        assert isinstance(changed, End | Note)
        assert not make.KEY.vouches_for(changed)
