"""What is said of markers: what one can hold, how it is found again, and where it must not get lost."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tests import stores, tiered
from tests.command import ask, run
from tests.parts import arm, pin
from tests.stores import History
from tests.tiered import TieredJob, lose, relay
from torchrec_stream_ckpt.errors import ConfigError, LogUnavailableError, MarkerNotFoundError
from torchrec_stream_ckpt.find.best import Best, Condition, best_of, meeting, ordered, said_of
from torchrec_stream_ckpt.format.end_note import Note
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.format.record import PIN, Meta, meta_of
from torchrec_stream_ckpt.inner import Catalog, Control, open_store
from torchrec_stream_ckpt.save.marker_notes import agreed, given
from torchrec_stream_ckpt.store.pins import pinned
from torchrec_stream_ckpt.util.types import MarkerId

POINTS = ("note.append", "note.appended", "relay.note")
"""Where a writer of a NOTE dies here."""
FIRST, SECOND, THIRD, FOURTH = (MarkerId(1, number) for number in range(1, 5))
SAID = {
    FIRST: {"auc": 0.7, "run": "a"},
    SECOND: {"auc": 0.9, "run": "b"},
    THIRD: {"run": "7"},
    FOURTH: {"auc": 0.9, "run": "c"},
}


def add(control: Control, marker: MarkerId, meta: Meta, nonce: str = "n") -> None:
    control.note(Note(control.refresh().job, marker.generation, marker.marker, meta, nonce, 0.0), timeout_s=5.0)


@pytest.fixture
def history(tmp_path: Path) -> History:
    """Four markers, and what was said of them later; the second copy has it, too."""
    made = History(tmp_path / "job")
    made.generation(1, [1, 2, 3, 4])
    objects = open_store(str(made.root))
    control = Control(made.log, copies=(objects, f"file://{made.root}"))
    for marker, said in SAID.items():
        add(control, marker, meta_of(said))
    control.close()
    return made


# What a marker can hold.


@pytest.mark.parametrize(
    ("meta", "pin", "why"),
    [
        ({"auc": float("nan")}, None, "metadata auc must be .*, got nan"),
        ({"auc": float("inf")}, None, "metadata auc must be .*, got inf"),
        ({"auc": torch.tensor(0.8)}, None, r"metadata auc must be .*, got tensor\(0.8"),
        ({"auc": True}, None, "metadata auc must be .*, got True"),
        ({"auc": None}, None, "metadata auc must be .*, got None"),
        ({"a b": 1}, None, "name 'a b' is not valid"),
        ({1: 1}, None, "meta must map names to values, got"),
        ([("auc", 1)], None, "meta must map names to values, got"),
        ({"text": "x" * 4096}, None, "is too large"),
        ({"pin": "it"}, None, "metadata name pin is reserved"),
        (None, "", "pin must be a reason in text, got ''"),
        (None, 7, "pin must be a reason in text, got 7"),
    ],
)
def test_what_a_marker_cannot_hold_is_refused_with_its_name(meta: object, pin: object, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as refused:
        given(meta, pin)  # type: ignore[arg-type]
    assert refused.value.hint


def test_a_rank_may_repeat_the_pin_alone_or_the_values_alone_and_nothing_else() -> None:
    first = given({"auc": 0.5}, "keep")
    repeats = [given(None, None), given(None, "keep"), given({"auc": 0.5}, None), first]
    assert agreed([first, *repeats]) == first
    others = [(first, given(None, "other")), (first, given({"auc": 0.7}, "keep")), (given(None, "keep"), first)]
    for one, other in [*others, (given({"auc": 0.5}, None), given(None, "keep"))]:
        with pytest.raises(ConfigError, match="the ranks pass different meta or pin for this marker"):
            agreed([one, other])


def test_numbers_of_numpy_are_held_as_numbers_and_why_it_is_pinned_among_them() -> None:
    held = given({"auc": np.float64(0.801), "n": 3}, "best so far")
    assert json.loads(json.dumps(dict(held))) == {"auc": 0.801, "n": 3, "pin": "best so far"}
    assert given(None, None) == given({}, None) == ()


# How it is found again.


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("auc>0.7", [SECOND, FOURTH]),
        ("auc >= 0.7", [FIRST, SECOND, FOURTH]),
        ("auc!=0.9", [FIRST]),
        ("auc = 0.9", [SECOND, FOURTH]),
        ("run<c", [FIRST, SECOND, THIRD]),
        ("run=7", [THIRD]),
        ("run>'7'", [FIRST, SECOND, FOURTH]),
    ],
)
def test_a_condition_finds_the_markers_that_have_such_a_value(text: str, found: list[MarkerId]) -> None:
    assert meeting(SAID, [Condition.parse(text)]) == found


@pytest.mark.parametrize("text", ["auc", "> 3", "auc>", "a b>1", ""])
def test_what_is_no_condition_is_refused_with_the_form(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a condition"):
        Condition.parse(text)


def test_an_unknown_name_is_refused_with_the_nearest_ones() -> None:
    for give in (
        lambda: meeting(SAID, [Condition.parse("acu>0.8")]),
        lambda: ordered(list(SAID), SAID, "acu"),
        lambda: best_of(SAID, Best.parse("acu:max")),
    ):
        with pytest.raises(ConfigError, match="'acu'") as refused:
            give()
        assert refused.value.hint == "did you mean auc?"
    with pytest.raises(ConfigError, match="no marker has 'auc'") as refused:
        best_of({FIRST: {}}, Best.parse("auc:max"))
    assert "mark(meta=" in refused.value.hint


def test_text_and_numbers_do_not_compare_and_the_markers_are_named() -> None:
    mixed = {FIRST: {"auc": 0.7}, SECOND: {"auc": "good"}}
    for give in (lambda: ordered(list(mixed), mixed, "auc"), lambda: best_of(mixed, Best.parse("auc:min"))):
        with pytest.raises(ConfigError, match=r"text 'good' at marker 1:2 but the number 0.7 at marker 1:1"):
            give()
    with pytest.raises(ConfigError, match="run of marker 1:1 is the text 'a', but 7 is a number"):
        meeting(SAID, [Condition.parse("run>7")])
    with pytest.raises(ConfigError, match=r"auc of marker 1:1 is the number 0.7, but 'high' is a text"):
        meeting(SAID, [Condition.parse("auc>high")])


def test_the_best_is_the_newest_of_equal_ones_and_markers_without_a_value_are_none_of_them() -> None:
    assert best_of(SAID, Best.parse("auc:max")) == FOURTH
    assert best_of(SAID, Best.parse("auc:min")) == FIRST
    assert Best.parse("auc:max:2", several=True).ranked(SAID)[:2] == [FOURTH, SECOND]
    assert best_of(SAID, Best.parse("run:max")) == FOURTH
    with pytest.raises(MarkerNotFoundError):
        best_of({}, Best.parse("auc:max"))


@pytest.mark.parametrize("text", ["auc", "auc:highest", "auc:max:3", ":max", "auc:max:"])
def test_what_does_not_say_which_is_the_best_is_refused_with_the_form(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a valid rule for the best marker") as refused:
        Best.parse(text)
    assert "auc:max" in refused.value.hint


def test_markers_are_sorted_by_a_value_and_those_without_it_are_the_lowest() -> None:
    assert ordered(list(SAID), SAID, "auc") == [THIRD, FIRST, SECOND, FOURTH]
    assert ordered(list(SAID), SAID, "auc:desc") == [FOURTH, SECOND, FIRST, THIRD]
    with pytest.raises(ConfigError, match="is not a sort order"):
        ordered(list(SAID), SAID, "auc:up")


def test_list_and_show_say_it_and_filter_by_it(history: History) -> None:
    uri = f"file://{history.root}"
    rows = {row["marker"]: row["meta"] for row in ask("list", uri)["markers"]}
    assert rows == {str(marker): said for marker, said in SAID.items()}
    picked = ask("list", uri, "--where", "auc>0.6", "--where", "step<40", "--sort", "auc:desc")
    assert [row["marker"] for row in picked["markers"]] == ["1:2", "1:1"]
    newest = ask("list", uri, "--where", "auc>0.6", "--newest", "2")["markers"]
    assert [row["marker"] for row in newest] == ["1:2", "1:4"]
    assert "auc=0.9, run=b" in run("list", uri)
    assert "auc=0.9, run=b" in run("list", uri, "--tree")
    assert "meta: run=7" in run("show", uri, "1:3")
    assert ask("show", uri, "1:2")["meta"] == SAID[SECOND]
    with pytest.raises(ConfigError, match="no marker has 'loss'"):
        run("list", uri, "--where", "loss<1")
    with pytest.raises(ConfigError, match="--tree"):
        run("list", uri, "--sort", "auc", "--tree")


def test_a_list_of_markers_of_which_nothing_was_said_has_no_column_for_it(tmp_path: Path) -> None:
    made = History(tmp_path)
    made.generation(1, [1])
    assert "meta" not in run("list", f"file://{tmp_path}")
    assert "meta" not in run("show", f"file://{tmp_path}")


# Where it must not get lost.


def test_a_note_of_no_marker_is_refused(history: History) -> None:
    with pytest.raises(MarkerNotFoundError):
        add(Control(history.log), MarkerId(1, 9), meta_of({"auc": 1.0}))


@pytest.mark.parametrize("point", POINTS[:2])
def test_a_writer_that_dies_at_a_note_leaves_all_of_it_or_nothing(history: History, point: str) -> None:
    arm(f"{point}=raise@1")
    with pytest.raises(OSError, match=point):
        add(Control(history.log), THIRD, meta_of({"auc": 0.5}), "another")
    arm("")
    there = dict(Control(history.log).refresh().meta(THIRD))
    assert there == {"run": "7", **({"auc": 0.5} if point == "note.appended" else {})}
    add(Control(history.log), THIRD, meta_of({"auc": 0.5}), "another")
    assert dict(Control(history.log).refresh().meta(THIRD)) == {"run": "7", "auc": 0.5}


def test_a_log_that_is_away_for_a_moment_is_asked_again(history: History, monkeypatch: pytest.MonkeyPatch) -> None:
    control, failures = Control(history.log), [LogUnavailableError("away"), LogUnavailableError("away")]
    append = control._append

    def flaky(frame: bytes) -> int:
        if failures:
            raise failures.pop()
        return append(frame)

    monkeypatch.setattr(control, "_append", flaky)
    monkeypatch.setattr("torchrec_stream_ckpt.log.control.partition._RETRY_S", 0.01)
    add(control, THIRD, meta_of({"auc": 0.5}), "another")
    assert dict(control.refresh().meta(THIRD))["auc"] == 0.5


def test_a_log_that_comes_back_from_its_store_knows_what_was_said(history: History) -> None:
    stores.fold(history.root)
    stores.lose_log(history.root)
    run("recover", f"file://{history.root}", "--store", str(history.root))
    assert run("recover", f"file://{history.root}", "--store", str(history.root), "--json")  # and again
    rows = ask("list", f"file://{history.root}")["markers"]
    assert {row["marker"]: row["meta"] for row in rows} == {str(marker): said for marker, said in SAID.items()}


@pytest.fixture
def job(tmp_path: Path) -> TieredJob:
    made = TieredJob(tmp_path / "inner", settings=tiered.config(tmp_path / "inner", tmp_path / "outer"))
    made.begin()
    made.markers(2)
    return made


def outer(job: TieredJob) -> Lineage:
    return job.tiers.outer.control.refresh()


def test_the_outer_tier_gets_what_was_said_and_pinned_later_once(job: TieredJob) -> None:
    add(job.tiers.inner.control, FIRST, meta_of({"auc": 0.7, PIN: "kept"}))
    arm("relay.note=raise@1")
    with pytest.raises(OSError, match=r"relay\.note"):
        relay(job.tiers)
    arm("")
    relay(job.tiers)
    add(job.tiers.inner.control, SECOND, meta_of({"auc": 0.9}), "later")
    relay(job.tiers)
    assert said_of(outer(job)) == {FIRST: {"auc": 0.7, PIN: "kept"}, SECOND: {"auc": 0.9}}
    last = job.tiers.outer.control.last
    relay(job.tiers)
    outer(job)
    assert job.tiers.outer.control.last == last
    assert pinned(job.tiers.outer.objects, outer(job).job) == {FIRST}
    lose(job.tiers)
    assert said_of(outer(job))[SECOND] == {"auc": 0.9}


def test_folding_leaves_what_was_said(history: History) -> None:
    stores.fold(history.root)
    catalog = Catalog.load(history.objects, history.lineage.job)
    assert catalog.markers == set(SAID)
    assert said_of(Control(history.log).refresh()) == SAID


# What gc keeps by it.


def gc(history: History, *arguments: str) -> list[str]:
    """The markers that are kept."""
    (record,) = ask("gc", *arguments, "--store", str(history.root), "--grace", "0s")
    return record["kept"]  # type: ignore[no-any-return]


def test_gc_keeps_the_best_and_the_newest(history: History) -> None:
    stores.fold(history.root)
    uri = f"file://{history.root}"
    assert gc(history, uri, "--keep-best", "auc:min", "--keep-best", "run:min", "--dry-run") == ["1:1", "1:3", "1:4"]
    assert gc(history, uri, "--keep-best", "auc:max:2") == ["1:2", "1:4"]
    assert gc(history, uri, "--keep-best", "auc:max:2") == ["1:2", "1:4"]  # it wants nothing back
    assert ask("show", uri, "best:auc:min")["marker"] == "1:4"  # of those that are offered
    assert ask("list", uri, "--where", "auc=0.7")["markers"][0]["dropped"]


def test_gc_over_a_store_without_its_log_knows_what_was_said(history: History) -> None:
    stores.fold(history.root)
    stores.lose_log(history.root)
    assert gc(history, "--no-log", "--keep-best", "auc:max:3") == ["1:1", "1:2", "1:4"]


def test_a_best_that_is_damaged_counts_for_none_and_stays(history: History) -> None:
    stores.fold(history.root)
    uri = f"file://{history.root}"
    (dense,) = [name for name in stores.contents(history.objects) if name.startswith("dense/") and "m00000002" in name]
    (history.root / dense).unlink()
    assert gc(history, uri, "--keep-best", "auc:max:2") == ["1:1", "1:2", "1:4"]


def test_gc_refuses_a_name_that_nothing_has_and_deletes_nothing(history: History) -> None:
    stores.fold(history.root)
    before = stores.contents(history.objects)
    with pytest.raises(ConfigError, match="no marker has 'acu'"):
        gc(history, f"file://{history.root}", "--keep-best", "acu:max")
    with pytest.raises(ConfigError, match="is not a valid rule for the best marker"):
        gc(history, f"file://{history.root}", "--keep-best", "auc:max:0")
    assert stores.contents(history.objects) == before


def test_a_pin_before_the_marker_is_folded_holds_from_then_on(history: History) -> None:
    job = history.lineage.job
    pin(history.objects, job, FIRST, folded=False)
    with pytest.raises(MarkerNotFoundError, match="is not in the store"):
        pin(history.objects, job, SECOND)
    stores.fold(history.root)
    assert gc(history, f"file://{history.root}", "--newest", "1") == ["1:1", "1:4"]
