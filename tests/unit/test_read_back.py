"""What replaces other copies is relied on by its bytes: read since it was written, which is remembered, or read now."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests import builders, stores
from tests.command import attempt, call, run
from tests.parts import (
    Fold,
    FolderObjects,
    GcPlan,
    GcRules,
    Materializer,
    Policy,
    ReadBack,
    Reading,
    Retention,
    Scrubber,
    ScrubPlace,
    arm,
    collect,
    open_dense,
)
from tests.stores import HeldObjects, History
from tests.unit.gc_history import ALWAYS, NEVER, SPANS, branched
from torchrec_stream_ckpt.errors import CorruptionError, StoreUnavailableError
from torchrec_stream_ckpt.format.frame import Buffer
from torchrec_stream_ckpt.format.readings import ReadUnit
from torchrec_stream_ckpt.inner import Catalog, Damaged, Holdings, Job, find
from torchrec_stream_ckpt.maintain.gc import gc as gc_module
from torchrec_stream_ckpt.maintain.scrub.readings import COUNTS_FOR_S
from torchrec_stream_ckpt.store.verdicts import put_reading, take_back
from torchrec_stream_ckpt.util.layout import READINGS_DIR, FoldName, scrub_place_name
from torchrec_stream_ckpt.util.types import MarkerId

pytestmark = pytest.mark.usefixtures("no_syncs")

HOUR = 3600.0


class Watched(HeldObjects):
    """A store that notes what is done to it."""

    def __init__(self, history: History, pool: Executor, upto: int = 3) -> None:
        """A base at each marker up to one, intervals alone from there on."""
        super().__init__({})
        self.done: list[tuple[str, str]] = []
        lineage = history.lineage
        old = replace(lineage, commits=lineage.commits.only([each for each in lineage.commits if each.marker <= upto]))
        for policy, known in ((ALWAYS, old), (NEVER, lineage)):
            made = Materializer(history.log, self, lambda _: open_dense(str(history.root)), pool, policy)  # type: ignore[arg-type]
            list(made.catch_up(known))
        self.done.clear()

    def read(self, name: str, begin: int = 0, end: int | None = None) -> memoryview:
        self.done.append(("read", name))
        return super().read(name, begin, end)

    def put(self, name: str, parts: Any) -> None:
        if hasattr(self, "done"):
            self.done.append(("put", name))
        super().put(name, parts)

    def flip(self, part: str) -> str:
        (name,) = (name for name in self.held if part in name)
        data = bytearray(self.held[name])
        data[-10] ^= 4
        self.held[name] = bytes(data)
        return name

    def bases_read(self) -> set[int]:
        """Markers of the bases of which rows were read since this was asked last."""
        names = {name for what, name in self.done if what == "read" and "-from-root-p" in name}
        self.done.clear()
        return {int(name.split("-m")[1][:8]) for name in names}


def six_markers(root: Path) -> History:
    made = History(root)
    made.generation(1, range(1, 7))
    return made


@pytest.fixture
def history(tmp_path: Path) -> History:
    return six_markers(tmp_path)


def gc(history: History, store: HeldObjects, pool: Executor, now_s: float, newest: int, host: str = "a host") -> GcPlan:
    rules, lineage = GcRules(retention=Retention(newest=newest), grace_s=HOUR), history.lineage
    return collect(store, lineage, lineage.job, rules, pool, lambda: {host: now_s})  # type: ignore[arg-type]


def offered(history: History, store: HeldObjects) -> set[int]:
    catalog = Catalog.load(store, history.lineage.job)  # type: ignore[arg-type]
    return {marker.marker for marker in catalog.markers - catalog.dropped}


# What gc gives up.


@pytest.mark.parametrize(
    ("harm", "kept"),
    [
        (["f-g00000001-m00000006-from-root-p000"], {6}),
        (["f-g00000001-m00000006-from-root-p000", "r00000-m00000006-p000"], {5, 6}),
        (["g00000001-m00000006/.metadata"], {5, 6}),
    ],
    ids=["a base that others replace", "a base and what else has its rows", "dense state"],
)
def test_a_marker_counts_for_the_newest_only_if_its_bytes_are_right(
    history: History, pool: Executor, harm: list[str], kept: set[int]
) -> None:
    """One flipped bit in the newest base: all markers before it were given up, and none could be restored."""
    store = Watched(history, pool, upto=6)
    for part in harm:
        store.flip(part)
    done = gc(history, store, pool, 0.0, 1)
    assert offered(history, store) == kept
    assert {marker.marker for marker in done.kept} == kept
    marker = MarkerId(1, min(kept))
    holdings = Holdings.load(store, history.lineage)  # type: ignore[arg-type]
    if len(kept) == 1:
        holdings = holdings.apart_from({(None, marker): "flipped"})
    assert (
        stores.rows_in(holdings.catalog, history.lineage, marker, holdings.look(marker).pieces) == history.rows[marker]
    )


def test_damage_that_lies_behind_the_floor_gives_nothing_more_up(history: History, pool: Executor) -> None:
    store = Watched(history, pool, upto=0)
    store.flip("r00000-m00000005-p000")
    gc(history, store, pool, 0.0, 2)
    assert offered(history, store) == {3, 4, 5, 6}, "1:5 and 1:6 need the interval, two others are kept for them"


# What is remembered.


def test_a_base_is_not_read_again_each_time_that_a_little_goes_in_its_favor(history: History, pool: Executor) -> None:
    store = Watched(history, pool)
    gc(history, store, pool, 0.0, 4)
    assert store.bases_read() == {3}
    for hours, newest in ((2, 4), (3, 3), (5, 3)):
        done = gc(history, store, pool, hours * HOUR, newest)
        assert bool(done.now) == (newest == 4 or hours == 5)
        assert store.bases_read() == set(), hours
    gc(history, store, pool, 5 * HOUR + COUNTS_FOR_S, 2)
    assert store.bases_read() == {3}, "that was long ago"
    assert len(list(store.list(f"{READINGS_DIR}/"))) == 1, "what counts no more is forgotten"
    for marker in (5, 6):
        rows = stores.rows_of(store, history.lineage, MarkerId(1, marker))  # type: ignore[arg-type]
        assert rows == history.rows[MarkerId(1, marker)]


@pytest.mark.parametrize("host", ["another host", "a host that was set back"])
def test_what_no_clock_of_this_run_tells_does_not_count(history: History, pool: Executor, host: str) -> None:
    store = Watched(history, pool)
    gc(history, store, pool, 100 * HOUR, 4)
    store.bases_read()
    now_s, host = (101 * HOUR, host) if host == "another host" else (99 * HOUR, "a host")
    gc(history, store, pool, now_s, 3, host)
    assert store.bases_read() == {3}


def test_what_was_read_of_another_store_does_not_count_in_its_copy(history: History, pool: Executor) -> None:
    """A copy takes the readings along, on the same host: nobody has read its bytes."""
    store = Watched(history, pool)
    gc(history, store, pool, 0.0, 4)
    store.bases_read()
    store.url = "held://copy"
    gc(history, store, pool, HOUR, 3)
    assert store.bases_read() == {3}
    store.url = HeldObjects.url
    gc(history, store, pool, 2 * HOUR, 3)
    assert store.bases_read() == set(), "the first store's own reading is there still"


def test_what_an_older_program_has_read_is_of_no_store(history: History, pool: Executor) -> None:
    store = Watched(history, pool)
    gc(history, store, pool, 0.0, 4)
    (name,) = (entry.name for entry in store.list(f"{READINGS_DIR}/"))
    reading = replace(Reading.from_bytes(store.read(name), name), store="")
    store.put(name, [reading.to_bytes()])
    assert Reading.from_bytes(store.read(name), name) == reading
    store.bases_read()
    gc(history, store, pool, HOUR, 3)
    assert store.bases_read() == {3}
    assert store.size(name) is None


def test_what_a_reader_found_damaged_is_read_again(history: History, pool: Executor) -> None:
    """What gc had read within a week counted, whoever had found the base damaged since: its sources were deleted."""
    store = Watched(history, pool)
    gc(history, store, pool, 0.0, 4)
    name, known = store.flip("-m00000003-from-root-p000"), units(store)
    take_back(store, history.lineage.job, [CorruptionError("of the log", path="/log/data/p00000/x")])  # type: ignore[arg-type]
    assert units(store) == known
    take_back(store, history.lineage.job, [CorruptionError("flipped", path=f"/somewhere/{name}")])  # type: ignore[arg-type]
    assert FoldName(history.lineage.job, MarkerId(1, 3), None).name in known - units(store)
    done = gc(history, store, pool, 2 * HOUR, 4)
    assert [said for said in done.damaged if "-m00000003-from-root" in said]


def units(store: HeldObjects) -> set[str]:
    """What all readings name."""
    names = [entry.name for entry in store.list(f"{READINGS_DIR}/")]
    return {unit.name for name in names for unit in Reading.from_bytes(store.read(name), name).units}


def test_a_fold_that_was_written_anew_within_one_run_is_read_again(history: History, pool: Executor) -> None:
    store = Watched(history, pool)
    lineage, step = history.lineage, (None, MarkerId(1, 3))
    read_back = ReadBack(store, lineage.job, pool, {"a host": 0.0})  # type: ignore[arg-type]
    assert read_back.is_whole(Holdings.load(store, lineage), step)  # type: ignore[arg-type]
    name = FoldName(lineage.job, step[1], None).name
    fold = Fold.from_bytes(store.read(name), name)
    store.put(name, [replace(fold, chain=fold.chain ^ 1).to_bytes()])
    store.flip("-m00000003-from-root-p000")
    assert not read_back.is_whole(Holdings.load(store, lineage), step)  # type: ignore[arg-type]


def test_what_a_scrub_found_damaged_is_read_again(history: History, pool: Executor) -> None:
    store = Watched(history, pool)
    gc(history, store, pool, 0.0, 4)
    store.flip("-m00000003-from-root-p000")
    lineage = history.lineage
    list(Scrubber(store, lambda: lineage, "command").pieces())  # type: ignore[arg-type]
    done = gc(history, store, pool, 2 * HOUR, 4)
    assert [said for said in done.damaged if "-m00000003-from-root" in said]
    gone = [entry.name for entry in done.now if entry.name.startswith("segments/")]
    assert {int(name.split("-m")[1][:8]) for name in gone} == {1, 2}, "base 2 has the rows of these, and is whole"
    assert not [name for name in gone if "-m00000002-from-root" in name]


@pytest.mark.parametrize("place", ["cut", "full", "more"])
def test_a_scrub_that_does_not_say_all_leaves_nothing_to_rely_on(history: History, pool: Executor, place: str) -> None:
    store = Watched(history, pool)
    gc(history, store, pool, 0.0, 4)
    store.bases_read()
    many = tuple(f"x{number}" for number in range(1000))
    said = ScrubPlace(1, 1.0, damaged=() if place == "more" else many, more=int(place == "more")).to_bytes()
    store.put(scrub_place_name(history.lineage.job, "service", 1), [said[:-3] if place == "cut" else said])
    gc(history, store, pool, 2 * HOUR, 4)
    assert store.bases_read() == {3}


def test_a_base_that_was_merged_anew_with_other_bytes_is_read(history: History, pool: Executor) -> None:
    store = Watched(history, pool)
    gc(history, store, pool, 0.0, 4)
    (name,) = (entry.name for entry in store.list(f"{READINGS_DIR}/"))
    reading = Reading.from_bytes(store.read(name), name)
    units = tuple(replace(unit, crc=unit.crc ^ 1) for unit in reading.units)
    store.put(name, [replace(reading, units=units).to_bytes()])
    store.bases_read()
    gc(history, store, pool, 2 * HOUR, 4)
    assert store.bases_read() == {3}


def test_a_reading_that_is_damaged_says_nothing_and_goes(history: History, pool: Executor) -> None:
    store = Watched(history, pool)
    gc(history, store, pool, 0.0, 4)
    name = store.flip(f"{READINGS_DIR}/")
    store.bases_read()
    gc(history, store, pool, 2 * HOUR, 4)
    assert store.bases_read() == {3}
    assert store.size(name) is None


def test_readings_that_are_not_ours_are_refused() -> None:
    reading = Reading(17.0, {"a": 3.5}, (ReadUnit("folds/x", 7, 4000),))
    assert Reading.from_bytes(reading.to_bytes(), "here") == reading
    for wrong in (b"", b"[]", b"{}", reading.to_bytes()[:-1], reading.to_bytes().replace(b"4000", b"4001")):
        with pytest.raises(CorruptionError):
            Reading.from_bytes(wrong, "here")
    for other in (Reading(True, {}, ()), Reading(1.0, {"a": "b"}, ()), Reading(1.0, {}, (ReadUnit("x", 1, 2.0),))):  # type: ignore[arg-type, dict-item]
        with pytest.raises(CorruptionError):
            Reading.from_bytes(other.to_bytes(), "here")


def test_what_goes_later_is_listed_before_anything_long_is_read(history: History, pool: Executor) -> None:
    store = Watched(history, pool)
    gc(history, store, pool, 0.0, 4)
    store.done.clear()
    gc(history, store, pool, 2 * COUNTS_FOR_S, 3)
    listed = next(place for place, (what, name) in enumerate(store.done) if what == "put" and "garbage/" in name)
    floor = [place for place, (what, name) in enumerate(store.done) if (what, "dropped/" in name) == ("put", True)]
    reads = [place for place, (what, name) in enumerate(store.done) if what == "read" and "-from-root-p" in name]
    assert not [place for place in reads if floor[-1] < place < listed]


def test_a_gc_that_fails_while_it_reads_leaves_no_list_of_what_may_be_needed(
    history: History, pool: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scrub leaves out what is listed."""
    store = Watched(history, pool)

    def fail(*args: Any) -> Any:
        assert list(store.list("garbage/"))
        raise StoreUnavailableError("away")

    monkeypatch.setattr(gc_module, "_proved", fail)
    with pytest.raises(StoreUnavailableError):
        gc(history, store, pool, 0.0, 4)
    assert not list(store.list("garbage/"))
    monkeypatch.undo()
    assert gc(history, store, pool, HOUR / 2, 4).now == ()
    assert gc(history, store, pool, 2 * HOUR, 4).now


def test_a_list_loses_what_was_found_to_be_needed_after_all(history: History, pool: Executor) -> None:
    store = Watched(history, pool)
    gc(history, store, pool, 0.0, 4)
    store.flip("-m00000003-from-root-p000")
    done = gc(history, store, pool, 2 * COUNTS_FOR_S, 4)
    assert done.damaged
    again = gc(history, store, pool, 2 * COUNTS_FOR_S + 2 * HOUR, 4)
    assert not [entry for entry in again.now if "-r00000-m0000000" in entry.name]
    rows = stores.rows_in(*without_base(history, store, 6))
    assert rows == history.rows[MarkerId(1, 6)]


def without_base(history: History, store: HeldObjects, marker: int) -> Any:
    holdings = Holdings.load(store, history.lineage).apart_from({(None, MarkerId(1, 3)): "flipped"})  # type: ignore[arg-type]
    return holdings.catalog, history.lineage, MarkerId(1, marker), holdings.look(MarkerId(1, marker)).pieces


# Which markers' rows a piece holds.


@pytest.mark.parametrize("policy", [ALWAYS, SPANS, NEVER])
def test_the_rows_of_a_piece_are_those_of_the_markers_that_it_leads_over(tmp_path: Path, policy: Policy) -> None:
    history = branched(tmp_path, policy)
    holdings = Holdings.load(history.objects, history.lineage)
    strides, order = holdings.strides, list(history.lineage.commits)
    random.Random(3).shuffle(order)
    for end in order:
        chain = [commit.id for commit in strides.chain(end)]
        for start in (None, *chain[:-1]):
            assert strides.rows(start, end) == _markers(holdings, start, end)


def _markers(holdings: Holdings, start: MarkerId | None, end: MarkerId) -> set[MarkerId]:
    chain = [commit.id for commit in holdings.strides.chain(end)]
    return set(chain[chain.index(start) + 1 :] if start is not None else chain)


# What a trim relies on is read, or was, and what a reader finds damaged counts no more.


@pytest.mark.parametrize(
    "reader",
    [("verify", "1:6"), ("verify", "--all"), ("trim", "--verify"), ("gc", "--give-up", "lost"), ("restore",)],
    ids=" ".join,
)
def test_every_reader_that_finds_damage_takes_back_what_was_read(history: History, reader: tuple[str, ...]) -> None:
    stores.fold(history.root, Policy(rebase=1e-9, compact="none"))
    root, uri = str(history.root), f"file://{history.root}"
    assert trim(history, "--upto", "1:3")[0] == 0
    with ThreadPoolExecutor(2) as pool:
        read_back = ReadBack(history.objects, history.lineage.job, pool, {"a host": 0.0})
        holdings = Holdings.load(history.objects, history.lineage)
        assert read_back.is_whole(holdings, (None, MarkerId(1, 6)))
        read_back.save()
    base = FoldName(history.lineage.job, MarkerId(1, 6), None).name
    assert base in units(history.objects)  # type: ignore[arg-type]
    flip(history, "m00000006-from-root-p000")
    if reader == ("restore",):
        job = Job.open(uri, store=root)
        damaged = Damaged()
        with contextlib.closing(job):
            route = find(job, None, damaged=damaged)
            assert route is not None
            name = next(each.ref.name for each in route.segments if "m00000006-from-root" in each.ref.name)
            damaged.elsewhere(route, CorruptionError("a checksum does not match", name=name))  # as reading raises it
            find(job, None, damaged=damaged)
    else:
        call(reader[0], uri, "--store", root, *reader[1:])
    assert base not in units(history.objects)  # type: ignore[arg-type]


def trim(history: History, *more: str) -> tuple[int, dict[str, Any], str]:
    root = str(history.root)
    status, said = attempt("trim", f"file://{root}", "--store", root, "--json", *more)
    return status, json.loads(said) if status == 0 else {}, said


def flip(history: History, part: str) -> str:
    (name,) = (entry.name for entry in history.objects.list("segments/") if part in entry.name)
    path = history.root / name
    path.write_bytes(path.read_bytes()[:-10] + bytes([path.read_bytes()[-10] ^ 4]) + path.read_bytes()[-9:])
    return name


@pytest.mark.parametrize("policy", [NEVER, Policy(rebase=1e-9, compact="none")], ids=["interval", "base"])
def test_a_chunk_that_was_flipped_after_folding_keeps_the_log_that_has_its_rows(
    history: History, policy: Policy
) -> None:
    stores.fold(history.root, policy)
    name = flip(history, "r00000-m00000004-p000" if policy is NEVER else "m00000006-from-root-p000")
    before = stores.contents(history.objects)
    status, _, said = trim(history)
    assert (status, name in said, "scrub URI --store URL --repair" in said) == (1, True, True), said
    assert stores.contents(history.objects) == before
    root = str(history.root)
    run("scrub", f"file://{root}", "--store", root, "--repair")
    assert trim(history)[0] == 0
    marker = MarkerId(1, 6)
    shutil.rmtree(history.root / "data")
    assert stores.rows_of(history.objects, history.lineage, marker) == history.rows[marker]


def test_a_trim_reads_what_it_takes_away_and_not_what_was_taken_before(history: History) -> None:
    stores.fold(history.root, NEVER)
    sizes = {
        marker: sum(entry.num_bytes for entry in history.objects.list("segments/") if f"m{marker:08d}" in entry.name)
        for marker in range(1, 7)
    }
    status, planned, _ = trim(history, "--upto", "1:3", "--dry-run")
    assert (status, list(history.objects.list(f"{READINGS_DIR}/"))) == (0, [])
    status, done, _ = trim(history, "--upto", "1:3")
    assert 0 < done["read_bytes"] == planned["read_bytes"] < sum(sizes[marker] for marker in (1, 2, 3))
    flip(history, "r00000-m00000002-p000")  # the log has it no more: nothing that this trim takes away would mend it
    status, more, said = trim(history)
    assert status == 0, said
    assert 0 < more["read_bytes"] < sum(sizes[marker] for marker in (4, 5, 6))
    assert trim(history)[1]["read_bytes"] == 0


def test_a_trim_relies_on_what_gc_has_read(history: History, pool: Executor) -> None:
    stores.fold(history.root, Policy(rebase=1e-9, compact="none"))
    lineage = history.lineage
    rules = GcRules(retention=Retention(newest=6))
    gc_rules = replace(rules, retention=Retention(newest=5))
    collect(history.objects, lineage, lineage.job, gc_rules, pool)
    status, done, said = trim(history)
    assert (status, done["read_bytes"]) == (0, 0), said


# What a reader finds damaged counts as read no more: also for a gc that goes on, on a full disk, and after a kill.


POINTS = ("readings.taken_back",)
READ = tuple(ReadUnit(FoldName(builders.JOB, MarkerId(1, marker), None).name, 7, 1) for marker in (1, 2, 3))


def damage_of(unit: ReadUnit) -> list[CorruptionError]:
    return [CorruptionError("flipped", name=unit.name)]


def readings(store: Any, *each: Sequence[ReadUnit]) -> None:
    for number, read in enumerate(each):
        put_reading(store, builders.JOB, Reading(float(number), {"a host": 1.0}, tuple(read), "held://"))


def test_damage_is_taken_back_from_all_readings_on_a_full_disk(tmp_path: Path) -> None:
    """The first one was deleted, there was no room for the rest of it, and the second one counted for a week."""

    class Full(FolderObjects):
        def put(self, name: str, parts: Sequence[Buffer]) -> None:
            raise StoreUnavailableError("no space left on device")

    readings(FolderObjects(tmp_path), READ[:2], READ[1:], READ[2:])
    take_back(Full(tmp_path), builders.JOB, damage_of(READ[1]))
    assert units(FolderObjects(tmp_path)) == {READ[2].name}  # type: ignore[arg-type]


def test_two_that_take_back_at_once_bring_nothing_back() -> None:
    class Raced(HeldObjects):
        raced = False

        def delete(self, name: str) -> None:
            if not self.raced:
                self.raced = True
                take_back(self, builders.JOB, damage_of(READ[1]))  # type: ignore[arg-type]
            super().delete(name)

    store = Raced({})
    readings(store, READ)
    take_back(store, builders.JOB, damage_of(READ[0]))  # type: ignore[arg-type]
    assert not {READ[0].name, READ[1].name} & units(store)


@pytest.mark.parametrize("nth", [1, 2])
def test_a_kill_while_damage_is_taken_back_leaves_nothing_new_that_counts(tmp_path: Path, nth: int) -> None:
    store = FolderObjects(tmp_path)
    readings(store, READ[:2], READ[1:], READ[2:])
    before = stores.contents(store)
    child = os.fork()
    if not child:
        arm(f"{POINTS[0]}=kill@{nth}")
        take_back(store, builders.JOB, damage_of(READ[1]))
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    left = stores.contents(store)
    assert left.items() < before.items()
    assert len(before) - len(left) == nth
    take_back(store, builders.JOB, damage_of(READ[1]))
    assert units(store) == {READ[2].name}  # type: ignore[arg-type]


def test_what_is_taken_back_while_gc_works_is_read(
    history: History, pool: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restore finds the damage after gc has begun, and before it deletes what the base was made of."""
    store, check = Watched(history, pool), gc_module.check_relied
    gc(history, store, pool, 0.0, 4)
    name = store.flip("-m00000003-from-root-p000")

    def late(*given: Any) -> None:
        check(*given)
        take_back(store, history.lineage.job, [CorruptionError("flipped", name=name)])  # type: ignore[arg-type]

    monkeypatch.setattr(gc_module, "check_relied", late)
    done = gc(history, store, pool, 2 * HOUR, 4)
    assert [said for said in done.damaged if "-m00000003-from-root" in said]
    for marker in (3, 4, 5, 6):
        assert stores.rows_in(*without_base(history, store, marker)) == history.rows[MarkerId(1, marker)]


def test_a_base_under_repair_keeps_its_sources_though_it_was_read_lately(history: History, pool: Executor) -> None:
    """The materializer has found the damage, and reads what the base was made of, when the next gc comes."""

    class Repaired(Watched):
        due = ""

        def read(self, name: str, begin: int = 0, end: int | None = None) -> memoryview:
            if self.due and self.due in name:
                self.due = ""
                with ThreadPoolExecutor(2) as other:
                    gc(history, self, other, 2 * HOUR, 4)
            return super().read(name, begin, end)

    store, lineage = Repaired(history, pool), history.lineage
    gc(history, store, pool, 0.0, 4)
    name = store.flip("-m00000003-from-root-p000")
    stores.lose_rows(history.root)
    store.due = "-m00000002-from-root-p000"
    made = Materializer(history.log, store, lambda _: open_dense(str(history.root)), pool)  # type: ignore[arg-type]
    catalog = Catalog.load(store, lineage.job)  # type: ignore[arg-type]
    assert made.repairer.mend(lineage, catalog, name, CorruptionError("flipped", name=name)).aside
    assert not store.due
    for marker in (3, 4, 5, 6):
        rows = stores.rows_of(store, lineage, MarkerId(1, marker))  # type: ignore[arg-type]
        assert rows == history.rows[MarkerId(1, marker)]
