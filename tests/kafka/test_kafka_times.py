"""Limits of a broker that depend on this host's clock, or on the size of a record."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from tests.kafka.test_kafka_jobs import doctor
from tests.kafka.test_kafka_log import make_topic, write
from tests.parts import open_log
from torchrec_stream_ckpt.errors import ConfigError, LogUnavailableError
from torchrec_stream_ckpt.inner import Log
from torchrec_stream_ckpt.log.api import Finding, Severity
from torchrec_stream_ckpt.log.kafka import clocks, producer

pytestmark = pytest.mark.kafka

KEEPS = {"retention_ms": "-1", "retention_bytes": "-1", "cleanup_policy": "delete"}
HOUR_MS = "3600000"


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


@pytest.mark.parametrize("ahead_s", [7200.0, -7200.0, 0.0])
def test_no_clock_is_too_wrong_for_the_topics_that_we_make(
    log: Log, job: str, ahead_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_clock(monkeypatch, ahead_s)
    log.prepare(1)
    write(log, [b"x"])
    log.append_control(b"x")
    assert examined(log)[f"{job}.data: message.timestamp.type"].found == "LogAppendTime"


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


def test_a_compacted_topic_does_not_look_like_a_wrong_clock(log: Log, admin: Any, job: str) -> None:
    make_topic(admin, f"{job}.data", cleanup_policy="compact", retention_ms="-1")
    with pytest.raises(ConfigError, match=r"cleanup\.policy=compact") as caught:
        log.prepare(1)
    assert "timestamp" not in str(caught.value)


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


def test_all_wrong_settings_of_a_topic_are_named_at_once(log: Log, admin: Any, job: str) -> None:
    make_topic(admin, f"{job}.data", retention_ms="60000", max_message_bytes="500000", min_insync_replicas="2")
    with pytest.raises(ConfigError) as caught:
        log.prepare(1)
    for each in ("retention.ms=60000", "max.message.bytes=500000", "min.insync.replicas=2 (the topic has 1 copies"):
        assert each in caught.value.message
    assert caught.value.hint.endswith("--add-config retention.ms=-1,max.message.bytes=1048588,min.insync.replicas=1")
