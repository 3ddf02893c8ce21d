"""Trimming a log: only what nobody needs goes, whoever misses it is told, and a kill in between does no harm."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.builders import Stream, claim, commit, digest_files, trim, write
from tests.command import attempt
from tests.parts import FileLog, Freed, Incarnation, open_dense, trim_log, verify_marker
from tests.stores import choose
from torchrec_stream_ckpt.errors import (
    ConfigError,
    CorruptionError,
    LogUnavailableError,
    MarkerNotFoundError,
    TrimmedError,
)
from torchrec_stream_ckpt.format.dense import dense_path
from torchrec_stream_ckpt.inner import Control
from torchrec_stream_ckpt.log.control.trim import Trimmed, trim_range
from torchrec_stream_ckpt.save.generation import Generation
from torchrec_stream_ckpt.util.layout import parse_segment
from torchrec_stream_ckpt.util.types import LogSpan, MarkerId, RankEnd
from torchrec_stream_ckpt.util.units import size

STORE = "s3://bucket/job"
POINTS = {"trim.append": 1, "trim.appended": 1, "trim.recorded": 1, "trim.deleted": 2}
"""Where a trim is killed, and at which pass."""


class Job:
    """A log of one rank whose frames have a segment each."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.log = FileLog(root)
        self.incarnation = self.log.prepare(1).id

    def generation(self, number: int, markers: Sequence[int], parent: str = "") -> None:
        """A generation with these markers, each behind three frames; a frame more follows the last one."""
        above = MarkerId.parse(parent) if parent else None
        self.log.append_control(claim(number, parent=above, incarnation=self.incarnation).to_frame())
        stream = Stream(generation=number)
        end = self._write(number, stream.frames, 0)
        for marker in markers:
            frames = [stream.rows(range(8), marker), stream.items(range(6), marker), stream.mark(marker)]
            end = self._write(number, frames, end)
            self._commit(number, marker, stream, end)
        self._write(number, [stream.rows([1], 9.0)], end)

    def _write(self, number: int, frames: Sequence[bytes], at: int) -> int:
        for frame in frames:
            at = write(self.log, [frame], generation=number, at=at)[-1].end
        return at

    def _commit(self, number: int, marker: int, stream: Stream, end: int) -> None:
        folder = dense_path(self.root, commit(number, marker))
        folder.mkdir(parents=True)
        (folder / ".metadata").write_bytes(b"meta")
        files = digest_files(folder, [".metadata"])
        self.log.append_control(commit(number, marker, [stream.end(0, end)], dense_files=files).to_frame())

    @property
    def control(self) -> Control:
        return Control(self.log)

    def trim(self, marker: str, *others: str, store: str = STORE, dry_run: bool = False) -> Trimmed:
        control = self.control
        first, *more = (control.refresh().find(MarkerId.parse(name)) for name in (marker, *others))
        return trim_log(self.log, control, first, store, others=more, dry_run=dry_run)

    def segments(self) -> dict[int, list[int]]:
        """First bytes of the segments, by generation."""
        found: dict[int, list[int]] = {}
        for path in sorted((self.root / "data" / "p00000").iterdir()):
            parsed = parse_segment(path.name)
            assert parsed is not None
            found.setdefault(parsed[0], []).append(parsed[1])
        return found

    def sizes(self) -> dict[str, int]:
        return {path.name: path.stat().st_size for path in (self.root / "data" / "p00000").iterdir()}

    def end(self, marker: str) -> int:
        return self.control.refresh().find(MarkerId.parse(marker)).ranks[0].end

    def restore(self, marker: str) -> str:
        """What a restore says: the marker, or the error's class."""
        try:
            choice = choose(self.log, self.control.refresh(), open_dense(str(self.root)), MarkerId.parse(marker))
            verify_marker(self.log, self.control.refresh(), open_dense(str(self.root)), MarkerId.parse(marker))
        except (TrimmedError, CorruptionError) as error:
            return type(error).__name__
        assert choice is not None
        return str(choice.commit.id)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """Generation 2 stands on 1:2 and generation 4 on it; 1:3 and 3:3 are on branches, 5 never committed."""
    made = Job(tmp_path)
    made.generation(1, [1, 2, 3])
    made.generation(2, [3, 4], "1:2")
    made.generation(3, [3], "1:1")
    made.generation(4, [5, 6], "2:4")
    made.generation(5, [], "4:5")
    made.generation(6, [6, 7], "4:5")
    return made


@pytest.fixture
def plain(tmp_path: Path) -> Job:
    """One generation with three markers."""
    made = Job(tmp_path)
    made.generation(1, [1, 2, 3])
    return made


def test_what_lies_in_front_of_the_marker_goes_and_the_rest_stays(plain: Job) -> None:
    before = plain.sizes()
    done = plain.trim("1:2")
    end = plain.end("1:2")
    assert plain.segments() == {1: [base for base in map(_base, sorted(before)) if base >= end]}
    gone = before.keys() - plain.sizes().keys()
    assert done.freed == Freed("segments", 7, sum(before[name] for name in gone))
    assert (done.appended, len(gone)) == (True, 7)
    assert f"7 segments, {size(done.freed.num_bytes or 0)} of the log up to 1:2, which {STORE} holds" == done.describe()


def _base(name: str) -> int:
    parsed = parse_segment(name)
    assert parsed is not None
    return parsed[1]


def test_a_dry_run_says_the_same_and_changes_nothing(job: Job) -> None:
    control, data = (job.root / "control.log").read_bytes(), job.sizes()
    planned = job.trim("4:5", dry_run=True)
    assert (job.root / "control.log").read_bytes() == control
    assert job.sizes() == data
    done = job.trim("4:5")
    assert (planned.freed, planned.trim.markers) == (done.freed, done.trim.markers)
    assert (planned.appended, done.appended) == (False, True)
    assert sum(data.values()) - sum(job.sizes().values()) == done.freed.num_bytes


def test_the_last_segment_of_a_living_generation_stays(plain: Job) -> None:
    before = plain.segments()[1]
    plain.trim("1:3")
    assert plain.segments() == {1: before[-1:]}
    plain.log.open_writer(1, 0, plain.end("1:3")).close()  # its writer finds its place


def test_a_segment_that_is_needed_in_part_stays(tmp_path: Path) -> None:
    log, stream = FileLog(tmp_path), Stream()
    incarnation = log.prepare(1).id
    log.append_control(claim(1, incarnation=incarnation).to_frame())
    stream.mark(1)
    ends = [ack.end for ack in write(log, stream.frames)]
    count = len(stream.frames)
    stream.mark(2)
    write(log, stream.frames[count:], at=ends[-1])
    log.append_control(commit(1, 1, [stream.end(0, ends[0], frames=2)]).to_frame())  # in the middle of a segment
    control = Control(log)
    done = trim_log(log, control, control.refresh().find(MarkerId(1, 1)), STORE)
    assert done.freed == Freed("segments", 0, 0)


def test_generations_on_the_path_and_dead_ones_go_and_branches_stay(job: Job) -> None:
    before = job.segments()
    done = job.trim("4:5")
    assert list(map(str, done.trim.markers)) == ["1:2", "2:4", "4:5"]
    left = job.segments()
    assert left.keys() == {1, 3, 4, 6}
    assert left[1] == [base for base in before[1] if base >= job.end("1:2")]  # 1:3 needs it
    assert left[4] == [base for base in before[4] if base >= job.end("4:5")]
    assert (left[3], left[6]) == (before[3], before[6])


def test_branches_that_the_store_holds_as_well_go_too(job: Job) -> None:
    before = job.segments()
    done = job.trim("4:6", "1:3", "3:3")
    assert list(map(str, done.trim.markers)) == ["1:3", "2:4", "3:3", "4:6"]
    assert job.segments() == {6: before[6]}


def test_offsets_of_a_log_that_was_lost_are_not_those_of_the_log_that_came_after_it(tmp_path: Path) -> None:
    job = Job(tmp_path)
    far = RankEnd(0, 0, 0, 50_000, 2, 0, 0, 0)
    job.log.append_control(claim(1, incarnation="lost").to_frame())  # what recover writes
    for marker in (1, 2):
        job.log.append_control(commit(1, marker, [far]).to_frame())
    job.log.append_control(trim("1:1").to_frame())
    job.log.append_control(claim(2, parent=MarkerId(1, 2), incarnation="lost").to_frame())
    job.generation(3, [3, 4], "1:2")
    before, lineage = job.segments(), job.control.refresh()
    (span,) = lineage.spans(3, lineage.find(MarkerId(3, 4)).ranks)
    cut = trim_range(lineage, lineage.trims.reach, Incarnation(job.incarnation, 1))
    assert (cut.gone, cut.kept, cut.dead) == ((), (span,), frozenset())
    done = job.trim("3:3")
    assert list(map(str, done.trim.markers)) == ["1:2", "3:3"]
    assert job.segments() == {3: [base for base in before[3] if base >= job.end("3:3")]}
    lineage = job.control.refresh()
    cut = trim_range(lineage, lineage.trims.reach, Incarnation(job.incarnation, 1))
    assert (cut.gone, cut.kept) == (
        (LogSpan(3, 0, 0, job.end("3:3")),),
        (LogSpan(3, 0, job.end("3:3"), job.end("3:4")),),
    )
    shutil.rmtree(tmp_path / "data")
    (tmp_path / "LOG").unlink()
    with pytest.raises(CorruptionError, match="its identity file is missing"):
        job.trim("3:4")


def test_what_a_marker_lacks_is_said_to_be_in_the_store(job: Job) -> None:
    job.trim("4:5")
    lineage = job.control.refresh()
    for marker in ("1:1", "1:2", "1:3", "2:3", "3:3", "4:6", "6:7"):
        with pytest.raises(TrimmedError, match=rf"the log up to marker \d:\d was trimmed on .*; the store {STORE}"):
            choose(job.log, lineage, open_dense(str(job.root)), MarkerId.parse(marker))
    assert lineage.trims.newest is not None
    assert lineage.trims.newest.id == MarkerId(4, 5)


def test_a_marker_whose_data_is_all_there_is_restored_from_the_log(job: Job) -> None:
    job.log.append_control(trim("1:2", "2:4", "4:5").to_frame())  # and killed before it deleted anything
    assert job.restore("6:7") == "6:7"


def test_data_that_nobody_has_trimmed_is_still_missed(plain: Job) -> None:
    plain.trim("1:1")
    assert plain.restore("1:3") == "TrimmedError"
    middle = plain.segments()[1][2]
    next(plain.root.glob(f"data/p00000/*-{middle:020d}.seg")).unlink()
    assert plain.restore("1:3") == "CorruptionError"
    assert plain.restore("1:1") == "TrimmedError"


def test_a_trim_that_was_run_again_appends_nothing_and_frees_nothing(job: Job) -> None:
    job.trim("4:5")
    again = job.trim("4:5")
    assert (again.appended, again.freed) == (False, Freed("segments", 0, 0))
    older = job.trim("2:3")
    assert (older.appended, older.freed) == (False, Freed("segments", 0, 0))
    moved = job.trim("4:5", store="file:///new")
    assert (moved.appended, moved.freed) == (True, Freed("segments", 0, 0))
    trim_ = job.control.refresh().trims.of(1)
    assert trim_ is not None
    assert trim_.store == "file:///new"


def test_a_marker_that_is_not_committed_is_refused(plain: Job) -> None:
    with pytest.raises(MarkerNotFoundError, match="marker 1:9 is not committed"):
        trim_log(plain.log, plain.control, commit(1, 9), STORE)


@pytest.mark.parametrize("store", ["", "file:///\x1b[2J", "x" * 5000])
def test_a_store_that_has_no_url_is_refused_before_anything_is_said(plain: Job, store: str) -> None:
    before = (plain.root / "control.log").read_bytes()
    with pytest.raises(ConfigError, match="is not a store URL"):
        plain.trim("1:1", store=store)
    assert (plain.root / "control.log").read_bytes() == before


def test_a_folder_that_is_not_ours_is_said_before_anything_else(plain: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    with pytest.raises(LogUnavailableError, match="cannot trim the log: Permission denied"):
        plain.trim("1:2")
    assert not plain.control.refresh().trims


def test_a_job_with_a_commit_key_is_trimmed_with_it_alone(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_bytes(bytes(range(32)))
    key.chmod(0o600)
    made = Job(tmp_path / "log")
    signing = Control(made.log, key)
    signing.claim(claim(1, incarnation=made.incarnation))
    signing.commit(commit(1, 1), 5.0, threading.Event())
    found = signing.refresh().find(MarkerId(1, 1))
    with pytest.raises(ConfigError, match="has a commit key"):
        trim_log(made.log, made.control, found, STORE)
    assert trim_log(made.log, signing, found, STORE).appended
    assert Control(made.log, key).refresh().trims.reach == {1: MarkerId(1, 1)}


# Killed, twice at once, and under a trainer.


_PROGRAM = """
import sys
from torchrec_stream_ckpt.log.control.partition import Control
from torchrec_stream_ckpt.log.control.trim import trim_log
from torchrec_stream_ckpt.log.api import open_log
from torchrec_stream_ckpt.util.types import MarkerId
from torchrec_stream_ckpt.util.units import size
log = open_log(sys.argv[1])
control = Control(log)
trim_log(log, control, control.refresh().find(MarkerId.parse(sys.argv[2])), sys.argv[3])
"""


def trim_process(job: Job, marker: str, fuse: str = "") -> subprocess.Popen[bytes]:
    arguments = [sys.executable, "-c", _PROGRAM, f"file://{job.root}", marker, STORE]
    return subprocess.Popen(arguments, env=os.environ | {"STREAM_CKPT_FAILPOINTS": fuse})


@pytest.mark.parametrize("point", POINTS)
def test_a_trim_that_is_killed_is_finished_by_the_next(job: Job, point: str) -> None:
    data = job.sizes()
    killed = trim_process(job, "4:5", f"{point}=kill@{POINTS[point]}")
    assert killed.wait(60) == -signal.SIGKILL
    said = bool(job.control.refresh().trims)
    assert said == (point != "trim.append")
    assert len(data) - len(job.sizes()) == (2 if point == "trim.deleted" else 0)
    assert job.restore("6:7") == ("TrimmedError" if point == "trim.deleted" else "6:7")
    done = job.trim("4:5")
    assert done.appended != said
    assert job.segments().keys() == {1, 3, 4, 6}
    assert job.restore("6:7") == "TrimmedError"


def test_two_trims_at_once_free_the_same_and_each_file_once(job: Job) -> None:
    data = job.sizes()
    planned = job.trim("4:5", dry_run=True).freed
    done: list[Trimmed] = []
    threads = [threading.Thread(target=lambda: done.append(Job.trim(job, "4:5"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(done) == 4
    assert sum(each.freed.count for each in done) == planned.count == len(data) - len(job.sizes())
    assert sum(each.freed.num_bytes or 0 for each in done) == planned.num_bytes
    assert job.control.refresh().trims.reach == {1: MarkerId(1, 2), 2: MarkerId(2, 4), 4: MarkerId(4, 5)}


class TrimmedUnderneath(FileLog):
    """A log that somebody trims just before its first look at what is there."""

    def __init__(self, root: Path, act: Callable[[], object]) -> None:
        super().__init__(root)
        self._act: Callable[[], object] | None = act

    def check_there(self, spans: Sequence[LogSpan]) -> None:
        act, self._act = self._act, None
        if act is not None:
            act()
        super().check_there(spans)


def trainer_of(job: Job, log: FileLog, generation: int) -> Generation:
    """What a trainer of an open generation asks before it commits."""
    control = Control(log)
    claims = control.refresh().claims
    return Generation(log, control, claims[generation], None, 0, 0, job.root, "")  # type: ignore[arg-type]


def test_a_trainer_commits_over_a_trim_that_comes_between_its_looks(job: Job) -> None:
    newest = job.control.refresh().find(MarkerId(6, 7))
    log = TrimmedUnderneath(job.root, lambda: job.trim("4:5"))
    trainer = trainer_of(job, log, 6)
    trainer.check_log(8, newest.ranks)
    assert job.segments().keys() == {1, 3, 4, 6}
    trainer.check_log(9, newest.ranks)


def test_a_trainer_does_not_commit_over_data_that_nobody_has_trimmed(job: Job) -> None:
    newest = job.control.refresh().find(MarkerId(6, 7))
    job.trim("4:5")
    trainer = trainer_of(job, job.log, 6)
    trainer.check_log(8, newest.ranks)
    for segment in sorted(job.root.glob("data/p00000/g00000006-*.seg"))[:1]:
        segment.unlink()
    with pytest.raises(CorruptionError, match=r"bytes 0 to \d+ of the log are missing"):
        trainer.check_log(9, newest.ranks)


def test_a_writer_goes_on_behind_a_front_that_was_trimmed(plain: Job) -> None:
    end = plain.end("1:3")
    plain.trim("1:2")
    again = write(plain.log, [b"x" * 128], at=end)
    assert again[0].offset == end


# What people see.


def test_the_command_line_says_trimmed_and_where(job: Job) -> None:
    uri = f"file://{job.root}"
    job.trim("4:5")
    rows = json.loads(attempt("list", uri, "--json")[1])["markers"]
    assert {row["trimmed"] for row in rows} == {STORE}
    assert {row["reason"] for row in rows} == {f"trimmed, in the store {STORE}"}
    assert not any(row["restorable"] for row in rows)
    for arguments in (["--tree"], []):
        told = " ".join(attempt("list", uri, *arguments)[1].split())
        assert "trimmed, in the store" in told
        assert "no: trimmed" not in told
        assert "not restorable" not in told
    shown = json.loads(attempt("show", uri, "--json")[1])
    assert [(each["up_to"], each["store"]) for each in shown["trimmed"]] == [
        (marker, STORE) for marker in ("1:2", "2:4", "4:5")
    ]
    assert "log up to marker 2:4: trimmed" in attempt("show", uri)[1]
    status, told = attempt("verify", uri)
    assert (status, "was trimmed on" in told, STORE in told) == (1, True, True)
    status, told = attempt("verify", uri, "--all")
    assert (status, told.count("was not read: trimmed")) == (0, len(rows))
    status, told = attempt("doctor", uri)
    assert (status, f"trimmed, in the store {STORE}" in told.replace("\n", "")) == (0, True)


def test_the_command_line_still_names_what_is_missing_beyond_the_trim(plain: Job) -> None:
    plain.trim("1:1")
    for segment in sorted(plain.root.glob("data/p00000/*.seg"))[:1]:
        segment.unlink()
    (first, *_, last) = json.loads(attempt("list", f"file://{plain.root}", "--json")[1])["markers"]
    assert first["reason"] == f"trimmed, in the store {STORE}"
    assert (last["trimmed"], "but were committed: no segment has them" in last["reason"]) == (None, True)
    assert attempt("doctor", f"file://{plain.root}")[0] == 1
