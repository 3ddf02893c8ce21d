"""Snapshots of the control partition: who begins at one sees what he would see who reads everything."""

from __future__ import annotations

import shutil
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.builders import claim, commit, trim
from tests.golden import make
from tests.parts import CommitKey, FileLog, body_of, control_file, lineage_of, shorten_control
from tests.sampled import sampled
from tests.unit.snapshot_log import JOB, RECORDS, again, grow, markers, note, parts, shorten
from tests.unit.test_commit_key import KEY, key_file
from torchrec_stream_ckpt.errors import (
    CommitUnknownError,
    ConfigError,
    CorruptionError,
    LogUnavailableError,
    StreamCkptError,
)
from torchrec_stream_ckpt.format.control import ControlRecord, parse_control
from torchrec_stream_ckpt.format.folding import is_snapshot
from torchrec_stream_ckpt.format.frame import HEADER_LEN
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.format.snapshot import Snapshot, pack, unpack
from torchrec_stream_ckpt.inner import Control
from torchrec_stream_ckpt.log.control import snapshots
from torchrec_stream_ckpt.util.layout import CONTROL_FILE
from torchrec_stream_ckpt.util.types import MarkerId


@pytest.fixture
def log(tmp_path: Path) -> FileLog:
    made = FileLog(tmp_path / "log")
    made.prepare(1)
    made.append_control(claim(1).to_frame())
    return made


@given(st.lists(RECORDS | st.none(), max_size=12))
@settings(max_examples=10, deadline=None)
def test_a_log_that_is_shortened_time_and_again_says_what_was_said(
    tmp_path_factory: pytest.TempPathFactory, history: list[ControlRecord | None]
) -> None:
    log = FileLog(tmp_path_factory.mktemp("log"))
    log.prepare(1)
    watcher, whole, places = Control(again(log)), Lineage(), {}
    for record in [claim(1), *history, None, claim(4), None]:
        if record is None:
            shorten(log)
        else:
            offset = log.append_control(record.to_frame())
            places[offset] = record.to_frame()
            whole.apply(record)
        if len(places) % 3 == 0:
            assert body_of(watcher.refresh()) == body_of(whole)
    assert body_of(Control(again(log)).refresh()) == body_of(watcher.refresh()) == body_of(whole)
    left = {offset: record for offset, record in log.read_control(log.control_base()) if not is_snapshot(record)}
    assert left == {offset: record for offset, record in places.items() if offset >= log.control_base()}


def test_the_log_is_cut_up_to_the_second_newest_snapshot(log: FileLog) -> None:
    grow(log, 1, 3)
    assert shorten(log) == 0
    offsets = [offset for offset, _ in log.read_control()]
    grow(log, 4, 5)
    assert shorten(log) == offsets[3]  # where 1:3 stands, the last record that the first snapshot covers
    assert len(parts(log)) == 2
    assert markers(log) == [1, 2, 3, 4, 5]
    grow(log, 6, 6)
    size = (log.uri.directory / CONTROL_FILE).stat().st_size
    shorten(log)
    assert (log.uri.directory / CONTROL_FILE).stat().st_size < size
    assert len(parts(log)) == 2


def test_nothing_is_written_while_little_stands_behind_the_newest_snapshot(
    log: FileLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "LEAST_BYTES", 5_000)
    grow(log, 1, 20)
    assert shorten_control(log, Control(log)).upto is not None
    grow(log, 21, 22)
    assert shorten_control(log, Control(log)).upto is None


@pytest.mark.parametrize("damaged", [1, 2])
def test_a_damaged_snapshot_is_passed_over_for_the_one_before_it(
    log: FileLog, damaged: int, caplog: pytest.LogCaptureFixture
) -> None:
    grow(log, 1, 3)
    shorten(log)
    grow(log, 4, 5)
    shorten(log)
    grow(log, 6, 6)
    newest_first = sorted(parts(log), reverse=True)
    _flip(log, newest_first[:damaged])
    if damaged == 1:
        assert markers(log) == [1, 2, 3, 4, 5, 6]
        assert "a part of a control snapshot is skipped: payload checksum" in caplog.text
    else:
        with pytest.raises(
            CorruptionError, match=r"the control partition begins at offset \d+, but has no intact snapshot"
        ):
            markers(log)


def _flip(log: FileLog, offsets: list[int]) -> None:
    path = log.uri.directory / CONTROL_FILE
    data = bytearray(path.read_bytes())
    with path.open("rb") as file:
        shift = control_file.read_front(file).shift
    for offset in offsets:
        data[offset - shift + HEADER_LEN + 60] ^= 1
    path.write_bytes(data)


def test_a_snapshot_of_another_history_is_passed_over_while_all_records_are_there(
    log: FileLog, caplog: pytest.LogCaptureFixture
) -> None:
    """A control log that was put together anew: offsets moved, and nothing is deleted by what it says of them."""
    grow(log, 1, 3)
    shorten(log)
    grow(log, 4, 4)
    shorten(log)
    path = log.uri.directory / CONTROL_FILE
    begin = log.control_base()
    records = [record for _, record in log.read_control(begin)]
    path.write_bytes(b"".join([claim(1).to_frame(), commit(1, 1).to_frame(), commit(1, 3).to_frame(), *records[1:]]))
    assert markers(log) == [1, 3, 4]
    assert "does not match the record at offset" in caplog.text
    assert shorten(again(log)) == 0


def test_a_snapshot_of_another_history_is_refused_where_records_were_deleted(log: FileLog) -> None:
    for first in (1, 4):
        grow(log, first, first + 2)
        shorten(log)
    path = log.uri.directory / CONTROL_FILE
    with path.open("rb") as file:
        head = path.read_bytes()[: control_file.read_front(file).num_bytes]
    records = [record for _, record in log.read_control(log.control_base())]
    path.write_bytes(head + b"".join([commit(1, 9).to_frame(), *records[1:]]))
    with pytest.raises(CorruptionError, match="does not match the record at offset"):
        markers(log)


def test_an_appender_that_knew_the_old_file_appends_to_the_new_one(log: FileLog) -> None:
    grow(log, 1, 3)
    old = again(log)
    first = old.append_control(commit(1, 4).to_frame())
    shorten(log)
    grow(log, 5, 8)
    shorten(log)
    assert log.control_base() == first
    last = old.append_control(commit(1, 9).to_frame())
    assert last > parts(log)[-1]
    assert markers(log) == [1, 2, 3, 4, 5, 6, 7, 8, 9]


def test_a_record_that_went_into_a_file_that_is_the_log_no_more_is_not_called_durable(
    log: FileLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system that loses locks: the new file is there before the append is over."""
    grow(log, 1, 3)
    shorten(log)
    grow(log, 4, 4)
    (_, _), *_, (last, _) = log.read_control()

    def interfere(name: str) -> None:
        if name == "control.written":
            monkeypatch.undo()
            assert control_file.prune(log.uri.directory / CONTROL_FILE, last)

    monkeypatch.setattr("torchrec_stream_ckpt.log.control_file.failpoint", interfere)
    with pytest.raises(CommitUnknownError, match="the control log was replaced"):
        log.append_control(commit(1, 5).to_frame())


def test_a_reader_that_stands_before_the_base_begins_anew(log: FileLog) -> None:
    grow(log, 1, 2)
    sleeper = Control(again(log))
    sleeper.refresh()
    grow(log, 3, 4)
    shorten(log)
    grow(log, 5, 6)
    shorten(log)
    assert [marker.marker for marker in sleeper.refresh().commits] == [1, 2, 3, 4, 5, 6]


def test_what_is_written_is_read_back_before_anything_goes(log: FileLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken machine: the bytes that are appended are not those that were computed."""
    grow(log, 1, 3)
    shorten(log)
    grow(log, 4, 5)
    wrong = Lineage.of([claim(1), commit(1, 1)])
    honest = snapshots.snapshot_of
    monkeypatch.setattr(
        snapshots,
        "snapshot_of",
        lambda folded, incarnation: honest(snapshots.Folded(wrong, folded.upto, folded.crc), incarnation),
    )
    with pytest.raises(CorruptionError, match="differs from the bytes that were written"):
        shorten(log)
    assert log.control_base() == 0


def test_a_read_that_broke_off_is_begun_again(log: FileLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was read before the log went away is not taken for what was folded."""
    grow(log, 1, 3)
    control, broken = Control(log), iter([True])
    read = log.read_control

    def breaking(start: int = 0, *, garbage: bool = False) -> Iterator[tuple[int, bytes]]:
        for each in read(start, garbage=garbage):
            yield each
            if next(broken, False):
                raise LogUnavailableError("away")

    monkeypatch.setattr(log, "read_control", breaking)
    with pytest.raises(LogUnavailableError):
        control.refresh()
    assert [marker.marker for marker in control.refresh().commits] == [1, 2, 3]


def test_with_a_commit_key_only_its_snapshots_count(tmp_path: Path) -> None:
    key, sign = key_file(tmp_path / "key"), CommitKey(KEY).sign
    log = FileLog(tmp_path / "log")
    log.prepare(1)
    log.append_control(sign(claim(1)).to_frame())
    grow(log, 1, 3, sign)
    log.append_control(commit(1, 4).to_frame())  # of somebody without the key
    with pytest.raises(ConfigError, match="this job has a commit key and ignores unsigned snapshots"):
        shorten(log)
    shorten(log, key)
    grow(log, 4, 5, sign)
    assert shorten(log, key) > 0
    lineage = Control(again(log), key).refresh()
    assert ([marker.marker for marker in lineage.commits], lineage.unsigned) == ([1, 2, 3, 4, 5], 1)
    for offset in parts(log):
        forged = parse_control(dict(log.read_control(log.control_base()))[offset])
        assert CommitKey(KEY).vouches_for(forged)
    _forge(log)
    with pytest.raises(CorruptionError, match="has no intact snapshot of the records before it"):
        Control(again(log), key).refresh()


def _forge(log: FileLog) -> None:
    """Every snapshot is signed with another key."""
    path, other = log.uri.directory / CONTROL_FILE, CommitKey(bytes(32))
    with path.open("rb") as file:
        front = path.read_bytes()[: control_file.read_front(file).num_bytes]
    records = [parse_control(record) for _, record in log.read_control(log.control_base())]
    made = [other.sign(each) if is_snapshot(each.to_frame()) else each for each in records]
    path.write_bytes(front + b"".join(each.to_frame() for each in made))


def test_a_log_with_a_commit_key_whose_base_is_damaged_is_refused(tmp_path: Path) -> None:
    """Garbage is passed over there: but this could have been the BASE, and no offset would mean what it did."""
    key, sign = key_file(tmp_path / "key"), CommitKey(KEY).sign
    log = FileLog(tmp_path / "log")
    log.prepare(1)
    log.append_control(sign(claim(1)).to_frame())
    for first in (1, 4):
        grow(log, first, first + 2, sign)
        shorten(log, key)
    path = log.uri.directory / CONTROL_FILE
    data = bytearray(path.read_bytes())
    data[20] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptionError, match="its first offset is lost"):
        Control(again(log), key).refresh()


def test_a_log_of_version_1_gets_its_first_snapshot_with_its_records_as_they_are(tmp_path: Path) -> None:
    log = FileLog(tmp_path / "log")
    log.prepare(1)
    records = [make.undump((make.HERE / "v1" / f"{name}.hex").read_text()) for name in ("claim", "commit", "trim")]
    for record in records:
        log.append_control(record)
    before = body_of(Control(log).refresh())
    shorten(log)
    claimed = parse_control(records[0])
    assert isinstance(claimed, type(claim(1)))
    later = claim(2, parent=MarkerId(1, 1), job=claimed.job, schema=claimed.schema)
    log.append_control(later.to_frame())
    shorten(log)
    assert before.endswith(b"".join(records))
    assert log.control_base() > 0
    lineage = Control(again(log)).refresh()
    assert [each.to_frame() for each in lineage.records()] == [*records[:2], later.to_frame(), records[2]]


def test_a_snapshot_of_many_records_comes_in_parts(log: FileLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchrec_stream_ckpt.format.snapshot.PIECE_BYTES", 200)
    grow(log, 1, 20)
    shorten(log)
    assert len(parts(log)) > 3
    assert markers(log) == list(range(1, 21))
    copy = log.uri.directory.with_name("copy")
    shutil.copytree(log.uri.directory, copy)
    path, (_, cut, *_) = copy / CONTROL_FILE, parts(log)
    path.write_bytes(path.read_bytes()[:cut])  # killed after the first part
    assert markers(FileLog(copy)) == list(range(1, 21))


# What a snapshot says: any records before it, in parts whose sizes are bounded.


@given(st.lists(RECORDS, max_size=30), st.data())
@settings(max_examples=sampled(200, 40), deadline=None)
def test_a_reader_from_a_snapshot_and_the_tail_sees_what_a_reader_of_everything_sees(
    history: list[ControlRecord], data: st.DataObject
) -> None:
    cut = data.draw(st.integers(0, len(history)))
    history = [claim(1), *history]
    whole, early = Lineage.of(history), Lineage.of(history[: cut + 1])
    late = lineage_of(body_of(early))
    for record in history[cut + 1 :]:
        late.apply(record)
    assert body_of(late) == body_of(whole)
    for name in ("claims", "commits", "ends", "notes", "stale", "unsigned", "given_up", "next_generation"):
        assert getattr(late, name) == getattr(whole, name), name
    assert late.trims.reach == whole.trims.reach
    assert late.trims.newest == whole.trims.newest
    for number in whole.claims:
        assert late.trims.of(number) == whole.trims.of(number)
    for marker, made in whole.commits.items():
        assert late.spans(marker.generation, made.ranks) == whole.spans(marker.generation, made.ranks)
        try:
            path = whole.path(marker)
        except StreamCkptError as error:
            with pytest.raises(type(error)):
                late.path(marker)
        else:
            assert late.path(marker) == path
            assert late.bases(marker) == whole.bases(marker)


def test_what_a_trim_gives_up_is_kept_by_nobody_and_its_number_is_known() -> None:
    """A parent stays, whatever a TRIM says: a generation stands on it."""
    given_up = (MarkerId(1, 1), MarkerId(1, 2), MarkerId(1, 3))
    lineage = Lineage.of(
        [claim(1), *(commit(1, each) for each in range(1, 6)), claim(2, parent=MarkerId(1, 2)), commit(2, 6)]
    )
    lineage.apply(note(MarkerId(1, 1), loss=0.5))
    lineage.apply(trim("1:4", given_up=given_up))
    assert [str(each) for each in lineage.commits] == ["1:2", "1:4", "1:5", "2:6"]
    assert lineage.given_up == {MarkerId(1, 1), MarkerId(1, 3)}
    assert [str(each.id) for each in lineage.path(MarkerId(2, 6))] == ["1:2", "2:6"]
    lineage.apply(trim("1:3", store="file:///late"))  # of somebody who has not read on
    assert (len(lineage.trims), lineage.stale, lineage.trims.reach) == (2, 0, {1: MarkerId(1, 4)})


def test_a_trim_gives_up_nothing_but_what_lies_in_front_of_it() -> None:
    bad = trim("1:4", given_up=(MarkerId(1, 4),)).to_frame()
    with pytest.raises(CorruptionError, match=r"TRIM\.given_up must be sorted"):
        parse_control(bad)


def part_of(body: bytes) -> Snapshot:
    (part,) = pack(body, JOB, 1, "log-1", 7, 0)
    return part


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parts": 257}, "SNAPSHOT is too large: part 0 of 257, 12 bytes"),
        ({"part": 1}, "SNAPSHOT is too large: part 1 of 1, 12 bytes"),
        ({"num_bytes": 2**30 + 1}, "too large"),
        ({"piece": "no base64!"}, "is not base64"),
        ({"piece": "AAAA" * 240_000}, "piece has 720000 bytes"),
        ({"piece": ""}, "piece has 0 bytes"),
        ({"digest": "00"}, r"SNAPSHOT\.digest is '00'"),
    ],
)
def test_a_part_that_declares_too_much_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(CorruptionError, match=message):
        parse_control(replace(part_of(b"twelve bytes"), **change).to_frame())  # type: ignore[arg-type]


def test_a_snapshot_that_unpacks_to_more_than_it_declares_is_not_unpacked() -> None:
    bomb = part_of(bytes(2**26))
    tracemalloc.start()
    try:
        with pytest.raises(CorruptionError, match="a SNAPSHOT unpacks to more than 1000 bytes"):
            unpack([replace(bomb, num_bytes=1000)])
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()
    assert len(unpack([bomb])) == 2**26


NUMBERS_LINE = b'{"given_up":{},"stale":0,"taken":0,"unsigned":0}\n'


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]\n",
        NUMBERS_LINE.replace(b'"stale":0', b'"stale":-1'),
        NUMBERS_LINE.replace(b'"stale":0', b'"stale":true'),
        NUMBERS_LINE.replace(b"{}", b'{"x":[1]}'),
        NUMBERS_LINE.replace(b"{}", b'{"1":1}'),
        NUMBERS_LINE.replace(b"{}", rb'{"\u00b2":[1]}'),  # a digit to some
        NUMBERS_LINE + commit(1, 1).to_frame(),  # does not count
        NUMBERS_LINE + claim(1).to_frame()[:-1],
        NUMBERS_LINE + claim(1).to_frame() + part_of(b"x").to_frame(),
    ],
)
def test_what_a_snapshot_cannot_carry_is_refused(body: bytes) -> None:
    with pytest.raises(CorruptionError):
        lineage_of(body)
