"""Checks of the topic settings that safety depends on, from the brokers' answers. Imports no Kafka client."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torchrec_stream_ckpt.log.api import Finding, Severity
from torchrec_stream_ckpt.log.kafka.settings import LEAST_MESSAGE_BYTES, TOPIC_SETTINGS, alter_command

NEEDED_RIGHTS = frozenset({"READ", "WRITE", "DESCRIBE", "DESCRIBE_CONFIGS"})
"""Operations of a trainer on both topics of its job."""
TRIM_RIGHT = "DELETE"
"""Operation of a trim on the data topic, in addition to those of a reader. No trainer needs it."""
BROKER_DEFAULTS = {
    "max.message.bytes": "message.max.bytes",
    "segment.bytes": "log.segment.bytes",
    "min.insync.replicas": "min.insync.replicas",
    "unclean.leader.election.enable": "unclean.leader.election.enable",
}
"""Setting of a topic -> the broker's setting that is its default."""


@dataclass(frozen=True, slots=True)
class Demand:
    """A setting of a topic without which it would refuse or lose records of a job."""

    setting: str
    found: str
    well: bool
    why: str
    """Effect of the found value, if it is not well."""
    right: str
    """``NAME=VALUE`` to set."""


def demands(settings: Mapping[str, str], copies: int) -> Iterator[Demand]:
    """Yield what a job demands of a topic.

    Args:
        settings: Effective settings of the topic.
        copies: Least number of replicas of a partition.
    """
    for name, (wanted, why) in TOPIC_SETTINGS.items():
        yield Demand(name, settings[name], settings[name] == wanted, why, f"{name}={wanted}")
    for name, usual in (("max.message.bytes", 1048588), ("segment.bytes", 1073741824)):
        value = settings.get(name, str(usual))
        yield Demand(name, value, int(value) >= LEAST_MESSAGE_BYTES, "too small for a frame", f"{name}={usual}")
    least = settings["min.insync.replicas"]
    if int(least) > copies:
        why = f"the topic has {copies} copies, so its brokers accept nothing"
        yield Demand("min.insync.replicas", least, False, why, f"min.insync.replicas={copies}")


def examine_topic(
    topic: str,
    settings: Mapping[str, str],
    replicas: Sequence[tuple[int, int]],
    rights: set[str],
    *,
    cluster: str,
    user: str | None = None,
) -> Iterator[Finding]:
    """Yield findings about one topic.

    Args:
        topic: Its name.
        settings: Its effective settings.
        replicas: (replicas, those in sync) of each partition.
        rights: Names of the operations that this user may do. Empty if the brokers do not report them.
        cluster: Arguments by which Kafka's tools reach the brokers, for the commands that mend.
        user: Login of this client, for the command that grants a missing right.
    """
    yield from _settings(topic, settings, replicas, cluster)
    missing = sorted(NEEDED_RIGHTS - rights - {"ALL"}) if rights and "ALL" not in rights else []
    yield Finding.of(
        f"{topic}: rights",
        f"{', '.join(missing)} not allowed" if missing else "has all permissions that a trainer needs",
        well=not missing,
        hint=acl_command(cluster, user, topic, missing),
        otherwise=Severity.BAD,
    )


def examine_new_topics(settings: Mapping[str, str], copies: int) -> Iterator[Finding]:
    """Yield findings about what the brokers' defaults give to topics that a job creates.

    Args:
        settings: Settings that the topics would have.
        copies: Number of replicas that they would have.
    """
    what = "new topics"
    defaults = {"replication": "default.replication.factor", **BROKER_DEFAULTS}
    for each in _settings(what, settings, [(copies, copies)], ""):
        default = defaults.get(each.check.removeprefix(f"{what}: "))
        if default is not None:
            hint = f"change {default} of the brokers, or create both topics with another value before the job begins"
            yield replace(each, hint=hint if each.hint else "")


def _settings(
    topic: str, settings: Mapping[str, str], replicas: Sequence[tuple[int, int]], cluster: str
) -> Iterator[Finding]:
    yield from _copies(topic, settings, replicas, cluster)
    for each in demands(settings, min(count for count, _ in replicas)):
        yield Finding.of(
            f"{topic}: {each.setting}",
            each.found,
            well=each.well,
            hint=f"{alter_command(cluster, topic, each.right)} ({each.why})",
            otherwise=Severity.BAD,
        )


def _copies(
    topic: str, settings: Mapping[str, str], replicas: Sequence[tuple[int, int]], cluster: str
) -> Iterator[Finding]:
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
    if least <= factor:
        yield Finding.of(
            f"{topic}: min.insync.replicas",
            str(least),
            well=least >= 2 or factor < 3,
            hint=alter_command(cluster, topic, "min.insync.replicas=2"),
        )
    unclean = settings["unclean.leader.election.enable"] == "true"
    yield Finding.of(
        f"{topic}: unclean.leader.election.enable",
        settings["unclean.leader.election.enable"],
        well=not unclean,
        hint=alter_command(cluster, topic, "unclean.leader.election.enable=false"),
        otherwise=Severity.BAD,
    )


def acl_command(cluster: str, user: str | None, topic: str, operations: Sequence[str]) -> str:
    """Return the command that grants a user permissions."""
    rights = " ".join(f"--operation {operation}" for operation in operations)
    return f"kafka-acls.sh {cluster} --add --allow-principal User:{user or 'NAME'} --topic {topic} {rights}"
