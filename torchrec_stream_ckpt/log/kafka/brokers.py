"""Queries to the brokers of a log: existing topics, ends of partitions, and leaders.

A broker that is cut off from the others still answers. So the answer of the newest leader counts.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, wait
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import confluent_kafka as ck
import confluent_kafka.admin as ck_admin

from torchrec_stream_ckpt.errors import CorruptionError, LogUnavailableError
from torchrec_stream_ckpt.log.kafka.client import make_client, outcome, plain
from torchrec_stream_ckpt.log.kafka.codes import Refusal, refusal_of
from torchrec_stream_ckpt.log.kafka.probe import find_cause, knock
from torchrec_stream_ckpt.log.kafka.reasons import DESTROYED_HINT, Reasons
from torchrec_stream_ckpt.log.kafka.settings import admin_settings
from torchrec_stream_ckpt.util.uris import KafkaUri

ANSWER_TIMEOUT_S = 7.0
_AGAIN_AFTER_S = (2.0, 2.0)
"""Timeouts of the first clients in seconds, if there are several brokers."""
_EACH_TIMEOUT_S = 3.0
"""Timeout of each broker in seconds, if all of several are asked."""
PROBE_AFTER_S = 2.0
PROPAGATION_S = 3.0
_FRESH_S = 1.0
"""Time for which a partition that was there need not be looked up again before its ends are asked for."""


def _doing(topic: str) -> str:
    return f"find the ends of {topic}"


class Edge(NamedTuple):
    """Beginning and end of a partition, as its leader reports them."""

    low: int
    """First offset that still exists."""
    high: int
    """End of the durable records."""
    epoch: int
    """Epoch of the leader. A later leader has a higher one."""

    @classmethod
    def of(cls, low: Any, high: Any) -> Edge:
        return cls(int(low.offset), int(high.offset), int(-1 if high.leader_epoch is None else high.leader_epoch))


class Brokers:
    """Queries the brokers of one log. Can be used from any thread.

    Args:
        uri: Initially known brokers, and the job.
        options: Client settings of the user, security included.
        timeout_s: Timeout for an answer.
    """

    def __init__(self, uri: KafkaUri, options: Mapping[str, str], timeout_s: float | None = None) -> None:
        self.uri = uri
        self.options = dict(options)
        self.asked = uri
        """Brokers that new clients ask. If there are several: those that knew the newest leaders at the last check."""
        self.epochs: dict[tuple[str, int], int] = {}
        """Newest known leader epoch of each partition. Answers of older leaders do not count."""
        self._topic_ids: dict[str, str] = {}
        self._described: tuple[float, Mapping[str, Any]] = (-math.inf, {})
        """When the topics were last described, and how."""
        self._timeout_s = ANSWER_TIMEOUT_S if timeout_s is None else timeout_s
        self._asking = threading.Lock()
        self._admin: Any = None
        self._reasons = Reasons(self.options)

    def close(self) -> None:
        with self._asking:
            self._admin = None

    # Queries.

    def ask(self, doing: str, call: Callable[[Any], Mapping[Any, Future[Any]]]) -> dict[Any, Any]:
        """Run one admin call and wait for all of its answers, which may be KafkaErrors.

        A client asks the broker that it has chosen and no other. So if there are several brokers and one does not
        answer, another client asks again. Any call may therefore be made twice.

        Raises:
            LogUnavailableError: there is no answer; the error has the cause that the client logged meanwhile.
        """
        for timeout_s in _AGAIN_AFTER_S if "," in self.uri.brokers else ():
            if (answers := self._ask_once(doing, call, timeout_s)) is not None:
                return answers
        if (answers := self._ask_once(doing, call, self._timeout_s)) is not None:
            return answers
        said = f"no answer within {self._timeout_s:.0f} s{self._silent()}"
        raise self._reasons.unavailable(self.uri, doing, said)

    def _ask_once(
        self, doing: str, call: Callable[[Any], Mapping[Any, Future[Any]]], timeout_s: float
    ) -> dict[Any, Any] | None:
        """Return the answers. Returns None if the brokers do not answer in time."""
        with self._asking:
            admin, reasons = self._client(), self._reasons
            admin.poll(0)
            reasons.clear()
            futures = call(admin)
            begin, probed = time.monotonic(), False
            while wait(futures.values(), timeout=0.1).not_done:
                admin.poll(0)
                waited_s = time.monotonic() - begin
                if not probed and (reasons.hopeless() or (waited_s > PROBE_AFTER_S and not reasons.unreachable())):
                    probed, cause = True, find_cause(self.uri, self.options)
                    if cause is not None:
                        raise reasons.found(self.uri, doing, cause)
                if reasons.hopeless() or waited_s > timeout_s:
                    self._admin, self.asked = None, self.uri  # the next client may find a broker that answers
                    if reasons.hopeless():
                        raise reasons.unavailable(self.uri, doing, "no answer")
                    return None
            return {key: outcome(future) for key, future in futures.items()}

    def answers(self, doing: str, call: Callable[[Any], Mapping[Any, Future[Any]]]) -> dict[Any, Any]:
        """Return answers as :meth:`ask`, but raise an answer that is an error."""
        answers = self.ask(doing, call)
        for answer in answers.values():
            if isinstance(answer, ck.KafkaError):
                raise self.unavailable(doing, answer)
        return answers

    def _silent(self) -> str:
        """Return a phrase that lists the unreachable brokers. Empty if all answer, or there is only one broker."""
        brokers = self.uri.brokers.split(",")
        silent = [broker for broker in brokers if not knock(broker)[0]] if len(brokers) > 1 else []
        return f"; {', '.join(silent)} cannot be reached from here" if silent else ""

    def _client(self) -> Any:
        if self._admin is None:
            settings = admin_settings(self.asked, self.options)
            self._admin = make_client(ck_admin.AdminClient, settings, self._reasons)
        return self._admin

    def unavailable(self, doing: str, error: Any) -> LogUnavailableError:
        """Return the error to raise for a client's error."""
        return self._reasons.unavailable(self.uri, doing, plain(error))

    # Topics.

    def describe(self, *, rights: bool = False) -> dict[str, Any]:
        """Return descriptions of the topics that exist. With ``rights``, includes this user's permissions."""
        names = ck.TopicCollection([self.uri.data_topic, self.uri.control_topic])
        asked = partial(ck_admin.AdminClient.describe_topics, topics=names, include_authorized_operations=rights)
        answers = self.ask("find the job's topics", lambda admin: asked(admin))
        for name, answer in answers.items():
            if isinstance(answer, ck.KafkaError) and answer.code() != ck.KafkaError.UNKNOWN_TOPIC_OR_PART:
                raise self.unavailable(f"find topic {name}", answer)
        found = {name: answer for name, answer in answers.items() if not isinstance(answer, ck.KafkaError)}
        for name, description in found.items():
            made = str(description.topic_id)
            if self._topic_ids.setdefault(name, made) != made:  # recreated: its leader epochs start at 0 again
                self._topic_ids[name] = made
                self.epochs = {each: epoch for each, epoch in self.epochs.items() if each[0] != name}
        self._described = time.monotonic(), found
        return found

    def require(
        self, topic: str, partition: int, doing: str, error: type[CorruptionError | LogUnavailableError]
    ) -> None:
        """Raise ``error`` unless the partition exists. ``doing`` names the intended operation."""
        description = self._await_topic(topic)
        if description is None:
            raise error(f"cannot {doing} topic '{topic}': it does not exist", hint=DESTROYED_HINT)
        if partition not in {known.id for known in description.partitions}:
            raise error(f"cannot {doing} topic '{topic}': no such partition", hint=DESTROYED_HINT, partition=partition)

    def _await_topic(self, topic: str) -> Any:
        """Return the topic's description. Returns None if the broker does not know the topic within a short wait."""
        deadline = time.monotonic() + PROPAGATION_S
        while True:
            description = self.describe().get(topic)
            if description is not None or time.monotonic() > deadline:
                return description
            time.sleep(0.1)

    def _was_there(self, topic: str, partition: int) -> bool:
        """Return whether the partition existed a moment ago."""
        when, topics = self._described
        known = topics[topic].partitions if topic in topics and time.monotonic() - when < _FRESH_S else ()
        return any(each.id == partition for each in known)

    # Ends of partitions.

    def edges(self, topic: str, partitions: Collection[int]) -> dict[int, Edge]:
        """Return both ends of partitions of a topic, all queried at once.

        Raises:
            LogUnavailableError: a leader does not answer, or only an outdated leader does.
        """
        found = self._edges(topic, partitions)
        if isinstance(found, ck.KafkaError):
            raise self.unavailable(_doing(topic), found)
        return found

    def _edges(self, topic: str, partitions: Collection[int]) -> dict[int, Edge] | Any:
        """Return :meth:`edges`, or the KafkaError that a broker has answered."""
        doing, deadline = _doing(topic), time.monotonic() + self._timeout_s

        def ask(admin: Any) -> dict[Any, Any]:
            questions: dict[Any, Any] = {}
            for end, spec in (("low", ck_admin.OffsetSpec.earliest()), ("high", ck_admin.OffsetSpec.latest())):
                asked = admin.list_offsets({ck.TopicPartition(topic, partition): spec for partition in partitions})
                questions |= {(end, place.partition): future for place, future in asked.items()}
            return questions

        while partitions:
            answers = self.ask(doing, ask)
            error = next((answer for answer in answers.values() if isinstance(answer, ck.KafkaError)), None)
            if error is None:
                edges = {each: Edge.of(answers["low", each], answers["high", each]) for each in partitions}
                if self._are_of_the_newest(topic, edges):
                    return edges
                self._ask_others(doing, deadline)
            elif refusal_of(error.name()) is Refusal.RETRIABLE and time.monotonic() < deadline:
                time.sleep(0.1)
                self.describe()  # otherwise the client keeps asking the leader that it knows
            else:
                return error
        return {}

    def _ask_others(self, doing: str, deadline: float) -> None:
        """Ask another broker next time, because the one that answered does not know the newest leader."""
        if time.monotonic() > deadline:
            raise LogUnavailableError(
                f"Kafka at {self.uri.brokers}: cannot {doing}: the broker that answers does not know the newest leader",
                hint="check whether that broker is cut off from the others; then try again",
            )
        time.sleep(0.1)
        with self._asking:
            self._admin = None

    def edge(self, topic: str, partition: int, wanted: int = 0) -> Edge:
        """Return both ends. If the partition seems to end before ``wanted``, asks the newest leader."""
        if not self._was_there(topic, partition):
            self.require(topic, partition, "read", CorruptionError)
        edges = self._edges(topic, [partition])
        if isinstance(edges, ck.KafkaError):
            self.require(topic, partition, "read", CorruptionError)  # it may have been deleted since
            raise self.unavailable(_doing(topic), edges)
        return (self.newest_edges(topic, edges) if edges[partition].high < wanted else edges)[partition]

    def look_around(self, topic: str, partitions: Collection[int]) -> None:
        """Let new clients ask those brokers that know the current leaders of these partitions, if there are several."""
        if "," in self.uri.brokers:
            self.newest_edges(topic, dict.fromkeys(partitions, Edge(0, 0, -1)))

    def newest_edges(self, topic: str, edges: Mapping[int, Edge]) -> dict[int, Edge]:
        """Return edges after asking each broker that the URI names. The answer of the newest leader counts.

        A leader that is cut off from its peers does not know that another leader has replaced it. A client that knows
        it, or a new one that finds it first, keeps asking it. Records that it lacks are not lost.
        """
        found: dict[str, dict[int, Edge]] = {}
        for broker in self.uri.brokers.split(","):
            if not knock(broker)[0]:
                continue
            other = Brokers(replace(self.uri, brokers=broker), self.options, _EACH_TIMEOUT_S)
            with closing(other), suppress(LogUnavailableError):
                found[broker] = other.edges(topic, edges)
        newest = {
            each: max((edge, *(of[each] for of in found.values())), key=lambda edge: edge.epoch)
            for each, edge in edges.items()
        }
        knowing = [
            broker for broker, of in found.items() if all(of[each].epoch == newest[each].epoch for each in newest)
        ]
        with self._asking:
            self.asked = replace(self.uri, brokers=",".join(knowing)) if knowing else self.uri
            self._admin = None
        self._are_of_the_newest(topic, newest)
        return newest

    def _are_of_the_newest(self, topic: str, edges: Mapping[int, Edge]) -> bool:
        """Return whether these edges are from the newest leaders known so far."""
        for partition, edge in edges.items():
            newest = self.epochs.get((topic, partition), edge.epoch)
            if edge.epoch < newest:
                return False
            self.epochs[topic, partition] = edge.epoch
        return True
