"""A log in a bucket: who races, what fails, what is lost, and how many requests it takes."""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.contract.test_log_contract import acknowledged, control_record, frame, seqs, span_of, write
from tests.parts import open_log, shorten_control
from tests.s3.faults import Fault, FaultyProxy
from tests.s3.server import S3Server
from tests.synthetic import Job, image_of_log
from torchrec_stream_ckpt.errors import (
    CommitUnknownError,
    ConfigError,
    CorruptionError,
    FencedError,
    LogUnavailableError,
    PrunedError,
    StreamLostError,
)
from torchrec_stream_ckpt.format.frame import HEADER_LEN, Header, Kind, seal
from torchrec_stream_ckpt.inner import Control, Log, open_store
from torchrec_stream_ckpt.log.api import TrimRange
from torchrec_stream_ckpt.log.bucket import control_objects, streams, writer
from torchrec_stream_ckpt.log.bucket import log as bucket_log
from torchrec_stream_ckpt.log.bucket.objects import delete_all
from torchrec_stream_ckpt.util.types import LogSpan
from torchrec_stream_ckpt.util.uris import parse_uri

pytestmark = pytest.mark.usefixtures("short_pauses")


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "LINGER_S", 0.05)


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[FaultyProxy]:
    found = FaultyProxy(s3_server.port)
    yield found
    found.close()


class Place:
    """A log, its folder behind the server, and clients that go through a proxy."""

    def __init__(self, server: S3Server, proxy: FaultyProxy) -> None:
        self.prefix = uuid.uuid4().hex
        self.uri = f"s3://{server.bucket}/{self.prefix}"
        self.folder: Path = server.objects / server.bucket / self.prefix
        config = {"connect_timeout": 5, "read_timeout": 2, "retries": {"mode": "standard", "max_attempts": 3}}
        self.options = server.options(endpoint_url=proxy.endpoint, config_kwargs=json.dumps(config))

    def open(self, **config: object) -> Log:
        given = json.loads(self.options["config_kwargs"]) | config
        return open_log(self.uri, {**self.options, "config_kwargs": json.dumps(given)})


@pytest.fixture
def place(s3_server: S3Server, proxy: FaultyProxy) -> Place:
    return Place(s3_server, proxy)


@pytest.fixture
def log(place: Place) -> Iterator[Log]:
    log = place.open()
    log.prepare(2)
    yield log
    log.close()


def mark(seq: int) -> memoryview:
    data = bytearray(HEADER_LEN)
    seal(Header(Kind.MARK, uuid.UUID(int=7).bytes, 1, seq=seq, marker=1), data)
    return memoryview(data)


PASSING: list[Fault] = ["slow down", "error", "broken before", "broken after", "silence"]


@pytest.mark.parametrize("fault", PASSING)
def test_a_control_record_is_there_once_whatever_happens_to_its_put(log: Log, proxy: FaultyProxy, fault: Fault) -> None:
    first = log.append_control(control_record(1))
    proxy.harm("put", fault, 2)
    second = log.append_control(control_record(2))
    assert proxy.fired["put", fault] == 2
    assert list(log.read_control()) == [(first, control_record(1)), (second, control_record(2))]


@pytest.mark.parametrize("fault", ["slow down", "broken after"])
def test_a_put_without_an_answer_is_looked_for_and_otherwise_unknown(
    place: Place, log: Log, proxy: FaultyProxy, fault: Fault
) -> None:
    proxy.harm("put", fault)
    if fault == "broken after":  # the server has it, and says so when it is asked
        assert log.append_control(control_record(1)) == 0
    else:
        with pytest.raises(CommitUnknownError, match="unknown whether a control record arrived"):
            log.append_control(control_record(1))
    proxy.heal()
    other = place.open()
    assert other.append_control(control_record(1)) == 0 or fault == "broken after"
    records = [record for _, record in other.read_control()]
    assert records == [control_record(1)] * (2 if fault == "broken after" else 1)
    other.close()


def test_of_appenders_at_one_moment_each_gets_a_number_of_its_own(place: Place, log: Log) -> None:
    logs, placed = [place.open() for _ in range(4)], {}
    start = threading.Barrier(4)

    def append(own: Log, number: int) -> None:
        start.wait()
        for step in range(5):
            record = control_record(100 * number + step)
            placed[own.append_control(record)] = record

    threads = [threading.Thread(target=append, args=each) for each in zip(logs, range(1, 5), strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(placed) == list(range(20))
    assert list(log.read_control()) == sorted(placed.items())
    for own in logs:
        own.close()


def test_an_old_log_takes_no_more_requests_than_a_young_one(
    place: Place, log: Log, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_objects, "BLOCK", 16)
    monkeypatch.setattr(control_objects, "_KNOWN", 32)
    appended, attached = [], []
    for number in range(1, 200):
        log.append_control(control_record(number))
        if number in (35, 194):
            proxy.taken()
            log.append_control(control_record(number))
            list(log.read_control(number))
            appended.append(proxy.taken())
            reader = place.open(read_timeout=90, max_pool_connections=128)
            proxy.taken()
            proxy.meet("/packs/000", number // 16)  # all packs are asked for in one turn, or this never ends
            assert len(list(reader.read_control())) > number
            assert proxy.met == 1
            attached.append(proxy.taken())
            proxy.meet("/packs/000", 1)
            reader.close()
    assert appended[0] == appended[1]
    assert appended[0]["list"] == 1
    assert sum(appended[0].values()) <= 4
    assert sum(attached[1].values()) - sum(attached[0].values()) == (196 - 36) // 16  # a pack each


def test_packs_are_read_together_within_a_bound_and_in_order(
    place: Place, log: Log, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_objects, "BLOCK", 4)
    records = [(number, control_record(number + 1)) for number in range(129)]
    for _, record in records:
        log.append_control(record)
    size = len(records[0][1]) * 4
    for bound, at_once in ((10**9, 16), (size * 4, 4), (1, 1)):
        monkeypatch.setattr(control_objects, "_MOST_AHEAD_BYTES", bound)
        reader = place.open(read_timeout=90, max_pool_connections=128)
        proxy.meet("/packs/000", at_once)
        assert list(reader.read_control()) == records
        assert proxy.met == 32 // at_once
        reader.close()


def test_a_pack_that_is_lost_or_damaged_decides_nothing(
    place: Place, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_objects, "BLOCK", 8)
    records = [(number, control_record(number + 1)) for number in range(40)]
    for _, record in records:
        log.append_control(record)
    packs = sorted((place.folder / "packs").iterdir())
    assert len(packs) == 5
    packs[0].unlink()
    packs[1].write_bytes(packs[1].read_bytes()[:-64])
    data = bytearray(packs[2].read_bytes())
    data[-1] ^= 1
    packs[2].write_bytes(data)
    packs[3].write_bytes(packs[4].read_bytes() + b"more")
    other = place.open()
    assert list(other.read_control()) == records
    other.close()


def test_records_that_were_deleted_are_named(place: Place, log: Log) -> None:
    for number in range(1, 6):
        log.append_control(control_record(number))
    list(log.read_control())
    (place.folder / control_objects.record_name(4)).unlink()
    with pytest.raises(LogUnavailableError, match="control record 4, which was read before, is missing"):
        list(log.read_control(5))


@pytest.mark.parametrize("missing", [0, 2, 7, 8, 15])
def test_a_hole_among_the_records_is_named_and_never_filled(
    place: Place, log: Log, monkeypatch: pytest.MonkeyPatch, missing: int
) -> None:
    monkeypatch.setattr(control_objects, "BLOCK", 8)
    for number in range(20):
        log.append_control(control_record(number + 1))
    for pack in (place.folder / "packs").iterdir():
        pack.unlink()
    (place.folder / control_objects.record_name(missing)).unlink()
    other = place.open()
    for use in (lambda: list(other.read_control()), lambda: other.append_control(control_record(99))):
        with pytest.raises(CorruptionError, match=f"control record {missing} is missing, but record {missing + 1}"):
            use()
    assert not (place.folder / control_objects.record_name(missing)).exists()
    other.close()


def test_a_process_that_was_away_never_writes_among_deleted_records(place: Place, log: Log) -> None:
    """Their names are free again, so its put succeeds: it would believe in a commit that nobody sees."""
    zombie = place.open()
    for number in (1, 2):
        zombie.append_control(control_record(number))
    for number in range(3, 12):
        log.append_control(control_record(number))
    log.prune_control(8)
    late = control_record(99)
    assert zombie.append_control(late) == 11
    with pytest.raises(PrunedError):  # it reads everything again, and hears that another one has claimed the job
        list(zombie.read_control(2))
    reader = place.open()
    wanted = [(number, control_record(number + 1)) for number in range(8, 11)]
    assert list(reader.read_control(8)) == list(zombie.read_control(8)) == [*wanted, (11, late)]
    assert not (place.folder / control_objects.record_name(2)).exists()
    reader.close()
    zombie.close()


def test_a_put_counts_only_once_the_base_was_seen(place: Place, log: Log, proxy: FaultyProxy) -> None:
    """Neither as appended nor as not appended: a caller may not believe in it, and may not call the marker failed."""
    for number in (1, 2):
        log.append_control(control_record(number))
    proxy.harm("list", "slow down")
    with pytest.raises(CommitUnknownError, match="unknown whether a control record arrived"):
        log.append_control(control_record(3))
    proxy.heal()
    assert list(log.read_control(2)) == [(2, control_record(3))]


def test_a_taken_name_that_cannot_be_read_is_unknown(place: Place, log: Log, proxy: FaultyProxy) -> None:
    """The first try of the client may have put it, and only the answer was lost."""
    other = place.open()
    list(other.read_control())
    other.append_control(control_record(1))
    log.append_control(control_record(2))
    proxy.harm("get", "slow down")
    with pytest.raises(CommitUnknownError, match="unknown whether a control record arrived"):
        other.append_control(control_record(3))
    other.close()


@pytest.mark.parametrize("fault", ["list", "put"])
def test_a_put_among_deleted_records_is_never_read(place: Place, log: Log, proxy: FaultyProxy, fault: str) -> None:
    """Its writer learned nothing: the bucket fell silent after the put, or the put arrived late."""
    zombie, reader = place.open(), place.open()
    for number in (1, 2):
        zombie.append_control(control_record(number))
    list(reader.read_control())
    for number in range(3, 12):
        log.append_control(control_record(number))
    log.prune_control(8)
    late = control_record(99)
    if fault == "list":
        proxy.harm("list", "slow down")
        with pytest.raises(CommitUnknownError):
            zombie.append_control(late)
        proxy.heal()
    else:
        (place.folder / control_objects.record_name(2)).write_bytes(late)
    assert (place.folder / control_objects.record_name(2)).read_bytes() == late
    for each in (zombie, reader):
        with pytest.raises(PrunedError, match="begin at 8, not at 2"):
            list(each.read_control(2))
        assert [number for number, _ in each.read_control(8)] == [8, 9, 10]
        each.close()


def test_records_among_deleted_ones_are_not_known_to_the_next_append(place: Place, log: Log) -> None:
    zombie = place.open()
    for number in (1, 2):
        zombie.append_control(control_record(number))
    for number in range(3, 7):
        log.append_control(control_record(number))
    log.prune_control(3)
    (place.folder / control_objects.record_name(2)).write_bytes(control_record(99))  # left by another zombie
    assert zombie.append_control(control_record(7)) == 6
    with pytest.raises(PrunedError):
        list(zombie.read_control(2))
    assert list(zombie.read_control(3)) == list(log.read_control(3))
    zombie.close()


def test_a_pack_holds_no_record_that_was_put_among_deleted_ones(
    place: Place, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_objects, "BLOCK", 8)
    for number in range(12):
        log.append_control(control_record(number + 1))
    log.prune_control(11)
    for number in (8, 9, 10):
        (place.folder / control_objects.record_name(number)).write_bytes(control_record(99))
    other = place.open()
    for number in range(12, 16):
        assert other.append_control(control_record(number + 1)) == number
    assert not (place.folder / "packs" / f"{8:020d}").exists()
    other.close()


def test_a_hole_at_the_place_of_a_process_is_named_and_not_filled(place: Place, log: Log) -> None:
    for number in range(1, 4):
        log.append_control(control_record(number))
    assert list(log.read_control(3)) == []
    other = place.open()
    for number in (4, 5):
        other.append_control(control_record(number))
    (place.folder / control_objects.record_name(3)).unlink()
    for use in (lambda: list(log.read_control(3)), lambda: log.append_control(control_record(99))):
        with pytest.raises(CorruptionError, match="control record 3 is missing, but record 4 exists"):
            use()
    assert not (place.folder / control_objects.record_name(3)).exists()
    other.close()


def test_a_zombie_is_fenced_although_the_control_records_were_shortened(place: Place) -> None:
    owner = place.open()
    owner.prepare(2)
    job = Job(Path("/nowhere"), log=owner)
    job.begin()
    first = job.commit()
    slow = place.open()
    control = Control(slow)
    frozen = Control(place.open())
    for each in (control, frozen):
        assert each.refresh().newest is not None
    job.begin(first.id)
    for _ in range(3):
        job.touch()
        job.commit()
        shorten_control(owner, Control(owner), at_once=True)
    assert owner.control_base() > 0
    late = replace(first, marker=2)
    with pytest.raises(FencedError):
        control.commit(late, 5.0, threading.Event())
    assert late.id not in Control(owner).refresh().commits
    frozen.append(late)  # as if it had been stopped between its look and its put
    assert late.id not in frozen.refresh().commits
    slow.close()
    owner.close()


def test_a_commit_takes_three_requests_in_turn_at_any_age(place: Place, proxy: FaultyProxy) -> None:
    """It asks for the next record and, at the same time, for its neighbors; puts its own; and looks for the base."""
    log = place.open()
    log.prepare(2)
    job = Job(Path("/nowhere"), log=log)
    job.begin()
    commit, control, asked = job.commit(), Control(log), []
    control.refresh()
    for marker in range(2, 40):
        proxy.taken()
        control.commit(replace(commit, marker=marker), 60.0, threading.Event())
        asked.append(proxy.taken())
    assert asked == [{"get": 1, "head": 2, "put": 1, "list": 1}] * len(asked)
    assert proxy.consents == 0
    log.close()


def test_a_put_that_arrives_after_its_process_and_its_number_are_gone_does_not_count(place: Place, log: Log) -> None:
    """Its name is free again, and nobody is left to look for the base."""
    for number in (1, 2):
        log.append_control(control_record(number))
    away = place.open()
    assert len(list(away.read_control())) == 2
    for number in range(3, 12):
        log.append_control(control_record(number))
    log.prune_control(8)
    late = place.folder / control_objects.record_name(2)
    late.write_bytes(control_record(99))
    with pytest.raises(PrunedError, match="begin at 8, not at 2"):
        list(away.read_control(2))
    wanted = [(number, control_record(number + 1)) for number in range(8, 11)]
    assert list(away.read_control(8)) == wanted
    assert away.append_control(control_record(12)) == 11
    assert list(log.read_control(8)) == [*wanted, (11, control_record(12))]
    log.prune_control(9)
    assert not late.exists()
    away.close()


def test_a_watch_that_was_away_while_records_were_deleted_sees_new_ones(place: Place, log: Log) -> None:
    for number in (1, 2):
        log.append_control(control_record(number))
    reader = place.open()
    watch = reader.watch()
    assert len(list(reader.read_control())) == 2
    assert watch.wait(0.0)
    for number in range(3, 12):
        log.append_control(control_record(number))
    log.prune_control(8)
    with pytest.raises(PrunedError):
        list(reader.read_control(2))
    assert len(list(reader.read_control(8))) == 3
    assert (watch.wait(0.0), watch.wait(0.0)) == (True, False)  # the first one for records that were read already
    log.append_control(control_record(12))
    assert watch.wait(0.0)
    watch.close()
    reader.close()


@pytest.mark.parametrize("content", [b"foreign", b""])
def test_a_foreign_pack_after_the_end_says_nothing(place: Place, log: Log, content: bytes) -> None:
    log.append_control(control_record(1))
    foreign = place.folder / f"packs/{control_objects.BLOCK:020d}"
    foreign.parent.mkdir(exist_ok=True)
    foreign.write_bytes(content)
    other = place.open()
    assert list(other.read_control()) == [(0, control_record(1))]
    assert other.append_control(control_record(2)) == 1
    other.close()


def test_listings_that_lag_hide_no_record_and_no_row(place: Place, log: Log, proxy: FaultyProxy) -> None:
    proxy.lag(60.0)
    records = [(number, control_record(number + 1)) for number in range(5)]
    for _, record in records:
        log.append_control(record)
    acks = write(log, [frame(seq, b"x" * 640) for seq in range(4)])
    other = place.open()
    assert list(other.read_control()) == records
    assert seqs(other, span_of(acks)) == [0, 1, 2, 3]
    assert other.append_control(control_record(6)) == 5
    assert list(log.read_control()) == [*records, (5, control_record(6))]
    assert proxy.hidden > 0
    other.close()


def test_the_first_rows_of_a_marker_may_be_hidden_while_later_ones_are_listed(
    place: Place, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "OBJECT_BYTES", 1)
    acks = write(log, [frame(seq, b"x" * 640) for seq in range(5)])
    objects = open_store(place.uri, place.options)
    sizes = {ack.offset: ack.end - ack.offset for ack in acks[2:]}
    found = streams.pieces(objects, LogSpan(1, 0, acks[1].offset, acks[-1].end), sizes)
    assert [piece.begin for piece in found] == [ack.offset for ack in acks[1:]]
    objects.close()


def test_an_empty_object_in_the_way_of_a_writer_is_named(place: Place, log: Log) -> None:
    """It has no frames that an earlier writer could have put, so nothing would change by opening the stream again."""
    stream = log.open_writer(1, 0, 0)
    foreign = place.folder / streams.object_name(1, 0, 0)
    foreign.parent.mkdir(parents=True, exist_ok=True)
    foreign.touch()
    stream.send(frame(0))
    with pytest.raises(StreamLostError, match="an empty object at this offset, put by another program"):
        acknowledged(stream, 1)
    stream.close()


def test_a_foreign_object_among_the_records_is_named_or_skipped(place: Place, log: Log) -> None:
    log.append_control(control_record(1))
    (place.folder / control_objects.record_name(1)).write_bytes(b"not ours" * 40)
    for use in (lambda: log.append_control(control_record(2)), lambda: list(log.read_control())):
        with pytest.raises(CorruptionError) as caught:
            use()
    log.append_control(control_record(2), garbage=True)
    assert caught.value.where["name"] == control_objects.record_name(1)
    found = list(log.read_control(garbage=True))
    assert [(number, len(record)) for number, record in found if number != 1] == [
        (0, len(control_record(1))),
        (2, len(control_record(2))),
    ]


def test_a_front_that_was_deleted_is_no_loss(place: Place, log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_objects, "BLOCK", 8)
    records = [(number, control_record(number + 1)) for number in range(30)]
    for _, record in records:
        log.append_control(record)
    log.prune_control(19)
    log.prune_control(11)
    assert log.control_base() == 19
    for each in (log, place.open()):
        assert list(each.read_control(19)) == records[19:]
        assert list(each.read_control(30)) == []
    other = place.open()
    with pytest.raises(PrunedError, match="begin at 19, not at 3"):
        list(other.read_control(3))
    assert other.append_control(control_record(31)) == 30
    left = sorted(path.name for path in (place.folder / "control").rglob("*") if path.is_file())
    assert left == [f"{number:020d}" for number in range(19, 31)]
    assert [path.name for path in (place.folder / "packs").iterdir()] == [f"{16:020d}"]
    with pytest.raises(CorruptionError, match="no control record has number 99"):
        log.prune_control(99)
    other.close()


def test_a_marker_takes_one_put_a_rank(log: Log, proxy: FaultyProxy) -> None:
    stream = log.open_writer(1, 0, 0)
    for first in (0, 10):
        proxy.taken()
        for seq in range(first, first + 9):
            stream.send(frame(seq, b"r" * 1000))
        stream.send(mark(first + 9))
        acknowledged(stream, 10)
        assert proxy.taken() == {"put": 1}
    stream.close()


@pytest.mark.parametrize("fault", PASSING)
def test_rows_outlast_a_server_in_trouble(log: Log, proxy: FaultyProxy, fault: Fault) -> None:
    stream = log.open_writer(1, 0, 0)
    proxy.harm("put", fault, 2)
    stream.send(frame(0))
    acks = acknowledged(stream, 1)
    proxy.heal()
    stream.close()
    assert seqs(log, span_of(acks)) == [0]


def test_a_resumed_stream_takes_what_was_put_without_an_answer(
    place: Place, log: Log, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The objects of the writer that died are cut at other frames than those that its successor would make."""
    monkeypatch.setattr(writer, "OBJECT_BYTES", 1000)
    sent = [frame(seq, bytes([seq]) * 300) for seq in range(12)]
    lost = log.open_writer(1, 0, 0)
    for each in sent[:7]:
        lost.send(each)
    lost.close()  # it waits for its puts, and nobody hears of them
    objects = {path.name: path.read_bytes() for path in (place.folder / "data").rglob("*") if path.is_file()}
    assert objects
    monkeypatch.setattr(writer, "OBJECT_BYTES", 5000)
    acks = write(log, sent)
    assert [bytes(data) for _, data in log.read(span_of(acks))] == [bytes(each) for each in sent]
    for name, data in objects.items():
        assert next((place.folder / "data").rglob(name)).read_bytes() == data  # none was overwritten


def test_a_put_that_arrives_late_is_taken_over_too(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    zombie = log.open_writer(1, 0, 0)
    heir = log.open_writer(1, 0, 0)
    sent = [frame(seq) for seq in range(4)]
    for each in sent[:2]:
        zombie.send(each)
    acknowledged(zombie, 2)
    for each in sent:
        heir.send(each)
    with pytest.raises(LogUnavailableError, match="another object at this offset, of an earlier writer"):
        acknowledged(heir, 4)
    heir.close()
    zombie.close()
    assert seqs(log, span_of(write(log, sent))) == [0, 1, 2, 3]


def test_leftovers_beyond_a_gap_are_passed_over(place: Place, log: Log) -> None:
    acks = write(log, [frame(seq) for seq in range(3)])
    stray = place.folder / "data/g00000001/p00000" / f"{acks[1].offset:020d}"
    stray.write_bytes(bytes(frame(9)))
    more = write(log, [frame(3)], resume_at=acks[-1].end)
    assert seqs(log, LogSpan(1, 0, 0, more[-1].end)) == [0, 1, 2, 3]
    assert log.ends(1, [0]) == {0: more[-1].end}


def test_a_trim_leaves_no_leftover_at_the_front(place: Place, log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reaches beyond the cut, into an object that is kept: taken for the first one, it would lead nowhere."""
    monkeypatch.setattr(writer, "OBJECT_BYTES", 1)
    acks = write(log, [frame(seq, b"x" * 640) for seq in range(6)])
    folder = place.folder / "data/g00000001/p00000"
    stray = folder / f"{acks[1].offset + 64:020d}"
    stray.write_bytes(bytes(frame(9, b"x" * 1280)))
    chosen = TrimRange((LogSpan(1, 0, 0, acks[1].end),), (), frozenset())
    kill = place.open()
    with monkeypatch.context() as patch:
        patch.setattr(bucket_log, "delete_all", lambda objects, names: delete_all(objects, names[:1]))
        kill.trim(chosen)
    for other in (kill, place.open()):
        assert other.ends(1, [0]) == {0: acks[-1].end}
        other.trim(chosen)
        other.close()
    assert sorted(path.name for path in folder.iterdir()) == [f"{ack.offset:020d}" for ack in acks[2:]]
    resumed = place.open()
    more = write(resumed, [frame(6)], resume_at=acks[-1].end)
    assert seqs(resumed, LogSpan(1, 0, acks[2].offset, more[-1].end)) == [2, 3, 4, 5, 6]
    resumed.close()


def test_another_program_in_a_stream_is_named(log: Log, place: Place) -> None:
    write(log, [frame(0), frame(1)])
    other = place.open()
    with pytest.raises(StreamLostError, match="already exist, written by another program"):
        other.open_writer(1, 0, 0)
    resumed = other.open_writer(1, 0, 0, again=True)
    with pytest.raises(StreamLostError, match="has other frames at this offset"):
        resumed.send(frame(0, b"other"))
    with pytest.raises(StreamLostError, match=r"acknowledged bytes .* of this generation are missing"):
        other.open_writer(1, 0, 10**6)
    other.close()


@pytest.mark.parametrize(
    ("harm", "error", "said"),
    [
        ("delete the first", CorruptionError, "are missing, but were committed"),
        ("delete the last", StreamLostError, "the log ends at byte"),
        ("cut the first", CorruptionError, "are missing, but were committed|ends inside a frame"),
        ("flip", CorruptionError, "differ from its checksum in the store"),
    ],
)
def test_objects_that_are_lost_cut_or_flipped_are_named(
    place: Place, log: Log, monkeypatch: pytest.MonkeyPatch, harm: str, error: type[Exception], said: str
) -> None:
    monkeypatch.setattr(writer, "OBJECT_BYTES", 1)
    acks = write(log, [frame(seq, b"x" * 640) for seq in range(5)])
    objects = sorted(path for path in (place.folder / "data").rglob("*") if path.is_file())
    if harm.startswith("delete"):
        objects[0 if harm.endswith("first") else -1].unlink()
    elif harm == "flip":
        data = bytearray(objects[2].read_bytes())
        data[1] ^= 1
        objects[2].write_bytes(data)
    else:
        objects[0].write_bytes(objects[0].read_bytes()[:-64])
    other = place.open()
    with pytest.raises(error, match=said) as caught:
        seqs(other, span_of(acks))
    assert "name" in caught.value.where  # type: ignore[attr-defined]
    if harm != "flip":
        with pytest.raises(error):
            other.check_there([span_of(acks)])
    other.close()


def test_an_identity_that_was_lost_is_no_empty_log(place: Place, log: Log) -> None:
    write(log, [frame(0)])
    (place.folder / "LOG").unlink()
    other = place.open()
    for use in (other.incarnation, lambda: other.prepare(1)):
        with pytest.raises(CorruptionError, match="holds rows, but its identity is missing"):
            use()
    log.append_control(control_record(1))
    with pytest.raises(CorruptionError, match="holds control records, but its identity is missing"):
        other.incarnation()
    other.close()


def test_a_store_that_ignores_conditions_is_refused(place: Place, proxy: FaultyProxy, s3_server: S3Server) -> None:
    for objects in (s3_server.objects, None):
        proxy.know_no_conditions(objects)
        log = place.open()
        with pytest.raises(ConfigError, match="overwrites objects although"):
            log.prepare(1)
        assert not (place.folder / "LOG").exists()
        assert "holds no log" in list(log.examine())[-1].found
        place.folder.mkdir(exist_ok=True)
        (place.folder / "LOG").write_bytes(b"0" * 32)
        assert any("overwrites objects" in finding.found for finding in log.examine())
        (place.folder / "LOG").unlink()
        log.close()


def test_a_bucket_that_is_not_there_and_rights_that_lack_are_named(place: Place, proxy: FaultyProxy) -> None:
    nowhere = open_log("s3://no-such-bucket/job", place.options)
    with pytest.raises(LogUnavailableError, match="the bucket 'no-such-bucket' does not exist"):
        nowhere.prepare(1)
    with pytest.raises(LogUnavailableError) as caught:
        nowhere.control_base()
    assert "cannot list the objects below s3://no-such-bucket/job: the bucket 'no-such-bucket'" in str(caught.value)
    nowhere.close()
    proxy.refuse("put", 403, "AccessDenied")
    log = place.open()
    with pytest.raises(LogUnavailableError, match="cannot create the bucket log: cannot write it"):
        log.prepare(1)
    log.close()


@pytest.mark.parametrize(
    ("uri", "said"),
    [
        ("s3://key:secret@bucket/job", "must be a bucket and a prefix only"),
        ("s3://bucket", "does not name a bucket and a prefix"),
        ("s3:///job", "does not name a bucket and a prefix"),
        ("s3://bucket/a/../b", "contains the part '..'"),
        ("s3://a//b", r"'s3://a//b' contains an empty part \('//'\)"),
        ("s3://bucket/./b", "contains the part '.'"),
        ("s3://bucket/job?endpoint=x", "must be a bucket and a prefix only"),
    ],
)
def test_uris_that_hold_more_or_less_are_refused(uri: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        parse_uri(uri)
    assert "secret" not in str(caught.value)


def test_markers_of_a_job_are_what_was_written(place: Place) -> None:
    """Generations, branches and column splits, as on every other log."""
    bucket = place.open()
    job = Job(Path("/nowhere"), log=bucket)
    bucket.prepare(2)
    job.begin(splits=[1, 1, 2])
    first = job.commit()
    job.touch()
    second = job.commit()
    job.begin(first.id, world=2, splits=[2, 1, 4])
    job.touch()
    third = job.commit()
    reader = place.open()
    lineage = Control(reader).refresh()
    for commit in (first, second, third):
        assert image_of_log(reader, lineage, commit.id).arrays.keys()
    reader.close()
    bucket.close()
