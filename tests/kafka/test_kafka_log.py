"""What only a real broker can show: faults, foreign settings and lost data."""

from __future__ import annotations

import logging
import signal
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from tests.kafka.test_kafka_jobs import doctor
from tests.own_broker import OwnBroker
from tests.parts import open_log
from torchrec_stream_ckpt.errors import CommitUnknownError, ConfigError, CorruptionError, LogUnavailableError
from torchrec_stream_ckpt.inner import Log
from torchrec_stream_ckpt.log.api import Finding, Severity
from torchrec_stream_ckpt.log.kafka import brokers as kafka_brokers
from torchrec_stream_ckpt.log.kafka import clocks, control_topic, producer
from torchrec_stream_ckpt.log.kafka.brokers import Brokers
from torchrec_stream_ckpt.log.kafka.producer import KafkaSender
from torchrec_stream_ckpt.log.kafka.reasons import Reasons
from torchrec_stream_ckpt.util.types import LogSpan
from torchrec_stream_ckpt.util.uris import KafkaUri

UNREACHABLE = "kafka://127.0.0.1:1/job"


@pytest.fixture
def job() -> str:
    return f"job-{uuid.uuid4().hex}"


@pytest.fixture
def log(bootstrap: str, job: str) -> Iterator[Log]:
    log = open_log(f"kafka://{bootstrap}/{job}")
    yield log
    log.close()


@pytest.fixture
def admin(bootstrap: str) -> Any:
    from confluent_kafka.admin import AdminClient

    return AdminClient({"bootstrap.servers": bootstrap})


def make_topic(admin: Any, name: str, **settings: str) -> None:
    from confluent_kafka.admin import NewTopic

    config = {key.replace("_", "."): value for key, value in settings.items()}
    admin.create_topics([NewTopic(name, 1, 1, config=config)])[name].result(30)


def write(log: Log, payloads: list[bytes], partition: int = 0) -> list[int]:
    """Offsets of the payloads, all acknowledged."""
    writer = log.open_writer(1, partition, 0)
    for payload in payloads:
        writer.send(memoryview(payload))
    offsets: list[int] = []
    deadline = time.monotonic() + 60
    while len(offsets) < len(payloads):
        assert time.monotonic() < deadline
        offsets += [ack.offset for ack in writer.poll(0.2)]
    writer.close()
    return offsets


@pytest.mark.parametrize(
    "operation",
    [
        lambda log: log.incarnation(),
        lambda log: log.prepare(1),
        lambda log: log.append_control(b"x"),
        lambda log: log.open_writer(1, 0, 0),
    ],
    ids=["incarnation", "prepare", "append_control", "open_writer"],
)
def test_unreachable_broker_is_told(operation: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert kafka_brokers.ANSWER_TIMEOUT_S < 9
    monkeypatch.setattr(kafka_brokers, "ANSWER_TIMEOUT_S", 1.0)
    log = open_log(UNREACHABLE)
    with pytest.raises(LogUnavailableError, match="connection refused") as caught:
        operation(log)
    assert "127.0.0.1:1" in str(caught.value)
    log.close()


@pytest.mark.parametrize(
    ("options", "raised"), [({}, LogUnavailableError), ({"no.such.option": "1"}, ConfigError)], ids=["away", "option"]
)
def test_an_append_that_was_expected_is_refused_as_any_other(
    options: dict[str, str], raised: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kafka_brokers, "ANSWER_TIMEOUT_S", 1.0)
    log = open_log(UNREACHABLE, options)
    for _ in range(2):
        log.expect_append()
        with pytest.raises(raised):
            log.append_control(b"x")
    log.close()


@pytest.mark.kafka
def test_an_append_takes_the_client_that_was_made_for_it(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    log.prepare(1)
    made: list[Any] = []

    def make(brokers: Brokers, *rest: Any) -> KafkaSender:
        made.append(brokers.asked)
        return KafkaSender(brokers, *rest)

    monkeypatch.setattr(control_topic, "KafkaSender", make)
    for _ in range(2):
        log.expect_append()
    assert [log.append_control(b"x") for _ in range(3)] == [0, 1, 2]
    log.expect_append()
    assert len(made) == 1


@pytest.mark.kafka
def test_a_client_that_would_ask_other_brokers_than_those_known_now_appends_nothing(
    bootstrap: str, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of the brokers that the URI names is away: only a look at all of them tells."""
    made: list[str] = []

    def make(brokers: Brokers, *rest: Any) -> KafkaSender:
        made.append(brokers.asked.brokers)
        return KafkaSender(brokers, *rest)

    monkeypatch.setattr(control_topic, "KafkaSender", make)
    log = open_log(f"kafka://{bootstrap},127.0.0.1:1/{job}")
    log.expect_append()
    log.prepare(1)
    assert log.append_control(b"x") == 0
    assert made == [f"{bootstrap},127.0.0.1:1", bootstrap]
    log.close()


@pytest.mark.kafka
def test_tls_to_a_port_without_tls_is_told(bootstrap: str) -> None:
    with pytest.raises(LogUnavailableError, match=r"security\.protocol"):
        open_log(f"kafka://{bootstrap}/job", {"security.protocol": "ssl"}).incarnation()


@pytest.mark.kafka
def test_login_at_a_listener_without_one_is_told_without_the_password(
    bootstrap: str, caplog: pytest.LogCaptureFixture
) -> None:
    login = {
        "security.protocol": "sasl_plaintext",
        "sasl.mechanism": "PLAIN",
        "sasl.username": "trainer",
        "sasl.password": "correct-horse",
    }
    with caplog.at_level(logging.DEBUG), pytest.raises(LogUnavailableError, match="does not accept a login") as caught:
        open_log(f"kafka://{bootstrap}/job", login).incarnation()
    assert "correct-horse" not in str(caught.value) + caplog.text


def test_secrets_are_struck_out() -> None:
    class Complaint:
        def name(self) -> str:
            return "_AUTHENTICATION"

        def str(self) -> str:
            return "bad login trainer:hunter2"

    reasons = Reasons({"sasl.password": "hunter2", "sasl.username": "trainer"})
    reasons.note(Complaint())
    told = str(reasons.unavailable(KafkaUri("h:1", "j"), "read", "no answer"))
    assert "rejected the login" in told
    assert "hunter2" not in told
    assert "hunter2" not in str(reasons.unavailable(KafkaUri("h:1", "j"), "read", "said hunter2"))


def test_a_complaint_that_repeats_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    reasons = Reasons({})
    with caplog.at_level(logging.INFO):
        for number in range(50):
            reasons.log(logging.ERROR, "%s [%s] %s", "GETPID", "client", f"slow (after {number}ms in state CONNECT)")
    assert len(caplog.records) == 1


def test_a_failed_connection_is_named_by_our_error_and_not_logged_before_it(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        Reasons({}).log(logging.ERROR, "%s [%s] %s", "FAIL", "client", "connect to 127.0.0.1:9 failed: refused")
    assert caplog.records == []


@pytest.mark.parametrize(
    "name", ["acks", "enable.idempotence", "auto.offset.reset", "enable.partition.eof", "enable.auto.commit"]
)
def test_option_that_exactness_rests_on_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        open_log(UNREACHABLE, {name: "1"})


@pytest.mark.parametrize(
    ("options", "message"),
    [({"no.such.option": "1"}, r"no\.such\.option"), ({"security.protocol": "telepathy"}, "telepathy")],
)
def test_unknown_option_is_named(options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_log(UNREACHABLE, options).incarnation()


@pytest.mark.kafka
@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"retention_ms": "86400000"}, r"retention\.ms=86400000"),
        ({"retention_ms": "-1", "retention_bytes": "1000000"}, r"retention\.bytes=1000000"),
        ({"retention_ms": "-1", "cleanup_policy": "compact"}, r"cleanup\.policy=compact"),
    ],
)
@pytest.mark.parametrize("suffix", ["data", "control"])
def test_topic_that_would_lose_rows_is_refused(
    log: Log, admin: Any, job: str, suffix: str, settings: dict[str, str], named: str
) -> None:
    make_topic(admin, f"{job}.{suffix}", **settings)
    with pytest.raises(ConfigError, match=named) as caught:
        log.prepare(1)
    assert f"{job}.{suffix}" in str(caught.value)


@pytest.mark.kafka
def test_topic_too_narrow_for_a_frame_is_refused(log: Log, admin: Any, job: str) -> None:
    make_topic(admin, f"{job}.data", retention_ms="-1", max_message_bytes="500000")
    with pytest.raises(ConfigError, match=r"max\.message\.bytes=500000"):
        log.prepare(1)


@pytest.mark.kafka
def test_span_that_was_trimmed_is_refused(log: Log, admin: Any, job: str) -> None:
    from confluent_kafka import TopicPartition

    log.prepare(1)
    offsets = write(log, [bytes([number]) * 100 for number in range(10)])
    for trimmed in admin.delete_records([TopicPartition(f"{job}.data", 0, 4)]).values():
        trimmed.result(30)
    with pytest.raises(CorruptionError, match=r"offsets \[0, 10\) are required, but the log has \[4, 10\)") as caught:
        list(log.read(LogSpan(1, 0, offsets[0], 10)))
    assert caught.value.where == {"topic": f"{job}.data", "partition": 0}
    assert len(list(log.read(LogSpan(1, 0, 4, 10)))) == 6
    log.check_there([LogSpan(1, 0, 4, 10)])
    with pytest.raises(CorruptionError, match="rows from offset 3 on are required, but the log begins at 4"):
        log.check_there([LogSpan(1, 0, 4, 10), LogSpan(2, 0, 3, 10)])


@pytest.mark.kafka
def test_topic_made_again_under_its_name_is_another_log(log: Log, admin: Any, job: str) -> None:
    before = log.prepare(1)
    write(log, [b"old"] * 3)
    log.append_control(b"old")
    for deleted in admin.delete_topics([f"{job}.data"]).values():
        deleted.result(30)
    while log.incarnation() is not None:
        time.sleep(0.1)
    after = log.prepare(1)
    # The control topic has stayed: one of both is enough to tell.
    assert after.id != before.id
    with pytest.raises(CorruptionError, match="deleted and recreated"):
        list(log.read(LogSpan(1, 0, 0, 3)))


@pytest.mark.kafka
def test_deleted_control_topic_is_not_taken_for_an_empty_one(log: Log, admin: Any, job: str) -> None:
    log.prepare(1)
    offset = log.append_control(b"record")
    for deleted in admin.delete_topics([f"{job}.control"]).values():
        deleted.result(30)
    while log.incarnation() is not None:
        time.sleep(0.1)
    with pytest.raises(CorruptionError):
        list(log.read_control(offset + 1))


@pytest.mark.kafka
def test_a_control_topic_that_has_lost_its_end_is_named(log: Log) -> None:
    log.prepare(1)
    offset = log.append_control(b"record")
    with pytest.raises(CorruptionError, match=rf"ends at offset {offset + 1}, but was read up to 9: its end was lost"):
        log.read_control(9)


@pytest.mark.kafka
def test_writer_without_a_topic_is_refused(log: Log) -> None:
    with pytest.raises(LogUnavailableError, match="does not exist"):
        log.open_writer(1, 0, 0)


@pytest.mark.kafka
def test_frame_that_is_too_large_ends_the_writer(log: Log) -> None:
    log.prepare(1)
    writer = log.open_writer(1, 0, 0)
    with pytest.raises(LogUnavailableError, match="MSG_SIZE_TOO_LARGE"):
        writer.send(memoryview(bytes(2_000_000)))
    with pytest.raises(LogUnavailableError, match="MSG_SIZE_TOO_LARGE"):
        writer.poll(0)
    writer.close()


@pytest.mark.kafka
def test_killed_broker_loses_no_acknowledged_frame(victim: OwnBroker) -> None:
    log = open_log(victim.uri)
    log.prepare(1)
    frames = [number.to_bytes(4, "little") * 50_000 for number in range(400)]
    writer = log.open_writer(1, 0, 0)
    acks: list[int] = []
    killed = threading.Event()

    def kill_and_restart() -> None:
        victim.kill()
        killed.set()
        victim.begin()

    killer = threading.Thread(target=kill_and_restart)
    acked_before_kill = 0
    for number, frame in enumerate(frames):
        writer.send(memoryview(frame))
        acks += [ack.offset for ack in writer.poll(0)]
        if number == len(frames) // 2:
            acked_before_kill = len(acks)
            killer.start()
            killed.wait(120)
    in_flight = len(frames) - len(acks)
    deadline = time.monotonic() + 60
    while len(acks) < len(frames) and time.monotonic() < deadline:
        acks += [ack.offset for ack in writer.poll(0.2)]
    killer.join()
    writer.close()

    assert killed.is_set()
    assert acked_before_kill < len(frames)
    assert in_flight > 0
    assert len(acks) == len(frames)
    found = dict(log.read(LogSpan(1, 0, acks[0], acks[-1] + 1)))
    assert [bytes(found[offset]) for offset in acks] == frames
    log.close()


@pytest.mark.kafka
def test_control_record_without_an_answer_is_unknown_until_read(
    victim: OwnBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchrec_stream_ckpt.log.kafka.settings._CONTROL_FIXED", {"message.timeout.ms": "2000"})
    log = open_log(victim.uri)
    log.prepare(1)
    first = log.append_control(b"first")
    victim.pause()
    with pytest.raises(CommitUnknownError) as told:
        log.append_control(b"second")
    silent = f"waiting for broker 1 at {victim.uri.split('/')[2]}, the leader of job.control[0]"
    assert silent in str(told.value)
    assert "check that this broker runs" in told.value.hint
    victim.signal(signal.SIGCONT)
    third = log.append_control(b"third")
    records = dict(log.read_control())
    assert records[first] == b"first"
    assert records[third] == b"third"
    assert list(records.values()).count(b"second") <= 1
    log.close()


# Limits of a broker that depend on this host's clock, or on the size of a record.


KEEPS = {"retention_ms": "-1", "retention_bytes": "-1", "cleanup_policy": "delete"}
HOUR_MS = "3600000"


def set_clock(monkeypatch: pytest.MonkeyPatch, ahead_s: float) -> None:
    """Let the clients stamp records as they would on a host with a clock that is off."""
    from confluent_kafka import Producer

    class Off:
        def __init__(self, client: Any) -> None:
            self._client = client

        def produce(self, topic: str, value: Any, **more: Any) -> None:
            self._client.produce(topic, value, timestamp=int((real() + ahead_s) * 1000), **more)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._client, name)

    real, make = time.time, producer.make_client
    monkeypatch.setattr(
        producer, "make_client", lambda kind, *rest: Off(make(kind, *rest)) if kind is Producer else make(kind, *rest)
    )
    monkeypatch.setattr(clocks.time, "time", lambda: real() + ahead_s)


def examined(log: Log) -> dict[str, Finding]:
    return {finding.check: finding for finding in log.examine()}


def ends(log: Log) -> dict[int, int]:
    return log.ends(1, [0])


@pytest.mark.kafka
@pytest.mark.parametrize("ahead_s", [7200.0, -7200.0, 0.0])
def test_no_clock_is_too_wrong_for_the_topics_that_we_make(
    log: Log, job: str, ahead_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_clock(monkeypatch, ahead_s)
    log.prepare(1)
    write(log, [b"x"])
    log.append_control(b"x")
    assert examined(log)[f"{job}.data: message.timestamp.type"].found == "LogAppendTime"


@pytest.mark.kafka
@pytest.mark.parametrize(
    ("ahead_s", "settings", "bound", "seen"),
    [
        (7200.0, {}, "3,600 s newer", "3,600 to 86,400 s ahead of that of broker 1"),
        (-7200.0, {"message_timestamp_before_max_ms": HOUR_MS}, "3,600 s older", "3,600 to 86,400 s behind that of"),
        (
            -7200.0,
            {"message_timestamp_before_max_ms": HOUR_MS, "message_timestamp_after_max_ms": str(2**62)},
            "3,600 s older",
            "3,600 to 86,400 s behind that of",
        ),
        (0.0, {"message_timestamp_before_max_ms": "1000"}, "1 s older", "within 1 s of that of broker 1"),
        (0.0, {"message_timestamp_after_max_ms": "1"}, "0.001 s newer", ""),
    ],
)
def test_a_topic_that_would_refuse_our_clock_is_refused_with_both_clocks(
    log: Log,
    admin: Any,
    bootstrap: str,
    job: str,
    ahead_s: float,
    settings: dict[str, str],
    bound: str,
    seen: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_topic(admin, f"{job}.data", **KEEPS, **settings)
    make_topic(admin, f"{job}.control", **KEEPS, **settings)
    set_clock(monkeypatch, ahead_s)
    with pytest.raises(ConfigError, match=r"message\.timestamp\.type=CreateTime") as caught:
        log.prepare(1)
    assert f"{job}.data" in caught.value.message
    assert bound in caught.value.message
    assert seen in caught.value.message
    assert "message.timestamp.type=LogAppendTime" in caught.value.hint
    status, found = doctor(f"kafka://{bootstrap}/{job}")
    for topic in ("data", "control"):
        finding = found[f"{job}.{topic}: message.timestamp.type"]
        assert (finding["verdict"], bound in finding["hint"]) == ("bad", True)
        assert found[f"{job}.{topic}: cleanup.policy"]["verdict"] == "ok"
    assert status == 1
    assert ends(log) == {0: 0}  # the clocks were compared without a record


@pytest.mark.kafka
def test_a_topic_with_the_times_of_its_writers_is_accepted(log: Log, admin: Any, job: str) -> None:
    for topic in (f"{job}.data", f"{job}.control"):
        make_topic(admin, topic, **KEEPS, message_timestamp_before_max_ms=HOUR_MS)
    log.prepare(1)
    assert ends(log) == {0: 0}
    write(log, [b"x"])
    finding = examined(log)[f"{job}.control: message.timestamp.type"]
    assert finding.verdict is Severity.OK
    assert finding.found == (
        "CreateTime; the brokers refuse records over 3,600 s newer or 3,600 s older than their clocks; this host's "
        "clock is within 1 s of that of broker 1"
    )


@pytest.mark.kafka
def test_a_compacted_topic_does_not_look_like_a_wrong_clock(log: Log, admin: Any, job: str) -> None:
    make_topic(admin, f"{job}.data", cleanup_policy="compact", retention_ms="-1")
    with pytest.raises(ConfigError, match=r"cleanup\.policy=compact") as caught:
        log.prepare(1)
    assert "timestamp" not in str(caught.value)


@pytest.mark.kafka
def test_records_out_of_bounds_are_refused_and_not_of_unknown_fate(
    log: Log, admin: Any, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for topic in (f"{job}.data", f"{job}.control"):
        make_topic(admin, topic, **KEEPS)
    log.prepare(1)
    set_clock(monkeypatch, 7200.0)
    with pytest.raises(LogUnavailableError, match=r"message\.timestamp\.after\.max\.ms of the topic"):
        log.append_control(b"x")
    with pytest.raises(LogUnavailableError, match="too far from the broker's clock") as caught:
        write(log, [b"x", b"y"])
    assert f"stream-ckpt doctor {log.uri}" in caught.value.hint
    assert "has cleanup.policy" not in str(caught.value)
    monkeypatch.undo()  # as after an outage: the next writer gives the frames a new time
    write(log, [b"x", b"y"])
    log.append_control(b"x")
    assert ends(log) == {0: 2}


@pytest.mark.kafka
def test_all_wrong_settings_of_a_topic_are_named_at_once(log: Log, admin: Any, job: str) -> None:
    make_topic(admin, f"{job}.data", retention_ms="60000", max_message_bytes="500000", min_insync_replicas="2")
    with pytest.raises(ConfigError) as caught:
        log.prepare(1)
    for each in ("retention.ms=60000", "max.message.bytes=500000", "min.insync.replicas=2 (the topic has 1 copies"):
        assert each in caught.value.message
    assert caught.value.hint.endswith("--add-config retention.ms=-1,max.message.bytes=1048588,min.insync.replicas=1")
