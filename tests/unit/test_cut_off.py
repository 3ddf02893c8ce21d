"""A broker that is cut off from its peers, and does not know it: what it lacks is not lost."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
from confluent_kafka import KafkaError

from tests.builders import claim
from tests.parts import FileLog
from torchrec_stream_ckpt.errors import CorruptionError, LogUnavailableError, StreamLostError
from torchrec_stream_ckpt.format.frame import parse_header
from torchrec_stream_ckpt.inner import Control
from torchrec_stream_ckpt.log.kafka import brokers as kafka_brokers
from torchrec_stream_ckpt.log.kafka.brokers import Brokers, Edge
from torchrec_stream_ckpt.log.kafka.log import KafkaLog
from torchrec_stream_ckpt.log.kafka.reader import Reader
from torchrec_stream_ckpt.util.types import LogSpan, MarkPlace
from torchrec_stream_ckpt.util.uris import KafkaUri

OLD, NEW, AWAY = "old:9092", "new:9092", "away:9092"


class Lagging(FileLog):
    """Its first reads show nothing."""

    def __init__(self, directory: Path, hidden: int) -> None:
        super().__init__(directory)
        self.hidden = hidden

    def read_control(self, start: int = 0, *, garbage: bool = False) -> Iterator[tuple[int, bytes]]:
        self.hidden -= 1
        return iter(()) if self.hidden >= 0 else super().read_control(start, garbage=garbage)


def test_a_claim_is_read_back_from_a_broker_that_knows_of_it(tmp_path: Path) -> None:
    log = Lagging(tmp_path, hidden=2)
    log.prepare(2)
    Control(log).claim(claim(1))
    assert log.hidden < 0


def test_a_claim_that_nobody_shows_is_an_outage_and_not_a_rival(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchrec_stream_ckpt.log.control.partition._READ_BACK_S", 0.0)
    log = Lagging(tmp_path, hidden=1000)
    log.prepare(2)
    with pytest.raises(LogUnavailableError, match="shows its records only up to"):
        Control(log).claim(claim(1))


def log_of(monkeypatch: pytest.MonkeyPatch, ends: dict[str, tuple[int, int]]) -> KafkaLog:
    """A log whose brokers say that partition 0 ends at (offset, by the leader of this number)."""

    def edges(self: Brokers, topic: str, partitions: Collection[int]) -> dict[int, Edge]:
        asked = self.asked.brokers.split(",")[0]
        if asked not in ends:
            raise LogUnavailableError("no answer")
        return {each: Edge(0, *ends[asked]) for each in partitions}

    monkeypatch.setattr(Brokers, "_edges", edges)
    monkeypatch.setattr(kafka_brokers, "knock", lambda place: (True, "its port accepts connections"))
    return KafkaLog(KafkaUri(f"{OLD},{AWAY},{NEW}", "job"), {})


def brokers_of(part: KafkaLog | Reader) -> Brokers:
    return part._brokers


def reader_of(log: KafkaLog) -> Reader:
    return log._reader


SPAN = LogSpan(1, 0, 10, 20)


def test_what_a_leader_lacks_that_was_followed_by_another_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    log_of(monkeypatch, {OLD: (15, 3), NEW: (25, 4)}).check_there([SPAN])


def test_what_the_newest_leader_lacks_is_lost_though_an_older_one_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StreamLostError, match="ends at offset 15"):
        log_of(monkeypatch, {OLD: (15, 4), NEW: (25, 3)}).check_there([SPAN])


def test_a_record_that_a_broker_was_not_given_is_an_outage_and_one_that_is_gone_is_damage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log = log_of(monkeypatch, {OLD: (15, 3), NEW: (25, 4)})
    assert isinstance(reader_of(log).out_of_range("job.data", 0, 18), LogUnavailableError)
    assert isinstance(reader_of(log).out_of_range("job.data", 0, 30), CorruptionError)


def test_after_a_failure_new_clients_ask_the_brokers_that_know_the_newest_leader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ends = {OLD: (15, 3), NEW: (25, 4)}
    log = log_of(monkeypatch, ends)
    brokers_of(log).look_around("job.data", [0])
    assert (brokers_of(log).asked.brokers, brokers_of(log).uri.brokers) == (NEW, f"{OLD},{AWAY},{NEW}")
    ends[OLD] = ends[AWAY] = ends[NEW]  # it is back
    brokers_of(log).look_around("job.data", [0])
    assert brokers_of(log).asked.brokers == f"{OLD},{AWAY},{NEW}"
    ends.clear()
    brokers_of(log).look_around("job.data", [0])
    assert brokers_of(log).asked == brokers_of(log).uri


def answering(monkeypatch: pytest.MonkeyPatch, *said: tuple[int, int]) -> Brokers:
    """Brokers whose partition 0 ends, by one answer after the other, at (offset, by the leader of this number)."""
    answers = iter(said)

    def ask(_brokers: Brokers, _doing: str, _call: object) -> dict[object, object]:
        high, epoch = next(answers)
        edge = {"low": SimpleNamespace(offset=0), "high": SimpleNamespace(offset=high, leader_epoch=epoch)}
        return {(end, 0): each for end, each in edge.items()}

    monkeypatch.setattr(Brokers, "ask", ask)
    return Brokers(KafkaUri(f"{OLD},{NEW}", "job"), {})


def test_the_word_of_a_leader_counts_no_more_once_a_newer_one_was_heard_of(monkeypatch: pytest.MonkeyPatch) -> None:
    brokers = answering(monkeypatch, (25, 4), (15, 3), (15, 3), (26, 4))
    assert [brokers.edges("job.data", [0])[0].high for _ in range(2)] == [25, 26]


def test_who_hears_of_an_older_leader_alone_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kafka_brokers, "ANSWER_TIMEOUT_S", -1.0)
    brokers = answering(monkeypatch, (25, 4), (15, 3))
    brokers.edges("job.data", [0])
    with pytest.raises(LogUnavailableError, match="does not know the newest leader"):
        brokers.edges("job.data", [0])


def asked(monkeypatch: pytest.MonkeyPatch, answer: object) -> tuple[Brokers, list[str]]:
    """Brokers that have described the partition just now, and what they are asked from then on."""
    described, questions = SimpleNamespace(topic_id="", partitions=[SimpleNamespace(id=0)]), list[str]()

    def ask(_brokers: Brokers, doing: str, _call: object) -> dict[object, object]:
        questions.append(doing)
        if answer is None:
            raise LogUnavailableError("no answer")
        return {"job.data": answer}

    monkeypatch.setattr(Brokers, "ask", lambda *_: {"job.data": described})
    brokers = Brokers(KafkaUri(OLD, "job"), {}, timeout_s=-1.0)
    brokers.describe()
    monkeypatch.setattr(Brokers, "ask", ask)
    return brokers, questions


def test_a_broker_that_does_not_answer_is_asked_once_for_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    brokers, questions = asked(monkeypatch, None)
    with pytest.raises(LogUnavailableError, match="no answer"):
        brokers.edge("job.data", 0)
    assert questions == ["find the ends of job.data"]


def test_a_broker_that_refuses_an_end_is_asked_whether_the_topic_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kafka_brokers, "PROPAGATION_S", -1.0)
    brokers, questions = asked(monkeypatch, KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART))
    with pytest.raises(CorruptionError, match="does not exist"):
        brokers.edge("job.data", 0)
    assert questions == ["find the ends of job.data", "find the job's topics"]


def test_a_topic_that_was_made_anew_counts_its_leaders_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    brokers = answering(monkeypatch, (25, 4))
    brokers.edges("job.data", [0])
    for made in ("first", "second"):
        monkeypatch.setattr(Brokers, "ask", lambda *_, made=made: {"job.data": SimpleNamespace(topic_id=made)})
        brokers.describe()
        assert brokers.epochs == ({("job.data", 0): 4} if made == "first" else {})


def test_who_begins_to_read_control_records_asks_the_newest_leader_for_all_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log = log_of(monkeypatch, {OLD: (2, 3), NEW: (4, 4)})
    monkeypatch.setattr(Brokers, "describe", lambda _brokers: {"job.control": None})
    monkeypatch.setattr(Brokers, "require", lambda *_: None)
    read = lambda _reader, _topic, _partition, begin, end, _idle_s: ((each, b"") for each in range(begin, end))  # noqa: E731
    monkeypatch.setattr(Reader, "_read_on", read)
    assert [offset for offset, _ in log.read_control()] == [0, 1, 2, 3]
    assert brokers_of(log).asked.brokers == NEW


def test_a_mark_that_a_broker_was_not_given_is_read_from_one_that_knows_the_leader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log, asked = log_of(monkeypatch, {OLD: (15, 3), NEW: (25, 4)}), list[str]()

    def fetch(reader: Reader, offsets: Mapping[int, int]) -> dict[int, bytes | None]:
        asked.append(brokers_of(reader).asked.brokers)
        if brokers_of(reader).asked.brokers != NEW:
            raise LogUnavailableError("no answer")
        return dict.fromkeys(offsets)

    monkeypatch.setattr(Reader, "_fetch_at", fetch)
    with pytest.raises(StreamLostError, match="the frame acknowledged at offset 9 is not there"):
        log.check_marks([MarkPlace(1, 0, 10, 7)])
    assert asked == [f"{OLD},{AWAY},{NEW}", NEW]


def test_a_mark_that_is_the_first_record_that_a_broker_was_not_given_is_not_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That broker's partition ends there: it gives no record, and no error."""
    log = log_of(monkeypatch, {OLD: (9, 3), NEW: (25, 4)})
    frame = claim(1).to_frame()

    def fetch(reader: Reader, offsets: Mapping[int, int]) -> dict[int, bytes | None]:
        return dict.fromkeys(offsets, frame if brokers_of(reader).asked.brokers == NEW else None)

    monkeypatch.setattr(Reader, "_fetch_at", fetch)
    log.check_marks([MarkPlace(1, 0, 10, parse_header(frame).header_crc)])


def test_who_reads_and_gets_no_answer_reads_on_from_one_that_knows_the_leader(monkeypatch: pytest.MonkeyPatch) -> None:
    log, asked = log_of(monkeypatch, {OLD: (15, 3), NEW: (25, 4)}), list[tuple[str, int]]()

    def read(
        reader: Reader, _topic: str, _partition: int, begin: int, end: int, _idle_s: float
    ) -> Iterator[tuple[int, bytes]]:
        asked.append((brokers_of(reader).asked.brokers, begin))
        knows = brokers_of(reader).asked.brokers == NEW
        yield from ((offset, b"") for offset in range(begin, end if knows else 15))
        if not knows:
            raise LogUnavailableError("no answer")

    monkeypatch.setattr(Reader, "_read_on", read)
    assert [offset for offset, _ in reader_of(log).records("job.data", 0, 10, 20)] == list(range(10, 20))
    assert asked == [(f"{OLD},{AWAY},{NEW}", 10), (NEW, 15)]
