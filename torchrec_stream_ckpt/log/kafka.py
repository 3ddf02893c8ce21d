"""The Kafka log: topics ``JOB.data`` (one partition a rank) and ``JOB.control`` (one partition).

Offsets are Kafka's own. Exactness does not rest on Kafka's transactions, but on what is in the frames;
this module sees to it that no frame is dropped, reordered or skipped without an error. The only module
that imports ``confluent_kafka``, which is untyped: its objects are ``Any`` here and nowhere else.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import confluent_kafka as ck
import confluent_kafka.admin as ck_admin
import numpy as np

from torchrec_stream_ckpt.errors import (
    CommitUnknownError,
    ConfigError,
    CorruptionError,
    LogUnavailableError,
    PrunedError,
    StreamLostError,
)
from torchrec_stream_ckpt.format.frame import HEADER_LEN, parse_header
from torchrec_stream_ckpt.layout import KafkaUri
from torchrec_stream_ckpt.log.api import Ack, Cut, Finding, Freed, Incarnation, Rows
from torchrec_stream_ckpt.log.kafka_health import NEEDED_RIGHTS, TRIM_RIGHT, acl_command, examine_topic
from torchrec_stream_ckpt.log.kafka_probe import find_cause, knock, leader_in
from torchrec_stream_ckpt.log.kafka_setup import (
    CONTROL_TIMEOUT_S,
    LEAST_MESSAGE_BYTES,
    TOPIC_SETTINGS,
    Reasons,
    admin_settings,
    alter_command,
    check_options,
    consumer_settings,
    control_settings,
    data_settings,
)
from torchrec_stream_ckpt.types import LogSpan, MarkPlace

ANSWER_TIMEOUT_S = 7.0
PROBE_AFTER_S = 2.0
PROPAGATION_S = 3.0
QUEUE_FULL_TIMEOUT_S = 5.0
READ_IDLE_TIMEOUT_S = 30.0
_BATCH_FRAMES = 32
_STATISTICS_MS = 2000
_COPIES_S = 1.0

# The broker refused these records, so they are certainly not in the log.
_REFUSED = frozenset(
    {
        "MSG_SIZE_TOO_LARGE",
        "TOPIC_AUTHORIZATION_FAILED",
        "CLUSTER_AUTHORIZATION_FAILED",
        "INVALID_RECORD",
        "_UNKNOWN_TOPIC",
        "_UNKNOWN_PARTITION",
    }
)
# A broker that knows less of this producer than it has acknowledged has lost the partition's tail, or what it knew.
_FORGOTTEN = ("OUT_OF_ORDER_SEQUENCE_NUMBER", "UNKNOWN_PRODUCER_ID")
_LOST_HINT = "see the brokers' logs: a disk or machine failed, or an unclean leader was elected"
_DESTROYED_HINT = "restore from another copy of the log, or begin a new job; see that nothing else sets its retention"

# What a partition's ends are answered with for a moment, after creation and while it has no leader.
_NO_LEADER = frozenset(
    {
        ck.KafkaError.LEADER_NOT_AVAILABLE,
        ck.KafkaError.NOT_LEADER_FOR_PARTITION,
        ck.KafkaError.FENCED_LEADER_EPOCH,
        ck.KafkaError.UNKNOWN_LEADER_EPOCH,
        ck.KafkaError.OFFSET_NOT_AVAILABLE,
        ck.KafkaError.REPLICA_NOT_AVAILABLE,
        ck.KafkaError.KAFKA_STORAGE_ERROR,
        ck.KafkaError.UNKNOWN_TOPIC_OR_PART,
        ck.KafkaError._NOENT,
    }
)

# What the client raises: a fatal producer error inside a poll that served a delivery callback comes out
# as SystemError, with the KafkaException as its cause.
_CLIENT_ERRORS = (ck.KafkaException, SystemError)


class _Edge(NamedTuple):
    """Where a partition begins and ends, as its leader says."""

    low: int
    """First offset that is still there."""
    high: int
    """End of what is durable."""
    epoch: int
    """Number of the leader: one that follows has a higher one."""

    @classmethod
    def of(cls, low: Any, high: Any) -> _Edge:
        return cls(int(low.offset), int(high.offset), int(-1 if high.leader_epoch is None else high.leader_epoch))


class KafkaLog:
    """A log on a Kafka cluster.

    Args:
        uri: Brokers and job.
        options: Client settings of the user, security included.

    Raises:
        ConfigError: an option would break a promise.
    """

    def __init__(self, uri: KafkaUri, options: Mapping[str, str]) -> None:
        self._uri = uri
        self._options = dict(options)
        check_options(self._options)
        self._asking = threading.Lock()
        self._admin: Any = None
        self._admin_reasons = Reasons(self._options)
        self._appending = threading.Lock()
        self._control: _Sender | None = None
        self._doubtful = True
        """Whether nobody has looked who leads the control partition, or the last append failed."""
        self._asked = uri
        """The brokers that new clients ask: of several, those that knew the newest leaders at the last look."""
        self._epochs: dict[tuple[str, int], int] = {}
        """The newest leader of each partition that was heard of: the word of an older one does not count."""
        self._topic_ids: dict[str, str] = {}

    def prepare(self, partitions: int, identity: str | None = None) -> Incarnation:
        """Create the topics or add partitions; refuses topics that would lose rows by themselves.

        Raises:
            ConfigError: a topic has a retention, is compacted, or takes no whole frame.
            LogUnavailableError: the brokers do not answer, or do not allow it.
        """
        self.preflight()
        topics = self._describe()
        self._create(self._uri.data_topic, topics, partitions)
        self._create(self._uri.control_topic, topics, 1)
        control = topics.get(self._uri.control_topic)
        if control is not None and len(control.partitions) != 1:
            raise ConfigError("the control topic must have one partition", topic=self._uri.control_topic)
        prepared = self._await_partitions(partitions)
        for topic in (self._uri.data_topic, self._uri.control_topic):
            self._check_settings(topic)
        return prepared

    def preflight(self) -> None:
        """Whether this user may do what a trainer does; asks for nothing to be made.

        Raises:
            LogUnavailableError: the brokers do not answer or a right is missing; says why, or which.
        """
        topics = self._describe(rights=True)
        for name, description in topics.items():
            self._check_rights(name, description, NEEDED_RIGHTS)
        for name in {self._uri.data_topic, self._uri.control_topic} - topics.keys():
            self._try_creating(name)

    def _check_rights(self, topic: str, description: Any, needed: Collection[str]) -> None:
        granted = {operation.name for operation in description.authorized_operations or ()}
        missing = sorted(set(needed) - granted) if granted and "ALL" not in granted else []
        if missing:
            raise LogUnavailableError(
                f"Kafka at {self._uri.brokers}: {self._who()} has no right to {', '.join(missing)} topic '{topic}'",
                hint=acl_command(self._options.get("sasl.username"), topic, missing),
            )

    def _try_creating(self, topic: str) -> None:
        new = ck_admin.NewTopic(topic, 1, -1, config=TOPIC_SETTINGS)
        doing = f"create topic {topic}"
        answers = self._ask(doing, lambda admin: admin.create_topics([new], validate_only=True))
        self._check_created(doing, answers, ck.KafkaError.TOPIC_ALREADY_EXISTS)

    def _who(self) -> str:
        name = self._options.get("sasl.username")
        return f"user '{name}'" if name else "this client"

    def incarnation(self) -> Incarnation | None:
        """The ids of both topics, None unless both exist."""
        topics = self._describe()
        data, control = topics.get(self._uri.data_topic), topics.get(self._uri.control_topic)
        if data is None or control is None:
            return None
        return Incarnation(f"{data.topic_id}+{control.topic_id}", len(data.partitions))

    def open_writer(self, generation: int, partition: int, resume_at: int, *, again: bool = False) -> KafkaWriter:
        """A writer of one partition; a generation needs no place of its own here, readers go by offsets.

        Raises:
            StreamLostError: the partition ends before ``resume_at``.
        """
        self._require(self._uri.data_topic, partition, "write", LogUnavailableError)
        if resume_at:
            self._look_around(self._uri.data_topic, [partition])  # the last writer gave up
            self._check_ends([LogSpan(generation, partition, resume_at, resume_at)])
        settings = data_settings(self._asked, self._options)
        return KafkaWriter(_Sender(self._uri, self._uri.data_topic, partition, settings, Reasons(self._options)))

    def read(self, span: LogSpan) -> Iterator[tuple[int, memoryview]]:
        """Frames of ``span``; the brokers are asked at once, frames are fetched as they are asked for."""
        records = self._read(self._uri.data_topic, span.partition, span.begin, span.end)
        return ((offset, memoryview(value)) for offset, value in records)

    def ends(self, generation: int, partitions: Collection[int]) -> dict[int, int]:
        return {partition: edge.high for partition, edge in self._edges(partitions).items()}

    def newest_rows(self, ends: Mapping[int, int] | None = None) -> Rows | None:
        topic, data = self._uri.data_topic, self._describe().get(self._uri.data_topic)
        edges = self._edges({each.id for each in data.partitions}) if data is not None else {}
        filled = {partition: edge for partition, edge in edges.items() if edge.high}
        newest = 1
        for partition, edge in filled.items() if ends is not None else ():
            for _, frame in self._read(topic, partition, max(edge.low, (ends or {}).get(partition, 0)), edge.high):
                with suppress(CorruptionError):  # a stray
                    newest = max(newest, parse_header(frame[:HEADER_LEN]).generation)
        place = f"{topic}[{min(filled)}]" if filled else ""
        return Rows(newest, f"topic '{topic}' holds", f"topic '{self._uri.control_topic}'", place) if filled else None

    def place(self, span: LogSpan) -> tuple[str, int]:
        return f"{self._uri.data_topic}[{span.partition}]", span.begin

    def check_there(self, spans: Sequence[LogSpan]) -> None:
        """One look at both ends of all partitions: a retention eats from the front, a failure takes the tail.

        Raises:
            StreamLostError: a partition ends, or has ended, before what was acknowledged.
        """
        lows = self._check_ends(spans)
        for span in spans:
            if span.begin < lows[span.partition]:
                raise CorruptionError(
                    f"the log begins at offset {lows[span.partition]}, and rows from {span.begin} on are needed: "
                    "a retention ate them, or somebody deleted them",
                    hint=_DESTROYED_HINT,
                    **self._where(span),
                )
        self._check_order(spans)

    def check_marks(self, marks: Sequence[MarkPlace]) -> None:
        """One fetch from all partitions; another one for each further MARK in a partition.

        A partition loses its end and nothing else. So a MARK that is there shows that all of before it is.

        Raises:
            StreamLostError: another frame is there, or none.
        """
        waiting = sorted(marks, key=lambda mark: -mark.end)
        while waiting:
            now = {mark.partition: mark for mark in reversed(waiting)}
            waiting = [mark for mark in waiting if now[mark.partition] is not mark]
            frames = self._frames_at({partition: mark.end - 1 for partition, mark in now.items()})
            for partition, mark in now.items():
                if not _has_checksum(frames[partition], mark.chain):
                    raise StreamLostError(
                        f"offset {mark.end - 1} does not hold the frame that was acknowledged there: "
                        "the tail was lost, and somebody else has written after that",
                        hint=_LOST_HINT,
                        topic=self._uri.data_topic,
                        partition=partition,
                        generation=mark.generation,
                    )

    def _check_ends(self, spans: Sequence[LogSpan]) -> dict[int, int]:
        """See whether each partition still ends where its spans do, or later; returns the partitions' first offsets."""
        edges = self._edges({span.partition for span in spans})
        short = self._short(spans, edges)
        if short is not None:
            edges = self._newest_edges(self._uri.data_topic, edges)
            short = self._short(spans, edges)
        if short is not None:
            raise StreamLostError(
                f"the log ends at offset {edges[short.partition].high}, and had acknowledged all up to {short.end}: "
                "its tail was lost",
                hint=_LOST_HINT,
                **self._where(short),
            )
        return {partition: edge.low for partition, edge in edges.items()}

    @staticmethod
    def _short(spans: Sequence[LogSpan], edges: Mapping[int, _Edge]) -> LogSpan | None:
        """A span that ends after its partition."""
        return next((span for span in spans if edges[span.partition].high < span.end), None)

    def _check_control_leader(self) -> None:
        """A reader that begins at a broker which is cut off would take an older marker for the newest."""
        if self._doubtful:
            self._look_around(self._uri.control_topic, [0])
            self._doubtful = False

    def _look_around(self, topic: str, partitions: Collection[int]) -> None:
        """Let new clients ask the brokers, of several, that know who leads these partitions now."""
        if "," in self._uri.brokers:
            self._newest_edges(topic, dict.fromkeys(partitions, _Edge(0, 0, -1)))

    def _newest_edges(self, topic: str, edges: Mapping[int, _Edge]) -> dict[int, _Edge]:
        """Edges as each broker knows them that the URI names: the word of the newest leader counts.

        A leader that is cut off from its peers does not know that another one has followed it, and a client goes on
        asking it, as does a new one that has met it first. What it lacks is not lost.
        """
        found: dict[str, dict[int, _Edge]] = {}
        for broker in self._uri.brokers.split(","):
            if not knock(broker)[0]:
                continue
            other = KafkaLog(replace(self._uri, brokers=broker), self._options)
            with closing(other), suppress(LogUnavailableError):
                found[broker] = other._edges_of(topic, edges)
        newest = {
            each: max((edge, *(of[each] for of in found.values())), key=lambda edge: edge.epoch)
            for each, edge in edges.items()
        }
        knowing = [
            broker for broker, of in found.items() if all(of[each].epoch == newest[each].epoch for each in newest)
        ]
        with self._asking:
            self._asked = replace(self._uri, brokers=",".join(knowing)) if knowing else self._uri
            self._admin = None
        self._are_of_the_newest(topic, newest)
        return newest

    def _are_of_the_newest(self, topic: str, edges: Mapping[int, _Edge]) -> bool:
        """Whether no newer leader of these partitions was heard of before."""
        for partition, edge in edges.items():
            newest = self._epochs.get((topic, partition), edge.epoch)
            if edge.epoch < newest:
                return False
            self._epochs[topic, partition] = edge.epoch
        return True

    def _check_order(self, spans: Sequence[LogSpan]) -> None:
        """Offsets go through all generations: one that begins before an older one ends was written over a lost tail."""
        ends: dict[int, LogSpan] = {}
        for span in sorted(spans, key=lambda span: span.generation):
            older = ends.get(span.partition)
            if older is not None and older.generation < span.generation and span.begin < older.end:
                raise StreamLostError(
                    f"generation {older.generation} ends at offset {older.end}, and generation {span.generation} "
                    f"begins at {span.begin}: the tail between them was lost",
                    hint=_LOST_HINT,
                    **self._where(older),
                )
            if older is None or span.end > older.end:
                ends[span.partition] = span

    def _where(self, span: LogSpan) -> dict[str, object]:
        return {"topic": self._uri.data_topic, "partition": span.partition, "generation": span.generation}

    def trim(self, cut: Cut, *, dry_run: bool = False) -> Freed:
        """Kafka deletes from the front of a partition alone: up to the first offset there that anybody needs.

        What a dead generation sent goes as far as it lies in front of that. A generation that has committed nothing
        lies behind all that was committed when it was claimed, so never in front of the end of what is gone.
        """
        topic = self._uri.data_topic
        self._require(topic, 0, "trim", LogUnavailableError)
        self._check_rights(topic, self._describe(rights=True)[topic], {TRIM_RIGHT})
        ends: dict[int, int] = {}
        for span in cut.gone:
            ends[span.partition] = max(span.end, ends.get(span.partition, 0))
        for span in cut.kept:
            if span.partition in ends:
                ends[span.partition] = min(span.begin, ends[span.partition])
        lows = {partition: edge.low for partition, edge in self._edges(ends).items()}
        ends = {partition: end for partition, end in ends.items() if end > lows[partition]}
        if ends and not dry_run:
            places = [ck.TopicPartition(topic, partition, end) for partition, end in ends.items()]
            self._answers(f"delete records of {topic}", lambda admin: admin.delete_records(places))
        return Freed("records", sum(end - lows[partition] for partition, end in ends.items()), None)

    def _edges(self, partitions: Collection[int]) -> dict[int, _Edge]:
        """Both ends, by partition of the data topic."""
        return self._edges_of(self._uri.data_topic, partitions)

    def _edges_of(self, topic: str, partitions: Collection[int]) -> dict[int, _Edge]:
        """The same of a topic: all partitions and both ends are asked for at once."""
        doing, deadline = f"find the ends of {topic}", time.monotonic() + ANSWER_TIMEOUT_S

        def ask(admin: Any) -> dict[Any, Any]:
            questions: dict[Any, Any] = {}
            for end, spec in (("low", ck_admin.OffsetSpec.earliest()), ("high", ck_admin.OffsetSpec.latest())):
                asked = admin.list_offsets({ck.TopicPartition(topic, partition): spec for partition in partitions})
                questions |= {(end, place.partition): future for place, future in asked.items()}
            return questions

        while partitions:
            answers = self._ask(doing, ask)
            error = next((answer for answer in answers.values() if isinstance(answer, ck.KafkaError)), None)
            if error is None:
                edges = {each: _Edge.of(answers["low", each], answers["high", each]) for each in partitions}
                if self._are_of_the_newest(topic, edges):
                    return edges
                self._ask_others(doing, deadline)
            elif error.code() in _NO_LEADER and time.monotonic() < deadline:
                time.sleep(0.1)
                self._describe()  # the client goes on asking the leader that it knows, unless it is told of another one
            else:
                raise self._unavailable(doing, error)
        return {}

    def _ask_others(self, doing: str, deadline: float) -> None:
        """A broker has answered that has not heard of the newest leader: the next question goes to another client."""
        if time.monotonic() > deadline:
            raise LogUnavailableError(
                f"Kafka at {self._uri.brokers}: cannot {doing}: a broker answers that does not know the newest leader",
                hint="see whether that broker is cut off from the others; then try again",
            )
        time.sleep(0.1)
        with self._asking:
            self._admin = None

    def append_control(self, record: bytes, *, garbage: bool = False) -> int:
        """Append one record; see :meth:`Log.append_control`.

        Raises:
            LogUnavailableError: it is certainly not in the log.
            CommitUnknownError: nobody knows.
        """
        with self._appending:
            if self._control is None:
                # Also tells a dead broker from a lost answer: here nothing has been sent yet.
                self._require(self._uri.control_topic, 0, "write", LogUnavailableError)
                self._check_control_leader()
                settings = control_settings(self._asked, self._options)
                self._control = _Sender(self._uri, self._uri.control_topic, 0, settings, Reasons(self._options))
            try:
                offset = _append(self._control, record)
            except BaseException:
                # A producer with a failure behind it may be fatally ill: the next append takes another.
                self._drop_control()
                self._doubtful = True
                raise
            return offset

    def read_control(self, start: int = 0, *, garbage: bool = False) -> Iterator[tuple[int, bytes]]:
        """Records from ``start`` to what is the end now; none while there is no topic yet."""
        if not start and self._uri.control_topic not in self._describe():
            return iter(())
        self._check_control_leader()
        low, high, _ = self._watermarks(self._uri.control_topic, 0, start)
        if start < low:
            raise PrunedError(
                f"the control topic begins at offset {low}, not at {start}", topic=self._uri.control_topic
            )
        if start > high:
            raise self._not_there(self._uri.control_topic, 0, (low, high), (start, high))
        return self._records(self._uri.control_topic, 0, start, high)

    def control_base(self) -> int:
        """The topic's first offset."""
        if self._uri.control_topic not in self._describe():
            return 0
        return self._watermarks(self._uri.control_topic, 0).low

    def control_next(self, offset: int, record: bytes) -> int:
        return offset + 1

    def prune_control(self, base: int) -> None:
        """Move the topic's first offset."""
        topic = self._uri.control_topic
        self._require(topic, 0, "trim", LogUnavailableError)
        self._check_rights(topic, self._describe(rights=True)[topic], {TRIM_RIGHT})
        if base > self._watermarks(topic, 0).low:
            place = ck.TopicPartition(topic, 0, base)
            self._answers(f"delete records of {topic}", lambda admin: admin.delete_records([place]))

    def examine(self) -> Iterator[Finding]:
        """What the brokers say of themselves, of both topics, and of this user's rights."""
        (cluster,) = self._ask("describe the cluster", lambda a: {"cluster": a.describe_cluster()}).values()
        yield Finding("brokers", f"{len(cluster.nodes)} in cluster {cluster.cluster_id}")
        for name, description in self._describe(rights=True).items():
            settings = {key: entry.value for key, entry in self._settings(name).items()}
            replicas = [(len(each.replicas), len(each.isr)) for each in description.partitions]
            rights = {each.name for each in description.authorized_operations or ()}
            yield from examine_topic(name, settings, replicas, rights)

    def close(self) -> None:
        with self._appending:
            self._drop_control()
        with self._asking:
            self._admin = None

    def _drop_control(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None

    # Asking the brokers.

    def _ask(self, doing: str, call: Callable[[Any], Mapping[Any, Future[Any]]]) -> dict[Any, Any]:
        """Run one admin call and wait for all of its answers, which may be KafkaErrors.

        Raises:
            LogUnavailableError: no answer, with the reason that the client has whispered meanwhile.
        """
        with self._asking:
            admin, reasons = self._admin_client(), self._admin_reasons
            admin.poll(0)
            reasons.clear()
            futures = call(admin)
            begin, probed = time.monotonic(), False
            while wait(futures.values(), timeout=0.1).not_done:
                admin.poll(0)
                waited_s = time.monotonic() - begin
                if not probed and (reasons.hopeless() or (waited_s > PROBE_AFTER_S and not reasons.unreachable())):
                    probed, cause = True, find_cause(self._uri, self._options)
                    if cause is not None:
                        raise reasons.found(self._uri, doing, cause)
                if reasons.hopeless() or waited_s > ANSWER_TIMEOUT_S:
                    self._admin, self._asked = None, self._uri  # the next one may find a broker that answers
                    raise reasons.unavailable(self._uri, doing, f"no answer within {ANSWER_TIMEOUT_S:.0f} s")
            return {key: _outcome(future) for key, future in futures.items()}

    def _answers(self, doing: str, call: Callable[[Any], Mapping[Any, Future[Any]]]) -> dict[Any, Any]:
        """As ``_ask``; an answer that is an error is raised."""
        answers = self._ask(doing, call)
        for answer in answers.values():
            if isinstance(answer, ck.KafkaError):
                raise self._unavailable(doing, answer)
        return answers

    def _admin_client(self) -> Any:
        if self._admin is None:
            settings = admin_settings(self._asked, self._options)
            self._admin = _client(ck_admin.AdminClient, settings, self._admin_reasons)
        return self._admin

    def _unavailable(self, doing: str, error: Any) -> LogUnavailableError:
        return self._admin_reasons.unavailable(self._uri, doing, _plain(error))

    def _describe(self, *, rights: bool = False) -> dict[str, Any]:
        """Descriptions of those of the two topics that exist; if asked for, with what this user may do."""
        names = ck.TopicCollection([self._uri.data_topic, self._uri.control_topic])
        asked = partial(ck_admin.AdminClient.describe_topics, topics=names, include_authorized_operations=rights)
        answers = self._ask("find the job's topics", lambda admin: asked(admin))
        for name, answer in answers.items():
            if isinstance(answer, ck.KafkaError) and answer.code() != ck.KafkaError.UNKNOWN_TOPIC_OR_PART:
                raise self._unavailable(f"find topic {name}", answer)
        found = {name: answer for name, answer in answers.items() if not isinstance(answer, ck.KafkaError)}
        for name, description in found.items():
            made = str(description.topic_id)
            if self._topic_ids.setdefault(name, made) != made:  # made anew: its leaders are counted from 0 again
                self._topic_ids[name] = made
                self._epochs = {each: epoch for each, epoch in self._epochs.items() if each[0] != name}
        return found

    def _require(
        self, topic: str, partition: int, doing: str, error: type[CorruptionError | LogUnavailableError]
    ) -> None:
        description = self._await_topic(topic)
        if description is None:
            raise error(f"cannot {doing} topic '{topic}': it does not exist", hint=_DESTROYED_HINT)
        if partition not in {known.id for known in description.partitions}:
            raise error(f"cannot {doing} topic '{topic}': no such partition", hint=_DESTROYED_HINT, partition=partition)

    def _await_topic(self, topic: str) -> Any:
        """The topic's description, or None when it does not turn up: a broker may learn of it late."""
        deadline = time.monotonic() + PROPAGATION_S
        while True:
            description = self._describe().get(topic)
            if description is not None or time.monotonic() > deadline:
                return description
            time.sleep(0.1)

    def _create(self, topic: str, topics: Mapping[str, Any], partitions: int) -> None:
        """Make the topic or let it grow; another rank 0 may be doing the same."""
        known = topics.get(topic)
        if known is None:
            # Replication factor -1: the cluster's own default.
            new = ck_admin.NewTopic(topic, partitions, -1, config=TOPIC_SETTINGS)
            answers = self._ask(f"create topic {topic}", lambda admin: admin.create_topics([new]))
            tolerated = ck.KafkaError.TOPIC_ALREADY_EXISTS
        elif len(known.partitions) < partitions:
            grown = ck_admin.NewPartitions(topic, partitions)
            answers = self._ask(f"add partitions to {topic}", lambda admin: admin.create_partitions([grown]))
            tolerated = ck.KafkaError.INVALID_PARTITIONS
        else:
            return
        self._check_created(f"create topic {topic} with {partitions} partitions", answers, tolerated)

    def _check_created(self, doing: str, answers: Mapping[Any, Any], tolerated: int) -> None:
        for answer in answers.values():
            if isinstance(answer, ck.KafkaError) and answer.code() != tolerated:
                raise self._unavailable(doing, answer)

    def _settings(self, topic: str) -> Any:
        """The topic's settings; waits for a broker that has not heard of a new topic yet."""
        resource = ck_admin.ConfigResource(ck_admin.ConfigResource.Type.TOPIC, topic)
        deadline = time.monotonic() + PROPAGATION_S
        while True:
            answers = self._ask("read the topic's settings", lambda admin: admin.describe_configs([resource]))
            (answer,) = answers.values()
            if not isinstance(answer, ck.KafkaError):
                return answer
            if answer.code() != ck.KafkaError.UNKNOWN_TOPIC_OR_PART or time.monotonic() > deadline:
                raise self._unavailable(f"read the settings of topic {topic}", answer)
            time.sleep(0.1)

    def _check_settings(self, topic: str) -> None:
        answer = self._settings(topic)
        for name, wanted in TOPIC_SETTINGS.items():
            if answer[name].value != wanted:
                raise ConfigError(
                    f"topic '{topic}' has {name}={answer[name].value}, which would lose rows: it must be {wanted}",
                    hint=alter_command(topic, f"{name}={wanted}"),
                )
        if int(answer["max.message.bytes"].value) < LEAST_MESSAGE_BYTES:
            raise ConfigError(
                f"topic '{topic}' has max.message.bytes={answer['max.message.bytes'].value}: a frame does not fit",
                hint="set it to 1048588, Kafka's default",
            )

    def _await_partitions(self, partitions: int) -> Incarnation:
        """Creation is acknowledged before every broker knows of it."""
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        while True:
            now = self.incarnation()
            if now is not None and now.partitions >= partitions:
                return now
            if time.monotonic() > deadline:
                seen = now.partitions if now else 0
                raise LogUnavailableError(
                    f"topic '{self._uri.data_topic}' shows {seen} of {partitions} partitions after creation",
                    hint="look at the brokers' log, then try again",
                )
            time.sleep(0.05)

    def _watermarks(self, topic: str, partition: int, wanted: int = 0) -> _Edge:
        """Both ends; where the partition is said to end before ``wanted``, as the newest leader knows them."""
        self._require(topic, partition, "read", CorruptionError)
        edges = self._edges_of(topic, [partition])
        return (self._newest_edges(topic, edges) if edges[partition].high < wanted else edges)[partition]

    # Reading.

    def _read(self, topic: str, partition: int, begin: int, end: int | None) -> Iterator[tuple[int, bytes]]:
        low, high, _ = self._watermarks(topic, partition, max(begin, end or 0))
        end = high if end is None else end
        if begin < low or max(begin, end) > high:
            raise self._not_there(topic, partition, (low, high), (begin, end))
        return self._records(topic, partition, begin, end)

    @staticmethod
    def _not_there(topic: str, partition: int, there: tuple[int, int], asked: tuple[int, int]) -> CorruptionError:
        return CorruptionError(
            f"the log has offsets [{there[0]}, {there[1]}), not [{asked[0]}, {asked[1]}): "
            "a retention ate them, or the topic was deleted and made again",
            hint=_DESTROYED_HINT,
            topic=topic,
            partition=partition,
        )

    def _records(self, topic: str, partition: int, begin: int, end: int) -> Iterator[tuple[int, bytes]]:
        """All records in [begin, end). A client that a broker kept waiting is followed by one that knows the leader."""
        several = "," in self._uri.brokers
        try:
            idle_s = ANSWER_TIMEOUT_S if several else READ_IDLE_TIMEOUT_S
            for offset, record in self._read_on(topic, partition, begin, end, idle_s):
                begin = offset + 1
                yield offset, record
        except LogUnavailableError:
            if not several:
                raise
        else:
            return
        self._look_around(topic, [partition])
        yield from self._read_on(topic, partition, begin, end, READ_IDLE_TIMEOUT_S)

    def _read_on(self, topic: str, partition: int, begin: int, end: int, idle_s: float) -> Iterator[tuple[int, bytes]]:
        """Records in [begin, end); offsets may have gaps, so the position decides, not a count."""
        if begin >= end:
            return
        reasons = Reasons(self._options)
        consumer = _client(ck.Consumer, consumer_settings(self._asked, self._options), reasons)
        try:
            consumer.assign([ck.TopicPartition(topic, partition, begin)])
            position, heard = begin, time.monotonic()
            while position < end:
                batch = self._consume(consumer, min(_BATCH_FRAMES, end - position), reasons, topic)
                if batch:
                    heard = time.monotonic()
                elif reasons.hopeless() or time.monotonic() - heard > idle_s:
                    raise reasons.unavailable(self._uri, f"read {topic}/{partition}", "no answer")
                for message in batch:
                    if message.error() is not None:
                        # The end of the partition, as far as the broker has it.
                        position = max(position, message.offset())
                        continue
                    if message.offset() >= end:
                        return
                    position = message.offset() + 1
                    yield message.offset(), _value(message)
        finally:
            consumer.close()

    def _frames_at(self, offsets: Mapping[int, int]) -> dict[int, bytes | None]:
        """The record at one offset of each data partition; None where the partition ends before, or has a gap."""
        try:
            return self._fetch_at(offsets)
        except LogUnavailableError:
            if "," not in self._uri.brokers:
                raise
        self._look_around(self._uri.data_topic, offsets)
        return self._fetch_at(offsets)

    def _fetch_at(self, offsets: Mapping[int, int]) -> dict[int, bytes | None]:
        topic, reasons, found = self._uri.data_topic, Reasons(self._options), dict[int, bytes | None]()
        consumer = _client(ck.Consumer, consumer_settings(self._asked, self._options), reasons)
        try:
            consumer.assign([ck.TopicPartition(topic, partition, offset) for partition, offset in offsets.items()])
            deadline = time.monotonic() + ANSWER_TIMEOUT_S
            while len(found) < len(offsets):
                if reasons.hopeless() or time.monotonic() > deadline:
                    raise reasons.unavailable(self._uri, f"read {topic}", "no answer")
                for message in self._consume(consumer, _BATCH_FRAMES, reasons, topic):
                    there = message.error() is None and message.offset() == offsets[message.partition()]
                    found.setdefault(message.partition(), _value(message) if there else None)
            return found
        finally:
            consumer.close()

    def _consume(self, consumer: Any, count: int, reasons: Reasons, topic: str) -> list[Any]:
        """Records and ends of the partition; anything else is raised."""
        doing = f"read {topic}"
        with _surfacing(reasons, self._uri, doing):
            batch = consumer.consume(count, timeout=0.2)
        # The client looks for the group that it was made to name. Nothing is asked of it, so no right to it is needed.
        batch = [each for each in batch if not _is(each.error(), ck.KafkaError.GROUP_AUTHORIZATION_FAILED)]
        for message in batch:
            error = message.error()
            if error is None or error.code() == ck.KafkaError._PARTITION_EOF:
                continue
            if error.code() in (ck.KafkaError._AUTO_OFFSET_RESET, ck.KafkaError.OFFSET_OUT_OF_RANGE):
                raise self._out_of_range(topic, message.partition(), message.offset())
            if error.code() in (ck.KafkaError.UNKNOWN_TOPIC_OR_PART, ck.KafkaError._UNKNOWN_PARTITION):
                raise CorruptionError(f"topic '{topic}' was deleted while it was read", hint=_DESTROYED_HINT)
            raise reasons.unavailable(self._uri, doing, _plain(error))
        return batch

    def _out_of_range(self, topic: str, partition: int, offset: int) -> CorruptionError | LogUnavailableError:
        """Why a broker has no record at ``offset``: it is gone, or this broker has not been given it."""
        edge = self._newest_edges(topic, self._edges_of(topic, [partition]))[partition]
        if edge.low <= offset <= edge.high:
            return LogUnavailableError(
                f"a broker has answered that knows less of {topic}[{partition}] than its leader: it has nothing at "
                f"offset {offset}, the partition has [{edge.low}, {edge.high})",
                hint="see whether a broker is cut off from the others; then try again",
            )
        # Of the control topic, whoever appends snapshots may delete the front: its readers begin anew.
        kind = PrunedError if topic == self._uri.control_topic else CorruptionError
        return kind(f"topic '{topic}' lost offsets while it was read", hint=_DESTROYED_HINT, offset=offset)


class KafkaWriter:
    """One rank's end of a data partition; see :class:`DataWriter`."""

    def __init__(self, sender: _Sender) -> None:
        self._sender = sender

    def send(self, frame: memoryview) -> None:
        with _telling_lost():
            # The client takes an array, not a memoryview; it copies the bytes into its own queue.
            self._sender.send(np.frombuffer(frame, np.uint8))

    def poll(self, timeout_s: float) -> list[Ack]:
        with _telling_lost():
            return self._acks(timeout_s)

    def _acks(self, timeout_s: float) -> list[Ack]:
        acks: list[Ack] = []
        for error, offset in self._sender.reports(timeout_s):
            if error is not None or offset < 0:
                # A duplicate that the broker no longer remembers has no offset: it is sent again.
                failure = self._sender.failed("write", error or "a frame was acknowledged without its offset")
                if not acks:
                    raise failure
                # What came before is durable; the next call raises.
                break
            acks.append(Ack(offset, offset + 1))
        return acks

    def waits_for(self) -> str:
        return self._sender.waits_for()

    def close(self) -> None:
        self._sender.close()


@contextmanager
def _telling_lost() -> Iterator[None]:
    """An idempotent producer that its broker has forgotten may have lost what was acknowledged."""
    try:
        yield
    except LogUnavailableError as error:
        if any(name in error.message for name in _FORGOTTEN):
            raise StreamLostError(
                f"the broker has lost what it knew of this stream, and may have lost its tail: {error.message}",
                hint=_LOST_HINT,
            ) from None
        raise


class _Sender:
    """An idempotent producer of one partition. One thread at a time; an error is final."""

    def __init__(
        self, uri: KafkaUri, topic: str, partition: int, settings: Mapping[str, Any], reasons: Reasons
    ) -> None:
        self._uri = uri
        self._topic = topic
        self._partition = partition
        self._reasons = reasons
        # (number of the record, error or None, offset); the callback does nothing but append.
        self._done: deque[tuple[int, Any, int]] = deque()
        self._sent = 0
        self._reported = 0
        self._failure: LogUnavailableError | None = None
        self._statistics = ""
        """What the client last said of itself: without asking anybody, who leads the partition."""
        telling = {"statistics.interval.ms": _STATISTICS_MS, "stats_cb": self._note}
        self._producer = _client(ck.Producer, {**settings, **telling}, reasons)

    def send(self, value: Any) -> None:
        """Queue one record.

        Raises:
            LogUnavailableError: it was not taken.
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
                        raise self.failed("write", "the client's queue stays full") from None
                    self._producer.poll(0.05)
        self._sent += 1

    def reports(self, timeout_s: float) -> list[tuple[Any, int]]:
        """(error, offset) of what was delivered or given up, in the order of ``send``."""
        with self._guard():
            self._producer.poll(0 if self._done else timeout_s)
        reports = []
        while self._done:
            number, error, offset = self._done.popleft()
            if number != self._reported:
                raise self.failed("write", f"report {number} came instead of {self._reported}")
            self._reported += 1
            reports.append((error, offset))
        return reports

    def failed(self, doing: str, error: Any) -> LogUnavailableError:
        """The error of this sender, from now on."""
        self._failure = self._reasons.unavailable(self._uri, f"{doing} {self._topic}/{self._partition}", _plain(error))
        return self._failure

    def reason(self) -> LogUnavailableError:
        """Why there is no answer, without ending this sender."""
        return self._reasons.unavailable(self._uri, f"write {self._topic}/{self._partition}", "no answer")

    def waits_for(self) -> str:
        """The broker that leads the partition, as the client knows it, and whether it can be reached."""
        leader = leader_in(self._statistics, self._topic, self._partition)
        if leader is None:
            return f"a leader of {self._topic}[{self._partition}], of the brokers {self._uri.brokers}"
        reached, said = knock(leader.place)
        return f"{leader}, the leader of {self._topic}[{self._partition}] ({said}{self._copies() if reached else ''})"

    def _copies(self) -> str:
        try:
            found = self._producer.list_topics(self._topic, _COPIES_S).topics[self._topic].partitions[self._partition]
        except (*_CLIENT_ERRORS, KeyError):
            return ""
        return f"; {len(found.isrs)} of {len(found.replicas)} copies are in sync"

    def close(self) -> None:
        """Drop what is queued; what is on the wire may still arrive."""
        try:
            self._producer.purge(blocking=False)
            self._producer.poll(0)
        except _CLIENT_ERRORS:
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
            with _surfacing(self._reasons, self._uri, f"write {self._topic}/{self._partition}"):
                yield
        except LogUnavailableError as error:
            self._failure = error
            raise


def _append(sender: _Sender, record: bytes) -> int:
    """Send one control record and wait for its offset."""
    sender.send(record)
    # The client gives up after CONTROL_TIMEOUT_S; beyond that it is the client itself that hangs.
    deadline = time.monotonic() + CONTROL_TIMEOUT_S + 5
    while time.monotonic() < deadline:
        try:
            reports = sender.reports(0.2)
        except LogUnavailableError as failure:
            raise _unknown(failure.message) from None
        for error, offset in reports:
            if error is not None and error.name() in _REFUSED:
                raise sender.failed("write", error)
            if error is not None:
                raise _unknown(f"{sender.reason().message}; {_plain(error)}")
            if offset < 0:
                raise _unknown("the broker knows the record already, but not its offset")
            return offset
    raise _unknown(sender.reason().message)


def _unknown(reason: str) -> CommitUnknownError:
    return CommitUnknownError(
        f"nobody knows whether the control record arrived: {reason}", hint="read the control topic once Kafka answers"
    )


def _client(kind: Callable[[dict[str, Any]], Any], settings: Mapping[str, Any], reasons: Reasons) -> Any:
    """Make a client whose complaints go to ``reasons`` and to logging, not to stderr.

    Raises:
        ConfigError: an option is unknown or has a bad value.
    """
    try:
        return kind({**settings, "error_cb": reasons.note, "logger": reasons})
    except (ck.KafkaException, TypeError, ValueError) as error:
        text = reasons.redact(_plain(error))
        hint = "see librdkafka's CONFIGURATION.md for the names"
        if "ssl." in text:
            hint = "check that file, and its password if it has one"
        raise ConfigError(f"Kafka client options: {text}", hint=hint) from None


@contextmanager
def _surfacing(reasons: Reasons, uri: KafkaUri, doing: str) -> Iterator[None]:
    """Turn what the client raises into our error."""
    try:
        yield
    except _CLIENT_ERRORS as error:
        if isinstance(error, SystemError) and not isinstance(error.__cause__, ck.KafkaException):
            raise
        raise reasons.unavailable(uri, doing, _plain(error.__cause__ or error)) from None


def _outcome(future: Future[Any]) -> Any:
    """Result of an admin call, or its KafkaError."""
    try:
        return future.result()
    except ck.KafkaException as error:
        return error.args[0]


def _is(error: Any, code: int) -> bool:
    return error is not None and bool(error.code() == code)


def _plain(error: Any) -> str:
    """A client error as words."""
    if isinstance(error, ck.KafkaException):
        error = error.args[0]
    return f"{error.str()} ({error.name()})" if isinstance(error, ck.KafkaError) else str(error)


def _has_checksum(record: bytes | None, header_crc: int) -> bool:
    try:
        return record is not None and parse_header(record).header_crc == header_crc
    except CorruptionError:
        return False


def _value(message: Any) -> bytes:
    """A record's bytes; none for one without a value, which no frame is."""
    value = message.value()
    return value if isinstance(value, bytes) else b""
