"""Checks of the topic settings that safety depends on, from the brokers' answers. Imports no Kafka client."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

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
TIME_MARGIN_S = 60.0
"""A broker has to accept records this much older or newer than our clock: clocks drift, and records wait."""
_UNBOUNDED_S = 10 * 365 * 86400.0


class Ahead(NamedTuple):
    """Difference between this host's clock and a broker's, in seconds. Negative if this clock is behind."""

    broker: int
    least_s: float
    most_s: float

    def __str__(self) -> str:
        if self.least_s >= -1 and self.most_s <= 1:
            return f"this host's clock is within 1 s of that of broker {self.broker}"
        near, far = sorted((abs(self.least_s), abs(self.most_s)))
        way = "ahead of" if self.least_s >= 0 else "behind"
        return f"this host's clock is {near:,.0f} to {far:,.0f} s {way} that of broker {self.broker}"


@dataclass(frozen=True, slots=True)
class TimeBounds:
    """Bounds of a topic on the difference between a record's time and the broker's clock. None: no bound."""

    ahead_s: float | None
    behind_s: float | None

    @classmethod
    def of(cls, settings: Mapping[str, str]) -> TimeBounds:
        """Return the bounds of a topic. If the broker stamps the records itself, there are none."""
        if settings.get("message.timestamp.type") == "LogAppendTime":
            return cls(None, None)
        both = settings.get("message.timestamp.difference.max.ms", "")  # before Kafka 3.6
        return cls(*(_bound_s(settings.get(f"message.timestamp.{side}.max.ms", both)) for side in ("after", "before")))

    @property
    def finite(self) -> bool:
        return self.ahead_s is not None or self.behind_s is not None

    @property
    def edges(self) -> list[float]:
        """Differences between this host's clock and the broker's from which on our records are too close to a bound."""
        found = [self.ahead_s - TIME_MARGIN_S] if self.ahead_s is not None else []
        return found + ([TIME_MARGIN_S - self.behind_s] if self.behind_s is not None else [])

    def refuse(self, ahead: Ahead) -> bool:
        """Return whether records with the time of our clock are out of bounds, or within the margin of them."""
        late = self.ahead_s is not None and ahead.least_s >= self.ahead_s - TIME_MARGIN_S
        return late or (self.behind_s is not None and ahead.most_s <= TIME_MARGIN_S - self.behind_s)

    def __str__(self) -> str:
        sides = ((self.ahead_s, "newer"), (self.behind_s, "older"))
        said = [f"{bound:,.{0 if bound >= 1 else 3}f} s {side}" for bound, side in sides if bound is not None]
        return f"the brokers refuse records over {' or '.join(said)} than their clocks" if said else ""


def _bound_s(setting: str) -> float | None:
    return bound if setting and (bound := int(setting) / 1000) < _UNBOUNDED_S else None


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


def demands(settings: Mapping[str, str], copies: int, ahead: Sequence[Ahead]) -> Iterator[Demand]:
    """Yield what a job demands of a topic.

    Args:
        settings: Effective settings of the topic.
        copies: Least number of replicas of a partition.
        ahead: Differences between this host's clock and the brokers', as far as they are known.
    """
    for name, wanted in TOPIC_SETTINGS.items():
        yield Demand(
            name, settings[name], settings[name] == wanted, "it deletes rows that markers need", f"{name}={wanted}"
        )
    for name, usual in (("max.message.bytes", 1048588), ("segment.bytes", 1073741824)):
        value = settings.get(name, str(usual))
        yield Demand(name, value, int(value) >= LEAST_MESSAGE_BYTES, "too small for a frame", f"{name}={usual}")
    least = settings["min.insync.replicas"]
    if int(least) > copies:
        why = f"the topic has {copies} copies, so its brokers accept nothing"
        yield Demand("min.insync.replicas", least, False, why, f"min.insync.replicas={copies}")
    kind, bounds = settings.get("message.timestamp.type", "CreateTime"), TimeBounds.of(settings)
    refusing = [each for each in ahead or [Ahead(-1, 0.0, 0.0)] if bounds.refuse(each)]
    said = "; ".join(map(str, ahead)) or "the clocks were not compared"
    why = f"{bounds}; {said}" if bounds.finite else ""
    found = f"{kind}; {why}" if why and not refusing else kind
    yield Demand("message.timestamp.type", found, not refusing, why, "message.timestamp.type=LogAppendTime")


def examine_topic(
    topic: str,
    settings: Mapping[str, str],
    replicas: Sequence[tuple[int, int]],
    rights: set[str],
    ahead: Sequence[Ahead] = (),
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
        ahead: Differences between this host's clock and the brokers', as far as they are known.
        cluster: Arguments by which Kafka's tools reach the brokers, for the commands that mend.
        user: Login of this client, for the command that grants a missing right.
    """
    yield from _settings(topic, settings, replicas, ahead, cluster)
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
    for each in _settings(what, settings, [(copies, copies)], (), ""):
        default = defaults.get(each.check.removeprefix(f"{what}: "))
        if default is not None:
            hint = f"change {default} of the brokers, or create both topics with another value before the job begins"
            yield replace(each, hint=hint if each.hint else "")


def _settings(
    topic: str, settings: Mapping[str, str], replicas: Sequence[tuple[int, int]], ahead: Sequence[Ahead], cluster: str
) -> Iterator[Finding]:
    yield from _copies(topic, settings, replicas, cluster)
    for each in demands(settings, min(count for count, _ in replicas), ahead):
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
