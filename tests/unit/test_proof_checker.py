"""The materializer compares each marker with its proof, says so in the store, and tells the trainer what differs."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from tests.builders import table
from tests.command import call
from tests.counting import CountingObjects
from tests.evolved import EvolvingJob
from tests.parts import (
    FileLog,
    Materializer,
    Policy,
    ProofRule,
    Verifier,
    WindowCheck,
    WindowReader,
    arm,
    entries_of,
    locate,
    open_dense,
)
from tests.stores import lose_rows
from tests.unit.folded_job import command
from tests.unit.test_proof_format import lose_a_row
from torchrec_stream_ckpt.extras.sizing.requests import proof_requests
from torchrec_stream_ckpt.format.proof import POSITIONS
from torchrec_stream_ckpt.format.readings import Comparison
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.inner import Catalog, Control, open_store
from torchrec_stream_ckpt.maintain.repairer import Repair
from torchrec_stream_ckpt.proofs.proof_status import status_of
from torchrec_stream_ckpt.store.reader import open_segments
from torchrec_stream_ckpt.store.verdicts import list_proved, new_verdicts
from torchrec_stream_ckpt.util.layout import MANIFESTS_DIR, PROVED_DIR, SEGMENTS_DIR
from torchrec_stream_ckpt.util.types import MarkerId, StateSpec

pytestmark = pytest.mark.usefixtures("no_syncs")

POINTS = ("proof.verdict", "proof.noted")
ROUND = 4
SCHEMA = Schema((replace(table("t_a", 700, 4), id=3), replace(table("t_b", 500, 4), id=9)))
BASES, INTERVALS = Policy(rebase=1e-9, compact="none"), Policy(rebase=0, compact="none")


@dataclass
class Run:
    """What one process of a materializer has done."""

    markers: list[int]
    differing: list[WindowCheck] = field(default_factory=list)
    repaired: list[Repair] = field(default_factory=list)
    proofs: int = 0
    problems: list[tuple[int, str]] = field(default_factory=list)
    """Markers that cannot be compared, and why."""


@pytest.fixture
def job(tmp_path: Path) -> EvolvingJob:
    """A round of windows is four markers; nothing is committed."""
    made = EvolvingJob(tmp_path / "log", schema=SCHEMA, width=POSITIONS // ROUND)
    made.first(SCHEMA)
    return made


def materialize(job: EvolvingJob, policy: Policy = INTERVALS, *, proofs: bool = True) -> Run:
    log, run = FileLog(job.root), Run([])
    with ThreadPoolExecutor(2) as pool:
        objects = open_store(str(job.root))
        failed = lambda commit, error: run.problems.append((commit.id.marker, error.headline))  # noqa: E731
        rule = ProofRule(lambda _: objects, run.differing.append, failed) if proofs else None
        materializer = Materializer(
            log, objects, lambda _: open_dense(str(job.root)), pool, policy, repaired=run.repaired.append, proofs=rule
        )
        run.markers = [marker.marker for marker in materializer.catch_up(Control(log).refresh())]
    run.proofs = materializer.counts.proofs
    return run


def said(job: EvolvingJob) -> list[Comparison]:
    return list_proved(open_store(str(job.root)), Control(job.log).refresh().job)


def verdicts(job: EvolvingJob) -> list[tuple[MarkerId, set[int]]]:
    """(marker, the blocks that are named) of all verdicts on the job's first generation."""
    found = new_verdicts(open_store(str(job.root)), Control(job.log).refresh().job, 1, ())
    return [(each.marker, {rows.begin // 64 for rows in each.rows}) for _, each in found]


@pytest.fixture
def fuse() -> Iterator[Callable[[str], None]]:
    yield arm
    arm("")


def test_each_marker_is_compared_once_whoever_comes_after(job: EvolvingJob) -> None:
    job.markers(3)
    assert materialize(job).proofs == 3
    job.markers(2)
    assert materialize(job, BASES).proofs == 2
    assert materialize(job).proofs == 0
    found = said(job)
    assert [each.marker for each in found] == [MarkerId(1, number) for number in range(1, 6)]
    assert {(each.who, each.width, each.differing) for each in found} == {("store", POSITIONS // ROUND, 0)}
    assert verdicts(job) == []
    assert Comparison.parse(found[0].name) == found[0]
    assert Comparison.parse(found[0].name.replace("-d000000", "-d0000000")) is None


@pytest.mark.parametrize("alone", [True, False])
def test_the_mark_of_a_failed_marker_is_no_proof_of_the_next_one(job: EvolvingJob, alone: bool) -> None:
    job.markers(1)
    job.touch()
    job.give_up()
    job.touch()
    commit = job.commit()
    lineage = Control(job.log).refresh()
    reader = Verifier(job.log, lineage, route=locate(lineage, commit.id) if alone else None)
    reader.read([commit])
    found = reader.rows_verdict(commit, None)
    assert found.damage == ()
    assert found.verified is not None
    assert found.verified.unproved is None


def test_a_store_that_was_never_compared_is_compared_for_a_round(job: EvolvingJob) -> None:
    job.markers(6)
    assert materialize(job, proofs=False).proofs == 0
    assert materialize(job).proofs == ROUND
    assert [each.marker.marker for each in said(job)] == [3, 4, 5, 6]


@pytest.mark.parametrize("where", ["segment", "fold"])
def test_a_lost_row_is_found_within_a_round_and_named_for_the_trainer(
    job: EvolvingJob, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    job.markers(1)
    assert materialize(job).differing == []
    job.markers(1)
    lose_a_row(monkeypatch, where)
    found = materialize(job, BASES).differing
    monkeypatch.undo()
    for _ in range(ROUND):
        if found:
            break
        job.give_up()  # no row changes meanwhile
        job.commit()
        found += materialize(job).differing
    (check,) = found
    assert check.compared.unproved is not None
    blocks = {block.begin // 64 for block in check.compared.unproved.blocks}
    assert verdicts(job) == [(check.marker, blocks)]
    assert [each.marker for each in said(job) if each.differing] == [check.marker]
    lineage = Control(job.log).refresh()
    assert lineage.newest is not None
    standing = status_of(lineage, lineage.newest.id, said(job))
    assert standing is not None
    assert (standing.differing, standing.differing_at) == (check.differing, (check.marker,))


@pytest.mark.parametrize("point", POINTS)
def test_a_materializer_that_dies_while_it_compares_is_taken_up(
    job: EvolvingJob, monkeypatch: pytest.MonkeyPatch, fuse: Callable[[str], None], point: str
) -> None:
    job.width = POSITIONS
    job.markers(1)
    lose_a_row(monkeypatch, "segment")
    fuse(f"{point}=raise")
    materialize(job, proofs=False)
    monkeypatch.undo()
    with pytest.raises(OSError, match=point):
        materialize(job)
    found = materialize(job).differing
    assert {marker for marker, _ in verdicts(job)} == {MarkerId(1, 1)}
    assert len(said(job)) == 1
    assert bool(found) == (point == "proof.verdict")


def test_what_was_altered_is_repaired_before_it_is_compared(job: EvolvingJob) -> None:
    job.markers(2)
    materialize(job, BASES)
    alter_the_base(job)
    job.markers(1)
    run = materialize(job)
    assert [each.name for each in run.repaired] == [base_of(job).name]
    assert (run.proofs, run.differing, run.problems) == (1, [], [])


def test_a_base_that_cannot_be_repaired_holds_up_no_marker(job: EvolvingJob) -> None:
    job.markers(2)
    materialize(job, BASES)
    alter_the_base(job)
    lose_rows(job.root)
    for path in (job.root / "segments").rglob("g*-m00000001-*.seg"):
        path.unlink()
    job.log = FileLog(job.root)
    said_before = said(job)
    run = materialize(job)
    assert run.problems == []  # nothing is left to compare
    for each in said_before[-1:]:
        open_store(str(job.root)).delete(each.name)
    run = materialize(job)
    ((marker, problem),) = run.problems
    assert (marker, run.proofs) == (2, 0)
    assert "checksum does not match" in problem


def base_of(job: EvolvingJob) -> object:
    catalog = Catalog.load(open_store(str(job.root)), Control(job.log).refresh().job)
    ((start, end),) = (each for each in catalog.folds if each[0] is None)
    (ref,) = catalog.fold(start, end).segments
    return ref


def alter_the_base(job: EvolvingJob) -> None:
    """All weights of the base are zeros."""
    objects, ref = open_store(str(job.root)), base_of(job)
    with ThreadPoolExecutor(1) as pool:
        (picked,) = open_segments(objects, [ref], Control(job.log).refresh().job, pool)  # type: ignore[list-item]
    path = job.root / picked.ref.name
    data = bytearray(path.read_bytes())
    for entry in entries_of(picked.entries):
        begin, half = entry.offset + entry.num_bytes // 2, entry.num_bytes // 2
        data[begin : begin + half] = bytes(half)
    path.write_bytes(data)


def test_markers_without_a_proof_are_passed_over(job: EvolvingJob) -> None:
    job.width = 0
    job.markers(2)
    run = materialize(job)
    assert (run.proofs, run.problems, said(job)) == (0, [], [])
    lineage = Control(job.log).refresh()
    assert status_of(lineage, MarkerId(1, 2), said(job)) is None


def test_a_standing_counts_the_newest_comparison_of_each_part(job: EvolvingJob) -> None:
    markers, lineage = job.markers(6), Control(job.log).refresh()
    materialize(job)
    found = said(job)
    for newest, share in enumerate((0.25, 0.5, 0.75, 1.0, 1.0, 1.0)):
        standing = status_of(lineage, markers[newest], found)
        assert standing is not None
        assert (standing.marker, standing.share) == (markers[newest], share)
        assert standing.oldest == markers[max(0, newest - ROUND + 1)]
    of_another_history = [replace(each, chain=each.chain ^ 1) for each in found]
    assert status_of(lineage, markers[-1], of_another_history) is None


def test_the_command_says_what_differs_and_goes_on(job: EvolvingJob, monkeypatch: pytest.MonkeyPatch) -> None:
    job.width = POSITIONS
    lose_a_row(monkeypatch, "segment")
    job.markers(2)
    copy = shutil.copytree(job.root, job.root.parent / "quiet")
    status, events, _ = command(f"file://{job.root}", "--once", "--json")
    assert status == 0
    (unproved,) = [each for each in events if each["event"] == "unproved"]
    assert unproved["marker"] == "1:1"
    assert unproved["blocks"] == len(unproved["first"]) == 1  # type: ignore[arg-type]
    assert events[-1]["proofs"] == 2
    lose_a_row(monkeypatch, "segment")
    status, events, _ = command(f"file://{copy}", "--once", "--json", "--no-check-proofs")
    assert (status, events[-1]["proofs"]) == (0, 0)


def cli(*arguments: str) -> str:
    done = call(*arguments, columns=140)
    assert done.exit_code in (0, 1), done.output
    return done.stdout


def test_what_was_compared_is_listed_watched_and_reported(job: EvolvingJob) -> None:
    uri, page = f"file://{job.root}", job.root.parent / "page.html"
    job.markers(2)
    quiet = json.loads(cli("list", uri, "--json"))
    assert (quiet["compared"], [each["compared"] for each in quiet["markers"]]) == (None, [None, None])
    materialize(job)
    listed = json.loads(cli("list", uri, "--json"))
    assert [each["compared"]["by"] for each in listed["markers"]] == ["store", "store"]
    assert {each["compared"]["differing"] for each in listed["markers"]} == {0}
    watched = json.loads(cli("watch", uri, "--once", "--json"))
    for standing in (listed["compared"], watched["compared"]):
        assert (standing["marker"], standing["oldest"], standing["share"]) == ("1:2", "1:1", 0.5)
        assert standing["oldest_s"] == listed["markers"][0]["compared"]["time_s"]
    assert "unproved" not in {alert["kind"] for alert in watched["alerts"]}
    assert "rows compared with proofs: 50%, the oldest" in cli("list", uri)
    assert "50%, the oldest" in cli("watch", uri, "--once")
    cli("report", uri, "--out", str(page))
    assert "Compared with proofs" in page.read_text()


def test_blocks_that_differ_are_listed_and_alarm_until_they_are_compared_again(
    job: EvolvingJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri, job.width = f"file://{job.root}", POSITIONS
    lose_a_row(monkeypatch, "segment")
    job.markers(1)
    materialize(job)
    monkeypatch.undo()
    assert "1:1: 1 block of rows differs from its proof in the tables" in cli("list", uri)
    watched = json.loads(cli("watch", uri, "--once", "--json"))
    (alert,) = [alert for alert in watched["alerts"] if alert["kind"] == "unproved"]
    assert "found at marker 1:1" in alert["text"]
    for stream in job.streams:  # as the trainer does that has found the verdict
        for shard in stream.shards:
            job.put_rows(stream, shard, np.arange(shard.row0, shard.row0 + shard.rows))
    job.commit()
    assert materialize(job).differing == []
    watched = json.loads(cli("watch", uri, "--once", "--json"))
    assert "unproved" not in {alert["kind"] for alert in watched["alerts"]}
    assert watched["compared"]["differing_at"] == []


# What it takes to compare a marker with its proof: requests to the store follow from the objects that lead to it.


MARKERS, RANKS = 40, 2
ROWWISE = StateSpec("momentum1", "float32", True)
LARGER = Schema((replace(table("t_a", 3000, 4, "float32", ROWWISE), id=3), replace(table("t_b", 2000, 8), id=9)))


def touch(job: EvolvingJob, rows: int) -> None:
    """Some rows of each shard, spread over it."""
    for stream in job.streams:
        for shard in stream.shards:
            ids = shard.row0 + np.sort(job.random.choice(shard.rows, min(rows, shard.rows), replace=False))
            job.put_rows(stream, shard, ids)
    job.flush()
    job.commit()


@dataclass(frozen=True)
class Checked:
    """What one marker asked of the store, and what leads to it."""

    asked: Counter[tuple[str, str]]
    pieces: int
    segments: int


def folded(job: EvolvingJob, store: Path, *, proofs: bool) -> Iterator[Checked]:
    objects = CountingObjects(open_store(str(store)))
    rule = ProofRule(lambda _: objects) if proofs else None
    lineage = Control(job.log).refresh()
    with ThreadPoolExecutor(2) as pool:
        dense = open_dense(str(job.root))
        materializer = Materializer(job.log, objects, lambda _: dense, pool, Policy(), proofs=rule)
        for marker in materializer.catch_up(lineage):
            asked = objects.taken()
            cover = Catalog.load(open_store(str(store)), lineage.job).cover(lineage.chain(marker))
            yield Checked(asked, len(cover), sum(len(piece.segments) for piece in cover))
        assert materializer.counts.proofs == (len(job.truth) if proofs else 0)


def test_a_comparison_asks_once_for_each_object_that_leads_to_the_marker(tmp_path: Path) -> None:
    """By the default policy, with spans and bases: no more requests at the fortieth marker than at the tenth."""
    job = EvolvingJob(tmp_path / "log", schema=LARGER, width=POSITIONS // 8)
    job.first(LARGER, RANKS)
    for number in range(MARKERS):
        touch(job, 150 if number else 1)
    without, with_ = (list(folded(job, tmp_path / f"store-{proofs}", proofs=proofs)) for proofs in (False, True))
    spans = {each.pieces for each in with_}
    assert max(spans) <= 8, "spans and bases keep the way short"
    job_id = Control(job.log).refresh().job
    starts = [start for start, _ in Catalog.load(open_store(str(tmp_path / "store-True")), job_id).folds]
    assert starts.count(None) >= 2, "bases"
    assert len(starts) - starts.count(None) >= 6, "and spans"
    found = []
    for number, (plain, checked) in enumerate(zip(without, with_, strict=True)):
        assert checked.asked["get", MANIFESTS_DIR] == plain.asked["get", MANIFESTS_DIR]
        asked = checked.asked - plain.asked
        gets = asked.pop(("get", SEGMENTS_DIR))
        assert asked == {("put", PROVED_DIR): 1} | ({("list", PROVED_DIR): 1} if not number else {})
        assert gets <= proof_requests(RANKS, segments=checked.segments).reads
        found.append(gets)
    # Three intervals after a base up to the next span's beginning, three after the last span; base, spans, and notes.
    assert max(found) <= 6 * RANKS + 1 + 4 + RANKS


@pytest.mark.parametrize("width", [POSITIONS // 128, POSITIONS // 4])
def test_a_large_object_takes_at_most_a_request_for_each_32_kib(tmp_path: Path, width: int) -> None:
    """And no more than there are blocks of the window, for each section, and chunks."""
    schema = Schema((replace(table("t_a", 100_000, 8, "float32", ROWWISE), id=3),))
    job = EvolvingJob(tmp_path, schema=schema, width=width)
    job.first(schema, 1)
    touch(job, 1)
    touch(job, 60_000)
    objects = CountingObjects(open_store(str(tmp_path)))
    lineage = Control(job.log).refresh()
    with ThreadPoolExecutor(2) as pool:
        materializer = Materializer(job.log, objects, lambda _: open_dense(str(tmp_path)), pool, Policy(rebase=0))
        markers = list(materializer.catch_up(lineage))
        catalog, reader = Catalog.load(objects, lineage.job), WindowReader(objects, pool)
        for marker in markers:
            objects.taken()
            check = reader.check(lineage, catalog, marker)
            refs = [ref for piece in catalog.cover(lineage.chain(marker)) for ref in piece.segments]
            assert min(ref.num_bytes for ref in refs) > 2**20
            gets = objects.asked["get", SEGMENTS_DIR]
            assert check.compared.checked == check.compared.total > 0
            assert not check.differing
            num_bytes = sum(ref.num_bytes for ref in refs)
            assert gets <= proof_requests(1, segments=len(refs), num_bytes=num_bytes).reads
            blocks = len(check.window.blocks(3, 0, 100_000)) if check.window is not None else 0
            assert gets <= len(refs) * (1 + 2 * blocks + 2)
