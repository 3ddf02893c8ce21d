"""Summaries make plans cheap, and never change what a restore gives: absent, old, damaged or lying ones."""

from __future__ import annotations

import random
import zlib
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from crc32c import crc32c

from tests.builders import Stream
from tests.golden import make_store
from tests.parts import (
    GcRules,
    IntervalFolder,
    Manifest,
    Policy,
    Progress,
    Repairer,
    Retention,
    Scrubber,
    arm,
    collect,
    locate,
    open_dense,
    summarizer,
    verify_marker,
)
from tests.stores import History
from tests.unit import summarized_job
from tests.unit.summarized_job import (
    NEVER,
    NEWEST,
    RUN,
    Store,
    exact,
    flip,
    folded,
    materializer,
    names,
    parts_of,
    put_again,
)
from torchrec_stream_ckpt.errors import CorruptionError
from torchrec_stream_ckpt.format import summary as summary_format
from torchrec_stream_ckpt.format.control import Mark, TableScalars
from torchrec_stream_ckpt.format.frame import Kind
from torchrec_stream_ckpt.format.summary import Part, Summary
from torchrec_stream_ckpt.inner import Catalog, open_rows
from torchrec_stream_ckpt.maintain.scrub.scrub_mender import ScrubMender
from torchrec_stream_ckpt.maintain.scrub.scrubber import Damage
from torchrec_stream_ckpt.store.summaries import list_summaries, load_summary, put_summary
from torchrec_stream_ckpt.util.layout import (
    SEGMENTS_DIR,
    SUMMARIES_DIR,
    StoreSegment,
    manifest_name,
    parse_store_segment,
    parse_summary_name,
)
from torchrec_stream_ckpt.util.types import MarkerId

pytestmark = pytest.mark.usefixtures("no_syncs")

small, history, store = summarized_job.small, summarized_job.given_history, summarized_job.given_store


class Later(History):
    """Another job with the same id and the same names of markers."""

    def time_of(self, marker: MarkerId) -> float:
        return 1.0 + super().time_of(marker)


# What is written.


def test_a_materializer_writes_each_marker_once(history: History, store: Store) -> None:
    written = list_summaries(store, history.lineage.job)  # type: ignore[arg-type]
    assert [name.count for name in written] == [RUN] * 4, "36 markers; the last 4 wait for more"
    parts = [name for each in written for name in load_summary(store, each).parts]
    assert len(parts) == len(set(parts)) == 2 * 4 * RUN
    for each in written:
        for name, part in load_summary(store, each).parts.items():
            assert part.data == bytes(store.read(name, 0, len(part.data)))
            assert part.num_bytes == store.size(name)


def test_bytes_of_summaries_are_linear_in_the_markers_and_are_never_written_again(
    history: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(summarizer, "MARKERS", 4)
    store, puts = Store(), []
    put = store.put
    monkeypatch.setattr(store, "put", lambda name, parts: puts.append(name) or put(name, parts))
    at = []
    for _ in materializer(history, store).catch_up(history.lineage):
        at.append([name for name in puts if name.startswith(SUMMARIES_DIR)])
    assert len(set(at[-1])) == len(at[-1]) == 9
    assert all(after[: len(before)] == before for before, after in pairwise(at))


def test_another_process_goes_on_where_one_was_killed(history: History) -> None:
    for killed_at in (5, 8, 9, 17, 30):
        store = Store()
        steps = materializer(history, store).catch_up(history.lineage)
        for _ in zip(range(killed_at), steps, strict=False):
            pass
        del steps
        list(materializer(history, store).catch_up(history.lineage))
        assert names(store) == sorted(name for name in folded() if name.startswith(SUMMARIES_DIR))
        exact(history, store)


def test_two_materializers_that_write_at_once_write_what_readers_can_use(history: History) -> None:
    store = Store()
    one, other = (materializer(history, store) for _ in range(2))
    lineage = history.lineage
    for _ in zip(one.catch_up(lineage), other.catch_up(lineage), strict=False):
        pass
    list(one.catch_up(lineage))
    list(other.catch_up(lineage))
    assert len(names(store)) >= 4
    exact(history, store)


def test_a_store_of_an_older_program_gets_them(history: History, store: Store) -> None:
    for name in names(store):
        store.delete(name)
    for _ in range(2):
        list(materializer(history, store).catch_up(history.lineage))
    assert len(names(store)) == 4


def test_what_is_damaged_is_left_out(history: History, store: Store) -> None:
    for name in names(store):
        store.delete(name)
    job = history.lineage.job
    bad = StoreSegment(job, MarkerId(1, 2), 0, 0).name
    store.held[bad] = store.held[bad][:40] + b"\xff" + store.held[bad][41:]
    del store.held[manifest_name(job, MarkerId(1, 3))]
    catalog = Catalog.load(store, job)  # type: ignore[arg-type]
    catalog.markers = catalog.markers | {MarkerId(1, 3)}  # gc takes it right after the listing
    with ThreadPoolExecutor(2) as pool:
        writer = summarizer.Summarizer(store, pool, materializer(history, store).progress)  # type: ignore[arg-type]
        writer.write(catalog)
    (first, *_) = list_summaries(store, job)  # type: ignore[arg-type]
    assert (first.first, first.count) == (MarkerId(1, 1), RUN - 2)


@pytest.mark.parametrize("point", ["materialize.summary", "materialize.summary_put"])
def test_a_process_that_ends_beside_a_summary_leaves_a_whole_store(history: History, point: str) -> None:
    store = Store()
    arm(f"{point}=raise@2")
    try:
        with pytest.raises(OSError, match="failpoint materialize"):
            list(materializer(history, store).catch_up(history.lineage))
    finally:
        arm("")
    held = Catalog.load(store, history.lineage.job).markers  # type: ignore[arg-type]
    assert len(held) == 2 * RUN
    exact(history, store, max(held))
    list(materializer(history, store).catch_up(history.lineage))
    assert len(names(store)) == 4
    exact(history, store)


# What is read.


def test_a_plan_reads_summaries_and_what_they_lack(history: History, store: Store) -> None:
    store.reads.clear()
    (route,) = exact(history, store)
    assert route.summarized
    assert len(route.pieces) == 30
    assert store.reads[SUMMARIES_DIR] <= 4
    assert store.reads["manifests"] <= 4
    plain = locate(history.lineage, NEWEST, Catalog.of_job(store, history.lineage), summaries=False)  # type: ignore[arg-type]
    assert [each.ref for each in route.segments] == [each.ref for each in plain.segments]
    assert route.told == plain.told


@pytest.mark.parametrize(
    "policy", [NEVER, Policy(rebase=0, compact="span4"), Policy(rebase=1e-9, compact="none")], ids=str
)
def test_every_branch_is_restored_by_them(history: History, policy: Policy) -> None:
    store = Store()
    list(materializer(history, store, policy).catch_up(history.lineage))
    for marker in ("1:20", "1:9", "2:15", "2:22", "2:30"):
        exact(history, store, MarkerId.parse(marker))


def test_exports_and_followers_take_them(history: History, store: Store, tmp_path: Path) -> None:
    store.reads.clear()
    with open_rows(history.log, history.lineage, NEWEST, store, tmp_path) as rows:  # type: ignore[arg-type]
        assert rows.opened == 1
    assert store.reads[SUMMARIES_DIR]
    store.reads.clear()
    since = MarkerId(2, 29)
    with open_rows(history.log, history.lineage, NEWEST, store, tmp_path, since=since):  # type: ignore[arg-type]
        pass
    assert not store.reads[SUMMARIES_DIR], "one marker more is read itself"


def test_verify_reads_the_objects(history: History, store: Store) -> None:
    store.reads.clear()
    dense = open_dense(str(history.root))
    verify_marker(history.log, history.lineage, dense, NEWEST, objects=store)  # type: ignore[arg-type]
    assert not store.reads[SUMMARIES_DIR]
    damaged = manifest_name(history.lineage.job, MarkerId(2, 16))
    store.held[damaged] = store.held[damaged][:-2]
    told: list[CorruptionError] = []
    verify_marker(history.log, history.lineage, dense, NEWEST, objects=store, told=told.append)  # type: ignore[arg-type]
    assert [damaged in str(error.where) for error in told] == [True]


# What they may say.


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "flipped": flip,
    "cut": lambda data: data[:-3],
    "empty": lambda _: b"",
    "text": lambda _: b"no summary",
    "longer": lambda data: data + b"\0",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_one_is_as_if_it_were_not_there(history: History, store: Store, damage: str) -> None:
    for name in names(store)[::2]:
        store.held[name] = DAMAGE[damage](store.held[name])
    (route,) = exact(history, store)
    assert route.summarized, "the others are used"
    for name in names(store)[1::2]:
        store.held[name] = DAMAGE[damage](store.held[name])
    (route,) = exact(history, store)
    assert not route.summarized


def test_one_of_a_newer_version_or_of_another_job_is_not_read(history: History, store: Store) -> None:
    for number, name in enumerate(names(store)):
        data = bytearray(store.held.pop(name))
        if number % 2:
            data[4] = 9
        else:
            data[8:24] = bytes(16)
        data[60:64] = crc32c(bytes(data[:60])).to_bytes(4, "little")
        parsed = parse_summary_name(name)
        assert parsed is not None
        store.held[replace(parsed, crc=crc32c(bytes(data))).name] = bytes(data)
    (route,) = exact(history, store)
    assert not route.summarized


def test_one_that_says_less_or_more_than_the_objects_changes_nothing(history: History, store: Store) -> None:
    first, second, *_ = names(store)
    parts = parts_of(store, first)
    put_again(store, first, {name: parts[name] for name in list(parts)[::3]})
    put_again(store, second, {**parts, **parts_of(store, second)})
    (route,) = exact(history, store)
    assert route.summarized


def test_one_of_another_history_is_not_believed(history: History, store: Store, tmp_path: Path) -> None:
    other = Later(tmp_path / "other")
    other.generation(1, range(1, 21))
    other.generation(2, range(15, 31), "1:14")
    theirs = Store()
    list(materializer(other, theirs).catch_up(other.lineage))
    for name in names(store):
        store.delete(name)
    store.held |= {name: theirs.held[name] for name in names(theirs)}
    routes = exact(history, store)
    assert not routes[-1].summarized


def lying_history(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """All objects of the store of another history, whose ranks said something else at each marker."""

    def mark(stream: Stream, marker: int = 1) -> bytes:
        said = Mark(0, sum(map(len, stream.frames)), (TableScalars(0, 0, 6, 0, 4, 7, 1.0, 0.5, 0.5),))
        return stream.json(Kind.MARK, said.to_json(), marker=marker, step=10 * marker)

    with monkeypatch.context() as patch:
        patch.setattr(Stream, "mark", mark)
        other, theirs = Later(folder), Store()
        other.generation(1, range(1, 21))
        other.generation(2, range(15, 31), "1:14")
        list(materializer(other, theirs).catch_up(other.lineage))
    return theirs.held


def test_no_parts_of_a_summary_change_what_a_plan_says(
    history: History, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts of other objects, of another history, cut ones and none, at random; also where folds have the rows."""
    theirs, rng = lying_history(tmp_path, monkeypatch), random.Random(3)
    lies = {name: part for each in names(Store(theirs)) for name, part in parts_of(Store(theirs), each).items()}
    used: Counter[bool] = Counter()
    for policy in (NEVER, Policy(rebase=0, compact="span4"), Policy(rebase=1e-9, compact="none")):
        whole = Store()
        list(materializer(history, whole, policy).catch_up(history.lineage))
        plain = {
            marker: locate(history.lineage, marker, Catalog.of_job(whole, history.lineage), summaries=False)  # type: ignore[arg-type]
            for marker in map(MarkerId.parse, ("1:20", "1:9", "2:22", "2:30"))
        }
        for truth in (0.0, *[0.97] * 7):
            store = whole.copy()
            for name in names(store):
                parts = parts_of(store, name)
                others = list(parts.items())
                for key, part in list(parts.items()):
                    if rng.random() >= truth:
                        like = [each for other, each in others if other.split("/")[0] == key.split("/")[0]]
                        cut = part._replace(data=part.data[: len(part.data) // 2])
                        other = rng.choice([lies[key], rng.choice(like), cut, None]) if truth else lies[key]
                        parts = {**parts, key: other} if other is not None else {k: parts[k] for k in parts if k != key}
                put_again(store, name, parts)
            for marker, expected in plain.items():
                route = locate(history.lineage, marker, Catalog.of_job(store, history.lineage))  # type: ignore[arg-type]
                assert [each.ref for each in route.segments] == [each.ref for each in expected.segments]
                assert route.told == expected.told
                used[route.summarized] += 1
    assert min(used[True], used[False]) > 5


def test_a_manifest_of_another_history_is_not_believed_where_a_fold_has_the_rows(
    history: History, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, name = Store(), manifest_name(history.lineage.job, NEWEST)
    list(materializer(history, store, Policy(rebase=1e-9, compact="none")).catch_up(history.lineage))
    whole = locate(history.lineage, NEWEST, Catalog.of_job(store, history.lineage))  # type: ignore[arg-type]
    assert len(whole.pieces) == 1
    store.held[name] = lying_history(tmp_path, monkeypatch)[name]
    route = locate(history.lineage, NEWEST, Catalog.of_job(store, history.lineage))  # type: ignore[arg-type]
    assert route.stored == MarkerId(2, 29), "the log has the last interval"
    assert [each.mark.scalars for notes in route.told.values() for each in notes] == [()]


def test_directories_that_lie_about_chunks_lead_back_to_the_objects(history: History, store: Store) -> None:
    """Manifest and directory agree with each other, and not with the chunks: found out as rows are read."""
    name = names(store)[0]
    parts = parts_of(store, name)
    job, marker = history.lineage.job, MarkerId(1, 3)
    segment = StoreSegment(job, marker, 0, 0).name
    front = bytearray(parts[segment].data)
    front[make_store.entry_at(0, "crc")] ^= 1
    make_store.sealed(front)
    manifest = Manifest.from_bytes(parts[manifest_name(job, marker)].data, "here")
    crc = int.from_bytes(front[124:128], "little")
    lying = replace(manifest, segments=((replace(manifest.refs[0], header_crc=crc),),)).to_bytes()
    parts[segment] = parts[segment]._replace(data=bytes(front))
    parts[manifest_name(job, marker)] = Part(len(lying), lying)
    put_again(store, name, parts)
    first, second = exact(history, store)
    assert (first.summarized, second.summarized) == (True, False)
    assert {each.ref.name for each in second.segments} >= {segment}, "it is read after all"


def test_what_is_damaged_in_the_objects_is_read_around_although_a_summary_says_that_it_is_whole(
    history: History,
) -> None:
    store = Store()
    list(materializer(history, store, Policy(rebase=0, compact="span4")).catch_up(history.lineage))
    store.held = {name: data for name, data in store.held.items() if not name.startswith("folds/")}
    store2 = Store()
    list(materializer(history, store2, Policy(rebase=0, compact="span4")).catch_up(history.lineage))
    folds = {name: data for name, data in store2.held.items() if name.startswith("folds/")}
    marker = MarkerId(2, 17)
    bad = StoreSegment(history.lineage.job, marker, 0, 0).name
    data = store.held[bad]
    store.held[bad] = data[:-1] + bytes([data[-1] ^ 1]) if data[-1] else flip(data)
    store.held |= folds
    exact(history, store)


def test_objects_that_gc_took_are_not_brought_back_by_a_summary(history: History, store: Store) -> None:
    """A marker is there if its manifest is listed: a summary that still has it says nothing."""
    job = history.lineage.job
    store.delete(manifest_name(job, MarkerId(2, 20)))
    route = locate(history.lineage, NEWEST, Catalog.of_job(store, history.lineage))  # type: ignore[arg-type]
    assert route.stored == MarkerId(2, 19), "what comes after the gap is the log's"


# The bytes.


def test_a_summary_that_would_unpack_to_more_than_it_says_is_refused(store: Store) -> None:
    data = bytearray(store.held[names(store)[0]])
    bomb = zlib.compress(bytes(50_000_000))
    with pytest.raises(CorruptionError, match="unpacks to more than"):
        Summary.from_bytes(bytes(data[:64]) + bomb, "bomb")
    data[32:40] = (summary_format.MAX_UNPACKED_BYTES + 1).to_bytes(8, "little")
    data[60:64] = crc32c(bytes(data[:60])).to_bytes(4, "little")
    with pytest.raises(CorruptionError, match="impossible"):
        Summary.from_bytes(bytes(data[:64]) + bomb, "bomb")


@pytest.mark.parametrize("name", ["folds/x", "manifests/../STORE", "pins/a"])
def test_a_part_that_is_neither_manifest_nor_segment_is_refused(store: Store, name: str) -> None:
    with pytest.raises(CorruptionError, match="invalid part"):
        Summary.from_bytes(Summary(make_store.make.JOB, {name: Part(1, b"x")}).to_bytes(), "here")


def test_segments_of_another_job_are_refused(store: Store) -> None:
    name = next(name for name in store.held if name.startswith(SEGMENTS_DIR))
    parsed = parse_store_segment(name)
    assert parsed is not None
    with pytest.raises(CorruptionError, match="invalid part"):
        Summary.from_bytes(Summary(b"\xaa" * 16, {name: Part(128, bytes(128))}).to_bytes(), "here")


# Summaries when gc takes objects, and when a scrub reads them.


# Those who delete and repair.


def collected(history: History, store: Store, rules: GcRules) -> None:
    with ThreadPoolExecutor(2) as pool:
        collect(store, history.lineage, history.lineage.job, rules, pool, clocks=lambda: {"boot": 1.0})  # type: ignore[arg-type]


def test_gc_takes_those_of_which_most_markers_went_and_the_materializer_writes_others(
    history: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store()
    list(materializer(history, store, Policy(rebase=1e-9, compact="none")).catch_up(history.lineage))
    before = names(store)
    rules = GcRules(retention=Retention(newest=10), grace_s=0.0)
    collected(history, store, rules)
    after = names(store)
    assert set(after) < set(before)
    lineage = history.lineage
    kept = Catalog.load(store, lineage.job).markers  # type: ignore[arg-type]
    for name in after:
        parsed = parse_summary_name(name)
        assert parsed is not None
        assert 2 * sum(parsed.first <= marker <= parsed.last for marker in kept) >= parsed.count
    exact(history, store)
    monkeypatch.setattr(summarizer, "MARKERS", 2)
    list(materializer(history, store).catch_up(lineage))
    job, covered = lineage.job, [name for name in map(parse_summary_name, names(store)) if name is not None]
    left = summarizer.without_summary(Catalog.load(store, job), covered)  # type: ignore[arg-type]
    assert len(left) < 2
    exact(history, store)


def test_gc_waits_its_grace_period_for_them(history: History) -> None:
    store = Store()
    list(materializer(history, store, Policy(rebase=1e-9, compact="none")).catch_up(history.lineage))
    before = names(store)
    collected(history, store, GcRules(retention=Retention(newest=10), grace_s=3600.0))
    assert names(store) == before


def test_gc_takes_one_whose_markers_another_one_has(history: History, store: Store) -> None:
    first, second, *_ = names(store)
    both = {**parts_of(store, first), **parts_of(store, second)}
    whole = [each for each in map(parse_summary_name, (first, second)) if each is not None]
    markers = [whole[0].first, *([whole[0].last] * (2 * RUN - 2)), whole[1].last]
    put_summary(store, Summary(history.lineage.job, both), markers)  # type: ignore[arg-type]
    collected(history, store, GcRules(retention=Retention(newest=100), grace_s=0.0))
    assert not {first, second} & set(names(store))
    assert len(names(store)) == 3
    (route,) = exact(history, store)
    assert route.summarized


# What a scrub says.


def scrubbed(history: History, store: Store, *, repair: bool = False) -> list[Damage]:
    told: list[Damage] = []
    with ThreadPoolExecutor(2) as pool:
        progress = Progress(lambda: None)
        folder = IntervalFolder(history.log, store, lambda _: True, progress)  # type: ignore[arg-type]
        repairer = Repairer(store, pool, folder, progress, lambda _: None)  # type: ignore[arg-type]
        mender = ScrubMender(store, repairer, lambda _: open_dense(str(history.root)), progress)  # type: ignore[arg-type]
        scrubber = Scrubber(store, lambda: history.lineage, "command", mender if repair else None, told.append)  # type: ignore[arg-type]
        for _ in scrubber.pieces(anew=True):
            pass
    return told


def test_a_scrub_names_a_damaged_and_a_stale_summary_and_takes_them_away(history: History, store: Store) -> None:
    assert scrubbed(history, store) == []
    first, second, *others = names(store)
    store.held[first] = flip(store.held[first])
    parts = parts_of(store, second)
    manifest = next(name for name in parts if name.startswith("manifests/"))
    parsed = Manifest.from_bytes(parts[manifest].data, manifest)
    lying = replace(parsed, segments=((replace(parsed.refs[0], rows=77),),)).to_bytes()
    put_again(store, second, {**parts, manifest: Part(len(lying), lying)})
    (stale,) = set(names(store)) - {first, *others}
    told = scrubbed(history, store)
    assert {damage.name for damage in told} == {first, stale}
    assert {damage.state for damage in told} == {"damaged"}
    told = scrubbed(history, store, repair=True)
    assert {damage.state for damage in told} == {"repaired"}
    assert names(store) == others
    assert scrubbed(history, store) == []
    list(materializer(history, store).catch_up(history.lineage))
    assert len(names(store)) == 4
    exact(history, store)
