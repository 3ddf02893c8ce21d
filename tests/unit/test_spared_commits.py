"""A trainer holds few COMMITs in memory, and answers as a reader that holds all of them."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.builders import claim, commit, trim
from tests.parts import CommitKey, FileLog, body_of, locate, shorten_control
from tests.sampled import sampled
from tests.stores import History, fold
from tests.unit.snapshot_log import RECORDS, again, note
from tests.unit.test_commit_key import KEY, key_file
from torchrec_stream_ckpt.errors import CorruptionError, LogUnavailableError, MarkerNotFoundError, StreamCkptError
from torchrec_stream_ckpt.format.commits import Commits, Place
from torchrec_stream_ckpt.format.control import Commit, ControlRecord
from torchrec_stream_ckpt.format.frame import HEADER_LEN
from torchrec_stream_ckpt.format.lineage import Lineage, towards
from torchrec_stream_ckpt.inner import Catalog, Control
from torchrec_stream_ckpt.util.layout import CONTROL_FILE
from torchrec_stream_ckpt.util.types import MarkerId


@pytest.fixture
def log(tmp_path: Path) -> FileLog:
    made = FileLog(tmp_path / "log")
    made.prepare(1)
    for record in (claim(1), *(commit(1, each) for each in range(1, 8)), claim(2, parent=MarkerId(1, 5))):
        made.append_control(record.to_frame())
    for each in range(8, 11):
        made.append_control(commit(2, each).to_frame())
    return made


def held(lineage: Lineage) -> list[str]:
    """The markers whose COMMITs are in memory."""
    return [str(marker) for marker, each in kept(lineage.commits).items() if not isinstance(each, int)]


def kept(commits: Commits) -> dict[MarkerId, object]:
    """The form in which each COMMIT is in memory: all of it, its frame, or its place in the log."""
    return dict(commits._held)


def agree(spared: Lineage, whole: Lineage) -> None:
    """Every question has the same answer. Who begins at a snapshot knows only the TRIMs that decide something."""
    assert spared.trims.deciding() == whole.trims.deciding()
    assert spared.trims.reach == whole.trims.reach
    for name in (
        "claims",
        "ends",
        "notes",
        "given_up",
        "stale",
        "unsigned",
        "taken",
        "next_generation",
    ):
        assert getattr(spared, name) == getattr(whole, name), name
    assert list(spared.commits) == list(whole.commits)
    assert list(reversed(spared.commits)) == list(reversed(whole.commits))
    for marker in whole.commits:
        assert spared.previous(marker) == whole.previous(marker)
        assert spared.newest_of(marker.generation) == whole.newest_of(marker.generation)
        for ask in (Lineage.way, Lineage.leading_to, Lineage.path, Lineage.chain, Lineage.bases, towards):
            try:
                answer = ask(whole, marker)
            except StreamCkptError as error:
                with pytest.raises(type(error)):
                    ask(spared, marker)
            else:
                assert ask(spared, marker) == answer
    for marker, made in whole.commits.items():
        assert spared.spans(marker.generation, made.ranks) == whole.spans(marker.generation, made.ranks)
        assert spared.meta(marker) == whole.meta(marker)
    assert spared.newest == whole.newest
    assert list(spared.records()) == list(whole.records())
    assert body_of(spared) == body_of(whole)


def bodies_agree(spared: Lineage, whole: Lineage, markers: list[MarkerId]) -> None:
    """Whatever way they are asked for."""
    assert list(spared.commits.values()) == list(whole.commits.values())
    assert list(reversed(spared.commits.values())) == list(reversed(whole.commits.values()))
    assert list(spared.commits.items()) == list(whole.commits.items())
    assert pickle.loads(pickle.dumps(spared)).commits == whole.commits
    for marker in markers:
        assert spared.commits.get(marker) == whole.commits.get(marker)
    assert spared.commits.named(whole.commits) == list(whole.commits.values())
    assert spared.notes == whole.notes


@pytest.mark.parametrize("signs", [False, True])
@given(history=st.lists(RECORDS | st.none(), max_size=12), data=st.data())
@settings(max_examples=sampled(25, 12))
def test_any_history_is_answered_as_by_one_that_holds_all(
    tmp_path_factory: pytest.TempPathFactory, history: list[ControlRecord | None], data: st.DataObject, signs: bool
) -> None:
    folder = tmp_path_factory.mktemp("log")
    key = key_file(folder / "key") if signs else None
    log = FileLog(folder / "log")
    log.prepare(1)
    watcher = Control(again(log), key, spare=True)
    for number, record in enumerate([claim(1), commit(1, 1), commit(1, 2), *history]):
        if record is None:
            shorten_control(log, Control(log, key), at_once=True)
        else:
            signed = CommitKey(KEY).sign(record) if signs and (not number or data.draw(st.integers(0, 9))) else record
            log.append_control(signed.to_frame(), garbage=signs)
        if not data.draw(st.integers(0, 4)) and watcher.refresh().commits:
            watcher.lineage.commits.get(data.draw(st.sampled_from(list(watcher.lineage.commits))))
    log.append_control((CommitKey(KEY).sign(claim(5)) if signs else claim(5)).to_frame(), garbage=signs)
    whole = Control(log, key).refresh()
    some = data.draw(st.permutations(list(whole.commits)))
    for reader in (watcher, Control(again(log), key, spare=True)):
        lineage = reader.refresh()
        agree(lineage, whole)
        bodies_agree(lineage, whole, some)
    late = Control(again(log), key, spare=True).refresh()
    bodies_agree(late, whole, some)  # when nobody has asked for anything before


def test_few_are_held_and_one_that_was_asked_for_stays(log: FileLog) -> None:
    lineage = Control(log, spare=True).refresh()
    assert held(lineage) == ["1:7", "2:10"]
    assert lineage.find(MarkerId(1, 3)) == commit(1, 3)
    assert held(lineage) == ["1:3", "1:7", "2:10"]
    assert [each.marker for each in lineage.commits.values()] == list(range(1, 11))
    assert held(lineage) == ["1:3", "1:7", "2:10"]


def test_what_leads_to_a_marker_needs_no_commit(log: FileLog) -> None:
    lineage = Control(log, spare=True).refresh()
    lineage.commits.fetch = None
    assert lineage.way(MarkerId(2, 10)) == [MarkerId(1, 5), MarkerId(2, 10)]
    assert len(lineage.leading_to(MarkerId(2, 9))) == 7
    assert len(towards(lineage, MarkerId(2, 9)).commits) == 7
    assert lineage.bases(MarkerId(2, 9)) == {0: 1, 1: 1}


def test_a_trim_and_a_note_of_a_marker_that_is_not_held_count(log: FileLog) -> None:
    control = Control(log, spare=True)
    control.refresh()
    control.lineage.commits.fetch = None
    log.append_control(trim("1:3", given_up=(MarkerId(1, 1),)).to_frame())
    log.append_control(note(MarkerId(1, 4), loss=0.5).to_frame())
    log.append_control(note(MarkerId(1, 1), loss=0.5).to_frame())
    lineage = control.refresh()
    assert (lineage.stale, lineage.given_up, lineage.trims.reach) == (1, {MarkerId(1, 1)}, {1: MarkerId(1, 3)})
    assert dict(lineage.notes) == {MarkerId(1, 4): (("loss", 0.5),)}
    assert MarkerId(1, 2) in lineage.commits
    assert MarkerId(1, 1) not in lineage.commits


class Counting:
    """Counts how often the log is read."""

    def __init__(self, lineage: Lineage) -> None:
        self.asked: list[list[Place]] = []
        fetch = lineage.commits.fetch
        assert fetch is not None

        def counted(places: Mapping[MarkerId, Place]) -> Mapping[MarkerId, bytes]:
            self.asked.append(sorted(places.values()))
            return fetch(places)

        lineage.commits.fetch = counted


def test_a_path_and_a_process_that_gets_all_are_fetched_in_one_pass(tmp_path: Path) -> None:
    log = FileLog(tmp_path / "log")
    log.prepare(1)
    for each in range(1, 9):  # each generation stands on the first of the two markers of the one before
        parent = MarkerId(each - 1, 2 * each - 3) if each > 1 else None
        for record in (claim(each, parent=parent), commit(each, 2 * each - 1), commit(each, 2 * each)):
            log.append_control(record.to_frame())
    lineage = Control(log, spare=True).refresh()
    count = Counting(lineage)
    assert len(lineage.path(MarkerId(8, 16))) == 8
    assert len(count.asked) == 1
    pickle.dumps(lineage)
    assert len(count.asked) == 2
    assert lineage.path(MarkerId(8, 16))
    assert len(count.asked) == 2


@pytest.mark.parametrize("markers", [10, 40])
def test_a_marker_is_located_by_one_pass_over_the_log(tmp_path: Path, markers: int) -> None:
    history = History(tmp_path)
    history.generation(1, range(1, markers + 1))
    fold(tmp_path)
    lineage = Control(history.log, spare=True).refresh()
    count, newest = Counting(lineage), MarkerId(1, markers)
    route = locate(lineage, newest, Catalog.load(history.objects, lineage.job))
    assert route.stored == newest
    assert [len(asked) for asked in count.asked] == [markers - 1], "the newest one is held"
    assert len(route.path.chain) == markers
    assert len(count.asked) == 2


def test_the_newest_are_found_without_reading_all(log: FileLog) -> None:
    lineage = Control(log, spare=True).refresh()
    count = Counting(lineage)
    newest = reversed(lineage.commits.values())
    assert next(newest) == commit(2, 10)
    assert not count.asked
    assert next(newest) == commit(2, 9)
    assert len(count.asked) == 1


def test_a_commit_whose_log_was_shortened_meanwhile_comes_from_the_snapshot(log: FileLog) -> None:
    control = Control(again(log), spare=True)
    lineage = control.refresh()
    for record in (trim("1:3", given_up=(MarkerId(1, 2),)), note(MarkerId(1, 4), loss=0.5)):
        log.append_control(record.to_frame())
    for _ in range(3):
        shorten_control(log, Control(log), at_once=True)
        log.append_control(note(MarkerId(1, 4), loss=0.5).to_frame())
    assert log.control_base() > 0
    assert lineage.find(MarkerId(1, 3)) == commit(1, 3)
    with pytest.raises(MarkerNotFoundError, match="1:2 was given up"):
        lineage.find(MarkerId(1, 2))
    with pytest.raises(MarkerNotFoundError, match="1:2 was given up"):
        control.refresh().find(MarkerId(1, 2))


@pytest.mark.parametrize("signs", [False, True])
def test_another_commit_in_its_place_is_refused(tmp_path: Path, signs: bool) -> None:
    key = key_file(tmp_path / "key") if signs else None
    log = FileLog(tmp_path / "log")
    log.prepare(1)

    def append(record: ControlRecord) -> int:
        return log.append_control((CommitKey(KEY).sign(record) if signs else record).to_frame(), garbage=signs)

    append(claim(1))
    offset = append(commit(1, 1, dense="a"))
    append(commit(1, 2))
    lineage = Control(log, key, spare=True).refresh()
    path = tmp_path / "log" / CONTROL_FILE
    other = commit(1, 1, dense="b")
    other = CommitKey(KEY).sign(other) if signs else other
    data = bytearray(path.read_bytes())
    data[offset : offset + len(other.to_frame())] = other.to_frame()
    path.write_bytes(data)
    with pytest.raises(CorruptionError, match="was replaced or deleted after it was read"):
        lineage.find(MarkerId(1, 1))
    data[offset + HEADER_LEN] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptionError):
        lineage.find(MarkerId(1, 1))
    assert lineage.find(MarkerId(1, 2))


def test_a_log_that_does_not_answer_is_said(log: FileLog, monkeypatch: pytest.MonkeyPatch) -> None:
    lineage = Control(log, spare=True).refresh()

    def away(start: int = 0, *, garbage: bool = False) -> Iterator[tuple[int, bytes]]:
        raise LogUnavailableError("the log is away", hint="wait")

    monkeypatch.setattr(log, "read_control", away)
    assert MarkerId(1, 3) in lineage.commits
    assert lineage.newest == commit(2, 10)
    with pytest.raises(LogUnavailableError):
        lineage.find(MarkerId(1, 3))


def test_commits_without_a_place_are_held() -> None:
    commits = Commits()
    for each in range(1, 4):
        commits.add(MarkerId(1, each), commit(1, each))
    assert all(isinstance(each, Commit) for each in kept(commits).values())
    assert commits == {MarkerId(1, each): commit(1, each) for each in range(1, 4)}
    assert commits != {}
    with pytest.raises(KeyError):
        commits[MarkerId(1, 4)]
