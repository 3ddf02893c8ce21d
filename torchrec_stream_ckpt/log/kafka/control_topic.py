"""Control topic: one partition of records, the first of which may be replaced by snapshots."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress

import confluent_kafka as ck

from torchrec_stream_ckpt.errors import ConfigError, CorruptionError, LogUnavailableError, PrunedError
from torchrec_stream_ckpt.log.kafka import topics
from torchrec_stream_ckpt.log.kafka.brokers import Brokers
from torchrec_stream_ckpt.log.kafka.health import TRIM_RIGHT
from torchrec_stream_ckpt.log.kafka.producer import KafkaSender, append
from torchrec_stream_ckpt.log.kafka.reader import Reader
from torchrec_stream_ckpt.log.kafka.settings import control_settings


class ControlTopic:
    """Appends and reads control records. Can be used from any thread.

    Args:
        brokers: Brokers of the log.
        reader: Reader of the same log.
    """

    def __init__(self, brokers: Brokers, reader: Reader) -> None:
        self._topic = brokers.uri.control_topic
        self._brokers = brokers
        self._reader = reader
        self._appending = threading.Lock()
        self._sender: KafkaSender | None = None
        self._made_for = brokers.asked
        """Brokers that the current sender asks."""
        self._has_sent = False
        """True if the current sender has appended a record."""
        self._doubtful = True
        """True if the leader of the partition has not been looked up, or the last append failed."""

    def expect_append(self) -> None:
        """Prepare for an append, as :meth:`Log.expect_append`.

        A new idempotent producer requests its id before it has a connection, and again only after 500 ms. Without this
        call, the first record would wait for that.
        """
        with self._appending, suppress(ConfigError):  # the append reports errors
            if self._sender is None:
                self._sender = self._make_sender()

    def append(self, record: bytes) -> int:
        """Append one record; see :meth:`Log.append_control`.

        Raises:
            LogUnavailableError: the record is certainly not in the log.
            CommitUnknownError: it is unknown whether the record arrived.
        """
        with self._appending:
            if not self._has_sent:
                # This also distinguishes a dead broker from a lost answer, because nothing has been sent yet.
                self._brokers.require(self._topic, 0, "write", LogUnavailableError)
                self._check_leader()
                if self._made_for != self._brokers.asked:
                    self._drop_sender()
            if self._sender is None:
                self._sender = self._make_sender()
            try:
                offset = append(self._sender, record)
                self._has_sent = True
                return offset
            except BaseException:
                # A producer that has failed once may be unusable. The next append makes another one.
                self._drop_sender()
                self._doubtful = True
                raise

    def waits_for(self) -> str:
        """Describe the pending broker, as :meth:`Log.waits_for`. For a thread other than the one in :meth:`append`."""
        sender = self._sender
        if sender is None:
            return f"a leader of {self._topic}[0], of the brokers {self._brokers.uri.brokers}"
        return sender.waits_for()

    def read(self, start: int = 0) -> Iterator[tuple[int, bytes]]:
        """Read records from ``start`` to the current end. Yields nothing if there is no topic yet."""
        if not start and self._topic not in self._brokers.describe():
            return iter(())
        self._check_leader()
        low, high, _ = self._brokers.edge(self._topic, 0, start)
        if start < low:
            raise PrunedError(f"the control topic begins at offset {low}, not at {start}", topic=self._topic)
        if start > high:
            raise CorruptionError(  # without a hint: the one that knows the second copy gives it
                f"the control topic ends at offset {high}, but was read up to {start}: its end was lost",
                topic=self._topic,
            )
        return self._reader.records(self._topic, 0, start, high)

    def base(self) -> int:
        """Return the topic's first offset."""
        if self._topic not in self._brokers.describe():
            return 0
        return self._brokers.edge(self._topic, 0).low

    def prune(self, base: int) -> None:
        """Move the topic's first offset."""
        topic = self._topic
        self._brokers.require(topic, 0, "trim", LogUnavailableError)
        topics.check_right(self._brokers, topic, TRIM_RIGHT)
        if base > self._brokers.edge(topic, 0).low:
            place = ck.TopicPartition(topic, 0, base)
            self._brokers.answers(f"delete records of {topic}", lambda admin: admin.delete_records([place]))

    def close(self) -> None:
        with self._appending:
            self._drop_sender()

    def _make_sender(self) -> KafkaSender:
        self._made_for = self._brokers.asked
        settings = control_settings(self._made_for, self._brokers.options)
        return KafkaSender(self._brokers, self._topic, 0, settings)

    def _check_leader(self) -> None:
        """Find the current leader. A reader that starts at a broker that is cut off would miss the newest marker."""
        if self._doubtful:
            self._brokers.look_around(self._topic, [0])
            self._doubtful = False

    def _drop_sender(self) -> None:
        if self._sender is not None:
            self._sender.close()
            self._sender, self._has_sent = None, False
