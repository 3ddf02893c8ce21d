"""What of a store leads to a marker: over listings made by hand, the pieces lie one behind the other or are none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import JOB, OTHER_JOB, claim, commit
from tests.parts import Dropped, Fold, Incarnation, Manifest, Piece, SegmentRef
from torchrec_stream_ckpt.errors import CorruptionError, MissingObjectError
from torchrec_stream_ckpt.find.job import came_after_recovery
from torchrec_stream_ckpt.format.control import Commit
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.inner import Catalog, open_store
from torchrec_stream_ckpt.util.layout import FoldName, StoreSegment, claim_name, dropped_name, manifest_name, pin_name
from torchrec_stream_ckpt.util.types import MarkerId

ALL = ("1:1", "1:2", "1:3", "2:3", "2:4", "2:5", "3:3")


def marker(text: str) -> MarkerId:
    return MarkerId.parse(text)


def history() -> Lineage:
    """Generation 2 stands on 1:2 and generation 3 on 1:1; 1:3 is on no path but its own."""
    records = [claim(1), commit(1, 1), commit(1, 2), commit(1, 3)]
    records += [claim(2, parent=marker("1:2")), commit(2, 3), commit(2, 4), commit(2, 5)]
    return Lineage.of([*records, claim(3, parent=marker("1:1")), commit(3, 3)])


class Shelf:
    """A store whose objects are put there one by one; of segments there are only names."""

    def __init__(self, root: Path) -> None:
        self.objects = open_store(str(root))
        self.lineage = history()

    def markers(self, *names: str) -> Shelf:
        for each in map(marker, names):
            self.put(self.manifest(self.lineage.find(each)))
        return self

    def manifest(self, made: Commit) -> Manifest:
        ref = SegmentRef(StoreSegment(JOB, made.id, 0, 0).name, 300, 128, 0, 1)
        return Manifest(made, self.lineage.previous(made.id), ((ref,),))

    def put(self, manifest: Manifest, at: str = "") -> None:
        where = marker(at) if at else manifest.commit.id
        self.objects.put(manifest_name(JOB, where), [manifest.to_bytes()])

    def folds(self, *spans: str) -> Shelf:
        """As ``START-END``; the root has no name."""
        for span in spans:
            name = self.fold_name(span)
            ref = SegmentRef(name.segment_name(0), 500, 128, 0, 2)
            self.objects.put(name.name, [Fold(JOB, name.start, name.end, 0, (ref,)).to_bytes()])
        return self

    @staticmethod
    def fold_name(span: str) -> FoldName:
        start, end = span.split("-")
        return FoldName(JOB, marker(end), marker(start) if start else None)

    def drop(self, *names: str) -> Shelf:
        for each in map(marker, names):
            drop = Dropped(self.lineage.find(each), self.lineage.previous(each), 5.0)
            self.objects.put(dropped_name(JOB, each), [drop.to_bytes()])
        return self

    def claims(self, *generations: int) -> Shelf:
        for generation in generations:
            self.objects.put(claim_name(JOB, generation), [self.lineage.claims[generation].to_frame()])
        return self

    @property
    def catalog(self) -> Catalog:
        return Catalog.load(self.objects, JOB)

    def cover(self, name: str) -> str:
        return shown(self.catalog.cover(self.lineage.chain(marker(name))))


def shown(cover: Sequence[Piece]) -> str:
    """A cover as ``-1:1 1:1-2:4``."""
    if not cover:
        return "nothing"
    return " ".join(f"{piece.start or ''}-{piece.end}" for piece in cover)


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("1:1", "1:1"),
        ("1:3", "1:1 1:2 1:3"),
        ("2:3", "1:1 1:2 2:3"),
        ("2:5", "1:1 1:2 2:3 2:4 2:5"),
        ("3:3", "1:1 3:3"),
    ],
)
def test_a_chain_is_all_markers_on_the_path(name: str, expected: str) -> None:
    assert " ".join(str(each.id) for each in history().chain(marker(name))) == expected


@pytest.mark.parametrize(
    ("name", "folds", "expected"),
    [
        ("1:1", [], "-1:1"),
        ("2:4", [], "-1:1 1:1-1:2 1:2-2:3 2:3-2:4"),
        ("3:3", [], "-1:1 1:1-3:3"),
        ("2:4", ["-1:2"], "-1:2 1:2-2:3 2:3-2:4"),
        ("2:4", ["-2:4"], "-2:4"),
        ("2:4", ["1:1-2:3"], "-1:1 1:1-2:3 2:3-2:4"),
        ("2:4", ["-1:2", "1:1-2:4", "1:2-2:4"], "-1:1 1:1-2:4"),
        ("2:4", ["-1:2", "-2:3", "1:2-2:4"], "-1:2 1:2-2:4"),
        # Those of other branches, of what comes behind, and those that lead backwards.
        ("2:4", ["-1:3", "1:1-3:3", "-3:3", "1:2-1:3"], "-1:1 1:1-1:2 1:2-2:3 2:3-2:4"),
        ("2:3", ["-2:4", "1:1-2:5"], "-1:1 1:1-1:2 1:2-2:3"),
        ("3:3", ["1:2-2:3", "-1:2", "-1:1"], "-1:1 1:1-3:3"),
    ],
)
def test_a_cover_takes_the_longest_folds_of_its_own_path(
    shelf: Shelf, name: str, folds: list[str], expected: str
) -> None:
    assert shelf.markers(*ALL).folds(*folds).cover(name) == expected


@pytest.mark.parametrize(
    ("markers", "folds", "expected"),
    [
        ([], [], "nothing"),
        (["1:2", "2:3", "2:4"], [], "nothing"),
        (["1:3", "3:3"], [], "nothing"),
        (["1:1", "1:2", "2:4"], [], "-1:1 1:1-1:2"),
        (["1:1", "2:3", "2:4"], ["1:1-1:2"], "-1:1 1:1-1:2 1:2-2:3 2:3-2:4"),
        (["1:1", "1:2", "2:4"], ["1:2-2:4"], "-1:1 1:1-1:2 1:2-2:4"),
        (["1:1", "1:2", "2:4"], ["1:1-2:3"], "-1:1 1:1-2:3 2:3-2:4"),
        (["2:4"], ["-2:4"], "-2:4"),
        (["2:4"], ["-2:3"], "-2:3 2:3-2:4"),
        # A fold behind a gap leads nowhere, and one that leads to a marker without manifest is no place to end.
        (["1:1", "2:4"], ["1:2-2:4"], "-1:1"),
        (["1:1", "1:2"], ["-2:3", "1:2-2:4"], "-1:1 1:1-1:2"),
        ([], ["-2:4"], "nothing"),
    ],
)
def test_a_cover_leads_as_far_as_the_store_does(
    shelf: Shelf, markers: list[str], folds: list[str], expected: str
) -> None:
    assert shelf.markers(*markers).folds(*folds).cover("2:4") == expected


def test_a_dropped_marker_is_still_a_link(shelf: Shelf) -> None:
    shelf.markers("1:1", "1:2", "2:3").drop("1:1", "1:2")
    assert shelf.catalog.dropped == {marker("1:1"), marker("1:2")}
    assert shelf.cover("2:3") == "-1:1 1:1-1:2 1:2-2:3"


def test_a_tail_is_covered_from_where_it_begins(shelf: Shelf) -> None:
    catalog = shelf.markers(*ALL).folds("-2:3", "1:2-2:4", "1:1-2:4").catalog
    chain = shelf.lineage.chain(marker("2:5"))
    assert shown(catalog.cover(chain[2:], marker("1:2"))) == "1:2-2:4 2:4-2:5"
    assert shown(catalog.cover(chain[3:], marker("2:3"))) == "2:3-2:4 2:4-2:5"
    assert catalog.cover([]) == ()


def test_folds_that_are_to_be_written_count_as_if_they_were(shelf: Shelf) -> None:
    catalog = shelf.markers(*ALL).catalog
    assumed = catalog.assuming([(marker("1:1"), marker("2:4"))])
    assert shown(assumed.cover(shelf.lineage.chain(marker("2:5")))) == "-1:1 1:1-2:4 2:4-2:5"
    assert shown(catalog.cover(shelf.lineage.chain(marker("2:5")))).count("-") == 5


@given(
    st.sets(st.sampled_from(["1:1", "1:2", "2:3", "2:4", "2:5"])),
    st.sets(st.tuples(st.integers(-1, 3), st.integers(1, 4)).filter(lambda span: span[0] < span[1] - 1), max_size=5),
)
def test_a_cover_is_gapless_and_no_other_leads_further(markers: set[str], spans: set[tuple[int, int]]) -> None:
    chain = history().chain(marker("2:5"))
    steps = {(place - 1, place) for place, each in enumerate(chain) if str(each.id) in markers} | spans
    reached = {-1}
    for place in range(5):
        if any((start, place) in steps for start in reached):
            reached.add(place)
    catalog = Catalog(open_store("memory://none"), JOB, frozenset(map(marker, markers))).assuming(
        (chain[start].id if start >= 0 else None, chain[end].id) for start, end in spans
    )
    for each in chain:
        catalog.kept.put(manifest_name(JOB, each.id), Shelf.manifest(_Bare(), each), 1)
    cover = catalog.cover(chain)
    ends = [place for place in reached - {-1} if str(chain[place].id) in markers]
    if not ends:
        assert not cover
        return
    assert cover[-1].end == chain[max(ends)].id
    assert [piece.start for piece in cover] == [None, *(piece.end for piece in cover[:-1])]


class _Bare(Shelf):
    """Without objects."""

    def __init__(self) -> None:
        self.lineage = history()


def test_objects_of_another_job_and_of_no_name_are_not_seen(shelf: Shelf) -> None:
    shelf.markers("1:1")
    data = shelf.manifest(shelf.lineage.find(marker("1:2"))).to_bytes()
    shelf.objects.put(manifest_name(OTHER_JOB, marker("1:2")), [data])
    shelf.objects.put(f"manifests/{JOB.hex()}/g1-m2.json", [data])
    shelf.objects.put(f"manifests/{JOB.hex()}/g000000001-m00000002.json", [data])
    shelf.objects.put(f"folds/{JOB.hex()}/g00000001-m00000002-from-nowhere.json", [data])
    assert shelf.catalog.markers == {marker("1:1")}
    assert shelf.catalog.folds == frozenset()


def test_a_manifest_of_another_history_is_refused(shelf: Shelf) -> None:
    shelf.markers("1:1", "1:2")
    shelf.put(shelf.manifest(replace(shelf.lineage.find(marker("1:2")), step=99)))
    with pytest.raises(CorruptionError, match="differs between store and log: one of the two was copied"):
        shelf.cover("1:2")


def test_a_fold_of_another_history_is_refused(shelf: Shelf) -> None:
    shelf.markers("1:1", "1:2")
    name = shelf.fold_name("-1:2")
    ref = SegmentRef(name.segment_name(0), 500, 128, 0, 2)
    shelf.objects.put(name.name, [Fold(JOB, name.start, name.end, 77, (ref,)).to_bytes()])
    with pytest.raises(CorruptionError, match="differs between store and log: one of the two was copied"):
        shelf.cover("1:2")


def test_a_marker_that_another_history_gave_up_is_not_taken_for_given_up(shelf: Shelf) -> None:
    made = shelf.lineage.find(marker("1:2"))
    other = Dropped(replace(made, step=99), shelf.lineage.previous(made.id), 5.0)
    shelf.objects.put(dropped_name(JOB, made.id), [other.to_bytes()])
    assert not shelf.catalog.is_dropped(shelf.lineage.find(marker("1:1")))
    with pytest.raises(CorruptionError, match="differs between store and log: one of the two was copied"):
        shelf.catalog.is_dropped(made)


@pytest.mark.parametrize("previous", [None, "1:1"])
def test_a_manifest_that_follows_on_another_marker_is_refused(shelf: Shelf, previous: str | None) -> None:
    shelf.markers("1:1", "1:2", "1:3")
    good = shelf.manifest(shelf.lineage.find(marker("1:3")))
    shelf.put(replace(good, previous=marker(previous) if previous else None))
    with pytest.raises(CorruptionError, match=r"the store lacks"):
        shelf.cover("1:3")


def test_a_manifest_or_fold_under_another_name_is_refused(shelf: Shelf) -> None:
    shelf.markers(*ALL)
    shelf.put(shelf.manifest(shelf.lineage.find(marker("1:3"))), at="1:2")
    with pytest.raises(CorruptionError, match="manifest does not match its file name"):
        shelf.cover("1:2")
    shelf.folds("-1:3")
    data = bytes(shelf.objects.read(shelf.fold_name("-1:3").name))
    shelf.objects.put(shelf.fold_name("-2:3").name, [data])
    with pytest.raises(CorruptionError, match="fold does not match its file name"):
        shelf.cover("2:3")


def test_what_goes_between_listing_and_reading_is_named(shelf: Shelf) -> None:
    catalog = shelf.markers(*ALL).folds("1:1-2:4").catalog
    shelf.objects.delete(manifest_name(JOB, marker("1:1")))
    with pytest.raises(MissingObjectError, match="g00000001-m00000001"):
        catalog.cover(shelf.lineage.chain(marker("2:4")))
    shelf.markers("1:1").objects.delete(shelf.fold_name("1:1-2:4").name)
    with pytest.raises(MissingObjectError, match="from-g00000001-m00000001"):
        catalog.cover(shelf.lineage.chain(marker("2:4")))
    catalog.refresh()
    assert shown(catalog.cover(shelf.lineage.chain(marker("2:4")))) == "-1:1 1:1-1:2 1:2-2:3 2:3-2:4"


def test_what_was_read_once_stays_true(shelf: Shelf) -> None:
    catalog = shelf.markers(*ALL).catalog
    chain = shelf.lineage.chain(marker("2:4"))
    before = catalog.cover(chain)
    for name in ALL:
        shelf.objects.delete(manifest_name(JOB, marker(name)))
    assert catalog.cover(chain) == before


def test_the_store_alone_tells_of_all_markers_that_are_or_were_there(shelf: Shelf) -> None:
    shelf.markers("1:2", "1:3", "2:3", "2:4", "3:3").drop("1:1", "2:4").claims(1, 2, 3)
    found = shelf.catalog.lineage()
    wanted = {each: made for each, made in shelf.lineage.commits.items() if each != marker("2:5")}
    assert (found.claims, found.commits) == (shelf.lineage.claims, wanted)
    assert found.chain(marker("2:4")) == shelf.lineage.chain(marker("2:4"))


def test_an_empty_store_tells_of_none(shelf: Shelf) -> None:
    assert Lineage() == shelf.catalog.lineage()


@pytest.mark.parametrize(
    ("there", "message"),
    [
        (["1:1", "1:3"], "the store lacks marker 1:2, the predecessor of 1:3"),
        (["1:2"], "the store lacks marker 1:1, the predecessor of 1:2"),
        (["1:1", "2:3"], "the store lacks marker 1:2, the predecessor of 2:3"),
        (["1:1", "1:2", "2:4"], "the store lacks marker 2:3, the predecessor of 2:4"),
        (["3:3"], "the store lacks marker 1:1, the predecessor of 3:3"),
    ],
)
def test_the_store_alone_does_not_guess_what_it_lacks(shelf: Shelf, there: list[str], message: str) -> None:
    with pytest.raises(CorruptionError, match=message):
        shelf.markers(*there).claims(1, 2, 3).catalog.lineage()


def test_a_claim_is_that_of_its_name(shelf: Shelf) -> None:
    shelf.markers("1:1").claims(1)
    shelf.objects.put(claim_name(JOB, 2), [shelf.lineage.claims[1].to_frame()])
    shelf.objects.put(claim_name(JOB, 3), [shelf.lineage.find(marker("1:1")).to_frame()])
    assert shelf.catalog.claim(1) == shelf.lineage.claims[1]
    for generation in (2, 3):
        with pytest.raises(CorruptionError, match="CLAIM does not match its file name"):
            shelf.catalog.claim(generation)
    with pytest.raises(MissingObjectError):
        shelf.catalog.claim(4)


@pytest.mark.parametrize(("reason", "offered"), [("retention", True), ("the loss of its dense state", False)])
def test_a_pin_overrides_a_rule_and_no_loss(tmp_path: Path, reason: str, offered: bool) -> None:
    shelf = Shelf(tmp_path).markers("1:1", "1:2", "1:3")
    made = shelf.lineage.find(marker("1:2"))
    drop = Dropped(made, shelf.lineage.previous(made.id), 0.0, reason)
    shelf.objects.put(dropped_name(JOB, made.id), [drop.to_bytes()])
    shelf.objects.put(pin_name(JOB, made.id), [b"{}"])
    assert (made.id not in Catalog.load(shelf.objects, JOB).dropped) == offered


def test_markers_in_a_generation_that_only_fences_are_those_of_a_lost_log() -> None:
    """Recovery took the number of a generation of which nothing was in the store, and its materializer came later."""
    lineage = Lineage.of([claim(1), commit(1, 1), claim(2, world=0)])
    now = Incarnation("log-1", 1)
    assert came_after_recovery(lineage, marker("2:4"), now)
    assert not came_after_recovery(lineage, marker("1:1"), now)
    assert not came_after_recovery(lineage, marker("1:2"), now)
