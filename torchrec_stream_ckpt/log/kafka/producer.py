"""Send to one partition: frames of a rank, and control records."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import confluent_kafka as ck
import numpy as np

from torchrec_stream_ckpt.errors import CommitUnknownError, LogUnavailableError, StreamLostError
from torchrec_stream_ckpt.log.api import Ack
from torchrec_stream_ckpt.log.kafka.brokers import Brokers
from torchrec_stream_ckpt.log.kafka.client import CLIENT_ERRORS, make_client, plain, surfacing
from torchrec_stream_ckpt.log.kafka.codes import Refusal, refusal_of
from torchrec_stream_ckpt.log.kafka.probe import knock, leader_in
from torchrec_stream_ckpt.log.kafka.reasons import LOST_HINT, Reasons
from torchrec_stream_ckpt.log.kafka.settings import CONTROL_TIMEOUT_S

QUEUE_FULL_TIMEOUT_S = 5.0
_STATISTICS_MS = 2000
_COPIES_S = 1.0

# A broker that knows less of this producer than it acknowledged has lost the partition's tail or its own state.
_FORGOTTEN = ("OUT_OF_ORDER_SEQUENCE_NUMBER", "UNKNOWN_PRODUCER_ID")


class KafkaSender:
    """Idempotent producer of one partition. For one thread at a time. An error is final."""

    def __init__(self, brokers: Brokers, topic: str, partition: int, settings: Mapping[str, Any]) -> None:
        self._uri = brokers.uri
        self._topic = topic
        self._partition = partition
        self._reasons = Reasons(brokers.options)
        # (number of the record, error or None, offset). The callback only appends.
        self._done: deque[tuple[int, Any, int]] = deque()
        self._sent = 0
        self._reported = 0
        self._failure: LogUnavailableError | None = None
        self._statistics = ""
        """Last statistics of the client. They contain the partition's leader, so no query is needed."""
        telling = {"statistics.interval.ms": _STATISTICS_MS, "stats_cb": self._note}
        self._producer = make_client(ck.Producer, {**settings, **telling}, self._reasons)

    def send(self, value: Any) -> None:
        """Queue one record.

        Raises:
            LogUnavailableError: it was not accepted.
        """
        deadline = time.monotonic() + QUEUE_FULL_TIMEOUT_S
        with self._guard():
            while True:
                try:
                    delivered = partial(self._delivered, self._sent)
                    self._producer.produce(self._topic, value, partition=self._partition, on_delivery=delivered)
                    break
                except BufferError:
                    if time.monotonic() > deadline:
                        raise self.failed("write", "the client's queue is still full") from None
                    self._producer.poll(0.05)
        self._sent += 1

    def reports(self, timeout_s: float) -> list[tuple[Any, int]]:
        """Return (error, offset) of records that were delivered or given up, in the order of ``send``."""
        with self._guard():
            self._producer.poll(0 if self._done else timeout_s)
        reports = []
        while self._done:
            number, error, offset = self._done.popleft()
            if number != self._reported:
                raise self.failed("write", f"expected report {self._reported}, found {number}")
            self._reported += 1
            reports.append((error, offset))
        return reports

    def failed(self, doing: str, error: Any) -> LogUnavailableError:
        """Set and return the error of this sender, which is permanent."""
        self._failure = self._reasons.unavailable(self._uri, f"{doing} {self._topic}/{self._partition}", plain(error))
        return self._failure

    def reason(self) -> LogUnavailableError:
        """Return an error with the reason why there is no answer, without ending this sender."""
        return self._reasons.unavailable(self._uri, f"write {self._topic}/{self._partition}", "no answer")

    def waits_for(self) -> str:
        """Describe the partition's leader, as the client knows it, and whether it accepts connections and answers."""
        leader = leader_in(self._statistics, self._topic, self._partition)
        if leader is None:
            return f"a leader of {self._topic}[{self._partition}], of the brokers {self._uri.brokers}"
        reached, said = knock(leader.place)
        return f"{leader}, the leader of {self._topic}[{self._partition}] ({said}{self._copies() if reached else ''})"

    def _copies(self) -> str:
        try:
            found = self._producer.list_topics(self._topic, _COPIES_S).topics[self._topic].partitions[self._partition]
        except (*CLIENT_ERRORS, KeyError):  # a stopped process still accepts connections: its kernel does
            return f"; the broker has answered nothing for {_COPIES_S:.0f} s"
        return f"; {len(found.isrs)} of {len(found.replicas)} copies are in sync"

    def close(self) -> None:
        """Drop queued records. Records that were already sent may still arrive."""
        try:
            self._producer.purge(blocking=False)
            self._producer.poll(0)
        except CLIENT_ERRORS:
            return
        finally:
            self._done.clear()

    def _note(self, statistics: str) -> None:
        self._statistics = statistics

    def _delivered(self, number: int, error: Any, message: Any) -> None:
        offset = message.offset()
        self._done.append((number, error, -1 if offset is None else offset))

    @contextmanager
    def _guard(self) -> Iterator[None]:
        if self._failure is not None:
            raise self._failure
        try:
            with surfacing(self._reasons, self._uri, f"write {self._topic}/{self._partition}"):
                yield
        except LogUnavailableError as error:
            self._failure = error
            raise


def append(sender: KafkaSender, record: bytes) -> int:
    """Send one control record and wait for its offset."""
    sender.send(record)
    # The client gives up after CONTROL_TIMEOUT_S. After more time, the client itself hangs.
    deadline = time.monotonic() + CONTROL_TIMEOUT_S + 5
    while time.monotonic() < deadline:
        try:
            reports = sender.reports(0.2)
        except LogUnavailableError as failure:
            raise _unknown(failure.message) from None
        for error, offset in reports:
            if error is not None and refusal_of(error.name()) is Refusal.REFUSED:
                raise sender.failed("write", error)
            if error is not None:
                raise _unknown(f"{sender.reason().message}; {plain(error)}; waiting for {sender.waits_for()}")
            if offset < 0:
                raise _unknown("the broker has the record already, but does not report its offset")
            return offset
    raise _unknown(f"{sender.reason().message}; waiting for {sender.waits_for()}")


def _unknown(reason: str) -> CommitUnknownError:
    return CommitUnknownError(
        f"it is unknown whether the control record arrived: {reason}",
        hint="check that this broker runs and answers; then run stream-ckpt list",
    )


class KafkaWriter:
    """Writer of one rank to a data partition; see :class:`DataWriter`."""

    how = "kafka"

    def __init__(self, sender: KafkaSender) -> None:
        self._sender = sender

    def send(self, frame: memoryview) -> None:
        with _telling_lost():
            # The client accepts an array, not a memoryview. It copies the bytes into its own queue.
            self._sender.send(np.frombuffer(frame, np.uint8))

    def poll(self, timeout_s: float) -> list[Ack]:
        with _telling_lost():
            return self._acks(timeout_s)

    def _acks(self, timeout_s: float) -> list[Ack]:
        acks: list[Ack] = []
        for error, offset in self._sender.reports(timeout_s):
            if error is not None or offset < 0:
                # A duplicate that the broker no longer remembers has no offset. It is sent again.
                failure = self._sender.failed("write", error or "a frame was acknowledged without its offset")
                if not acks:
                    raise failure
                # The earlier frames are durable. The next call raises.
                break
            acks.append(Ack(offset, offset + 1))
        return acks

    @property
    def origin(self) -> int | None:
        return None

    def waits_for(self) -> str:
        return self._sender.waits_for()

    def close(self) -> None:
        self._sender.close()


@contextmanager
def _telling_lost() -> Iterator[None]:
    """Raise StreamLostError if the broker has lost its state of this producer: acknowledged frames may be lost."""
    try:
        yield
    except LogUnavailableError as error:
        if any(name in error.message for name in _FORGOTTEN):
            raise StreamLostError(
                f"the broker has lost its state of this stream, and may have lost its tail: {error.message}",
                hint=LOST_HINT,
            ) from None
        raise
