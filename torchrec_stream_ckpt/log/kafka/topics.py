"""The two topics of a log: creation, required settings, and permissions that a trainer needs."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import confluent_kafka as ck
import confluent_kafka.admin as ck_admin

from torchrec_stream_ckpt.errors import ConfigError, LogUnavailableError
from torchrec_stream_ckpt.log.api import Finding, Incarnation, Severity
from torchrec_stream_ckpt.log.kafka.brokers import ANSWER_TIMEOUT_S, PROPAGATION_S, Brokers
from torchrec_stream_ckpt.log.kafka.client import plain
from torchrec_stream_ckpt.log.kafka.clocks import compare_clocks
from torchrec_stream_ckpt.log.kafka.health import (
    BROKER_DEFAULTS,
    NEEDED_RIGHTS,
    Ahead,
    TimeBounds,
    acl_command,
    demands,
    examine_new_topics,
    examine_topic,
)
from torchrec_stream_ckpt.log.kafka.settings import NEW_TOPIC_SETTINGS, alter_command, cluster_arguments


def incarnation(brokers: Brokers) -> Incarnation | None:
    """Return the ids of both topics. Returns None unless both exist."""
    topics = brokers.describe()
    data, control = topics.get(brokers.uri.data_topic), topics.get(brokers.uri.control_topic)
    if data is None or control is None:
        return None
    return Incarnation(f"{data.topic_id}+{control.topic_id}", len(data.partitions))


def prepare(brokers: Brokers, partitions: int) -> Incarnation:
    """Create the topics or add partitions. Refuses topics whose settings would lose rows or refuse records.

    Raises:
        ConfigError: a topic has a retention, is compacted, or does not accept a whole frame, or one with the time of
            this host's clock; the error names all such settings of the topic.
        LogUnavailableError: the brokers do not answer, or do not permit it.
    """
    preflight(brokers)
    topics, uri = brokers.describe(), brokers.uri
    _create(brokers, uri.data_topic, topics, partitions)
    _create(brokers, uri.control_topic, topics, 1)
    control = topics.get(uri.control_topic)
    if control is not None and len(control.partitions) != 1:
        raise ConfigError(
            f"the control topic must have one partition, but has {len(control.partitions)}",
            hint="name another job in the URI: its topics are created with the right number of partitions",
            topic=uri.control_topic,
        )
    prepared = _await_partitions(brokers, partitions)
    for topic in _look(brokers, brokers.describe()):
        _check_settings(topic, _cluster(brokers))
    return prepared


def preflight(brokers: Brokers) -> None:
    """Check that this user has a trainer's permissions. Creates nothing.

    Raises:
        LogUnavailableError: the brokers do not answer, or a permission is missing; the error says why, or which.
    """
    topics = brokers.describe(rights=True)
    for name, description in topics.items():
        _check_rights(brokers, name, description, NEEDED_RIGHTS)
    for name in {brokers.uri.data_topic, brokers.uri.control_topic} - topics.keys():
        _try_creating(brokers, name)


def check_right(brokers: Brokers, topic: str, right: str) -> None:
    """Check that this user may do one operation on an existing topic.

    Raises:
        LogUnavailableError: the permission is missing, or the brokers do not answer.
    """
    _check_rights(brokers, topic, brokers.describe(rights=True)[topic], {right})


def examine(brokers: Brokers) -> Iterator[Finding]:
    """Yield findings about the brokers, both topics, and this user's permissions."""
    (cluster,) = brokers.ask("describe the cluster", lambda admin: {"": admin.describe_cluster()}).values()
    yield Finding("brokers", f"{len(cluster.nodes)} in cluster {cluster.cluster_id}")
    topics = brokers.describe(rights=True)
    if new := [name for name in (brokers.uri.data_topic, brokers.uri.control_topic) if name not in topics]:
        yield from _examine_new(brokers, new, cluster.nodes[0].id)
    for topic in _look(brokers, topics):
        rights = {each.name for each in topics[topic.name].authorized_operations or ()}
        user = brokers.options.get("sasl.username")
        cluster = _cluster(brokers)
        yield from examine_topic(
            topic.name, topic.settings, topic.replicas, rights, topic.ahead, cluster=cluster, user=user
        )


def _examine_new(brokers: Brokers, names: Sequence[str], broker: int) -> Iterator[Finding]:
    """Yield findings about topics that do not exist: whether this user may create them, and their settings then."""
    said = ", ".join(f"{name}={value}" for name, value in NEW_TOPIC_SETTINGS.items())
    for name in names:
        check = f"{name}: creation"
        try:
            _try_creating(brokers, name)
            yield Finding(check, f"allowed, with {said}")
        except LogUnavailableError as error:
            yield Finding(check, error.headline, Severity.BAD, error.hint)
    resource = ck_admin.ConfigResource(ck_admin.ConfigResource.Type.BROKER, str(broker))
    (answer,) = brokers.ask("read the brokers' settings", lambda admin: admin.describe_configs([resource])).values()
    if isinstance(answer, ck.KafkaError):
        yield Finding(
            "new topics: settings", f"unknown, because the brokers do not show their defaults: {plain(answer)}"
        )
        return
    settings = {topic: answer[default].value for topic, default in BROKER_DEFAULTS.items()} | NEW_TOPIC_SETTINGS
    yield from examine_new_topics(settings, int(answer["default.replication.factor"].value))


def _check_rights(brokers: Brokers, topic: str, description: Any, needed: Collection[str]) -> None:
    granted = {operation.name for operation in description.authorized_operations or ()}
    missing = sorted(set(needed) - granted) if granted and "ALL" not in granted else []
    if missing:
        user = brokers.options.get("sasl.username")
        who = f"user '{user}'" if user else "this client"
        raise LogUnavailableError(
            f"Kafka at {brokers.uri.brokers}: {who} has no right to {', '.join(missing)} topic '{topic}'",
            hint=acl_command(_cluster(brokers), user, topic, missing),
        )


def _try_creating(brokers: Brokers, topic: str) -> None:
    new = ck_admin.NewTopic(topic, 1, -1, config=NEW_TOPIC_SETTINGS)
    doing = f"create topic {topic}"
    answers = brokers.ask(doing, lambda admin: admin.create_topics([new], validate_only=True))
    _check_created(brokers, doing, answers, ck.KafkaError.TOPIC_ALREADY_EXISTS)


def _create(brokers: Brokers, topic: str, topics: Mapping[str, Any], partitions: int) -> None:
    """Create the topic or add partitions. Another rank 0 may be doing the same."""
    known = topics.get(topic)
    if known is None:
        # Replication factor -1: the cluster's own default.
        new = ck_admin.NewTopic(topic, partitions, -1, config=NEW_TOPIC_SETTINGS)
        answers = brokers.ask(f"create topic {topic}", lambda admin: admin.create_topics([new]))
        tolerated = ck.KafkaError.TOPIC_ALREADY_EXISTS
    elif len(known.partitions) < partitions:
        grown = ck_admin.NewPartitions(topic, partitions)
        answers = brokers.ask(f"add partitions to {topic}", lambda admin: admin.create_partitions([grown]))
        tolerated = ck.KafkaError.INVALID_PARTITIONS
    else:
        return
    _check_created(brokers, f"create topic {topic} with {partitions} partitions", answers, tolerated)


def _check_created(brokers: Brokers, doing: str, answers: Mapping[Any, Any], tolerated: int) -> None:
    for answer in answers.values():
        if isinstance(answer, ck.KafkaError) and answer.code() != tolerated:
            raise brokers.unavailable(doing, answer)


def _await_partitions(brokers: Brokers, partitions: int) -> Incarnation:
    """Wait until the brokers report all partitions. Creation is acknowledged before every broker knows of it."""
    deadline = time.monotonic() + ANSWER_TIMEOUT_S
    while True:
        now = incarnation(brokers)
        if now is not None and now.partitions >= partitions:
            return now
        if time.monotonic() > deadline:
            seen = now.partitions if now else 0
            raise LogUnavailableError(
                f"topic '{brokers.uri.data_topic}' shows {seen} of {partitions} partitions after creation",
                hint="check the brokers' logs, then try again",
            )
        time.sleep(0.05)


class _Topic(NamedTuple):
    """A topic as it is now."""

    name: str
    settings: dict[str, str]
    replicas: list[tuple[int, int]]
    """(replicas, those in sync) of each partition."""
    ahead: list[Ahead]
    """Differences between this host's clock and the brokers', as far as they are known."""


def _look(brokers: Brokers, topics: Mapping[str, Any]) -> list[_Topic]:
    """Read the settings of the topics that exist, and compare the clocks if a topic bounds the times of records."""
    data = brokers.uri.data_topic
    names = sorted(topics, key=lambda name: name != data)
    settings = {name: _settings(brokers, name) for name in names}
    bounds = [TimeBounds.of(settings[name]) for name in names]
    ahead = compare_clocks(brokers, topics[data], bounds) if data in topics else []
    return [
        _Topic(name, settings[name], [(len(each.replicas), len(each.isr)) for each in topics[name].partitions], ahead)
        for name in names
    ]


def _settings(brokers: Brokers, topic: str) -> dict[str, str]:
    """Return the topic's settings. Waits for a broker that does not know a new topic yet."""
    resource = ck_admin.ConfigResource(ck_admin.ConfigResource.Type.TOPIC, topic)
    deadline = time.monotonic() + PROPAGATION_S
    while True:
        (answer,) = brokers.ask("read the topic's settings", lambda admin: admin.describe_configs([resource])).values()
        if not isinstance(answer, ck.KafkaError):
            return {name: entry.value for name, entry in answer.items()}
        if answer.code() != ck.KafkaError.UNKNOWN_TOPIC_OR_PART or time.monotonic() > deadline:
            raise brokers.unavailable(f"read the settings of topic {topic}", answer)
        time.sleep(0.1)


def _cluster(brokers: Brokers) -> str:
    return cluster_arguments(brokers.uri, brokers.options)


def _check_settings(topic: _Topic, cluster: str) -> None:
    copies = min(count for count, _ in topic.replicas)
    if bad := [each for each in demands(topic.settings, copies, topic.ahead) if not each.well]:
        raise ConfigError(
            f"topic '{topic.name}' has " + ", ".join(f"{each.setting}={each.found} ({each.why})" for each in bad),
            hint=alter_command(cluster, topic.name, ",".join(each.right for each in bad)),
        )
