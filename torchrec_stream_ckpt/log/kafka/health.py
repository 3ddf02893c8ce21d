"""Checks of the topic settings that safety depends on, from the brokers' answers. Imports no Kafka client."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torchrec_stream_ckpt.log.api import Finding, Severity
from torchrec_stream_ckpt.log.kafka.settings import LEAST_MESSAGE_BYTES, TOPIC_SETTINGS, alter_command

NEEDED_RIGHTS = frozenset({"READ", "WRITE", "DESCRIBE", "DESCRIBE_CONFIGS"})
"""Operations of a trainer on both topics of its job."""
TRIM_RIGHT = "DELETE"
"""Operation of a trim on the data topic, in addition to those of a reader. No trainer needs it."""


def examine_topic(
    topic: str, settings: Mapping[str, str], replicas: Sequence[tuple[int, int]], rights: set[str]
) -> Iterator[Finding]:
    """Yield findings about one topic.

    Args:
        topic: Its name.
        settings: Its effective settings.
        replicas: (replicas, those in sync) of each partition.
        rights: Names of the operations that this user may do. Empty if the brokers do not report them.
    """
    yield from _copies(topic, settings, replicas)
    yield from _retention(topic, settings)
    room = int(settings["max.message.bytes"])
    yield Finding.of(
        f"{topic}: max.message.bytes",
        str(room),
        well=room >= LEAST_MESSAGE_BYTES,
        hint=alter_command(topic, "max.message.bytes=1048588"),
        otherwise=Severity.BAD,
    )
    missing = sorted(NEEDED_RIGHTS - rights - {"ALL"}) if rights and "ALL" not in rights else []
    yield Finding.of(
        f"{topic}: rights",
        f"{', '.join(missing)} not allowed" if missing else "has all permissions that a trainer needs",
        well=not missing,
        hint=acl_command(None, topic, missing),
        otherwise=Severity.BAD,
    )


def _copies(topic: str, settings: Mapping[str, str], replicas: Sequence[tuple[int, int]]) -> Iterator[Finding]:
    factor = min(count for count, _ in replicas)
    yield Finding.of(
        f"{topic}: replication",
        f"{factor} copies",
        well=factor >= 3,
        hint="recreate the topic with 3 replicas, or add replicas with kafka-reassign-partitions.sh: otherwise "
        "losing one broker's disk loses the log",
    )
    behind = sum(1 for count, in_sync in replicas if in_sync < count)
    yield Finding.of(
        f"{topic}: in sync",
        f"{behind} of {len(replicas)} partitions are behind" if behind else "all partitions",
        well=not behind,
        hint="look at the brokers' logs: one is down or slow",
    )
    least = int(settings["min.insync.replicas"])
    yield Finding.of(
        f"{topic}: min.insync.replicas",
        str(least),
        well=least >= 2 or factor < 3,
        hint=alter_command(topic, "min.insync.replicas=2"),
    )
    unclean = settings["unclean.leader.election.enable"] == "true"
    yield Finding.of(
        f"{topic}: unclean.leader.election.enable",
        settings["unclean.leader.election.enable"],
        well=not unclean,
        hint=alter_command(topic, "unclean.leader.election.enable=false"),
        otherwise=Severity.BAD,
    )


def _retention(topic: str, settings: Mapping[str, str]) -> Iterator[Finding]:
    for name, wanted in TOPIC_SETTINGS.items():
        yield Finding.of(
            f"{topic}: {name}",
            settings[name],
            well=settings[name] == wanted,
            hint=alter_command(topic, f"{name}={wanted}") + " (it deletes rows that markers need)",
            otherwise=Severity.BAD,
        )


def acl_command(user: str | None, topic: str, operations: Sequence[str]) -> str:
    """Return the command that grants a user permissions."""
    rights = " ".join(f"--operation {operation}" for operation in operations)
    return f"kafka-acls.sh --add --allow-principal User:{user or 'NAME'} --topic {topic} {rights}"
