"""Which marker is restored: what of the log is read for that, and what not."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.builders import JOB, digest_files, trim
from tests.parts import (
    DenseFolder,
    FileLog,
    Incarnation,
    Policy,
    TierState,
    Verifier,
    locate,
    plan_reads,
    read_hello,
    shorten_control,
    verify_marker,
)
from tests.parts import job as route_job
from tests.stores import choose, fold
from tests.synthetic import SCHEMA, Job
from tests.unit.snapshot_log import note
from torchrec_stream_ckpt.errors import CorruptionError, MarkerNotFoundError
from torchrec_stream_ckpt.find.route import Shards
from torchrec_stream_ckpt.format import commits
from torchrec_stream_ckpt.format.control import Commit
from torchrec_stream_ckpt.format.frame import HEADER_LEN, json_frame
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.format.rank_ends import RankEnds
from torchrec_stream_ckpt.format.rank_shards import RankShards
from torchrec_stream_ckpt.inner import Control, Route, find, open_store
from torchrec_stream_ckpt.log.api import LogReader
from torchrec_stream_ckpt.util.layout import CONTROL_FILE, dense_name
from torchrec_stream_ckpt.util.types import LogSpan, MarkerId, TableShard

TARGETS = [TableShard(index, 0, table.rows, 0, table.dim) for index, table in enumerate(SCHEMA.tables)]


class Counting:
    """A log that says which streams are read, and which are looked for."""

    def __init__(self, log: LogReader) -> None:
        self._log = log
        self.read_of: list[int] = []
        self.looked_for: list[int] = []

    def incarnation(self) -> Incarnation | None:
        return self._log.incarnation()

    def read(self, span: LogSpan) -> Iterator[tuple[int, memoryview]]:
        self.read_of.append(span.generation)
        return self._log.read(span)

    def check_there(self, spans: Sequence[LogSpan]) -> None:
        self.looked_for += [span.generation for span in spans]
        self._log.check_there(spans)

    def place(self, span: LogSpan) -> tuple[str, int]:
        return self._log.place(span)


def behind_of(log: LogReader, lineage: Lineage, since: MarkerId, marker: MarkerId, known: Shards) -> Route:
    """What a spare reads."""
    route = locate(lineage, marker, since=since)
    route.check(log)
    return route.complete(log, known)


def grown(root: Path, *layouts: bool) -> tuple[Job, Lineage]:
    """A job of two ranks with a generation for each, on the one before."""
    job, newest = Job(root, 2), None
    for number, each in enumerate(layouts):
        job.layouts = each
        job.begin(newest.id if newest is not None else None, world=2 if number != 2 else 3)
        job.touch()
        newest = committed(job)
    return job, Control(job.log).refresh()


def committed(job: Job) -> Commit:
    """The next marker, with a dense directory of one file."""
    name = dense_name(JOB, MarkerId(job.generation, job.marker + 1))
    folder = job.root / name
    folder.mkdir(parents=True)
    (folder / ".metadata").write_bytes(b"")
    return job.commit(dense=name, dense_files=digest_files(folder, [".metadata"]))


def test_a_marker_is_chosen_without_opening_a_stream(tmp_path: Path) -> None:
    job, lineage = grown(tmp_path, True, True, True, True)
    log = Counting(job.log)
    choice = choose(log, lineage, DenseFolder(tmp_path), None)
    assert choice is not None
    assert choice.commit.id == MarkerId(4, 1)
    assert log.read_of == []
    assert log.looked_for == [4] * len(choice.commit.ranks), "of the marker's own generation alone"
    for commit in lineage.commits.values():
        claim = lineage.claims[commit.generation]
        said = [read_hello(job.log, claim, commit, end).shards for end in commit.ranks]
        assert list(choice.shards[commit.generation]) == said
    assert choice.shards[1] is choice.shards[2], "one object for one layout"
    plan = plan_reads(choice, SCHEMA, TARGETS)
    assert {(read.interval.commit.generation, read.interval.end.rank) for read in plan.reads} == {
        (commit.generation, end.rank) for commit in lineage.commits.values() for end in commit.ranks
    }
    assert all(
        read.shards == choice.shards[read.interval.commit.generation][read.interval.end.rank] for read in plan.reads
    )


def test_the_choice_opens_the_commit_of_the_marker_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[int] = []
    open_commit = commits.open_commit
    monkeypatch.setattr(commits, "open_commit", lambda frame: opened.append(len(frame)) or open_commit(frame))
    for generations in (4, 16):
        opened.clear()
        job, lineage = grown(tmp_path / f"{generations}", *[True] * generations)
        choice = choose(job.log, lineage, DenseFolder(job.root), None)
        assert choice is not None
        assert (choice.marker.generation, len(opened)) == (generations, 1)
        plan_reads(choice, SCHEMA, TARGETS)
        assert len(opened) == generations, "the plan reads the ends of all streams"
        fold(job.root, Policy(rebase=0, compact="none"), upto=MarkerId(generations - 1, 1))
        opened.clear()
        choice = choose(job.log, Control(job.log).refresh(), DenseFolder(job.root), None, open_store(str(job.root)))
        assert choice is not None
        opened.clear()
        assert {each.commit.generation for each in choice.intervals} == {generations}
        assert opened == [], "what the store holds is not looked for in the log"


def test_a_wrong_commit_of_an_older_generation_is_named_once_its_rows_are_planned(tmp_path: Path) -> None:
    job, lineage = grown(tmp_path, True, True, True)
    first = lineage.find(MarkerId(1, 1))
    text = first.to_frame()[HEADER_LEN:].decode("ascii")
    wrong = json_frame(first.header(), text.replace('"time_s":', '"tine_s":').rstrip(" ").encode("ascii"))
    control = tmp_path / CONTROL_FILE
    control.write_bytes(control.read_bytes().replace(first.to_frame(), wrong))
    lineage = Control(job.log).refresh()
    choice = choose(job.log, lineage, DenseFolder(tmp_path), None)
    assert choice is not None
    assert choice.marker == MarkerId(3, 1)
    with pytest.raises(CorruptionError, match="COMMIT") as refused:
        plan_reads(choice, SCHEMA, TARGETS)
    assert refused.value.where["marker"] == MarkerId(1, 1)
    with pytest.raises(CorruptionError, match="COMMIT"):
        choose(job.log, lineage, DenseFolder(tmp_path), MarkerId(1, 1))


def test_a_commit_with_other_ranks_than_the_layout_of_its_claim_is_refused(tmp_path: Path) -> None:
    job, lineage = grown(tmp_path, True, True)
    words = "the COMMIT has 3 ranks, but the layout in its CLAIM has 2"
    for marker in (MarkerId(1, 1), MarkerId(2, 1)):
        commit = lineage.find(marker)
        more = replace(commit, ranks=RankEnds.of([*commit.ranks, replace(commit.ranks[1], rank=2)]))
        lineage.commits[marker] = more
        with pytest.raises(CorruptionError, match=words) as refused:
            plan_reads(locate(lineage, MarkerId(2, 1)).complete(job.log), SCHEMA, TARGETS)
        assert refused.value.where["marker"] == marker
        lineage.commits[marker] = commit


def test_the_streams_of_generations_without_a_layout_are_asked(tmp_path: Path) -> None:
    job, lineage = grown(tmp_path, False, True, False, True)
    log = Counting(job.log)
    choice = choose(log, lineage, DenseFolder(tmp_path), None)
    assert choice is not None
    assert log.read_of == [1, 1, 3, 3, 3]
    whole = grown(tmp_path / "whole", True, True, True, True)
    said = choose(whole[0].log, whole[1], DenseFolder(tmp_path / "whole"), None)
    assert said is not None
    assert {each: list(shards) for each, shards in choice.shards.items()} == {
        each: list(shards) for each, shards in said.shards.items()
    }


def test_a_marker_whose_own_streams_are_gone_is_passed_over_at_once(tmp_path: Path) -> None:
    job, lineage = grown(tmp_path, True, True)
    for segment in (tmp_path / "data" / "p00001").glob("g00000002-*.seg"):
        segment.unlink()
    choice = choose(job.log, lineage, DenseFolder(tmp_path), None)
    assert choice is not None
    assert choice.commit.id == MarkerId(1, 1)
    assert "2:1" in choice.skipped[0]


def test_what_lies_behind_a_marker_is_known_without_opening_a_stream(tmp_path: Path) -> None:
    job, lineage = grown(tmp_path, True, True, True)
    log = Counting(job.log)
    behind = behind_of(log, lineage, MarkerId(1, 1), MarkerId(3, 1), {})
    assert log.read_of == []
    assert behind.shards.keys() == {each.claim.generation for each in behind.intervals} == {2, 3}


def test_a_spare_knows_the_shards_of_a_generation_whose_rows_a_store_gave(tmp_path: Path) -> None:
    for layouts in (True, False):
        job, lineage = grown(tmp_path / f"{layouts}", layouts)
        fold(job.root, Policy(rebase=0, compact="none"))
        objects = open_store(str(job.root))
        choice = choose(job.log, lineage, DenseFolder(job.root), None, objects)
        assert choice is not None
        assert choice.pieces
        assert not choice.shards
        known = choice.all_shards()
        assert list(known[1]) == [tuple(stream.shards) for stream in job.streams]
        job.touch()
        newest = committed(job)
        log = Counting(job.log)
        behind = behind_of(log, Control(job.log).refresh(), MarkerId(1, 1), newest.id, known)
        assert log.read_of == []
        assert behind.shards == known


def test_a_store_that_says_other_shards_than_the_claim_is_refused(tmp_path: Path) -> None:
    job, lineage = grown(tmp_path, True)
    fold(tmp_path, Policy(rebase=0, compact="none"))
    claim = lineage.claims[1]
    turned = Job(tmp_path / "other", 2)
    turned.splits[0] = [2, 1, 1]
    layout = turned.layout()
    assert layout is not None
    object.__setattr__(claim, "layout", layout)
    choice = choose(job.log, lineage, DenseFolder(tmp_path), None, open_store(str(tmp_path)))
    assert choice is not None
    with pytest.raises(CorruptionError, match="the store lists other shards of the ranks than the CLAIM"):
        choice.all_shards()


class Forged(Job):
    """CLAIMs that do not say what the HELLOs say."""

    def layout(self) -> RankShards | None:
        return RankShards.of([tuple(self._shards(rank))[::-1] for rank in range(self.world)])


def test_streams_are_held_against_the_claim_by_whoever_reads_them(tmp_path: Path) -> None:
    job = Forged(tmp_path, 2)
    job.begin()
    newest = committed(job)
    lineage, words = Control(job.log).refresh(), "the shards in HELLO differ from its CLAIM"
    with pytest.raises(CorruptionError, match=words) as refused:
        verify_marker(job.log, lineage, DenseFolder(tmp_path), newest.id)
    assert (refused.value.where["generation"], refused.value.where["rank"]) == ("1", "0")
    verifier = Verifier(job.log, lineage)
    verifier.read([newest])
    damage = verifier.verdict(newest, DenseFolder(tmp_path)).damage
    assert [each.message for each in damage] == [words, words], "one a rank"
    with pytest.raises(CorruptionError, match=words):
        fold(tmp_path, Policy(rebase=0, compact="none"))
    with pytest.raises(CorruptionError, match=words):
        read_hello(job.log, lineage.claims[1], newest, newest.ranks[1])


def test_the_log_is_looked_through_where_its_folder_is_gone(tmp_path: Path) -> None:
    job, lineage = grown(tmp_path, True)
    shutil.rmtree(tmp_path / "data")
    with pytest.raises(CorruptionError):
        choose(job.log, lineage, DenseFolder(tmp_path), MarkerId(1, 1))


def test_markers_that_are_given_up_while_one_is_chosen_are_looked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, _ = grown(tmp_path, True)
    for _ in range(3):
        job.touch()
        committed(job)
    (tmp_path / dense_name(JOB, MarkerId(1, 4)) / ".metadata").unlink()
    log = FileLog(tmp_path)
    reader = route_job.Job(
        uri=f"file://{tmp_path}", log=log, control=Control(log, spare=True), store=f"file://{tmp_path}"
    )
    read, looks = TierState.read, list[TierState]()

    def overtaken(job: route_job.Job) -> TierState:
        """Another process trims as soon as a state was read, and the COMMIT of 1:2 goes."""
        looks.append(read(job))
        if len(looks) == 1:
            log.append_control(trim("1:3", given_up=(MarkerId(1, 2),)).to_frame())
            for _ in range(3):
                shorten_control(log, Control(log), at_once=True)
                log.append_control(note(MarkerId(1, 3), loss=0.5).to_frame())
        return looks[-1]

    monkeypatch.setattr(TierState, "read", overtaken)
    route = find(reader, None)
    assert route is not None
    assert route.marker == MarkerId(1, 3)
    assert [each[:4] for each in route.skipped] == ["1:4:"]
    assert len(looks) > 1
    monkeypatch.undo()
    with pytest.raises(MarkerNotFoundError, match="1:2 was given up"):
        find(reader, MarkerId(1, 2))
